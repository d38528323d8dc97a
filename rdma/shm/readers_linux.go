package shm

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvd-io/kvd/rdma"
)

// readers counts who is inside the mappings, so that they are unmapped only when
// nobody is. The count is spread over stripes: one counter would pass between the
// cores with every READ.
//
// The rule that makes it safe: a reader enters first and looks at the table then;
// who unmaps takes the mapping out of the table first and looks at the stripes
// then. Atomics of Go are sequentially consistent, so either the reader does not
// find the mapping, or its stripe is seen to be taken.
type readers struct {
	stripes [numStripes]stripe
}

const numStripes = 32 // power of two

// stripe fills two cache lines: neighbouring lines are fetched in pairs.
type stripe struct {
	inside atomic.Int64
	_      [120]byte
}

// enter picks the stripe by the batch: goroutines that run at the same time post
// different ones. leave is stripe.inside.Add(-1).
func (r *readers) enter(b *rdma.Batch) *stripe {
	// Multiplicative hashing (Knuth): the addresses differ in a few middle bits.
	h := uint64(uintptr(unsafe.Pointer(b))) * 0x9e3779b97f4a7c15
	s := &r.stripes[h>>(64-5)]
	s.inside.Add(1)
	return s
}

// enterAny enters outside of a Post.
func (r *readers) enterAny() *stripe {
	s := &r.stripes[0]
	s.inside.Add(1)
	return s
}

// waitQuiet returns when everybody who was inside at the call has left. It is
// called after the mapping was taken out of the table. A reader is inside for
// the length of its copies, so this is short.
func (r *readers) waitQuiet() {
	for i := range r.stripes {
		for n := 0; r.stripes[i].inside.Load() != 0; n++ {
			if n < 100 {
				runtime.Gosched()
			} else {
				time.Sleep(20 * time.Microsecond)
			}
		}
	}
}
