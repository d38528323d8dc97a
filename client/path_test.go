package client

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/simnic"
	"github.com/kvd-io/kvd/rdma/tcp"
)

// twoPaths is a cluster whose nodes can be read by "fake", which is preferred, and by
// "other".
type twoPaths struct {
	*fixture
	fast, slow *fakeNet
	log        *logBuffer
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) count(words string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), words)
}

func startTwoPaths(t *testing.T, prepare func(*twoPaths), edit func(*Config)) *twoPaths {
	f := &twoPaths{fixture: &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: 4})}, log: &logBuffer{}}
	f.fast = &fakeNet{c: f.fakeCluster, name: "fake"}
	f.slow = &fakeNet{c: f.fakeCluster, name: "other", query: true}
	if prepare != nil {
		prepare(f)
	}
	f.c = f.dial(t, f.fast, func(c *Config) {
		c.Providers = append(c.Providers, f.slow)
		c.Logger = slog.New(slog.NewTextHandler(f.log, nil))
		if edit != nil {
			edit(c)
		}
	})
	f.ready(t)
	return f
}

// via waits until the nodes are read by the transport.
func (f *twoPaths) via(t *testing.T, transport string, nodes ...uint64) {
	t.Helper()
	for _, id := range nodes {
		eventually(t, fmt.Sprint("node ", id, " is read by ", transport), func() bool {
			s := f.c.sessionOf(id)
			return s != nil && f.c.via[s.via] == transport
		})
	}
}

func (s Stats) fell(transport string, why pathReason) uint64 {
	for _, f := range s.TransportFallbacks {
		if f.Transport == transport && f.Reason == why.String() {
			return f.Count
		}
	}
	return 0
}

// TestDeviceComesAndGoes: with the device gone the nodes are read by the next transport at
// once, what is known of where objects lie is kept, and when it is back so are they.
func TestDeviceComesAndGoes(t *testing.T) {
	f := startTwoPaths(t, nil, nil)
	f.via(t, "fake", 1, 2, 3)
	for i := range 20 {
		f.put(fmt.Sprint("key ", i), "1")
		f.want(t, fmt.Sprint("key ", i), "1")
	}
	require.Empty(t, f.c.Stats().TransportFallbacks)

	f.fast.unplug(fmt.Errorf("%w: no device", rdma.ErrUnsupported))
	f.via(t, "other", 1, 2, 3)
	s := f.during(func() {
		for i := range 20 {
			f.want(t, fmt.Sprint("key ", i), "1")
		}
	})
	require.EqualValues(t, 20, s.gets(Linearizable, "other"))
	require.EqualValues(t, 20, s.CacheHits, "places are kept")
	require.Zero(t, s.Queries)
	require.EqualValues(t, 3, f.c.Stats().fell("fake", pathLost))
	for _, p := range f.c.Stats().Peers {
		require.Equal(t, "other", p.Transport)
		require.Contains(t, p.Reason, "fake: ")
		require.EqualValues(t, 1, p.Sessions, "the gRPC session goes on")
		require.EqualValues(t, 2, p.Connections)
	}

	f.fast.unplug(nil)
	f.via(t, "fake", 1, 2, 3)
	s = f.during(func() {
		for i := range 20 {
			f.want(t, fmt.Sprint("key ", i), "1")
		}
	})
	require.EqualValues(t, 20, s.gets(Linearizable, "fake"))
	require.EqualValues(t, 20, s.CacheHits)
	require.Equal(t, 3, f.log.count("node is read over other"), "once for each node")
}

// TestDeviceLater: a host that has no device when the client starts gets one.
func TestDeviceLater(t *testing.T) {
	f := startTwoPaths(t, func(f *twoPaths) { f.fast.down = fmt.Errorf("%w: no device", rdma.ErrUnsupported) }, nil)
	f.via(t, "other", 1, 2, 3)
	require.EqualValues(t, 3, f.c.Stats().fell("fake", pathUnsupported))
	f.fast.unplug(nil)
	f.via(t, "fake", 1, 2, 3)
	require.EqualValues(t, 3, f.c.Stats().fell("fake", pathUnsupported))
}

// TestPathRefused: falling back is decided for each node, with its reason.
func TestPathRefused(t *testing.T) {
	full := failWith(codes.ResourceExhausted, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_EXHAUSTED})
	denied := failWith(codes.PermissionDenied, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_DENIED})
	f := startTwoPaths(t, func(f *twoPaths) {
		f.nodes[0].refusal = map[string]error{"fake": full}
		f.nodes[1].refusal = map[string]error{"fake": denied, "other": full}
	}, nil)
	f.via(t, "other", 1)
	f.via(t, TransportGRPC, 2)
	f.via(t, "fake", 3)
	s := f.c.Stats()
	require.EqualValues(t, 1, s.fell("fake", pathExhausted))
	require.EqualValues(t, 1, s.fell("fake", pathDenied))
	require.EqualValues(t, 1, s.fell("other", pathExhausted))
	for i := range 20 {
		f.put(fmt.Sprint("key ", i), "1")
		f.want(t, fmt.Sprint("key ", i), "1")
	}
	f.locked(func() { f.nodes[0].refusal, f.nodes[1].refusal = nil, nil })
	f.via(t, "fake", 1, 2)
	for _, p := range f.c.Stats().Peers {
		require.EqualValues(t, 1, p.Sessions)
	}
}

// TestRevokedConnection: a node that takes the connection back (its limit of queue pairs)
// is read by the next transport, and is not asked for another connection at once, however
// often it gives one.
func TestRevokedConnection(t *testing.T) {
	f := startTwoPaths(t, nil, nil)
	f.put(theKey, "1")
	for i := range 3 {
		f.via(t, "fake", 1)
		f.fast.lose(1, fmt.Errorf("%w: too many", rdma.ErrRevoked))
		f.via(t, "other", 1)
		f.want(t, theKey, "1")
		require.EqualValues(t, i+1, f.c.Stats().fell("fake", pathRevoked))
	}
	b := f.c.sessionOf(1).of
	b.mu.Lock()
	wait := time.Until(b.mu.paths[0].again)
	b.mu.Unlock()
	require.Greater(t, wait, retryPathMin, "the pause has grown")
	require.Equal(t, 1, f.log.count("node=1 address="+f.nodes[0].addr+" reason=\"fake: "))
}

// TestPathPace: pauses grow, are bounded, and begin anew only behind a connection that held.
func TestPathPace(t *testing.T) {
	b := &boot{cfg: &Config{Jitter: func(uint64) float64 { return rand.Float64() }}}
	b.mu.paths = make([]path, 1)
	p := &b.mu.paths[0]
	var last time.Duration
	for range 20 {
		b.connected(0)
		b.failed(0, pathRevoked, "")
		last = time.Until(p.again)
		require.LessOrEqual(t, last, retryPathMax*13/10)
	}
	require.Greater(t, last, retryPathMax/2)
	why, _ := b.blocked(0, time.Now())
	require.Equal(t, pathRevoked, why)
	s := &session{of: b, passed: []passedOver{{0, pathRevoked, ""}}}
	at, ok := b.nextTry(s)
	require.True(t, ok)
	require.LessOrEqual(t, time.Until(at), retryOnlyPath, "there is nothing else to read by")

	b.connected(0)
	p.since = time.Now().Add(-steadyAfter)
	before := b.failed(0, pathLost, "")
	require.Less(t, time.Until(p.again), 2*retryPathMin, "it held")
	b.forgive(0, before)
	why, _ = b.blocked(0, time.Now())
	require.Equal(t, pathUsable, why)
}

// TestOnePath: with one transport configured a node is read over gRPC while that does not
// work, and soon by it again.
func TestOnePath(t *testing.T) {
	f := startTwoPaths(t, nil, func(c *Config) { c.Transport = "fake" })
	f.put(theKey, "1")
	f.want(t, theKey, "1")
	f.fast.unplug(fmt.Errorf("%w: no device", rdma.ErrUnsupported))
	f.via(t, TransportGRPC, 1, 2, 3)
	s := f.during(func() { f.want(t, theKey, "1") })
	require.EqualValues(t, 1, s.gets(Linearizable, TransportGRPC))
	f.fast.unplug(nil)
	f.via(t, "fake", 1, 2, 3)
	s = f.during(func() { f.want(t, theKey, "1") })
	require.EqualValues(t, 1, s.gets(Linearizable, "fake"))
	require.EqualValues(t, 1, s.CacheHits)
}

// TestNotServedIsNoFallback: what a node does not serve, or what needs the same host, is
// neither counted nor tried again.
func TestNotServedIsNoFallback(t *testing.T) {
	f := startTwoPaths(t, func(f *twoPaths) {
		f.transports = []string{"other"}
		f.nodes[2].plain = true
	}, nil)
	f.via(t, "other", 1, 2)
	f.via(t, TransportGRPC, 3)
	require.Empty(t, f.c.Stats().TransportFallbacks)
	for id := uint64(1); id <= 3; id++ {
		s := f.c.sessionOf(id)
		_, again := s.of.nextTry(s)
		require.False(t, again)
	}
	require.Zero(t, f.fast.asked, "nobody wants a device")
}

// TestNamedTransport: what was asked for by name is counted where a node does not have it.
func TestNamedTransport(t *testing.T) {
	f := startTwoPaths(t, func(f *twoPaths) { f.transports = []string{"other"} }, func(c *Config) { c.Transport = "fake" })
	f.via(t, TransportGRPC, 1, 2, 3)
	require.EqualValues(t, 3, f.c.Stats().fell("fake", pathNotServed))
	require.Contains(t, f.c.Stats().Peers[0].Reason, "which serves other")
}

// TestLeaderWithoutSession: a leader that others name, and that there is no session with
// for a while, is asked over gRPC soon.
func TestLeaderWithoutSession(t *testing.T) {
	f := startTwoPaths(t, nil, func(c *Config) { c.RetryMax = time.Hour })
	key := f.keysInShard(1, 1)[0]
	f.put(key, "value")
	f.want(t, key, "value")
	n := (*f.c.nodes.Load())[1]
	s := n.sess.Swap(nil) // as between two sessions, for good
	s.ended.Store(true)
	got := f.during(func() { f.want(t, key, "value") })
	require.EqualValues(t, 1, got.gets(Linearizable, TransportGRPC))
	require.EqualValues(t, 1, got.Fallbacks["no_route"])
	require.LessOrEqual(t, got.Retries["no_route"], uint64(maxFruitless+1))
}

// TestRequireRDMA: Dial fails with the reason, and in time.
func TestRequireRDMA(t *testing.T) {
	cluster := newFakeCluster(t, fakeOptions{nodes: 3, shards: 1})
	dial := func(edit func(*Config, *fakeNet)) (*Client, error) {
		net := &fakeNet{c: cluster, name: "fake"}
		cfg := Config{
			Endpoints: []string{cluster.nodes[0].addr}, HostID: "host", RequireRDMA: true,
			Providers: []rdma.Provider{net, tcp.Provider{}}, DialTimeout: 5 * time.Second,
		}
		edit(&cfg, net)
		return Dial(context.Background(), cfg)
	}
	c, err := dial(func(*Config, *fakeNet) {})
	require.NoError(t, err)
	for _, p := range c.Stats().Peers {
		require.Equal(t, "fake", p.Transport)
	}
	require.NoError(t, c.Close())

	for name, f := range map[string]struct {
		edit func(*Config, *fakeNet)
		err  error
		text []string
	}{
		"no device":         {func(_ *Config, n *fakeNet) { n.down = fmt.Errorf("%w: no device on this host", rdma.ErrUnsupported) }, ErrNoRDMA, []string{"fake: ", "no device on this host"}},
		"no provider":       {func(c *Config, _ *fakeNet) { c.Providers = c.Providers[1:] }, ErrInvalid, []string{"RDMA is required"}},
		"another transport": {func(c *Config, _ *fakeNet) { c.Transport = "tcp" }, ErrInvalid, []string{`"tcp"`}},
		"plain text":        {func(c *Config, _ *fakeNet) { c.RequireTLS, c.TLS = true, testTLS() }, ErrNoRDMA, []string{"AllowPlaintextReads"}},
	} {
		_, err := dial(f.edit)
		require.ErrorIs(t, err, f.err, name)
		for _, words := range f.text {
			require.Contains(t, err.Error(), words, name)
		}
		require.NotContains(t, err.Error(), "\n")
	}

	full := failWith(codes.ResourceExhausted, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_EXHAUSTED})
	cluster.mu.Lock()
	cluster.nodes[1].refusal = map[string]error{"fake": full}
	cluster.nodes[2].plain = true
	cluster.mu.Unlock()
	_, err = dial(func(*Config, *fakeNet) {})
	require.ErrorIs(t, err, ErrNoRDMA)
	require.ErrorIs(t, err, ErrUnavailable)
	require.Contains(t, err.Error(), cluster.nodes[1].addr)
	require.Contains(t, err.Error(), "EXHAUSTED")
	require.Contains(t, err.Error(), "node at "+cluster.nodes[2].addr+": fake: not served by the node")
	require.NotContains(t, err.Error(), cluster.nodes[0].addr)
}

// TestLossUnderLoad: the fabric breaks, again and again, under readers and writers. No get
// fails or is older than what was acknowledged before it, and each time reading goes on
// over tcp and back.
func TestLossUnderLoad(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("KVD_SEED=%d", seed)
	fabric, err := simnic.New(simnic.Config{
		Seed: seed, Delay: simnic.Range{Max: 20 * time.Microsecond}, Return: simnic.Range{Max: 20 * time.Microsecond},
		TearOneIn: 4, Timeout: 50 * time.Millisecond,
	})
	require.NoError(t, err)
	t.Cleanup(fabric.Close)
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: 4, targets: func(n *fakeNode) []rdma.Provider {
		return []rdma.Provider{fabric.Host(fmt.Sprint("node ", n.id)), tcp.Provider{}}
	}})}
	f.c = f.dial(t, fabric.Host("client"), func(c *Config) { c.Providers = append(c.Providers, tcp.Provider{}) })
	f.ready(t)
	p := &twoPaths{fixture: f}
	p.via(t, "simnic", 1, 2, 3)

	ctx := ctxFor(t, 60*time.Second)
	const keys = 8
	var acked [keys]atomic.Uint64
	stop := make(chan struct{})
	var all sync.WaitGroup
	work := func(step func(i int)) {
		all.Go(func() {
			for i := 0; !t.Failed(); i++ {
				select {
				case <-stop:
					return
				default:
					step(i)
				}
			}
		})
	}
	for r := range 4 {
		work(func(i int) {
			k := (i + r) % keys
			before := acked[k].Load()
			v, err := f.c.Get(ctx, fmt.Appendf(nil, "key %d", k))
			if err == ErrNotFound && before == 0 {
				return
			}
			var n uint64
			if _, scanErr := fmt.Sscanf(string(v.Data), "%d ", &n); err != nil || scanErr != nil || n < before {
				t.Errorf("key %d: %.20q, %v: want at least %d", k, v.Data, err, before)
			}
		})
	}
	work(func(i int) {
		n, k := uint64(i/keys+1), i%keys
		if _, err := f.c.Put(ctx, fmt.Appendf(nil, "key %d", k), fmt.Appendf(nil, "%d %0*d", n, 100+i%500, n)); err != nil {
			t.Errorf("put: %v", err)
		}
		acked[k].Store(n)
	})
	for id := uint64(1); id <= 3; id++ {
		host := fmt.Sprint("node ", id)
		fabric.Partition("client", host)
		fabric.Lose("client", host)
		p.via(t, "tcp", id)
		fabric.Heal("client", host)
		p.via(t, "simnic", id)
	}
	close(stop)
	all.Wait()
	s := f.c.Stats()
	t.Logf("gets %v, fallbacks of transports %v, of gets %v, retries %v", s.Gets, s.TransportFallbacks, s.Fallbacks, s.Retries)
	require.GreaterOrEqual(t, s.fell("simnic", pathLost), uint64(3))
	require.NotZero(t, s.gets(Linearizable, "tcp"))
	require.NotZero(t, s.gets(Linearizable, "simnic"))
	for _, p := range s.Peers {
		require.EqualValues(t, 1, p.Sessions)
		require.EqualValues(t, 3, p.Connections)
	}
}
