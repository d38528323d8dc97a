package raft

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/internal/clock"
	"go.etcd.io/raft/v3/raftpb"
)

func TestConfigValidate(t *testing.T) {
	good := Config{NodeID: 1, Log: newMemLog(), Transport: loopEnd{}}
	require.NoError(t, good.Validate())
	for name, change := range map[string]func(*Config){
		"NodeID":              func(c *Config) { c.NodeID = 0 },
		"NodeID is":           func(c *Config) { c.NodeID = maxNodeID },
		"Log":                 func(c *Config) { c.Log = nil },
		"Transport":           func(c *Config) { c.Transport = nil },
		"TickInterval":        func(c *Config) { c.TickInterval = -1 },
		"HeartbeatTicks":      func(c *Config) { c.HeartbeatTicks = -1 },
		"ElectionTicks":       func(c *Config) { c.ElectionTicks = 1 },
		"MaxInflightBytes":    func(c *Config) { c.MaxInflightBytes = 1 },
		"MaxInflightMessages": func(c *Config) { c.MaxInflightMessages = -1 },
		"MaxInboxMessages":    func(c *Config) { c.MaxInboxMessages = -1 },
		"Workers":             func(c *Config) { c.Workers = -1 },
		"Appliers":            func(c *Config) { c.Appliers = -1 },
	} {
		c := good
		change(&c)
		require.ErrorContains(t, c.Validate(), name)
	}
}

// What the read protocol rests on is not to be had otherwise.
func TestCoreConfig(t *testing.T) {
	h, err := NewHost(Config{NodeID: 1, Log: newMemLog(), Transport: loopEnd{}})
	require.NoError(t, err)
	c := h.coreConfig(&Group{}, 0)
	require.True(t, c.AsyncStorageWrites)
	require.True(t, c.PreVote)
	require.True(t, c.CheckQuorum)
	require.True(t, c.DisableProposalForwarding)
	require.True(t, c.StepDownOnRemoval)
	require.False(t, c.DisableConfChangeValidation)
	require.Zero(t, c.ReadOnlyOption)
}

func TestTicksComeFromTheClock(t *testing.T) {
	clk := clock.NewManual(time.Unix(0, 0))
	h, err := NewHost(Config{NodeID: 1, Log: newMemLog(), Transport: loopEnd{newLoop(), 1}, Clock: clk, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	g, err := h.AddGroup(GroupConfig{ID: 1, StateMachine: newMachine(1, 1)})
	require.NoError(t, err)
	h.Start()
	defer func() { require.NoError(t, h.Close()) }()
	waitFor(t, "election", func() bool {
		clk.Advance(100 * time.Millisecond)
		return g.Status().Leading
	})
	_, _, err = g.Propose(t.Context(), []byte("alone"))
	require.NoError(t, err)
}

// A stall is no reason to run for election at once.
func TestTicksAreNotMadeUpFor(t *testing.T) {
	var b inbox
	for range 50 {
		b.addTick()
	}
	require.Equal(t, maxTicks, b.take().ticks)
}

func TestProposeGivesUp(t *testing.T) {
	c := startLive(t, 3, 1, nil, nil)
	lead := c.leader(0)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err := lead.Propose(ctx, []byte("never"))
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, ErrOutcomeUnknown)

	sm := c.loop.sms[lead.h.cfg.NodeID][0]
	before := len(sm.entries())
	for _, n := range c.nodes {
		if n != lead.h.cfg.NodeID {
			c.loop.setDown(n, true)
		}
	}
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, _, err = lead.Propose(ctx, []byte("perhaps"))
	require.ErrorIs(t, err, ErrOutcomeUnknown)
	for _, n := range c.nodes {
		c.loop.setDown(n, false)
	}
	c.leader(0)
	require.GreaterOrEqual(t, len(sm.entries()), before)
}

// A proposal that is given up before it was stepped is left out.
func TestAbandonedBeforeProposed(t *testing.T) {
	m := newManual(t, 1, 1, nil)
	m.elect(1, 0)
	g := m.nodes[1].group(0)
	w := g.newProposal([]byte("x"))
	require.True(t, g.inbox.addProposal(w, 1<<20))
	o := g.abandon(w, context.Canceled)
	require.ErrorIs(t, o.err, context.Canceled)
	require.NotErrorIs(t, o.err, ErrOutcomeUnknown)
	g.kick()
	m.settle()
	require.Empty(t, m.nodes[1].sms[0].entries())
}

// An entry answers only in the term in which it was proposed.
func TestAnswerInOwnTermOnly(t *testing.T) {
	m := newManual(t, 1, 1, nil)
	m.elect(1, 0)
	g := m.nodes[1].group(0)
	for _, c := range []struct {
		term uint64
		err  error
	}{{2, nil}, {3, ErrOutcomeUnknown}, {1, ErrOutcomeUnknown}} {
		w := g.newProposal([]byte("x"))
		w.term = 2
		g.mu.waiters[w.id] = w
		g.resolveLocked(w.entry.GetData(), &raftpb.Entry{Index: new(uint64(9)), Term: &c.term}, "v")
		o := <-w.done
		require.ErrorIs(t, o.err, c.err)
	}
	// Nor does another node's entry that happens to have the same number.
	w := g.newProposal([]byte("x"))
	w.term = 2
	g.mu.waiters[w.id] = w
	hdr := make([]byte, headerBytes)
	putHeader(hdr, w.id, 2)
	g.resolveLocked(hdr, &raftpb.Entry{Index: new(uint64(9)), Term: new(uint64(2))}, "v")
	require.Empty(t, w.done)
}

func TestOverload(t *testing.T) {
	m := newManual(t, 3, 1, func(c *Config) { c.MaxUncommittedBytes = 100; c.MaxMessageBytes = 100 })
	m.elect(1, 0)
	n := m.nodes[1]
	a, b := n.propose(0, "0123456789012345678901234567890123456789"), n.propose(0, "0123456789012345678901234567890123456789")
	require.ErrorIs(t, (<-b.done).err, ErrOverloaded)
	m.settle()
	require.NoError(t, (<-a.done).err)
	// Several at once that are too much together: as many as fit.
	g := n.group(0)
	ws := []*proposal{n.propose(0, "01234567890123456789")}
	for range 3 {
		w := g.newProposal([]byte("01234567890123456789"))
		require.True(t, g.inbox.addProposal(w, 1<<20))
		ws = append(ws, w)
	}
	require.False(t, g.inbox.addProposal(g.newProposal(make([]byte, 10)), 100), "inbox is bounded too")
	g.kick()
	m.settle()
	var ok, over int
	for _, w := range ws {
		switch o := <-w.done; {
		case o.err == nil:
			ok++
		case errors.Is(o.err, ErrOverloaded):
			over++
		}
	}
	require.Equal(t, 2, ok)
	require.Equal(t, 2, over)
}

func TestInboxIsBounded(t *testing.T) {
	m := newManual(t, 2, 1, func(c *Config) { c.MaxInboxMessages = 3 })
	n := m.nodes[1]
	g := n.group(0)
	require.True(t, g.turn.ask()) // somebody is at it
	msg := &raftpb.Message{Type: raftpb.MsgHeartbeat.Enum(), From: new(uint64(2)), To: new(uint64(1)), Term: new(uint64(5))}
	for range 5 {
		n.host.Step([]GroupMessage{{Message: msg}})
	}
	require.EqualValues(t, 2, n.host.Stats().DroppedFull)
}

func TestCloseAnswersEverybody(t *testing.T) {
	c := startLive(t, 3, 1, nil, nil)
	lead := c.leader(0)
	for _, n := range c.nodes {
		c.loop.setDown(n, true)
	}
	errs := make(chan error, 1)
	go func() {
		_, _, err := lead.Propose(context.Background(), []byte("x"))
		errs <- err
	}()
	waitFor(t, "proposal", func() bool {
		lead.mu.Lock()
		defer lead.mu.Unlock()
		return len(lead.mu.waiters) == 1
	})
	require.NoError(t, lead.h.Close())
	err := <-errs
	require.ErrorIs(t, err, ErrOutcomeUnknown)
	require.ErrorIs(t, err, ErrClosed)
	_, _, err = lead.Propose(t.Context(), []byte("y"))
	require.ErrorIs(t, err, ErrClosed)
	require.NotErrorIs(t, err, ErrOutcomeUnknown)
	_, err = lead.ReadIndex(t.Context())
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, lead.TransferLeader(t.Context(), 2), ErrClosed)
	_, err = lead.h.AddGroup(GroupConfig{ID: 9, StateMachine: newMachine(9, 1)})
	require.ErrorIs(t, err, ErrClosed)
	sm := c.loop.sms[lead.h.cfg.NodeID][0]
	require.Zero(t, sm.serving)
}

// The first error of log, state or core stops the node: once, with everybody told.
func TestFatal(t *testing.T) {
	boom := errors.New("boom")
	for name, broken := range map[string]func(*manualNode){
		"log":   func(n *manualNode) { n.log.failNext = boom },
		"state": func(n *manualNode) { n.sms[0].fail = boom },
		"core storage": func(n *manualNode) {
			n.group(0).storage.log = brokenLog{n.log, boom}
			n.group(0).storage.mu.last++ // as if there were more to be read
		},
		"core": func(n *manualNode) {
			n.group(0).inbox.addOp(func(g *Group) { coreLogger{}.Panicf("core says %v", boom) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			calls := 0
			m := newManual(t, 3, 2, func(c *Config) {
				was := c.Hooks.OnFatal
				c.Hooks.OnFatal = func(g GroupID, err error) { calls++; was(g, err) }
			})
			m.elect(1, 0)
			m.elect(1, 1)
			n := m.nodes[1]
			w := n.propose(0, "a")
			other := n.propose(1, "b")
			broken(n)
			m.settle()
			for range 20 {
				m.tick(1)
				m.settle()
			}
			require.Equal(t, 1, calls)
			require.ErrorContains(t, n.fate, "boom")
			for _, w := range []*proposal{w, other} {
				if o := <-w.done; o.err != nil {
					require.ErrorIs(t, o.err, ErrOutcomeUnknown)
				}
			}
			require.Zero(t, n.sms[0].serving)
			require.Zero(t, n.sms[1].serving)
			require.ErrorIs(t, (<-n.propose(1, "c").done).err, ErrClosed)
			require.ErrorContains(t, n.host.Close(), "boom")
		})
	}
}

type brokenLog struct {
	LogStore
	err error
}

func (l brokenLog) Entries(GroupID, uint64, uint64, uint64) ([]*raftpb.Entry, error) {
	return nil, l.err
}
func (l brokenLog) Term(GroupID, uint64) (uint64, error) { return 0, l.err }

// One group whose state machine hangs does not hold up the others.
func TestSlowGroup(t *testing.T) {
	c := startLive(t, 1, 8, func(cfg *Config) { cfg.Appliers = 2 }, nil)
	slow := c.loop.sms[1][0]
	c.leader(0)
	block := make(chan struct{})
	unblock := sync.OnceFunc(func() { close(block) })
	t.Cleanup(unblock)
	slow.mu.Lock()
	slow.block = block
	slow.mu.Unlock()
	done := make(chan error, 1)
	go func() {
		_, _, err := c.group(1, 0).Propose(context.Background(), []byte("slow"))
		done <- err
	}()
	for g := GroupID(1); g < 8; g++ {
		_, _, err := c.leader(g).Propose(t.Context(), []byte("x"))
		require.NoError(t, err)
	}
	require.Empty(t, done)
	unblock()
	require.NoError(t, <-done)
}

// A follower that was away gets a snapshot; while it is installed its other groups
// go on.
func TestLiveSnapshot(t *testing.T) {
	c := startLive(t, 3, 4, func(cfg *Config) { cfg.LogRetainEntries = 10; cfg.Appliers = 1 }, nil)
	for g := range GroupID(4) {
		c.leader(g)
	}
	var away NodeID = 3
	c.loop.setDown(away, true)
	for g := range GroupID(4) {
		for i := range 100 {
			proposeAnyhow(t, c, g, fmt.Sprint(i))
		}
	}
	for _, n := range c.nodes {
		if n == away {
			continue
		}
		for g := range GroupID(4) {
			waitFor(t, "truncation", func() bool {
				c.loop.sms[n][g].flush()
				return c.group(n, g).Status().FirstIndex > 50
			})
		}
	}
	block := make(chan struct{})
	unblock := sync.OnceFunc(func() { close(block) })
	t.Cleanup(unblock)
	blocked := c.loop.sms[away][0]
	blocked.mu.Lock()
	blocked.block = block
	blocked.mu.Unlock()
	c.loop.setDown(away, false)
	for g := GroupID(1); g < 4; g++ {
		waitFor(t, "snapshot", func() bool { return len(c.loop.sms[away][g].entries()) >= 100 })
	}
	require.Less(t, len(blocked.entries()), 100)
	unblock()
	waitFor(t, "snapshot", func() bool { return len(blocked.entries()) >= 100 })
	require.NotZero(t, c.loop.hosts[away].Stats().SnapshotsGot)
}

func proposeAnyhow(t *testing.T, c *live, g GroupID, data string) {
	t.Helper()
	waitFor(t, "proposal applied", func() bool {
		for _, n := range c.nodes {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, _, err := c.group(n, g).Propose(ctx, []byte(data))
			cancel()
			if err == nil {
				return true
			}
		}
		return false
	})
}

func TestLiveTransfer(t *testing.T) {
	c := startLive(t, 3, 1, nil, nil)
	for range 5 {
		lead := c.leader(0)
		to := NodeID(1 + uint64(lead.h.cfg.NodeID)%3)
		err := lead.TransferLeader(t.Context(), to)
		if errors.Is(err, ErrTransfer) || errors.Is(err, ErrNotLeader) {
			continue // a slow machine elects by itself
		}
		require.NoError(t, err)
		require.Equal(t, to, lead.Status().Leader)
	}
	lead := c.leader(0)
	require.ErrorIs(t, lead.TransferLeader(t.Context(), 17), ErrTransfer)
}

// 128 groups on a node share syncs and calls.
func TestManyGroups(t *testing.T) {
	const groups = 128
	c := startLive(t, 3, groups, nil, func(l *memLog) { l.syncDelay = time.Millisecond })
	var wg sync.WaitGroup
	var applied atomic.Int64
	for g := range GroupID(groups) {
		wg.Go(func() {
			for i := range 5 {
				proposeAnyhow(t, c, g, fmt.Sprint(i))
				applied.Add(1)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, groups*5, applied.Load())
	s := c.loop.hosts[1].Stats()
	require.EqualValues(t, groups, s.Groups)
	require.Less(t, s.LogSyncs, s.LogEntries, "syncs are shared")
	require.Less(t, s.SendCalls, s.MessagesOut, "calls are shared")
}

// The core learns of what the transport lost, and sends again.
func TestReportUnreachable(t *testing.T) {
	m := newManual(t, 3, 1, nil)
	m.elect(1, 0)
	m.nodes[1].propose(0, "lost")
	for len(m.net) > 0 {
		m.drop(0)
	}
	n := m.nodes[1]
	n.host.ReportUnreachable(2)
	// No longer ahead of what node 2 acknowledged, while node 3 is.
	n.group(0).mu.Lock()
	n.group(0).publishProgressLocked()
	n.group(0).mu.Unlock()
	for _, f := range n.group(0).Status().Followers {
		want := f.Match + 2
		if f.Node == 2 {
			want = f.Match + 1
		}
		require.Equal(t, want, f.Next, "node %d", f.Node)
	}
	m.tick(1)
	m.settle()
	require.Len(t, m.nodes[2].sms[0].entries(), 1)
}

// A read that was not confirmed ends with the leadership that it asked about.
func TestReadEndsWithLeadership(t *testing.T) {
	m := newManual(t, 3, 1, nil)
	m.elect(1, 0)
	r := m.nodes[1].read(0)
	for len(m.net) > 0 {
		m.drop(0)
	}
	tr := m.nodes[1].transfer(0, 2)
	m.settle()
	require.NoError(t, <-tr.done)
	require.Len(t, r.done, 1)
	require.ErrorIs(t, (<-r.done).err, ErrNotLeader)
}

func TestAddGroupTwice(t *testing.T) {
	m := newManual(t, 1, 1, nil)
	_, err := m.nodes[1].host.AddGroup(GroupConfig{ID: 0, StateMachine: newMachine(0, 1)})
	require.ErrorContains(t, err, "already there")
	_, err = m.nodes[1].host.AddGroup(GroupConfig{ID: 1})
	require.ErrorContains(t, err, "StateMachine is missing")
	require.Nil(t, m.nodes[1].host.Group(1))
}

// A leader whose disk hangs leaves the lead to others, and serves no longer.
func TestDiskStall(t *testing.T) {
	c := startLive(t, 3, 2, nil, nil)
	lead := c.leader(0)
	self := lead.h.cfg.NodeID
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	c.logs[self].gate.Store(&gate)
	done := make(chan error, 1)
	go func() {
		_, _, err := lead.Propose(context.Background(), []byte("x"))
		done <- err
	}()
	waitFor(t, "another leader", func() bool {
		for _, n := range c.nodes {
			if _, err := c.group(n, 0).ReadIndex(t.Context()); n != self && err == nil {
				return true
			}
		}
		return false
	})
	require.ErrorIs(t, <-done, ErrOutcomeUnknown)
	require.NotZero(t, lead.h.Stats().DiskStalls)
	c.logs[self].gate.Store(nil)
	open()
	c.leader(0)
}

// A group leaves under load: everyone who waits is answered, nothing of it is written or
// applied afterwards, the others go on, and it can be made again.
func TestRemoveGroup(t *testing.T) {
	c := startLive(t, 1, 2, nil, nil)
	h := c.loop.hosts[1]
	g := c.leader(1)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				_, _, err := g.Propose(t.Context(), []byte("x"))
				if err != nil {
					if !errors.Is(err, ErrOutcomeUnknown) && !errors.Is(err, ErrClosed) && !errors.Is(err, ErrNotLeader) {
						t.Errorf("propose: %v", err)
					}
					return
				}
			}
		})
	}
	waitFor(t, "something is applied", func() bool { return g.Status().Applied > 5 })
	require.NoError(t, h.RemoveGroup(1))
	wrote, applied := g.Status().LastIndex, g.Status().Applied
	wg.Wait()
	require.Nil(t, h.Group(1))
	require.ErrorIs(t, h.RemoveGroup(1), ErrNoGroup)
	require.False(t, g.Status().Leading)
	other := c.leader(0)
	for range 20 {
		_, _, err := other.Propose(t.Context(), []byte("y"))
		require.NoError(t, err)
	}
	require.Equal(t, wrote, g.Status().LastIndex)
	require.Equal(t, applied, g.Status().Applied)
	_, err := g.ReadIndex(t.Context())
	require.ErrorIs(t, err, ErrClosed)
	require.Zero(t, c.loop.sms[1][1].serving)
	again, err := h.AddGroup(GroupConfig{ID: 1, StateMachine: c.loop.sms[1][1]})
	require.NoError(t, err)
	require.GreaterOrEqual(t, again.Status().Term, uint64(1))
}
