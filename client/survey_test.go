package client

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// surveyNode answers what a survey asks, or hangs.
type surveyNode struct {
	kvdv1.UnimplementedClusterServer
	kvdv1.UnimplementedOperatorServer
	kvdv1.UnimplementedGossipServer
	status      *kvdv1.StatusResponse
	denied      bool
	hangStatus  bool
	hangShards  bool
	membersFail bool
	shardsAsked atomic.Int64
	hanging     *gauge // calls that do, of all nodes
}

// gauge remembers its highest reading.
type gauge struct {
	mu struct {
		sync.Mutex
		now, most int
	}
}

func (g *gauge) add(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.now += n
	g.mu.most = max(g.mu.most, g.mu.now)
}

func (n *surveyNode) Status(ctx context.Context, _ *kvdv1.StatusRequest) (*kvdv1.StatusResponse, error) {
	if n.hangStatus {
		n.hanging.add(1)
		<-ctx.Done()
		n.hanging.add(-1)
		return nil, ctx.Err()
	}
	return n.status, nil
}

func (n *surveyNode) Shards(ctx context.Context, _ *kvdv1.ShardsRequest) (*kvdv1.ShardsResponse, error) {
	asked := n.shardsAsked.Add(1)
	switch {
	case n.hangShards:
		<-ctx.Done()
		return nil, ctx.Err()
	case n.denied:
		return nil, status.Error(codes.PermissionDenied, "no operator")
	}
	return &kvdv1.ShardsResponse{NodeId: n.status.GetNodeId(), Replicas: []*kvdv1.ShardReplica{{Shard: 0, Leading: n.status.GetNodeId() == 2, Term: uint64(asked)}}}, nil
}

func (n *surveyNode) Liveness(context.Context, *kvdv1.LivenessRequest) (*kvdv1.LivenessResponse, error) {
	return &kvdv1.LivenessResponse{Enabled: n.status.GetNodeId() == 1}, nil
}

func (n *surveyNode) Members(ctx context.Context, _ *kvdv1.MembersRequest) (*kvdv1.MembersResponse, error) {
	if n.membersFail {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &kvdv1.MembersResponse{Members: []*kvdv1.MemberStatus{{Node: &kvdv1.NodeRecord{NodeId: n.status.GetNodeId()}}}}, nil
}

func (n *surveyNode) Rebalance(_ context.Context, req *kvdv1.RebalanceRequest) (*kvdv1.RebalanceResponse, error) {
	if !req.GetDryRun() {
		return nil, status.Error(codes.Internal, "a survey changes nothing")
	}
	return &kvdv1.RebalanceResponse{Problems: []string{"few zones"}}, nil
}

// surveyNodes serves nodes that name each other, and gives an Admin that knows the first
// of them.
func surveyNodes(t *testing.T, timeout time.Duration, nodes ...*surveyNode) *Admin {
	var members []*kvdv1.Member
	for i, n := range nodes {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		members = append(members, &kvdv1.Member{NodeId: uint64(i + 1), Address: l.Addr().String()})
		if n.status == nil {
			n.status = &kvdv1.StatusResponse{ClusterId: "c", NodeId: uint64(i + 1)}
		}
		g := grpc.NewServer()
		kvdv1.RegisterClusterServer(g, n)
		kvdv1.RegisterOperatorServer(g, n)
		kvdv1.RegisterGossipServer(g, n)
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = g.Serve(l) // ends with Stop
		}()
		t.Cleanup(func() {
			g.Stop()
			<-done
		})
	}
	for _, n := range nodes {
		n.status.Members = members
	}
	a, err := DialAdmin(Config{Endpoints: []string{members[0].GetAddress()}, ConnectTimeout: timeout})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	return a
}

// TestSurvey: one endpoint is enough, and the leader of group 0 is who is asked about the
// members.
func TestSurvey(t *testing.T) {
	nodes := []*surveyNode{{}, {}, {}}
	a := surveyNodes(t, time.Minute, nodes...)
	s, err := a.Survey(ctxFor(t, time.Minute))
	require.NoError(t, err)
	require.Equal(t, "c", s.ClusterID)
	require.Len(t, s.Nodes, 3)
	for i, n := range s.Nodes {
		require.NoError(t, n.Err)
		require.NoError(t, n.ReplicasErr)
		require.Equal(t, uint64(i+1), n.NodeID)
		require.Equal(t, uint64(i+1), n.Status.GetNodeId())
		require.Len(t, n.Replicas, 1)
		require.Equal(t, i == 0, n.Gossip != nil, "only the first gossips")
		require.Equal(t, int64(1), nodes[i].shardsAsked.Load(), "nobody was silent, so nobody is asked again")
	}
	require.NoError(t, s.MembersErr)
	require.Equal(t, uint64(2), s.Members[0].GetNode().GetNodeId())
	require.Equal(t, []string{"few zones"}, s.Placement)

	heard := a.Liveness(ctxFor(t, time.Minute), map[uint64]string{1: s.Nodes[0].Address, 2: s.Nodes[1].Address})
	require.Len(t, heard, 1)
	require.Contains(t, heard, uint64(1))
}

// TestSurveyOfHangingNodes: nodes that hang are waited for once, all together, and the
// rest is known in spite of them, as it was after they were silent.
func TestSurveyOfHangingNodes(t *testing.T) {
	nodes := []*surveyNode{{}, {hangStatus: true}, {hangStatus: true}, {hangStatus: true}, {hangShards: true}, {hangStatus: true}}
	nodes[0].membersFail = true
	hanging := &gauge{}
	for _, n := range nodes {
		n.hanging = hanging
	}
	const timeout = time.Second
	a := surveyNodes(t, timeout, nodes...)
	s, err := a.Survey(ctxFor(t, time.Minute))
	require.NoError(t, err)
	require.Len(t, s.Nodes, 6)
	for i, n := range s.Nodes {
		require.Equal(t, uint64(i+1), n.NodeID, "the others named it")
		if nodes[i].hangStatus {
			require.ErrorIs(t, n.Err, ErrUnavailable)
			require.Nil(t, n.Status)
		} else {
			require.NoError(t, n.Err)
		}
	}
	require.ErrorIs(t, s.Nodes[4].ReplicasErr, ErrUnavailable)
	require.Equal(t, uint64(2), s.Nodes[0].Replicas[0].GetTerm(), "asked again after the silence")
	require.NoError(t, s.MembersErr, "the second that is asked says it")
	require.Equal(t, uint64(5), s.Members[0].GetNode().GetNodeId())
	hanging.mu.Lock()
	defer hanging.mu.Unlock()
	require.Equal(t, 4, hanging.mu.most, "all were waited for at the same time")
}

// What makes a survey useless is an error, and not a verdict.
func TestSurveyRefused(t *testing.T) {
	a := surveyNodes(t, time.Minute, &surveyNode{denied: true}, &surveyNode{denied: true})
	_, err := a.Survey(ctxFor(t, time.Minute))
	require.ErrorIs(t, err, ErrDenied)

	a = surveyNodes(t, time.Minute, &surveyNode{}, &surveyNode{status: &kvdv1.StatusResponse{ClusterId: "other", NodeId: 2}})
	_, err = a.Survey(ctxFor(t, time.Minute))
	require.ErrorIs(t, err, ErrWrongCluster)
	require.ErrorContains(t, err, "cluster other")

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	a, err = DialAdmin(Config{Endpoints: []string{l.Addr().String()}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	s, err := a.Survey(ctxFor(t, time.Minute))
	require.NoError(t, err, "that nobody answers is what is to be judged")
	require.ErrorIs(t, s.Nodes[0].Err, ErrUnavailable)
	require.ErrorIs(t, s.MembersErr, ErrUnavailable)

	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = a.Survey(ctx)
	require.ErrorIs(t, err, context.Canceled)
}
