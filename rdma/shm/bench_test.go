//go:build linux

package shm

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
)

// benchBatch makes a batch that shares no cache line with another.
func benchBatch(reads ...rdma.Read) *rdma.Batch {
	b := new(struct {
		_ [128]byte
		rdma.Batch
		_ [128]byte
	})
	b.Reads = reads
	return &b.Batch
}

func postOnce(tb testing.TB, c rdma.Conn, b *rdma.Batch) {
	b.Reset()
	c.Post(b)
	if !b.Completed() || b.Err() != nil {
		tb.Fatalf("READ: complete %v, %v", b.Completed(), b.Err())
	}
}

// cpuTime is what this process has used.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// run splits b.N over goroutines. Beside the time it reports CPU time, which says
// more on a machine that others use too.
func run(b *testing.B, goroutines int, op func() func()) {
	b.ReportAllocs()
	var wg sync.WaitGroup
	ops := make([]func(), goroutines)
	for i := range ops {
		ops[i] = op()
	}
	b.ResetTimer()
	before := cpuTime(b)
	for i := range goroutines {
		n := b.N / goroutines
		if i == 0 {
			n += b.N % goroutines
		}
		wg.Go(func() {
			for range n {
				ops[i]()
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
}

// BenchmarkRead measures Reset, Post and Completed of one READ.
func BenchmarkRead(b *testing.B) {
	for _, size := range []struct {
		name  string
		bytes int
	}{{"64B", 64}, {"1KiB", 1 << 10}, {"64KiB", 64 << 10}} {
		for _, goroutines := range []int{1, 2} {
			b.Run(size.name+"/goroutines="+itoa(goroutines), func(b *testing.B) {
				s := newPair(b, &Provider{})
				c := s.connect()
				b.SetBytes(int64(size.bytes))
				run(b, goroutines, func() func() {
					batch := benchBatch(rdma.Read{Region: pairRegion, Offset: 4096, Dst: make([]byte, size.bytes)})
					return func() { postOnce(b, c, batch) }
				})
			})
		}
	}
}

// BenchmarkConfirmedGet measures the READs of a get: the object and the leader's
// control record on one connection, another voter's record on a second.
func BenchmarkConfirmedGet(b *testing.B) {
	for _, goroutines := range []int{1, 2} {
		b.Run("goroutines="+itoa(goroutines), func(b *testing.B) {
			leader, voter := newPair(b, &Provider{}), newPair(b, &Provider{})
			lc, vc := leader.connect(), voter.connect()
			run(b, goroutines, func() func() {
				first := benchBatch(
					rdma.Read{Region: pairRegion, Offset: 8192, Dst: make([]byte, 1024)},
					rdma.Read{Region: pairRegion, Offset: 64, Dst: make([]byte, 64)})
				second := benchBatch(rdma.Read{Region: pairRegion, Offset: 64, Dst: make([]byte, 64)})
				return func() {
					postOnce(b, lc, first)
					postOnce(b, vc, second)
				}
			})
		})
	}
}

// TestReadAllocates: the path of a READ is free of allocations.
func TestReadAllocates(t *testing.T) {
	s := newPair(t, &Provider{})
	c := s.connect()
	batch := benchBatch(rdma.Read{Region: pairRegion, Dst: make([]byte, 1024)})
	require.Zero(t, testing.AllocsPerRun(200, func() { postOnce(t, c, batch) }))
}
