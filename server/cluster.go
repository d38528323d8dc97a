package server

import (
	"context"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

// Status implements kvdv1.ClusterServer. Who is not the operator is told which node
// this is, and where the others are.
func (n *Node) Status(ctx context.Context, _ *kvdv1.StatusRequest) (*kvdv1.StatusResponse, error) {
	id := n.identity.Load()
	r := &kvdv1.StatusResponse{NodeId: n.id(), Version: n.cfg.Version, Address: n.advertise}
	if id != nil {
		r.ClusterId = id.manifest.GetClusterId()
	}
	if n.ready.Load() {
		r.Members, _ = n.members()
	}
	if !callerOf(ctx).operator() {
		return r, nil
	}
	r.BootId, r.StartedUnixMs, r.ServerCpuSeconds = n.bootID, n.started.UnixMilli(), cpuSeconds()
	if id != nil {
		r.Incarnation = id.incarnation()
	}
	if !n.ready.Load() {
		return r, nil
	}
	r.Transports, r.ReadOnlyReason = n.export.names(), n.disk.refusal()
	r.ReadOnly = r.GetReadOnlyReason() != ""
	r.ShardCount = id.manifest.GetShards()
	r.Replication = uint32(n.replication(id.manifest, n.registry.able()))
	r.WantedReplication = max(id.manifest.GetReplication(), id.manifest.GetWantedReplication())
	a := n.arena.Stats()
	r.Arena = &kvdv1.ArenaStatus{
		LimitBytes: n.cfg.ArenaBytes, RegisteredBytes: a.RegisteredBytes, UsedBytes: a.UsedBytes, ObjectBytes: a.ObjectBytes,
		IndexBytes: a.IndexBytes, Objects: a.Objects, Evictions: a.Evictions,
	}
	r.Shards = append(r.Shards, n.shardStatus(0, n.meta, n.host.Group(0)))
	for number := uint32(1); number <= id.manifest.GetShards(); number++ {
		if sh := n.shard(number); sh != nil {
			st := n.shardStatus(number, sh.machine, sh.g)
			for _, sp := range *sh.spaces.Load() {
				st.ResidentKeys += sp.Stats().Objects
			}
			r.Shards = append(r.Shards, st)
		}
	}
	return r, nil
}

func (n *Node) shardStatus(number uint32, m *machine, g *raft.Group) *kvdv1.ShardStatus {
	st := g.Status()
	s := &kvdv1.ShardStatus{
		Shard: number, LeaderNode: uint64(st.Leader), Term: st.Term, Applied: st.Applied, Commit: st.Commit,
		FirstIndex: st.FirstIndex, LastIndex: st.LastIndex, ConfigId: st.ConfigID, Voters: st.Conf.GetVoters(),
	}
	if m.record != nil {
		s.ServedTerm = m.record.Load().ServedTerm
	}
	if meta, err := m.eng.Meta(); err == nil {
		s.Keys = meta.Keys
	}
	return s
}

func cpuSeconds() float64 {
	var ru unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &ru); err != nil {
		return 0
	}
	return float64(ru.Utime.Nano()+ru.Stime.Nano()) / float64(time.Second)
}

// metaWait bounds a call that needs the leader of group 0, or what it decided.
const metaWait = 5 * time.Second

// forwardedKey marks a call that a node passed on. It is not passed on again: two
// nodes that take each other for the leader would do so without end.
const forwardedKey = "kvd-forwarded"

// metaLeader runs local where this node leads group 0, and else remote with a client
// of the node that does, until it finds one; after ctx or metaWait it gives up. The
// functions use the context that they are given.
func (n *Node) metaLeader(ctx context.Context, local func(context.Context) error, remote func(context.Context, kvdv1.ClusterClient) error) error {
	return n.metaLeaderConn(ctx, local, func(ctx context.Context, c grpc.ClientConnInterface) error {
		return remote(ctx, kvdv1.NewClusterClient(c))
	})
}

// metaLeaderConn is metaLeader with a connection to the leader.
func (n *Node) metaLeaderConn(ctx context.Context, local func(context.Context) error, remote func(context.Context, grpc.ClientConnInterface) error) error {
	ctx, cancel := context.WithTimeout(ctx, metaWait)
	defer cancel()
	g := n.host.Group(0)
	if isForwarded(ctx) && !g.Status().Leading {
		return failNotLeader(0, g)
	}
	forward := metadata.AppendToOutgoingContext(ctx, forwardedKey, "1")
	for {
		st := g.Status()
		var err error
		switch {
		case st.Leading:
			err = local(ctx)
		case st.Leader != 0:
			conn, cerr := n.memberConn(st.Leader)
			if cerr != nil {
				return cerr
			}
			err = remote(forward, conn)
		default:
			err = failNotLeader(0, g)
		}
		if status.Code(err) != codes.Unavailable {
			return err
		}
		pause(ctx, 50*time.Millisecond)
		if ctx.Err() != nil {
			return err
		}
	}
}

// CreateNamespace implements kvdv1.ClusterServer. A node that does not lead group 0
// passes it on.
func (n *Node) CreateNamespace(ctx context.Context, req *kvdv1.CreateNamespaceRequest) (*kvdv1.CreateNamespaceResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	switch {
	case !namespaceName.MatchString(req.GetName()):
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "namespace name %q: want 1 to 63 of a-z, 0-9, dot, dash, underscore, with a letter or digit at both ends", req.GetName())
	case req.GetPlaintextReads() && !req.GetRequireTls():
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "namespace %s: READs in plain text are an exception from requiring TLS, which it does not", req.GetName())
	case req.GetRequireTls() && n.auth.tls == nil:
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "namespace %s is to require TLS, and node %d has none: give every node tls-cert and tls-key first", req.GetName(), n.id())
	}
	var resp *kvdv1.CreateNamespaceResponse
	err := n.metaLeader(ctx, func(ctx context.Context) (err error) {
		resp, err = n.createHere(ctx, req)
		return err
	}, func(ctx context.Context, c kvdv1.ClusterClient) (err error) {
		resp, err = c.CreateNamespace(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	// So that the caller can use it here at once.
	if err := n.awaitNamespace(ctx, resp.GetNamespace().GetName()); err != nil {
		return nil, err
	}
	return resp, nil
}

func (n *Node) createHere(ctx context.Context, req *kvdv1.CreateNamespaceRequest) (*kvdv1.CreateNamespaceResponse, error) {
	if n.namespaces.byName(req.GetName()) == nil && n.namespaces.count() >= maxNamespaces {
		return nil, fail(kvdv1.ErrorDetail_REASON_EXHAUSTED, "there are %d namespaces, the limit: each has memory of its own on every node", maxNamespaces)
	}
	info := &kvdv1.NamespaceInfo{
		Name: req.GetName(), Immutable: req.GetImmutable(), OneSided: !req.GetTwoSidedOnly(),
		DefaultTtlMs: req.GetDefaultTtlMs(), QuotaBytes: req.GetQuotaBytes(),
		RequireTls: req.GetRequireTls(), PlaintextReads: req.GetPlaintextReads(),
	}
	cmd := &kvdv1.Command{LeaderUnixMs: n.cfg.Clock.Now().UnixMilli(), Op: &kvdv1.Command_Namespace{Namespace: &kvdv1.NamespaceOp{Create: info}}}
	result, _, err := n.propose(ctx, 0, n.host.Group(0), cmd)
	if err != nil {
		return nil, err
	}
	r, ok := result.(namespaceResult)
	if !ok {
		return nil, fail(kvdv1.ErrorDetail_REASON_OUTCOME_UNKNOWN, "namespace %s may or may not have been made: list the namespaces", req.GetName())
	}
	if r.existed {
		return nil, fail(kvdv1.ErrorDetail_REASON_ALREADY_EXISTS, "namespace %s exists already (id %d, immutable %t)", r.info.GetName(), r.info.GetId(), r.info.GetImmutable())
	}
	return &kvdv1.CreateNamespaceResponse{Namespace: r.info}, nil
}

// ListNamespaces implements kvdv1.ClusterServer; the answer is the leader's, as far as it
// concerns the caller.
func (n *Node) ListNamespaces(ctx context.Context, req *kvdv1.ListNamespacesRequest) (*kvdv1.ListNamespacesResponse, error) {
	resp, err := n.allNamespaces(ctx, req)
	if c := callerOf(ctx); err == nil && !c.operator() {
		resp.Namespaces = slices.DeleteFunc(resp.Namespaces, func(ns *kvdv1.NamespaceInfo) bool {
			return !c.may(rightRead|rightWrite|rightAdmin, ns.GetName())
		})
	}
	return resp, err
}

func (n *Node) allNamespaces(ctx context.Context, req *kvdv1.ListNamespacesRequest) (*kvdv1.ListNamespacesResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	var resp *kvdv1.ListNamespacesResponse
	err := n.metaLeader(ctx, func(ctx context.Context) error {
		if err := n.metaBarrier(ctx); err != nil {
			return err
		}
		resp = &kvdv1.ListNamespacesResponse{Namespaces: n.namespaces.list()}
		return nil
	}, func(ctx context.Context, c kvdv1.ClusterClient) (err error) {
		resp, err = c.ListNamespaces(ctx, req)
		return err
	})
	return resp, err
}

// findNamespace looks the name up here and, where it is unknown, at the leader of
// group 0: this node may be behind.
func (n *Node) findNamespace(ctx context.Context, name string) (*kvdv1.NamespaceInfo, error) {
	if ns := n.namespaces.byName(name); ns != nil {
		return ns, nil
	}
	all, err := n.allNamespaces(ctx, &kvdv1.ListNamespacesRequest{})
	if err != nil {
		return nil, err
	}
	for _, ns := range all.GetNamespaces() {
		if ns.GetName() == name {
			if err := n.awaitNamespace(ctx, name); err != nil {
				return nil, err
			}
			return n.namespaces.byName(name), nil
		}
	}
	return nil, fail(kvdv1.ErrorDetail_REASON_UNKNOWN_NAMESPACE, "there is no namespace %q: kvctl namespace create makes one, kvctl namespace ls lists them", name)
}

// awaitNamespace returns once this node has applied the namespace's creation.
func (n *Node) awaitNamespace(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, metaWait)
	defer cancel()
	for {
		// The index first: what is applied after it is waited for, whatever comes between.
		next := n.meta.appliedIndex() + 1
		if n.namespaces.byName(name) != nil {
			return nil
		}
		if err := n.meta.waitApplied(ctx, next); err != nil {
			return failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY, RetryAfterMs: 100}, "namespace %s exists, but has not reached node %d yet", name, n.id())
		}
	}
}

// namespaceByID is for calls that carry an id which some node gave out.
func (n *Node) namespaceByID(ctx context.Context, id uint32) (*kvdv1.NamespaceInfo, error) {
	if ns := n.namespaces.byID(id); ns != nil {
		return ns, nil
	}
	all, err := n.allNamespaces(ctx, &kvdv1.ListNamespacesRequest{})
	if err != nil {
		return nil, err
	}
	for _, ns := range all.GetNamespaces() {
		if ns.GetId() == id {
			return ns, nil
		}
	}
	return nil, fail(kvdv1.ErrorDetail_REASON_UNKNOWN_NAMESPACE, "there is no namespace with id %d", id)
}

// TransferLeader implements kvdv1.ClusterServer.
func (n *Node) TransferLeader(ctx context.Context, req *kvdv1.TransferLeaderRequest) (*kvdv1.TransferLeaderResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	g := n.host.Group(raft.GroupID(req.GetShard()))
	if g == nil {
		return nil, failNoReplica(req.GetShard())
	}
	if err := n.checkTransfer(g.Status(), req.GetToNode()); err != nil {
		return nil, err
	}
	if err := g.TransferLeader(ctx, raft.NodeID(req.GetToNode())); err != nil {
		return nil, failRaft(err, req.GetShard(), g)
	}
	return &kvdv1.TransferLeaderResponse{}, nil
}
