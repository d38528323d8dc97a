package raft

import (
	"testing"

	"github.com/stretchr/testify/require"

	"go.etcd.io/raft/v3/raftpb"
)

// TestReconcile covers the states in which a crash can leave log and state, and
// those in which only loss can.
func TestReconcile(t *testing.T) {
	entries := func(first uint64, terms ...uint64) []*raftpb.Entry {
		var es []*raftpb.Entry
		for i, term := range terms {
			es = append(es, &raftpb.Entry{Index: new(first + uint64(i)), Term: &term})
		}
		return es
	}
	hard := func(term, vote, commit uint64) *raftpb.HardState {
		return &raftpb.HardState{Term: &term, Vote: &vote, Commit: &commit}
	}
	for _, c := range []struct {
		name    string
		log     memGroupLog
		st      AppliedState
		want    LogState
		written bool
		err     string
	}{
		{name: "nothing at all"},
		{name: "initial state drawn", st: AppliedState{Index: 1, Term: 1},
			want: LogState{Hard: hard(1, 0, 1), Truncated: 1, TruncatedTerm: 1, Last: 1}, written: true},
		{name: "in order", log: memGroupLog{hard: hard(3, 2, 4), truncated: 1, truncatedTerm: 1, entries: entries(2, 2, 2, 3, 3)},
			st: AppliedState{Index: 3, Term: 2}, want: LogState{Hard: hard(3, 2, 4), Truncated: 1, TruncatedTerm: 1, Last: 5}},
		{name: "commit behind applied", log: memGroupLog{hard: hard(3, 2, 2), truncated: 1, truncatedTerm: 1, entries: entries(2, 2, 2, 3, 3)},
			st: AppliedState{Index: 4, Term: 3}, want: LogState{Hard: hard(3, 2, 4), Truncated: 1, TruncatedTerm: 1, Last: 5}, written: true},
		{name: "snapshot installed, log not emptied", log: memGroupLog{hard: hard(3, 2, 4), truncated: 1, truncatedTerm: 1, entries: entries(2, 2, 2, 3, 3)},
			st: AppliedState{Index: 9, Term: 3}, want: LogState{Hard: hard(3, 2, 9), Truncated: 9, TruncatedTerm: 3, Last: 9}, written: true},
		{name: "the same, of a later term", log: memGroupLog{hard: hard(3, 2, 4), truncated: 1, truncatedTerm: 1, entries: entries(2, 2, 2, 3)},
			st: AppliedState{Index: 9, Term: 5}, want: LogState{Hard: hard(5, 0, 9), Truncated: 9, TruncatedTerm: 5, Last: 9}, written: true},
		{name: "the same, over a longer log of a deposed leader", log: memGroupLog{hard: hard(5, 2, 2), truncated: 1, truncatedTerm: 1, entries: entries(2, 2, 3, 3, 3, 3, 3)},
			st: AppliedState{Index: 4, Term: 4}, want: LogState{Hard: hard(5, 2, 4), Truncated: 4, TruncatedTerm: 4, Last: 4}, written: true},
		{name: "state lost", log: memGroupLog{hard: hard(3, 2, 6), truncated: 5, truncatedTerm: 2, entries: entries(6, 2)},
			st: AppliedState{Index: 4, Term: 2}, err: "the state was lost or is older"},
		{name: "end of the log lost", log: memGroupLog{hard: hard(3, 2, 8), truncated: 5, truncatedTerm: 2, entries: entries(6, 2)},
			st: AppliedState{Index: 6, Term: 2}, err: "log was lost"},
		{name: "not of one replica", log: memGroupLog{hard: hard(3, 2, 5), truncated: 5, truncatedTerm: 2},
			st: AppliedState{Index: 5, Term: 3}, err: "not of one replica"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newMemLog()
			l.live[7], l.durable[7] = c.log.clone(), c.log.clone()
			ls, err := l.Open(7)
			require.NoError(t, err)
			ls, err = reconcile(7, l, ls, c.st)
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				require.Zero(t, l.syncs)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.want.Hard.String(), ls.Hard.String())
			c.want.Hard, ls.Hard = nil, nil
			require.Equal(t, c.want, ls)
			require.Equal(t, c.written, l.syncs == 1)
			// It is durable, and done: the second time there is nothing to do.
			l.crash(0)
			again, err := l.Open(7)
			require.NoError(t, err)
			_, err = reconcile(7, l, again, c.st)
			require.NoError(t, err)
			require.Equal(t, c.written, l.syncs == 1)
		})
	}
}

// A term is published from the disk before the replica can answer anybody.
func TestTermAtOpen(t *testing.T) {
	m := newManual(t, 3, 1, nil)
	m.elect(1, 0)
	m.nodes[2].crash(0)
	require.Zero(t, m.nodes[2].sms[0].term)
	require.NoError(t, m.nodes[2].start())
	require.EqualValues(t, 2, m.nodes[2].sms[0].term)
}
