package verbs

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

func addrs(list ...string) (out []netip.Addr) {
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func TestCMOfferRoundTrip(t *testing.T) {
	in := addrs("10.0.0.1", "fd00::1", "192.168.7.9", "10.9.9.9")
	b := encodeCMOffer(in)
	require.LessOrEqual(t, len(b), maxExtra)
	out, err := decodeCMOffer(b)
	require.NoError(t, err)
	require.Equal(t, in[:maxCMOfferAddrs], out)
	for n := range b {
		_, err := decodeCMOffer(b[:n])
		require.ErrorIs(t, err, rdma.ErrHandshake, "the first %d bytes", n)
	}
	_, err = decodeCMOffer(append(b, 0))
	require.ErrorIs(t, err, rdma.ErrHandshake)
}

func TestCMAnswerRoundTrip(t *testing.T) {
	in := cmAnswer{token: cmToken{1, 2, 15: 16}, at: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:4711"), netip.MustParseAddrPort("[fd00::1]:65535")}}
	b := in.encode()
	require.LessOrEqual(t, len(b), maxExtra)
	out, err := decodeCMAnswer(b)
	require.NoError(t, err)
	require.Equal(t, in, out)
	for n := range b {
		_, err := decodeCMAnswer(b[:n])
		require.ErrorIs(t, err, rdma.ErrHandshake, "the first %d bytes", n)
	}
	_, err = decodeCMAnswer(cmAnswer{}.encode())
	require.ErrorContains(t, err, "no address")
}

func TestCMPrivateData(t *testing.T) {
	token := cmToken{0: 7, 15: 9}
	b := cmPrivate(token)
	require.LessOrEqual(t, len(b), ibv.MaxCMPrivateData)
	got, err := parseCMPrivate(append(b, make([]byte, 20)...)) // padded on some transports
	require.NoError(t, err)
	require.Equal(t, token, got)
	for n := range b {
		_, err := parseCMPrivate(b[:n])
		require.ErrorIs(t, err, rdma.ErrHandshake, "the first %d bytes", n)
	}
	b[len(cmPrivateMagic)]++
	_, err = parseCMPrivate(b)
	require.ErrorContains(t, err, "protocol version 2, want 1")
}

func TestCMNearest(t *testing.T) {
	var at []netip.AddrPort
	for _, a := range addrs("10.1.0.1", "10.2.0.1", "fd00::1", "10.2.0.9") {
		at = append(at, netip.AddrPortFrom(a, 1))
	}
	first := func(l *cmLink, peer ...string) string { return l.nearest(at, addrs(peer...))[0].Addr().String() }
	l := &cmLink{}
	require.Equal(t, "10.2.0.1", first(l, "10.2.0.2"))
	require.Equal(t, "10.1.0.1", first(l, "10.1.0.200"))
	require.Equal(t, "fd00::1", first(l, "fd00::2"))
	require.Equal(t, "10.2.0.9", first(l, "10.2.0.9"))
	require.Equal(t, "10.1.0.1", first(l), "in their order where nothing is known of the peer")
	l.p.PreferAddress = netip.MustParseAddr("10.2.0.9")
	require.Equal(t, "10.2.0.9", first(l), "the preferred one among equals")
	require.Len(t, l.nearest(at, nil), 4)
}

// TestCMLongest: a short READ never crosses a page, and all of it is posted in the end.
func TestCMLongest(t *testing.T) {
	l := &cmLink{}
	for length := 1; length <= 200; length++ {
		for at := uint64(8192 - 210); at < 8192+10; at++ {
			for done := 0; done < length; {
				n := l.longest(at+uint64(done), length-done)
				require.Positive(t, n)
				if length <= 64 {
					first, last := (at+uint64(done))/4096, (at+uint64(done+n)-1)/4096
					require.Equal(t, first, last, "%d bytes at %d", length, at)
				} else if done == 0 && n != length {
					require.Equal(t, length, n, "a longer READ is one")
				}
				done += n
			}
		}
	}
}

func FuzzCMMessages(f *testing.F) {
	f.Add(encodeCMOffer(addrs("10.0.0.1")))
	f.Add(cmAnswer{at: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:1")}}.encode())
	f.Add(cmPrivate(cmToken{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, err := decodeCMOffer(b); err == nil && string(encodeCMOffer(a)) != string(b) {
			// An IPv4 address has one form on the wire: mapped.
			t.Errorf("offer %x is encoded as %x", b, encodeCMOffer(a))
		}
		if a, err := decodeCMAnswer(b); err == nil && string(a.encode()) != string(b) {
			t.Errorf("answer %x is encoded as %x", b, a.encode())
		}
		if tok, err := parseCMPrivate(b); err == nil && string(cmPrivate(tok)) != string(b[:len(cmPrivate(tok))]) {
			t.Errorf("private data %x is encoded as %x", b, cmPrivate(tok))
		}
	})
}
