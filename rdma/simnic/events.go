package simnic

import (
	"container/heap"
	"runtime"
	"time"

	"github.com/kvd-io/kvd/internal/clock"
)

// event is something that happens at a time. It belongs to a connection or a
// pending accept, which schedules it again and again.
type event struct {
	at  time.Time
	seq uint64 // order among equal times: first scheduled, first run
	pos int    // in the queue, plus one; 0 while not in it
	run func() // with the fabric locked
}

type eventQueue []*event

func (q eventQueue) Len() int { return len(q) }
func (q eventQueue) Less(i, j int) bool {
	if q[i].at.Equal(q[j].at) {
		return q[i].seq < q[j].seq
	}
	return q[i].at.Before(q[j].at)
}
func (q eventQueue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].pos, q[j].pos = i+1, j+1
}
func (q *eventQueue) Push(x any) {
	e := x.(*event)
	*q = append(*q, e)
	e.pos = len(*q)
}
func (q *eventQueue) Pop() any {
	old := *q
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	e.pos = 0
	return e
}

// scheduleLocked puts e at d from now, wherever it was before.
func (f *Fabric) scheduleLocked(e *event, d time.Duration) {
	f.cancelLocked(e)
	e.at = f.cfg.Clock.Now().Add(d)
	f.mu.seq++
	e.seq = f.mu.seq
	heap.Push(&f.mu.events, e)
	if e.pos == 1 { // it is next: whoever sleeps must know
		select {
		case f.kick <- struct{}{}:
		default:
		}
	}
}

func (f *Fabric) cancelLocked(e *event) {
	if e.pos > 0 {
		heap.Remove(&f.mu.events, e.pos-1)
	}
}

// Step runs the next event if its time has come, and tells whether there was one.
// For Config.Stepped; harmless otherwise.
func (f *Fabric) Step() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.mu.events) == 0 || f.mu.events[0].at.After(f.cfg.Clock.Now()) {
		return false
	}
	heap.Pop(&f.mu.events).(*event).run()
	return true
}

// Told counts what clients were told so far: completions, and ends of connections. By it
// a caller of Step learns whether somebody may have gone on because of it.
func (f *Fabric) Told() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.told
}

// Next is the time of the next event; false when nothing is under way.
func (f *Fabric) Next() (time.Time, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.mu.events) == 0 {
		return time.Time{}, false
	}
	return f.mu.events[0].at, true
}

// spinBelow is the wait that is not worth a timer: those of the host come up to a
// millisecond late, and a READ takes microseconds.
const spinBelow = 30 * time.Microsecond

// serve runs the events as they come due, until Close.
func (f *Fabric) serve() {
	defer close(f.served)
	timer := f.cfg.Clock.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		for f.Step() {
		}
		timer.Stop()
		if at, ok := f.Next(); ok {
			if f.cfg.Clock == clock.System && time.Until(at) < spinBelow {
				runtime.Gosched()
				continue
			}
			f.arm(timer, at)
		}
		select {
		case <-f.quit:
			return
		case <-f.kick:
		case <-timer.C():
		}
	}
}

// arm sets the timer to fire at the given time. A manual clock may be moved between
// looking at it and setting the timer, which would then fire too late.
func (f *Fabric) arm(timer clock.Timer, at time.Time) {
	for {
		now := f.cfg.Clock.Now()
		timer.Reset(at.Sub(now))
		if f.cfg.Clock == clock.System || f.cfg.Clock.Now().Equal(now) {
			return
		}
	}
}
