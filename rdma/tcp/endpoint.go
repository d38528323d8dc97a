package tcp

import (
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// goodbyeTimeout is how long a revoked connection has for what was executed
// before, for the goodbye, and for the client to hang up.
const goodbyeTimeout = 200 * time.Millisecond

// endpoint is the target's end of one connection: waiting for its client, then
// served, then ended.
type endpoint struct {
	d     *domain
	peer  rdma.Peer
	token token
	done  chan struct{}
	once  sync.Once // end

	// exec is held while requests are executed (memory is copied, nothing else), so
	// that Close can say: no READ is executed after it returned.
	exec struct {
		sync.Mutex
		revoked bool
	}

	mu struct {
		sync.Mutex
		expiry *time.Timer
		nc     net.Conn // nil until the client has come
	}
}

// Done is closed when the connection has ended.
func (ep *endpoint) Done() <-chan struct{} { return ep.done }

// Close revokes the connection: nothing is executed for it any more. It does not
// wait for the goodbye; Done tells.
func (ep *endpoint) Close() error {
	ep.exec.Lock()
	ep.exec.revoked = true
	ep.exec.Unlock()
	if ep.d.t.take(ep.token) != nil {
		ep.end()
		return nil
	}
	ep.mu.Lock()
	defer ep.mu.Unlock()
	if ep.mu.nc != nil {
		hurry(ep.mu.nc)
	}
	return nil
}

// hurry wakes the goroutine that serves nc, wherever it waits.
func hurry(nc net.Conn) {
	_ = nc.SetWriteDeadline(time.Now().Add(goodbyeTimeout))
	_ = nc.SetReadDeadline(time.Unix(1, 0))
}

// expire ends an endpoint whose client never came.
func (ep *endpoint) expire() {
	if ep.d.t.take(ep.token) != nil {
		ep.d.t.log.Info("the client did not connect in time", "client", ep.peer.Name, "session", ep.peer.Session)
		ep.end()
	}
}

// end is called once by whoever took the token, when there is nothing to serve
// (any more).
func (ep *endpoint) end() {
	ep.once.Do(func() {
		ep.mu.Lock()
		if ep.mu.expiry != nil {
			ep.mu.expiry.Stop()
		}
		ep.mu.Unlock()
		ep.d.mu.Lock()
		delete(ep.d.mu.endpoints, ep)
		ep.d.mu.Unlock()
		ep.d.t.slots.Add(-1)
		close(ep.done)
	})
}

// serve runs the connection to its end on the calling goroutine.
func (ep *endpoint) serve(nc net.Conn) {
	t := ep.d.t
	ep.mu.Lock()
	ep.mu.expiry.Stop()
	ep.mu.nc = nc
	ep.mu.Unlock()
	ep.exec.Lock()
	if ep.exec.revoked {
		// Close came between the token and here, and found no socket to wake.
		hurry(nc)
	}
	ep.exec.Unlock()

	s := newSession(ep, nc)
	err := s.run()
	switch {
	case errors.Is(err, rdma.ErrRevoked):
		sayGoodbye(nc, s.out, codeRevoked)
	case errors.Is(err, errProtocol):
		t.log.Warn("connection closed", "client", ep.peer.Name, "session", ep.peer.Session, "err", err)
		sayGoodbye(nc, s.out, codeProtocol)
	}
	_ = nc.Close()
	t.live.Add(-1)
	ep.end()
}

// sayGoodbye sends what was answered already and why there is no more, then lets
// the client hang up: closing a socket with unread bytes in it resets the
// connection, which may overtake the goodbye.
func sayGoodbye(nc net.Conn, out []byte, code uint8) {
	at := len(out)
	out = append(out, make([]byte, responseHeaderSize)...)
	response{kind: kindBye, code: code}.seal(out[at:], false)
	_ = nc.SetDeadline(time.Now().Add(goodbyeTimeout))
	if _, err := nc.Write(out); err != nil {
		return
	}
	if half, ok := nc.(interface{ CloseWrite() error }); ok {
		if half.CloseWrite() != nil {
			return
		}
	}
	_, _ = io.Copy(io.Discard, nc)
}
