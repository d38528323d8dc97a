package verbs

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

func someOffer() offer {
	return offer{nonce: nonce{1, 2, 3}, rails: []side{
		{kind: kindExchange, link: ibv.LinkEthernet, qpn: 17, psn: 0xabcdef, mtu: ibv.MTU1024, depth: 16, gids: []wireGID{v2("::ffff:10.0.0.1"), v1("fe80::1")}},
		{kind: kindCM, link: ibv.LinkEthernet, mtu: ibv.MTU1024, depth: 1, extra: []byte("token")},
	}}
}

func someAnswer() answer {
	return answer{nonce: nonce{1, 2, 3}, node: 7, boot: 9, expiry: 10000, rails: []answerRail{
		{clientRail: 1, clientGID: 2, device: 3, side: side{kind: kindExchange, link: ibv.LinkInfiniBand, qpn: 1, psn: 2, lid: 5, mtu: ibv.MTU4096, depth: 8, gids: []wireGID{{ibv.GIDTypeIB, gidOf("fe80::9")}}}},
		{clientRail: 0, device: 4, side: side{kind: kindCM, mtu: ibv.MTU256, depth: 1, extra: []byte{1}}},
	}}
}

func someAttr() attr {
	return attr{id: 7, boot: 9, addr: 1 << 40, length: 4096, keys: []attrKey{{1, 2}, {3, 4}}}
}

func TestWireRoundTrip(t *testing.T) {
	o, err := decodeOffer(someOffer().encode())
	require.NoError(t, err)
	require.Equal(t, someOffer(), o)
	a, err := decodeAnswer(someAnswer().encode())
	require.NoError(t, err)
	require.Equal(t, someAnswer(), a)
	r, err := decodeAttr(someAttr().encode())
	require.NoError(t, err)
	require.Equal(t, someAttr(), r)
}

func TestWireRefusals(t *testing.T) {
	offerWith := func(change func(*side)) []byte {
		o := someOffer()
		change(&o.rails[0])
		return o.encode()
	}
	version := func(b []byte, magic string) []byte {
		binary.LittleEndian.PutUint16(b[len(magic):], protocolVersion+1)
		return b
	}
	many := offer{}
	for range maxRails + 1 {
		many.rails = append(many.rails, someOffer().rails[0])
	}
	twice := someAnswer()
	twice.rails[1].clientRail = 1
	for _, c := range []struct {
		name string
		err  error
		want string
	}{
		{"version", second(decodeOffer(version(someOffer().encode(), offerMagic))), "protocol version 2, want 1: bring both sides to the same release"},
		{"version of an answer", second(decodeAnswer(version(someAnswer().encode(), answerMagic))), "protocol version 2, want 1"},
		{"version of an attr", second(decodeAttr(version(someAttr().encode(), attrMagic))), "protocol version 2, want 1"},
		{"no rail", second(decodeOffer(offer{}.encode())), "no rail"},
		{"too many rails", second(decodeOffer(many.encode())), "17 rails, want at most 16"},
		{"kind", second(decodeOffer(offerWith(func(s *side) { s.kind = 9 }))), "kind 9 of connecting"},
		{"queue pair number", second(decodeOffer(offerWith(func(s *side) { s.qpn = 1 << 24 }))), "want 24 bits"},
		{"packet number", second(decodeOffer(offerWith(func(s *side) { s.psn = 1 << 24 }))), "want 24 bits"},
		{"MTU", second(decodeOffer(offerWith(func(s *side) { s.mtu = 6 }))), "path MTU code 6"},
		{"depth", second(decodeOffer(offerWith(func(s *side) { s.depth = 0 }))), "READ depth 0"},
		{"no GID", second(decodeOffer(offerWith(func(s *side) { s.gids = nil }))), "no GID"},
		{"too many GIDs", second(decodeOffer(offerWith(func(s *side) { s.gids = make([]wireGID, maxGIDChoices+1) }))), "5 GIDs, want at most 4"},
		{"extra too long", second(decodeOffer(offerWith(func(s *side) { s.extra = make([]byte, maxExtra+1) }))), "65 bytes, want at most 64"},
		{"rail twice", second(decodeAnswer(twice.encode())), "rail 1 twice"},
		{"address that wraps", second(decodeAttr(attr{addr: ^uint64(0), length: 2}.encode())), "do not end below 2^64"},
		{"trailing bytes", second(decodeAttr(append(someAttr().encode(), 0))), "1 bytes too many"},
		{"another provider", second(decodeOffer([]byte("kvdshm-o and more"))), "does not speak kvd's verbs"},
	} {
		require.ErrorIs(t, c.err, rdma.ErrHandshake, c.name)
		require.ErrorContains(t, c.err, c.want, c.name)
	}
}

func second[T any](_ T, err error) error { return err }

// FuzzWire: whatever arrives is refused or means what it says, and never more than a
// bounded amount of anything.
func FuzzWire(f *testing.F) {
	f.Add(someOffer().encode())
	f.Add(someAnswer().encode())
	f.Add(someAttr().encode())
	f.Add([]byte(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if o, err := decodeOffer(b); err == nil {
			require.Equal(t, b, o.encode())
			require.LessOrEqual(t, len(o.rails), maxRails)
		} else {
			require.ErrorIs(t, err, rdma.ErrHandshake)
		}
		if a, err := decodeAnswer(b); err == nil {
			require.Equal(t, b, a.encode())
		} else {
			require.ErrorIs(t, err, rdma.ErrHandshake)
		}
		if a, err := decodeAttr(b); err == nil {
			require.Equal(t, b, a.encode())
		} else {
			require.ErrorIs(t, err, rdma.ErrHandshake)
		}
	})
}

func TestMessages(t *testing.T) {
	for _, m := range []message{msgHello, msgUsed, msgBye} {
		got, value := parseMessage(m.with(uint32(byeBudget)))
		require.Equal(t, m, got)
		require.Equal(t, byeBudget, bye(value))
	}
}
