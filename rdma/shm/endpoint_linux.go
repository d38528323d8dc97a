package shm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// endpoint is the server's end of a connection: expected (from Accept), then
// connected (from attach), then ended. It implements rdma.Endpoint.
type endpoint struct {
	target *target
	domain *domain
	peer   rdma.Peer
	token  token
	proof  [proofSize]byte
	done   chan struct{}

	// mu also orders what is sent: a region is handed out and taken back under it.
	// Sending never waits (sendNow), so neither does whoever needs mu.
	mu struct {
		sync.Mutex
		expiry *time.Timer
		sock   *net.UnixConn // nil before attach
		page   *rdma.Memory  // nil before attach and after the end
		given  map[rdma.RegionID]struct{}
		taken  uint64 // regions taken back: the open state of the page
		ended  bool
	}
}

func newEndpoint(t *target, d *domain, peer rdma.Peer) *endpoint {
	return &endpoint{target: t, domain: d, peer: peer, done: make(chan struct{})}
}

// Close implements rdma.Endpoint: it stores the end in the page that the client
// checks after each batch, so it holds from now on, and hangs up.
func (e *endpoint) Close() error {
	e.end(endRevoked)
	return nil
}

// Done implements rdma.Endpoint.
func (e *endpoint) Done() <-chan struct{} { return e.done }

func (e *endpoint) expireAfter(d time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.mu.ended && e.mu.sock == nil {
		e.mu.expiry = time.AfterFunc(d, func() {
			e.target.log.Info("shm: accepted client did not connect in time", "peer", e.peer.Name, "session", e.peer.Session, "limit", d)
			e.end(endRevoked)
		})
	}
}

// attach joins the endpoint with the socket that brought its token, and welcomes
// the client. On an error the socket stays the caller's.
func (e *endpoint) attach(c *net.UnixConn) error {
	page, err := rdma.AllocMemory("kvd-shm-conn", pageSize, rdma.MemoryOptions{Shareable: true})
	if err != nil {
		return fmt.Errorf("shm: connection page: %w", err)
	}
	store64(page.Bytes(), offMagic, connMagic)
	store64(page.Bytes(), offProcess, e.target.death.process)
	store64(page.Bytes(), offNode, e.target.cfg.NodeID)
	store64(page.Bytes(), offBoot, e.target.cfg.BootID)

	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.ended {
		return errors.Join(errors.New("shm: the token was revoked"), page.Free())
	}
	msg := welcome{proof: e.proof, tid: e.target.death.tid}.encode()
	if err := sendNow(c, msg, e.target.death.memory.FD(), page.FD()); err != nil {
		return errors.Join(fmt.Errorf("shm: welcome: %w", err), page.Free())
	}
	if e.mu.expiry != nil {
		e.mu.expiry.Stop()
	}
	e.mu.sock, e.mu.page = c, page
	e.mu.given = make(map[rdma.RegionID]struct{})
	return nil
}

// serve answers the client until it hangs up or is hung up on.
func (e *endpoint) serve() (reason uint64, err error) {
	e.mu.Lock()
	sock := e.mu.sock
	e.mu.Unlock()
	var buf [maxMessage]byte
	for {
		msg, _, err := receive(sock, buf[:], 0)
		if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
			return endGone, nil
		}
		if err != nil {
			return endProtocol, err
		}
		id, err := decodeGetRegion(msg)
		if err != nil {
			return endProtocol, err
		}
		if err := e.give(id); err != nil {
			return endStuck, err
		}
	}
}

// give answers a request for a region.
func (e *endpoint) give(id rdma.RegionID) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.ended {
		return nil
	}
	r := e.domain.region(id)
	if r == nil {
		return sendNow(e.mu.sock, regionReply{id: id}.encode())
	}
	raw, err := r.file.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	err = raw.Control(func(fd uintptr) {
		sendErr = sendNow(e.mu.sock, regionReply{id: id, known: true, size: r.size}.encode(), int(fd))
	})
	if err != nil { // deregistered since it was looked up
		return sendNow(e.mu.sock, regionReply{id: id}.encode())
	}
	if sendErr == nil {
		e.mu.given[id] = struct{}{}
	}
	return sendErr
}

// take revokes a region: at once through the page, and with a message that tells
// the client which region to unmap.
func (e *endpoint) take(id rdma.RegionID) {
	err := func() error {
		e.mu.Lock()
		defer e.mu.Unlock()
		if _, ok := e.mu.given[id]; !ok || e.mu.ended {
			return nil
		}
		delete(e.mu.given, id)
		e.mu.taken++
		store64(e.mu.page.Bytes(), offWord, e.mu.taken)
		return sendNow(e.mu.sock, drop{id: id, count: e.mu.taken}.encode())
	}()
	if err != nil {
		e.target.log.Info("shm: client does not read its messages: connection ended", "peer", e.peer.Name, "session", e.peer.Session, "err", err)
		e.end(endStuck)
	}
}

// end finishes the connection; only the first call counts.
func (e *endpoint) end(reason uint64) {
	e.mu.Lock()
	if e.mu.ended {
		e.mu.Unlock()
		return
	}
	e.mu.ended = true
	if e.mu.expiry != nil {
		e.mu.expiry.Stop()
	}
	sock, page := e.mu.sock, e.mu.page
	e.mu.page = nil
	if page != nil {
		store64(page.Bytes(), offWord, stateEnded|reason)
	}
	e.mu.Unlock()

	if sock != nil {
		_ = sock.Close()
	}
	if page != nil {
		if err := page.Free(); err != nil {
			e.target.log.Error("shm: connection page not released", "err", err)
		}
	}
	e.target.redeem(e.token)
	e.domain.leave(e)
	e.target.endpoints.Add(-1)
	close(e.done)
}
