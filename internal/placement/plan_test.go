package placement

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

const mib = 1 << 20

// zoned gives the nodes these zones, in turn.
func (c Cluster) zoned(zones ...string) Cluster {
	for i := range c.Nodes {
		c.Nodes[i].Zone = zones[i%len(zones)]
	}
	return c
}

func (c Cluster) with(nodes ...Node) Cluster {
	c.Nodes = append(slices.Clone(c.Nodes), nodes...)
	return c
}

func (c Cluster) state(id uint64, s State) Cluster {
	c.node(id).State = s
	return c
}

// requireEven: no node's replicas, leaders or bytes are further from the mean than a tenth
// of it, or than one replica where that is more.
func requireEven(t *testing.T, c Cluster) {
	t.Helper()
	held := c.held()
	var n, replicas, leaders, bytes, largest float64
	for _, nd := range c.Nodes {
		if nd.State == Active {
			n++
			replicas += float64(held[nd.ID].replicas)
			leaders += float64(held[nd.ID].leaders)
			bytes += float64(held[nd.ID].bytes)
		}
	}
	for _, sh := range c.Shards {
		largest = max(largest, float64(sh.Bytes))
	}
	for _, nd := range c.Nodes {
		if nd.State == Active {
			h := held[nd.ID]
			require.InDelta(t, replicas/n, h.replicas, max(1, replicas/n/10), "replicas of node %d\n%v", nd.ID, held)
			require.InDelta(t, leaders/n, h.leaders, max(1, leaders/n/10), "leaders of node %d\n%v", nd.ID, held)
			require.InDelta(t, bytes/n, h.bytes, max(largest, bytes/n/10), "bytes of node %d\n%v", nd.ID, held)
		}
	}
}

// fewest is a bound from below on the moves from one cluster to another: each makes one
// replica where there was none.
func fewest(from, to Cluster) (moves int) {
	a, b := from.held(), to.held()
	for id, h := range b {
		moves += max(0, h.replicas-a[id].replicas)
	}
	return moves
}

// TestGrow: a fourth node joins three with 128 shards. The least that has to move so that
// it is within a tenth of the others is counted by hand.
func TestGrow(t *testing.T) {
	for _, l := range []Limits{{}, {Moves: 1}, {Moves: 4, MovesPerNode: 2}} {
		c := evenly(128, 3, 3, 10*mib).with(Node{ID: 4})
		r := settle(t, &c, l)
		require.Empty(t, r.Problems)
		requireEven(t, c)
		// All 384 replicas evenly on four nodes: 96 each.
		require.LessOrEqual(t, len(r.Moves), 96)
		require.GreaterOrEqual(t, len(r.Moves), 87, "fewer can not bring the node to nine tenths of 96")
		for _, m := range r.Moves {
			require.EqualValues(t, 4, m.Add, "only the new node gets replicas: %+v", m)
			require.Equal(t, Balance, m.Kind)
		}
		require.LessOrEqual(t, len(r.Transfers), 43, "leaders: 128 over four nodes are 32 each, and the new one has none")
		require.True(t, Plan(c, l).Empty())
	}
}

// TestGrowUneven: shards of very different sizes.
func TestGrowUneven(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range clusters(50) {
		c := evenly(128, 3, 3, 0).with(Node{ID: 4})
		for i := range c.Shards {
			c.Shards[i].Bytes = 1 + r.Uint64N(32*mib)
		}
		start := c.clone()
		all := settle(t, &c, Limits{Moves: 4, MovesPerNode: 2})
		requireEven(t, c)
		require.LessOrEqual(t, len(all.Moves), fewest(start, c)+8, "moves beyond the fewest that lead from the one to the other")
	}
}

// TestEmptyCluster fills three nodes beside one that has everything.
func TestGrowFromOne(t *testing.T) {
	c := evenly(64, 1, 1, mib).with(Node{ID: 2}, Node{ID: 3})
	c.Replication = 3
	r := settle(t, &c, Limits{Moves: 5})
	require.Len(t, r.Moves, 128, "each shard gets two more voters")
	requireEven(t, c)
	require.Empty(t, r.Problems)
}

func TestZones(t *testing.T) {
	// All in zone a; then labels b and c come up with a node each.
	c := evenly(30, 3, 3, mib).zoned("a").with(Node{ID: 4, Zone: "b"}, Node{ID: 5, Zone: "c"})
	r := settle(t, &c, Limits{Moves: 3})
	for _, sh := range c.Shards {
		zones, _, _ := c.domainsOf(sh.Voters)
		require.Equal(t, 3, zones)
	}
	require.Len(t, r.Moves, 60, "two of three replicas of each shard")
	for _, m := range r.Moves {
		require.Equal(t, Spread, m.Kind, m.Reason)
	}
	// Within zone a the replicas are even.
	h := c.held()
	for id := uint64(1); id <= 3; id++ {
		require.Equal(t, 10, h[id].replicas, "node %d of %v", id, h)
	}
}

func TestRacksAndHosts(t *testing.T) {
	c := Cluster{Replication: 3, Nodes: []Node{
		{ID: 1, Zone: "a", Rack: "1", Host: "x"}, {ID: 2, Zone: "a", Rack: "1", Host: "x"},
		{ID: 3, Zone: "a", Rack: "1", Host: "y"}, {ID: 4, Zone: "a", Rack: "2", Host: "x"},
	}}
	c.Shards = []Shard{{ID: 1, Voters: []uint64{1, 2, 3}, Leader: 1}}
	r := settle(t, &c, Limits{})
	zones, racks, hosts := c.domainsOf(c.Shards[0].Voters)
	require.Equal(t, [3]int{1, 2, 3}, [3]int{zones, racks, hosts}, "the host x of rack 2 is another than that of rack 1")
	require.Len(t, r.Moves, 1)
	require.Len(t, r.Problems, 1)
	require.Contains(t, r.Problems[0], "not enough zones: with active nodes in 1 (a)")
}

// TestZonesAreNotLost: the fuller zone keeps its shards where the emptier one would mean
// fewer zones.
func TestZonesAreNotLost(t *testing.T) {
	c := evenly(40, 3, 3, mib).zoned("a", "b", "c").with(Node{ID: 4, Zone: "a"}, Node{ID: 5, Zone: "a"})
	settle(t, &c, Limits{})
	h := c.held()
	require.Equal(t, 40, h[2].replicas, "node 2 is all of zone b")
	require.Equal(t, 40, h[3].replicas, "node 3 is all of zone c")
	for _, id := range []uint64{1, 4, 5} {
		require.InDelta(t, 40.0/3, h[id].replicas, 1)
	}
}

// TestTwoInAZone: with five replicas in three zones none holds three of them.
func TestTwoInAZone(t *testing.T) {
	c := evenly(12, 9, 5, mib).zoned("a", "a", "a", "b", "b", "b", "c", "c", "c")
	for i := range c.Nodes {
		c.Nodes[i].Rack = fmt.Sprint(i) // racks do not tell
	}
	for i := range c.Shards {
		c.Shards[i].Voters = []uint64{1, 2, 3, 4, 7}
		c.Shards[i].Leader = 1
	}
	all := settle(t, &c, Limits{})
	require.Empty(t, all.Problems)
	for _, m := range all.Moves[:12] {
		require.Equal(t, Spread, m.Kind)
		require.Contains(t, m.Reason, "the replicas are spread more evenly over their domains then")
	}
	for _, sh := range c.Shards {
		in := map[string]int{}
		for _, v := range sh.Voters {
			in[c.node(v).Zone]++
		}
		for zone, n := range in {
			require.LessOrEqual(t, n, 2, "zone %s of %v", zone, sh.Voters)
		}
	}
	requireEven(t, c)
}

func TestDrain(t *testing.T) {
	c := evenly(60, 4, 3, mib).state(2, Draining)
	start := c.clone()
	replicas, leaders := Remaining(c, 2)
	require.Equal(t, [2]int{45, 15}, [2]int{replicas, leaders})
	first := Plan(c, Limits{Moves: 3, MovesPerNode: 3})
	require.Len(t, first.Moves, 3)
	require.GreaterOrEqual(t, len(first.Transfers), 15, "leaders go at once")
	for _, tr := range first.Transfers[:15] {
		require.EqualValues(t, 2, tr.From)
	}
	r := settle(t, &c, Limits{Moves: 3, MovesPerNode: 3})
	require.Empty(t, r.Problems)
	replicas, leaders = Remaining(c, 2)
	require.Zero(t, replicas)
	require.Zero(t, leaders)
	require.LessOrEqual(t, len(r.Moves), 45, "each of its replicas moves once, and no other")
	require.Equal(t, 45, fewest(start, c))
	for _, m := range r.Moves {
		require.Equal(t, Drain, m.Kind)
		require.EqualValues(t, 2, m.Remove)
	}
	requireEven(t, c)
}

func TestDead(t *testing.T) {
	c := evenly(60, 5, 3, mib).state(1, Dead)
	for i := range c.Shards { // others were elected
		if sh := &c.Shards[i]; sh.Leader == 1 {
			sh.Leader = sh.Voters[1]
		}
	}
	r := settle(t, &c, Limits{Moves: 8})
	require.Len(t, r.Moves, 36, "36 of 180 replicas were on the dead node")
	for _, m := range r.Moves {
		require.Equal(t, Repair, m.Kind)
		require.EqualValues(t, 1, m.Remove)
		require.Contains(t, m.Reason, "node 1 is dead")
	}
	requireEven(t, c)
	require.Empty(t, r.Problems)
	// Back as an empty node under its id: it gets its share.
	c = c.state(1, Active)
	r = settle(t, &c, Limits{Moves: 8})
	require.InDelta(t, 36, len(r.Moves), 4)
	requireEven(t, c)
}

// TestWorstFirst: with one move at a time, the shard that can not lose another voter is
// repaired first, and repair comes before drain.
func TestWorstFirst(t *testing.T) {
	c := Cluster{Replication: 3}
	for id := uint64(1); id <= 7; id++ {
		c.Nodes = append(c.Nodes, Node{ID: id})
	}
	c = c.state(1, Dead).state(2, Draining)
	c.Shards = []Shard{
		{ID: 1, Voters: []uint64{2, 3, 4}, Leader: 3},       // one of the others may go
		{ID: 2, Voters: []uint64{1, 3, 4, 5, 6}, Leader: 3}, // has enough without the dead one
		{ID: 3, Voters: []uint64{3, 4}, Leader: 3},          // can lose none
		{ID: 4, Voters: []uint64{1, 5, 6}, Leader: 5},       // can lose none
	}
	var order []string
	for range 10 {
		r := Plan(c, Limits{Moves: 1})
		if len(r.Moves) == 0 {
			break
		}
		order = append(order, fmt.Sprintf("%d %v", r.Moves[0].Shard, r.Moves[0].Kind))
		apply(t, &c, r)
	}
	require.Equal(t, []string{"3 repair", "4 repair", "1 drain", "2 surplus", "2 surplus"}, order[:5])
}

// TestAllSizes: replication 1, 3 and 5 on one to seven nodes.
func TestAllSizes(t *testing.T) {
	for _, replication := range []int{1, 3, 5} {
		for nodes := 1; nodes <= 7; nodes++ {
			t.Run(fmt.Sprintf("%d of %d", replication, nodes), func(t *testing.T) {
				c := evenly(35, 1, 1, mib)
				c.Replication = replication
				for id := 2; id <= nodes; id++ {
					c.Nodes = append(c.Nodes, Node{ID: uint64(id)})
				}
				r := settle(t, &c, Limits{Moves: 6, MovesPerNode: 3})
				requireEven(t, c)
				for _, sh := range c.Shards {
					require.Len(t, sh.Voters, min(nodes, replication))
				}
				if nodes >= replication {
					require.Empty(t, r.Problems)
				} else {
					require.Len(t, r.Problems, 2)
					require.Equal(t, "shards 1, 2, 3, 4, 5 and 30 more have nowhere to put a replica: every active node has one already; add a node or lower the replication", r.Problems[0])
					require.Equal(t, fmt.Sprintf("replication %d wants %d active nodes, and there are %d: add nodes or lower the replication", replication, replication, nodes), r.Problems[1])
				}
			})
		}
	}
}

// TestReplicationChange: up and down again.
func TestReplicationChange(t *testing.T) {
	c := evenly(50, 5, 3, mib)
	c.Replication = 5
	r := settle(t, &c, Limits{})
	require.Len(t, r.Moves, 100)
	c.Replication = 3
	r = settle(t, &c, Limits{})
	require.Len(t, r.Moves, 100)
	for _, m := range r.Moves {
		require.Equal(t, Surplus, m.Kind)
	}
	requireEven(t, c)
}

func TestLastReplica(t *testing.T) {
	c := evenly(1, 1, 1, mib).state(1, Draining)
	r := Plan(c, Limits{})
	require.True(t, r.Empty(), "%+v", r)
	require.Len(t, r.Problems, 2)
	require.Equal(t, "shard 1 has nowhere to put a replica: every active node has one already; add a node or lower the replication", r.Problems[0])
	require.Equal(t, "replication 1 wants 1 active nodes, and there are 0 (node 1 is draining): add nodes or lower the replication", r.Problems[1])

	// With another node it goes there, whole, before it is removed.
	c = c.with(Node{ID: 2})
	r = Plan(c, Limits{})
	require.Equal(t, []Move{{Shard: 1, Add: 2, Remove: 1, Kind: Drain, Reason: "node 1 is draining: its replica goes to node 2"}}, r.Moves)
	require.Empty(t, r.Transfers, "there is nobody to hand over to before the move")

	// Its node is dead: nothing can be done.
	c = c.state(1, Dead)
	r = Plan(c, Limits{})
	require.True(t, r.Empty())
	require.Equal(t, []string{"shard 1 has lost the quorum, with the voters on dead nodes: bring one of those nodes back"}, r.Problems)
}

func TestDrainWithoutRoom(t *testing.T) {
	c := evenly(3, 3, 3, mib).state(3, Draining)
	r := Plan(c, Limits{})
	require.Empty(t, r.Moves)
	require.Len(t, r.Transfers, 1, "leaders may go nevertheless")
	require.Len(t, r.Problems, 2)
	require.Equal(t, "replication 3 wants 3 active nodes, and there are 2 (node 3 is draining): add nodes or lower the replication", r.Problems[1])

	// A fourth node without the room.
	c = c.with(Node{ID: 4, LimitBytes: mib})
	r = Plan(c, Limits{})
	require.Len(t, r.Moves, 1)
	require.Equal(t, []string{"shards 2, 3 have nowhere to put a replica: no active node without one has room for its bytes; add a node or memory"}, r.Problems)
}

// TestUnderWay: a learner is finished, in the place of the replica that it is best to lose,
// or given up.
func TestUnderWay(t *testing.T) {
	base := func() Cluster { return evenly(12, 3, 3, mib).with(Node{ID: 4}) }
	for _, test := range []struct {
		name   string
		edit   func(*Cluster)
		add    uint64
		remove uint64
		reason string
	}{
		{"pays", func(c *Cluster) {}, 4, 1, "in place of the one on node"},
		{"missing voter", func(c *Cluster) { c.Shards[0].Voters = []uint64{1, 2} }, 4, 0, "the voter that is missing"},
		{"dead voter", func(c *Cluster) { *c = c.state(2, Dead) }, 4, 2, "the voter that is missing"},
		{"draining voter", func(c *Cluster) { *c = c.state(3, Draining) }, 4, 3, "the voter that is missing"},
		{"its node died", func(c *Cluster) { *c = c.state(4, Dead) }, 0, 4, "given up: the node is dead"},
		{"its node drains", func(c *Cluster) { *c = c.state(4, Draining) }, 0, 4, "given up: the node is draining"},
		{"its node is gone", func(c *Cluster) { c.Nodes = c.Nodes[:3] }, 0, 4, "given up: the node is dead"},
		{"of no use", func(c *Cluster) {
			for i := 1; i < 12; i++ { // node 4 has more than the others without it
				c.Shards[i].Voters = []uint64{4, 1 + uint64(i)%3, 1 + uint64(i+1)%3}
			}
		}, 0, 4, "as good without it"},
		{"enough voters", func(c *Cluster) {
			*c = c.with(Node{ID: 5})
			c.Shards[0].Voters = []uint64{1, 2, 3, 5}
		}, 0, 4, "as good without it"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := base()
			c.Shards[0].Learners = []uint64{4}
			test.edit(&c)
			r := Plan(c, Limits{Moves: 1})
			require.Len(t, r.Moves, 1)
			m := r.Moves[0]
			require.Equal(t, Finish, m.Kind)
			require.Equal(t, [2]uint64{test.add, test.remove}, [2]uint64{m.Add, m.Remove}, m.Reason)
			require.Contains(t, m.Reason, test.reason)
			settle(t, &c, Limits{})
		})
	}
}

// TestLearnersCountOnce: what is under way to a node is not sent there twice.
func TestLearnersCountOnce(t *testing.T) {
	for _, learners := range []int{0, 10, 40} {
		c := evenly(128, 3, 3, mib).with(Node{ID: 4})
		for i := range learners {
			c.Shards[i].Learners = []uint64{4}
		}
		require.Len(t, Plan(c, Limits{}).Moves, 93)
	}
}

// TestLeaderGoesLast: of two draining replicas the one that does not lead goes first, and
// the leader hands over to an active one.
func TestLeaderGoesLast(t *testing.T) {
	for _, leader := range []uint64{1, 2} {
		c := Cluster{Replication: 3, Nodes: []Node{{ID: 1, State: Draining}, {ID: 2, State: Draining}, {ID: 3}, {ID: 4}, {ID: 5}},
			Shards: []Shard{{ID: 1, Voters: []uint64{1, 2, 3}, Leader: leader}}}
		r := Plan(c, Limits{Transfers: 1})
		require.Equal(t, 3-leader, r.Moves[0].Remove)
		require.Equal(t, []Transfer{{Shard: 1, From: leader, To: 3, Reason: fmt.Sprintf("node %d is draining", leader)}}, r.Transfers)
	}
	// Not to the replica that is about to go.
	c := Cluster{Replication: 1, Nodes: []Node{{ID: 1, State: Draining}, {ID: 2}, {ID: 3}},
		Shards: []Shard{{ID: 1, Voters: []uint64{1, 2}, Learners: []uint64{3}, Leader: 1}, {ID: 2, Voters: []uint64{2}, Leader: 2}}}
	r := Plan(c, Limits{})
	require.Len(t, r.Moves, 1)
	require.EqualValues(t, 2, r.Moves[0].Remove, r.Moves[0].Reason)
	require.Empty(t, r.Transfers)
	settle(t, &c, Limits{})
	require.Equal(t, []uint64{3}, c.Shards[0].Voters)
}

// TestLeaders: balanced over other nodes where there is no straight way.
func TestLeaders(t *testing.T) {
	c := Cluster{Replication: 2}
	for id := uint64(1); id <= 4; id++ {
		c.Nodes = append(c.Nodes, Node{ID: id, Zone: fmt.Sprint(id)})
	}
	// A chain: 1-2, 2-3, 3-4, so that a leader of node 1 can reach node 4 over the others
	// only. Each node leads one more than its neighbour, so no single step helps.
	add := func(n int, voters ...uint64) {
		for range n {
			c.Shards = append(c.Shards, Shard{ID: uint32(len(c.Shards) + 1), Voters: voters, Leader: voters[0]})
		}
	}
	add(4, 1, 2)
	add(3, 2, 3)
	add(2, 3, 4)
	add(1, 4, 3)
	r := settleLeaders(t, &c)
	held := c.held()
	for id := uint64(1); id <= 4; id++ {
		require.InDelta(t, 2.5, held[id].leaders, 0.5, "node %d of %v", id, held)
	}
	require.Len(t, r, 3, "one step each of the way from node 1 to node 4")
}

// settleLeaders applies transfers only.
func settleLeaders(t *testing.T, c *Cluster) (all []Transfer) {
	for range 100 {
		r := Plan(*c, Limits{Transfers: 1})
		if len(r.Transfers) == 0 {
			return all
		}
		all = append(all, r.Transfers...)
		apply(t, c, Result{Transfers: r.Transfers})
	}
	t.Fatal("leaders go on forever")
	return nil
}

// TestExchange: where no single move helps, two replicas change places, if both may move
// at once.
func TestExchange(t *testing.T) {
	c := evenly(4, 2, 1, 400*mib)
	c.Shards[0].Bytes, c.Shards[2].Bytes = 600*mib, 600*mib // 1200 MiB on node 1, 800 MiB on node 2
	for _, l := range []Limits{{Moves: 1}, {MovesPerNode: 1}} {
		require.Empty(t, Plan(c, l).Moves)
	}
	r := Plan(c, Limits{Moves: 2, MovesPerNode: 2})
	require.Len(t, r.Moves, 2)
	require.Equal(t, "shards 1 and 2 change places, for node 2 (2 replicas, 800 MiB) has fewer bytes than node 1 (2 replicas, 1.2 GiB)", r.Moves[0].Reason)
	settle(t, &c, Limits{})
	require.Equal(t, c.held()[1].bytes, c.held()[2].bytes)

	// Not worth two moves: it would only be a quarter better.
	c = evenly(4, 2, 1, 0)
	c.Shards[0].Bytes, c.Shards[1].Bytes, c.Shards[2].Bytes, c.Shards[3].Bytes = 100*mib, 99*mib, 100*mib, 60*mib
	require.Empty(t, Plan(c, Limits{}).Moves)
}

func TestWeights(t *testing.T) {
	c := evenly(120, 4, 3, mib).with(Node{ID: 5, Weight: 2})
	settle(t, &c, Limits{})
	h := c.held()
	for id := uint64(1); id <= 4; id++ {
		require.InDelta(t, 60, h[id].replicas, 6, "node %d of %v", id, h)
		require.InDelta(t, 20, h[id].leaders, 2, "node %d of %v", id, h)
	}
	require.InDelta(t, 120, h[5].replicas, 12)
	require.InDelta(t, 40, h[5].leaders, 4)
}

// TestDrift: shards that grow and shrink a little move nothing.
func TestDrift(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	c := evenly(128, 4, 3, 100*mib)
	require.True(t, Plan(c, Limits{}).Empty())
	for range 100 {
		for i := range c.Shards {
			c.Shards[i].Bytes = 90*mib + r.Uint64N(20*mib)
		}
		require.True(t, Plan(c, Limits{}).Empty())
	}
}

// TestFewBytes: bytes that are too few to matter move nothing, however they are spread and
// whatever becomes of them, and do not keep replicas from being even by number.
func TestFewBytes(t *testing.T) {
	c := evenly(4, 2, 1, 1*mib)
	c.Shards[0].Bytes, c.Shards[2].Bytes = 30*mib, 30*mib // 60 MiB on node 1, 2 MiB on node 2
	require.True(t, Plan(c, Limits{}).Empty(), "they differ by 58 MiB")
	c.Shards[0].Bytes, c.Shards[2].Bytes = 40*mib, 40*mib
	require.NotEmpty(t, Plan(c, Limits{}).Moves, "they differ by 78 MiB")
	c = evenly(4, 2, 1, 1000*mib)
	c.Shards[0].Bytes, c.Shards[2].Bytes = 1050*mib, 1050*mib
	require.True(t, Plan(c, Limits{}).Empty(), "100 MiB are less than 15 %% of 2050 MiB")

	for seed := range uint64(clusters(2000)) {
		r := rand.New(rand.NewPCG(seed, 6))
		c := random(r)
		draw := func() {
			for i := range c.Shards {
				c.Shards[i].Bytes = r.Uint64N(mib / 2)
			}
		}
		for i := range c.Nodes {
			c.Nodes[i].LimitBytes = 0
		}
		draw()
		settle(t, &c, Limits{Moves: 1 + r.IntN(4)})
		for range 10 {
			draw()
			require.Empty(t, Plan(c, Limits{}).Moves, "seed %d\n%s", seed, &c)
		}
	}
}

// TestLeadersOnly: a node that is drained of its leaders alone keeps its replicas, and no
// problem is told of it; what is wrong otherwise is mended around it.
func TestLeadersOnly(t *testing.T) {
	only := func(c Cluster, id uint64) Cluster {
		c.node(id).State, c.node(id).LeadersOnly = Draining, true
		return c
	}
	for _, nodes := range []int{3, 4} {
		c := only(evenly(12, nodes, 3, mib), 3)
		r := settle(t, &c, Limits{})
		require.Empty(t, r.Moves, "%d nodes", nodes)
		require.Empty(t, r.Problems, "%d nodes", nodes)
		require.Zero(t, c.held()[3].leaders)
	}
	// Another one dies: its replicas go elsewhere, and not to the node that is back soon.
	c := only(evenly(12, 5, 3, mib), 3).state(2, Dead)
	r := settle(t, &c, Limits{Moves: 2})
	require.Empty(t, r.Problems)
	for _, m := range r.Moves {
		require.Equal(t, Repair, m.Kind)
		require.EqualValues(t, 2, m.Remove)
		require.NotEqual(t, uint64(3), m.Add)
	}
	require.NotEmpty(t, r.Moves)
	// With none to go to, that is told, and of the dead one alone.
	c = only(evenly(3, 3, 3, mib), 3).state(2, Dead)
	require.Equal(t, []string{
		"shards 1, 2, 3 have nowhere to put a replica: every active node has one already; add a node or lower the replication",
		"replication 3 wants 3 active nodes, and there are 2 (node 2 is dead): add nodes or lower the replication",
	}, Plan(c, Limits{}).Problems)
}

func TestBadInput(t *testing.T) {
	for _, test := range []struct {
		name string
		edit func(*Cluster)
		want string
	}{
		{"replication 0", func(c *Cluster) { c.Replication = 0 }, "replication is 0: want at least 1"},
		{"node 0", func(c *Cluster) { c.Nodes[0].ID = 0 }, "a node has the id 0: want ids from 1"},
		{"node twice", func(c *Cluster) { c.Nodes[0].ID = 2 }, "node 2 is listed twice"},
		{"shard twice", func(c *Cluster) { c.Shards[0].ID = 2 }, "shard 2 is listed twice"},
		{"two replicas on a node", func(c *Cluster) { c.Shards[0].Voters = []uint64{1, 1, 2} }, "shard 1 has two replicas on node 1: there can be one"},
		{"learner and voter", func(c *Cluster) { c.Shards[0].Learners = []uint64{2} }, "shard 1 has two replicas on node 2: there can be one"},
		{"no replica", func(c *Cluster) { c.Shards[0].Voters = nil }, "shard 1 has no replica anywhere: restore from a backup"},
		{"nothing at all", func(c *Cluster) { *c = Cluster{Replication: 3} }, "replication 3 wants 3 active nodes, and there are 0: add nodes or lower the replication"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := evenly(4, 3, 3, mib)
			test.edit(&c)
			r := Plan(c, Limits{})
			require.Empty(t, r.Moves)
			require.Equal(t, []string{test.want}, r.Problems)
		})
	}
}

// TestReasons: every move tells why, in words that name the nodes.
func TestReasons(t *testing.T) {
	c := evenly(6, 3, 3, 512*mib).zoned("a", "b", "c").with(Node{ID: 4, Zone: "a"})
	r := Plan(c, Limits{Moves: 1})
	require.Len(t, r.Moves, 1)
	require.Equal(t, "node 4 (0 replicas, 0 B) is emptier than node 1 (6 replicas, 3.0 GiB)", r.Moves[0].Reason)

	c = evenly(6, 3, 3, mib).zoned("a", "a", "b").with(Node{ID: 4, Zone: "c"})
	r = Plan(c, Limits{Moves: 1})
	require.Len(t, r.Moves, 1)
	require.Equal(t, "node 4 (zone c) instead of node 2 (zone a): the replicas are in 3 zones then, not in 2", r.Moves[0].Reason)
}

// BenchmarkPlan at the largest number of shards: one step of growth.
func BenchmarkPlan(b *testing.B) {
	c := evenly(4095, 30, 3, mib).with(Node{ID: 31})
	for b.Loop() {
		if len(Plan(c, Limits{Moves: 8}).Moves) != 8 {
			b.Fatal("no moves")
		}
	}
}

// TestEvenFromAnywhere: from replicas strewn at random to even ones, with about as few
// moves as that takes.
func TestEvenFromAnywhere(t *testing.T) {
	moved, least := 0, 0
	for seed := range uint64(clusters(100)) {
		r := rand.New(rand.NewPCG(seed, 5))
		nodes := 4 + r.IntN(6)
		c := evenly(64+r.IntN(64), nodes, []int{1, 3}[r.IntN(2)], 0)
		skew := 1 + r.IntN(3) // the first nodes have more
		for i := range c.Shards {
			sh := &c.Shards[i]
			sh.Bytes = 1 + r.Uint64N(64*mib)
			sh.Voters = nil
			for len(sh.Voters) < c.Replication {
				id := uint64(nodes)
				for range skew {
					id = min(id, 1+r.Uint64N(uint64(nodes)))
				}
				if !slices.Contains(sh.Voters, id) {
					sh.Voters = append(sh.Voters, id)
				}
			}
			sh.Leader = sh.Voters[0]
		}
		start := c.clone()
		all := settle(t, &c, Limits{Moves: 4})
		requireEven(t, c)
		moved += len(all.Moves)
		least += fewest(start, c)
	}
	t.Logf("%d moves, and %d is the least", moved, least)
	require.LessOrEqual(t, moved*10, least*12, "moves, against a bound from below on them")
}
