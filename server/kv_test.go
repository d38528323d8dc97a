package server

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
	"github.com/kvd-io/kvd/storage/layout"
)

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func (c *testCluster) shardOf(key []byte) uint32 {
	m := c.nodes[0].identity.Load().manifest
	return layout.HashKey(m.GetHashSeed(), key).Shard(m.GetShards())
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	require.Eventually(t, f, 20*time.Second, 2*time.Millisecond, what)
}

// leaderOf waits until exactly the leader of a shard serves it and all know.
func (c *testCluster) leaderOf(shard uint32) (leader int) {
	c.t.Helper()
	eventually(c.t, "a leader that all know", func() bool {
		leader = -1
		for i, n := range c.nodes {
			if n != nil && n.shard(shard).servedTerm() != 0 {
				leader = i
			}
		}
		if leader < 0 {
			return false
		}
		for _, n := range c.nodes {
			if n != nil && n.host.Group(raft.GroupID(shard)).Status().Leader != raft.NodeID(leader+1) {
				return false
			}
		}
		return true
	})
	return leader
}

// A call that is refused says why, by a reason that clients branch on.
func TestReasons(t *testing.T) {
	c := startCluster(t, 3, 4, func(cfg *Config) { cfg.MaxValueBytes = 1000 })
	ctx := testContext(t)
	key := []byte("key")
	_, err := c.put("key", "value", nil)
	require.NoError(t, err)
	shard := c.shardOf(key)
	leader := c.leaderOf(shard)
	follower := (leader + 1) % 3
	at := c.kv(leader)

	t.Run("not leader", func(t *testing.T) {
		kv := c.kv(follower)
		_, err := kv.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: key})
		require.EqualValues(t, leader+1, requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_LEADER).GetLeaderNode())
		_, err = kv.Delete(ctx, &kvdv1.DeleteRequest{NamespaceId: 1, Key: key})
		require.EqualValues(t, leader+1, requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_LEADER).GetLeaderNode())
		for _, level := range []kvdv1.ReadLevel{0, kvdv1.ReadLevel_READ_LEVEL_LINEARIZABLE, 77} {
			_, err = kv.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: key, Level: level})
			d := requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_LEADER)
			require.EqualValues(t, leader+1, d.GetLeaderNode())
			_, err = kv.List(ctx, &kvdv1.ListRequest{NamespaceId: 1, Shard: shard, Level: level})
			requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_LEADER)
		}
		_, err = kv.OpenWriter(ctx, &kvdv1.OpenWriterRequest{Shard: shard})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_LEADER)
		_, err = kvdv1.NewClusterClient(c.conns[follower]).TransferLeader(ctx, &kvdv1.TransferLeaderRequest{Shard: shard, ToNode: 1})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_LEADER)
	})
	t.Run("unknown namespace", func(t *testing.T) {
		for _, i := range []int{leader, follower} {
			_, err := c.kv(i).Get(ctx, &kvdv1.GetRequest{NamespaceId: 99, Key: key})
			requireReason(t, err, kvdv1.ErrorDetail_REASON_UNKNOWN_NAMESPACE)
			_, err = c.kv(i).Put(ctx, &kvdv1.PutRequest{Key: key})
			requireReason(t, err, kvdv1.ErrorDetail_REASON_UNKNOWN_NAMESPACE)
			_, err = c.kv(i).List(ctx, &kvdv1.ListRequest{NamespaceId: 99, Shard: shard})
			requireReason(t, err, kvdv1.ErrorDetail_REASON_UNKNOWN_NAMESPACE)
		}
	})
	t.Run("invalid", func(t *testing.T) {
		for _, k := range [][]byte{nil, make([]byte, layout.MaxKeySize+1)} {
			_, err := at.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: k})
			requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_KEY)
			_, err = at.Delete(ctx, &kvdv1.DeleteRequest{NamespaceId: 1, Key: k})
			requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_KEY)
		}
		_, err := at.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: key, Value: make([]byte, 1001)})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_VALUE_TOO_LARGE)
		both := &kvdv1.Precondition{IfAbsent: true, IfVersion: 1}
		_, err = at.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: key, Precondition: both})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
		_, err = at.Delete(ctx, &kvdv1.DeleteRequest{NamespaceId: 1, Key: key, Precondition: &kvdv1.Precondition{IfAbsent: true}})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
		_, err = at.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: key, Writer: &kvdv1.WriterStamp{WriterId: 5}})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	})
	t.Run("no replica", func(t *testing.T) {
		for _, number := range []uint32{0, 5, math.MaxUint32} {
			_, err := at.List(ctx, &kvdv1.ListRequest{NamespaceId: 1, Shard: number})
			requireReason(t, err, kvdv1.ErrorDetail_REASON_NO_REPLICA)
			_, err = at.OpenWriter(ctx, &kvdv1.OpenWriterRequest{Shard: number})
			requireReason(t, err, kvdv1.ErrorDetail_REASON_NO_REPLICA)
		}
		_, err := kvdv1.NewClusterClient(c.conns[0]).TransferLeader(ctx, &kvdv1.TransferLeaderRequest{Shard: 5, ToNode: 1})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_NO_REPLICA)
	})
	t.Run("read only", func(t *testing.T) {
		why := "full"
		n := c.nodes[leader]
		n.disk.refusing.Store(&why)
		defer n.disk.refusing.Store(nil)
		_, err := at.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: key})
		require.NotZero(t, requireReason(t, err, kvdv1.ErrorDetail_REASON_READ_ONLY).GetRetryAfterMs())
		_, err = at.Delete(ctx, &kvdv1.DeleteRequest{NamespaceId: 1, Key: key})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_READ_ONLY)
		_, err = at.OpenWriter(ctx, &kvdv1.OpenWriterRequest{Shard: shard})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_READ_ONLY)
		g, err := at.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: key})
		require.NoError(t, err, "reads go on")
		require.Equal(t, "value", string(g.GetValue()))
	})
	t.Run("starting", func(t *testing.T) {
		n := c.nodes[leader]
		n.ready.Store(false)
		defer n.ready.Store(true)
		_, err := at.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: key})
		require.NotZero(t, requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_READY).GetRetryAfterMs())
		_, err = at.List(ctx, &kvdv1.ListRequest{NamespaceId: 1, Shard: 1})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_READY)
		_, err = at.OpenWriter(ctx, &kvdv1.OpenWriterRequest{Shard: 1})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_READY)
		cl := kvdv1.NewClusterClient(c.conns[leader])
		_, err = cl.CreateNamespace(ctx, &kvdv1.CreateNamespaceRequest{Name: "x"})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_READY)
		_, err = cl.ListNamespaces(ctx, &kvdv1.ListNamespacesRequest{})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_READY)
		_, err = cl.TransferLeader(ctx, &kvdv1.TransferLeaderRequest{Shard: 1})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_READY)
		st, err := cl.Status(ctx, &kvdv1.StatusRequest{})
		require.NoError(t, err, "who it is can be asked at any time")
		require.NotEmpty(t, st.GetClusterId())
		require.Empty(t, st.GetShards())
	})
	t.Run("session", func(t *testing.T) {
		kv := c.kv(follower)
		w, err := at.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: key, Value: []byte("newest")})
		require.NoError(t, err)
		g, err := kv.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: key, Level: kvdv1.ReadLevel_READ_LEVEL_SESSION, MinApplied: w.GetApplied()})
		require.NoError(t, err)
		require.Equal(t, "newest", string(g.GetValue()))
		require.GreaterOrEqual(t, g.GetApplied(), w.GetApplied())
		_, err = kv.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: key, Level: kvdv1.ReadLevel_READ_LEVEL_SESSION, MinApplied: 1 << 40})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_READY)
		_, err = kv.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: key, Level: kvdv1.ReadLevel_READ_LEVEL_STALE, MinApplied: 1 << 40})
		require.NoError(t, err)
	})
	t.Run("lost leadership", func(t *testing.T) {
		n := c.nodes[leader]
		sh := n.shard(shard)
		g := n.host.Group(raft.GroupID(shard))
		term, err := n.readBarrier(ctx, sh, g, kvdv1.ReadLevel_READ_LEVEL_LINEARIZABLE, 0)
		require.NoError(t, err)
		require.NotZero(t, term)
		require.NoError(t, stillServed(sh, g, term))
		require.NoError(t, g.TransferLeader(ctx, raft.NodeID(follower+1)))
		// What the engine shows from here on may not be in the new leader's memory yet.
		requireReason(t, stillServed(sh, g, term), kvdv1.ErrorDetail_REASON_NOT_LEADER)
		require.NoError(t, stillServed(sh, g, 0), "other levels do not care")
	})
	t.Run("translated", func(t *testing.T) {
		g := c.nodes[0].host.Group(1)
		require.NoError(t, failRaft(nil, 1, g))
		for err, want := range map[error]kvdv1.ErrorDetail_Reason{
			raft.ErrNotLeader: kvdv1.ErrorDetail_REASON_NOT_LEADER, raft.ErrOverloaded: kvdv1.ErrorDetail_REASON_EXHAUSTED,
			fmt.Errorf("%w: %w", raft.ErrOutcomeUnknown, context.Canceled): kvdv1.ErrorDetail_REASON_OUTCOME_UNKNOWN,
			raft.ErrNotReady:  kvdv1.ErrorDetail_REASON_NOT_READY,
			raft.ErrClosed:    kvdv1.ErrorDetail_REASON_NOT_READY,
			engine.ErrCorrupt: kvdv1.ErrorDetail_REASON_CORRUPT,
		} {
			requireReason(t, failRaft(err, 1, g), want)
		}
		require.Equal(t, codes.Canceled, status.Code(failRaft(context.Canceled, 1, g)))
		require.Equal(t, codes.DeadlineExceeded, status.Code(failRaft(context.DeadlineExceeded, 1, g)))
		requireReason(t, failEngine(engine.ErrCorrupt), kvdv1.ErrorDetail_REASON_CORRUPT)
		requireReason(t, failEngine(engine.ErrClosed), kvdv1.ErrorDetail_REASON_NOT_READY)
	})
}

// Every reason has a code of its own choice.
func TestEveryReasonHasACode(t *testing.T) {
	for number, text := range kvdv1.ErrorDetail_Reason_name {
		if number != 0 {
			require.NotEqual(t, codes.OK, codeOf[kvdv1.ErrorDetail_Reason(number)], text)
		}
	}
}

// Time comes from the node's clock: what is past its time is gone for readers at once
// and for writers' conditions too, and is removed for good by an entry.
func TestExpiryAndPages(t *testing.T) {
	manual := clock.NewManual(time.Unix(1_700_000_000, 0))
	c := startCluster(t, 1, 1, func(cfg *Config) { cfg.Clock = ticking{clock.System, manual} })
	ctx := testContext(t)
	kv := c.kv(0)
	c.leaderOf(1)
	for i := range 25 {
		req := &kvdv1.PutRequest{NamespaceId: 1, Key: fmt.Appendf(nil, "key-%02d", i), Value: []byte("value")}
		if i%5 != 0 {
			req.TtlMs = 1000
		}
		_, err := kv.Put(ctx, req)
		require.NoError(t, err)
	}
	pages := func() (keys []string) {
		var after []byte
		for {
			r, err := kv.List(ctx, &kvdv1.ListRequest{NamespaceId: 1, Shard: 1, Prefix: []byte("key-"), Limit: 4, StartAfter: after})
			require.NoError(t, err)
			for _, it := range r.GetItems() {
				require.Equal(t, "value", string(it.GetValue()))
				require.EqualValues(t, 5, it.GetSize())
				keys = append(keys, string(it.GetKey()))
			}
			if !r.GetMore() {
				return keys
			}
			require.Greater(t, string(r.GetLastKey()), string(after), "each page gets further, items or not")
			after = r.GetLastKey()
		}
	}
	require.Len(t, pages(), 25)
	manual.Advance(time.Second) // the upkeep's clock stands still: nothing is removed yet
	require.Equal(t, []string{"key-00", "key-05", "key-10", "key-15", "key-20"}, pages())
	g, err := kv.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: []byte("key-01")})
	require.NoError(t, err)
	require.False(t, g.GetFound())
	w, err := kv.Delete(ctx, &kvdv1.DeleteRequest{NamespaceId: 1, Key: []byte("key-01")})
	require.NoError(t, err)
	require.Equal(t, notFound, w.GetOutcome())
	w, err = kv.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("key-02"), Value: []byte("value"), Precondition: &kvdv1.Precondition{IfAbsent: true}})
	require.NoError(t, err)
	require.Equal(t, applied, w.GetOutcome())
	n := c.nodes[0]
	for n.expireShard(ctx, n.shard(1), n.host.Group(1)) {
	}
	meta, err := n.shard(1).eng.Meta()
	require.NoError(t, err)
	require.EqualValues(t, 6, meta.Keys)
	require.Equal(t, []string{"key-00", "key-02", "key-05", "key-10", "key-15", "key-20"}, pages())
	l, err := kv.List(ctx, &kvdv1.ListRequest{NamespaceId: 1, Shard: 1, Limit: math.MaxUint32, KeysOnly: true})
	require.NoError(t, err)
	require.Len(t, l.GetItems(), 6)
	require.Empty(t, l.GetItems()[0].GetValue())

	// More than one entry's worth, and an idle writer.
	o, err := kv.OpenWriter(ctx, &kvdv1.OpenWriterRequest{Shard: 1})
	require.NoError(t, err)
	s := n.shard(1)
	require.EqualValues(t, time.Hour.Milliseconds(), o.GetTtlMs())
	manual.Advance(time.Hour - time.Millisecond)
	require.False(t, n.expireShard(ctx, s, n.host.Group(1)))
	require.Len(t, s.writers.mu.byID, 1)
	manual.Advance(time.Millisecond)
	require.False(t, n.expireShard(ctx, s, n.host.Group(1)))
	require.Empty(t, s.writers.mu.byID)
	w, err = kv.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("key"), Writer: &kvdv1.WriterStamp{WriterId: o.GetWriterId(), Sequence: 1}})
	require.NoError(t, err)
	require.Equal(t, gone, w.GetOutcome())
}

// ticking has the time of one clock and the timers of another.
type ticking struct {
	clock.Clock
	now *clock.Manual
}

func (c ticking) Now() time.Time { return c.now.Now() }
func (c ticking) NewTicker(d time.Duration) clock.Ticker {
	if d == upkeepInterval {
		return c.now.NewTicker(1 << 60) // the test does the upkeep
	}
	return c.Clock.NewTicker(d)
}

func TestNamespaces(t *testing.T) {
	c := startCluster(t, 3, 2)
	ctx := testContext(t)
	var meta int
	eventually(t, "a leader of group 0", func() bool {
		meta = slices.IndexFunc(c.nodes, func(n *Node) bool { return n.host.Group(0).Status().Leading })
		return meta >= 0
	})
	other := kvdv1.NewClusterClient(c.conns[(meta+1)%3])
	r, err := other.CreateNamespace(ctx, &kvdv1.CreateNamespaceRequest{Name: "data", Immutable: true, DefaultTtlMs: 60_000, TwoSidedOnly: true})
	require.NoError(t, err, "it is passed on to the leader")
	ns := r.GetNamespace()
	require.True(t, ns.GetImmutable())
	require.False(t, ns.GetOneSided())
	require.NotNil(t, c.nodes[(meta+1)%3].namespaces.byID(ns.GetId()), "it can be used there at once")
	for i, n := range c.nodes {
		require.NoError(t, n.awaitNamespace(ctx, "data"))
		all, err := kvdv1.NewClusterClient(c.conns[i]).ListNamespaces(ctx, &kvdv1.ListNamespacesRequest{})
		require.NoError(t, err)
		require.Len(t, all.GetNamespaces(), 2)
		_, err = kvdv1.NewClusterClient(c.conns[i]).CreateNamespace(ctx, &kvdv1.CreateNamespaceRequest{Name: "data"})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_ALREADY_EXISTS)
	}
	for _, name := range []string{"", "A", "a b", "-a", "a-", "a/b", strings.Repeat("a", 64), "a\n", "ä"} {
		_, err := other.CreateNamespace(ctx, &kvdv1.CreateNamespaceRequest{Name: name})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, name)
	}
	for _, name := range []string{"a", "7", "a.b-c_d", strings.Repeat("a", 63)} {
		_, err := other.CreateNamespace(ctx, &kvdv1.CreateNamespaceRequest{Name: name})
		require.NoError(t, err, name)
	}
	// What was passed on once is not passed on again.
	_, err = other.CreateNamespace(metadata.AppendToOutgoingContext(ctx, forwardedKey, "1"), &kvdv1.CreateNamespaceRequest{Name: "b"})
	require.EqualValues(t, meta+1, requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_LEADER).GetLeaderNode())

	// The namespace's own settings hold wherever the write goes.
	key := []byte("key")
	at := c.kv(c.leaderOf(c.shardOf(key)))
	w, err := at.Put(ctx, &kvdv1.PutRequest{NamespaceId: ns.GetId(), Key: key, Value: []byte("v")})
	require.NoError(t, err)
	again, err := at.Put(ctx, &kvdv1.PutRequest{NamespaceId: ns.GetId(), Key: key, Value: []byte("v")})
	require.NoError(t, err)
	require.Equal(t, w.GetVersion(), again.GetVersion())
	again, err = at.Put(ctx, &kvdv1.PutRequest{NamespaceId: ns.GetId(), Key: key, Value: []byte("w")})
	require.NoError(t, err)
	require.Equal(t, conflict, again.GetOutcome())
	g, err := at.Get(ctx, &kvdv1.GetRequest{NamespaceId: ns.GetId(), Key: key})
	require.NoError(t, err)
	require.InDelta(t, time.Now().UnixMilli()+60_000, g.GetExpiresUnixMs(), 30_000)
	g, err = at.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: key})
	require.NoError(t, err)
	require.False(t, g.GetFound(), "the same key of another namespace is another key")
}

// A put of the largest value and a page of it go through gRPC's limits.
func TestLargeValues(t *testing.T) {
	nodes := 3
	if raceEnabled {
		nodes = 1 // such an entry takes seconds between nodes then
	}
	c := startCluster(t, nodes, 1, func(cfg *Config) { cfg.MaxValueBytes, cfg.TickInterval = MaxValueLimit, 100*time.Millisecond })
	value := bytes.Repeat([]byte("x"), MaxValueLimit)
	_, err := c.put("key", string(value), nil)
	require.NoError(t, err)
	eventually(t, "the leader lists it", func() bool { // on a busy machine such an entry may cost the lead
		r, err := c.kv(c.leaderOf(1)).List(testContext(t), &kvdv1.ListRequest{NamespaceId: 1, Shard: 1}, grpc.MaxCallRecvMsgSize(maxMessageBytes))
		return err == nil && len(r.GetItems()) > 0
	})
	for i, n := range c.nodes {
		eventually(t, fmt.Sprintf("node %d has it", i+1), func() bool {
			v, ok, err := n.shard(1).eng.Get(1, []byte("key"))
			return err == nil && ok && bytes.Equal(v.Data, value)
		})
	}
}

// Get and List look at the served term again after they have read: while it keeps
// changing, some of them must refuse to reveal what they saw.
func TestReadsLookAtTheTermAgain(t *testing.T) {
	c := startCluster(t, 1, 1)
	ctx := testContext(t)
	c.leaderOf(1)
	kv := c.kv(0)
	_, err := kv.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("key")})
	require.NoError(t, err)
	sh := c.nodes[0].shard(1)
	term := sh.servedTerm()
	stop := make(chan struct{})
	var flips sync.WaitGroup
	flips.Go(func() {
		for i := uint64(0); ; i++ {
			select {
			case <-stop:
				sh.record.SetServedTerm(term)
				return
			default:
				sh.record.SetServedTerm(term + i%2)
				runtime.Gosched()
			}
		}
	})
	refused := func(call func() error) func() bool {
		return func() bool {
			err := call()
			if err == nil {
				return false
			}
			requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_LEADER)
			return true
		}
	}
	eventually(t, "a get that reveals nothing", refused(func() error {
		_, err := kv.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: []byte("key")})
		return err
	}))
	eventually(t, "a list that reveals nothing", refused(func() error {
		_, err := kv.List(ctx, &kvdv1.ListRequest{NamespaceId: 1, Shard: 1})
		return err
	}))
	close(stop)
	flips.Wait()
	_, err = kv.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: []byte("key")})
	require.NoError(t, err)
}
