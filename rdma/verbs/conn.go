package verbs

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/kvd-io/kvd/rdma"
)

// conn implements rdma.Conn: one queue pair on each rail that both sides have. A batch
// goes whole to one of them, so a chain is executed in order. A rail that fails hands its
// outstanding batches to the others, as READs may be repeated; with the last one the
// connection is finished.
type conn struct {
	in   *initiator
	node uint64
	boot uint64
	all  []*rail // fixed once connected

	alive       atomic.Pointer[[]*rail]
	regions     atomic.Pointer[map[rdma.RegionID]*remote] // replaced, never changed
	outstanding atomic.Int64                              // batches
	waitFunc    rdma.WaitFunc

	done chan struct{}
	mu   struct {
		sync.Mutex
		cause   error // why it ends; the first reason stays
		err     error // set before done is closed
		chosen  bool  // alive is what works, not empty because nothing is known yet
		closing bool
		left    int // rails that are not gone
	}
}

var _ rdma.Conn = (*conn)(nil)

// remote is a region of the target.
type remote struct {
	addr   uint64
	length uint64
	// keys by rail.index.
	keys []remoteKey
}

type remoteKey struct {
	rkey  uint32
	valid bool
}

func newConn(in *initiator, a answer) *conn {
	c := &conn{in: in, node: a.node, boot: a.boot, done: make(chan struct{})}
	c.regions.Store(&map[rdma.RegionID]*remote{})
	c.alive.Store(&[]*rail{})
	c.waitFunc = c.wait
	return c
}

// adopt makes r a rail of the connection, before any of them is connected.
func (c *conn) adopt(r *rail, a answerRail) {
	r.index, r.device = len(c.all), a.device
	c.all = append(c.all, r)
	r.end.Lock()
	defer r.end.Unlock()
	if !r.end.torn { // otherwise its device went meanwhile, and nobody will report it
		r.end.c = c
		c.mu.Lock()
		c.mu.left++
		c.mu.Unlock()
	}
}

// awaitRails waits until each rail has greeted the target or failed, and returns how
// many work.
func (c *conn) awaitRails(ctx context.Context) (working int, errs []error) {
	var alive []*rail
	for _, r := range c.all {
		select {
		case <-r.greeted:
			alive = append(alive, r)
			continue
		default:
		}
		select {
		case <-r.greeted:
			alive = append(alive, r)
		case <-r.dying:
			errs = append(errs, r.reason())
			c.in.shunned.add(r.n, r.gid)
		case <-ctx.Done():
			r.fail(fmt.Errorf("%w: verbs: connect: %w", rdma.ErrTimeout, ctx.Err()))
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	// One that failed just now was not there to take itself off.
	kept := alive[:0]
	for _, r := range alive {
		if !r.isDying() {
			kept = append(kept, r)
		}
	}
	c.alive.Store(&kept)
	c.mu.chosen = true
	return len(kept), errs
}

// begin hands the connection over, unless the initiator was closed meanwhile.
func (c *conn) begin() (rdma.Conn, error) {
	c.in.mu.Lock()
	if c.in.mu.closed {
		c.in.mu.Unlock()
		_ = c.Close()
		return nil, fmt.Errorf("%w: verbs: initiator", rdma.ErrClosed)
	}
	c.in.mu.conns[c] = struct{}{}
	c.in.mu.Unlock()
	select {
	case <-c.done: // before it was known
		c.in.forget(c)
	default:
	}
	return c, nil
}

// AddRegion implements rdma.Conn.
func (c *conn) AddRegion(id rdma.RegionID, length uint64, b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	old := *c.regions.Load()
	if _, ok := old[id]; ok {
		return nil
	}
	a, err := decodeAttr(b)
	if err != nil {
		return err
	}
	switch {
	case a.id != id:
		return fmt.Errorf("%w: verbs: the attr is of region %d, not of %d", rdma.ErrAccess, a.id, id)
	case length > a.length:
		return fmt.Errorf("%w: verbs: region %d is said to have %d bytes, its attr has %d", rdma.ErrAccess, id, length, a.length)
	case a.boot != c.boot:
		return fmt.Errorf("%w: verbs: region %d is of boot %#x, the connection of %#x", rdma.ErrAccess, id, a.boot, c.boot)
	}
	r := &remote{addr: a.addr, length: length, keys: make([]remoteKey, len(c.all))}
	found := false
	for _, rail := range c.all {
		for _, k := range a.keys {
			if k.device == rail.device {
				r.keys[rail.index] = remoteKey{rkey: k.rkey, valid: true}
				found = true
			}
		}
	}
	if !found {
		return fmt.Errorf("%w: verbs: region %d has no key for a device of this connection: the attr is older than it, or the device has gone: ask for it again", rdma.ErrAccess, id)
	}
	grown := make(map[rdma.RegionID]*remote, len(old)+1)
	maps.Copy(grown, old)
	grown[id] = r
	c.regions.Store(&grown)
	return nil
}

// HasRegion implements rdma.Conn.
func (c *conn) HasRegion(id rdma.RegionID) bool {
	_, ok := (*c.regions.Load())[id]
	return ok
}

// Synchronous implements rdma.Conn.
func (c *conn) Synchronous() bool { return false }

// Done implements rdma.Conn.
func (c *conn) Done() <-chan struct{} { return c.done }

// Err implements rdma.Conn.
func (c *conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.err
}

// Close implements rdma.Conn.
func (c *conn) Close() error {
	closed := fmt.Errorf("%w: verbs: connection", rdma.ErrClosed)
	c.mu.Lock()
	first := !c.mu.closing && c.mu.cause == nil
	c.mu.closing = true
	if c.mu.cause == nil {
		c.mu.cause = closed
	}
	c.mu.Unlock()
	if first {
		for _, r := range c.all {
			r.farewell(byeLeft)
		}
	}
	for _, r := range c.all {
		r.fail(closed)
	}
	for _, r := range c.all {
		<-r.gone
	}
	<-c.done
	return nil
}

// finish ends the connection for a reason that is not one rail's alone.
func (c *conn) finish(why error) {
	c.mu.Lock()
	if c.mu.cause == nil {
		c.mu.cause = why
	}
	why = c.mu.cause
	c.mu.Unlock()
	for _, r := range c.all {
		r.fail(why)
	}
}

func (c *conn) cause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.cause
}

// leaving takes a rail that fails out of the choice.
func (c *conn) leaving(r *rail) {
	c.mu.Lock()
	defer c.mu.Unlock()
	old := *c.alive.Load()
	kept := make([]*rail, 0, len(old))
	for _, o := range old {
		if o != r {
			kept = append(kept, o)
		}
	}
	c.alive.Store(&kept)
	if len(kept) == 0 && c.mu.chosen && c.mu.cause == nil {
		c.mu.cause = r.reason()
	}
}

// railGone takes over what was outstanding on a rail: nothing of it touches a buffer any
// more. Called once for each rail, by its own goroutine.
func (c *conn) railGone(r *rail, left []*work) {
	cause := c.cause()
	for _, w := range left {
		switch {
		case w.err != nil:
			c.complete(w, w.err)
		case cause != nil:
			c.complete(w, cause)
		default:
			w.rewind()
			c.route(w)
		}
	}
	if cause == nil && len(left) > 0 {
		c.in.log.Warn("verbs: a rail failed, its READs go on by another", "node", c.node, "device", r.n.name, "port", r.spec.port, "batches", len(left), "err", r.reason())
	}
	c.mu.Lock()
	c.mu.left--
	last := c.mu.left == 0
	if last {
		if c.mu.cause == nil {
			c.mu.cause = r.reason()
		}
		c.mu.err = c.mu.cause
	}
	c.mu.Unlock()
	if last {
		c.in.forget(c)
		close(c.done)
	}
}

// complete gives a batch back. Nothing of w may be touched afterwards.
func (c *conn) complete(w *work, err error) {
	c.outstanding.Add(-1)
	w.b.Complete(err)
}
