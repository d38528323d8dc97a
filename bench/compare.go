package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// subject is a system with its workers' connections and what was measured so far.
type subject struct {
	system
	conns   []conn
	samples []sample
	cpu     []time.Duration // of its processes, for each sample; nil where unknown
}

// compare starts all systems, loads them, and measures them by turns: one round
// measures each system once, and every other round goes backwards, so that a
// machine that slows down or warms up meets all of them alike. Whatever was
// started is stopped before compare returns.
func compare(ctx context.Context, systems []system, w workload, rounds int, dir string, say func(string)) (out []*subject, err error) {
	defer func() {
		for _, s := range out {
			err = errors.Join(err, s.stop())
		}
	}()
	for _, sys := range systems {
		s := &subject{system: sys}
		out = append(out, s)
		say("starting " + sys.name())
		if err := s.open(ctx, w, dir); err != nil {
			return out, fmt.Errorf("%s: %w", sys.name(), err)
		}
	}
	for _, s := range out {
		say(fmt.Sprintf("%s: putting %d keys", s.name(), len(w.keys)))
		if err := preload(ctx, w, s.conns); err != nil {
			return out, fmt.Errorf("%s: %w", s.name(), err)
		}
	}
	for r := range rounds {
		for _, s := range order(out, r) {
			if err := s.measureOnce(ctx, w); err != nil {
				return out, fmt.Errorf("%s: %w", s.name(), err)
			}
			last := s.samples[len(s.samples)-1]
			say(fmt.Sprintf("round %d of %d: %-9s %8.0f ops/s", r+1, rounds, s.name(), last.perSecond()))
		}
	}
	return out, nil
}

// order of round r: forward, backward, forward, ...
func order(all []*subject, r int) []*subject {
	if r%2 == 0 {
		return all
	}
	back := slices.Clone(all)
	slices.Reverse(back)
	return back
}

func (s *subject) open(ctx context.Context, w workload, dir string) error {
	if err := s.start(ctx, dir, w); err != nil {
		return err
	}
	for range w.clients {
		c, err := s.conn()
		if err != nil {
			return err
		}
		s.conns = append(s.conns, c)
	}
	return nil
}

func (s *subject) measureOnce(ctx context.Context, w workload) error {
	before, okBefore := cpuTime(s.pids())
	smp, err := measure(ctx, w, s.conns)
	if err != nil {
		return err
	}
	after, okAfter := cpuTime(s.pids())
	if smp.ops == 0 {
		return fmt.Errorf("no operation succeeded; the first error: %w", smp.firstErr)
	}
	s.samples = append(s.samples, smp)
	if okBefore && okAfter {
		s.cpu = append(s.cpu, after-before)
	}
	return nil
}

// latency over all rounds.
func (s *subject) latency() *hdrhistogram.Histogram {
	h := newHistogram()
	for _, smp := range s.samples {
		h.Merge(smp.latency)
	}
	return h
}

// ratio of one system to the baseline, taken round by round: the two samples of a
// round lie close together in time, so what disturbs the machine for longer
// disturbs both.
type ratio struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// pairedRatio of f(a)/f(b) over the rounds that both have.
func pairedRatio(a, b []sample, f func(sample) float64) *ratio {
	var rs []float64
	for i := range min(len(a), len(b)) {
		if base := f(b[i]); base > 0 {
			rs = append(rs, f(a[i])/base)
		}
	}
	if len(rs) == 0 {
		return nil
	}
	return &ratio{Median: median(rs), Min: slices.Min(rs), Max: slices.Max(rs)}
}

// median of xs, which it leaves as they are; 0 for none.
func median(xs []float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	s := slices.Clone(xs)
	slices.Sort(s)
	mid := len(s) / 2
	if len(s)%2 == 1 {
		return s[mid]
	}
	return (s[mid-1] + s[mid]) / 2
}

// percentileMicros of one sample.
func percentileMicros(h *hdrhistogram.Histogram, p float64) float64 {
	return float64(h.ValueAtPercentile(p)) / 1e3
}
