package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// script has every stream of writes served by serve.
func (f *fixture) script(serve func(n *fakeNode, stream kvdv1.KV_WriteServer) error) {
	f.locked(func() { f.onStream = serve })
}

// first scripts the first stream; those after it are served as usual.
func (f *fixture) first(serve func(n *fakeNode, stream kvdv1.KV_WriteServer) error) {
	served := false
	f.script(func(n *fakeNode, stream kvdv1.KV_WriteServer) error {
		n.c.mu.Lock()
		again := served
		served = true
		n.c.mu.Unlock()
		if again {
			return n.serveWrites(stream)
		}
		return serve(n, stream)
	})
}

// leaderRemote is the gRPC side of the node that leads shard 1.
func (f *fixture) leaderRemote(t testing.TB) *remote {
	r, err := f.c.pool.get(f.nodes[0].addr)
	require.NoError(t, err)
	return r
}

func putFrame(key string, value []byte) *kvdv1.WriteFrame {
	return &kvdv1.WriteFrame{Op: &kvdv1.WriteFrame_Put{Put: &kvdv1.PutRequest{NamespaceId: 1, Key: []byte(key), Value: value}}}
}

// openStream is the stream of writes that is open to r.
func openStream(t testing.TB, r *remote) *writeStream {
	r.writes.mu.Lock()
	defer r.writes.mu.Unlock()
	require.NotNil(t, r.writes.mu.current)
	return r.writes.mu.current
}

// books are the counts of a stream's frames.
func (s *writeStream) books() (sent, queued, bytes int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.mu.sent), len(s.mu.queue), s.mu.bytes
}

// Answers find their callers in whatever order they come, and all share one stream.
func TestAnswersInAnyOrder(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	const n = 5
	f.script(func(node *fakeNode, stream kvdv1.KV_WriteServer) error {
		var frames []*kvdv1.WriteFrame
		for range n {
			frame, err := stream.Recv()
			if err != nil {
				return err
			}
			if ms := frame.GetTimeoutMs(); ms == 0 || ms > 2000 {
				t.Errorf("the node has %d ms: want what one try has", ms)
			}
			frames = append(frames, frame)
		}
		for i := range frames {
			if err := stream.Send(node.frame(frames[n-1-i])); err != nil {
				return err
			}
		}
		_, err := stream.Recv()
		return err
	})
	ctx := ctxFor(t, time.Minute)
	var wg sync.WaitGroup
	versions := make([]uint64, n)
	for i := range n {
		wg.Go(func() {
			v, err := f.c.Put(ctx, fmt.Appendf(nil, "key %d", i), fmt.Appendf(nil, "value %d", i))
			if err != nil {
				t.Error(err)
			}
			versions[i] = v
		})
	}
	wg.Wait()
	f.locked(func() {
		require.Equal(t, 1, f.streams)
		require.Zero(t, f.calls)
		for i, v := range versions {
			require.Equal(t, v, f.truth[fmt.Sprint("key ", i)].version)
		}
	})
}

// TestBrokenStream: how a stream ends decides whether the writes on it may have been
// applied.
func TestBrokenStream(t *testing.T) {
	notReady := failWith(codes.Unavailable, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY})
	for _, c := range []struct {
		name   string
		refuse bool // ends before it is accepted
		apply  bool // the frame is applied, and not answered
		end    error
		unsure bool
		class  error
	}{
		{name: "lost with the answer", apply: true, end: status.Error(codes.Unavailable, "transport is closing"), unsure: true, class: ErrUnavailable},
		{name: "lost before", end: status.Error(codes.Unavailable, "transport is closing"), unsure: true, class: ErrUnavailable},
		{name: "ended without a word", end: nil, unsure: true, class: ErrUnavailable},
		{name: "node stops", end: notReady, class: ErrUnavailable},
		{name: "refused: denied", refuse: true, end: status.Error(codes.PermissionDenied, "no"), class: ErrDenied},
		{name: "refused: not ready", refuse: true, end: notReady, class: ErrUnavailable},
		{name: "refused by nobody we know", refuse: true, end: status.Error(codes.Unavailable, "proxy"), unsure: true, class: ErrUnavailable},
		// Said of some frame, or for some reason, after others were read.
		{name: "another frame was malformed", end: status.Error(codes.InvalidArgument, "id 0"), unsure: true, class: ErrUnavailable},
		{name: "another frame was too large", end: status.Error(codes.ResourceExhausted, "large"), unsure: true, class: ErrUnavailable},
		{name: "unimplemented too late", apply: true, end: status.Error(codes.Unimplemented, "?"), unsure: true, class: ErrUnavailable},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
			serve := func(n *fakeNode, stream kvdv1.KV_WriteServer) error {
				if c.refuse {
					// With the frame on its way: one that finds the stream ended was not sent.
					_, _ = stream.Recv()
					return c.end
				}
				if err := stream.SendHeader(nil); err != nil {
					return err
				}
				frame, err := stream.Recv()
				if err != nil {
					return err
				}
				if c.apply {
					n.frame(frame)
				}
				return c.end
			}
			f.script(serve)
			r := f.leaderRemote(t)
			_, err := f.c.write(ctxFor(t, time.Minute), r, putFrame("a", nil))
			require.ErrorIs(t, err, c.class)
			require.Equal(t, c.unsure, mayHaveApplied(err), "%v", err)
			require.NotContains(t, err.Error(), "\n")

			// Through the whole client: stamped, it is done once and succeeds.
			if c.class == ErrDenied {
				return
			}
			f.first(serve)
			before := uint64(0)
			f.locked(func() { before = f.index[1] })
			v, err := f.c.Put(ctxFor(t, time.Minute), []byte("b"), []byte("1"), IfAbsent())
			require.NoError(t, err)
			f.locked(func() { require.Equal(t, before+1, f.index[1], "applied once") })
			require.Equal(t, before+1, v)

			// Without a stamp it is not sent again where it may have been applied.
			eventually(t, "the pause to be over", func() bool {
				s, err := r.writes.stream(f.c, r)
				return s != nil && err == nil
			})
			openStream(t, r).stop()
			eventually(t, "the stream to end", func() bool { return openStreamOrNil(r) == nil })
			f.first(serve)
			_, err = f.c.Put(ctxFor(t, time.Minute), []byte("c"), []byte("1"), NoWriter())
			if c.unsure {
				require.ErrorIs(t, err, ErrOutcomeUnknown)
			} else {
				require.NoError(t, err)
			}
		})
	}
}

func openStreamOrNil(r *remote) *writeStream {
	r.writes.mu.Lock()
	defer r.writes.mu.Unlock()
	return r.writes.mu.current
}

// A node that can not be reached was sent nothing.
func TestNobodyListens(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	r, err := f.c.pool.get("127.0.0.1:1")
	require.NoError(t, err)
	for range 3 { // the later ones within the pause
		_, err = f.c.write(ctxFor(t, time.Minute), r, putFrame("a", nil))
		require.ErrorIs(t, err, ErrUnavailable)
		require.False(t, mayHaveApplied(err), "%v", err)
	}
	require.Nil(t, openStreamOrNil(r))
}

// A node that does not answer: deadlines hold, for what was sent and for what found
// no room, and what was not sent was not done.
func TestNodeNeverAnswers(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	read := make(chan uint64, 2*maxStreamWrites)
	release := make(chan struct{})
	f.script(func(n *fakeNode, stream kvdv1.KV_WriteServer) error {
		var frames []*kvdv1.WriteFrame
		for range maxStreamWrites {
			frame, err := stream.Recv()
			if err != nil {
				return err
			}
			frames = append(frames, frame)
			read <- frame.GetId()
		}
		<-release
		for _, frame := range frames {
			if err := stream.Send(n.frame(frame)); err != nil {
				return err
			}
		}
		return n.serveFrames(stream)
	})
	r := f.leaderRemote(t)
	short, cancel := context.WithCancelCause(context.Background())
	var wg sync.WaitGroup
	for range maxStreamWrites {
		wg.Go(func() {
			_, err := f.c.write(short, r, putFrame("a", make([]byte, 512)))
			if !errors.Is(err, context.Canceled) || !mayHaveApplied(err) {
				t.Errorf("a write that was sent: %v", err)
			}
		})
	}
	for range maxStreamWrites {
		<-read
	}
	s := openStream(t, r)
	// There is no room for another one: it waits, and leaves without having been sent.
	_, err := f.c.write(ctxFor(t, 20*time.Millisecond), r, putFrame("late", nil))
	require.ErrorIs(t, err, ErrUnavailable)
	require.False(t, mayHaveApplied(err))
	cancel(nil)
	wg.Wait()
	sent, queued, _ := s.books()
	require.Equal(t, maxStreamWrites, sent, "they are still under way at the node")
	require.Zero(t, queued)

	// Nobody wants the late answers; they make room.
	done := make(chan error, 1)
	go func() {
		_, err := f.c.write(ctxFor(t, time.Minute), r, putFrame("next", nil))
		done <- err
	}()
	close(release)
	require.NoError(t, <-done)
	eventually(t, "all answers", func() bool {
		sent, queued, bytes := s.books()
		return sent == 0 && queued == 0 && bytes == 0
	})
	f.locked(func() { require.Zero(t, f.truth["late"].version) })

	// With the deadline that the caller set.
	f.script(func(_ *fakeNode, stream kvdv1.KV_WriteServer) error {
		<-stream.Context().Done()
		return stream.Context().Err()
	})
	s.stop()
	_, err = f.c.Put(ctxFor(t, 50*time.Millisecond), []byte("a"), nil)
	require.ErrorIs(t, err, ErrOutcomeUnknown)
}

// A caller never waits for the network beyond its own deadline.
func TestNodeDoesNotRead(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	f.script(func(_ *fakeNode, stream kvdv1.KV_WriteServer) error {
		<-stream.Context().Done()
		return stream.Context().Err()
	})
	r := f.leaderRemote(t)
	value := make([]byte, 200<<10)
	unsure := 0
	for range 4 {
		_, err := f.c.write(ctxFor(t, 30*time.Millisecond), r, putFrame("a", value))
		require.ErrorIs(t, err, ErrUnavailable)
		if mayHaveApplied(err) {
			unsure++
		}
	}
	require.Positive(t, unsure)
	require.Less(t, unsure, 4, "some did not get as far as gRPC")
	s := openStream(t, r)
	_, queued, _ := s.books()
	require.Zero(t, queued, "who leaves takes the frame out of the queue")
}

// The caller gets its key and value back when Put returns, whoever sends them.
func TestFramesAreNotBorrowed(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			value := make([]byte, 16<<10) // all together they do not go out directly
			for i := range 20 {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i%4+1)*time.Millisecond)
				_, _ = f.c.Put(ctx, fmt.Appendf(nil, "key %d", w), value)
				cancel()
				for j := range value {
					value[j]++
				}
			}
		})
	}
	wg.Wait()
	f.locked(func() {
		for key, v := range f.truth {
			for _, b := range v.value {
				require.Equal(t, v.value[0], b, "%s is torn", key)
			}
		}
	})
}

func TestCloseWhileWaiting(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	read := make(chan struct{})
	f.script(func(_ *fakeNode, stream kvdv1.KV_WriteServer) error {
		if _, err := stream.Recv(); err != nil {
			return err
		}
		close(read)
		<-stream.Context().Done()
		return stream.Context().Err()
	})
	done := make(chan error, 1)
	go func() {
		_, err := f.c.Put(ctxFor(t, time.Minute), []byte("a"), nil)
		done <- err
	}()
	<-read
	require.NoError(t, f.c.Close())
	err := <-done
	require.ErrorIs(t, err, ErrOutcomeUnknown, "it was sent")
	_, err = f.c.Put(ctxFor(t, time.Second), []byte("a"), nil)
	require.ErrorIs(t, err, ErrClosed)
}

// A node of a version without the stream is written to by calls, and asked for the
// stream only now and then.
func TestNodeWithoutStream(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	f.script(func(*fakeNode, kvdv1.KV_WriteServer) error {
		return status.Error(codes.Unimplemented, "method Write not implemented")
	})
	ctx := ctxFor(t, time.Minute)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 5 {
				if _, err := f.c.Put(ctx, fmt.Appendf(nil, "%d/%d", w, i), []byte("v"), IfAbsent()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	_, err := f.c.Delete(ctx, []byte("0/0"))
	require.NoError(t, err)
	f.locked(func() {
		require.Equal(t, 1, f.streams)
		require.Equal(t, 20, f.calls)
		require.Len(t, f.truth, 19)
	})
	// Once it is of a new version.
	f.script(nil)
	r := f.leaderRemote(t)
	r.writes.mu.Lock()
	r.writes.mu.callsTo = time.Now()
	r.writes.mu.Unlock()
	_, err = f.c.Put(ctx, []byte("a"), nil)
	require.NoError(t, err)
	f.locked(func() {
		require.Equal(t, 2, f.streams)
		require.Equal(t, 20, f.calls)
	})
}

// Streams that end at once are opened with pauses between them, that grow.
func TestReopeningPauses(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	f.script(func(*fakeNode, kvdv1.KV_WriteServer) error { return status.Error(codes.Unavailable, "not today") })
	r := f.leaderRemote(t)
	began := time.Now()
	for range 100 {
		_, err := f.c.write(ctxFor(t, time.Minute), r, putFrame("a", nil))
		require.ErrorIs(t, err, ErrUnavailable)
	}
	var streams int
	f.locked(func() { streams = f.streams })
	require.Positive(t, streams)
	least := time.Duration(0)
	for pause := writeReopenMin; streams > 1; streams-- {
		least += pause / 2 // at most half of it is taken off
		pause = min(2*pause, writeReopenMax)
	}
	require.GreaterOrEqual(t, time.Since(began), least)
	f.script(nil)
	_, err := f.c.Put(ctxFor(t, time.Minute), []byte("a"), nil)
	require.NoError(t, err)
}

// TestWritersOnBreakingStreams: each write depends on the one before it, so that one
// that was lost, or applied twice, is a conflict.
func TestWritersOnBreakingStreams(t *testing.T) {
	f := start(t, fakeOptions{shards: 2}, netOptions{sync: true}, nil)
	f.script(func(n *fakeNode, stream kvdv1.KV_WriteServer) error {
		if err := stream.SendHeader(nil); err != nil {
			return err
		}
		var writes sync.WaitGroup
		defer writes.Wait()
		var sending sync.Mutex
		lost := false
		for range 100 {
			frame, err := stream.Recv()
			if err != nil {
				return err
			}
			writes.Go(func() {
				r := n.frame(frame)
				sending.Lock()
				defer sending.Unlock()
				if !lost {
					_ = stream.Send(r) // the client may be gone
				}
			})
		}
		sending.Lock()
		lost = true // what is under way is applied and not answered
		sending.Unlock()
		return status.Error(codes.Unavailable, "transport is closing")
	})
	ctx := ctxFor(t, 60*time.Second)
	var wg sync.WaitGroup
	for w := range 64 {
		wg.Go(func() {
			key := fmt.Appendf(nil, "key %d", w)
			value := []byte(strings.Repeat("v", 1+w*8))
			if w == 0 {
				value = make([]byte, 100<<10)
			}
			v, err := f.c.Put(ctx, key, value, IfAbsent())
			for i := 0; i < 20 && err == nil; i++ {
				v, err = f.c.Put(ctx, key, value, IfVersion(v))
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	f.locked(func() {
		require.Greater(t, f.streams, 3)
		require.EqualValues(t, 2*10+64*21, f.index[1]+f.index[2], "each applied once")
	})
}

func TestTimeoutOfFrames(t *testing.T) {
	require.Zero(t, timeoutMs(context.Background()))
	for _, c := range []struct{ left, least, most time.Duration }{
		{-time.Second, time.Millisecond, time.Millisecond},
		{10 * time.Microsecond, time.Millisecond, time.Millisecond},
		{time.Minute, time.Minute - time.Second, time.Minute},
		{100 * time.Hour, time.Hour, time.Hour},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), c.left)
		got := time.Duration(timeoutMs(ctx)) * time.Millisecond
		cancel()
		require.GreaterOrEqual(t, got, c.least)
		require.LessOrEqual(t, got, c.most)
	}
}

// BenchmarkPut against a node that does nothing: what a write costs beside it.
func BenchmarkPut(b *testing.B) {
	for _, over := range []string{"stream", "calls"} {
		b.Run(over, func(b *testing.B) {
			f := start(b, fakeOptions{}, netOptions{sync: true}, nil)
			if over == "calls" {
				f.script(func(*fakeNode, kvdv1.KV_WriteServer) error { return status.Error(codes.Unimplemented, "") })
			}
			done := &kvdv1.WriteResponse{Outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, Version: 1, Applied: 1}
			f.onPutDo(func(*fakeNode, *kvdv1.PutRequest) (*kvdv1.WriteResponse, error) { return done, nil })
			ctx := context.Background()
			key, value := []byte("a"), make([]byte, 1024)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := f.c.Put(ctx, key, value); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
