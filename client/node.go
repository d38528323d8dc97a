package client

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// node is one member of the cluster: an address, and the session with it while
// there is one.
type node struct {
	c    *Client
	id   uint64
	life context.Context // ends when the node has left the cluster, or with the Client
	// leave ends it.
	leave context.CancelFunc
	sess  atomic.Pointer[session] // nil: none now
	mute  atomic.Bool             // did not answer the last call in time
	mu    struct {
		sync.Mutex
		addr   string // where it was last reached, or as its peers name it
		opened uint64 // sessions so far
		made   uint64 // connections so far
		last   *session
		err    error                // why there is none
		said   map[string]time.Time // choices of transport, when they were logged
	}
	tried chan struct{} // closed when it was first tried to open a session
}

const (
	reopenMin = 10 * time.Millisecond
	reopenMax = time.Second
	// reopenDenied is the least pause after a node refused this client: its token has to
	// be renewed first.
	reopenDenied = 2 * time.Second
	// sayAgain is how long the same choice of transport is not logged again.
	sayAgain = 10 * time.Minute
)

func (n *node) addr() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.addr
}

// remote is the node's gRPC side.
func (n *node) remote() (*remote, error) { return n.c.pool.get(n.addr()) }

// run keeps a session open until life ends. first, when not nil, is one that is
// open and published already.
func (n *node) run(life context.Context, first *session) {
	defer n.firstTried() // also where it has left before
	pause := n.c.cfg.newPauses(n.id, reopenMin, reopenMax, 0.5)
	for s := first; life.Err() == nil; s = nil {
		var err error
		if s == nil {
			if s, err = n.open(life); err == nil {
				n.publish(s, nil)
			}
		}
		n.firstTried()
		if err == nil {
			began := time.Now()
			err = n.serve(life, s)
			if time.Since(began) > reopenMax {
				pause.reset()
			}
		}
		n.setErr(err)
		d := pause.next()
		if errors.Is(err, ErrDenied) {
			d = max(d, reopenDenied)
		}
		if !sleep(life, d) {
			return
		}
	}
}

func (n *node) firstTried() {
	select {
	case <-n.tried:
	default:
		close(n.tried)
	}
}

// publish lets reads use the session. before, when not nil, is the one to the same boot
// whose place it takes.
func (n *node) publish(s, before *session) {
	n.mu.Lock()
	if before == nil {
		n.mu.opened++
	}
	if s.conn != nil {
		n.mu.made++
	}
	n.mu.last = s
	n.mu.addr = s.remote.addr
	n.mu.err = nil
	n.mu.Unlock()
	n.countPassed(s, before)
	n.announce(s)
	n.sess.Store(s)
	s.published.Store(true)
	if before != nil {
		before.ended.Store(true)
		n.c.reroute(before)
	} else {
		n.mute.Store(false)
		n.c.takeMembers(s.stream.opened.GetMembers(), s.stream.opened.GetMembersVersion())
	}
	n.c.changed.broadcast()
}

// countPassed counts the transports that the node is not read by although it serves them,
// where that is new.
func (n *node) countPassed(s, before *session) {
	for _, p := range s.passed {
		known := before != nil && slices.ContainsFunc(before.passed, func(o passedOver) bool {
			return o.transport == p.transport && o.why == p.why
		})
		// What was asked for by name is missed even where it was never to be had.
		missed := p.why.fallback() || p.why == pathNotServed && n.c.cfg.Transport != TransportAuto
		if missed && !known {
			n.c.count.paths[p.transport+1][p.why].Add(1)
		}
	}
}

// serve keeps a published session until its stream ends. A connection that is lost is
// replaced by one of what else there is, over the same stream; and while the node is read
// by a lesser transport, the better ones are tried beside it from time to time.
func (n *node) serve(life context.Context, s *session) error {
	st := s.stream
	err := func() error {
		for {
			next, err := n.await(life, s)
			if next == nil {
				return err
			}
			n.publish(next, s)
			n.retire(s)
			s = next
		}
	}()
	n.sess.CompareAndSwap(s, nil)
	s.close()
	st.stop()
	n.c.changed.broadcast()
	if life.Err() == nil {
		n.c.cfg.Logger.Info("session ended", slog.Uint64("node", n.id), slog.String("address", s.remote.addr), slog.Any("error", err))
	}
	return err
}

// await blocks until there is another session over the same stream to go on with, or,
// with nil, until the stream is over, and says why.
func (n *node) await(life context.Context, s *session) (next *session, err error) {
	var connDone <-chan struct{}
	if s.conn != nil {
		connDone = s.conn.Done()
	}
	for {
		var retry <-chan time.Time
		var timer *time.Timer
		if at, ok := s.of.nextTry(s); ok {
			timer = time.NewTimer(time.Until(at))
			retry = timer.C
		}
		select {
		case err = <-s.stream.ended:
			err = rpcFailed(s.remote.addr, err)
		case <-connDone:
			next, err = n.replace(life, s, s.conn.Err())
		case <-s.broken:
			next, err = n.replace(life, s, *s.fault.Load())
		case <-retry:
			next = n.improve(life, s)
		case <-life.Done():
			err = ErrClosed
		}
		if timer != nil {
			timer.Stop()
		}
		if next != nil || err != nil {
			return next, err
		}
	}
}

// replace makes a session over the same stream in place of one whose connection failed;
// nil where the stream is of no use either.
func (n *node) replace(life context.Context, s *session, err error) (*session, error) {
	s.ended.Store(true)
	n.c.changed.broadcast()
	if s.conn == nil || reasonOf(err) == kvdv1.ErrorDetail_REASON_SESSION_GONE || life.Err() != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(life, n.c.cfg.ConnectTimeout)
	defer cancel()
	before := s.of.failed(s.via-1, classifyPath(err), err.Error())
	next := n.c.newSession(s.remote, s.stream)
	if next.prepare(ctx, len(n.c.transports)) != nil {
		s.of.forgive(s.via-1, before)
		next.close()
		return nil, err
	}
	return next, nil
}

// improve tries the transports that are better than the session's; nil where none works.
func (n *node) improve(life context.Context, s *session) *session {
	limit := len(n.c.transports)
	if s.conn != nil {
		limit = s.via - 1
	}
	ctx, cancel := context.WithTimeout(life, n.c.cfg.ConnectTimeout)
	defer cancel()
	next := n.c.newSession(s.remote, s.stream)
	next.connect(ctx, limit)
	if next.conn == nil {
		return nil
	}
	if err := next.fetchRoutes(ctx, nil); err != nil {
		s.of.failed(next.via-1, classifyPath(err), err.Error())
		next.close()
		return nil
	}
	return next
}

// retire closes the connection of a session that another has taken the place of. What is
// on its way may still arrive, unless the connection was lost.
func (n *node) retire(s *session) {
	if s.conn == nil {
		return
	}
	linger := func() {
		t := time.NewTimer(attemptLimit)
		defer t.Stop()
		select {
		case <-s.conn.Done():
		case <-s.broken:
		case <-t.C:
		case <-n.c.life.Done():
		}
		s.close()
	}
	if !n.c.tasks.spawn(linger) {
		s.close()
	}
}

// announce logs how the node is read, once for each choice and its reasons.
func (n *node) announce(s *session) {
	via := n.c.via[s.via]
	said, level := via, slog.LevelInfo
	if s.conn == nil && s.why != reasonForced {
		level = slog.LevelWarn
	}
	for _, p := range s.passed {
		said += " " + n.c.via[p.transport+1] + ":" + p.why.String()
		if p.why.fallback() {
			level = slog.LevelWarn
		}
	}
	now := time.Now()
	n.mu.Lock()
	last, known := n.mu.said[said]
	if known = known && now.Sub(last) < sayAgain; !known {
		n.mu.said[said] = now
	}
	n.mu.Unlock()
	if known {
		level = slog.LevelDebug
	}
	n.c.cfg.Logger.Log(context.Background(), level, "node is read over "+via,
		slog.Uint64("node", n.id), slog.String("address", s.remote.addr), slog.String("reason", s.note))
}

// open tries the node's address and then the configured endpoints: a node may be
// reachable under another address than its peers use.
func (n *node) open(life context.Context) (*session, error) {
	addr := n.addr()
	s, err := n.c.openSession(life, life, addr, n.id)
	if err == nil {
		return s, nil
	}
	for _, e := range n.c.cfg.Endpoints {
		if e == addr || n.c.endpointTaken(e) {
			continue
		}
		if s, err2 := n.c.openSession(life, life, e, n.id); err2 == nil {
			return s, nil
		}
	}
	return nil, err
}

func (n *node) setErr(err error) {
	n.mu.Lock()
	n.mu.err = err
	n.mu.Unlock()
}

// stats describes the node for Stats.
func (n *node) stats() PeerStats {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := PeerStats{NodeID: n.id, Address: n.mu.addr, Sessions: n.mu.opened, Connections: n.mu.made, Connected: n.sess.Load() != nil}
	if s := n.mu.last; s != nil {
		p.Transport, p.Reason = n.c.via[s.via], s.note
	} else if n.mu.err != nil {
		p.Transport, p.Reason = n.c.via[viaGRPC], n.mu.err.Error()
	}
	return p
}

// addMembers starts a node for each member that is new.
func (c *Client) addMembers(members []*kvdv1.Member) {
	for _, m := range members {
		if m.GetNodeId() != 0 && m.GetAddress() != "" {
			c.addNode(m.GetNodeId(), m.GetAddress(), nil)
		}
	}
}

// addNode makes the node known, with a session where one is open already: reads can
// use that one when addNode returns.
func (c *Client) addNode(id uint64, addr string, first *session) {
	n := c.newNode(id, addr)
	if n == nil {
		return
	}
	if first != nil {
		n.publish(first, nil)
	}
	if !c.tasks.spawn(func() { n.run(n.life, first) }) && first != nil {
		first.close() // the Client is closing
		first.stream.stop()
	}
}

// newNode makes the node known; nil where it was, or the Client is closed.
func (c *Client) newNode(id uint64, addr string) *node {
	c.mu.Lock()
	defer c.mu.Unlock()
	old := *c.nodes.Load()
	if n := old[id]; n != nil {
		n.movedTo(addr)
		return nil
	}
	if c.mu.closed {
		return nil
	}
	n := &node{c: c, id: id, tried: make(chan struct{})}
	n.life, n.leave = context.WithCancel(c.life)
	n.mu.addr, n.mu.said = addr, map[string]time.Time{}
	nodes := make(map[uint64]*node, len(old)+1)
	for k, v := range old {
		nodes[k] = v
	}
	nodes[id] = n
	c.nodes.Store(&nodes)
	return n
}

// movedTo takes in where its peers reach the node, if it is not reached where it was: it
// may have another address since.
func (n *node) movedTo(addr string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.sess.Load() == nil {
		n.mu.addr = addr
	}
}

// endpointTaken tells whether a node with a session is reached under that address.
func (c *Client) endpointTaken(addr string) bool {
	for _, n := range *c.nodes.Load() {
		if s := n.sess.Load(); s != nil && s.remote.addr == addr {
			return true
		}
	}
	return false
}

// sleep waits for d; false when ctx ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
