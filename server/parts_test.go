package server

import (
	"bytes"
	"errors"
	"math"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

// The disk: writes stop below the limit, go on only well above it, and a disk that
// can not be asked changes nothing.
func TestDiskWatch(t *testing.T) {
	const mib = 1 << 20
	d := newDiskWatch(vfs.Default, "/data", 100*mib)
	var free uint64
	var fail error
	d.free = func(path string) (uint64, error) {
		require.Equal(t, "/data", path)
		return free, fail
	}
	for _, x := range []struct {
		free     uint64
		err      error
		refusing bool
		changed  bool
	}{
		{free: 1000 * mib}, {free: 100 * mib}, {free: 99 * mib, refusing: true, changed: true},
		{free: 10 * mib, refusing: true}, {free: 120 * mib, refusing: true}, {free: 150 * mib, refusing: true},
		{free: 0, err: errors.New("gone"), refusing: true},
		{free: 151 * mib, changed: true}, {free: 120 * mib}, {free: 0, err: errors.New("gone")},
		{free: 0, refusing: true, changed: true},
	} {
		free, fail = x.free, x.err
		changed, err := d.look()
		require.Equal(t, x.err != nil, err != nil)
		require.Equal(t, x.changed, changed, "%+v", x)
		require.Equal(t, x.refusing, d.refusal() != "", "%+v", x)
	}
	require.Contains(t, d.refusal(), "0 MiB left, writes need 100 MiB")
	real := newDiskWatch(vfs.Default, t.TempDir(), 1)
	_, err := real.look()
	require.NoError(t, err)
	require.Empty(t, real.refusal())
	_, err = newDiskWatch(vfs.Default, filepath.Join(t.TempDir(), "none"), 1).look()
	require.Error(t, err)
}

func TestGate(t *testing.T) {
	g := newGate()
	require.True(t, g.enter())
	require.True(t, g.enter())
	drained := g.close()
	require.False(t, g.enter())
	require.Equal(t, drained, g.close(), "again")
	g.leave()
	select {
	case <-drained:
		t.Fatal("one is still inside")
	default:
	}
	g.leave()
	<-drained
	require.False(t, g.enter())
	<-newGate().close()

	// Whoever was let in has left when it is drained.
	for range 200 {
		g := newGate()
		var inside atomic.Int64
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for g.enter() {
					inside.Add(1)
					inside.Add(-1)
					g.leave()
				}
			})
		}
		<-g.close()
		require.Zero(t, inside.Load())
		wg.Wait()
	}
}

// Keys of the expiry index sort by time, whatever the rest is.
func FuzzExpiryKey(f *testing.F) {
	f.Add(int64(1), uint32(1), []byte("a"), int64(2), uint32(0), []byte(""))
	f.Add(int64(math.MaxInt64), uint32(math.MaxUint32), []byte{0xff}, int64(0), uint32(7), []byte("abc"))
	f.Fuzz(func(t *testing.T, at int64, namespace uint32, key []byte, at2 int64, namespace2 uint32, key2 []byte) {
		at, at2 = at&math.MaxInt64, at2&math.MaxInt64
		a, b := expiryKey(at, namespace, key), expiryKey(at2, namespace2, key2)
		if at != at2 {
			require.Equal(t, at < at2, bytes.Compare(a, b) < 0)
		}
		gotAt, gotNamespace, gotKey, err := parseExpiryKey(a)
		if len(key) == 0 {
			require.ErrorIs(t, err, errExpiryKey)
			return
		}
		require.NoError(t, err)
		require.Equal(t, at, gotAt)
		require.Equal(t, namespace, gotNamespace)
		require.Equal(t, key, gotKey)
		for cut := range 13 {
			_, _, _, err := parseExpiryKey(a[:cut])
			require.ErrorIs(t, err, errExpiryKey)
		}
	})
}

func TestConfigIsChecked(t *testing.T) {
	good := Config{NodeID: 1, DataDir: "d", Peers: []PeerConfig{{1, "a:1"}, {2, "b:1"}, {3, "c:1"}}}
	require.NoError(t, good.Validate())
	require.NoError(t, Config{NodeID: 1, DataDir: "d"}.Validate())
	for what, spoil := range map[string]func(c *Config){
		"no id": func(c *Config) { c.NodeID = 0 }, "no directory": func(c *Config) { c.DataDir = "" },
		"shards": func(c *Config) { c.Shards = maxShards + 1 }, "even": func(c *Config) { c.Replication = 2 },
		"too many": func(c *Config) { c.Replication = 9 }, "value": func(c *Config) { c.MaxValueBytes = MaxValueLimit + 1 },
		"negative value": func(c *Config) { c.MaxValueBytes = -1 }, "chunk": func(c *Config) { c.MaxChunkBytes = 1 << 40 },
		"election": func(c *Config) { c.ElectionTicks = 2 }, "tick": func(c *Config) { c.TickInterval = time.Microsecond },
		"peer 0":     func(c *Config) { c.Peers[1].NodeID = 0 },
		"no address": func(c *Config) { c.Peers[1].Address = "" },
		"same id":    func(c *Config) { c.Peers[1].NodeID = 1 }, "same address": func(c *Config) { c.Peers[1].Address = "a:1" },
		"not a peer": func(c *Config) { c.NodeID = 4 },
	} {
		c := good
		c.Peers = slices.Clone(good.Peers)
		spoil(&c)
		require.ErrorIs(t, c.Validate(), ErrConfig, what)
	}
}

// Shards are spread over the nodes, each on as many as its replication; group 0 is
// everywhere.
func TestPlacement(t *testing.T) {
	for nodes := 1; nodes <= 9; nodes++ {
		m := &kvdv1.Manifest{Shards: 64, Replication: min(3, oddAtMost(uint32(nodes)))}
		for i := range nodes {
			m.Nodes = append(m.Nodes, &kvdv1.ManifestNode{NodeId: uint64(10 + i)})
		}
		held := map[uint64]int{}
		for g := uint64(1); g <= 64; g++ {
			voters, learners := manifestPlacement(m, g)
			require.Empty(t, learners)
			require.Len(t, voters, int(m.GetReplication()))
			require.True(t, slices.IsSorted(voters))
			require.Len(t, slices.Compact(slices.Clone(voters)), len(voters))
			for _, v := range voters {
				held[v]++
			}
		}
		require.Len(t, held, nodes)
		for _, n := range held {
			require.InDelta(t, 64*int(m.GetReplication())/nodes, n, 3)
		}
		voters, learners := manifestPlacement(m, 0)
		require.Len(t, append(slices.Clone(voters), learners...), nodes)
		require.Equal(t, 1, len(voters)%2)
		require.LessOrEqual(t, len(voters), 5)
	}
}

// Leadership is handed to the live voter that has the longest log.
func TestBestFollower(t *testing.T) {
	f := func(node raft.NodeID, match uint64, change ...func(*raft.FollowerProgress)) raft.FollowerProgress {
		p := raft.FollowerProgress{Node: node, Match: match, Active: true}
		for _, c := range change {
			c(&p)
		}
		return p
	}
	require.Zero(t, bestFollower(raft.Status{}))
	require.EqualValues(t, 3, bestFollower(raft.Status{Followers: []raft.FollowerProgress{
		f(2, 5), f(3, 7), f(4, 9, func(p *raft.FollowerProgress) { p.Active = false }),
		f(5, 9, func(p *raft.FollowerProgress) { p.Learner = true }), f(6, 9, func(p *raft.FollowerProgress) { p.Snapshot = true }),
	}}))
	require.EqualValues(t, 2, bestFollower(raft.Status{Followers: []raft.FollowerProgress{f(2, 0)}}))
}

// The metrics can be asked for at any time, also of a node that has stopped.
func TestMetrics(t *testing.T) {
	c := startCluster(t, 1, 2)
	_, err := c.put("key", "value", nil)
	require.NoError(t, err)
	n := c.nodes[0]
	names := func() (all []string) {
		families, err := n.metrics.registry.Gather()
		require.NoError(t, err)
		for _, f := range families {
			all = append(all, f.GetName())
		}
		return all
	}
	require.Subset(t, names(), []string{"kvd_shard_leader", "kvd_shard_keys", "kvd_arena_objects", "kvd_rpc_total", "kvd_log_sync_seconds", "kvd_sessions", "kvd_read_only"})
	require.Positive(t, counted(t, n, "kvd_rpc_total", ""))
	c.stop()
	require.NotContains(t, names(), "kvd_shard_leader")
}
