package arena

import (
	"math/bits"

	"github.com/kvd-io/kvd/rdma"
)

// chunk is one registered memory and the purpose of each of its pages. All but the
// immutable fields is guarded by its namespace's lock.
type chunk struct {
	id    uint32       // immutable
	mem   *rdma.Memory // immutable
	bytes []byte       // immutable

	free      []uint64 // a bit for each page: 1 free
	freePages int
	// longest is an upper bound of the longest free run, so that a search which must
	// fail is skipped.
	longest int
	owner   []*slab // of each page that is not free; or one of the marks below
}

// Marks in chunk.owner.
var (
	tablePages   = &slab{} // an index table
	retiredPages = &slab{} // in quarantine
)

// newChunk uses the first size bytes of mem, which has more where the host's pages
// are larger than ours.
func newChunk(id uint32, mem *rdma.Memory, size uint64) *chunk {
	pages := int(size >> pageShift)
	c := &chunk{id: id, mem: mem, bytes: mem.Bytes()[:size], free: make([]uint64, (pages+63)/64), owner: make([]*slab, pages)}
	c.giveRun(0, pages)
	return c
}

func (c *chunk) pages() int { return len(c.owner) }

func (c *chunk) span(page, pages int) []byte {
	return c.bytes[page<<pageShift:][: pages<<pageShift : pages<<pageShift]
}

// takeRun takes the first run of n free pages for owner.
func (c *chunk) takeRun(n int, owner *slab) (page int, ok bool) {
	if c.longest < n {
		return 0, false
	}
	run, longest := 0, 0
	for w, word := range c.free {
		switch word {
		case 0:
			longest, run = max(longest, run), 0
		case ^uint64(0):
			run += 64
		default:
			for b := 0; b < 64 && run < n; {
				if ones := bits.TrailingZeros64(^(word >> b)); ones > 0 {
					ones = min(ones, 64-b)
					run, b = run+ones, b+ones
					if run >= n {
						c.mark(w*64+b-run, n, owner)
						return w*64 + b - run, true
					}
					continue
				}
				longest, run = max(longest, run), 0
				if word>>b == 0 {
					break
				}
				b += bits.TrailingZeros64(word >> b)
			}
			continue
		}
		if run >= n {
			page = (w+1)*64 - run
			c.mark(page, n, owner)
			return page, true
		}
	}
	c.longest = max(longest, run)
	return 0, false
}

func (c *chunk) mark(page, n int, owner *slab) {
	for p := page; p < page+n; p++ {
		c.free[p/64] &^= 1 << (p % 64)
		c.owner[p] = owner
	}
	c.freePages -= n
}

// giveRun makes pages free; neighbouring free runs become one.
func (c *chunk) giveRun(page, n int) {
	for p := page; p < page+n; p++ {
		c.free[p/64] |= 1 << (p % 64)
		c.owner[p] = nil
	}
	c.freePages += n
	c.longest = c.freePages
}

func (c *chunk) setOwner(page, n int, owner *slab) {
	for p := page; p < page+n; p++ {
		c.owner[p] = owner
	}
}
