package client

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// get is the state of one attempt to read one key: its asks, its buffers. It is
// pooled; but whatever a flight or a posted batch still refers to keeps it out of
// the pool, because the buffers are the provider's until completion.
type get struct {
	c    *Client
	sh   *shard
	hash layout.KeyHash
	key  []byte // borrowed until the call returns; no flight looks at it

	refs  atomic.Int32 // the call's own, one for each ask submitted, one for a posted batch
	wake  chan struct{}
	timer *time.Timer

	asks [maxVoters + 1]ask
	n    int // asks in use; asks[0] is the leader's

	direct rdma.Batch // READs that need no record: buckets, look-ups, unconfirmed objects
	reads  [1]rdma.Read
	bytes  int  // that direct asks for
	posted bool // direct is outstanding
	sunk   bool // direct goes into sink
	line   [layout.BucketSize]byte
	record [layout.RecordSize]byte
	query  []byte
	buf    []byte // the object, where it does not go into sink

	// sink, when not nil, is the caller's buffer, held by this attempt. lent is the
	// caller's buffer that an outstanding READ of an attempt which was given up may still
	// write to.
	sink, lent *Buffer
}

// keepBuffer bounds the buffer that a pooled get keeps.
const keepBuffer = 2 << 20

var getPool = sync.Pool{New: func() any {
	g := &get{wake: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	g.timer.Stop()
	for i := range g.asks {
		g.asks[i].g = g
	}
	return g
}}

func (c *Client) acquire(key []byte) *get {
	g := getPool.Get().(*get)
	g.c, g.key = c, key
	g.hash, g.sh = c.cluster().hashKey(key)
	g.refs.Store(1)
	select {
	case <-g.wake:
	default:
	}
	return g
}

// unref gives one reference back. With the last one the get is free.
func (g *get) unref() {
	if g.refs.Add(-1) != 0 {
		return
	}
	if cap(g.buf) > keepBuffer {
		g.buf = nil
	}
	g.key, g.c, g.sh = nil, nil, nil
	for i := range g.n {
		g.asks[i].reset()
	}
	g.n = 0
	g.posted = false
	if g.lent != nil {
		g.lent.returned()
		g.lent = nil
	}
	getPool.Put(g)
}

func (a *ask) reset() {
	a.s, a.dst, a.flight, a.err = nil, nil, nil, nil
	a.voter, a.leader, a.late, a.apart = 0, false, false, false
	a.state.Store(askIdle)
}

// fresh ends an attempt: asks that nobody answered yet are left to their flights.
// It returns the get for the next attempt, which is another one where this one's
// memory is still in use.
func (g *get) fresh() *get {
	if !g.leaveAsks() {
		for i := range g.n {
			g.asks[i].reset()
		}
		g.n = 0
		return g
	}
	next := g.c.acquire(g.key)
	next.sink, g.sink = g.sink, nil
	g.key = nil
	g.unref()
	return next
}

// leaveAsks leaves what is outstanding to itself, and with it the caller's buffer if it
// may still be written to; true where there is something.
func (g *get) leaveAsks() (busy bool) {
	busy = g.posted
	writing := g.posted && g.sunk
	for i := range g.n {
		a := &g.asks[i]
		if !a.leave() {
			busy = true
			writing = writing || g.sink.holds(a.dst)
		}
	}
	if writing && g.sink != nil {
		g.sink.lend()
		g.lent, g.sink = g.sink, nil
	}
	return busy
}

// leave tells the ask that its get is gone; true when it is done anyway.
func (a *ask) leave() bool {
	switch a.state.Swap(askLeft) {
	case askDone, askIdle:
		return true
	case askWatched:
		a.flight.abandon()
	}
	a.s.c.convoy.late(a)
	return false
}

// release ends the call.
func (g *get) release() {
	g.leaveAsks()
	if g.sink != nil {
		g.sink.end()
		g.sink = nil
	}
	g.key = nil
	g.unref()
}

// signal wakes the get's goroutine.
func (g *get) signal() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// await returns when something about an ask may have changed (true), or when limit
// passed or ctx ended (false). A flight that this get watches is seen to its end
// here; past the limit it is given to somebody else.
func (g *get) await(ctx context.Context, limit time.Duration) bool {
	for i := range g.n {
		a := &g.asks[i]
		if a.state.Load() != askWatched {
			continue
		}
		f := a.flight
		if f.batch.Wait(ctx, limit) {
			f.finish()
			return true
		}
		a.state.Store(askWaiting)
		f.abandon()
		g.c.convoy.late(a)
		return false
	}
	g.timer.Reset(limit)
	defer g.timer.Stop()
	select {
	case <-g.wake:
		return true
	case <-g.timer.C:
	case <-ctx.Done():
	}
	return false
}

// space is room for an object of n bytes that lives as long as the attempt: the caller's
// buffer where there is one that is large enough.
func (g *get) space(n int) []byte {
	if g.sink != nil {
		if b := g.sink.object(len(g.key), n); b != nil {
			return b
		}
	}
	return g.own(n)
}

// own is memory of the get itself, of n bytes.
func (g *get) own(n int) []byte {
	if cap(g.buf) < n {
		g.buf = make([]byte, n)
	}
	return g.buf[:n]
}

// readOne posts a single READ by itself and waits for it.
func (g *get) readOne(ctx context.Context, s *session, at layout.Place, dst []byte, limit time.Duration) reason {
	g.direct.Reset()
	g.reads[0] = rdma.Read{Region: rdma.RegionID(at.Chunk), Offset: at.Offset, Dst: dst}
	g.direct.Reads = g.reads[:]
	g.bytes, g.sunk = len(dst), g.sink.holds(dst)
	s.conn.Post(&g.direct)
	return g.awaitDirect(ctx, s, limit)
}

// awaitDirect waits for the batch that was posted by itself. When it is not
// complete in time the get may not be used again until it is: see fresh.
func (g *get) awaitDirect(ctx context.Context, s *session, limit time.Duration) reason {
	if !g.direct.Completed() && !g.direct.Wait(ctx, limit) {
		g.posted = true
		g.refs.Add(1)
		done := func() {
			s.outlast(&g.direct, g.bytes)
			g.unref()
		}
		if !g.c.tasks.spawn(done) {
			done() // the Client is closing, which completes the batch
		}
		return reasonSlow
	}
	err := g.direct.Err()
	if err == nil {
		if s.slow.Load() {
			s.slow.Store(false)
		}
		return reasonNone
	}
	s.readFailed(err)
	return readError(err)
}

// readError sorts the failure of a batch.
func readError(err error) reason {
	switch {
	case errors.Is(err, rdma.ErrAccess):
		return reasonLayout // the region went away: what named it is out of date
	case errors.Is(err, rdma.ErrExhausted):
		return reasonTooLong
	default:
		return reasonConn
	}
}
