package server

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// strangerAt starts one more cluster, whose node 3 listens at an address, and whose shards
// have all moved: each has one replica, and is further than those of a new cluster.
func strangerAt(t *testing.T, addr string, shards uint32) *testCluster {
	c := newTestCluster(t, testConfigs(t, 1, shards))
	c.cfgs[0].NodeID, c.cfgs[0].Peers, c.cfgs[0].Replication = 0, nil, 1
	require.NoError(t, c.start(0))
	for range 2 {
		by := c.grow(c.nodes[0].Address())
		if by == 2 {
			c.cfgs[by].ListenAddr = addr
		}
		require.NoError(t, c.start(by))
	}
	require.Equal(t, uint64(3), c.nodes[2].id())
	within(t, time.Minute, "each node has its share", func() bool {
		for _, n := range c.nodes {
			if len(n.localShards()) != int(shards)/3 {
				return false
			}
		}
		return c.spread(shards, func(v []uint64) bool { return len(v) == 1 })
	})
	return c
}

// A node of another cluster comes up at the address of a member that is down, with the
// member's id. Nobody takes its word for the member's, nor passes on to it what is meant for
// the member.
func TestStrangerAtMembersAddress(t *testing.T) {
	const shards = 6
	c := startCluster(t, 3, shards)
	for number := uint32(1); number <= shards; number++ {
		_, err := c.put(c.keyOf(number, shards), "kept", nil)
		require.NoError(t, err)
	}
	for _, undo := range []bool{false, true} {
		_, err := c.cluster(0).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 3, LeadersOnly: !undo, Undo: undo})
		require.NoError(t, err)
	}
	addr := c.nodes[2].Address()
	c.stopNode(2)
	other := strangerAt(t, addr, shards)

	// As the leader of group 0 asks in its rounds.
	var leader *Node
	eventually(t, "group 0 is led", func() bool {
		i := slices.IndexFunc(c.nodes[:2], func(n *Node) bool { return n.host.Group(0).Status().Leading })
		if i >= 0 {
			leader = c.nodes[i]
		}
		return i >= 0
	})
	k := &keeper{since: time.Now(), heard: map[uint64]time.Time{}}
	_, err := leader.keepOnce(testContext(t), k)
	require.NoError(t, err)
	require.Contains(t, k.heard, uint64(1))
	require.NotContains(t, k.heard, uint64(3), "a stranger's answer is not node 3's")
	for number := uint32(1); number <= shards; number++ {
		require.ElementsMatch(t, []uint64{1, 2, 3}, leader.shardMap.whereabouts(number).GetVoters(), "shard %d", number)
	}

	// As a node passes a call on to a leader that it believes to be node 3.
	conn, err := leader.memberConn(3)
	require.NoError(t, err)
	_, err = kvdv1.NewClusterClient(conn).CreateNamespace(testContext(t), &kvdv1.CreateNamespaceRequest{Name: "ours"})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_READY)
	require.ErrorContains(t, err, "answers at its address")
	_, err = kvdv1.NewClusterClient(conn).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 3, LeadersOnly: true})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_READY)
	require.Equal(t, isActive, other.member(3).GetNode().GetState())
	names, err := other.cluster(2).ListNamespaces(testContext(t), &kvdv1.ListNamespacesRequest{})
	require.NoError(t, err)
	for _, ns := range names.GetNamespaces() {
		require.NotEqual(t, "ours", ns.GetName())
	}
	require.ErrorContains(t, leader.allUnderstand(testContext(t), registryProtocol, "grow"), "the address of node 3")

	// As it is asked itself, by those who say that they are others than they are.
	to := leader.identity.Load().incarnation()
	for _, from := range []*kvdv1.Identity{nil, other.nodes[2].self(), {ClusterId: leader.ClusterID(), NodeId: 3, Incarnation: 1}} {
		_, err = leader.Load(testContext(t), &kvdv1.LoadRequest{From: from, ToIncarnation: to})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_WRONG_CLUSTER)
		_, err = leader.Configuration(testContext(t), &kvdv1.ConfigurationRequest{From: from, ToIncarnation: to, Shard: 1})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_WRONG_CLUSTER)
	}
	_, err = leader.Load(testContext(t), &kvdv1.LoadRequest{From: leader.self(), ToIncarnation: to + 1})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_WRONG_CLUSTER)
	for _, n := range c.nodes[:2] {
		require.Len(t, n.localShards(), shards)
	}
	for number := uint32(1); number <= shards; number++ {
		g, err := c.get(c.keyOf(number, shards))
		require.NoError(t, err)
		require.Equal(t, "kept", string(g.GetValue()))
	}
}

// Whatever group 0 was told, a replica goes only when the leader of its shard says that it
// was left.
func TestReplicaStaysUntilItsLeaderLetsGo(t *testing.T) {
	const shards = 2
	c := startCluster(t, 3, shards)
	_, err := c.cluster(0).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 3, LeadersOnly: true})
	require.NoError(t, err)
	var n *Node
	eventually(t, "group 0 takes what is not true", func() bool {
		i := slices.IndexFunc(c.nodes, func(n *Node) bool { return n.host.Group(0).Status().Leading })
		if i < 0 {
			return false
		}
		n = c.nodes[i]
		op := &kvdv1.ShardOp{Reports: []*kvdv1.ShardReport{{Shard: 1, ConfigId: 1 << 40, Voters: []uint64{7}}}}
		_, _, err := n.propose(testContext(t), 0, n.host.Group(0), &kvdv1.Command{LeaderUnixMs: 1, Op: &kvdv1.Command_Shard{Shard: op}})
		return err == nil
	})
	for _, n := range c.nodes {
		eventually(t, "it is told", func() bool { return n.shardMap.whereabouts(1).GetConfigId() == 1<<40 })
		sh := n.shard(1)
		require.NotNil(t, sh)
		if st := sh.g.Status(); !st.Leading {
			require.True(t, n.seemsLeft(sh, st))
			require.False(t, n.leaveIfLeft(testContext(t), sh))
			require.Same(t, sh, n.shard(1))
		}
	}
	eventually(t, "all serve on", func() bool { return slices.Equal(c.replicasOf(1), []uint64{1, 2, 3}) }) // a leader may be on its way
}
