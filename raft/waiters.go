package raft

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sync/atomic"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// outcome answers a proposal or a read.
type outcome struct {
	value any
	index uint64
	err   error
}

// A normal entry's data begins with a header, by which the proposer finds who
// waits for it: its proposal's id and its node, 8 bytes each, big endian. Ids start
// at a random number in each run, so an entry that an earlier run left in the log
// answers nobody. A configuration entry has the same bytes as its context.
const headerBytes = 16

func putHeader(b []byte, id uint64, node NodeID) {
	binary.BigEndian.PutUint64(b, id)
	binary.BigEndian.PutUint64(b[8:], uint64(node))
}

func header(b []byte) (id uint64, node NodeID, ok bool) {
	if len(b) < headerBytes {
		return 0, 0, false
	}
	return binary.BigEndian.Uint64(b), NodeID(binary.BigEndian.Uint64(b[8:])), true
}

// proposal waits for its entry to be applied.
type proposal struct {
	id    uint64
	entry *raftpb.Entry // ours until proposed, then the core's
	conf  *raftpb.ConfChangeV2
	done  chan outcome // capacity 1, sent to once

	// Guarded by the group's lock.
	term  uint64 // in which it was proposed; 0: not yet
	gone  bool   // nobody waits any more
	ended bool
}

func (g *Group) newProposal(data []byte) *proposal {
	w := &proposal{id: g.h.ids.Add(1), done: make(chan outcome, 1)}
	b := make([]byte, headerBytes+len(data))
	putHeader(b, w.id, g.h.cfg.NodeID)
	copy(b[headerBytes:], data)
	w.entry = &raftpb.Entry{Type: raftpb.EntryNormal.Enum(), Data: b}
	return w
}

func (g *Group) newConfProposal(cc *raftpb.ConfChangeV2) (*proposal, error) {
	w := &proposal{id: g.h.ids.Add(1), done: make(chan outcome, 1)}
	w.conf = proto.Clone(cc).(*raftpb.ConfChangeV2)
	w.conf.Context = make([]byte, headerBytes)
	putHeader(w.conf.Context, w.id, g.h.cfg.NodeID)
	data, err := proto.Marshal(w.conf)
	if err != nil {
		return nil, fmt.Errorf("raft: group %d: encode configuration change: %w", g.id, err)
	}
	w.entry = &raftpb.Entry{Type: raftpb.EntryConfChangeV2.Enum(), Data: data}
	return w, nil
}

func (w *proposal) answer(o outcome) {
	if !w.ended {
		w.ended = true
		w.done <- o
	}
}

// abandon is called when the caller of w stops waiting.
func (g *Group) abandon(w *proposal, cause error) outcome {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w.ended {
		return <-w.done
	}
	w.gone = true
	if w.term == 0 {
		return outcome{err: cause} // it will be left out
	}
	delete(g.mu.waiters, w.id)
	return outcome{err: fmt.Errorf("%w: %w", ErrOutcomeUnknown, cause)}
}

// resolveLocked answers who waits for the entry with that header. An entry answers
// only in the term in which it was proposed: with another term it is not the entry
// that this replica appended as leader.
func (g *Group) resolveLocked(hdr []byte, e *raftpb.Entry, value any) {
	id, node, ok := header(hdr)
	if !ok || node != g.h.cfg.NodeID {
		return
	}
	w := g.mu.waiters[id]
	if w == nil {
		return
	}
	delete(g.mu.waiters, id)
	if w.term != e.GetTerm() {
		w.answer(outcome{err: fmt.Errorf("%w: proposed in term %d, applied in term %d", ErrOutcomeUnknown, w.term, e.GetTerm())})
		return
	}
	o := outcome{value: value, index: e.GetIndex()}
	if err, ok := value.(error); ok && w.conf != nil {
		o = outcome{err: err}
	}
	w.answer(o)
}

// noteIndexesLocked remembers where proposals came to lie, for acknowledgeLocked.
func (g *Group) noteIndexesLocked(entries []*raftpb.Entry) {
	for _, e := range entries {
		if id, _, ok := header(e.GetData()); ok && g.mu.waiters[id] != nil {
			g.mu.waiters[id].entry.Index = new(e.GetIndex())
		}
	}
}

// acknowledgeLocked acknowledges what was proposed, for a broken variant alone: another
// leader's entries may come to lie there.
func (g *Group) acknowledgeLocked() {
	for id, w := range g.mu.waiters {
		if index := w.entry.GetIndex(); index > 0 {
			delete(g.mu.waiters, id)
			w.answer(outcome{index: index})
		}
	}
}

func (g *Group) failProposalsLocked(err error) {
	for id, w := range g.mu.waiters {
		delete(g.mu.waiters, id)
		w.answer(outcome{err: err})
	}
}

// read waits for an index that a quorum confirms.
type read struct {
	done chan outcome // capacity 1, sent to once
	gone atomic.Bool
}

func (r *read) answer(o outcome) { r.done <- o }

// readers are the reads of one group, in three stages: in the inbox, asked of a
// quorum (by round), confirmed but not yet applied.
type readers struct {
	asked     map[uint64][]*read
	confirmed []confirmedReads // indexes ascending
}

type confirmedReads struct {
	index uint64
	reads []*read
}

func (r *readers) fail(err error) {
	for _, rs := range r.asked {
		answerReads(rs, outcome{err: err})
	}
	for _, c := range r.confirmed {
		answerReads(c.reads, outcome{err: err})
	}
	*r = readers{}
}

func answerReads(rs []*read, o outcome) {
	for _, r := range rs {
		r.answer(o)
	}
}

// release answers the reads that applied covers.
func (r *readers) release(applied uint64) {
	n := 0
	for n < len(r.confirmed) && r.confirmed[n].index <= applied {
		answerReads(r.confirmed[n].reads, outcome{index: r.confirmed[n].index})
		n++
	}
	r.confirmed = r.confirmed[n:]
}

// beginReadsLocked asks a quorum once for all reads that came since the last time.
func (g *Group) beginReadsLocked(reads []*read) {
	c := &g.mu.core
	live := reads[:0]
	for _, r := range reads {
		if !r.gone.Load() {
			live = append(live, r)
		}
	}
	switch {
	case len(live) == 0:
		return
	case c.leadTerm == 0:
		answerReads(live, outcome{err: ErrNotLeader})
		return
	case c.serving != c.leadTerm:
		answerReads(live, outcome{err: ErrNotReady})
		return
	}
	c.readSeq++
	id := g.h.ids.Add(1)
	if g.mu.reads.asked == nil {
		g.mu.reads.asked = make(map[uint64][]*read)
	}
	g.mu.reads.asked[id] = live
	g.h.count.readRounds.Add(1)
	g.core.ReadIndex(binary.BigEndian.AppendUint64(nil, id))
}

// confirmReadLocked is called when a quorum has confirmed a round.
func (g *Group) confirmReadLocked(ctx []byte, index uint64) {
	if len(ctx) != 8 {
		return
	}
	id := binary.BigEndian.Uint64(ctx)
	rs := g.mu.reads.asked[id]
	if rs == nil {
		return
	}
	delete(g.mu.reads.asked, id)
	g.mu.reads.confirmed = append(g.mu.reads.confirmed, confirmedReads{index, rs})
}

// transfer waits for another replica to lead.
type transfer struct {
	to       NodeID
	begun    bool   // the core was told
	patience uint64 // in ticks of the group: it is told then, whatever is under way
	deadline uint64 // in ticks of the group
	done     chan error
}

func (g *Group) beginTransferLocked(t *transfer) {
	c := &g.mu.core
	switch {
	case c.leadTerm == 0:
		t.done <- ErrNotLeader
	case t.to == g.h.cfg.NodeID:
		t.done <- nil
	case !slices.Contains(g.config.Load().conf.GetVoters(), uint64(t.to)):
		t.done <- fmt.Errorf("raft: group %d: node %d is not a voter: %w", g.id, t.to, ErrTransfer)
	default:
		t.deadline = c.ticks + 2*uint64(g.h.cfg.ElectionTicks)
		t.patience = c.ticks + uint64(g.h.cfg.ElectionTicks)/2
		g.mu.handover = append(g.mu.handover, t)
	}
}

// beginHandoverLocked tells the core of transfers, once everything that was proposed is
// applied: what is under way when leadership goes has an unknown outcome. Nothing new is
// taken meanwhile.
func (g *Group) beginHandoverLocked() {
	c := &g.mu.core
	for _, t := range g.mu.handover {
		if !t.begun && c.leadTerm != 0 && (len(g.mu.waiters) == 0 || c.ticks >= t.patience) {
			t.begun = true
			g.core.TransferLeader(uint64(t.to))
		}
	}
}

// handingOverLocked is the node to which leadership is about to go, or 0.
func (g *Group) handingOverLocked() NodeID {
	for _, t := range g.mu.handover {
		if !t.begun {
			return t.to
		}
	}
	return 0
}

// leaveToOthersLocked hands leadership to the follower that has most of the log.
// It is called while this node's disk hangs: its heartbeats still go out, so nobody
// else would think of an election, but it can apply nothing and answer nobody.
func (g *Group) leaveToOthersLocked() {
	if g.mu.core.leadTerm == 0 {
		return
	}
	g.publishProgressLocked()
	var best FollowerProgress
	for _, f := range *g.progress.Load() {
		if f.Active && !f.Learner && !f.Snapshot && f.Match > best.Match {
			best = f
		}
	}
	if best.Node != 0 {
		g.core.TransferLeader(uint64(best.Node)) // again: no effect
	}
}

// checkTransfersLocked answers those whose end is known.
func (g *Group) checkTransfersLocked() {
	c := &g.mu.core
	rest := g.mu.handover[:0]
	for _, t := range g.mu.handover {
		switch {
		case c.lead == uint64(t.to):
			t.done <- nil
		case c.lead != 0 && c.lead != uint64(g.h.cfg.NodeID):
			t.done <- fmt.Errorf("raft: group %d: node %d was elected instead: %w", g.id, c.lead, ErrTransfer)
		case c.ticks >= t.deadline:
			t.done <- fmt.Errorf("raft: group %d: node %d did not take over in time: %w", g.id, t.to, ErrTransfer)
		default:
			rest = append(rest, t)
		}
	}
	clear(g.mu.handover[len(rest):])
	g.mu.handover = rest
}

func (g *Group) failTransfersLocked(err error) {
	for _, t := range g.mu.handover {
		t.done <- err
	}
	g.mu.handover = nil
}
