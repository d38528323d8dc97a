package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// TestSharedConfirmations: 16 callers over three leaders need at most 1.3 READs a
// get.
func TestSharedConfirmations(t *testing.T) {
	for _, shards := range []int{1, 8, 128} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			f := start(t, fakeOptions{shards: shards}, netOptions{run: delayed(t, 300*time.Microsecond)}, nil)
			var keys [][]byte
			for i := range 64 {
				k := fmt.Sprint("key ", i)
				f.put(k, k)
				f.want(t, k, k)
				keys = append(keys, []byte(k))
			}
			const callers, each = 16, 200
			// How well callers meet depends on the scheduler: on a host that is busy with
			// other things the best of a few rounds counts.
			best := 9.0
			for range 4 {
				s := f.during(func() {
					var wg sync.WaitGroup
					for w := range callers {
						wg.Go(func() {
							for i := range each {
								k := keys[(w*7+i)%len(keys)]
								v, err := f.c.Get(context.Background(), k)
								if err != nil || string(v.Data) != string(k) {
									t.Errorf("get %q: %q, %v", k, v.Data, err)
									return
								}
							}
						})
					}
					wg.Wait()
				})
				require.EqualValues(t, callers*each, s.gets(Linearizable, "fake"))
				perGet := float64(s.TotalReads()) / (callers * each)
				t.Logf("%.3f READs a get, %.3f confirmations a get", perGet, float64(s.Confirmations)/(callers*each))
				require.GreaterOrEqual(t, s.ObjectReads, uint64(callers*each))
				if best = min(best, perGet); best <= 1.3 {
					break
				}
			}
			require.LessOrEqual(t, best, 1.3)
		})
	}
}

// holder lets a test decide when batches of one node are executed and completed.
type holder struct {
	mu      sync.Mutex
	hold    uint64 // node whose batches are held; 0: none
	execute bool   // held batches are executed before they are held
	held    []func()
}

func (h *holder) run(n *fakeNode, _ *rdma.Batch, exec func() error, done func(error)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n.id != h.hold {
		go done(exec())
		return
	}
	if h.execute {
		err := exec()
		h.held = append(h.held, func() { done(err) })
		return
	}
	h.held = append(h.held, func() { done(exec()) })
}

func (h *holder) set(node uint64, execute bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hold, h.execute = node, execute
}

func (h *holder) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.held)
}

func (h *holder) release() {
	h.mu.Lock()
	held := h.held
	h.held, h.hold = nil, 0
	h.mu.Unlock()
	for _, f := range held {
		f()
	}
}

// TestConfirmationIsNotReused: a flight was executed, but its answer is still on its
// way, when another node takes over and acknowledges a write. A get that starts now
// must not be confirmed by that flight, though it would find it most convenient.
func TestConfirmationIsNotReused(t *testing.T) {
	h := &holder{}
	f := start(t, fakeOptions{}, netOptions{run: h.run}, func(c *Config) { c.HedgeMin = 10 * time.Second })
	f.put(theKey, "old")
	f.want(t, theKey, "old")

	h.set(1, true)
	first := make(chan string, 1)
	go func() {
		v, _ := f.get(t, theKey)
		first <- v
	}()
	eventually(t, "the first get's flight", func() bool { return h.count() == 1 })
	f.cutOff(1)
	f.locked(func() { f.elect(1, 2, 6) })
	f.put(theKey, "new") // acknowledged

	second := make(chan string, 1)
	go func() {
		v, _ := f.get(t, theKey)
		second <- v
	}()
	lane := &f.c.sessionOf(1).lane
	eventually(t, "the second get waiting for the next flight", func() bool {
		f.c.convoy.mu.Lock()
		defer f.c.convoy.mu.Unlock()
		return len(lane.waiting) == 1
	})
	h.release()
	require.Equal(t, "new", <-second)
	require.Contains(t, []string{"old", "new"}, <-first, "concurrent with the write: either is right")
}

// TestHedge: a voter that hangs, or dies, costs one get little and the next ones
// nothing.
func TestHedge(t *testing.T) {
	h := &holder{}
	// Long enough for a busy machine not to make the other voter late as well.
	f := start(t, fakeOptions{}, netOptions{run: h.run}, func(c *Config) { c.HedgeMin = 50 * time.Millisecond })
	f.put(theKey, "1")
	f.want(t, theKey, "1")
	h.set(2, false)
	// It is the nearest, so it is asked first.
	f.c.sessionOf(2).slow.Store(false)
	f.c.sessionOf(2).latency.Store(int64(100 * time.Microsecond))
	f.c.sessionOf(3).latency.Store(int64(500 * time.Microsecond))
	s := f.during(func() {
		began := time.Now()
		f.want(t, theKey, "1")
		require.Less(t, time.Since(began), attemptLimit)
	})
	require.EqualValues(t, 1, s.Hedges)
	require.Empty(t, s.Fallbacks)
	s = f.during(func() {
		for range 20 {
			f.want(t, theKey, "1")
		}
	})
	require.EqualValues(t, 0, s.Hedges, "a slow voter is avoided")
	require.EqualValues(t, 20, s.Confirmed)
	h.release()
	eventually(t, "the voter counts again once it answered", func() bool { return !f.c.sessionOf(2).slow.Load() })
	f.nodes[1].kill()
	s = f.during(func() {
		for range 20 {
			f.want(t, theKey, "1")
		}
	})
	require.Empty(t, s.Fallbacks)
}

// TestHangingLeader: the leader's memory answers nothing any more (its connection
// still stands) until another leads.
func TestHangingLeader(t *testing.T) {
	h := &holder{}
	f := start(t, fakeOptions{}, netOptions{run: h.run}, func(c *Config) { c.ConnectTimeout = 300 * time.Millisecond })
	f.put(theKey, "old")
	f.want(t, theKey, "old")
	h.set(1, false)
	f.locked(func() { f.nodes[0].silent = true })
	got := make(chan string, 1)
	go func() {
		v, err := f.get(t, theKey)
		if err != nil {
			v = err.Error()
		}
		got <- v
	}()
	eventually(t, "the get is stuck", func() bool { return h.count() > 0 })
	f.cutOff(1)
	f.locked(func() { f.elect(1, 3, 6) })
	f.put(theKey, "new")
	require.Equal(t, "new", <-got)
	h.release()
}

// TestLeaderDies: a get that finds the leader dead goes on until there is another,
// without showing an error.
func TestLeaderDies(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{}, nil)
	f.put(theKey, "old")
	f.want(t, theKey, "old")
	f.nodes[0].kill()
	got := make(chan error, 1)
	go func() {
		_, err := f.get(t, theKey)
		got <- err
	}()
	eventually(t, "the get has met the dead leader", func() bool { return len(f.c.Stats().Retries) > 0 })
	f.locked(func() { f.elect(1, 3, 6) })
	require.NoError(t, <-got)
	f.want(t, theKey, "old")
}

// TestAbandoned: a get whose context ends leaves at once, and its buffers stay the
// provider's until completion: later gets are not disturbed by what arrives then.
func TestAbandoned(t *testing.T) {
	h := &holder{}
	f := start(t, fakeOptions{}, netOptions{run: h.run}, nil)
	f.put(theKey, "1")
	f.want(t, theKey, "1")
	for _, key := range []string{theKey, "a key that must be looked up"} {
		h.set(1, false)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() {
			_, err := f.c.Get(ctx, []byte(key))
			done <- err
		}()
		eventually(t, "the get is under way", func() bool { return h.count() > 0 })
		cancel()
		err := <-done
		require.ErrorIs(t, err, context.Canceled)
		require.False(t, errors.Is(err, ErrUnavailable))
		for i := range 50 {
			k := fmt.Sprint("filler ", i)
			f.put(k, k)
		}
		h.release()
		for i := range 50 {
			k := fmt.Sprint("filler ", i)
			f.want(t, k, k)
		}
	}
}

// TestDeadlineWithoutContext: a call without a deadline ends by CallTimeout.
func TestDeadlineWithoutContext(t *testing.T) {
	h := &holder{}
	f := start(t, fakeOptions{}, netOptions{run: h.run}, func(c *Config) {
		c.CallTimeout, c.ConnectTimeout = 400*time.Millisecond, 200*time.Millisecond
	})
	f.put(theKey, "1")
	f.want(t, theKey, "1")
	for id := range f.nodes {
		f.locked(func() { f.nodes[id].silent = true })
	}
	h.set(1, false)
	began := time.Now()
	_, err := f.c.Get(context.Background(), []byte(theKey))
	require.True(t, isTimeout(err), "%v", err)
	require.Less(t, time.Since(began), 3*time.Second)
	h.release()
}

// TestSpans: slots near each other are covered by one READ, and every record is
// found again.
func TestSpans(t *testing.T) {
	for _, c := range []struct {
		slots []uint32
		spans int
	}{
		{[]uint32{5}, 1}, {[]uint32{5, 5, 5}, 1}, {[]uint32{0, 1, 2, 3}, 1}, {[]uint32{9, 3, 7}, 1},
		{[]uint32{0, mergeGap}, 1}, {[]uint32{0, mergeGap + 1}, 2}, {[]uint32{4000, 0, 2000}, 3},
	} {
		f := &flight{slots: append([]uint32(nil), c.slots...)}
		f.planSpans()
		require.Len(t, f.spans, c.spans, "%v", c.slots)
		for _, p := range f.spans {
			for i := range p.count {
				copy(f.raw[p.at+int(i)*layout.RecordSize:], layout.AppendRecord(nil, layout.Record{Shard: uint64(p.first + i)}))
			}
		}
		for _, slot := range c.slots {
			require.EqualValues(t, slot, f.record(slot).Shard)
		}
	}
}
