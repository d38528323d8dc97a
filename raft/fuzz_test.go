package raft

import (
	"encoding/json"
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	"go.etcd.io/raft/v3/raftpb"
)

// FuzzStep lets a peer send anything: as raw protobuf, and built so that it comes
// far. Nothing may panic, and nothing may stop the node but the news that its log
// was lost.
func FuzzStep(f *testing.F) {
	f.Add([]byte{})
	for kind := range byte(20) {
		f.Add([]byte{kind, 1, 3, 2, 2, 2, 0, 0, 3, 2, 4, 2})
		f.Add([]byte{kind, 0, 2, 1, 1, 9, 1, 8, 0, 0, 0, 0, 0, 0, 0, 0})
		f.Add([]byte{kind, 1, 4, 250, 3, 250, 2, 1, 2, 3, 1, 1, 1, 1})
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, leads := range []NodeID{1, 2} {
			m := newManual(t, 3, 1, nil)
			m.elect(leads, 0)
			m.nodes[leads].propose(0, "a")
			m.settle()
			n := m.nodes[1]
			var raw raftpb.Message
			if proto.Unmarshal(data, &raw) == nil {
				raw.To = new(uint64(1))
				n.host.Step([]GroupMessage{{Message: &raw}})
			}
			n.host.Step([]GroupMessage{{}, {Message: craft(data)}, {Message: craft(data)}})
			m.net = nil
			for range 3 {
				for n.write() || n.apply() || n.work() {
				}
				n.host.tick()
				m.net = nil
			}
			if n.fate != nil && !errors.Is(n.fate, ErrLogLost) {
				t.Fatalf("a message stopped the node: %v", n.fate)
			}
		}
	})
}

// craft builds a message whose fields are near what the group is at: term 2, log
// up to 3.
func craft(data []byte) *raftpb.Message {
	next := func() uint64 {
		if len(data) == 0 {
			return 0
		}
		b := data[0]
		data = data[1:]
		return uint64(b)
	}
	kinds := []raftpb.MessageType{
		raftpb.MsgApp, raftpb.MsgAppResp, raftpb.MsgVote, raftpb.MsgVoteResp, raftpb.MsgPreVote,
		raftpb.MsgPreVoteResp, raftpb.MsgSnap, raftpb.MsgHeartbeat, raftpb.MsgHeartbeatResp, raftpb.MsgTimeoutNow,
	}
	m := &raftpb.Message{
		Type: kinds[next()%uint64(len(kinds))].Enum(), To: new(uint64(1)), From: new(2 + next()%3),
		Term: new(next() % 5), Index: new(next()), LogTerm: new(next() % 5), Commit: new(next()),
	}
	switch next() % 4 {
	case 1:
		m.Reject, m.RejectHint = new(true), new(next())
	case 2:
		m.Context = make([]byte, next()%10)
		for i := range m.Context {
			m.Context[i] = byte(next())
		}
	case 3:
		m.Context = []byte("CampaignTransfer")
	}
	index := m.GetIndex()
	for range next() % 4 {
		index += 1 + next()/250
		m.Entries = append(m.Entries, &raftpb.Entry{Index: new(index), Term: new(next() % 5), Data: make([]byte, 16)})
	}
	if m.GetType() == raftpb.MsgSnap {
		m.Snapshot = &raftpb.Snapshot{}
		if next()%4 > 0 {
			m.Snapshot.Metadata = &raftpb.SnapshotMetadata{Index: new(next()), Term: new(next() % 5)}
			if next()%4 > 0 {
				m.Snapshot.Metadata.ConfState = &raftpb.ConfState{Voters: []uint64{1, 2, next()}, Learners: []uint64{next()}}
			}
			// The transport vouches for the data.
			meta := m.Snapshot.GetMetadata()
			m.Snapshot.Data, _ = json.Marshal(machineState{Index: meta.GetIndex(), Term: meta.GetTerm(), Conf: meta.GetConfState()})
		}
	}
	return m
}
