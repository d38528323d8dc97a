package client

import (
	"context"
	"fmt"
	"slices"
	"sync"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// writer is this Client's registration in one shard. It makes a write that is sent
// several times apply once: the shard remembers the results of the sequences that
// the writer has not acknowledged.
type writer struct {
	mu struct {
		sync.Mutex
		id   uint64 // 0: none is registered
		next uint64
		// open are the sequences whose result is still wanted, ascending.
		// Invariant: all are below next.
		open []uint64
	}
}

// ticket is the place of one write in its writer's order.
type ticket struct {
	writer, sequence uint64
}

// take gives a ticket; ok is false where no writer is registered.
func (w *writer) take() (t ticket, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.id == 0 {
		return ticket{}, false
	}
	t = ticket{w.mu.id, w.mu.next}
	w.mu.next++
	w.mu.open = append(w.mu.open, t.sequence)
	return t, true
}

// stamp is what the write is sent with. It acknowledges what is settled by now.
func (w *writer) stamp(t ticket) *kvdv1.WriterStamp {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := &kvdv1.WriterStamp{WriterId: t.writer, Sequence: t.sequence, AckedBelow: t.sequence}
	if t.writer == w.mu.id && len(w.mu.open) > 0 {
		s.AckedBelow = w.mu.open[0]
	}
	return s
}

// settle gives the ticket back: nobody will ask for its result any more.
func (w *writer) settle(t ticket) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if t.writer != w.mu.id {
		return
	}
	if i, ok := slices.BinarySearch(w.mu.open, t.sequence); ok {
		w.mu.open = slices.Delete(w.mu.open, i, i+1)
	}
}

// expire forgets the writer, which the shard does not know any more.
func (w *writer) expire(id uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.id == id {
		w.mu.id = 0
	}
}

// register takes a new writer in, unless one was registered meanwhile.
func (w *writer) register(id uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.id == 0 {
		w.mu.id, w.mu.next = id, 1
		w.mu.open = w.mu.open[:0]
	}
}

// takeTicket registers a writer first where there is none.
func (c *Client) takeTicket(ctx context.Context, sh *shard, op string) (ticket, error) {
	for {
		if t, ok := sh.writer.take(); ok {
			return t, nil
		}
		answer := c.asking.DoChan(fmt.Sprintf("writer %d", sh.id), func() (any, error) {
			done := make(chan error, 1)
			if !c.tasks.spawn(func() { done <- c.openWriter(sh, op) }) {
				return nil, ErrClosed
			}
			return nil, <-done
		})
		select {
		case <-ctx.Done():
			return ticket{}, c.gaveUp(ctx, op, fmt.Sprintf("registering a writer in shard %d", sh.id), nil)
		case r := <-answer:
			if r.Err != nil {
				return ticket{}, r.Err
			}
		}
	}
}

// openWriter serves every write that waits for a writer, so it has a deadline of its
// own.
func (c *Client) openWriter(sh *shard, op string) error {
	ctx, cancel := context.WithTimeout(c.life, c.cfg.CallTimeout)
	defer cancel()
	call := leaderCall{c: c, sh: sh, op: op}
	return call.run(ctx, func(ctx context.Context, _ *node, r *remote) error {
		resp, err := r.kv.OpenWriter(ctx, &kvdv1.OpenWriterRequest{Shard: sh.id})
		if err != nil {
			return registrationFailed(rpcFailed(r.addr, err))
		}
		if resp.GetWriterId() == 0 {
			return fmt.Errorf("%w: node at %s registered a writer without an id", ErrIncompatible, r.addr)
		}
		sh.writer.register(resp.GetWriterId())
		return nil
	})
}

// registrationFailed makes an unknown outcome one that is tried again: a writer too
// many only waits to expire.
func registrationFailed(err error) error {
	if reasonOf(err) == kvdv1.ErrorDetail_REASON_OUTCOME_UNKNOWN {
		return fmt.Errorf("%w: %v", ErrUnavailable, err)
	}
	return err
}
