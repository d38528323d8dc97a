package client

import (
	"time"

	"github.com/kvd-io/kvd/internal/chaos"
	"github.com/kvd-io/kvd/storage/layout"
)

// trustFor is how long a remembered address may be used without a control record
// that is READ with it. It must stay well below the time for which servers keep
// tables and slabs unchanged after they bumped layout_gen (10 s).
const trustFor = 2 * time.Second

// relaxed reads at the levels Session and Stale: any replica that is known to have
// applied enough, the nearest first. ok is false where none could answer: the
// confirmed read then does, whose promise is stronger.
//
// What the replica had applied must have been seen in an exchange that was complete
// before the object READ is posted. Then the object is at least as new as that.
func (r *reading) relaxed() (v Value, err error, ok bool) {
	replicas := r.c.nearest(r.g.sh, r.c.cfg.Clock.Now())
	need := r.needed()
	for _, slow := range [2]bool{false, true} { // who was slow only where nobody else can answer
		for _, s := range replicas {
			if s.ended.Load() || s.stalled.Load() > 0 || s.slow.Load() != slow {
				continue
			}
			switch r.attemptAt(s, need) {
			case present:
				v, err := r.accept(s)
				return v, err, true
			case absent:
				r.countGet(s)
				return Value{}, ErrNotFound, true
			}
			r.c.count.retries[r.why].Add(1)
			r.g = r.g.fresh()
			if err := r.alive(); err != nil {
				return Value{}, err, true
			}
		}
	}
	return Value{}, nil, false
}

// needed is the index that a replica must have applied.
func (r *reading) needed() uint64 {
	sh := r.g.sh
	if r.level == Session {
		return sh.index.Load()
	}
	if !r.lag.set {
		return 0
	}
	newest := sh.index.Load()
	for _, n := range *r.c.nodes.Load() {
		if s := n.sess.Load(); s != nil {
			newest = max(newest, s.replicas[sh.id].applied.Load())
		}
	}
	return newest - min(newest, r.lag.entries)
}

// attemptAt reads once at one replica, unconfirmed.
func (r *reading) attemptAt(s *session, need uint64) verdict {
	p := &s.replicas[r.g.sh.id]
	if p.applied.Load() < need || !r.trusted(p) {
		if why := r.readRecord(s); why != reasonNone {
			return r.fail(why)
		}
		if p.applied.Load() < need {
			return r.fail(reasonBehind)
		}
	}
	gen := p.gen.Load()
	if v, ok := r.attemptRemembered(s, p, gen); ok {
		return v
	}
	info := p.info.Load()
	if info == nil || info.table.ID == 0 {
		r.c.learnTableLater(r.g.sh, s)
		return r.fail(reasonNoTable)
	}
	if info.tableGen != gen {
		r.bound()
		r.c.learnTable(r.ctx, r.g.sh, s)
		if info = p.info.Load(); info.table.ID == 0 || info.tableGen != p.gen.Load() {
			return r.fail(reasonLayout)
		}
	}
	r.c.count.cacheMisses.Add(1)
	return r.attemptUnconfirmed(s, p, info)
}

// attemptRemembered reads where the object lay; ok is false where the location is
// not known or no longer right.
func (r *reading) attemptRemembered(s *session, p *replica, gen uint64) (verdict, bool) {
	g := r.g
	loc, ok := r.c.cache.get(g.hash, s.ord)
	if !ok || loc.gen != gen || s.room(loc.at.Chunk, loc.at.Offset) < uint64(loc.length) {
		return failed, false
	}
	r.c.count.cacheHits.Add(1)
	r.c.count.objectReads.Add(1)
	buf := g.space(int(loc.length))
	if why := g.readOne(r.ctx, s, loc.at, buf, limitFor(len(buf))); why != reasonNone {
		return r.fail(why), true
	}
	// Asked again after the READ: the process may have been stopped in between.
	if r.trusted(p) && p.gen.Load() == gen {
		switch r.judge(buf, loc.at, loc.version) {
		case live:
			return present, true
		case expired:
			// Not a proof of absence for a session: the value may have been replaced.
			return r.fail(reasonMoved), true
		}
	}
	r.c.cache.drop(g.hash, s.ord, loc)
	return failed, false
}

// attemptUnconfirmed looks the key up in the replica's index.
func (r *reading) attemptUnconfirmed(s *session, p *replica, info *replicaInfo) verdict {
	for f := (found{}); ; {
		if why := r.walk(s, info.table, &f); why != reasonNone {
			return r.fail(why)
		}
		for _, slot := range f.candidates[:f.n] {
			if v, ok := r.attemptSlotUnconfirmed(s, p, slot, info.tableGen); ok {
				return v
			}
			f.incomplete = true
		}
		if !f.ended {
			continue
		}
		if why := f.absence(); why != reasonNone {
			return r.fail(why)
		}
		return r.absentAt(s, p, info.tableGen)
	}
}

func (r *reading) attemptSlotUnconfirmed(s *session, p *replica, slot layout.Slot, gen uint64) (verdict, bool) {
	buf, why := r.roomFor(s, slot)
	if why != reasonNone {
		return r.fail(why), true
	}
	at := slot.Place()
	r.c.count.objectReads.Add(1)
	if why := r.g.readOne(r.ctx, s, at, buf, limitFor(len(buf))); why != reasonNone {
		return r.fail(why), true
	}
	if !r.trusted(p) || p.gen.Load() != gen {
		return r.fail(reasonLayout), true
	}
	switch j := r.judge(buf, at, 0); j {
	case live:
		r.remember(s, at, gen)
		return present, true
	case otherKey:
		if !r.isOthers(slot) {
			return r.fail(reasonMoved), true
		}
		return failed, false
	default:
		return r.fail(j.reason()), true
	}
}

// absentAt ends a look-up that found nothing. The session goes up to what a record
// READ behind the buckets says: whoever saw the absence must not be shown what
// preceded it.
func (r *reading) absentAt(s *session, p *replica, gen uint64) verdict {
	if r.level == Linearizable {
		return r.fail(reasonMoved) // an absence has to be confirmed
	}
	if why := r.readRecord(s); why != reasonNone {
		return r.fail(why)
	}
	rec, _ := layout.DecodeRecord(r.g.record[:])
	if rec.LayoutGen != gen && !chaos.Broken(chaos.LayoutGenIgnored) {
		return r.fail(reasonLayout)
	}
	raise(&r.g.sh.index, rec.Applied)
	return absent
}

// trusted tells whether the layout generation known of the replica is recent enough
// for its addresses to be used.
func (r *reading) trusted(p *replica) bool {
	return r.c.cfg.Clock.Now().UnixNano()-p.seenAt.Load() < int64(trustFor)
}

// readRecord READs the replica's record and takes it in.
func (r *reading) readRecord(s *session) reason {
	slot, ok := s.slotOn(r.g.sh.id)
	if !ok {
		return reasonNoTransport
	}
	began := r.c.cfg.Clock.Now().UnixNano()
	r.c.count.recordReads.Add(1)
	at := layout.Place{Offset: uint64(slot) * layout.RecordSize} // region 0: the control table
	if why := r.g.readOne(r.ctx, s, at, r.g.record[:], attemptLimit); why != reasonNone {
		return why
	}
	rec, _ := layout.DecodeRecord(r.g.record[:])
	if !s.identifies(&rec, r.g.sh.id) || rec.Term == layout.RetiredTerm {
		return reasonIdentity
	}
	s.replicas[r.g.sh.id].saw(&rec, began)
	return reasonNone
}

// immutable reads a key of an immutable namespace at the nearest replica: a present
// key never changes there, so a hit needs nobody's word. ok is false for anything
// but a hit.
func (r *reading) immutable() (v Value, err error, ok bool) {
	for _, s := range r.c.nearest(r.g.sh, r.c.cfg.Clock.Now()) {
		if s.ended.Load() || s.slow.Load() || s.stalled.Load() > 0 {
			continue
		}
		if r.attemptAt(s, 0) == present && r.object.Flags&layout.FlagImmutable != 0 {
			v, err := r.accept(s)
			return v, err, true
		}
		r.g = r.g.fresh()
		break // the confirmed read settles it
	}
	return Value{}, nil, false
}
