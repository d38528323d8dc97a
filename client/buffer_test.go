package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

func (f *fixture) buffer(t testing.TB, n int) *Buffer {
	b, err := f.c.AllocBuffer(n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Free()) })
	return b
}

// wantIn reads into the buffer and wants the value at its place there.
func (b *Buffer) wantIn(t testing.TB, key, value string, opts ...ReadOption) {
	t.Helper()
	v, err := b.GetInto(ctxFor(t, time.Minute), []byte(key), opts...)
	require.NoError(t, err)
	require.True(t, string(v.Data) == value, "%d bytes, want %d: %.20q, %.20q", len(v.Data), len(value), v.Data, value)
	require.Equal(t, len(v.Data), cap(v.Data))
	if len(value) > 0 {
		require.Same(t, &b.mem[valueAt], &v.Data[0])
	}
}

// TestBufferNoCopy: whatever the way to the value, the READ puts it where the caller
// finds it.
func TestBufferNoCopy(t *testing.T) {
	for name, net := range map[string]netOptions{
		"inline": {sync: true}, "round trips": {run: delayed(t, 10*time.Microsecond)}, "look-ups": {query: true, run: delayed(t, 10*time.Microsecond)},
	} {
		for _, immutable := range []bool{false, true} {
			t.Run(fmt.Sprint(name, immutable), func(t *testing.T) {
				f := start(t, fakeOptions{immutable: immutable}, net, nil)
				b := f.buffer(t, 1000)
				require.Equal(t, 1000, b.Cap())
				for i, level := range []Level{Linearizable, Session, Stale} {
					key := fmt.Sprint("a key ", i)
					value := strings.Repeat(key, 50)
					f.put(key, value)
					for range 3 { // the place is unknown, then known
						f.net.mu.Lock()
						f.net.trace = nil
						f.net.mu.Unlock()
						s := f.during(func() { b.wantIn(t, key, value, WithLevel(level)) })
						require.EqualValues(t, 1, s.BufferDirect)
						require.Zero(t, s.BufferCopied)
						if s.Queries > 0 {
							continue
						}
						require.EqualValues(t, 1, s.ObjectReads)
						f.net.mu.Lock()
						found := false
						for _, r := range f.net.trace {
							value := unsafe.Add(unsafe.Pointer(r.dst), layout.HeaderSize+len(key))
							found = found || value == unsafe.Pointer(&b.mem[valueAt])
						}
						f.net.mu.Unlock()
						require.True(t, found, "a READ into the buffer")
					}
				}
				_, err := b.GetInto(context.Background(), []byte("nobody"))
				require.ErrorIs(t, err, ErrNotFound)
				_, err = b.GetInto(context.Background(), nil)
				require.ErrorIs(t, err, ErrInvalid)
				b.wantIn(t, "a key 0", strings.Repeat("a key 0", 50)) // it is free again
			})
		}
	}
}

// TestBufferNoAllocations: a warm get into a Buffer allocates nothing.
func TestBufferNoAllocations(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	f.put(theKey, "some value")
	f.net.mu.Lock()
	f.net.trace = make([]fakeRead, 4096)
	f.net.mu.Unlock()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	b := f.buffer(t, 64)
	key := []byte(theKey)
	for _, opts := range [][]ReadOption{nil, {WithLevel(Session)}, {WithLevel(Stale)}} {
		n := testing.AllocsPerRun(1000, func() {
			v, err := b.GetInto(ctx, key, opts...)
			if err != nil || &v.Data[0] != &b.mem[valueAt] || string(v.Data) != "some value" {
				t.Fatalf("%q %v", v.Data, err)
			}
		})
		if !raceEnabled {
			require.Zero(t, n)
		}
	}
}

// TestBufferSizes: around the borders of size classes, with a buffer that is just large
// enough, and one that is a byte too small.
func TestBufferSizes(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	last := 0
	for c := layout.Class(1); layout.ClassSize(c) <= 128<<10; c++ {
		for _, size := range []int{layout.ClassSize(c) - 1, layout.ClassSize(c), layout.ClassSize(c) + 1} {
			key := fmt.Sprint("k", size)
			n := size - layout.HeaderSize - len(key)
			if n < 1 || n == last {
				continue
			}
			last = n
			for _, node := range f.nodes { // one block serves all, each after the other is deleted
				f.locked(func() { node.next = min(node.next, fakeChunk/2) })
			}
			value := strings.Repeat("x", n-1) + "y"
			f.put(key, value)
			b, err := f.c.AllocBuffer(n)
			require.NoError(t, err)
			s := f.during(func() {
				b.wantIn(t, key, value)
				b.wantIn(t, key, value)
			})
			require.EqualValues(t, 2, s.BufferDirect, "%d bytes: %+v", size, s)
			require.NoError(t, b.Free())
			if n > 1 {
				b, err = f.c.AllocBuffer(n - 1)
				require.NoError(t, err)
				_, err = b.GetInto(context.Background(), []byte(key))
				var small *TooSmallError
				require.ErrorAs(t, err, &small)
				require.ErrorIs(t, err, ErrTooSmall)
				require.Equal(t, TooSmallError{Size: n, Cap: n - 1}, *small)
				require.NoError(t, b.Free())
			}
			f.del(key)
		}
	}
	b := f.buffer(t, 10)
	f.put("long", strings.Repeat("x", 100_000))
	_, err := b.GetInto(context.Background(), []byte("long"))
	require.ErrorIs(t, err, ErrTooSmall)
	f.put("empty", "")
	v, err := b.GetInto(context.Background(), []byte("empty"))
	require.NoError(t, err)
	require.Empty(t, v.Data)
	require.NotNil(t, v.Data)

	key := strings.Repeat("k", layout.MaxKeySize)
	f.put(key, "0123456789")
	b.wantIn(t, key, "0123456789")

	for _, n := range []int{-1, 0, layout.MaxObjectSize, layout.MaxObjectSize - layout.HeaderSize} {
		_, err := f.c.AllocBuffer(n)
		require.ErrorIs(t, err, ErrInvalid)
	}
	largest := f.buffer(t, layout.MaxObjectSize-layout.HeaderSize-1)
	largest.wantIn(t, key, "0123456789")
	require.NotNil(t, largest.object(1, layout.MaxObjectSize))
}

// TestBufferOverGRPC: there the value is copied to its place once.
func TestBufferOverGRPC(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{}, func(c *Config) { c.Transport = TransportGRPC })
	f.put(theKey, "0123456789")
	b := f.buffer(t, 10)
	s := f.during(func() { b.wantIn(t, theKey, "0123456789") })
	require.EqualValues(t, 1, s.BufferCopied)
	small := f.buffer(t, 9)
	_, err := small.GetInto(context.Background(), []byte(theKey))
	require.ErrorIs(t, err, ErrTooSmall)
}

// TestBufferReal: the transports that there are.
func TestBufferReal(t *testing.T) {
	for name := range realTransports(t) {
		t.Run(name, func(t *testing.T) {
			f := startReal(t, name, 1)
			b := f.buffer(t, 100_000)
			for _, n := range []int{0, 1, 7, 100, 1000, 10_000, 100_000} {
				value := strings.Repeat("x", n)
				f.put(theKey, value)
				v, err := b.GetInto(ctxFor(t, 20*time.Second), []byte(theKey))
				require.NoError(t, err)
				require.Equal(t, value, string(v.Data))
			}
			s := f.c.Stats()
			t.Logf("%d values without a copy, %d with one", s.BufferDirect, s.BufferCopied)
			require.NotZero(t, s.BufferDirect)
			if name != "simnic" { // which loses connections
				require.LessOrEqual(t, s.BufferCopied, uint64(1), "no index was known at first")
			}
		})
	}
}

// TestBufferForOneGet: a second get is refused, and so is Free. A READ that its get gave
// up keeps the memory for itself.
func TestBufferForOneGet(t *testing.T) {
	h := &holder{}
	f := start(t, fakeOptions{}, netOptions{run: h.run}, func(c *Config) { c.StallTimeout = time.Hour })
	f.put(theKey, "old")
	b, err := f.c.AllocBuffer(100)
	require.NoError(t, err)
	b.wantIn(t, theKey, "old")

	h.set(1, false)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	given := make(chan error, 1)
	go func() {
		_, err := b.GetInto(ctx, []byte(theKey))
		given <- err
	}()
	eventually(t, "the READ", func() bool { return h.count() == 1 })
	_, err = b.GetInto(context.Background(), []byte(theKey))
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorIs(t, b.Free(), ErrInvalid)
	for _, r := range f.c.GetManyInto(context.Background(), [][]byte{[]byte(theKey)}, []*Buffer{b}) {
		require.ErrorIs(t, r.Err, ErrInvalid)
	}
	cancel()
	require.ErrorIs(t, <-given, context.Canceled)

	// The READ is still out: the next value must be elsewhere, and stay as it is.
	s := f.during(func() {
		v, err := b.GetInto(ctxFor(t, time.Minute), []byte(theKey))
		require.NoError(t, err)
		require.Equal(t, "old", string(v.Data))
		require.False(t, b.holds(v.Data))
	})
	require.EqualValues(t, 1, s.BufferCopied)
	require.Equal(t, bufferLent, b.state.Load())

	var freed atomic.Bool
	unmap := b.unmap
	b.unmap = func() error { freed.Store(true); return unmap() }
	require.NoError(t, b.Free())
	require.False(t, freed.Load(), "the READ may still arrive")
	_, err = b.GetInto(context.Background(), []byte(theKey))
	require.ErrorIs(t, err, ErrInvalid)
	h.release()
	eventually(t, "the end of the memory", freed.Load)
	require.NoError(t, b.Free())
}

// TestBufferComesBack: a lent buffer is used again once the READ is complete.
func TestBufferComesBack(t *testing.T) {
	h := &holder{}
	f := start(t, fakeOptions{}, netOptions{run: h.run}, func(c *Config) { c.StallTimeout = time.Hour })
	f.put(theKey, "value")
	b := f.buffer(t, 100)
	for range 3 {
		b.wantIn(t, theKey, "value")
		h.set(1, false)
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
		_, err := b.GetInto(ctx, []byte(theKey))
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		h.release()
		eventually(t, "the buffer", func() bool { return b.state.Load() == bufferIdle })
	}
}

func TestGetManyInto(t *testing.T) {
	for _, net := range []netOptions{{sync: true}, {run: delayed(t, 10*time.Microsecond)}} {
		f := start(t, fakeOptions{shards: 4}, net, nil)
		var keys [][]byte
		var bufs []*Buffer
		for i := range 50 {
			keys = append(keys, fmt.Appendf(nil, "key %d", i))
			f.put(string(keys[i]), fmt.Sprint("value ", i))
			bufs = append(bufs, f.buffer(t, 100))
		}
		keys = append(keys, []byte("nobody"), keys[0], keys[1], keys[2])
		bufs = append(bufs, f.buffer(t, 1), nil, bufs[0], f.buffer(t, 3))
		for range 2 { // the places are unknown, then known
			s := f.during(func() {
				results := f.c.GetManyInto(ctxFor(t, time.Minute), keys, bufs)
				for i := range 50 {
					require.NoError(t, results[i].Err)
					require.Equal(t, fmt.Sprint("value ", i), string(results[i].Value.Data))
					require.Same(t, &bufs[i].mem[valueAt], &results[i].Value.Data[0])
				}
				require.ErrorIs(t, results[50].Err, ErrNotFound)
				require.Equal(t, "value 0", string(results[51].Value.Data))
				require.ErrorIs(t, results[52].Err, ErrInvalid)
				require.ErrorIs(t, results[53].Err, ErrTooSmall)
			})
			require.EqualValues(t, 50, s.BufferDirect)
			require.Zero(t, s.BufferCopied)
		}
		for _, r := range f.c.GetManyInto(context.Background(), keys, bufs[:1]) {
			require.ErrorIs(t, r.Err, ErrInvalid)
		}
		require.Empty(t, f.c.GetManyInto(context.Background(), nil, nil))
	}
}

// TestBufferUnderFaults: torn READs, lost connections, gets that are given up, writers, and
// READs that arrive late: what a get returned is whole, and stays as it was.
func TestBufferUnderFaults(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("KVD_SEED=%d", seed)
	f := startReal(t, "simnic", 2)
	ctx := ctxFor(t, 60*time.Second)
	const keys = 4
	value := func(k, n int) []byte { return bytes.Repeat([]byte{byte(n), byte(k)}, 20+n%700) }
	for k := range keys {
		_, err := f.c.Put(ctx, fmt.Appendf(nil, "key %d", k), value(k, 1))
		require.NoError(t, err)
	}
	stop := make(chan struct{})
	var readers, writers sync.WaitGroup
	for r := range 4 {
		b := f.buffer(t, 2000)
		readers.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(r)))
			for !t.Failed() {
				select {
				case <-stop:
					return
				default:
				}
				k := rnd.IntN(keys)
				short, cancel := context.WithTimeout(ctx, time.Duration(50+rnd.IntN(2000))*time.Microsecond)
				v, err := b.GetInto(short, fmt.Appendf(nil, "key %d", k))
				cancel()
				if err != nil {
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("%v", err)
					}
					continue
				}
				first := bytes.Clone(v.Data)
				if len(first) == 0 || !bytes.Equal(first, bytes.Repeat(first[:2], len(first)/2)) || first[1] != byte(k) {
					t.Errorf("key %d: %d bytes that were never written: %.20x", k, len(first), first)
				}
				if rnd.IntN(8) == 0 { // a READ that is late would come now
					<-time.After(200 * time.Microsecond)
				}
				if !bytes.Equal(first, v.Data) {
					t.Errorf("the value changed after the get")
				}
			}
		})
	}
	for k := range keys {
		writers.Go(func() {
			for n := range 300 {
				if _, err := f.c.Put(ctx, fmt.Appendf(nil, "key %d", k), value(k, n)); err != nil {
					t.Errorf("put: %v", err)
					return
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	s := f.c.Stats()
	t.Logf("%d values without a copy, %d with one; retries %v, fallbacks %v", s.BufferDirect, s.BufferCopied, s.Retries, s.Fallbacks)
	require.NotZero(t, s.BufferDirect)
}

// sinkNet is a transport whose memory is to be registered.
type sinkNet struct {
	*fakeNet
	sinks   int
	refusal error
}

type fakeSink struct {
	n *sinkNet
	b []byte
}

func (n *sinkNet) NewInitiator(rdma.InitiatorConfig) (rdma.Initiator, error) { return n, nil }
func (n *sinkNet) AllocSink(size int) (rdma.Sink, error) {
	if n.refusal != nil {
		return nil, n.refusal
	}
	n.sinks++
	return &fakeSink{n, make([]byte, (size+os.Getpagesize()-1)/os.Getpagesize()*os.Getpagesize())}, nil
}
func (s *fakeSink) Bytes() []byte { return s.b }
func (s *fakeSink) Free() error   { s.n.sinks--; return nil }

// TestBufferIsRegistered: where a transport wants registered memory the buffer is that.
func TestBufferIsRegistered(t *testing.T) {
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: 1})}
	plain, sinks := &fakeNet{c: f.fakeCluster, name: "other"}, &sinkNet{fakeNet: &fakeNet{c: f.fakeCluster, name: "fake"}}
	f.c = f.dial(t, plain, func(c *Config) { c.Providers = []rdma.Provider{plain, sinks} })
	f.ready(t)
	f.put(theKey, "value")
	b, err := f.c.AllocBuffer(100)
	require.NoError(t, err)
	require.Equal(t, "fake", b.Registered())
	require.Equal(t, 1, sinks.sinks)
	b.wantIn(t, theKey, "value")
	require.NoError(t, b.Free())
	require.NoError(t, b.Free())
	require.Zero(t, sinks.sinks)

	sinks.refusal = fmt.Errorf("%w: have 64 KiB, need 16 MiB: raise LimitMEMLOCK", rdma.ErrExhausted)
	_, err = f.c.AllocBuffer(100)
	require.ErrorIs(t, err, ErrExhausted)
	require.Contains(t, err.Error(), "LimitMEMLOCK")

	other := f.dial(t, plain, func(c *Config) {
		c.Providers, c.Transport = []rdma.Provider{plain, sinks}, "other"
	})
	b, err = other.AllocBuffer(100)
	require.NoError(t, err, "the transport is not used")
	require.Empty(t, b.Registered())
	require.NoError(t, b.Free())
	require.NoError(t, other.Close())
	_, err = other.AllocBuffer(100)
	require.ErrorIs(t, err, ErrClosed)
}
