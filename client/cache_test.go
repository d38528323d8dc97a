package client

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/storage/layout"
)

func TestCache(t *testing.T) {
	c := newCache(1024)
	h := layout.KeyHash{Lo: 1, Hi: 2}
	at := func(version, gen uint64) location {
		return location{at: layout.Place{Chunk: 3, Offset: 64}, length: 100, version: version, gen: gen}
	}
	_, ok := c.get(h, 1)
	require.False(t, ok)
	c.put(h, 1, at(5, 1))
	got, ok := c.get(h, 1)
	require.True(t, ok)
	require.Equal(t, at(5, 1), got)
	for session := uint32(2); session < 2000; session++ { // some of them fall into the same set
		_, ok = c.get(h, session)
		require.False(t, ok, "another session")
	}
	_, ok = c.get(layout.KeyHash{Lo: 9, Hi: 2}, 1)
	require.False(t, ok, "another key with the same high word")
	c.put(h, 1, at(4, 1))
	got, _ = c.get(h, 1)
	require.EqualValues(t, 5, got.version, "an older version comes too late")
	c.put(h, 1, at(4, 2))
	got, _ = c.get(h, 1)
	require.EqualValues(t, 2, got.gen, "a newer generation counts more")
	c.drop(h, 1, at(5, 1))
	_, ok = c.get(h, 1)
	require.True(t, ok, "no longer the one that was found wrong")
	c.drop(h, 1, at(4, 2))
	_, ok = c.get(h, 1)
	require.False(t, ok)

	none := newCache(-1)
	none.put(h, 1, at(5, 1))
	none.drop(h, 1, at(5, 1))
	_, ok = none.get(h, 1)
	require.False(t, ok)
}

// TestCacheAgainstMap: whatever the cache returns is what was put last; and it keeps
// most of what fits.
func TestCacheAgainstMap(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	c := newCache(4096)
	twin := map[layout.KeyHash]location{}
	for i := range uint64(20000) {
		h := layout.HashKey(seed, []byte{byte(r.IntN(8)), byte(r.IntN(256))})
		l := location{at: layout.Place{Chunk: 1, Offset: i * 8}, length: 64, version: i + 1, gen: 1}
		c.put(h, 1, l)
		twin[h] = l
	}
	kept := 0
	for h, want := range twin {
		if got, ok := c.get(h, 1); ok {
			kept++
			require.Equal(t, want, got)
		}
	}
	require.Greater(t, kept, len(twin)*95/100)
}

func TestQuorum(t *testing.T) {
	for _, c := range []struct {
		in, out, have []uint64
		want          bool
	}{
		{[]uint64{1}, nil, []uint64{1}, true},
		{[]uint64{1, 2, 3}, nil, []uint64{1}, false},
		{[]uint64{1, 2, 3}, nil, []uint64{1, 3}, true},
		{[]uint64{1, 2, 3, 4}, nil, []uint64{1, 3}, false},
		{[]uint64{1, 2, 3, 4}, nil, []uint64{1, 3, 4}, true},
		{[]uint64{1, 2, 3, 4, 5}, nil, []uint64{1, 5, 4}, true},
		{[]uint64{1, 2, 3}, []uint64{3, 4, 5}, []uint64{1, 2}, false},
		{[]uint64{1, 2, 3}, []uint64{3, 4, 5}, []uint64{4, 5}, false},
		{[]uint64{1, 2, 3}, []uint64{3, 4, 5}, []uint64{1, 3, 4}, true},
		{[]uint64{1, 2, 3}, nil, []uint64{8, 9}, false},
	} {
		ids, q, ok := makeQuorum(c.in, c.out)
		require.True(t, ok)
		var set uint8
		for i, id := range ids {
			for _, h := range c.have {
				if h == id {
					set |= 1 << i
				}
			}
		}
		require.Equal(t, c.want, q.reached(set), "%v %v %v", c.in, c.out, c.have)
	}
	_, _, ok := makeQuorum(nil, nil)
	require.False(t, ok)
	_, _, ok = makeQuorum([]uint64{1, 2, 3, 4, 5, 6, 7, 8, 9}, nil)
	require.False(t, ok)
}

// TestNoAllocations: a warm get into the caller's memory allocates nothing.
func TestNoAllocations(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	f.put(theKey, "some value")
	f.net.mu.Lock()
	f.net.trace = make([]fakeRead, 4096) // full: the transport of the test must not allocate either
	f.net.mu.Unlock()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	dst := make([]byte, 64)
	key := []byte(theKey)
	for _, opts := range [][]ReadOption{nil, {WithLevel(Session)}, {WithLevel(Stale)}} {
		n := testing.AllocsPerRun(1000, func() {
			v, err := f.c.GetInto(ctx, key, dst, opts...)
			if err != nil || &v.Data[0] != &dst[0] || string(v.Data) != "some value" {
				t.Fatalf("%q %v", v.Data, err)
			}
		})
		if !raceEnabled {
			require.Zero(t, n)
		}
	}
}
