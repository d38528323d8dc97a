package rdma

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const patience = 10 * time.Second

func fresh() *Batch {
	b := &Batch{}
	b.Reset()
	return b
}

func TestBatchCompletes(t *testing.T) {
	b := fresh()
	require.False(t, b.Completed())
	boom := errors.New("boom")
	b.Complete(boom)
	require.True(t, b.Completed())
	require.ErrorIs(t, b.Err(), boom)
	for range 3 { // as often as one likes
		require.True(t, b.Wait(context.Background(), 0))
		require.True(t, b.Wait(context.Background(), time.Nanosecond))
	}
	<-b.Ready()
	b.Reset()
	require.False(t, b.Completed())
	require.NoError(t, b.Err())
	select {
	case <-b.Ready():
		t.Fatal("a token right after Reset")
	default:
	}
}

func TestBatchMisuse(t *testing.T) {
	t.Run("twice", func(t *testing.T) {
		b := fresh()
		b.Complete(nil)
		require.Panics(t, func() { b.Complete(errors.New("second")) })
		require.NoError(t, b.Err(), "the first outcome stays")
	})
	t.Run("without Reset", func(t *testing.T) {
		require.Panics(t, func() { (&Batch{}).Complete(nil) })
	})
}

func TestBatchWaitGivesUp(t *testing.T) {
	b := fresh()
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	require.False(t, b.Wait(gone, 0))
	require.False(t, b.Wait(gone, time.Hour))
	for range 3 { // the timer is reused
		start := time.Now()
		require.False(t, b.Wait(context.Background(), 3*time.Millisecond))
		require.GreaterOrEqual(t, time.Since(start), 3*time.Millisecond)
	}
	b.Complete(nil)
	require.True(t, b.Wait(gone, 0), "complete wins over cancelled")
}

func TestBatchManyWaiters(t *testing.T) {
	for round := range 50 {
		b := fresh()
		if round%2 == 1 { // a provider's function that takes the token for itself
			b.SetWaiter(func(ctx context.Context, b *Batch, _ time.Duration) {
				select {
				case <-b.Ready():
				case <-ctx.Done():
				}
			})
		}
		var wg sync.WaitGroup
		var here atomic.Int32
		for w := range 8 {
			wg.Go(func() {
				here.Add(1)
				var limit time.Duration
				if w%2 == 1 {
					limit = patience
				}
				if !b.Wait(context.Background(), limit) {
					t.Error("Wait gave up on a complete batch")
				}
			})
		}
		for here.Load() < 8 {
			runtime.Gosched()
		}
		for range 100 { // most have parked by then
			runtime.Gosched()
		}
		b.Complete(nil)
		wg.Wait()
	}
}

func TestBatchWaiter(t *testing.T) {
	for name, f := range map[string]WaitFunc{
		"completes it":     func(_ context.Context, b *Batch, _ time.Duration) { b.Complete(nil) },
		"returns early":    func(_ context.Context, b *Batch, _ time.Duration) { go b.Complete(nil) },
		"takes the token":  func(_ context.Context, b *Batch, _ time.Duration) { go b.Complete(nil); <-b.Ready() },
		"uses up its time": func(_ context.Context, b *Batch, d time.Duration) { <-time.After(d); b.Complete(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			b := fresh()
			b.SetWaiter(f)
			limit := patience
			if name == "uses up its time" {
				limit = time.Millisecond
			}
			require.True(t, b.Wait(context.Background(), limit))
		})
	}
	t.Run("gone after Reset", func(t *testing.T) {
		b := fresh()
		b.SetWaiter(func(context.Context, *Batch, time.Duration) { t.Error("called after Reset") })
		b.Complete(nil)
		b.Reset()
		require.False(t, b.Wait(context.Background(), time.Millisecond))
	})
}

// TestBatchStaleToken is the story that a token alone proves nothing: the caller
// sees the state, resets and posts again, and only then the first completion gets
// round to sending its token.
func TestBatchStaleToken(t *testing.T) {
	b := fresh()
	b.Complete(nil)
	ready := b.ready
	b.Reset()
	signal(ready) // the late token
	require.False(t, b.Wait(context.Background(), time.Millisecond), "a stale token passed for a completion")
	signal(ready)
	go b.Complete(nil)
	require.True(t, b.Wait(context.Background(), patience))
	require.True(t, b.Completed())
}

// TestBatchReuse hands one batch to and fro as fast as it goes. The plain counter is
// the buffer: under -race it shows any hand-over without order.
func TestBatchReuse(t *testing.T) {
	b := fresh()
	posted := make(chan int)
	var buffer int
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range posted {
			buffer = i
			b.Complete(nil)
		}
	})
	for i := range 20_000 {
		posted <- i
		switch i % 3 {
		case 0:
			for !b.Completed() { // sees the state before the token is sent
			}
		case 1:
			require.True(t, b.Wait(context.Background(), 0))
		case 2:
			require.True(t, b.Wait(context.Background(), patience))
		}
		require.Equal(t, i, buffer)
		b.Reset()
	}
	close(posted)
	wg.Wait()
}

func TestBatchWaitAllocates(t *testing.T) {
	b := fresh()
	ctx := context.Background()
	b.Wait(ctx, time.Nanosecond)
	got := testing.AllocsPerRun(100, func() {
		b.Wait(ctx, time.Microsecond)
		b.Complete(nil)
		b.Wait(ctx, 0)
		b.Reset()
	})
	require.Zero(t, got)
}
