package raft

import (
	"testing"

	"github.com/stretchr/testify/require"

	"go.etcd.io/raft/v3/raftpb"
)

func change(t *testing.T, s string) *raftpb.ConfChangeV2 {
	t.Helper()
	cs, err := raftpb.ConfChangesFromString(s)
	require.NoError(t, err)
	return &raftpb.ConfChangeV2{Changes: cs}
}

func TestCheckConfChange(t *testing.T) {
	plain := &raftpb.ConfState{Voters: []uint64{1, 2, 3}, Learners: []uint64{4}}
	joint := &raftpb.ConfState{Voters: []uint64{1, 2, 4}, VotersOutgoing: []uint64{1, 2, 3}}
	for _, c := range []struct {
		conf *raftpb.ConfState
		cc   *raftpb.ConfChangeV2
		ok   bool
	}{
		{plain, change(t, "v4"), true},
		{plain, change(t, "v4 r1"), true},
		{plain, change(t, "r1 r2 r3"), false}, // no voter left
		{plain, &raftpb.ConfChangeV2{}, false},
		{plain, &raftpb.ConfChangeV2{Transition: raftpb.ConfChangeTransition(77).Enum()}, false},
		{joint, &raftpb.ConfChangeV2{}, true},
		{joint, change(t, "v5"), false},
		{joint, change(t, "v5 r1"), false},
		{&raftpb.ConfState{Voters: []uint64{1}, Learners: []uint64{1}}, change(t, "v2"), false},
	} {
		err := checkConfChange(c.conf, c.cc)
		require.Equal(t, c.ok, err == nil, "%v then %v: %v", c.conf, c.cc, err)
	}
	require.NoError(t, checkConfState(plain))
	require.NoError(t, checkConfState(joint))
	require.Error(t, checkConfState(&raftpb.ConfState{Voters: []uint64{1}, Learners: []uint64{1}}))
}

// A change that does not fit and is in the log nonetheless, say by an older
// version that did not check, changes nothing on any replica and stops none.
func TestMisfitInTheLog(t *testing.T) {
	m := newManual(t, 3, 1, nil)
	m.elect(1, 0)
	n := m.nodes[1]
	n.group(0).inbox.addOp(func(g *Group) {
		w, err := g.newConfProposal(change(t, "r1 r2 r3"))
		require.NoError(t, err)
		_ = g.stepProposalsLocked([]*proposal{w})
	})
	n.group(0).kick()
	m.settle()
	m.tick(1)
	m.settle()
	for _, id := range m.ids() {
		require.NoError(t, m.nodes[id].fate)
		st := m.nodes[id].group(0).Status()
		require.Equal(t, []uint64{1, 2, 3}, st.Conf.GetVoters())
		require.EqualValues(t, 3, st.Applied)
	}
	w := n.propose(0, "goes on")
	m.settle()
	require.NoError(t, (<-w.done).err)
}

// A joint change is left by the leader itself.
func TestJoint(t *testing.T) {
	m := newManual(t, 3, 1, nil)
	m.addNode(4)
	m.elect(1, 0)
	w := m.nodes[1].proposeConf(0, change(t, "v4 r3"))
	for range 5 {
		m.settle()
		m.tick(1)
	}
	m.settle()
	require.NoError(t, (<-w.done).err)
	for _, id := range []NodeID{1, 2, 4} {
		st := m.nodes[id].group(0).Status()
		require.Equal(t, []uint64{1, 2, 4}, st.Conf.GetVoters())
		require.Empty(t, st.Conf.GetVotersOutgoing())
	}
	require.Empty(t, m.broken)
}
