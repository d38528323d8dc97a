package client

import (
	"sync"

	"github.com/kvd-io/kvd/storage/layout"
)

// location is where an object lay in one session's node. It may be wrong at any
// time: the object itself says whether it is still the key's value, and the layout
// generation whether the address still means anything.
type location struct {
	at      layout.Place
	length  uint32 // bytes: header, key, value
	version uint64
	gen     uint64 // layout_gen under which the address was learnt
}

const (
	cacheShards = 64
	cacheWays   = 4
)

// cacheEntry holds no pointer, so that the collector need not scan the cache. A
// session's ordinal is never used twice: whatever was remembered of a node is
// forgotten at once when its session ends.
type cacheEntry struct {
	lo, hi  uint64
	offset  uint64
	version uint64
	gen     uint64
	session uint32 // ordinal; 0: empty
	chunk   uint32
	length  uint32
	used    bool // since the hand last passed
}

// cache remembers locations by (key's hash, session): cacheShards tables, each of
// sets of cacheWays entries. Within a set the victim is found by CLOCK.
type cache struct {
	setsPerShard uint64 // a power of two; 0: nothing is remembered
	shards       [cacheShards]cacheShard
}

type cacheShard struct {
	mu struct {
		sync.Mutex
		entries []cacheEntry // made at the first insertion
		hand    uint8
	}
	_ [64]byte // two shards never share a cache line
}

func newCache(entries int) *cache {
	c := &cache{}
	if entries <= 0 {
		return c
	}
	c.setsPerShard = 1
	for c.setsPerShard*cacheShards*cacheWays < uint64(entries) {
		c.setsPerShard *= 2
	}
	return c
}

// set gives the shard and the index of the first entry of the set. Another node's
// copy of the key belongs to another set.
func (c *cache) set(h layout.KeyHash, session uint32) (*cacheShard, int) {
	x := (h.Hi ^ uint64(session)*0x9e3779b97f4a7c15) * 0xff51afd7ed558ccd
	x ^= x >> 32
	return &c.shards[x%cacheShards], int(x/cacheShards&(c.setsPerShard-1)) * cacheWays
}

func (c *cache) get(h layout.KeyHash, session uint32) (location, bool) {
	if c.setsPerShard == 0 {
		return location{}, false
	}
	s, first := c.set(h, session)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.entries == nil {
		return location{}, false
	}
	for i := range cacheWays {
		e := &s.mu.entries[first+i]
		if e.session == session && e.hi == h.Hi && e.lo == h.Lo {
			e.used = true
			return location{
				at: layout.Place{Chunk: e.chunk, Offset: e.offset}, length: e.length, version: e.version, gen: e.gen,
			}, true
		}
	}
	return location{}, false
}

// put remembers l. An older version never replaces a newer one of the same
// generation: answers may arrive out of order.
func (c *cache) put(h layout.KeyHash, session uint32, l location) {
	if c.setsPerShard == 0 {
		return
	}
	s, first := c.set(h, session)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.entries == nil {
		s.mu.entries = make([]cacheEntry, c.setsPerShard*cacheWays)
	}
	e := s.victimLocked(h, session, first)
	if e.session == session && e.hi == h.Hi && e.lo == h.Lo && (e.gen > l.gen || e.gen == l.gen && e.version > l.version) {
		return
	}
	*e = cacheEntry{
		lo: h.Lo, hi: h.Hi, offset: l.at.Offset, version: l.version, gen: l.gen,
		session: session, chunk: l.at.Chunk, length: l.length, used: true,
	}
}

func (s *cacheShard) victimLocked(h layout.KeyHash, session uint32, first int) *cacheEntry {
	set := s.mu.entries[first : first+cacheWays]
	var empty *cacheEntry
	for i := range set {
		e := &set[i]
		if e.session == session && e.hi == h.Hi && e.lo == h.Lo {
			return e
		}
		if e.session == 0 && empty == nil {
			empty = e
		}
	}
	if empty != nil {
		return empty
	}
	for {
		e := &set[s.mu.hand%cacheWays]
		s.mu.hand++
		if !e.used {
			return e
		}
		e.used = false
	}
}

// drop forgets the location where it is still the given one.
func (c *cache) drop(h layout.KeyHash, session uint32, l location) {
	if c.setsPerShard == 0 {
		return
	}
	s, first := c.set(h, session)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.entries == nil {
		return
	}
	for i := range cacheWays {
		e := &s.mu.entries[first+i]
		if e.session == session && e.hi == h.Hi && e.lo == h.Lo && e.version == l.version && e.gen == l.gen {
			*e = cacheEntry{}
			return
		}
	}
}
