package tcp

import (
	"context"
	"errors"
	"io"
	mrand "math/rand/v2"
	"net"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

// proxy stands between client and target and may spoil what it forwards.
type proxy struct {
	ln net.Listener
	wg sync.WaitGroup
}

// newProxy forwards one connection to target. spoil changes a piece of the stream
// that starts at offset at; returning false ends the connection.
func newProxy(tb testing.TB, target string, up, down func(at int, piece []byte) bool) *proxy {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	p := &proxy{ln: ln}
	p.wg.Go(func() {
		client, err := ln.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", target)
		if err != nil {
			client.Close()
			return
		}
		pump := func(dst, src net.Conn, spoil func(int, []byte) bool) {
			defer dst.Close()
			defer src.Close()
			buf := make([]byte, 4096)
			for at := 0; ; {
				n, err := src.Read(buf)
				if n > 0 && spoil != nil && !spoil(at, buf[:n]) {
					return
				}
				at += n
				if _, werr := dst.Write(buf[:n]); err != nil || werr != nil {
					return
				}
			}
		}
		p.wg.Go(func() { pump(server, client, up) })
		pump(client, server, down)
	})
	tb.Cleanup(func() {
		ln.Close()
		p.wg.Wait()
	})
	return p
}

// connectVia dials through the proxy.
func (r *rig) connectVia(addr string) (rdma.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	d, err := r.in.Prepare(ctx)
	require.NoError(r.tb, err)
	encoded, _, err := r.domain.Accept(ctx, rdma.Peer{Name: "via proxy"}, d.Offer())
	require.NoError(r.tb, err)
	a, err := decodeAnswer(encoded)
	require.NoError(r.tb, err)
	a.addrs = []string{addr}
	c, err := d.Connect(ctx, a.encode())
	if err == nil {
		require.NoError(r.tb, c.AddRegion(1, r.memory.Size(), r.attr))
	}
	return c, err
}

// spoiler garbles one byte of a proxy's stream in one direction, and may cut it there.
func spoiler(rnd *mrand.Rand) (up, down func(from int, piece []byte) bool) {
	at, cut, upwards := rnd.IntN(20000), rnd.IntN(2) == 0, rnd.IntN(2) == 0
	noise := byte(1 + rnd.IntN(255))
	spoil := func(from int, piece []byte) bool {
		if at < from || at >= from+len(piece) {
			return true
		}
		piece[at-from] ^= noise
		return !cut
	}
	if upwards {
		return spoil, nil
	}
	return nil, spoil
}

// A proxy that tears, cuts and garbles the stream gives errors, never a hang, a
// panic, or a READ that claims success with another length. Garbled payload is not
// this package's to notice.
func TestSpoiledStream(t *testing.T) {
	r := newUnconnected(t, Provider{HandshakeTimeout: time.Second}, 1<<20)
	seed := uint64(time.Now().UnixNano())
	rnd := mrand.New(mrand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	failed := 0
	for range 60 {
		up, down := spoiler(rnd)
		p := newProxy(t, r.target.ln.Addr().String(), up, down)
		c, err := r.connectVia(p.ln.Addr().String())
		if err != nil {
			failed++
			continue
		}
		for range 30 {
			lengths := []int{8, 64, 1 + rnd.IntN(3000)}
			b := newBatch()
			for _, n := range lengths {
				b.Reads = append(b.Reads, rdma.Read{Region: 1, Offset: uint64(rnd.IntN(1 << 19)), Dst: make([]byte, n)})
			}
			c.Post(b)
			if err := await(t, b); err != nil {
				require.ErrorIs(t, err, rdma.ErrConnLost)
				failed++
				break
			}
			for i, read := range b.Reads {
				require.Equal(t, lengths[i], read.N)
			}
		}
		require.NoError(t, c.Close())
		p.ln.Close()
	}
	require.Positive(t, failed, "the proxy spoiled nothing: the test proves nothing")
}

// What is not kvd is told so within the deadline, by either side.
func TestStrangers(t *testing.T) {
	version3 := encodeHello(token{})
	version3[8] = protocolVersion + 1
	for name, say := range map[string][]byte{
		"http":         []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n................................"),
		"noise":        {0xff, 0xfe, 0xfd},
		"nothing":      {},
		"half":         encodeHello(token{})[:20],
		"next version": version3,
		"no token":     encodeHello(token{1, 2, 3}),
		"own answer":   welcome{}.encode(),
	} {
		t.Run(name, func(t *testing.T) {
			r := newUnconnected(t, Provider{HandshakeTimeout: 100 * time.Millisecond}, 4096)
			nc, err := net.Dial("tcp", r.target.ln.Addr().String())
			require.NoError(t, err)
			defer nc.Close()
			_, err = nc.Write(say)
			require.NoError(t, err)
			require.NoError(t, nc.SetDeadline(time.Now().Add(patience)))
			got, err := io.ReadAll(nc)
			if err != nil { // a reset, since it did not read all of it
				require.False(t, isTimeout(err), "the target neither answered nor hung up")
			}
			switch name {
			case "next version":
				_, err := decodeWelcome(got)
				require.ErrorIs(t, err, rdma.ErrHandshake)
				require.ErrorContains(t, err, "version")
			case "no token":
				_, err := decodeWelcome(got)
				require.ErrorIs(t, err, rdma.ErrRevoked)
			default:
				require.Empty(t, got)
			}
			require.Zero(t, r.target.Stats().Accepted)
		})
		t.Run("dialled "+name, func(t *testing.T) {
			r := newUnconnected(t, Provider{}, 4096)
			in, err := Provider{}.NewInitiator(rdma.InitiatorConfig{ConnectTimeout: 300 * time.Millisecond})
			require.NoError(t, err)
			r.in = in.(*initiator)
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			var wg sync.WaitGroup
			wg.Go(func() {
				if nc, err := ln.Accept(); err == nil {
					_, _ = nc.Write(say)
					_, _ = io.Copy(io.Discard, nc)
					nc.Close()
				}
			})
			_, err = r.connectVia(ln.Addr().String())
			require.ErrorIs(t, err, rdma.ErrHandshake)
			ln.Close()
			wg.Wait()
			require.NoError(t, in.Close())
		})
	}
}

// Memory may be unmapped as soon as Deregister returned, whatever is being read: a
// goroutine that still copied from it would crash the test.
func TestDeregisterThenFree(t *testing.T) { inBothModes(t, testDeregisterThenFree) }

func testDeregisterThenFree(t *testing.T, p Provider) {
	r := newRig(t, p, 4096)
	for id := rdma.RegionID(2); id < 40; id++ {
		m, err := rdma.AllocMemory("kvd-tcp-short-lived", 4<<20, rdma.MemoryOptions{})
		require.NoError(t, err)
		attr, err := r.domain.Register(id, m)
		require.NoError(t, err)
		require.NoError(t, r.conn.AddRegion(id, m.Size(), attr))
		var wg sync.WaitGroup
		started := make(chan struct{}, 4)
		for range 4 {
			wg.Go(func() {
				b := newBatch(rdma.Read{Region: id, Dst: make([]byte, 1<<20)})
				for {
					r.conn.Post(b)
					err := await(t, b)
					select {
					case started <- struct{}{}:
					default:
					}
					if err != nil {
						require.ErrorIs(t, err, rdma.ErrAccess)
						return
					}
					b.Reset()
				}
			})
		}
		<-started
		require.NoError(t, r.domain.Deregister(id))
		require.NoError(t, m.Free())
		wg.Wait()
	}
	b := newBatch(rdma.Read{Region: 1, Dst: make([]byte, 64)})
	r.conn.Post(b)
	require.NoError(t, await(t, b), "the connection outlives a refused READ")
}

// A client that asks for much and reads nothing costs the target its buffers only,
// and nobody else waits for it. Nor does its Post wait.
func TestSlowClient(t *testing.T) { inBothModes(t, testSlowClient) }

func testSlowClient(t *testing.T, p Provider) {
	r := newRig(t, p, 1<<20)
	slow, slowEP := r.connect()
	release := holdRole(slow)
	batches := make([]*rdma.Batch, 200)
	for i := range batches {
		batches[i] = newBatch(rdma.Read{Region: 1, Dst: make([]byte, 1<<20)})
		slow.Post(batches[i])
	}
	// Until the target is stuck: no more bytes for a while.
	sent := r.target.Stats().Bytes
	eventually(t, "output stops", func() bool {
		before := sent
		<-time.After(20 * time.Millisecond)
		sent = r.target.Stats().Bytes
		return sent == before && sent > 0
	})
	require.Less(t, sent, uint64(len(batches))<<20)
	b := newBatch(rdma.Read{Region: 1, Dst: make([]byte, 64)})
	r.conn.Post(b)
	require.NoError(t, await(t, b))

	require.NoError(t, slowEP.Close(), "a stuck client can be revoked")
	select {
	case <-slowEP.Done():
	case <-time.After(patience):
		t.Fatal("endpoint of a stuck client not done")
	}
	release()
	for _, b := range batches {
		if err := await(t, b); err != nil {
			require.True(t, errors.Is(err, rdma.ErrConnLost) || errors.Is(err, rdma.ErrRevoked), "%v", err)
		}
	}
}

// holdRole takes the reader role of a connection and reads nothing until release.
func holdRole(c *conn) (release func()) {
	for !c.takeIfFree() {
		runtime.Gosched()
	}
	return c.passOn
}

// Batches that nobody waits for complete, and a Post never waits for the network,
// however much is posted before anybody reads.
func TestPostWithoutWait(t *testing.T) { inBothModes(t, testPostWithoutWait) }

func testPostWithoutWait(t *testing.T, p Provider) {
	r := newRig(t, p, 1<<20)
	var batches []*rdma.Batch
	for range 100 {
		b := newBatch()
		for i := range 2000 { // more than one frame
			b.Reads = append(b.Reads, rdma.Read{Region: 1, Offset: uint64(i * 64), Dst: make([]byte, 512)})
		}
		r.conn.Post(b)
		batches = append(batches, b)
	}
	for _, b := range batches {
		eventually(t, "completion", b.Completed)
		require.NoError(t, b.Err())
		for i, read := range b.Reads {
			require.Equal(t, r.memory.Bytes()[i*64:][:512], read.Dst)
		}
	}
	require.Zero(t, r.conn.outstanding.Load())
}

// A target that executes nothing, as a stopped process, holds up no Post, however
// much of it does not fit into the sockets; and batches stay outstanding until it
// goes on.
func TestPostToStoppedTarget(t *testing.T) { inBothModes(t, testPostToStoppedTarget) }

func testPostToStoppedTarget(t *testing.T, p Provider) {
	r := newRig(t, p, 4096)
	r.domain.memory.Lock()
	var batches []*rdma.Batch
	posted := make(chan struct{})
	go func() {
		defer close(posted)
		chain := slices.Repeat([]rdma.Read{{Region: 1, Dst: make([]byte, 8)}}, 2000)
		for range 600 { // of 32 KB each
			b := newBatch(slices.Clone(chain)...)
			r.conn.Post(b)
			batches = append(batches, b)
		}
	}()
	stuck := false
	select {
	case <-posted:
		stuck = batches[0].Wait(context.Background(), 3*time.Millisecond)
	case <-time.After(patience):
		t.Error("Post waits for the target")
	}
	r.domain.memory.Unlock()
	<-posted
	require.False(t, stuck, "a batch completed that nobody executed")
	for _, b := range batches {
		require.NoError(t, await(t, b))
	}
}

// What a look-up is shown of the memory: whole, aligned, within a region.
func TestQueryMemory(t *testing.T) {
	r := newUnconnected(t, Provider{}, 4096)
	s := newSession(&endpoint{d: r.domain}, nil)
	size := r.memory.Size()
	require.Len(t, s.mem(1, size-64, 64), 64)
	for _, bad := range []struct {
		chunk          uint32
		offset, length uint64
	}{
		{1, size - 56, 64}, {1, size + 8, 0}, {1, 1<<64 - 8, 64}, {1, 8, 1<<64 - 8},
		{1, 4, 8}, {2, 0, 8},
	} {
		require.Nil(t, s.mem(bad.chunk, bad.offset, bad.length), "%+v", bad)
	}
}

func TestLimits(t *testing.T) {
	r := newRig(t, Provider{MaxReadBytes: 1000, MaxInFlight: 2, MaxConnections: 1}, 4096)
	post := func(n int) *rdma.Batch {
		b := newBatch(rdma.Read{Region: 1, Dst: make([]byte, n)})
		r.conn.Post(b)
		return b
	}
	require.ErrorIs(t, await(t, post(1001)), rdma.ErrExhausted)
	r.conn.maxReadBytes = 4096 // the target checks for itself
	require.ErrorIs(t, await(t, post(1001)), rdma.ErrExhausted)
	require.NoError(t, await(t, post(1000)))

	release := stall(r.conn)
	first, second := post(8), post(8)
	require.ErrorIs(t, await(t, post(8)), rdma.ErrExhausted)
	release()
	require.NoError(t, await(t, first))
	require.NoError(t, await(t, second))

	_, _, err := r.domain.Accept(context.Background(), rdma.Peer{}, encodeOffer())
	require.ErrorIs(t, err, rdma.ErrExhausted)
}
