package raft

import (
	"fmt"
	"sync"

	etcdraft "go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// coreStorage shows one group's part of the log store to the core. The core reads
// it under the group's lock; the log writer moves its bounds.
type coreStorage struct {
	group GroupID
	log   LogStore
	hard  *raftpb.HardState // as found at open, for InitialState

	mu struct {
		sync.Mutex
		// Invariant: truncated <= applied.Index, truncated <= last. Entries
		// (truncated, last] can be read from the log store.
		truncated, truncatedTerm uint64
		last                     uint64
		// What the state machine holds: a snapshot would be of this.
		applied AppliedState
	}
}

var _ etcdraft.Storage = (*coreStorage)(nil)

func newCoreStorage(g GroupID, log LogStore, ls LogState, st AppliedState) *coreStorage {
	s := &coreStorage{group: g, log: log, hard: ls.Hard}
	s.mu.truncated, s.mu.truncatedTerm, s.mu.last = ls.Truncated, ls.TruncatedTerm, ls.Last
	s.mu.applied = st
	return s
}

// InitialState is called once, when the core starts.
func (s *coreStorage) InitialState() (*raftpb.HardState, *raftpb.ConfState, error) {
	conf := s.appliedState().Conf
	if conf == nil {
		conf = &raftpb.ConfState{}
	}
	return s.hard, conf, nil
}

// Entries implements etcdraft.Storage.
func (s *coreStorage) Entries(lo, hi, maxBytes uint64) ([]*raftpb.Entry, error) {
	first, last := s.bounds()
	switch {
	case lo < first:
		return nil, etcdraft.ErrCompacted
	case hi > last+1:
		return nil, etcdraft.ErrUnavailable
	}
	ents, err := s.log.Entries(s.group, lo, hi, maxBytes)
	if err == nil && len(ents) > 0 {
		return ents[:len(ents):len(ents)], nil
	}
	// The log may have been cut while we read.
	if first, _ := s.bounds(); lo < first {
		return nil, etcdraft.ErrCompacted
	}
	if err == nil {
		err = fmt.Errorf("raft: log of group %d has no entry %d, want [%d, %d]", s.group, lo, first, last)
	}
	return nil, err
}

// Term implements etcdraft.Storage.
func (s *coreStorage) Term(i uint64) (uint64, error) {
	s.mu.Lock()
	truncated, truncatedTerm, last := s.mu.truncated, s.mu.truncatedTerm, s.mu.last
	s.mu.Unlock()
	switch {
	case i < truncated:
		return 0, etcdraft.ErrCompacted
	case i == truncated:
		return truncatedTerm, nil
	case i > last:
		return 0, etcdraft.ErrUnavailable
	}
	term, err := s.log.Term(s.group, i)
	if err != nil {
		if first, _ := s.bounds(); i < first {
			return 0, etcdraft.ErrCompacted
		}
	}
	return term, err
}

// LastIndex implements etcdraft.Storage.
func (s *coreStorage) LastIndex() (uint64, error) {
	_, last := s.bounds()
	return last, nil
}

// FirstIndex implements etcdraft.Storage.
func (s *coreStorage) FirstIndex() (uint64, error) {
	first, _ := s.bounds()
	return first, nil
}

// Snapshot names what the state machine holds now. The transport streams that, or
// something newer, and says so in the message which it delivers.
func (s *coreStorage) Snapshot() (*raftpb.Snapshot, error) {
	st := s.appliedState()
	if st.Index == 0 {
		return nil, etcdraft.ErrSnapshotTemporarilyUnavailable
	}
	return &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
		ConfState: proto.Clone(st.Conf).(*raftpb.ConfState),
		Index:     new(st.Index),
		Term:      new(st.Term),
	}}, nil
}

func (s *coreStorage) bounds() (first, last uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.truncated + 1, s.mu.last
}

func (s *coreStorage) appliedState() AppliedState {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.applied
}

func (s *coreStorage) setApplied(index, term uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if index > s.mu.applied.Index {
		s.mu.applied.Index, s.mu.applied.Term = index, term
	}
}

func (s *coreStorage) setAppliedState(st AppliedState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.applied = st
}

// appended is called when entries up to last are durable; what was behind is gone.
func (s *coreStorage) appended(last uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.last = last
}

// cut is called before the entries up to index are removed, so that no reader
// finds a hole.
func (s *coreStorage) cut(index, term uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if index > s.mu.truncated {
		s.mu.truncated, s.mu.truncatedTerm = index, term
	}
}

func (s *coreStorage) reset(index, term uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.truncated, s.mu.truncatedTerm, s.mu.last = index, term, index
}
