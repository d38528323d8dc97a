package arena

import (
	"fmt"

	"github.com/kvd-io/kvd/internal/chaos"
	"github.com/kvd-io/kvd/storage/layout"
)

// lockedCopy is the largest object in bytes that is copied under the namespace's
// lock: below it, letting go and taking it again costs more than the copy.
const lockedCopy = 16 << 10

// Shard is the index and the objects of one (namespace, shard replica). Writes to
// one Shard are made by one goroutine at a time; different Shards of a namespace
// may be written at the same time, and all else may be called at any time.
type Shard struct {
	n   *Namespace
	id  uint32
	rec *Record

	// Guarded by n.mu.
	table   *table // nil before the first write
	frozen  bool   // its writer works on the table without the lock: nobody evicts from it
	hidden  bool   // being replaced or dropped: there is no table to look up
	dropped bool
	lost    bool   // a key became non-resident while there was no table to say so
	noGrow  uint64 // Namespace.mu.freed+1 when the table last found no room to grow
	stats   counters
}

// Item is a key-value to be shown. The slices are copied.
type Item struct {
	Key     []byte
	Value   []byte
	Version uint64
	Expiry  int64 // Unix milliseconds; 0: never
	Flags   uint8
}

// Location of a resident object.
type Location struct {
	Place     layout.Place
	Length    int // bytes: header, key, value
	Version   uint64
	LayoutGen uint64
}

// Put shows the item in place of whatever the key had. It never fails: where there
// is no room even after eviction, or the item is larger than any object can be, the
// key becomes non-resident (its old object marked, its bucket incomplete) and
// resident is false.
func (s *Shard) Put(it Item) (loc Location, resident bool) {
	h := s.hash(it.Key)
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	if s.dropped {
		return Location{}, false
	}
	b, slot, ok := s.showLocked(&s.table, h, it)
	if !ok {
		s.nonResidentLocked(s.table, h, it.Key)
		return Location{}, false
	}
	return Location{Place: slot.Place(), Length: b.header().Size(), Version: it.Version, LayoutGen: s.rec.layoutGen()}, true
}

// hash of a key, which must be one of this shard's: eviction finds an object's shard
// by its key.
func (s *Shard) hash(key []byte) layout.KeyHash {
	h := layout.HashKey(s.n.a.cfg.HashSeed, key)
	if of := h.Shard(s.n.a.cfg.Shards); of != s.id {
		panic(fmt.Sprintf("arena: key %q of shard %d was given to shard %d of %d", key, of, s.id, s.n.a.cfg.Shards))
	}
	return h
}

// showLocked writes the item's object and links it in *t, which is the shard's table
// or that of a Load. It may let go of the lock before anything is linked.
func (s *Shard) showLocked(t **table, h layout.KeyHash, it Item) (block, layout.Slot, bool) {
	n := s.n
	c := layout.ClassFor(layout.ObjectSize(len(it.Key), len(it.Value)))
	if c == 0 || len(it.Key) == 0 || len(it.Key) > layout.MaxKeySize {
		return block{}, 0, false
	}
	// The table first: without one, objects could take all the memory and never be found.
	if *t == nil && !s.makeTableLocked(t) {
		return block{}, 0, false
	}
	b, ok := n.allocLocked(c)
	if !ok {
		return block{}, 0, false
	}
	b.slab.hashes[b.i] = uint32(h.Hi >> 32)
	n.encodeLocked(b, it)
	slot := layout.MakeSlot(h.Fingerprint(), b.slab.class, b.place())
	// From here on other shards may have evicted, but nobody else adds keys to this
	// one: what is looked up now stays so until the slot is stored.
	if r, old, ok := (*t).find(n, h, it.Key); ok {
		if old.touched() {
			b.touch()
		}
		s.unlinkLocked(*t, r, layout.StateSuperseded, false, successor{slot, b})
		return b, slot, true
	}
	r, ok := s.roomLocked(t, h)
	if !ok {
		s.setStateLocked(b, layout.StateDropped)
		n.giveBlockLocked(b)
		return block{}, 0, false
	}
	s.linkLocked(*t, r, slot, b)
	return b, slot, true
}

// encodeLocked writes a pending object; a large one without the lock. The block is
// in no slot, so nobody evicts it meanwhile.
func (n *Namespace) encodeLocked(b block, it Item) {
	if layout.ObjectSize(len(it.Key), len(it.Value)) > lockedCopy {
		n.mu.Unlock()
		defer n.mu.Lock()
	}
	layout.EncodeObject(b.bytes(), n.a.cfg.HashSeed, b.place(), layout.Object{
		Flags: it.Flags, Version: it.Version, Expiry: it.Expiry, Key: it.Key, Value: it.Value,
	})
	n.traceBlock(opState, b)
}

// nonResidentLocked makes the key one that only the engine has.
func (s *Shard) nonResidentLocked(t *table, h layout.KeyHash, key []byte) {
	s.stats.NonResident++
	s.n.mu.stats.NonResident++
	if t == nil {
		s.lost = true
		return
	}
	if r, _, ok := t.find(s.n, h, key); ok {
		s.unlinkLocked(t, r, layout.StateSuperseded, true, successor{})
		return
	}
	s.markIncompleteLocked(t, h.HomeBucket(t.Buckets))
}

// Delete unlinks the key; why becomes the object's state (StateDeleted or
// StateExpired). A key that is not resident stays covered by its incomplete bucket.
func (s *Shard) Delete(key []byte, why layout.State) {
	if why != layout.StateDeleted && why != layout.StateExpired {
		panic(fmt.Sprintf("arena: Delete with state %d: want deleted or expired", why))
	}
	h := s.hash(key)
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	if s.table == nil {
		return
	}
	if r, _, ok := s.table.find(s.n, h, key); ok {
		s.unlinkLocked(s.table, r, why, false, successor{})
	}
}

// Lookup finds a resident key. ok is false where it is not resident, which says
// nothing about its existence.
func (s *Shard) Lookup(key []byte) (loc Location, ok bool) {
	h := s.hash(key)
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	if s.table == nil || s.hidden {
		return Location{}, false
	}
	_, b, ok := s.table.find(s.n, h, key)
	if !ok {
		return Location{}, false
	}
	head := b.header()
	return Location{Place: b.place(), Length: head.Size(), Version: head.Version, LayoutGen: s.rec.layoutGen()}, true
}

// Touch tells the eviction policy that the key was used.
func (s *Shard) Touch(key []byte) {
	h := s.hash(key)
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	if s.table == nil || s.hidden {
		return
	}
	if _, b, ok := s.table.find(s.n, h, key); ok {
		b.touch()
	}
}

// Table is the index as readers may look it up now, with the layout_gen under which
// it is valid; ok is false before the first write, while a Load is committed, and
// after Drop. Without a table nothing is known about any key.
func (s *Shard) Table() (t layout.Table, layoutGen uint64, ok bool) {
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	if s.table == nil || s.hidden {
		return layout.Table{}, 0, false
	}
	return s.table.Table, s.rec.layoutGen(), true
}

// Drop marks all objects as dropped, frees them and bumps layout_gen; the shard
// has left this node and takes no writes any more. Its number may be opened again.
func (s *Shard) Drop() {
	n := s.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if s.dropped {
		return
	}
	s.dropped = true
	s.discardTableLocked()
	delete(n.mu.shards, s.id)
}

// discardTableLocked takes the table from readers and frees its objects. It lets go
// of the lock now and then; the shard has no table meanwhile and stays frozen until
// it returns.
func (s *Shard) discardTableLocked() {
	const batch = 64 // buckets under one lock
	if s.dropped || !chaos.Broken(chaos.SnapshotUnannounced) {
		s.bumpLocked()
	}
	t := s.table
	if t == nil {
		return
	}
	s.frozen, s.hidden = true, true
	for from, end := uint32(0), t.Buckets+t.overflowUsed; from < end; from += batch {
		s.dropLocked(t, from, min(from+batch, end))
		s.n.mu.Unlock()
		s.n.mu.Lock()
	}
	s.table, s.frozen, s.hidden = nil, false, false
	s.n.retirePagesLocked(t.chunk, t.page, t.pages)
}
