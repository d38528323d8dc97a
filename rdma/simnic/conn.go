package simnic

import (
	"fmt"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// conn is the client's half of a connection and its send queue. All of it but done
// is guarded by the fabric's lock.
//
// Invariant: executed <= len(queue); queue[:executed] waits for its completion to
// arrive, queue[executed] is at the target, the rest has not left.
type conn struct {
	f    *Fabric
	id   uint64
	ini  *initiator
	t    *target
	ep   *endpoint
	done chan struct{}
	err  error // why it is finished; nil while it is not

	keys     map[rdma.RegionID]known
	queue    []request
	executed int
	reads    int // in queue, for QueueDepth
	at       progress
	held     bool // met a target that holds back
	stalled  bool // met a broken path

	execute, deliver, timeout event
	ended                     event // of a dead target whose memory is mapped
}

// known is a region as the client was told of it.
type known struct {
	key    uint64
	length uint64
}

// request is a posted batch.
type request struct {
	b       *rdma.Batch
	started time.Time // not executed before
	arrives time.Time // completion, once executed
}

func newConn(i *initiator, t *target, ep *endpoint, id uint64) *conn {
	c := &conn{f: i.f, id: id, ini: i, t: t, ep: ep, done: make(chan struct{}), keys: make(map[rdma.RegionID]known)}
	c.execute.run = c.executeLocked
	c.deliver.run = c.deliverLocked
	c.timeout.run = func() {
		c.f.cfg.Logger.Debug("simnic: retransmission timeout", "from", c.ini.host, "to", c.t.host)
		c.finishLocked(fmt.Errorf("%w: %q did not answer for %v", rdma.ErrConnLost, c.t.host, c.f.cfg.Timeout))
	}
	c.ended.run = func() { c.loseLocked("its process has ended") }
	return c
}

func (c *conn) AddRegion(id rdma.RegionID, length uint64, attr []byte) error {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if _, ok := c.keys[id]; ok {
		return nil
	}
	key, err := decodeAttr(attr)
	if err != nil {
		return fmt.Errorf("region %d: %w", id, err)
	}
	c.keys[id] = known{key, length}
	return nil
}

func (c *conn) HasRegion(id rdma.RegionID) bool {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	_, ok := c.keys[id]
	return ok
}

func (c *conn) Synchronous() bool     { return false }
func (c *conn) Done() <-chan struct{} { return c.done }

func (c *conn) Err() error {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	return c.err
}

func (c *conn) Close() error {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	c.finishLocked(closedError())
	return nil
}

func (c *conn) Post(b *rdma.Batch) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if err := c.refuseLocked(b); err != nil {
		b.Complete(err)
		return
	}
	delay := c.f.drawLocked(c.f.cfg.Delay)
	c.queue = append(c.queue, request{b: b, started: c.f.cfg.Clock.Now().Add(delay)})
	c.reads += len(b.Reads)
	if len(c.queue) == c.executed+1 && !c.stalled {
		c.f.scheduleLocked(&c.execute, delay)
	}
}

// refuseLocked says why a chain cannot even be queued. What the client itself knows
// to be wrong costs no connection.
func (c *conn) refuseLocked(b *rdma.Batch) error {
	if c.err != nil {
		return c.err
	}
	if len(b.Reads) == 0 {
		return fmt.Errorf("%w: a chain of no READ", rdma.ErrAccess)
	}
	if depth := c.f.cfg.QueueDepth; depth > 0 && c.reads+len(b.Reads) > depth {
		return fmt.Errorf("%w: %d READs outstanding and %d more, the queue has %d", rdma.ErrExhausted, c.reads, len(b.Reads), depth)
	}
	for i := range b.Reads {
		r := &b.Reads[i]
		k, ok := c.keys[r.Region]
		if !ok {
			return fmt.Errorf("%w: READ %d: region %d was not added", rdma.ErrAccess, i, r.Region)
		}
		if n := uint64(len(r.Dst)); n == 0 || n > k.length || r.Offset > k.length-n {
			return fmt.Errorf("%w: READ %d: %d bytes at %d of region %d, which has %d", rdma.ErrAccess, i, n, r.Offset, r.Region, k.length)
		}
	}
	return nil
}

// blockedLocked: nothing passes between the two ends.
func (c *conn) blockedLocked() bool {
	return c.t.dead && c.t.left == nil || c.f.mu.partitions[pair(c.ini.host, c.t.host)]
}

// finishLocked ends the connection: what is outstanding completes with err, and the
// target learns of it if word reaches it.
func (c *conn) finishLocked(err error) {
	if c.err != nil {
		return
	}
	c.err = err
	c.f.mu.told++
	c.f.cancelLocked(&c.execute)
	c.f.cancelLocked(&c.deliver)
	c.f.cancelLocked(&c.timeout)
	c.f.cancelLocked(&c.ended)
	delete(c.f.mu.conns, c.id)
	for _, q := range c.queue {
		q.b.Complete(err)
	}
	c.queue, c.executed, c.reads = nil, 0, 0
	close(c.done)
	if !c.ep.ended {
		c.ep.hearLocked()
	}
}

func (c *conn) loseLocked(why string) {
	c.f.cfg.Logger.Debug("simnic: connection lost", "from", c.ini.host, "to", c.t.host, "why", why)
	c.finishLocked(fmt.Errorf("%w: to %q, %s", rdma.ErrConnLost, c.t.host, why))
}

// stallLocked waits for the path to heal, or for the timeout.
func (c *conn) stallLocked() {
	if c.stalled {
		return
	}
	c.stalled = true
	c.f.cancelLocked(&c.execute)
	c.f.cancelLocked(&c.deliver)
	c.f.scheduleLocked(&c.timeout, c.f.cfg.Timeout)
}

// resumeLocked sends again whatever was not completed.
func (c *conn) resumeLocked() {
	c.stalled = false
	c.f.cancelLocked(&c.timeout)
	c.executed, c.at = 0, progress{}
	c.f.scheduleLocked(&c.execute, c.f.drawLocked(c.f.cfg.Delay))
}
