package arena

import (
	"github.com/kvd-io/kvd/storage/layout"

	"github.com/kvd-io/kvd/internal/chaos"
)

// successor is what takes an unlinked object's slot: a pending object, or nothing.
type successor struct {
	slot  layout.Slot
	block block
}

// unlinkLocked is the one place where an object stops being its key's value while
// its table is in use. The order is the contract with readers:
//
//  1. where the key will still have a value, but not in memory: the slot's bucket
//     becomes incomplete, before the slot can be read as empty. Not the home bucket: a
//     reader may have read that one already;
//  2. the object's state: who remembers its address learns from the object itself;
//  3. the slot;
//  4. the successor becomes live: the linearization point of an overwrite. Between
//     2 and 4 a reader finds an object that is not live, and retries;
//  5. the bucket's check sum. Until then nobody concludes an absence from it;
//  6. the block is free, for its class at once.
func (s *Shard) unlinkLocked(t *table, r slotRef, why layout.State, leavesValue bool, next successor) {
	n := s.n
	old := n.blockLocked(t.slot(r).Place())
	unmarked := why == layout.StateEvicted && chaos.Broken(chaos.EvictUnmarked)
	if leavesValue && !unmarked {
		s.markIncompleteLocked(t, r.bucket)
	}
	if next.slot != 0 && chaos.Broken(chaos.OverwriteReversed) {
		s.setSlotLocked(t, r, next.slot)
		s.setStateLocked(next.block, layout.StateLive)
		chaos.Linger()
	}
	if !unmarked {
		s.setStateLocked(old, why)
	}
	s.setSlotLocked(t, r, next.slot)
	if next.slot != 0 {
		s.goLiveLocked(t, next.block)
	} else {
		t.entries--
	}
	s.sealLocked(t, r.bucket)
	s.accountLocked(old, -1)
	n.giveBlockLocked(old)
}

// linkLocked makes a pending object the value of a key that had none: slot, check
// sum, live.
//
// The check sum comes before live. Otherwise a header from before, which has this
// slot empty and is complete, could be read after the object was live, and the slot
// after it was evicted again: a wrong absence with a matching check sum.
func (s *Shard) linkLocked(t *table, r slotRef, slot layout.Slot, b block) {
	s.setSlotLocked(t, r, slot)
	t.entries++
	s.sealLocked(t, r.bucket)
	s.goLiveLocked(t, b)
}

// goLiveLocked shows an object, unless its table is still being loaded: then Commit
// does.
func (s *Shard) goLiveLocked(t *table, b block) {
	s.accountLocked(b, +1)
	if t == s.table {
		s.setStateLocked(b, layout.StateLive)
	}
}

// dropLocked marks and frees the objects in some buckets of a table that nobody can
// find any more or, after layout_gen was bumped, nobody can believe. The table
// itself stays as it is.
func (s *Shard) dropLocked(t *table, from, to uint32) {
	for bucket := from; bucket < to; bucket++ {
		for i := range layout.SlotsPerBucket {
			if slot := t.slot(slotRef{bucket, i}); slot != 0 {
				b := s.n.blockLocked(slot.Place())
				s.setStateLocked(b, layout.StateDropped)
				s.accountLocked(b, -1)
				s.n.giveBlockLocked(b)
			}
		}
	}
}

// accountLocked counts a linked object in or out.
func (s *Shard) accountLocked(b block, by int) {
	delta := uint64(by)
	size := delta * uint64(b.slab.size)
	s.stats.Objects += delta
	s.stats.ObjectBytes += size
	s.n.mu.stats.Objects += delta
	s.n.mu.stats.ObjectBytes += size
}

func (s *Shard) setStateLocked(b block, st layout.State) {
	layout.StoreState(b.bytes(), st)
	if s.n.a.hook != nil {
		s.n.trace(event{Op: opState, Shard: s.id, Place: b.place(), State: st})
	}
}

func (s *Shard) setSlotLocked(t *table, r slotRef, slot layout.Slot) {
	t.storeSlot(r, slot)
	if s.n.a.hook != nil {
		s.n.trace(event{Op: opSlot, Shard: s.id, Bucket: r.bucket, Index: r.i, Slot: slot, Place: slot.Place()})
	}
}

func (s *Shard) sealLocked(t *table, bucket uint32) {
	t.seal(bucket)
	s.traceHeader(t, bucket)
}

// markIncompleteLocked says of a bucket that its chain lacks a key.
func (s *Shard) markIncompleteLocked(t *table, bucket uint32) {
	flags, chain := t.header(bucket)
	if flags&layout.BucketIncomplete != 0 {
		return
	}
	t.storeHeader(bucket, flags|layout.BucketIncomplete, chain)
	s.traceHeader(t, bucket)
}

func (s *Shard) traceHeader(t *table, bucket uint32) {
	if s.n.a.hook != nil {
		flags, chain := t.header(bucket)
		s.n.trace(event{Op: opHeader, Shard: s.id, Bucket: bucket, Flags: flags, Chain: chain})
	}
}

// bumpLocked takes the truth from addresses that readers remember of this shard.
func (s *Shard) bumpLocked() {
	gen := s.rec.bumpLayoutGen()
	s.n.trace(event{Op: opGen, Shard: s.id, Value: gen})
}
