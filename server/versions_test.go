package server

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

// otherVersion answers Hello, and nothing else, as a node of another version.
type otherVersion struct {
	kvdv1.UnimplementedPeerServer
	*kvdv1.HelloResponse
}

func (o otherVersion) Hello(context.Context, *kvdv1.HelloRequest) (*kvdv1.HelloResponse, error) {
	return o.HelloResponse, nil
}

// replaceBy has a node of another version answer in place of node i, until f returns.
func (c *testCluster) replaceBy(i int, hello *kvdv1.HelloResponse, f func()) {
	l, err := net.Listen("tcp", c.cfgs[i].ListenAddr)
	require.NoError(c.t, err)
	s := grpc.NewServer()
	kvdv1.RegisterPeerServer(s, otherVersion{HelloResponse: hello})
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	defer func() {
		s.Stop()
		require.NoError(c.t, <-served)
	}()
	f()
}

// Nodes whose versions do not go together say so to each other, in the handshake of each
// kind of call; those of a version that did not tell yet are taken.
func TestProtocolsThatDoNotGoTogether(t *testing.T) {
	c := startCluster(t, 3, 1)
	f := fakePeer{t: t, c: c, as: 0, to: 1}
	to := c.nodes[1]
	load := func(protocol, needs uint32) error {
		from := f.identity()
		from.Protocol, from.Needs = protocol, needs
		_, err := to.Load(testContext(t), &kvdv1.LoadRequest{From: from, ToIncarnation: f.incarnation()})
		return err
	}
	stream := func(protocol, needs uint32) error {
		ctx, cancel := context.WithCancel(testContext(t))
		defer cancel()
		from := f.identity()
		from.Protocol, from.Needs = protocol, needs
		s, err := f.client().Raft(ctx)
		require.NoError(t, err)
		_ = s.Send(&kvdv1.RaftBatch{From: from, ToIncarnation: f.incarnation()})
		_, err = s.CloseAndRecv()
		return err
	}
	for _, call := range []func(protocol, needs uint32) error{load, stream} {
		require.NoError(t, call(0, 0), "a version that does not tell")
		require.NoError(t, call(protocol+7, protocol), "a newer one")
		err := call(protocol+7, protocol+1)
		requireReason(t, err, kvdv1.ErrorDetail_REASON_PROTOCOL)
		require.ErrorContains(t, err, "node 1 needs protocol 3, and node 2 understands 2: start a newer kvd as node 2")
	}
	require.Equal(t, uint32(0), to.self().GetNeeds())
	require.Equal(t, uint32(protocol), to.self().GetProtocol())

	// Once the registry is used, who does not know it is of no use.
	for _, undo := range []bool{false, true} {
		_, err := c.cluster(0).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 3, LeadersOnly: !undo, Undo: undo})
		require.NoError(t, err)
	}
	eventually(t, "node 2 knows of the registry", func() bool { return to.directory().index > 0 })
	require.Equal(t, uint32(registryProtocol), to.self().GetNeeds())
}

func TestGoTogether(t *testing.T) {
	for _, x := range []struct {
		a, b  *kvdv1.Identity
		older uint64 // 0: they go together
	}{
		{&kvdv1.Identity{Protocol: 5, Needs: 3}, &kvdv1.Identity{Protocol: 3, Needs: 1}, 0},
		{&kvdv1.Identity{Protocol: 5, Needs: 3}, &kvdv1.Identity{Protocol: 2, Needs: 1}, 2},
		{&kvdv1.Identity{Protocol: 3, Needs: 3}, &kvdv1.Identity{Protocol: 5, Needs: 4}, 1},
		{&kvdv1.Identity{Protocol: 5, Needs: 3}, &kvdv1.Identity{}, 0}, // it does not tell
	} {
		x.a.NodeId, x.b.NodeId = 1, 2
		for _, err := range []error{goTogether(x.a, x.b), goTogether(x.b, x.a)} {
			if x.older == 0 {
				require.NoError(t, err)
				continue
			}
			requireReason(t, err, kvdv1.ErrorDetail_REASON_PROTOCOL)
			require.ErrorContains(t, err, fmt.Sprintf("start a newer kvd as node %d", x.older))
		}
	}
}

// A node does not start beside peers that need more than it understands.
func TestPeersNeedANewerVersion(t *testing.T) {
	c := startCluster(t, 3, 1)
	hello := &kvdv1.HelloResponse{Self: c.nodes[2].self(), Active: true, RecordedIncarnation: c.nodes[0].self().GetIncarnation()}
	c.stopNode(2)
	c.stopNode(0)
	hello.Self.Protocol, hello.Self.Needs = protocol+1, protocol+1
	before, err := os.ReadFile(filepath.Join(c.cfgs[0].DataDir, identityFile))
	require.NoError(t, err)
	c.replaceBy(2, hello, func() {
		err := c.start(0)
		require.ErrorIs(t, err, ErrRefused)
		require.ErrorContains(t, err, "node 3 needs protocol 3, and node 1 understands 2: start a newer kvd as node 1")
	})
	after, err := os.ReadFile(filepath.Join(c.cfgs[0].DataDir, identityFile))
	require.NoError(t, err)
	require.Equal(t, string(before), string(after))
	require.NoError(t, c.start(2))
	require.NoError(t, c.start(0), "the directory is as it was")
}

// What older versions would stop at is not begun while one of them is there, and not while
// it is not known of one. Operators see of each node what it understands.
func TestRegistryWaitsForOldVersions(t *testing.T) {
	c := startCluster(t, 3, 1)
	drain := func() error {
		_, err := c.cluster(0).Drain(testContext(t), &kvdv1.DrainRequest{NodeId: 3, LeadersOnly: true})
		return err
	}
	for _, m := range c.members(0).GetMembers() {
		require.Equal(t, uint32(protocol), m.GetProtocol())
	}
	hello := &kvdv1.HelloResponse{Self: c.nodes[2].self(), Active: true, Version: "v0"}
	hello.Self.Protocol = 0
	c.stopNode(2)
	c.replaceBy(2, hello, func() {
		eventually(t, "the version of node 3 is the reason", func() bool {
			err := drain()
			require.Error(t, err)
			return reasonOf(err) == kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT
		})
		require.ErrorContains(t, drain(), "runs a version that can not be in a cluster that grows (it understands protocol 0, and 1 is needed): run this version there first")
		third := c.members(0).GetMembers()[2]
		require.NotNil(t, third.Protocol)
		require.Zero(t, third.GetProtocol())
		require.Equal(t, "v0", third.GetNode().GetVersion())
	})
	eventually(t, "nobody answers", func() bool { return c.members(0).GetMembers()[2].Protocol == nil })
	require.ErrorContains(t, drain(), "does not answer, and whether its version can be in a cluster that grows is not known")
	require.False(t, c.nodes[0].registry.written())
	require.NoError(t, c.start(2))
	eventually(t, "all know it", func() bool { return drain() == nil })
}

// An entry of a newer version stops the node, and leaves its state as it was.
func TestNewerEntry(t *testing.T) {
	r := newRig(t, defaultWriterLimits, 1<<20)
	put := func(key string) *kvdv1.Command {
		return &kvdv1.Command{Op: &kvdv1.Command_Put{Put: &kvdv1.PutOp{NamespaceId: 1, Key: []byte(key), Value: []byte("v")}}}
	}
	r.one(put("a"))
	at := r.shard.appliedIndex()
	newer := put("c")
	newer.Format = entryFormat + 1
	_, err := r.shard.Apply([]raft.Entry{command(t, at+1, put("b")), command(t, at+2, newer)}, at+2, 1)
	require.ErrorIs(t, err, ErrDataDir)
	require.ErrorContains(t, err, "has format 1, this kvd knows 0: start the newer kvd")
	require.Equal(t, at, r.shard.appliedIndex())
}

// A list of replicas of a newer version is refused by its number, whatever it looks like.
func TestNewerReplicas(t *testing.T) {
	d := &dataDir{path: t.TempDir()}
	require.NoError(t, d.saveReplicas(map[uint32]replicaState{1: replicaOpen}))
	_, err := d.loadReplicas()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(d.path, replicasFile), []byte(`{"format": 2, "replicas": [1]}`), 0o600))
	_, err = d.loadReplicas()
	require.ErrorIs(t, err, ErrDataDir)
	require.ErrorContains(t, err, "replicas.json has format 2, this kvd knows 1: start the newer kvd")
}
