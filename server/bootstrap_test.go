package server

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

func writeIdentity(t testing.TB, dir string, id *identity) {
	d, err := openDataDir(dir)
	require.NoError(t, err)
	require.NoError(t, d.saveIdentity(id))
	require.NoError(t, d.close())
}

func readIdentity(t testing.TB, dir string) *identity {
	d, err := openDataDir(dir)
	require.NoError(t, err)
	id, err := d.loadIdentity()
	require.NoError(t, err)
	require.NoError(t, d.close())
	return id
}

// startAll starts the named nodes together and returns their errors.
func (c *testCluster) startAll(nodes ...int) map[int]error {
	type result struct {
		i   int
		err error
	}
	results := make(chan result)
	for _, i := range nodes {
		go func() { results <- result{i, c.start(i)} }()
	}
	errs := map[int]error{}
	for range nodes {
		r := <-results
		errs[r.i] = r.err
	}
	return errs
}

func prepareCluster(t testing.TB, nodes int) *testCluster {
	c := newTestCluster(t, testConfigs(t, nodes, 2))
	for i := range c.cfgs {
		c.cfgs[i].BootstrapTimeout = 8 * time.Second
	}
	return c
}

// A bootstrap that was cut off at any step goes on at the next start, to the cluster
// that was drawn first.
func TestBootstrapGoesOnAfterCrash(t *testing.T) {
	type state struct{ there, leading, active bool }
	drawn, adopted := state{there: true, leading: true}, state{there: true}
	active := state{there: true, active: true}
	first := state{there: true, leading: true, active: true}
	for name, states := range map[string][3]state{
		"drawn":                          {drawn, {}, {}},
		"adopted by one":                 {drawn, adopted, {}},
		"adopted by all":                 {drawn, adopted, adopted},
		"active at the first":            {first, adopted, adopted},
		"active at two":                  {first, active, adopted},
		"wiped between adopt and active": {drawn, {}, adopted},
	} {
		t.Run(name, func(t *testing.T) {
			c := prepareCluster(t, 3)
			m := drawManifest(c.cfgs[0].withDefaults())
			for i, s := range states {
				if s.there {
					writeIdentity(t, c.cfgs[i].DataDir, &identity{manifest: m, nodeID: uint64(i + 1), active: s.active, leading: s.leading})
				}
			}
			for i, err := range c.startAll(0, 1, 2) {
				require.NoError(t, err, "node %d", i+1)
			}
			for i, n := range c.nodes {
				id := n.identity.Load()
				require.True(t, proto.Equal(m, id.manifest))
				require.True(t, id.active)
				require.Equal(t, m.GetNodes()[i].GetIncarnation(), id.incarnation())
			}
			_, err := c.put("key", "value", nil)
			require.NoError(t, err)
		})
	}
}

// The word is said once: later starts with it, and without it, find the same cluster.
func TestBootstrapIsDoneOnce(t *testing.T) {
	c := prepareCluster(t, 2)
	require.Equal(t, map[int]error{0: nil, 1: nil}, c.startAll(0, 1))
	id := c.nodes[0].ClusterID()
	require.Equal(t, id, c.nodes[1].ClusterID())
	c.stop()
	c.cfgs[1].Bootstrap = true
	require.Equal(t, map[int]error{0: nil, 1: nil}, c.startAll(0, 1))
	c.stop()
	c.cfgs[0].Bootstrap, c.cfgs[1].Bootstrap = false, false
	require.Equal(t, map[int]error{0: nil, 1: nil}, c.startAll(0, 1))
	require.Equal(t, id, c.nodes[0].ClusterID())
	require.True(t, readIdentityOf(c.nodes[1]).opened)
}

func readIdentityOf(n *Node) *identity { return n.identity.Load() }

// A node that lost its directory is told so, whether or not it was told to bootstrap:
// under its old id it never comes back.
func TestWipedNodeIsRefused(t *testing.T) {
	c := prepareCluster(t, 3)
	for i, err := range c.startAll(0, 1, 2) {
		require.NoError(t, err, "node %d", i+1)
	}
	for _, bootstrap := range []bool{false, true} {
		c.stopNode(1)
		c.cfgs[1].DataDir, c.cfgs[1].Bootstrap = t.TempDir(), bootstrap
		err := c.start(1)
		require.ErrorIs(t, err, ErrRefused)
		require.ErrorContains(t, err, "a voter that forgets may vote twice")
		require.ErrorContains(t, err, "leave node")
		_, err = os.Stat(filepath.Join(c.cfgs[1].DataDir, identityFile))
		require.ErrorIs(t, err, os.ErrNotExist, "nothing was written")
	}
	// Another incarnation of the same id: a directory of a cluster that was made anew.
	m := proto.Clone(c.nodes[0].identity.Load().manifest).(*kvdv1.Manifest)
	m.Nodes[1].Incarnation++
	writeIdentity(t, c.cfgs[1].DataDir, &identity{manifest: m, nodeID: 2, active: true})
	err := c.start(1)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "remembers incarnation")
	// Another cluster.
	m.ClusterId = strings.Repeat("ab", 16)
	writeIdentity(t, c.cfgs[1].DataDir, &identity{manifest: m, nodeID: 2, active: true})
	err = c.start(1)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "correct the peers or the directory")
	// A node that was never a member.
	c.cfgs[1].DataDir, c.cfgs[1].NodeID = t.TempDir(), 9
	c.cfgs[1].Peers = append([]PeerConfig{{NodeID: 9, Address: c.cfgs[1].ListenAddr}}, c.cfgs[0].Peers[0], c.cfgs[0].Peers[2])
	err = c.start(1)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "is not one of its members")
	// A peer that is somebody else.
	c.cfgs[1].Peers[1].NodeID = 7
	err = c.start(1)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "was expected to be node 7")
	_, err = c.put("key", "value", nil)
	require.NoError(t, err, "the others go on")
}

// A node of another cluster at the address of a peer that is down keeps nobody from
// starting, as long as another peer knows who starts.
func TestStrangerAtAPeersAddress(t *testing.T) {
	c := startCluster(t, 3, 1)
	c.stopNode(1)
	c.stopNode(2)
	stranger := testConfigs(t, 1, 1)
	stranger[0].ListenAddr, stranger[0].Peers[0].Address = c.cfgs[2].ListenAddr, c.cfgs[2].ListenAddr
	other := newTestCluster(t, stranger)
	require.NoError(t, other.start(0))
	require.NoError(t, c.start(1))
	c.leaderOf(1)
	_, err := c.put("key", "value", nil)
	require.NoError(t, err)
	// Where only the stranger answers, the peers or the directory may be wrong.
	c.stopNode(0)
	c.stopNode(1)
	err = c.start(1)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, c.cfgs[2].ListenAddr)
}

func TestTwoBootstraps(t *testing.T) {
	c := prepareCluster(t, 2)
	c.cfgs[1].Bootstrap = true
	c.cfgs[0].BootstrapTimeout, c.cfgs[1].BootstrapTimeout = 3*time.Second, 3*time.Second
	errs := c.startAll(0, 1)
	require.Error(t, errs[0])
	require.Error(t, errs[1])
	for i := range c.cfgs {
		if id := readIdentity(t, c.cfgs[i].DataDir); id != nil {
			require.False(t, id.active, "nobody votes")
		}
	}
}

// A start that can not be right says why, and leaves the directory alone.
func TestStartIsRefused(t *testing.T) {
	c := prepareCluster(t, 1)
	require.NoError(t, c.start(0))
	cfg, second := c.cfgs[0], c.cfgs[0]
	second.ListenAddr = "127.0.0.1:0"
	_, err := Start(context.Background(), second)
	require.ErrorIs(t, err, ErrLocked)
	require.ErrorContains(t, err, "stop it first")
	second.DataDir = t.TempDir()
	second.ListenAddr = cfg.ListenAddr
	_, err = Start(context.Background(), second)
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "is another node running there?")
	c.stop()

	path := filepath.Join(cfg.DataDir, identityFile)
	file, err := os.ReadFile(path)
	require.NoError(t, err)
	resum := func(change func(id *identity)) []byte {
		dir := t.TempDir()
		id := readIdentity(t, cfg.DataDir)
		change(id)
		writeIdentity(t, dir, id)
		b, err := os.ReadFile(filepath.Join(dir, identityFile))
		require.NoError(t, err)
		return b
	}
	for name, x := range map[string]struct {
		change func(cfg *Config)
		file   []byte
		is     error
		says   string
	}{
		"other node id":     {func(c *Config) { c.NodeID, c.Peers = 2, nil }, file, ErrRefused, "belongs to node 1"},
		"garbage":           {nil, []byte("hello"), ErrDataDir, "not JSON"},
		"empty":             {nil, nil, ErrDataDir, "not JSON"},
		"half":              {nil, file[:len(file)/2], ErrDataDir, "not JSON"},
		"edited":            {nil, []byte(strings.Replace(string(file), `"shards": 2`, `"shards": 3`, 1)), ErrDataDir, "check sum"},
		"inactive by hand":  {nil, []byte(strings.Replace(string(file), `"active": true`, `"active": false`, 1)), ErrDataDir, "check sum"},
		"newer":             {nil, []byte(strings.Replace(string(file), `"format": 2,`, `"format": 3,`, 1)), ErrDataDir, "has format 3, this kvd knows 2: start the newer kvd"},
		"newer, other form": {nil, []byte(`{"format": 3, "node_id": "one", "manifest": []}`), ErrDataDir, "has format 3, this kvd knows 2: start the newer kvd"},
		"newer manifest":    {nil, resum(func(id *identity) { id.manifest.Format = 2 }), ErrDataDir, "has format 2, this kvd knows 1: start the kvd that wrote it"},
		"not in manifest":   {nil, resum(func(id *identity) { id.nodeID = 5 }), ErrDataDir, "node 5 is not in it"},
		"no shards":         {nil, resum(func(id *identity) { id.manifest.Shards = 0 }), ErrDataDir, "0 shards"},
		"short cluster id":  {nil, resum(func(id *identity) { id.manifest.ClusterId = "abc" }), ErrDataDir, "want 32 digits"},
		"replication":       {nil, resum(func(id *identity) { id.manifest.Replication = 3 }), ErrDataDir, "replication 3 over 1 nodes"},
		"no incarnation":    {nil, resum(func(id *identity) { id.manifest.Nodes[0].Incarnation = 0 }), ErrDataDir, "incarnation"},
		"no bootstrap word": {func(c *Config) { c.DataDir, c.Bootstrap, c.Peers = t.TempDir(), false, nil }, file, ErrRefused, "--bootstrap"},
		"a file":            {func(c *Config) { c.DataDir = path }, file, ErrDataDir, "can not be made"},
		"stores of nobody":  {func(c *Config) { c.DataDir = withStore(t, "state") }, file, ErrDataDir, "not known whose"},
		"log of nobody":     {func(c *Config) { c.DataDir = withStore(t, "log") }, file, ErrDataDir, "not known whose"},
		"bad configuration": {func(c *Config) { c.NodeID = 0 }, file, ErrConfig, "node id 0"},
	} {
		cfg := cfg
		require.NoError(t, os.WriteFile(path, x.file, 0o600))
		if x.change != nil {
			x.change(&cfg)
		}
		_, err := Start(context.Background(), cfg)
		require.ErrorIs(t, err, x.is, name)
		require.ErrorContains(t, err, x.says, name)
		after, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, string(x.file), string(after), name)
	}
	require.NoError(t, os.WriteFile(path, file, 0o600))
	require.NoError(t, c.start(0), "the directory is as it was")
}

func withStore(t testing.TB, name string) string {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700))
	return dir
}

// A directory that lost its log, its state or both does not begin anew.
func TestLostStores(t *testing.T) {
	for _, lost := range [][]string{{"state"}, {"log"}, {"log", "state"}} {
		c := prepareCluster(t, 1)
		require.NoError(t, c.start(0))
		_, err := c.put("key", "value", nil)
		require.NoError(t, err)
		c.stop()
		for _, name := range lost {
			require.NoError(t, os.RemoveAll(filepath.Join(c.cfgs[0].DataDir, name)))
		}
		err = c.start(0)
		require.ErrorIs(t, err, ErrDataDir, "%v", lost)
		require.ErrorContains(t, err, "has lost the", "%v", lost)
	}
}

// Who waits for a bootstrap that never comes says so in the end.
func TestBootstrapTimesOut(t *testing.T) {
	for _, bootstrap := range []bool{true, false} {
		c := prepareCluster(t, 2)
		c.cfgs[0].Bootstrap, c.cfgs[0].BootstrapTimeout = bootstrap, 300*time.Millisecond
		err := c.start(0)
		require.ErrorIs(t, err, ErrRefused)
		if bootstrap {
			require.ErrorContains(t, err, "did not answer within")
		} else {
			require.ErrorContains(t, err, "no peer bootstrapped a cluster")
		}
	}
	// The start's own context ends it too.
	c := prepareCluster(t, 2)
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	_, err := Start(ctx, c.cfgs[0])
	require.Error(t, err)
}

// What a stranger can say to a node before it has a cluster, and after.
func TestAdoptAndActivateAreGuarded(t *testing.T) {
	c := prepareCluster(t, 1)
	require.NoError(t, c.start(0))
	n := c.nodes[0]
	m := n.identity.Load().manifest
	ctx := context.Background()
	peer := kvdv1.NewPeerClient(c.conns[0])
	_, err := peer.Adopt(ctx, &kvdv1.AdoptRequest{Manifest: m, NodeId: 1})
	require.NoError(t, err, "the same again")
	_, err = peer.Activate(ctx, &kvdv1.ActivateRequest{ClusterId: m.GetClusterId()})
	require.NoError(t, err)
	other := proto.Clone(m).(*kvdv1.Manifest)
	other.HashSeed++
	for what, req := range map[string]*kvdv1.AdoptRequest{
		"nothing": {}, "other node": {Manifest: m, NodeId: 2}, "other content": {Manifest: other, NodeId: 1},
		"other format": {Manifest: &kvdv1.Manifest{Format: 9}, NodeId: 1},
	} {
		_, err := peer.Adopt(ctx, req)
		requireReason(t, err, kvdv1.ErrorDetail_REASON_WRONG_CLUSTER, what)
	}
	_, err = peer.Activate(ctx, &kvdv1.ActivateRequest{ClusterId: "x"})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_WRONG_CLUSTER)
	h, err := peer.Hello(ctx, &kvdv1.HelloRequest{})
	require.NoError(t, err)
	require.True(t, h.GetActive())
	require.Zero(t, h.GetRecordedIncarnation())

	// An empty node takes no manifest that can not be one.
	empty := &Node{cfg: Config{NodeID: 1}.withDefaults(), dir: &dataDir{path: t.TempDir()}, log: testLogger(t)}
	for what, spoil := range map[string]func(m *kvdv1.Manifest){
		"shards": func(m *kvdv1.Manifest) { m.Shards = 1 << 31 }, "cluster id": func(m *kvdv1.Manifest) { m.ClusterId = "ab" },
		"replication": func(m *kvdv1.Manifest) { m.Replication = 2 }, "nobody": func(m *kvdv1.Manifest) { m.Nodes = nil },
		"twice":  func(m *kvdv1.Manifest) { m.Nodes = append(m.Nodes, m.Nodes[0]) },
		"absent": func(m *kvdv1.Manifest) { m.Nodes[0].NodeId = 4 },
	} {
		bad := proto.Clone(m).(*kvdv1.Manifest)
		spoil(bad)
		_, err := empty.Adopt(ctx, &kvdv1.AdoptRequest{Manifest: bad, NodeId: 1})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_WRONG_CLUSTER, what)
		require.Nil(t, empty.identity.Load(), what)
	}
	_, err = empty.Adopt(ctx, &kvdv1.AdoptRequest{Manifest: m, NodeId: 1})
	require.NoError(t, err)
}

// A peer that accepts and never answers does not hold up a start for long.
func TestDeafPeerAtStart(t *testing.T) {
	c := prepareCluster(t, 1)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	require.NoError(t, c.start(0))
	c.stop()
	c.cfgs[0].Peers = append(c.cfgs[0].Peers, PeerConfig{NodeID: 2, Address: l.Addr().String()})
	began := time.Now()
	require.NoError(t, c.start(0))
	require.Less(t, time.Since(began), helloTimeout+3*time.Second)
}
