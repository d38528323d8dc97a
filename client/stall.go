package client

import (
	"context"
	"fmt"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// stallAfter is how long a batch may be out before its connection counts as stalled. It
// is below attemptLimit, so that the get which noticed finds the flag set.
const stallAfter = attemptLimit * 4 / 5

var errStalled = fmt.Errorf("connection given up: %w", ErrUnavailable)

// outlast sees a posted batch of n bytes to its end that no get waits for any more. While
// it is late the connection counts as stalled: gets use other ways at once. An answer that
// does not come at all (bytes were lost, the process is stopped for long) would keep the
// batch, and who waits behind it in its lane, for ever. So after Config.StallTimeout the
// session is given up: closing its connection completes the batch, which is the
// provider's until then, and the node's loop connects anew.
func (s *session) outlast(b *rdma.Batch, n int) {
	ctx := context.Background()
	transfer := time.Duration(n) * time.Second / slowestLink
	if b.Wait(ctx, stallAfter+transfer) {
		return
	}
	s.stalled.Add(1)
	defer s.stalled.Add(-1)
	limit := s.c.cfg.StallTimeout
	if !b.Wait(ctx, limit+transfer) {
		s.fail(fmt.Errorf("%w: node %d has not answered a READ for %v", errStalled, s.nodeID, limit))
		b.Wait(ctx, 0)
	}
}

// readBytes is how many bytes the chain asks for. It must not be posted yet.
func readBytes(reads []rdma.Read) (n int) {
	for i := range reads {
		n += len(reads[i].Dst)
	}
	return n
}
