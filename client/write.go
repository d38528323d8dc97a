package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/layout"
)

// Put stores a value and returns its version. Errors: ErrConflict (with IfAbsent,
// IfVersion, or in an immutable namespace), ErrInvalid, ErrExhausted, ErrReadOnly,
// ErrUnavailable (not applied), ErrOutcomeUnknown (perhaps applied).
func (c *Client) Put(ctx context.Context, key, value []byte, opts ...WriteOption) (version uint64, err error) {
	o, err := mergeWriteOptions(opts)
	if err == nil {
		err = c.checkWrite(key, value)
	}
	if err != nil {
		return 0, fmt.Errorf("put: %w", err)
	}
	req := &kvdv1.PutRequest{
		NamespaceId: c.cluster().namespace, Key: key, Value: value,
		Precondition: o.precondition(), TtlMs: uint64((o.ttl + time.Millisecond - 1) / time.Millisecond),
	}
	w := c.newWrite("put", key, o)
	w.frame.Op, w.stamp = &kvdv1.WriteFrame_Put{Put: req}, &req.Writer
	return w.run(ctx)
}

// Delete removes a key and returns the version of the removal. Errors as for Put,
// and ErrNotFound where the key was absent.
func (c *Client) Delete(ctx context.Context, key []byte, opts ...WriteOption) (version uint64, err error) {
	o, err := mergeWriteOptions(opts)
	switch {
	case err != nil:
	case o.ifAbsent:
		err = fmt.Errorf("%w: IfAbsent makes no sense for a delete", ErrInvalid)
	case o.ttl != 0:
		err = fmt.Errorf("%w: TTL makes no sense for a delete", ErrInvalid)
	default:
		err = c.checkKey(key)
	}
	if err != nil {
		return 0, fmt.Errorf("delete: %w", err)
	}
	req := &kvdv1.DeleteRequest{NamespaceId: c.cluster().namespace, Key: key, Precondition: o.precondition()}
	w := c.newWrite("delete", key, o)
	w.frame.Op, w.stamp = &kvdv1.WriteFrame_Delete{Delete: req}, &req.Writer
	return w.run(ctx)
}

func mergeWriteOptions(opts []WriteOption) (WriteOption, error) {
	var o WriteOption
	for _, p := range opts {
		o.ifAbsent = o.ifAbsent || p.ifAbsent
		o.ifVersion = max(o.ifVersion, p.ifVersion)
		o.noWriter = o.noWriter || p.noWriter
		if p.ttl != 0 {
			o.ttl = p.ttl
		}
	}
	switch {
	case o.ifAbsent && o.ifVersion != 0:
		return o, fmt.Errorf("%w: IfAbsent and IfVersion contradict each other", ErrInvalid)
	case o.ttl < 0:
		return o, fmt.Errorf("%w: TTL %v: want more than 0", ErrInvalid, o.ttl)
	}
	return o, nil
}

func (o WriteOption) precondition() *kvdv1.Precondition {
	if !o.ifAbsent && o.ifVersion == 0 {
		return nil
	}
	return &kvdv1.Precondition{IfAbsent: o.ifAbsent, IfVersion: o.ifVersion}
}

func (c *Client) checkWrite(key, value []byte) error {
	if err := c.checkKey(key); err != nil {
		return err
	}
	limit := layout.MaxObjectSize - layout.HeaderSize - len(key)
	if k := c.cluster(); k.maxValue > 0 {
		limit = min(limit, k.maxValue)
	}
	if len(value) > limit {
		return fmt.Errorf("%w: value of %d bytes: want at most %d", ErrInvalid, len(value), limit)
	}
	return nil
}

// write is one write until its fate is known.
type write struct {
	c      *Client
	op     string
	sh     *shard
	hash   layout.KeyHash
	opt    WriteOption
	frame  kvdv1.WriteFrame
	stamp  **kvdv1.WriterStamp // within frame
	sent   int
	unsure bool // some try may have been applied
	ticket ticket
}

func (c *Client) newWrite(op string, key []byte, o WriteOption) *write {
	w := &write{c: c, op: op, opt: o}
	w.hash, w.sh = c.cluster().hashKey(key)
	return w
}

// run sends the write until its outcome is known or the deadline passes. Every try
// carries the same stamp, so that it applies once.
func (w *write) run(ctx context.Context) (version uint64, err error) {
	ctx, cancel := w.c.withDeadline(ctx)
	defer cancel()
	for {
		if !w.opt.noWriter {
			if w.ticket, err = w.c.takeTicket(ctx, w.sh, w.op); err != nil {
				return 0, w.fate(err)
			}
		}
		resp, from, err := w.deliver(ctx)
		w.sh.writer.settle(w.ticket)
		switch {
		case err != nil:
			return 0, w.fate(err)
		case resp.GetOutcome() == kvdv1.WriteOutcome_WRITE_OUTCOME_WRITER_EXPIRED:
			w.sh.writer.expire(w.ticket.writer)
			if w.unsure || w.opt.noWriter {
				// An earlier try may have been applied, and what would tell is forgotten.
				w.unsure = true
				return 0, w.fate(fmt.Errorf("%s: the shard has forgotten this writer", w.op))
			}
			continue
		}
		return w.outcome(resp, from)
	}
}

// deliver sends the write with the current ticket until somebody answers.
func (w *write) deliver(ctx context.Context) (resp *kvdv1.WriteResponse, from *node, err error) {
	call := leaderCall{c: w.c, sh: w.sh, op: w.op}
	err = call.run(ctx, func(ctx context.Context, n *node, r *remote) error {
		if !w.opt.noWriter {
			*w.stamp = w.sh.writer.stamp(w.ticket)
		}
		if w.sent++; w.sent > 1 {
			w.c.count.writeRetries.Add(1)
		}
		var err error
		if resp, err = w.c.write(ctx, r, &w.frame); err == nil {
			from = n
			return nil
		}
		if !mayHaveApplied(err) {
			return err
		}
		w.unsure = true
		if w.opt.noWriter {
			return fmt.Errorf("%w (%v)", ErrOutcomeUnknown, err)
		}
		// The stamp makes it safe to send it again.
		return fmt.Errorf("%w: %v", ErrUnavailable, err)
	})
	return resp, from, err
}

// fate is the error of a write that nobody acknowledged.
func (w *write) fate(err error) error {
	if !w.unsure {
		return err
	}
	w.c.count.unknownOutcomes.Add(1)
	if errors.Is(err, ErrOutcomeUnknown) {
		return err
	}
	if errors.Is(err, context.Canceled) {
		return fmt.Errorf("%s: %w: %w", w.op, ErrOutcomeUnknown, context.Canceled)
	}
	return fmt.Errorf("%s: %w (%v)", w.op, ErrOutcomeUnknown, err)
}

// outcome turns the answer into the caller's result and takes in what it reveals.
func (w *write) outcome(resp *kvdv1.WriteResponse, from *node) (uint64, error) {
	raise(&w.sh.index, max(resp.GetApplied(), resp.GetVersion()))
	switch resp.GetOutcome() {
	case kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED:
		w.c.count.writes.Add(1)
		w.c.learnLocation(w.sh, w.hash, from, resp.GetLocation(), resp.GetVersion())
		return resp.GetVersion(), nil
	case kvdv1.WriteOutcome_WRITE_OUTCOME_CONFLICT:
		return 0, fmt.Errorf("%s: %w", w.op, &ConflictError{
			Current: resp.GetVersion(), Immutable: w.c.cluster().immutable && w.opt.precondition() == nil,
		})
	case kvdv1.WriteOutcome_WRITE_OUTCOME_NOT_FOUND:
		return 0, fmt.Errorf("%s: %w", w.op, ErrNotFound)
	default:
		return 0, fmt.Errorf("%s: %w: outcome %v is not known to this client", w.op, ErrIncompatible, resp.GetOutcome())
	}
}
