package rdmatest

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"testing"

	"github.com/kvd-io/kvd/rdma"
)

// testReconnects: many connections, ended in every way, leave nothing behind:
// no connection in Stats, no goroutine, no file descriptor.
func testReconnects(t *testing.T, f Factory) {
	rounds := 1000
	if f.Reconnects > 0 {
		rounds = f.Reconnects
	}
	if testing.Short() {
		rounds = min(rounds, 100)
	}
	l := newStand(t, f, 4096)
	l.shut()
	cycle := func(i int) {
		c := l.another()
		c.mustRead(7, 7, 0, 64)
		switch i % 3 {
		case 0:
			_ = c.conn.Close()
			awaitDone(t, "endpoint", c.ep.Done())
		case 1:
			_ = c.ep.Close()
			awaitDone(t, "conn", c.conn.Done())
			_ = c.conn.Close()
		case 2:
			c.shut()
		}
	}
	for i := range 6 { // whatever is made once is made now
		cycle(i)
	}
	l.noConnections()
	goroutines, files := runtime.NumGoroutine(), openFiles()
	for i := range rounds {
		cycle(i)
	}
	l.noConnections()
	eventually(t, "goroutines gone", func() bool { return runtime.NumGoroutine() <= goroutines }, func() string {
		return fmt.Sprintf("%d, before %d", runtime.NumGoroutine(), goroutines)
	})
	eventually(t, "file descriptors gone", func() bool { return openFiles() <= files }, func() string {
		return fmt.Sprintf("%d, before %d", openFiles(), files)
	})
	if got, want := l.rig.Target.Stats().Accepted, uint64(rounds+7); got != want {
		t.Errorf("Accepted is %d, want %d", got, want)
	}
}

// openFiles counts this process's descriptors, 0 where the host does not say.
func openFiles() int {
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(e)
}

func testAllocations(t *testing.T, f Factory) {
	l := newStand(t, f, 64<<10)
	for _, n := range []int{1, 8} {
		reads := make([]rdma.Read, n)
		for i := range reads {
			reads[i] = rdma.Read{Region: 7, Offset: uint64(i * 4096), Dst: make([]byte, 1024)}
		}
		b := newBatch(reads...)
		ctx := context.Background()
		once := func() {
			l.conn.Post(b)
			if !b.Wait(ctx, 0) || b.Err() != nil {
				t.Errorf("READ: %v", b.Err())
			}
			b.Reset()
		}
		for range 100 {
			once()
		}
		got := testing.AllocsPerRun(500, once)
		t.Logf("chain of %d: %.1f allocations a Post and Wait", n, got)
		if got > f.MaxAllocs && !raceEnabled {
			t.Errorf("chain of %d: %.1f allocations a Post and Wait, want at most %.1f", n, got, f.MaxAllocs)
		}
	}
}

// Benchmark measures Post and Wait by a lone caller: single READs and a chain.
func Benchmark(b *testing.B, f Factory) {
	for _, c := range []struct {
		name        string
		chain, size int
	}{{"64B", 1, 64}, {"1KiB", 1, 1 << 10}, {"64KiB", 1, 64 << 10}, {"8x1KiB", 8, 1 << 10}} {
		b.Run(c.name, func(b *testing.B) {
			l := newStand(b, f, 1<<20)
			reads := make([]rdma.Read, c.chain)
			for i := range reads {
				reads[i] = rdma.Read{Region: 7, Offset: uint64(i * 64 << 10), Dst: make([]byte, c.size)}
			}
			batch := newBatch(reads...)
			ctx := context.Background()
			b.SetBytes(int64(c.chain * c.size))
			b.ReportAllocs()
			for b.Loop() {
				l.conn.Post(batch)
				if !batch.Wait(ctx, 0) || batch.Err() != nil {
					b.Fatalf("READ: %v", batch.Err())
				}
				batch.Reset()
			}
		})
	}
}
