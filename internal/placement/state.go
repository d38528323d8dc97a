package placement

import (
	"fmt"
	"slices"
	"strings"
)

// node is a Node with what it will hold once all moves chosen so far are done.
type node struct {
	Node
	weight           float64
	zone, rack, host int // numbers of the domains; a rack's is its zone's alone, a host's its rack's
	replicas         int
	bytes            float64
	peak             float64 // bytes, if all comes and nothing goes
	moves            int     // that it takes part in
}

// shard is a Shard by indexes of nodes, all of them active, draining or dead.
type shard struct {
	Shard
	active, draining, learners []int
	// staying are those on draining nodes that only the leaders leave.
	staying []int
	// dead are ids: there may be no node for them.
	dead   []uint64
	size   float64
	leader int  // index; -1: none that lives
	moving bool // has a move or a transfer in this plan
	taken  bool // gets no move, or no more, in this plan
}

// state of one run of Plan. Nodes and shards are in the order of their ids.
type state struct {
	nodes       []node
	shards      []shard
	replication int
	limits      Limits
	index       map[uint64]int // of nodes, by id
	actives     []int          // indexes of active nodes
	// Mean load of a weight of 1, if all replicas were on active nodes.
	meanReplicas, meanBytes float64

	moves     []Move
	transfers []Transfer
	problems  []string
}

func newState(c Cluster, l Limits) (*state, error) {
	if c.Replication < 1 {
		return nil, fmt.Errorf("replication is %d: want at least 1", c.Replication)
	}
	s := &state{replication: c.Replication, limits: l, index: map[uint64]int{}}
	if err := s.addNodes(c.Nodes); err != nil {
		return nil, err
	}
	if err := s.addShards(c.Shards); err != nil {
		return nil, err
	}
	s.measure()
	return s, nil
}

func (s *state) addNodes(nodes []Node) error {
	nodes = slices.Clone(nodes)
	slices.SortFunc(nodes, func(a, b Node) int { return compareIDs(a.ID, b.ID) })
	domains := map[string]int{}
	number := func(key string) int {
		if _, ok := domains[key]; !ok {
			domains[key] = len(domains)
		}
		return domains[key]
	}
	for i, n := range nodes {
		if n.ID == 0 {
			return fmt.Errorf("a node has the id 0: want ids from 1")
		}
		if i > 0 && nodes[i-1].ID == n.ID {
			return fmt.Errorf("node %d is listed twice", n.ID)
		}
		host := "named " + n.Host
		if n.Host == "" {
			host = fmt.Sprintf("of node %d", n.ID)
		}
		s.index[n.ID] = i
		s.nodes = append(s.nodes, node{
			Node: n, weight: float64(max(n.Weight, 1)),
			zone: number(fmt.Sprintf("%q", n.Zone)),
			rack: number(fmt.Sprintf("%q/%q", n.Zone, n.Rack)),
			host: number(fmt.Sprintf("%q/%q/%q", n.Zone, n.Rack, host)),
		})
		if n.State == Active {
			s.actives = append(s.actives, i)
		}
	}
	return nil
}

func (s *state) addShards(shards []Shard) error {
	shards = slices.Clone(shards)
	slices.SortFunc(shards, func(a, b Shard) int { return compareIDs(uint64(a.ID), uint64(b.ID)) })
	for i, in := range shards {
		if i > 0 && shards[i-1].ID == in.ID {
			return fmt.Errorf("shard %d is listed twice", in.ID)
		}
		sh := shard{Shard: in, size: float64(in.Bytes), leader: -1}
		seen := map[uint64]bool{}
		for j, id := range slices.Concat(in.Voters, in.Learners) {
			if seen[id] {
				return fmt.Errorf("shard %d has two replicas on node %d: there can be one", in.ID, id)
			}
			seen[id] = true
			n, known := s.index[id]
			switch {
			case j >= len(in.Voters):
				if known {
					sh.learners = append(sh.learners, n)
				} else {
					sh.learners = append(sh.learners, -1)
				}
			case !known || s.nodes[n].State == Dead:
				sh.dead = append(sh.dead, id)
			case s.nodes[n].State == Draining && s.nodes[n].LeadersOnly:
				sh.staying = append(sh.staying, n)
			case s.nodes[n].State == Draining:
				sh.draining = append(sh.draining, n)
			default:
				sh.active = append(sh.active, n)
			}
			if known {
				s.load(n, &sh, +1)
				if id == in.Leader && j < len(in.Voters) && s.nodes[n].State != Dead {
					sh.leader = n
				}
			}
		}
		slices.Sort(sh.active)
		slices.Sort(sh.draining)
		slices.Sort(sh.staying)
		slices.Sort(sh.dead)
		s.shards = append(s.shards, sh)
	}
	return nil
}

func compareIDs(a, b uint64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func (s *state) measure() {
	var weight, bytes float64
	for _, i := range s.actives {
		weight += s.nodes[i].weight
	}
	for i := range s.shards {
		bytes += s.shards[i].size
	}
	if weight > 0 {
		s.meanReplicas = float64(len(s.shards)*s.replication) / weight
		// Where all that there is hardly matters, neither does how it lies.
		s.meanBytes = max(bytes*float64(s.replication)/weight, ToleranceBytes/Tolerance)
	}
}

func (s *state) load(n int, sh *shard, by int) {
	s.nodes[n].replicas += by
	s.nodes[n].bytes += float64(by) * sh.size
	if by > 0 {
		s.nodes[n].peak += sh.size
	}
}

// cost of a node that held so much more.
func (s *state) cost(n *node, replicas int, bytes float64) float64 {
	r := float64(n.replicas+replicas) / (n.weight * s.meanReplicas)
	b := 0.0
	if s.meanBytes > 0 {
		b = (n.bytes + bytes) / (n.weight * s.meanBytes)
	}
	// The conversions keep a compiler from fusing: every machine is to plan the same.
	return n.weight * (float64(r*r) + float64(b*b))
}

// costOf giving the shard's replica to node n (by is 1) or taking it away (-1).
func (s *state) costOf(n int, sh *shard, by int) float64 {
	nd := &s.nodes[n]
	return s.cost(nd, by, float64(by)*sh.size) - s.cost(nd, 0, 0)
}

// quorum tells whether enough voters live to change anything.
func (sh *shard) quorum() bool {
	return sh.living() > len(sh.Voters)/2
}

func (sh *shard) living() int { return len(sh.active) + len(sh.draining) + len(sh.staying) }

// kept are the nodes whose replicas are not to go.
func (sh *shard) kept() []int {
	if len(sh.staying) == 0 {
		return sh.active
	}
	return slices.Concat(sh.active, sh.staying)
}

// room tells whether one more move may be planned, and busy which nodes may not take part
// in one.
func (s *state) room() bool { return s.limits.Moves == 0 || len(s.moves) < s.limits.Moves }

func (s *state) busy(n int) bool {
	return s.limits.MovesPerNode > 0 && s.nodes[n].moves >= s.limits.MovesPerNode
}

// fits tells whether a node's limit of bytes allows one more replica.
func (s *state) fits(n int, sh *shard) bool { return s.nodes[n].roomFor(sh.size) }

func (n *node) roomFor(bytes float64) bool {
	return n.LimitBytes == 0 || n.peak+bytes <= float64(n.LimitBytes)
}

// move plans a move. Add and remove are indexes of nodes, or below 0 for none; gone is the
// id of a replica that is removed from a node that does not live.
func (s *state) move(kind Kind, sh *shard, add, remove int, gone uint64, format string, args ...any) {
	m := Move{Shard: sh.ID, Kind: kind, Remove: gone, Reason: fmt.Sprintf(format, args...)}
	if add >= 0 {
		m.Add = s.nodes[add].ID
		s.nodes[add].moves++
		if !slices.Contains(sh.learners, add) { // a learner is counted already
			s.load(add, sh, +1)
		}
	}
	if n, known := s.index[gone]; known {
		s.load(n, sh, -1)
	}
	if remove >= 0 {
		m.Remove = s.nodes[remove].ID
		s.nodes[remove].moves++
		s.load(remove, sh, -1)
	}
	s.moves = append(s.moves, m)
	sh.moving, sh.taken = true, true
}

// name of a node for people: its id, and where it is if that is known.
func (s *state) name(n int) string {
	var where []string
	for _, d := range [...]struct{ kind, name string }{{"zone", s.nodes[n].Zone}, {"rack", s.nodes[n].Rack}, {"host", s.nodes[n].Host}} {
		if d.name != "" {
			where = append(where, d.kind+" "+d.name)
		}
	}
	if len(where) == 0 {
		return fmt.Sprintf("node %d", s.nodes[n].ID)
	}
	return fmt.Sprintf("node %d (%s)", s.nodes[n].ID, strings.Join(where, ", "))
}
