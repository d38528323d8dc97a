package arena

import "github.com/kvd-io/kvd/storage/layout"

// Load replaces the whole content of a shard: a snapshot, or the state found at
// start. Its objects stay pending, in a table that nobody can find, until Commit.
// They are not evicted before, so a content larger than the memory is loaded in
// part; the rest is non-resident.
type Load struct {
	s     *Shard
	table *table
	lost  bool // a key became non-resident while there was no table
	done  bool
}

// StartLoad begins to replace the shard's content. Commit bumps layout_gen, marks
// every old object as dropped and shows the new table. Abort frees it. Between
// StartLoad and either of them the Shard is not written otherwise.
func (s *Shard) StartLoad() *Load { return &Load{s: s} }

// Put adds the item, or replaces one of the same key in this Load.
func (l *Load) Put(it Item) (resident bool) {
	s := l.s
	h := s.hash(it.Key)
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	l.check()
	if _, _, ok := s.showLocked(&l.table, h, it); ok {
		return true
	}
	if l.table == nil {
		s.stats.NonResident++
		s.n.mu.stats.NonResident++
		l.lost = true
		return false
	}
	s.nonResidentLocked(l.table, h, it.Key)
	return false
}

func (l *Load) check() {
	if l.done {
		panic("arena: Load used after Commit or Abort")
	}
}

// Commit shows the loaded content in place of the old one. In order: layout_gen, so
// that no address of the old content is believed any more; the old objects, marked
// and freed; the new ones, live; the new table. Meanwhile there is no table.
func (l *Load) Commit() {
	s, n := l.s, l.s.n
	n.mu.Lock()
	defer n.mu.Unlock()
	l.check()
	l.done = true
	if s.dropped {
		l.discardLocked()
		return
	}
	s.discardTableLocked()
	s.lost = l.lost
	if l.table == nil {
		return
	}
	if l.lost {
		l.table.setIncomplete(0, l.table.Buckets-1)
		s.lost = false
	}
	s.table, s.frozen, s.hidden = l.table, true, true
	const batch = 64
	for from, end := uint32(0), l.table.Buckets+l.table.overflowUsed; from < end; from += batch {
		for bucket := from; bucket < min(from+batch, end); bucket++ {
			for i := range layout.SlotsPerBucket {
				if slot := l.table.slot(slotRef{bucket, i}); slot != 0 {
					s.setStateLocked(n.blockLocked(slot.Place()), layout.StateLive)
				}
			}
		}
		n.mu.Unlock()
		n.mu.Lock()
	}
	s.frozen, s.hidden = false, false
	s.showTableLocked(l.table)
}

// Abort frees what was loaded. The shard keeps its content.
func (l *Load) Abort() {
	l.s.n.mu.Lock()
	defer l.s.n.mu.Unlock()
	if !l.done {
		l.done = true
		l.discardLocked()
	}
}

// discardLocked frees the loaded objects and the table: no reader ever knew either.
func (l *Load) discardLocked() {
	if t := l.table; t != nil {
		l.s.dropLocked(t, 0, t.Buckets+t.overflowUsed)
		l.s.n.freePagesLocked(t.chunk, t.page, t.pages)
	}
}
