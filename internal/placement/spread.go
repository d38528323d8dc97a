package placement

// spread tells how well a set of replicas is spread over failure domains.
type spread struct {
	zones, racks, hosts             int // distinct
	zonePairs, rackPairs, hostPairs int // replicas that share one
}

// compare is below 0 where a is worse than b, for sets of the same size.
func (a spread) compare(b spread) int {
	if d := a.compareDomains(b); d != 0 {
		return d
	}
	for _, d := range [...]int{b.zonePairs - a.zonePairs, b.rackPairs - a.rackPairs, b.hostPairs - a.hostPairs} {
		if d != 0 {
			return d
		}
	}
	return 0
}

// compareDomains looks at the numbers of distinct domains only, from the largest domain
// to the smallest.
func (a spread) compareDomains(b spread) int {
	for _, d := range [...]int{a.zones - b.zones, a.racks - b.racks, a.hosts - b.hosts} {
		if d != 0 {
			return d
		}
	}
	return 0
}

// spreadOf the nodes with these indexes, which are distinct; without, if it is one of
// them, is left out, and with is added where it is not below 0.
func (s *state) spreadOf(set []int, without, with int) spread {
	var out spread
	member := func(i int) int { // the index in the set of its i-th member; -1: left out
		switch {
		case i == len(set):
			return with
		case set[i] == without:
			return -1
		}
		return set[i]
	}
	for i := 0; i <= len(set); i++ {
		n := member(i)
		if n < 0 {
			continue
		}
		zone, rack, host := true, true, true // whether it is the first in its domain
		for j := 0; j < i; j++ {
			m := member(j)
			if m < 0 {
				continue
			}
			a, b := &s.nodes[n], &s.nodes[m]
			if a.zone == b.zone {
				zone = false
				out.zonePairs++
			}
			if a.rack == b.rack {
				rack = false
				out.rackPairs++
			}
			if a.host == b.host {
				host = false
				out.hostPairs++
			}
		}
		if zone {
			out.zones++
		}
		if rack {
			out.racks++
		}
		if host {
			out.hosts++
		}
	}
	return out
}
