package arena

import (
	"time"

	"github.com/kvd-io/kvd/storage/layout"
)

const (
	// reclaimBudget bounds the objects that one put evicts to empty slabs.
	reclaimBudget = 64
	tickBudget    = 4096
	// reclaimTries: passes over slabs that do not get empty (an object is being
	// written for long, or loaded) before they are left alone.
	reclaimTries = 32
	// searchPages bounds the search for a run to empty.
	searchPages = 1 << 16
)

// reclaim is how pages change their purpose while objects lie in them: slabs that
// make up a run of pages are emptied, a few objects with each put, then retired.
type reclaim struct {
	slabs []*slab // being emptied
	pages int     // of the run they lie in
	tries int

	chunk int // where the next search begins
	page  int

	promised    int // pages of the last run, free at about promisedAt
	promisedAt  time.Time
	nextBalance time.Time
	nextTidy    time.Time
}

// reclaimLocked sees to it that there will be a run of that many free pages, for a
// class or (0) a table: not now, since pages have to wait out the quarantine.
func (n *Namespace) reclaimLocked(pages int, taker layout.Class) {
	r := &n.mu.reclaim
	if len(r.slabs) > 0 {
		return
	}
	if r.promised >= pages && n.a.cfg.Clock.Now().Before(r.promisedAt) {
		return
	}
	if got := n.retireEmptyLocked(taker); got >= pages {
		n.promiseLocked(got)
		return
	}
	r.slabs, r.pages, r.tries = n.chooseRunLocked(pages), pages, 0
	if len(r.slabs) == 0 {
		n.promiseLocked(pages) // either they are in quarantine, or there are none: look again then
	}
	for _, s := range r.slabs {
		s.draining = true
		n.mu.pools[s.class].clearPartial(s)
	}
}

func (n *Namespace) promiseLocked(pages int) {
	n.mu.reclaim.promised = pages
	n.mu.reclaim.promisedAt = n.a.cfg.Clock.Now().Add(n.a.cfg.Quarantine)
}

// chooseRunLocked finds slabs which, with the pages between them that are free or in
// quarantine, make up a run of that many pages. The search goes round all memory, so
// that every class gives in proportion to what it has.
func (n *Namespace) chooseRunLocked(pages int) []*slab {
	r := &n.mu.reclaim
	var slabs []*slab
	run := 0
	for looked := 0; looked < searchPages; {
		if r.chunk >= len(n.mu.chunks) {
			r.chunk = 0
			if looked == 0 && len(n.mu.chunks) == 0 {
				return nil
			}
		}
		c := n.mu.chunks[r.chunk]
		if c == nil || r.page >= c.pages() {
			r.chunk, r.page, slabs, run = r.chunk+1, 0, nil, 0
			looked++
			continue
		}
		step := 1
		switch s := c.owner[r.page]; s {
		case nil, retiredPages:
			run++
		case tablePages:
			slabs, run = nil, 0
		default:
			step = s.page + s.pages - r.page
			slabs, run = append(slabs, s), run+s.pages
		}
		r.page += step
		looked += step
		if run >= pages {
			return slabs
		}
	}
	return nil
}

// reclaimStepLocked evicts up to budget objects from the slabs that are to be
// emptied, and retires them when they are.
func (n *Namespace) reclaimStepLocked(budget int) {
	r := &n.mu.reclaim
	if len(r.slabs) == 0 {
		return
	}
	left := false
	for _, s := range r.slabs {
		for i := 0; i < s.blocks && s.used > 0; i++ {
			if !s.holds(i) {
				continue
			}
			if budget == 0 {
				return
			}
			if n.evictLocked(block{s, i}) {
				budget--
			} else {
				left = true
			}
		}
	}
	slabs := r.slabs
	if left {
		if r.tries++; r.tries > reclaimTries {
			r.slabs = nil
			for _, s := range slabs {
				s.draining = false
				n.mu.pools[s.class].setPartial(s)
			}
		}
		return
	}
	r.slabs = nil
	n.retireSlabsLocked(slabs)
	n.promiseLocked(r.pages)
}

// retireEmptyLocked retires the slabs without objects of all classes but one, and
// returns their pages.
func (n *Namespace) retireEmptyLocked(but layout.Class) int {
	if n.mu.emptyPages == 0 {
		return 0
	}
	var empty []*slab
	pages := 0
	for _, p := range n.mu.pools {
		if p == nil || p.class == but {
			continue
		}
		for _, s := range p.partial {
			if s.used == 0 {
				empty = append(empty, s)
				pages += s.pages
			}
		}
	}
	n.retireSlabsLocked(empty)
	return pages
}

// retireSlabsLocked takes empty slabs from their classes. No slot leads to them; but
// a reader may remember an address in them, and soon something else will lie there.
func (n *Namespace) retireSlabsLocked(slabs []*slab) {
	if len(slabs) == 0 {
		return
	}
	n.bumpAllLocked()
	for _, s := range slabs {
		n.mu.pools[s.class].remove(s)
		n.mu.emptyPages -= s.pages
		n.mu.slabPages -= s.pages
		n.retirePagesLocked(s.chunk, s.page, s.pages)
	}
}

// balanceLocked gives a class more room that has turned over all of its objects by
// eviction while it has less than half of the memory. Without it the classes keep
// for ever what they had when memory ran out. It is rare, since every reader forgets
// its addresses each time.
func (n *Namespace) balanceLocked(p *pool) {
	if p.evicted < max(p.blocks, 64) {
		return
	}
	p.evicted = 0
	r := &n.mu.reclaim
	now := n.a.cfg.Clock.Now()
	if p.pages*2 > n.mu.slabPages || now.Before(r.nextBalance) {
		return
	}
	r.nextBalance = now.Add(n.a.cfg.Quarantine)
	n.reclaimLocked(p.slabPages(), p.class)
}
