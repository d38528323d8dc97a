package raft

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/kvd-io/kvd/internal/clock"
)

// TestDelayLoop: one step a delay after each wake, none before and none without.
func TestDelayLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &Host{cfg: Config{Clock: clock.System}, done: make(chan struct{})}
		wake, began := make(chan struct{}, 1), time.Now()
		var steps []time.Duration
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			h.delayLoop(wake, 3*time.Millisecond, func() bool {
				steps = append(steps, time.Since(began))
				return true
			})
		}()
		for range 2 {
			wake <- struct{}{}
			<-time.After(10 * time.Millisecond)
			synctest.Wait()
		}
		wake <- struct{}{}
		close(h.done) // ends it while it waits, too
		<-ended
		require.Equal(t, []time.Duration{3 * time.Millisecond, 13 * time.Millisecond}, steps)
	})
}

// TestCommitDelay: a commit alone is not sent at once; the next append carries it
// instead, and without one it is sent when it is due.
func TestCommitDelay(t *testing.T) {
	m := newManual(t, 3, 1, func(c *Config) { c.CommitDelay = 1 })
	leader := m.nodes[1]
	leader.group(0).Campaign()
	m.settle()
	require.True(t, leader.group(0).Status().Leading)

	empties := func() (n int) {
		for _, s := range m.net {
			if s.gm.Message.GetType() == raftpb.MsgApp && len(s.gm.Message.GetEntries()) == 0 {
				n++
			}
		}
		return n
	}
	// run takes every step but that of what is late.
	run := func() {
		for busy := true; busy; {
			busy = false
			for len(m.net) > 0 {
				require.Zero(t, empties(), "a commit was sent on its own")
				m.deliver(0)
				busy = true
			}
			for _, id := range m.ids() {
				for n := m.nodes[id]; n.work() || n.write() || n.apply(); {
					busy = true
				}
			}
		}
	}
	applied := func(id NodeID) uint64 { return m.nodes[id].group(0).Status().Applied }

	before := applied(1)
	leader.propose(0, "a")
	run()
	require.Equal(t, before+1, applied(1))
	require.Equal(t, before, applied(2), "followers wait for the next append")
	leader.propose(0, "b")
	run()
	require.Equal(t, before+1, applied(2), "it brought the commit of the first")

	require.True(t, leader.late())
	require.Equal(t, 2, empties())
	m.settle()
	require.Equal(t, before+2, applied(2))
	require.Equal(t, before+2, applied(3))
	require.False(t, leader.late())
}

// TestCommitTravelsAlong: what is put off for one group leaves with the next message
// of another, and a put costs a follower one append and one answer.
func TestCommitTravelsAlong(t *testing.T) {
	m := newManual(t, 3, 2, func(c *Config) { c.CommitDelay = 1 })
	for g := range 2 {
		m.nodes[1].group(GroupID(g)).Campaign()
		m.settle()
	}
	sent := map[raftpb.MessageType]int{}
	// run delivers and works without the tick and without the delay.
	run := func() {
		for busy := true; busy; {
			busy = false
			for len(m.net) > 0 {
				sent[m.net[0].gm.Message.GetType()]++
				m.deliver(0)
				busy = true
			}
			for _, id := range m.ids() {
				for n := m.nodes[id]; n.work() || n.write() || n.apply(); {
					busy = true
				}
			}
		}
	}
	before := m.nodes[2].group(0).Status().Applied
	m.nodes[1].propose(0, "a")
	run()
	require.Equal(t, before, m.nodes[2].group(0).Status().Applied)
	m.nodes[1].propose(1, "b")
	run()
	require.Equal(t, before+1, m.nodes[2].group(0).Status().Applied, "the commit of group 0 came with the append of group 1")
	// Two followers: two puts are four appends with entries, and two commits came along.
	require.Equal(t, 6, sent[raftpb.MsgApp])
	before = m.nodes[2].group(1).Status().Applied
	clear(sent)
	for range 10 {
		m.nodes[1].propose(0, "c")
		run()
	}
	require.Equal(t, 2*10+2, sent[raftpb.MsgApp], "one append a follower and put, and once the commit of group 1")
	require.LessOrEqual(t, sent[raftpb.MsgAppResp], 2*10+2)
	require.Equal(t, before+1, m.nodes[2].group(1).Status().Applied)
}

// TestAnswerToCommitWaits: to acknowledge a commit alone does not wake the follower's
// log writer. The answer goes out with the next batch, at the latest with the tick.
func TestAnswerToCommitWaits(t *testing.T) {
	m := newManual(t, 3, 1, func(c *Config) { c.CommitDelay = 1 })
	leader, follower := m.nodes[1], m.nodes[2]
	leader.group(0).Campaign()
	m.settle()
	woken := func() bool {
		select {
		case <-follower.host.writer.wake:
			return true
		default:
			return false
		}
	}
	// deliverAll hands over what is under way and counts the answers among it.
	deliverAll := func() (answers int) {
		for len(m.net) > 0 {
			if p := m.net[0]; p.from == 2 && p.gm.Message.GetType() == raftpb.MsgAppResp {
				answers++
			}
			m.deliver(0)
		}
		return answers
	}
	woken()
	leader.propose(0, "a")
	deliverAll()
	require.True(t, woken(), "an append with entries has the writer woken")
	for _, id := range m.ids() {
		m.nodes[id].write()
	}
	require.Equal(t, 1, deliverAll())
	require.True(t, leader.apply())

	require.True(t, leader.late())
	require.Zero(t, deliverAll())
	require.False(t, woken(), "the commit alone has not")
	follower.host.tick()
	require.True(t, woken())
	follower.write()
	require.Equal(t, 1, deliverAll(), "nor is its answer lost")
}
