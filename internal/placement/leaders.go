package placement

import (
	"fmt"
	"slices"
	"strings"
)

// leading counts, for each node, the shards that it leads once the transfers chosen so far
// are done.
type leading []int

func (l leading) more(s *state, n int) float64 { return float64(2*l[n]+1) / s.nodes[n].weight } // cost of one more
func (l leading) less(s *state, n int) float64 { return float64(2*l[n]-1) / s.nodes[n].weight } // saved by one less

func (s *state) leaders() {
	leads := make(leading, len(s.nodes))
	for i := range s.shards {
		if l := s.shards[i].leader; l >= 0 {
			leads[l]++
		}
	}
	s.evacuateLeaders(leads)
	for s.mayTransfer() && s.shiftLeader(leads) {
	}
}

func (s *state) mayTransfer() bool {
	return s.limits.Transfers == 0 || len(s.transfers) < s.limits.Transfers
}

// transfer plans to make node to the leader.
func (s *state) transfer(leads leading, sh *shard, to int, format string, args ...any) {
	leads[sh.leader]--
	leads[to]++
	s.transfers = append(s.transfers, Transfer{Shard: sh.ID, From: s.nodes[sh.leader].ID, To: s.nodes[to].ID, Reason: fmt.Sprintf(format, args...)})
	sh.leader, sh.moving = to, true
}

// evacuateLeaders moves leaders off draining nodes and off replicas that are about to go.
// Where no other active voter is there, whoever carries the move out hands over to the
// replica that was added.
func (s *state) evacuateLeaders(leads leading) {
	leaves := map[uint32]uint64{}
	for _, m := range s.moves {
		leaves[m.Shard] = m.Remove
	}
	for i := range s.shards {
		sh := &s.shards[i]
		if sh.leader < 0 || !s.mayTransfer() {
			continue
		}
		from := &s.nodes[sh.leader]
		if from.State != Draining && leaves[sh.ID] != from.ID {
			continue
		}
		to := -1
		for _, n := range sh.active {
			if n != sh.leader && s.nodes[n].ID != leaves[sh.ID] && (to < 0 || leads.more(s, n) < leads.more(s, to)) {
				to = n
			}
		}
		switch {
		case to < 0:
		case from.State == Draining:
			s.transfer(leads, sh, to, "node %d is draining", from.ID)
		default:
			s.transfer(leads, sh, to, "the replica on node %d is about to go", from.ID)
		}
	}
}

// shiftLeader takes one leader from a fuller node to an emptier one, over others if it has
// to, and tells whether it found a way that pays. What saves most goes first, then what
// takes the fewest transfers.
func (s *state) shiftLeader(leads leading) bool {
	way := s.ways()
	var path []step
	first, saved := 0, gain
	for _, from := range s.actives {
		p := s.path(leads, way, from)
		if p == nil {
			continue
		}
		saves := leads.less(s, from) - leads.more(s, p[len(p)-1].to)
		if saves > saved+gain || saves > saved-gain && (path == nil || len(p) < len(path)) {
			path, first, saved = p, from, saves
		}
	}
	if path == nil {
		return false
	}
	last := path[len(path)-1].to
	was := [2]int{leads[first], leads[last]}
	for _, st := range path {
		if s.mayTransfer() {
			s.transfer(leads, st.shard, st.to, "node %d leads %s, node %d leads %s", s.nodes[first].ID, count(was[0], "shard"), s.nodes[last].ID, count(was[1], "shard"))
		}
	}
	return true
}

// step of a path: this shard's leader becomes node to.
type step struct {
	shard *shard
	to    int
}

// ways lists, for each node, a step to each node that one of its leaders could go to: of
// the shards that are not moved in this plan the one with the lowest id.
func (s *state) ways() [][]step {
	way := make([][]step, len(s.nodes))
	for i := range s.shards {
		sh := &s.shards[i]
		if sh.moving || sh.leader < 0 || s.nodes[sh.leader].State != Active {
			continue
		}
		for _, n := range sh.active {
			if n != sh.leader && !slices.ContainsFunc(way[sh.leader], func(st step) bool { return st.to == n }) {
				way[sh.leader] = append(way[sh.leader], step{sh, n})
			}
		}
	}
	return way
}

// path is the shortest way from a node to the one where a leader costs least, or nil where
// none saves anything.
func (s *state) path(leads leading, way [][]step, from int) []step {
	came := make([]step, len(s.nodes)) // the step by which a node was reached
	prev := make([]int, len(s.nodes))
	for i := range prev {
		prev[i] = -1
	}
	prev[from] = from
	queue, best := []int{from}, -1
	for len(queue) > 0 {
		n := queue[0]
		queue = queue[1:]
		for _, st := range way[n] {
			if prev[st.to] >= 0 {
				continue
			}
			prev[st.to], came[st.to] = n, st
			queue = append(queue, st.to)
			if leads.more(s, st.to) < leads.less(s, from)-gain && (best < 0 || leads.more(s, st.to) < leads.more(s, best)-gain) {
				best = st.to
			}
		}
	}
	if best < 0 {
		return nil
	}
	var path []step
	for n := best; n != from; n = prev[n] {
		path = append(path, came[n])
	}
	slices.Reverse(path)
	return path
}

// clusterProblems tells what the nodes as a whole do not allow.
func (s *state) clusterProblems() {
	places := slices.Clone(s.actives)
	for i := range s.nodes {
		if n := &s.nodes[i]; n.State == Draining && n.LeadersOnly {
			places = append(places, i)
		}
	}
	if len(places) < s.replication {
		var away []string
		for i := range s.nodes {
			if n := &s.nodes[i]; n.State != Active && !slices.Contains(places, i) {
				away = append(away, fmt.Sprintf("node %d is %s", n.ID, n.State))
			}
		}
		text := ""
		if len(away) > 0 {
			text = " (" + strings.Join(away, ", ") + ")"
		}
		s.problems = append(s.problems, fmt.Sprintf("replication %d wants %d active nodes, and there are %d%s: add nodes or lower the replication",
			s.replication, s.replication, len(places), text))
		return
	}
	s.zoneProblem(places)
}

// zoneProblem tells where the loss of one zone has to take the majority of a shard with
// it, if zones are in use. Places are the nodes that have replicas which stay.
func (s *state) zoneProblem(places []int) {
	size := map[string]int{} // nodes of each zone
	for _, n := range places {
		size[s.nodes[n].Zone]++
	}
	if _, none := size[""]; none && len(size) == 1 || s.replication == 1 {
		return
	}
	// One replica more to the zone with the fewest, for as long as there are any to give:
	// nothing spreads more evenly.
	placed := map[string]int{}
	most := 0
	for range s.replication {
		to, found := "", false
		for zone, room := range size {
			if placed[zone] < room && (!found || placed[zone] < placed[to]) {
				to, found = zone, true
			}
		}
		placed[to]++
		most = max(most, placed[to])
	}
	if s.replication-most > s.replication/2 {
		return
	}
	var names []string
	for zone := range size {
		if zone == "" {
			zone = "without a name"
		}
		names = append(names, zone)
	}
	slices.Sort(names)
	s.problems = append(s.problems, fmt.Sprintf("not enough zones: with active nodes in %d (%s) and replication %d, the loss of one zone can take the majority of a shard; add nodes in another zone",
		len(names), strings.Join(names, ", "), s.replication))
}
