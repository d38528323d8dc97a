package verbs

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

func end(k kind, link ibv.LinkLayer, gids ...wireGID) side {
	return side{kind: k, link: link, mtu: ibv.MTU1024, depth: 16, gids: gids}
}

func v2(addr string) wireGID { return wireGID{ibv.GIDTypeRoCEv2, gidOf(addr)} }
func v1(addr string) wireGID { return wireGID{ibv.GIDTypeRoCEv1, gidOf(addr)} }

func TestGIDPairs(t *testing.T) {
	for _, c := range []struct {
		name           string
		client, server []wireGID
		want           []gidPair
	}{
		{"same kind", []wireGID{v2("::ffff:10.0.0.1")}, []wireGID{v2("::ffff:10.0.0.2")}, []gidPair{{0, 0}}},
		{"the server's first choice first", []wireGID{v2("fe80::1"), v2("::ffff:10.0.0.1")}, []wireGID{v2("::ffff:10.0.0.2"), v2("fe80::2")}, []gidPair{{1, 0}, {0, 1}}},
		{"no family in common", []wireGID{v2("::ffff:10.0.0.1")}, []wireGID{v2("2001:db8::1")}, nil},
		{"no version in common", []wireGID{v1("::ffff:10.0.0.1")}, []wireGID{v2("::ffff:10.0.0.1")}, nil},
		{"link-local stays among itself", []wireGID{v2("fe80::1")}, []wireGID{v2("2001:db8::1")}, nil},
		{"bounded", []wireGID{v2("fd00::1"), v2("fd00::2"), v2("fd00::3")}, []wireGID{v2("fd00::4"), v2("fd00::5")},
			[]gidPair{{0, 0}, {1, 0}, {2, 0}, {0, 1}}},
	} {
		require.Equal(t, c.want, gidPairs(c.client, c.server), c.name)
	}
}

func TestPairRails(t *testing.T) {
	const eth, ib = ibv.LinkEthernet, ibv.LinkInfiniBand
	for _, c := range []struct {
		name           string
		client, server []side
		want           [][2]int // client, server
	}{
		{"one to one", []side{end(kindExchange, eth, v2("::ffff:10.0.0.1"))}, []side{end(kindExchange, eth, v2("::ffff:10.0.0.2"))}, [][2]int{{0, 0}}},
		{"by subnet",
			[]side{end(kindExchange, eth, v2("::ffff:10.1.0.1")), end(kindExchange, eth, v2("::ffff:10.2.0.1"))},
			[]side{end(kindExchange, eth, v2("::ffff:10.2.0.9")), end(kindExchange, eth, v2("::ffff:10.1.0.9"))}, [][2]int{{1, 0}, {0, 1}}},
		{"each rail once",
			[]side{end(kindExchange, eth, v2("::ffff:10.1.0.1"))},
			[]side{end(kindExchange, eth, v2("::ffff:10.1.0.8")), end(kindExchange, eth, v2("::ffff:10.1.0.9"))}, [][2]int{{0, 0}}},
		{"other link layer", []side{end(kindExchange, ib, wireGID{ibv.GIDTypeIB, gidOf("fe80::1")})}, []side{end(kindExchange, eth, v2("fe80::2"))}, nil},
		{"InfiniBand", []side{end(kindExchange, ib, wireGID{ibv.GIDTypeIB, gidOf("fe80::1")})}, []side{end(kindExchange, ib, wireGID{ibv.GIDTypeIB, gidOf("fe80::2")})}, [][2]int{{0, 0}}},
		{"other way of connecting", []side{end(kindCM, eth)}, []side{end(kindExchange, eth, v2("fe80::2"))}, nil},
		{"rdma_cm needs no GID", []side{end(kindCM, eth)}, []side{end(kindCM, eth)}, [][2]int{{0, 0}}},
		{"nothing", nil, nil, nil},
	} {
		var got [][2]int
		for _, p := range pairRails(c.client, c.server) {
			got = append(got, [2]int{p.client, p.server})
			if c.client[p.client].kind == kindExchange {
				require.NotEmpty(t, p.gids, c.name)
			}
		}
		require.ElementsMatch(t, c.want, got, c.name)
	}
}

func TestNegotiateLesser(t *testing.T) {
	require.Equal(t, ibv.MTU1024, lesserMTU(ibv.MTU4096, ibv.MTU1024, 0))
	require.Equal(t, ibv.MTU512, lesserMTU(ibv.MTU4096, ibv.MTU1024, 512))
	require.Equal(t, ibv.MTU1024, lesserMTU(ibv.MTU4096, ibv.MTU1024, 4096))
	for _, c := range []struct{ initiator, target, limit, want int }{
		{16, 128, 0, 16}, {128, 16, 0, 16}, {128, 128, 8, 8}, {0, 16, 0, 1}, {1000, 1000, 0, 255}, {4, 4, 16, 4},
	} {
		require.Equal(t, c.want, readDepth(c.initiator, c.target, c.limit), "%+v", c)
	}
}

func TestNeedsGRH(t *testing.T) {
	near, far := gidOf("fe80::1"), gidOf("2001:db8::1")
	require.True(t, needsGRH(ibv.LinkEthernet, false, near, near), "RoCE always")
	require.False(t, needsGRH(ibv.LinkInfiniBand, false, near, gidOf("fe80::2")), "one subnet: the LID is enough")
	require.True(t, needsGRH(ibv.LinkInfiniBand, false, near, far), "another subnet")
	require.True(t, needsGRH(ibv.LinkInfiniBand, true, near, near), "the port demands it")
}

func TestCommonBits(t *testing.T) {
	require.Equal(t, 128, commonBits(gidOf("fe80::1"), gidOf("fe80::1")))
	require.Equal(t, 127, commonBits(gidOf("fe80::2"), gidOf("fe80::3")))
	require.Equal(t, 0, commonBits(gidOf("8000::"), gidOf("::")))
	require.Equal(t, 96+8+8, commonBits(gidOf("::ffff:10.1.0.1"), gidOf("::ffff:10.1.128.1")))
}

// TestBounceRing: places never overlap, are aligned and in one piece, and come back in
// order.
func TestBounceRing(t *testing.T) {
	b := bounce{buf: make([]byte, 4096)}
	type place struct{ at, n, end uint64 }
	var used []place
	overlap := func(p place) bool {
		for _, o := range used {
			if p.at < o.at+o.n && o.at < p.at+p.n {
				return true
			}
		}
		return false
	}
	taken, full := 0, 0
	for i := range 10000 {
		n := uint64(1 + (i*7919)%1024)
		at, ok := b.take(n)
		if !ok {
			full++
			require.NotEmpty(t, used, "an empty ring has room for a quarter")
			b.tail, used = used[0].end, used[1:]
			continue
		}
		p := place{at, n, b.head}
		require.False(t, overlap(p), "place %+v of %+v", p, used)
		require.Zero(t, at%bounceAlign)
		require.LessOrEqual(t, at+n, uint64(len(b.buf)))
		require.LessOrEqual(t, b.head-b.tail, uint64(len(b.buf)))
		used = append(used, p)
		taken++
	}
	require.Greater(t, taken, 1000)
	require.Greater(t, full, 1000)
}
