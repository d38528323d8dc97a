package arena

import (
	"math"

	"github.com/kvd-io/kvd/storage/layout"
)

const (
	// lockedRehash is the largest number of entries that are moved to a larger table
	// under the namespace's lock.
	lockedRehash = 2048
	// rebuilds of a table that turned out too small for its overflow.
	maxRebuilds = 4
)

// roomLocked finds an empty slot for a key that has none, in *t, which it replaces
// by a larger table where need be. It may let go of the lock before the slot
// is found.
func (s *Shard) roomLocked(t **table, h layout.KeyHash) (slotRef, bool) {
	if (*t).full() {
		s.growTableLocked(t)
	}
	if r, ok := s.freeSlotLocked(*t, h); ok {
		return r, true
	}
	s.growTableLocked(t)
	// Even where it could not grow: the attempt may have evicted from this chain.
	if r, ok := s.freeSlotLocked(*t, h); ok {
		return r, true
	}
	if t != &s.table {
		return slotRef{}, false // a Load's objects are not evicted
	}
	return s.evictFromChainLocked(*t, h), true
}

func (s *Shard) freeSlotLocked(t *table, h layout.KeyHash) (slotRef, bool) {
	used := t.overflowUsed
	r, ok := t.freeSlot(h.HomeBucket(t.Buckets))
	if t.overflowUsed != used && s.n.a.hook != nil {
		bucket := h.HomeBucket(t.Buckets)
		for next, _ := t.next(bucket); next != r.bucket; next, _ = t.next(bucket) {
			bucket = next
		}
		s.traceHeader(t, bucket)
	}
	return r, ok
}

// takeTablePagesLocked is takePagesLocked, with a new chunk if need be. It may let
// go of the lock.
func (n *Namespace) takeTablePagesLocked(pages int) (*chunk, int, bool) {
	for {
		if c, page, ok := n.takePagesLocked(pages, tablePages); ok {
			return c, page, true
		}
		if !n.growLocked(pages) {
			n.reclaimLocked(pages, 0)
			n.reclaimStepLocked(reclaimBudget)
			return nil, 0, false
		}
	}
}

// makeTableLocked makes the first table, of one page.
func (s *Shard) makeTableLocked(t **table) bool {
	c, page, ok := s.n.takeTablePagesLocked(1)
	if !ok {
		return false
	}
	made := newTable(s.n.a.nextTableID(), c, page, 1)
	if t != &s.table {
		*t = made // a Load's: nobody sees it before Commit
		return true
	}
	if s.lost {
		made.setIncomplete(0, made.Buckets-1)
		s.lost = false
	}
	s.showTableLocked(made)
	return true
}

// growTableLocked replaces *t by a larger table with the same entries. It may let go
// of the lock, and is then the only one who touches *t.
//
// A reader with the old table cannot see what is written to the new one. So
// layout_gen is bumped before the new one is shown, and with it before any write to
// it; the old one stays unchanged for the quarantine.
func (s *Shard) growTableLocked(t **table) bool {
	n, old := s.n, *t
	if s.noGrow == n.mu.freed+1 {
		return false // nothing was freed since it found no room
	}
	visible := old == s.table
	for pages, try := s.grownPages(old, visible), 0; try < maxRebuilds; pages, try = pages+pages/4+1, try+1 {
		c, page, ok := n.takeTablePagesLocked(pages)
		if !ok {
			break
		}
		grown, ok := s.rebuildLocked(old, c, page, pages, n.mu.chunks)
		if !ok {
			n.freePagesLocked(c, page, pages)
			continue
		}
		s.stats.TableGrowths++
		n.mu.stats.TableGrowths++
		if !visible {
			*t = grown
			n.freePagesLocked(old.chunk, old.page, old.pages)
			return true
		}
		s.bumpLocked()
		s.showTableLocked(grown)
		n.retirePagesLocked(old.chunk, old.page, old.pages)
		return true
	}
	s.noGrow = n.mu.freed + 1
	return false
}

// grownPages is the size of the table that replaces t. Small steps leave little
// unused, but each step leaves an old table in quarantine; so the step is larger the
// more of the table came within one quarantine. It also differs a little from table
// to table, so that shards which fill evenly do not all grow at the same moment.
func (s *Shard) grownPages(t *table, visible bool) int {
	const smallest, largest = 1.25, 2.0
	factor := smallest
	if visible {
		age := max(s.n.a.cfg.Clock.Now().Sub(t.made), 1)
		gained := float64(t.entries-t.madeWith) / float64(t.entries+1)
		factor = min(smallest+2*gained*float64(s.n.a.cfg.Quarantine)/float64(age), largest)
	}
	factor *= 0.95 + 0.1*float64(splitMix(t.ID)>>40)/(1<<24)
	return max(t.pages+1, int(float64(t.pages)*factor+0.5))
}

// showTableLocked makes t the shard's table.
func (s *Shard) showTableLocked(t *table) {
	t.made, t.madeWith = s.n.a.cfg.Clock.Now(), t.entries
	s.table = t
	s.n.trace(event{Op: opTable, Shard: s.id, Value: uint64(t.Buckets)})
}

// homeBucket of the object in a table of that many buckets. Half of the hash decides
// it, except where a border between two buckets lies in the other half's range.
func (b block) homeBucket(seed uint64, buckets uint32) uint32 {
	high := uint64(b.slab.hashes[b.i]) << 32
	first := layout.KeyHash{Hi: high}.HomeBucket(buckets)
	if first == (layout.KeyHash{Hi: high | math.MaxUint32}).HomeBucket(buckets) {
		return first
	}
	return layout.HashKey(seed, b.key()).HomeBucket(buckets)
}

// rebuildLocked fills a new table in those pages with the entries of old; ok is
// false where they do not fit. Without the lock it looks only at what cannot change:
// the table of a frozen shard, and the slabs in which its objects lie.
func (s *Shard) rebuildLocked(old *table, c *chunk, page, pages int, chunks []*chunk) (*table, bool) {
	id := s.n.a.nextTableID()
	if old.entries > lockedRehash {
		s.frozen = true
		s.n.mu.Unlock()
		defer func() {
			s.n.mu.Lock()
			s.frozen = false
		}()
	}
	grown := newTable(id, c, page, pages)
	ok := true
	old.slots(func(_ slotRef, slot layout.Slot) bool {
		b := blockAt(chunks, slot.Place())
		var r slotRef
		if r, ok = grown.freeSlot(b.homeBucket(s.n.a.cfg.HashSeed, grown.Buckets)); ok {
			grown.storeSlot(r, slot)
			grown.entries++
		}
		return ok
	})
	if !ok {
		return nil, false
	}
	for bucket := range grown.Buckets + grown.overflowUsed {
		grown.seal(bucket)
	}
	grown.inherit(old)
	return grown, true
}

// inherit marks every bucket incomplete in whose range of hashes an incomplete
// chain of old lies: the keys that made it so are not known any more.
func (t *table) inherit(old *table) {
	from, to := uint64(old.Buckets), uint64(t.Buckets)
	for bucket := range old.Buckets {
		if old.incomplete(bucket) {
			i := uint64(bucket)
			t.setIncomplete(uint32(i*to/from), uint32(((i+1)*to-1)/from))
		}
	}
}

// setIncomplete marks home buckets first to last of a table that nobody knows yet.
func (t *table) setIncomplete(first, last uint32) {
	for bucket := first; bucket <= last; bucket++ {
		flags, chain := t.header(bucket)
		t.storeHeader(bucket, flags|layout.BucketIncomplete, chain)
	}
}
