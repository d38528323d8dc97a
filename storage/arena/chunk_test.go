package arena

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// The page allocator against a slice of booleans.
func TestPageRuns(t *testing.T) {
	mem, err := rdma.AllocMemory("test", 300*pageSize, rdma.MemoryOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, mem.Free()) }()
	c := newChunk(1, mem, 300*pageSize)
	used := make([]bool, c.pages())
	type run struct{ page, n int }
	var runs []run
	rng := rand.New(rand.NewPCG(7, 7))
	for range 20000 {
		if n := 1 + rng.IntN(1<<rng.IntN(8)); rng.IntN(2) == 0 {
			want := firstRun(used, n)
			page, ok := c.takeRun(n, tablePages)
			require.Equal(t, want >= 0, ok)
			if ok {
				require.Equal(t, want, page)
				for i := range n {
					used[page+i] = true
				}
				runs = append(runs, run{page, n})
			}
		} else if len(runs) > 0 {
			i := rng.IntN(len(runs))
			r := runs[i]
			runs[i] = runs[len(runs)-1]
			runs = runs[:len(runs)-1]
			c.giveRun(r.page, r.n)
			for j := range r.n {
				used[r.page+j] = false
			}
		}
	}
}

func firstRun(used []bool, n int) int {
	run := 0
	for i, u := range used {
		if run++; u {
			run = 0
		}
		if run == n {
			return i + 1 - n
		}
	}
	return -1
}

func TestChunksAreAnnouncedBeforeUse(t *testing.T) {
	var r *rig
	var seen []rdma.RegionID
	cfg := Config{Shards: 1, LimitBytes: 1 << 20, MinChunkBytes: 64 << 10}
	cfg.OnChunk = func(namespace uint32, id rdma.RegionID, m *rdma.Memory) error {
		require.EqualValues(t, 1, namespace)
		require.Contains(t, r.n.Chunks(), id)
		require.GreaterOrEqual(t, m.FD(), 0)
		r.n.Stats() // no lock is held that a reader needs
		r.shards[0].Lookup([]byte("key"))
		require.Equal(t, len(m.Bytes()), bytes.Count(m.Bytes(), []byte{0}), "something is in it already")
		seen = append(seen, id)
		return nil
	}
	r = newRig(t, cfg)
	for i := range 4000 {
		loc, ok := r.shards[0].Put(Item{Key: fmt.Appendf(nil, "key-%05d", i), Value: make([]byte, 200), Version: 1})
		if ok {
			require.Contains(t, seen, regionID(loc.Place.Chunk))
		}
		if tb, _, ok := r.shards[0].Table(); ok {
			require.Contains(t, seen, regionID(tb.Place.Chunk))
		}
	}
	require.LessOrEqual(t, r.a.Stats().RegisteredBytes, uint64(1<<20))
	require.Len(t, r.n.Chunks(), len(seen))
}

func TestRefusedChunk(t *testing.T) {
	refuse := errors.New("device says no")
	var gone, asked []rdma.RegionID
	r := newRig(t, Config{
		OnChunk: func(_ uint32, id rdma.RegionID, _ *rdma.Memory) error {
			asked = append(asked, id)
			return refuse
		},
		OnChunkGone: func(_ uint32, id rdma.RegionID) { gone = append(gone, id) },
	})
	require.False(t, r.put("key", "value", 1))
	require.False(t, r.put("key", "value", 2))
	require.Equal(t, []rdma.RegionID{1}, asked, "no new attempt at once")
	require.Equal(t, asked, gone)
	require.Zero(t, r.a.Stats().RegisteredBytes)
	refuse = nil
	r.clock.Advance(2 * time.Second)
	require.True(t, r.put("key", "value", 3))
	require.Equal(t, []rdma.RegionID{1, 2}, asked, "an id is never used twice")

	// What was lost before there was a table is not absent.
	g := &reader{r: r, rng: rand.New(rand.NewPCG(1, 1)), pause: func() {}}
	_, _, out := g.get(0, r.route(0), "other")
	require.Equal(t, unknown, out)
}

func TestQuotaAndLimit(t *testing.T) {
	r := newRig(t, Config{LimitBytes: 1 << 20, MinChunkBytes: 64 << 10})
	small := r.a.OpenNamespace(2, 100_000)
	require.Same(t, small, r.a.OpenNamespace(2, 0))
	require.Same(t, small, r.a.Namespace(2))
	require.EqualValues(t, 100_000, small.quota.Load(), "0 leaves it")
	require.Nil(t, r.a.Namespace(3))
	s := small.OpenShard(1, r.recs[0])
	for i := range 2000 {
		s.Put(Item{Key: fmt.Appendf(nil, "key-%05d", i), Value: make([]byte, 500), Version: 1})
	}
	require.LessOrEqual(t, small.Stats().RegisteredBytes, uint64(100_000))
	for i := range 4000 {
		r.put(fmt.Sprintf("key-%05d", i), strings.Repeat("v", 500), 1)
	}
	st := r.a.Stats()
	require.LessOrEqual(t, st.RegisteredBytes, uint64(1<<20))
	require.Greater(t, st.RegisteredBytes, uint64(1<<20)*9/10)
	require.Equal(t, r.n.Stats().RegisteredBytes+small.Stats().RegisteredBytes, st.RegisteredBytes)
}

// A namespace that nobody uses any more gives its chunks back, after the quarantine,
// and its number can be used again with fresh chunk ids.
func TestDroppedNamespaceReleasesItsChunks(t *testing.T) {
	var gone []rdma.RegionID
	r := newRig(t, Config{Shards: 2, OnChunkGone: func(_ uint32, id rdma.RegionID) { gone = append(gone, id) }})
	for i := range 5000 {
		require.True(t, r.put(fmt.Sprintf("key-%05d", i), strings.Repeat("v", 1000), 1))
	}
	chunks := len(r.n.Chunks())
	loc, ok := r.shard("key-00000").Lookup([]byte("key-00000"))
	require.True(t, ok)
	raw := r.n.Chunks()[regionID(loc.Place.Chunk)].Bytes()[loc.Place.Offset:]
	for i, s := range r.shards {
		gen := r.recs[i].layoutGen()
		s.Drop()
		s.Drop()
		require.Greater(t, r.recs[i].layoutGen(), gen)
		_, _, ok := s.Table()
		require.False(t, ok)
		_, ok = s.Put(Item{Key: []byte(keyOf(r, s)), Version: 9})
		require.False(t, ok)
	}
	require.Equal(t, layout.StateDropped, layout.LoadState(raw), "who remembers it sees that it is gone")
	r.a.Tick()
	require.Empty(t, gone, "not before the quarantine")
	r.clock.Advance(11 * time.Second)
	r.a.Tick()
	require.Len(t, gone, chunks)
	require.Zero(t, r.a.Stats().RegisteredBytes)
	require.Empty(t, r.n.Chunks())

	for i := range r.shards {
		r.shards[i] = r.n.OpenShard(uint32(i+1), r.recs[i])
	}
	require.True(t, r.put("key", "value", 1))
	for id := range r.n.Chunks() {
		require.NotContains(t, gone, id)
	}
}

func keyOf(r *rig, s *Shard) string {
	for i := 0; ; i++ {
		if key := fmt.Sprint("k", i); r.shard(key) == s {
			return key
		}
	}
}
