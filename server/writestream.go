package server

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

const (
	// maxStreamWrites of one stream may be under way; a write counts until its answer
	// was sent. More are refused.
	maxStreamWrites = 1024
	// maxIdleWriters of one stream wait for the next burst. More end.
	maxIdleWriters = 32
)

// writeStream carries one client's writes. Its goroutines take turns to receive: who
// received a frame gives the turn away and carries the write out itself. So a lone
// write changes hands once, and a goroutine's grown stack is used again.
type writeStream struct {
	n      *Node
	stream kvdv1.KV_WriteServer
	turn   chan struct{} // capacity 1: holds the right to receive while nobody has it
	idle   atomic.Int32  // goroutines that wait for the turn
	sendMu sync.Mutex    // held while a result is sent: gRPC wants one sender at a time

	ending  chan struct{} // closed when nothing more is received
	drained chan struct{} // closed when, after that, every write was answered

	mu struct {
		sync.Mutex
		open  map[uint64]struct{} // writes not yet answered, by id
		ended bool
		err   error // the stream's status, set when it ends
	}
}

// Write implements kvdv1.KVServer. It ends with REASON_NOT_READY when the node stops,
// and then every write that it carried out was answered: what was not answered was
// not done.
func (n *Node) Write(stream kvdv1.KV_WriteServer) error {
	// At once, so that a stream which never got as far can be told from one that broke.
	if err := stream.SendHeader(nil); err != nil {
		return err
	}
	w := &writeStream{
		n: n, stream: stream, turn: make(chan struct{}, 1),
		ending: make(chan struct{}), drained: make(chan struct{}),
	}
	w.mu.open = map[uint64]struct{}{}
	w.passTurn()
	select {
	case <-w.ending:
	case <-stream.Context().Done():
		w.end(context.Cause(stream.Context())) // the client's end, or that of its token
	case <-n.stopping: // returning ends the stream, and with it who receives
		w.end(failShuttingDown(n.id()))
	}
	<-w.drained
	return w.mu.err
}

// work receives and carries out writes until the stream ends or enough others do.
func (w *writeStream) work() {
	for w.takeTurn() {
		frame, err := w.receive()
		if errors.Is(err, io.EOF) { // the client has no more writes, and waits for answers
			w.end(nil)
			return
		}
		if err != nil {
			w.end(err)
			return
		}
		w.passTurn()
		w.carryOut(frame)
	}
}

// takeTurn is false where nothing is left to do for this goroutine.
func (w *writeStream) takeTurn() bool {
	select {
	case <-w.turn:
		return true
	default:
	}
	defer w.idle.Add(-1)
	if w.idle.Add(1) > maxIdleWriters {
		return false
	}
	select {
	case <-w.turn:
		return true
	case <-w.ending:
		return false
	}
}

// passTurn makes sure that somebody receives.
func (w *writeStream) passTurn() {
	w.turn <- struct{}{}
	// Whoever is idle takes the turn sooner or later, and nobody else can have it.
	if w.idle.Load() == 0 {
		w.n.background(func(context.Context) { w.work() })
	}
}

// receive returns the next write that is to be carried out.
func (w *writeStream) receive() (*kvdv1.WriteFrame, error) {
	for {
		frame, err := w.stream.Recv()
		if err != nil {
			return nil, err
		}
		admitted, err := w.admit(frame.GetId())
		if err != nil || admitted {
			return frame, err
		}
		// Sent by who receives, so that a client which takes no answers is not read.
		err = failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_EXHAUSTED, RetryAfterMs: 20},
			"this stream has %d writes under way, the limit: wait for some answers", maxStreamWrites)
		w.n.metrics.rpc.WithLabelValues(kvdv1.KV_Write_FullMethodName, codes.ResourceExhausted.String()).Inc()
		w.send(writeResultOf(frame.GetId(), nil, err))
	}
}

// admit takes the write in, if there is room. An error ends the stream: an answer
// under such an id would mean nothing.
func (w *writeStream) admit(id uint64) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, used := w.mu.open[id]
	switch {
	case w.mu.ended:
		return false, errStreamEnded
	case id == 0:
		return false, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "a write without an id: want one that is not in use on this stream")
	case used:
		return false, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "a write with id %d, which another one has that was not answered yet", id)
	case len(w.mu.open) >= maxStreamWrites:
		return false, nil
	}
	w.mu.open[id] = struct{}{}
	return true, nil
}

// errStreamEnded is seen by nobody: the stream has its status already.
var errStreamEnded = errors.New("server: the stream has ended")

// carryOut does one write as the call of its kind would, and answers it.
func (w *writeStream) carryOut(frame *kvdv1.WriteFrame) {
	ctx := w.stream.Context()
	if ms := frame.GetTimeoutMs(); ms > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(ms)*time.Millisecond)
		defer cancel()
	}
	resp, err := w.n.observe(ctx, frame, writeMethod, w.n.writeFrame)
	answer, _ := resp.(*kvdv1.WriteResponse)
	w.send(writeResultOf(frame.GetId(), answer, err))
	w.answered(frame.GetId())
}

var writeMethod = &grpc.UnaryServerInfo{FullMethod: kvdv1.KV_Write_FullMethodName}

// writeFrame has the form of a call's handler.
func (n *Node) writeFrame(ctx context.Context, req any) (any, error) {
	frame := req.(*kvdv1.WriteFrame)
	leave, err := n.load.enter(callerOf(ctx), costOf(frame))
	if err != nil {
		return nil, err
	}
	defer leave()
	switch op := frame.GetOp().(type) {
	case *kvdv1.WriteFrame_Put:
		if err := n.admitFrame(ctx, op.Put.GetNamespaceId()); err != nil {
			return nil, err
		}
		return n.Put(ctx, op.Put)
	case *kvdv1.WriteFrame_Delete:
		if err := n.admitFrame(ctx, op.Delete.GetNamespaceId()); err != nil {
			return nil, err
		}
		return n.Delete(ctx, op.Delete)
	}
	return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "a write that is neither a put nor a delete that this version knows")
}

// admitFrame decides about a write as about the call of its kind.
func (n *Node) admitFrame(ctx context.Context, namespace uint32) error {
	if err := n.authorizeID(ctx, callerOf(ctx), rightWrite, namespace); err != nil {
		return n.refused(ctx, kvdv1.KV_Write_FullMethodName, err)
	}
	return nil
}

// writeResultOf carries what a call would have returned.
func writeResultOf(id uint64, resp *kvdv1.WriteResponse, err error) *kvdv1.WriteResult {
	if err == nil {
		return &kvdv1.WriteResult{Id: id, Response: resp}
	}
	st := status.Convert(err)
	r := &kvdv1.WriteResult{Id: id, Code: uint32(st.Code()), Message: st.Message()}
	for _, d := range st.Details() {
		if detail, ok := d.(*kvdv1.ErrorDetail); ok {
			r.Detail = detail
		}
	}
	return r
}

// send may find the stream broken, which who receives finds too.
func (w *writeStream) send(r *kvdv1.WriteResult) {
	w.sendMu.Lock()
	defer w.sendMu.Unlock()
	_ = w.stream.Send(r)
}

func (w *writeStream) answered(id uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.mu.open, id)
	w.drainedLocked()
}

// end lets no more writes in. The first caller's err is the stream's status.
func (w *writeStream) end(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.ended {
		return
	}
	w.mu.ended, w.mu.err = true, err
	close(w.ending)
	w.drainedLocked()
}

// drainedLocked is called once for each change, so it sees the last one once.
func (w *writeStream) drainedLocked() {
	if w.mu.ended && len(w.mu.open) == 0 {
		close(w.drained)
	}
}
