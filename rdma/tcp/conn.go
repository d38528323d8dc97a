package tcp

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// conn is the reading side of one connection. Three parts of it have an owner
// each: the sender (send.go) is shared by whoever posts, the receiver (receive.go)
// belongs to the one goroutine that holds the reader role, and the role (role.go)
// says who that is.
type conn struct {
	in           *initiator
	nc           net.Conn     // what is read: the socket, or TLS over it
	sock         *net.TCPConn // what is written, by the sender, and closed
	maxReadBytes uint64

	send sender
	recv receiver
	role role

	// outstanding counts batches that were posted and are not complete. A post counts
	// before it is queued.
	outstanding atomic.Int64

	regions   atomic.Pointer[map[rdma.RegionID]uint64] // id -> length; replaced, never changed
	regionsMu sync.Mutex                               // serializes AddRegion

	waitFunc rdma.WaitFunc // wait, bound once

	// mustEnd: the socket is closed or broken, so somebody must read until the error
	// shows and complete what is outstanding.
	mustEnd atomic.Bool
	end     struct {
		sync.Mutex
		cause error // why this side closed the socket; nil while it has not
		err   error // set before done is closed
	}
	done    chan struct{}
	helpers sync.WaitGroup // the background reader and writer
}

// work is what the provider keeps for a posted batch: in Batch.Work, reused.
type work struct {
	c   *conn
	b   *rdma.Batch
	err error // the first of its frames; the role holder's

	// claimed: a goroutine is in wait with it. Others that wait for the same batch
	// sleep on the batch's own channel.
	claimed atomic.Bool

	// The rest is guarded by role.mu.
	waiting    bool // in role.mu.waiters
	granted    bool // woken to become the reader
	next, prev *work
	wake       chan struct{} // room for one: sent after waiting went from true to false, and only then
	timer      *time.Timer   // the waiting goroutine's
}

// maxPostedFrames of one batch: its READs in frames of maxFrameReads. A bound for
// the sender's buffer, far above what a caller can use.
const maxPostedFrames = 1024

func newConn(in *initiator, nc net.Conn, sock *net.TCPConn, raw syscall.RawConn, maxReadBytes uint64) *conn {
	c := &conn{in: in, nc: nc, sock: sock, maxReadBytes: maxReadBytes, done: make(chan struct{})}
	c.regions.Store(&map[rdma.RegionID]uint64{})
	c.send.init(c, raw)
	c.recv.init(c)
	c.role.init()
	c.waitFunc = c.wait
	c.helpers.Go(c.readInBackground)
	c.helpers.Go(c.writeInBackground)
	return c
}

// AddRegion makes a region known.
func (c *conn) AddRegion(id rdma.RegionID, length uint64, attr []byte) error {
	c.regionsMu.Lock()
	defer c.regionsMu.Unlock()
	old := *c.regions.Load()
	if _, ok := old[id]; ok {
		return nil
	}
	if err := checkAttr(attr, id); err != nil {
		return err
	}
	grown := make(map[rdma.RegionID]uint64, len(old)+1)
	maps.Copy(grown, old)
	grown[id] = length
	c.regions.Store(&grown)
	return nil
}

// HasRegion tells whether the region was added.
func (c *conn) HasRegion(id rdma.RegionID) bool {
	_, ok := (*c.regions.Load())[id]
	return ok
}

// Synchronous is false: there is a network in between.
func (c *conn) Synchronous() bool { return false }

// Done is closed when the connection is finished.
func (c *conn) Done() <-chan struct{} { return c.done }

// Err says why the connection is finished; nil before.
func (c *conn) Err() error {
	c.end.Lock()
	defer c.end.Unlock()
	return c.end.err
}

// Close completes what is outstanding with ErrClosed and waits for the helpers.
func (c *conn) Close() error {
	c.abandon(fmt.Errorf("%w: tcp", rdma.ErrClosed))
	<-c.done
	c.helpers.Wait()
	return nil
}

// abandon closes the socket for the given reason and sees to it that somebody
// notices. The first reason counts.
func (c *conn) abandon(cause error) {
	c.end.Lock()
	if c.end.cause == nil {
		c.end.cause = cause
	}
	c.end.Unlock()
	c.mustEnd.Store(true)
	_ = c.sock.Close()
	c.kick()
}

// finish is called once, by the holder of the reader role, which it keeps for good:
// nobody reads any more. seen is the error that it met.
func (c *conn) finish(seen error) {
	c.end.Lock()
	err := c.end.cause
	if err == nil {
		switch {
		case errors.Is(seen, rdma.ErrRevoked):
			err = seen
		default:
			err = lost(c, seen)
		}
		c.end.cause = err
	}
	c.end.err = err
	c.end.Unlock()
	_ = c.sock.Close()
	c.recv.failAll(c.send.stop(err), err)
	close(c.done)
	c.in.forget(c)
}

// Post starts the chain b.Reads.
func (c *conn) Post(b *rdma.Batch) {
	if err := c.checkReads(b.Reads); err != nil {
		b.Complete(err)
		return
	}
	c.start(b, nil)
}

// PostQuery starts a query; it is copied. The answer goes to b.Reads[0].
func (c *conn) PostQuery(b *rdma.Batch, query []byte) {
	switch {
	case len(query) > maxQueryBytes:
		b.Complete(fmt.Errorf("%w: tcp: query of %d bytes: at most %d", rdma.ErrExhausted, len(query), maxQueryBytes))
		return
	case len(b.Reads) == 0:
		b.Complete(fmt.Errorf("%w: tcp: query with no place for its answer, want one READ", rdma.ErrAccess))
		return
	}
	if query == nil {
		query = []byte{}
	}
	c.start(b, query)
}

// checkReads refuses what this side knows to be wrong; the target checks again.
func (c *conn) checkReads(reads []rdma.Read) error {
	if len(reads) == 0 {
		return fmt.Errorf("%w: tcp: a chain of no READs", rdma.ErrAccess)
	}
	if len(reads) > maxPostedFrames*maxFrameReads {
		return fmt.Errorf("%w: tcp: chain of %d READs: at most %d", rdma.ErrExhausted, len(reads), maxPostedFrames*maxFrameReads)
	}
	regions := *c.regions.Load()
	for i := range reads {
		r := &reads[i]
		length := uint64(len(r.Dst))
		size, ok := regions[r.Region]
		switch {
		case !ok:
			return fmt.Errorf("%w: tcp: READ %d of region %d, which was not added to this connection", rdma.ErrAccess, i, r.Region)
		case length == 0:
			return fmt.Errorf("%w: tcp: READ %d of no bytes", rdma.ErrAccess, i)
		case r.Offset > size || length > size-r.Offset:
			return fmt.Errorf("%w: tcp: READ %d of %d bytes at %d of region %d, which has %d", rdma.ErrAccess, i, length, r.Offset, r.Region, size)
		case length > c.maxReadBytes:
			return fmt.Errorf("%w: tcp: READ %d of %d bytes: the target answers at most %d", rdma.ErrExhausted, i, length, c.maxReadBytes)
		}
	}
	return nil
}

// start queues a batch and has it sent. query is nil for READs.
func (c *conn) start(b *rdma.Batch, query []byte) {
	w, ok := b.Work.(*work)
	if !ok {
		w = &work{wake: make(chan struct{}, 1)}
		b.Work = w
	}
	w.c, w.b, w.err = c, b, nil
	if n := c.outstanding.Add(1); n > int64(c.in.p.MaxInFlight) {
		c.outstanding.Add(-1)
		b.Complete(fmt.Errorf("%w: tcp: %d batches outstanding on this connection: wait for some, or raise MaxInFlight", rdma.ErrExhausted, n-1))
		return
	}
	b.SetWaiter(c.waitFunc)
	flusher, err := c.send.queue(w, query)
	if err != nil {
		c.outstanding.Add(-1)
		b.Complete(err)
		return
	}
	// The batch may be complete, and the caller's, from here on.
	c.role.postedNow()
	crowd := c.send.crowd()
	if flusher {
		if crowd {
			// Others were woken together with this caller and are about to post. Let
			// them: one write takes the requests of all.
			runtime.Gosched()
		}
		c.send.flush()
	}
}
