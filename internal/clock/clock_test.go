package clock

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var start = time.Date(2020, 2, 29, 23, 59, 59, 0, time.UTC)

// fired takes a tick without waiting for one.
func fired(c <-chan time.Time) (time.Time, bool) {
	select {
	case at := <-c:
		return at, true
	default:
		return time.Time{}, false
	}
}

func mustFire(t *testing.T, c <-chan time.Time, at time.Duration) {
	t.Helper()
	got, ok := fired(c)
	require.True(t, ok, "did not fire")
	require.Equal(t, start.Add(at), got)
}

func mustNotFire(t *testing.T, c <-chan time.Time) {
	t.Helper()
	at, ok := fired(c)
	require.False(t, ok, "fired at %v", at)
}

func TestManualStandsStill(t *testing.T) {
	m := NewManual(start)
	require.Equal(t, start, m.Now())
	require.Equal(t, start, m.Now())
	m.Advance(90 * time.Second)
	require.Equal(t, start.Add(90*time.Second), m.Now())
	m.Advance(0)
	require.Equal(t, start.Add(90*time.Second), m.Now())
}

func TestManualTimer(t *testing.T) {
	m := NewManual(start)
	tm := m.NewTimer(10 * time.Second)
	m.Advance(10*time.Second - 1)
	mustNotFire(t, tm.C())
	m.Advance(1)
	mustFire(t, tm.C(), 10*time.Second)
	m.Advance(time.Hour)
	mustNotFire(t, tm.C()) // once
	require.False(t, tm.Stop(), "it was not running")
}

func TestManualTimerDueAtOnce(t *testing.T) {
	m := NewManual(start)
	for _, d := range []time.Duration{0, -time.Second} {
		tm := m.NewTimer(d)
		_, ok := fired(tm.C())
		require.True(t, ok, "a timer of %v fires without the clock being moved", d)
	}
}

func TestManualTimerStop(t *testing.T) {
	m := NewManual(start)
	tm := m.NewTimer(time.Second)
	require.True(t, tm.Stop())
	require.False(t, tm.Stop())
	m.Advance(time.Hour)
	mustNotFire(t, tm.C())
}

// TestManualNoStaleTick: as with time.Timer, nothing of the time before Stop or Reset
// is received after it.
func TestManualNoStaleTick(t *testing.T) {
	m := NewManual(start)
	tm := m.NewTimer(time.Second)
	m.Advance(time.Second)
	require.False(t, tm.Stop())
	mustNotFire(t, tm.C())

	require.False(t, tm.Reset(time.Second))
	m.Advance(time.Second)
	require.False(t, tm.Reset(time.Minute), "it had fired")
	mustNotFire(t, tm.C())
	require.True(t, tm.Reset(2*time.Minute), "it was running")
	m.Advance(time.Minute)
	mustNotFire(t, tm.C())
	m.Advance(time.Minute)
	mustFire(t, tm.C(), 2*time.Second+2*time.Minute)
}

func TestManualTicker(t *testing.T) {
	m := NewManual(start)
	tk := m.NewTicker(time.Second)
	for i := 1; i <= 3; i++ {
		m.Advance(time.Second)
		mustFire(t, tk.C(), time.Duration(i)*time.Second)
	}
	m.Advance(10 * time.Second) // ten ticks, one place
	mustFire(t, tk.C(), 4*time.Second)
	mustNotFire(t, tk.C())
	m.Advance(500 * time.Millisecond)
	mustNotFire(t, tk.C())
	m.Advance(500 * time.Millisecond)
	mustFire(t, tk.C(), 14*time.Second)
	tk.Stop()
	m.Advance(time.Hour)
	mustNotFire(t, tk.C())
	require.Panics(t, func() { m.NewTicker(0) })
}

// TestManualOrder: timers that come due within one Advance fire in the order of their
// deadlines, each at its own deadline; equal deadlines in the order they were set.
func TestManualOrder(t *testing.T) {
	m := NewManual(start)
	rnd := rand.New(rand.NewPCG(1, 2))
	type set struct {
		t  Timer
		at time.Duration
	}
	var timers []set
	for range 100 {
		d := time.Duration(1+rnd.IntN(20)) * time.Second
		timers = append(timers, set{m.NewTimer(d), d})
	}
	m.Advance(10 * time.Second)
	for _, s := range timers {
		if s.at <= 10*time.Second {
			mustFire(t, s.t.C(), s.at)
		} else {
			mustNotFire(t, s.t.C())
		}
	}
	require.Equal(t, start.Add(10*time.Second), m.Now())
	m.Advance(time.Hour)
	for _, s := range timers {
		if s.at > 10*time.Second {
			mustFire(t, s.t.C(), s.at)
		}
	}
}

// TestManualEqualDeadlines holds the clock to one order, on which replays rest.
func TestManualEqualDeadlines(t *testing.T) {
	for range 20 {
		m := NewManual(start)
		timers := make([]*manualTimer, 20)
		for i := range timers {
			timers[i] = m.NewTimer(time.Second).(*manualTimer)
		}
		timers[3].Reset(time.Second) // set anew: last
		want := append(slices.Delete(slices.Clone(timers), 3, 4), timers[3])
		m.mu.Lock()
		got := m.dueLocked(m.mu.now.Add(time.Second))
		m.mu.Unlock()
		require.Equal(t, want, got)
	}
}

func TestManualFromManyGoroutines(t *testing.T) {
	m := NewManual(start)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 200 {
				tm := m.NewTimer(time.Duration(i) * time.Millisecond)
				m.Advance(time.Millisecond)
				tm.Reset(time.Millisecond)
				m.Now()
				tm.Stop()
			}
		})
	}
	wg.Wait()
	require.Equal(t, start.Add(1600*time.Millisecond), m.Now())
	require.Empty(t, m.mu.timers, "stopped timers are let go")
}

func TestSystem(t *testing.T) {
	before := time.Now()
	require.False(t, System.Now().Before(before))
	tm := System.NewTimer(time.Hour)
	require.True(t, tm.Reset(time.Nanosecond))
	<-tm.C()
	require.False(t, tm.Stop())
	tk := System.NewTicker(time.Millisecond)
	<-tk.C()
	<-tk.C()
	tk.Stop()
}
