package server

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/simnic"
	"github.com/kvd-io/kvd/storage/layout"
)

// twinPatience of the tests is short, but outlasts a stream that ends.
const twinPatience = 500 * time.Millisecond

func startTwinCluster(t *testing.T) *testCluster {
	return startCluster(t, 3, 2, func(c *Config) { c.TwinPatience = twinPatience })
}

// copyOf a node that does not run: its configuration, with a copy of its directory and
// an address of its own.
func (c *testCluster) copyOf(i int) Config {
	cfg := c.cfgs[i]
	cfg.DataDir = filepath.Join(c.t.TempDir(), "copy")
	require.NoError(c.t, os.CopyFS(cfg.DataDir, os.DirFS(c.cfgs[i].DataDir)))
	cfg.ListenAddr = freeAddrs(c.t, 1)[0]
	cfg.Peers = slices.Clone(cfg.Peers)
	cfg.Peers[i].Address = cfg.ListenAddr
	return cfg
}

// hears waits until a node receives messages of another.
func (c *testCluster) hears(i, from int) {
	eventually(c.t, "a stream between the nodes", func() bool { return len(c.nodes[i].boots.others(uint64(from+1), 0)) > 0 })
}

func (c *testCluster) requireUnharmed() {
	_, err := c.put("key", "value", nil)
	require.NoError(c.t, err)
	for _, n := range c.nodes {
		require.Empty(c.t, n.fatal)
	}
}

func stopNode(t *testing.T, n *Node) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(t, n.Stop(ctx))
}

// While the original runs, its peers say so to a copy, and so does the original itself
// to one that only it can hear.
func TestTwinIsRefusedAtStart(t *testing.T) {
	c := startTwinCluster(t)
	c.stopNode(0)
	twin := c.copyOf(0)
	require.NoError(t, c.start(0))
	c.hears(1, 0)
	c.hears(2, 0)
	boot := c.nodes[0].bootID

	for what, spoil := range map[string]func(*Config){
		"heard by node ": func(cfg *Config) {
			// The original's address is not asked: another node is said to be there.
			id := readIdentity(t, cfg.DataDir)
			id.manifest.Nodes[0].Address = cfg.ListenAddr
			writeIdentity(t, cfg.DataDir, id)
		},
		"it answers at " + c.cfgs[0].ListenAddr: func(cfg *Config) {
			nobody := freeAddrs(t, 2)
			cfg.Peers[1].Address, cfg.Peers[2].Address = nobody[0], nobody[1]
		},
	} {
		cfg := twin
		cfg.Peers = slices.Clone(twin.Peers)
		cfg.DataDir = filepath.Join(t.TempDir(), "copy")
		require.NoError(t, os.CopyFS(cfg.DataDir, os.DirFS(twin.DataDir)))
		spoil(&cfg)
		_, err := Start(context.Background(), cfg)
		require.ErrorIs(t, err, ErrRefused, what)
		require.ErrorContains(t, err, "node 1 runs already ("+what)
		require.ErrorContains(t, err, cfg.DataDir+" is a copy, or the other process must be stopped first")
	}
	c.requireUnharmed()
	require.Equal(t, boot, c.nodes[0].bootID)
	require.Equal(t, []uint64{boot}, c.nodes[1].boots.others(1, 0), "the original is heard as before")
}

// A start that runs out of time while it waits for the other process is refused: that
// nobody could answer any more is no proof that the other one is gone.
func TestTwinIsRefusedWhenTimeIsUp(t *testing.T) {
	c := startTwinCluster(t)
	c.stopNode(0)
	twin := c.copyOf(0)
	require.NoError(t, c.start(0))
	c.hears(1, 0)
	twin.TwinPatience, twin.BootstrapTimeout = time.Hour, twinPatience
	_, err := Start(context.Background(), twin)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "node 1 runs already")
}

// A copy that starts while no peer runs can not be told. When the peers come, they let
// in who answers at the address that they know, whoever of the two comes first.
func TestTwinStopsItself(t *testing.T) {
	c := startTwinCluster(t)
	c.stop()
	cfg := c.copyOf(0)
	// Neither does it find the original: its manifest has its own address.
	id := readIdentity(t, cfg.DataDir)
	id.manifest.Nodes[0].Address = cfg.ListenAddr
	writeIdentity(t, cfg.DataDir, id)
	twin, err := Start(context.Background(), cfg)
	require.NoError(t, err)
	defer stopNode(t, twin)
	for i, err := range c.startAll(0, 1, 2) {
		require.NoError(t, err, "node %d", i+1)
	}
	select {
	case err := <-twin.Fatal():
		require.ErrorIs(t, err, ErrRefused)
		require.ErrorContains(t, err, "node 1 runs already (heard by node ")
		require.ErrorContains(t, err, "is a copy, or the other process must be stopped first")
	case <-time.After(20 * time.Second):
		t.Fatal("the copy goes on")
	}
	c.requireUnharmed()
}

// From when a peer says that it hears another process, nobody reads a copy's memory;
// when the other one is gone, this one serves again.
func TestTwinIsNotReadInDoubt(t *testing.T) {
	f, err := simnic.New(simnic.Config{})
	require.NoError(t, err)
	t.Cleanup(f.Close)
	c := startTwinCluster(t)
	c.stop()
	cfg := c.copyOf(0)
	id := readIdentity(t, cfg.DataDir)
	id.manifest.Nodes[0].Address = cfg.ListenAddr
	writeIdentity(t, cfg.DataDir, id)
	cfg.TwinPatience = time.Hour
	cfg.Providers = []rdma.Provider{f.Host("copy")}
	twin, err := Start(testContext(t), cfg)
	require.NoError(t, err)
	defer stopNode(t, twin)
	grpcConn, err := grpc.NewClient("passthrough:///"+twin.Address(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer func() { require.NoError(t, grpcConn.Close()) }()
	of := &testCluster{t: t, conns: []*grpc.ClientConn{grpcConn}}
	conn := openSession(t, of, "").connect(f.Host("client"))
	_, err = read(conn, 0, 0, layout.RecordSize)
	require.NoError(t, err, "nobody is there who could tell")

	for i, err := range c.startAll(0, 1, 2) {
		require.NoError(t, err, "node %d", i+1)
	}
	eventually(t, "READs fail", func() bool {
		_, err := read(conn, 0, 0, layout.RecordSize)
		return err != nil
	})
	open := func() error {
		stream, err := kvdv1.NewAccessClient(grpcConn).OpenSession(testContext(t), &kvdv1.OpenSessionRequest{LayoutVersion: layout.Version})
		require.NoError(t, err)
		_, err = stream.Recv()
		return err
	}
	requireReason(t, open(), kvdv1.ErrorDetail_REASON_NOT_READY)
	c.requireUnharmed()
	c.stopNode(0)
	eventually(t, "it may be the node now", func() bool { return open() == nil })
	require.Empty(t, twin.fatal)
}

// raw opens a message stream to a node, as some boot of another, and returns what ends
// it.
func (c *testCluster) raw(ctx context.Context, as, to int, boot uint64) func() error {
	id := readIdentityOf(c.nodes[to])
	s, err := kvdv1.NewPeerClient(c.conns[to]).Raft(ctx)
	require.NoError(c.t, err)
	from := &kvdv1.Identity{ClusterId: id.manifest.GetClusterId(), NodeId: uint64(as + 1), Incarnation: id.recorded(uint64(as + 1)), BootId: boot}
	_ = s.Send(&kvdv1.RaftBatch{From: from, ToIncarnation: id.incarnation()})
	return func() error { return s.RecvMsg(&kvdv1.RaftAck{}) }
}

// While a node runs, a stream of another boot is refused; of one boot there may be
// several, as after a connection that broke.
func TestTwinStreamIsRefused(t *testing.T) {
	c := startTwinCluster(t)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	requireReason(t, c.raw(ctx, 0, 1, 77)(), kvdv1.ErrorDetail_REASON_TWIN)
	again, hang := context.WithCancel(ctx)
	defer hang()
	end := c.raw(again, 0, 1, c.nodes[0].bootID)
	c.hears(1, 0)
	c.requireUnharmed()
	hang()
	require.Error(t, end())
}

// The stream of a process that died with its host lives on at the peers. The next start
// waits for its end.
func TestTwinGoneWhileWaiting(t *testing.T) {
	c := startTwinCluster(t)
	c.stopNode(0)
	c.cfgs[0].TwinPatience = time.Minute
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	eventually(t, "the stopped node's streams are gone", func() bool { return len(c.nodes[1].boots.others(1, 0)) == 0 })
	dead, end := context.WithCancel(ctx)
	defer end()
	ended := c.raw(dead, 0, 1, 77)
	c.hears(1, 0)
	started := make(chan error, 1)
	go func() { started <- c.start(0) }()
	select {
	case err := <-started:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(10 * twinPoll):
	}
	end()
	require.Error(t, ended())
	require.NoError(t, <-started)
	c.hears(1, 0)
	c.requireUnharmed()
}

// Where a copy came first, the boot that answers at the node's address puts it out.
func TestTwinIsEvicted(t *testing.T) {
	b := newBoots()
	first := b.enter(1, 10, false)
	require.NotNil(t, first)
	second := b.enter(1, 10, false)
	require.NotNil(t, second, "the same boot")
	require.Nil(t, b.enter(1, 11, false))
	require.NotNil(t, b.enter(2, 11, false), "another node")
	require.Equal(t, []uint64{10}, b.others(1, 11))
	require.Empty(t, b.others(1, 10))
	proved := b.enter(1, 11, true)
	require.NotNil(t, proved)
	for _, in := range []*inbound{first, second} {
		select {
		case <-in.evicted:
		default:
			t.Fatal("not evicted")
		}
		b.leave(1, in)
	}
	require.Equal(t, []uint64{11}, b.others(1, 10))
	require.Nil(t, b.enter(1, 10, false))
	b.leave(1, proved)
	require.NotNil(t, b.enter(1, 10, false))

	c := startTwinCluster(t)
	c.stopNode(0)
	eventually(t, "the stopped node's streams are gone", func() bool { return len(c.nodes[1].boots.others(1, 0)) == 0 })
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	ended := c.raw(ctx, 0, 1, 77)
	c.hears(1, 0)
	// The node is not told at its start that it has a twin.
	c.cfgs[0].Peers = slices.Clone(c.cfgs[0].Peers)
	c.cfgs[0].Peers[1].Address = freeAddrs(t, 1)[0]
	require.NoError(t, c.start(0))
	end := c.raw(ctx, 0, 1, c.nodes[0].bootID)
	requireReason(t, ended(), kvdv1.ErrorDetail_REASON_TWIN)
	require.Equal(t, []uint64{c.nodes[0].bootID}, c.nodes[1].boots.others(1, 0))
	cancel()
	require.Error(t, end())
}

// A node that is stopped and started is not taken for its own twin, and does not wait.
func TestTwinQuickRestart(t *testing.T) {
	c := startCluster(t, 3, 2) // with the patience of production
	for range 3 {
		for i := range c.nodes {
			c.hears((i+1)%3, i)
			c.stopNode(i)
			began := time.Now()
			require.NoError(t, c.start(i))
			require.Less(t, time.Since(began), 3*time.Second)
		}
	}
	c.requireUnharmed()
}

// One refusal proves nothing: only a peer that goes on refusing stops the node.
func TestTwinWatch(t *testing.T) {
	n := &Node{cfg: Config{NodeID: 1, DataDir: "/data", TwinPatience: time.Minute, Peers: []PeerConfig{{2, "b:1"}}}, log: testLogger(t), fatal: make(chan error, 1)}
	n.peers = newPeers(n)
	defer n.peers.close()
	var w twinWatch
	refused := failTwin(1)
	w.ended(n, 2, time.Now(), refused)
	require.Empty(t, n.fatal)
	w.since = w.since.Add(-2 * time.Minute)
	w.ended(n, 2, time.Now(), errStarting)
	w.ended(n, 2, time.Now(), refused)
	require.Empty(t, n.fatal, "another end came between")
	w.since = w.since.Add(-2 * time.Minute)
	w.ended(n, 2, time.Now().Add(-2*time.Minute), refused)
	require.Empty(t, n.fatal, "it was let in between")
	w.since = w.since.Add(-2 * time.Minute)
	w.ended(n, 2, time.Now(), refused)
	require.ErrorContains(t, <-n.fatal, "heard by node 2 at b:1")
}
