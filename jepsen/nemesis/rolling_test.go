package nemesis

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/jepsen/env"
	"github.com/kvd-io/kvd/jepsen/worker"
)

// orderly are three processes that say so when they stop because they are told to.
func orderly(t *testing.T) *env.Env {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "node")
	e := processesOf(t, bin)
	require.NoError(t, os.WriteFile(bin, []byte("#!/bin/sh\ntrap 'echo level=INFO msg=stopped; exit 0' TERM\necho up\nwhile :; do sleep 0.05; done\n"), 0o700))
	for _, n := range e.Nodes {
		require.NoError(t, n.Start())
		require.Eventually(t, func() bool { return n.Logged("up", 0) }, 10*time.Second, time.Millisecond)
	}
	return e
}

// council is a cluster as its members tell of it.
type council struct {
	Control
	env  *env.Env
	keep bool // a drained node keeps its replica

	mu     sync.Mutex
	states map[uint64]string // by member
	late   uint64            // a member that does not catch up
	orders []worker.Drain
	ran    []bool // whether the node ran, at each order
	end    func() // ends the run, when it was asked as often as that
	asked  int
}

// endAfter gives a run's context, which ends when the council was asked so often.
func (c *council) endAfter(t *testing.T, asked int) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	c.end, c.asked = cancel, asked
	return ctx
}

func newCouncil(e *env.Env) *council {
	return &council{env: e, states: map[uint64]string{1: active, 2: active, 3: active}}
}

func (c *council) Members() (all []worker.Member, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.asked--; c.asked == 0 {
		c.end()
	}
	for _, n := range c.env.Nodes {
		id := n.Member()
		if id == 0 { // started anew: it has joined by now
			id = n.ID + 10
			c.states[id] = active
		}
		replicas := 1
		if c.states[id] != active && !c.keep {
			replicas = 0
		}
		all = append(all, worker.Member{Node: id, Address: n.Address, State: c.states[id], Replicas: replicas})
	}
	return all, nil
}

func (c *council) Drain(d worker.Drain) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.orders = append(c.orders, d)
	c.ran = append(c.ran, c.env.ByMember(d.Node).PID() != 0)
	switch {
	case d.Undo:
		c.states[d.Node] = active
	case d.ForGood:
		c.states[d.Node] = gone
	default:
		c.states[d.Node] = draining
	}
	return nil
}

func (c *council) Status() (*worker.Status, error) {
	all, err := c.Members()
	c.mu.Lock()
	defer c.mu.Unlock()
	st := &worker.Status{}
	for _, m := range all {
		st.Answered = append(st.Answered, m.Node)
		if m.Replicas == 0 {
			continue
		}
		r := worker.Replica{Node: m.Node, Shard: 1, Voters: []uint64{m.Node}, Applied: 7}
		if m.Node == c.late {
			r.Applied = 6
		}
		st.Replicas = append(st.Replicas, r)
	}
	return st, err
}

// A rolling restart was seen when all nodes stopped in order, one after the other, and are
// back.
func TestRollingRestartIsSeen(t *testing.T) {
	e := orderly(t)
	before := pids(e)
	f := one(t.Context(), t, &Runner{Env: e, Ctl: newCouncil(e)}, Event{Kind: RollingRestart})
	require.True(t, f.Seen, f.Detail)
	require.Equal(t, []uint64{2, 3, 1}, f.Nodes)
	for i, pid := range pids(e) {
		require.NotZero(t, pid)
		require.NotEqual(t, before[i], pid)
		require.Empty(t, e.Nodes[i].Crashes())
	}
}

// The next node is not touched before the one before has caught up.
func TestRollingRestartWaits(t *testing.T) {
	e := orderly(t)
	before := pids(e)
	c := newCouncil(e)
	c.late = 2
	f := one(c.endAfter(t, 5), t, &Runner{Env: e, Ctl: c}, Event{Kind: RollingRestart})
	require.False(t, f.Seen)
	require.Equal(t, []uint64{2}, f.Nodes)
	require.Contains(t, f.Detail, "node 2 was not back")
	require.Contains(t, f.Detail, "shard 1 is at 6 of 7")
	after := pids(e)
	require.Equal(t, []int{before[0], before[2]}, []int{after[0], after[2]})
}

// A node that is told to stop and just ends did not stop in order. It is started again.
func TestRollingRestartOfWhoJustEnds(t *testing.T) {
	e := started(t)
	f := one(t.Context(), t, &Runner{Env: e, Ctl: newCouncil(e)}, Event{Kind: RollingRestart})
	require.False(t, f.Seen)
	require.Contains(t, f.Detail, "node 2 did not stop in order")
	require.NotZero(t, e.Node(2).PID())
}

// All nodes are drained, restarted while they have nothing, and active again.
func TestDrainIsSeen(t *testing.T) {
	e := orderly(t)
	before := pids(e)
	c := newCouncil(e)
	f := one(t.Context(), t, &Runner{Env: e, Ctl: c}, Event{Kind: Drain})
	require.True(t, f.Seen, f.Detail)
	require.Equal(t, []worker.Drain{{Node: 2}, {Node: 2, Undo: true}, {Node: 3}, {Node: 3, Undo: true}, {Node: 1}, {Node: 1, Undo: true}}, c.orders)
	for i, pid := range pids(e) {
		require.NotEqual(t, before[i], pid)
	}
	require.Equal(t, map[uint64]string{1: active, 2: active, 3: active}, c.states)
}

// Who keeps a replica was not drained: it is not restarted, and is active again.
func TestDrainWithoutEffect(t *testing.T) {
	e := orderly(t)
	before := pids(e)
	c := newCouncil(e)
	c.keep = true
	f := one(c.endAfter(t, 9), t, &Runner{Env: e, Ctl: c}, Event{Kind: Drain})
	require.False(t, f.Seen)
	require.Equal(t, before, pids(e))
	require.Equal(t, active, c.states[2])
}

// A lost node is dead when it is decommissioned, and what comes in its place has another id
// and nothing of what the one before had.
func TestReplaceIsSeen(t *testing.T) {
	e := orderly(t)
	c := newCouncil(e)
	f := one(t.Context(), t, &Runner{Env: e, Ctl: c}, Event{Kind: Replace})
	require.True(t, f.Seen, f.Detail)
	require.Equal(t, []uint64{2}, f.Nodes)
	require.Equal(t, []worker.Drain{{Node: 2, ForGood: true}}, c.orders)
	require.Equal(t, []bool{false}, c.ran, "it was alive when it was given up")
	require.Equal(t, gone, c.states[2])
	require.Equal(t, uint64(12), e.Node(2).Member())
	require.NotZero(t, e.Node(2).PID())
	require.False(t, e.Node(2).Leaving())
}

// One that the cluster does not let go was not replaced, and nothing is in its place.
func TestReplaceWithoutEffect(t *testing.T) {
	e := orderly(t)
	c := newCouncil(e)
	f := one(c.endAfter(t, 5), t, &Runner{Env: e, Ctl: deafCouncil{c}}, Event{Kind: Replace})
	require.False(t, f.Seen)
	require.True(t, f.Short)
	require.True(t, e.Node(2).Leaving(), "the run's end goes on with it")
	require.Equal(t, uint64(2), e.Node(2).Member())
}

type deafCouncil struct{ *council }

func (deafCouncil) Drain(worker.Drain) error { return errors.New("no leader") }
