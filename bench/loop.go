package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// operation that the load consists of.
type operation string

const (
	opGet operation = "get"
	opPut operation = "put"
)

// Latencies are recorded in nanoseconds with three digits, up to a minute.
const (
	maxLatency = time.Minute
	digits     = 3
)

// maxErrors of one worker before it gives up: a dead server answers errors faster
// than a living one answers gets.
const maxErrors = 100

// minValueBytes leaves room for the key's index, by which an answer is checked.
const minValueBytes = 8

// workload is what every system is asked to do, the same for all.
type workload struct {
	op      operation
	clients int // workers, each with one operation under way
	size    int // bytes of a value
	keys    []key
	seed    uint64
	warmup  time.Duration // before each measurement, not recorded
	measure time.Duration
}

// makeKeys draws n distinct keys of 20 bytes. The same seed gives the same keys.
func makeKeys(n int, seed uint64) []key {
	rng := rand.New(rand.NewPCG(seed, 0x6b6579))
	keys := make([]key, n)
	for i := range keys {
		// 32 random bits spread the keys, the index keeps them distinct.
		text := fmt.Sprintf("k%08x%011x", rng.Uint32(), i)
		keys[i] = key{index: uint64(i), text: text, bytes: []byte(text)}
	}
	return keys
}

// makeValue is size bytes that do not compress. stamp makes it a key's.
func makeValue(size int, seed uint64) []byte {
	var s [32]byte
	binary.LittleEndian.PutUint64(s[:], seed)
	value := make([]byte, size)
	_, _ = rand.NewChaCha8(s).Read(value) // never fails
	return value
}

func stamp(value []byte, k key) { binary.LittleEndian.PutUint64(value, k.index) }

// checkValue tells whether got can be k's value. The stamp and the ends are looked
// at, not every byte: the loop measures the system, not bytes.Equal.
func checkValue(got, want []byte, k key) error {
	switch {
	case len(got) != len(want):
		return fmt.Errorf("key %s: got %d bytes, want %d", k.text, len(got), len(want))
	case binary.LittleEndian.Uint64(got) != k.index:
		return fmt.Errorf("key %s: got the value of key number %d, want %d", k.text, binary.LittleEndian.Uint64(got), k.index)
	case len(got) >= 2*minValueBytes && !bytes.Equal(got[len(got)-minValueBytes:], want[len(want)-minValueBytes:]):
		return fmt.Errorf("key %s: the last %d bytes of its value differ", k.text, minValueBytes)
	}
	return nil
}

// sample is one measurement of one system.
type sample struct {
	ops      uint64        // that succeeded
	errors   uint64        // while measuring or warming up
	firstErr error         // one of them
	elapsed  time.Duration // from the end of the warm-up to the last answer
	latency  *hdrhistogram.Histogram
}

// perSecond is the throughput.
func (s sample) perSecond() float64 {
	if s.elapsed <= 0 {
		return 0
	}
	return float64(s.ops) / s.elapsed.Seconds()
}

func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, maxLatency.Nanoseconds(), digits)
}

// preload puts every key once, so that gets find them and puts overwrite.
func preload(ctx context.Context, w workload, conns []conn) error {
	errs := make([]error, len(conns))
	var wg sync.WaitGroup
	for i, c := range conns {
		wg.Go(func() {
			value := makeValue(w.size, w.seed)
			for n := i; n < len(w.keys); n += len(conns) {
				stamp(value, w.keys[n])
				if err := c.put(ctx, w.keys[n], value); err != nil {
					errs[i] = fmt.Errorf("putting key %s: %w", w.keys[n].text, err)
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// measure runs the closed loop: each worker sends its next operation when the last
// one is answered. So a system that stalls is also asked less meanwhile, and its
// tail looks better than under arrivals that do not wait; all systems alike.
//
// The error says that the measurement is worthless; single failed operations are
// in the sample.
func measure(ctx context.Context, w workload, conns []conn) (sample, error) {
	workers := make([]worker, len(conns))
	begin := time.Now()
	var wg sync.WaitGroup
	for i, c := range conns {
		workers[i] = worker{
			w:     w,
			conn:  c,
			rng:   rand.New(rand.NewPCG(w.seed, uint64(i)+1)),
			value: makeValue(w.size, w.seed),
			hist:  newHistogram(),
		}
		wg.Go(func() { workers[i].run(ctx, begin) })
	}
	wg.Wait()
	return merge(workers, w.warmup), ctx.Err()
}

type worker struct {
	w     workload
	conn  conn
	rng   *rand.Rand
	value []byte // what is put, and what an answer is compared with
	hist  *hdrhistogram.Histogram

	ops, errs uint64
	firstErr  error
	last      time.Duration // when the last recorded operation was answered, since begin
}

// run takes one time stamp for each operation: the end of one is the start of the
// next. What the loop itself does (draw a key, check the answer) is some 20 ns of
// each latency.
func (wk *worker) run(ctx context.Context, begin time.Time) {
	from, to := wk.w.warmup, wk.w.warmup+wk.w.measure
	start := time.Since(begin)
	for start < to {
		err := wk.one(ctx)
		end := time.Since(begin)
		switch {
		case err != nil:
			wk.errs++
			if wk.firstErr == nil {
				wk.firstErr = err
			}
			if wk.errs >= maxErrors || ctx.Err() != nil {
				return
			}
		case start >= from:
			// An operation begun in time counts however long it took: leaving out the
			// last ones would leave out the slow ones.
			wk.ops++
			wk.last = end
			_ = wk.hist.RecordValue(min(int64(end-start), maxLatency.Nanoseconds()))
		}
		start = end
	}
}

func (wk *worker) one(ctx context.Context) error {
	k := wk.w.keys[wk.rng.IntN(len(wk.w.keys))]
	if wk.w.op == opPut {
		stamp(wk.value, k)
		return wk.conn.put(ctx, k, wk.value)
	}
	got, err := wk.conn.get(ctx, k)
	if err != nil {
		return err
	}
	return checkValue(got, wk.value, k)
}

// merge adds up what the workers saw.
func merge(workers []worker, warmup time.Duration) sample {
	s := sample{latency: newHistogram()}
	for _, wk := range workers {
		s.ops += wk.ops
		s.errors += wk.errs
		if s.firstErr == nil {
			s.firstErr = wk.firstErr
		}
		s.elapsed = max(s.elapsed, wk.last-warmup)
		s.latency.Merge(wk.hist)
	}
	return s
}
