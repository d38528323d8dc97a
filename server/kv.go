package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/internal/chaos"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/arena"
	"github.com/kvd-io/kvd/storage/engine"
	"github.com/kvd-io/kvd/storage/layout"
)

const (
	listDefaultLimit = 1000
	listMaxLimit     = 10_000
	listMaxBytes     = 4 << 20
)

// replica finds the shard of a key and this node's replica of it.
func (n *Node) replica(key []byte) (*shard, *raft.Group, error) {
	m := n.identity.Load().manifest
	return n.replicaOf(layout.HashKey(m.GetHashSeed(), key).Shard(m.GetShards()))
}

func (n *Node) replicaOf(number uint32) (*shard, *raft.Group, error) {
	sh := n.shard(number)
	if sh == nil {
		return nil, nil, failNoReplica(number)
	}
	return sh, sh.g, nil
}

// check looks at what every call on a key has: the node is up, the key is one, the
// namespace exists.
func (n *Node) check(ctx context.Context, namespace uint32, key []byte) (*kvdv1.NamespaceInfo, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	switch {
	case len(key) == 0:
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_KEY, "the key is empty: want 1 to %d bytes", layout.MaxKeySize)
	case len(key) > layout.MaxKeySize:
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_KEY, "the key has %d bytes: want at most %d", len(key), layout.MaxKeySize)
	}
	return n.namespaceByID(ctx, namespace)
}

// Get implements kvdv1.KVServer.
func (n *Node) Get(ctx context.Context, req *kvdv1.GetRequest) (*kvdv1.GetResponse, error) {
	if _, err := n.check(ctx, req.GetNamespaceId(), req.GetKey()); err != nil {
		return nil, err
	}
	sh, g, err := n.replica(req.GetKey())
	if err != nil {
		return nil, err
	}
	n.metrics.gets.WithLabelValues("grpc", levelName(req.GetLevel())).Inc()
	term, err := n.readBarrier(ctx, sh, g, req.GetLevel(), req.GetMinApplied())
	if err != nil {
		return nil, err
	}
	v, ok, err := sh.eng.Get(req.GetNamespaceId(), req.GetKey())
	if err != nil {
		return nil, failEngine(err)
	}
	if err := stillServed(sh, g, term); err != nil {
		return nil, err
	}
	n.metrics.fallbacks.add(req.GetFallback())
	r := &kvdv1.GetResponse{Applied: sh.revealedIndex()}
	if !ok || v.Expiry != 0 && v.Expiry <= n.cfg.Clock.Now().UnixMilli() {
		return r, nil
	}
	r.Found, r.Value, r.Version, r.ExpiresUnixMs = true, v.Data, v.Version, v.Expiry
	if sp := sh.space(req.GetNamespaceId()); sp != nil {
		if loc, resident := sp.Lookup(req.GetKey()); resident && loc.Version == v.Version {
			sp.Touch(req.GetKey())
			r.Location = n.location(loc)
			return r, nil
		}
	}
	loc, resident, err := sh.takeBack(req.GetNamespaceId(), req.GetKey())
	if err != nil {
		return nil, failEngine(err)
	}
	if resident && loc.Version == v.Version {
		r.Location = n.location(loc)
	}
	return r, nil
}

// sessionWait bounds how long a session read waits for the replica to catch up;
// another replica is the better choice then. It also keeps such a read from holding
// up the node's end.
const sessionWait = time.Second

// readBarrier returns once the engine may be read at the level. Only the leader
// answers linearizable reads, and what it answers its arena shows already, because
// applying shows it there first. It returns the term that the leader serves, for
// stillServed; 0 at the other levels.
func (n *Node) readBarrier(ctx context.Context, sh *shard, g *raft.Group, level kvdv1.ReadLevel, minApplied uint64) (term uint64, err error) {
	switch level {
	case kvdv1.ReadLevel_READ_LEVEL_STALE:
		return 0, nil
	case kvdv1.ReadLevel_READ_LEVEL_SESSION:
		ctx, cancel := context.WithTimeout(ctx, sessionWait)
		defer cancel()
		if err := sh.waitApplied(ctx, minApplied); err != nil {
			return 0, fail(kvdv1.ErrorDetail_REASON_NOT_READY, "shard %d is at index %d here, the session needs %d: ask another replica", sh.number, sh.appliedIndex(), minApplied)
		}
		return 0, nil
	}
	if term = sh.servedTerm(); term == 0 {
		if g.Status().Leading {
			return 0, failRaft(raft.ErrNotReady, sh.number, g)
		}
		return 0, failNotLeader(sh.number, g)
	}
	index, err := g.ReadIndex(ctx)
	if err != nil {
		return 0, failRaft(err, sh.number, g)
	}
	if err := sh.waitApplied(ctx, index); err != nil {
		return 0, failRaft(err, sh.number, g)
	}
	return term, nil
}

// stillServed is asked between a read of the engine and its answer. Once another node
// leads, this one may apply an entry before the leader does; who then went to the
// leader's memory with what was answered here would find it missing. While the term
// is served, everything in the engine was applied by its leader, memory first.
func stillServed(sh *shard, g *raft.Group, term uint64) error {
	if sh.gone.Load() { // and what was read may have been half of it
		return failNoReplica(sh.number)
	}
	if term != 0 && sh.servedTerm() != term {
		return failNotLeader(sh.number, g)
	}
	return nil
}

func levelName(l kvdv1.ReadLevel) string {
	switch l {
	case kvdv1.ReadLevel_READ_LEVEL_SESSION:
		return "session"
	case kvdv1.ReadLevel_READ_LEVEL_STALE:
		return "stale"
	}
	return "linearizable"
}

func failEngine(err error) error {
	if errors.Is(err, engine.ErrCorrupt) {
		return fail(kvdv1.ErrorDetail_REASON_CORRUPT, "%v", err)
	}
	return fail(kvdv1.ErrorDetail_REASON_NOT_READY, "%v", err)
}

func (n *Node) location(l arena.Location) *kvdv1.Location {
	return &kvdv1.Location{
		BootId: n.bootID, LayoutGen: l.LayoutGen, Chunk: l.Place.Chunk, Offset: l.Place.Offset, Length: uint32(l.Length),
	}
}

// checkWrite looks at what every write has.
func (n *Node) checkWrite(ctx context.Context, namespace uint32, key []byte, p *kvdv1.Precondition, w *kvdv1.WriterStamp) (*kvdv1.NamespaceInfo, error) {
	ns, err := n.check(ctx, namespace, key)
	if err != nil {
		return nil, err
	}
	if p.GetIfAbsent() && p.GetIfVersion() != 0 {
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "a write can be conditional on absence or on a version, not on both")
	}
	if w.GetWriterId() != 0 && w.GetSequence() == 0 {
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "the write is stamped by writer %d without a sequence: want one from 1 on, a new one for each write", w.GetWriterId())
	}
	if why := n.disk.refusal(); why != "" {
		return nil, failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_READ_ONLY, RetryAfterMs: 1000}, "%s", why)
	}
	return ns, nil
}

// Put implements kvdv1.KVServer.
func (n *Node) Put(ctx context.Context, req *kvdv1.PutRequest) (*kvdv1.WriteResponse, error) {
	ns, err := n.checkWrite(ctx, req.GetNamespaceId(), req.GetKey(), req.GetPrecondition(), req.GetWriter())
	if err != nil {
		return nil, err
	}
	if len(req.GetValue()) > n.cfg.MaxValueBytes {
		return nil, fail(kvdv1.ErrorDetail_REASON_VALUE_TOO_LARGE, "the value has %d bytes, the limit is %d: split it, or raise max-value-bytes on every node", len(req.GetValue()), n.cfg.MaxValueBytes)
	}
	now := n.cfg.Clock.Now().UnixMilli()
	op := &kvdv1.PutOp{
		NamespaceId: req.GetNamespaceId(), Key: req.GetKey(), Value: req.GetValue(),
		Precondition: req.GetPrecondition(), Writer: req.GetWriter(), Immutable: ns.GetImmutable(), Owner: callerOf(ctx).owner(),
	}
	ttl := req.GetTtlMs()
	if ttl == 0 {
		ttl = ns.GetDefaultTtlMs()
	}
	if ttl > 0 {
		op.ExpiresUnixMs = now + int64(min(ttl, uint64(1)<<50))
	}
	return n.write(ctx, req.GetKey(), &kvdv1.Command{LeaderUnixMs: now, Op: &kvdv1.Command_Put{Put: op}})
}

// Delete implements kvdv1.KVServer.
func (n *Node) Delete(ctx context.Context, req *kvdv1.DeleteRequest) (*kvdv1.WriteResponse, error) {
	ns, err := n.checkWrite(ctx, req.GetNamespaceId(), req.GetKey(), req.GetPrecondition(), req.GetWriter())
	if err != nil {
		return nil, err
	}
	if req.GetPrecondition().GetIfAbsent() {
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "a delete can not be conditional on absence")
	}
	op := &kvdv1.DeleteOp{
		NamespaceId: req.GetNamespaceId(), Key: req.GetKey(), Precondition: req.GetPrecondition(),
		Writer: req.GetWriter(), Immutable: ns.GetImmutable(), Owner: callerOf(ctx).owner(),
	}
	return n.write(ctx, req.GetKey(), &kvdv1.Command{LeaderUnixMs: n.cfg.Clock.Now().UnixMilli(), Op: &kvdv1.Command_Delete{Delete: op}})
}

func (n *Node) write(ctx context.Context, key []byte, cmd *kvdv1.Command) (*kvdv1.WriteResponse, error) {
	sh, g, err := n.replica(key)
	if err != nil {
		return nil, err
	}
	result, index, err := n.propose(ctx, sh.number, g, cmd)
	if err != nil {
		return nil, err
	}
	w, ok := result.(writeResult)
	if !ok && chaos.Broken(chaos.OldTermAcknowledged) {
		w, ok = writeResult{outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, version: index}, true
	}
	if !ok {
		// The entry lay below a snapshot: it was applied, but not here.
		return nil, fail(kvdv1.ErrorDetail_REASON_OUTCOME_UNKNOWN, "shard %d: entry %d was applied by way of a snapshot, its result is not known here", sh.number, index)
	}
	r := &kvdv1.WriteResponse{Outcome: w.outcome, Version: w.version, Applied: index}
	if w.resident {
		r.Location = n.location(w.location)
	}
	return r, nil
}

// propose encodes and proposes a command and waits for its result.
func (n *Node) propose(ctx context.Context, number uint32, g *raft.Group, cmd *kvdv1.Command) (any, uint64, error) {
	data, err := proto.Marshal(cmd)
	if err != nil {
		panic(fmt.Sprintf("server: encode command: %v", err)) // bug: commands are always encodable
	}
	if !n.writes.enter() {
		return nil, 0, failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY, RetryAfterMs: 20}, "shard %d: node %d hands its shards over: try again in a moment", number, n.id())
	}
	defer n.writes.leave()
	result, index, err := g.Propose(ctx, data)
	if err != nil {
		return nil, 0, failRaft(err, number, g)
	}
	return result, index, nil
}

// OpenWriter implements kvdv1.KVServer.
func (n *Node) OpenWriter(ctx context.Context, req *kvdv1.OpenWriterRequest) (*kvdv1.OpenWriterResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	sh, g, err := n.replicaOf(req.GetShard())
	if err != nil {
		return nil, err
	}
	if why := n.disk.refusal(); why != "" {
		return nil, failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_READ_ONLY, RetryAfterMs: 1000}, "%s", why)
	}
	cmd := &kvdv1.Command{LeaderUnixMs: n.cfg.Clock.Now().UnixMilli(), Op: &kvdv1.Command_OpenWriter{OpenWriter: &kvdv1.OpenWriterOp{Owner: callerOf(ctx).owner()}}}
	_, index, err := n.propose(ctx, sh.number, g, cmd)
	if err != nil {
		return nil, err
	}
	return &kvdv1.OpenWriterResponse{WriterId: index, TtlMs: uint64(n.cfg.WriterTTL.Milliseconds())}, nil
}

// List implements kvdv1.KVServer.
func (n *Node) List(ctx context.Context, req *kvdv1.ListRequest) (*kvdv1.ListResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	if _, err := n.namespaceByID(ctx, req.GetNamespaceId()); err != nil {
		return nil, err
	}
	sh, g, err := n.replicaOf(req.GetShard())
	if err != nil {
		return nil, err
	}
	term, err := n.readBarrier(ctx, sh, g, req.GetLevel(), 0)
	if err != nil {
		return nil, err
	}
	limit := min(int(req.GetLimit()), listMaxLimit)
	if limit == 0 {
		limit = listDefaultLimit
	}
	items, more, err := sh.eng.List(req.GetNamespaceId(), engine.ListOptions{
		Prefix: req.GetPrefix(), StartAfter: req.GetStartAfter(),
		Limit: limit, MaxBytes: listMaxBytes, KeysOnly: req.GetKeysOnly(),
	})
	if err != nil {
		return nil, failEngine(err)
	}
	if err := stillServed(sh, g, term); err != nil {
		return nil, err
	}
	r := &kvdv1.ListResponse{Applied: sh.revealedIndex()}
	now := n.cfg.Clock.Now().UnixMilli()
	for _, it := range items {
		if it.Value.Expiry != 0 && it.Value.Expiry <= now {
			continue
		}
		r.Items = append(r.Items, &kvdv1.ListResponse_Item{
			Key: it.Key, Value: it.Value.Data, Version: it.Value.Version, Size: uint64(it.Size), ExpiresUnixMs: it.Value.Expiry,
		})
	}
	r.More = more
	if len(items) > 0 {
		r.LastKey = items[len(items)-1].Key
	}
	return r, nil
}
