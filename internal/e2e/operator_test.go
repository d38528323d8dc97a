//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

type shardSaid struct {
	Shard    uint32
	Leader   uint64
	Term     uint64
	ConfigID uint64 `json:"config_id"`
	Voters   []uint64
	Learners []uint64
	Keys     uint64
	Bytes    uint64
	Replicas []struct {
		Node  uint64
		Lag   uint64 `json:"lag_entries"`
		State string
	}
}

func (c *cluster) shards(t testing.TB, args ...string) (rows []shardSaid) {
	t.Helper()
	decode(t, c.kvctl(t, append([]string{"-o", "json", "shards"}, args...)...), &rows)
	return rows
}

// TestShardsAndTransfer: every shard is shown as it is; leadership goes where it is sent
// and no write is left with an unknown outcome; what can not be is refused with a sentence.
func TestShardsAndTransfer(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	ctx := context.Background()
	cl := c.dial(t, nil)
	bytes := uint64(0)
	for i := range 60 {
		key := fmt.Appendf(nil, "key/%d", i)
		_, err := cl.Put(ctx, key, make([]byte, 100))
		require.NoError(t, err)
		bytes += uint64(len(key)) + 100
	}
	c.caughtUp(t)
	rows := c.shards(t)
	require.Len(t, rows, 5)
	keys := uint64(0)
	for i, r := range rows {
		require.Equal(t, uint32(i), r.Shard)
		require.Equal(t, []uint64{1, 2, 3}, r.Voters)
		require.NotZero(t, r.Leader)
		require.NotZero(t, r.Term)
		require.Len(t, r.Replicas, 3)
		for _, rep := range r.Replicas {
			require.Zero(t, rep.Lag)
			require.Equal(t, map[bool]string{true: "leader", false: "follower"}[rep.Node == r.Leader], rep.State)
		}
		if r.Shard > 0 {
			keys, bytes = keys+r.Keys, bytes-r.Bytes
		}
	}
	require.Equal(t, uint64(60), keys)
	require.Zero(t, bytes)
	require.Contains(t, c.kvctl(t, "shards", "2").stdout, "LAG OF EACH REPLICA")
	c.kvctl(t, "shards", "99").failed(t, 3, "shard 99")
	c.kvctl(t, "shards", "x").failed(t, 2, "want a number")

	key := []byte("key/0")
	shard := cl.ShardOf(key)
	number := strconv.Itoa(int(shard))
	var stop atomic.Bool
	var unknown, done atomic.Int64
	var writers sync.WaitGroup
	for range 4 {
		writers.Go(func() {
			for !stop.Load() {
				_, err := cl.Put(ctx, key, []byte("x"), client.NoWriter())
				if errors.Is(err, client.ErrOutcomeUnknown) {
					unknown.Add(1)
				} else if err == nil {
					done.Add(1)
				}
			}
		})
	}
	quiet := 0
	for range 6 {
		before, lost := c.shards(t, number)[0], unknown.Load()
		to := before.Leader%3 + 1
		r := c.kvctl(t, "transfer", number, strconv.FormatUint(to, 10))
		require.Zero(t, r.code, r.stderr)
		after := c.shards(t, number)[0]
		if after.Term == before.Term+1 { // no election of a node's own accord
			quiet++
			require.Equal(t, to, after.Leader)
			require.Contains(t, r.stdout, fmt.Sprintf("node %d leads shard %s now", to, number))
			require.Equal(t, lost, unknown.Load(), "writes are left with an unknown outcome")
		}
	}
	stop.Store(true)
	writers.Wait()
	t.Logf("%d quiet hand-overs under %d writes", quiet, done.Load())
	require.Positive(t, quiet)

	c.kvctl(t, "transfer", number, "17").failed(t, 2, "none of its voters", "[1 2 3]")
	c.kvctl(t, "transfer", "99", "1").failed(t, 3, "shard 99")
	c.kvctl(t, "transfer", number, "one").failed(t, 2, "number of a node")
	leads := c.shards(t, number)[0].Leader
	require.Contains(t, c.kvctl(t, "transfer", number, strconv.FormatUint(leads, 10)).stdout, "already")
	dead := leads%3 + 1
	require.NoError(t, c.Node(dead).Kill())
	await(t, "the leader misses the dead node", func() error {
		for _, rep := range c.shardsStill(t, number)[0].Replicas {
			if rep.Node == dead && rep.State != "unreachable" {
				return fmt.Errorf("it is %s", rep.State)
			}
		}
		return nil
	})
	r := c.kvctl(t, "--timeout", "5s", "transfer", number, strconv.FormatUint(dead, 10))
	r.failed(t, 5, "not been heard of", fmt.Sprintf("node %d", dead))
}

// shardsStill leaves aside what is said on standard error about a node that is gone.
func (c *cluster) shardsStill(t testing.TB, args ...string) (rows []shardSaid) {
	t.Helper()
	r := c.kvctl(t, append([]string{"-o", "json", "shards"}, args...)...)
	r.stderr = ""
	decode(t, r, &rows)
	return rows
}

type explained struct {
	Shard    uint32
	Leader   uint64
	Voters   []uint64
	Get      string
	Replicas []struct {
		Node      uint64
		Leader    bool
		Transport string
		Cached    bool `json:"location_cached"`
		Stored    bool
		Version   uint64
		Resident  bool
		Chunk     uint32
		Length    uint32 `json:"object_bytes"`
		Class     uint32 `json:"class_bytes"`
		Reason    string
		Detail    string
	}
}

// TestExplain: where a key lies on each replica, by what it is read, and if it is in no
// memory, why.
func TestExplain(t *testing.T) {
	c := sharedNodes(t)
	require.Zero(t, c.kvctl(t, "put", "explain/a", "value").code)
	c.caughtUp(t)
	explain := func(args ...string) (x explained) {
		t.Helper()
		decode(t, c.kvctl(t, append([]string{"-o", "json", "explain"}, args...)...), &x)
		require.Len(t, x.Replicas, 3)
		require.Equal(t, []uint64{1, 2, 3}, x.Voters)
		return x
	}
	for _, transport := range []string{"shm", "tcp"} {
		x := explain("explain/a", "--transport", transport)
		require.Contains(t, x.Get, "answered by "+transport)
		for _, r := range x.Replicas {
			require.True(t, r.Stored && r.Resident, r)
			require.Empty(t, r.Reason)
			require.Equal(t, transport, r.Transport)
			require.Equal(t, r.Node == x.Leader, r.Leader)
			require.Equal(t, r.Leader, r.Cached, "the get went to the leader")
			require.Positive(t, r.Version)
			require.Positive(t, r.Chunk)
			require.GreaterOrEqual(t, r.Class, r.Length)
		}
	}
	for _, r := range explain("explain/none").Replicas {
		require.False(t, r.Stored || r.Resident)
		require.Equal(t, "absent", r.Reason)
	}
	text := c.kvctl(t, "explain", "explain/a", "--transport", "grpc")
	require.Zero(t, text.code, text.stderr)
	for _, words := range []string{"gRPC is configured", "chunk", "block of", "(leader)", "version", "not remembered"} {
		require.Contains(t, text.stdout, words)
	}
	c.kvctl(t, "explain", "").failed(t, 2, "empty")
	c.kvctl(t, "-n", "nowhere", "explain", "x").failed(t, 3, "nowhere")

	// A namespace with room for a few: the first keys make room for later ones.
	a := c.admin(t)
	_, err := a.CreateNamespace(context.Background(), client.NamespaceSpec{Name: "explain-small", QuotaBytes: 6 << 20})
	require.NoError(t, err)
	small := c.dial(t, func(cfg *client.Config) { cfg.Namespace = "explain-small" })
	for i := range 200 {
		_, err := small.Put(context.Background(), fmt.Appendf(nil, "k%03d", i), make([]byte, 100_000))
		require.NoError(t, err)
	}
	c.caughtUp(t)
	gone := map[string]int{}
	for i := range 5 {
		for _, r := range explain("-n", "explain-small", "--transport", "grpc", fmt.Sprintf("k%03d", i)).Replicas {
			require.True(t, r.Stored)
			if !r.Leader && !r.Resident { // the get put it back at the leader
				gone[r.Reason]++
				require.Contains(t, r.Detail, "bytes")
			}
		}
	}
	t.Logf("%v", gone)
	require.NotEmpty(t, gone)
	for why := range gone {
		require.Contains(t, []string{"evicted", "no_room", "evicted_or_no_room"}, why)
	}
}
