package raft

import (
	etcdraft "go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
)

// A group that has nothing to do is quiesced: no replica of it ticks, and no message of
// it is sent. The heartbeats between nodes stand for its own then.
//
//  1. A leader that had nothing to do for Config.QuiesceTicks, and whose followers all
//     have the whole log and are heard, marks its heartbeats with the log's last index,
//     which is committed.
//  2. A follower to which that is true as well, and which hears the leader's node,
//     quiesces and marks its answer. One that knows no marks answers without.
//  3. When all have agreed to the same round of heartbeats, the leader quiesces.
//
// So when a leader is quiesced, everybody is; and a follower that is while the leader
// is not lives on the leader's heartbeats, as always. Whatever else comes wakes a replica:
// a proposal, a read, any other message of a peer, a connection that broke. So does a
// node that was not heard for an election timeout or that was started anew: the
// leader's node wakes its followers, a follower's its leaders. A leader that woke goes on
// with heartbeats without a mark, and they wake the others.
//
// Nothing here is relied upon for safety: to the protocol a quiesced replica is one whose
// clock is slow.

// quiesceState is guarded by the group's lock.
type quiesceState struct {
	busyAt uint64 // leader, in ticks: when there was something to do last
	// offer is the index with which a leader marks the heartbeats of this tick; 0: not.
	offer  uint64
	boots  uint64 // what was heard, before it was looked whether all live
	agreed []NodeID

	asked quiesceMark // follower: what the leader's last message was marked with
}

type quiesceMark struct{ from, index uint64 }

// rouseLocked wakes a quiesced group if one of the things in the inbox is a reason to.
func (g *Group) rouseLocked(in *work) {
	q := &g.mu.quiesce
	if g.busiesLocked(in) {
		q.busyAt, q.offer = g.mu.core.ticks, 0
	}
	if g.quiesced.Load() != 0 && (in.wake || g.wakesLocked(in)) {
		g.wakeLocked()
	}
}

// busiesLocked: a leader has more to do than to listen to the answers to its heartbeats.
func (g *Group) busiesLocked(in *work) bool {
	for _, gm := range in.messages {
		if m := gm.Message; m.GetType() != raftpb.MsgHeartbeatResp || m.GetTerm() != g.mu.core.leadTerm {
			return true
		}
	}
	return len(in.applied) > 0 || in.begins()
}

// begins: what callers and transport ask for.
func (w *work) begins() bool {
	return len(w.ops)+len(w.lost)+len(w.transfers)+len(w.reads)+len(w.proposals) > 0
}

func (g *Group) wakesLocked(in *work) bool {
	c := &g.mu.core
	for _, gm := range in.messages {
		m := gm.Message
		switch agrees := gm.Quiesce != 0 && gm.Quiesce == c.last && m.GetTerm() == c.term; {
		case agrees && m.GetType() == raftpb.MsgHeartbeatResp && c.leadTerm != 0:
		case agrees && m.GetType() == raftpb.MsgHeartbeat:
		default:
			return true
		}
	}
	return in.begins()
}

// hears tells whether a node was heard within an election timeout.
func (h *Host) hears(n NodeID) bool { return h.live.silence(n) < uint64(h.cfg.ElectionTicks) }

// wakeLocked goes on as if the group had ticked all the time, and the heartbeats of the
// nodes had been its own.
func (g *Group) wakeLocked() {
	c := &g.mu.core
	g.quiesced.Store(0)
	g.h.count.wakes.Add(1)
	g.mu.quiesce.busyAt, g.mu.quiesce.offer = c.ticks, 0
	if c.leadTerm != 0 {
		// It has heard of all since it began to lead: without that it would not have quiesced.
		c.leadSince = min(c.leadSince, c.ticks-uint64(g.h.cfg.ElectionTicks)-1)
		g.config.Load().eachOther(g.h.cfg.NodeID, func(n NodeID) {
			g.mu.heard[n] = c.ticks - min(g.h.live.silence(n), uint64(g.h.cfg.ElectionTicks)+1)
		})
		return
	}
	// The last tick of an election timeout is left to the ticker: what woke the group may be
	// a message of the leader.
	for range min(g.h.live.silence(NodeID(c.lead)), uint64(g.h.cfg.ElectionTicks)-1) {
		g.core.Tick()
	}
}

// offerLocked decides at a leader's tick whether its heartbeats are marked.
func (g *Group) offerLocked() {
	q := &g.mu.quiesce
	q.offer, q.agreed = 0, q.agreed[:0]
	q.boots = g.h.live.boots()
	if !g.idleLocked() {
		return
	}
	q.offer = g.mu.core.last
	g.quiesceIfAgreedLocked() // it may be alone
}

// idleLocked tells whether a leader has nothing to do, its followers have everything, and
// all of them live.
func (g *Group) idleLocked() bool {
	c, ticks := &g.mu.core, uint64(g.h.cfg.QuiesceTicks)
	if g.h.cfg.QuiesceTicks <= 0 || c.leadTerm == 0 || c.ticks-c.leadSince < ticks || c.ticks-g.mu.quiesce.busyAt < ticks {
		return false
	}
	// What is proposed, read, or not yet known to be committed shows in these: all of the
	// log is applied, the own term's first entry too.
	if g.applied.Load() != c.last || len(g.mu.handover) > 0 || g.core.BasicStatus().LeadTransferee != 0 {
		return false
	}
	idle := true
	g.core.WithProgress(func(id uint64, _ etcdraft.ProgressType, pr tracker.Progress) {
		if pr.Match != c.last {
			idle = false
		}
		if id != uint64(g.h.cfg.NodeID) && (pr.State != tracker.StateReplicate || !g.h.hears(NodeID(id))) {
			idle = false
		}
	})
	return idle
}

// agreedLocked is told of a heartbeat's answer that was marked.
func (g *Group) agreedLocked(from NodeID, index uint64) {
	q := &g.mu.quiesce
	if q.offer == 0 || index != q.offer {
		return
	}
	q.agreed = append(q.agreed, from)
	g.quiesceIfAgreedLocked()
}

func (g *Group) quiesceIfAgreedLocked() {
	q, all := &g.mu.quiesce, true
	g.config.Load().eachOther(g.h.cfg.NodeID, func(n NodeID) {
		found := false
		for _, a := range q.agreed {
			found = found || a == n
		}
		all = all && found
	})
	if all {
		g.quiesced.Store(q.boots + 1)
	}
}

// markLocked is what a message to a peer is marked with. Of a follower that agrees it is
// the moment in which it quiesces: the Ready that brought the answer has also said what
// this replica knows.
func (g *Group) markLocked(m *raftpb.Message) uint64 {
	q := &g.mu.quiesce
	switch {
	case m.GetType() == raftpb.MsgHeartbeat:
		return q.offer
	case m.GetType() == raftpb.MsgHeartbeatResp && m.GetTo() == q.asked.from && g.agreesLocked():
		return q.asked.index
	}
	return 0
}

func (g *Group) agreesLocked() bool {
	c, a := &g.mu.core, g.mu.quiesce.asked
	boots := g.h.live.boots()
	if g.h.cfg.QuiesceTicks <= 0 || a.index == 0 || c.lead != a.from || c.leadTerm != 0 || c.last != a.index ||
		g.commit.Load() != a.index || !g.h.hears(NodeID(a.from)) {
		return false
	}
	g.quiesced.Store(boots + 1)
	return true
}

// eachOther calls f for the nodes of the configuration but for self; twice for some, where
// it is joint.
func (c *config) eachOther(self NodeID, f func(NodeID)) {
	for _, ids := range [...][]uint64{c.conf.GetVoters(), c.conf.GetVotersOutgoing(), c.conf.GetLearners(), c.conf.GetLearnersNext()} {
		for _, id := range ids {
			if NodeID(id) != self {
				f(NodeID(id))
			}
		}
	}
}

func (c *config) has(n NodeID) (found bool) {
	c.eachOther(0, func(m NodeID) { found = found || m == n })
	return found
}
