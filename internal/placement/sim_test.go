package placement

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// apply carries one plan out at once, in the way that a cluster would: transfers, then
// moves; the leader of a shard that loses its leader's replica is one of those left.
func apply(t testing.TB, c *Cluster, r Result) {
	for _, tr := range r.Transfers {
		sh := c.shard(tr.Shard)
		require.Equal(t, sh.Leader, tr.From, "transfer of shard %d from a node that does not lead it", tr.Shard)
		require.Contains(t, sh.Voters, tr.To, "transfer of shard %d to a node that is no voter", tr.Shard)
		sh.Leader = tr.To
	}
	for _, m := range r.Moves {
		applyMove(t, c, m)
	}
}

func applyMove(t testing.TB, c *Cluster, m Move) {
	sh := c.shard(m.Shard)
	require.False(t, m.Add == 0 && m.Remove == 0, "an empty move")
	if m.Add != 0 {
		require.NotContains(t, sh.Voters, m.Add, "%+v: two replicas on one node", m)
		sh.Learners = without(sh.Learners, m.Add)
		sh.Voters = append(sh.Voters, m.Add)
	}
	if m.Remove != 0 {
		require.True(t, slices.Contains(sh.Voters, m.Remove) || slices.Contains(sh.Learners, m.Remove), "%+v removes what is not there", m)
		sh.Voters, sh.Learners = without(sh.Voters, m.Remove), without(sh.Learners, m.Remove)
	}
	if !slices.Contains(sh.Voters, sh.Leader) {
		sh.Leader = 0
		for _, v := range sh.Voters {
			if n := c.node(v); n != nil && n.State != Dead {
				sh.Leader = v
				break
			}
		}
	}
}

func without(ids []uint64, id uint64) []uint64 {
	return slices.DeleteFunc(slices.Clone(ids), func(x uint64) bool { return x == id })
}

func (c *Cluster) shard(id uint32) *Shard {
	for i := range c.Shards {
		if c.Shards[i].ID == id {
			return &c.Shards[i]
		}
	}
	return nil
}

func (c *Cluster) node(id uint64) *Node {
	for i := range c.Nodes {
		if c.Nodes[i].ID == id {
			return &c.Nodes[i]
		}
	}
	return nil
}

func (c *Cluster) clone() Cluster {
	out := *c
	out.Nodes = slices.Clone(c.Nodes)
	out.Shards = slices.Clone(c.Shards)
	for i := range out.Shards {
		out.Shards[i].Voters = slices.Clone(out.Shards[i].Voters)
		out.Shards[i].Learners = slices.Clone(out.Shards[i].Learners)
	}
	return out
}

// String is the cluster on few lines, for failures.
func (c *Cluster) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "replication %d\n", c.Replication)
	for _, n := range c.Nodes {
		fmt.Fprintf(&b, "node %d %s (leaders only: %v) zone %q rack %q host %q weight %d limit %d\n", n.ID, n.State, n.LeadersOnly, n.Zone, n.Rack, n.Host, n.Weight, n.LimitBytes)
	}
	for _, s := range c.Shards {
		fmt.Fprintf(&b, "shard %d voters %v learners %v leader %d, %d bytes\n", s.ID, s.Voters, s.Learners, s.Leader, s.Bytes)
	}
	return b.String()
}

// settle plans and applies until a plan is empty, and returns all moves and transfers. It
// fails where a cluster never settles.
func settle(t testing.TB, c *Cluster, l Limits) (all Result) {
	t.Helper()
	bound := 20 * (len(c.Shards)*c.Replication + len(c.Nodes) + 5)
	for range bound {
		r := Plan(*c, l)
		if r.Empty() {
			all.Problems = r.Problems
			return all
		}
		all.Moves = append(all.Moves, r.Moves...)
		all.Transfers = append(all.Transfers, r.Transfers...)
		apply(t, c, r)
	}
	t.Fatalf("no end after %d plans:\n%s", bound, c)
	return all
}

// evenly makes shards with the replicas dealt out in turn to the first nodes.
func evenly(shards, nodes, replication int, bytes uint64) Cluster {
	c := Cluster{Replication: replication}
	for i := range nodes {
		c.Nodes = append(c.Nodes, Node{ID: uint64(i + 1)})
	}
	for i := range shards {
		sh := Shard{ID: uint32(i + 1), Bytes: bytes}
		for j := range min(replication, nodes) {
			sh.Voters = append(sh.Voters, uint64((i+j)%nodes+1))
		}
		sh.Leader = sh.Voters[0]
		c.Shards = append(c.Shards, sh)
	}
	return c
}

// held is what a node has.
type held struct {
	replicas, leaders int
	bytes             uint64
}

func (c *Cluster) held() map[uint64]held {
	out := map[uint64]held{}
	for _, n := range c.Nodes {
		out[n.ID] = held{}
	}
	for _, s := range c.Shards {
		for _, v := range s.Voters {
			h := out[v]
			h.replicas++
			h.bytes += s.Bytes
			out[v] = h
		}
		h := out[s.Leader]
		h.leaders++
		out[s.Leader] = h
	}
	return out
}

// random draws a cluster; everything may be wrong with it that can be wrong with one.
func random(r *rand.Rand) Cluster {
	c := Cluster{Replication: []int{1, 3, 3, 3, 5}[r.IntN(5)]}
	nodes := 1 + r.IntN(9)
	zones, racks := r.IntN(4), r.IntN(3)
	for i := range nodes {
		n := Node{ID: uint64(i + 1), Weight: uint32(r.IntN(3))}
		if zones > 0 {
			n.Zone = fmt.Sprintf("z%d", r.IntN(zones))
		}
		if racks > 0 {
			n.Rack = fmt.Sprintf("r%d", r.IntN(racks))
		}
		if r.IntN(3) == 0 {
			n.Host = fmt.Sprintf("h%d", r.IntN(4))
		}
		if r.IntN(6) == 0 {
			n.State = State(1 + r.IntN(2))
			n.LeadersOnly = r.IntN(2) == 0
		}
		c.Nodes = append(c.Nodes, n)
	}
	mean := uint64(1) << r.IntN(30)
	for i := range r.IntN(24) {
		sh := Shard{ID: uint32(i + 1), Bytes: r.Uint64N(2 * mean)}
		for _, n := range r.Perm(nodes)[:min(nodes, c.Replication)] {
			sh.Voters = append(sh.Voters, uint64(n+1))
		}
		if r.IntN(4) == 0 { // too few, too many, a learner, an unknown node
			switch k := r.IntN(4); {
			case k == 0 && len(sh.Voters) > 1:
				sh.Voters = sh.Voters[1:]
			case k == 1:
				sh.Voters = append(sh.Voters, 1000+r.Uint64N(3))
			default:
				if id := uint64(1 + r.IntN(nodes)); !slices.Contains(sh.Voters, id) {
					if k == 2 {
						sh.Voters = append(sh.Voters, id)
					} else {
						sh.Learners = append(sh.Learners, id)
					}
				}
			}
		}
		if r.IntN(5) > 0 {
			sh.Leader = sh.Voters[r.IntN(len(sh.Voters))]
		}
		c.Shards = append(c.Shards, sh)
	}
	if r.IntN(4) == 0 { // limits that bind some
		for i := range c.Nodes {
			if r.IntN(2) == 0 {
				c.Nodes[i].LimitBytes = 1 + r.Uint64N(1+mean*uint64(len(c.Shards)))
			}
		}
	}
	return c
}
