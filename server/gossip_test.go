package server

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/internal/gossip"
)

const (
	isAlive = kvdv1.LivenessState_LIVENESS_STATE_ALIVE
	isDead  = kvdv1.LivenessState_LIVENESS_STATE_DEAD
	isLeft  = kvdv1.LivenessState_LIVENESS_STATE_LEFT
)

func gossiping(c *Config) {
	// Not where the ports are that other nodes of a test gave back and are about to take.
	c.Gossip = GossipConfig{Listen: fmt.Sprintf("127.0.1.%d:0", c.NodeID), Timing: gossip.Loopback()}
	c.Zone, c.Version = "zone", "test"
}

// liveness of a node as node i hears it.
func (c *testCluster) liveness(i int, id uint64) *kvdv1.NodeLiveness {
	r, err := kvdv1.NewGossipClient(c.conns[i]).Liveness(testContext(c.t), &kvdv1.LivenessRequest{})
	require.NoError(c.t, err)
	require.True(c.t, r.GetEnabled())
	for _, l := range r.GetNodes() {
		if l.GetNodeId() == id {
			return l
		}
	}
	return nil
}

func (c *testCluster) soundsLike(i int, id uint64, states ...kvdv1.LivenessState) {
	c.t.Helper()
	eventually(c.t, "node "+string(rune('1'+i))+" hears of another", func() bool { return slices.Contains(states, c.liveness(i, id).GetState()) })
}

func TestGossipLiveness(t *testing.T) {
	c := startCluster(t, 3, 2, gossiping)
	for i := range 3 {
		for id := uint64(1); id <= 3; id++ {
			c.soundsLike(i, id, isAlive)
		}
	}
	l := c.liveness(0, 2)
	require.Equal(t, c.nodes[1].Address(), l.GetAddress())
	require.Equal(t, "zone", l.GetZone())
	require.Equal(t, "test", l.GetVersion())
	require.NotZero(t, l.GetSinceUnixMs())
	families, err := c.nodes[0].metrics.registry.Gather()
	require.NoError(t, err)
	figures := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if len(m.GetLabel()) == 1 {
				figures[f.GetName()+" "+m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	require.EqualValues(t, 2, figures["kvd_gossip_members alive"]+figures["kvd_gossip_members suspect"])
	require.NotZero(t, figures["kvd_gossip_packets_total in"])
	require.NotZero(t, figures["kvd_gossip_bytes_total out"])
	require.Contains(t, figures, "kvd_gossip_refused_total label")

	before := c.nodes[0].directory()
	c.stopNode(2)
	c.soundsLike(0, 3, isLeft)
	require.Equal(t, before, c.nodes[0].directory(), "gossip changes nothing that counts")
	require.Len(t, c.nodes[0].host.Group(0).Status().Conf.GetVoters(), 3)
	require.NoError(t, c.start(2))
	c.soundsLike(0, 3, isAlive)
	c.soundsLike(2, 1, isAlive)

	// All at once: each remembers where the others were, and all have moved.
	for i := range 3 {
		c.stopNode(i)
	}
	errs := make(chan error, 3)
	for i := range 3 {
		go func() { errs <- c.start(i) }()
	}
	for range 3 {
		require.NoError(t, <-errs)
	}
	for i := range 3 {
		for id := uint64(1); id <= 3; id++ {
			c.soundsLike(i, id, isAlive)
		}
	}
}

// TestGossipOff: without an address nothing listens, and nodes say so.
func TestGossipOff(t *testing.T) {
	c := startCluster(t, 1, 1)
	r, err := kvdv1.NewGossipClient(c.conns[0]).Liveness(testContext(t), &kvdv1.LivenessRequest{})
	require.NoError(t, err)
	require.False(t, r.GetEnabled())
	require.Empty(t, r.GetNodes())
	_, err = os.Stat(filepath.Join(c.cfgs[0].DataDir, gossipFile))
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestGossipFindsMovedNode: a node of a static cluster comes back at another address, of
// which the others' configuration knows nothing.
func TestGossipFindsMovedNode(t *testing.T) {
	c := startCluster(t, 3, 2, gossiping)
	c.soundsLike(0, 3, isAlive)
	c.soundsLike(1, 3, isAlive)
	c.stopNode(2)
	old := c.cfgs[2].ListenAddr
	moved := freeAddrs(t, 1)[0]
	c.cfgs[2].ListenAddr = moved
	c.cfgs[2].Peers = slices.Clone(c.cfgs[2].Peers)
	c.cfgs[2].Peers[2].Address = moved
	require.NoError(t, c.start(2))
	require.Equal(t, old, c.cfgs[0].Peers[2].Address)
	eventually(t, "the others know where it is", func() bool {
		return c.liveness(0, 3).GetAddress() == moved && c.liveness(1, 3).GetAddress() == moved
	})
	// The leader of group 0 has to reach it for this.
	_, err := kvdv1.NewClusterClient(c.conns[0]).CreateNamespace(testContext(t), &kvdv1.CreateNamespaceRequest{Name: "after"})
	require.NoError(t, err)
	require.NoError(t, c.nodes[2].awaitNamespace(testContext(t), "after"))
}

// TestGossipDecidesNothing: a node that all others call dead stays a voter, and its vote
// counts when another one is really gone.
func TestGossipDecidesNothing(t *testing.T) {
	c := startCluster(t, 3, 2, gossiping)
	c.soundsLike(0, 3, isAlive)
	c.soundsLike(1, 3, isAlive)
	require.NoError(t, c.nodes[2].closeGossip())
	c.soundsLike(0, 3, isDead)
	c.soundsLike(1, 3, isDead)
	c.stopNode(1)
	eventually(t, "the two that are left decide", func() bool {
		_, err := kvdv1.NewClusterClient(c.conns[0]).CreateNamespace(testContext(t), &kvdv1.CreateNamespaceRequest{Name: "after"})
		return err == nil || reasonOf(err) == kvdv1.ErrorDetail_REASON_ALREADY_EXISTS
	})
	require.ElementsMatch(t, []uint64{1, 2, 3}, c.nodes[0].host.Group(0).Status().Conf.GetVoters())
}

// TestGossipNotTheRecorded: who has the key and a cluster's id, but not the incarnation
// that is recorded for the node, is nobody's node.
func TestGossipNotTheRecorded(t *testing.T) {
	c := startCluster(t, 1, 1, gossiping)
	n := c.nodes[0]
	key, _, err := n.loadGossipKey(n.ClusterID())
	require.NoError(t, err)
	start := func(id, incarnation uint64) *gossip.Gossip {
		g, err := gossip.Start(gossip.Config{
			ClusterID: n.ClusterID(), NodeID: id, Incarnation: incarnation, Generation: 1, Key: key, ListenAddr: "127.0.0.1:0", Timing: gossip.Loopback(),
			Logger: testLogger(t),
		})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, g.Close()) })
		_, err = g.Join(context.Background(), n.gossip.Load().g.Addr().String())
		require.NoError(t, err)
		return g
	}
	start(1, n.identity.Load().incarnation()+1)
	eventually(t, "it is refused", func() bool { return n.gossip.Load().g.Stats().RefusedMember > 0 })
	require.Empty(t, n.gossip.Load().g.Members())
	start(2, 77) // a node that joins may be heard before it is recorded
	c.soundsLike(0, 2, isAlive)
	n.known.Store(&directory{index: 1, nodes: []*kvdv1.NodeRecord{{NodeId: 2, Incarnation: 78}}})
	require.Equal(t, kvdv1.LivenessState_LIVENESS_STATE_UNSPECIFIED, c.liveness(0, 2).GetState(), "and is not taken for the one that then is")
	n.known.Store(nil)
}

func TestGossipGeneration(t *testing.T) {
	c := startCluster(t, 1, 1, gossiping)
	generation := func() uint64 { return c.nodes[0].gossip.Load().load().Generation }
	last := generation()
	for range 2 {
		c.stopNode(0)
		require.NoError(t, c.start(0))
		require.Greater(t, generation(), last)
		last = generation()
	}
	// A clock that was set back.
	c.stopNode(0)
	require.NoError(t, os.WriteFile(filepath.Join(c.cfgs[0].DataDir, gossipFile), []byte(`{"generation": 9999999999999999}`), 0o600))
	require.NoError(t, c.start(0))
	require.EqualValues(t, 10000000000000000, generation())
	// Damaged: the clock gives it, and the node says so.
	c.stopNode(0)
	require.NoError(t, os.WriteFile(filepath.Join(c.cfgs[0].DataDir, gossipFile), []byte(`{"gener`), 0o600))
	var log bytes.Buffer
	c.cfgs[0].Logger = slog.New(slog.NewTextHandler(&log, nil))
	require.NoError(t, c.start(0))
	require.NotZero(t, generation())
	c.stopNode(0)
	require.Contains(t, log.String(), "what was remembered of gossip is lost")
}

func TestGossipSettings(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(content), mode))
		return path
	}
	key := file("key", strings.Repeat("ab", 32), 0o600)
	for name, x := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"a key for nothing": {func(c *Config) { c.Gossip = GossipConfig{KeyFile: key} }, "gossip-key-file without gossip-listen"},
		"a name":            {func(c *Config) { c.Gossip.Listen = "localhost:1" }, "want IP:PORT"},
		"no port":           {func(c *Config) { c.Gossip.Listen = "127.0.0.1" }, "want IP:PORT"},
		"not a key":         {func(c *Config) { c.Gossip.KeyFile = file("short", "abcd", 0o600) }, "is not 32 bytes in base64 or hexadecimal"},
		"for all to read":   {func(c *Config) { c.Gossip.KeyFile = file("open", strings.Repeat("ab", 32), 0o644) }, "want 0600"},
		"no such file":      {func(c *Config) { c.Gossip.KeyFile = dir + "/none" }, "no such file"},
		"nowhere":           {func(c *Config) { c.Gossip.Listen = "192.0.2.1:1" }, "gossip can not listen on 192.0.2.1:1"},
		"everywhere, any":   {func(c *Config) { c.Gossip.Listen = "0.0.0.0:0" }, "it is not known how others reach it"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfigs(t, 1, 1)[0]
			gossiping(&cfg)
			x.change(&cfg)
			n, err := Start(testContext(t), cfg)
			require.Nil(t, n)
			require.ErrorIs(t, err, ErrConfig)
			require.ErrorContains(t, err, x.want)
		})
	}
	// Two nodes with one key and one without.
	c := startCluster(t, 3, 1, gossiping, func(cfg *Config) {
		if cfg.NodeID != 3 {
			cfg.Gossip.KeyFile = key
		}
	})
	c.soundsLike(0, 2, isAlive)
	eventually(t, "another key is refused", func() bool {
		return c.nodes[0].gossip.Load().g.Stats().RefusedKey+c.nodes[1].gossip.Load().g.Stats().RefusedKey > 0
	})
	require.Equal(t, kvdv1.LivenessState_LIVENESS_STATE_UNSPECIFIED, c.liveness(0, 3).GetState())
	require.Equal(t, kvdv1.LivenessState_LIVENESS_STATE_UNSPECIFIED, c.liveness(2, 1).GetState())
}

// Who joins with another key of gossip than the cluster's is refused, and nothing changes.
func TestJoinWithAnotherGossipKey(t *testing.T) {
	dir := t.TempDir()
	file := func(digits string) string {
		path := filepath.Join(dir, digits)
		require.NoError(t, os.WriteFile(path, []byte(strings.Repeat(digits, 32)), 0o600))
		return path
	}
	for name, x := range map[string]struct{ cluster, joiner, says string }{
		"another":        {file("ab"), file("cd"), "the gossip-key-file of the new node is not that of node 1"},
		"none":           {file("ab"), "", "node 1 has a gossip-key-file, and the new node has none"},
		"one too many":   {"", file("cd"), "the new node has a gossip-key-file, and node 1 has none"},
		"the same":       {file("ab"), file("ab"), ""},
		"none on either": {"", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := newTestCluster(t, testConfigs(t, 1, 1))
			c.cfgs[0].NodeID, c.cfgs[0].Peers = 0, nil
			gossiping(&c.cfgs[0])
			c.cfgs[0].Gossip.KeyFile = x.cluster
			require.NoError(t, c.start(0))
			by := c.grow(c.nodes[0].Address())
			gossiping(&c.cfgs[by])
			c.cfgs[by].Gossip.KeyFile = x.joiner
			err := c.start(by)
			if x.says == "" {
				require.NoError(t, err)
				c.soundsLike(0, 2, isAlive)
				return
			}
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, x.says)
			require.ErrorContains(t, err, "Nothing was changed")
			require.False(t, c.nodes[0].registry.written())
			_, err = os.Stat(filepath.Join(c.cfgs[by].DataDir, identityFile))
			require.ErrorIs(t, err, os.ErrNotExist)
			c.cfgs[by].Gossip = GossipConfig{}
			require.NoError(t, c.start(by), "a node need not gossip")
		})
	}
}
