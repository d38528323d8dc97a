package client

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/shm"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction(shm.DeathWordGoroutine))
}

// fixture is a cluster and a client of it.
type fixture struct {
	*fakeCluster
	net *fakeNet
	c   *Client
}

// netOptions of the transport: see fakeNet.
type netOptions struct {
	sync, query bool
	run         runner
}

// start makes a cluster with one client. edit may change the client's settings.
func start(t testing.TB, o fakeOptions, net netOptions, edit func(*Config)) *fixture {
	if o.nodes == 0 {
		o.nodes = 3
	}
	if o.shards == 0 {
		o.shards = 1
	}
	f := &fixture{fakeCluster: newFakeCluster(t, o)}
	f.net = &fakeNet{c: f.fakeCluster, name: "fake", sync: net.sync, query: net.query, run: net.run}
	f.c = f.dial(t, f.net, edit)
	f.ready(t)
	return f
}

func (f *fixture) dial(t testing.TB, net rdma.Provider, edit func(*Config)) *Client {
	cfg := Config{
		Endpoints: []string{f.nodes[0].addr}, Providers: []rdma.Provider{net}, HostID: "host",
		DialTimeout: 10 * time.Second, CallTimeout: 5 * time.Second,
	}
	if edit != nil {
		edit(&cfg)
	}
	c, err := Dial(context.Background(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// ready waits until every living node has a session.
func (f *fixture) ready(t testing.TB) {
	eventually(t, "sessions with all nodes", func() bool {
		alive := 0
		for _, n := range f.nodes {
			if !n.dead() {
				alive++
			}
		}
		return len(f.c.liveSessions()) == alive
	})
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: did not happen in 10 s", what)
		}
	}
}

// get reads with a deadline of its own.
func (f *fixture) get(t testing.TB, key string, opts ...ReadOption) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	v, err := f.c.Get(ctx, []byte(key), opts...)
	return string(v.Data), err
}

func (f *fixture) want(t testing.TB, key, value string, opts ...ReadOption) {
	t.Helper()
	got, err := f.get(t, key, opts...)
	require.NoError(t, err)
	require.Equal(t, value, got)
}

func (f *fixture) wantAbsent(t testing.TB, key string, opts ...ReadOption) {
	t.Helper()
	_, err := f.get(t, key, opts...)
	require.ErrorIs(t, err, ErrNotFound)
}

// during counts what f added to the client's Stats.
func (f *fixture) during(do func()) Stats {
	before := f.c.Stats()
	do()
	return f.c.Stats().Sub(before)
}

func (s Stats) gets(level Level, via string) uint64 {
	for _, g := range s.Gets {
		if g.Level == level && g.Via == via {
			return g.Count
		}
	}
	return 0
}

// keysInShard makes n keys of one shard.
func (c *fakeCluster) keysInShard(s uint32, n int) []string {
	var keys []string
	for i := 0; len(keys) < n; i++ {
		if k := fmt.Sprintf("key-%d", i); c.shardOf(k) == s {
			keys = append(keys, k)
		}
	}
	return keys
}

// delayed runs each batch after d, in the order of posting for each node.
func delayed(t testing.TB, d time.Duration) runner {
	type job struct {
		at   time.Time
		exec func() error
		done func(error)
	}
	queues := make([]chan job, 16)
	stop := make(chan struct{})
	t.Cleanup(func() { close(stop) })
	for i := range queues {
		queues[i] = make(chan job, 4096)
		go func() {
			for {
				select {
				case j := <-queues[i]:
					if wait := time.Until(j.at); wait > 0 {
						timer := time.NewTimer(wait)
						select {
						case <-timer.C:
						case <-stop:
						}
						timer.Stop()
					}
					j.done(j.exec())
				case <-stop:
					return
				}
			}
		}()
	}
	return func(n *fakeNode, b *rdma.Batch, exec func() error, done func(error)) {
		queues[n.id] <- job{time.Now().Add(d), exec, done}
	}
}

func isTimeout(err error) bool {
	return errors.Is(err, ErrUnavailable) && errors.Is(err, context.DeadlineExceeded)
}
