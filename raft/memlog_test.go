package raft

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// memLog is a log store in memory with a disk that forgets: what was committed
// without sync is lost in a crash, from some batch on.
type memLog struct {
	syncDelay time.Duration
	onWrite   func(desc string)             // called before Commit returns
	failNext  error                         // of the next Commit
	gate      atomic.Pointer[chan struct{}] // Commit hangs until it is closed

	mu       sync.Mutex
	live     map[GroupID]*memGroupLog
	durable  map[GroupID]*memGroupLog
	unsynced [][]memOp
	syncs    int
}

type memGroupLog struct {
	hard          *raftpb.HardState
	truncated     uint64
	truncatedTerm uint64
	entries       []*raftpb.Entry // truncated+1 ...
}

func (g *memGroupLog) clone() *memGroupLog {
	c := *g
	c.entries = slices.Clone(g.entries)
	return &c
}

func (g *memGroupLog) last() uint64 { return g.truncated + uint64(len(g.entries)) }

type memOp struct {
	g    GroupID
	desc string
	do   func(*memGroupLog) error
}

func newMemLog() *memLog {
	return &memLog{live: map[GroupID]*memGroupLog{}, durable: map[GroupID]*memGroupLog{}}
}

func (l *memLog) group(m map[GroupID]*memGroupLog, g GroupID) *memGroupLog {
	if m[g] == nil {
		m[g] = &memGroupLog{}
	}
	return m[g]
}

// crash loses what was not synced, except for the first keep batches of it.
func (l *memLog) crash(keep int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, ops := range l.unsynced[:min(keep, len(l.unsynced))] {
		l.applyTo(l.durable, ops)
	}
	l.unsynced = nil
	l.live = map[GroupID]*memGroupLog{}
	for g, s := range l.durable {
		l.live[g] = s.clone()
	}
}

func (l *memLog) applyTo(m map[GroupID]*memGroupLog, ops []memOp) {
	for _, op := range ops {
		if err := op.do(l.group(m, op.g)); err != nil {
			panic(fmt.Sprintf("group %d: %s: %v", op.g, op.desc, err))
		}
	}
}

func (l *memLog) Open(g GroupID) (LogState, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.group(l.live, g)
	return LogState{Hard: s.hard, Truncated: s.truncated, TruncatedTerm: s.truncatedTerm, Last: s.last()}, nil
}

func (l *memLog) Entries(g GroupID, lo, hi, maxBytes uint64) ([]*raftpb.Entry, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.group(l.live, g)
	if lo <= s.truncated || hi > s.last()+1 {
		return nil, fmt.Errorf("entries [%d,%d) of (%d,%d]", lo, hi, s.truncated, s.last())
	}
	size := uint64(0)
	var out []*raftpb.Entry
	for _, e := range s.entries[lo-s.truncated-1 : hi-s.truncated-1] {
		size += uint64(proto.Size(e))
		if len(out) > 0 && size > maxBytes {
			break
		}
		out = append(out, e)
	}
	return out, nil
}

func (l *memLog) Term(g GroupID, index uint64) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.group(l.live, g)
	if index <= s.truncated || index > s.last() {
		return 0, fmt.Errorf("term of %d in (%d,%d]", index, s.truncated, s.last())
	}
	return s.entries[index-s.truncated-1].GetTerm(), nil
}

func (l *memLog) NewBatch() LogBatch { return &memBatch{l: l} }

type memBatch struct {
	l    *memLog
	ops  []memOp
	used bool
}

func (b *memBatch) add(g GroupID, desc string, do func(*memGroupLog) error) error {
	b.ops = append(b.ops, memOp{g, desc, do})
	return nil
}

func (b *memBatch) Append(g GroupID, entries []*raftpb.Entry) error {
	first, last := entries[0].GetIndex(), entries[len(entries)-1].GetIndex()
	return b.add(g, fmt.Sprintf("append [%d,%d] term %d", first, last, entries[len(entries)-1].GetTerm()), func(s *memGroupLog) error {
		if first <= s.truncated || first > s.last()+1 {
			return fmt.Errorf("log holds (%d,%d]", s.truncated, s.last())
		}
		s.entries = append(s.entries[:first-s.truncated-1], entries...)
		return nil
	})
}

func (b *memBatch) SetHardState(g GroupID, hs *raftpb.HardState) error {
	return b.add(g, fmt.Sprintf("hard term %d vote %d commit %d", hs.GetTerm(), hs.GetVote(), hs.GetCommit()), func(s *memGroupLog) error {
		s.hard = proto.Clone(hs).(*raftpb.HardState)
		return nil
	})
}

func (b *memBatch) Truncate(g GroupID, index, term uint64) error {
	return b.add(g, fmt.Sprintf("truncate %d", index), func(s *memGroupLog) error {
		if index <= s.truncated || index > s.last() {
			return fmt.Errorf("log holds (%d,%d]", s.truncated, s.last())
		}
		s.entries = slices.Clone(s.entries[index-s.truncated:])
		s.truncated, s.truncatedTerm = index, term
		return nil
	})
}

func (b *memBatch) Reset(g GroupID, index, term uint64) error {
	return b.add(g, fmt.Sprintf("reset %d term %d", index, term), func(s *memGroupLog) error {
		s.entries, s.truncated, s.truncatedTerm = nil, index, term
		return nil
	})
}

func (b *memBatch) Commit(sync bool) error {
	if b.used {
		return errors.New("batch used twice")
	}
	b.used = true
	if g := b.l.gate.Load(); g != nil {
		<-*g
	}
	if sync && b.l.syncDelay > 0 {
		<-time.NewTimer(b.l.syncDelay).C // the disk is slow
	}
	b.l.mu.Lock()
	defer b.l.mu.Unlock()
	if err := b.l.failNext; err != nil {
		b.l.failNext = nil
		return err
	}
	b.l.applyTo(b.l.live, b.ops)
	b.l.unsynced = append(b.l.unsynced, b.ops)
	if sync {
		b.l.syncs++
		for _, ops := range b.l.unsynced {
			b.l.applyTo(b.l.durable, ops)
		}
		b.l.unsynced = nil
	}
	if b.l.onWrite != nil {
		for _, op := range b.ops {
			b.l.onWrite(fmt.Sprintf("g%d log %s sync=%t", op.g, op.desc, sync))
		}
	}
	return nil
}

func (b *memBatch) Discard() { b.used = true }
