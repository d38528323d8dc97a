//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// shards that newCluster gives a cluster.
const shards = 4

// readers get keys without end, by one client each, and hold every answer against what
// was put. Not one may fail.
type readers struct {
	stop  context.CancelFunc
	wg    sync.WaitGroup
	gets  atomic.Int64
	fault atomic.Pointer[error]
}

func startReaders(t testing.TB, held map[string]string, clients ...*client.Client) *readers {
	ctx, stop := context.WithCancel(context.Background())
	r := &readers{stop: stop}
	var keys []string
	for k := range held {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for i, c := range clients {
		r.wg.Go(func() {
			for n := i * 7; ctx.Err() == nil; n++ {
				k := keys[n%len(keys)]
				v, err := c.Get(ctx, []byte(k))
				if err == nil && string(v.Data) != held[k] {
					err = errors.New("other bytes")
				}
				if err != nil && ctx.Err() == nil {
					err = fmt.Errorf("get %s: %w", k, err)
					r.fault.CompareAndSwap(nil, &err)
					return
				}
				r.gets.Add(1)
			}
		})
	}
	t.Cleanup(r.end)
	return r
}

func (r *readers) end() {
	r.stop()
	r.wg.Wait()
}

func (r *readers) requireUnharmed(t testing.TB) {
	t.Helper()
	r.end()
	if err := r.fault.Load(); err != nil {
		require.NoError(t, *err)
	}
	require.NotZero(t, r.gets.Load())
}

// awaitVoters returns when every shard has as many voters, and none of the nodes in
// without.
func awaitVoters(t testing.TB, c *cluster, voters int, without ...uint64) {
	t.Helper()
	a := c.admin(t)
	await(t, fmt.Sprintf("%d voters of every shard", voters), func() error {
		ctx, cancel := within(patience)
		defer cancel()
		nodes, err := a.Status(ctx)
		if err != nil {
			return err
		}
		seen := map[uint32]bool{}
		for _, n := range nodes {
			for _, s := range n.Status.GetShards() {
				if s.GetShard() == 0 || s.GetLeaderNode() != n.NodeID {
					continue
				}
				seen[s.GetShard()] = true
				if len(s.GetVoters()) != voters {
					return fmt.Errorf("shard %d has voters %v", s.GetShard(), s.GetVoters())
				}
				for _, id := range without {
					if slices.Contains(s.GetVoters(), id) {
						return fmt.Errorf("shard %d is still on node %d", s.GetShard(), id)
					}
				}
			}
		}
		if len(seen) != shards {
			return fmt.Errorf("%d of %d shards have a leader that says so", len(seen), shards)
		}
		return nil
	})
}

// TestGrow: a node alone becomes three while it is written and read. Not one get fails,
// no acknowledged put is lost, and in the end it survives its first node.
func TestGrow(t *testing.T) {
	c := newCluster(t, devcluster.Config{Nodes: 1})
	held := fill(t, c.dial(t, nil), "held", 300, 2000)
	first := c.dial(t, nil)
	warmUp(t, first, held)
	r := startReaders(t, held, first, c.dial(t, nil), c.dial(t, func(cfg *client.Config) { cfg.Transport = "tcp" }))
	l := startLoad(t, "load", c.dial(t, nil))
	for range 2 {
		ctx, cancel := within(patience)
		_, err := c.Join(ctx)
		cancel()
		require.NoError(t, err)
	}
	awaitVoters(t, c, 3)
	l.awaitProgress(t)
	r.requireUnharmed(t)
	l.pause()
	require.Empty(t, l.errors(), "puts failed, or their outcome is unknown")
	l.verify(t, first)

	require.NoError(t, c.Node(1).Kill())
	check(t, first, held)
	l.verify(t, first)
	c.restart(t, 1)
	fresh := c.dial(t, func(cfg *client.Config) { cfg.Endpoints = []string{c.Node(3).Address} })
	check(t, fresh, held)

	// The third is wiped: under its id it never comes back, with nothing said it is another.
	third := c.Node(3)
	require.NoError(t, third.Kill())
	require.NoError(t, os.RemoveAll(third.DataDir))
	res := command{bin: kvdBin, args: append(third.Args(), "--node-id", "3")}.run(t)
	res.refused(t, 3, "given its id by the cluster", "a voter that forgets may vote twice")
	require.NoFileExists(t, filepath.Join(third.DataDir, "cluster.json"))
	check(t, first, held)
}

// awaitActive waits until so many nodes may have replicas.
func awaitActive(t testing.TB, c *cluster, nodes int) {
	t.Helper()
	a := c.admin(t)
	await(t, fmt.Sprintf("%d active nodes", nodes), func() error {
		ctx, cancel := within(patience)
		defer cancel()
		members, err := a.Members(ctx)
		if err != nil {
			return err
		}
		active := 0
		for _, m := range members {
			if m.GetNode().GetState() == kvdv1.NodeState_NODE_STATE_ACTIVE {
				active++
			}
		}
		if active != nodes {
			return fmt.Errorf("%d of them: %v", active, members)
		}
		return nil
	})
}

func succeeded(t testing.TB, r result) result {
	t.Helper()
	require.Zero(t, r.code, "exit code; output:\n%s", r.text())
	return r
}

// TestDrain: of four nodes one is drained, stopped and taken out for good, by kvctl and
// under load. Not one get fails, and puts only wait.
func TestDrain(t *testing.T) {
	c := newCluster(t, devcluster.Config{Nodes: 1})
	for range 3 {
		ctx, cancel := within(patience)
		_, err := c.Join(ctx)
		cancel()
		require.NoError(t, err)
	}
	awaitActive(t, c, 4) // the last may be no place for a replica yet
	awaitVoters(t, c, 3)
	all := c.dial(t, nil)
	held := fill(t, all, "held", 200, 1500)
	warmUp(t, all, held)

	// A node that leads nothing is not safe to stop where another that votes beside it is down.
	require.NoError(t, c.Node(4).Kill())
	c.kvctl(t, "drain", "3", "--leaders-only", "--yes").failed(t, 5, "node 3 leads nothing, but it is not safe to stop", "too few of those that vote in shard", "would be left")
	succeeded(t, c.kvctl(t, "drain", "3", "--undo"))
	c.restart(t, 4)

	r := startReaders(t, held, all, c.dial(t, func(cfg *client.Config) { cfg.Transport = "tcp" }))
	l := startLoad(t, "load", c.dial(t, nil))

	c.kvctl(t, "drain", "2").failed(t, 2, "give --yes")
	c.kvctl(t, "drain", "0", "--yes").failed(t, 2, "want the number of a node")
	c.kvctl(t, "drain", "9", "--yes").failed(t, 3, "there never was a node 9")
	succeeded(t, c.kvctl(t, "rebalance", "--dry-run", "-o", "json"))
	require.Contains(t, succeeded(t, c.kvctl(t, "drain", "2", "--yes")).stdout, "safe to stop")
	awaitVoters(t, c, 3, 2)
	require.Contains(t, succeeded(t, c.kvctl(t, "members")).stdout, "draining")
	c.kvctl(t, "drain", "3", "--yes").failed(t, 4, "would leave 2 nodes for the 3 replicas")
	l.awaitProgress(t)
	r.requireUnharmed(t)
	l.pause()
	require.Empty(t, l.errors())

	ctx, cancel := within(patience)
	require.NoError(t, c.Node(2).Stop(ctx))
	cancel()
	check(t, all, held)
	require.Contains(t, succeeded(t, c.kvctl(t, "decommission", "2", "--yes")).stdout, "never used again")
	require.Contains(t, succeeded(t, c.kvctl(t, "decommission", "2", "--yes")).stdout, "left the cluster already")
	require.NotContains(t, succeeded(t, c.kvctl(t, "members")).stdout, "decommissioned")
	require.Contains(t, succeeded(t, c.kvctl(t, "members", "--all")).stdout, "gone")
	second := command{bin: kvdBin, args: c.Node(2).Args()}.run(t)
	second.refused(t, 3, "its id is never used again", "--join")
	l.verify(t, all)
	check(t, all, held)

	// A directory of this cluster does not get into another.
	other := newCluster(t, devcluster.Config{Nodes: 1})
	ctx, cancel = within(patience)
	require.NoError(t, c.Node(4).Stop(ctx))
	cancel()
	args := withoutFlag(c.Node(4).Args(), "--join")
	wrong := command{bin: kvdBin, args: append(args, "--join", other.Node(1).Address)}.run(t)
	wrong.refused(t, 3, "correct the addresses to join or the directory")
}

// TestKillsWhileMoving: nodes are killed while replicas come and go. Every move is
// carried on by whoever leads next, and no acknowledged put is lost.
func TestKillsWhileMoving(t *testing.T) {
	c := newCluster(t, devcluster.Config{Nodes: 1})
	for range 3 {
		ctx, cancel := within(patience)
		_, err := c.Join(ctx)
		cancel()
		require.NoError(t, err)
	}
	awaitActive(t, c, 4)
	awaitVoters(t, c, 3)
	cl := c.dial(t, nil)
	held := fill(t, cl, "held", 200, 1500)
	l := startLoad(t, "load", cl)
	for round := range 6 {
		drained, killed := uint64(1+round%4), uint64(1+(round*3+1)%4)
		id := fmt.Sprint(drained)
		succeeded(t, c.kvctl(t, "drain", id, "--yes", "--no-wait"))
		await(t, "a move has begun", func() error {
			for _, n := range c.Nodes() {
				if strings.Contains(n.LogTail(6), "replica was made here") || strings.Contains(n.LogTail(6), "replicas change") {
					return nil
				}
			}
			return errors.New("nothing moves")
		})
		require.NoError(t, c.Node(killed).Kill())
		c.restart(t, killed)
		await(t, "the drain is undone", func() error {
			if r := c.kvctl(t, "drain", id, "--undo"); r.code != 0 {
				return errors.New(r.text())
			}
			return nil
		})
	}
	awaitVoters(t, c, 3)
	l.awaitProgress(t)
	l.pause()
	l.verify(t, cl)
	check(t, cl, held)
	for _, n := range c.Nodes() { // and from their directories alone
		require.NoError(t, n.Kill())
	}
	for _, n := range c.Nodes() {
		require.NoError(t, n.Start())
	}
	for _, n := range c.Nodes() {
		c.awaitServing(t, n.ID)
	}
	awaitVoters(t, c, 3)
	l.verify(t, cl)
	check(t, cl, held)
}
