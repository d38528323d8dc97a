package client

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

// TestLostAnswers: a connection stands, and what is asked over it is not answered and never
// will be. Gets go on by other ways, and the connection is made anew.
func TestLostAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		query bool
		cache int
		read  func(f *fixture) error
	}{
		"flight":  {read: (*fixture).getTheKey},
		"bucket":  {cache: -1, read: (*fixture).getTheKey},
		"look-up": {query: true, cache: -1, read: (*fixture).getTheKey},
		"many": {read: func(f *fixture) error {
			return f.c.GetMany(context.Background(), [][]byte{[]byte(theKey)})[0].Err
		}},
		"many, buckets": {cache: -1, read: func(f *fixture) error {
			return f.c.GetMany(context.Background(), [][]byte{[]byte(theKey)})[0].Err
		}},
		"stale": {read: func(f *fixture) error {
			_, err := f.c.Get(context.Background(), []byte(theKey), WithLevel(Stale))
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			drop := &dropper{}
			f := start(t, fakeOptions{}, netOptions{run: drop.run, query: c.query}, func(cfg *Config) {
				cfg.StallTimeout = 500 * time.Millisecond
				if c.cache != 0 {
					cfg.CacheEntries = c.cache
				}
			})
			f.put(theKey, "1")
			require.NoError(t, c.read(f))
			drop.set(1)
			old := f.c.sessionOf(1)
			require.NoError(t, c.read(f))
			eventually(t, "the connection counts as stalled", func() bool { return old.stalled.Load() > 0 })
			began := time.Now()
			for range 5 {
				require.NoError(t, c.read(f))
			}
			require.Less(t, time.Since(began), attemptLimit, "nobody waits for what is known to be late")
			eventually(t, "another connection", func() bool { s := f.c.sessionOf(1); return s != nil && s != old })
			drop.set()
			eventually(t, "closing has completed what was out", func() bool { return old.stalled.Load() == 0 })
			eventually(t, "one-sided reads", func() bool {
				s := f.during(func() { require.NoError(t, c.read(f)) })
				return s.gets(Linearizable, "fake")+s.gets(Stale, "fake") == 1
			})
		})
	}
}

func (f *fixture) getTheKey() error {
	_, err := f.c.Get(context.Background(), []byte(theKey))
	return err
}

// TestStalledVoters: while the leader can be read and no other voter can, gets do not wait
// for one again and again.
func TestStalledVoters(t *testing.T) {
	drop := &dropper{}
	f := start(t, fakeOptions{}, netOptions{run: drop.run}, nil)
	f.put(theKey, "1")
	f.want(t, theKey, "1")
	drop.set(2, 3)
	f.want(t, theKey, "1")
	eventually(t, "both count as stalled", func() bool {
		return f.c.sessionOf(2).stalled.Load() > 0 && f.c.sessionOf(3).stalled.Load() > 0
	})
	began := time.Now()
	f.want(t, theKey, "1")
	require.Less(t, time.Since(began), attemptLimit)
	require.NotZero(t, f.c.Stats().Fallbacks["voters"])
}

// dropper leaves batches of some nodes unanswered.
type dropper struct {
	mu    sync.Mutex
	nodes []uint64
}

func (d *dropper) run(n *fakeNode, _ *rdma.Batch, exec func() error, done func(error)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !slices.Contains(d.nodes, n.id) {
		go done(exec())
	}
}

func (d *dropper) set(nodes ...uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.nodes = nodes
}
