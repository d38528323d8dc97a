package placement

import (
	"cmp"
	"fmt"
	"slices"
)

// gain is how much lower, at least, the cost has to be for one choice to be better than
// another: more than what rounding makes, and less than what a replica makes.
const gain = 1e-9

// finish decides on learners: they are under way, so no limit stands in their way.
func (s *state) finish() {
	for i := range s.shards {
		sh := &s.shards[i]
		for j, n := range sh.learners {
			id := sh.Learners[j]
			switch {
			case sh.taken:
			case len(sh.Voters) == 0 || !sh.quorum(): // nothing can be changed
			case n < 0 || s.nodes[n].State == Dead:
				s.move(Finish, sh, -1, -1, id, "the learner on node %d is given up: the node is dead", id)
			case s.nodes[n].State == Draining:
				s.move(Finish, sh, -1, n, 0, "the learner on node %d is given up: the node is draining", id)
			default:
				s.finishLearner(sh, n)
			}
		}
	}
}

// finishLearner makes the learner on active node n a voter, in the place of the replica
// that is best to lose, or gives it up where no replica is worth losing for it.
func (s *state) finishLearner(sh *shard, n int) {
	id := s.nodes[n].ID
	if len(sh.active) < s.replication {
		remove, gone := s.leaving(sh, true)
		s.move(Finish, sh, n, remove, gone, "the learner on node %d becomes the voter that is missing", id)
		return
	}
	drop, best, bestCost := n, s.spreadOf(sh.active, -1, -1), s.costOf(n, sh, -1)
	for _, a := range sh.active {
		after, c := s.spreadOf(sh.active, a, n), s.costOf(a, sh, -1)
		if d := after.compare(best); len(sh.active) == s.replication && (d > 0 || d == 0 && c < bestCost-gain) {
			drop, best, bestCost = a, after, c
		}
	}
	if drop == n {
		s.move(Finish, sh, -1, n, 0, "the learner on node %d is given up: the voters are as good without it", id)
		return
	}
	s.move(Finish, sh, n, drop, 0, "the learner on node %d becomes a voter in place of the one on node %d", id, s.nodes[drop].ID)
}

// leaving is the replica that goes when an active one comes: a dead one by id, else a
// draining one by index, else one that may stay if there are others enough, else none
// (-1, 0). Of draining ones the leader goes last.
func (s *state) leaving(sh *shard, enough bool) (remove int, gone uint64) {
	if len(sh.dead) > 0 {
		return -1, sh.dead[0]
	}
	from := sh.draining
	if len(from) == 0 && enough {
		from = sh.staying
	}
	for _, n := range from {
		if n != sh.leader {
			return n, 0
		}
	}
	if len(from) > 0 {
		return from[0], 0
	}
	return -1, 0
}

// repair gives new replicas to shards whose voters are missing, dead or draining.
func (s *state) repair() {
	var lost, empty, full, blocked []*shard
	var todo []*shard
	for i := range s.shards {
		sh := &s.shards[i]
		switch {
		case sh.taken:
		case len(sh.Voters) == 0:
			sh.taken = true
			empty = append(empty, sh)
		case !sh.quorum():
			sh.taken, sh.leader = true, -1
			lost = append(lost, sh)
		case len(sh.active)+len(sh.staying) < s.replication:
			todo = append(todo, sh)
		}
	}
	// Those first that can lose the fewest voters; a shard with a voter that is missing or
	// dead can lose fewer than one whose voters are all there.
	spare := func(sh *shard) int { return sh.living() - (len(sh.Voters)/2 + 1) }
	slices.SortStableFunc(todo, func(a, b *shard) int { return spare(a) - spare(b) })
	for _, sh := range todo {
		add, candidates, cramped := s.destination(sh)
		switch {
		case candidates == 0 && cramped > 0:
			full = append(full, sh)
		case candidates == 0:
			blocked = append(blocked, sh)
		case add < 0 || !s.room(): // its turn comes
			sh.taken = true
		default:
			s.replace(sh, add)
		}
	}
	s.shardProblem(empty, "%s no replica anywhere: restore from a backup")
	s.shardProblem(lost, "%s lost the quorum, with the voters on dead nodes: bring one of those nodes back")
	s.shardProblem(full, "%s nowhere to put a replica: no active node without one has room for its bytes; add a node or memory")
	s.shardProblem(blocked, "%s nowhere to put a replica: every active node has one already; add a node or lower the replication")
}

// replace plans the move that gives node add a replica, in place of one that is to go.
func (s *state) replace(sh *shard, add int) {
	remove, gone := s.leaving(sh, false)
	if len(sh.Voters) < s.replication && gone == 0 {
		remove = -1 // a draining voter stays until there are enough
	}
	switch {
	case remove >= 0 && s.busy(remove): // its turn comes
		sh.taken = true
	case gone != 0:
		s.move(Repair, sh, add, -1, gone, "node %d is dead: its replica is made anew on %s", gone, s.name(add))
	case remove >= 0:
		s.move(Drain, sh, add, remove, 0, "node %d is draining: its replica goes to %s", s.nodes[remove].ID, s.name(add))
	default:
		s.move(Repair, sh, add, -1, 0, "the shard has %d of %d voters: one more on %s", len(sh.Voters), s.replication, s.name(add))
	}
}

// destination is the active node that should get a replica beside those that are kept: the
// one with the best spread, of those the one that costs least. It is -1 where all nodes
// with that spread take part in enough moves already. Candidates counts the nodes that could take it, and cramped
// those that lack the room.
func (s *state) destination(sh *shard) (add, candidates, cramped int) {
	add = -1
	var best spread
	var bestCost float64
	kept := sh.kept()
	for _, n := range s.actives {
		if slices.Contains(sh.active, n) || slices.Contains(sh.learners, n) {
			continue
		}
		if !s.fits(n, sh) {
			cramped++
			continue
		}
		candidates++
		after, c := s.spreadOf(kept, -1, n), s.costOf(n, sh, +1)
		switch d := after.compare(best); {
		case candidates == 1 || d > 0:
			best, add = after, -1
			fallthrough
		case d == 0 && (add < 0 || c < bestCost-gain):
			if !s.busy(n) {
				add, bestCost = n, c
			}
		}
	}
	return add, candidates, cramped
}

// surplus removes voters that are too many: dead ones, then those on draining nodes, then those
// whose loss costs least.
func (s *state) surplus() {
	for i := range s.shards {
		sh := &s.shards[i]
		if sh.taken || len(sh.Voters) <= s.replication || !s.room() {
			continue
		}
		remove, gone := s.leaving(sh, true)
		switch {
		case gone != 0:
			s.move(Surplus, sh, -1, -1, gone, "the shard has %d voters, %d are wanted, and node %d is dead", len(sh.Voters), s.replication, gone)
		case len(sh.active)+len(sh.staying) < s.replication: // the draining ones are still needed
		case remove >= 0:
			if !s.busy(remove) {
				s.move(Surplus, sh, -1, remove, 0, "the shard has %d voters, %d are wanted, and node %d is draining", len(sh.Voters), s.replication, s.nodes[remove].ID)
			}
		default:
			s.dropWorst(sh)
		}
	}
}

func (s *state) dropWorst(sh *shard) {
	drop := -1
	var best spread
	var bestCost float64
	for _, a := range sh.active {
		after, c := s.spreadOf(sh.active, a, -1), s.costOf(a, sh, -1)
		if d := after.compare(best); drop < 0 || d > 0 || d == 0 && c < bestCost-gain {
			drop, best, bestCost = a, after, c
		}
	}
	if !s.busy(drop) {
		s.move(Surplus, sh, -1, drop, 0, "the shard has %d voters, %d are wanted, and the one on %s is the easiest to spare", len(sh.Voters), s.replication, s.name(drop))
	}
}

// shardProblem says one sentence of all these shards; format begins with them.
func (s *state) shardProblem(shards []*shard, format string) {
	if len(shards) == 0 {
		return
	}
	slices.SortFunc(shards, func(a, b *shard) int { return cmp.Compare(a.ID, b.ID) })
	const most = 5
	who := "shard"
	if len(shards) > 1 {
		who = "shards"
	}
	for i, sh := range shards {
		switch {
		case i == most:
			who += fmt.Sprintf(" and %d more", len(shards)-most)
		case i > most:
		case i > 0:
			who += fmt.Sprintf(", %d", sh.ID)
		default:
			who += fmt.Sprintf(" %d", sh.ID)
		}
	}
	verb := " has"
	if len(shards) > 1 {
		verb = " have"
	}
	s.problems = append(s.problems, fmt.Sprintf(format, who+verb))
}
