package arena

import (
	"bytes"
	"time"

	"github.com/kvd-io/kvd/storage/layout"
)

const (
	bucketsPerPage = pageSize / layout.BucketSize
	// overflowShare of a table's buckets is for overflow. With seven slots in a
	// bucket and random hashes that is used up at a load of about 0.7, so it, not
	// maxLoad, usually decides when a large table grows.
	overflowShare = 8
	// maxLoad in percent of the home buckets' slots.
	maxLoad = 80
	// maxChain in buckets: a reader pays a round trip for each.
	maxChain = 6
)

// table is an index that is written. Guarded by the namespace's lock while the
// shard is not frozen.
type table struct {
	layout.Table
	chunk *chunk
	page  int
	pages int
	mem   []byte

	entries      int
	overflowUsed uint32

	made     time.Time // when it was shown
	madeWith int       // entries then
}

// slotRef names a slot: bucket number and place in it.
type slotRef struct {
	bucket uint32
	i      int
}

// newTable makes an empty table in a run of pages. Every bucket's header is valid
// before anybody can look for it.
func newTable(id uint64, c *chunk, page, pages int) *table {
	total := uint32(pages * bucketsPerPage)
	overflow := total / overflowShare
	t := &table{chunk: c, page: page, pages: pages, mem: c.span(page, pages)}
	t.Table = layout.Table{
		ID:       id,
		Place:    layout.Place{Chunk: c.id, Offset: uint64(page) << pageShift},
		Buckets:  total - overflow,
		Overflow: overflow,
	}
	clear(t.mem)
	var none [layout.SlotsPerBucket]layout.Slot
	for i := range total {
		layout.StoreWord(t.mem, t.at(i, 0), layout.BucketHeader(id, i, 0, 0, &none))
	}
	return t
}

// at is the offset in mem of a word of a bucket.
func (t *table) at(bucket uint32, word int) uint64 {
	return uint64(bucket)*layout.BucketSize + 8*uint64(word)
}

func (t *table) slot(r slotRef) layout.Slot {
	return layout.Slot(layout.LoadWord(t.mem, t.at(r.bucket, 1+r.i)))
}

func (t *table) storeSlot(r slotRef, s layout.Slot) {
	layout.StoreWord(t.mem, t.at(r.bucket, 1+r.i), uint64(s))
}

// header's flags and chain of a bucket.
func (t *table) header(bucket uint32) (flags uint8, chain uint32) {
	w := layout.LoadWord(t.mem, t.at(bucket, 0))
	return uint8(w >> 56), uint32(w>>32) & layout.MaxChain
}

func (t *table) storeHeader(bucket uint32, flags uint8, chain uint32) {
	var slots [layout.SlotsPerBucket]layout.Slot
	for i := range slots {
		slots[i] = t.slot(slotRef{bucket, i})
	}
	layout.StoreWord(t.mem, t.at(bucket, 0), layout.BucketHeader(t.ID, bucket, flags, chain, &slots))
}

// seal makes the bucket's check sum that of its slots.
func (t *table) seal(bucket uint32) {
	flags, chain := t.header(bucket)
	t.storeHeader(bucket, flags, chain)
}

// incomplete tells whether a bucket of the chain lacks a key.
func (t *table) incomplete(home uint32) bool {
	for bucket, ok := home, true; ok; bucket, ok = t.next(bucket) {
		if flags, _ := t.header(bucket); flags&layout.BucketIncomplete != 0 {
			return true
		}
	}
	return false
}

// full tells that the table should be replaced before the next entry.
func (t *table) full() bool {
	return t.entries*100 >= int(t.Buckets)*layout.SlotsPerBucket*maxLoad
}

// find the slot of the key. The key is compared with the object's, whatever its
// state.
func (t *table) find(n *Namespace, h layout.KeyHash, key []byte) (slotRef, block, bool) {
	fp, bucket := h.Fingerprint(), h.HomeBucket(t.Buckets)
	for {
		for i := range layout.SlotsPerBucket {
			r := slotRef{bucket, i}
			s := t.slot(r)
			if s == 0 || s.Fingerprint() != fp {
				continue
			}
			if b := n.blockLocked(s.Place()); bytes.Equal(b.key(), key) {
				return r, b, true
			}
		}
		next, ok := t.next(bucket)
		if !ok {
			return slotRef{}, block{}, false
		}
		bucket = next
	}
}

// findPlace finds the slot that leads to the place, in the chain of that hash.
func (t *table) findPlace(h layout.KeyHash, at layout.Place) (slotRef, bool) {
	bucket := h.HomeBucket(t.Buckets)
	for {
		for i := range layout.SlotsPerBucket {
			r := slotRef{bucket, i}
			if s := t.slot(r); s != 0 && s.Place() == at {
				return r, true
			}
		}
		next, ok := t.next(bucket)
		if !ok {
			return slotRef{}, false
		}
		bucket = next
	}
}

func (t *table) next(bucket uint32) (uint32, bool) {
	_, chain := t.header(bucket)
	return t.Next(chain)
}

// freeSlot finds an empty slot in the chain of home; where there is none it links
// another overflow bucket, if there is one left and the chain is not too long.
//
// An overflow bucket is linked while it is empty, and never unlinked: a reader who
// came before the link sees the chain as it was, complete in itself.
func (t *table) freeSlot(home uint32) (slotRef, bool) {
	bucket := home
	for length := 1; ; length++ {
		for i := range layout.SlotsPerBucket {
			if r := (slotRef{bucket, i}); t.slot(r) == 0 {
				return r, true
			}
		}
		next, ok := t.next(bucket)
		if ok {
			bucket = next
			continue
		}
		if t.overflowUsed == t.Overflow || length >= maxChain {
			return slotRef{}, false
		}
		t.overflowUsed++
		flags, _ := t.header(bucket)
		t.storeHeader(bucket, flags, t.overflowUsed)
		return slotRef{t.Buckets + t.overflowUsed - 1, 0}, true
	}
}

// slots calls f for every entry.
func (t *table) slots(f func(r slotRef, s layout.Slot) bool) {
	for bucket := range t.Buckets + t.overflowUsed {
		for i := range layout.SlotsPerBucket {
			r := slotRef{bucket, i}
			if s := t.slot(r); s != 0 && !f(r, s) {
				return
			}
		}
	}
}
