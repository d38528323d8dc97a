package raft

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"go.etcd.io/raft/v3/raftpb"
)

const idleGroups = 24

// startIdle makes a cluster whose groups all have nothing to do and are quiesced; each node
// leads some.
func startIdle(t *testing.T, nodes int, conf func(*Config)) *manual {
	m := newManual(t, nodes, idleGroups, func(c *Config) {
		c.QuiesceTicks = 3
		if conf != nil {
			conf(c)
		}
	})
	for _, g := range m.groups {
		m.elect(idleLeader(m, g), g)
		m.nodes[idleLeader(m, g)].propose(g, "first")
	}
	m.rounds(6)
	m.requireQuiesced()
	return m
}

func idleLeader(m *manual, g GroupID) NodeID { return NodeID(1 + uint64(g)%uint64(len(m.nodes))) }

// rounds lets ticks pass on all nodes, and what comes of each.
func (m *manual) rounds(n int) {
	for range n {
		for _, id := range m.ids() {
			m.tick(id)
		}
		m.settle()
		m.trace = nil
	}
}

func (m *manual) up() (up []*manualNode) {
	for _, id := range m.ids() {
		if n := m.nodes[id]; n.host != nil {
			up = append(up, n)
		}
	}
	return up
}

func (m *manual) requireQuiesced() {
	m.t.Helper()
	for _, n := range m.up() {
		for _, g := range m.groups {
			require.True(m.t, n.group(g).Status().Quiesced, "group %d on node %d", g, n.id)
		}
	}
	require.Empty(m.t, m.broken)
}

// leads is who leads the group according to all that run; 0: they do not agree.
func (m *manual) leads(g GroupID) NodeID {
	up := m.up()
	l := up[0].group(g).Status().Leader
	for _, n := range up {
		if n.group(g).Status().Leader != l {
			return 0
		}
	}
	return l
}

func (m *manual) term(g GroupID) (term uint64) {
	for _, n := range m.up() {
		term = max(term, n.group(g).Status().Term)
	}
	return term
}

// requireProgress demands that what is proposed at the leader is applied.
func (m *manual) requireProgress(g GroupID) {
	m.t.Helper()
	w := m.nodes[m.leads(g)].propose(g, "more")
	m.settle()
	select {
	case o := <-w.done:
		require.NoError(m.t, o.err, "group %d", g)
	default:
		m.t.Fatalf("group %d makes no progress", g)
	}
}

// cuts loses what is sent from one node to another; 0 stands for all.
func cuts(from, to NodeID) func(packet) bool {
	return func(p packet) bool { return (from == 0 || p.from == from) && (to == 0 || p.to == to) }
}

// However many groups are idle: each node sends each other one message a tick, and
// nothing else happens.
func TestQuiescedCostNothing(t *testing.T) {
	const nodes, ticks = 3, 1000
	m := startIdle(t, nodes, nil)
	type cost struct{ messages, calls, batches, beats, terms, leaders, ticks, wakes uint64 }
	costs := func(n *manualNode) cost {
		s := n.host.Stats()
		c := cost{s.MessagesOut, s.SendCalls, s.LogBatches, s.NodeHeartbeatsOut, s.TermChanges, s.LeaderStarts, 0, s.Wakes}
		for _, g := range m.groups {
			c.ticks += n.group(g).mu.core.ticks
		}
		require.Equal(t, idleGroups, s.Quiesced)
		return c
	}
	before := map[NodeID]cost{}
	for id, n := range m.nodes {
		before[id] = costs(n)
	}
	m.rounds(ticks)
	m.requireQuiesced()
	for id, n := range m.nodes {
		want := before[id]
		want.beats += (nodes - 1) * ticks
		require.Equal(t, want, costs(n), "node %d", id)
		require.Equal(t, n.host.Stats().NodeHeartbeatsIn, want.beats)
		for _, g := range m.groups {
			for _, f := range n.group(g).Status().Followers {
				require.True(t, f.Active, "group %d: node %d", g, f.Node)
			}
			// One that was on its way when the group fell quiet.
			n.group(g).inbox.addTick()
			n.group(g).kick()
			require.Empty(t, m.net)
		}
	}
}

// A node that stopped by an error is one that does not live.
func TestFailedNodeIsNotHeard(t *testing.T) {
	m := startIdle(t, 3, nil)
	m.nodes[1].host.fail(m.nodes[1].group(0), errors.New("the disk is gone"))
	m.rounds(6 * m.nodes[2].host.cfg.ElectionTicks)
	for _, g := range m.groups {
		leads := 0
		for _, n := range []*manualNode{m.nodes[2], m.nodes[3]} {
			if n.group(g).Status().Leading {
				leads++
			}
		}
		require.Equal(t, 1, leads, "group %d", g)
	}
}

// When a node dies the groups that it led elect others, as soon as groups that tick do
// and no sooner, and not all at once. Those that it followed know that it is not active.
func TestQuiescedElectWhenNodeDies(t *testing.T) {
	m := startIdle(t, 3, nil)
	election := m.nodes[1].host.cfg.ElectionTicks
	terms := map[GroupID]uint64{}
	for _, g := range m.groups {
		terms[g] = m.term(g)
	}
	m.nodes[1].crash(0)
	m.rounds(election - 1)
	m.requireQuiesced()
	m.rounds(1)
	for _, g := range m.groups {
		require.False(t, m.nodes[2].group(g).Status().Quiesced && idleLeader(m, g) != 3, "group %d relies on node 1", g)
	}
	elected := map[int]int{}                              // by the tick
	for tick := election + 1; tick < 6*election; tick++ { // votes may be split
		m.rounds(1)
		done := 0
		for _, g := range m.groups {
			if l := m.leads(g); l > 1 && m.term(g) > terms[g] {
				done++
			}
		}
		if _, ok := elected[done]; !ok {
			elected[done] = tick
		}
	}
	require.Contains(t, elected, idleGroups/3, "elections won by the ticks: %v", elected)
	require.Greater(t, len(elected), 1, "all in one tick: %v", elected)
	m.rounds(election)
	for _, g := range m.groups {
		if idleLeader(m, g) != 1 {
			require.Equal(t, idleLeader(m, g), m.leads(g), "group %d keeps its leader", g)
			require.Equal(t, terms[g], m.term(g), "group %d", g)
		}
		for _, f := range m.nodes[m.leads(g)].group(g).Status().Followers {
			require.Equal(t, f.Node != 1, f.Active, "group %d: node %d", g, f.Node)
		}
		m.requireProgress(g)
	}
	require.NoError(t, m.nodes[1].start())
	m.rounds(2 * election)
	m.requireQuiesced()
}

// A dead follower is known to be inactive as late as in a group that ticks, and not later.
func TestQuiescedFollowerInactive(t *testing.T) {
	m := startIdle(t, 3, nil)
	election := m.nodes[1].host.cfg.ElectionTicks
	active := func() bool {
		for _, f := range m.nodes[1].group(0).Status().Followers {
			if f.Node == 3 {
				return f.Active
			}
		}
		return false
	}
	m.nodes[3].crash(0)
	for i := range election {
		require.True(t, active(), "silent for %d ticks of %d", i, election)
		m.rounds(1)
	}
	m.rounds(1)
	require.False(t, active())
}

// A node that starts anew knows nobody who leads, and nobody may go on to take it for the
// leader that it was, however soon it is back.
func TestQuiescedNodeRestarts(t *testing.T) {
	m := startIdle(t, 3, nil)
	election := m.nodes[1].host.cfg.ElectionTicks
	terms := map[GroupID]uint64{}
	for _, g := range m.groups {
		terms[g] = m.term(g)
	}
	m.nodes[1].crash(0)
	require.NoError(t, m.nodes[1].start())
	// Votes are not asked for: it is the others that must notice.
	m.cut = func(p packet) bool { return p.kind() == "MsgPreVote" && p.from == 1 }
	m.rounds(3)
	for _, g := range m.groups {
		if l := idleLeader(m, g); l != 1 {
			require.Equal(t, l, m.nodes[1].group(g).Status().Leader, "group %d: it was told who leads", g)
			require.Equal(t, terms[g], m.term(g), "group %d", g)
		}
		for _, n := range m.up() {
			if idleLeader(m, g) == 1 {
				require.False(t, n.group(g).Status().Quiesced, "group %d, which it led, on node %d", g, n.id)
			}
		}
	}
	m.rounds(3 * election)
	m.cut = nil
	for _, g := range m.groups {
		require.NotZero(t, m.leads(g), "group %d", g)
		m.requireProgress(g)
	}
	m.rounds(2 * election)
	m.requireQuiesced()
}

// Whatever is cut, and in whichever direction: a group goes on as one that ticks would,
// and when all is healed everybody knows one leader and is quiet again.
func TestQuiescedCuts(t *testing.T) {
	for _, c := range []struct {
		name     string
		cut      func(packet) bool
		stays    []NodeID // whose groups must keep leader and term
		inactive map[NodeID]NodeID
	}{
		{"one does not hear another", cuts(1, 2), []NodeID{1, 2, 3}, map[NodeID]NodeID{1: 2, 2: 1}},
		{"a node is deaf", cuts(0, 1), []NodeID{2, 3}, map[NodeID]NodeID{2: 1, 3: 1}},
		{"a node is mute", cuts(1, 0), []NodeID{2, 3}, map[NodeID]NodeID{2: 1, 3: 1}},
		{"a node is alone", func(p packet) bool { return p.from == 1 || p.to == 1 }, []NodeID{2, 3}, map[NodeID]NodeID{2: 1, 3: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := startIdle(t, 3, nil)
			election := m.nodes[1].host.cfg.ElectionTicks
			terms := map[GroupID]uint64{}
			for _, g := range m.groups {
				terms[g] = m.term(g)
			}
			m.cut = c.cut
			// A leader notices that all are silent, then that it has no quorum, then others stand.
			m.rounds(7 * election)
			for _, g := range m.groups {
				was := idleLeader(m, g)
				if !slices.Contains(c.stays, was) {
					var leads []NodeID
					for _, n := range m.up() {
						if n.group(g).Status().Leading {
							leads = append(leads, n.id)
						}
					}
					require.Len(t, leads, 1, "group %d", g)
					require.NotEqual(t, was, leads[0], "group %d", g)
					continue
				}
				st := m.nodes[was].group(g).Status()
				require.True(t, st.Leading, "group %d keeps its leader", g)
				require.Equal(t, terms[g], st.Term, "group %d", g)
				for _, f := range st.Followers {
					require.Equal(t, c.inactive[was] != f.Node, f.Active, "group %d, led by node %d: node %d", g, was, f.Node)
				}
				w := m.nodes[was].propose(g, "meanwhile")
				m.settle()
				require.NoError(t, (<-w.done).err)
			}
			m.cut = nil
			m.rounds(4 * election)
			for _, g := range m.groups {
				require.NotZero(t, m.leads(g), "group %d", g)
			}
			m.requireQuiesced()
			for _, g := range m.groups {
				m.requireProgress(g)
			}
		})
	}
}

// A node of a version that knows no marks, or that does not want them, is sent the
// heartbeats of all groups.
func TestQuiesceNeedsAll(t *testing.T) {
	for name, old := range map[string]func(*manual){
		"answers without marks": func(m *manual) {
			m.cut = func(p packet) bool {
				if p.beat == nil && p.from == 3 && p.gm.Quiesce != 0 {
					p.gm.Quiesce = 0
					m.nodes[p.to].host.Step([]GroupMessage{p.gm})
					return true
				}
				return p.beat != nil && p.from == 3
			}
		},
		"does not want to": func(m *manual) {
			m.conf = func(c *Config) { c.QuiesceTicks = 0 }
			m.nodes[3].crash(0)
			require.NoError(m.t, m.nodes[3].start())
			m.conf = nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := startIdle(t, 3, nil)
			old(m)
			m.rounds(50)
			terms := map[GroupID]uint64{}
			got := map[GroupID]int{}
			for _, g := range m.groups {
				terms[g] = m.term(g)
			}
			inner := m.cut
			m.cut = func(p packet) bool {
				if p.kind() == "MsgHeartbeat" && p.to == 3 {
					got[p.gm.Group]++
				}
				return inner != nil && inner(p)
			}
			m.rounds(50)
			for _, g := range m.groups {
				require.Equal(t, terms[g], m.term(g), "group %d", g)
				require.NotZero(t, m.leads(g), "group %d", g)
				if l := m.leads(g); l != 3 {
					require.Equal(t, 50, got[g], "group %d", g)
					require.False(t, m.nodes[l].group(g).Status().Quiesced, "group %d", g)
				}
				require.False(t, m.nodes[3].group(g).Status().Quiesced, "group %d", g)
				m.requireProgress(g)
			}
		})
	}
}

// What is still on its way to be told, or to be done, keeps a group awake.
func TestBusyGroupsTick(t *testing.T) {
	awake := func(t *testing.T, m *manual, ticks int, why string) {
		t.Helper()
		m.rounds(ticks)
		require.False(t, m.nodes[1].group(0).Status().Quiesced, why)
		require.Empty(t, m.broken)
	}
	t.Run("a follower that lacks entries", func(t *testing.T) {
		m := startIdle(t, 3, nil)
		m.cut = func(p packet) bool { return p.to == 2 && p.kind() == "MsgApp" }
		m.nodes[1].propose(0, "x")
		awake(t, m, 20, "node 2 lacks it")
		m.cut = nil
		m.rounds(20)
		m.requireQuiesced()
	})
	t.Run("work now and then", func(t *testing.T) {
		m := startIdle(t, 3, nil)
		for i := range 10 {
			m.nodes[1].propose(0, "x")
			m.settle()
			m.rounds(1)
			require.False(t, m.nodes[1].group(0).Status().Quiesced, "tick %d", i)
		}
	})
	t.Run("work that comes between the marks and the answers", func(t *testing.T) {
		m := startIdle(t, 3, nil)
		n := m.nodes[1]
		n.propose(0, "x")
		m.settle()
		m.rounds(2)
		m.tick(1)
		m.cut = func(p packet) bool { return p.kind() == "MsgApp" }
		n.propose(0, "y")
		m.settle()
		require.False(t, n.group(0).Status().Quiesced)
		m.cut = nil
		m.rounds(20)
		m.requireQuiesced()
	})
	t.Run("a follower whose acknowledgement is lost", func(t *testing.T) {
		m := startIdle(t, 3, nil)
		m.cut = func(p packet) bool { return p.from == 2 && p.kind() == "MsgAppResp" }
		m.nodes[1].propose(0, "x")
		awake(t, m, 20, "node 1 does not know that node 2 has it")
		m.cut = nil
		m.rounds(20)
		m.requireQuiesced()
	})
	t.Run("answers of different rounds", func(t *testing.T) {
		m := startIdle(t, 3, nil)
		m.nodes[1].propose(0, "x")
		m.settle()
		for i := range 8 {
			deaf := NodeID(2 + i%2)
			m.cut = func(p packet) bool { return p.from == deaf && p.kind() == "MsgHeartbeatResp" }
			m.rounds(1)
			require.False(t, m.nodes[1].group(0).Status().Quiesced, "tick %d", i)
		}
		m.cut = nil
		m.rounds(1)
		m.requireQuiesced()
	})
	t.Run("a handover that does not come about", func(t *testing.T) {
		m := startIdle(t, 3, nil)
		m.cut = func(p packet) bool { return p.kind() == "MsgTimeoutNow" }
		w := m.nodes[1].transfer(0, 2)
		awake(t, m, 15, "who asked for it waits")
		m.rounds(6)
		require.ErrorIs(t, <-w.done, ErrTransfer)
		m.rounds(4)
		m.requireQuiesced()
	})
	t.Run("a follower that is probed", func(t *testing.T) {
		m := startIdle(t, 3, nil)
		m.cut = func(p packet) bool { return p.to == 2 && p.kind() == "MsgApp" }
		m.nodes[1].host.ReportUnreachable(2)
		awake(t, m, 20, "what is sent to node 2 is lost")
		m.cut = nil
		m.rounds(20)
		m.requireQuiesced()
	})
	t.Run("a leader that has not applied", func(t *testing.T) {
		m := startIdle(t, 1, nil)
		n := m.nodes[1]
		w := n.propose(0, "x")
		for n.write() {
		}
		n.group(0).abandon(w, context.Canceled)
		for range 20 {
			m.tick(1)
		}
		require.Equal(t, n.group(0).Status().Commit, n.group(0).Status().Applied+1)
		require.False(t, n.group(0).Status().Quiesced)
		m.rounds(5)
		m.requireQuiesced()
	})
	t.Run("a read that is not confirmed", func(t *testing.T) {
		m := startIdle(t, 3, nil)
		m.cut = func(p packet) bool { return p.kind() == "MsgHeartbeatResp" && len(p.gm.Message.GetContext()) > 0 }
		r := m.nodes[1].read(0)
		awake(t, m, 8, "the read waits")
		m.cut = nil
		m.rounds(20)
		require.NoError(t, (<-r.done).err)
		m.requireQuiesced()
	})
	t.Run("a node that is not heard", func(t *testing.T) {
		m := startIdle(t, 3, nil)
		m.cut = func(p packet) bool { return p.beat != nil && p.from == 2 && p.to == 1 }
		awake(t, m, 20, "node 2 is not heard")
		m.cut = func(p packet) bool { return p.beat != nil && p.from == 1 && p.to == 2 }
		awake(t, m, 20, "node 2 does not hear")
		require.Equal(t, NodeID(1), m.leads(0))
	})
	t.Run("a disk that hangs", func(t *testing.T) {
		m := startIdle(t, 3, nil)
		h := m.nodes[1].host
		m.cut = func(p packet) bool { return p.kind() == "MsgTimeoutNow" }
		m.clock.Advance(h.cfg.TickInterval)
		h.writer.busySince.Store(m.clock.Now().UnixNano())
		m.clock.Advance(time.Duration(h.cfg.ElectionTicks+1) * h.cfg.TickInterval)
		m.tick(1)
		h.writer.busySince.Store(0)
		m.settle()
		awake(t, m, 8, "leadership is being handed over, and nothing can be proposed")
		m.rounds(4)
		m.requireQuiesced()

		m.cut = nil
		h.writer.busySince.Store(m.clock.Now().UnixNano())
		m.clock.Advance(time.Duration(h.cfg.ElectionTicks+1) * h.cfg.TickInterval)
		m.tick(1)
		h.writer.busySince.Store(0)
		m.settle()
		require.NotEqual(t, NodeID(1), m.leads(0), "leadership was handed to who can write")
		m.rounds(20)
		m.requireQuiesced()
	})
}

// A group that is alone agrees with itself.
func TestQuiesceAlone(t *testing.T) {
	m := startIdle(t, 1, nil)
	before := m.nodes[1].host.Stats()
	m.rounds(100)
	require.Equal(t, before, m.nodes[1].host.Stats())
	m.requireProgress(0)
	require.False(t, m.nodes[1].group(0).Status().Quiesced)
}

// A log whose state was flushed after its group fell quiet is cut all the same.
func TestQuiescedLogIsCut(t *testing.T) {
	m := startIdle(t, 3, func(c *Config) { c.LogRetainEntries = 2 })
	n := m.nodes[1]
	for i := range 10 {
		n.propose(0, fmt.Sprint(i))
		m.settle()
	}
	m.rounds(20)
	m.requireQuiesced()
	first := n.group(0).Status().FirstIndex
	n.sms[0].flush()
	for range truncateEveryTicks {
		m.tick(1)
	}
	for n.truncate() || n.write() {
	}
	require.Greater(t, n.group(0).Status().FirstIndex, first)
	require.True(t, n.group(0).Status().Quiesced)
}

// Marks of a broken peer keep nobody from electing.
func TestQuiesceMarksAreChecked(t *testing.T) {
	m := startIdle(t, 3, nil)
	n := m.nodes[2]
	st := n.group(0).Status()
	step := func(typ raftpb.MessageType, from NodeID, term, commit, mark uint64) bool {
		n.host.Step([]GroupMessage{{Group: 0, Quiesce: mark, Message: &raftpb.Message{
			Type: typ.Enum(), From: new(uint64(from)), To: new(uint64(2)), Term: &term, Commit: &commit,
		}}})
		m.net = nil
		return n.group(0).Status().Quiesced
	}
	require.True(t, step(raftpb.MsgHeartbeat, 1, st.Term, st.Commit, st.Commit))
	require.False(t, step(raftpb.MsgHeartbeat, 1, st.Term, st.Commit, st.Commit+1), "an index that this log has not")
	require.False(t, step(raftpb.MsgHeartbeat, 1, st.Term, st.Commit, 1), "one long past")
	require.True(t, step(raftpb.MsgHeartbeat, 1, st.Term, st.Commit, st.Commit))
	require.False(t, step(raftpb.MsgHeartbeatResp, 3, st.Term, 0, st.Commit), "no leader")
	require.True(t, step(raftpb.MsgHeartbeat, 1, st.Term, st.Commit, st.Commit))
	require.False(t, step(raftpb.MsgHeartbeat, 3, st.Term-1, st.Commit, st.Commit), "a leader of the past")
	require.False(t, step(raftpb.MsgPreVote, 3, st.Term+1, 0, st.Commit), "no heartbeat")

	// An entry that is not committed.
	n.host.Step([]GroupMessage{{Group: 0, Message: &raftpb.Message{
		Type: raftpb.MsgApp.Enum(), From: new(uint64(1)), To: new(uint64(2)), Term: &st.Term, Commit: &st.Commit,
		Index: &st.LastIndex, LogTerm: &st.Term, Entries: []*raftpb.Entry{{Index: new(st.LastIndex + 1), Term: &st.Term}},
	}}})
	for n.write() {
	}
	require.Equal(t, st.LastIndex+1, n.group(0).Status().LastIndex)
	require.False(t, step(raftpb.MsgHeartbeat, 1, st.Term, st.Commit, st.Commit), "it has more than that")
	require.False(t, step(raftpb.MsgHeartbeat, 1, st.Term, st.Commit, st.LastIndex+1), "it is not committed")
	require.True(t, step(raftpb.MsgHeartbeat, 1, st.Term, st.LastIndex+1, st.LastIndex+1))

	// A candidate ticks, whatever it was asked just before.
	g := n.group(0)
	require.True(t, g.inbox.addMessage(GroupMessage{Quiesce: st.LastIndex + 1, Message: &raftpb.Message{
		Type: raftpb.MsgHeartbeat.Enum(), From: new(uint64(1)), To: new(uint64(2)), Term: &st.Term, Commit: new(st.LastIndex + 1),
	}}, 1))
	g.inbox.addOp(func(g *Group) { _ = g.core.Campaign() })
	g.kick()
	require.False(t, g.Status().Quiesced)
}

func TestLiveQuiesce(t *testing.T) {
	c := startLive(t, 3, 4, func(cfg *Config) { cfg.QuiesceTicks = 2 }, nil)
	quiesced := func() bool {
		for _, n := range c.nodes {
			if c.loop.hosts[n].Stats().Quiesced < 4 {
				return false
			}
		}
		return true
	}
	for round := range 3 {
		for g := range GroupID(4) {
			lead := c.leader(g)
			_, _, err := lead.Propose(t.Context(), []byte("x"))
			require.NoError(t, err, "round %d", round)
			if round == 1 {
				to := 1 + lead.h.cfg.NodeID%3
				require.NoError(t, lead.TransferLeader(t.Context(), to))
			}
		}
		waitFor(t, "rest", quiesced)
	}
	gone := c.group(1, 0).Status().Leader
	for _, n := range c.nodes {
		if n != gone {
			continue
		}
		c.loop.setDown(n, true)
	}
	waitFor(t, "another leader", func() bool {
		for _, n := range c.nodes {
			if n != gone && c.group(n, 0).Status().Leading {
				_, _, err := c.group(n, 0).Propose(t.Context(), []byte("y"))
				return err == nil
			}
		}
		return false
	})
	c.loop.setDown(gone, false)
	waitFor(t, "rest again", quiesced)
}
