package raft

import (
	"errors"
	"fmt"
	"runtime/debug"
	"slices"

	etcdraft "go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/kvd-io/kvd/internal/chaos"
)

// process steps what the inbox holds and takes what the core then has ready. The
// caller has the group's turn.
func (g *Group) process(p *pass) {
	g.mu.Lock()
	in := g.inbox.take()
	if g.mu.stopped != nil {
		g.refuse(in)
		g.mu.Unlock()
		return
	}
	err := g.guard(func() error {
		g.rouseLocked(&in)
		if err := g.stepAllLocked(p, in); err != nil {
			return err
		}
		return g.drainLocked(p)
	})
	g.mu.Unlock()
	if err != nil {
		p.events = append(p.events, func() { g.h.fail(g, err) })
	}
}

// guard turns what the core throws into an error. It throws when its storage
// fails, and when it meets what must not be.
func (g *Group) guard(f func() error) (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case corePanic:
			err = fmt.Errorf("raft: group %d: the core stopped: %w", g.id, r)
		case error:
			err = fmt.Errorf("raft: group %d: the core stopped: %w\n%s", g.id, r, debug.Stack())
		default:
			err = fmt.Errorf("raft: group %d: the core stopped: %v\n%s", g.id, r, debug.Stack())
		}
	}()
	return f()
}

func (g *Group) stepAllLocked(p *pass, in work) error {
	for _, m := range in.local {
		_ = g.core.Step(m)
	}
	for _, a := range in.applied {
		g.finishApplyLocked(p, a)
	}
	for _, m := range in.messages {
		if err := g.stepMessageLocked(p, m); err != nil {
			return err
		}
	}
	if in.release {
		g.mu.held.listed = false
	}
	if in.release || len(in.lost) > 0 || len(in.transfers) > 0 {
		g.releaseLocked(p)
	}
	for range in.ticks {
		g.tickLocked()
	}
	for _, n := range in.lost {
		g.core.ReportUnreachable(uint64(n))
	}
	for _, op := range in.ops {
		op(g)
	}
	for _, t := range in.transfers {
		// Whether this replica leads must be up to date.
		if err := g.drainLocked(p); err != nil {
			return err
		}
		g.beginTransferLocked(t)
	}
	if len(in.reads) > 0 || len(in.proposals) > 0 {
		// Losing leadership must be seen before something new is accepted.
		if err := g.drainLocked(p); err != nil {
			return err
		}
		g.beginReadsLocked(in.reads)
		g.proposeLocked(in.proposals)
	}
	g.beginHandoverLocked()
	return nil
}

// stepMessageLocked steps a message from a peer, once it is known to be one which
// the core can take.
func (g *Group) stepMessageLocked(p *pass, gm GroupMessage) error {
	m := gm.Message
	err := g.checkMessageLocked(m)
	if errors.Is(err, errNeedsReady) {
		// It may be about entries which the core has and this host has not yet seen.
		if err := g.drainLocked(p); err != nil {
			return err
		}
		err = g.checkMessageLocked(m)
	}
	switch {
	case errors.Is(err, ErrLogLost):
		return err
	case err != nil:
		g.h.count.droppedInvalid.Add(1)
		g.h.log.Warn("raft: message dropped", "group", uint64(g.id), "err", err)
		return nil
	}
	if c := &g.mu.core; c.leadTerm != 0 && m.GetTerm() == c.leadTerm {
		g.mu.heard[NodeID(m.GetFrom())] = c.ticks
	}
	g.acknowledgedLocked(m)
	// Errors of Step are about messages of peers that are no longer members.
	_ = g.core.Step(m)
	g.mu.quiesce.asked = quiesceMark{}
	switch {
	case gm.Quiesce == 0:
	case m.GetType() == raftpb.MsgHeartbeat:
		g.mu.quiesce.asked = quiesceMark{m.GetFrom(), gm.Quiesce}
	case m.GetType() == raftpb.MsgHeartbeatResp && m.GetTerm() == g.mu.core.leadTerm:
		g.agreedLocked(NodeID(m.GetFrom()), gm.Quiesce)
	}
	return nil
}

func (g *Group) tickLocked() {
	if g.quiesced.Load() != 0 {
		return // it was on its way
	}
	g.core.Tick()
	chaos.RunLater(g)
	c := &g.mu.core
	c.ticks++
	g.checkTransfersLocked()
	if c.leadTerm != 0 {
		g.publishProgressLocked()
		g.offerLocked()
	}
	if c.ticks%truncateEveryTicks == 0 && (c.leadTerm == 0 || c.ticks-c.leadSince > uint64(g.h.cfg.ElectionTicks)) {
		g.considerTruncation() // who has just begun to lead does not know yet what others have
	}
}

// proposeLocked appends all proposals in one message, so that each follower gets
// one append for them.
func (g *Group) proposeLocked(all []*proposal) {
	batch := all[:0]
	to := g.handingOverLocked()
	for _, w := range all {
		if w.gone {
			continue
		}
		if g.mu.core.leadTerm == 0 {
			w.answer(outcome{err: ErrNotLeader})
			continue
		}
		if to != 0 {
			w.answer(outcome{err: fmt.Errorf("%w: leadership is about to be handed to node %d", ErrNotLeader, to)})
			continue
		}
		if w.conf != nil {
			g.proposeConfLocked(w)
			continue
		}
		batch = append(batch, w)
	}
	if len(batch) == 0 {
		return
	}
	if g.stepProposalsLocked(batch) == nil || len(batch) == 1 {
		return
	}
	// Too much together. One by one, as much as fits.
	for _, w := range batch {
		_ = g.stepProposalsLocked([]*proposal{w})
	}
}

// stepProposalsLocked answers a single proposal that is dropped; several are left
// for another try.
func (g *Group) stepProposalsLocked(ws []*proposal) error {
	m := &raftpb.Message{Type: raftpb.MsgProp.Enum(), From: new(uint64(g.h.cfg.NodeID))}
	m.Entries = make([]*raftpb.Entry, len(ws))
	for i, w := range ws {
		m.Entries[i] = w.entry
	}
	err := g.core.Step(m)
	switch {
	case err == nil:
		for i, w := range ws {
			if w.conf != nil && m.Entries[i].GetType() != raftpb.EntryConfChangeV2 {
				// The core put an empty entry in its place.
				w.answer(outcome{err: fmt.Errorf("raft: group %d: %w", g.id, ErrConfChangeRefused)})
				continue
			}
			w.term = g.mu.core.leadTerm
			g.mu.waiters[w.id] = w
		}
	case len(ws) == 1:
		ws[0].answer(outcome{err: g.whyDroppedLocked(err)})
	}
	return err
}

// whyDroppedLocked: the core has one error for all reasons.
func (g *Group) whyDroppedLocked(err error) error {
	if !errors.Is(err, etcdraft.ErrProposalDropped) {
		return fmt.Errorf("raft: group %d: propose: %w", g.id, err)
	}
	switch s := g.core.BasicStatus(); {
	case s.RaftState != etcdraft.StateLeader:
		return ErrNotLeader
	case s.LeadTransferee != 0:
		return fmt.Errorf("%w: leadership is being handed to node %d", ErrNotLeader, s.LeadTransferee)
	}
	return ErrOverloaded
}

// drainLocked takes everything that the core has ready.
func (g *Group) drainLocked(p *pass) error {
	for g.core.HasReady() {
		rd := g.core.Ready()
		g.publishLocked(p, &rd)
		for _, rs := range rd.ReadStates {
			g.confirmReadLocked(rs.RequestCtx, rs.Index)
		}
		g.mu.reads.release(g.applied.Load())
		if err := g.dispatchLocked(p, &rd); err != nil {
			return err
		}
	}
	return nil
}

// publishLocked makes known what a Ready says of term and leadership, before
// anything of that Ready is handed on. This order is what one-sided readers rest
// on: whoever sees an effect of a new term can also see the term.
func (g *Group) publishLocked(p *pass, rd *etcdraft.Ready) {
	c := &g.mu.core
	termChanged := false
	if rd.HardState != nil {
		g.commit.Store(rd.HardState.GetCommit())
		if t := rd.HardState.GetTerm(); t > c.term {
			c.term, termChanged = t, true
			if chaos.Enabled && chaos.Broken(chaos.TermAfterMessage) {
				chaos.Later(g, func() { g.sm.SetTerm(t) })
			} else {
				g.sm.SetTerm(t)
			}
			g.h.count.terms.Add(1)
		}
	}
	leads := c.leadTerm != 0
	if rd.SoftState != nil {
		c.lead = rd.SoftState.Lead
		leads = rd.SoftState.RaftState == etcdraft.StateLeader
	}
	leadTerm := uint64(0)
	if leads {
		leadTerm = c.term
	}
	if leadTerm != c.leadTerm {
		g.changeLeadTermLocked(leadTerm)
	}
	if rd.SoftState != nil || termChanged {
		g.publishRoleLocked(p)
		g.checkTransfersLocked()
	}
}

func (g *Group) changeLeadTermLocked(leadTerm uint64) {
	c := &g.mu.core
	if c.leadTerm != 0 {
		c.serving = 0
		g.sm.SetServing(0)
		if chaos.Broken(chaos.OldTermAcknowledged) {
			g.acknowledgeLocked()
		}
		g.failProposalsLocked(fmt.Errorf("%w: leadership was lost", ErrOutcomeUnknown))
		g.mu.reads.fail(ErrNotLeader)
		g.progress.Store(nil)
		g.h.late.dropGroup(g.id)
		g.mu.held.clear()
	}
	c.leadTerm, c.leadSince = leadTerm, c.ticks
	clear(g.mu.heard)
	c.readSeq = 0
	if leadTerm != 0 {
		if chaos.Broken(chaos.ServedEarly) {
			c.serving = leadTerm
			g.sm.SetServing(leadTerm)
		}
		g.h.count.leaderStarts.Add(1)
		g.h.log.Debug("raft: leads", "group", uint64(g.id), "term", leadTerm)
		g.publishProgressLocked()
	}
}

// dispatchLocked hands the messages of a Ready on: those for the disk to the log
// writer, committed entries to the apply queue, the rest to the pass. The two local
// queues are filled here, under the group's lock, since their order must be the
// order of the Readys; the goroutines behind are woken when the messages are sent.
func (g *Group) dispatchLocked(p *pass, rd *etcdraft.Ready) error {
	c := &g.mu.core
	if !etcdraft.IsEmptySnap(rd.Snapshot) {
		c.last = rd.Snapshot.GetMetadata().GetIndex()
	}
	if chaos.Broken(chaos.OldTermAcknowledged) {
		g.noteIndexesLocked(rd.Entries)
	}
	if n := len(rd.Entries); n > 0 {
		c.last = rd.Entries[n-1].GetIndex()
	}
	var requests []*raftpb.Message // for votes
	spare := g.spareLocked(rd)
	for _, m := range rd.Messages {
		switch m.GetTo() {
		case etcdraft.LocalAppendThread:
			g.queueAppendLocked(p, m, requests)
			requests = nil
		case etcdraft.LocalApplyThread:
			if g.apply.add(&applyTask{entries: m.GetEntries(), responses: m.GetResponses()}) {
				p.applies = append(p.applies, g)
			}
		default:
			gm, to := GroupMessage{Group: g.id, Message: m, Quiesce: g.markLocked(m)}, NodeID(m.GetTo())
			switch {
			case m.GetType() == raftpb.MsgSnap:
				delete(g.mu.held.appends, to)
				p.snaps = append(p.snaps, gm)
			case m.GetType() == raftpb.MsgVote:
				requests = append(requests, m)
			case slices.Contains(spare, to) && len(m.GetEntries()) > 0 && g.holdLocked(m):
			case g.putOffLocked(m):
			default:
				g.sendHeldLocked(p, to)
				g.askedLocked(m)
				p.out.add(to, gm)
			}
		}
	}
	if len(requests) > 0 {
		panic("raft: requests for votes without a term to be stored") // bug: of the core, which makes both in one step
	}
	return nil
}

// queueAppendLocked queues what a Ready has for the disk. The requests for votes of the
// same Ready leave when that is durable. The core would let them go at once and hold back
// its own vote alone; but then two others may elect a candidate whose disk hangs, and
// after a crash it knows nothing of its term: it may win the same one again, with other
// entries at the same index and term.
func (g *Group) queueAppendLocked(p *pass, m *raftpb.Message, requests []*raftpb.Message) {
	c := &g.mu.core
	w := &logWork{g: g, entries: m.GetEntries(), responses: m.GetResponses()}
	if !etcdraft.IsEmptySnap(m.GetSnapshot()) {
		w.snap = m.GetSnapshot()
	}
	quiet := g.sayNothingNewLocked(w.responses)
	lazy := quiet && len(w.entries) == 0 && w.snap == nil
	if m.GetTerm() != 0 || m.GetVote() != 0 || m.GetCommit() != 0 {
		w.hard = &raftpb.HardState{Term: m.Term, Vote: m.Vote, Commit: m.Commit}
		if !sameVote(w.hard, c.queuedHS) {
			lazy = false
		}
		c.queuedHS = w.hard
	}
	if len(requests) > 0 {
		w.responses = slices.Concat(w.responses, requests)
	}
	g.h.writer.queue(w)
	// A commit alone, with nobody who waits for an answer, is not worth waking the writer.
	if !lazy {
		p.wakeWriter = true
	}
}

// sameVote tells whether a and b differ at most in their commit.
func sameVote(a, b *raftpb.HardState) bool {
	return a.GetTerm() == b.GetTerm() && a.GetVote() == b.GetVote()
}

func (h *Host) sendSnapshot(gm GroupMessage) {
	h.count.snapsSent.Add(1)
	to := gm.Message.GetTo()
	h.log.Info("raft: sends a snapshot", "group", uint64(gm.Group), "to", to,
		"index", gm.Message.GetSnapshot().GetMetadata().GetIndex())
	h.cfg.Transport.SendSnapshot(NodeID(to), gm.Group, gm.Message, func(ok bool) {
		g := h.Group(gm.Group)
		if g == nil {
			return
		}
		status := etcdraft.SnapshotFinish
		if !ok {
			status = etcdraft.SnapshotFailure
			h.count.snapsFailed.Add(1)
		}
		g.inbox.addOp(func(g *Group) { g.core.ReportSnapshot(to, status) })
		g.kick()
	})
}
