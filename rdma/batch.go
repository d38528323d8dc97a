package rdma

import (
	"context"
	"sync/atomic"
	"time"
)

// Batch is a chain of READs on one connection, and its completion. A Batch is
// reused by Reset; its zero value needs Reset before the first use. It must not be
// copied after that.
//
// Invariant: posted at most once between two Resets, completed exactly once for
// each post.
//
// Who may touch what, and when: between Post and completion the batch is the
// provider's. The caller may call Wait, Ready and Completed once Post has returned,
// from any number of goroutines. Reset, like any other use of the fields, waits
// until the batch is complete and no other goroutine is in Wait.
type Batch struct {
	// Reads is the chain. The provider's from Post until completion.
	Reads []Read

	// Work is for the provider that the batch is posted to: state that it keeps
	// for a posted batch. A provider may leave a value in it to reuse later, and must
	// check its type before it does.
	Work any

	// err is written before state says complete and read after, which orders the two.
	err   error
	state atomic.Uint32 // open or complete
	// ready has room for one token. One is there after completion, but one may also
	// be left from the post before: Complete sends it after it stored the state, and
	// a caller that saw the state may have reset and posted again by then. So a
	// token only says: look at the state.
	ready chan struct{}
	wait  WaitFunc                   // of this post; may be nil
	timer atomic.Pointer[time.Timer] // kept for the next Wait with a limit
}

const (
	open     = 0 // not complete: idle or posted
	complete = 1
	inline   = 2 // complete, before Post returned: there is no token
)

// inlineReady stands in for ready of a batch that was completed inline.
var inlineReady = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// WaitFunc drives a provider with the goroutine of a caller that waits for b. It
// returns when b is complete, ctx is done, or limit (when positive) has passed; it
// may return early for no reason. It may take the token of b.Ready, on which it
// must look at b.Completed as anybody else. It must hold for several callers at
// once.
type WaitFunc = func(ctx context.Context, b *Batch, limit time.Duration)

// Reset makes the batch ready to be posted. It must not be outstanding.
func (b *Batch) Reset() {
	if b.ready == nil {
		b.ready = make(chan struct{}, 1)
	}
	if b.state.Load() != inline {
		select {
		case <-b.ready:
		default:
		}
	}
	b.err = nil
	b.wait = nil
	b.state.Store(open)
}

// SetWaiter is called by a provider that wants to borrow the goroutine of a waiting
// caller: during Post, and before anything can complete the batch, for with the
// completion the batch is no longer the provider's to write to. A func value that
// lives as long as the connection costs no allocation here.
func (b *Batch) SetWaiter(f WaitFunc) { b.wait = f }

// Complete is called by the provider, once for each posted batch, after its last
// access to the batch and its buffers.
func (b *Batch) Complete(err error) {
	if b.ready == nil {
		panic("rdma: batch posted without Reset")
	}
	if b.state.Load() != open { // before err is overwritten under a reader's eyes
		panic("rdma: batch completed twice, or posted without Reset")
	}
	b.err = err
	ready := b.ready
	if b.state.Swap(complete) != open {
		panic("rdma: batch completed twice, or posted without Reset")
	}
	signal(ready)
}

// CompleteInline is Complete for a provider whose Post returns with the batch
// complete (Conn.Synchronous): it must be called during Post, when nobody can be
// waiting yet, and so spares the token, which costs more than a short READ.
func (b *Batch) CompleteInline(err error) {
	if b.state.Load() != open || b.ready == nil {
		panic("rdma: batch completed twice, or posted without Reset")
	}
	b.err = err
	if b.state.Swap(inline) != open {
		panic("rdma: batch completed twice, or posted without Reset")
	}
}

func signal(ready chan struct{}) {
	select {
	case ready <- struct{}{}:
	default:
	}
}

// Completed tells whether the batch is complete, and so the caller's again.
func (b *Batch) Completed() bool { return b.state.Load() != open }

// Err is the outcome; valid once the batch is complete.
func (b *Batch) Err() error { return b.err }

// Ready yields a token when the batch is complete, for use in a select. A token
// may come too early, left over from the post before: whoever takes one looks at
// Completed, and selects again when it is false. Taking it is the taker's alone;
// other waiters use Wait, which passes the token on.
func (b *Batch) Ready() <-chan struct{} {
	if b.state.Load() == inline {
		return inlineReady
	}
	return b.ready
}

// Wait returns true when the batch is complete, false when ctx ended or limit
// (when positive) passed before: then the batch is still outstanding and the
// provider still owns its buffers.
func (b *Batch) Wait(ctx context.Context, limit time.Duration) bool {
	if b.Completed() {
		return true
	}
	var deadline time.Time
	if limit > 0 {
		deadline = time.Now().Add(limit)
	}
	if b.wait != nil {
		b.wait(ctx, b, limit)
		if b.Completed() {
			signal(b.ready) // the function may have taken another waiter's token
			return true
		}
	}
	if limit <= 0 {
		return b.park(ctx, nil)
	}
	left := time.Until(deadline)
	if left <= 0 {
		return b.Completed()
	}
	t := b.timer.Swap(nil)
	if t == nil {
		t = time.NewTimer(left)
	} else {
		t.Reset(left)
	}
	done := b.park(ctx, t.C)
	t.Stop()
	b.timer.Store(t)
	return done
}

// park blocks until the batch is complete, ctx is done or late fires.
func (b *Batch) park(ctx context.Context, late <-chan time.Time) bool {
	for {
		select {
		case <-b.ready:
			if b.Completed() {
				signal(b.ready) // for whoever else waits
				return true
			}
		case <-ctx.Done():
			return b.Completed()
		case <-late:
			return b.Completed()
		}
	}
}
