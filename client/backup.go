package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/layout"
)

// ErrExportGone: the node that kept an export does not any more, or is gone itself. Open
// another one and begin at its first key. It is an ErrUnavailable too.
var ErrExportGone = fmt.Errorf("the export is gone: %w", ErrUnavailable)

const (
	// pageStep bounds a call that carries a page, smallStep one that carries little.
	pageStep  = 15 * time.Second
	smallStep = 5 * time.Second
	// lostAfter is how long a node that keeps an export may be unreachable.
	lostAfter = 10 * time.Second
)

// BackupCluster returns what the cluster itself holds, as its leader confirms it now:
// namespaces, and tokens with the hashes of their secrets.
func (a *Admin) BackupCluster(ctx context.Context) (*kvdv1.BackupCluster, error) {
	var resp *kvdv1.OpenExportResponse
	err := a.atLeader(ctx, "read the cluster", 0, smallStep, func(ctx context.Context, r *remote) (err error) {
		resp, err = kvdv1.NewBackupClient(r.cc).OpenExport(ctx, &kvdv1.OpenExportRequest{})
		return rpcFailed(r.addr, err)
	})
	return resp.GetCluster(), err
}

// Export is a shard's content at one index, kept by one node.
type Export struct {
	// Shard says which shard, at which index and term, and how many keys and bytes.
	Shard *kvdv1.BackupShard

	a    *Admin
	addr string
	id   uint64
	ns   uint32 // the last key that was read
	key  []byte
}

// OpenExport fixes a shard's content: every write that was acknowledged before the call
// is in it. While the leader keeps too many exports it waits for one to end.
func (a *Admin) OpenExport(ctx context.Context, shard uint32) (*Export, error) {
	e := &Export{a: a}
	err := a.atLeader(ctx, fmt.Sprintf("export shard %d", shard), shard, smallStep, func(ctx context.Context, r *remote) error {
		resp, err := kvdv1.NewBackupClient(r.cc).OpenExport(ctx, &kvdv1.OpenExportRequest{Shard: shard})
		e.Shard, e.addr, e.id = resp.GetShard(), r.addr, resp.GetExportId()
		return rpcFailed(r.addr, err)
	})
	return e, err
}

// Next returns the next page, in order of namespace and key; none, at the end. It tries
// again where the node can not be reached for a while. Errors: ErrExportGone, those of ctx.
func (e *Export) Next(ctx context.Context) ([]*kvdv1.BackupItem, error) {
	r, err := e.a.pool.get(e.addr)
	if err != nil {
		return nil, err
	}
	pauses := e.a.cfg.newPauses(e.id, e.a.cfg.RetryMin, e.a.cfg.RetryMax, 0.5)
	for began := time.Now(); ; {
		call, cancel := context.WithTimeout(ctx, pageStep)
		resp, err := kvdv1.NewBackupClient(r.cc).ReadExport(call, &kvdv1.ReadExportRequest{ExportId: e.id, AfterNamespace: e.ns, AfterKey: e.key})
		cancel()
		if err == nil {
			items := resp.GetItems()
			if n := len(items); n > 0 {
				e.ns, e.key = items[n-1].GetNamespaceId(), items[n-1].GetKey()
			}
			return items, nil
		}
		err = rpcFailed(e.addr, err)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case reasonOf(err) == kvdv1.ErrorDetail_REASON_SESSION_GONE || errors.Is(err, ErrUnavailable) && time.Since(began) > lostAfter:
			return nil, fmt.Errorf("shard %d: %w (%v)", e.Shard.GetShard(), ErrExportGone, err)
		case !errors.Is(err, ErrUnavailable):
			return nil, fmt.Errorf("export shard %d: %w", e.Shard.GetShard(), err)
		}
		sleep(ctx, max(pauses.next(), retryAfter(err)))
	}
}

// Close lets the node give it up. Without it the node does after some minutes.
func (e *Export) Close(ctx context.Context) {
	r, err := e.a.pool.get(e.addr)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, e.a.cfg.ConnectTimeout)
	defer cancel()
	_, _ = kvdv1.NewBackupClient(r.cc).CloseExport(ctx, &kvdv1.CloseExportRequest{ExportId: e.id}) // best effort
}

// Importer puts the content of a backup into a cluster.
type Importer struct {
	a       *Admin
	cluster *kvdv1.BackupCluster
}

// NewImporter asks the cluster how it spreads keys over shards.
func (a *Admin) NewImporter(ctx context.Context) (*Importer, error) {
	c, err := a.BackupCluster(ctx)
	return &Importer{a: a, cluster: c}, err
}

// Cluster is what the cluster held when the Importer was made.
func (m *Importer) Cluster() *kvdv1.BackupCluster { return m.cluster }

// Keys counts the keys that each shard holds now, by its leader's word. It stops at the
// first shard that has any unless all are wanted.
func (m *Importer) Keys(ctx context.Context, all bool) (keys uint64, err error) {
	for shard := uint32(1); shard <= m.cluster.GetShards(); shard++ {
		e, err := m.a.OpenExport(ctx, shard)
		if err != nil {
			return 0, err
		}
		e.Close(ctx)
		if keys += e.Shard.GetKeys(); keys > 0 && !all {
			break
		}
	}
	return keys, nil
}

// Prepare makes namespaces and tokens, and returns the ids that the namespaces have in
// this cluster, by name. It may be repeated.
func (m *Importer) Prepare(ctx context.Context, namespaces []*kvdv1.NamespaceInfo, tokens []*kvdv1.TokenRecord) (map[string]uint32, error) {
	var resp *kvdv1.ImportClusterResponse
	err := m.a.atLeader(ctx, "make the namespaces", 0, pageStep, func(ctx context.Context, r *remote) (err error) {
		resp, err = kvdv1.NewBackupClient(r.cc).ImportCluster(ctx, &kvdv1.ImportClusterRequest{Namespaces: namespaces, Tokens: tokens})
		return rpcFailed(r.addr, err)
	})
	ids := map[string]uint32{}
	for _, ns := range resp.GetNamespaces() {
		ids[ns.GetName()] = ns.GetId()
	}
	return ids, err
}

// Split sorts items by the shards that their keys have in this cluster.
func (m *Importer) Split(items []*kvdv1.BackupItem) map[uint32][]*kvdv1.BackupItem {
	split := map[uint32][]*kvdv1.BackupItem{}
	for _, it := range items {
		shard := layout.HashKey(m.cluster.GetHashSeed(), it.GetKey()).Shard(m.cluster.GetShards())
		split[shard] = append(split[shard], it)
	}
	return split
}

// Import puts items of one shard, as Split returned them, where they are absent. It may
// be repeated; what was put before counts as same then.
func (m *Importer) Import(ctx context.Context, shard uint32, items []*kvdv1.BackupItem) (*kvdv1.ImportResponse, error) {
	var resp *kvdv1.ImportResponse
	err := m.a.atLeader(ctx, fmt.Sprintf("restore into shard %d", shard), shard, pageStep, func(ctx context.Context, r *remote) (err error) {
		resp, err = kvdv1.NewBackupClient(r.cc).Import(ctx, &kvdv1.ImportRequest{Items: items})
		return rpcFailed(r.addr, err)
	})
	return resp, err
}

// shardLeaders remembers where the leaders were last.
type shardLeaders struct {
	sync.Mutex
	addr map[uint32]string
}

func (l *shardLeaders) get(shard uint32) string {
	l.Lock()
	defer l.Unlock()
	return l.addr[shard]
}

func (l *shardLeaders) set(shard uint32, addr string) {
	l.Lock()
	defer l.Unlock()
	if l.addr == nil {
		l.addr = map[uint32]string{}
	}
	l.addr[shard] = addr
}

// atLeader calls f at the node that leads the shard, again and again until it returns nil
// or an error that waiting does not cure, or ctx ends. f must be one that may be
// repeated although its outcome is unknown. Without a deadline in ctx Config.CallTimeout
// bounds it, and limit each call of f.
func (a *Admin) atLeader(ctx context.Context, op string, shard uint32, limit time.Duration, f func(ctx context.Context, r *remote) error) error {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	pauses := a.cfg.newPauses(uint64(shard), a.cfg.RetryMin, a.cfg.RetryMax, 0.5)
	next := a.leaders.get(shard)
	var last []error
	for tries := 0; ; tries++ {
		addrs := a.addresses()
		addr := next
		if addr == "" {
			addr = addrs[tries%len(addrs)]
		}
		err := a.atFor(ctx, addr, limit, f)
		if err == nil {
			a.leaders.set(shard, addr)
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = append(last, err)
			last = last[max(0, len(last)-len(addrs)):]
		}
		if permanent(err) && !errors.Is(err, ErrIncompatible) {
			return fmt.Errorf("%s: %w", op, err)
		}
		next = ""
		if id := leaderHint(err); id != 0 && tries%3 != 2 {
			if hinted := a.addressOf(ctx, id, addr); hinted != "" && hinted != addr {
				next = hinted
				if ctx.Err() == nil {
					continue
				}
			}
		}
		if errors.Is(err, ErrExhausted) || errors.Is(err, ErrReadOnly) {
			next = addr // it is the leader
		}
		hopeless := len(last) >= len(addrs) && !slices.ContainsFunc(last, func(err error) bool { return !errors.Is(err, ErrIncompatible) })
		if ctx.Err() != nil || hopeless || !sleep(ctx, max(pauses.next(), retryAfter(err))) {
			return fmt.Errorf("%s: %w", op, adminGaveUp(ctx, last))
		}
	}
}
