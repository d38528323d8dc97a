package verbs

import (
	"bytes"
	"fmt"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
	"github.com/kvd-io/kvd/rdma/wire"
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

func writeSide(w *wire.Writer, s side) {
	w.U8(uint8(s.kind))
	w.U8(uint8(s.link))
	w.U32(s.qpn)
	w.U32(s.psn)
	w.U16(s.lid)
	w.U8(uint8(s.mtu))
	w.U8(s.depth)
	w.U8(uint8(len(s.gids)))
	for _, g := range s.gids {
		w.U8(uint8(g.typ))
		*w = append(*w, g.gid[:]...)
	}
	w.U8(uint8(len(s.extra)))
	*w = append(*w, s.extra...)
}

func readSide(r *wire.Reader) (s side) {
	s.kind = kind(r.U8())
	s.link = ibv.LinkLayer(r.U8())
	s.qpn = r.U32()
	s.psn = r.U32()
	s.lid = r.U16()
	s.mtu = ibv.MTU(r.U8())
	s.depth = r.U8()
	if n := r.Count(maxGIDChoices, "GIDs"); n > 0 {
		s.gids = make([]wireGID, n)
		for i := range s.gids {
			s.gids[i].typ = ibv.GIDType(r.U8())
			copy(s.gids[i].gid[:], r.Take(len(ibv.GID{})))
		}
	}
	if n := r.Count(maxExtra, "bytes"); n > 0 {
		s.extra = bytes.Clone(r.Take(n))
	}
	switch {
	case r.Err() != nil:
	case s.kind != kindExchange && s.kind != kindCM:
		r.Fail("%s of connecting, want exchange or rdma_cm", s.kind)
	case s.qpn > maxNumber24 || s.psn > maxNumber24:
		r.Fail("queue pair %#x, packet number %#x: want 24 bits", s.qpn, s.psn)
	case s.mtu.Bytes() == 0:
		r.Fail("path MTU code %d: want 1 to 5", s.mtu)
	case s.depth == 0:
		r.Fail("READ depth 0: want at least 1")
	case s.kind == kindExchange && len(s.gids) == 0:
		r.Fail("no GID: want at least one")
	}
	return s
}

func (o offer) encode() []byte {
	w := wire.Writer(offerMagic)
	w.U16(protocolVersion)
	w = append(w, o.nonce[:]...)
	w.U8(uint8(len(o.rails)))
	for _, s := range o.rails {
		writeSide(&w, s)
	}
	return w
}

func decodeOffer(b []byte) (o offer, err error) {
	r := newReader(b, "offer", offerMagic)
	r.Version(protocolVersion)
	copy(o.nonce[:], r.Take(nonceSize))
	for range r.Count(maxRails, "rails") {
		o.rails = append(o.rails, readSide(r))
	}
	if r.Err() == nil && len(o.rails) == 0 {
		r.Fail("no rail: want at least one")
	}
	return o, r.End()
}

func (a answer) encode() []byte {
	w := wire.Writer(answerMagic)
	w.U16(protocolVersion)
	w = append(w, a.nonce[:]...)
	w.U64(a.node)
	w.U64(a.boot)
	w.U32(a.expiry)
	w.U8(uint8(len(a.rails)))
	for _, s := range a.rails {
		w.U8(s.clientRail)
		w.U8(s.clientGID)
		w.U32(s.device)
		writeSide(&w, s.side)
	}
	return w
}

func decodeAnswer(b []byte) (a answer, err error) {
	r := newReader(b, "answer", answerMagic)
	r.Version(protocolVersion)
	copy(a.nonce[:], r.Take(nonceSize))
	a.node = r.U64()
	a.boot = r.U64()
	a.expiry = r.U32()
	seen := map[uint8]bool{}
	for range r.Count(maxRails, "rails") {
		s := answerRail{clientRail: r.U8(), clientGID: r.U8(), device: r.U32()}
		s.side = readSide(r)
		if r.Err() == nil && seen[s.clientRail] {
			r.Fail("rail %d twice", s.clientRail)
		}
		seen[s.clientRail] = true
		a.rails = append(a.rails, s)
	}
	if r.Err() == nil && len(a.rails) == 0 {
		r.Fail("no rail: want at least one")
	}
	return a, r.End()
}

func (a attr) encode() []byte {
	w := wire.Writer(attrMagic)
	w.U16(protocolVersion)
	w.U32(uint32(a.id))
	w.U64(a.boot)
	w.U64(a.addr)
	w.U64(a.length)
	w.U8(uint8(len(a.keys)))
	for _, k := range a.keys {
		w.U32(k.device)
		w.U32(k.rkey)
	}
	return w
}

func decodeAttr(b []byte) (a attr, err error) {
	r := newReader(b, "region attribute", attrMagic)
	r.Version(protocolVersion)
	a.id = rdma.RegionID(r.U32())
	a.boot = r.U64()
	a.addr = r.U64()
	a.length = r.U64()
	for range r.Count(maxAttrKeys, "keys") {
		a.keys = append(a.keys, attrKey{device: r.U32(), rkey: r.U32()})
	}
	if r.Err() == nil && a.addr+a.length < a.addr {
		r.Fail("%d bytes at %#x do not end below 2^64", a.length, a.addr)
	}
	return a, r.End()
}

// newReader reads a message that begins with the mark given.
func newReader(b []byte, what, magic string) *wire.Reader {
	r := wire.NewReader(b, "verbs "+what)
	r.Magic(magic, "the peer does not speak kvd's verbs")
	return r
}
