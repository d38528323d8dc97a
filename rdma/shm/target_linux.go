package shm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// maxHandshakes bounds the connections that have not shown a token yet, so that
// who may connect but was not accepted cannot use up descriptors.
const maxHandshakes = 128

// NewTarget implements rdma.Provider.
func (p *Provider) NewTarget(cfg rdma.TargetConfig) (rdma.Target, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	death, err := processDeath()
	if err != nil {
		return nil, err
	}
	t := &target{
		provider: p.withDefaults(), cfg: cfg, death: death, log: cfg.Logger,
		uids: newUIDSet(p.AllowedUIDs), host: HostID(),
	}
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	path, stale, err := p.socketPath(cfg, t.uids.private())
	if err != nil {
		return nil, err
	}
	if t.listener, err = listen(path, stale, t.uids.private()); err != nil {
		return nil, err
	}
	t.mu.pending = make(map[token]*endpoint)
	t.mu.domains = make(map[*domain]struct{})
	t.mu.shaking = make(map[*net.UnixConn]struct{})
	t.running.Go(t.acceptLoop)
	t.log.Info("shm: listening", "socket", path, "uids", t.uids.String())
	return t, nil
}

// target implements rdma.Target.
type target struct {
	provider Provider // with defaults
	cfg      rdma.TargetConfig
	death    *death
	log      *slog.Logger
	uids     uidSet
	host     string
	listener *listener
	running  sync.WaitGroup // accept loop and one goroutine a socket

	endpoints atomic.Int64 // expected or connected: bounded by MaxConnections
	connected atomic.Int64
	accepted  atomic.Uint64

	// Lock order: target.mu, domain.mu and endpoint.mu are never held together, except
	// domain.mu inside endpoint.mu.
	mu struct {
		sync.Mutex
		pending map[token]*endpoint // accepted, not connected yet
		domains map[*domain]struct{}
		shaking map[*net.UnixConn]struct{} // have not shown a token yet
		closed  bool
	}
}

var errTargetClosed = fmt.Errorf("%w: shm: target", rdma.ErrClosed)

// NewDomain implements rdma.Target.
func (t *target) NewDomain(name string) (rdma.Domain, error) {
	d := &domain{target: t, name: name}
	d.mu.regions = make(map[rdma.RegionID]*region)
	d.mu.endpoints = make(map[*endpoint]struct{})
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return nil, errTargetClosed
	}
	t.mu.domains[d] = struct{}{}
	return d, nil
}

var _ rdma.Confidential = (*target)(nil)

// Confidential implements rdma.Confidential: nothing leaves the host.
func (t *target) Confidential() bool { return true }

// Stats implements rdma.Target. Reads stays 0: clients read by themselves.
func (t *target) Stats() rdma.TargetStats {
	return rdma.TargetStats{Connections: t.connected.Load(), Accepted: t.accepted.Load()}
}

// Close implements rdma.Target.
func (t *target) Close() error {
	t.mu.Lock()
	if t.mu.closed {
		t.mu.Unlock()
		return nil
	}
	t.mu.closed = true
	domains := t.mu.domains
	t.mu.domains = nil
	for c := range t.mu.shaking {
		_ = c.Close() // does not wait; the goroutine that reads it then ends
	}
	t.mu.Unlock()

	err := t.listener.Close()
	for d := range domains {
		err = errors.Join(err, d.end(endTarget))
	}
	t.running.Wait()
	return err
}

func (t *target) forget(d *domain) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.mu.domains, d)
}

// expect makes the token with which the client of e has to come.
func (t *target) expect(e *endpoint) error {
	if _, err := rand.Read(e.token[:]); err != nil {
		return fmt.Errorf("shm: token: %w", err)
	}
	if _, err := rand.Read(e.proof[:]); err != nil {
		return fmt.Errorf("shm: token: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return errTargetClosed
	}
	t.mu.pending[e.token] = e
	return nil
}

// redeem finds the endpoint of a token, which is good once, and before its
// expiry: after that the endpoint has ended and taken it back.
func (t *target) redeem(tok token) *endpoint {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.mu.pending[tok]
	delete(t.mu.pending, tok)
	return e
}

func (t *target) acceptLoop() {
	for {
		c, err := t.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of descriptors, most likely: connections that end give them back.
			t.log.Warn("shm: accept failed, trying again", "err", err)
			time.Sleep(50 * time.Millisecond)
			continue
		}
		if !t.beginHandshake(c) {
			refuse(c, refuseBusy, fmt.Sprintf("closing, or %d connections have not shown a token yet: try again", maxHandshakes))
			_ = c.Close()
			continue
		}
		t.running.Go(func() { t.serve(c) })
	}
}

func (t *target) beginHandshake(c *net.UnixConn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed || len(t.mu.shaking) >= maxHandshakes {
		return false
	}
	t.mu.shaking[c] = struct{}{}
	return true
}

func (t *target) endHandshake(c *net.UnixConn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.mu.shaking, c)
}

// refuse tells the client why, if it can be told without waiting.
func refuse(c *net.UnixConn, code uint16, text string) {
	_ = sendNow(c, refusal{code: code, text: text}.encode())
}

// hangUp closes after the client did, or after the deadline that is set. Closing
// with a message of the client's unread would destroy the refusal before the client
// has read it.
func hangUp(c *net.UnixConn) {
	_ = c.CloseWrite()
	var buf [maxMessage]byte
	for {
		if _, err := c.Read(buf[:]); err != nil {
			_ = c.Close()
			return
		}
	}
}

// serve runs one socket from the handshake to its end.
func (t *target) serve(c *net.UnixConn) {
	_ = c.SetReadDeadline(time.Now().Add(t.provider.HandshakeTimeout))
	e := t.admit(c)
	if e == nil {
		hangUp(c)
		t.endHandshake(c)
		return
	}
	_ = c.SetReadDeadline(time.Time{})
	t.accepted.Add(1)
	t.connected.Add(1)
	defer t.connected.Add(-1)
	reason, err := e.serve()
	if err != nil {
		t.log.Info("shm: connection ended", "peer", e.peer.Name, "session", e.peer.Session, "err", err)
	}
	e.end(reason)
}

// admit checks who connected and which endpoint is meant, and ends the handshake; nil
// when it was refused.
func (t *target) admit(c *net.UnixConn) *endpoint {
	uid, err := peerUID(c)
	if err != nil {
		t.log.Warn("shm: connection refused", "err", err)
		return nil
	}
	if !t.uids.has(uid) {
		t.log.Warn("shm: connection refused", "uid", uid, "allowed", t.uids.String())
		refuse(c, refuseUID, fmt.Sprintf("user %d may not connect, allowed: %v", uid, t.uids))
		return nil
	}
	var buf [maxMessage]byte
	msg, _, err := receive(c, buf[:], 0)
	if err != nil {
		return nil // probes of the socket, and clients that went away
	}
	h, err := decodeHello(msg)
	if err != nil {
		t.log.Warn("shm: connection refused", "uid", uid, "err", err)
		refuse(c, refuseVersion, err.Error())
		return nil
	}
	e := t.redeem(h.token)
	if e == nil {
		t.log.Warn("shm: connection refused", "uid", uid, "err", "unknown, used or expired token")
		refuse(c, refuseToken, "the token is unknown, used or expired")
		return nil
	}
	// Once the client is welcomed, its socket is the endpoint's to close, which says why
	// on the page first.
	t.endHandshake(c)
	if err := e.attach(c); err != nil {
		t.log.Warn("shm: connection refused", "uid", uid, "err", err)
		refuse(c, refuseToken, err.Error())
		e.end(endGone)
		if !t.beginHandshake(c) {
			_ = c.Close()
		}
		return nil
	}
	return e
}

// accept implements domain.Accept.
func (t *target) accept(ctx context.Context, d *domain, peer rdma.Peer, b []byte) ([]byte, *endpoint, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, fmt.Errorf("%w: shm: accept: %w", rdma.ErrTimeout, err)
	}
	o, err := decodeOffer(b)
	if err != nil {
		return nil, nil, err
	}
	if !sameKernel(o.host, t.host) {
		return nil, nil, fmt.Errorf("%w: shm: client %q runs on host %q, this is host %q; use tcp", rdma.ErrUnsupported, peer.Name, o.host, t.host)
	}
	if n := t.endpoints.Add(1); n > int64(t.provider.MaxConnections) {
		t.endpoints.Add(-1)
		return nil, nil, fmt.Errorf("%w: shm: %d connections open, the limit is %d: close some, or raise it", rdma.ErrExhausted, n-1, t.provider.MaxConnections)
	}
	e := newEndpoint(t, d, peer)
	if err := d.enter(e); err != nil {
		t.endpoints.Add(-1)
		return nil, nil, err
	}
	if err := t.expect(e); err != nil {
		e.end(endTarget)
		return nil, nil, err
	}
	e.expireAfter(t.provider.AcceptTimeout)
	a := answer{
		node: t.cfg.NodeID, boot: t.cfg.BootID, token: e.token, proof: e.proof,
		path: t.listener.path, host: t.host, expiry: uint32(t.provider.AcceptTimeout.Milliseconds()),
	}
	return a.encode(), e, nil
}
