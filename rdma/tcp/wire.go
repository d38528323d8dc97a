package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/kvd-io/kvd/rdma"
)

// protocolVersion is the version of everything that crosses the socket.
const protocolVersion = 3

const (
	requestHeaderSize  = 20
	responseHeaderSize = 20
	descriptorSize     = 16 // one READ in a request
	queryPrefixSize    = 8  // what precedes the query in a request

	// maxFrameReads bounds the READs of one frame; a longer chain takes several.
	maxFrameReads = 1024
	// maxQueryBytes bounds a query: a key of the largest size and its prefix fit
	// with room to spare.
	maxQueryBytes = 8 << 10
	// maxBodyBytes bounds what follows a request header.
	maxBodyBytes = maxFrameReads * descriptorSize
	// maxRequestBytes is the longest request frame.
	maxRequestBytes = requestHeaderSize + maxBodyBytes
)

// Kinds of frame. Requests and responses have no value in common, so that a
// stream echoed back to its sender is refused at the first frame.
const (
	kindRead   = 0x01 // a chain of READs
	kindQuery  = 0x02 // a query
	kindData   = 0x81 // bytes of one READ
	kindAnswer = 0x82 // the answer to a query
	kindError  = 0x83 // ends a request: the rest of it was not executed
	kindBye    = 0x84 // the target ends the connection
)

// codeLast in a data frame: it completes its READ.
const codeLast = 0x01

// Codes of error and bye frames.
const (
	codeAccess    = 0x01
	codeExhausted = 0x02
	codeRevoked   = 0x03
	codeProtocol  = 0x04
)

// errProtocol: the peer sent what the protocol does not allow. The stream cannot
// be trusted any further.
var errProtocol = errors.New("tcp: protocol violated")

// check tells damaged bytes from sound ones: a header's before its length is believed,
// a payload's, where it is guarded, before its READ is complete.
func check(b []byte) uint32 { return uint32(xxh3.Hash(b)) }

// request is a decoded request frame. body is borrowed from the buffer it was
// parsed in.
type request struct {
	kind  uint8
	count int // READs; 1 for a query
	seq   uint32
	body  []byte
}

// readAt is READ i of a chain.
func (r *request) readAt(i int) (region rdma.RegionID, offset, length uint64) {
	d := r.body[i*descriptorSize:][:descriptorSize]
	return rdma.RegionID(binary.LittleEndian.Uint32(d[8:])),
		binary.LittleEndian.Uint64(d),
		uint64(binary.LittleEndian.Uint32(d[12:]))
}

// query of a query frame, and the most bytes that its answer may have.
func (r *request) query() (query []byte, limit uint64) {
	return r.body[queryPrefixSize:], uint64(binary.LittleEndian.Uint32(r.body))
}

// appendReads appends one frame for reads, of which there are at most
// maxFrameReads, each of at most math.MaxUint32 bytes.
func appendReads(dst []byte, seq uint32, reads []rdma.Read) []byte {
	start := len(dst)
	dst = append(dst, make([]byte, requestHeaderSize)...)
	for i := range reads {
		r := &reads[i]
		dst = binary.LittleEndian.AppendUint64(dst, r.Offset)
		dst = binary.LittleEndian.AppendUint32(dst, uint32(r.Region))
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(r.Dst)))
	}
	sealRequest(dst[start:], kindRead, len(reads), seq)
	return dst
}

// appendQuery appends a query frame. limit is the room for the answer in bytes.
func appendQuery(dst []byte, seq uint32, limit uint32, query []byte) []byte {
	start := len(dst)
	dst = append(dst, make([]byte, requestHeaderSize)...)
	dst = binary.LittleEndian.AppendUint32(dst, limit)
	dst = binary.LittleEndian.AppendUint32(dst, 0)
	dst = append(dst, query...)
	sealRequest(dst[start:], kindQuery, 1, seq)
	return dst
}

// sealRequest writes the header of a frame whose body is in place.
func sealRequest(frame []byte, kind uint8, count int, seq uint32) {
	body := frame[requestHeaderSize:]
	frame[0], frame[1] = kind, 0
	binary.LittleEndian.PutUint16(frame[2:], uint16(count))
	binary.LittleEndian.PutUint32(frame[4:], uint32(len(body)))
	binary.LittleEndian.PutUint32(frame[8:], seq)
	binary.LittleEndian.PutUint32(frame[12:], check(body))
	binary.LittleEndian.PutUint32(frame[16:], check(frame[:16]))
}

// parseRequest decodes the frame at the start of b. size is its length in bytes,
// or 0 where b holds only the beginning of it.
func parseRequest(b []byte) (r request, size int, err error) {
	if len(b) < requestHeaderSize {
		return request{}, 0, nil
	}
	if got, want := binary.LittleEndian.Uint32(b[16:]), check(b[:16]); got != want {
		return request{}, 0, fmt.Errorf("%w: request header check sum %#x, want %#x", errProtocol, got, want)
	}
	r = request{kind: b[0], count: int(binary.LittleEndian.Uint16(b[2:])), seq: binary.LittleEndian.Uint32(b[8:])}
	length := uint64(binary.LittleEndian.Uint32(b[4:]))
	switch {
	case b[1] != 0:
		err = fmt.Errorf("%w: request flags %#x, want 0", errProtocol, b[1])
	case r.kind == kindRead && (r.count == 0 || r.count > maxFrameReads || length != uint64(r.count)*descriptorSize):
		err = fmt.Errorf("%w: %d READs in %d bytes: want 1 to %d of %d bytes", errProtocol, r.count, length, maxFrameReads, descriptorSize)
	case r.kind == kindQuery && (r.count != 1 || length < queryPrefixSize || length > queryPrefixSize+maxQueryBytes):
		err = fmt.Errorf("%w: query of %d bytes: want %d to %d", errProtocol, length, queryPrefixSize, queryPrefixSize+maxQueryBytes)
	case r.kind != kindRead && r.kind != kindQuery:
		err = fmt.Errorf("%w: request of kind %#x", errProtocol, r.kind)
	}
	if err != nil {
		return request{}, 0, err
	}
	if uint64(len(b)-requestHeaderSize) < length {
		return request{}, 0, nil
	}
	r.body = b[requestHeaderSize:][:length:length]
	if got, want := binary.LittleEndian.Uint32(b[12:]), check(r.body); got != want {
		return request{}, 0, fmt.Errorf("%w: request body check sum %#x, want %#x", errProtocol, got, want)
	}
	return r, requestHeaderSize + int(length), nil
}

// response is a decoded response header. What is plausible for the request that
// it answers is for the receiver to say.
type response struct {
	kind   uint8
	code   uint8
	index  uint16 // READ within the frame of the request
	length uint32 // bytes that follow
	seq    uint32 // of the frame of the request
	sum    uint32 // check of a guarded payload, else 0
}

// guarded tells whether what is read from the region needs a check sum of ours. Control
// records do, which have none of their own; objects and buckets prove themselves, and
// are most of the bytes.
func guarded(region rdma.RegionID) bool { return region == rdma.ControlRegion }

// seal writes the header of a frame whose payload is in place. length and sum are the
// payload's.
func (r response) seal(frame []byte, guard bool) {
	payload := frame[responseHeaderSize:]
	r.length = uint32(len(payload))
	if guard {
		r.sum = check(payload)
	}
	r.put(frame)
}

// put encodes the header, as it is, into the first responseHeaderSize bytes of b.
func (r response) put(b []byte) {
	b[0], b[1] = r.kind, r.code
	binary.LittleEndian.PutUint16(b[2:], r.index)
	binary.LittleEndian.PutUint32(b[4:], r.length)
	binary.LittleEndian.PutUint32(b[8:], r.seq)
	binary.LittleEndian.PutUint32(b[12:], r.sum)
	binary.LittleEndian.PutUint32(b[16:], check(b[:16]))
}

// parseResponse decodes the header in the first responseHeaderSize bytes of b.
func parseResponse(b []byte) (response, error) {
	b = b[:responseHeaderSize]
	if got, want := binary.LittleEndian.Uint32(b[16:]), check(b[:16]); got != want {
		return response{}, fmt.Errorf("%w: response header check sum %#x, want %#x", errProtocol, got, want)
	}
	r := response{
		kind: b[0], code: b[1],
		index:  binary.LittleEndian.Uint16(b[2:]),
		length: binary.LittleEndian.Uint32(b[4:]),
		seq:    binary.LittleEndian.Uint32(b[8:]),
		sum:    binary.LittleEndian.Uint32(b[12:]),
	}
	if (r.kind == kindError || r.kind == kindBye) && r.length != 0 {
		return response{}, fmt.Errorf("%w: response of kind %#x with %d bytes, want none", errProtocol, r.kind, r.length)
	}
	return r, nil
}
