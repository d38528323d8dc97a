package server

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"go.etcd.io/raft/v3/raftpb"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

// stewardPause is how often the leader of group 0 looks at the nodes without being told
// of a change.
const stewardPause = 500 * time.Millisecond

// maxMetaVoters is the number of nodes that vote in group 0; the others learn what it
// decides. More would make each decision slower and hardly less likely to be lost.
const maxMetaVoters = 5

// caughtUpEntries is how far behind its leader's commit a learner may be that is given a
// vote: it has to make that up before it helps to commit.
const caughtUpEntries = 256

// steward does, as long as this node runs, what the leader of group 0 owes the
// cluster, if it is that; and tells group 0 where this node is.
func (n *Node) steward(ctx context.Context) {
	tick := n.cfg.Clock.NewTicker(stewardPause)
	defer tick.Stop()
	for {
		select {
		case <-tick.C():
		case <-n.stewardWake:
		case <-ctx.Done():
			return
		}
		if !n.registry.written() {
			continue // the cluster is as its manifest says
		}
		n.announce(ctx)
		if n.host.Group(0).Status().Leading {
			n.tendMeta(ctx)
		}
	}
}

// metaChange is one step that brings the members of group 0 nearer to what they should
// be. At most one field is set, but for promote, demote and remove, which go together.
type metaChange struct {
	learn   uint64   // to be added as a learner
	promote []uint64 // learners that get a vote
	demote  []uint64 // voters that only learn from now on
	remove  []uint64 // that leave
	active  uint64   // a node that has joined and is there now
}

func (c metaChange) none() bool {
	return c.learn == 0 && len(c.promote) == 0 && len(c.demote) == 0 && len(c.remove) == 0 && c.active == 0
}

// metaMember is what the leader of group 0 sees of a node.
type metaMember struct {
	live     bool // heard of in the group just now
	caughtUp bool // live, and has nearly all
	silent   bool // not heard of for longer than Config.ReplaceAfter
}

// planMeta chooses the next step. of tells of each node what is seen of it.
//
// Voters are the nodes that have a vote already, in the order of their ids, and then
// others, up to maxMetaVoters and to an odd number: a second voter would only be one
// more that must not fail. Nobody loses a vote for the sake of that order.
//
// Who is drained, or silent for too long, gives its vote to others. While it is without
// harm one of them keeps its vote where the number would be even else: the others alone
// are a quorum then too, and if one of them is lost for good there is one copy more.
//
// Those that are to vote have a quorum that is live, or nothing is changed: a change that
// can not be finished would leave the group joint, and stuck.
func planMeta(nodes []*kvdv1.NodeRecord, conf *raftpb.ConfState, of func(uint64) metaMember) metaChange {
	voters, learners := conf.GetVoters(), conf.GetLearners()
	if len(conf.GetVotersOutgoing()) > 0 {
		return metaChange{} // the change before is not over
	}
	member := func(id uint64) bool { return slices.Contains(voters, id) || slices.Contains(learners, id) }
	for _, r := range nodes {
		id := r.GetNodeId()
		switch {
		case r.GetState() == kvdv1.NodeState_NODE_STATE_GONE:
		case !member(id):
			return metaChange{learn: id}
		case r.GetState() == kvdv1.NodeState_NODE_STATE_JOINING && of(id).caughtUp:
			return metaChange{active: id}
		}
	}
	var keep, spare, demote, remove, able []uint64
	for _, id := range voters {
		switch r := findNode(nodes, id); {
		case r.GetState() == kvdv1.NodeState_NODE_STATE_GONE:
			remove = append(remove, id)
		case r.GetState() == kvdv1.NodeState_NODE_STATE_DECOMMISSIONED:
			demote = append(demote, id)
		case of(id).silent, r.GetState() == kvdv1.NodeState_NODE_STATE_DRAINING && !r.GetLeadersOnly():
			spare = append(spare, id)
		default:
			keep = append(keep, id)
		}
	}
	for _, id := range learners {
		switch r := findNode(nodes, id); {
		case r.GetState() == kvdv1.NodeState_NODE_STATE_GONE:
			remove = append(remove, id)
		case r.GetState() == kvdv1.NodeState_NODE_STATE_ACTIVE && of(id).caughtUp && !of(id).silent:
			able = append(able, id)
		}
	}
	slices.Sort(able)
	slices.SortStableFunc(spare, func(a, b uint64) int {
		switch x, y := of(a).live, of(b).live; {
		case x == y:
			return cmp.Compare(a, b)
		case x:
			return -1
		}
		return 1
	})
	promote := able[:min(len(able), max(0, maxMetaVoters-len(keep)))]
	then := len(keep) + len(promote)
	switch {
	case then == 0 && len(spare) > 0:
		keep, spare = spare, nil // there is nobody else
	case then%2 == 0 && len(spare) > 0 && (len(promote) == 0 || then == 2):
		keep, spare = append(keep, spare[0]), spare[1:]
	case then%2 == 0 && len(promote) > 0:
		promote = promote[:len(promote)-1]
	}
	next := slices.Concat(keep, promote)
	live := 0
	for _, id := range next {
		if of(id).live {
			live++
		}
	}
	if live < len(next)/2+1 {
		return metaChange{} // also: the last voter stays until there is another
	}
	return metaChange{promote: promote, demote: slices.Concat(demote, spare), remove: remove}
}

// tendMeta takes steps until there is none to take, or one fails: then later.
func (n *Node) tendMeta(ctx context.Context) {
	g := n.host.Group(0)
	for ctx.Err() == nil {
		step, cancel := context.WithTimeout(ctx, metaWait)
		more, err := n.tendMetaOnce(step, g)
		cancel()
		if err != nil && !errors.Is(err, raft.ErrNotLeader) && !errors.Is(err, raft.ErrConfChangeRefused) && ctx.Err() == nil {
			n.log.Info("the members of the cluster's own group are not as they should be yet; it will be tried again", "err", err)
		}
		if err != nil || !more {
			return
		}
	}
}

func (n *Node) tendMetaOnce(ctx context.Context, g *raft.Group) (more bool, err error) {
	if planMeta(n.registry.nodes(), g.Status().Conf, n.metaMembers(g.Status())).none() {
		return false, nil
	}
	// What is decided here rests on what this node has applied: it must be the leader
	// still, and know what others were told before.
	if err := n.metaBarrier(ctx); err != nil {
		return false, err
	}
	st := g.Status()
	c := planMeta(n.registry.nodes(), st.Conf, n.metaMembers(st))
	change := &raftpb.ConfChangeV2{Transition: raftpb.ConfChangeTransitionAuto.Enum()}
	add := func(kind raftpb.ConfChangeType, ids ...uint64) {
		for _, id := range ids {
			change.Changes = append(change.Changes, &raftpb.ConfChangeSingle{Type: kind.Enum(), NodeId: new(id)})
		}
	}
	switch {
	case c.none() || !st.Leading:
		return false, nil
	case c.active != 0:
		r, err := n.proposeNode(ctx, &kvdv1.NodeOp{Change: &kvdv1.NodeOp_Move{Move: &kvdv1.NodeMove{NodeId: c.active, To: kvdv1.NodeState_NODE_STATE_ACTIVE}}})
		if err == nil && r.refused == "" {
			n.log.Info("a node has joined", "member", c.active, "address", r.node.GetAddress())
		}
		return err == nil, err
	case c.learn != 0:
		add(raftpb.ConfChangeAddLearnerNode, c.learn)
	case slices.Contains(c.remove, n.id()) || slices.Contains(c.demote, n.id()):
		// Who leads on is chosen before this one goes.
		to := bestFollower(withoutFollowers(st, slices.Concat(c.remove, c.demote)))
		switch {
		case to != 0:
			return false, g.TransferLeader(ctx, to)
		case len(c.promote) == 0:
			return false, nil
		}
		// None of those that stay votes yet.
		c.demote, c.remove = nil, nil
		add(raftpb.ConfChangeAddNode, c.promote...)
	default:
		add(raftpb.ConfChangeAddNode, c.promote...)
		add(raftpb.ConfChangeAddLearnerNode, c.demote...)
		add(raftpb.ConfChangeRemoveNode, c.remove...)
	}
	if err := g.ProposeConfChange(ctx, change); err != nil {
		return false, err
	}
	n.log.Info("the cluster's own group changed its members", "learns", c.learn, "votes now", c.promote, "votes no more", c.demote, "left", c.remove)
	return true, nil
}

// metaMembers is what this node, if it leads group 0, sees of each node. Silent is who is
// heard neither by the group nor by the keeper, which looks who it is that answers.
func (n *Node) metaMembers(st raft.Status) func(uint64) metaMember {
	return func(id uint64) metaMember {
		if id == n.id() {
			return metaMember{live: true, caughtUp: true}
		}
		i := slices.IndexFunc(st.Followers, func(f raft.FollowerProgress) bool { return uint64(f.Node) == id })
		live := i >= 0 && st.Followers[i].Active
		return metaMember{live: live, caughtUp: caughtUp(st, id), silent: !live && n.lost.has(id)}
	}
}

// withoutFollowers leaves some out of a status.
func withoutFollowers(st raft.Status, ids []uint64) raft.Status {
	st.Followers = slices.DeleteFunc(slices.Clone(st.Followers), func(f raft.FollowerProgress) bool {
		return slices.Contains(ids, uint64(f.Node))
	})
	return st
}

// proposeNode has group 0 apply a change of nodes. This node must lead it.
func (n *Node) proposeNode(ctx context.Context, op *kvdv1.NodeOp) (nodeResult, error) {
	cmd := &kvdv1.Command{LeaderUnixMs: n.cfg.Clock.Now().UnixMilli(), Op: &kvdv1.Command_Node{Node: op}}
	result, _, err := n.propose(ctx, 0, n.host.Group(0), cmd)
	if err != nil {
		return nodeResult{}, err
	}
	r, ok := result.(nodeResult)
	if !ok {
		return nodeResult{}, fail(kvdv1.ErrorDetail_REASON_OUTCOME_UNKNOWN, "the change of nodes may or may not have been made: list the members")
	}
	return r, nil
}
