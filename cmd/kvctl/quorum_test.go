package main

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
)

// fakeMembers is a cluster that only says who its members are.
type fakeMembers struct {
	kvdv1.UnimplementedClusterServer
	list func() []*kvdv1.MemberStatus
}

func (f *fakeMembers) Members(context.Context, *kvdv1.MembersRequest) (*kvdv1.MembersResponse, error) {
	return &kvdv1.MembersResponse{Members: f.list()}, nil
}

func (f *fakeMembers) Rebalance(context.Context, *kvdv1.RebalanceRequest) (*kvdv1.RebalanceResponse, error) {
	return &kvdv1.RebalanceResponse{}, nil
}

func (f *fakeMembers) serve(t *testing.T) *client.Admin {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := grpc.NewServer()
	kvdv1.RegisterClusterServer(s, f)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // ends with Stop
	}()
	t.Cleanup(func() { s.Stop(); <-done })
	a, err := client.DialAdmin(client.Config{Endpoints: []string{l.Addr().String()}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	return a
}

const (
	isActive   = kvdv1.NodeState_NODE_STATE_ACTIVE
	isDraining = kvdv1.NodeState_NODE_STATE_DRAINING
)

// voting is a member without replicas that votes in group 0.
func voting(id uint64, state kvdv1.NodeState) *kvdv1.MemberStatus {
	return &kvdv1.MemberStatus{Node: &kvdv1.NodeRecord{NodeId: id, State: state}, Voter: true, Live: true}
}

func TestQuorumWithout(t *testing.T) {
	learns := func(m *kvdv1.MemberStatus) *kvdv1.MemberStatus { m.Voter = false; return m }
	silent := func(m *kvdv1.MemberStatus) *kvdv1.MemberStatus { m.Live = false; return m }
	restarts := func(m *kvdv1.MemberStatus) *kvdv1.MemberStatus { m.Node.LeadersOnly = true; return m }
	for what, x := range map[string]struct {
		list []*kvdv1.MemberStatus
		node uint64
		says string // "": it is safe
	}{
		"one of three":                 {[]*kvdv1.MemberStatus{voting(1, isActive), voting(2, isDraining), voting(3, isActive)}, 2, ""},
		"a second of three":            {[]*kvdv1.MemberStatus{voting(1, isActive), voting(2, isDraining), voting(3, isDraining)}, 3, "1 of its 3 voters would be left"},
		"both learn now":               {[]*kvdv1.MemberStatus{voting(1, isActive), learns(voting(2, isDraining)), learns(voting(3, isDraining))}, 3, ""},
		"another is silent":            {[]*kvdv1.MemberStatus{voting(1, isActive), voting(2, isDraining), silent(voting(3, isActive))}, 2, "it needs 2"},
		"for a restart":                {[]*kvdv1.MemberStatus{voting(1, isActive), restarts(voting(2, isDraining)), restarts(voting(3, isDraining))}, 3, ""},
		"for a restart, one of two":    {[]*kvdv1.MemberStatus{voting(1, isActive), restarts(voting(2, isDraining))}, 2, "1 of its 2 voters"},
		"nobody said who votes":        {[]*kvdv1.MemberStatus{learns(voting(1, isActive))}, 1, ""},
		"the only one":                 {[]*kvdv1.MemberStatus{voting(1, isDraining), learns(voting(2, isActive))}, 1, "0 of its 1 voters"},
		"another is to leave for ever": {[]*kvdv1.MemberStatus{voting(1, isActive), voting(2, isDraining), voting(3, kvdv1.NodeState_NODE_STATE_DECOMMISSIONED)}, 2, "1 of its 3"},
	} {
		says := quorumWithout(x.list, x.node)
		if x.says == "" {
			require.Empty(t, says, what)
			continue
		}
		require.Contains(t, says, x.says, what)
	}
}

// A drain ends when group 0 does without the node as well, and else says what it waits for.
func TestDrainWaitsForGroup0(t *testing.T) {
	asked := 0
	f := &fakeMembers{list: func() []*kvdv1.MemberStatus {
		list := []*kvdv1.MemberStatus{voting(1, isActive), voting(2, isDraining), voting(3, isDraining)}
		if asked++; asked > 2 {
			list[1].Voter, list[2].Voter = false, false
		}
		return list
	}}
	a := f.serve(t)
	l := &leaving{s: &settings{timeout: 10 * time.Second}, node: 3, wait: time.Minute}
	require.NoError(t, l.awaitEmpty(context.Background(), &cobra.Command{}, a))
	require.Equal(t, 3, asked)

	asked = -1000
	l.wait = 500 * time.Millisecond
	err := l.awaitEmpty(context.Background(), &cobra.Command{}, a)
	require.ErrorIs(t, err, client.ErrUnavailable)
	require.ErrorContains(t, err, "group 0 (the cluster's own)")
	require.Equal(t, exitUnavailable, exitCode(err))

	// A node that is back soon keeps its vote: nothing is to be waited for.
	l.leaders, l.wait = true, time.Minute
	err = l.awaitEmpty(context.Background(), &cobra.Command{}, a)
	require.ErrorIs(t, err, client.ErrUnavailable)
	require.ErrorContains(t, err, "it is not safe to stop: group 0")
}
