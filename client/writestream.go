package client

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

const (
	// maxStreamWrites may be under way on one stream; others wait for their turn. Half
	// of what a node takes, which counts a write a little longer than we do.
	maxStreamWrites = 512
	// maxDirectBytes of unanswered frames are sent by their callers. gRPC takes 64 KiB
	// of a stream before it makes a sender wait for the network, and a caller must not
	// wait there: its context could not call it back.
	maxDirectBytes = 60 << 10
	// frameOverhead bounds what a frame has beside key and value.
	frameOverhead = 128

	writeReopenMin = 5 * time.Millisecond
	writeReopenMax = 200 * time.Millisecond
	// retryStream is how long a node that knows no stream of writes gets single calls.
	retryStream = 30 * time.Second
)

// writes carries the writes for one address: over one stream that all callers share,
// opened when it is needed, or as single calls to a node that knows no such stream.
// The zero value is ready.
type writes struct {
	mu struct {
		sync.Mutex
		current *writeStream // nil: none is open
		pause   backoff.ExponentialBackOff
		retryAt time.Time // no stream is opened before
		err     error     // why the last one ended
		callsTo time.Time // until then writes go as single calls
	}
}

// errNoStream: the node has no such stream, and nothing was done.
var errNoStream = errors.New("client: the node knows no stream of writes")

// write does one write at r and returns the answer or an error of rpcFailed's kind.
// ctx must have a deadline. The frame is the caller's again when write returns.
func (c *Client) write(ctx context.Context, r *remote, frame *kvdv1.WriteFrame) (*kvdv1.WriteResponse, error) {
	s, err := r.writes.stream(c, r)
	if err != nil {
		return nil, err
	}
	if s != nil {
		resp, err := s.do(ctx, frame)
		if !errors.Is(err, errNoStream) {
			return resp, err
		}
	}
	var resp *kvdv1.WriteResponse
	switch op := frame.GetOp().(type) {
	case *kvdv1.WriteFrame_Put:
		resp, err = r.kv.Put(ctx, op.Put)
	case *kvdv1.WriteFrame_Delete:
		resp, err = r.kv.Delete(ctx, op.Delete)
	}
	return resp, rpcFailed(r.addr, err)
}

// stream is the open stream, or a new one that is being opened; nil, nil: use single
// calls.
func (w *writes) stream(c *Client, r *remote) (*writeStream, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := w.mu.current; s != nil {
		return s, nil
	}
	now := time.Now()
	switch {
	case now.Before(w.mu.callsTo):
		return nil, nil
	case now.Before(w.mu.retryAt):
		return nil, notSent(w.mu.err)
	}
	s := &writeStream{c: c, r: r, opened: make(chan struct{})}
	s.mu.sent = map[uint64]sentWrite{}
	if !c.tasks.spawn(s.run) {
		return nil, ErrClosed
	}
	w.mu.current = s
	return s, nil
}

// gone takes the stream's end in. Others are opened with pauses between them unless
// this one was of use.
func (w *writes) gone(s *writeStream, err error, useful bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.current, w.mu.err = nil, err
	switch {
	case errors.Is(err, errNoStream):
		w.mu.callsTo = time.Now().Add(retryStream)
	case useful:
		w.mu.pause = backoff.ExponentialBackOff{}
		w.mu.retryAt = time.Time{}
	default:
		if w.mu.pause.InitialInterval == 0 {
			w.mu.pause = backoff.ExponentialBackOff{
				InitialInterval: writeReopenMin, MaxInterval: writeReopenMax, Multiplier: 2, RandomizationFactor: 0.5,
			}
		}
		w.mu.retryAt = time.Now().Add(w.mu.pause.NextBackOff())
	}
}

// writeStream is one stream of writes to one node.
type writeStream struct {
	c      *Client
	r      *remote
	opened chan struct{}        // closed when stream is set, or the stream has ended
	stream kvdv1.KV_WriteClient // nil: it could not be opened
	stop   context.CancelFunc

	mu struct {
		sync.Mutex
		lastID uint64
		// sent are the frames without an answer. Those whose caller has left stay, as
		// they are still under way at the node.
		sent  map[uint64]sentWrite
		bytes int // of the frames in sent
		// queue holds frames that wait to be sent, in order.
		queue []*streamCall
		// sending: somebody has the right to send. Invariant: the queue is empty, or
		// waits for room, or somebody has it.
		sending bool
		useful  bool  // something was answered
		err     error // set when the stream has ended: nothing is added any more
		refused bool  // with err: no frame was read by the node
	}
}

type sentWrite struct {
	call *streamCall // nil: its caller has left
	size int
}

// streamCall is one caller's wait for an answer. Pooled: done is empty between uses.
type streamCall struct {
	id      uint64
	size    int
	encoded *grpc.PreparedMsg // of a queued frame
	done    chan streamAnswer // capacity 1
}

type streamAnswer struct {
	result *kvdv1.WriteResult // nil: err tells why
	err    error
}

var streamCalls = sync.Pool{New: func() any { return &streamCall{done: make(chan streamAnswer, 1)} }}

// run opens the stream and receives until it ends.
func (s *writeStream) run() {
	ctx, stop := context.WithCancel(s.c.life)
	defer stop()
	stream, err := s.r.kv.Write(ctx)
	if err != nil {
		s.end(err, true)
		close(s.opened)
		return
	}
	s.stream, s.stop = stream, stop
	close(s.opened)
	for {
		result, err := stream.Recv()
		if err != nil {
			header, _ := stream.Header() // reports no errors of its own
			s.end(err, header == nil)
			return
		}
		s.answer(result)
	}
}

// do sends the frame and waits for its answer.
func (s *writeStream) do(ctx context.Context, frame *kvdv1.WriteFrame) (*kvdv1.WriteResponse, error) {
	select {
	case <-s.opened:
	default:
		select {
		case <-s.opened:
		case <-ctx.Done():
			return nil, notSent(rpcFailed(s.r.addr, status.FromContextError(ctx.Err()).Err()))
		}
	}
	call := streamCalls.Get().(*streamCall)
	call.size = len(frame.GetPut().GetKey()) + len(frame.GetPut().GetValue()) + len(frame.GetDelete().GetKey()) + frameOverhead
	frame.TimeoutMs = timeoutMs(ctx)
	if err := s.send(call, frame); err != nil {
		streamCalls.Put(call)
		return nil, err
	}
	var a streamAnswer
	select {
	case a = <-call.done:
	case <-ctx.Done():
		a = s.leave(call, ctx.Err())
	}
	call.encoded = nil
	streamCalls.Put(call)
	if a.err != nil {
		return nil, a.err
	}
	return s.response(a.result)
}

// timeoutMs is the time that is left, rounded up: the node need not be done sooner
// than the caller asks.
func timeoutMs(ctx context.Context) uint32 {
	deadline, ok := ctx.Deadline()
	if !ok {
		return 0
	}
	const most = time.Hour
	left := min(max(time.Until(deadline), time.Millisecond), most)
	return uint32((left + time.Millisecond - 1) / time.Millisecond)
}

// response is what the single call would have returned.
func (s *writeStream) response(r *kvdv1.WriteResult) (*kvdv1.WriteResponse, error) {
	if resp := r.GetResponse(); resp != nil {
		return resp, nil
	}
	code := codes.Code(r.GetCode())
	if code == codes.OK {
		code = codes.Internal
	}
	st := status.New(code, r.GetMessage())
	if r.GetDetail() != nil {
		if with, err := st.WithDetails(r.GetDetail()); err == nil {
			st = with
		}
	}
	return nil, rpcFailed(s.r.addr, st.Err())
}

// send sends the frame, or queues it where it would have to wait. It fails only
// where the stream has ended; else the call is answered.
func (s *writeStream) send(call *streamCall, frame *kvdv1.WriteFrame) error {
	s.mu.Lock()
	if s.mu.err != nil {
		defer s.mu.Unlock()
		return s.failureLocked(false)
	}
	s.mu.lastID++
	call.id, frame.Id = s.mu.lastID, s.mu.lastID
	if !s.mu.sending && len(s.mu.queue) == 0 && s.roomLocked() && s.mu.bytes+call.size <= maxDirectBytes {
		s.mu.sending = true
		s.sentLocked(call)
		s.mu.Unlock()
		s.sendOne(frame)
		s.mu.Lock()
		s.mu.sending = false
		s.kickLocked()
		s.mu.Unlock()
		return nil
	}
	s.mu.Unlock()
	// Encoded here, so that whoever sends it does not touch what the caller lent.
	call.encoded = new(grpc.PreparedMsg)
	if err := call.encoded.Encode(s.stream, frame); err != nil {
		return notSent(rpcFailed(s.r.addr, err))
	}
	s.mu.Lock()
	if s.mu.err != nil {
		defer s.mu.Unlock()
		return s.failureLocked(false)
	}
	s.mu.queue = append(s.mu.queue, call)
	s.kickLocked()
	s.mu.Unlock()
	return nil
}

func (s *writeStream) roomLocked() bool { return len(s.mu.sent) < maxStreamWrites }

func (s *writeStream) sentLocked(call *streamCall) {
	s.mu.sent[call.id] = sentWrite{call, call.size}
	s.mu.bytes += call.size
}

// sendOne needs the right to send. Its errors are the stream's end, which run sees.
func (s *writeStream) sendOne(m any) {
	if err := s.stream.SendMsg(m); err != nil && !errors.Is(err, io.EOF) {
		s.stop() // the fault is on this side, where run might not see it
	}
}

// kickLocked has the queue sent, if it can be and nobody is at it.
func (s *writeStream) kickLocked() {
	if !s.mu.sending && len(s.mu.queue) > 0 && s.roomLocked() {
		s.mu.sending = s.c.tasks.spawn(s.drain)
	}
}

// drain has the right to send and sends what is queued; it may have to wait for the
// network.
func (s *writeStream) drain() {
	for {
		s.mu.Lock()
		if len(s.mu.queue) == 0 || !s.roomLocked() {
			s.mu.sending = false
			s.mu.Unlock()
			return
		}
		call := s.mu.queue[0]
		s.mu.queue = slices.Delete(s.mu.queue, 0, 1)
		s.sentLocked(call)
		encoded := call.encoded // the call is its caller's again once it is answered
		s.mu.Unlock()
		s.sendOne(encoded)
	}
}

// answer gives a result to its caller, who may have left.
func (s *writeStream) answer(r *kvdv1.WriteResult) {
	s.mu.Lock()
	w := s.mu.sent[r.GetId()]
	delete(s.mu.sent, r.GetId())
	s.mu.bytes -= w.size
	s.mu.useful = true
	s.kickLocked()
	s.mu.Unlock()
	if w.call != nil {
		w.call.done <- streamAnswer{result: r}
	}
}

// leave ends a caller's wait. Where the answer came just now, that counts.
func (s *writeStream) leave(call *streamCall, cause error) streamAnswer {
	err := rpcFailed(s.r.addr, status.FromContextError(cause).Err())
	s.mu.Lock()
	if w, ok := s.mu.sent[call.id]; ok {
		w.call = nil
		s.mu.sent[call.id] = w
		s.mu.Unlock()
		return streamAnswer{err: err}
	}
	if i := slices.Index(s.mu.queue, call); i >= 0 {
		s.mu.queue = slices.Delete(s.mu.queue, i, i+1)
		s.mu.Unlock()
		return streamAnswer{err: notSent(err)}
	}
	s.mu.Unlock()
	return <-call.done // whoever took it out of the books is about to answer
}

// end answers everybody who waits.
func (s *writeStream) end(err error, refused bool) {
	s.mu.Lock()
	s.mu.err, s.mu.refused = err, refused
	sent, queue := s.mu.sent, s.mu.queue
	s.mu.sent, s.mu.queue, s.mu.bytes = nil, nil, 0
	lost, unsent := s.failureLocked(true), s.failureLocked(false)
	useful := s.mu.useful
	s.mu.Unlock()
	s.r.writes.gone(s, unsent, useful)
	for _, w := range sent {
		if w.call != nil {
			w.call.done <- streamAnswer{err: lost}
		}
	}
	for _, call := range queue {
		call.done <- streamAnswer{err: unsent}
	}
}

// failureLocked is the fate of a write when the stream has ended: of one that was
// sent and not answered, or of one that was not sent.
func (s *writeStream) failureLocked(sent bool) error {
	if s.mu.refused && status.Code(s.mu.err) == codes.Unimplemented {
		return errNoStream
	}
	err := rpcFailed(s.r.addr, s.mu.err)
	switch {
	case s.mu.refused:
		// As of a single call: the status is about every frame.
	case reasonOf(err) == kvdv1.ErrorDetail_REASON_NOT_READY:
		// The node's promise: what it did not answer it did not do.
	default:
		// The status is about some other frame, or about the connection.
		class := ErrUnavailable
		if s.c.life.Err() != nil {
			class = context.Canceled
		}
		err = &rpcError{class: class, text: err.Error(), unsure: true}
	}
	if !sent {
		return notSent(err)
	}
	return err
}

// notSent makes the failure of a call that of one which the node has not seen.
func notSent(err error) error {
	var e *rpcError
	if !errors.As(err, &e) || !e.unsure {
		return err
	}
	known := *e
	known.unsure = false
	return &known
}
