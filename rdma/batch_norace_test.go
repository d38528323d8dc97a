//go:build !race

package rdma

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBatchCompletedTwiceAtOnce: of two providers that complete a batch at the same
// moment one panics. It is a race by what it tests, so the race detector does not run
// it.
func TestBatchCompletedTwiceAtOnce(t *testing.T) {
	for range 1000 {
		b := fresh()
		var panics, here atomic.Int32
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for here.Add(1); here.Load() < 2; { // as close together as it goes
					runtime.Gosched()
				}
				defer func() {
					if recover() != nil {
						panics.Add(1)
					}
				}()
				b.Complete(nil)
			})
		}
		wg.Wait()
		require.EqualValues(t, 1, panics.Load())
	}
}
