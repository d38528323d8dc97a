package shm

import (
	"sync/atomic"

	"github.com/kvd-io/kvd/internal/chaos"
	"github.com/kvd-io/kvd/rdma"
)

// table is all that a READ needs to know. It never changes once it is published:
// a connection replaces it as a whole. Its mappings may only be touched between
// readers.enter and leave.
type table struct {
	alive *uint32 // the death word, mapped
	tid   uint32  // its value while the server lives
	state *uint64 // the state of the connection, mapped
	count uint64  // its value that this table is up to date with

	// Open addressing by the low bits of the id: ids are dense, so nearly all
	// regions are found at once. At most half of the slots are used.
	mask  uint32
	slots []slot
}

type slot struct {
	id     rdma.RegionID
	mapped []byte // nil: free slot
}

// find returns the mapping of a region, or nil.
func (t *table) find(id rdma.RegionID) []byte {
	for i := uint32(id) & t.mask; ; i = (i + 1) & t.mask {
		s := &t.slots[i]
		if s.mapped == nil || s.id == id {
			return s.mapped
		}
	}
}

// serverAlive tells whether the process that owns the memory lived at the moment of
// the call.
func (t *table) serverAlive() bool {
	return atomic.LoadUint32(t.alive) == t.tid || chaos.Broken(chaos.FrozenMapping)
}

// with returns a copy of t that has the given regions and count.
func (t *table) with(regions map[rdma.RegionID][]byte, count uint64) *table {
	n := uint32(4)
	for n < uint32(2*len(regions)) {
		n *= 2
	}
	c := &table{alive: t.alive, tid: t.tid, state: t.state, count: count, mask: n - 1, slots: make([]slot, n)}
	for id, mapped := range regions {
		i := uint32(id) & c.mask
		for c.slots[i].mapped != nil {
			i = (i + 1) & c.mask
		}
		c.slots[i] = slot{id: id, mapped: mapped}
	}
	return c
}
