package server

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
)

const (
	// maxExports of a node are open at a time: each keeps files and memory of the store
	// from being given free.
	maxExports = 16
	// exportIdle is how long one is kept that nobody reads.
	exportIdle = 2 * time.Minute
	// exportPageBytes of keys and values are in one page, and one item more; and
	// exportPageItems at most.
	exportPageBytes = 1 << 20
	exportPageItems = 1 << 14
	// maxImportItems of one call; importing is how many of them are proposed at once.
	maxImportItems = 1 << 14
	importing      = 128
)

// backups implements kvdv1.BackupServer: a service of its own, for it keeps exports.
type backups struct {
	kvdv1.UnimplementedBackupServer
	n  *Node
	mu struct {
		sync.Mutex
		open   map[uint64]*export
		closed bool
	}
}

// export is a shard's content at one index.
type export struct {
	owner string
	used  time.Time // guarded by backups.mu
	mu    struct {
		sync.Mutex
		snap *engine.Snapshot // nil: closed
	}
}

// newBackups returns the service; what it keeps is given up when the node stops.
func newBackups(n *Node) *backups {
	b := &backups{n: n}
	b.mu.open = map[uint64]*export{}
	n.background(b.sweep)
	return b
}

// sweep gives up what nobody reads, and in the end everything.
func (b *backups) sweep(ctx context.Context) {
	tick := b.n.cfg.Clock.NewTicker(exportIdle / 8)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-tick.C():
			now := b.n.cfg.Clock.Now()
			b.drop(false, func(_ uint64, x *export) bool { return now.Sub(x.used) >= exportIdle })
		case <-ctx.Done():
		}
	}
	b.drop(true, func(uint64, *export) bool { return true })
}

// drop closes the exports that f chooses; with last no others are taken in any more.
func (b *backups) drop(last bool, f func(id uint64, x *export) bool) {
	var gone []*export
	b.mu.Lock()
	b.mu.closed = b.mu.closed || last
	for id, x := range b.mu.open {
		if f(id, x) {
			delete(b.mu.open, id)
			gone = append(gone, x)
		}
	}
	b.mu.Unlock()
	for _, x := range gone {
		if err := x.close(); err != nil {
			b.n.log.Warn("an export was closed with an error", "err", err)
		}
	}
}

func (x *export) close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.mu.snap == nil {
		return nil
	}
	snap := x.mu.snap
	x.mu.snap = nil
	return snap.Close()
}

// keep takes the snapshot in, or closes it.
func (b *backups) keep(snap *engine.Snapshot, owner string) (uint64, error) {
	x := &export{owner: owner, used: b.n.cfg.Clock.Now()}
	x.mu.snap = snap
	b.mu.Lock()
	defer b.mu.Unlock()
	var err error
	switch {
	case b.mu.closed:
		err = failShuttingDown(b.n.id())
	case len(b.mu.open) >= maxExports:
		err = failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_EXHAUSTED, RetryAfterMs: 500}, "node %d keeps %d exports, the limit: try again when another backup is done", b.n.id(), maxExports)
	}
	if err != nil {
		return 0, errors.Join(err, x.close())
	}
	id := rand.Uint64() | 1 // never 0
	for b.mu.open[id] != nil {
		id += 2
	}
	b.mu.open[id] = x
	return id, nil
}

// get returns an export to the caller that opened it.
func (b *backups) get(id uint64, c *caller) (*export, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	x := b.mu.open[id]
	if x == nil || x.owner != c.owner() {
		return nil, errExportGone
	}
	x.used = b.n.cfg.Clock.Now()
	return x, nil
}

var errExportGone = fail(kvdv1.ErrorDetail_REASON_SESSION_GONE, "this export does not exist here (any more): open a new one")

// OpenExport implements kvdv1.BackupServer.
func (b *backups) OpenExport(ctx context.Context, req *kvdv1.OpenExportRequest) (*kvdv1.OpenExportResponse, error) {
	n := b.n
	if !n.ready.Load() {
		return nil, errStarting
	}
	if req.GetShard() == 0 {
		return b.exportCluster(ctx)
	}
	sh, g, err := n.replicaOf(req.GetShard())
	if err != nil {
		return nil, err
	}
	term, err := n.readBarrier(ctx, sh, g, kvdv1.ReadLevel_READ_LEVEL_LINEARIZABLE, 0)
	if err != nil {
		return nil, err
	}
	snap, err := sh.eng.OpenSnapshot()
	if err != nil {
		return nil, failEngine(err)
	}
	if err := stillServed(sh, g, term); err != nil {
		return nil, errors.Join(err, snap.Close())
	}
	meta := snap.Meta()
	id, err := b.keep(snap, callerOf(ctx).owner())
	if err != nil {
		return nil, err
	}
	return &kvdv1.OpenExportResponse{ExportId: id, Shard: &kvdv1.BackupShard{
		Shard: req.GetShard(), Index: meta.Applied, Term: meta.AppliedTerm, Keys: meta.Keys, Bytes: meta.Bytes,
	}}, nil
}

// exportCluster answers what group 0 holds, at one index.
func (b *backups) exportCluster(ctx context.Context) (resp *kvdv1.OpenExportResponse, err error) {
	n := b.n
	if err := n.metaBarrier(ctx); err != nil {
		return nil, err
	}
	snap, err := n.engine.Group(0).OpenSnapshot()
	if err != nil {
		return nil, failEngine(err)
	}
	defer func() { err = errors.Join(err, snap.Close()) }()
	meta, m := snap.Meta(), n.identity.Load().manifest
	c := &kvdv1.BackupCluster{
		ClusterId: m.GetClusterId(), HashSeed: m.GetHashSeed(), Shards: m.GetShards(), Index: meta.Applied, Term: meta.AppliedTerm,
		Version: n.cfg.Version, TakenUnixMs: n.cfg.Clock.Now().UnixMilli(), MaxValueBytes: uint64(n.cfg.MaxValueBytes),
	}
	err = snap.Aux(auxNamespace, func(_, value []byte) (bool, error) {
		ns := &kvdv1.NamespaceInfo{}
		c.Namespaces = append(c.Namespaces, ns)
		return true, proto.Unmarshal(value, ns)
	})
	if err == nil {
		err = snap.Aux(auxToken, func(key, value []byte) (bool, error) {
			rec, err := decodeToken(key, value)
			c.Tokens = append(c.Tokens, rec)
			return true, err
		})
	}
	if err != nil {
		return nil, failEngine(err)
	}
	return &kvdv1.OpenExportResponse{Shard: &kvdv1.BackupShard{Index: meta.Applied, Term: meta.AppliedTerm}, Cluster: c}, nil
}

// ReadExport implements kvdv1.BackupServer.
func (b *backups) ReadExport(ctx context.Context, req *kvdv1.ReadExportRequest) (*kvdv1.ReadExportResponse, error) {
	x, err := b.get(req.GetExportId(), callerOf(ctx))
	if err != nil {
		return nil, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.mu.snap == nil {
		return nil, errExportGone
	}
	var after *engine.Position
	if len(req.GetAfterKey()) > 0 {
		after = &engine.Position{Namespace: req.GetAfterNamespace(), Key: req.GetAfterKey()}
	}
	r, size := &kvdv1.ReadExportResponse{}, 0
	err = x.mu.snap.KeyValues(after, func(namespace uint32, key []byte, v engine.Value) (bool, error) {
		if size >= exportPageBytes || len(r.Items) == exportPageItems {
			r.More = true
			return false, nil
		}
		size += len(key) + len(v.Data)
		r.Items = append(r.Items, &kvdv1.BackupItem{
			NamespaceId: namespace, Key: append([]byte(nil), key...), Value: append([]byte(nil), v.Data...), ExpiresUnixMs: v.Expiry,
		})
		return true, ctx.Err()
	})
	if err != nil {
		return nil, failEngine(err)
	}
	return r, nil
}

// CloseExport implements kvdv1.BackupServer.
func (b *backups) CloseExport(ctx context.Context, req *kvdv1.CloseExportRequest) (*kvdv1.CloseExportResponse, error) {
	if _, err := b.get(req.GetExportId(), callerOf(ctx)); err != nil {
		return &kvdv1.CloseExportResponse{}, nil // it is closed
	}
	b.drop(false, func(id uint64, _ *export) bool { return id == req.GetExportId() })
	return &kvdv1.CloseExportResponse{}, nil
}

// Import implements kvdv1.BackupServer.
func (b *backups) Import(ctx context.Context, req *kvdv1.ImportRequest) (*kvdv1.ImportResponse, error) {
	n := b.n
	if len(req.GetItems()) > maxImportItems {
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "%d keys in one call: want at most %d", len(req.GetItems()), maxImportItems)
	}
	// All are looked at before the first is put.
	infos := map[uint32]*kvdv1.NamespaceInfo{}
	for _, it := range req.GetItems() {
		ns, err := n.checkWrite(ctx, it.GetNamespaceId(), it.GetKey(), nil, nil)
		if err != nil {
			return nil, err
		}
		if err := n.checkValue(it.GetValue()); err != nil {
			return nil, err
		}
		infos[it.GetNamespaceId()] = ns
	}
	var mu sync.Mutex
	r := &kvdv1.ImportResponse{}
	var puts errgroup.Group
	puts.SetLimit(importing)
	for _, it := range req.GetItems() {
		puts.Go(func() error {
			count, err := n.importItem(ctx, infos[it.GetNamespaceId()], it)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				*count(r)++
			}
			return err
		})
	}
	// The first error; what was put stays put, and is found to be the same next time.
	if err := puts.Wait(); err != nil {
		return nil, err
	}
	return r, nil
}

func importedApplied(r *kvdv1.ImportResponse) *uint64 { return &r.Applied }
func importedSame(r *kvdv1.ImportResponse) *uint64    { return &r.Same }
func importedOther(r *kvdv1.ImportResponse) *uint64   { return &r.Other }
func importedExpired(r *kvdv1.ImportResponse) *uint64 { return &r.Expired }

// importItem puts one key, if it is absent, and tells what to count.
func (n *Node) importItem(ctx context.Context, ns *kvdv1.NamespaceInfo, it *kvdv1.BackupItem) (func(*kvdv1.ImportResponse) *uint64, error) {
	now := n.cfg.Clock.Now().UnixMilli()
	if e := it.GetExpiresUnixMs(); e != 0 && e <= now {
		return importedExpired, nil
	}
	op := &kvdv1.PutOp{
		NamespaceId: ns.GetId(), Key: it.GetKey(), Value: it.GetValue(), Precondition: &kvdv1.Precondition{IfAbsent: true},
		ExpiresUnixMs: it.GetExpiresUnixMs(), Immutable: ns.GetImmutable(), Owner: callerOf(ctx).owner(),
	}
	w, err := n.write(ctx, it.GetKey(), &kvdv1.Command{LeaderUnixMs: now, Op: &kvdv1.Command_Put{Put: op}})
	if err != nil {
		return nil, err
	}
	if w.GetOutcome() == kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED {
		return importedApplied, nil
	}
	sh, _, err := n.replica(it.GetKey())
	if err != nil {
		return nil, err
	}
	// What was applied with the answer is in the engine.
	v, ok, err := sh.eng.Get(ns.GetId(), it.GetKey())
	if err != nil {
		return nil, failEngine(err)
	}
	if ok && string(v.Data) == string(it.GetValue()) && v.Expiry == it.GetExpiresUnixMs() {
		return importedSame, nil
	}
	return importedOther, nil
}

// ImportCluster implements kvdv1.BackupServer.
func (b *backups) ImportCluster(ctx context.Context, req *kvdv1.ImportClusterRequest) (*kvdv1.ImportClusterResponse, error) {
	n := b.n
	if !n.ready.Load() {
		return nil, errStarting
	}
	if err := n.metaBarrier(ctx); err != nil {
		return nil, err
	}
	var namespaces []*kvdv1.NamespaceInfo
	for _, ns := range req.GetNamespaces() {
		switch have := n.namespaces.byName(ns.GetName()); {
		case have != nil && !sameNamespace(have, ns):
			return nil, fail(kvdv1.ErrorDetail_REASON_ALREADY_EXISTS, "namespace %s exists here with other settings than in the backup: restore into a cluster that has no namespaces of its own", ns.GetName())
		case have != nil:
			continue
		case !namespaceName.MatchString(ns.GetName()) || ns.GetPlaintextReads() && !ns.GetRequireTls():
			return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "namespace %q can not be made: its name or its settings are not possible", ns.GetName())
		case ns.GetRequireTls() && n.auth.tls == nil:
			return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "namespace %s requires TLS, and node %d has none: give every node tls-cert and tls-key first", ns.GetName(), n.id())
		}
		namespaces = append(namespaces, ns)
	}
	if have := n.namespaces.count(); have+len(namespaces) > maxNamespaces {
		return nil, fail(kvdv1.ErrorDetail_REASON_EXHAUSTED, "there are %d namespaces, and %d are to be made: the limit is %d", have, len(namespaces), maxNamespaces)
	}
	tokens, err := n.tokensToImport(req.GetTokens())
	if err != nil {
		return nil, err
	}
	for _, ns := range namespaces {
		if err := n.importNamespace(ctx, ns); err != nil {
			return nil, err
		}
	}
	for _, rec := range tokens {
		if r, err := n.changeTokens(ctx, &kvdv1.TokenOp{Create: rec}); err != nil {
			return nil, err
		} else if r.existed {
			return nil, failTokenExists(rec)
		}
	}
	return &kvdv1.ImportClusterResponse{Namespaces: n.namespaces.list()}, nil
}

// sameNamespace tells whether two have the same name and settings; ids are given anew.
func sameNamespace(a, b *kvdv1.NamespaceInfo) bool {
	a, b = proto.Clone(a).(*kvdv1.NamespaceInfo), proto.Clone(b).(*kvdv1.NamespaceInfo)
	a.Id, b.Id = 0, 0
	return proto.Equal(a, b)
}

func failTokenExists(rec *kvdv1.TokenRecord) error {
	return fail(kvdv1.ErrorDetail_REASON_ALREADY_EXISTS, "there is another token named %s, or with id %s, here than in the backup: revoke it first", rec.GetInfo().GetName(), rec.GetInfo().GetId())
}

// tokensToImport leaves out those that are here already, and those whose time is over.
func (n *Node) tokensToImport(recs []*kvdv1.TokenRecord) (out []*kvdv1.TokenRecord, err error) {
	for _, rec := range recs {
		raw, err := proto.Marshal(rec)
		if err == nil {
			_, err = decodeToken([]byte(rec.GetInfo().GetId()), raw)
		}
		if err != nil || rec.GetInfo().GetName() == "" {
			return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "a token of the backup can not be one: id %q, name %q", rec.GetInfo().GetId(), rec.GetInfo().GetName())
		}
		same, other := false, false
		for _, have := range n.tokens.records() {
			switch {
			case proto.Equal(have, rec):
				same = true
			case have.GetInfo().GetId() == rec.GetInfo().GetId() || have.GetInfo().GetName() == rec.GetInfo().GetName():
				other = true
			}
		}
		if other {
			return nil, failTokenExists(rec)
		}
		if !same && !(&token{rec}).expired(n.cfg.Clock.Now().UnixMilli()) {
			out = append(out, rec)
		}
	}
	if have := len(*n.tokens.known.Load()); have+len(out) > maxTokens {
		return nil, fail(kvdv1.ErrorDetail_REASON_EXHAUSTED, "there are %d tokens, and %d are to be made: the limit is %d", have, len(out), maxTokens)
	}
	return out, nil
}

func (n *Node) importNamespace(ctx context.Context, ns *kvdv1.NamespaceInfo) error {
	cmd := &kvdv1.Command{LeaderUnixMs: n.cfg.Clock.Now().UnixMilli(), Op: &kvdv1.Command_Namespace{Namespace: &kvdv1.NamespaceOp{Create: ns}}}
	result, _, err := n.propose(ctx, 0, n.host.Group(raft.GroupID(0)), cmd)
	if err != nil {
		return err
	}
	if r, ok := result.(namespaceResult); !ok {
		return fail(kvdv1.ErrorDetail_REASON_OUTCOME_UNKNOWN, "namespace %s may or may not have been made: list the namespaces", ns.GetName())
	} else if !sameNamespace(r.info, ns) {
		return fail(kvdv1.ErrorDetail_REASON_ALREADY_EXISTS, "namespace %s was made meanwhile, with other settings", ns.GetName())
	}
	return nil
}

// checkValue refuses a value that is too large.
func (n *Node) checkValue(value []byte) error {
	if len(value) > n.cfg.MaxValueBytes {
		return fail(kvdv1.ErrorDetail_REASON_VALUE_TOO_LARGE, "the value has %d bytes, the limit is %d: split it, or raise max-value-bytes on every node", len(value), n.cfg.MaxValueBytes)
	}
	return nil
}
