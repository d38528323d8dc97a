package verbs

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// protocolVersion is part of every message of the exchange; both sides refuse another. It
// covers this file and the immediates of message.go.
const protocolVersion = 1

const (
	offerMagic  = "kvdverbs-o"
	answerMagic = "kvdverbs-a"
	attrMagic   = "kvdverbs-r"

	nonceSize   = 16
	maxRails    = 16 // of an offer or answer
	maxExtra    = 64 // bytes of a connector's own
	maxAttrKeys = 64
	maxNumber24 = 1<<24 - 1 // queue pair and packet numbers
)

type nonce [nonceSize]byte

// kind says how the queue pairs of a rail come together.
type kind uint8

const (
	kindExchange kind = 1 // InfiniBand, RoCE: numbers in offer and answer
	kindCM       kind = 2 // iWARP: rdma_cm, with a token from the answer
)

func (k kind) String() string {
	switch k {
	case kindExchange:
		return "exchange"
	case kindCM:
		return "rdma_cm"
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// wireGID is a GID that a side can be reached at.
type wireGID struct {
	typ ibv.GIDType
	gid ibv.GID
}

// side is one end of a queue pair as the other end must know it.
type side struct {
	kind  kind
	link  ibv.LinkLayer
	qpn   uint32
	psn   uint32
	lid   uint16
	mtu   ibv.MTU
	depth uint8     // READs: outstanding at a time (offer), served at a time (answer: agreed)
	gids  []wireGID // offer: to try, best first; answer: the one used
	extra []byte    // the connector's own
}

type offer struct {
	nonce nonce
	rails []side
}

// answerRail joins one rail of the offer with a device of the target.
type answerRail struct {
	clientRail uint8  // index into the offer's
	clientGID  uint8  // index into that rail's gids
	device     uint32 // the target's, as attrs name it
	side
}

type answer struct {
	nonce      nonce // the offer's: an answer is good for its own dial only
	node, boot uint64
	expiry     uint32 // milliseconds that the client has to connect
	rails      []answerRail
}

// attrKey is what a READ through one device of the target needs.
type attrKey struct {
	device uint32
	rkey   uint32
}

type attr struct {
	id     rdma.RegionID
	boot   uint64
	addr   uint64
	length uint64
	keys   []attrKey
}

func (w *writer) side(s side) {
	w.u8(uint8(s.kind))
	w.u8(uint8(s.link))
	w.u32(s.qpn)
	w.u32(s.psn)
	w.u16(s.lid)
	w.u8(uint8(s.mtu))
	w.u8(s.depth)
	w.u8(uint8(len(s.gids)))
	for _, g := range s.gids {
		w.u8(uint8(g.typ))
		*w = append(*w, g.gid[:]...)
	}
	w.u8(uint8(len(s.extra)))
	*w = append(*w, s.extra...)
}

func (r *reader) side() (s side) {
	s.kind = kind(r.u8())
	s.link = ibv.LinkLayer(r.u8())
	s.qpn = r.u32()
	s.psn = r.u32()
	s.lid = r.u16()
	s.mtu = ibv.MTU(r.u8())
	s.depth = r.u8()
	if n := r.count(maxGIDChoices, "GIDs"); n > 0 {
		s.gids = make([]wireGID, n)
		for i := range s.gids {
			s.gids[i].typ = ibv.GIDType(r.u8())
			copy(s.gids[i].gid[:], r.take(len(ibv.GID{})))
		}
	}
	if n := r.count(maxExtra, "bytes"); n > 0 {
		s.extra = bytes.Clone(r.take(n))
	}
	switch {
	case r.err != nil:
	case s.kind != kindExchange && s.kind != kindCM:
		r.fail("%s of connecting, want exchange or rdma_cm", s.kind)
	case s.qpn > maxNumber24 || s.psn > maxNumber24:
		r.fail("queue pair %#x, packet number %#x: want 24 bits", s.qpn, s.psn)
	case s.mtu.Bytes() == 0:
		r.fail("path MTU code %d: want 1 to 5", s.mtu)
	case s.depth == 0:
		r.fail("READ depth 0: want at least 1")
	case s.kind == kindExchange && len(s.gids) == 0:
		r.fail("no GID: want at least one")
	}
	return s
}

func (o offer) encode() []byte {
	w := writer(offerMagic)
	w.u16(protocolVersion)
	w = append(w, o.nonce[:]...)
	w.u8(uint8(len(o.rails)))
	for _, s := range o.rails {
		w.side(s)
	}
	return w
}

func decodeOffer(b []byte) (o offer, err error) {
	r := newReader(b, "offer", offerMagic)
	r.version()
	copy(o.nonce[:], r.take(nonceSize))
	for range r.count(maxRails, "rails") {
		o.rails = append(o.rails, r.side())
	}
	if r.err == nil && len(o.rails) == 0 {
		r.fail("no rail: want at least one")
	}
	return o, r.end()
}

func (a answer) encode() []byte {
	w := writer(answerMagic)
	w.u16(protocolVersion)
	w = append(w, a.nonce[:]...)
	w.u64(a.node)
	w.u64(a.boot)
	w.u32(a.expiry)
	w.u8(uint8(len(a.rails)))
	for _, s := range a.rails {
		w.u8(s.clientRail)
		w.u8(s.clientGID)
		w.u32(s.device)
		w.side(s.side)
	}
	return w
}

func decodeAnswer(b []byte) (a answer, err error) {
	r := newReader(b, "answer", answerMagic)
	r.version()
	copy(a.nonce[:], r.take(nonceSize))
	a.node = r.u64()
	a.boot = r.u64()
	a.expiry = r.u32()
	seen := map[uint8]bool{}
	for range r.count(maxRails, "rails") {
		s := answerRail{clientRail: r.u8(), clientGID: r.u8(), device: r.u32()}
		s.side = r.side()
		if r.err == nil && seen[s.clientRail] {
			r.fail("rail %d twice", s.clientRail)
		}
		seen[s.clientRail] = true
		a.rails = append(a.rails, s)
	}
	if r.err == nil && len(a.rails) == 0 {
		r.fail("no rail: want at least one")
	}
	return a, r.end()
}

func (a attr) encode() []byte {
	w := writer(attrMagic)
	w.u16(protocolVersion)
	w.u32(uint32(a.id))
	w.u64(a.boot)
	w.u64(a.addr)
	w.u64(a.length)
	w.u8(uint8(len(a.keys)))
	for _, k := range a.keys {
		w.u32(k.device)
		w.u32(k.rkey)
	}
	return w
}

func decodeAttr(b []byte) (a attr, err error) {
	r := newReader(b, "region attribute", attrMagic)
	r.version()
	a.id = rdma.RegionID(r.u32())
	a.boot = r.u64()
	a.addr = r.u64()
	a.length = r.u64()
	for range r.count(maxAttrKeys, "keys") {
		a.keys = append(a.keys, attrKey{device: r.u32(), rkey: r.u32()})
	}
	if r.err == nil && a.addr+a.length < a.addr {
		r.fail("%d bytes at %#x do not end below 2^64", a.length, a.addr)
	}
	return a, r.end()
}

// writer appends in little-endian order.
type writer []byte

func (w *writer) u8(v uint8)   { *w = append(*w, v) }
func (w *writer) u16(v uint16) { *w = binary.LittleEndian.AppendUint16(*w, v) }
func (w *writer) u32(v uint32) { *w = binary.LittleEndian.AppendUint32(*w, v) }
func (w *writer) u64(v uint64) { *w = binary.LittleEndian.AppendUint64(*w, v) }

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
		r.fail("%d bytes that do not begin like one: the peer does not speak kvd's verbs", len(b))
	}
	return r
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: verbs %s: %s", rdma.ErrHandshake, r.what, fmt.Sprintf(format, args...))
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

func (r *reader) u8() uint8 {
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

// count reads how many things follow.
func (r *reader) count(limit int, of string) int {
	n := int(r.u8())
	if n > limit {
		r.fail("%d %s, want at most %d", n, of, limit)
		return 0
	}
	return n
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
