// Package clock is how kvd's packages tell the time, so that a test can hold it in
// its hand.
package clock

import "time"

// Clock tells the time and makes timers. Implementations may be used from several
// goroutines.
type Clock interface {
	Now() time.Time
	NewTimer(d time.Duration) Timer
	NewTicker(d time.Duration) Ticker
}

// Timer fires once on C. Stop and Reset behave as time.Timer's do.
type Timer interface {
	C() <-chan time.Time
	Stop() bool
	Reset(d time.Duration) bool
}

// Ticker fires repeatedly on C; ticks that nobody takes are dropped.
type Ticker interface {
	C() <-chan time.Time
	Stop()
}

// System is the host's clock.
var System Clock = system{}

type system struct{}

func (system) Now() time.Time                   { return time.Now() }
func (system) NewTimer(d time.Duration) Timer   { return sysTimer{time.NewTimer(d)} }
func (system) NewTicker(d time.Duration) Ticker { return sysTicker{time.NewTicker(d)} }

type sysTimer struct{ *time.Timer }

func (t sysTimer) C() <-chan time.Time { return t.Timer.C }

type sysTicker struct{ *time.Ticker }

func (t sysTicker) C() <-chan time.Time { return t.Ticker.C }
