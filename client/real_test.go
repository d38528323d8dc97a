package client

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/shm"
	"github.com/kvd-io/kvd/rdma/simnic"
	"github.com/kvd-io/kvd/rdma/tcp"
	"github.com/kvd-io/kvd/storage/arena"
	"github.com/kvd-io/kvd/storage/layout"
)

// realSide gives a node of the tests a real arena, served by real transports.
type realSide struct {
	arena   *arena.Arena
	records []*arena.Record
	shards  []*arena.Shard
	space   *arena.Namespace

	targets []rdma.Target

	mu      sync.Mutex
	domains map[string]rdma.Domain
	attrs   map[rdma.RegionID]map[string][]byte
	lengths map[rdma.RegionID]uint64
}

func newRealSide(t testing.TB, n *fakeNode, providers []rdma.Provider) *realSide {
	r := &realSide{
		domains: map[string]rdma.Domain{}, attrs: map[rdma.RegionID]map[string][]byte{}, lengths: map[rdma.RegionID]uint64{},
	}
	n.c.transports = nil
	var targets []rdma.Target
	for _, p := range providers {
		target, err := p.NewTarget(rdma.TargetConfig{NodeID: n.id, BootID: n.boot})
		require.NoError(t, err)
		targets = append(targets, target)
		r.domains[p.Name()], err = target.NewDomain("default")
		require.NoError(t, err)
		n.c.transports = append(n.c.transports, p.Name())
	}
	r.targets = targets
	var err error
	r.arena, err = arena.New(arena.Config{
		HashSeed: n.c.seed, BootID: n.boot, Shards: n.c.shards, LimitBytes: 256 << 20, Name: "kvd-client-test",
		OnChunk: func(_ uint32, id rdma.RegionID, m *rdma.Memory) error { return r.register(id, m) },
	})
	require.NoError(t, err)
	require.NoError(t, r.register(rdma.ControlRegion, r.arena.ControlMemory()))
	r.records = make([]*arena.Record, n.c.shards+1)
	r.shards = make([]*arena.Shard, n.c.shards+1)
	r.space = r.arena.OpenNamespace(1, 0)
	for s := uint32(1); s <= n.c.shards; s++ {
		r.records[s], err = r.arena.NewRecord(uint64(s), n.id, 5)
		require.NoError(t, err)
		r.records[s].SetConfigID(1)
		r.records[s].SetApplied(10)
		r.shards[s] = r.space.OpenShard(s, r.records[s])
	}
	t.Cleanup(func() {
		for _, target := range targets {
			require.NoError(t, target.Close())
		}
		require.NoError(t, r.arena.Close())
	})
	return r
}

func (r *realSide) register(id rdma.RegionID, m *rdma.Memory) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.attrs[id], r.lengths[id] = map[string][]byte{}, m.Size()
	for name, d := range r.domains {
		attr, err := d.Register(id, m)
		if err != nil {
			return err
		}
		r.attrs[id][name] = attr
	}
	return nil
}

func (r *realSide) connect(ctx context.Context, req *kvdv1.ConnectRequest) (*kvdv1.ConnectResponse, error) {
	answer, _, err := r.domains[req.GetTransport()].Accept(ctx, rdma.Peer{Name: "test"}, req.GetOffer())
	return &kvdv1.ConnectResponse{Answer: answer}, err
}

func (r *realSide) regions(transport string) *kvdv1.RegionsResponse {
	r.mu.Lock()
	defer r.mu.Unlock()
	resp := &kvdv1.RegionsResponse{}
	for id, length := range r.lengths {
		resp.Regions = append(resp.Regions, &kvdv1.Region{Id: uint32(id), Length: length, Attr: r.attrs[id][transport]})
	}
	return resp
}

func (r *realSide) writeRecord(s uint32, rec layout.Record) {
	r.records[s].SetTerm(rec.Term)
	r.records[s].SetServedTerm(rec.ServedTerm)
	r.records[s].SetConfigID(rec.ConfigID)
	r.records[s].SetApplied(rec.Applied)
}

func (r *realSide) show(s uint32, key string, v fakeValue) *kvdv1.Location {
	l, resident := r.shards[s].Put(arena.Item{Key: []byte(key), Value: v.value, Version: v.version, Expiry: v.expiry})
	r.records[s].SetApplied(v.version)
	if !resident {
		return nil
	}
	return &kvdv1.Location{
		BootId: r.records[s].Load().BootID, LayoutGen: l.LayoutGen, Chunk: l.Place.Chunk, Offset: l.Place.Offset, Length: uint32(l.Length),
	}
}

func (r *realSide) hide(s uint32, key string, version uint64) {
	r.shards[s].Delete([]byte(key), layout.StateDeleted)
	r.records[s].SetApplied(version)
}

func (r *realSide) describe(s uint32, l *kvdv1.LocalReplica) {
	l.Slot = r.records[s].Slot()
	if t, gen, ok := r.shards[s].Table(); ok {
		l.Table = &kvdv1.IndexTable{
			LayoutGen: gen, TableId: t.ID, Chunk: t.Place.Chunk, Offset: t.Place.Offset, Buckets: t.Buckets, Overflow: t.Overflow,
		}
	}
}

// realTransports are the ways to serve and to read the arenas.
func realTransports(t testing.TB) map[string]func(t testing.TB) (func(n *fakeNode) []rdma.Provider, rdma.Provider) {
	return map[string]func(t testing.TB) (func(n *fakeNode) []rdma.Provider, rdma.Provider){
		"shm": func(t testing.TB) (func(n *fakeNode) []rdma.Provider, rdma.Provider) {
			dir := t.TempDir()
			return func(n *fakeNode) []rdma.Provider {
				return []rdma.Provider{&shm.Provider{SocketPath: filepath.Join(dir, fmt.Sprint(n.id))}}
			}, &shm.Provider{}
		},
		"tcp": func(testing.TB) (func(n *fakeNode) []rdma.Provider, rdma.Provider) {
			return func(*fakeNode) []rdma.Provider { return []rdma.Provider{tcp.Provider{}} }, tcp.Provider{}
		},
		"simnic": func(t testing.TB) (func(n *fakeNode) []rdma.Provider, rdma.Provider) {
			fabric, err := simnic.New(simnic.Config{
				Seed: rand.Uint64(), Delay: simnic.Range{Max: 20 * time.Microsecond}, Return: simnic.Range{Max: 20 * time.Microsecond},
				TearOneIn: 2, Pause: simnic.Range{Max: 20 * time.Microsecond}, LoseOneIn: 2000,
			})
			require.NoError(t, err)
			t.Cleanup(fabric.Close)
			return func(n *fakeNode) []rdma.Provider {
				return []rdma.Provider{fabric.Host(fmt.Sprint("node", n.id))}
			}, fabric.Host("client")
		},
	}
}

func startReal(t testing.TB, name string, shards int) *fixture {
	targets, reader := realTransports(t)[name](t)
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: shards, targets: targets})}
	f.c = f.dial(t, reader, nil)
	f.ready(t)
	return f
}

// TestRealTransports: writers overwrite and delete, leaders change, and every get
// is at least as new as what was acknowledged before it started.
func TestRealTransports(t *testing.T) {
	for name := range realTransports(t) {
		t.Run(name, func(t *testing.T) {
			f := startReal(t, name, 4)
			ctx := ctxFor(t, time.Minute)
			const keys = 8
			var acked [keys]atomic.Uint64
			stop := make(chan struct{})
			var readers, writers sync.WaitGroup
			for r := range 4 {
				readers.Go(func() {
					for i := r; ; i++ {
						select {
						case <-stop:
							return
						default:
						}
						runtime.Gosched() // shared memory never blocks: the writers would starve
						k := i % keys
						before := acked[k].Load()
						v, err := f.c.Get(ctx, fmt.Appendf(nil, "key %d", k))
						if err == ErrNotFound && before == 0 {
							continue
						}
						var n uint64
						if _, scanErr := fmt.Sscanf(string(v.Data), "%d ", &n); err != nil || scanErr != nil || n < before {
							t.Errorf("key %d: %.20q, %v: want at least %d", k, v.Data, err, before)
							return
						}
					}
				})
			}
			pad := make([]byte, 700)
			for k := range keys {
				writers.Go(func() {
					for n := uint64(1); n <= 150; n++ {
						value := append(fmt.Appendf(nil, "%d ", n), pad[:n*4]...)
						if _, err := f.c.Put(ctx, fmt.Appendf(nil, "key %d", k), value); err != nil {
							t.Errorf("put: %v", err)
							return
						}
						acked[k].Store(n)
						if k == 0 && n%50 == 0 {
							f.locked(func() {
								s := uint32(n/50)%4 + 1
								f.elect(s, f.leader[s]%3+1, f.term[s]+1)
							})
						}
					}
				})
			}
			writers.Wait()
			close(stop)
			readers.Wait()
			s := f.c.Stats()
			t.Logf("%s: gets %v, READs %d, retries %v, fallbacks %v", name, s.Gets, s.TotalReads(), s.Retries, s.Fallbacks)
			require.NotZero(t, s.gets(Linearizable, name))
		})
	}
}

func BenchmarkGet(b *testing.B) {
	for _, name := range []string{"shm", "tcp"} {
		for _, level := range []Level{Linearizable, Session} {
			for _, callers := range []int{1, 16, 64} {
				b.Run(fmt.Sprintf("%s/%v/%d", name, level, callers), func(b *testing.B) { benchmarkGet(b, name, level, callers) })
			}
		}
	}
}

func benchmarkGet(b *testing.B, name string, level Level, callers int) {
	f := startReal(b, name, 8)
	ctx := context.Background()
	var keys [][]byte
	for i := range 1000 {
		keys = append(keys, fmt.Appendf(nil, "key %d", i))
		_, err := f.c.Put(ctx, keys[i], make([]byte, 1024))
		require.NoError(b, err)
	}
	for _, k := range keys {
		_, err := f.c.Get(ctx, k, WithLevel(level))
		require.NoError(b, err)
	}
	b.ReportAllocs()
	before := f.c.Stats()
	b.ResetTimer()
	var wg sync.WaitGroup
	for w := range callers {
		wg.Go(func() {
			dst := make([]byte, 1024)
			for i := range b.N / callers {
				if _, err := f.c.GetInto(ctx, keys[(w*31+i)%len(keys)], dst, WithLevel(level)); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	s := f.c.Stats().Sub(before)
	b.ReportMetric(float64(s.TotalReads())/float64(max(s.TotalGets(), 1)), "READs/get")
}
