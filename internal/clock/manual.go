package clock

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// Manual is a clock that moves only when told to.
type Manual struct {
	mu struct {
		sync.Mutex
		now    time.Time
		timers map[*manualTimer]struct{}
		armed  uint64 // how often a timer was set, for an order among equal deadlines
	}
}

// NewManual starts at the given time.
func NewManual(start time.Time) *Manual {
	m := &Manual{}
	m.mu.now = start
	m.mu.timers = make(map[*manualTimer]struct{})
	return m
}

// Now is the time it was last told.
func (m *Manual) Now() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mu.now
}

// Advance moves the time on and fires, in order of their deadlines, the timers
// that come due; those of one deadline in the order in which they were set. A
// negative d moves nothing.
func (m *Manual) Advance(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	end := m.mu.now.Add(max(0, d))
	for {
		due := m.dueLocked(end)
		if len(due) == 0 {
			break
		}
		// One at a time: a ticker may come due again before the next timer does.
		t := due[0]
		m.mu.now = t.at
		select {
		case t.c <- t.at:
		default:
		}
		if t.every > 0 {
			t.at = t.at.Add(t.every)
		} else {
			delete(m.mu.timers, t)
		}
	}
	m.mu.now = end
}

// dueLocked lists the timers whose deadline is not after end, in the order in which
// they fire.
func (m *Manual) dueLocked(end time.Time) []*manualTimer {
	var due []*manualTimer
	for t := range m.mu.timers {
		if !t.at.After(end) {
			due = append(due, t)
		}
	}
	slices.SortFunc(due, func(a, b *manualTimer) int {
		if c := a.at.Compare(b.at); c != 0 {
			return c
		}
		return cmp.Compare(a.order, b.order)
	})
	return due
}

// NewTimer makes a timer that fires when Advance reaches it.
func (m *Manual) NewTimer(d time.Duration) Timer { return m.add(d, 0) }

// NewTicker makes a ticker driven by Advance. d must be positive.
func (m *Manual) NewTicker(d time.Duration) Ticker {
	if d <= 0 {
		// bug: of the caller; time.NewTicker panics here as well.
		panic("clock: ticker interval must be positive")
	}
	return manualTicker{m.add(d, d)}
}

func (m *Manual) add(d, every time.Duration) *manualTimer {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := &manualTimer{clock: m, c: make(chan time.Time, 1), at: m.mu.now.Add(d), every: every}
	m.armLocked(t)
	return t
}

func (m *Manual) armLocked(t *manualTimer) {
	if t.every == 0 && !t.at.After(m.mu.now) {
		t.c <- m.mu.now
		return
	}
	m.mu.armed++
	t.order = m.mu.armed
	m.mu.timers[t] = struct{}{}
}

type manualTimer struct {
	clock *Manual
	c     chan time.Time
	at    time.Time     // guarded by clock.mu, as order is
	order uint64        // of setting
	every time.Duration // 0: once
}

func (t *manualTimer) C() <-chan time.Time { return t.c }

func (t *manualTimer) Stop() bool {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	return t.stopLocked()
}

func (t *manualTimer) stopLocked() bool {
	_, armed := t.clock.mu.timers[t]
	delete(t.clock.mu.timers, t)
	select {
	case <-t.c:
	default:
	}
	return armed
}

func (t *manualTimer) Reset(d time.Duration) bool {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	armed := t.stopLocked()
	t.at = t.clock.mu.now.Add(d)
	t.clock.armLocked(t)
	return armed
}

type manualTicker struct{ t *manualTimer }

func (t manualTicker) C() <-chan time.Time { return t.t.c }
func (t manualTicker) Stop()               { t.t.Stop() }
