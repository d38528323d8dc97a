package main

import (
	"context"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
)

func (n *fakeNode) Members(context.Context, *kvdv1.MembersRequest) (*kvdv1.MembersResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.silent {
		return nil, fakeDetail(codes.Unavailable, kvdv1.ErrorDetail_REASON_NOT_READY)
	}
	return &kvdv1.MembersResponse{LeaderNode: 1, Members: n.members}, nil
}

func (n *fakeNode) Drain(context.Context, *kvdv1.DrainRequest) (*kvdv1.DrainResponse, error) {
	return &kvdv1.DrainResponse{}, n.refuses
}

func (n *fakeNode) Decommission(context.Context, *kvdv1.DecommissionRequest) (*kvdv1.DecommissionResponse, error) {
	if n.left != nil {
		n.left()
	}
	return &kvdv1.DecommissionResponse{}, n.refuses
}

func member(node uint64, addr string, state kvdv1.NodeState) *kvdv1.MemberStatus {
	return &kvdv1.MemberStatus{Node: &kvdv1.NodeRecord{NodeId: node, Address: addr, State: state}}
}

// What a cluster can use is what its oldest node understands; where one does not answer it
// is not known.
func TestCommonProtocol(t *testing.T) {
	n := newFakeNode(t)
	n.members = []*kvdv1.MemberStatus{
		member(1, n.addr, kvdv1.NodeState_NODE_STATE_ACTIVE), member(2, "127.0.0.1:1", kvdv1.NodeState_NODE_STATE_ACTIVE), member(3, "127.0.0.1:2", kvdv1.NodeState_NODE_STATE_GONE),
	}
	n.members[0].Protocol, n.members[1].Protocol = new(uint32(7)), new(uint32(0))
	out, _, err := n.run(t, nil, "members")
	require.NoError(t, err)
	require.Contains(t, string(out), "protocol of all: 0\n")
	n.members[1].Protocol = nil
	out, _, err = n.run(t, nil, "members")
	require.NoError(t, err)
	require.Contains(t, string(out), "not known, for there is no answer of node 2\n")
	out, _, err = n.run(t, nil, "members", "-o", "json")
	require.NoError(t, err)
	require.Contains(t, string(out), `"protocol": 7`)
	require.Equal(t, 1, strings.Count(string(out), `"protocol"`))
}

// What the state of the cluster does not allow is a conflict, not a mistake in what was
// written; a node that has left already has left.
func TestNodesThatCanNotMove(t *testing.T) {
	n := newFakeNode(t)
	n.members = []*kvdv1.MemberStatus{
		member(1, n.addr, kvdv1.NodeState_NODE_STATE_ACTIVE), member(3, "127.0.0.1:1", kvdv1.NodeState_NODE_STATE_GONE),
	}
	n.refuses = fakeDetail(codes.InvalidArgument, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	for _, args := range [][]string{{"drain", "1", "--yes"}, {"drain", "1", "--undo"}, {"decommission", "1", "--yes"}} {
		_, _, err := n.run(t, nil, args...)
		require.ErrorIs(t, err, client.ErrConflict, "%q", args)
		require.ErrorContains(t, err, "as the test wants it")
		require.Equal(t, exitConflict, exitCode(err))
	}
	for _, what := range []string{"drain", "decommission"} {
		_, _, err := n.run(t, nil, what, "9", "--yes")
		require.ErrorContains(t, err, "there never was a node 9: kvctl members lists them")
		require.Equal(t, exitNotFound, exitCode(err))
	}
	_, _, err := n.run(t, nil, "drain", "3", "--yes")
	require.ErrorContains(t, err, "node 3 has left the cluster, and its id is never used again")
	require.Equal(t, exitConflict, exitCode(err))
	out, _, err := n.run(t, nil, "decommission", "3", "--yes")
	require.NoError(t, err)
	require.Equal(t, "node 3 has left the cluster already; its id is never used again\n", string(out))
	out, _, err = n.run(t, nil, "-o", "json", "decommission", "3", "--yes")
	require.NoError(t, err)
	require.JSONEq(t, `{"node": 3, "state": "gone"}`, string(out))
}

// A node can be taken out through itself: once it is gone the others tell how far it is.
func TestDecommissionThroughItself(t *testing.T) {
	stays := newFakeNode(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	leaves := &fakeNode{addr: l.Addr().String()}
	leaves.members = []*kvdv1.MemberStatus{
		member(1, stays.addr, kvdv1.NodeState_NODE_STATE_ACTIVE), member(2, leaves.addr, kvdv1.NodeState_NODE_STATE_ACTIVE),
	}
	stays.members = []*kvdv1.MemberStatus{
		leaves.members[0], member(2, leaves.addr, kvdv1.NodeState_NODE_STATE_GONE),
	}
	s := grpc.NewServer()
	kvdv1.RegisterClusterServer(s, leaves)
	stopped := make(chan struct{})
	leaves.left = func() {
		go func() { s.GracefulStop(); close(stopped) }()
	}
	go func() { _ = s.Serve(l) }() // its error is that of the stop
	t.Cleanup(func() { s.Stop(); <-stopped })
	out, _, err := leaves.run(t, nil, "decommission", "2", "--yes", "--wait", "1m")
	require.NoError(t, err)
	require.Contains(t, string(out), "node 2 has left the cluster")
}

// While nobody tells how far a node is, that is said; and an interruption ends the wait.
func TestAwaitUnknown(t *testing.T) {
	n := newFakeNode(t)
	n.members = []*kvdv1.MemberStatus{member(1, n.addr, kvdv1.NodeState_NODE_STATE_ACTIVE)}
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	var said saidTo = func(b []byte) {
		if len(b) > 0 {
			interrupt()
		}
	}
	n.left = func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.silent = true
	}
	root := newRoot()
	root.SetErr(said)
	root.SetArgs([]string{"--endpoints", n.addr, "decommission", "1", "--yes", "--timeout", "1s"})
	err := root.ExecuteContext(ctx)
	require.ErrorIs(t, err, errInterrupted)
	require.ErrorContains(t, err, "what was begun with node 1 goes on, and kvctl members tells how far it is")
	require.Equal(t, exitFailed, exitCode(err))
}

type saidTo func([]byte)

func (s saidTo) Write(b []byte) (int, error) {
	s(b)
	return len(b), nil
}
