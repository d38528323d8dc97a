package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/kvd-io/kvd/client"
)

// store is what a load drives: *client.Client.
type store interface {
	GetInto(ctx context.Context, key, dst []byte, opts ...client.ReadOption) (client.Value, error)
	Put(ctx context.Context, key, value []byte, opts ...client.WriteOption) (uint64, error)
	ShardOf(key []byte) uint32
}

// access is a read or a write.
type access int

const (
	read access = iota
	written
	accesses // how many there are
)

func (a access) String() string { return [accesses]string{"read", "write"}[a] }

// heldKey has one writer, which gives it values with rising numbers. tried and acked
// bound what any reader may see: no less than what was acknowledged before its get
// began, no more than what was sent before it ended.
type heldKey struct {
	index uint64
	name  []byte
	shard uint32
	tried atomic.Uint64
	acked atomic.Uint64
}

const (
	// keysOfWriter is how many keys each writer writes by turns.
	keysOfWriter = 16
	// minHeldBytes of a value: the key's index and the value's number.
	minHeldBytes = 16
	// bucketSpan is how finely completions are counted over time.
	bucketSpan = 10 * time.Millisecond
	// keptFailures is how many failed operations are told one by one.
	keptFailures = 20
)

// heldLoad is a closed loop of workers. Each works on one shard only: an operation on a
// shard that has no leader waits, and would keep its worker from the others, so that they
// would seem slow when nobody asks them.
type heldLoad struct {
	stores   []store // workers take turns over them
	size     int
	deadline time.Duration // of each operation
	period   time.Duration // between the beginnings of a worker's operations, at least
	began    time.Time
	keys     []*heldKey
	workers  []*heldWorker

	watch atomic.Pointer[watch]
	fails struct {
		sync.Mutex
		count [accesses]uint64
		wrong uint64 // answers that can not be
		first []string
	}
	stop context.CancelFunc
	wg   sync.WaitGroup
}

type heldWorker struct {
	load  *heldLoad
	store store
	shard uint32
	kind  access
	keys  []*heldKey // read from, or written to
	rng   *rand.Rand
	buf   []byte

	mu struct {
		sync.Mutex
		hist *hdrhistogram.Histogram
		done []tally // by bucket of time
	}
}

// tally of operations that succeeded.
type tally struct {
	ops  uint64
	took time.Duration // all together
}

// mean is how long one took.
func (t tally) mean() time.Duration { return t.took / time.Duration(max(t.ops, 1)) }

// watch waits for the first answers of shards after an event: of operations that began
// behind it.
type watch struct {
	from  time.Time // what began before does not count
	first map[uint32]*[accesses]atomic.Int64
	left  atomic.Int32
	done  chan struct{} // closed when all have answered
}

func newWatch(from time.Time, shards []uint32) *watch {
	w := &watch{from: from, first: map[uint32]*[accesses]atomic.Int64{}, done: make(chan struct{})}
	for _, s := range shards {
		w.first[s] = &[accesses]atomic.Int64{}
	}
	if w.left.Store(int32(len(shards)) * int32(accesses)); len(shards) == 0 {
		close(w.done)
	}
	return w
}

// answered takes in an operation that succeeded.
func (w *watch) answered(shard uint32, kind access, start, end time.Time) {
	if f := w.first[shard]; f != nil && !start.Before(w.from) && f[kind].CompareAndSwap(0, end.UnixNano()) && w.left.Add(-1) == 0 {
		close(w.done)
	}
}

// since is how long after t the shard first answered; false: it has not yet.
func (w *watch) since(t time.Time, shard uint32, kind access) (time.Duration, bool) {
	at := w.first[shard][kind].Load()
	return time.Unix(0, at).Sub(t), at != 0
}

// newHeldLoad makes workers, of which every other one writes, and gives the shards to
// them by turns. Nothing is done yet.
func newHeldLoad(stores []store, shards, workers, size int, deadline time.Duration, seed uint64) (*heldLoad, error) {
	l := &heldLoad{stores: stores, size: size, deadline: deadline}
	if workers < 2*shards {
		return nil, fmt.Errorf("%d clients for %d shards: want two at least for each, one that reads and one that writes", workers, shards)
	}
	byShard := map[uint32][]*heldKey{}
	writers := map[uint32]int{}
	for i := range workers / 2 {
		writers[uint32(i%shards)+1]++
	}
	for n, missing := uint64(0), workers/2*keysOfWriter; missing > 0; n++ {
		k := &heldKey{index: n, name: fmt.Appendf(nil, "held/%d/%d", seed, n)}
		k.shard = stores[0].ShardOf(k.name)
		if len(byShard[k.shard]) < writers[k.shard]*keysOfWriter {
			byShard[k.shard] = append(byShard[k.shard], k)
			l.keys = append(l.keys, k)
			missing--
		}
	}
	given := map[uint32]int{}
	for i := range workers {
		w := &heldWorker{
			load: l, store: stores[i%len(stores)], shard: uint32(i/2%shards) + 1, kind: access(i % 2),
			rng: rand.New(rand.NewPCG(seed, uint64(i))), buf: makeValue(size, seed+uint64(i)),
		}
		w.keys = byShard[w.shard]
		if w.kind == written {
			w.keys = w.keys[given[w.shard]:][:keysOfWriter]
			given[w.shard] += keysOfWriter
		}
		w.mu.hist = newHistogram()
		l.workers = append(l.workers, w)
	}
	return l, nil
}

// start writes every key once and lets the workers go.
func (l *heldLoad) start(ctx context.Context) error {
	errs := make([]error, len(l.workers))
	var wg sync.WaitGroup
	for i, w := range l.workers {
		if w.kind != written {
			continue
		}
		wg.Go(func() {
			for _, k := range w.keys {
				if errs[i] == nil {
					errs[i] = w.put(ctx, k)
				}
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("writing each key once: %w", err)
	}
	ctx, l.stop = context.WithCancel(ctx)
	l.latencies() // those of the first writes are not the load's
	l.began = time.Now()
	for _, w := range l.workers {
		l.wg.Go(func() { w.run(ctx) })
	}
	return nil
}

// end returns when no operation is under way.
func (l *heldLoad) end() {
	if l.stop != nil {
		l.stop()
	}
	l.wg.Wait()
}

func (w *heldWorker) run(ctx context.Context) {
	due := time.Now().Add(time.Duration(w.rng.Float64() * float64(w.load.period)))
	for n := 0; ctx.Err() == nil; n++ {
		if wait := time.Until(due); wait > 0 && sleepFor(ctx, wait) != nil {
			return
		}
		k := w.keys[n%len(w.keys)]
		start := time.Now()
		// Who is late does not catch up: what was not asked shows as lost throughput.
		if due = due.Add(w.load.period); due.Before(start) {
			due = start
		}
		var err error
		if w.kind == written {
			err = w.put(ctx, k)
		} else {
			err = w.get(ctx, w.keys[w.rng.IntN(len(w.keys))])
		}
		end := time.Now()
		switch {
		case err == nil:
			w.record(start, end)
		case ctx.Err() != nil:
			return // the load ends
		default:
			w.load.failed(w, start, end, err)
		}
	}
}

func (w *heldWorker) record(start, end time.Time) {
	bucket := int(end.Sub(w.load.began) / bucketSpan)
	w.mu.Lock()
	for len(w.mu.done) <= bucket {
		w.mu.done = append(w.mu.done, tally{})
	}
	w.mu.done[bucket].ops++
	w.mu.done[bucket].took += end.Sub(start)
	_ = w.mu.hist.RecordValue(min(int64(end.Sub(start)), maxLatency.Nanoseconds()))
	w.mu.Unlock()
	if watch := w.load.watch.Load(); watch != nil {
		watch.answered(w.shard, w.kind, start, end)
	}
}

// errWrong is an answer that can not be.
var errWrong = errors.New("wrong answer")

func (l *heldLoad) failed(w *heldWorker, start, end time.Time, err error) {
	l.fails.Lock()
	defer l.fails.Unlock()
	if errors.Is(err, errWrong) {
		l.fails.wrong++
	} else {
		l.fails.count[w.kind]++
	}
	if len(l.fails.first) < keptFailures {
		l.fails.first = append(l.fails.first, fmt.Sprintf("%.3f s: %s of shard %d, after %.3f s: %v",
			end.Sub(l.began).Seconds(), w.kind, w.shard, end.Sub(start).Seconds(), err))
	}
}

func (w *heldWorker) put(ctx context.Context, k *heldKey) error {
	ctx, cancel := context.WithTimeout(ctx, w.load.deadline)
	defer cancel()
	n := k.tried.Add(1)
	binary.LittleEndian.PutUint64(w.buf, k.index)
	binary.LittleEndian.PutUint64(w.buf[8:], n)
	if _, err := w.store.Put(ctx, k.name, w.buf); err != nil {
		return err // perhaps applied: tried says so
	}
	k.acked.Store(n)
	return nil
}

func (w *heldWorker) get(ctx context.Context, k *heldKey) error {
	ctx, cancel := context.WithTimeout(ctx, w.load.deadline)
	defer cancel()
	return readHeld(ctx, w.store, k, w.buf)
}

// readHeld gets a key and holds the answer against what was written.
func readHeld(ctx context.Context, s store, k *heldKey, buf []byte) error {
	least := k.acked.Load()
	v, err := s.GetInto(ctx, k.name, buf)
	if errors.Is(err, client.ErrNotFound) {
		return fmt.Errorf("%w: key %s is absent: want value %d, which was acknowledged, or a later one", errWrong, k.name, least)
	}
	if err != nil {
		return err
	}
	most := k.tried.Load()
	if len(v.Data) != len(buf) || binary.LittleEndian.Uint64(v.Data) != k.index {
		return fmt.Errorf("%w: key %s holds %d bytes that are not its own", errWrong, k.name, len(v.Data))
	}
	if n := binary.LittleEndian.Uint64(v.Data[8:]); n < least || n > most {
		return fmt.Errorf("%w: key %s holds value %d: want %d, which was acknowledged, to %d, which was sent", errWrong, k.name, n, least, most)
	}
	return nil
}

// verify reads every key after the load: lost are those whose acknowledged value, or a
// later one, is not there.
func (l *heldLoad) verify(ctx context.Context, s store) (lost []string, err error) {
	buf := bytes.Clone(l.workers[0].buf)
	for _, k := range l.keys {
		one, cancel := context.WithTimeout(ctx, readyTimeout)
		err := readHeld(one, s, k, buf)
		cancel()
		switch {
		case errors.Is(err, errWrong):
			lost = append(lost, err.Error())
		case err != nil:
			return lost, fmt.Errorf("reading what was written: %w", err)
		}
	}
	return lost, nil
}

// completed sums up what was completed from one time to another, by workers of the shards
// that are wanted.
func (l *heldLoad) completed(from, to time.Time, wanted func(shard uint32) bool) (sum [accesses]tally) {
	a, b := int(from.Sub(l.began)/bucketSpan), int(to.Sub(l.began)/bucketSpan)
	for _, w := range l.workers {
		if !wanted(w.shard) {
			continue
		}
		w.mu.Lock()
		for i := max(a, 0); i < min(b, len(w.mu.done)); i++ {
			sum[w.kind].ops += w.mu.done[i].ops
			sum[w.kind].took += w.mu.done[i].took
		}
		w.mu.Unlock()
	}
	return sum
}

// latencies since they were taken last, by kind of access.
func (l *heldLoad) latencies() (out [accesses]*hdrhistogram.Histogram) {
	for i := range out {
		out[i] = newHistogram()
	}
	for _, w := range l.workers {
		w.mu.Lock()
		out[w.kind].Merge(w.mu.hist)
		w.mu.hist.Reset()
		w.mu.Unlock()
	}
	return out
}

// failures so far: operations without an answer, and answers that can not be.
func (l *heldLoad) failures() (count [accesses]uint64, wrong uint64, first []string) {
	l.fails.Lock()
	defer l.fails.Unlock()
	return l.fails.count, l.fails.wrong, slices.Clone(l.fails.first)
}
