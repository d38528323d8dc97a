package tcp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

const (
	// tick is how long a batch may be outstanding with nobody reading, and how long a
	// caller that reads may be past its limit, before the background reader steps in.
	tick = time.Millisecond
	// idleTick: a connection idle for so long is read in the background, which is how
	// its end is noticed.
	idleTick = 20 * time.Millisecond
)

// role says who reads the socket: a caller that waits for its own answer, or the
// background reader. Whoever holds it owns the receiver and completes everybody's
// batches.
//
// Invariant: while batches are outstanding and nobody holds the role, the tick is
// set to fire within about one tick.
type role struct {
	mu struct {
		sync.Mutex
		held       bool
		background bool // held, and on its way to the background reader
		takes      uint64
		first      *work // waiters, in order of arrival
		last       *work
	}
	bursts atomic.Uint64 // reads that brought something
	kicked chan struct{}

	// The timer is the background reader's, but a post may move it closer when lazy.
	timer *time.Timer
	lazy  atomic.Bool // set to idleTick
}

func (ro *role) init() {
	ro.kicked = make(chan struct{}, 1)
	ro.timer = time.NewTimer(idleTick)
	ro.lazy.Store(true)
}

// postedNow keeps the invariant when a batch was queued.
func (ro *role) postedNow() {
	if ro.lazy.Load() && ro.lazy.CompareAndSwap(true, false) {
		ro.timer.Reset(tick)
	}
}

func (ro *role) linkLocked(w *work) {
	w.waiting = true
	w.prev, w.next = ro.mu.last, nil
	if w.prev == nil {
		ro.mu.first = w
	} else {
		w.prev.next = w
	}
	ro.mu.last = w
}

func (ro *role) unlinkLocked(w *work) {
	w.waiting = false
	if w.prev == nil {
		ro.mu.first = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		ro.mu.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.next, w.prev = nil, nil
}

// kick has the background reader look whether it is needed.
func (c *conn) kick() {
	select {
	case c.role.kicked <- struct{}{}:
	default:
	}
}

// wait is the rdma.WaitFunc of every batch of c. The first caller to come reads;
// the others sleep until they are complete, or are handed the role.
func (c *conn) wait(ctx context.Context, b *rdma.Batch, limit time.Duration) {
	w := b.Work.(*work)
	if ctx.Err() != nil || !w.claimed.CompareAndSwap(false, true) {
		return
	}
	defer w.claimed.Store(false)
	var deadline time.Time
	if limit > 0 {
		deadline = time.Now().Add(limit)
	}
	ro := &c.role
	ro.mu.Lock()
	if b.Completed() {
		ro.mu.Unlock()
		return
	}
	reading := !ro.mu.held
	if reading {
		ro.mu.held = true
		ro.mu.takes++
	} else {
		ro.linkLocked(w)
	}
	ro.mu.Unlock()
	for {
		if reading && !c.readFor(w) {
			return
		}
		if reading = c.sleep(ctx, w, deadline); !reading {
			return
		}
	}
}

// readFor reads until w's batch is complete, then passes the role on and returns
// false. true: it took too long, the role went to the background reader, and w was
// put on the list of waiters.
func (c *conn) readFor(w *work) bool {
	for !w.b.Completed() {
		err := c.burst(w)
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded):
			// The background reader thinks that this caller has waited for long. Nobody
			// but a holder clears the deadline.
			_ = c.nc.SetReadDeadline(time.Time{})
			if c.recedeTo(w) {
				return true
			}
		default:
			c.finish(err)
			return false
		}
	}
	c.passOn()
	return false
}

// recedeTo gives the role to the background reader and makes w a waiter, unless w
// is complete.
func (c *conn) recedeTo(w *work) bool {
	ro := &c.role
	ro.mu.Lock()
	defer ro.mu.Unlock()
	if w.b.Completed() {
		return false
	}
	ro.linkLocked(w)
	ro.mu.background = true
	c.kick()
	return true
}

// passOn gives the role to a waiter, or to nobody.
func (c *conn) passOn() {
	ro := &c.role
	ro.mu.Lock()
	next := ro.mu.first
	switch {
	case c.mustEnd.Load():
		ro.mu.background = true
		next = nil
		c.kick()
	case next != nil:
		ro.unlinkLocked(next)
		next.granted = true
		ro.mu.takes++
	default:
		ro.mu.held = false
	}
	ro.mu.Unlock()
	if next != nil {
		next.wake <- struct{}{}
	}
}

// sleep blocks until w is complete or granted the role (true), or until the caller
// gives up.
func (c *conn) sleep(ctx context.Context, w *work, deadline time.Time) (granted bool) {
	var late <-chan time.Time
	if !deadline.IsZero() {
		if w.timer == nil {
			w.timer = time.NewTimer(time.Until(deadline))
		} else {
			w.timer.Reset(time.Until(deadline))
		}
		late = w.timer.C
		defer w.timer.Stop()
	}
	if stop := ctx.Done(); stop == nil && late == nil {
		<-w.wake
	} else {
		select {
		case <-w.wake:
		case <-stop:
			return c.giveUp(w)
		case <-late:
			return c.giveUp(w)
		}
	}
	return c.takeGrant(w)
}

// giveUp takes w off the list. Where somebody else just did, a wake is certain.
func (c *conn) giveUp(w *work) bool {
	ro := &c.role
	ro.mu.Lock()
	if w.waiting {
		ro.unlinkLocked(w)
		ro.mu.Unlock()
		return false
	}
	ro.mu.Unlock()
	<-w.wake
	if c.takeGrant(w) {
		// The role came too late for somebody who no longer wants it.
		c.passOn()
	}
	return false
}

func (c *conn) takeGrant(w *work) bool {
	ro := &c.role
	ro.mu.Lock()
	defer ro.mu.Unlock()
	granted := w.granted
	w.granted = false
	return granted
}

// burst reads once and completes what was answered by it. own is the holder's, nil
// for the background reader. Only the holder calls it.
func (c *conn) burst(own *work) error {
	err := c.recv.fill(c.nc.Read)
	c.role.bursts.Add(1)
	if len(c.recv.finished) > 0 {
		c.deliver(own)
	}
	return err
}

// deliver completes the finished work. It returns how many callers it woke.
func (c *conn) deliver(own *work) (woken int) {
	ro := &c.role
	finished := c.recv.finished
	// Waiters leave the list before their batch completes: with the completion the
	// work is the caller's again, save for one that sleeps until the wake below.
	ro.mu.Lock()
	for i, w := range finished {
		if w.waiting {
			ro.unlinkLocked(w)
			woken++
		} else {
			c.complete(w, false)
			finished[i] = nil
		}
	}
	ro.mu.Unlock()
	expect := woken
	if own == nil {
		expect--
	}
	c.send.expected.Store(int32(max(0, expect)))
	for i, w := range finished {
		if w != nil {
			c.complete(w, true)
			finished[i] = nil
		}
	}
	c.recv.finished = finished[:0]
	return woken
}

func (c *conn) complete(w *work, wake bool) {
	c.outstanding.Add(-1)
	w.b.Complete(w.err)
	if wake {
		w.wake <- struct{}{}
	}
}

// readInBackground holds the role when no caller does and somebody must: batches
// nobody waits for, callers that gave up, an idle connection, the end.
func (c *conn) readInBackground() {
	ro := &c.role
	var seen struct{ takes, bursts uint64 }
	for {
		select {
		case <-c.done:
			ro.timer.Stop()
			return
		case <-ro.kicked:
			if !c.takeIfNeeded() {
				continue
			}
		case <-ro.timer.C:
			takes, held := ro.observe()
			moved := seen.takes != takes || seen.bursts != ro.bursts.Load()
			seen.takes, seen.bursts = takes, ro.bursts.Load()
			if !moved && held && c.outstanding.Load() > 0 {
				// A caller has been reading in vain for a tick. It may be past its limit or
				// its context; only a deadline brings it back to look.
				_ = c.nc.SetReadDeadline(time.Unix(1, 0))
			}
			if moved || !c.takeIfFree() {
				c.again()
				continue
			}
		}
		c.holdInBackground()
		c.again()
	}
}

func (ro *role) observe() (takes uint64, held bool) {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	return ro.mu.takes, ro.mu.held
}

// again sets the tick: soon while batches are outstanding.
func (c *conn) again() {
	ro := &c.role
	if c.outstanding.Load() > 0 {
		ro.lazy.Store(false)
		ro.timer.Reset(tick)
		return
	}
	ro.timer.Reset(idleTick)
	ro.lazy.Store(true)
	// A batch posted since the look above found the tick not lazy and left it.
	if c.outstanding.Load() > 0 {
		ro.postedNow()
	}
}

// takeIfNeeded takes the role where it was sent here, or the end must be read.
func (c *conn) takeIfNeeded() bool {
	ro := &c.role
	ro.mu.Lock()
	defer ro.mu.Unlock()
	switch {
	case ro.mu.background:
		ro.mu.background = false
		return true
	case ro.mu.held || !c.mustEnd.Load():
		return false
	}
	ro.mu.held = true
	ro.mu.takes++
	return true
}

func (c *conn) takeIfFree() bool {
	ro := &c.role
	ro.mu.Lock()
	defer ro.mu.Unlock()
	if ro.mu.held {
		return false
	}
	ro.mu.held = true
	ro.mu.takes++
	return true
}

// holdInBackground reads until callers wait for their answers again.
func (c *conn) holdInBackground() {
	_ = c.nc.SetReadDeadline(time.Time{})
	for {
		err := c.recv.fill(c.nc.Read)
		c.role.bursts.Add(1)
		woken := 0
		if len(c.recv.finished) > 0 {
			woken = c.deliver(nil)
		}
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			_ = c.nc.SetReadDeadline(time.Time{})
		case err != nil:
			c.finish(err)
			return
		}
		if woken > 0 {
			c.passOn()
			return
		}
	}
}

// lost is the class of an error on the socket.
func lost(c *conn, err error) error {
	return fmt.Errorf("%w: tcp: %s: %w", rdma.ErrConnLost, c.nc.RemoteAddr(), err)
}
