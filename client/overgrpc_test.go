package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestLeadershipComesBackToReadableNode: while the leader can only be asked over gRPC, a
// client notices that another node took over that can be read.
func TestLeadershipComesBackToReadableNode(t *testing.T) {
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: 1})}
	f.nodes[2].plain = true
	f.net = &fakeNet{c: f.fakeCluster, name: "fake"}
	f.c = f.dial(t, f.net, nil)
	f.ready(t)
	f.put(theKey, "1")
	f.want(t, theKey, "1")
	f.locked(func() { f.elect(1, 3, 6) })
	for range 3 {
		s := f.during(func() { f.want(t, theKey, "1") })
		require.EqualValues(t, 1, s.gets(Linearizable, "grpc"))
		f.locked(func() {
			require.Equal(t, "no_transport", f.fallback, "the node is told why")
			require.Contains(t, s.Fallbacks, f.fallback)
		})
	}
	f.locked(func() { f.elect(1, 2, 7) })
	eventually(t, "one-sided reads from the new leader", func() bool {
		return f.during(func() { f.want(t, theKey, "1") }).gets(Linearizable, "fake") == 1
	})
	require.LessOrEqual(t, f.c.Stats().Peers[2].Sessions, uint64(1), "no session was needed for that")
}

// TestSilentLeader: the leader of several shards hangs. Only the first call waits for it;
// the others ask who leads instead.
func TestSilentLeader(t *testing.T) {
	const limit = 400 * time.Millisecond
	f := start(t, fakeOptions{shards: 8}, netOptions{}, func(c *Config) { c.Transport, c.ConnectTimeout = TransportGRPC, limit })
	f.locked(func() {
		for s := uint32(1); s <= f.shards; s++ {
			f.elect(s, 1, 6)
		}
	})
	key := func(s uint32) string { return f.keysInShard(s, 1)[0] }
	for s := uint32(1); s <= f.shards; s++ {
		f.put(key(s), "1")
		f.want(t, key(s), "1")
	}
	f.cutOff(1)
	f.locked(func() {
		f.nodes[0].silent = true
		for s := uint32(1); s <= f.shards; s++ {
			f.elect(s, 2, 7)
		}
	})
	f.want(t, key(1), "1")
	began := time.Now()
	for s := uint32(2); s <= f.shards; s++ {
		f.want(t, key(s), "1")
	}
	require.Less(t, time.Since(began), limit)

	// It comes back, and leads.
	f.locked(func() {
		f.nodes[0].silent, f.nodes[0].cut = false, false
		for s := uint32(1); s <= f.shards; s++ {
			f.elect(s, 1, 8)
		}
	})
	for s := uint32(1); s <= f.shards; s++ {
		f.want(t, key(s), "1")
	}
}
