package simnic

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/kvd-io/kvd/internal/clock"
)

// Range is a duration drawn evenly from [Min, Max]. A Max below Min counts as Min.
type Range struct{ Min, Max time.Duration }

// Config of a Fabric. The zero value is a NIC that is fast and never fails.
type Config struct {
	// Seed of every choice.
	Seed uint64
	// Clock tells the time and makes timers; clock.System when nil.
	Clock clock.Clock
	// Stepped leaves it to the caller to run the events, by Step. Without it a
	// goroutine does, until Close.
	Stepped bool

	// Delay is from Post to the first READ of the chain being executed. Gap is
	// between the READs of a chain, Return from the last word read to the completion.
	Delay, Gap, Return Range

	// TearOneIn cuts one READ in so many into two to four pieces, in any order, with
	// Pause between them. 0: none, 1: each of more than one word.
	TearOneIn int
	Pause     Range

	// LoseOneIn loses the connection at one READ in so many, RevokeOneIn has the
	// target revoke it. 0: never. Both sides are told.
	LoseOneIn, RevokeOneIn int

	// Mapped is memory that clients have mapped, as shared memory: it outlives the process,
	// and is as it was when that died. Whether it lives is looked at behind the last word of
	// a READ, as package shm does by the death word. That the connection has ended is told
	// after a time from Ended.
	Mapped bool
	Ended  Range

	// Timeout is how long a READ stalls on a broken path, or at a dead target, before
	// its connection is lost: 500 ms when 0.
	Timeout time.Duration
	// AcceptTimeout ends an Endpoint whose client does not connect: 5 s when 0.
	AcceptTimeout time.Duration
	// QueueDepth bounds the READs outstanding on a connection; a chain that does not
	// fit completes with rdma.ErrExhausted. 0: no bound.
	QueueDepth int

	// Logger gets one line at debug level for each failure; none when nil.
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Clock == nil {
		c.Clock = clock.System
	}
	if c.Timeout == 0 {
		c.Timeout = 500 * time.Millisecond
	}
	if c.AcceptTimeout == 0 {
		c.AcceptTimeout = 5 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate says what is wrong with the settings; it changes nothing.
func (c Config) Validate() error {
	for name, d := range map[string]time.Duration{
		"Delay.Min": c.Delay.Min, "Gap.Min": c.Gap.Min, "Return.Min": c.Return.Min, "Pause.Min": c.Pause.Min, "Ended.Min": c.Ended.Min,
		"Timeout": c.Timeout, "AcceptTimeout": c.AcceptTimeout,
	} {
		if d < 0 {
			return fmt.Errorf("simnic: %s is %v: want 0 or more", name, d)
		}
	}
	for name, n := range map[string]int{
		"TearOneIn": c.TearOneIn, "LoseOneIn": c.LoseOneIn, "RevokeOneIn": c.RevokeOneIn, "QueueDepth": c.QueueDepth,
	} {
		if n < 0 {
			return fmt.Errorf("simnic: %s is %d: want 0 or more", name, n)
		}
	}
	return nil
}
