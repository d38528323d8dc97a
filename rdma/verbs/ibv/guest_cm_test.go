//go:build rdmaguest

package ibv

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
	"time"
)

// cmSide is one channel with what belongs to it.
type cmSide struct {
	ch *CMChannel
	id *CMID // of the connection
}

func newCMSide(t testing.TB) *cmSide {
	t.Helper()
	ch, err := NewCMChannel()
	must(t, err)
	s := &cmSide{ch: ch}
	t.Cleanup(func() {
		if s.id != nil {
			must(t, s.id.Close())
		}
		must(t, ch.Close())
	})
	return s
}

func (s *cmSide) expect(t testing.TB, want CMEventType) CMEvent {
	t.Helper()
	must(t, s.ch.SetDeadline(time.Now().Add(20*time.Second)))
	ev, err := s.ch.Next()
	must(t, err)
	if ev.Type != want {
		t.Fatalf("event %q (%v), want %q", ev.Type, ev.Err(), want)
	}
	return ev
}

// siwPair connects a reader and a target by rdma_cm, with queue pairs of our own context
// or of the ids.
func siwPair(t *testing.T, idsOwn bool) (client, server *cmSide, reader, target *end, listener *CMID) {
	t.Helper()
	addr := netip.AddrPortFrom(firstAddr(t, "KVD_GUEST_SIW_ADDRS"), 0)
	server, client = newCMSide(t), newCMSide(t)
	var err error
	listener, err = server.ch.NewID()
	must(t, err)
	t.Cleanup(func() { must(t, listener.Close()) })
	must(t, listener.Bind(addr))
	must(t, listener.Listen(8))
	if got := listener.DeviceName(); got != siwName(t) {
		t.Fatalf("bound to device %q, want %q", got, siwName(t))
	}
	dst := listener.LocalAddr()
	if dst.Port() == 0 {
		t.Fatalf("listening at %s: want a port", dst)
	}

	client.id, err = client.ch.NewID()
	must(t, err)
	must(t, client.id.ResolveAddr(netip.AddrPort{}, dst, 5*time.Second))
	client.expect(t, CMAddrResolved)
	must(t, client.id.ResolveRoute(5*time.Second))
	client.expect(t, CMRouteResolved)

	ctx := openDevice(t, siwName(t))
	mk := func(id *CMID, access Access) *end {
		c := ctx
		if idsOwn {
			c, err = id.Context()
			must(t, err)
		}
		e := &end{mem: mapped(t, testSize)}
		e.pd, err = c.NewPD()
		must(t, err)
		t.Cleanup(func() { must(t, e.pd.Close()) })
		e.cq, err = c.NewCQ(CQConfig{Depth: 256, Channel: true})
		must(t, err)
		t.Cleanup(func() { must(t, e.cq.Close()) })
		e.mr, err = e.pd.RegMR(e.mem, access)
		must(t, err)
		t.Cleanup(func() { must(t, e.mr.Close()) })
		cfg := QPConfig{SendCQ: e.cq, RecvCQ: e.cq, MaxSendWR: 128}
		if idsOwn {
			e.qp, err = id.NewQP(e.pd, cfg)
		} else {
			e.qp, err = e.pd.NewQP(cfg)
		}
		must(t, err)
		t.Cleanup(func() { must(t, e.qp.Close()) })
		return e
	}
	params := func(e *end, private string) CMParams {
		p := CMParams{PrivateData: []byte(private), ResponderResources: 16, InitiatorDepth: 16, RetryCount: 6, RNRRetryCount: 6}
		if !idsOwn {
			p.QP = e.qp
			acc := AccessRemoteRead
			must(t, e.qp.ToInit(InitParams{Port: 1, Access: acc}))
		}
		return p
	}
	// The sink of a READ is written by the peer on iWARP.
	reader = mk(client.id, AccessLocalWrite|AccessRemoteWrite)
	must(t, client.id.Connect(params(reader, "a token of up to 56 bytes")))
	req := server.expect(t, CMConnectRequest)
	server.id = req.ID
	if !bytes.HasPrefix(req.PrivateData, []byte("a token of up to 56 bytes")) || req.Listen != listener {
		t.Fatalf("%+v: want the private data and the listener", req)
	}
	t.Logf("request: responder resources %d, initiator depth %d, %d bytes of private data", req.ResponderResources, req.InitiatorDepth, len(req.PrivateData))
	target = mk(server.id, AccessLocalWrite|AccessRemoteRead)
	must(t, server.id.Accept(params(target, "welcome")))
	ev := client.expect(t, CMEstablished)
	t.Logf("established: responder resources %d, initiator depth %d, private %q", ev.ResponderResources, ev.InitiatorDepth, ev.PrivateData)
	server.expect(t, CMEstablished)
	for i := range target.mem {
		target.mem[i] = byte(i*7 + i>>9)
	}
	return client, server, reader, target, listener
}

func TestGuestCMRead(t *testing.T) {
	for name, idsOwn := range map[string]bool{"queue pair of our own": false, "queue pair of the id": true} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			client, server, r, target, _ := siwPair(t, idsOwn)
			for i, n := range []int{1, 64, 4096, 65536, 1 << 20} {
				if s := r.one(t, r.read(uint64(i), target, 0, i*13, n)); s != WCSuccess {
					t.Fatalf("%d bytes: %s", n, s)
				}
				if !bytes.Equal(r.mem[:n], target.mem[i*13:i*13+n]) {
					t.Fatalf("%d bytes: other bytes than the target's", n)
				}
			}
			// Words both ways; the connecting side has spoken first.
			must(t, target.qp.PostRecv(70))
			must(t, r.qp.PostRecvInto(71, r.mr.Addr()+8192, MaxWord, r.mr.LKey()))
			must(t, r.qp.PostWord(72, nil))
			if c := target.wait(t); c.ID != 70 || c.Status != WCSuccess || c.ByteLen != 0 || c.Imm != 0 {
				t.Errorf("a word of no bytes: %+v", c)
			}
			if c := r.wait(t); c.ID != 72 || c.Status != WCSuccess {
				t.Errorf("sending a word of no bytes: %+v", c)
			}
			must(t, target.qp.PostWord(73, []byte("bye!")))
			if c := r.wait(t); c.ID != 71 || c.Status != WCSuccess || c.ByteLen != 4 || string(r.mem[8192:8196]) != "bye!" {
				t.Errorf("a word: %+v, %q", c, r.mem[8192:8196])
			}
			if err := target.qp.PostWord(74, make([]byte, MaxWord+1)); err == nil {
				t.Error("a word that is too long was posted")
			}
			a, err := r.qp.Query()
			t.Logf("state %v %v", a, err)
			must(t, server.id.Disconnect())
			client.expect(t, CMDisconnected)
		})
	}
}

func TestGuestCMRejected(t *testing.T) {
	noLeaks(t)
	server, client := newCMSide(t), newCMSide(t)
	addr := netip.AddrPortFrom(firstAddr(t, "KVD_GUEST_SIW_ADDRS"), 0)
	listener, err := server.ch.NewID()
	must(t, err)
	defer func() { must(t, listener.Close()) }()
	must(t, listener.Bind(addr))
	must(t, listener.Listen(8))
	dst := listener.LocalAddr()

	c := openDevice(t, siwName(t))
	pd, err := c.NewPD()
	must(t, err)
	defer func() { must(t, pd.Close()) }()
	cq, err := c.NewCQ(CQConfig{Depth: 16})
	must(t, err)
	defer func() { must(t, cq.Close()) }()
	qp, err := pd.NewQP(QPConfig{SendCQ: cq, RecvCQ: cq, MaxSendWR: 4})
	must(t, err)
	defer func() { must(t, qp.Close()) }()
	must(t, qp.ToInit(InitParams{Port: 1}))
	dial := func(dst netip.AddrPort) error {
		t.Helper()
		id, err := client.ch.NewID()
		must(t, err)
		if client.id != nil {
			must(t, client.id.Close())
		}
		client.id = id
		must(t, id.ResolveAddr(netip.AddrPort{}, dst, 5*time.Second))
		client.expect(t, CMAddrResolved)
		must(t, id.ResolveRoute(5*time.Second))
		client.expect(t, CMRouteResolved)
		return id.Connect(CMParams{QP: qp, PrivateData: []byte("bad token"), InitiatorDepth: 1, ResponderResources: 1})
	}
	must(t, dial(dst))
	req := server.expect(t, CMConnectRequest)
	must(t, req.ID.Reject([]byte("no")))
	must(t, req.ID.Close())
	ev := client.expect(t, CMRejected)
	t.Logf("%v, private data %q", ev.Err(), ev.PrivateData)
	if ev.Err() == nil {
		t.Error("a rejection is no error")
	}
	// Nobody listens there.
	must(t, listener.Close())
	if err := dial(dst); err != nil { // soft-iWARP knows at once, others by an event
		t.Log(err)
	} else {
		must(t, client.ch.SetDeadline(time.Now().Add(20*time.Second)))
		ev, err = client.ch.Next()
		must(t, err)
		t.Logf("%s: %v", ev.Type, ev.Err())
		if ev.Err() == nil {
			t.Errorf("connection to a closed port: %s, want an error", ev.Type)
		}
	}
}

func TestGuestCMErrors(t *testing.T) {
	noLeaks(t)
	s := newCMSide(t)
	id, err := s.ch.NewID()
	must(t, err)
	s.id = id
	if err := id.Bind(netip.MustParseAddrPort("192.0.2.1:0")); err == nil {
		t.Error("bound to an address that is not ours")
	} else {
		t.Log(err)
	}
	// An address that no RDMA device leads to: refused at once or by an event.
	if err := id.ResolveAddr(netip.AddrPort{}, netip.MustParseAddrPort("192.0.2.1:7"), time.Second); err != nil {
		t.Log(err)
	} else if ev, err := s.ch.Next(); err != nil || ev.Err() == nil {
		t.Errorf("%+v %v: want an error", ev, err)
	} else {
		t.Log(ev.Err())
	}
	if _, err := id.Context(); err == nil {
		t.Error("an unbound id has a context")
	}
	must(t, s.ch.SetDeadline(time.Now()))
	if _, err := s.ch.Next(); !errors.Is(err, ErrDeadline) {
		t.Errorf("%v, want ErrDeadline", err)
	}
	must(t, s.ch.SetDeadline(time.Time{}))
	if err := s.ch.Close(); !errors.Is(err, ErrBusy) {
		t.Errorf("%v, want ErrBusy while an id is open", err)
	}
	must(t, id.Close())
	got := make(chan error, 1)
	go func() {
		_, err := s.ch.Next()
		got <- err
	}()
	must(t, s.ch.Close())
	if err := <-got; !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
}

// A request posted after the peer is gone may complete never on iWARP: the event tells.
func TestGuestCMPeerGone(t *testing.T) {
	noLeaks(t)
	client, server, r, target, _ := siwPair(t, false)
	if s := r.one(t, r.read(1, target, 0, 0, 64)); s != WCSuccess {
		t.Fatal(s)
	}
	must(t, target.qp.Close())
	must(t, server.id.Close())
	server.id = nil
	client.expect(t, CMDisconnected)
	if _, err := r.qp.Post([]ReadWR{r.read(2, target, 0, 0, 64)}); err != nil {
		t.Logf("a READ after the end: %v", err)
	} else {
		var out [1]Completion
		n, err := r.cq.Poll(out[:], 100*time.Millisecond)
		t.Logf("a READ after the end: %d completions, %v, %s", n, err, out[0].Status)
		if n == 1 && out[0].Status == WCSuccess {
			t.Error("a READ succeeded after the peer's end")
		}
	}
}

// On soft-iWARP a refused WRITE may complete well here: what counts is that the memory
// stays, and that the connection ends.
func TestGuestCMWriteRefused(t *testing.T) {
	noLeaks(t)
	client, _, r, target, _ := siwPair(t, false)
	before := bytes.Clone(target.mem[:4096])
	for i := range r.mem[:4096] {
		r.mem[i] = 0xEE
	}
	must(t, r.qp.PostAttack(AttackWrite, r.read(1, target, 0, 0, 64)))
	t.Logf("refused WRITE: %s", r.wait(t).Status)
	client.expect(t, CMDisconnected)
	if !bytes.Equal(before, target.mem[:4096]) {
		t.Error("the target's memory changed")
	}
}
