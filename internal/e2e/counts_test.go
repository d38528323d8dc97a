//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// TestCountsOfAGet: how many READs a get costs, by what the client knows.
func TestCountsOfAGet(t *testing.T) {
	c := sharedNodes(t)
	writer := c.dial(t, nil)
	held := fill(t, writer, "counts", 64, 1024)
	n := uint64(len(held))
	for _, name := range []string{"shm", "tcp"} {
		t.Run(name+" warm", func(t *testing.T) {
			cl := c.dial(t, overTransport(name))
			warmUp(t, cl, held)
			d := calm(t, cl, func() { check(t, cl, held) })
			require.Equal(t, n, via(d, name))
			require.Equal(t, n, d.ObjectReads, "one READ of the object")
			require.Equal(t, 2*n, d.RecordReads, "the leader's record and one more voter's")
			require.Equal(t, n, d.Confirmations)
			require.Zero(t, d.BucketReads+d.Queries)
			require.Equal(t, n, d.CacheHits)
		})
		t.Run(name+" cold", func(t *testing.T) {
			// Nothing is remembered, so each get is a cold one.
			cl := c.dial(t, func(cfg *client.Config) { cfg.Transport, cfg.CacheEntries = name, -1 })
			check(t, cl, held) // routes
			d := calm(t, cl, func() { check(t, cl, held) })
			require.Equal(t, n, via(d, name))
			if name == "tcp" {
				require.Equal(t, n, d.Queries, "one look-up by the node, in the same round trip")
				require.Zero(t, d.BucketReads+d.ObjectReads)
			} else {
				require.InDelta(t, float64(n), float64(d.BucketReads), float64(n)/8, "one bucket more, few chains")
				require.InDelta(t, float64(n), float64(d.ObjectReads), float64(n)/8, "few finger prints collide")
			}
			require.Equal(t, n, d.Confirmations)
		})
		t.Run(name+" absent", func(t *testing.T) {
			cl := c.dial(t, overTransport(name))
			warmUp(t, cl, held)
			d := calm(t, cl, func() {
				for i := range 32 {
					_, err := cl.Get(context.Background(), fmt.Appendf(nil, "counts/none/%d", i))
					require.ErrorIs(t, err, client.ErrNotFound)
				}
			})
			require.Equal(t, uint64(32), via(d, name), "absence is proven one-sidedly")
			require.Zero(t, sum(d.Fallbacks))
		})
		t.Run(name+" session and stale", func(t *testing.T) {
			cl := c.dial(t, overTransport(name))
			warmUp(t, cl, held)
			for _, level := range []client.Level{client.Session, client.Stale} {
				check(t, cl, held, client.WithLevel(level)) // locations at the nearest
				d := calm(t, cl, func() { check(t, cl, held, client.WithLevel(level)) })
				require.Equal(t, n, via(d, name))
				require.Equal(t, n, d.ObjectReads)
				require.Zero(t, d.Confirmations, "nobody is asked")
				require.LessOrEqual(t, d.RecordReads, n, "at most its own record")
				require.Zero(t, d.BucketReads+d.Queries)
			}
		})
	}
}

// TestCountsShared: concurrent gets share what confirms them.
func TestCountsShared(t *testing.T) {
	c := sharedNodes(t)
	held := fill(t, c.dial(t, nil), "sharing", 200, 1024)
	cl := c.dial(t, overTransport("tcp"))
	warmUp(t, cl, held)
	var keys [][]byte
	for k := range held {
		keys = append(keys, []byte(k))
	}
	d := counted(cl, func() {
		var wg sync.WaitGroup
		for w := range 16 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for i := range 600 {
					k := keys[(w*37+i)%len(keys)]
					v, err := cl.Get(context.Background(), k)
					if err != nil || string(v.Data) != held[string(k)] {
						t.Errorf("%s: %v", k, err)
						return
					}
				}
			}()
		}
		wg.Wait()
	})
	perGet := float64(d.TotalReads()+d.Queries) / float64(d.TotalGets())
	t.Logf("%.3f READs a get with 16 callers", perGet)
	require.LessOrEqual(t, perGet, 1.3)
	require.Equal(t, d.TotalGets(), via(d, "tcp"))

	d = calm(t, cl, func() {
		for i, r := range cl.GetMany(context.Background(), keys) {
			require.NoError(t, r.Err)
			require.True(t, held[string(keys[i])] == string(r.Value.Data))
		}
	})
	require.Equal(t, uint64(len(keys)), d.ObjectReads)
	require.LessOrEqual(t, d.Confirmations, uint64(4), "one a shard")
}

// TestCountsOfImmutable: a hit in an immutable namespace is one READ and no more.
func TestCountsOfImmutable(t *testing.T) {
	c := sharedNodes(t)
	ctx, cancel := within(patience)
	defer cancel()
	_, err := c.admin(t).CreateNamespace(ctx, client.NamespaceSpec{Name: "counts-immutable", Immutable: true})
	require.NoError(t, err)
	in := func(transport string) func(*client.Config) {
		return func(cfg *client.Config) { cfg.Transport, cfg.Namespace = transport, "counts-immutable" }
	}
	held := fill(t, c.dial(t, in("auto")), "imm", 40, 1024)
	c.caughtUp(t)
	for _, name := range []string{"shm", "tcp"} {
		cl := c.dial(t, in(name))
		check(t, cl, held)
		check(t, cl, held)
		await(t, "each hit is exactly one READ", func() error {
			d := calm(t, cl, func() { check(t, cl, held) })
			require.Equal(t, uint64(len(held)), via(d, name))
			if d.TotalReads() != uint64(len(held)) || d.Confirmations+d.Queries > 0 {
				return fmt.Errorf("%s: %d hits cost %d READs, %d confirmations, %d look-ups", name, len(held), d.TotalReads(), d.Confirmations, d.Queries)
			}
			return nil
		})
	}
	_, err = c.dial(t, in("auto")).Put(ctx, []byte("imm/000000"), []byte("other"))
	require.ErrorIs(t, err, client.ErrConflict)
}

// TestCountsOfNewMemory: memory that a node registered after the client came is read
// one-sidedly, and what was found there is remembered, by each transport.
func TestCountsOfNewMemory(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	clients := map[string]*client.Client{"shm": c.dial(t, overTransport("shm")), "tcp": c.dial(t, overTransport("tcp"))}
	held := fill(t, c.dial(t, nil), "new", 40, 1500) // the first: before it there was no chunk
	for name, cl := range clients {
		t.Run(name, func(t *testing.T) { warmUp(t, cl, held) })
	}
}

// TestMixedTransports: each node serves others; one client reads them all.
func TestMixedTransports(t *testing.T) {
	c := newCluster(t, devcluster.Config{NodeArgs: map[uint64][]string{
		2: {"--transports", "tcp"}, 3: {"--transports", "shm"},
	}})
	held := fill(t, c.dial(t, nil), "mixed", 60, 900)
	byNode := func(cl *client.Client) map[uint64]client.PeerStats {
		m := map[uint64]client.PeerStats{}
		await(t, "all nodes are connected", func() error {
			for _, p := range cl.Stats().Peers {
				m[p.NodeID] = p
			}
			if len(m) != 3 || m[1].Sessions == 0 || m[2].Sessions == 0 || m[3].Sessions == 0 {
				return fmt.Errorf("peers: %+v", m)
			}
			return nil
		})
		return m
	}
	auto := c.dial(t, nil)
	warmUp(t, auto, held)
	peers := byNode(auto)
	require.Equal(t, []string{"shm", "tcp", "shm"}, []string{peers[1].Transport, peers[2].Transport, peers[3].Transport})
	require.Equal(t, "preferred", peers[1].Reason)
	require.Contains(t, peers[2].Reason, "shm: not served by the node")

	tcp := c.dial(t, overTransport("tcp"))
	c.lead(t, 3) // which serves no tcp
	check(t, tcp, held)
	peers = byNode(tcp)
	require.Equal(t, client.TransportGRPC, peers[3].Transport)
	require.Contains(t, peers[3].Reason, "tcp: not served by the node")
	d := counted(tcp, func() { check(t, tcp, held) })
	require.Equal(t, uint64(len(held)), via(d, client.TransportGRPC), "a get that is not one-sided is counted as such")
	require.Equal(t, uint64(len(held)), d.Fallbacks["no_transport"], "%v", d.Fallbacks)
	r := c.kvctl(t, "-v", "get", "mixed/000001", "--transport", "tcp")
	require.Zero(t, r.code)
	require.Contains(t, r.stderr, "fell back to gRPC")
	require.Contains(t, r.stderr, "no_transport")

	warmUp(t, auto, held)
	for _, leader := range []uint64{1, 2} {
		c.lead(t, leader)
		warmUp(t, auto, held)
	}
}

// TestFollowerKill: a dead follower is hedged by the other voter. No get waits for it
// long; by how much p99 moves is in the log (and in BenchmarkFollowerKill).
func TestFollowerKill(t *testing.T) {
	for _, name := range []string{"shm", "tcp"} {
		t.Run(name, func(t *testing.T) {
			before, after, worst := followerKill(t, name, 400*time.Millisecond)
			t.Logf("p99 %v before, %v after; slowest %v", before, after, worst)
			require.Less(t, worst, 500*time.Millisecond)
		})
	}
}

// BenchmarkFollowerKill reports by how much killing a follower moves p99.
func BenchmarkFollowerKill(b *testing.B) {
	for _, name := range []string{"shm", "tcp"} {
		b.Run(name, func(b *testing.B) {
			for range b.N {
				before, after, worst := followerKill(b, name, 3*time.Second)
				b.ReportMetric(float64(before.Microseconds()), "p99-before-us")
				b.ReportMetric(float64(after.Microseconds()), "p99-after-us")
				b.ReportMetric(float64(worst.Microseconds()), "max-us")
			}
		})
	}
}

// followerKill measures gets of one caller for a time before and from the moment at
// which a follower is killed.
func followerKill(t testing.TB, transport string, d time.Duration) (before, after, worst time.Duration) {
	c := newCluster(t, devcluster.Config{})
	held := fill(t, c.dial(t, nil), "follower", 64, 1024)
	c.lead(t, 1)
	cl := c.dial(t, overTransport(transport))
	warmUp(t, cl, held)
	measure := func() (p99, worst time.Duration) {
		var times []time.Duration
		for end := time.Now().Add(d); time.Now().Before(end); {
			for k, want := range held {
				began := time.Now()
				v, err := cl.Get(context.Background(), []byte(k))
				times = append(times, time.Since(began))
				require.NoError(t, err)
				require.True(t, want == string(v.Data))
			}
		}
		slices.Sort(times)
		return times[len(times)*99/100], times[len(times)-1]
	}
	before, _ = measure()
	killed := make(chan error, 1)
	go func() { killed <- c.Node(2).Kill() }()
	after, worst = measure()
	require.NoError(t, <-killed)
	require.Zero(t, via(cl.Stats(), client.TransportGRPC), "one-sided all the time")
	return before, after, worst
}

// TestTinyArena: more data than memory. Each key is readable with its bytes, an absent
// one is not mistaken for one that was evicted.
func TestTinyArena(t *testing.T) {
	c := newCluster(t, devcluster.Config{Args: []string{"--arena", "8MiB", "--max-chunk", "2MiB", "--quarantine", "500ms"}})
	cl := c.dial(t, nil)
	held := fill(t, cl, "tiny", 4000, 5000) // 20 MB
	for _, transport := range []string{"shm", "tcp"} {
		reader := c.dial(t, overTransport(transport))
		check(t, reader, held)
		s := reader.Stats()
		require.Positive(t, via(s, client.TransportGRPC), "what is not in memory comes from the engine")
		require.Positive(t, s.Fallbacks["incomplete_bucket"], "%v", s.Fallbacks)
		for i := range 200 {
			_, err := reader.Get(context.Background(), fmt.Appendf(nil, "tiny/none/%d", i))
			require.ErrorIs(t, err, client.ErrNotFound)
		}
		t.Logf("%s: %d of %d gets one-sided, fallbacks %v", transport, via(s, transport), s.TotalGets(), s.Fallbacks)
	}
	// Overwrites and deletes of what is and what is not resident.
	i := 0
	for k := range held {
		if i++; i > 300 {
			break
		}
		if i%2 == 0 {
			held[k] = valueOf(k+"again", 3000)
			_, err := cl.Put(context.Background(), []byte(k), []byte(held[k]))
			require.NoError(t, err)
			continue
		}
		_, err := cl.Delete(context.Background(), []byte(k))
		require.NoError(t, err)
		delete(held, k)
		_, err = cl.Get(context.Background(), []byte(k))
		require.ErrorIs(t, err, client.ErrNotFound)
	}
	check(t, cl, held)
	nodes, err := cl.Status(context.Background())
	require.NoError(t, err)
	for _, n := range nodes {
		require.NoError(t, n.Err)
		require.LessOrEqual(t, n.Status.GetArena().GetRegisteredBytes(), uint64(8<<20), "node %d: the cap is hard", n.NodeID)
	}
}
