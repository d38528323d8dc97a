package client

import (
	"time"

	"github.com/kvd-io/kvd/internal/chaos"
	"github.com/kvd-io/kvd/storage/layout"
)

// begin posts the leader's part of an attempt: the object, when dst is not empty,
// and behind it the leader's control record.
func (g *get) begin(rt *route, at layout.Place, dst []byte) {
	g.n = 1
	a := &g.asks[0]
	a.slot, a.voter, a.leader, a.late = rt.slot, rt.self, true, false
	a.at, a.dst = at, dst
	rt.leader.submit(a)
}

// confirm waits until the leader's record and a quorum of voters bear the route out
// (reasonNone), or one of them refutes it, or too few answer in time. gen is the
// layout_gen that the addresses used were learnt under.
//
// Everything that it looks at was posted after the get began: asks are made by the
// get itself, and a flight takes only asks that are there when it is posted.
func (r *reading) confirm(rt *route, gen uint64) reason {
	g := r.g
	var gaveUpAt time.Time // zero until something was slow
	for {
		t := g.tally(rt, gen)
		switch {
		case t.refuted != reasonNone:
			return t.refuted
		case t.leader && (rt.quorum.reached(t.yes) || chaos.Broken(chaos.NoConfirmation)):
			r.c.count.confirmed.Add(1)
			a := &g.asks[0]
			a.s.replicas[g.sh.id].saw(&a.rec, 0)
			return reasonNone
		}
		if g.askVoters(rt, t.hope) {
			if !gaveUpAt.IsZero() {
				r.c.count.hedges.Add(1)
			}
			continue
		}
		if !t.outstanding {
			return t.doubt
		}
		limit := r.hedgeDelay(g)
		if !gaveUpAt.IsZero() {
			if limit = time.Until(gaveUpAt); limit <= 0 {
				return reasonSlow
			}
		}
		if g.await(r.ctx, limit) {
			continue
		}
		if r.ctx.Err() != nil {
			return reasonSlow
		}
		if gaveUpAt.IsZero() {
			gaveUpAt = time.Now().Add(limitFor(len(g.asks[0].dst)))
		}
		g.giveUpLate()
	}
}

// count of what the asks brought so far.
type tally struct {
	leader      bool   // the leader's record bears the route out
	yes         uint8  // voters that confirm, the leader among them
	hope        uint8  // yes, and those who may still
	outstanding bool   // some ask is
	refuted     reason // by the leader's record or connection
	doubt       reason // why voters did not confirm
}

// tally applies the rules of acceptance to the records that are there.
func (g *get) tally(rt *route, gen uint64) tally {
	t := tally{doubt: reasonVoters}
	for i := range g.n {
		a := &g.asks[i]
		if a.state.Load() != askDone {
			t.outstanding = true
			if !a.late {
				t.hope |= a.voter
			}
			continue
		}
		why := a.check(rt, gen)
		switch {
		case why == reasonNone:
			t.leader = t.leader || a.leader
			t.yes |= a.voter
			t.hope |= a.voter
		case a.leader:
			t.refuted = why
			return t
		case why == reasonTerm:
			t.doubt = reasonTerm
		}
	}
	return t
}

// check applies the rules to one record.
func (a *ask) check(rt *route, gen uint64) reason {
	switch {
	case a.err != nil:
		return readError(a.err)
	case !a.s.identifies(&a.rec, a.g.sh.id):
		return reasonIdentity
	case a.rec.Term > a.mustServe(rt):
		return reasonTerm
	case !a.leader:
		return reasonNone
	case a.rec.ServedTerm != a.mustServe(rt):
		return reasonTerm
	case a.rec.ConfigID != rt.configID && !chaos.Broken(chaos.ConfigIgnored):
		return reasonConfig
	case a.rec.LayoutGen != gen && !chaos.Broken(chaos.LayoutGenIgnored):
		return reasonLayout
	}
	return reasonNone
}

// mustServe is the term that the leader's record has to show, and no record may exceed.
func (a *ask) mustServe(rt *route) uint64 {
	if chaos.Broken(chaos.RouteWithObject) {
		if l := &a.g.asks[0]; l.state.Load() == askDone && l.rec.ServedTerm != 0 {
			return l.rec.ServedTerm
		}
	}
	return rt.term
}

// askVoters asks as many voters as a quorum still needs beyond hope; it tells
// whether it asked any.
func (g *get) askVoters(rt *route, hope uint8) (asked bool) {
	for !rt.quorum.reached(hope) {
		bit, s, slot := g.bestVoter(rt)
		if bit == 0 {
			return asked
		}
		a := &g.asks[g.n]
		g.n++
		a.slot, a.voter, a.leader, a.late = slot, bit, false, false
		a.dst = nil
		s.submit(a)
		hope |= bit
		asked = true
	}
	return asked
}

// bestVoter is the nearest voter that was not asked yet; bit 0: none is left.
func (g *get) bestVoter(rt *route) (bit uint8, best *session, slot uint32) {
	var tried uint8
	for i := range g.n {
		tried |= g.asks[i].voter
	}
	for i, id := range rt.voters {
		b := uint8(1) << i
		if b == rt.self || tried&b != 0 {
			continue
		}
		s := g.c.sessionOf(id)
		if s == nil || s.stalled.Load() > 0 {
			continue
		}
		if at, ok := s.slotOn(g.sh.id); ok && (best == nil || s.distance() < best.distance()) {
			bit, best, slot = b, s, at
		}
	}
	return bit, best, slot
}

// giveUpLate marks the voters that did not answer in time, so that others are asked.
// They are avoided until they answer something.
func (g *get) giveUpLate() {
	for i := range g.n {
		a := &g.asks[i]
		if a.late || a.state.Load() == askDone {
			continue
		}
		g.c.convoy.late(a)
		if a.leader {
			continue
		}
		a.late = true
		a.s.slow.Store(true)
	}
}

// hedgeDelay is how long the asks that are out may take before others are asked.
func (r *reading) hedgeDelay(g *get) time.Duration {
	usual := int64(0)
	for i := range g.n {
		if a := &g.asks[i]; a.state.Load() != askDone {
			usual = max(usual, a.s.latency.Load())
		}
	}
	return min(max(r.c.cfg.HedgeMin, time.Duration(3*usual)), attemptLimit)
}
