package server

import (
	"context"
	"fmt"
	"slices"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/layout"
)

// operator implements kvdv1.OperatorServer.
type operator struct {
	kvdv1.UnimplementedOperatorServer
	n *Node
}

// Shards implements kvdv1.OperatorServer.
func (o operator) Shards(ctx context.Context, req *kvdv1.ShardsRequest) (*kvdv1.ShardsResponse, error) {
	n := o.n
	if !n.ready.Load() {
		return nil, errStarting
	}
	r := &kvdv1.ShardsResponse{NodeId: n.id()}
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
	st := raft.Status{} // of a replica that is leaving just now
	if g := n.host.Group(raft.GroupID(number)); g != nil {
		st = g.Status()
	}
	r := &kvdv1.ShardReplica{
		Shard: number, Leading: st.Leading, LeaderNode: uint64(st.Leader), Term: st.Term, ConfigId: st.ConfigID,
		Voters: st.Conf.GetVoters(), VotersOutgoing: st.Conf.GetVotersOutgoing(), Learners: st.Conf.GetLearners(),
		Applied: st.Applied, Commit: st.Commit, FirstIndex: st.FirstIndex, LastIndex: st.LastIndex,
	}
	if !st.ConfigSince.IsZero() {
		r.ConfigAgeMs = uint64(max(0, n.cfg.Clock.Now().Sub(st.ConfigSince).Milliseconds()))
	}
	if m.record != nil {
		r.ServedTerm = m.record.Load().ServedTerm
	}
	if meta, err := m.eng.Meta(); err == nil {
		r.Keys, r.Bytes = meta.Keys, meta.Bytes
	}
	if sh := n.shard(number); sh != nil {
		for _, sp := range *sh.spaces.Load() {
			r.ResidentKeys += sp.Stats().Objects
		}
	}
	for _, f := range st.Followers {
		if uint64(f.Node) != n.id() {
			r.Others = append(r.Others, &kvdv1.ReplicaProgress{NodeId: uint64(f.Node), Match: f.Match, Learner: f.Learner, Active: f.Active, Snapshot: f.Snapshot})
		}
	}
	return r
}

// checkTransfer refuses what can not come to a good end. Only the leader knows enough.
func (n *Node) checkTransfer(st raft.Status, to uint64) error {
	if !st.Leading {
		return nil // raft says it
	}
	bad := func(format string, args ...any) error {
		return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "shard %d: %s", st.ID, fmt.Sprintf(format, args...))
	}
	switch {
	case slices.Contains(st.Conf.GetLearners(), to):
		return bad("node %d is a learner, which can not lead: wait until it is a voter", to)
	case !slices.Contains(st.Conf.GetVoters(), to):
		return bad("node %d is none of its voters, which are %v", to, st.Conf.GetVoters())
	}
	for _, f := range st.Followers {
		switch {
		case uint64(f.Node) != to || to == n.id():
		case !f.Active:
			return failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY, RetryAfterMs: 200}, "shard %d: node %d has not been heard of lately: see that it runs, or choose another of %v", st.ID, to, st.Conf.GetVoters())
		case f.Snapshot:
			return failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY, RetryAfterMs: 200}, "shard %d: node %d is so far behind that it is sent a snapshot: wait, or choose another of %v", st.ID, to, st.Conf.GetVoters())
		}
	}
	return nil
}

// Why a key is not in memory, in words for programs.
const (
	whyAbsent     = "absent"
	whyExpired    = "expired"
	whyNoReplica  = "no_replica"
	whyTooLarge   = "too_large"
	whyNoRoom     = "no_room"
	whyEvicted    = "evicted"
	whyGone       = "evicted_or_no_room"
	whyNotLoaded  = "not_loaded"
	whyOutOfDate  = "out_of_date"
	neverOrGone   = "the store has no such key: it was never put, was deleted, or expired and was removed"
	readsTakeBack = "the next get over gRPC puts it back if there is room then"
)

// Explain implements kvdv1.OperatorServer.
func (o operator) Explain(ctx context.Context, req *kvdv1.ExplainRequest) (*kvdv1.ExplainResponse, error) {
	n := o.n
	ns, err := n.check(ctx, req.GetNamespaceId(), req.GetKey())
	if err != nil {
		return nil, err
	}
	r := &kvdv1.ExplainResponse{NodeId: n.id(), BootId: n.bootID}
	sh, _, err := n.replica(req.GetKey())
	if err != nil {
		r.Reason, r.Detail = whyNoReplica, "this node has no replica of the key's shard"
		return r, nil
	}
	r.Replica = n.describeReplica(sh.number, sh.machine)
	r.LayoutGen = sh.record.Load().LayoutGen
	v, ok, err := sh.eng.Get(ns.GetId(), req.GetKey())
	if err != nil {
		return nil, failEngine(err)
	}
	if !ok {
		r.Reason, r.Detail = whyAbsent, neverOrGone
		return r, nil
	}
	r.Stored, r.Version, r.ValueBytes, r.ExpiresUnixMs = true, v.Version, uint64(len(v.Data)), v.Expiry
	size := layout.ObjectSize(len(req.GetKey()), len(v.Data))
	r.ClassBytes = uint32(layout.ClassSize(layout.ClassFor(size)))
	if sp := sh.space(ns.GetId()); sp != nil {
		if loc, resident := sp.Lookup(req.GetKey()); resident {
			r.Location = n.location(loc)
			if loc.Version != v.Version { // an entry is being applied
				r.Reason, r.Detail = whyOutOfDate, fmt.Sprintf("memory shows version %d already: a write is being applied", loc.Version)
			}
		}
	}
	if r.Location == nil {
		r.Reason, r.Detail = n.whyNotResident(sh, ns, size)
	}
	if v.Expiry != 0 && v.Expiry <= n.cfg.Clock.Now().UnixMilli() {
		r.Reason, r.Detail = whyExpired, "its time is over: readers take it for absent, and the leader removes it within a second or so"
	}
	return r, nil
}

// whyNotResident draws the reason from what is counted: memory itself does not remember
// keys that it does not have.
func (n *Node) whyNotResident(sh *shard, ns *kvdv1.NamespaceInfo, size int) (why, detail string) {
	limit := n.cfg.ArenaBytes
	if q := ns.GetQuotaBytes(); q > 0 {
		limit = min(limit, q)
	}
	if layout.ClassFor(size) == 0 || uint64(size) > limit {
		return whyTooLarge, fmt.Sprintf("its object of %d bytes is larger than any that memory can hold (namespace %s has %d bytes here)", size, ns.GetName(), limit)
	}
	sp := sh.space(ns.GetId())
	if sp == nil {
		return whyNotLoaded, "nothing of this namespace and shard was shown in memory since the node started: " + readsTakeBack
	}
	st := sp.Stats()
	switch {
	case st.Evictions > 0 && st.NonResident == 0:
		return whyEvicted, fmt.Sprintf("it made room for others (%d keys of this shard did since the node started; namespace %s may have %d bytes here): %s", st.Evictions, ns.GetName(), limit, readsTakeBack)
	case st.Evictions == 0 && st.NonResident > 0:
		return whyNoRoom, fmt.Sprintf("memory was full when it was put or loaded (%d times in this shard since the node started; namespace %s may have %d bytes here): %s", st.NonResident, ns.GetName(), limit, readsTakeBack)
	case st.Evictions == 0:
		return whyNotLoaded, "it was not shown in memory since the node started: " + readsTakeBack
	}
	return whyGone, fmt.Sprintf("it made room for others, or found none itself (%d and %d times in this shard since the node started; namespace %s may have %d bytes here): %s", st.Evictions, st.NonResident, ns.GetName(), limit, readsTakeBack)
}
