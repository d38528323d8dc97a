package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// runner decides when a batch is executed and when it is complete.
type runner = func(n *fakeNode, b *rdma.Batch, exec func() error, done func(error))

// fakeNet is a provider whose READs a test can watch, hold and break.
type fakeNet struct {
	c    *fakeCluster
	name string
	sync bool // Post completes inline
	// query makes connections rdma.Queriers.
	query bool
	// run, when set, is given every batch that is not run inline: it must call exec
	// once, and then done once, from whichever goroutine and whenever.
	run runner

	mu    sync.Mutex
	conns []*fakeConn
	trace []fakeRead
	down  error // nil, or why there is no device
	asked int   // for a device
}

// fakeRead is one executed READ.
type fakeRead struct {
	node   uint64
	batch  int
	region rdma.RegionID
	offset uint64
	length int
	dst    *byte
}

func (f *fakeNet) Name() string                                              { return f.name }
func (f *fakeNet) NewTarget(rdma.TargetConfig) (rdma.Target, error)          { return nil, rdma.ErrUnsupported }
func (f *fakeNet) NewInitiator(rdma.InitiatorConfig) (rdma.Initiator, error) { return f, f.device() }
func (f *fakeNet) Prepare(context.Context) (rdma.Dial, error)                { return fakeDial{f}, f.device() }

func (f *fakeNet) device() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++
	return f.down
}

// unplug takes the device away: its connections are lost, and there are no others. nil
// puts it back.
func (f *fakeNet) unplug(why error) {
	f.mu.Lock()
	f.down = why
	f.mu.Unlock()
	if why != nil {
		f.lose(0, fmt.Errorf("%w: the device is gone", rdma.ErrConnLost))
	}
}

// lose ends the connections with a node, or with all (0).
func (f *fakeNet) lose(node uint64, err error) {
	f.mu.Lock()
	conns := slices.Clone(f.conns)
	f.mu.Unlock()
	for _, c := range conns {
		if node == 0 || c.n.id == node {
			c.fail(err)
		}
	}
}

func (f *fakeNet) Close() error {
	f.mu.Lock()
	conns := f.conns
	f.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
	return nil
}

type fakeDial struct{ f *fakeNet }

func (d fakeDial) Offer() []byte { return []byte("offer") }
func (d fakeDial) Abort()        {}
func (d fakeDial) Connect(_ context.Context, answer []byte) (rdma.Conn, error) {
	n := d.f.c.nodes[answer[0]-1]
	c := &fakeConn{f: d.f, n: n, done: make(chan struct{}), out: make(map[*rdma.Batch]bool)}
	go c.watch()
	d.f.mu.Lock()
	d.f.conns = append(d.f.conns, c)
	d.f.mu.Unlock()
	if d.f.query {
		return &fakeQuerier{c}, nil
	}
	return c, nil
}

type fakeConn struct {
	f    *fakeNet
	n    *fakeNode
	done chan struct{}
	mu   sync.Mutex
	err  error
	out  map[*rdma.Batch]bool // outstanding
}

func (c *fakeConn) watch() {
	select {
	case <-c.n.stop:
		c.fail(rdma.ErrConnLost)
	case <-c.done:
	}
}

func (c *fakeConn) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	var out []*rdma.Batch
	for b := range c.out {
		out = append(out, b)
	}
	clear(c.out)
	c.mu.Unlock()
	close(c.done)
	for _, b := range out {
		b.Complete(err)
	}
}

func (c *fakeConn) AddRegion(rdma.RegionID, uint64, []byte) error { return nil }
func (c *fakeConn) HasRegion(rdma.RegionID) bool                  { return true }
func (c *fakeConn) Done() <-chan struct{}                         { return c.done }
func (c *fakeConn) Synchronous() bool                             { return c.f.sync }
func (c *fakeConn) Close() error                                  { c.fail(rdma.ErrClosed); return nil }
func (c *fakeConn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *fakeConn) Post(b *rdma.Batch) {
	if c.f.sync { // without a closure: allocations are counted
		err := c.Err()
		if err == nil {
			err = c.n.read(c.f, b)
		}
		b.CompleteInline(err)
		return
	}
	c.post(b, func() error { return c.n.read(c.f, b) })
}

func (c *fakeConn) post(b *rdma.Batch, exec func() error) {
	if c.f.sync {
		if err := c.Err(); err != nil {
			b.CompleteInline(err)
			return
		}
		b.CompleteInline(exec())
		return
	}
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		b.Complete(c.err)
		return
	}
	c.out[b] = true
	c.mu.Unlock()
	done := func(err error) {
		c.mu.Lock()
		mine := c.out[b]
		delete(c.out, b)
		c.mu.Unlock()
		if mine {
			b.Complete(err)
		}
	}
	if c.f.run == nil {
		done(exec())
		return
	}
	c.f.run(c.n, b, func() error {
		// A batch that was completed by fail is no longer ours to touch.
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.out[b] {
			return c.err
		}
		return exec()
	}, done)
}

type fakeQuerier struct{ *fakeConn }

func (c *fakeQuerier) PostQuery(b *rdma.Batch, query []byte) {
	q := bytes.Clone(query)
	c.post(b, func() error {
		n := c.n
		n.c.mu.Lock()
		defer n.c.mu.Unlock()
		answer := layout.AnswerQuery(func(chunk uint32, offset, length uint64) []byte {
			if chunk != 1 || offset > uint64(len(n.chunk)) || length > uint64(len(n.chunk))-offset {
				return nil
			}
			return n.chunk[offset:][:length]
		}, q, nil)
		if len(answer) > len(b.Reads[0].Dst) {
			return rdma.ErrExhausted
		}
		b.Reads[0].N = copy(b.Reads[0].Dst, answer)
		return nil
	})
}

var errFakeBounds = errors.New("outside")

// read executes a chain.
func (n *fakeNode) read(f *fakeNet, b *rdma.Batch) error {
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	f.mu.Lock()
	batch := 1
	if k := len(f.trace); k > 0 {
		batch = f.trace[k-1].batch + 1
	}
	for _, r := range b.Reads {
		if len(f.trace) < 4096 {
			f.trace = append(f.trace, fakeRead{n.id, batch, r.Region, r.Offset, len(r.Dst), unsafe.SliceData(r.Dst)})
		}
	}
	f.mu.Unlock()
	for i := range b.Reads {
		r := &b.Reads[i]
		m := n.chunk
		if r.Region == rdma.ControlRegion {
			m = n.control
		} else if r.Region != 1 {
			return fmt.Errorf("%w: region %d", rdma.ErrAccess, r.Region)
		}
		if r.Offset > uint64(len(m)) || uint64(len(r.Dst)) > uint64(len(m))-r.Offset {
			return fmt.Errorf("%w: %w", rdma.ErrAccess, errFakeBounds)
		}
		r.N = copy(r.Dst, m[r.Offset:])
	}
	return nil
}
