package client

import (
	"context"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

const (
	// maxCandidates of one bucket: all of its slots may have the finger print.
	maxCandidates = layout.SlotsPerBucket
	// maxWalk bounds the buckets of one chain.
	maxWalk = 256
	// answerGuess is the room for the answer to a look-up whose length nobody knows.
	// A longer one is read through the buckets, which tell the length.
	answerGuess = 16 << 10
)

// found is what the buckets of a key's chain said so far.
type found struct {
	candidates [maxCandidates]layout.Slot // of the buckets read last
	n          int
	next       uint32 // bucket to be read next
	ended      bool   // there is none
	walked     int    // buckets read
	unsound    bool   // some bucket was being written, or is no bucket
	incomplete bool   // some bucket does not name all of its keys
}

// absence is reasonNone where the whole chain proves that a key which is none of
// the candidates is absent.
func (f *found) absence() reason {
	switch {
	case f.unsound:
		return reasonUnsound
	case f.incomplete:
		return reasonIncomplete
	}
	return reasonNone
}

// walk READs buckets of the key's chain until one names candidates or the chain
// ends. Calling it again goes on from there.
func (r *reading) walk(s *session, t layout.Table, f *found) reason {
	if f.walked == 0 {
		f.next = r.g.hash.HomeBucket(t.Buckets)
	}
	fp := r.g.hash.Fingerprint()
	for f.n = 0; f.n == 0 && !f.ended; f.walked++ {
		if f.walked == maxWalk {
			return reasonUnsound // longer than any chain: not one
		}
		at := layout.Place{Chunk: t.Place.Chunk, Offset: t.Offset(f.next)}
		if s.room(at.Chunk, at.Offset) < layout.BucketSize {
			return r.missingRegion(s, at.Chunk)
		}
		line := r.g.line[:]
		r.c.count.bucketReads.Add(1)
		if why := r.g.readOne(r.ctx, s, at, line, attemptLimit); why != reasonNone {
			return why
		}
		f.add(layout.DecodeBucket(line, t.ID, f.next), t, fp)
	}
	return reasonNone
}

// add takes in one bucket.
func (f *found) add(b layout.Bucket, t layout.Table, fp uint16) {
	f.unsound = f.unsound || !b.Sound
	f.incomplete = f.incomplete || b.Sound && !b.Complete()
	for _, slot := range b.Slots {
		if slot == 0 || slot.Fingerprint() != fp || layout.ClassSize(slot.Class()) == 0 || slot.Place().Chunk == 0 {
			continue
		}
		f.candidates[f.n] = slot
		f.n++
	}
	next, more := t.Next(b.Chain)
	f.next, f.ended = next, !more
	// A chain that leads out of the table is one that was being written.
	f.unsound = f.unsound || b.Chain != 0 && !more
}

// roomFor is a buffer for the object of the slot: its class's size, or less where
// the chunk ends before.
func (r *reading) roomFor(s *session, slot layout.Slot) ([]byte, reason) {
	at := slot.Place()
	room := s.room(at.Chunk, at.Offset)
	if room == 0 {
		return nil, r.missingRegion(s, at.Chunk)
	}
	n := min(uint64(layout.ClassSize(slot.Class())), room)
	if n < layout.HeaderSize {
		return nil, reasonTorn
	}
	return r.g.space(int(n)), reasonNone
}

// missingRegion asks for a chunk that a slot or table names and that is not known
// here: it was made since, or the name is garbage.
func (r *reading) missingRegion(s *session, chunk uint32) reason {
	r.bound()
	r.c.learnRegion(r.ctx, s, chunk)
	return reasonRegion
}

// attemptQuery lets the leader's node look the key up, in one round trip together
// with the confirmation. ok is false where the buckets must be read after all.
//
// The connection executes what is posted in order (see rdma.Querier), so the
// records, posted behind the query, are read after the look-up.
func (r *reading) attemptQuery(rt *route, info *replicaInfo) (v verdict, ok bool) {
	g, s := r.g, rt.leader
	g.postQuery(s, info.table)
	g.begin(rt, layout.Place{}, nil)
	g.askVoters(rt, rt.self)
	a, why := g.awaitAnswer(r.ctx, s)
	switch {
	case why == reasonTooLong:
		return failed, false
	case why != reasonNone:
		return r.fail(why), true
	}
	if why := r.confirm(rt, info.tableGen); why != reasonNone {
		return r.fail(why), true
	}
	switch a.Kind {
	case layout.AnswerFound:
		switch j := r.judge(a.Object, a.Place, 0); j {
		case live:
			r.remember(s, a.Place, info.tableGen)
			return present, true
		case expired:
			return r.noValue(rt), true
		default:
			return r.fail(j.reason()), true
		}
	case layout.AnswerAbsent:
		return r.noValue(rt), true
	case layout.AnswerIncomplete:
		return r.fail(reasonIncomplete), true
	case layout.AnswerBusy:
		return r.fail(reasonPending), true
	default: // the node does not know the table (any more)
		return r.fail(reasonLayout), true
	}
}

// postQuery starts a look-up of the get's key.
func (g *get) postQuery(s *session, t layout.Table) {
	g.query = layout.AppendQuery(g.query[:0], t, g.c.cluster().seed, g.key)
	var buf []byte
	if g.sunk = g.sink != nil; g.sunk {
		buf = g.sink.answer(len(g.key))
	} else {
		buf = g.own(max(cap(g.buf), answerGuess))
	}
	g.direct.Reset()
	g.reads[0] = rdma.Read{Dst: buf}
	g.direct.Reads = g.reads[:]
	g.bytes = len(buf)
	g.c.count.queries.Add(1)
	s.query.PostQuery(&g.direct, g.query)
}

// awaitAnswer waits for the look-up. Its object aliases the memory that postQuery chose.
func (g *get) awaitAnswer(ctx context.Context, s *session) (layout.Answer, reason) {
	if why := g.awaitDirect(ctx, s, attemptLimit); why != reasonNone {
		return layout.Answer{}, why
	}
	buf := g.reads[0].Dst
	return layout.DecodeAnswer(buf[:min(g.reads[0].N, len(buf))]), reasonNone
}
