package shm

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
)

var errServerDied = fmt.Errorf("%w: shm: the server process died", rdma.ErrConnLost)

// conn implements rdma.Conn.
//
// One goroutine (receiveLoop) reads the socket, and it alone maps, unmaps and
// replaces the table; Post only reads the table.
type conn struct {
	in      *initiator
	sock    *net.UnixConn
	answer  answer
	timeout time.Duration
	death   []byte // mapped, until receiveLoop ends
	page    []byte // mapped, until receiveLoop ends

	table   atomic.Pointer[table] // nil once the connection has ended
	readers readers

	regions map[rdma.RegionID][]byte // receiveLoop's: what is mapped
	done    chan struct{}            // closed with the end of the connection
	left    chan struct{}            // closed when receiveLoop has unmapped all

	mu struct {
		sync.Mutex
		err     error // why the connection ended
		waiting map[rdma.RegionID]*request
		changed chan struct{} // closed and replaced when the table is
	}
}

// request is an AddRegion under way; others for the same region wait with it.
type request struct {
	size uint64
	done chan struct{}
	err  error // valid when done is closed
}

func newConn(in *initiator, sock *net.UnixConn, a answer, tid uint32, death, page []byte) *conn {
	c := &conn{
		in: in, sock: sock, answer: a, timeout: in.timeout, death: death, page: page,
		regions: make(map[rdma.RegionID][]byte),
		done:    make(chan struct{}), left: make(chan struct{}),
	}
	c.mu.waiting = make(map[rdma.RegionID]*request)
	c.mu.changed = make(chan struct{})
	empty := &table{alive: deathWord(death), tid: tid, state: wordAt(page, offWord)}
	c.table.Store(empty.with(nil, 0))
	return c
}

// Synchronous implements rdma.Conn.
func (c *conn) Synchronous() bool { return true }

// Done implements rdma.Conn.
func (c *conn) Done() <-chan struct{} { return c.done }

// Err implements rdma.Conn.
func (c *conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.err
}

// Close implements rdma.Conn. It returns when nothing is mapped any more.
func (c *conn) Close() error {
	c.fail(fmt.Errorf("%w: shm: connection", rdma.ErrClosed))
	<-c.left
	return nil
}

// fail ends the connection; the first reason stays. The mappings go later, when
// receiveLoop has seen everybody leave: fail itself may be called from inside.
func (c *conn) fail(reason error) {
	c.mu.Lock()
	if c.mu.err != nil {
		c.mu.Unlock()
		return
	}
	c.mu.err = reason
	waiting := c.mu.waiting
	c.mu.waiting = nil
	for _, w := range waiting {
		w.err = reason
	}
	c.mu.Unlock()
	c.table.Store(nil)
	for _, w := range waiting {
		close(w.done)
	}
	close(c.done)
	_ = c.sock.Close()
}

// HasRegion implements rdma.Conn.
func (c *conn) HasRegion(id rdma.RegionID) bool {
	t := c.table.Load()
	return t != nil && t.find(id) != nil
}

// AddRegion implements rdma.Conn: it asks the server for the memory, checks it and
// maps it. It waits for the answer, at most as long as a Connect may take.
func (c *conn) AddRegion(id rdma.RegionID, length uint64, b []byte) error {
	if c.HasRegion(id) {
		return nil
	}
	a, err := decodeAttr(b)
	if err != nil {
		return err
	}
	if a.id != id || a.size != length || a.boot != c.answer.boot {
		return fmt.Errorf("%w: shm: attribute of region %d, %d bytes, boot %#x; want region %d, %d bytes, boot %#x: fetch the region table again",
			rdma.ErrAccess, a.id, a.size, a.boot, id, length, c.answer.boot)
	}
	w, first, err := c.join(id, length)
	if err != nil {
		return err
	}
	if first {
		_ = c.sock.SetWriteDeadline(time.Now().Add(c.timeout))
		if _, err := c.sock.Write(encodeGetRegion(id)); err != nil {
			c.fail(brokenSocket("region request", err))
		}
	}
	limit := time.NewTimer(c.timeout)
	defer limit.Stop()
	select {
	case <-w.done:
		return w.err
	case <-limit.C:
		return fmt.Errorf("%w: shm: region %d: no answer within %v: is the server stopped?", rdma.ErrTimeout, id, c.timeout)
	}
}

// join returns the request for a region, and whether it is new.
func (c *conn) join(id rdma.RegionID, size uint64) (w *request, first bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.err != nil {
		return nil, false, c.mu.err
	}
	if w := c.mu.waiting[id]; w != nil {
		return w, false, nil
	}
	w = &request{size: size, done: make(chan struct{})}
	c.mu.waiting[id] = w
	return w, true, nil
}

// receiveLoop works in what the server sends, until the socket closes; then it
// unmaps everything.
func (c *conn) receiveLoop() {
	defer close(c.left)
	var buf [maxMessage]byte
	for {
		msg, fds, err := receive(c.sock, buf[:], 1)
		if err == nil {
			err = c.handle(msg, fds)
		}
		if err != nil {
			c.fail(c.explain(err))
			break
		}
	}
	c.readers.waitQuiet()
	c.unmap()
	c.in.leave(c)
}

// explain prefers what the pages say to what the socket shows.
func (c *conn) explain(err error) error {
	if state := load64(c.page, offWord); state&stateEnded != 0 {
		return endError(state)
	}
	if atomic.LoadUint32(deathWord(c.death))&ownerDied != 0 {
		return errServerDied
	}
	return brokenSocket("connection", err)
}

// handle works in one message. The descriptors are its to close.
func (c *conn) handle(msg []byte, fds []int) error {
	switch msg[0] {
	case msgRegion:
		m, err := decodeRegionReply(msg)
		if err == nil && m.known != (len(fds) == 1) {
			err = fmt.Errorf("%w: shm: region %d, known %v, came with %d descriptors", rdma.ErrHandshake, m.id, m.known, len(fds))
		}
		if err != nil {
			closeFDs(fds)
			return err
		}
		return c.addMapping(m, fds)
	case msgDrop:
		closeFDs(fds)
		m, err := decodeDrop(msg)
		if err != nil {
			return err
		}
		return c.dropMapping(m)
	default:
		closeFDs(fds)
		return fmt.Errorf("%w: shm: message of unknown type %d", rdma.ErrHandshake, msg[0])
	}
}

// addMapping answers a request with what the server said.
func (c *conn) addMapping(m regionReply, fds []int) error {
	c.mu.Lock()
	w := c.mu.waiting[m.id]
	delete(c.mu.waiting, m.id)
	c.mu.Unlock()
	if w == nil {
		closeFDs(fds)
		return fmt.Errorf("%w: shm: region %d was not asked for", rdma.ErrHandshake, m.id)
	}
	defer close(w.done)
	switch {
	case !m.known:
		w.err = fmt.Errorf("%w: shm: the server does not know region %d: fetch the region table again", rdma.ErrAccess, m.id)
		return nil
	case m.size != w.size:
		closeFDs(fds)
		w.err = fmt.Errorf("%w: shm: region %d has %d bytes at the server, want %d", rdma.ErrHandshake, m.id, m.size, w.size)
		return w.err
	}
	var mapped []byte
	mapped, w.err = mapSealed(fds[0], m.size, fmt.Sprintf("region %d", m.id))
	if errors.Is(w.err, rdma.ErrHandshake) {
		return w.err
	}
	if w.err != nil {
		return nil
	}
	c.regions[m.id] = mapped
	if !c.publish(func(t *table) uint64 { return t.count }) {
		w.err = c.Err()
	}
	return nil
}

// dropMapping unmaps a region that the server took back.
func (c *conn) dropMapping(m drop) error {
	mapped, ok := c.regions[m.id]
	if !ok {
		return fmt.Errorf("%w: shm: the server took back region %d, which it has not given", rdma.ErrHandshake, m.id)
	}
	delete(c.regions, m.id)
	c.publish(func(*table) uint64 { return m.count })
	c.readers.waitQuiet()
	return unmapAll(mapped)
}

// publish replaces the table after regions changed. False: the connection has ended.
func (c *conn) publish(count func(old *table) uint64) bool {
	old := c.table.Load()
	// fail may store nil at any time; it must not be overwritten.
	if old == nil || !c.table.CompareAndSwap(old, old.with(c.regions, count(old))) {
		return false
	}
	c.mu.Lock()
	close(c.mu.changed)
	c.mu.changed = make(chan struct{})
	c.mu.Unlock()
	return true
}

// unmap releases all mappings. Nobody may be inside, and the table must be gone or
// never have been used.
func (c *conn) unmap() {
	c.table.Store(nil)
	all := [][]byte{c.death, c.page}
	for _, m := range c.regions {
		all = append(all, m)
	}
	c.regions = nil
	if err := unmapAll(all...); err != nil {
		c.in.log.Error("shm: mappings not released", "node", c.answer.node, "err", err)
	}
}

func unmapAll(mappings ...[]byte) error {
	var err error
	for _, m := range mappings {
		err = errors.Join(err, unix.Munmap(m))
	}
	return err
}
