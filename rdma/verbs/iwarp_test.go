//go:build rdmaguest

package verbs

import (
	"bytes"
	"hash/crc32"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/rdmatest"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// siw is the settings with which tests reach the guest's soft-iWARP device.
func siw() Provider {
	return Provider{Devices: []string{"siw*"}, AcceptTimeout: 5 * time.Second, RescanInterval: 200 * time.Millisecond}
}

func TestConformanceIWARP(t *testing.T) {
	before := ibv.Live()
	p := siw()
	p.RescanInterval = time.Minute // what it allocates would count as the READs'
	f := factory(p, p)
	f.RefusalIsLoss = true // now and then soft-iWARP says that the queue pair failed
	rdmatest.Run(t, f)
	require.Equal(t, before, ibv.Live(), "objects left behind")
}

func BenchmarkReadIWARP(b *testing.B) { rdmatest.Benchmark(b, factory(siw(), siw())) }

// TestIWARPManyQueues: the queues of one context come to every offset that the library
// of soft-iWARP may refuse, see fillRefusedKey.
func TestIWARPManyQueues(t *testing.T) {
	p := newPair(t, siw(), siw(), 64<<10)
	for range 60 {
		c, _ := p.connect()
		require.NoError(t, p.read(c, make([]byte, 64), 0))
	}
}

// TestIWARPShortReads: soft-iWARP itself answers some of these wrongly, see longest.
func TestIWARPShortReads(t *testing.T) {
	p := newPair(t, siw(), siw(), 64<<10)
	c, _ := p.connect()
	for _, n := range []int{1, 2, 5, 8, 24, 31, 32, 33, 63, 64, 65, 128} {
		for back := 1; back <= n; back += max(n/8, 1) {
			require.NoError(t, p.read(c, make([]byte, n), uint64(3*4096-back)), "%d bytes, %d before a page's end", n, back)
		}
	}
}

// TestIWARPSinks: a peer has a key to where READs land, so what a caller registered is
// reached by a copy.
func TestIWARPSinks(t *testing.T) {
	p := newPair(t, siw(), siw(), 1<<20)
	s, err := p.rig.Initiator.(rdma.Allocator).AllocSink(300 << 10)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Free()) }()
	c, _ := p.connect()
	r := c.all[0]
	_, direct := r.direct(s.Bytes())
	require.False(t, direct)
	require.NoError(t, p.read(c, s.Bytes()[1:200<<10], 77))
	other, _ := p.connect()
	require.NotSame(t, r.pd, other.all[0].pd, "a domain for each connection")
}

// TestIWARPRefusesWrites: what counts is the memory, and that the connection ends; the
// status is the device's.
func TestIWARPRefusesWrites(t *testing.T) {
	p := newPair(t, siw(), siw(), 64<<10)
	was := crc32.ChecksumIEEE(p.mem.Bytes())
	c, _ := p.connect()
	r := c.all[0]
	m := (*c.regions.Load())[pairRegion]
	copy(r.post.bounce.buf, bytes.Repeat([]byte{0xee}, 64))
	r.post.Lock()
	err := r.qp.PostAttack(ibv.AttackWrite, ibv.ReadWR{ID: r.post.nextID, LocalAddr: r.post.bounce.base, Length: 64, LKey: r.post.bounce.lkey, RemoteAddr: m.addr, RKey: m.keys[0].rkey})
	r.post.Unlock()
	require.NoError(t, err)
	select {
	case <-c.Done():
	case <-time.After(patience):
		t.Fatal("the connection survived it")
	}
	require.ErrorIs(t, c.Err(), rdma.ErrConnLost)
	require.Equal(t, was, crc32.ChecksumIEEE(p.mem.Bytes()), "the region was changed")
}

// TestIWARPGoodbye: the reason of a target's end reaches the client.
func TestIWARPGoodbye(t *testing.T) {
	server := siw()
	server.MaxQueuePairs = 1
	p := newPair(t, server, siw(), 64<<10)
	first, ep := p.connect()
	require.NoError(t, p.read(first, make([]byte, 64), 0))
	second, ep2 := p.connect()
	<-first.Done()
	require.ErrorIs(t, first.Err(), rdma.ErrExhausted)
	<-ep.Done()
	require.NoError(t, p.read(second, make([]byte, 64), 0))
	require.NoError(t, ep2.Close())
	<-second.Done()
	require.ErrorIs(t, second.Err(), rdma.ErrRevoked)
	// And the other way: the client leaves.
	third, ep3 := p.connect()
	require.NoError(t, third.Close())
	<-ep3.Done()
}

// TestIWARPPeerDies: the end of a target's queue pair is noticed without any deadline.
func TestIWARPPeerDies(t *testing.T) {
	p := newPair(t, siw(), siw(), 64<<10)
	c, ep := p.connect()
	stop := p.load(c, 2)
	for _, r := range ep.(*endpoint).rails() {
		r.sent() // no goodbye
		require.True(t, r.close())
	}
	<-c.Done()
	_, errs := stop()
	require.NotEmpty(t, errs)
	for _, err := range errs {
		require.ErrorIs(t, err, rdma.ErrConnLost)
	}
	require.ErrorIs(t, c.Err(), rdma.ErrConnLost)
	require.NoError(t, ep.Close())
}

// stranger asks a target for a connection, with private data of its own, and returns how
// that went.
func stranger(t *testing.T, at netip.AddrPort, private []byte) ibv.CMEvent {
	t.Helper()
	var closers []func() error
	defer func() {
		for i := len(closers) - 1; i >= 0; i-- {
			require.NoError(t, closers[i]())
		}
	}()
	ctx, err := ibv.Open("siw0")
	require.NoError(t, err)
	closers = append(closers, ctx.Close)
	pd, err := ctx.NewPD()
	require.NoError(t, err)
	closers = append(closers, pd.Close)
	cq, err := ctx.NewCQ(ibv.CQConfig{Depth: 8})
	require.NoError(t, err)
	closers = append(closers, cq.Close)
	qp, err := pd.NewQP(ibv.QPConfig{SendCQ: cq, RecvCQ: cq, MaxSendWR: 4})
	require.NoError(t, err)
	closers = append(closers, qp.Close)
	require.NoError(t, qp.ToInit(ibv.InitParams{Port: 1}))
	ch, err := ibv.NewCMChannel()
	require.NoError(t, err)
	closers = append(closers, ch.Close)
	id, err := ch.NewID()
	require.NoError(t, err)
	closers = append(closers, id.Close)
	next := func() ibv.CMEvent {
		require.NoError(t, ch.SetDeadline(time.Now().Add(patience)))
		ev, err := ch.Next()
		require.NoError(t, err)
		return ev
	}
	require.NoError(t, id.ResolveAddr(netip.AddrPort{}, at, patience))
	require.Equal(t, ibv.CMAddrResolved, next().Type)
	require.NoError(t, id.ResolveRoute(patience))
	require.Equal(t, ibv.CMRouteResolved, next().Type)
	require.NoError(t, id.Connect(ibv.CMParams{QP: qp, PrivateData: private, InitiatorDepth: 1, ResponderResources: 1}))
	return next()
}

// TestIWARPTokens: nobody gets in without a token, with one twice, or with one whose
// endpoint has ended, and those who were let in stay.
func TestIWARPTokens(t *testing.T) {
	server := siw()
	server.AcceptTimeout = patience // else a slow guest lets a token expire too soon
	p := newPair(t, server, siw(), 64<<10)
	c, _ := p.connect()
	accept := func(p *pair) (cmAnswer, rdma.Endpoint) {
		d, err := p.rig.Initiator.Prepare(t.Context())
		require.NoError(t, err)
		defer d.Abort()
		b, ep, err := p.domain.Accept(t.Context(), rdma.Peer{Name: "test"}, d.Offer())
		require.NoError(t, err)
		a, err := decodeAnswer(b)
		require.NoError(t, err)
		ca, err := decodeCMAnswer(a.rails[0].extra)
		require.NoError(t, err)
		return ca, ep
	}
	good, ep := accept(p)
	at := good.at[0]
	wrongVersion := cmPrivate(good.token)
	wrongVersion[len(cmPrivateMagic)]++
	for name, private := range map[string][]byte{
		"nothing": nil, "another protocol": []byte("GET / HTTP/1.1"), "cut short": cmPrivate(good.token)[:12],
		"a guess": cmPrivate(cmToken{1, 2, 3}), "zeros": make([]byte, ibv.MaxCMPrivateData), "another version": wrongVersion,
	} {
		require.Equal(t, ibv.CMRejected, stranger(t, at, private).Type, name)
	}
	require.Equal(t, ibv.CMEstablished, stranger(t, at, cmPrivate(good.token)).Type, "the token itself")
	require.Equal(t, ibv.CMRejected, stranger(t, at, cmPrivate(good.token)).Type, "used before")
	<-ep.Done() // the stranger has left
	revoked, ep := accept(p)
	require.NoError(t, ep.Close())
	require.Equal(t, ibv.CMRejected, stranger(t, at, cmPrivate(revoked.token)).Type, "revoked")
	soon := newPair(t, siw(), siw(), 64<<10)
	expired, ep := accept(soon)
	<-ep.Done()
	require.Equal(t, ibv.CMRejected, stranger(t, expired.at[0], cmPrivate(expired.token)).Type, "expired")
	require.NoError(t, p.read(c, make([]byte, 64), 0))
}

// TestIWARPReconnects leave nothing behind.
func TestIWARPReconnects(t *testing.T) {
	p := newPair(t, siw(), siw(), 64<<10)
	c, _ := p.connect()
	before := ibv.Live()
	for i := range 100 {
		again, ep := p.connect()
		require.NoError(t, p.read(again, make([]byte, 4096), uint64(i)))
		if i%2 == 0 {
			require.NoError(t, again.Close())
		} else {
			require.NoError(t, ep.Close())
		}
		<-ep.Done()
		<-again.Done()
		require.NoError(t, again.Close())
	}
	eventually(t, "everything is released", func() bool { return ibv.Live() == before })
	require.NoError(t, p.read(c, make([]byte, 64), 0))
}
