package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// maxGreeting bounds the sockets that have not shown a token yet. Whoever comes
// on top of that is hung up on: strangers cost a node this much and no more.
const maxGreeting = 256

// target is the serving side on one node: a listener, and the connections of all
// its domains.
type target struct {
	p     Provider
	node  rdma.TargetConfig
	log   *slog.Logger
	ln    net.Listener
	addrs []string // what answers say

	goroutines sync.WaitGroup
	greeting   chan struct{} // one token for each socket without a valid hello

	slots    atomic.Int64 // endpoints: accepted, connected, not yet ended
	live     atomic.Int64 // connected
	accepted atomic.Uint64
	reads    atomic.Uint64
	queries  atomic.Uint64
	bytes    atomic.Uint64

	mu struct {
		sync.Mutex
		closed  bool
		waiting map[token]*endpoint // accepted, not yet connected
		domains map[*domain]struct{}
		sockets map[net.Conn]struct{} // without a valid hello
	}
}

// NewTarget starts to listen.
func (p Provider) NewTarget(cfg rdma.TargetConfig) (rdma.Target, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	p = p.withDefaults()
	if p.ServerTLS != nil {
		p.ServerTLS = serverTLS(p.ServerTLS)
	}
	lc := net.ListenConfig{KeepAliveConfig: p.keepAlive(), KeepAlive: keepAliveOff(p)}
	ln, err := lc.Listen(context.Background(), "tcp", p.ListenAddr)
	if err != nil {
		return nil, fmt.Errorf("tcp: listen on %q: %w", p.ListenAddr, err)
	}
	addrs, err := advertised(p.AdvertiseAddr, ln.Addr())
	if err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	t := &target{
		p: p, node: cfg, log: orDiscard(cfg.Logger).With("transport", "tcp"), ln: ln, addrs: addrs,
		greeting: make(chan struct{}, maxGreeting),
	}
	t.mu.waiting = make(map[token]*endpoint)
	t.mu.domains = make(map[*domain]struct{})
	t.mu.sockets = make(map[net.Conn]struct{})
	t.log.Info("listening", "addr", ln.Addr().String(), "advertised", addrs, "tls", p.ServerTLS != nil)
	t.goroutines.Go(t.acceptLoop)
	return t, nil
}

// keepAliveOff is what net wants to be told where there is to be no keep-alive.
func keepAliveOff(p Provider) time.Duration {
	if p.DeadPeerTimeout < 0 {
		return -1
	}
	return 0
}

// advertised lists what clients are told to dial.
func advertised(want string, listening net.Addr) ([]string, error) {
	host, port, err := net.SplitHostPort(listening.String())
	if err != nil {
		return nil, fmt.Errorf("tcp: listening address %q: %w", listening, err)
	}
	if want != "" {
		if h, p, err := net.SplitHostPort(want); err == nil && p != "" && p != "0" {
			return []string{net.JoinHostPort(h, p)}, nil
		} else if err == nil {
			want = h
		}
		return []string{net.JoinHostPort(want, port)}, nil
	}
	if ip := net.ParseIP(host); ip == nil || !ip.IsUnspecified() {
		return []string{listening.String()}, nil
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("tcp: addresses of this host: %w: set AdvertiseAddr", err)
	}
	var far, near []string
	for _, a := range all {
		n, ok := a.(*net.IPNet)
		if !ok || n.IP.IsLinkLocalUnicast() || n.IP.IsMulticast() {
			continue
		}
		if addr := net.JoinHostPort(n.IP.String(), port); n.IP.IsLoopback() {
			near = append(near, addr)
		} else {
			far = append(far, addr)
		}
	}
	// Loopback last: from another host it leads to whatever listens there, which
	// the token and the node's id tell, but late.
	addrs := append(far, near...)
	if len(addrs) == 0 {
		return nil, errors.New("tcp: this host has no address to tell clients: set AdvertiseAddr")
	}
	return addrs[:min(len(addrs), maxAddrs)], nil
}

func (t *target) acceptLoop() {
	for {
		nc, err := t.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of descriptors, mostly. Waiting lets some be closed; spinning would not.
			t.log.Warn("accept failed, trying again", "err", err)
			timer := time.NewTimer(10 * time.Millisecond)
			<-timer.C
			continue
		}
		select {
		case t.greeting <- struct{}{}:
			t.goroutines.Go(func() { t.greet(nc.(*net.TCPConn)) })
		default:
			t.log.Warn("connection refused: too many peers have not shown a token", "peer", nc.RemoteAddr().String(), "limit", maxGreeting)
			_ = nc.Close()
		}
	}
}

// greet reads a stranger's hello and turns the socket over to its endpoint.
func (t *target) greet(nc *net.TCPConn) {
	if !t.track(nc) {
		<-t.greeting
		_ = nc.Close()
		return
	}
	secured, ep, err := t.handshake(nc)
	t.untrack(nc)
	<-t.greeting
	if err != nil {
		t.log.Warn("handshake failed", "peer", nc.RemoteAddr().String(), "err", err)
		_ = nc.Close()
		return
	}
	ep.serve(secured)
}

func (t *target) track(nc net.Conn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return false
	}
	t.mu.sockets[nc] = struct{}{}
	return true
}

func (t *target) untrack(nc net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.mu.sockets, nc)
}

// handshake is bounded in time by HandshakeTimeout and in memory by the hello.
func (t *target) handshake(sock *net.TCPConn) (net.Conn, *endpoint, error) {
	if err := sock.SetDeadline(time.Now().Add(t.p.HandshakeTimeout)); err != nil {
		return nil, nil, fmt.Errorf("%w: tcp: %w", rdma.ErrHandshake, err)
	}
	if raw, err := sock.SyscallConn(); err == nil {
		if err := setUserTimeout(raw, t.p.DeadPeerTimeout); err != nil {
			t.log.Warn("no limit on unacknowledged bytes: a dead peer is found later", "err", err)
		}
	}
	var nc net.Conn = sock
	if t.p.ServerTLS != nil {
		s, err := secureServer(sock, t.p.ServerTLS)
		if err != nil {
			// A close with unread bytes resets, which may overtake the alert that says why.
			_ = sock.SetDeadline(time.Now().Add(goodbyeTimeout))
			if sock.CloseWrite() == nil {
				_, _ = io.Copy(io.Discard, sock)
			}
			return nil, nil, err
		}
		nc = s
	}
	var buf [helloSize]byte
	if n, err := io.ReadFull(nc, buf[:]); err != nil {
		return nil, nil, fmt.Errorf("%w: tcp: %d of %d bytes of greeting: %w", rdma.ErrHandshake, n, helloSize, err)
	}
	tok, version, err := decodeHello(buf[:])
	reply := welcome{nodeID: t.node.NodeID, bootID: t.node.BootID, maxReadBytes: uint64(t.p.MaxReadBytes)}
	if err != nil {
		// A stranger hears nothing; another version of kvd hears which one this is.
		if version != 0 {
			reply.verdict = welcomeVersion
			_, _ = nc.Write(reply.encode())
		}
		return nil, nil, err
	}
	ep := t.take(tok)
	if ep == nil {
		reply.verdict = welcomeToken
		_, _ = nc.Write(reply.encode())
		return nil, nil, fmt.Errorf("%w: tcp: unknown token (used, expired, or of an earlier boot)", rdma.ErrRevoked)
	}
	// Counted before the client can know that it is connected.
	t.accepted.Add(1)
	t.live.Add(1)
	if err := t.welcome(nc, reply); err != nil {
		t.live.Add(-1)
		ep.end()
		return nil, nil, err
	}
	return nc, ep, nil
}

func (t *target) welcome(nc net.Conn, reply welcome) error {
	if _, err := nc.Write(reply.encode()); err != nil {
		return fmt.Errorf("%w: tcp: send welcome: %w", rdma.ErrHandshake, err)
	}
	if err := nc.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("%w: tcp: %w", rdma.ErrHandshake, err)
	}
	return nil
}

// Confidential tells that READs are under TLS, or that nobody was told an address
// which leads off this host.
func (t *target) Confidential() bool {
	return t.p.ServerTLS != nil || staysHere(t.ln.Addr().String(), t.addrs)
}

var _ rdma.Confidential = (*target)(nil)

// staysHere: a listener on loopback alone, at which no address of another kind
// points. A forwarded port has one.
func staysHere(listening string, addrs []string) bool {
	for _, addr := range append([]string{listening}, addrs...) {
		host, _, err := net.SplitHostPort(addr)
		if ip := net.ParseIP(host); err != nil || !ip.IsLoopback() {
			return false
		}
	}
	return true
}

// take redeems a token: the first to come has the endpoint, the next has nil.
func (t *target) take(tok token) *endpoint {
	t.mu.Lock()
	defer t.mu.Unlock()
	ep := t.mu.waiting[tok]
	delete(t.mu.waiting, tok)
	return ep
}

// NewDomain makes a protection domain.
func (t *target) NewDomain(name string) (rdma.Domain, error) {
	d := &domain{t: t, name: name}
	d.memory.regions = make(map[rdma.RegionID][]byte)
	d.mu.endpoints = make(map[*endpoint]struct{})
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return nil, fmt.Errorf("%w: tcp: target", rdma.ErrClosed)
	}
	t.mu.domains[d] = struct{}{}
	return d, nil
}

// Stats of all domains together.
func (t *target) Stats() rdma.TargetStats {
	return rdma.TargetStats{
		Connections: t.live.Load(),
		Accepted:    t.accepted.Load(),
		Reads:       t.reads.Load(),
		Queries:     t.queries.Load(),
		Bytes:       t.bytes.Load(),
	}
}

// Close stops listening, revokes every connection and waits for the goroutines.
func (t *target) Close() error {
	t.mu.Lock()
	t.mu.closed = true
	domains := make([]*domain, 0, len(t.mu.domains))
	for d := range t.mu.domains {
		domains = append(domains, d)
	}
	for nc := range t.mu.sockets {
		_ = nc.Close()
	}
	t.mu.Unlock()
	err := t.ln.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	for _, d := range domains {
		err = errors.Join(err, d.Close())
	}
	t.goroutines.Wait()
	return err
}
