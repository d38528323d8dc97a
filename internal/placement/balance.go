package placement

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/dustin/go-humanize"
)

// healthy shards have just the voters that they should have; only those are moved for the
// sake of spread and balance.
func (s *state) healthy(sh *shard) bool {
	return !sh.taken && len(sh.active) == s.replication && len(sh.Voters) == s.replication
}

// swap is a move of the replica on node from to node to.
type swap struct {
	shard    *shard
	from, to int
	cost     float64 // how much dearer the cluster gets
}

// better tells whether a is to be preferred over b, all else being equal: by cost, then a
// replica that does not lead. What was found first stays otherwise.
func (a swap) better(b swap) bool {
	if a.cost < b.cost-gain || a.cost > b.cost+gain {
		return a.cost < b.cost
	}
	return a.from != a.shard.leader && b.from == b.shard.leader
}

// improveSpread moves replicas to other failure domains where that is better.
func (s *state) improveSpread() {
	for i := range s.shards {
		sh := &s.shards[i]
		if !s.healthy(sh) {
			continue
		}
		now := s.spreadOf(sh.active, -1, -1)
		if now.zones == len(sh.active) { // it can not be better
			continue
		}
		best, choice, found := now, swap{}, false
		for _, a := range sh.active {
			for _, b := range s.actives {
				if slices.Contains(sh.active, b) || slices.Contains(sh.learners, b) || !s.fits(b, sh) {
					continue
				}
				after := s.spreadOf(sh.active, a, b)
				d := after.compare(best)
				if d < 0 || after.compare(now) <= 0 {
					continue
				}
				c := swap{sh, a, b, s.costOf(a, sh, -1) + s.costOf(b, sh, +1)}
				if d > 0 {
					best, found = after, false
				}
				if !s.busy(a) && !s.busy(b) && (!found || c.better(choice)) {
					choice, found = c, true
				}
			}
		}
		switch {
		case found && s.room():
			s.move(Spread, sh, choice.to, choice.from, 0, "%s instead of %s: %s", s.name(choice.to), s.name(choice.from), best.since(now))
		case best != now:
			sh.taken = true // its turn comes
		}
	}
}

// since tells people what is better about a spread than it was before.
func (a spread) since(was spread) string {
	for _, d := range [...]struct {
		now, was int
		name     string
	}{{a.zones, was.zones, "zone"}, {a.racks, was.racks, "rack"}, {a.hosts, was.hosts, "host"}} {
		if d.now != d.was {
			return fmt.Sprintf("the replicas are in %s then, not in %d", count(d.now, d.name), d.was)
		}
	}
	return "the replicas are spread more evenly over their domains then"
}

// count of things, in words.
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// apart tells how many more bytes node a has than b, for each weight of 1, and whether it
// is more than this fraction of their mean, and enough to matter.
func apart(a, b *node, fraction float64) (more float64, far bool) {
	n, m := a.bytes/a.weight, b.bytes/b.weight
	return n - m, n-m > max(fraction*(n+m)/2, ToleranceBytes)
}

// balance moves replicas from fuller nodes to emptier ones, the best move first, until
// no move pays; and where a move of one does not, it exchanges two.
func (s *state) balance() {
	for s.room() {
		if best := s.bestMove(); best.shard != nil {
			s.move(Balance, best.shard, best.to, best.from, 0, "%s is emptier than %s", s.fill(best.to), s.fill(best.from))
		} else if !s.exchange() {
			return
		}
	}
}

// bestMove has no shard where no move pays.
func (s *state) bestMove() (best swap) {
	for i := range s.shards {
		sh := &s.shards[i]
		if !s.healthy(sh) {
			continue
		}
		for _, a := range sh.active {
			if s.busy(a) {
				continue
			}
			out := s.costOf(a, sh, -1)
			for _, b := range s.actives {
				if c := (swap{sh, a, b, out + s.costOf(b, sh, +1)}); c.cost < -gain && (best.shard == nil || c.better(best)) && s.allowed(c) {
					best = c
				}
			}
		}
	}
	return best
}

// exchange gives a larger replica of a fuller node for a smaller one of an emptier node:
// with few shards a node, numbers can be even and bytes not. Two moves are dear, so the
// nodes have to be apart by three times the fraction that does for one, and at least half of
// that must go.
// It is done only where the limits allow both at once, for one alone may make things worse.
func (s *state) exchange() bool {
	l := s.limits
	if l.Moves > 0 && len(s.moves)+2 > l.Moves {
		return false
	}
	var there, back swap
	for _, a := range s.actives {
		for _, b := range s.actives {
			na, nb := &s.nodes[a], &s.nodes[b]
			more, far := apart(na, nb, 3*Tolerance)
			if !far || l.MovesPerNode > 0 && max(na.moves, nb.moves)+2 > l.MovesPerNode {
				continue
			}
			small := s.givable(b, a)
			for _, x := range s.givable(a, b) {
				for _, y := range small {
					if y.size >= x.size {
						break // the others are larger
					}
					d := x.size - y.size
					cost := s.cost(na, 0, -d) - s.cost(na, 0, 0) + s.cost(nb, 0, d) - s.cost(nb, 0, 0)
					left := math.Abs(more - d/na.weight - d/nb.weight)
					if cost < min(there.cost, 0)-gain && left <= more/2 && nb.roomFor(x.size) && na.roomFor(y.size) {
						there, back = swap{x, a, b, cost}, swap{y, b, a, 0}
					}
				}
			}
		}
	}
	if there.shard == nil {
		return false
	}
	fuller, emptier := s.fill(there.from), s.fill(there.to)
	for _, c := range []swap{there, back} {
		s.move(Balance, c.shard, c.to, c.from, 0, "shards %d and %d change places, for %s has fewer bytes than %s", there.shard.ID, back.shard.ID, emptier, fuller)
	}
	return true
}

// givable are the shards, by size, whose replica on node a may go to node b.
func (s *state) givable(a, b int) (out []*shard) {
	for i := range s.shards {
		sh := &s.shards[i]
		if s.healthy(sh) && slices.Contains(sh.active, a) && !slices.Contains(sh.active, b) && s.keepsSpread(sh, a, b) {
			out = append(out, sh)
		}
	}
	slices.SortStableFunc(out, func(x, y *shard) int { return cmp.Compare(x.size, y.size) })
	return out
}

func (s *state) keepsSpread(sh *shard, from, to int) bool {
	return s.spreadOf(sh.active, from, to).compare(s.spreadOf(sh.active, -1, -1)) >= 0
}

// allowed tells whether a move for the sake of balance may be made.
func (s *state) allowed(c swap) bool {
	a, b := &s.nodes[c.from], &s.nodes[c.to]
	_, far := apart(a, b, Tolerance)
	return !s.busy(c.to) && !slices.Contains(c.shard.active, c.to) && s.fits(c.to, c.shard) &&
		(tooMany(a, b) || far) &&
		s.keepsSpread(c.shard, c.from, c.to)
}

// tooMany tells whether node a has more replicas than b by more than Tolerance of their
// mean, and one less is better by their number alone: else the bytes would decide,
// however few they are.
func tooMany(a, b *node) bool {
	n, m := float64(a.replicas)/a.weight, float64(b.replicas)/b.weight
	return n-m > Tolerance*(n+m)/2 && float64(2*b.replicas+1)/b.weight < float64(2*a.replicas-1)/a.weight-gain
}

// fill says what a node holds.
func (s *state) fill(n int) string {
	nd := &s.nodes[n]
	weight := ""
	if nd.weight > 1 {
		weight = fmt.Sprintf(", weight %d", nd.Weight)
	}
	return fmt.Sprintf("node %d (%s, %s%s)", nd.ID, count(nd.replicas, "replica"), humanize.IBytes(uint64(max(nd.bytes, 0))), weight)
}
