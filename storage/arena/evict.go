package arena

import (
	"fmt"

	"github.com/kvd-io/kvd/storage/layout"
)

const (
	// clockSteps bounds the blocks one put looks at for a victim. Each look takes a
	// second chance away, so a later put finds what this one did not.
	clockSteps = 512
	// widerClasses is how many classes further up a large object may take a block
	// from: at most a quarter larger, and better than emptying slabs.
	widerClasses = 4
)

// allocLocked finds a block for an object of the class: a free one, one in new
// memory, or that of a victim. The block's class may be larger. It may let go of the
// lock.
func (n *Namespace) allocLocked(c layout.Class) (block, bool) {
	least := (layout.ClassSize(c) + pageSize - 1) >> pageShift
	for {
		if b, ok := n.takeBlockLocked(c); ok {
			return b, true
		}
		if !n.growLocked(least) {
			break
		}
	}
	n.reclaimStepLocked(reclaimBudget)
	last := c
	if c > layout.MaxSlabClass {
		last = min(c+widerClasses, layout.MaxClass)
		for d := c + 1; d <= last; d++ {
			if p := n.mu.pools[d]; p != nil && len(p.partial) > 0 {
				return n.takeBlockLocked(d)
			}
		}
	}
	for d := c; d <= last; d++ {
		if p := n.mu.pools[d]; p != nil && n.evictFromLocked(p) {
			n.balanceLocked(p)
			return n.takeBlockLocked(d)
		}
	}
	n.reclaimLocked(least, c)
	return block{}, false
}

// evictFromLocked frees a block of the pool: second-chance FIFO, known as CLOCK
// (Corbato, 1968). The hand goes round the blocks; one that was touched since it
// last came by is spared once.
func (n *Namespace) evictFromLocked(p *pool) bool {
	for range clockSteps {
		if len(p.slabs) == 0 {
			return false
		}
		if p.hand >= len(p.slabs) {
			p.hand, p.handAt = 0, 0
		}
		s := p.slabs[p.hand]
		if p.handAt >= s.blocks || s.draining {
			p.hand, p.handAt = p.hand+1, 0
			continue
		}
		b := block{s, p.handAt}
		p.handAt++
		if !s.holds(b.i) {
			continue
		}
		if b.touched() {
			b.untouch()
			continue
		}
		if n.evictLocked(b) {
			p.evicted++
			return true
		}
	}
	return false
}

// evictLocked makes the block's object non-resident, unless it is not live (being
// written, or loaded) or its shard is working on its table.
func (n *Namespace) evictLocked(b block) bool {
	if b.state() != layout.StateLive {
		return false
	}
	h := layout.HashKey(n.a.cfg.HashSeed, b.key())
	s := n.mu.shards[h.Shard(n.a.cfg.Shards)]
	if s == nil || s.frozen || s.table == nil {
		return false
	}
	r, ok := s.table.findPlace(h, b.place())
	if !ok {
		panic(fmt.Sprintf("arena: live object at %+v is in no slot of shard %d", b.place(), s.id))
	}
	s.evictSlotLocked(r)
	return true
}

func (s *Shard) evictSlotLocked(r slotRef) {
	s.stats.Evictions++
	s.n.mu.stats.Evictions++
	s.unlinkLocked(s.table, r, layout.StateEvicted, true, successor{})
}

// evictFromChainLocked makes an empty slot where the chain is full and the table
// cannot grow. The first object that was not touched goes; if all were, the first,
// and the others lose their second chance.
func (s *Shard) evictFromChainLocked(t *table, h layout.KeyHash) slotRef {
	home := h.HomeBucket(t.Buckets)
	victim := slotRef{home, 0}
	each := func(f func(r slotRef, b block) bool) bool {
		for bucket, ok := home, true; ok; bucket, ok = t.next(bucket) {
			for i := range layout.SlotsPerBucket {
				r := slotRef{bucket, i}
				if !f(r, s.n.blockLocked(t.slot(r).Place())) {
					return false
				}
			}
		}
		return true
	}
	if each(func(r slotRef, b block) bool { victim = r; return b.touched() }) {
		each(func(_ slotRef, b block) bool { b.untouch(); return true })
		victim = slotRef{home, 0}
	}
	s.evictSlotLocked(victim)
	return victim
}
