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

const markBytes = 256 << 10

func (s *logSize) add(entries []*raftpb.Entry) {
	bytes := uint64(0)
	for _, e := range entries {
		bytes += uint64(len(e.GetData())) + 32
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

// cutPoint is the index up to which the log may go: never beyond what the state
// would still hold after a crash, nor what a live follower needs, unless it is too
// far behind.
func (g *Group) cutPoint(durable, first, last uint64) uint64 {
	cfg := &g.h.cfg
	retained := func(factor uint64) uint64 {
		by := uint64(0)
		if n := cfg.LogRetainEntries * factor; last > n {
			by = last - n
		}
		return max(by, g.logSize.keep(cfg.LogRetainBytes*factor))
	}
	cut := retained(1)
	atMost := cut
	if ps := g.progress.Load(); ps != nil {
		for _, p := range *ps {
			if p.Active {
				atMost = min(atMost, p.Match)
			}
		}
	}
	cut = max(atMost, retained(cfg.LogWaitFactor))
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
	first, last := g.storage.bounds()
	cut := g.cutPoint(min(durable, g.applied.Load()), first, last)
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
