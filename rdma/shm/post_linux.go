package shm

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// errOutdated: the server took a region away since the table was made.
var errOutdated = errors.New("shm: region table outdated")

// Post implements rdma.Conn. It returns with the batch complete.
func (c *conn) Post(b *rdma.Batch) {
	err := c.read(b)
	for tries := 0; err == errOutdated; tries++ {
		if err = c.awaitTable(); err == nil {
			err = c.read(b)
		}
	}
	b.CompleteInline(err)
}

// read copies the whole chain and then asks whether the copies may be used.
func (c *conn) read(b *rdma.Batch) error {
	s := c.readers.enter(b)
	t := c.table.Load()
	if t == nil {
		s.inside.Add(-1)
		return c.Err()
	}
	if len(b.Reads) == 0 {
		s.inside.Add(-1)
		return fmt.Errorf("%w: shm: batch without READs", rdma.ErrAccess)
	}
	for i := range b.Reads {
		r := &b.Reads[i]
		m := t.find(r.Region)
		n := uint64(len(r.Dst))
		// Written so that nothing can overflow; a region that is not there has no bytes.
		if n == 0 || n > uint64(len(m)) || r.Offset > uint64(len(m))-n {
			s.inside.Add(-1)
			return c.outside(r, m)
		}
		copyOut(r.Dst, m[r.Offset:r.Offset+n])
		r.N = len(r.Dst)
	}
	// After the last copy, not before: a server that dies in between leaves memory
	// behind that nobody vouches for.
	alive, state, count := t.serverAlive(), atomic.LoadUint64(t.state), t.count
	s.inside.Add(-1)
	if alive && state == count {
		return nil
	}
	return c.unusable(alive, state)
}

// maxWordCopy is the longest READ in bytes that is copied word by word; the
// contract asks for half of it.
const maxWordCopy = 2 * rdma.WholeReadBytes

// copyOut copies in the order of the chain: all of it is loaded before anything
// that the next call, or the checks at the end, load.
func copyOut(dst, src []byte) {
	if len(src) > rdma.WholeReadBytes && len(src) <= maxWordCopy {
		rdma.CopyExposed(dst[:rdma.WholeReadBytes], src[:rdma.WholeReadBytes])
		dst, src = dst[rdma.WholeReadBytes:], src[rdma.WholeReadBytes:]
	}
	rdma.CopyExposed(dst, src)
}

// unusable tells why the copies of a batch must not be used.
func (c *conn) unusable(alive bool, state uint64) error {
	switch {
	case !alive:
		c.fail(errServerDied)
	case state&stateEnded != 0:
		c.fail(endError(state))
	default:
		return errOutdated
	}
	return c.Err()
}

// outside says what is wrong with a READ; an ended connection goes first.
func (c *conn) outside(r *rdma.Read, m []byte) error {
	if err := c.Err(); err != nil {
		return err
	}
	if m == nil {
		return fmt.Errorf("%w: shm: region %d was not added to this connection, or was taken back", rdma.ErrAccess, r.Region)
	}
	if len(r.Dst) == 0 {
		return fmt.Errorf("%w: shm: READ of 0 bytes in region %d: want at least one", rdma.ErrAccess, r.Region)
	}
	return fmt.Errorf("%w: shm: READ of %d bytes at %d in region %d of %d bytes", rdma.ErrAccess, len(r.Dst), r.Offset, r.Region, len(m))
}

// awaitTable waits until the message that explains the page's state has been
// worked in. It is on its way, or the connection is ending.
func (c *conn) awaitTable() error {
	limit := time.NewTimer(c.timeout)
	defer limit.Stop()
	for {
		c.mu.Lock()
		changed := c.mu.changed
		c.mu.Unlock()
		switch current, err := c.tableCurrent(); {
		case err != nil:
			return err
		case current:
			return nil
		}
		select {
		case <-changed:
		case <-c.done:
			return c.Err()
		case <-limit.C:
			c.fail(fmt.Errorf("%w: shm: the server took a region back but has not said which for %v", rdma.ErrConnLost, c.timeout))
			return c.Err()
		}
	}
}

// tableCurrent compares the table with the page's state once more.
func (c *conn) tableCurrent() (bool, error) {
	s := c.readers.enterAny()
	t := c.table.Load()
	if t == nil {
		s.inside.Add(-1)
		return false, c.Err()
	}
	alive, state, count := t.serverAlive(), atomic.LoadUint64(t.state), t.count
	s.inside.Add(-1)
	if alive && state == count {
		return true, nil
	}
	if err := c.unusable(alive, state); !errors.Is(err, errOutdated) {
		return false, err
	}
	return false, nil
}
