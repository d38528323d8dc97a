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

func ctxFor(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func (f *fixture) onPutDo(do func(n *fakeNode, req *kvdv1.PutRequest) (*kvdv1.WriteResponse, error)) {
	f.locked(func() { f.onPut = do })
}

func TestPutDeleteConditions(t *testing.T) {
	f := start(t, fakeOptions{shards: 4}, netOptions{sync: true}, nil)
	ctx := ctxFor(t, time.Minute)
	k := []byte("a")
	v1, err := f.c.Put(ctx, k, []byte("1"))
	require.NoError(t, err)
	require.NotZero(t, v1)

	// The answer said where the object lies: the first get is warm.
	s := f.during(func() { f.want(t, "a", "1") })
	require.EqualValues(t, 1, s.CacheHits)
	require.EqualValues(t, 0, s.BucketReads)

	_, err = f.c.Put(ctx, k, []byte("x"), IfAbsent())
	var conflict *ConflictError
	require.ErrorAs(t, err, &conflict)
	require.ErrorIs(t, err, ErrConflict)
	require.Equal(t, v1, conflict.Current)
	_, err = f.c.Put(ctx, k, []byte("x"), IfVersion(v1+100))
	require.ErrorIs(t, err, ErrConflict)
	v2, err := f.c.Put(ctx, k, []byte("2"), IfVersion(v1))
	require.NoError(t, err)
	require.Greater(t, v2, v1)
	f.want(t, "a", "2")

	_, err = f.c.Delete(ctx, k)
	require.NoError(t, err)
	f.wantAbsent(t, "a")
	_, err = f.c.Delete(ctx, k)
	require.ErrorIs(t, err, ErrNotFound)
	_, err = f.c.Put(ctx, k, nil)
	require.NoError(t, err)
	got, err := f.c.Get(ctx, k)
	require.NoError(t, err)
	require.NotNil(t, got.Data, "an empty value is a value")
	require.Empty(t, got.Data)
}

func TestInvalidRequests(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	ctx := ctxFor(t, time.Minute)
	for name, call := range map[string]func() error{
		"empty key":      func() error { _, err := f.c.Get(ctx, nil); return err },
		"long key":       func() error { _, err := f.c.Get(ctx, make([]byte, 4097)); return err },
		"put empty key":  func() error { _, err := f.c.Put(ctx, nil, nil); return err },
		"large value":    func() error { _, err := f.c.Put(ctx, []byte("k"), make([]byte, 1<<20+1)); return err },
		"negative TTL":   func() error { _, err := f.c.Put(ctx, []byte("k"), nil, TTL(-1)); return err },
		"contradiction":  func() error { _, err := f.c.Put(ctx, []byte("k"), nil, IfAbsent(), IfVersion(3)); return err },
		"delete absent":  func() error { _, err := f.c.Delete(ctx, []byte("k"), IfAbsent()); return err },
		"many empty key": func() error { return f.c.GetMany(ctx, [][]byte{nil})[0].Err },
	} {
		err := call()
		require.ErrorIs(t, err, ErrInvalid, name)
		require.NotContains(t, err.Error(), "\n")
	}
}

// TestLostAnswer: the write was applied and the answer lost. It is sent again with
// the same stamp and applies once.
func TestLostAnswer(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	lost := 0
	var stamps []string
	f.locked(func() {
		f.afterPut = func(_ *fakeNode, req *kvdv1.PutRequest) error {
			stamps = append(stamps, req.GetWriter().String())
			if lost++; lost == 1 {
				return status.Error(codes.Unavailable, "transport is closing")
			}
			return nil
		}
	})
	v, err := f.c.Put(ctxFor(t, time.Minute), []byte("a"), []byte("1"), IfAbsent())
	require.NoError(t, err, "its own first try must not look like a conflict")
	require.Len(t, stamps, 2)
	require.Equal(t, stamps[0], stamps[1])
	got, err := f.c.Get(context.Background(), []byte("a"))
	require.NoError(t, err)
	require.Equal(t, v, got.Version, "applied once")
	require.EqualValues(t, 1, f.c.Stats().WriteRetries)
}

func TestFateOfWrites(t *testing.T) {
	outcomeUnknown := failWith(codes.Unknown, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_OUTCOME_UNKNOWN})
	notReady := failWith(codes.Unavailable, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY})
	expired := &kvdv1.WriteResponse{Outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_WRITER_EXPIRED}
	for _, c := range []struct {
		name   string
		answer func(try int) (*kvdv1.WriteResponse, error) // nil, nil: apply
		opts   []WriteOption
		err    error // nil: success
		tries  int   // 0: any
		not    error
		// mayBeOut: the deadline may pass while the last try is under way, whose fate is
		// unknown then, whatever its answer would have been.
		mayBeOut bool
	}{
		{name: "unknown for ever", answer: func(int) (*kvdv1.WriteResponse, error) { return nil, outcomeUnknown }, err: ErrOutcomeUnknown, not: ErrUnavailable},
		{name: "unknown, then applied", answer: func(try int) (*kvdv1.WriteResponse, error) {
			if try == 1 {
				return nil, outcomeUnknown
			}
			return nil, nil
		}},
		{name: "not ready for ever", answer: func(int) (*kvdv1.WriteResponse, error) { return nil, notReady }, err: ErrUnavailable, not: ErrOutcomeUnknown, mayBeOut: true},
		{name: "lost for ever", answer: func(int) (*kvdv1.WriteResponse, error) {
			return nil, status.Error(codes.Unavailable, "transport is closing")
		}, err: ErrOutcomeUnknown, not: ErrUnavailable},
		{name: "lost, without a writer", answer: func(int) (*kvdv1.WriteResponse, error) {
			return nil, status.Error(codes.Unavailable, "transport is closing")
		}, opts: []WriteOption{NoWriter()}, err: ErrOutcomeUnknown, tries: 1},
		{name: "without a writer", answer: func(int) (*kvdv1.WriteResponse, error) { return nil, nil }, opts: []WriteOption{NoWriter()}},
		{name: "writer expired at first", answer: func(try int) (*kvdv1.WriteResponse, error) {
			if try == 1 {
				return expired, nil
			}
			return nil, nil
		}},
		{name: "writer expired on a retry", answer: func(try int) (*kvdv1.WriteResponse, error) {
			if try == 1 {
				return nil, outcomeUnknown
			}
			return expired, nil
		}, err: ErrOutcomeUnknown, tries: 2},
		{name: "exhausted", answer: func(int) (*kvdv1.WriteResponse, error) {
			return nil, failWith(codes.ResourceExhausted, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_EXHAUSTED})
		}, err: ErrExhausted, not: ErrOutcomeUnknown},
		{name: "exhausted after a lost try", answer: func(try int) (*kvdv1.WriteResponse, error) {
			if try == 1 {
				return nil, outcomeUnknown
			}
			return nil, failWith(codes.ResourceExhausted, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_EXHAUSTED})
		}, err: ErrOutcomeUnknown},
		{name: "read only", answer: func(int) (*kvdv1.WriteResponse, error) {
			return nil, failWith(codes.Unavailable, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_READ_ONLY})
		}, err: ErrReadOnly},
		{name: "denied", answer: func(int) (*kvdv1.WriteResponse, error) {
			return nil, failWith(codes.PermissionDenied, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_DENIED})
		}, err: ErrDenied},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
			try := 0
			f.onPutDo(func(*fakeNode, *kvdv1.PutRequest) (*kvdv1.WriteResponse, error) {
				try++
				return c.answer(try)
			})
			put := func() error {
				_, err := f.c.Put(ctxFor(t, 300*time.Millisecond), []byte("a"), []byte("1"), c.opts...)
				return err
			}
			err := put()
			for again := 0; c.mayBeOut && errors.Is(err, ErrOutcomeUnknown) && again < 10; again++ {
				err = put() // on a busy machine a try may be cut off, but not each time
			}
			if c.tries > 0 {
				f.locked(func() { require.Equal(t, c.tries, try) })
			}
			if c.err == nil {
				require.NoError(t, err)
				f.want(t, "a", "1")
				return
			}
			require.ErrorIs(t, err, c.err)
			if c.not != nil {
				require.NotErrorIs(t, err, c.not)
			}
			require.NotContains(t, err.Error(), "\n")
		})
	}
}

// TestFollowsLeader: a write goes to whoever leads, also when the one who was asked
// names somebody else or is dead.
func TestFollowsLeader(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	ctx := ctxFor(t, time.Minute)
	_, err := f.c.Put(ctx, []byte("a"), []byte("1"))
	require.NoError(t, err)
	f.locked(func() { f.elect(1, 2, 6) })
	_, err = f.c.Put(ctx, []byte("a"), []byte("2"))
	require.NoError(t, err)
	f.want(t, "a", "2")
	f.nodes[1].kill()
	f.locked(func() { f.elect(1, 3, 7) })
	_, err = f.c.Put(ctx, []byte("a"), []byte("3"))
	require.NoError(t, err)
	f.want(t, "a", "3")
}

// TestCancelledWrite: the caller left while the write was on its way.
func TestCancelledWrite(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	arrived := make(chan struct{})
	release := make(chan struct{})
	f.onPutDo(func(n *fakeNode, _ *kvdv1.PutRequest) (*kvdv1.WriteResponse, error) {
		n.c.mu.Unlock()
		close(arrived)
		<-release
		n.c.mu.Lock()
		return nil, nil
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		_, err := f.c.Put(ctx, []byte("a"), []byte("1"))
		done <- err
	}()
	<-arrived
	cancel()
	err := <-done
	close(release)
	require.ErrorIs(t, err, ErrOutcomeUnknown)
	require.ErrorIs(t, err, context.Canceled)
}

// TestAcknowledgements: what is acknowledged as settled is never ahead of a write
// that may still be sent again.
func TestAcknowledgements(t *testing.T) {
	var w writer
	w.register(7)
	a, _ := w.take()
	b, _ := w.take()
	c, _ := w.take()
	require.EqualValues(t, 1, w.stamp(c).GetAckedBelow())
	w.settle(b)
	require.EqualValues(t, 1, w.stamp(c).GetAckedBelow())
	w.settle(a)
	require.EqualValues(t, 3, w.stamp(c).GetAckedBelow())
	w.expire(7)
	_, ok := w.take()
	require.False(t, ok)
	w.register(8)
	w.settle(c) // of the writer before
	d, _ := w.take()
	require.Equal(t, ticket{8, 1}, d)
}

func TestConcurrentWritersAndReaders(t *testing.T) {
	f := start(t, fakeOptions{shards: 4}, netOptions{}, nil)
	ctx := ctxFor(t, time.Minute)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			k := []byte(fmt.Sprint("key ", w))
			for i := range 50 {
				want := fmt.Sprint(i)
				v, err := f.c.Put(ctx, k, []byte(want))
				if err != nil {
					t.Error(err)
					return
				}
				for _, l := range []Level{Linearizable, Session} {
					got, err := f.c.Get(ctx, k, WithLevel(l))
					if err != nil || string(got.Data) != want || got.Version != v {
						t.Errorf("%v get of what was just written: %q version %d, %v: want %q version %d", l, got.Data, got.Version, err, want, v)
					}
				}
			}
		})
	}
	wg.Wait()
}

func TestList(t *testing.T) {
	f := start(t, fakeOptions{shards: 8}, netOptions{sync: true}, nil)
	ctx := ctxFor(t, time.Minute)
	for i := range 100 {
		f.put(fmt.Sprintf("a/%03d", i), fmt.Sprint(i))
	}
	f.put("b", "x")
	list := func(prefix string, opts ...ListOption) (keys []string) {
		for it, err := range f.c.List(ctx, []byte(prefix), opts...) {
			require.NoError(t, err)
			keys = append(keys, string(it.Key))
		}
		return keys
	}
	all := list("a/", PageSize(3))
	require.Len(t, all, 100)
	for i, k := range all {
		require.Equal(t, fmt.Sprintf("a/%03d", i), k)
	}
	require.Len(t, list(""), 101)
	// Pages of nothing but expired keys do not end the list.
	f.locked(func() {
		for i := range 20 {
			f.truth[fmt.Sprintf("a/050-%02d", i)] = fakeValue{version: 1, expiry: 1}
		}
	})
	require.Equal(t, all, list("a/", PageSize(3)))
	require.Equal(t, all[41:46], list("a/", StartAfter([]byte("a/040")), Limit(5)))
	require.Empty(t, list("zzz"))
	for it, err := range f.c.List(ctx, []byte("a/"), KeysOnly()) {
		require.NoError(t, err)
		require.Nil(t, it.Value)
		require.NotZero(t, it.Size)
		break // leaving early is fine
	}
	for id := range f.nodes {
		f.locked(func() { f.nodes[id].cut = true })
	}
	var last error
	for _, err := range f.c.List(ctxFor(t, 200*time.Millisecond), []byte("a/")) {
		last = err
	}
	require.True(t, isTimeout(last), "%v", last)

	// Nobody leads. Any replica can answer with what it has.
	require.Equal(t, all, list("a/", PageSize(3), ListLevel(Stale)))
	require.NoError(t, f.c.Close())
	for _, err := range f.c.List(ctx, nil, ListLevel(Stale)) {
		require.ErrorIs(t, err, ErrClosed)
	}
}

// TestImmutableConflict: the error says that it is the namespace, not a condition.
func TestImmutableConflict(t *testing.T) {
	f := start(t, fakeOptions{immutable: true}, netOptions{sync: true}, nil)
	f.locked(func() {
		f.onPut = func(*fakeNode, *kvdv1.PutRequest) (*kvdv1.WriteResponse, error) {
			return &kvdv1.WriteResponse{Outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_CONFLICT, Version: 7}, nil
		}
	})
	_, err := f.c.Put(ctxFor(t, time.Minute), []byte("k"), []byte("v"))
	require.ErrorIs(t, err, ErrConflict)
	require.Contains(t, err.Error(), "immutable")
	_, err = f.c.Put(ctxFor(t, time.Minute), []byte("k"), []byte("v"), IfAbsent())
	require.ErrorIs(t, err, ErrConflict)
	require.NotContains(t, err.Error(), "immutable")
}

func TestRPCErrors(t *testing.T) {
	for _, c := range []struct {
		err    error
		class  error
		unsure bool
		text   string
	}{
		{status.Error(codes.Unavailable, `connection error: desc = "transport: Error while dialing: dial tcp 127.0.0.1:1: connect: connection refused"`), ErrUnavailable, false, "node at X cannot be reached: dial tcp 127.0.0.1:1: connect: connection refused"},
		{status.Error(codes.Unavailable, `connection error: desc = "error reading server preface: http2: frame too large"`), ErrIncompatible, false, "does not speak gRPC"},
		{status.Error(codes.Unavailable, `connection error: desc = "error reading server preface: http2: failed reading the frame payload: unexpected EOF, note that the frame header looked like an HTTP/1.1 header"`), ErrIncompatible, false, "does not speak gRPC"},
		{status.Error(codes.Unavailable, `connection error: desc = "initial http2 frame from server is not a settings frame: *http2.PingFrame"`), ErrIncompatible, false, "does not speak gRPC"},
		{status.Error(codes.Unavailable, `connection error: desc = "error reading server preface: EOF"`), ErrUnavailable, false, "closed the connection"},
		{status.Error(codes.Unavailable, `connection error: desc = "error reading server preface: unexpected EOF"`), ErrUnavailable, false, "closed the connection"},
		{status.Error(codes.Unavailable, `connection error: desc = "error reading server preface: read tcp 127.0.0.1:1->127.0.0.1:2: read: connection reset by peer"`), ErrUnavailable, false, "closed the connection"},
		{status.Error(codes.Unavailable, `connection error: desc = "transport: failed to write client preface: write tcp 127.0.0.1:1->127.0.0.1:2: write: broken pipe"`), ErrUnavailable, false, "closed the connection"},
		{status.Error(codes.Unavailable, `connection error: desc = "write tcp 127.0.0.1:1->127.0.0.1:2: write: broken pipe"`), ErrUnavailable, true, "closed the connection"},
		{status.Error(codes.Unavailable, `connection error: desc = "write tcp 127.0.0.1:1->127.0.0.1:2: write: connection reset by peer"`), ErrUnavailable, true, "closed the connection"},
		{status.Error(codes.Unavailable, `connection error: desc = "error reading server preface: read: i/o timeout"`), ErrUnavailable, false, "did not answer"},
		{status.Error(codes.Unavailable, `connection error: desc = "error reading server preface: read tcp 127.0.0.1:1->127.0.0.1:2: use of closed network connection"`), ErrUnavailable, false, "did not answer"},
		{status.Error(codes.Unavailable, `connection error: desc = "transport: authentication handshake failed: tls: failed to verify certificate: x509: certificate signed by unknown authority"`), ErrUnavailable, false, "unknown authority"},
		{status.Error(codes.Unavailable, `connection error: desc = "error reading server preface: remote error: tls: certificate required"`), ErrDenied, false, "refuses the TLS connection: certificate required"},
		{status.Error(codes.Unauthenticated, "who are you"), ErrDenied, false, "who are you"},
		{status.Error(codes.Unimplemented, "unknown service kvd.v1.Access"), ErrIncompatible, false, "not a kvd node"},
		{status.Error(codes.Unknown, "unexpected HTTP status code received from server: 404"), ErrIncompatible, true, "not a kvd node"},
		{status.Error(codes.DeadlineExceeded, "x"), ErrUnavailable, true, "did not answer in time"},
		{status.Error(codes.PermissionDenied, "no"), ErrDenied, false, "no"},
		{status.Error(codes.DataLoss, "bad sum"), ErrCorrupt, true, "bad sum"},
		{failWith(codes.Internal, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_CORRUPT}), ErrCorrupt, false, ""},
		{failWith(codes.Internal, &kvdv1.ErrorDetail{Reason: 999}), ErrUnavailable, false, ""},
		{errors.New("plain"), ErrUnavailable, true, "plain"},
	} {
		err := rpcFailed("X", c.err)
		require.ErrorIs(t, err, c.class)
		require.Equal(t, c.unsure, mayHaveApplied(err), "%v", c.err)
		require.Contains(t, err.Error(), c.text)
	}
	require.NoError(t, rpcFailed("X", nil))
	for r := range kvdv1.ErrorDetail_Reason_name {
		if r != 0 {
			require.Contains(t, classes, kvdv1.ErrorDetail_Reason(r), "every reason has a class")
		}
	}
	require.True(t, strings.Contains((&ConflictError{}).Error(), "absent"))
	require.True(t, Retryable(fmt.Errorf("x: %w", ErrReadOnly)))
	require.False(t, Retryable(ErrOutcomeUnknown))
}
