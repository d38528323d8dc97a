package server

import (
	"context"
	"slices"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

// operator implements kvdv1.OperatorServer.
type operator struct {
	kvdv1.UnimplementedOperatorServer
	n *Node
}

// Shards implements kvdv1.OperatorServer.
func (o operator) Shards(_ context.Context, req *kvdv1.ShardsRequest) (*kvdv1.ShardsResponse, error) {
	n := o.n
	if !n.ready.Load() {
		return nil, errStarting
	}
	r := &kvdv1.ShardsResponse{NodeId: n.cfg.NodeID}
	want := func(number uint32) bool { return len(req.GetShards()) == 0 || slices.Contains(req.GetShards(), number) }
	for number := range n.identity.Load().manifest.GetShards() + 1 {
		if m := n.machine(raft.GroupID(number)); m != nil && want(number) {
			r.Replicas = append(r.Replicas, n.describeReplica(number, m))
		}
	}
	return r, nil
}

// describeReplica is what this node says of its replica.
func (n *Node) describeReplica(number uint32, m *machine) *kvdv1.ShardReplica {
	st := n.host.Group(raft.GroupID(number)).Status()
	r := &kvdv1.ShardReplica{
		Shard: number, Leading: st.Leading, LeaderNode: uint64(st.Leader), Term: st.Term, ConfigId: st.ConfigID,
		Voters: st.Conf.GetVoters(), VotersOutgoing: st.Conf.GetVotersOutgoing(), Learners: st.Conf.GetLearners(),
		Applied: st.Applied, Commit: st.Commit, FirstIndex: st.FirstIndex, LastIndex: st.LastIndex,
	}
	if m.record != nil {
		r.ServedTerm = m.record.Load().ServedTerm
	}
	if meta, err := m.eng.Meta(); err == nil {
		r.Keys, r.Bytes = meta.Keys, meta.Bytes
	}
	if sh := n.shards[number]; sh != nil {
		for _, sp := range *sh.spaces.Load() {
			r.ResidentKeys += sp.Stats().Objects
		}
	}
	for _, f := range st.Followers {
		if uint64(f.Node) != n.cfg.NodeID {
			r.Others = append(r.Others, &kvdv1.ReplicaProgress{NodeId: uint64(f.Node), Match: f.Match, Learner: f.Learner, Active: f.Active, Snapshot: f.Snapshot})
		}
	}
	return r
}
