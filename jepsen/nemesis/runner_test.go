package nemesis

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/jepsen/env"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/jepsen/worker"
)

// processes are three nodes that are real processes, but not kvd: they wait to be killed.
func processes(t *testing.T) *env.Env {
	t.Helper()
	return processesOf(t, filepath.Join(t.TempDir(), "node"))
}

func processesOf(t *testing.T, bin string) *env.Env {
	t.Helper()
	require.NoError(t, os.WriteFile(bin, []byte("#!/bin/sh\nexec sleep 1000\n"), 0o700))
	e, err := env.New(env.Config{Binary: bin, Self: bin, DataDir: t.TempDir(), LogDir: t.TempDir(), Nodes: 3, Shards: 4, Clients: []string{"beside"}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return e
}

func started(t *testing.T) *env.Env {
	t.Helper()
	e := processes(t)
	for _, n := range e.Nodes {
		require.NoError(t, n.Start())
	}
	return e
}

// control answers as a worker does. What has no answer is not asked for by these faults.
type control struct {
	Control
	mu          sync.Mutex
	transferred []worker.Transfer
	refuse      error // of a transfer
	leader      uint64
}

func (c *control) Transfer(to worker.Transfer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.transferred = append(c.transferred, to)
	return c.refuse
}

func (c *control) Status() (*worker.Status, error) {
	if c.leader == 0 {
		return nil, errors.New("nobody answers")
	}
	return &worker.Status{Replicas: []worker.Replica{{Node: c.leader, Shard: 1, ServedTerm: 1}}}, nil
}

// one runs one fault and gives its record.
func one(ctx context.Context, t *testing.T, r *Runner, e Event) history.Fault {
	t.Helper()
	var got []history.Fault
	r.Record, r.Say, r.Shards, r.patient = func(f history.Fault) { got = append(got, f) }, t.Logf, 4, time.Millisecond
	if r.Ctl == nil {
		r.Ctl = &control{}
	}
	if e.Node == 0 {
		e.Node = 2
	}
	e.Order = []uint64{2, 3, 1}
	r.Run(ctx, Lanes{{e}})
	require.Len(t, got, 1)
	require.Equal(t, e.Kind, got[0].Kind)
	require.LessOrEqual(t, got[0].Start, got[0].End)
	return got[0]
}

func pids(e *env.Env) []int {
	var out []int
	for _, n := range e.Nodes {
		out = append(out, n.PID())
	}
	return out
}

// A kill was seen when the process is another one afterwards.
func TestKillIsSeen(t *testing.T) {
	e := started(t)
	before := pids(e)
	f := one(t.Context(), t, &Runner{Env: e}, Event{Kind: Kill})
	after := pids(e)
	require.True(t, f.Seen)
	require.False(t, f.Short)
	require.Equal(t, []uint64{2}, f.Nodes)
	require.NotZero(t, after[1])
	require.NotEqual(t, before[1], after[1])
	require.Equal(t, []int{before[0], before[2]}, []int{after[0], after[2]}, "the others go on")
	require.Empty(t, e.Node(2).Crashes(), "an ordered end is no crash")
}

// The node stays dead while the fault lasts.
func TestKilledNodeStaysDead(t *testing.T) {
	e := started(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan history.Fault)
	go func() { done <- one(ctx, t, &Runner{Env: e}, Event{Kind: Kill, For: time.Hour}) }()
	require.Eventually(t, func() bool { return e.Node(2).PID() == 0 }, 10*time.Second, time.Millisecond)
	cancel()
	f := <-done
	require.True(t, f.Seen)
	require.NotZero(t, e.Node(2).PID(), "and is started also at the run's end")
}

// A kill that finds no process is not seen, nor one after which the node does not start.
func TestKillWithoutEffect(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "node")
	e := processesOf(t, bin)
	f := one(t.Context(), t, &Runner{Env: e}, Event{Kind: Kill})
	require.False(t, f.Seen)
	require.NotZero(t, e.Node(2).PID(), "started it is")
	require.NoError(t, os.Remove(bin))
	f = one(t.Context(), t, &Runner{Env: e}, Event{Kind: Kill})
	require.False(t, f.Seen, "it does not come back")
	require.Contains(t, f.Detail, "failed: env: start node 2")
	require.Zero(t, e.Node(2).PID())
}

// All are killed, or it does not count as seen.
func TestKillAllIsSeen(t *testing.T) {
	e := started(t)
	before := pids(e)
	f := one(t.Context(), t, &Runner{Env: e}, Event{Kind: KillAll})
	require.True(t, f.Seen)
	require.ElementsMatch(t, []uint64{1, 2, 3}, f.Nodes)
	for i, pid := range pids(e) {
		require.NotZero(t, pid)
		require.NotEqual(t, before[i], pid)
	}
	_, err := e.Node(3).Kill()
	require.NoError(t, err)
	f = history.Fault{}
	require.NoError(t, (&Runner{Env: e}).one(t.Context(), Event{Kind: KillAll, Node: 2, Order: []uint64{2, 3, 1}}, &f))
	require.False(t, f.Seen, "one did not run")
	require.Contains(t, f.Detail, "2 of 3 ran")
	require.NotZero(t, e.Node(3).PID())
}

// What was not seen is tried again, at other nodes, and the record is of the try that was
// seen.
func TestTriedUntilSeen(t *testing.T) {
	e := started(t)
	_, err := e.Node(2).Kill()
	require.NoError(t, err)
	third := e.Node(3).PID()
	f := one(t.Context(), t, &Runner{Env: e}, Event{Kind: Kill})
	require.True(t, f.Seen)
	require.Equal(t, []uint64{3}, f.Nodes, "node 2 did not run")
	require.Contains(t, f.Detail, "nodes [2], not seen, tried again")
	require.NotEqual(t, third, e.Node(3).PID())
	for _, pid := range pids(e) {
		require.NotZero(t, pid)
	}
}

// A fault whose proof is late is waited for: nobody sends anything in the beginning.
func TestProofIsWaitedFor(t *testing.T) {
	w := &wires{quiet: true}
	r := &Runner{Env: processes(t), net: w, Ctl: &control{leader: 3}, patient: time.Hour}
	f := history.Fault{}
	done := make(chan error)
	go func() { done <- r.one(t.Context(), Event{Kind: Halves, Node: 2, Order: []uint64{2, 3, 1}}, &f) }()
	require.Eventually(t, func() bool { return w.asked.Load() > 3 }, 10*time.Second, time.Millisecond)
	w.spoken.Store(true)
	require.NoError(t, <-done)
	require.True(t, f.Seen, f.Detail)
	require.Empty(t, w.cuts, "taken back")
}

// A stop was seen when the kernel says that the process is stopped, and ends with it.
func TestStopIsSeen(t *testing.T) {
	e := started(t)
	before := pids(e)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan history.Fault)
	go func() { done <- one(ctx, t, &Runner{Env: e}, Event{Kind: Stop, For: time.Hour}) }()
	require.Eventually(t, func() bool { return state(t, before[1]) == "T" }, 10*time.Second, time.Millisecond)
	require.NotEqual(t, "T", state(t, before[0]))
	// The fault needs a moment to see it, too; then it ends with the run.
	require.Eventually(t, e.Node(2).Stopped, 10*time.Second, time.Millisecond)
	cancel()
	<-done
	require.Equal(t, before, pids(e), "it lives")
	require.Eventually(t, func() bool { return state(t, before[1]) != "T" }, 10*time.Second, time.Millisecond)
	answered := uint64(40)
	gets := func() map[string]uint64 {
		answered += 2
		return map[string]uint64{"shm": answered, "grpc": 9}
	}
	f := one(t.Context(), t, &Runner{Env: e, Gets: gets}, Event{Kind: Stop, For: 10 * time.Millisecond})
	require.True(t, f.Seen)
	require.Equal(t, map[string]uint64{"shm": 2, "grpc": 0}, f.Gets, "only those in between")
	require.False(t, f.Short)
}

// state of a process by the kernel's word: S, R, T, ...
func state(t *testing.T, pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	return strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))[0]
}

// Nothing stops where nothing runs.
func TestStopWithoutEffect(t *testing.T) {
	f := one(t.Context(), t, &Runner{Env: processes(t)}, Event{Kind: Stop})
	require.False(t, f.Seen)
	require.False(t, f.Short)
}

// Transfers were seen when the cluster agreed to one.
func TestTransferIsSeen(t *testing.T) {
	e := processes(t)
	for _, refuse := range []error{nil, errors.New("no")} {
		c := &control{refuse: refuse}
		f := one(t.Context(), t, &Runner{Env: e, Ctl: c}, Event{Kind: Transfer, For: 100 * time.Millisecond})
		require.NotEmpty(t, c.transferred)
		require.Equal(t, refuse == nil, f.Seen, "%v: %s", refuse, f.Detail)
		for _, to := range c.transferred {
			require.Contains(t, []uint64{1, 2, 3}, to.To)
			require.Contains(t, []uint32{1, 2, 3, 4}, to.Shard)
		}
	}
}

// wires is a network that does what it is told, or only says so.
type wires struct {
	deaf    bool // nothing that is ordered happens, and probes tell
	quiet   bool // nobody sends anything, so that cuts drop nothing
	cuts    map[env.Cut]bool
	most    int
	down    map[string]bool
	dropped uint64
	fail    error // of Cut
	asked   atomic.Int64
	spoken  atomic.Bool // somebody sends after all
}

func (w *wires) Cut(_ string, cuts []env.Cut) error {
	if w.fail != nil {
		return w.fail
	}
	w.cuts = map[env.Cut]bool{}
	for _, c := range cuts {
		w.cuts[c] = true
	}
	w.most = max(w.most, len(cuts))
	return nil
}

func (w *wires) VerifyCuts(...string) error {
	if w.deaf && len(w.cuts) > 0 {
		return errors.New("the network is not as ordered")
	}
	return nil
}

func (w *wires) Dropped() (uint64, error) {
	w.asked.Add(1)
	if !w.deaf && (!w.quiet || w.spoken.Load()) && len(w.cuts) > 0 {
		w.dropped += 5
	}
	return w.dropped, nil
}

func (w *wires) Link(host string, up bool) error {
	if w.down == nil {
		w.down = map[string]bool{}
	}
	w.down[host] = !up
	return nil
}

func (w *wires) Reachable(_, to string) bool { return w.deaf || !w.down[to] }

var cutKinds = []string{Halves, Bridge, Ring, OneWay, IsolateLeader, ClientLeader}

// A cut was seen when the probes agree and packets were dropped; whatever comes of it, it
// is taken back.
func TestCutIsSeen(t *testing.T) {
	e := processes(t)
	for _, kind := range cutKinds {
		for name, c := range map[string]struct {
			net  *wires
			seen bool
		}{
			"works": {&wires{}, true}, "deaf": {&wires{deaf: true}, false}, "quiet": {&wires{quiet: true}, false}, "fails": {&wires{fail: errors.New("nft")}, false},
		} {
			w := c.net
			f := one(t.Context(), t, &Runner{Env: e, net: w, Ctl: &control{leader: 3}}, Event{Kind: kind})
			require.Equal(t, c.seen, f.Seen, "%s, %s: %s", kind, name, f.Detail)
			require.Empty(t, w.cuts, "%s, %s: taken back", kind, name)
			if c.seen {
				require.NotZero(t, w.most, kind)
			}
		}
	}
}

// Who is to be cut off because it leads must be known.
func TestNoLeaderNoCut(t *testing.T) {
	e := processes(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, kind := range []string{IsolateLeader, ClientLeader} {
		w := &wires{}
		f := history.Fault{Kind: kind}
		err := (&Runner{Env: e, net: w, Ctl: &control{}}).one(ctx, Event{Kind: kind, Node: 1, Order: []uint64{1, 2, 3}}, &f)
		require.ErrorContains(t, err, "nobody answers")
		require.False(t, f.Seen)
		require.Zero(t, w.most)
	}
}

// A cable out was seen when the host could not be reached.
func TestFlapIsSeen(t *testing.T) {
	e := processes(t)
	for _, deaf := range []bool{false, true} {
		w := &wires{deaf: deaf}
		f := one(t.Context(), t, &Runner{Env: e, net: w}, Event{Kind: Flap, For: time.Millisecond})
		require.Equal(t, !deaf, f.Seen, f.Detail)
		require.Contains(t, w.down, "n2")
		for host, down := range w.down {
			require.False(t, down, "%s is plugged in again", host)
		}
	}
}
