package server

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// metaScene makes the nodes 1 to n, all active, and what is seen of them: down ones are not
// live, silent ones were not for long.
func metaScene(n uint64, down, silent []uint64) ([]*kvdv1.NodeRecord, func(uint64) metaMember) {
	var nodes []*kvdv1.NodeRecord
	for id := uint64(1); id <= n; id++ {
		nodes = append(nodes, &kvdv1.NodeRecord{NodeId: id, State: isActive})
	}
	return nodes, func(id uint64) metaMember {
		live := !slices.Contains(down, id) && !slices.Contains(silent, id)
		return metaMember{live: live, caughtUp: live, silent: slices.Contains(silent, id)}
	}
}

// Votes go from those that are silent, or drained, to those that can use them; and from
// nobody where that would help nobody, or could not be finished.
func TestPlanMetaGivesVotesToOthers(t *testing.T) {
	ids := func(list ...uint64) []uint64 { return list }
	for what, x := range map[string]struct {
		voters, learners                      []uint64
		down, silent, draining, leaders, gone []uint64
		want                                  []uint64 // voters then; nil: nothing is changed
	}{
		"a silent one, and another learns":      {voters: ids(1, 2, 3), learners: ids(4), silent: ids(2), want: ids(1, 3, 4)},
		"down, but not for long":                {voters: ids(1, 2, 3), learners: ids(4), down: ids(2)},
		"a silent one, and no other":            {voters: ids(1, 2, 3), silent: ids(2)},
		"the other is silent too":               {voters: ids(1, 2, 3), learners: ids(4), silent: ids(2, 4)},
		"the other is drained":                  {voters: ids(1, 2, 3), learners: ids(4), silent: ids(2), draining: ids(4)},
		"two others":                            {voters: ids(1, 2, 3), learners: ids(4, 5), silent: ids(2), want: ids(1, 3, 4)},
		"two silent of five":                    {voters: ids(1, 2, 3, 4, 5), silent: ids(4, 5), want: ids(1, 2, 3)},
		"one silent of five":                    {voters: ids(1, 2, 3, 4, 5), silent: ids(4)},
		"no quorum is left":                     {voters: ids(1, 2, 3), learners: ids(4), silent: ids(2), down: ids(3, 4)},
		"those that would vote are down":        {voters: ids(1, 2, 3, 4, 5), down: ids(2, 3), draining: ids(4, 5)},
		"drained, and another learns":           {voters: ids(1, 2, 3), learners: ids(4), draining: ids(2), want: ids(1, 3, 4)},
		"drained, the others are a quorum":      {voters: ids(1, 2, 3), draining: ids(2)},
		"two drained of three":                  {voters: ids(1, 2, 3), draining: ids(2, 3), want: ids(1)},
		"all drained":                           {voters: ids(1, 2, 3), draining: ids(1, 2, 3)},
		"one drained, one silent of three":      {voters: ids(1, 2, 3), draining: ids(2), silent: ids(3), want: ids(1)},
		"drained of its leaders":                {voters: ids(1, 2, 3), learners: ids(4), leaders: ids(2)},
		"two drained, one learns: one stays":    {voters: ids(1, 2, 3), learners: ids(4), draining: ids(2, 3), want: ids(1, 2, 4)},
		"the rather that is live":               {voters: ids(1, 2, 3), learners: ids(4), silent: ids(2), draining: ids(3), want: ids(1, 3, 4)},
		"the only voter is drained":             {voters: ids(1), learners: ids(2), draining: ids(1), want: ids(2)},
		"one left, one silent, two that learn":  {voters: ids(1, 2, 3), learners: ids(4, 5), silent: ids(2), gone: ids(3), want: ids(1, 4, 5)},
		"left, and nobody that is live instead": {voters: ids(1, 2, 3), gone: ids(3), down: ids(2)},
	} {
		nodes, of := metaScene(5, x.down, x.silent)
		nodes = nodes[:max(len(x.voters)+len(x.learners), 1)]
		for _, r := range nodes {
			switch id := r.GetNodeId(); {
			case slices.Contains(x.gone, id):
				r.State = isGone
			case slices.Contains(x.draining, id), slices.Contains(x.leaders, id):
				r.State, r.LeadersOnly = isDraining, slices.Contains(x.leaders, id)
			}
		}
		conf := &raftpb.ConfState{Voters: slices.Clone(x.voters), Learners: slices.Clone(x.learners)}
		c := planMeta(nodes, conf, of)
		if x.want == nil {
			require.True(t, c.none(), "%s: %+v", what, c)
			continue
		}
		applyMeta(conf, c)
		require.ElementsMatch(t, x.want, conf.GetVoters(), "%s: %+v", what, c)
		require.True(t, planMeta(nodes, conf, of).none(), "%s: it comes to rest", what)
	}
}

// With any nodes down, silent and drained, no change leaves a group that can not decide,
// none undoes one before, and an odd number stays odd.
func TestPlanMetaKeepsQuorum(t *testing.T) {
	for seed := range uint64(3000) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		count := 1 + rnd.Uint64N(7)
		var down, silent []uint64
		for id := uint64(2); id <= count; id++ { // 1 leads
			switch rnd.IntN(4) {
			case 0:
				down = append(down, id)
			case 1:
				silent = append(silent, id)
			}
		}
		nodes, of := metaScene(count, down, silent)
		for _, r := range nodes {
			r.State = []kvdv1.NodeState{isActive, isActive, isDraining, isDecommissioned}[rnd.IntN(4)]
			r.LeadersOnly = r.State == isDraining && rnd.IntN(3) == 0
		}
		conf := &raftpb.ConfState{}
		most := 1 + 2*rnd.IntN(3)
		for id := uint64(1); id <= count; id++ {
			if len(conf.Voters) < most && (rnd.IntN(2) == 0 || id == 1) {
				conf.Voters = append(conf.Voters, id)
			} else {
				conf.Learners = append(conf.Learners, id)
			}
		}
		decides := func(voters []uint64) bool {
			live := 0
			for _, id := range voters {
				if of(id).live {
					live++
				}
			}
			return live > len(voters)/2
		}
		for steps := 0; ; steps++ {
			require.Less(t, steps, 20, "seed %d: no end", seed)
			c := planMeta(nodes, conf, of)
			if c.none() {
				break
			}
			applyMeta(conf, c)
			require.True(t, decides(conf.GetVoters()), "seed %d: %v", seed, conf)
			for _, id := range c.promote {
				require.False(t, of(id).silent, "seed %d", seed)
			}
			// Those that are to stay are a quorum without those that are spare.
			var stay []uint64
			for _, id := range conf.GetVoters() {
				r := findNode(nodes, id)
				if !of(id).silent && (r.GetState() == isActive || r.GetLeadersOnly()) {
					stay = append(stay, id)
				}
			}
			require.True(t, len(stay) == 0 || len(stay) > len(conf.GetVoters())/2, "seed %d: %v", seed, conf)
		}
	}
}

// A voter of group 0 that is lost is replaced there too: then one more may be lost.
func TestDeadVoterOfMetaIsReplaced(t *testing.T) {
	c := startAlone(t, 1)
	c.stopNode(0)
	c.cfgs[0].ReplaceAfter = 2 * time.Second
	require.NoError(t, c.start(0))
	for range 3 {
		by := c.grow(c.nodes[0].Address())
		c.cfgs[by].ReplaceAfter = 2 * time.Second
		require.NoError(t, c.start(by))
	}
	eventually(t, "three vote", func() bool { return len(c.voters()) == 3 })
	require.Equal(t, []uint64{1, 2, 3}, c.voters())
	c.stopNode(1)
	within(t, time.Minute, "node 4 votes in the place of node 2", func() bool { return slices.Equal(c.voters(), []uint64{1, 3, 4}) })
	c.stopNode(2)
	within(t, time.Minute, "the others decide", func() bool {
		_, err := c.cluster(3).CreateNamespace(testContext(t), &kvdv1.CreateNamespaceRequest{Name: "after"})
		return err == nil || reasonOf(err) == kvdv1.ErrorDetail_REASON_ALREADY_EXISTS
	})
	// Back again they learn, and vote no more than is needed.
	require.NoError(t, c.start(1))
	require.NoError(t, c.start(2))
	eventually(t, "they hear of it", func() bool { return c.nodes[1].awaitNamespace(testContext(t), "after") == nil })
	require.Len(t, c.voters(), 3)
}

// Who is drained can be stopped, all of them together: group 0 goes on without.
func TestDrainedNodesDoNotDecide(t *testing.T) {
	c := startAlone(t, 1)
	for range 2 {
		require.NoError(t, c.start(c.grow(c.nodes[0].Address())))
	}
	within(t, time.Minute, "three vote, three replicas", func() bool { return len(c.voters()) == 3 })
	c.move(2, isDraining)
	c.move(3, isDraining)
	within(t, time.Minute, "only node 1 votes", func() bool { return slices.Equal(c.voters(), []uint64{1}) })
	c.stopNode(1)
	c.stopNode(2)
	_, err := c.cluster(0).CreateNamespace(testContext(t), &kvdv1.CreateNamespaceRequest{Name: "alone"})
	require.NoError(t, err)
	_, err = c.cluster(0).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 2, Undo: true})
	require.NoError(t, err)
}

// The only voter of group 0 may leave where another can vote.
func TestOnlyVoterOfMetaIsDrained(t *testing.T) {
	c := startAlone(t, 1)
	by := c.grow(c.nodes[0].Address())
	require.NoError(t, c.start(by))
	eventually(t, "it is active", func() bool { return c.members(0).GetMembers()[1].GetNode().GetState() == isActive })
	require.Equal(t, []uint64{1}, c.voters())
	c.move(1, isDraining)
	within(t, time.Minute, "node 2 votes", func() bool { return slices.Equal(c.voters(), []uint64{2}) })
	within(t, time.Minute, "the shard moves", func() bool { return slices.Equal(c.replicasOf(1), []uint64{2}) })
	c.stopNode(0)
	_, err := c.cluster(by).CreateNamespace(testContext(t), &kvdv1.CreateNamespaceRequest{Name: "alone"})
	require.NoError(t, err)
}
