package verbs

import (
	"context"
	"fmt"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// tick is how long a batch may be outstanding with nobody looking before an event is
// asked for.
const tick = time.Millisecond

// slowTick is the tick while an event is awaited: it only watches ReadTimeout.
const slowTick = 20 * time.Millisecond

// usedEvery is how often a target hears that a connection is in use, which it cannot
// see: its choice of the least recently used goes by it.
const usedEvery = 5 * time.Second

// wait is the rdma.WaitFunc of every batch. The first caller to come looks at the
// completion queue, in one crossing into C that lasts until something completes; the
// others sleep until they are complete or get the role. A caller that looked for
// SpinTime in vain asks for an event and sleeps too.
func (c *conn) wait(ctx context.Context, b *rdma.Batch, limit time.Duration) {
	w := b.Work.(*work)
	if ctx.Err() != nil || !w.claimed.CompareAndSwap(false, true) {
		return
	}
	defer w.claimed.Store(false)
	start := time.Now()
	now := start
	spinEnd := start.Add(c.in.p.SpinTime)
	var late <-chan time.Time
	for !b.Completed() {
		r := w.rail.Load()
		left := spinEnd.Sub(now)
		if limit > 0 {
			if now.Sub(start) >= limit {
				break
			}
			left = min(left, limit-now.Sub(start))
		}
		if ctx.Err() != nil {
			break
		}
		if left > 0 && r.poll.TryLock() {
			found := r.lookPolled(left) > 0
			if b.Completed() { // the usual case: one look, and no clock
				r.poll.Unlock()
				break
			}
			now = time.Now()
			if found {
				spinEnd = now.Add(c.in.p.SpinTime)
			} else if !now.Before(spinEnd) {
				r.armPolled(true)
			}
			r.poll.Unlock()
			continue
		}
		if limit > 0 && late == nil {
			late = w.alarm(limit - now.Sub(start))
		}
		r.parked.Add(1)
		// Whoever looked may have left since: it saw nobody parked to hand the role to.
		if left > 0 && r.poll.TryLock() {
			r.poll.Unlock()
			r.parked.Add(-1)
			continue
		}
		granted := false
		select {
		case <-b.Ready():
		case <-r.role:
			granted = true
		case <-late:
			late = nil
		case <-ctx.Done():
		}
		r.parked.Add(-1)
		if now = time.Now(); granted {
			spinEnd = now.Add(c.in.p.SpinTime)
		}
	}
	if late != nil {
		w.timer.Stop()
	}
	if r := w.rail.Load(); r.batches.Load() > 0 {
		r.handRole()
	}
}

func (w *work) alarm(d time.Duration) <-chan time.Time {
	if w.timer == nil {
		w.timer = time.NewTimer(d)
	} else {
		w.timer.Reset(d)
	}
	return w.timer.C
}

// tick sees to it that what nobody waits for completes, and that nothing is outstanding
// for ever. It runs while batches are outstanding.
func (r *rail) tick() {
	r.ticks.Lock()
	defer r.ticks.Unlock()
	if r.isDying() {
		return
	}
	now := time.Now()
	if now.Sub(r.ticks.lastUsed) > usedEvery {
		r.ticks.lastUsed = now
		_ = r.say(msgUsed, 0) // a word lost is told again
	}
	if r.batches.Load() == 0 {
		r.ticks.stalled = time.Time{}
		r.ticking.Store(false)
		// A batch posted since the look above found the tick on and left it.
		if r.batches.Load() > 0 && r.ticking.CompareAndSwap(false, true) {
			r.timer.Reset(tick)
		}
		return
	}
	next := tick
	if seen := r.completions.Load(); seen != r.ticks.seen {
		r.ticks.seen, r.ticks.stalled = seen, time.Time{}
	} else {
		if r.ticks.stalled.IsZero() {
			r.ticks.stalled = now
		}
		if now.Sub(r.ticks.stalled) > r.in.p.ReadTimeout && !r.in.held.Load() {
			r.fail(fmt.Errorf("%w: verbs: %s port %d: %w for %v", rdma.ErrConnLost, r.n.name, r.spec.port, errStalled, r.in.p.ReadTimeout))
			return
		}
		if r.poll.TryLock() { // otherwise somebody looks
			r.armPolled(true)
			r.poll.Unlock()
			next = slowTick
		}
	}
	r.timer.Reset(next)
}
