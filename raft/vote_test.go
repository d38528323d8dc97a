package raft

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
)

// A replica that was made anew does not vote for one that was away: what the replica before
// it had acknowledged may be missing there.
func TestEmptyReplicaDoesNotVote(t *testing.T) {
	m := newManual(t, 1, 1, nil)
	m.addNode(4)
	n := m.nodes[4]
	ask := func(kind raftpb.MessageType) {
		n.host.Step([]GroupMessage{{Group: 0, Message: &raftpb.Message{
			Type: kind.Enum(), From: new(uint64(1)), To: new(uint64(4)), Term: new(uint64(9)), LogTerm: new(uint64(8)), Index: new(uint64(100)),
		}}})
		m.net = nil
		for n.work() || n.write() || n.apply() || n.late() {
		}
		for _, p := range m.net {
			require.True(t, p.gm.Message.GetReject(), "%v", p.gm.Message)
		}
	}
	ask(raftpb.MsgVote)
	ask(raftpb.MsgPreVote)
	require.Less(t, n.group(0).Status().Term, uint64(9))
}
