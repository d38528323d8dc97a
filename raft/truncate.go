package raft

import (
	"errors"
	"fmt"
	"sync"

	etcdraft "go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
)

// truncateEveryTicks is how often a group looks at the length of its log.
const truncateEveryTicks = 8

// logSize knows roughly how many bytes of the log lie behind an index: it
// remembers marks, one for each stretch of at least markBytes. Entries from before
// the start are not counted.
type logSize struct {
	mu struct {
		sync.Mutex
		marks []logMark // indexes ascending
	}
}

type logMark struct {
	last  uint64 // of the stretch
	bytes uint64
}

const (
	markBytes = 256 << 10
	// entryBytes is about what an entry takes beside its data.
	entryBytes = 32
)

func (s *logSize) add(entries []*raftpb.Entry) {
	bytes := uint64(0)
	for _, e := range entries {
		bytes += uint64(len(e.GetData())) + entryBytes
	}
	first, last := entries[0].GetIndex(), entries[len(entries)-1].GetIndex()
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := len(s.mu.marks); n > 0 && s.mu.marks[n-1].last >= first; n = len(s.mu.marks) {
		s.mu.marks = s.mu.marks[:n-1] // overwritten
	}
	if n := len(s.mu.marks); n > 0 && s.mu.marks[n-1].bytes < markBytes {
		s.mu.marks[n-1].last = last
		s.mu.marks[n-1].bytes += bytes
		return
	}
	s.mu.marks = append(s.mu.marks, logMark{last, bytes})
}

func (s *logSize) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.marks = nil
}

func (s *logSize) cut(index uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for n < len(s.mu.marks) && s.mu.marks[n].last <= index {
		n++
	}
	s.mu.marks = append([]logMark(nil), s.mu.marks[n:]...)
}

// keep returns the lowest index up to which the log may be cut and still hold at
// least limit bytes; 0 if it is shorter than that.
func (s *logSize) keep(limit uint64) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	sum := uint64(0)
	for i := len(s.mu.marks) - 1; i >= 0; i-- {
		if sum >= limit {
			return s.mu.marks[i].last
		}
		sum += s.mu.marks[i].bytes
	}
	return 0
}

// after returns about how many bytes lie behind the index.
func (s *logSize) after(index uint64) (sum uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := len(s.mu.marks) - 1; i >= 0 && s.mu.marks[i].last > index; i-- {
		sum += s.mu.marks[i].bytes
	}
	return sum
}

// logNeeds are followers that get a snapshot, or are to go on with one whose stream
// broke: what they will need of the log begins behind it, wherever they are themselves.
type logNeeds struct {
	mu struct {
		sync.Mutex
		at map[NodeID]logNeed
	}
}

type logNeed struct {
	index uint64
	sent  bool // the follower has the snapshot, and does not show it yet
}

// KeepLog tells that a snapshot at the index is being sent to a node, or is kept for it:
// the log behind it is kept as it is for a live follower at that index. One for each node
// counts, the last. It ends with ReleaseLog.
func (g *Group) KeepLog(to NodeID, index uint64) {
	g.needs.mu.Lock()
	defer g.needs.mu.Unlock()
	if g.needs.mu.at == nil {
		g.needs.mu.at = map[NodeID]logNeed{}
	}
	g.needs.mu.at[to] = logNeed{index: index}
}

// ReleaseLog ends what KeepLog began. If the node took the snapshot that is when it
// acknowledges its index, or is silent.
func (g *Group) ReleaseLog(to NodeID, took bool) {
	g.needs.mu.Lock()
	defer g.needs.mu.Unlock()
	need, ok := g.needs.mu.at[to]
	if need.sent = true; ok && took {
		g.needs.mu.at[to] = need
		return
	}
	delete(g.needs.mu.at, to)
}

// positions are the indexes behind which followers need the log. It is the leader's
// business alone: others keep what LogRetain says.
func (n *logNeeds) positions(followers []FollowerProgress) (all []uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	there := map[NodeID]bool{}
	for _, f := range followers {
		there[f.Node] = true
		need, ok := n.mu.at[f.Node]
		if ok && need.sent && (f.Match >= need.index || !f.Active) {
			delete(n.mu.at, f.Node)
			ok = false
		}
		switch {
		case ok:
			all = append(all, max(f.Match, need.index))
		case f.Active:
			all = append(all, f.Match)
		}
	}
	for node, need := range n.mu.at {
		if need.sent && !there[node] {
			delete(n.mu.at, node)
		}
	}
	return all
}

// considerTruncation leaves it to a goroutine of its own, since it reads from disk.
func (g *Group) considerTruncation() {
	first, last := g.storage.bounds()
	if last-first+1 <= g.h.cfg.LogRetainEntries && g.logSize.keep(g.h.cfg.LogRetainBytes) < first {
		return
	}
	if g.wantTruncate.CompareAndSwap(false, true) {
		g.h.truncates.push(g)
	}
}

// cutPoint is the index up to which the log may go: never beyond what the state would
// still hold after a crash, nor what a follower needs, unless the state is smaller than
// that: then a snapshot is cheaper, for the follower and for the disk here. So the log
// held for followers is never larger than the state.
func (g *Group) cutPoint(durable, first, last, stateBytes uint64) uint64 {
	cfg := &g.h.cfg
	cut := g.logSize.keep(cfg.LogRetainBytes)
	if n := cfg.LogRetainEntries; last > n {
		cut = max(cut, last-n)
	}
	if cfg.DiskLow != nil && cfg.DiskLow() {
		stateBytes = 0
	}
	var followers []FollowerProgress
	if ps := g.progress.Load(); ps != nil {
		followers = *ps
	}
	for _, at := range g.needs.positions(followers) {
		// To whom the log does not reach any more, it is no use.
		if at+1 >= first && at < cut && g.logSize.after(at) <= stateBytes {
			cut = at
		}
	}
	return min(cut, durable)
}

func (h *Host) truncateLoop() {
	for h.truncateStep(true) {
	}
}

// truncateStep looks at one group. Without wait it returns false when none asks.
func (h *Host) truncateStep(wait bool) bool {
	g := h.truncates.pop(wait, h.done)
	if g == nil {
		return false
	}
	g.wantTruncate.Store(false)
	g.truncate()
	return true
}

// truncate runs without the group's lock.
func (g *Group) truncate() {
	durable, err := g.sm.DurableApplied()
	if err != nil {
		g.h.fail(g, fmt.Errorf("raft: group %d: durable applied index: %w", g.id, err))
		return
	}
	state, err := g.sm.StateBytes()
	if err != nil {
		g.h.fail(g, fmt.Errorf("raft: group %d: size of the state: %w", g.id, err))
		return
	}
	first, last := g.storage.bounds()
	cut := g.cutPoint(min(durable, g.applied.Load()), first, last, state)
	if cut < first {
		return
	}
	term, err := g.storage.Term(cut)
	if err != nil {
		if errors.Is(err, etcdraft.ErrCompacted) {
			return // a snapshot came meanwhile
		}
		g.h.fail(g, fmt.Errorf("raft: group %d: term of entry %d: %w", g.id, cut, err))
		return
	}
	g.logSize.cut(cut)
	g.h.count.truncations.Add(1)
	// It rides with the next batch.
	g.h.writer.queue(&logWork{g: g, truncate: cut, cutTerm: term})
}
