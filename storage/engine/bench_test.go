package engine

import (
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
)

// Benchmarks run on the disk below this folder, not on a file system in memory.
func benchConfig(b *testing.B) Config {
	dir, err := os.MkdirTemp(".", "bench-")
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, os.RemoveAll(dir)) })
	return Config{Dir: dir}
}

// BenchmarkSyncedAppend is the durable part of an acknowledged write. "plain" is
// without prepared segments.
func BenchmarkSyncedAppend(b *testing.B) {
	for _, prepared := range []bool{true, false} {
		for _, n := range []int{1, 64} {
			name := fmt.Sprintf("entries=%d/plain", n)
			if prepared {
				name = fmt.Sprintf("entries=%d/prepared", n)
			}
			b.Run(name, func(b *testing.B) { benchAppend(b, n, prepared) })
		}
	}
}

func benchAppend(b *testing.B, n int, prepared bool) {
	cfg := benchConfig(b)
	if !prepared {
		cfg.walBytes = -1
	}
	var took []time.Duration
	cfg.OnSync = func(d time.Duration) { took = append(took, d) }
	e := open(b, cfg)
	e.wals.wg.Wait()
	defer func() { require.NoError(b, e.Close()) }()
	data := make([]byte, 1<<10)
	next := uint64(1)
	b.SetBytes(int64(n << 10))
	b.ResetTimer()
	for b.Loop() {
		es := make([]*raftpb.Entry, n)
		for i := range es {
			es[i] = entry(next, 1, "")
			es[i].Data = data
			next++
		}
		batch := e.NewLogBatch()
		require.NoError(b, batch.Append(1, es))
		require.NoError(b, batch.SetHardState(1, hardState(1, 1, next-1)))
		// The host cuts the log from time to time.
		if next%4096 == 1 && next > 8192 {
			require.NoError(b, batch.Truncate(1, next-8192, 1))
		}
		require.NoError(b, batch.Commit(true))
	}
	b.StopTimer()
	slices.Sort(took)
	for _, p := range []int{50, 99} {
		b.ReportMetric(float64(took[len(took)*p/100].Microseconds()), fmt.Sprintf("p%d-µs", p))
	}
}

func benchKey(i int) []byte { return binary.BigEndian.AppendUint64([]byte("key/"), uint64(i)) }

func fillBench(b *testing.B, e *Engine, keys, size int) {
	v := Value{Data: make([]byte, size), Version: 1}
	for i := 0; i < keys; {
		batch := e.Group(1).NewBatch()
		for range 1000 {
			require.NoError(b, batch.Put(1, benchKey(i), v))
			i++
		}
		require.NoError(b, batch.Commit())
	}
}

func BenchmarkBatchPut(b *testing.B) {
	for _, n := range []int{1, 64} {
		b.Run(fmt.Sprintf("puts=%d", n), func(b *testing.B) {
			e := open(b, benchConfig(b))
			defer func() { require.NoError(b, e.Close()) }()
			v := Value{Data: make([]byte, 1<<10), Version: 1}
			b.SetBytes(int64(n << 10))
			i := 0
			for b.Loop() {
				batch := e.Group(1).NewBatch()
				for range n {
					key := benchKey(i)
					_, _, err := batch.Get(1, key)
					require.NoError(b, err)
					require.NoError(b, batch.Put(1, key, v))
					i++
				}
				require.NoError(b, batch.SetMeta(Meta{Applied: uint64(i)}))
				require.NoError(b, batch.Commit())
			}
		})
	}
}

func BenchmarkGet(b *testing.B) {
	const keys = 200_000
	e := open(b, benchConfig(b))
	defer func() { require.NoError(b, e.Close()) }()
	fillBench(b, e, keys, 100)
	require.NoError(b, e.Flush())
	g := e.Group(1)
	for _, hit := range []bool{true, false} {
		b.Run(fmt.Sprintf("hit=%t", hit), func(b *testing.B) {
			i := 0
			for b.Loop() {
				i += 7919
				key := benchKey(i % keys)
				if !hit {
					key = append(key, 'x')
				}
				_, ok, err := g.Get(1, key)
				require.NoError(b, err)
				require.Equal(b, hit, ok)
			}
		})
	}
}

// BenchmarkScan reports the time for one key; a start reads all of them.
func BenchmarkScan(b *testing.B) {
	const keys = 500_000
	e := open(b, benchConfig(b))
	defer func() { require.NoError(b, e.Close()) }()
	fillBench(b, e, keys, 100)
	require.NoError(b, e.Flush())
	for b.Loop() {
		n := 0
		require.NoError(b, e.Group(1).Scan(func(uint32, []byte, Value) error { n++; return nil }))
		require.Equal(b, keys, n)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/keys, "ns/key")
}
