package verbs

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// cmServed is the target's end of a connection by rdma_cm: servedRail.extra, guarded by
// servedRail.mu.
type cmServed struct {
	token cmToken
	depth int
	id    *ibv.CMID // nil before the client came
}

// cmBacklog is how many clients may be waiting to be let in.
const cmBacklog = 128

// listening returns where clients connect; the first call makes the listeners.
func (l *cmLink) listening() ([]netip.AddrPort, error) {
	l.listen.Lock()
	defer l.listen.Unlock()
	l.mu.Lock()
	at := l.mu.at
	l.mu.Unlock()
	if len(at) > 0 {
		return at, nil
	}
	addrs, err := l.addresses()
	if err != nil {
		return nil, err
	}
	var ids []*ibv.CMID
	var errs []error
	for _, ip := range addrs {
		id, err := l.ch.NewID()
		if err != nil {
			errs = append(errs, err)
			break
		}
		err = id.Bind(netip.AddrPortFrom(ip, uint16(l.p.CMPort)))
		if err == nil {
			err = id.Listen(cmBacklog)
		}
		if err != nil {
			errs = append(errs, err, id.Close())
			continue
		}
		ids, at = append(ids, id), append(at, id.LocalAddr())
	}
	if len(at) == 0 {
		return nil, fmt.Errorf("%w: verbs: %s listens nowhere: %w", rdma.ErrUnsupported, l.n.name, errors.Join(errs...))
	}
	if err := errors.Join(errs...); err != nil {
		l.log.Warn("verbs: not listening on every address", "device", l.n.name, "err", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.listeners, l.mu.at = ids, at
	return at, nil
}

func (l *cmLink) accept(r *servedRail, client side, _ []gidPair) (answerRail, error) {
	from, err := decodeCMOffer(client.extra)
	if err != nil {
		return answerRail{}, err
	}
	at, err := l.listening()
	if err != nil {
		return answerRail{}, err
	}
	if _, err := r.newQP(r.pd.NewQP); err != nil {
		return answerRail{}, err
	}
	a := answerRail{side: r.own}
	a.mtu = min(client.mtu, r.own.mtu)
	a.depth = uint8(readDepth(int(client.depth), int(r.own.depth), l.p.MaxReadDepth))
	a.gids = nil
	s := &cmServed{depth: int(a.depth)}
	_, _ = rand.Read(s.token[:]) // never fails: crypto/rand ends the process first
	at = l.nearest(at, from)
	a.extra = cmAnswer{token: s.token, at: at[:min(len(at), maxCMAnswerAddrs)]}.encode()
	err = r.withQP(func(qp *ibv.QP) error {
		// Peers may READ through it, and nothing else; the kernel moves it on from here.
		if err := qp.ToInit(ibv.InitParams{Port: r.spec.port, Access: ibv.AccessRemoteRead}); err != nil {
			return err
		}
		if err := r.postRecvs(qp); err != nil {
			return err
		}
		if len(r.spec.gids) > 0 {
			r.gid = r.spec.gids[0]
		}
		r.extra = s
		l.mu.Lock()
		defer l.mu.Unlock()
		l.mu.tokens[s.token] = r
		return nil
	})
	if err != nil {
		return answerRail{}, fmt.Errorf("%w: verbs: %s: %w", rdma.ErrUnsupported, l.n.name, err)
	}
	return a, nil
}

// request lets a client in whose token is known, and not used before.
func (l *cmLink) request(ev ibv.CMEvent) {
	token, err := parseCMPrivate(ev.PrivateData)
	if err != nil {
		l.log.Warn("verbs: connect request refused", "device", l.n.name, "from", ev.ID.RemoteAddr().String(), "err", err)
		l.turnAway(ev.ID)
		return
	}
	l.mu.Lock()
	r := l.mu.tokens[token]
	delete(l.mu.tokens, token)
	l.mu.Unlock()
	if r == nil {
		l.log.Info("verbs: connect request refused: its token was used before, has expired or was revoked", "device", l.n.name, "from", ev.ID.RemoteAddr().String())
		l.turnAway(ev.ID)
		return
	}
	err = r.withQP(func(qp *ibv.QP) error {
		s := r.extra.(*cmServed)
		s.id = ev.ID
		l.own(ev.ID, r)
		return ev.ID.Accept(ibv.CMParams{QP: qp, ResponderResources: s.depth, InitiatorDepth: 1, RetryCount: l.p.Retry, RNRRetryCount: min(l.p.Retry, 6)})
	})
	switch {
	case errors.Is(err, ibv.ErrClosed): // the endpoint ended meanwhile, and knows nothing of the id
		l.turnAway(ev.ID)
	case err != nil:
		l.end(r, fmt.Errorf("%w: verbs: %s: %w", rdma.ErrConnLost, l.n.name, err))
	}
}

func (l *cmLink) turnAway(id *ibv.CMID) {
	if err := id.Reject(nil); err != nil {
		l.log.Debug("verbs: connect request not rejected", "device", l.n.name, "err", err)
	}
	l.shut(id)
}

// servedEvent: the client's first word, not CMEstablished, tells that it is there, for
// before that word this side must not send.
func (l *cmLink) servedEvent(r *servedRail, ev ibv.CMEvent) {
	if err := ev.Err(); err != nil {
		l.end(r, fmt.Errorf("%w: verbs: %s: %w", rdma.ErrConnLost, l.n.name, err))
	}
}

// end takes a rail down on a goroutine of its own: its id cannot be destroyed by the one
// that hands out events, as others may hold the rail and wait for events.
func (l *cmLink) end(r *servedRail, why error) {
	r.tn.t.work.Go(func() { r.ep.railEnded(r, why) })
}

func (l *cmLink) goodbye(r *servedRail, why bye) bool {
	return r.withQP(func(qp *ibv.QP) error {
		if s, ok := r.extra.(*cmServed); !ok || s.id == nil {
			return ibv.ErrClosed
		}
		return qp.PostWord(idMessage|r.id, cmWord(msgBye.with(uint32(why))))
	}) == nil
}

func (l *cmLink) release(r *servedRail) {
	s, ok := r.extra.(*cmServed)
	if !ok {
		return
	}
	l.mu.Lock()
	delete(l.mu.tokens, s.token)
	l.mu.Unlock()
	if s.id != nil {
		l.shut(s.id)
		s.id = nil
	}
}
