package client

import (
	"context"
	"errors"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// Members lists the nodes of the cluster by id, those that have left too, by the word of
// the leader of group 0. Later calls reach the cluster through any of them. Errors:
// ErrUnavailable, ErrDenied.
func (a *Admin) Members(ctx context.Context) ([]*kvdv1.MemberStatus, error) {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	var list []*kvdv1.MemberStatus
	err := a.anywhere(ctx, "members", func(ctx context.Context, r *remote) error {
		resp, err := r.cluster.Members(ctx, &kvdv1.MembersRequest{})
		list = resp.GetMembers()
		return rpcFailed(r.addr, err)
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, m := range list {
		switch n := m.GetNode(); {
		case n.GetState() == kvdv1.NodeState_NODE_STATE_GONE:
			delete(a.mu.members, n.GetNodeId())
		case n.GetAddress() != "":
			a.mu.members[n.GetNodeId()] = n.GetAddress()
		}
	}
	return list, err
}

// refusedNow makes an ErrConflict of a refusal: what was asked for is sound, and the state
// of the cluster does not allow it.
func refusedNow(err error) error {
	var e *rpcError
	if errors.As(err, &e) && e.detail.GetReason() == kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT {
		return &rpcError{class: ErrConflict, detail: e.detail, text: err.Error()}
	}
	return err
}

// DrainOptions of Admin.Drain.
type DrainOptions struct {
	// LeadersOnly leaves replicas where they are: for a node that is back soon.
	LeadersOnly bool
	// Undo makes the node an active one again.
	Undo bool
}

// Drain has a node's leaders and replicas moved away. It returns when that is decided;
// Members tells how far it is. Asking again does no harm. Errors: ErrConflict where the
// state of the node or of the others does not allow it (those that are left could not hold
// everything), ErrUnavailable, ErrDenied.
func (a *Admin) Drain(ctx context.Context, node uint64, o DrainOptions) error {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	return refusedNow(a.anywhere(ctx, "drain", func(ctx context.Context, r *remote) error {
		_, err := r.cluster.Drain(ctx, &kvdv1.DrainRequest{NodeId: node, LeadersOnly: o.LeadersOnly, Undo: o.Undo})
		return rpcFailed(r.addr, err)
	}))
}

// Decommission drains a node for good. When it holds nothing any more it leaves the
// cluster, and its id is never used again. Errors as Drain.
func (a *Admin) Decommission(ctx context.Context, node uint64) error {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	return refusedNow(a.anywhere(ctx, "decommission", func(ctx context.Context, r *remote) error {
		_, err := r.cluster.Decommission(ctx, &kvdv1.DecommissionRequest{NodeId: node})
		return rpcFailed(r.addr, err)
	}))
}

// Rebalance tells what would be moved next and, but for a dry run, has it moved. The
// answer is the caller's. Errors: ErrUnavailable, ErrDenied, ErrConflict (a node's version
// does not allow it).
func (a *Admin) Rebalance(ctx context.Context, dryRun bool) (*kvdv1.RebalanceResponse, error) {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	var resp *kvdv1.RebalanceResponse
	err := a.anywhere(ctx, "rebalance", func(ctx context.Context, r *remote) (err error) {
		resp, err = r.cluster.Rebalance(ctx, &kvdv1.RebalanceRequest{DryRun: dryRun})
		return rpcFailed(r.addr, err)
	})
	return resp, refusedNow(err)
}
