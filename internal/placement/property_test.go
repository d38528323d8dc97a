package placement

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// domainsOf is the twin of spreadOf: it counts distinct names.
func (c *Cluster) domainsOf(ids []uint64) (zones, racks, hosts int) {
	z, r, h := map[string]bool{}, map[[2]string]bool{}, map[[4]string]bool{}
	for _, id := range ids {
		n := c.node(id)
		if n == nil {
			continue
		}
		z[n.Zone] = true
		r[[2]string{n.Zone, n.Rack}] = true
		own := ""
		if n.Host == "" {
			own = string(rune(id))
		}
		h[[4]string{n.Zone, n.Rack, n.Host, own}] = true
	}
	return len(z), len(r), len(h)
}

func (c *Cluster) inState(ids []uint64, states ...State) []uint64 {
	return slices.DeleteFunc(slices.Clone(ids), func(id uint64) bool {
		n := c.node(id)
		return n == nil && !slices.Contains(states, Dead) || n != nil && !slices.Contains(states, n.State)
	})
}

// staying are those that only the leaders leave.
func (c *Cluster) staying(ids []uint64) []uint64 {
	return slices.DeleteFunc(c.inState(ids, Draining), func(id uint64) bool { return !c.node(id).LeadersOnly })
}

// checkPlan checks what must hold of every plan, whatever the cluster.
func checkPlan(t *testing.T, c Cluster, l Limits, r Result) {
	fresh, learners := 0, 0
	at, coming := map[uint64]int{}, map[uint64]uint64{}
	shards := map[uint32]bool{}
	for _, m := range r.Moves {
		sh := c.shard(m.Shard)
		require.False(t, shards[m.Shard], "two moves of shard %d", m.Shard)
		shards[m.Shard] = true
		require.NotEmpty(t, m.Reason)
		alive := c.inState(sh.Voters, Active, Draining)
		require.Greater(t, 2*len(alive), len(sh.Voters), "%+v: without a quorum nothing can be changed", m)
		after := without(sh.Voters, m.Remove)
		if m.Add != 0 {
			n := c.node(m.Add)
			require.NotNil(t, n)
			require.Equal(t, Active, n.State, "%+v", m)
			require.NotContains(t, sh.Voters, m.Add, "%+v", m)
			after = append(after, m.Add)
		}
		if m.Remove != 0 {
			require.True(t, slices.Contains(sh.Voters, m.Remove) || slices.Contains(sh.Learners, m.Remove), "%+v", m)
		}
		aliveAfter := c.inState(after, Active, Draining)
		require.Greater(t, 2*len(aliveAfter), len(after), "%+v leaves no quorum of living voters", m)
		healthy := c.inState(sh.Voters, Active)
		require.GreaterOrEqual(t, len(c.inState(after, Active)), min(len(healthy), c.Replication), "%+v leaves fewer active voters", m)
		if m.Kind == Spread || m.Kind == Balance || m.Kind == Finish && len(healthy) == c.Replication {
			z0, r0, h0 := c.domainsOf(healthy)
			z1, r1, h1 := c.domainsOf(c.inState(after, Active))
			require.GreaterOrEqual(t, z1, z0, "%+v: fewer zones", m)
			require.GreaterOrEqual(t, r1, r0, "%+v: fewer racks", m)
			require.GreaterOrEqual(t, h1, h0, "%+v: fewer hosts", m)
		}
		if m.Kind == Repair || m.Kind == Drain { // no other node would have been a better place
			rest := append(c.inState(without(sh.Voters, m.Remove), Active), c.staying(without(sh.Voters, m.Remove))...)
			z1, r1, h1 := c.domainsOf(append(slices.Clone(rest), m.Add))
			for _, n := range c.Nodes {
				if n.State != Active || slices.Contains(rest, n.ID) || slices.Contains(sh.Learners, n.ID) || n.LimitBytes > 0 {
					continue
				}
				z2, r2, h2 := c.domainsOf(append(slices.Clone(rest), n.ID))
				require.LessOrEqual(t, cmp.Or(z2-z1, r2-r1, h2-h1), 0, "%+v: node %d would be a better place\n%s", m, n.ID, &c)
			}
		}
		if slices.Contains(c.staying(sh.Voters), m.Remove) {
			require.True(t, m.Kind == Finish || m.Kind == Surplus && len(healthy)+len(c.staying(sh.Voters)) > c.Replication, "%+v: that replica was to stay", m)
		}
		if m.Kind == Finish {
			learners++
		} else {
			fresh++
			for _, id := range []uint64{m.Add, m.Remove} {
				if n := c.node(id); n != nil && n.State != Dead {
					at[id]++
				}
			}
			if m.Add != 0 {
				coming[m.Add] += sh.Bytes
				if limit := c.node(m.Add).LimitBytes; limit > 0 {
					require.LessOrEqual(t, c.held()[m.Add].bytes+coming[m.Add], limit, "%+v: no room", m)
				}
			}
		}
	}
	if l.Moves > 0 && fresh > 0 {
		require.LessOrEqual(t, fresh+learners, l.Moves)
	}
	if l.MovesPerNode > 0 {
		for id, n := range at {
			require.LessOrEqual(t, n, l.MovesPerNode, "moves at node %d", id)
		}
	}
	if l.Transfers > 0 {
		require.LessOrEqual(t, len(r.Transfers), l.Transfers)
	}
	seen := map[uint32]bool{}
	for _, tr := range r.Transfers {
		sh := c.shard(tr.Shard)
		require.False(t, seen[tr.Shard], "two transfers of shard %d", tr.Shard)
		seen[tr.Shard] = true
		require.NotEmpty(t, tr.Reason)
		require.Equal(t, sh.Leader, tr.From)
		require.Contains(t, sh.Voters, tr.To)
		require.Equal(t, Active, c.node(tr.To).State, "%+v", tr)
		for _, m := range r.Moves {
			require.False(t, m.Shard == tr.Shard && m.Remove == tr.To, "%+v makes the replica leader that is about to go", tr)
		}
	}
}

// checkSettled checks what must hold where Plan has nothing more to do.
func checkSettled(t *testing.T, c Cluster, problems []string) {
	var active []uint64
	for _, n := range c.Nodes {
		if n.State == Active {
			active = append(active, n.ID)
		}
	}
	limited := slices.ContainsFunc(c.Nodes, func(n Node) bool { return n.LimitBytes > 0 })
	for _, sh := range c.Shards {
		alive := c.inState(sh.Voters, Active, Draining)
		if 2*len(alive) <= len(sh.Voters) {
			require.NotEmpty(t, problems, "a shard lost its quorum, and nobody says so\n%s", &c)
			continue
		}
		require.Empty(t, sh.Learners, "shard %d\n%s", sh.ID, &c)
		healthy := c.inState(sh.Voters, Active)
		if kept := c.staying(sh.Voters); len(active) >= c.Replication && !limited && len(kept) > 0 {
			require.Len(t, append(kept, healthy...), c.Replication, "shard %d\n%s", sh.ID, &c)
			require.Len(t, sh.Voters, c.Replication, "shard %d\n%s", sh.ID, &c)
		} else if len(active) >= c.Replication && !limited {
			require.Len(t, sh.Voters, c.Replication, "shard %d\n%s", sh.ID, &c)
			require.Len(t, healthy, c.Replication, "shard %d\n%s", sh.ID, &c)
			// The best spread that any set of nodes has.
			var best [3]int
			subsets(active, c.Replication, func(set []uint64) {
				z, r, h := c.domainsOf(set)
				if slices.Compare([]int{z, r, h}, best[:]) > 0 {
					best = [3]int{z, r, h}
				}
			})
			z, r, h := c.domainsOf(healthy)
			require.Equal(t, best, [3]int{z, r, h}, "spread of shard %d\n%s", sh.ID, &c)
		} else if len(healthy)+len(kept) < c.Replication {
			require.NotEmpty(t, problems, "shard %d has too few voters, and nobody says so\n%s", sh.ID, &c)
		}
		if n := c.node(sh.Leader); n != nil && n.State == Draining {
			require.Empty(t, healthy, "shard %d is led by a draining node\n%s", sh.ID, &c)
		}
	}
	checkLeaders(t, c)
}

// checkLeaders: no leader can go straight to another node and make things more even.
func checkLeaders(t *testing.T, c Cluster) {
	// Nobody knows who leads a shard without a quorum.
	c = c.clone()
	c.Shards = slices.DeleteFunc(c.Shards, func(sh Shard) bool {
		return 2*len(c.inState(sh.Voters, Active, Draining)) <= len(sh.Voters)
	})
	held := c.held()
	weight := func(n *Node) int { return int(max(n.Weight, 1)) }
	for _, sh := range c.Shards {
		from := c.node(sh.Leader)
		if from == nil || from.State != Active {
			continue
		}
		for _, id := range c.inState(sh.Voters, Active) {
			to := c.node(id)
			more, less := (2*held[id].leaders+1)*weight(from), (2*held[from.ID].leaders-1)*weight(to)
			require.GreaterOrEqual(t, more, less, "shard %d should be led by node %d and not %d\n%s", sh.ID, id, from.ID, &c)
		}
	}
}

func subsets(ids []uint64, k int, visit func([]uint64)) {
	var rec func(from int, set []uint64)
	rec = func(from int, set []uint64) {
		if len(set) == k {
			visit(set)
			return
		}
		for i := from; i < len(ids); i++ {
			rec(i+1, append(set[:len(set):len(set)], ids[i]))
		}
	}
	rec(0, nil)
}

func randomLimits(r *rand.Rand) Limits {
	return Limits{Moves: r.IntN(5), MovesPerNode: r.IntN(3), Transfers: r.IntN(4)}
}

// TestRandomClusters: from any state, in steps of any size of which some are not carried
// out, every plan keeps the rules, and the cluster comes to rest where it should.
func TestRandomClusters(t *testing.T) {
	for seed := range uint64(clusters(6000)) {
		walk(t, seed)
	}
}

func walk(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	c := random(r)
	var l Limits
	var plan Result
	defer func() {
		if t.Failed() {
			t.Logf("seed %d, limits %+v, plan %+v\n%s", seed, l, plan, &c)
		}
	}()
	for range 2000 {
		l = randomLimits(r)
		plan = Plan(c.clone(), l)
		checkPlan(t, c, l, plan)
		if plan.Empty() {
			checkSettled(t, c, plan.Problems)
			return
		}
		for _, tr := range plan.Transfers {
			if r.IntN(4) > 0 {
				apply(t, &c, Result{Transfers: []Transfer{tr}})
			}
		}
		for _, m := range plan.Moves {
			sh := c.shard(m.Shard)
			switch {
			case r.IntN(4) == 0: // fails
			case m.Add != 0 && !slices.Contains(sh.Learners, m.Add) && r.IntN(2) == 0: // half way
				sh.Learners = append(sh.Learners, m.Add)
			default:
				applyMove(t, &c, m)
			}
		}
	}
	t.Fatal("does not settle")
}

// TestOrderDoesNotMatter: neither of nodes, nor of shards, nor of replicas; and Plan
// changes nothing of what it is given.
func TestOrderDoesNotMatter(t *testing.T) {
	for seed := range uint64(clusters(2000)) {
		r := rand.New(rand.NewPCG(seed, 2))
		c := random(r)
		l := randomLimits(r)
		before := c.clone()
		want := Plan(c, l)
		require.Equal(t, before, c, "seed %d: the input was changed", seed)
		r.Shuffle(len(c.Nodes), func(i, j int) { c.Nodes[i], c.Nodes[j] = c.Nodes[j], c.Nodes[i] })
		r.Shuffle(len(c.Shards), func(i, j int) { c.Shards[i], c.Shards[j] = c.Shards[j], c.Shards[i] })
		for i := range c.Shards {
			v := c.Shards[i].Voters
			r.Shuffle(len(v), func(i, j int) { v[i], v[j] = v[j], v[i] })
		}
		require.Equal(t, want, Plan(c, l), "seed %d", seed)
	}
}

// TestHardlyBackAndForth: on the way to rest a replica hardly ever comes back to a node that
// it was moved from, or leaves one that it was moved to. In these small clusters, in which
// everything is wrong at once and a shard is a good part of a node, it is one move in 20.
func TestHardlyBackAndForth(t *testing.T) {
	again, total := 0, 0
	for seed := range uint64(clusters(3000)) {
		r := rand.New(rand.NewPCG(seed, 3))
		c := random(r)
		for i := range c.Shards {
			c.Shards[i].Learners = nil
		}
		type place struct {
			shard uint32
			node  uint64
		}
		added, removed := map[place]bool{}, map[place]bool{}
		for _, m := range settle(t, &c, Limits{Moves: 1 + r.IntN(4)}).Moves {
			total++
			if added[place{m.Shard, m.Remove}] || removed[place{m.Shard, m.Add}] {
				again++
			}
			added[place{m.Shard, m.Add}], removed[place{m.Shard, m.Remove}] = true, true
		}
	}
	t.Logf("%d of %d moves undid or redid an earlier one of the same shard", again, total)
	require.LessOrEqual(t, again*100, 6*total, "moves that were made twice: %d of %d", again, total)
}
