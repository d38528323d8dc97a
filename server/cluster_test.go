package server

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/layout"
)

// testCluster is several nodes in this process, on loopback.
type testCluster struct {
	t    testing.TB
	cfgs []Config
	// Only the test's goroutine changes these, under mu; others read them under it.
	mu    sync.RWMutex
	nodes []*Node
	conns []*grpc.ClientConn
}

func testLogger(t testing.TB) *slog.Logger {
	if testing.Verbose() {
		return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
	}
	return slog.New(slog.DiscardHandler)
}

func freeAddrs(t testing.TB, n int) []string {
	var addrs []string
	var ls []net.Listener
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		ls = append(ls, l)
		addrs = append(addrs, l.Addr().String())
	}
	for _, l := range ls {
		require.NoError(t, l.Close())
	}
	return addrs
}

// testTick is short, for the tests' time, but a busy machine must not take a leader
// for dead.
func testTick() time.Duration {
	if raceEnabled {
		return 80 * time.Millisecond
	}
	return 25 * time.Millisecond
}

func testConfigs(t testing.TB, nodes int, shards uint32) []Config {
	addrs := freeAddrs(t, nodes)
	var peers []PeerConfig
	for i, a := range addrs {
		peers = append(peers, PeerConfig{NodeID: uint64(i + 1), Address: a})
	}
	var cfgs []Config
	for i := range nodes {
		cfgs = append(cfgs, Config{
			NodeID: uint64(i + 1), DataDir: t.TempDir(), ListenAddr: addrs[i], Peers: peers, Bootstrap: i == 0,
			Shards: shards, TickInterval: testTick(), ArenaBytes: 64 << 20, MinFreeDisk: 1,
			BootstrapTimeout: 20 * time.Second,
			Logger:           testLogger(t).With("node", i+1),
		})
	}
	return cfgs
}

func newTestCluster(t testing.TB, cfgs []Config) *testCluster {
	c := &testCluster{t: t, cfgs: cfgs, nodes: make([]*Node, len(cfgs)), conns: make([]*grpc.ClientConn, len(cfgs))}
	t.Cleanup(c.stop)
	t.Cleanup(c.tellIfFailed)
	return c
}

// tellIfFailed logs what each node knows of the cluster's own group.
func (c *testCluster) tellIfFailed() {
	for i, n := range c.nodes {
		if !c.t.Failed() || n == nil {
			continue
		}
		c.t.Logf("node %d: group 0: %+v", i+1, n.host.Group(0).Status())
		for _, r := range n.registry.nodes() {
			c.t.Logf("node %d: knows %v", i+1, r)
		}
		for _, sh := range n.localShards() {
			c.t.Logf("node %d: shard %d: %+v", i+1, sh.number, sh.g.Status())
		}
	}
}

func startCluster(t testing.TB, nodes int, shards uint32, change ...func(*Config)) *testCluster {
	c := newTestCluster(t, testConfigs(t, nodes, shards))
	for i := range c.cfgs {
		for _, f := range change {
			f(&c.cfgs[i])
		}
	}
	errs := make(chan error, nodes)
	for i := range nodes {
		go func() { errs <- c.start(i) }()
	}
	for range nodes {
		require.NoError(t, <-errs)
	}
	return c
}

func (c *testCluster) start(i int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	n, err := Start(ctx, c.cfgs[i])
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient("passthrough:///"+n.Address(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	c.mu.Lock()
	c.nodes[i], c.conns[i] = n, conn
	c.mu.Unlock()
	return err
}

func (c *testCluster) stopNode(i int) {
	if c.nodes[i] == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c.mu.Lock()
	n := c.nodes[i]
	c.nodes[i] = nil
	c.mu.Unlock()
	require.NoError(c.t, n.Stop(ctx))
	require.NoError(c.t, c.conns[i].Close())
}

func (c *testCluster) stop() {
	for i := range c.nodes {
		c.stopNode(i)
	}
}

func (c *testCluster) kv(i int) kvdv1.KVClient { return kvdv1.NewKVClient(c.conns[i]) }

// leader calls f on the node that leads the key's shard, until f does not say that
// another one does.
func (c *testCluster) leader(key []byte, f func(kvdv1.KVClient) error) error {
	deadline := time.Now().Add(15 * time.Second)
	i := 0
	for {
		c.mu.RLock()
		up, conn, next := c.nodes[i] != nil, c.conns[i], (i+1)%len(c.nodes)
		c.mu.RUnlock()
		if !up {
			i = next
			continue
		}
		err := f(kvdv1.NewKVClient(conn))
		// Canceled: the node was stopped, and its connection closed.
		if status.Code(err) != codes.Unavailable && status.Code(err) != codes.Canceled && reasonOf(err) != kvdv1.ErrorDetail_REASON_NO_REPLICA || time.Now().After(deadline) {
			return err
		}
		i = next
		<-time.After(5 * time.Millisecond)
	}
}

func (c *testCluster) put(key, value string, p *kvdv1.Precondition) (*kvdv1.WriteResponse, error) {
	var r *kvdv1.WriteResponse
	err := c.leader([]byte(key), func(kv kvdv1.KVClient) (err error) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		r, err = kv.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: []byte(key), Value: []byte(value), Precondition: p})
		if p == nil && status.Code(err) == codes.Unknown {
			return errStarting // an election came between: the same put again does no harm
		}
		return err
	})
	return r, err
}

func (c *testCluster) get(key string) (*kvdv1.GetResponse, error) {
	var r *kvdv1.GetResponse
	err := c.leader([]byte(key), func(kv kvdv1.KVClient) (err error) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		r, err = kv.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: []byte(key)})
		return err
	})
	return r, err
}

func TestOneNode(t *testing.T) {
	c := startCluster(t, 1, 4)
	for i := range 100 {
		key, value := fmt.Sprintf("key-%d", i), fmt.Sprintf("value-%d", i)
		r, err := c.put(key, value, nil)
		require.NoError(t, err)
		require.Equal(t, kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, r.GetOutcome())
		g, err := c.get(key)
		require.NoError(t, err)
		require.Equal(t, value, string(g.GetValue()))
		require.NotNil(t, g.GetLocation())
	}
	c.stopNode(0)
	require.NoError(t, c.start(0))
	for i := range 100 {
		g, err := c.get(fmt.Sprintf("key-%d", i))
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("value-%d", i), string(g.GetValue()))
		require.NotNil(t, g.GetLocation(), "after a restart the memory is filled from the state")
	}
}

func TestThreeNodes(t *testing.T) {
	c := startCluster(t, 3, 8)
	big := bytes.Repeat([]byte("x"), 300_000)
	for i := range 50 {
		_, err := c.put(fmt.Sprintf("key-%d", i), string(big[:i*5000]), nil)
		require.NoError(t, err)
	}
	// Every replica shows the same, in its arena and in its engine.
	for i := range 50 {
		key := []byte(fmt.Sprintf("key-%d", i))
		g, err := c.get(string(key))
		require.NoError(t, err)
		require.Len(t, g.GetValue(), i*5000)
		shard := layout.HashKey(c.nodes[0].identity.Load().manifest.GetHashSeed(), key).Shard(8)
		for _, n := range c.nodes {
			sh := n.shard(shard)
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			require.NoError(t, sh.waitApplied(ctx, g.GetApplied()))
			cancel()
			loc, resident := sh.space(1).Lookup(key)
			require.True(t, resident)
			require.Equal(t, g.GetVersion(), loc.Version)
			require.Equal(t, g.GetApplied(), sh.record.Load().Applied)
		}
	}
}

// requireReason wants the error to carry that reason, with the code that belongs to it.
func requireReason(t testing.TB, err error, want kvdv1.ErrorDetail_Reason, what ...any) *kvdv1.ErrorDetail {
	t.Helper()
	require.Error(t, err, what...)
	for _, d := range status.Convert(err).Details() {
		if d, ok := d.(*kvdv1.ErrorDetail); ok {
			require.Equal(t, want, d.GetReason(), "%v: %v", what, err)
			require.Equal(t, codeOf[want], status.Code(err), "%v: %v", what, err)
			return d
		}
	}
	require.Failf(t, "no detail", "%v: %v", what, err)
	return nil
}
