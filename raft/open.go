package raft

import (
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
)

// reconcile brings the log in line with the state before a group is used, and
// returns the log's state after that. The log is written only where a crash (or a
// first start) left it behind the state:
//
//   - the state is ahead of the log's end, or another history: a snapshot was
//     installed, or the initial state drawn, and the log not yet emptied;
//   - the hard state's commit is behind the applied index: commits are written
//     without a sync of their own.
//
// Both are durable when it returns. Anything else that does not fit is refused.
func reconcile(g GroupID, log LogStore, ls LogState, st AppliedState) (LogState, error) {
	if st.Index < ls.Truncated {
		return ls, fmt.Errorf("raft: group %d: the state is at index %d but the log begins after %d: "+
			"the state was lost or is older than the log; restore both together, or rebuild this replica from its peers",
			g, st.Index, ls.Truncated)
	}
	if c := ls.Hard.GetCommit(); c > ls.Last && c > st.Index {
		return ls, fmt.Errorf("raft: group %d: %w: index %d was committed but the log ends at %d; "+
			"this replica must be rebuilt from its peers under a new node id", g, ErrLogLost, c, ls.Last)
	}
	reset, err := needsReset(g, log, ls, st)
	if err != nil {
		return ls, err
	}
	if !reset && ls.Hard.GetCommit() >= st.Index {
		return ls, nil
	}
	hs := &raftpb.HardState{
		Term:   new(max(ls.Hard.GetTerm(), st.Term)),
		Vote:   new(uint64(0)),
		Commit: new(max(ls.Hard.GetCommit(), st.Index)),
	}
	if hs.GetTerm() == ls.Hard.GetTerm() {
		*hs.Vote = ls.Hard.GetVote()
	}
	batch := log.NewBatch()
	if reset {
		// A commit above the snapshot was of entries that go with the log; they were
		// committed elsewhere and come again.
		*hs.Commit = st.Index
		if err := batch.Reset(g, st.Index, st.Term); err != nil {
			batch.Discard()
			return ls, fmt.Errorf("raft: group %d: empty the log: %w", g, err)
		}
		ls.Truncated, ls.TruncatedTerm, ls.Last = st.Index, st.Term, st.Index
	}
	if err := batch.SetHardState(g, hs); err != nil {
		batch.Discard()
		return ls, fmt.Errorf("raft: group %d: write hard state: %w", g, err)
	}
	if err := batch.Commit(true); err != nil {
		return ls, fmt.Errorf("raft: group %d: write hard state: %w", g, err)
	}
	ls.Hard = hs
	return ls, nil
}

// needsReset tells whether the log belongs to a history before the state.
func needsReset(g GroupID, log LogStore, ls LogState, st AppliedState) (bool, error) {
	if st.Index > ls.Last {
		return true, nil
	}
	if st.Index == 0 {
		return false, nil
	}
	term := ls.TruncatedTerm
	if st.Index > ls.Truncated {
		var err error
		if term, err = log.Term(g, st.Index); err != nil {
			return false, fmt.Errorf("raft: group %d: term of entry %d: %w", g, st.Index, err)
		}
	} else if term != st.Term {
		return false, fmt.Errorf("raft: group %d: entry %d has term %d in the log and %d in the state: "+
			"they are not of one replica", g, st.Index, term, st.Term)
	}
	// An uncommitted tail of a deposed leader may reach past the snapshot.
	return term != st.Term, nil
}
