package arena

import (
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// Namespace is a domain of its own chunks. One lock guards the metadata of all its
// shards, because a put in one shard may evict an object of another; large values
// are copied, chunks made and large tables rebuilt without it.
type Namespace struct {
	a  *Arena
	id uint32

	quota      atomic.Uint64 // bytes of the chunks at most; 0: no quota
	registered atomic.Uint64 // bytes of the chunks
	list       atomic.Pointer[map[rdma.RegionID]*rdma.Memory]
	growMu     sync.Mutex // one maker or releaser of chunks at a time; taken before mu

	mu struct {
		sync.Mutex
		chunks     []*chunk // by id-1; nil: released, the id is not used again
		made       uint64   // chunks ever added
		shards     map[uint32]*Shard
		pools      [layout.MaxClass + 1]*pool
		quarantine []retired // in the order of their times
		reclaim    reclaim

		freed      uint64 // counts events that may have made room for a page run
		emptyPages int    // pages of slabs without any object
		slabPages  int
		heldPages  int       // not free: slabs, tables, quarantine
		noChunk    time.Time // no new chunk before, the last attempt was refused
		stats      counters
	}
}

// retired pages wait until readers that might still look at them have given up.
type retired struct {
	chunk       *chunk
	page, pages int
	since       time.Time
}

func newNamespace(a *Arena, id uint32) *Namespace {
	n := &Namespace{a: a, id: id}
	n.list.Store(&map[rdma.RegionID]*rdma.Memory{})
	n.mu.shards = make(map[uint32]*Shard)
	return n
}

// Chunks lists the memory that exists now. The map is the caller's; the memory is
// freed after OnChunkGone.
func (n *Namespace) Chunks() map[rdma.RegionID]*rdma.Memory { return maps.Clone(*n.list.Load()) }

// OpenShard attaches a shard replica; its addresses are invalidated through rec. It
// panics where the shard is attached already.
func (n *Namespace) OpenShard(shard uint32, rec *Record) *Shard {
	if shard == 0 || shard > n.a.cfg.Shards {
		panic("arena: shard number outside of 1..Shards")
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.shards[shard] != nil {
		panic("arena: shard opened twice; Drop the old one first")
	}
	s := &Shard{n: n, id: shard, rec: rec}
	n.mu.shards[shard] = s
	return s
}

func (n *Namespace) poolLocked(c layout.Class) *pool {
	p := n.mu.pools[c]
	if p == nil {
		p = &pool{class: c}
		n.mu.pools[c] = p
	}
	return p
}

func (n *Namespace) chunkLocked(id uint32) *chunk { return n.mu.chunks[id-1] }

// blockLocked is the block that starts at the place.
func (n *Namespace) blockLocked(at layout.Place) block { return blockAt(n.mu.chunks, at) }

func blockAt(chunks []*chunk, at layout.Place) block {
	s := chunks[at.Chunk-1].owner[at.Offset>>pageShift]
	return block{s, int(at.Offset-uint64(s.page)<<pageShift) / s.size}
}

// takeBlockLocked gives out a block of exactly that class, from a slab there is or
// one made in free pages.
func (n *Namespace) takeBlockLocked(c layout.Class) (block, bool) {
	p := n.poolLocked(c)
	b, ok := p.take()
	if !ok {
		if !n.addSlabLocked(p) {
			return block{}, false
		}
		b, _ = p.take()
	}
	if b.slab.used == 1 {
		n.mu.emptyPages -= b.slab.pages
	}
	return b, true
}

// giveBlockLocked frees a block whose object is not live and in no slot any more.
func (n *Namespace) giveBlockLocked(b block) {
	n.traceBlock(opFree, b)
	n.mu.pools[b.slab.class].give(b)
	if b.slab.used == 0 {
		n.mu.emptyPages += b.slab.pages
	}
}

func (n *Namespace) addSlabLocked(p *pool) bool {
	pages := p.slabPages()
	c, page, ok := n.takePagesLocked(pages, nil)
	if !ok {
		// The largest slab that is worth having may fit nowhere; a small one may.
		least := (layout.ClassSize(p.class) + pageSize - 1) >> pageShift
		if pages = least; pages > fullSlabPages || p.class > layout.MaxSlabClass {
			return false
		}
		if c, page, ok = n.takePagesLocked(pages, nil); !ok {
			return false
		}
	}
	s := newSlab(p.class, pages)
	s.chunk, s.page = c, page
	c.setOwner(page, pages, s)
	s.clear()
	p.add(s)
	n.mu.emptyPages += pages
	n.mu.slabPages += pages
	return true
}

// takePagesLocked takes a run of free pages; their bytes are what they were.
func (n *Namespace) takePagesLocked(pages int, owner *slab) (*chunk, int, bool) {
	for again := true; ; again = false {
		for _, c := range n.mu.chunks {
			if c == nil {
				continue
			}
			if page, ok := c.takeRun(pages, owner); ok {
				n.mu.heldPages += pages
				return c, page, true
			}
		}
		if !again || !n.endQuarantineLocked() {
			return nil, 0, false
		}
	}
}

// freePagesLocked gives pages back that no reader can know.
func (n *Namespace) freePagesLocked(c *chunk, page, pages int) {
	c.giveRun(page, pages)
	n.mu.heldPages -= pages
	n.mu.freed++
}

// retirePagesLocked starts the quarantine of pages. layout_gen was bumped before,
// for everyone who may remember an address in them.
func (n *Namespace) retirePagesLocked(c *chunk, page, pages int) {
	c.setOwner(page, pages, retiredPages)
	n.mu.quarantine = append(n.mu.quarantine, retired{c, page, pages, n.a.cfg.Clock.Now()})
	n.trace(event{Op: opRetire, Place: layout.Place{Chunk: c.id, Offset: uint64(page) << pageShift}, Value: uint64(pages)})
}

// endQuarantineLocked frees the pages whose time is over and tells whether there
// were any.
func (n *Namespace) endQuarantineLocked() bool {
	if len(n.mu.quarantine) == 0 {
		return false
	}
	now, done := n.a.cfg.Clock.Now(), 0
	for _, r := range n.mu.quarantine {
		if now.Sub(r.since) < n.a.cfg.Quarantine {
			break
		}
		n.freePagesLocked(r.chunk, r.page, r.pages)
		done++
	}
	n.mu.quarantine = append(n.mu.quarantine[:0], n.mu.quarantine[done:]...)
	return done > 0
}

// bumpAllLocked invalidates what readers remember of any shard of the namespace.
func (n *Namespace) bumpAllLocked() {
	for _, s := range n.mu.shards {
		s.bumpLocked()
	}
}

func (n *Namespace) tick(now time.Time, starved bool) {
	n.mu.Lock()
	n.endQuarantineLocked()
	n.reclaimStepLocked(tickBudget)
	if n.mu.emptyPages > n.mu.heldPages/8 && !now.Before(n.mu.reclaim.nextTidy) {
		// Not more often: every reader of the namespace forgets its addresses.
		n.mu.reclaim.nextTidy = now.Add(n.a.cfg.Quarantine)
		n.retireEmptyLocked(0)
	}
	idle := len(n.mu.shards) == 0
	n.mu.Unlock()
	if idle || starved {
		n.releaseChunks()
	}
}

func (n *Namespace) free() error {
	n.growMu.Lock()
	defer n.growMu.Unlock()
	n.mu.Lock()
	defer n.mu.Unlock()
	var err error
	for _, c := range n.mu.chunks {
		if c != nil {
			err = errors.Join(err, c.mem.Free())
		}
	}
	n.mu.chunks = nil
	n.list.Store(&map[rdma.RegionID]*rdma.Memory{})
	return err
}
