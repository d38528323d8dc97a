package tcp

import (
	"context"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

// stall keeps requests from being sent, so that batches stay outstanding.
func stall(c *conn) (release func()) {
	for !becomeFlusher(&c.send) {
		runtime.Gosched()
	}
	return c.send.flush
}

func becomeFlusher(s *sender) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	free := !s.mu.flushing
	s.mu.flushing = true
	return free
}

// A caller that reads the socket stops when its context or its limit ends, and
// another one, or nobody, finds the stream where it was left.
func TestReaderGivesUp(t *testing.T) { inBothModes(t, testReaderGivesUp) }

func testReaderGivesUp(t *testing.T, p Provider) {
	for name, wait := range map[string]func(*rdma.Batch) bool{
		"limit": func(b *rdma.Batch) bool { return b.Wait(context.Background(), 5*time.Millisecond) },
		"deadline": func(b *rdma.Batch) bool {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
			defer cancel()
			return b.Wait(ctx, 0)
		},
		"cancelled": func(b *rdma.Batch) bool {
			ctx, cancel := context.WithCancel(context.Background())
			defer time.AfterFunc(5*time.Millisecond, cancel).Stop()
			return b.Wait(ctx, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, p, 4096)
			release := stall(r.conn)
			first := newBatch(rdma.Read{Region: 1, Dst: make([]byte, 64)})
			second := newBatch(rdma.Read{Region: 1, Offset: 64, Dst: make([]byte, 64)})
			r.conn.Post(first)
			r.conn.Post(second)
			start := time.Now()
			require.False(t, wait(first))
			require.Less(t, time.Since(start), patience/2)
			require.False(t, first.Completed())
			release()
			require.NoError(t, await(t, second))
			require.NoError(t, await(t, first))
			require.Equal(t, r.memory.Bytes()[:64], first.Reads[0].Dst)
			require.Equal(t, r.memory.Bytes()[64:128], second.Reads[0].Dst)
		})
	}
}

// The reader leaves in the middle of an answer: what has arrived of it is not
// lost, and the rest goes where it belongs.
func TestReaderGivesUpWithinAnAnswer(t *testing.T) { inBothModes(t, testReaderGivesUpWithinAnAnswer) }

func testReaderGivesUpWithinAnAnswer(t *testing.T, p Provider) {
	r := newUnconnected(t, p, 1<<20)
	resume := make(chan struct{})
	half := make(chan struct{}, 1)
	via := newProxy(t, r.target.ln.Addr().String(), nil, func(at int, piece []byte) bool {
		if at > 300_000 {
			select {
			case half <- struct{}{}:
			default:
			}
			<-resume
		}
		return true
	})
	c, err := r.connectVia(via.ln.Addr().String())
	require.NoError(t, err)
	b := newBatch(rdma.Read{Region: 1, Dst: make([]byte, 1<<20)})
	c.Post(b)
	require.False(t, b.Wait(context.Background(), 30*time.Millisecond))
	<-half
	require.False(t, b.Completed())
	close(resume)
	require.NoError(t, await(t, b))
	require.Equal(t, r.memory.Bytes(), b.Reads[0].Dst)
	require.NoError(t, c.Close())
}

// Whoever waits, gives up, waits again, waits for another's batch or for none:
// every batch completes with its own bytes. The reader role changes hands all the
// time here.
func TestRoleUnderPressure(t *testing.T) { inBothModes(t, testRoleUnderPressure) }

func testRoleUnderPressure(t *testing.T, p Provider) {
	r := newRig(t, p, 1<<20)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	var wg sync.WaitGroup
	for caller := range 16 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(caller)))
			batches := make([]*rdma.Batch, 3)
			for i := range batches {
				batches[i] = &rdma.Batch{Reads: make([]rdma.Read, 1)}
			}
			for range 150 {
				for _, b := range batches {
					b.Reset()
					n := 1 + rnd.IntN(40_000)
					b.Reads[0] = rdma.Read{Region: 1, Offset: uint64(rnd.IntN(1<<20 - n)), Dst: make([]byte, n)}
					r.conn.Post(b)
				}
				for _, i := range rnd.Perm(len(batches)) {
					b := batches[i]
					switch rnd.IntN(4) {
					case 0:
						b.Wait(context.Background(), time.Duration(1+rnd.IntN(200))*time.Microsecond)
					case 1:
						ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rnd.IntN(100))*time.Microsecond)
						b.Wait(ctx, time.Millisecond)
						cancel()
					case 2:
						for !b.Completed() {
							<-b.Ready()
						}
					case 3:
						done := make(chan struct{})
						go func() {
							defer close(done)
							b.Wait(context.Background(), patience)
						}()
						b.Wait(context.Background(), time.Duration(rnd.IntN(50))*time.Microsecond)
						<-done
					}
					if !b.Wait(context.Background(), patience) || b.Err() != nil {
						t.Errorf("READ: complete %v, %v", b.Completed(), b.Err())
						return
					}
					read := b.Reads[0]
					if string(read.Dst) != string(r.memory.Bytes()[read.Offset:][:len(read.Dst)]) {
						t.Errorf("other bytes for %d at %d", len(read.Dst), read.Offset)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	require.Zero(t, r.conn.outstanding.Load())
}

// An idle connection notices that the target ended it.
func TestIdleConnectionEnds(t *testing.T) { inBothModes(t, testIdleConnectionEnds) }

func testIdleConnectionEnds(t *testing.T, p Provider) {
	r := newRig(t, p, 4096)
	other, otherEP := r.connect()
	require.NoError(t, r.ep.Close())
	select {
	case <-r.conn.Done():
	case <-time.After(patience):
		t.Fatal("not done")
	}
	require.ErrorIs(t, r.conn.Err(), rdma.ErrRevoked)
	b := newBatch(rdma.Read{Region: 1, Dst: make([]byte, 8)})
	r.conn.Post(b)
	require.ErrorIs(t, b.Err(), rdma.ErrRevoked)

	// A target that dies says nothing.
	ep := otherEP.(*endpoint)
	ep.mu.Lock()
	require.NoError(t, ep.mu.nc.Close())
	ep.mu.Unlock()
	select {
	case <-other.Done():
	case <-time.After(patience):
		t.Fatal("not done")
	}
	require.ErrorIs(t, other.Err(), rdma.ErrConnLost)
}
