package raft

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"go.etcd.io/raft/v3/raftpb"
)

// holding is a cluster of which node 1 leads group 0 and holds appends back. Followers
// are as quick as each other, so the one with the lower id is chosen.
func holding(t *testing.T, nodes int) (*manual, *manualNode) {
	m := newManual(t, nodes, 1, func(c *Config) { c.CommitDelay, c.HoldDelay = 1, 1 })
	m.elect(1, 0)
	return m, m.nodes[1]
}

// entriesTo are the indexes of the entries on their way to a node.
func (m *manual) entriesTo(to NodeID) (indexes []uint64) {
	for _, p := range m.net {
		if p.to != to || p.gm.Message.GetType() != raftpb.MsgApp {
			continue
		}
		for _, e := range p.gm.Message.GetEntries() {
			indexes = append(indexes, e.GetIndex())
		}
	}
	return indexes
}

// runTo delivers to and from the leader and the given nodes, and has them work, but
// without the timers.
func (m *manual) runTo(nodes ...NodeID) {
	nodes = append(nodes, 1)
	in := func(id NodeID) bool {
		for _, n := range nodes {
			if n == id {
				return true
			}
		}
		return false
	}
	for busy := true; busy; {
		busy = false
		for i := 0; i < len(m.net); {
			if in(m.net[i].to) && in(m.net[i].from) {
				m.deliver(i)
				busy = true
			} else {
				i++
			}
		}
		for _, id := range nodes {
			for n := m.nodes[id]; n.work() || n.write() || n.apply(); {
				busy = true
			}
		}
	}
}

func (m *manual) applied(id NodeID) uint64 { return m.nodes[id].group(0).Status().Applied }

// TestHold: a lone proposal is sent to as many followers as the quorum needs, and is
// committed with them. What is held for the other meanwhile leaves as one append, with
// the commit, when it is due.
func TestHold(t *testing.T) {
	for _, c := range []struct {
		nodes        int
		asked, spare []NodeID
	}{
		{3, []NodeID{2}, []NodeID{3}},
		{4, []NodeID{2, 3}, []NodeID{4}},
		{5, []NodeID{2, 3}, []NodeID{4, 5}},
	} {
		m, leader := holding(t, c.nodes)
		before := m.applied(1)
		for i := range uint64(3) {
			leader.propose(0, "a")
			for _, n := range c.asked {
				require.Equal(t, []uint64{before + i + 1}, m.entriesTo(n), "of %d nodes, node %d", c.nodes, n)
			}
			for _, n := range c.spare {
				require.Empty(t, m.entriesTo(n), "of %d nodes, node %d", c.nodes, n)
			}
			m.runTo(c.asked...)
			require.Equal(t, before+i+1, m.applied(1), "of %d nodes", c.nodes)
		}
		require.True(t, leader.host.holdStep())
		for _, n := range c.spare {
			require.Equal(t, []uint64{before + 1, before + 2, before + 3}, m.entriesTo(n))
		}
		require.Len(t, m.net, len(c.spare), "one append each")
		m.runTo(c.spare...)
		for _, n := range c.spare {
			require.Equal(t, before+3, m.applied(n), "the append brought the commit")
		}
		require.False(t, leader.host.holdStep())
		m.settle()
		require.Empty(t, m.broken)
	}
}

// TestHoldChosenFails: when the follower that was asked does not answer, the other gets
// the append by the timer, the proposal is committed, and the next one goes to the other
// at once. When the first is back it is sent everything as well.
func TestHoldChosenFails(t *testing.T) {
	m, leader := holding(t, 3)
	before := m.applied(1)
	leader.propose(0, "a")
	m.runTo()
	require.Equal(t, before, m.applied(1), "node 2 is not heard of, and node 3 was not asked")
	require.True(t, leader.host.holdStep())
	m.runTo(3)
	require.Equal(t, before+1, m.applied(1))

	leader.propose(0, "b")
	require.Contains(t, m.entriesTo(3), before+2, "it is relied upon now")
	m.runTo(3)
	require.Equal(t, before+2, m.applied(1))
	m.settle()
	require.Equal(t, before+2, m.applied(2))
	require.Empty(t, m.broken)
}

// TestHoldUnderLoad: with something under way, nothing is held, and what was held leaves
// first, in one append.
func TestHoldUnderLoad(t *testing.T) {
	m, leader := holding(t, 3)
	before := m.applied(1)
	leader.propose(0, "a")
	require.Empty(t, m.entriesTo(3))
	leader.propose(0, "b")
	require.Equal(t, []uint64{before + 1, before + 2}, m.entriesTo(2))
	require.Equal(t, []uint64{before + 1, before + 2}, m.entriesTo(3))
	m.runTo(2, 3)
	require.Equal(t, before+2, m.applied(1))
	m.settle()
	require.Empty(t, m.broken)
}

// TestHoldLeavesWith: what else makes the leader send what it holds.
func TestHoldLeavesWith(t *testing.T) {
	for name, do := range map[string]func(m *manual, leader *manualNode){
		"heartbeat": func(m *manual, leader *manualNode) { leader.host.tick() },
		"loss":      func(m *manual, leader *manualNode) { leader.host.ReportUnreachable(2) },
		"transfer":  func(m *manual, leader *manualNode) { leader.transfer(0, 3) },
	} {
		t.Run(name, func(t *testing.T) {
			m, leader := holding(t, 3)
			leader.propose(0, "a")
			require.Empty(t, m.entriesTo(3))
			do(m, leader)
			require.Len(t, m.entriesTo(3), 1)
			for i, p := range m.net {
				if p.to == 3 {
					require.Equal(t, raftpb.MsgApp, m.net[i].gm.Message.GetType(), "it goes before the rest")
					break
				}
			}
			m.settle()
			require.Empty(t, m.broken)
		})
	}
}

// TestHoldEndsWithLeadership: what a leader held is not sent after it stepped down.
func TestHoldEndsWithLeadership(t *testing.T) {
	m, leader := holding(t, 3)
	leader.propose(0, "a")
	require.Empty(t, m.entriesTo(3))
	m.net = nil // node 2 did not get it either
	term := leader.group(0).Status().Term + 1
	leader.host.Step([]GroupMessage{{Message: &raftpb.Message{
		Type: raftpb.MsgHeartbeat.Enum(), From: new(uint64(2)), To: new(uint64(1)), Term: &term,
	}}})
	require.False(t, leader.group(0).Status().Leading)
	leader.host.holdStep()
	require.Empty(t, m.entriesTo(3))
}

// TestHoldBounded: an append that would grow beyond MaxMessageBytes is not held.
func TestHoldBounded(t *testing.T) {
	m := newManual(t, 3, 1, func(c *Config) { c.CommitDelay, c.HoldDelay, c.MaxMessageBytes = 1, 1, 100 })
	m.elect(1, 0)
	leader, before := m.nodes[1], m.applied(1)
	for range 2 { // of 16 + 40 bytes each
		leader.propose(0, "0123456789012345678901234567890123456789")
		m.runTo(2)
	}
	require.Equal(t, before+2, m.applied(1))
	require.Equal(t, []uint64{before + 1, before + 2}, m.entriesTo(3))
	m.settle()
	require.Empty(t, m.broken)
}

// TestPace: who acknowledges sooner is chosen, but not for a small difference.
func TestPace(t *testing.T) {
	var h holds
	h.init()
	soonest := func(favour ...NodeID) NodeID {
		nodes := []NodeID{2, 3}
		h.soonest(nodes, favour)
		return nodes[0]
	}
	require.Equal(t, NodeID(2), soonest())
	require.Equal(t, NodeID(3), soonest(3), "equal: no reason to change")
	h.acknowledged(2, 100*time.Microsecond)
	h.acknowledged(3, 90*time.Microsecond)
	require.Equal(t, NodeID(3), soonest())
	require.Equal(t, NodeID(2), soonest(2))
	for range 30 {
		h.acknowledged(2, 200*time.Microsecond)
	}
	require.Equal(t, NodeID(3), soonest(2))
}
