package arena

import (
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/storage/layout"
)

// mix of writes that a test makes.
type workload struct {
	name    string
	keys    int
	maxLen  int // bytes of values
	deletes int // percent
	loads   int // percent
	cfg     Config
}

var workloads = []workload{
	{name: "roomy", keys: 40, maxLen: 200, deletes: 30, cfg: Config{Shards: 2}},
	{name: "overwrites of one size", keys: 4, maxLen: 0, deletes: 5, cfg: Config{Shards: 1}},
	{name: "growing", keys: 2000, maxLen: 20, deletes: 2, cfg: Config{Shards: 2}},
	{name: "tiny", keys: 400, maxLen: 600, deletes: 10, cfg: Config{Shards: 2, LimitBytes: 64 << 10, MinChunkBytes: 16 << 10, Quarantine: 1}},
	{name: "crowded", keys: 600, maxLen: 0, deletes: 5, cfg: Config{Shards: 1, LimitBytes: 24 << 10, MinChunkBytes: 24 << 10}},
	{name: "tiny and large values", keys: 60, maxLen: 40000, deletes: 10, cfg: Config{Shards: 2, LimitBytes: 256 << 10, MinChunkBytes: 64 << 10, Quarantine: 1}},
	{name: "loads", keys: 100, maxLen: 100, deletes: 10, loads: 5, cfg: Config{Shards: 2, LimitBytes: 96 << 10, MinChunkBytes: 32 << 10, Quarantine: 1}},
}

// load replaces the shard's content by what is acknowledged, as a snapshot would.
func (r *rig) load(shard int, facts []*fact, maxLen int) {
	l := r.shards[shard].StartLoad()
	for _, f := range facts {
		if acked := f.acked.Load(); f.shard == shard && acked&1 != 0 {
			l.Put(Item{Key: []byte(f.key), Value: valueOf(f.key, acked>>1, maxLen), Version: acked >> 1})
		}
	}
	l.Commit()
}

// Gets that are torn at every word and interleaved with the writer at every store,
// from a seed: the version of a key never goes back, a key that is there is never
// found absent, and nothing but what was written is seen.
func TestReadersBetweenStores(t *testing.T) {
	for _, w := range workloads {
		t.Run(w.name, func(t *testing.T) {
			for seed := range uint64(3) {
				interleave(t, w, seed)
			}
		})
	}
}

var errStopped = errors.New("the test is over")

func interleave(t *testing.T, w workload, seed uint64) {
	r := newRig(t, w.cfg)
	rng := rand.New(rand.NewPCG(seed, 1))
	facts := r.facts(w.keys)
	var failure error
	outcomes := map[outcome]int{}
	routes := make([]route, len(r.shards))

	// Each get is a coroutine that runs some words further at each store.
	const readers = 4
	resume := make([]func() (struct{}, bool), readers)
	for i := range readers {
		next, stop := iter.Pull(func(yield func(struct{}) bool) {
			defer func() {
				if e := recover(); e != nil && e != errStopped {
					panic(e)
				}
			}()
			g := &reader{r: r, rng: rng, pause: func() {
				if !yield(struct{}{}) {
					panic(errStopped)
				}
			}}
			remembered := map[int]Location{}
			for failure == nil {
				n := rng.IntN(len(facts))
				f := facts[n]
				rt := routes[f.shard]
				g.pause()
				floor, was := f.begin()
				var o layout.Object
				var out outcome
				if loc, ok := remembered[n]; ok && rng.IntN(2) == 0 {
					if o, out = g.remembered(f.shard, loc, f.key); out == retry {
						delete(remembered, n)
					}
				} else {
					var at layout.Place
					if o, at, out = g.get(f.shard, rt, f.key); out == present {
						remembered[n] = Location{Place: at, Length: layout.ObjectSize(len(o.Key), len(o.Value)), Version: o.Version, LayoutGen: rt.gen}
					}
				}
				outcomes[out]++
				if err := f.judge(o, out, floor, was, w.maxLen); err != nil {
					failure = err
				}
			}
		})
		defer stop()
		resume[i] = next
	}
	r.a.hook = func(event) {
		for _, next := range resume {
			for range rng.IntN(12) {
				next()
			}
		}
	}
	for version := uint64(1); version <= 4000 && failure == nil; version++ {
		f := facts[rng.IntN(len(facts))]
		if rng.IntN(100) < w.loads && version%8 == 0 {
			r.load(f.shard, facts, w.maxLen)
		} else {
			f.write(r.shards[f.shard], rng, version, w.maxLen, w.deletes)
		}
		r.clock.Advance(time.Nanosecond)
		if version%50 == 0 {
			r.a.Tick()
		}
		for i := range routes {
			if rng.IntN(3) == 0 {
				routes[i] = r.route(i)
			}
		}
	}
	r.a.hook = nil
	require.NoError(t, failure, "seed %d", seed)
	require.Greater(t, outcomes[present], 100, "seed %d: %v", seed, outcomes)
}

// The same with real goroutines.
func TestReadersAgainstWriters(t *testing.T) {
	for _, w := range workloads {
		t.Run(w.name, func(t *testing.T) {
			const seed = 11
			r := newRig(t, w.cfg)
			facts := r.facts(w.keys)
			byShard := make([][]*fact, len(r.shards))
			for _, f := range facts {
				byShard[f.shard] = append(byShard[f.shard], f)
			}
			var writers, readers sync.WaitGroup
			var done atomic.Bool
			failures := make(chan error, 16)
			for i, mine := range byShard {
				writers.Go(func() {
					rng := rand.New(rand.NewPCG(seed, uint64(i)))
					for version := uint64(1); version <= 10000/uint64(len(byShard)); version++ {
						if rng.IntN(1000) < w.loads {
							r.load(i, facts, w.maxLen)
						}
						mine[rng.IntN(len(mine))].write(r.shards[i], rng, version, w.maxLen, w.deletes)
						if version%16 == 0 {
							r.clock.Advance(time.Nanosecond)
							r.a.Tick()
						}
					}
				})
			}
			var outcomes [4]atomic.Int64
			for i := range 3 {
				readers.Go(func() {
					rng := rand.New(rand.NewPCG(seed, 100+uint64(i)))
					g := &reader{r: r, rng: rng, pause: func() {
						if rng.IntN(400) == 0 {
							runtime.Gosched()
						}
					}}
					var rt route
					for !done.Load() {
						f := facts[rng.IntN(len(facts))]
						rt = r.route(f.shard)
						floor, was := f.begin()
						o, _, out := g.get(f.shard, rt, f.key)
						outcomes[out].Add(1)
						if err := f.judge(o, out, floor, was, w.maxLen); err != nil {
							select {
							case failures <- err:
							default:
							}
							return
						}
					}
				})
			}
			writers.Wait()
			done.Store(true)
			readers.Wait()
			select {
			case err := <-failures:
				t.Fatal(err)
			default:
			}
			t.Log(fmt.Sprint("retry ", outcomes[retry].Load(), " present ", outcomes[present].Load(), " absent ", outcomes[absent].Load(), " unknown ", outcomes[unknown].Load()))
		})
	}
}
