package verbs

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// goodbyeTimeout is how long the end of a connection waits for its goodbye to be
// acknowledged. A peer that is alive does so within a round trip.
const goodbyeTimeout = 100 * time.Millisecond

// endpoint implements rdma.Endpoint: one queue pair on each rail.
type endpoint struct {
	d    *domain
	peer rdma.Peer
	done chan struct{}

	mu struct {
		sync.Mutex
		rails   []*servedRail // fixed with started
		started bool          // counted, may be evicted
		met     bool          // the client greeted
		ending  bool
		expiry  *time.Timer
	}
}

// Done implements rdma.Endpoint.
func (ep *endpoint) Done() <-chan struct{} { return ep.done }

// Close implements rdma.Endpoint: the queue pairs are destroyed when it returns.
func (ep *endpoint) Close() error {
	ep.end(byeRevoked, true)
	return nil
}

// start counts the endpoint and gives its client time to come. False: it has been ended
// already.
func (ep *endpoint) start(rails []*servedRail) bool {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	if ep.mu.ending {
		return false
	}
	ep.mu.rails = rails
	ep.mu.started = true
	ep.d.remember(ep)
	ep.d.t.accepted.Add(1)
	ep.d.t.connections.Add(1)
	if !ep.mu.met {
		ep.mu.expiry = time.AfterFunc(ep.d.t.p.AcceptTimeout, ep.expire)
	}
	return true
}

func (ep *endpoint) isStarted() bool {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	return ep.mu.started
}

func (ep *endpoint) rails() []*servedRail {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	return ep.mu.rails
}

func (ep *endpoint) expire() {
	ep.mu.Lock()
	met := ep.mu.met
	ep.mu.Unlock()
	if !met {
		ep.d.t.log.Info("verbs: the client did not connect in time", "client", ep.peer.Name, "session", ep.peer.Session)
		ep.end(byeRevoked, false)
	}
}

// connected: the client is there.
func (ep *endpoint) connected() {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	ep.mu.met = true
	if ep.mu.expiry != nil {
		ep.mu.expiry.Stop()
	}
}

// left: the client said goodbye, to one rail or to all.
func (ep *endpoint) left(r *servedRail, why bye) {
	if why == byeRail {
		ep.railEnded(r, fmt.Errorf("%w: verbs: the client gave up this rail", rdma.ErrConnLost))
		return
	}
	ep.end(why, false)
}

// railEnded takes down one rail; with the last one the connection has ended.
func (ep *endpoint) railEnded(r *servedRail, why error) {
	if !r.close() {
		return
	}
	for _, o := range ep.rails() {
		if !o.isClosed() {
			ep.d.t.log.Warn("verbs: connection lost a rail", "client", ep.peer.Name, "session", ep.peer.Session, "err", why)
			return
		}
	}
	ep.d.t.log.Info("verbs: connection ended", "client", ep.peer.Name, "session", ep.peer.Session, "err", why)
	ep.end(byeRail, false)
}

// end destroys the queue pairs, after telling the client why. Whoever comes second waits
// for the first.
func (ep *endpoint) end(why bye, tell bool) {
	ep.mu.Lock()
	if ep.mu.ending {
		ep.mu.Unlock()
		<-ep.done
		return
	}
	ep.mu.ending = true
	if ep.mu.expiry != nil {
		ep.mu.expiry.Stop()
	}
	started, rails := ep.mu.started, ep.mu.rails
	ep.mu.Unlock()
	if tell {
		// Also where no greeting has been heard yet: it may be on its way, from a client
		// that counts as connected since it was acknowledged.
		limit := time.NewTimer(goodbyeTimeout)
		for _, r := range rails {
			r.farewell(why)
		}
		for _, r := range rails {
			select {
			case <-r.byeSent:
				continue
			case <-limit.C:
			}
			break
		}
		limit.Stop()
	}
	for _, r := range rails {
		r.close()
	}
	if started {
		ep.d.forget(ep)
		ep.d.t.connections.Add(-1)
	}
	close(ep.done)
}

// servedRail is the target's end of one queue pair.
type servedRail struct {
	ep   *endpoint
	tn   *targetNIC
	pd   *ibv.PD
	spec railSpec
	own  side
	id   uint64 // in the ids of its requests

	gid      ibv.GIDEntry // the one in use
	extra    any          // the connector's own
	lastUsed atomic.Int64 // nowNanos

	byeOnce sync.Once
	byeSent chan struct{} // closed when the goodbye was acknowledged, or cannot be

	mu struct {
		sync.Mutex
		qp     *ibv.QP // nil before it is made
		closed bool
	}
}

// open makes the queue pair, by the connector of the device.
func (r *servedRail) open(client side, ways []gidPair) (answerRail, error) {
	if err := r.tn.enter(r); err != nil {
		return answerRail{}, err
	}
	return r.tn.n.link.accept(r, client, ways)
}

// newQP makes a queue pair with room for messages; create is what makes it.
func (r *servedRail) newQP(create func(ibv.QPConfig) (*ibv.QP, error)) (*ibv.QP, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed {
		return nil, fmt.Errorf("%w: verbs: endpoint", rdma.ErrClosed)
	}
	qp, err := create(ibv.QPConfig{SendCQ: r.tn.cq, RecvCQ: r.tn.cq, MaxSendWR: messageSlots, MaxRecvWR: recvSlots})
	if err != nil {
		return nil, fmt.Errorf("%w: verbs: %s makes no more queue pairs, its limit is said to be %d: %w", rdma.ErrExhausted, r.tn.n.name, r.tn.n.attr.MaxQP, err)
	}
	r.mu.qp = qp
	r.tn.t.counters.of(r.tn.n.name, r.spec.port).queuePairs.Add(1)
	return qp, nil
}

// withQP runs fn while the queue pair is there.
func (r *servedRail) withQP(fn func(*ibv.QP) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed || r.mu.qp == nil {
		return ibv.ErrClosed
	}
	return fn(r.mu.qp)
}

// postRecvs makes room for messages.
func (r *servedRail) postRecvs(qp *ibv.QP) error {
	for range recvSlots {
		if err := qp.PostRecv(idRecv | r.id); err != nil {
			return err
		}
	}
	return nil
}

// repost makes room for another message. A failure shows as the end of the connection.
func (r *servedRail) repost() {
	_ = r.withQP(func(qp *ibv.QP) error { return qp.PostRecv(idRecv | r.id) })
}

// farewell tells the client that the rail, or the connection, ends; sent follows, unless
// the client is gone.
func (r *servedRail) farewell(why bye) {
	if r.isClosed() || !r.tn.n.link.goodbye(r, why) {
		r.sent()
	}
}

// sent: the goodbye arrived, or never will.
func (r *servedRail) sent() { r.byeOnce.Do(func() { close(r.byeSent) }) }

func (r *servedRail) isClosed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.closed
}

// close destroys the queue pair: afterwards no READ on it is answered. False: it was
// closed before.
func (r *servedRail) close() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed {
		return false
	}
	r.mu.closed = true
	r.sent()
	if r.mu.qp != nil {
		r.tn.t.counters.of(r.tn.n.name, r.spec.port).queuePairs.Add(-1)
		if err := r.mu.qp.Close(); err != nil {
			r.ep.d.t.log.Error("verbs: queue pair not released", "device", r.tn.n.name, "err", err)
		}
	}
	r.tn.n.link.release(r)
	if r.id != 0 {
		r.tn.leave(r)
	}
	return true
}
