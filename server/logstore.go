package server

import (
	"go.etcd.io/raft/v3/raftpb"

	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
)

// logStore lets the groups keep their logs in the engine. The two packages do not
// know each other.
type logStore struct{ *engine.Engine }

var _ raft.LogStore = logStore{}

func (s logStore) Open(g raft.GroupID) (raft.LogState, error) {
	st, err := s.OpenLog(uint64(g))
	return raft.LogState(st), err
}

func (s logStore) NewBatch() raft.LogBatch { return logBatch{s.NewLogBatch()} }

func (s logStore) Entries(g raft.GroupID, lo, hi, maxBytes uint64) ([]*raftpb.Entry, error) {
	return s.LogEntries(uint64(g), lo, hi, maxBytes)
}

func (s logStore) Term(g raft.GroupID, index uint64) (uint64, error) {
	return s.LogTerm(uint64(g), index)
}

type logBatch struct{ b *engine.LogBatch }

func (l logBatch) Append(g raft.GroupID, entries []*raftpb.Entry) error {
	return l.b.Append(uint64(g), entries)
}

func (l logBatch) SetHardState(g raft.GroupID, hs *raftpb.HardState) error {
	return l.b.SetHardState(uint64(g), hs)
}

func (l logBatch) Truncate(g raft.GroupID, index, term uint64) error {
	return l.b.Truncate(uint64(g), index, term)
}

func (l logBatch) Reset(g raft.GroupID, index, term uint64) error {
	return l.b.Reset(uint64(g), index, term)
}

func (l logBatch) Commit(sync bool) error { return l.b.Commit(sync) }
func (l logBatch) Discard()               { l.b.Discard() }
