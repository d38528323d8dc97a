package client

import (
	"time"

	"github.com/cenkalti/backoff/v5"
)

// pauses are the times between attempts: they double from one to the next, and are spread
// by Config.Jitter, so that clients which failed together do not come back together.
type pauses struct {
	grow   backoff.ExponentialBackOff
	spread float64 // each is up to so much of it shorter or longer
	id     uint64  // of what is tried again
	jitter func(id uint64) float64
}

func (c *Config) newPauses(id uint64, first, most time.Duration, spread float64) *pauses {
	return &pauses{
		grow:   backoff.ExponentialBackOff{InitialInterval: first, MaxInterval: most, Multiplier: 2},
		spread: spread, id: id, jitter: c.Jitter,
	}
}

// next is the pause before the next attempt.
func (p *pauses) next() time.Duration {
	return time.Duration(float64(p.grow.NextBackOff()) * (1 + p.spread*(2*p.jitter(p.id)-1)))
}

// reset begins anew.
func (p *pauses) reset() { p.grow.Reset() }

func (c *Client) newBackOff(shard uint32) *pauses {
	return c.cfg.newPauses(uint64(shard), c.cfg.RetryMin, c.cfg.RetryMax, 0.5)
}
