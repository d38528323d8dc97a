package client

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWarmAndColdCounts(t *testing.T) {
	for _, sync := range []bool{true, false} {
		f := start(t, fakeOptions{}, netOptions{sync: sync}, nil)
		f.put("a", "1")
		s := f.during(func() { f.want(t, "a", "1") })
		require.EqualValues(t, 1, s.BucketReads)
		require.EqualValues(t, 1, s.ObjectReads)
		require.EqualValues(t, 2, s.RecordReads, "leader and one more voter")
		s = f.during(func() { f.want(t, "a", "1") })
		require.EqualValues(t, 0, s.BucketReads)
		require.EqualValues(t, 1, s.ObjectReads)
		require.EqualValues(t, 2, s.RecordReads)
		require.EqualValues(t, 1, s.Confirmations)
		require.EqualValues(t, 1, s.CacheHits)
		require.EqualValues(t, 1, s.gets(Linearizable, "fake"))
		require.Empty(t, s.Fallbacks)
		require.Empty(t, s.Retries)
		s = f.during(func() { f.wantAbsent(t, "nobody") })
		require.EqualValues(t, 1, s.BucketReads)
		require.EqualValues(t, 0, s.ObjectReads)
		require.Empty(t, s.Fallbacks)
	}
}

// TestNewChunkByLookUp: a look-up finds an object in memory that was registered after the
// session was opened. The region is learnt, and the place is used from then on.
func TestNewChunkByLookUp(t *testing.T) {
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: 1})}
	for _, n := range f.nodes {
		n.hidden = true
	}
	f.net = &fakeNet{c: f.fakeCluster, name: "fake", query: true}
	f.c = f.dial(t, f.net, nil)
	f.ready(t)
	f.put(theKey, "1")
	f.want(t, theKey, "1")
	eventually(t, "the place is used", func() bool {
		return f.during(func() { f.want(t, theKey, "1") }).CacheHits == 1
	})
	s := f.during(func() { f.want(t, theKey, "1") })
	require.Zero(t, s.Queries)
	require.EqualValues(t, 1, s.ObjectReads)
}
