package raft

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"go.etcd.io/raft/v3/raftpb"
)

// When entries are committed the core tells every follower at once, by an append
// without entries, which each of them acknowledges. A put would cost a follower four
// messages instead of two, and the next append carries the commit anyway. So such an
// append is put off for Config.CommitDelay. It leaves earlier with whatever else is
// sent to that node, of any group, but for acknowledgements: what a leader has to apply as
// a follower of another group would come just when it is about to answer a caller. It is
// dropped when its group sends another append there. To the protocol it is a message that was late or lost.
//
// Its acknowledgement says nothing new, and waits for the log writer's next batch: see
// sayNothingNewLocked.

// lateBox holds the messages that are put off.
type lateBox struct {
	wake chan struct{} // capacity 1: something is in it
	mu   struct {
		sync.Mutex
		to map[NodeID]map[GroupID]*raftpb.Message
	}
}

func (b *lateBox) init() {
	b.wake = make(chan struct{}, 1)
	b.mu.to = make(map[NodeID]map[GroupID]*raftpb.Message)
}

func (b *lateBox) put(g GroupID, m *raftpb.Message) {
	to := NodeID(m.GetTo())
	b.mu.Lock()
	if b.mu.to[to] == nil {
		b.mu.to[to] = make(map[GroupID]*raftpb.Message)
	}
	b.mu.to[to][g] = m
	b.mu.Unlock()
	signal(b.wake)
}

func (b *lateBox) drop(to NodeID, g GroupID) {
	b.mu.Lock()
	delete(b.mu.to[to], g)
	b.mu.Unlock()
}

// dropGroup forgets what a group no longer has to say.
func (b *lateBox) dropGroup(g GroupID) {
	b.mu.Lock()
	for _, of := range b.mu.to {
		delete(of, g)
	}
	b.mu.Unlock()
}

// take empties the box of what is for the node, and appends it to msgs, in order of
// the groups.
func (b *lateBox) take(to NodeID, msgs []GroupMessage) []GroupMessage {
	b.mu.Lock()
	defer b.mu.Unlock()
	of := b.mu.to[to]
	if len(of) == 0 {
		return msgs
	}
	for _, g := range slices.SortedFunc(maps.Keys(of), cmp.Compare) {
		msgs = append(msgs, GroupMessage{Group: g, Message: of[g]})
	}
	clear(of)
	return msgs
}

func (b *lateBox) nodes() []NodeID {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.SortedFunc(maps.Keys(b.mu.to), cmp.Compare)
}

// putOffLocked keeps m back if it is an append without entries. An append with
// entries takes the place of what was kept back.
func (g *Group) putOffLocked(m *raftpb.Message) bool {
	if g.h.cfg.CommitDelay <= 0 || m.GetType() != raftpb.MsgApp {
		return false
	}
	if len(m.GetEntries()) > 0 {
		g.h.late.drop(NodeID(m.GetTo()), g.id)
		return false
	}
	if !g.addCommitLocked(m) {
		g.h.late.put(g.id, m)
	}
	return true
}

// sayNothingNewLocked tells whether the answers acknowledge only what was
// acknowledged before: then nobody waits for them.
func (g *Group) sayNothingNewLocked(answers []*raftpb.Message) bool {
	if g.h.cfg.CommitDelay <= 0 {
		return len(answers) == 0
	}
	c := &g.mu.core
	nothing := true
	for _, m := range answers {
		if m.GetType() != raftpb.MsgAppResp || m.GetReject() || m.GetTo() == uint64(g.h.cfg.NodeID) {
			nothing = false
			continue
		}
		ack := acknowledged{to: m.GetTo(), term: m.GetTerm(), index: m.GetIndex()}
		if c.acked.to != ack.to || c.acked.term != ack.term || c.acked.index < ack.index {
			c.acked, nothing = ack, false
		}
	}
	return nothing
}

// acknowledged is the furthest that a follower told its leader of.
type acknowledged struct{ to, term, index uint64 }

// delayLoop sends by step, a delay after each wake, what has been kept back. What is kept
// back while it waits is sent with the rest, earlier than it need be.
func (h *Host) delayLoop(wake <-chan struct{}, delay time.Duration, step func() bool) {
	for {
		select {
		case <-wake:
		case <-h.done:
			return
		}
		t := h.cfg.Clock.NewTimer(delay)
		select {
		case <-t.C():
		case <-h.done:
			t.Stop()
			return
		}
		step()
	}
}

// lateStep sends what is put off now; false: nothing is.
func (h *Host) lateStep() (any bool) {
	for _, to := range h.late.nodes() {
		if msgs := h.late.take(to, nil); len(msgs) > 0 {
			h.send(to, msgs)
			any = true
		}
	}
	return any
}

// send hands messages to the transport. No lock may be held.
func (h *Host) send(to NodeID, msgs []GroupMessage) {
	h.count.sendCalls.Add(1)
	h.count.messagesOut.Add(uint64(len(msgs)))
	h.cfg.Transport.Send(to, msgs)
}
