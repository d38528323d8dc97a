package arena

import (
	"errors"
	"fmt"

	"github.com/kvd-io/kvd/storage/layout"
)

// Check verifies the arena's invariants, for tests, while nothing is written: every
// slot leads to a live object of that bucket, no block is in two places, every page
// has one purpose, the counts agree. It returns all that it finds wrong.
func (a *Arena) Check() error {
	var errs []error
	var registered uint64
	for _, n := range a.namespaces() {
		n.mu.Lock()
		c := checker{n: n, linked: make(map[*slab][]uint32)}
		c.run()
		n.mu.Unlock()
		registered += n.registered.Load()
		errs = append(errs, c.errs...)
	}
	if got := a.registered.Load(); got != registered || got > a.cfg.LimitBytes {
		errs = append(errs, fmt.Errorf("arena: %d bytes counted, namespaces have %d, limit %d", got, registered, a.cfg.LimitBytes))
	}
	return errors.Join(errs...)
}

type checker struct {
	n       *Namespace
	linked  map[*slab][]uint32 // for each block, the shard that links it
	index   map[*chunk]int     // pages of tables
	errs    []error
	objects uint64
	bytes   uint64
}

func (c *checker) failf(format string, args ...any) {
	if len(c.errs) < 20 {
		c.errs = append(c.errs, fmt.Errorf("arena: namespace %d: "+format, append([]any{c.n.id}, args...)...))
	}
}

func (c *checker) run() {
	c.index = make(map[*chunk]int)
	for _, s := range c.n.mu.shards {
		if s.table != nil {
			c.table(s, s.table)
		}
	}
	c.pools()
	c.pages()
	if st := c.n.mu.stats; st.Objects != c.objects || st.ObjectBytes != c.bytes {
		c.failf("counts %d objects of %d bytes, slots lead to %d of %d", st.Objects, st.ObjectBytes, c.objects, c.bytes)
	}
}

func (c *checker) table(s *Shard, t *table) {
	if t.chunk.owner[t.page] != tablePages || t.chunk.owner[t.page+t.pages-1] != tablePages {
		c.failf("table of shard %d lies in pages of another purpose", s.id)
	}
	c.index[t.chunk] += t.pages
	seen := make(map[uint32]bool)
	entries, objects, bytes := 0, uint64(0), uint64(0)
	for home := range t.Buckets {
		for bucket, ok := home, true; ok; bucket, ok = t.next(bucket) {
			if seen[bucket] {
				c.failf("shard %d: bucket %d is in two chains", s.id, bucket)
				break
			}
			seen[bucket] = true
			b := layout.DecodeBucket(t.mem[t.at(bucket, 0):], t.ID, bucket)
			if !b.Sound {
				c.failf("shard %d: bucket %d: check sum does not match", s.id, bucket)
			}
			for _, slot := range b.Slots {
				if slot != 0 {
					entries++
					objects++
					bytes += c.object(s, t, home, slot)
				}
			}
		}
	}
	if entries != t.entries {
		c.failf("shard %d: %d entries counted, %d found", s.id, t.entries, entries)
	}
	if len(seen) != int(t.Buckets+t.overflowUsed) {
		c.failf("shard %d: %d buckets reached, %d in use", s.id, len(seen), t.Buckets+t.overflowUsed)
	}
	if s.stats.Objects != objects || s.stats.ObjectBytes != bytes {
		c.failf("shard %d: counts %d objects of %d bytes, found %d of %d", s.id, s.stats.Objects, s.stats.ObjectBytes, objects, bytes)
	}
	c.objects += objects
	c.bytes += bytes
}

// object checks what a slot leads to and returns the size of its block.
func (c *checker) object(s *Shard, t *table, home uint32, slot layout.Slot) uint64 {
	at := slot.Place()
	if at.Chunk == 0 || int(at.Chunk) > len(c.n.mu.chunks) || c.n.chunkLocked(at.Chunk) == nil {
		c.failf("shard %d: slot leads to chunk %d, which does not exist", s.id, at.Chunk)
		return 0
	}
	b := c.n.blockLocked(at)
	if b.slab.size == 0 || b.place() != at || !b.slab.holds(b.i) || b.slab.class != slot.Class() {
		c.failf("shard %d: slot %x leads to %+v, no used block of class %d", s.id, uint64(slot), at, slot.Class())
		return 0
	}
	by := c.linked[b.slab]
	if by == nil {
		by = make([]uint32, b.slab.blocks)
		c.linked[b.slab] = by
	}
	if by[b.i] != 0 {
		c.failf("block at %+v is in slots of shards %d and %d", at, s.id, by[b.i])
	}
	by[b.i] = s.id
	o, verdict := layout.DecodeObject(b.bytes(), c.n.a.cfg.HashSeed, at)
	if verdict != layout.Valid || o.State != layout.StateLive {
		c.failf("shard %d: object at %+v: verdict %d, state %d", s.id, at, verdict, o.State)
		return uint64(b.slab.size)
	}
	h := layout.HashKey(c.n.a.cfg.HashSeed, o.Key)
	if b.slab.hashes[b.i] != uint32(h.Hi>>32) || b.homeBucket(c.n.a.cfg.HashSeed, t.Buckets) != home {
		c.failf("shard %d: wrong half hash of key %q", s.id, o.Key)
	}
	if h.Shard(c.n.a.cfg.Shards) != s.id || h.HomeBucket(t.Buckets) != home || h.Fingerprint() != slot.Fingerprint() {
		c.failf("shard %d: object with key %q does not belong in bucket %d", s.id, o.Key, home)
	}
	return uint64(b.slab.size)
}

func (c *checker) pools() {
	emptyPages, slabPages := 0, 0
	for _, p := range c.n.mu.pools {
		if p == nil {
			continue
		}
		blocks, pages := 0, 0
		for i, s := range p.slabs {
			blocks, pages = blocks+s.blocks, pages+s.pages
			if s.used == 0 {
				emptyPages += s.pages
			}
			c.slab(p, i, s)
		}
		slabPages += pages
		if p.blocks != blocks || p.pages != pages {
			c.failf("class %d counts %d blocks in %d pages, has %d in %d", p.class, p.blocks, p.pages, blocks, pages)
		}
	}
	if emptyPages != c.n.mu.emptyPages || slabPages != c.n.mu.slabPages {
		c.failf("counts %d slab pages, %d empty; found %d, %d", c.n.mu.slabPages, c.n.mu.emptyPages, slabPages, emptyPages)
	}
}

func (c *checker) slab(p *pool, i int, s *slab) {
	used := 0
	for at := range s.blocks {
		b := block{s, at}
		linked := c.linked[s] != nil && c.linked[s][at] != 0
		switch {
		case s.holds(at):
			used++
			if !linked && b.state() == layout.StateLive {
				c.failf("live object at %+v is in no slot", b.place())
			}
		case linked:
			c.failf("object at %+v lies in a free block", b.place())
		case b.state() == layout.StateLive:
			c.failf("free block at %+v looks live", b.place())
		}
	}
	if used != s.used || s.index != i || s.class != p.class {
		c.failf("slab of class %d at page %d: %d used, counts %d", s.class, s.page, used, s.used)
	}
	if listed := s.partial >= 0 && p.partial[s.partial] == s; listed != (s.used < s.blocks && !s.draining) {
		c.failf("slab of class %d at page %d: %d of %d used, draining %v, listed as partial %v", s.class, s.page, s.used, s.blocks, s.draining, listed)
	}
}

func (c *checker) pages() {
	held := 0
	for _, ch := range c.n.mu.chunks {
		if ch == nil {
			continue
		}
		free, tables := 0, 0
		for page, s := range ch.owner {
			isFree := ch.free[page/64]>>(page%64)&1 != 0
			switch {
			case isFree != (s == nil):
				c.failf("chunk %d page %d: free %v, but owned %v", ch.id, page, isFree, s != nil)
			case isFree:
				free++
			case s == tablePages:
				tables++
			case s != retiredPages && (s.chunk != ch || page < s.page || page >= s.page+s.pages):
				c.failf("chunk %d page %d is owned by a slab that lies elsewhere", ch.id, page)
			}
		}
		if free != ch.freePages || ch.longest > ch.pages() {
			c.failf("chunk %d: counts %d free pages, has %d", ch.id, ch.freePages, free)
		}
		if tables != c.index[ch] {
			c.failf("chunk %d: %d pages marked as tables, tables have %d", ch.id, tables, c.index[ch])
		}
		held += ch.pages() - free
	}
	if held != c.n.mu.heldPages {
		c.failf("counts %d held pages, has %d", c.n.mu.heldPages, held)
	}
}
