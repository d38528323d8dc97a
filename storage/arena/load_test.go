package arena

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/storage/layout"
)

// Nothing of a Load can be found or believed before Commit, and nothing of the old
// content after it began to show the new.
func TestLoadIsBesideTheOldContent(t *testing.T) {
	r := newRig(t, Config{Shards: 1})
	s := r.shards[0]
	for i := range 500 {
		require.True(t, r.put(fmt.Sprintf("old-%05d", i), "old", uint64(i+1)))
	}
	var oldPlaces []Location
	for i := range 500 {
		loc, _ := s.Lookup(fmt.Appendf(nil, "old-%05d", i))
		oldPlaces = append(oldPlaces, loc)
	}
	before := r.route(0)
	live := 0
	r.a.hook = func(e event) {
		if e.Op == opState && e.State == layout.StateLive {
			live++
		}
	}
	l := s.StartLoad()
	for i := range 5000 {
		require.True(t, l.Put(Item{Key: fmt.Appendf(nil, "new-%05d", i), Value: []byte("new"), Version: uint64(i + 1)}))
	}
	require.True(t, l.Put(Item{Key: []byte("new-00000"), Value: []byte("newer"), Version: 9}))
	require.Zero(t, live)
	require.Equal(t, before, r.route(0))
	_, _, ok := r.get("new-00000")
	require.False(t, ok)
	_, _, ok = r.get("old-00000")
	require.True(t, ok)

	// From the first store on that Commit makes, the old addresses are refused; and no
	// new object is live before every old one is marked.
	var steps []op
	dropped := 0
	r.a.hook = func(e event) {
		if e.Op == opState && e.State == layout.StateDropped {
			dropped++
		}
		if e.Op == opState && e.State == layout.StateLive {
			require.Equal(t, 500, dropped)
		}
		if len(steps) == 0 || steps[len(steps)-1] != e.Op {
			steps = append(steps, e.Op)
		}
	}
	l.Commit()
	r.a.hook = nil
	require.Equal(t, opGen, steps[0])
	require.Equal(t, opTable, steps[len(steps)-1])
	require.Greater(t, r.route(0).gen, before.gen)
	v, version, ok := r.get("new-00000")
	require.True(t, ok)
	require.Equal(t, "newer", v)
	require.EqualValues(t, 9, version)
	require.EqualValues(t, 5000, r.a.Stats().Objects)
	for _, loc := range oldPlaces {
		raw := r.n.Chunks()[regionID(loc.Place.Chunk)].Bytes()[loc.Place.Offset:][:loc.Length]
		o, verdict := layout.DecodeObject(raw, testSeed, loc.Place)
		require.False(t, verdict == layout.Valid && o.State == layout.StateLive && strings.HasPrefix(string(o.Key), "old"))
	}
	require.Panics(t, func() { l.Put(Item{Key: []byte("x")}) })
}

func TestAbortedLoadLeavesEverything(t *testing.T) {
	r := newRig(t, Config{Shards: 1})
	require.True(t, r.put("key", "value", 1))
	before, used := r.route(0), r.a.Stats()
	l := r.shards[0].StartLoad()
	for i := range 1000 {
		l.Put(Item{Key: fmt.Appendf(nil, "new-%05d", i), Value: []byte("new"), Version: 1})
	}
	l.Abort()
	l.Abort()
	require.Equal(t, before, r.route(0))
	v, _, ok := r.get("key")
	require.True(t, ok)
	require.Equal(t, "value", v)
	require.Equal(t, used.Objects, r.a.Stats().Objects)
	require.Equal(t, used.IndexBytes, r.a.Stats().IndexBytes)
}

// Content larger than the memory: the rest is non-resident, never absent.
func TestLoadLargerThanMemory(t *testing.T) {
	r := newRig(t, Config{Shards: 1, LimitBytes: 128 << 10, MinChunkBytes: 64 << 10})
	l := r.shards[0].StartLoad()
	resident := 0
	for i := range 3000 {
		if l.Put(Item{Key: fmt.Appendf(nil, "new-%05d", i), Value: make([]byte, 100), Version: 1}) {
			resident++
		}
	}
	l.Commit()
	require.NoError(t, r.a.Check())
	require.Greater(t, resident, 300)
	require.EqualValues(t, resident, r.a.Stats().Objects)
	model := twin{}
	var keys []string
	for i := range 3000 {
		key := fmt.Sprintf("new-%05d", i)
		keys = append(keys, key)
		model[key] = Item{Key: []byte(key), Value: make([]byte, 100), Version: 1}
	}
	compare(r, keys, model)

	// An empty snapshot leaves no table and no objects.
	r.shards[0].StartLoad().Commit()
	require.Zero(t, r.a.Stats().Objects)
	require.False(t, r.route(0).ok)
}
