package arena

import (
	"math/bits"

	"github.com/kvd-io/kvd/storage/layout"
)

const (
	fullSlabPages  = 16 // 64 KiB
	largeSlabPages = 64 // for classes above largeBlock
	largeBlock     = 8 << 10
)

// slab is a run of pages cut into equal blocks, each of which holds one object or
// nothing. Objects start at block boundaries and nowhere else. A class above
// layout.MaxSlabClass has one block in a slab.
//
// What the arena remembers about an object is two bits, used and touched, and half
// of its hash; the rest is in the object itself. Guarded by the namespace's lock.
type slab struct {
	chunk  *chunk
	class  layout.Class
	size   int // bytes of a block
	page   int
	pages  int
	blocks int

	used    int      // Invariant: the number of bits set in inUse
	inUse   []uint64 // a bit for each block
	touched []uint64 // second chances, see evict.go
	hint    int      // no word of inUse below has a zero bit
	hashes  []uint32 // high 32 bits of KeyHash.Hi, so that a table can grow without a look at its objects

	index    int  // in pool.slabs
	partial  int  // in pool.partial, -1: not there
	draining bool // being emptied: gives out no block
}

// block is one block of a slab; the zero block is none.
type block struct {
	slab *slab
	i    int
}

func (b block) offset() uint64 { return uint64(b.slab.page)<<pageShift + uint64(b.i*b.slab.size) }

func (b block) place() layout.Place {
	return layout.Place{Chunk: b.slab.chunk.id, Offset: b.offset()}
}

// bytes of the whole block.
func (b block) bytes() []byte {
	off := b.offset()
	return b.slab.chunk.bytes[off:][:b.slab.size:b.slab.size]
}

func (b block) state() layout.State { return layout.LoadState(b.bytes()) }

func (b block) touch()        { b.slab.touched[b.i/64] |= 1 << (b.i % 64) }
func (b block) untouch()      { b.slab.touched[b.i/64] &^= 1 << (b.i % 64) }
func (b block) touched() bool { return b.slab.touched[b.i/64]>>(b.i%64)&1 != 0 }

// header of the object in the block.
func (b block) header() layout.HeaderInfo {
	h, _ := layout.PeekHeader(b.bytes())
	return h
}

// key of the object in the block, borrowed until the block is freed.
func (b block) key() []byte {
	raw := b.bytes()
	h, _ := layout.PeekHeader(raw)
	return raw[layout.HeaderSize:][:h.KeyLen:h.KeyLen]
}

// pool is all slabs of one class in a namespace.
type pool struct {
	class   layout.Class
	slabs   []*slab
	partial []*slab // those with a free block that are not draining
	blocks  int
	pages   int

	next int // slabPages, computed once for each number of pages; 0: not known

	hand    int // slab and block that the clock looks at next
	handAt  int
	evicted int // since the class last asked for more room
}

// slabPages is how many pages the next slab of the class takes. Slabs grow with the
// pool, so that a class with a single object costs about a page; full ones are
// sized so that the rest behind the last block is small.
func (p *pool) slabPages() int {
	if p.next == 0 {
		p.next = p.nextSlabPages()
	}
	return p.next
}

func (p *pool) nextSlabPages() int {
	size := layout.ClassSize(p.class)
	if p.class > layout.MaxSlabClass {
		return (size + pageSize - 1) >> pageShift
	}
	limit := fullSlabPages
	if size > largeBlock {
		limit = largeSlabPages
	}
	least := max(min(limit, p.pages), (size+pageSize-1)>>pageShift)
	best, bestWaste := least, 1.0
	for n := least; n <= limit; n++ {
		waste := float64(n<<pageShift%size) / float64(n<<pageShift)
		if waste <= 1.0/32 {
			return n
		}
		if waste < bestWaste {
			best, bestWaste = n, waste
		}
	}
	return best
}

func newSlab(c layout.Class, pages int) *slab {
	s := &slab{class: c, size: layout.ClassSize(c), pages: pages, partial: -1}
	s.blocks = 1
	if c <= layout.MaxSlabClass {
		s.blocks = pages << pageShift / s.size
	}
	words := (s.blocks + 63) / 64
	bitmaps := make([]uint64, 2*words)
	s.inUse, s.touched = bitmaps[:words:words], bitmaps[words:]
	s.hashes = make([]uint32, s.blocks)
	if rest := s.blocks % 64; rest != 0 {
		s.inUse[words-1] = ^uint64(0) << rest // no blocks there
	}
	return s
}

// clear leaves no block that looks like a live object, whatever lay in the pages
// before. Invariant from here on: a free block's state is never live.
func (s *slab) clear() {
	for i := range s.blocks {
		layout.StoreWord(block{s, i}.bytes(), 0, 0)
	}
}

// take gives out a free block; there must be one.
func (s *slab) take() block {
	for ; ; s.hint++ {
		if free := ^s.inUse[s.hint]; free != 0 {
			i := bits.TrailingZeros64(free)
			s.inUse[s.hint] |= 1 << i
			s.used++
			b := block{s, s.hint*64 + i}
			b.untouch()
			return b
		}
	}
}

func (s *slab) holds(i int) bool { return i < s.blocks && s.inUse[i/64]>>(i%64)&1 != 0 }

func (p *pool) add(s *slab) {
	s.index = len(p.slabs)
	p.slabs = append(p.slabs, s)
	p.blocks += s.blocks
	p.pages += s.pages
	p.next = 0
	p.setPartial(s)
}

func (p *pool) remove(s *slab) {
	last := p.slabs[len(p.slabs)-1]
	p.slabs[s.index], last.index = last, s.index
	p.slabs[len(p.slabs)-1] = nil
	p.slabs = p.slabs[:len(p.slabs)-1]
	p.blocks -= s.blocks
	p.pages -= s.pages
	p.next = 0
	p.clearPartial(s)
}

func (p *pool) setPartial(s *slab) {
	if s.partial < 0 && !s.draining && s.used < s.blocks {
		s.partial = len(p.partial)
		p.partial = append(p.partial, s)
	}
}

func (p *pool) clearPartial(s *slab) {
	if s.partial < 0 {
		return
	}
	last := p.partial[len(p.partial)-1]
	p.partial[s.partial], last.partial = last, s.partial
	p.partial[len(p.partial)-1] = nil
	p.partial = p.partial[:len(p.partial)-1]
	s.partial = -1
}

// take gives out a free block of the class, if one of its slabs has one.
func (p *pool) take() (block, bool) {
	if len(p.partial) == 0 {
		return block{}, false
	}
	s := p.partial[len(p.partial)-1]
	b := s.take()
	if s.used == s.blocks {
		p.clearPartial(s)
	}
	return b, true
}

// give takes a block back; the next object of the class may have it at once.
func (p *pool) give(b block) {
	s := b.slab
	s.inUse[b.i/64] &^= 1 << (b.i % 64)
	s.used--
	s.hint = min(s.hint, b.i/64)
	p.setPartial(s)
}
