package server

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
)

// registryRig is group 0 of a cluster of two, as its entries would build it.
type registryRig struct {
	t     *testing.T
	r     *rig
	reg   *registry
	m     *machine
	told  uint64
	index uint64
}

func newRegistryRig(t *testing.T) *registryRig {
	r := newRig(t, smallLimits, 16<<20)
	b := r.eng.Group(0).NewBatch()
	require.NoError(t, b.SetMeta(engine.Meta{Applied: 1, AppliedTerm: 1, ConfigID: 1, Conf: r.shard.meta.Conf}))
	require.NoError(t, b.Commit())
	g := &registryRig{t: t, r: r, index: 1}
	g.open()
	return g
}

func (g *registryRig) open() {
	m := &kvdv1.Manifest{Nodes: []*kvdv1.ManifestNode{{NodeId: 1, Incarnation: 11, Address: "a:1"}, {NodeId: 2, Incarnation: 12, Address: "b:1"}}}
	g.reg = newRegistry(m, func(index uint64, nodes []*kvdv1.NodeRecord) { g.told = index })
	g.m = newMachine(0, g.r.eng.Group(0))
	g.m.content = metaContent{newNamespaces(g.r.arena), newTokens(nil), g.reg, newShardMap(m, func() {}), g.r.eng.Group(0)}
	_, err := g.m.Open()
	require.NoError(g.t, err)
}

func (g *registryRig) do(op *kvdv1.NodeOp) nodeResult {
	g.index++
	out, err := g.m.Apply([]raft.Entry{command(g.t, g.index, &kvdv1.Command{LeaderUnixMs: int64(g.index), Op: &kvdv1.Command_Node{Node: op}})}, g.index, 1)
	require.NoError(g.t, err)
	return out[0].(nodeResult)
}

func joinOp(incarnation uint64, addr string) *kvdv1.NodeOp {
	return &kvdv1.NodeOp{Change: &kvdv1.NodeOp_Join{Join: &kvdv1.NodeRecord{Incarnation: incarnation, Address: addr}}}
}

func moveOp(id uint64, to kvdv1.NodeState) *kvdv1.NodeOp {
	return &kvdv1.NodeOp{Change: &kvdv1.NodeOp_Move{Move: &kvdv1.NodeMove{NodeId: id, To: to}}}
}

const (
	isJoining        = kvdv1.NodeState_NODE_STATE_JOINING
	isActive         = kvdv1.NodeState_NODE_STATE_ACTIVE
	isDraining       = kvdv1.NodeState_NODE_STATE_DRAINING
	isDecommissioned = kvdv1.NodeState_NODE_STATE_DECOMMISSIONED
	isGone           = kvdv1.NodeState_NODE_STATE_GONE
)

// Ids are drawn once, also when a node is gone and the state is read again.
func TestRegistryDrawsIDsOnce(t *testing.T) {
	g := newRegistryRig(t)
	require.False(t, g.reg.written())
	require.Len(t, g.reg.nodes(), 2)
	require.Equal(t, isActive, g.reg.find(1).GetState())

	first := g.do(joinOp(100, "c:1"))
	require.Equal(t, uint64(3), first.node.GetNodeId())
	require.Equal(t, isJoining, first.node.GetState())
	require.Equal(t, g.index, g.told)
	require.True(t, proto.Equal(first.node, g.do(joinOp(100, "elsewhere:1")).node), "the same asks again")
	require.Equal(t, uint64(3), g.do(joinOp(100, "c:1")).node.GetNodeId())

	require.NotEmpty(t, g.do(moveOp(3, isGone)).refused)
	require.NotEmpty(t, g.do(moveOp(3, isDraining)).refused)
	require.NotEmpty(t, g.do(moveOp(9, isActive)).refused)
	require.Empty(t, g.do(moveOp(3, isDecommissioned)).refused)
	require.Empty(t, g.do(moveOp(3, isDecommissioned)).refused, "it is already")
	require.Empty(t, g.do(moveOp(3, isGone)).refused)
	require.NotEmpty(t, g.do(moveOp(3, isActive)).refused, "nobody comes back")
	require.Equal(t, uint64(4), g.do(joinOp(101, "c:1")).node.GetNodeId())

	before := g.reg.nodes()
	g.open()
	require.Equal(t, g.index, g.told)
	require.Len(t, g.reg.nodes(), len(before))
	for i, n := range g.reg.nodes() {
		require.True(t, proto.Equal(before[i], n), "%v and %v", before[i], n)
	}
	require.Equal(t, uint64(5), g.do(joinOp(102, "d:1")).node.GetNodeId())
}

func TestRegistryUpdate(t *testing.T) {
	g := newRegistryRig(t)
	update := func(id, inc uint64, addr string) nodeResult {
		return g.do(&kvdv1.NodeOp{Change: &kvdv1.NodeOp_Update{Update: &kvdv1.NodeRecord{NodeId: id, Incarnation: inc, Address: addr, Zone: "z", State: isGone}}})
	}
	require.NotEmpty(t, update(3, 1, "x:1").refused)
	require.NotEmpty(t, update(2, 1, "x:1").refused, "another incarnation")
	require.False(t, g.reg.written(), "what is refused writes nothing")
	r := update(2, 12, "x:1")
	require.Empty(t, r.refused)
	require.Equal(t, "x:1", g.reg.find(2).GetAddress())
	require.Equal(t, "z", g.reg.find(2).GetZone())
	require.Equal(t, isActive, g.reg.find(2).GetState(), "an update changes no state")
	g.do(moveOp(2, isDecommissioned))
	g.do(moveOp(2, isGone))
	require.NotEmpty(t, update(2, 12, "y:1").refused)
}

// What a snapshot may bring is looked at before it counts.
func TestNodeRecordsAreChecked(t *testing.T) {
	good := &kvdv1.NodeRecord{NodeId: 3, Incarnation: 7, State: isActive}
	for what, spoil := range map[string]func(n *kvdv1.NodeRecord){
		"good": nil, "other id": func(n *kvdv1.NodeRecord) { n.NodeId = 4 },
		"no incarnation": func(n *kvdv1.NodeRecord) { n.Incarnation = 0 }, "no state": func(n *kvdv1.NodeRecord) { n.State = 0 },
	} {
		n := proto.Clone(good).(*kvdv1.NodeRecord)
		if spoil != nil {
			spoil(n)
		}
		v, err := proto.Marshal(n)
		require.NoError(t, err)
		err = metaContent{}.check(engine.Item{Aux: auxNode, Key: nodeKey(3), Value: v})
		if spoil == nil {
			require.NoError(t, err)
			continue
		}
		require.ErrorIs(t, err, engine.ErrCorrupt, what)
	}
}

// applyMeta is what the change makes of the members, in one step.
func applyMeta(conf *raftpb.ConfState, c metaChange) {
	without := func(list []uint64, ids ...uint64) []uint64 {
		return slices.DeleteFunc(list, func(x uint64) bool { return slices.Contains(ids, x) })
	}
	if c.learn != 0 {
		conf.Learners = append(conf.Learners, c.learn)
	}
	conf.Learners = without(conf.Learners, append(slices.Clone(c.promote), c.remove...)...)
	conf.Voters = append(without(conf.Voters, append(slices.Clone(c.demote), c.remove...)...), c.promote...)
	conf.Learners = append(conf.Learners, c.demote...)
}

// Whatever the nodes do, the members of group 0 come to rest, and then every node that
// is not gone is one, few vote, nobody who must not does, and somebody votes always.
func TestPlanMetaComesToRest(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		nodes := []*kvdv1.NodeRecord{{NodeId: 1, Incarnation: 1, State: isActive}}
		conf := &raftpb.ConfState{Voters: []uint64{1}}
		for range 40 {
			switch n := nodes[rnd.IntN(len(nodes))]; rnd.IntN(3) {
			case 0:
				if len(nodes) < 12 {
					nodes = append(nodes, &kvdv1.NodeRecord{NodeId: uint64(len(nodes) + 1), Incarnation: 1, State: isJoining})
				}
			case 1:
				to := nodeMoves[n.GetState()]
				live := slices.DeleteFunc(slices.Clone(nodes), func(x *kvdv1.NodeRecord) bool { return x.GetState() != isActive })
				if len(to) > 0 && n.GetState() != isJoining && (len(live) > 1 || n.GetState() != isActive) {
					n.State = to[rnd.IntN(len(to))]
				}
			}
			steps := 0
			for ; ; steps++ {
				require.Less(t, steps, 50, "seed %d: no end", seed)
				c := planMeta(nodes, conf, healthy)
				if c.none() {
					break
				}
				require.NotContains(t, conf.GetVoters(), c.learn)
				if c.active != 0 {
					findNode(nodes, c.active).State = isActive
				}
				applyMeta(conf, c)
				require.NotEmpty(t, conf.GetVoters(), "seed %d", seed)
				require.LessOrEqual(t, len(conf.GetVoters()), maxMetaVoters)
			}
			able := 0
			for _, n := range nodes {
				id := n.GetNodeId()
				votes, learns := slices.Contains(conf.GetVoters(), id), slices.Contains(conf.GetLearners(), id)
				require.False(t, votes && learns, "seed %d: node %d", seed, id)
				if n.GetState() == isActive {
					able++
				}
				switch n.GetState() {
				case isGone:
					require.False(t, votes && len(conf.GetVoters()) > 1 || learns, "seed %d: node %d is gone", seed, id)
				case isDecommissioned:
					require.True(t, learns || votes && len(conf.GetVoters()) == 1, "seed %d: node %d", seed, id)
				default:
					require.True(t, votes || learns, "seed %d: node %d", seed, id)
				}
			}
			if able >= 3 {
				require.GreaterOrEqual(t, len(conf.GetVoters()), 3, "seed %d: %d nodes are able to vote", seed, able)
			}
		}
	}
}

func healthy(uint64) metaMember { return metaMember{live: true, caughtUp: true} }

// ahead sees all nodes alive, and some that have caught up.
func ahead(ids ...uint64) func(uint64) metaMember {
	return func(id uint64) metaMember { return metaMember{live: true, caughtUp: slices.Contains(ids, id)} }
}

// Nobody gets a vote who has not what is committed, nor becomes active.
func TestPlanMetaWaitsForLearners(t *testing.T) {
	nodes := []*kvdv1.NodeRecord{{NodeId: 1, State: isActive}, {NodeId: 2, State: isJoining}, {NodeId: 3, State: isActive}}
	conf := &raftpb.ConfState{Voters: []uint64{1}, Learners: []uint64{2, 3}}
	require.True(t, planMeta(nodes, conf, ahead()).none())
	require.Equal(t, uint64(2), planMeta(nodes, conf, ahead(2)).active)
	require.True(t, planMeta(nodes, conf, ahead(3)).none(), "a second voter alone helps nobody")
	nodes[1].State = isActive
	require.Equal(t, []uint64{2, 3}, planMeta(nodes, conf, healthy).promote)
	conf.VotersOutgoing = []uint64{1}
	require.True(t, planMeta(nodes, conf, healthy).none(), "one change at a time")
}
