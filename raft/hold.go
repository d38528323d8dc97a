package raft

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	etcdraft "go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
)

// An entry is committed when a quorum has it, and the core sends it to everybody. While
// a group has nothing else under way, only as many followers as the quorum needs get it
// at once, the ones that acknowledged soonest of late. For the others the append is held
// back, for Config.HoldDelay at most; what comes meanwhile joins it, so that they get
// and sync several entries at a time. A put then costs a follower less work, and less of
// it falls into the time in which somebody waits for the answer.
//
// To the protocol a held append is a message on its way. It leaves, in its place before
// whatever else its group sends to that node, with the first of
//
//   - the timer: where a chosen follower fails to answer, that is when others are asked;
//   - an append that is not held, as when the group has more under way;
//   - any other message of the group to that node, as a heartbeat;
//   - the loss of messages to whomever, and the wish to hand leadership over.
//
// With leadership it is dropped.

// holds are the groups that hold appends back, and how soon nodes acknowledge.
type holds struct {
	wake chan struct{} // capacity 1: a group is in it
	mu   struct {
		sync.Mutex
		groups []*Group
		pace   map[NodeID]time.Duration
	}
}

func (h *holds) init() {
	h.wake = make(chan struct{}, 1)
	h.mu.pace = make(map[NodeID]time.Duration)
}

func (h *holds) add(g *Group) {
	h.mu.Lock()
	h.mu.groups = append(h.mu.groups, g)
	h.mu.Unlock()
	signal(h.wake)
}

// take gives the groups, in order of their ids.
func (h *holds) take() []*Group {
	h.mu.Lock()
	groups := h.mu.groups
	h.mu.groups = nil
	h.mu.Unlock()
	slices.SortFunc(groups, byID)
	return groups
}

// acknowledged takes in how long a node took.
func (h *holds) acknowledged(n NodeID, took time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if old, ok := h.mu.pace[n]; ok {
		took = old + (took-old)/8
	}
	h.mu.pace[n] = took
}

// soonest sorts the nodes by what their next acknowledgement is expected to take. Those
// in favour go before others that are hardly better: a change costs one slow write.
func (h *holds) soonest(nodes, favour []NodeID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	expected := func(n NodeID) time.Duration {
		d := h.mu.pace[n]
		if !slices.Contains(favour, n) {
			d += d / 2
		}
		return d
	}
	inFavour := func(a, b NodeID) int {
		switch fa, fb := slices.Contains(favour, a), slices.Contains(favour, b); {
		case fa && !fb:
			return 1
		case fb && !fa:
			return -1
		}
		return 0
	}
	slices.SortFunc(nodes, func(a, b NodeID) int {
		return cmp.Or(cmp.Compare(expected(a), expected(b)), -inFavour(a, b), cmp.Compare(a, b))
	})
}

// heldState is what a leading group holds back. Guarded by the group's lock.
type heldState struct {
	appends map[NodeID]*raftpb.Message
	chosen  []NodeID // who was asked at once the last time
	// asked is what a node was sent and has not acknowledged yet.
	asked  map[NodeID]askedAppend
	listed bool // in the host's holds
}

type askedAppend struct {
	index uint64
	at    time.Time
}

func (s *heldState) clear() {
	clear(s.appends)
	clear(s.asked)
	s.chosen = nil
}

// spareLocked returns the followers that can wait for the entry of the Ready: it must be
// the only one that is under way.
func (g *Group) spareLocked(rd *etcdraft.Ready) []NodeID {
	n := len(rd.Entries)
	if n != 1 || g.h.cfg.HoldDelay <= 0 || g.mu.core.leadTerm == 0 {
		return nil
	}
	last := rd.Entries[0].GetIndex()
	before := last - 1
	conf := g.config.Load().conf
	if before != g.commit.Load() || len(conf.GetVotersOutgoing()) > 0 {
		return nil
	}
	self := uint64(g.h.cfg.NodeID)
	need := len(conf.GetVoters())/2 + 1
	if slices.Contains(conf.GetVoters(), self) {
		need--
	}
	s := &g.mu.held
	var can, ready []NodeID
	g.core.WithProgress(func(id uint64, t etcdraft.ProgressType, pr tracker.Progress) {
		if id == self || t != etcdraft.ProgressTypePeer || pr.State != tracker.StateReplicate || pr.Next != last+1 {
			return
		}
		can = append(can, NodeID(id))
		sent := before
		if m := s.appends[NodeID(id)]; m != nil {
			sent = m.GetIndex()
		}
		if pr.Match == sent { // it owes no answer
			ready = append(ready, NodeID(id))
		}
	})
	if len(ready) < need || len(can) == need {
		return nil
	}
	g.h.holds.soonest(ready, s.chosen)
	s.chosen = ready[:need]
	return slices.DeleteFunc(can, func(n NodeID) bool { return slices.Contains(s.chosen, n) })
}

// holdLocked holds an append back, until the timer at the latest. It returns false where
// what is held would become too large.
func (g *Group) holdLocked(m *raftpb.Message) bool {
	s, to := &g.mu.held, NodeID(m.GetTo())
	g.h.late.drop(to, g.id) // the append brings that commit too
	switch old := s.appends[to]; {
	case old == nil || !continues(old, m):
		// What was held is void where the core begins anew.
		if s.appends == nil {
			s.appends = make(map[NodeID]*raftpb.Message)
		}
		s.appends[to] = m
	case entriesSize(old.GetEntries())+entriesSize(m.GetEntries()) > g.h.cfg.MaxMessageBytes:
		return false
	default:
		// Never in place: the core has a use for its slices.
		old.Entries = slices.Concat(old.GetEntries(), m.GetEntries())
		old.Commit = m.Commit
	}
	if !s.listed {
		s.listed = true
		g.h.holds.add(g)
	}
	return true
}

// continues tells whether m begins where the entries of old end.
func continues(old, m *raftpb.Message) bool {
	return old.GetTerm() == m.GetTerm() && old.GetIndex()+uint64(len(old.GetEntries())) == m.GetIndex()
}

func entriesSize(entries []*raftpb.Entry) (size uint64) {
	for _, e := range entries {
		size += uint64(len(e.GetData()))
	}
	return size
}

// addCommitLocked gives what is held for the node of m, an append without entries, that
// one's commit. False: nothing is held there.
func (g *Group) addCommitLocked(m *raftpb.Message) bool {
	old := g.mu.held.appends[NodeID(m.GetTo())]
	if old == nil || !continues(old, m) {
		return false
	}
	old.Commit = m.Commit
	return true
}

// sendHeldLocked sends what is held for the node, before something else of the group.
func (g *Group) sendHeldLocked(p *pass, to NodeID) {
	s := &g.mu.held
	m := s.appends[to]
	if m == nil {
		return
	}
	delete(s.appends, to)
	g.askedLocked(m)
	p.out.add(to, GroupMessage{Group: g.id, Message: m})
}

// releaseLocked sends all that is held.
func (g *Group) releaseLocked(p *pass) {
	for _, to := range slices.Sorted(maps.Keys(g.mu.held.appends)) {
		g.sendHeldLocked(p, to)
	}
}

// askedLocked begins to measure how long a node takes to acknowledge, unless it is
// being measured already.
func (g *Group) askedLocked(m *raftpb.Message) {
	n, s, to := len(m.GetEntries()), &g.mu.held, NodeID(m.GetTo())
	if _, ok := s.asked[to]; ok || n == 0 || g.h.cfg.HoldDelay <= 0 {
		return
	}
	if s.asked == nil {
		s.asked = make(map[NodeID]askedAppend)
	}
	s.asked[to] = askedAppend{m.GetEntries()[n-1].GetIndex(), g.h.cfg.Clock.Now()}
}

// acknowledgedLocked ends it.
func (g *Group) acknowledgedLocked(m *raftpb.Message) {
	from := NodeID(m.GetFrom())
	a, ok := g.mu.held.asked[from]
	if !ok || m.GetType() != raftpb.MsgAppResp || m.GetTerm() != g.mu.core.term {
		return
	}
	if m.GetReject() || m.GetIndex() >= a.index {
		delete(g.mu.held.asked, from)
	}
	if !m.GetReject() && m.GetIndex() >= a.index {
		g.h.holds.acknowledged(from, g.h.cfg.Clock.Now().Sub(a.at))
	}
}

// holdStep sends what is held now; false: nothing is. It goes by the groups' turns, so
// that what they send meanwhile comes behind.
func (h *Host) holdStep() bool {
	groups := h.holds.take()
	p := h.newPass()
	for _, g := range groups {
		g.inbox.addRelease()
		p.add(g)
	}
	p.run()
	return len(groups) > 0
}
