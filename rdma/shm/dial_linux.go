package shm

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
)

// NewInitiator implements rdma.Provider.
func (p *Provider) NewInitiator(cfg rdma.InitiatorConfig) (rdma.Initiator, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	in := &initiator{log: cfg.Logger, timeout: cfg.ConnectTimeout}
	if in.log == nil {
		in.log = slog.New(slog.DiscardHandler)
	}
	if in.timeout <= 0 {
		in.timeout = p.withDefaults().HandshakeTimeout
	}
	in.mu.conns = make(map[*conn]struct{})
	return in, nil
}

// initiator implements rdma.Initiator.
type initiator struct {
	log     *slog.Logger
	timeout time.Duration // of a Connect, and of an AddRegion

	mu struct {
		sync.Mutex
		conns  map[*conn]struct{}
		closed bool
	}
}

var errInitiatorClosed = fmt.Errorf("%w: shm: initiator", rdma.ErrClosed)

// Prepare implements rdma.Initiator.
func (in *initiator) Prepare(ctx context.Context) (rdma.Dial, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%w: shm: prepare: %w", rdma.ErrTimeout, err)
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.mu.closed {
		return nil, errInitiatorClosed
	}
	host := HostID()
	if host == "" {
		return nil, fmt.Errorf("%w: shm: /proc/sys/kernel/random/boot_id cannot be read, so no server can be known to be on this host; use tcp", rdma.ErrUnsupported)
	}
	return &dial{in: in, host: host}, nil
}

// Close implements rdma.Initiator.
func (in *initiator) Close() error {
	in.mu.Lock()
	in.mu.closed = true
	conns := make([]*conn, 0, len(in.mu.conns))
	for c := range in.mu.conns {
		conns = append(conns, c)
	}
	in.mu.Unlock()
	var err error
	for _, c := range conns {
		err = errors.Join(err, c.Close())
	}
	return err
}

func (in *initiator) enter(c *conn) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.mu.closed {
		return errInitiatorClosed
	}
	in.mu.conns[c] = struct{}{}
	return nil
}

func (in *initiator) leave(c *conn) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.mu.conns, c)
}

// dial implements rdma.Dial. It holds nothing until Connect.
type dial struct {
	in   *initiator
	host string
	used atomic.Bool
}

// Offer implements rdma.Dial.
func (d *dial) Offer() []byte { return offer{host: d.host}.encode() }

// Abort implements rdma.Dial.
func (d *dial) Abort() { d.used.Store(true) }

// Connect implements rdma.Dial.
func (d *dial) Connect(ctx context.Context, b []byte) (rdma.Conn, error) {
	if d.used.Swap(true) {
		return nil, fmt.Errorf("%w: shm: this dial was connected or aborted before: prepare another", rdma.ErrClosed)
	}
	a, err := decodeAnswer(b)
	if err != nil {
		return nil, err
	}
	if !sameKernel(a.host, d.host) {
		return nil, fmt.Errorf("%w: shm: the server runs on host %q, this is host %q; use tcp", rdma.ErrUnsupported, a.host, d.host)
	}
	ctx, cancel := context.WithTimeout(ctx, d.in.timeout)
	defer cancel()
	var dialer net.Dialer
	nc, err := dialer.DialContext(ctx, "unixpacket", a.path)
	if err != nil {
		return nil, dialError(ctx, a, d.host, err)
	}
	sock := nc.(*net.UnixConn)
	// A deadline in the past wakes whoever reads or writes.
	stop := context.AfterFunc(ctx, func() { _ = sock.SetDeadline(time.Unix(1, 0)) })
	c, err := d.handshake(sock, a)
	if err == nil && !stop() {
		c.unmap()
		err = ctx.Err()
	}
	stop()
	if err == nil {
		if err = d.in.enter(c); err != nil {
			c.unmap()
		}
	}
	if err != nil {
		_ = sock.Close()
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%w: shm: handshake with node %#x at %s: %w", rdma.ErrTimeout, a.node, a.path, ctx.Err())
		}
		return nil, err
	}
	go c.receiveLoop()
	return c, nil
}

// dialError sorts a failure to reach the socket.
func dialError(ctx context.Context, a answer, host string, err error) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%w: shm: connect to %s: %w", rdma.ErrTimeout, a.path, ctx.Err())
	case errors.Is(err, unix.ENOENT) && sameMounts(a.host, host):
		return fmt.Errorf("%w: shm: the server's socket %s is gone: the server has ended", rdma.ErrConnLost, a.path)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return fmt.Errorf("%w: shm: the server's socket %s does not exist here (server %s, client %s): mount its directory into this container, or use tcp", rdma.ErrUnsupported, a.path, a.host, host)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: shm: user %d may not open the server's socket %s: run as an allowed user, or add it to the server's allowed users", rdma.ErrRevoked, os.Geteuid(), a.path)
	case errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("%w: shm: nobody listens on %s: the server has ended", rdma.ErrConnLost, a.path)
	}
	return fmt.Errorf("%w: shm: connect to %s: %w", rdma.ErrConnLost, a.path, err)
}

// handshake shows the token and maps the two pages. On an error nothing is left
// but the socket.
func (d *dial) handshake(sock *net.UnixConn, a answer) (*conn, error) {
	if _, err := sock.Write(hello{token: a.token}.encode()); err != nil && !errors.Is(err, unix.EPIPE) {
		return nil, fmt.Errorf("%w: shm: hello: %w", rdma.ErrConnLost, err)
	} // after EPIPE there is a refusal to read
	var buf [maxMessage]byte
	msg, fds, err := receive(sock, buf[:], 2)
	if err != nil {
		return nil, brokenSocket("handshake", err)
	}
	if msg[0] == msgRefuse {
		closeFDs(fds)
		return nil, refusalError(msg)
	}
	w, err := decodeWelcome(msg)
	switch {
	case err != nil:
	case len(fds) != 2:
		err = fmt.Errorf("%w: shm: welcome with %d descriptors, want 2", rdma.ErrHandshake, len(fds))
	case subtle.ConstantTimeCompare(w.proof[:], a.proof[:]) != 1:
		err = fmt.Errorf("%w: shm: whoever listens on %s is not the server that sent the answer", rdma.ErrHandshake, a.path)
	}
	if err != nil {
		closeFDs(fds)
		return nil, err
	}
	size := uint64(os.Getpagesize())
	death, err := mapSealed(fds[0], size, "death page")
	if err != nil {
		closeFDs(fds[1:])
		return nil, err
	}
	page, err := mapSealed(fds[1], size, "connection page")
	if err != nil {
		return nil, errors.Join(err, unix.Munmap(death))
	}
	if err := checkPages(death, page, a, w.tid); err != nil {
		return nil, errors.Join(err, unix.Munmap(death), unix.Munmap(page))
	}
	return newConn(d.in, sock, a, w.tid, death, page), nil
}

func refusalError(msg []byte) error {
	m, err := decodeRefusal(msg)
	if err != nil {
		return err
	}
	class := rdma.ErrRevoked
	switch m.code {
	case refuseVersion:
		class = rdma.ErrHandshake
	case refuseBusy:
		class = rdma.ErrExhausted
	}
	return fmt.Errorf("%w: shm: the server refused: %s", class, m.text)
}

// brokenSocket sorts an error of receive.
func brokenSocket(during string, err error) error {
	switch {
	case errors.Is(err, rdma.ErrHandshake):
		return err
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%w: shm: %s: the server hung up", rdma.ErrConnLost, during)
	}
	return fmt.Errorf("%w: shm: %s: %w", rdma.ErrConnLost, during, err)
}
