package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/tcp"
)

// grow prepares one more node that joins by the addresses.
func (c *testCluster) grow(join ...string) int {
	addr := freeAddrs(c.t, 1)[0]
	c.cfgs = append(c.cfgs, Config{
		DataDir: c.t.TempDir(), ListenAddr: addr, Join: join, Shards: c.cfgs[0].Shards, TickInterval: testTick(),
		ArenaBytes: 64 << 20, MinFreeDisk: 1, BootstrapTimeout: 20 * time.Second, Host: fmt.Sprintf("host-%d", len(c.cfgs)+1),
		TwinPatience: c.cfgs[0].TwinPatience, Logger: testLogger(c.t).With("node", len(c.cfgs)+1),
	})
	c.mu.Lock()
	c.nodes, c.conns = append(c.nodes, nil), append(c.conns, nil)
	c.mu.Unlock()
	return len(c.cfgs) - 1
}

// startAlone makes a cluster of one that says nothing of ids or peers.
func startAlone(t testing.TB, shards uint32) *testCluster {
	c := newTestCluster(t, testConfigs(t, 1, shards))
	c.cfgs[0].NodeID, c.cfgs[0].Peers = 0, nil
	require.NoError(t, c.start(0))
	eventually(t, "it leads", func() bool { return c.nodes[0].host.Group(0).Status().Leading })
	return c
}

func (c *testCluster) members(i int) *kvdv1.MembersResponse {
	r, err := kvdv1.NewClusterClient(c.conns[i]).Members(testContext(c.t), &kvdv1.MembersRequest{})
	require.NoError(c.t, err)
	return r
}

func (c *testCluster) voters() (ids []uint64) {
	for _, m := range c.members(0).GetMembers() {
		if m.GetVoter() {
			ids = append(ids, m.GetNode().GetNodeId())
		}
	}
	return ids
}

// A node alone is a cluster, and grows: each node gets the next id, learns group 0 and
// in the end votes there, and starts again as who it is with nothing told.
func TestClusterGrows(t *testing.T) {
	c := startAlone(t, 4)
	require.Equal(t, uint64(1), c.nodes[0].id())
	_, err := c.put("key", "value", nil)
	require.NoError(t, err)
	for i := 1; i < 4; i++ {
		by := c.grow(c.nodes[i-1].Address()) // any member lets others in
		require.NoError(t, c.start(by))
		require.Equal(t, uint64(i+1), c.nodes[by].id())
		require.Equal(t, c.nodes[0].ClusterID(), c.nodes[by].ClusterID())
		_, err := os.Stat(filepath.Join(c.cfgs[by].DataDir, joinFile))
		require.ErrorIs(t, err, os.ErrNotExist)
	}
	eventually(t, "all are active, three vote", func() bool {
		for _, m := range c.members(3).GetMembers() {
			if m.GetNode().GetState() != isActive {
				return false
			}
		}
		return len(c.voters()) == 3
	})
	require.Equal(t, "host-3", c.members(0).GetMembers()[2].GetNode().GetHost())
	// What group 0 decides reaches all, and sessions are told of everyone.
	cluster := kvdv1.NewClusterClient(c.conns[3])
	_, err = cluster.CreateNamespace(testContext(t), &kvdv1.CreateNamespaceRequest{Name: "late"})
	require.NoError(t, err)
	for _, n := range c.nodes {
		members, _ := n.members()
		require.Len(t, members, 4)
		require.NoError(t, n.awaitNamespace(testContext(t), "late"))
	}
	g, err := c.get("key")
	require.NoError(t, err)
	require.Equal(t, "value", string(g.GetValue()))

	// Again, with nothing told, and with what was told before.
	c.stopNode(2)
	c.cfgs[2].Join = nil
	require.NoError(t, c.start(2))
	require.Equal(t, uint64(3), c.nodes[2].id())
	c.stopNode(3)
	require.NoError(t, c.start(3))
	require.Equal(t, uint64(4), c.nodes[3].id())

	// The one that was first is one of many.
	c.stopNode(0)
	c.cfgs[0].Bootstrap = false
	eventually(t, "the others decide without it", func() bool {
		_, err := kvdv1.NewClusterClient(c.conns[1]).CreateNamespace(testContext(t), &kvdv1.CreateNamespaceRequest{Name: "without"})
		return err == nil || reasonOf(err) == kvdv1.ErrorDetail_REASON_ALREADY_EXISTS
	})
	require.NoError(t, c.start(0))
	require.NoError(t, c.nodes[0].awaitNamespace(testContext(t), "without"))
}

// A cluster whose nodes were all named at its bootstrap grows too.
func TestStaticClusterGrows(t *testing.T) {
	c := startCluster(t, 3, 2)
	require.False(t, c.nodes[0].registry.written())
	require.Equal(t, 1, c.formatOf(0), "an older version may take over")
	by := c.grow(c.nodes[1].Address(), c.nodes[2].Address())
	require.NoError(t, c.start(by))
	require.Equal(t, uint64(4), c.nodes[by].id())
	eventually(t, "it is active", func() bool { return c.members(by).GetMembers()[3].GetNode().GetState() == isActive })
	require.Len(t, c.voters(), 3)
	for i, m := range c.members(0).GetMembers()[:3] {
		require.Equal(t, c.cfgs[i].ListenAddr, m.GetNode().GetAddress())
	}
	for i := range c.nodes {
		require.Equal(t, 2, c.formatOf(i), "an older version would not know node 4")
	}
	c.stopNode(0)
	require.NoError(t, c.start(0))
	require.NotNil(t, c.nodes[0].directory().find(4))
	require.Equal(t, 2, c.formatOf(0))
}

// formatOf is what the file of a node's identity says.
func (c *testCluster) formatOf(i int) int {
	b, err := os.ReadFile(filepath.Join(c.cfgs[i].DataDir, identityFile))
	require.NoError(c.t, err)
	var j identityJSON
	require.NoError(c.t, json.Unmarshal(b, &j))
	return j.Format
}

// A node that moves to another address tells the cluster.
func TestJoinedNodeMoves(t *testing.T) {
	c := startAlone(t, 1)
	by := c.grow(c.nodes[0].Address())
	require.NoError(t, c.start(by))
	eventually(t, "it is active", func() bool { return c.members(0).GetMembers()[1].GetNode().GetState() == isActive })
	c.stopNode(by)
	moved := freeAddrs(t, 1)[0]
	c.cfgs[by].ListenAddr, c.cfgs[by].Zone = moved, "elsewhere"
	require.NoError(t, c.start(by))
	eventually(t, "the cluster knows", func() bool {
		n := c.members(0).GetMembers()[1].GetNode()
		return n.GetAddress() == moved && n.GetZone() == "elsewhere"
	})
	cluster := kvdv1.NewClusterClient(c.conns[0])
	_, err := cluster.CreateNamespace(testContext(t), &kvdv1.CreateNamespaceRequest{Name: "after"})
	require.NoError(t, err)
	require.NoError(t, c.nodes[by].awaitNamespace(testContext(t), "after"))
}

// What can not join says why, and changes nothing here or there.
func TestJoinIsRefused(t *testing.T) {
	c := startAlone(t, 1)
	other := startAlone(t, 1)
	known := map[string][]string{"two.test": {"127.0.0.1"}}
	lookup := func(_ context.Context, host string) ([]string, error) {
		if a := known[host]; len(a) > 0 {
			return a, nil
		}
		return nil, errors.New("no such host")
	}
	for name, x := range map[string]struct {
		change func(cfg *Config)
		is     error
		says   string
	}{
		"a name of nothing":  {func(cfg *Config) { cfg.Join, cfg.Lookup = []string{"nowhere.test"}, lookup }, ErrRefused, "nowhere.test resolves to nothing"},
		"nobody there":       {func(cfg *Config) { cfg.Join = freeAddrs(t, 1) }, ErrRefused, "nobody at"},
		"an id of its own":   {func(cfg *Config) { cfg.NodeID = 1 }, ErrRefused, "given its id by the cluster"},
		"both ways":          {func(cfg *Config) { cfg.Bootstrap = true }, ErrConfig, "not both"},
		"peers as well":      {func(cfg *Config) { cfg.NodeID, cfg.Peers = 1, []PeerConfig{{1, "127.0.0.1:1"}} }, ErrConfig, "give one of them"},
		"no port":            {func(cfg *Config) { cfg.Join = []string{"a:b:c"} }, ErrConfig, "want HOST or HOST:PORT"},
		"another's address":  {func(cfg *Config) { cfg.AdvertiseAddr = other.nodes[0].Address() }, ErrRefused, "another node answers at"},
		"an unknown address": {func(cfg *Config) { cfg.AdvertiseAddr = freeAddrs(t, 1)[0] }, ErrRefused, "does not reach the new node"},
		"a long zone":        {func(cfg *Config) { cfg.Zone = string(make([]byte, 300)) }, ErrConfig, "zone of 300 bytes"},
		"no gossip key": {func(cfg *Config) {
			cfg.Gossip = GossipConfig{Listen: "127.0.1.1:0", KeyFile: filepath.Join(cfg.DataDir, "nofile")}
		}, ErrConfig, "nofile"},
		"gossip in use": {func(cfg *Config) { cfg.Gossip.Listen = c.nodes[0].Address() }, ErrConfig, "gossip-listen"},
		"transport in use": {func(cfg *Config) {
			cfg.Providers = []rdma.Provider{tcp.Provider{ListenAddr: c.nodes[0].Address()}}
		}, ErrConfig, "transport tcp"},
		"nothing said": {func(cfg *Config) { cfg.Join = nil }, ErrRefused, "--join to come into one"},
	} {
		by := c.grow(c.nodes[0].Address())
		c.cfgs[by].BootstrapTimeout = 700 * time.Millisecond
		x.change(&c.cfgs[by])
		err := c.start(by)
		require.ErrorIs(t, err, x.is, name)
		require.ErrorContains(t, err, x.says, name)
		_, err = os.Stat(filepath.Join(c.cfgs[by].DataDir, identityFile))
		require.ErrorIs(t, err, os.ErrNotExist, name)
		require.False(t, c.nodes[0].registry.written(), name)
	}
	// A name that stands for a node.
	by := c.grow("two.test:" + portOf(c.nodes[0].Address()))
	c.cfgs[by].Lookup = lookup
	require.NoError(t, c.start(by))
	require.Equal(t, uint64(2), c.nodes[by].id())

	// A directory of another cluster, told to join this one.
	c.stopNode(by)
	c.cfgs[by].Join = []string{other.nodes[0].Address()}
	err := c.start(by)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "correct the addresses to join or the directory")

	// A wiped node under its old id, and a copy of its directory.
	wiped := c.cfgs[by]
	c.cfgs[by].Join = []string{c.nodes[0].Address()}
	require.NoError(t, c.start(by))
	wiped.DataDir, wiped.Join, wiped.NodeID = t.TempDir(), []string{c.nodes[0].Address()}, 2
	wiped.ListenAddr = freeAddrs(t, 1)[0]
	_, err = Start(testContext(t), wiped)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "a voter that forgets may vote twice")
}

func portOf(addr string) string {
	_, port, _ := splitJoin(addr)
	return port
}

// A join that was cut off after it had its id costs none: the next start has the same.
func TestJoinGoesOnAfterCrash(t *testing.T) {
	c := startAlone(t, 1)
	by := c.grow(c.nodes[0].Address())
	d, err := openDataDir(c.cfgs[by].DataDir)
	require.NoError(t, err)
	inc, err := d.joiningAs()
	require.NoError(t, err)
	require.NoError(t, d.close())
	r, err := c.nodes[0].proposeNode(testContext(t), joinOp(inc, c.cfgs[by].ListenAddr))
	require.NoError(t, err)
	require.Equal(t, uint64(2), r.node.GetNodeId())
	require.NoError(t, c.start(by))
	require.Equal(t, uint64(2), c.nodes[by].id())

	// One whose id was burnt meanwhile is told so.
	again := c.grow(c.nodes[0].Address())
	d, err = openDataDir(c.cfgs[again].DataDir)
	require.NoError(t, err)
	inc, err = d.joiningAs()
	require.NoError(t, err)
	require.NoError(t, d.close())
	for _, op := range []*kvdv1.NodeOp{joinOp(inc, "127.0.0.1:1"), moveOp(3, isDecommissioned), moveOp(3, isGone)} {
		_, err = c.nodes[0].proposeNode(testContext(t), op)
		require.NoError(t, err)
	}
	err = c.start(again)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "its id is never used again")
}

// A node starts although another answers where it looks for one that it knows: first one
// that waits to be let in somewhere, then one that was, in the place of the other, which is
// dead.
func TestStartWhereAnotherAnswers(t *testing.T) {
	c := startAlone(t, 1)
	by := c.grow(c.nodes[0].Address())
	require.NoError(t, c.start(by))
	eventually(t, "it is active", func() bool { return c.members(0).GetMembers()[1].GetNode().GetState() == isActive })
	c.stopNode(by)

	anew := c.grow(freeAddrs(t, 1)[0])
	c.cfgs[anew].ListenAddr = c.cfgs[by].ListenAddr
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		_, err := Start(ctx, c.cfgs[anew])
		ended <- err
	}()
	eventually(t, "another answers", func() bool {
		r, err := c.nodes[0].hello(testContext(t), PeerConfig{NodeID: 2, Address: c.cfgs[by].ListenAddr})
		return err != nil && !errors.Is(err, ErrRefused) && r != nil && r.GetSelf().GetNodeId() == 0
	})
	c.stopNode(0)
	require.NoError(t, c.start(0), "nobody has an id there")
	cancel()
	require.Error(t, <-ended)

	// One that is of the cluster moves there.
	lost := c.cfgs[by].ListenAddr
	c.cfgs[anew].ListenAddr, c.cfgs[anew].Join = freeAddrs(t, 1)[0], []string{c.nodes[0].Address()}
	require.NoError(t, c.start(anew))
	require.Equal(t, uint64(3), c.nodes[anew].id())
	c.stopNode(anew)
	c.cfgs[anew].ListenAddr = lost
	require.NoError(t, c.start(anew))
	c.stopNode(0)
	require.NoError(t, c.start(0), "node 3 answers in the place of node 2")
	eventually(t, "it is active", func() bool { return c.members(0).GetMembers()[2].GetNode().GetState() == isActive })
}

// Nodes that are started together all come in, whoever finds whom half started.
func TestNodesJoinTogether(t *testing.T) {
	for range 3 {
		c := startAlone(t, 1)
		errs := make(chan error)
		for range 4 {
			c.grow(c.nodes[0].Address())
		}
		for i := 1; i < len(c.cfgs); i++ {
			go func() { errs <- c.start(i) }()
		}
		for range len(c.cfgs) - 1 {
			require.NoError(t, <-errs)
		}
		require.Len(t, c.members(0).GetMembers(), len(c.cfgs))
		c.stop()
	}
}

// Who has no id yet is no mistake in the configuration; who has another is one.
func TestHelloOfAnother(t *testing.T) {
	c := startAlone(t, 1)
	by := c.grow(freeAddrs(t, 1)[0]) // there is nobody
	c.cfgs[by].ListenAddr = freeAddrs(t, 1)[0]
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		_, err := Start(ctx, c.cfgs[by])
		ended <- err
	}()
	starting := PeerConfig{NodeID: 3, Address: c.cfgs[by].ListenAddr}
	eventually(t, "it answers", func() bool {
		r, err := c.nodes[0].hello(testContext(t), starting)
		require.Error(t, err)
		require.NotErrorIs(t, err, ErrRefused)
		return r != nil
	})
	_, err := c.nodes[0].hello(testContext(t), PeerConfig{NodeID: 3, Address: c.nodes[0].Address()})
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "says that it is node 1")
	cancel()
	require.Error(t, <-ended)
}

// A new node at the address of a lost one is told what to do before it has an id, and
// comes in when that was done.
func TestJoinAtAddressOfLostNode(t *testing.T) {
	c := startAlone(t, 1)
	by := c.grow(c.nodes[0].Address())
	require.NoError(t, c.start(by))
	eventually(t, "it is active", func() bool { return c.members(0).GetMembers()[1].GetNode().GetState() == isActive })
	c.stopNode(by)
	anew := c.grow(c.nodes[0].Address())
	c.cfgs[anew].ListenAddr = c.cfgs[by].ListenAddr
	for range 2 {
		err := c.start(anew)
		require.ErrorIs(t, err, ErrRefused)
		require.ErrorContains(t, err, "kvctl decommission 2")
	}
	require.Len(t, c.members(0).GetMembers(), 2, "no id was spent")
	for _, to := range []kvdv1.NodeState{isDecommissioned, isGone} {
		_, err := c.nodes[0].proposeNode(testContext(t), moveOp(2, to))
		require.NoError(t, err)
	}
	require.NoError(t, c.start(anew))
	require.Equal(t, uint64(3), c.nodes[anew].id())
}

// A node that has left is refused by everyone, at its start and in every stream.
func TestGoneNodeIsRefused(t *testing.T) {
	c := startAlone(t, 1)
	by := c.grow(c.nodes[0].Address())
	require.NoError(t, c.start(by))
	eventually(t, "it is active", func() bool { return c.members(0).GetMembers()[1].GetNode().GetState() == isActive })
	from := c.nodes[by].self()
	c.stopNode(by)
	for _, to := range []kvdv1.NodeState{isDecommissioned, isGone} {
		_, err := c.nodes[0].proposeNode(testContext(t), moveOp(2, to))
		require.NoError(t, err)
	}
	err := c.nodes[0].checkPeer(from, c.nodes[0].identity.Load().incarnation())
	require.ErrorContains(t, err, "its id is never used again")
	err = c.start(by)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "its id is never used again")
	eventually(t, "group 0 forgets it", func() bool {
		return len(c.nodes[0].host.Group(0).Status().Conf.GetLearners()) == 0
	})
}

// With TLS a node joins by a certificate of the nodes' CA for its own host, and without,
// where there are tokens, by the peers' secret. Who has not that is refused.
func TestJoinIsGuarded(t *testing.T) {
	nodes, others := newAuthority(t, "nodes"), newAuthority(t, "others")
	root := secretFile(t, tokenOf(rootTokenID, "root"))
	secure := func(ca *authority, host string) func(cfg *Config) {
		return func(cfg *Config) {
			cfg.TLS, cfg.Auth = ca.files(t.TempDir(), host), AuthConfig{Mode: AuthTokens, RootTokenFile: root}
		}
	}
	secret := func(s string) func(cfg *Config) {
		return func(cfg *Config) {
			cfg.Auth = AuthConfig{Mode: AuthTokens, RootTokenFile: root, PeerSecretFile: secretFile(t, s)}
		}
	}
	type try struct {
		change func(cfg *Config)
		says   string // "": it may
	}
	for what, x := range map[string]struct {
		first func(cfg *Config)
		tries map[string]try
	}{
		"TLS": {secure(nodes, "127.0.0.1"), map[string]try{
			"another CA":   {secure(others, "127.0.0.1"), "nobody at"},
			"another host": {secure(nodes, "client.example"), "not valid for the host of any node"},
			"no TLS":       {func(*Config) {}, "nobody at"},
			"as it should": {secure(nodes, "127.0.0.1"), ""},
		}},
		"secret": {secret(peerSecret), map[string]try{
			"no secret":      {func(*Config) {}, "has not the secret"},
			"another secret": {secret(peerSecret + "x"), "has not the secret"},
			"as it should":   {secret(peerSecret), ""},
		}},
	} {
		t.Run(what, func(t *testing.T) {
			c := newTestCluster(t, testConfigs(t, 1, 1))
			c.cfgs[0].NodeID, c.cfgs[0].Peers = 0, nil
			x.first(&c.cfgs[0])
			require.NoError(t, c.start(0))
			for what, try := range x.tries {
				by := c.grow(c.nodes[0].Address())
				try.change(&c.cfgs[by])
				if try.says == "" {
					require.NoError(t, c.start(by), what)
					continue
				}
				c.cfgs[by].BootstrapTimeout = 1500 * time.Millisecond
				err := c.start(by)
				require.ErrorIs(t, err, ErrRefused, what)
				require.ErrorContains(t, err, try.says, what)
			}
			require.Len(t, c.nodes[0].registry.nodes(), 2, "who was refused got no id")
		})
	}
}
