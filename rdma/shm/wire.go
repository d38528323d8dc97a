package shm

import (
	"fmt"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/wire"
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
	w := wire.Writer(offerMagic)
	w.U16(protocolVersion)
	w.Text(o.host)
	return w
}

func decodeOffer(b []byte) (o offer, err error) {
	r := newReader(b, "offer", offerMagic)
	r.Version(protocolVersion)
	o.host = r.Text(maxHostID)
	return o, r.End()
}

func (a answer) encode() []byte {
	w := wire.Writer(answerMagic)
	w.U16(protocolVersion)
	w.U64(a.node)
	w.U64(a.boot)
	w = append(w, a.token[:]...)
	w = append(w, a.proof[:]...)
	w.Text(a.path)
	w.Text(a.host)
	w.U32(a.expiry)
	return w
}

func decodeAnswer(b []byte) (a answer, err error) {
	r := newReader(b, "answer", answerMagic)
	r.Version(protocolVersion)
	a.node = r.U64()
	a.boot = r.U64()
	copy(a.token[:], r.Take(tokenSize))
	copy(a.proof[:], r.Take(proofSize))
	a.path = r.Text(MaxSocketPath)
	a.host = r.Text(maxHostID)
	a.expiry = r.U32()
	if err := r.End(); err != nil {
		return a, err
	}
	if err := checkSocketPath(a.path); err != nil {
		return a, fmt.Errorf("%w: answer: %w", rdma.ErrHandshake, err)
	}
	return a, nil
}

func (a attr) encode() []byte {
	w := wire.Writer(attrMagic)
	w.U16(protocolVersion)
	w.U32(uint32(a.id))
	w.U64(a.size)
	w.U64(a.boot)
	return w
}

func decodeAttr(b []byte) (a attr, err error) {
	r := newReader(b, "region attribute", attrMagic)
	r.Version(protocolVersion)
	a.id = rdma.RegionID(r.U32())
	a.size = r.U64()
	a.boot = r.U64()
	return a, r.End()
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
	w := wire.Writer{msgHello}
	w.U16(protocolVersion)
	return append(w, h.token[:]...)
}

func decodeHello(b []byte) (h hello, err error) {
	r := newReader(b, "hello", string(msgHello))
	r.Version(protocolVersion)
	copy(h.token[:], r.Take(tokenSize))
	return h, r.End()
}

func (m welcome) encode() []byte {
	w := wire.Writer{msgWelcome}
	w.U16(protocolVersion)
	w = append(w, m.proof[:]...)
	w.U32(m.tid)
	return w
}

func decodeWelcome(b []byte) (m welcome, err error) {
	r := newReader(b, "welcome", string(msgWelcome))
	r.Version(protocolVersion)
	copy(m.proof[:], r.Take(proofSize))
	m.tid = r.U32()
	return m, r.End()
}

func (m refusal) encode() []byte {
	w := wire.Writer{msgRefuse}
	w.U16(m.code)
	w.Text(m.text[:min(len(m.text), maxRefusal)])
	return w
}

func decodeRefusal(b []byte) (m refusal, err error) {
	r := newReader(b, "refusal", string(msgRefuse))
	m.code = r.U16()
	m.text = r.Text(maxRefusal)
	return m, r.End()
}

func encodeGetRegion(id rdma.RegionID) []byte {
	w := wire.Writer{msgGetRegion}
	w.U32(uint32(id))
	return w
}

func decodeGetRegion(b []byte) (rdma.RegionID, error) {
	r := newReader(b, "region request", string(msgGetRegion))
	id := rdma.RegionID(r.U32())
	return id, r.End()
}

func (m regionReply) encode() []byte {
	w := wire.Writer{msgRegion}
	w.U32(uint32(m.id))
	if m.known {
		w = append(w, 1)
	} else {
		w = append(w, 0)
	}
	w.U64(m.size)
	return w
}

func decodeRegionReply(b []byte) (m regionReply, err error) {
	r := newReader(b, "region", string(msgRegion))
	m.id = rdma.RegionID(r.U32())
	m.known = r.U8() == 1
	m.size = r.U64()
	return m, r.End()
}

func (m drop) encode() []byte {
	w := wire.Writer{msgDrop}
	w.U32(uint32(m.id))
	w.U64(m.count)
	return w
}

func decodeDrop(b []byte) (m drop, err error) {
	r := newReader(b, "drop", string(msgDrop))
	m.id = rdma.RegionID(r.U32())
	m.count = r.U64()
	return m, r.End()
}

// newReader reads a message that begins with the mark given.
func newReader(b []byte, what, magic string) *wire.Reader {
	r := wire.NewReader(b, "shm "+what)
	r.Magic(magic, "the peer is not a kvd shm peer")
	return r
}
