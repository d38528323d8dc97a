package rdmatest

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// held returns a stand whose READs do not complete until release, false where the
// rig cannot hold them back: then the case does not apply (a READ that is never
// outstanding cannot be given up either).
func held(t *testing.T, f Factory) (l *stand, release func(), ok bool) {
	t.Helper()
	l = newStand(t, f, 64<<10)
	if l.rig.Hold == nil {
		t.Log("does not apply: the rig has no Hold")
		return nil, nil, false
	}
	return l, sync.OnceFunc(l.rig.Hold()), true
}

func (l *link) post(n int) []*rdma.Batch {
	batches := make([]*rdma.Batch, n)
	for i := range batches {
		batches[i] = newBatch(rdma.Read{Region: 7, Offset: uint64(i * 64), Dst: make([]byte, 64)},
			rdma.Read{Region: 7, Offset: uint64(i), Dst: make([]byte, 1000)})
		l.conn.Post(batches[i])
	}
	return batches
}

func testCloseWhileOutstanding(t *testing.T, f Factory) {
	l, release, ok := held(t, f)
	if !ok {
		return
	}
	defer release()
	batches := l.post(20)
	if err := l.conn.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	for _, b := range batches {
		if !b.Completed() {
			t.Fatal("Close returned with a batch outstanding")
		}
		mustFail(t, "batch outstanding at Close", b.Err(), rdma.ErrClosed)
		clear(b.Reads[0].Dst)
	}
	l.mustBeClosed()
}

func testRevokeWhileOutstanding(t *testing.T, f Factory) {
	l, release, ok := held(t, f)
	if !ok {
		return
	}
	defer release()
	batches := l.post(20)
	if err := l.ep.Close(); err != nil {
		t.Fatalf("endpoint close: %v", err)
	}
	awaitDone(t, "conn", l.conn.Done())
	for _, b := range batches {
		eventually(t, "batch complete", b.Completed, func() string { return "it is outstanding on a revoked connection" })
		mustFail(t, "batch outstanding at the revocation", b.Err(), finished...)
	}
}

// testCompletesUnwatched: a posted batch completes though nobody ever waits.
func testCompletesUnwatched(t *testing.T, f Factory) {
	l := newStand(t, f, 64<<10)
	for _, b := range l.post(50) {
		eventually(t, "batch complete", b.Completed, func() string { return "nobody waits for it" })
		if b.Err() != nil {
			t.Fatalf("batch: %v", b.Err())
		}
		mustMatch(t, b.Reads[0].Dst, 7, b.Reads[0].Offset)
		mustMatch(t, b.Reads[1].Dst, 7, b.Reads[1].Offset)
	}
}

// testBacklog posts far more than any buffer between the two sides holds, before
// anybody waits: Post must not block on answers that nobody has taken yet.
func testBacklog(t *testing.T, f Factory) {
	l := newStand(t, f, 1<<20)
	batches := make([]*rdma.Batch, 300)
	within(t, "posting a backlog", func() {
		for i := range batches {
			batches[i] = newBatch(rdma.Read{Region: 7, Offset: uint64(i * 64), Dst: make([]byte, 64<<10)})
			l.conn.Post(batches[i])
		}
	})
	for _, b := range batches {
		await(t, b)
		if b.Err() != nil {
			t.Fatalf("batch of the backlog: %v", b.Err())
		}
		mustMatch(t, b.Reads[0].Dst[:4096], 7, b.Reads[0].Offset)
	}
}

// testKilledWhilePosting takes connections down under load, from each side. Every
// posted batch completes exactly once (a second completion panics in rdma.Batch),
// with good bytes or an error of the right class, though not all are waited for.
func testKilledWhilePosting(t *testing.T, f Factory) {
	for _, k := range []struct {
		name    string
		kill    func(*stand) error
		classes []error
	}{
		{"endpoint", func(l *stand) error { return l.ep.Close() }, finished},
		{"domain", func(l *stand) error { return l.d.Close() }, finished},
		{"target", func(l *stand) error { return l.rig.Target.Close() }, finished},
		{"conn", func(l *stand) error { return l.conn.Close() }, []error{rdma.ErrClosed}},
		{"initiator", func(l *stand) error { return l.rig.Initiator.Close() }, []error{rdma.ErrClosed}},
	} {
		t.Run(k.name, func(t *testing.T) {
			for range 5 {
				l := newStand(t, f, 64<<10)
				killUnderLoad(t, l, func() error { return k.kill(l) }, k.classes)
				l.side.close()
			}
		})
	}
}

func killUnderLoad(t *testing.T, l *stand, kill func() error, classes []error) {
	t.Helper()
	const posters, window = 8, 4
	var wg sync.WaitGroup
	warm := make(chan struct{}, posters)
	for p := range posters {
		wg.Go(func() {
			var ring [window]*rdma.Batch
			for i := 0; ; i++ {
				b := ring[i%window]
				if b == nil {
					b = newBatch(rdma.Read{Region: 7, Offset: uint64(8 * p), Dst: make([]byte, 64)},
						rdma.Read{Region: 7, Offset: uint64(p), Dst: make([]byte, 2000)})
					ring[i%window] = b
				} else {
					if !b.Wait(context.Background(), patience) {
						t.Errorf("batch not complete after %v", patience)
						return
					}
					if b.Err() != nil {
						break
					}
					mustMatchAsync(t, b)
					b.Reset()
				}
				l.conn.Post(b)
				if i == 3*window {
					warm <- struct{}{}
				}
			}
			settle(t, ring[:], classes)
		})
	}
	for range posters {
		<-warm
	}
	if err := kill(); err != nil {
		t.Errorf("kill: %v", err)
	}
	wg.Wait()
}

// mustMatchAsync is mustMatch for goroutines other than the test's, which must not
// call Fatal.
func mustMatchAsync(tb testing.TB, b *rdma.Batch) {
	for _, r := range b.Reads {
		for i, c := range r.Dst {
			if c != pattern(7, r.Offset+uint64(i)) {
				tb.Errorf("READ at %d: byte %d is wrong", r.Offset, i)
				return
			}
		}
		clear(r.Dst)
	}
}

// settle checks, without waiting on them, that all posted batches complete.
func settle(t *testing.T, ring []*rdma.Batch, classes []error) {
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for _, b := range ring {
		if b == nil {
			continue
		}
		for !b.Completed() {
			if time.Now().After(deadline) {
				t.Error("a batch posted before the end of the connection never completed")
				return
			}
			<-tick.C
		}
		if err := b.Err(); err != nil && !isAny(err, classes) {
			t.Errorf("batch ended with %q, want one of the classes %v", err, classes)
		}
		clear(b.Reads[0].Dst)
	}
}

func isAny(err error, classes []error) bool {
	for _, c := range classes {
		if errors.Is(err, c) {
			return true
		}
	}
	return false
}

// testWaitGivesUp: Wait with a limit or a finished context returns, the READ goes
// on, and its buffers come back only with the completion.
func testWaitGivesUp(t *testing.T, f Factory) {
	l, release, ok := held(t, f)
	if !ok {
		return
	}
	batches := l.post(3)
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	for _, b := range batches {
		if b.Wait(context.Background(), 2*time.Millisecond) {
			t.Fatal("Wait with a limit: true for a READ that is held back")
		}
		if b.Wait(gone, 0) || b.Wait(gone, time.Hour) {
			t.Fatal("Wait with a cancelled context: true for a READ that is held back")
		}
		late, cancel := context.WithTimeout(context.Background(), 2*time.Millisecond)
		if b.Wait(late, 0) {
			t.Fatal("Wait with a deadline: true for a READ that is held back")
		}
		cancel()
		if b.Completed() {
			t.Fatal("Completed is true for a READ that is held back")
		}
	}
	release()
	for _, b := range batches {
		await(t, b)
		if b.Err() != nil {
			t.Fatalf("batch, after waiting was given up and taken up again: %v", b.Err())
		}
		mustMatch(t, b.Reads[0].Dst, 7, b.Reads[0].Offset)
		if !b.Wait(gone, 0) {
			t.Fatal("Wait for a complete batch with a cancelled context: false, want true")
		}
	}
	l.mustRead(7, 7, 0, 64)
}

// testSharedWait: callers on one connection wait each for their own batch; one that
// lends its goroutine to the provider must not starve the others, nor leave with
// their answers.
func testSharedWait(t *testing.T, f Factory) {
	l := newStand(t, f, 64<<10)
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			b := newBatch(rdma.Read{Region: 7, Offset: uint64(64 * w), Dst: make([]byte, 64)})
			for i := range 200 {
				l.conn.Post(b)
				ctx, cancel := context.WithCancel(context.Background())
				if (i+w)%3 == 0 {
					cancel() // gives up at once, and must wait again
					b.Wait(ctx, 0)
				}
				if !b.Wait(context.Background(), patience) {
					t.Errorf("waiter %d, READ %d: not complete after %v", w, i, patience)
				}
				cancel()
				if b.Err() != nil {
					t.Errorf("waiter %d, READ %d: %v", w, i, b.Err())
					return
				}
				mustMatchAsync(t, b)
				b.Reset()
			}
		})
	}
	wg.Wait()
}
