package server

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

func (c *testCluster) cluster(i int) kvdv1.ClusterClient { return kvdv1.NewClusterClient(c.conns[i]) }

func (c *testCluster) member(id uint64) *kvdv1.MemberStatus {
	for i, n := range c.nodes {
		if n != nil {
			for _, m := range c.members(i).GetMembers() {
				if m.GetNode().GetNodeId() == id {
					return m
				}
			}
		}
	}
	return nil
}

// A node is drained under load: its replicas go, it is told when none is left, and with
// the drain undone it gets its share again. Then it is decommissioned, and is no more.
func TestDrainAndDecommission(t *testing.T) {
	const shards = 4
	c := startAlone(t, shards)
	for range 3 {
		by := c.grow(c.nodes[0].Address())
		require.NoError(t, c.start(by))
	}
	within(t, time.Minute, "three replicas of each, on four nodes", func() bool {
		used := map[uint64]bool{}
		return c.spread(shards, func(v []uint64) bool {
			for _, id := range v {
				used[id] = true
			}
			return len(v) == 3
		}) && len(used) == 4
	})
	l := c.startLoad(2)
	_, err := c.cluster(1).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 2})
	require.NoError(t, err)
	within(t, time.Minute, "node 2 is empty", func() bool {
		m := c.member(2)
		return m.GetReplicas() == 0 && m.GetLeads() == 0 && len(c.nodes[1].localShards()) == 0
	})
	require.True(t, c.spread(shards, func(v []uint64) bool { return slices.Equal(v, []uint64{1, 3, 4}) }))
	_, err = c.cluster(0).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 3})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	require.ErrorContains(t, err, "would leave 2 nodes for the 3 replicas")
	require.Equal(t, isActive, c.member(3).GetNode().GetState(), "nothing was changed")

	_, err = c.cluster(0).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 2, Undo: true})
	require.NoError(t, err)
	within(t, time.Minute, "node 2 has its share", func() bool { return c.member(2).GetReplicas() >= 2 })

	_, err = c.cluster(3).Decommission(testContext(t), &kvdv1.DecommissionRequest{NodeId: 1})
	require.NoError(t, err)
	within(t, time.Minute, "node 1 is gone", func() bool {
		select {
		case err := <-c.nodes[0].Fatal():
			require.ErrorContains(t, err, "its id is never used again")
			c.stopNode(0)
		default:
		}
		i := slices.IndexFunc(c.nodes, func(n *Node) bool { return n != nil })
		if c.nodes[0] == nil {
			return c.members(i).GetMembers()[0].GetNode().GetState() == isGone
		}
		return false
	})
	l.end()
	require.True(t, c.spread(shards, func(v []uint64) bool { return slices.Equal(v, []uint64{2, 3, 4}) }))
	err = c.start(0)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "its id is never used again")
	_, err = c.cluster(2).Decommission(testContext(t), &kvdv1.DecommissionRequest{NodeId: 4})
	require.ErrorContains(t, err, "would be 2 nodes for the 3 replicas")
	_, err = c.cluster(2).Decommission(testContext(t), &kvdv1.DecommissionRequest{NodeId: 7})
	require.ErrorContains(t, err, "never was a node 7")
}

// A cluster that nobody grew is drained of leaders for a restart, and left alone else.
func TestDrainLeadersOfStaticCluster(t *testing.T) {
	c := startCluster(t, 3, 3)
	c.leaderOf(1)
	r, err := c.cluster(0).Rebalance(testContext(t), &kvdv1.RebalanceRequest{DryRun: true})
	require.NoError(t, err)
	for _, m := range r.GetMoves() {
		require.True(t, m.GetLeader(), "%v", m)
	}
	require.False(t, c.nodes[0].registry.written(), "a dry run changes nothing")
	_, err = c.cluster(0).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 2})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	require.False(t, c.nodes[0].registry.written(), "what is refused changes nothing")
	_, err = c.cluster(0).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 2, LeadersOnly: true})
	require.NoError(t, err)
	within(t, time.Minute, "node 2 leads nothing", func() bool {
		m := c.member(2)
		return m.GetLeads() == 0 && m.GetReplicas() == 3 && c.member(1).GetLeads()+c.member(3).GetLeads() == 3
	})
	for number := uint32(1); number <= 3; number++ {
		require.Equal(t, []uint64{1, 2, 3}, c.replicasOf(number))
	}
}

func TestLastNodeIsNotDrained(t *testing.T) {
	c := startAlone(t, 1)
	for _, req := range []*kvdv1.DrainRequest{{NodeId: 1}, {NodeId: 1, LeadersOnly: true}} {
		_, err := c.cluster(0).Drain(testContext(t), req)
		require.ErrorContains(t, err, "node 1 is the last that can hold replicas")
	}
	_, err := c.cluster(0).Decommission(testContext(t), &kvdv1.DecommissionRequest{NodeId: 1})
	require.ErrorContains(t, err, "node 1 is the last that can hold replicas")
	require.False(t, c.nodes[0].registry.written())
}

// A node whose disk has no room for writes leads nothing, as long as others have room.
func TestNoRoomNoLeaders(t *testing.T) {
	const shards = 3
	c := startAlone(t, shards)
	for range 2 {
		require.NoError(t, c.start(c.grow(c.nodes[0].Address())))
	}
	three := func(v []uint64) bool { return len(v) == 3 }
	within(t, time.Minute, "each leads a shard", func() bool {
		return c.spread(shards, three) && c.member(1).GetLeads() == 1 && c.member(2).GetLeads() == 1 && c.member(3).GetLeads() == 1
	})
	restart := func(room uint64) {
		c.stopNode(2)
		c.cfgs[2].MinFreeDisk = room
		require.NoError(t, c.start(2))
	}
	restart(1 << 62)
	l := c.startLoad(2)
	within(t, time.Minute, "the others lead", func() bool {
		return c.member(1).GetLeads()+c.member(2).GetLeads() == shards
	})
	for range 4 {
		seen := c.nodes[0].heard.Load()
		within(t, time.Minute, "the keeper looks again", func() bool { return c.nodes[0].heard.Load() != seen })
		require.Zero(t, c.member(3).GetLeads())
	}
	l.end()
	require.True(t, c.spread(shards, three), "replicas stay")
	restart(1)
	within(t, time.Minute, "it leads again when it has room", func() bool { return c.member(3).GetLeads() == 1 })
}

// Of drains at the same moment only as many are begun as leave enough nodes.
func TestDrainsAtOnce(t *testing.T) {
	const shards = 2
	c := startAlone(t, shards)
	for range 3 {
		require.NoError(t, c.start(c.grow(c.nodes[0].Address())))
	}
	within(t, time.Minute, "four are active, with three replicas of each", func() bool {
		return c.nodes[0].registry.able() == 4 && c.spread(shards, func(v []uint64) bool { return len(v) == 3 })
	})
	errs := make([]error, 3)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { _, errs[i] = c.cluster(i).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: uint64(i) + 2}) })
	}
	wg.Wait()
	begun := 0
	for _, err := range errs {
		if err == nil {
			begun++
			continue
		}
		require.ErrorContains(t, err, "would leave 2 nodes for the 3 replicas of each shard")
	}
	require.Equal(t, 1, begun)
}

// A node that is silent for too long is replaced where there is room; back again it finds
// itself left, and lets go.
func TestDeadNodeIsReplaced(t *testing.T) {
	const shards = 2
	c := startAlone(t, shards)
	c.stopNode(0)
	c.cfgs[0].ReplaceAfter = 2 * time.Second
	require.NoError(t, c.start(0))
	for range 3 {
		by := c.grow(c.nodes[0].Address())
		c.cfgs[by].ReplaceAfter = 2 * time.Second
		require.NoError(t, c.start(by))
	}
	within(t, time.Minute, "three replicas of each", func() bool {
		return c.spread(shards, func(v []uint64) bool { return len(v) == 3 })
	})
	dead := c.replicasOf(1)[2]
	l := c.startLoad(1)
	c.stopNode(int(dead - 1))
	within(t, time.Minute, "it is replaced", func() bool {
		return c.spread(shards, func(v []uint64) bool { return len(v) == 3 && !slices.Contains(v, dead) })
	})
	require.NoError(t, c.start(int(dead-1)))
	within(t, time.Minute, "it lets go of what it had", func() bool {
		for _, sh := range c.nodes[dead-1].localShards() {
			if at := c.replicasOf(sh.number); at == nil || !slices.Contains(at, dead) {
				return false
			}
		}
		return true
	})
	l.end()
}

// To undo a drain does not make a node active that never was.
func TestJoiningNodeIsNotUndrained(t *testing.T) {
	c := startAlone(t, 1)
	_, err := c.nodes[0].proposeNode(testContext(t), joinOp(5, freeAddrs(t, 1)[0]))
	require.NoError(t, err)
	_, err = c.cluster(0).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 2, Undo: true})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	require.ErrorContains(t, err, "node 2 is joining and was not drained")
	require.Equal(t, kvdv1.NodeState_NODE_STATE_JOINING, c.member(2).GetNode().GetState())
}

// Nothing is planned to go to a node that is silent, and one that has been for too long
// is replaced in what is shown as in what is done.
func TestRebalanceKnowsWhoIsSilent(t *testing.T) {
	const shards = 6
	c := startCluster(t, 3, shards, func(cfg *Config) { cfg.ReplaceAfter = 8 * time.Second })
	_, err := c.cluster(0).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 2, LeadersOnly: true})
	require.NoError(t, err)
	within(t, time.Minute, "node 2 leads nothing", func() bool { return c.member(2).GetLeads() == 0 })
	c.stopNode(1)
	_, err = c.cluster(0).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 2, Undo: true})
	require.NoError(t, err)
	r, err := c.cluster(0).Rebalance(testContext(t), &kvdv1.RebalanceRequest{DryRun: true})
	require.NoError(t, err)
	for _, m := range r.GetMoves() {
		require.NotEqual(t, uint64(2), m.GetAdd(), "%v", m)
	}

	// It is dead in a while, with nowhere for its replicas to go.
	within(t, time.Minute, "that is shown", func() bool {
		r, err := c.cluster(0).Rebalance(testContext(t), &kvdv1.RebalanceRequest{DryRun: true})
		require.NoError(t, err)
		return len(r.GetProblems()) > 0
	})
}
