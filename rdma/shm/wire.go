package shm

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/kvd-io/kvd/rdma"
)

// protocolVersion is part of every message of the exchange; both sides refuse
// another. It covers wire.go and page.go.
const protocolVersion = 1

const (
	tokenSize = 32 // proves to the server that the client was given the answer
	proofSize = 16 // proves to the client that the server gave the answer

	maxMessage  = 512 // bytes, of any message over the socket
	maxHostID   = 128
	maxRefusal  = 300
	offerMagic  = "kvdshm-o"
	answerMagic = "kvdshm-a"
	attrMagic   = "kvdshm-r"
)

type token [tokenSize]byte

// offer is what a client tells before it connects.
type offer struct {
	host string // HostID of the client
}

// answer is what an accepted client needs to connect.
type answer struct {
	node, boot uint64
	token      token
	proof      [proofSize]byte
	path       string // of the socket
	host       string // HostID of the server
	expiry     uint32 // milliseconds until the token is void
}

// attr describes a region.
type attr struct {
	id   rdma.RegionID
	size uint64
	boot uint64
}

func (o offer) encode() []byte {
	w := writer(offerMagic)
	w.u16(protocolVersion)
	w.text(o.host)
	return w
}

func decodeOffer(b []byte) (o offer, err error) {
	r := newReader(b, "offer", offerMagic)
	r.version()
	o.host = r.text(maxHostID)
	return o, r.end()
}

func (a answer) encode() []byte {
	w := writer(answerMagic)
	w.u16(protocolVersion)
	w.u64(a.node)
	w.u64(a.boot)
	w = append(w, a.token[:]...)
	w = append(w, a.proof[:]...)
	w.text(a.path)
	w.text(a.host)
	w.u32(a.expiry)
	return w
}

func decodeAnswer(b []byte) (a answer, err error) {
	r := newReader(b, "answer", answerMagic)
	r.version()
	a.node = r.u64()
	a.boot = r.u64()
	copy(a.token[:], r.take(tokenSize))
	copy(a.proof[:], r.take(proofSize))
	a.path = r.text(MaxSocketPath)
	a.host = r.text(maxHostID)
	a.expiry = r.u32()
	if err := r.end(); err != nil {
		return a, err
	}
	if err := checkSocketPath(a.path); err != nil {
		return a, fmt.Errorf("%w: answer: %w", rdma.ErrHandshake, err)
	}
	return a, nil
}

func (a attr) encode() []byte {
	w := writer(attrMagic)
	w.u16(protocolVersion)
	w.u32(uint32(a.id))
	w.u64(a.size)
	w.u64(a.boot)
	return w
}

func decodeAttr(b []byte) (a attr, err error) {
	r := newReader(b, "region attribute", attrMagic)
	r.version()
	a.id = rdma.RegionID(r.u32())
	a.size = r.u64()
	a.boot = r.u64()
	return a, r.end()
}

// The messages over the socket. Each is one packet (the socket is SOCK_SEQPACKET),
// its first byte says which; descriptors travel with the packet that
// announces them.
const (
	msgHello     byte = iota + 1 // client: version, token
	msgWelcome                   // server: version, proof, thread id; death page, connection page
	msgRefuse                    // server: code, text. Then it hangs up
	msgGetRegion                 // client: id
	msgRegion                    // server: id, status, size; memory when status is ok
	msgDrop                      // server: id, new drop count. The client unmaps the region
)

// Codes of msgRefuse.
const (
	refuseUID uint16 = iota + 1
	refuseToken
	refuseVersion
	refuseBusy
)

type hello struct{ token token }

type welcome struct {
	proof [proofSize]byte
	tid   uint32 // what the death word holds while the server lives
}

type refusal struct {
	code uint16
	text string
}

type regionReply struct {
	id    rdma.RegionID
	known bool
	size  uint64
}

type drop struct {
	id    rdma.RegionID
	count uint64
}

func (h hello) encode() []byte {
	w := writer{msgHello}
	w.u16(protocolVersion)
	return append(w, h.token[:]...)
}

func decodeHello(b []byte) (h hello, err error) {
	r := newReader(b, "hello", string(msgHello))
	r.version()
	copy(h.token[:], r.take(tokenSize))
	return h, r.end()
}

func (m welcome) encode() []byte {
	w := writer{msgWelcome}
	w.u16(protocolVersion)
	w = append(w, m.proof[:]...)
	w.u32(m.tid)
	return w
}

func decodeWelcome(b []byte) (m welcome, err error) {
	r := newReader(b, "welcome", string(msgWelcome))
	r.version()
	copy(m.proof[:], r.take(proofSize))
	m.tid = r.u32()
	return m, r.end()
}

func (m refusal) encode() []byte {
	w := writer{msgRefuse}
	w.u16(m.code)
	w.text(m.text[:min(len(m.text), maxRefusal)])
	return w
}

func decodeRefusal(b []byte) (m refusal, err error) {
	r := newReader(b, "refusal", string(msgRefuse))
	m.code = r.u16()
	m.text = r.text(maxRefusal)
	return m, r.end()
}

func encodeGetRegion(id rdma.RegionID) []byte {
	w := writer{msgGetRegion}
	w.u32(uint32(id))
	return w
}

func decodeGetRegion(b []byte) (rdma.RegionID, error) {
	r := newReader(b, "region request", string(msgGetRegion))
	id := rdma.RegionID(r.u32())
	return id, r.end()
}

func (m regionReply) encode() []byte {
	w := writer{msgRegion}
	w.u32(uint32(m.id))
	if m.known {
		w = append(w, 1)
	} else {
		w = append(w, 0)
	}
	w.u64(m.size)
	return w
}

func decodeRegionReply(b []byte) (m regionReply, err error) {
	r := newReader(b, "region", string(msgRegion))
	m.id = rdma.RegionID(r.u32())
	m.known = r.u8() == 1
	m.size = r.u64()
	return m, r.end()
}

func (m drop) encode() []byte {
	w := writer{msgDrop}
	w.u32(uint32(m.id))
	w.u64(m.count)
	return w
}

func decodeDrop(b []byte) (m drop, err error) {
	r := newReader(b, "drop", string(msgDrop))
	m.id = rdma.RegionID(r.u32())
	m.count = r.u64()
	return m, r.end()
}

// writer appends in little-endian order.
type writer []byte

func (w *writer) u16(v uint16) { *w = binary.LittleEndian.AppendUint16(*w, v) }
func (w *writer) u32(v uint32) { *w = binary.LittleEndian.AppendUint32(*w, v) }
func (w *writer) u64(v uint64) { *w = binary.LittleEndian.AppendUint64(*w, v) }
func (w *writer) text(s string) {
	w.u16(uint16(len(s)))
	*w = append(*w, s...)
}

// reader takes values off the front of a message. The first thing wrong sticks;
// values taken after it are zero.
type reader struct {
	what string
	rest []byte
	err  error
}

func newReader(b []byte, what, magic string) *reader {
	r := &reader{what: what, rest: b}
	if !bytes.Equal(r.take(len(magic)), []byte(magic)) {
		r.fail("%d bytes that do not begin like one: the peer is not a kvd shm peer", len(b))
	}
	return r
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: shm %s: %s", rdma.ErrHandshake, r.what, fmt.Sprintf(format, args...))
	}
	r.rest = nil
}

// take returns n bytes, borrowed from the message, or nil after a failure.
func (r *reader) take(n int) []byte {
	if r.err != nil {
		return nil
	}
	if len(r.rest) < n {
		r.fail("cut short: %d bytes left, want %d", len(r.rest), n)
		return nil
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

func (r *reader) u8() byte {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *reader) u16() uint16 {
	if b := r.take(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

func (r *reader) u32() uint32 {
	if b := r.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (r *reader) u64() uint64 {
	if b := r.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (r *reader) text(limit int) string {
	n := int(r.u16())
	if n > limit {
		r.fail("text of %d bytes, want at most %d", n, limit)
	}
	return string(r.take(n))
}

func (r *reader) version() {
	if v := r.u16(); r.err == nil && v != protocolVersion {
		r.fail("protocol version %d, want %d: bring both sides to the same release", v, protocolVersion)
	}
}

func (r *reader) end() error {
	if r.err == nil && len(r.rest) > 0 {
		r.fail("%d bytes too many", len(r.rest))
	}
	return r.err
}
