package server

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/layout"
)

// applyMove is what a step makes of a configuration and of who leads.
func applyMove(conf *raftpb.ConfState, leader *uint64, s moveStep) {
	drop := func(list []uint64, ids ...uint64) []uint64 {
		return slices.DeleteFunc(slices.Clone(list), func(x uint64) bool { return slices.Contains(ids, x) })
	}
	switch {
	case s.learn != 0:
		conf.Learners = append(conf.Learners, s.learn)
	case s.forget != 0:
		conf.Learners = drop(conf.Learners, s.forget)
	case s.handTo != 0:
		*leader = s.handTo
	case s.endOver:
		conf.VotersOutgoing = nil
	default:
		conf.VotersOutgoing = slices.Clone(conf.Voters)
		conf.Learners = drop(conf.Learners, s.enter...)
		conf.Voters = append(drop(conf.Voters, s.leave...), s.enter...)
	}
}

// From any configuration a shard gets to any wish, even when the wish changes on the way
// and others are elected in between. At no time has it fewer voters than the smaller of
// what it had and what it is to have, and who leads votes.
func TestPlanMoveGetsThere(t *testing.T) {
	for seed := range uint64(500) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		some := func() []uint64 {
			all := rnd.Perm(7)
			var ids []uint64
			for _, i := range all[:1+2*rnd.IntN(3)] {
				ids = append(ids, uint64(i+1))
			}
			return ids
		}
		conf := &raftpb.ConfState{Voters: some()}
		leader := conf.Voters[0]
		for range 4 {
			wish := some()
			least := min(len(conf.Voters), len(wish))
			stop := rnd.IntN(12) // the wish changes before it is reached, now and then
			for steps := 0; ; steps++ {
				require.Less(t, steps, 40, "seed %d: no end", seed)
				s := planMove(leader, conf, wish, func(id uint64) bool { return id != leader })
				if s.none() {
					require.ElementsMatch(t, wish, conf.Voters, "seed %d", seed)
					require.Empty(t, conf.Learners)
					require.Contains(t, conf.Voters, leader)
					break
				}
				if s.learn != 0 {
					require.NotContains(t, append(slices.Clone(conf.Voters), conf.Learners...), s.learn)
				}
				applyMove(conf, &leader, s)
				require.GreaterOrEqual(t, len(conf.Voters), min(least, len(wish)), "seed %d", seed)
				if rnd.IntN(4) == 0 {
					leader = conf.Voters[rnd.IntN(len(conf.Voters))]
				}
				if steps == stop {
					wish = some()
				}
			}
		}
	}
}

// Nobody gets a vote, and nobody loses one, before all that are to come have caught up.
func TestPlanMoveWaits(t *testing.T) {
	conf := &raftpb.ConfState{Voters: []uint64{1, 2, 3}, Learners: []uint64{4, 5}}
	behind := func(who ...uint64) func(uint64) bool {
		return func(id uint64) bool { return !slices.Contains(who, id) }
	}
	require.True(t, planMove(1, conf, []uint64{1, 4, 5}, behind(5)).none())
	s := planMove(1, conf, []uint64{1, 4, 5}, behind())
	require.Equal(t, []uint64{4, 5}, s.enter)
	require.Equal(t, []uint64{2, 3}, s.leave)
	require.Equal(t, uint64(5), planMove(1, conf, []uint64{1, 2, 4}, behind()).forget)
	require.True(t, planMove(1, conf, nil, behind()).none(), "nobody wishes anything")
	conf = &raftpb.ConfState{Voters: []uint64{4, 5}, VotersOutgoing: []uint64{1}}
	require.Equal(t, uint64(5), planMove(1, conf, []uint64{4, 5}, behind(4)).handTo)
	require.True(t, planMove(1, conf, []uint64{4, 5}, behind(4, 5)).none(), "a leader does not go before there is another")
	require.True(t, planMove(4, conf, []uint64{4, 5}, behind()).endOver)
}

// traffic writes and reads until it is told to end, and holds all against what it wrote.
type traffic struct {
	c     *testCluster
	mu    sync.Mutex
	wrote map[string]string
	ops   atomic.Int64
	stop  chan struct{}
	wg    sync.WaitGroup
	fault atomic.Pointer[error]
}

func (c *testCluster) startLoad(writers int) *traffic {
	l := &traffic{c: c, wrote: map[string]string{}, stop: make(chan struct{})}
	for w := range writers {
		l.wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-l.stop:
					return
				default:
				}
				if err := l.one(w, i); err != nil {
					l.fault.CompareAndSwap(nil, &err)
					return
				}
				l.ops.Add(1)
			}
		})
	}
	return l
}

func (l *traffic) one(w, i int) error {
	key, value := fmt.Sprintf("load-%d-%d", w, i%200), fmt.Sprintf("%d-%s", i, bytes.Repeat([]byte("x"), i%900))
	if _, err := l.c.put(key, value, nil); err != nil {
		return fmt.Errorf("put %s: %w", key, err)
	}
	l.mu.Lock()
	l.wrote[key] = value
	l.mu.Unlock()
	g, err := l.c.get(key)
	if err != nil {
		return fmt.Errorf("get %s: %w", key, err)
	}
	if got := string(g.GetValue()); got != value {
		return fmt.Errorf("get %s: %d bytes, want %d", key, len(got), len(value))
	}
	return nil
}

func (l *traffic) end() {
	close(l.stop)
	l.wg.Wait()
	if err := l.fault.Load(); err != nil {
		require.NoError(l.c.t, *err)
	}
	for key, value := range l.wrote {
		g, err := l.c.get(key)
		require.NoError(l.c.t, err)
		require.Equal(l.c.t, value, string(g.GetValue()), key)
	}
}

// replicasOf is where each shard's voters are, as its own group has it: by a replica that
// serves.
func (c *testCluster) replicasOf(number uint32) []uint64 {
	for _, n := range c.nodes {
		if n == nil {
			continue
		}
		if sh := n.shard(number); sh != nil && sh.servedTerm() != 0 {
			st := sh.g.Status()
			if len(st.Conf.GetVotersOutgoing()) == 0 && len(st.Conf.GetLearners()) == 0 {
				return slices.Sorted(slices.Values(st.Conf.GetVoters()))
			}
		}
	}
	return nil
}

func (c *testCluster) spread(shards uint32, want func(voters []uint64) bool) bool {
	for number := uint32(1); number <= shards; number++ {
		if at := c.replicasOf(number); at == nil || !want(at) {
			return false
		}
	}
	return true
}

// One node grows to three under load: every shard gets its three replicas, leaders are
// shared, and all replicas show the same, in memory too.
func TestGrowUnderLoad(t *testing.T) {
	const shards = 6
	c := startAlone(t, shards)
	l := c.startLoad(2)
	for range 2 {
		by := c.grow(c.nodes[0].Address())
		require.NoError(t, c.start(by))
	}
	within(t, time.Minute, "three replicas of each", func() bool {
		return c.spread(shards, func(voters []uint64) bool { return slices.Equal(voters, []uint64{1, 2, 3}) })
	})
	within(t, time.Minute, "leaders are shared", func() bool {
		for _, n := range c.nodes {
			leads := 0
			for _, sh := range n.localShards() {
				if sh.servedTerm() != 0 {
					leads++
				}
			}
			if leads != shards/len(c.nodes) {
				return false
			}
		}
		return true
	})
	before := l.ops.Load()
	eventually(t, "the load goes on", func() bool { return l.ops.Load() > before+20 || l.fault.Load() != nil })
	l.end()
	for key, value := range l.wrote {
		number := layout.HashKey(c.nodes[0].identity.Load().manifest.GetHashSeed(), []byte(key)).Shard(shards)
		g, err := c.get(key)
		require.NoError(t, err)
		for _, n := range c.nodes {
			sh := n.shard(number)
			require.NoError(t, sh.waitApplied(testContext(t), g.GetApplied()))
			v, ok, err := sh.eng.Get(1, []byte(key))
			require.NoError(t, err)
			require.True(t, ok)
			require.Equal(t, value, string(v.Data))
			loc, resident := sh.space(1).Lookup([]byte(key))
			require.True(t, resident)
			require.Equal(t, v.Version, loc.Version)
		}
	}
	// Again from their directories.
	for i := range c.nodes {
		c.stopNode(i)
		require.NoError(t, c.start(i))
	}
	for key, value := range l.wrote {
		g, err := c.get(key)
		require.NoError(t, err)
		require.Equal(t, value, string(g.GetValue()))
	}
}

// A replica that leaves retires its record before its data goes, and leaves nothing; a
// node that gets the shard again has another slot, and remembers what it promised.
func TestReplicaLeavesAndComesBack(t *testing.T) {
	c := startAlone(t, 1)
	by := c.grow(c.nodes[0].Address())
	require.NoError(t, c.start(by))
	eventually(t, "it is active", func() bool { return c.members(0).GetMembers()[1].GetNode().GetState() == isActive })
	_, err := c.put("key", "value", nil)
	require.NoError(t, err)
	to := func(node uint64) {
		c.move(node, isActive)
		c.move(3-node, isDraining)
		eventually(t, "the shard moves", func() bool { return slices.Equal(c.replicasOf(1), []uint64{node}) })
		eventually(t, "the other lets go", func() bool { return c.nodes[2-node].shard(1) == nil })
		c.nodes[2-node].replicas.Lock() // until all of it is gone
		//lint:ignore SA2001 whoever holds it is what is waited for
		c.nodes[2-node].replicas.Unlock()
		g, err := c.get("key")
		require.NoError(t, err)
		require.Equal(t, "value", string(g.GetValue()))
	}
	to(2)
	old := c.nodes[by].shard(1)
	term := old.g.Status().Term
	to(1)
	require.Equal(t, uint64(layout.RetiredTerm), old.record.Load().Term)
	require.Zero(t, old.record.Load().ServedTerm)
	require.True(t, old.gone.Load())
	_, err = c.kv(by).Get(testContext(t), &kvdv1.GetRequest{NamespaceId: 1, Key: []byte("key"), Level: kvdv1.ReadLevel_READ_LEVEL_STALE})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_NO_REPLICA)
	meta, err := c.nodes[by].engine.Group(1).Meta()
	require.NoError(t, err)
	require.Zero(t, meta)
	log, err := c.nodes[by].engine.OpenLog(1)
	require.NoError(t, err)
	require.Equal(t, log.Truncated, log.Last)
	require.GreaterOrEqual(t, log.Hard.GetTerm(), term, "it forgot its term")
	route := c.nodes[by].route(1, 1)
	require.Nil(t, route.GetLocal())
	require.Equal(t, []uint64{1}, route.GetVoters(), "who was left knows where to ask")
	to(2)
	again := c.nodes[by].shard(1)
	require.Greater(t, again.record.Slot(), old.record.Slot())
	require.GreaterOrEqual(t, again.g.Status().Term, term)
}

// move takes a node into a state.
func (c *testCluster) move(id uint64, to kvdv1.NodeState) {
	c.t.Helper()
	eventually(c.t, "group 0 takes it", func() bool {
		for _, n := range c.nodes {
			if n != nil && n.host.Group(0).Status().Leading {
				ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
				_, err := n.proposeNode(ctx, moveOp(id, to))
				cancel()
				return err == nil
			}
		}
		return false
	})
}

// keyOf finds a key of a shard.
func (c *testCluster) keyOf(number, shards uint32) string {
	for i := 0; ; i++ {
		key := fmt.Sprintf("key-%d", i)
		if layout.HashKey(c.nodes[0].identity.Load().manifest.GetHashSeed(), []byte(key)).Shard(shards) == number {
			return key
		}
	}
}

func within(t testing.TB, d time.Duration, what string, f func() bool) {
	t.Helper()
	require.Eventually(t, f, d, 10*time.Millisecond, what)
}

// What is done to a replica can be cut off at every step: the next start finishes it, and
// a promise once given is kept.
func TestReplicaStoresAfterCrash(t *testing.T) {
	c := startAlone(t, 3)
	n := c.nodes[0]
	_, err := c.put(c.keyOf(1, 3), "kept", nil)
	require.NoError(t, err)
	term := n.shard(2).g.Status().Term
	require.NotZero(t, term)
	for _, at := range []replicaState{replicaLeaving, replicaMaking} {
		c.stopNode(0)
		d, err := openDataDir(c.cfgs[0].DataDir)
		require.NoError(t, err)
		require.NoError(t, d.saveReplicas(map[uint32]replicaState{1: replicaOpen, 2: at}))
		require.NoError(t, d.close())
		require.NoError(t, c.start(0))
		n = c.nodes[0]
		noted, err := n.dir.loadReplicas()
		require.NoError(t, err)
		log, err := n.engine.OpenLog(2)
		require.NoError(t, err)
		require.GreaterOrEqual(t, log.Hard.GetTerm(), term, "it forgot its term")
		require.Zero(t, log.Last)
		if at == replicaLeaving {
			require.Equal(t, map[uint32]replicaState{1: replicaOpen}, noted)
			require.Nil(t, n.shard(2))
			continue
		}
		require.Equal(t, map[uint32]replicaState{1: replicaOpen, 2: replicaOpen}, noted)
		require.Zero(t, n.shard(2).appliedIndex())
	}
	require.Nil(t, n.shard(3), "what is not noted is not here")
	g, err := c.get(c.keyOf(1, 3))
	require.NoError(t, err)
	require.Equal(t, "kept", string(g.GetValue()))
}
