//go:build e2e || rdmaguest

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
)

// truth is what readers may rely on: for each key the newest version that was
// acknowledged, or revealed by a linearizable get, before a read begins.
type truth struct {
	keys   []string
	floors []atomic.Uint64
}

func newTruth(n int) *truth {
	tr := &truth{floors: make([]atomic.Uint64, n)}
	for i := range n {
		tr.keys = append(tr.keys, fmt.Sprintf("stop/%03d", i))
	}
	return tr
}

func raise(a *atomic.Uint64, v uint64) {
	for have := a.Load(); have < v && !a.CompareAndSwap(have, v); have = a.Load() {
	}
}

// put writes a value which tells its round.
func (tr *truth) put(ctx context.Context, c *client.Client, i, round int) error {
	v, err := c.Put(ctx, []byte(tr.keys[i]), fmt.Appendf(nil, "%s#%d", tr.keys[i], round))
	if err == nil {
		raise(&tr.floors[i], v)
	}
	return err
}

func (tr *truth) putAll(t testing.TB, c *client.Client, round int) {
	t.Helper()
	for i := range tr.keys {
		ctx, cancel := within(patience)
		require.NoError(t, tr.put(ctx, c, i, round))
		cancel()
	}
}

// roundOf is the round that a value tells.
func (tr *truth) roundOf(i int, v client.Value) (int, error) {
	text, ok := strings.CutPrefix(string(v.Data), tr.keys[i]+"#")
	if !ok {
		return 0, fmt.Errorf("%s holds %q", tr.keys[i], v.Data)
	}
	return strconv.Atoi(text)
}

// get reads at the linearizable level; a version behind the floor is a violation.
func (tr *truth) get(ctx context.Context, c *client.Client, i int) (round int, violation, err error) {
	floor := tr.floors[i].Load()
	v, err := c.Get(ctx, []byte(tr.keys[i]))
	if err != nil {
		return 0, nil, err
	}
	if v.Version < floor {
		return 0, fmt.Errorf("stale: %s came back with version %d after version %d was acknowledged or revealed", tr.keys[i], v.Version, floor), nil
	}
	raise(&tr.floors[i], v.Version)
	round, violation = tr.roundOf(i, v)
	return round, violation, nil
}

// watcher reads all keys again and again, at all levels, through one client.
type watcher struct {
	name string
	c    *client.Client
	tr   *truth

	rounds    atomic.Int64 // passes that succeeded
	failures  []error      // gets without an answer
	violation error
}

func (w *watcher) run(ctx context.Context) {
	seen := make([]uint64, len(w.tr.keys)) // what a session promises not to go back behind
	pace := time.NewTicker(2 * time.Millisecond)
	defer pace.Stop()
	for ctx.Err() == nil && w.violation == nil {
		<-pace.C // the nodes need the processors, too
		if err := w.pass(ctx, seen); err != nil && ctx.Err() == nil {
			w.failures = append(w.failures, err)
		} else {
			w.rounds.Add(1)
		}
	}
}

func (w *watcher) pass(ctx context.Context, seen []uint64) error {
	for i, key := range w.tr.keys {
		_, violation, err := w.tr.get(ctx, w.c, i)
		if violation != nil {
			w.violation = violation
			return nil
		}
		if err != nil {
			return fmt.Errorf("linearizable get: %w", err)
		}
		for _, level := range []client.Level{client.Session, client.Stale} {
			v, err := w.c.Get(ctx, []byte(key), client.WithLevel(level))
			if err != nil {
				return fmt.Errorf("%v get: %w", level, err)
			}
			if _, err := w.tr.roundOf(i, v); err != nil {
				w.violation = err
			}
			if level == client.Session {
				if v.Version < seen[i] {
					w.violation = fmt.Errorf("session went back: %s has version %d after %d", key, v.Version, seen[i])
				}
				seen[i] = max(seen[i], v.Version)
			}
		}
	}
	return nil
}

// warm reads until each get is one-sided with known locations.
func (w *watcher) warm(t testing.TB) {
	t.Helper()
	await(t, w.name+" reads one-sidedly", func() error {
		before := w.c.Stats()
		for i := range w.tr.keys {
			_, violation, err := w.tr.get(context.Background(), w.c, i)
			require.NoError(t, violation, w.name)
			if err != nil {
				return err
			}
		}
		d := w.c.Stats().Sub(before)
		if n := via(d, client.TransportGRPC); n > 0 || d.CacheMisses > 0 {
			return fmt.Errorf("%d gets over gRPC (%v), %d misses", n, d.Fallbacks, d.CacheMisses)
		}
		for _, p := range w.c.Stats().Peers {
			// Over shm alone node 3 is read over gRPC.
			if !p.Connected && (w.name != "shm" || p.NodeID != 3) {
				return fmt.Errorf("node %d is not connected: %s", p.NodeID, p.Reason)
			}
		}
		return nil
	})
}

// readsStoppedMemory: the leader is stopped and nobody else was elected yet, so gets are
// still proven by its record and one other's.
func (w *watcher) readsStoppedMemory(t testing.TB) {
	t.Helper()
	before := w.c.Stats()
	took := since(func() {
		for i := range w.tr.keys {
			round, violation, err := w.tr.get(context.Background(), w.c, i)
			require.NoError(t, violation)
			require.NoError(t, err)
			require.Equal(t, 1, round)
		}
	})
	d := w.c.Stats().Sub(before)
	require.Equal(t, uint64(len(w.tr.keys)), via(d, w.name), "one-sided gets from the stopped leader: %+v", d)
	require.Zero(t, sum(d.Fallbacks))
	t.Logf("%d gets from the stopped leader's memory in %v", len(w.tr.keys), took)
}

func awaitPasses(t testing.TB, watchers []*watcher) {
	t.Helper()
	for _, w := range watchers {
		from := w.rounds.Load()
		await(t, w.name+" reads on", func() error {
			if w.rounds.Load() < from+2 {
				return errors.New("no pass over the keys succeeded")
			}
			return nil
		})
	}
}

// steppedDown: the node itself says that it leads nothing.
func steppedDown(a *client.Admin, node uint64) error {
	ctx, cancel := within(5 * time.Second)
	defer cancel()
	nodes, err := a.Status(ctx)
	if err != nil {
		return err
	}
	for _, n := range nodes {
		if n.NodeID != node {
			continue
		}
		if n.Err != nil {
			return n.Err
		}
		for _, s := range n.Status.GetShards() {
			if s.GetShard() != 0 && s.GetServedTerm() != 0 {
				return fmt.Errorf("node %d still serves term %d of shard %d", node, s.GetServedTerm(), s.GetShard())
			}
		}
		return nil
	}
	return fmt.Errorf("node %d does not answer", node)
}

// readOn gets everything again and again until the returned function is called, which
// tells how many gets there were, and fails the test where one failed or was wrong.
func readOn(t testing.TB, held map[string]string, clients ...*client.Client) (stop func() int64) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var gets atomic.Int64
	faults := make([]error, len(clients))
	for i, c := range clients {
		wg.Add(1)
		go func() {
			defer wg.Done()
			pace := time.NewTicker(2 * time.Millisecond)
			defer pace.Stop()
			for ctx.Err() == nil && faults[i] == nil {
				if inGuest() { // whose nodes need the processors, too
					<-pace.C
				}
				for k, want := range held {
					v, err := c.Get(context.Background(), []byte(k))
					if err == nil && string(v.Data) != want {
						err = fmt.Errorf("other bytes")
					}
					if err != nil {
						faults[i] = fmt.Errorf("%s: %w", k, err)
						break
					}
					gets.Add(1)
				}
			}
		}()
	}
	t.Cleanup(func() { cancel(); wg.Wait() })
	return func() int64 {
		t.Helper()
		cancel()
		wg.Wait()
		for i, err := range faults {
			require.NoError(t, err, "reader %d", i)
		}
		return gets.Load()
	}
}

// counted runs f and returns what it cost.
func counted(c *client.Client, f func()) client.Stats {
	before := c.Stats()
	f()
	return c.Stats().Sub(before)
}

// calm repeats a measurement until no retry disturbed it: an election or a pause of the
// machine may cost READs, and is not what is measured.
func calm(t testing.TB, c *client.Client, f func()) client.Stats {
	t.Helper()
	var d client.Stats
	await(t, "a measurement without retries", func() error {
		d = counted(c, f)
		if n := sum(d.Retries); n > 0 || d.Hedges > 0 {
			return fmt.Errorf("%d hedges, retries %v", d.Hedges, d.Retries)
		}
		return nil
	})
	return d
}
