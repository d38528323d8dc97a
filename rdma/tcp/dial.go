package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// initiator is the reading side in one process.
type initiator struct {
	p       Provider
	timeout time.Duration // of a Connect
	log     *slog.Logger

	mu struct {
		sync.Mutex
		closed bool
		conns  map[*conn]struct{}
	}
}

// NewInitiator starts the reading side.
func (p Provider) NewInitiator(cfg rdma.InitiatorConfig) (rdma.Initiator, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	if p.ClientTLS != nil {
		p.ClientTLS = hardened(p.ClientTLS)
	}
	in := &initiator{p: p.withDefaults(), timeout: cfg.ConnectTimeout, log: orDiscard(cfg.Logger).With("transport", "tcp")}
	if in.timeout <= 0 {
		in.timeout = defaultConnectTimeout
	}
	in.mu.conns = make(map[*conn]struct{})
	return in, nil
}

// Prepare needs nothing from the network.
func (in *initiator) Prepare(ctx context.Context) (rdma.Dial, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("tcp: prepare: %w", err)
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.mu.closed {
		return nil, fmt.Errorf("%w: tcp: initiator", rdma.ErrClosed)
	}
	return &dial{in: in}, nil
}

// Close closes every connection.
func (in *initiator) Close() error {
	in.mu.Lock()
	in.mu.closed = true
	conns := make([]*conn, 0, len(in.mu.conns))
	for c := range in.mu.conns {
		conns = append(conns, c)
	}
	in.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
	return nil
}

// adopt keeps c until it is finished; false: the initiator was closed meanwhile.
func (in *initiator) adopt(c *conn) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.mu.closed {
		return false
	}
	in.mu.conns[c] = struct{}{}
	return true
}

func (in *initiator) forget(c *conn) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.mu.conns, c)
}

// dial is a connection in the making. It holds nothing until Connect.
type dial struct {
	in   *initiator
	used atomic.Bool
}

// Offer says which protocol and version this side speaks.
func (d *dial) Offer() []byte { return encodeOffer() }

// Abort ends the dial.
func (d *dial) Abort() { d.used.Store(true) }

// Connect dials the addresses of the answer in turn. Only not reaching one leads
// to the next: the token is good for one try.
func (d *dial) Connect(ctx context.Context, encoded []byte) (rdma.Conn, error) {
	if d.used.Swap(true) {
		return nil, fmt.Errorf("%w: tcp: this dial was used or aborted: prepare another", rdma.ErrClosed)
	}
	a, err := decodeAnswer(encoded)
	if err != nil {
		return nil, err
	}
	if a.tls && d.in.p.ClientTLS == nil {
		return nil, fmt.Errorf("%w: tcp: the target speaks TLS, which this client is not set up for: give it the cluster's CA", rdma.ErrHandshake)
	}
	if !a.tls && d.in.p.ClientTLS != nil {
		return nil, fmt.Errorf("%w: tcp: the target's READs over TCP are plain text, and this client is to use TLS: switch it on at the node, or read otherwise", rdma.ErrHandshake)
	}
	ctx, cancel := context.WithTimeout(ctx, d.in.timeout)
	defer cancel()
	nc, addr, err := d.reach(ctx, a.addrs)
	if err != nil {
		return nil, err
	}
	c, err := d.greet(ctx, nc, addr, a)
	if err != nil {
		return nil, errors.Join(err, ignoreClosed(nc.Close()))
	}
	return c, nil
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// reach connects to the first address that answers. Each has an equal share of the
// time that is left.
func (d *dial) reach(ctx context.Context, addrs []string) (*net.TCPConn, string, error) {
	dialer := net.Dialer{KeepAliveConfig: d.in.p.keepAlive(), KeepAlive: keepAliveOff(d.in.p)}
	deadline, _ := ctx.Deadline()
	var errs []error
	for i, addr := range addrs {
		share := time.Until(deadline) / time.Duration(len(addrs)-i)
		try, cancel := context.WithTimeout(ctx, share)
		nc, err := dialer.DialContext(try, "tcp", addr)
		cancel()
		if err == nil {
			return nc.(*net.TCPConn), addr, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	err := errors.Join(errs...)
	if ctx.Err() != nil || isTimeout(err) {
		return nil, "", connectTimeout(ctx, "connect", err)
	}
	return nil, "", fmt.Errorf("%w: tcp: connect to %q: %w", rdma.ErrConnLost, addrs, err)
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// connectTimeout classes the end of a Connect's context.
func connectTimeout(ctx context.Context, step string, err error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return fmt.Errorf("%w: tcp: %s: %w", rdma.ErrClosed, step, ctx.Err())
	}
	return fmt.Errorf("%w: tcp: %s: %w", rdma.ErrTimeout, step, err)
}

// greet runs the handshake. nc is the caller's to close when it fails.
func (d *dial) greet(ctx context.Context, nc *net.TCPConn, addr string, a *answer) (*conn, error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("%w: tcp: %w", rdma.ErrConnLost, err)
	}
	if err := setUserTimeout(raw, d.in.p.DeadPeerTimeout); err != nil {
		d.in.log.Warn("no limit on unacknowledged bytes: a dead peer is found later", "addr", addr, "err", err)
	}
	// Deadlines, not only the context: they also end a peer that trickles.
	deadline, _ := ctx.Deadline()
	_ = nc.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { _ = nc.SetDeadline(time.Unix(1, 0)) })
	stream, w, err := d.exchange(nc, addr, a)
	if !stop() && err == nil {
		err = os.ErrDeadlineExceeded
	}
	switch {
	case err == nil:
	case ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded):
		// Whoever says nothing within the time may be no kvd at all: both classes hold.
		return nil, fmt.Errorf("%w: %w", rdma.ErrHandshake, connectTimeout(ctx, "handshake with "+addr, err))
	case errors.Is(err, rdma.ErrRevoked), errors.Is(err, rdma.ErrHandshake):
		return nil, fmt.Errorf("%w (at %s)", err, addr)
	default:
		return nil, fmt.Errorf("%w: tcp: %s hung up or sent no greeting: %w", rdma.ErrHandshake, addr, err)
	}
	if w.nodeID != a.nodeID || w.bootID != a.bootID {
		return nil, fmt.Errorf("%w: tcp: at %s there is node %d boot %x, wanted node %d boot %x", rdma.ErrHandshake, addr, w.nodeID, w.bootID, a.nodeID, a.bootID)
	}
	_ = nc.SetDeadline(time.Time{})
	c := newConn(d.in, stream, nc, raw, w.maxReadBytes)
	if !d.in.adopt(c) {
		_ = c.Close()
		return nil, fmt.Errorf("%w: tcp: initiator", rdma.ErrClosed)
	}
	return c, nil
}

func (d *dial) exchange(sock *net.TCPConn, addr string, a *answer) (net.Conn, welcome, error) {
	var nc net.Conn = sock
	if a.tls {
		cfg := d.in.p.ClientTLS.Clone()
		if cfg.ServerName == "" {
			cfg.ServerName = a.name
		}
		if cfg.ServerName == "" {
			host, _, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, welcome{}, fmt.Errorf("%w: tcp: address %q: %w", rdma.ErrHandshake, addr, err)
			}
			cfg.ServerName = host
		}
		s, err := secureClient(sock, cfg)
		if err != nil {
			return nil, welcome{}, err
		}
		nc = s
	}
	if _, err := nc.Write(encodeHello(a.token)); err != nil {
		return nil, welcome{}, err
	}
	var buf [welcomeSize]byte
	if _, err := io.ReadFull(nc, buf[:]); err != nil {
		if isAlert(err) {
			// In TLS 1.3 a client hears only now what became of its certificate.
			err = tlsError(err)
		}
		return nil, welcome{}, err
	}
	w, err := decodeWelcome(buf[:])
	return nc, w, err
}
