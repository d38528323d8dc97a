package server

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

// What an operator does with nodes. All of it is decided by the leader of group 0.

// Members implements kvdv1.ClusterServer; the answer is the leader's.
func (n *Node) Members(ctx context.Context, req *kvdv1.MembersRequest) (*kvdv1.MembersResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	var resp *kvdv1.MembersResponse
	err := n.metaLeader(ctx, func(ctx context.Context) error {
		if err := n.metaBarrier(ctx); err != nil {
			return err
		}
		resp = n.membersHere(ctx)
		return nil
	}, func(ctx context.Context, c kvdv1.ClusterClient) (err error) {
		resp, err = c.Members(ctx, req)
		return err
	})
	return resp, err
}

func (n *Node) membersHere(ctx context.Context) *kvdv1.MembersResponse {
	st := n.host.Group(0).Status()
	r := &kvdv1.MembersResponse{LeaderNode: uint64(st.Leader)}
	var hellos map[uint64]*kvdv1.HelloResponse
	var asked sync.WaitGroup
	asked.Go(func() { hellos = n.askHello(ctx) })
	facts := n.askLoads(ctx, &keeper{heard: map[uint64]time.Time{}})
	asked.Wait()
	for _, node := range n.registry.nodes() {
		id := node.GetNodeId()
		m := &kvdv1.MemberStatus{Node: proto.Clone(node).(*kvdv1.NodeRecord), Voter: slices.Contains(st.Conf.GetVoters(), id) || slices.Contains(st.Conf.GetVotersOutgoing(), id)}
		if addr, ok := n.peers.addressOf(raft.NodeID(id)); ok {
			m.Node.Address = addr
		}
		m.Live = n.boots.hears(id) || id == n.id()
		if h := hellos[id]; h != nil {
			m.Protocol = proto.Uint32(h.GetProtocol())
			m.Node.Version = cmp.Or(h.GetVersion(), m.Node.Version)
		}
		for number := uint32(1); number <= n.identity.Load().manifest.GetShards(); number++ {
			f := facts[number]
			if n.mayHold(number, f, id) {
				m.Replicas++
			}
			if f == nil {
				continue
			}
			if f.leader == id {
				m.Leads++
			}
			m.Bytes += f.held[id]
		}
		r.Members = append(r.Members, m)
	}
	return r
}

// mayHold tells whether a node has, or is to have, a replica of a shard. facts may be nil.
func (n *Node) mayHold(number uint32, f *shardFacts, id uint64) bool {
	if f != nil {
		if _, has := f.held[id]; has || holds(f.report, id) {
			return true
		}
		return slices.Contains(n.shardMap.wish(number), id)
	}
	return holds(n.shardMap.whereabouts(number), id) || slices.Contains(n.shardMap.wish(number), id)
}

// Drain implements kvdv1.ClusterServer.
func (n *Node) Drain(ctx context.Context, req *kvdv1.DrainRequest) (*kvdv1.DrainResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	to := &kvdv1.NodeMove{NodeId: req.GetNodeId(), To: kvdv1.NodeState_NODE_STATE_DRAINING, LeadersOnly: req.GetLeadersOnly()}
	if req.GetUndo() {
		to = &kvdv1.NodeMove{NodeId: req.GetNodeId(), To: kvdv1.NodeState_NODE_STATE_ACTIVE}
	}
	err := n.metaLeader(ctx, func(ctx context.Context) error {
		return n.moveNode(ctx, to, "drain")
	}, func(ctx context.Context, c kvdv1.ClusterClient) error {
		_, err := c.Drain(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &kvdv1.DrainResponse{}, nil
}

// Decommission implements kvdv1.ClusterServer.
func (n *Node) Decommission(ctx context.Context, req *kvdv1.DecommissionRequest) (*kvdv1.DecommissionResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	to := &kvdv1.NodeMove{NodeId: req.GetNodeId(), To: kvdv1.NodeState_NODE_STATE_DECOMMISSIONED}
	err := n.metaLeader(ctx, func(ctx context.Context) error {
		return n.moveNode(ctx, to, "decommission")
	}, func(ctx context.Context, c kvdv1.ClusterClient) error {
		_, err := c.Decommission(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &kvdv1.DecommissionResponse{}, nil
}

// moveNode takes a node into another state, at the leader of group 0, if those that are
// left can hold everything.
func (n *Node) moveNode(ctx context.Context, to *kvdv1.NodeMove, what string) error {
	// One after the other: each is to see what the one before left. Another leader sees it
	// by its barrier.
	select {
	case n.moving <- struct{}{}:
		defer func() { <-n.moving }()
	case <-ctx.Done():
		return fail(kvdv1.ErrorDetail_REASON_NOT_READY, "others are being drained or decommissioned at this moment: try again")
	}
	if err := n.metaBarrier(ctx); err != nil {
		return err
	}
	refuse := func(format string, args ...any) error {
		return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, format, args...)
	}
	have := n.registry.find(to.GetNodeId())
	if have == nil || have.GetState() != to.GetTo() {
		if why := whyNoMove(have, to); why != "" {
			return refuse("%s", why)
		}
		// Who joins becomes active when it has caught up, and not because someone says so.
		if have.GetState() == kvdv1.NodeState_NODE_STATE_JOINING && to.GetTo() == kvdv1.NodeState_NODE_STATE_ACTIVE {
			return refuse("node %d is joining and was not drained: it is active when it has caught up. If it is lost, decommission it", to.GetNodeId())
		}
	}
	if to.GetTo() != kvdv1.NodeState_NODE_STATE_ACTIVE {
		left := 0
		for _, r := range n.registry.nodes() {
			if r.GetNodeId() != to.GetNodeId() && r.GetState() == kvdv1.NodeState_NODE_STATE_ACTIVE {
				left++
			}
		}
		need := n.replicasOfEach()
		switch {
		case left == 0:
			return refuse("node %d is the last that can hold replicas: let another join first", to.GetNodeId())
		case left < need && !to.GetLeadersOnly() && what == "drain":
			return refuse("to drain node %d would leave %d nodes for the %d replicas of each shard: let another join first, or drain it of its leaders only if it is back soon", to.GetNodeId(), left, need)
		case left < need && !to.GetLeadersOnly():
			return refuse("without node %d there would be %d nodes for the %d replicas of each shard: let another join first", to.GetNodeId(), left, need)
		}
	}
	if err := n.beginRegistry(ctx); err != nil {
		return err
	}
	r, err := n.proposeNode(ctx, &kvdv1.NodeOp{Change: &kvdv1.NodeOp_Move{Move: to}})
	if err == nil && r.refused != "" {
		err = refuse("%s", r.refused)
	}
	return err
}

// replicasOfEach is how many replicas a shard has at most.
func (n *Node) replicasOfEach() int {
	most := 1
	for number := uint32(1); number <= n.identity.Load().manifest.GetShards(); number++ {
		most = max(most, len(n.target(number)))
	}
	return most
}

// beginRegistry is asked before the first entry of a kind that older versions do not
// know.
func (n *Node) beginRegistry(ctx context.Context) error {
	if n.registry.written() {
		return nil
	}
	return n.allUnderstand(ctx, registryProtocol, "be in a cluster that grows")
}

// Rebalance implements kvdv1.ClusterServer.
func (n *Node) Rebalance(ctx context.Context, req *kvdv1.RebalanceRequest) (*kvdv1.RebalanceResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	var resp *kvdv1.RebalanceResponse
	err := n.metaLeader(ctx, func(ctx context.Context) (err error) {
		resp, err = n.rebalanceHere(ctx, req)
		return err
	}, func(ctx context.Context, c kvdv1.ClusterClient) (err error) {
		resp, err = c.Rebalance(ctx, req)
		return err
	})
	return resp, err
}

func (n *Node) rebalanceHere(ctx context.Context, req *kvdv1.RebalanceRequest) (*kvdv1.RebalanceResponse, error) {
	if err := n.metaBarrier(ctx); err != nil {
		return nil, err
	}
	k := n.keeperNow()
	plan, moving := n.planNow(k, n.askLoads(ctx, k))
	r := &kvdv1.RebalanceResponse{Problems: plan.Problems, Moving: uint32(len(moving))}
	for _, t := range plan.Transfers {
		r.Moves = append(r.Moves, &kvdv1.PlannedMove{Shard: t.Shard, Add: t.To, Remove: t.From, Leader: true, Reason: t.Reason})
	}
	for _, m := range plan.Moves {
		r.Moves = append(r.Moves, &kvdv1.PlannedMove{Shard: m.Shard, Add: m.Add, Remove: m.Remove, Reason: m.Reason})
	}
	if req.GetDryRun() || n.registry.written() || len(r.GetMoves()) == 0 {
		return r, nil // it is under way by itself, or is not to be
	}
	// A cluster that is as its manifest says is left alone until it is told otherwise.
	if err := n.beginRegistry(ctx); err != nil {
		return nil, err
	}
	_, err := n.proposeNode(ctx, &kvdv1.NodeOp{Change: &kvdv1.NodeOp_Update{Update: n.myRecord()}})
	return r, err
}
