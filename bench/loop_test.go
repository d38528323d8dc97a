package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeStore is a system in memory. It can be made slow, wrong or broken.
type fakeStore struct {
	mu struct {
		sync.Mutex
		values map[string][]byte
	}
	under, most atomic.Int64 // operations under way, and the most there were
	delay       time.Duration
	failEvery   int64
	calls       atomic.Int64
	corrupt     func([]byte) []byte
}

func newFakeStore() *fakeStore {
	f := &fakeStore{}
	f.mu.values = map[string][]byte{}
	return f
}

func (f *fakeStore) enter() (leave func(), err error) {
	n := f.under.Add(1)
	for {
		most := f.most.Load()
		if n <= most || f.most.CompareAndSwap(most, n) {
			break
		}
	}
	if f.delay > 0 {
		<-time.After(f.delay)
	}
	if c := f.calls.Add(1); f.failEvery > 0 && c%f.failEvery == 0 {
		err = errors.New("made to fail")
	}
	return func() { f.under.Add(-1) }, err
}

func (f *fakeStore) get(_ context.Context, k key) ([]byte, error) {
	leave, err := f.enter()
	defer leave()
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	v, ok := f.mu.values[k.text]
	if !ok {
		return nil, fmt.Errorf("key %s not found", k.text)
	}
	if f.corrupt != nil {
		v = f.corrupt(append([]byte(nil), v...))
	}
	return v, nil
}

func (f *fakeStore) put(_ context.Context, k key, value []byte) error {
	leave, err := f.enter()
	defer leave()
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.values[k.text] = append([]byte(nil), value...)
	return nil
}

func conns(f *fakeStore, n int) []conn {
	out := make([]conn, n)
	for i := range out {
		out[i] = f
	}
	return out
}

func smallLoad(op operation) workload {
	return workload{op: op, clients: 4, size: 64, keys: makeKeys(50, 1), seed: 1, warmup: 20 * time.Millisecond, measure: 100 * time.Millisecond}
}

func TestPreloadPutsEveryKeyWithItsOwnValue(t *testing.T) {
	f, w := newFakeStore(), smallLoad(opGet)
	require.NoError(t, preload(t.Context(), w, conns(f, w.clients)))
	require.Len(t, f.mu.values, len(w.keys))
	want := makeValue(w.size, w.seed)
	for _, k := range w.keys {
		stamp(want, k)
		require.Equal(t, want, f.mu.values[k.text])
	}
}

// What is recorded is what was done: as many latencies as operations, each as long
// as the store took, never more under way than there are workers.
func TestMeasureRecordsEachOperationOnce(t *testing.T) {
	for _, op := range []operation{opGet, opPut} {
		t.Run(string(op), func(t *testing.T) {
			f, w := newFakeStore(), smallLoad(op)
			require.NoError(t, preload(t.Context(), w, conns(f, w.clients)))
			f.delay = 2 * time.Millisecond
			f.calls.Store(0)
			s, err := measure(t.Context(), w, conns(f, w.clients))
			require.NoError(t, err)
			require.Zero(t, s.errors)
			require.NotZero(t, s.ops)
			require.EqualValues(t, s.ops, s.latency.TotalCount())
			require.Less(t, s.ops, uint64(f.calls.Load()), "what the warm-up did is not counted")
			require.LessOrEqual(t, f.most.Load(), int64(w.clients))
			require.GreaterOrEqual(t, s.latency.Min(), (f.delay - f.delay/100).Nanoseconds())
			require.GreaterOrEqual(t, s.elapsed, w.measure-f.delay)
			// Four workers at 2 ms cannot exceed 2,000 a second.
			require.LessOrEqual(t, s.perSecond(), float64(w.clients)/f.delay.Seconds()*1.01)
		})
	}
}

// An operation that hangs until long after the end is the tail: it must show.
func TestMeasureKeepsTheLastSlowOperation(t *testing.T) {
	f, w := newFakeStore(), smallLoad(opPut)
	w.clients, w.warmup, w.measure = 1, 0, 10*time.Millisecond
	f.delay = 60 * time.Millisecond
	s, err := measure(t.Context(), w, conns(f, 1))
	require.NoError(t, err)
	require.EqualValues(t, 1, s.ops)
	require.GreaterOrEqual(t, s.latency.Max(), (f.delay - time.Millisecond).Nanoseconds())
	require.GreaterOrEqual(t, s.elapsed, f.delay-time.Millisecond, "throughput must not profit from it")
}

func TestMeasureCountsErrorsAndGivesUp(t *testing.T) {
	f, w := newFakeStore(), smallLoad(opGet)
	require.NoError(t, preload(t.Context(), w, conns(f, w.clients)))
	f.delay, f.failEvery = time.Millisecond, 10
	s, err := measure(t.Context(), w, conns(f, w.clients))
	require.NoError(t, err)
	require.NotZero(t, s.ops)
	require.NotZero(t, s.errors)
	require.ErrorContains(t, s.firstErr, "made to fail")

	f.delay, f.failEvery = 0, 1
	w.measure = time.Minute
	begin := time.Now()
	s, err = measure(t.Context(), w, conns(f, w.clients))
	require.NoError(t, err)
	require.Zero(t, s.ops)
	require.EqualValues(t, maxErrors*w.clients, s.errors)
	require.Less(t, time.Since(begin), w.measure/2, "a dead system is given up")
}

func TestMeasureSeesWrongAnswers(t *testing.T) {
	for name, corrupt := range map[string]func([]byte) []byte{
		"short":           func(v []byte) []byte { return v[:len(v)-1] },
		"another key's":   func(v []byte) []byte { v[0] ^= 1; return v },
		"end overwritten": func(v []byte) []byte { v[len(v)-1] ^= 1; return v },
	} {
		t.Run(name, func(t *testing.T) {
			f, w := newFakeStore(), smallLoad(opGet)
			w.measure = 10 * time.Millisecond
			require.NoError(t, preload(t.Context(), w, conns(f, w.clients)))
			f.corrupt = corrupt
			s, err := measure(t.Context(), w, conns(f, w.clients))
			require.NoError(t, err)
			require.Zero(t, s.ops)
			require.Error(t, s.firstErr)
		})
	}
}

func TestMeasureEndsWithItsContext(t *testing.T) {
	f, w := newFakeStore(), smallLoad(opPut)
	w.measure = time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	stopping := &cancelled{fakeStore: f, ctx: ctx}
	cancel()
	_, err := measure(ctx, w, []conn{stopping})
	require.ErrorIs(t, err, context.Canceled)
}

// cancelled answers with its context's error, as real clients do.
type cancelled struct {
	*fakeStore
	ctx context.Context
}

func (c *cancelled) put(context.Context, key, []byte) error { return c.ctx.Err() }

func TestKeysAndValuesComeFromTheSeed(t *testing.T) {
	a, b, other := makeKeys(1000, 7), makeKeys(1000, 7), makeKeys(1000, 8)
	require.Equal(t, a, b)
	require.NotEqual(t, a[0].text, other[0].text)
	seen := map[string]bool{}
	for i, k := range a {
		require.Len(t, k.bytes, 20)
		require.Equal(t, k.text, string(k.bytes))
		require.EqualValues(t, i, k.index)
		require.False(t, seen[k.text])
		seen[k.text] = true
	}
	require.Equal(t, makeValue(100, 7), makeValue(100, 7))
	require.NotEqual(t, makeValue(100, 7), makeValue(100, 8))
}

func TestMergeAddsUpWorkers(t *testing.T) {
	a, b := worker{hist: newHistogram()}, worker{hist: newHistogram()}
	for us := int64(1); us <= 100; us++ {
		require.NoError(t, a.hist.RecordValue(us*1000))
		require.NoError(t, b.hist.RecordValue((us+100)*1000))
	}
	a.ops, a.last = 100, 3*time.Second
	b.ops, b.last, b.errs, b.firstErr = 100, 5*time.Second, 2, errors.New("lost")
	s := merge([]worker{a, b}, time.Second)
	require.EqualValues(t, 200, s.ops)
	require.EqualValues(t, 2, s.errors)
	require.ErrorContains(t, s.firstErr, "lost")
	require.Equal(t, 4*time.Second, s.elapsed, "from the end of the warm-up to the last answer")
	require.InDelta(t, 50, s.perSecond(), 0.001)
	require.EqualValues(t, 200, s.latency.TotalCount())
	require.InEpsilon(t, 100.0, percentileMicros(s.latency, 50), 0.01)
	require.InEpsilon(t, 198.0, percentileMicros(s.latency, 99), 0.01)
	require.InEpsilon(t, 200.0, float64(s.latency.Max())/1000, 0.01)
}
