package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// Admin does what an operator does. It needs no namespace and no session, so it
// works while the cluster can serve nobody else.
type Admin struct {
	cfg  Config
	pool *pool
	// known gives addresses beyond the endpoints; may be nil.
	known   func() []string
	leaders shardLeaders
	mu      struct {
		sync.Mutex
		members map[uint64]string // addresses by node id
		cluster string            // that the endpoints agreed on; "": not asked yet
	}
}

// NodeStatus is one node's answer, or why there is none.
type NodeStatus struct {
	NodeID  uint64 // 0: never learnt
	Address string
	Status  *kvdv1.StatusResponse // nil with Err
	Err     error
}

// DialAdmin opens an Admin. It makes no connection yet. Of cfg only Endpoints,
// ClusterID, the timeouts, Token and TLS matter. With a ClusterID nothing is asked of a
// node of another cluster, nor changed there: that is an ErrWrongCluster. Without one the
// endpoints are asked at the first call, as by Dial, and must be of one cluster.
func DialAdmin(cfg Config) (*Admin, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	p, err := newPool(cfg)
	if err != nil {
		return nil, err
	}
	return newAdmin(cfg, p, nil), nil
}

func newAdmin(cfg Config, p *pool, known func() []string) *Admin {
	a := &Admin{cfg: cfg, pool: p, known: known}
	a.mu.members = make(map[uint64]string)
	return a
}

// Close ends its connections.
func (a *Admin) Close() error {
	a.pool.close()
	return nil
}

func (a *Admin) withDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, a.cfg.CallTimeout)
}

// addresses lists where nodes may be: the endpoints first, as configured.
func (a *Admin) addresses() []string {
	list := slices.Clone(a.cfg.Endpoints)
	if a.known != nil {
		list = append(list, a.known()...)
	}
	a.mu.Lock()
	for _, addr := range a.mu.members {
		list = append(list, addr)
	}
	a.mu.Unlock()
	seen := make(map[string]bool)
	return slices.DeleteFunc(list, func(addr string) bool {
		if seen[addr] {
			return true
		}
		seen[addr] = true
		return false
	})
}

// Status asks every endpoint and every member that they name, in order of node id.
// A node that does not answer has Err; the error is set only where none did.
func (a *Admin) Status(ctx context.Context) ([]NodeStatus, error) {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	byAddr := make(map[string]NodeStatus)
	for {
		var ask []string
		for _, addr := range a.addresses() {
			if _, done := byAddr[addr]; !done {
				ask = append(ask, addr)
			}
		}
		if len(ask) == 0 {
			break
		}
		for _, s := range a.askStatus(ctx, ask) {
			byAddr[s.Address] = s
		}
	}
	return a.mergeStatus(byAddr)
}

// askStatus asks the nodes at once.
func (a *Admin) askStatus(ctx context.Context, addrs []string) []NodeStatus {
	answers := make([]NodeStatus, len(addrs))
	var wg sync.WaitGroup
	for i, addr := range addrs {
		wg.Go(func() {
			answers[i] = NodeStatus{Address: addr}
			answers[i].Status, answers[i].Err = a.statusOf(ctx, addr)
			answers[i].NodeID = answers[i].Status.GetNodeId()
		})
	}
	wg.Wait()
	return answers
}

func (a *Admin) statusOf(ctx context.Context, addr string) (*kvdv1.StatusResponse, error) {
	r, err := a.pool.get(addr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, a.cfg.ConnectTimeout)
	defer cancel()
	resp, err := r.cluster.Status(ctx, &kvdv1.StatusRequest{})
	if err != nil {
		return nil, rpcFailed(addr, err)
	}
	if want := a.want(); want != "" && resp.GetClusterId() != want {
		return nil, &rpcError{class: ErrWrongCluster, text: fmt.Sprintf("node at %s: %v: it is of cluster %s: want %s",
			addr, ErrWrongCluster, resp.GetClusterId(), want)}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, m := range resp.GetMembers() {
		if m.GetAddress() != "" {
			a.mu.members[m.GetNodeId()] = m.GetAddress()
		}
	}
	return resp, nil
}

// mergeStatus keeps one answer for each node: it may have been asked under two
// addresses.
func (a *Admin) mergeStatus(byAddr map[string]NodeStatus) ([]NodeStatus, error) {
	a.mu.Lock()
	idOf := make(map[string]uint64)
	for id, addr := range a.mu.members {
		idOf[addr] = id
	}
	a.mu.Unlock()
	answered := make(map[uint64]bool)
	var list []NodeStatus
	var failures []error
	for _, addr := range a.addresses() {
		s, ok := byAddr[addr]
		if ok && s.Err == nil && !answered[s.NodeID] {
			answered[s.NodeID] = true
			list = append(list, s)
		}
	}
	for _, addr := range a.addresses() {
		s, ok := byAddr[addr]
		if !ok || s.Err == nil {
			continue
		}
		s.NodeID = idOf[addr]
		if s.NodeID == 0 || !answered[s.NodeID] {
			list = append(list, s)
			failures = append(failures, s.Err)
		}
	}
	slices.SortStableFunc(list, func(x, y NodeStatus) int { return cmp.Compare(x.NodeID-1, y.NodeID-1) })
	if len(answered) == 0 {
		return list, dialFailed(failures)
	}
	return list, nil
}

// anywhere calls f at one node after the other until one does not fail for being
// the wrong one or unreachable, or until ctx ends.
func (a *Admin) anywhere(ctx context.Context, op string, f func(ctx context.Context, r *remote) error) error {
	pause := a.cfg.RetryMin
	var hinted string
	for {
		var failures []error
		addrs := a.addresses()
		if hinted != "" {
			addrs = append([]string{hinted}, addrs...)
			hinted = ""
		}
		for _, addr := range addrs {
			err := a.at(ctx, addr, f)
			if err == nil {
				return nil
			}
			failures = append(failures, err)
			if id := leaderHint(err); id != 0 {
				hinted = a.addressOf(ctx, id, addr)
			}
			// What one endpoint is not, another may be; what a node refuses, all do.
			if permanent(err) && !errors.Is(err, ErrIncompatible) || errors.Is(err, ErrOutcomeUnknown) || errors.Is(err, ErrExhausted) {
				return fmt.Errorf("%s: %w", op, err)
			}
			if ctx.Err() != nil {
				break
			}
			if hinted != "" {
				break
			}
		}
		hopeless := !slices.ContainsFunc(failures, func(err error) bool { return !errors.Is(err, ErrIncompatible) })
		if ctx.Err() != nil || hopeless || !sleep(ctx, pause) {
			return fmt.Errorf("%s: %w", op, adminGaveUp(ctx, failures))
		}
		pause = min(2*pause, a.cfg.RetryMax)
	}
}

func adminGaveUp(ctx context.Context, failures []error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return context.Canceled
	}
	err := dialFailed(failures)
	return &rpcError{class: errors.Unwrap(err), text: strings.TrimPrefix(err.Error(), "no endpoint accepted a session: ")}
}

func (a *Admin) at(ctx context.Context, addr string, f func(ctx context.Context, r *remote) error) error {
	return a.atFor(ctx, addr, a.cfg.ConnectTimeout, f)
}

// atFor gives the call so much time.
func (a *Admin) atFor(ctx context.Context, addr string, limit time.Duration, f func(ctx context.Context, r *remote) error) error {
	r, err := a.pool.get(addr)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	// What an operator asks for does not say of which cluster, so the node is asked first.
	if err := a.adopt(ctx); err != nil {
		return err
	}
	if a.want() != "" {
		if _, err := a.statusOf(ctx, addr); err != nil {
			return err
		}
	}
	return f(ctx, r)
}

// addressOf is where node id may be reached; via is asked where nobody said so yet.
func (a *Admin) addressOf(ctx context.Context, id uint64, via string) string {
	for range 2 {
		a.mu.Lock()
		addr := a.mu.members[id]
		a.mu.Unlock()
		if addr != "" {
			return addr
		}
		if _, err := a.statusOf(ctx, via); err != nil {
			return ""
		}
	}
	return ""
}

// CreateNamespace makes a namespace. Errors: ErrAlreadyExists, ErrInvalid,
// ErrUnavailable, ErrOutcomeUnknown.
func (a *Admin) CreateNamespace(ctx context.Context, spec NamespaceSpec) (Namespace, error) {
	if spec.Name == "" || spec.DefaultTTL < 0 {
		return Namespace{}, fmt.Errorf("create namespace: %w: want a name and a TTL of 0 or more", ErrInvalid)
	}
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	unsure := false
	var made *kvdv1.NamespaceInfo
	err := a.anywhere(ctx, "create namespace", func(ctx context.Context, r *remote) error {
		resp, err := r.cluster.CreateNamespace(ctx, &kvdv1.CreateNamespaceRequest{
			Name: spec.Name, Immutable: spec.Immutable, TwoSidedOnly: spec.TwoSidedOnly,
			DefaultTtlMs: uint64(spec.DefaultTTL / time.Millisecond), QuotaBytes: spec.QuotaBytes,
			RequireTls: spec.RequireTLS, PlaintextReads: spec.PlaintextReads,
		})
		if err != nil {
			err = rpcFailed(r.addr, err)
			unsure = unsure || mayHaveApplied(err)
			return registrationFailed(err)
		}
		made = resp.GetNamespace()
		return nil
	})
	switch {
	case err == nil:
		return decodeNamespace(made), nil
	case unsure && errors.Is(err, ErrAlreadyExists):
		return a.ownNamespace(ctx, spec, err)
	case unsure:
		return Namespace{}, fmt.Errorf("create namespace: %w (%v)", ErrOutcomeUnknown, err)
	}
	return Namespace{}, err
}

// ownNamespace is the namespace of that name if it is what an earlier try, whose
// answer was lost, would have made.
func (a *Admin) ownNamespace(ctx context.Context, spec NamespaceSpec, exists error) (Namespace, error) {
	all, err := a.Namespaces(ctx)
	if err != nil {
		return Namespace{}, err
	}
	for _, n := range all {
		if n.Name == spec.Name && n.Immutable == spec.Immutable && n.OneSided == !spec.TwoSidedOnly &&
			n.DefaultTTL == spec.DefaultTTL.Truncate(time.Millisecond) && n.QuotaBytes == spec.QuotaBytes &&
			n.RequireTLS == spec.RequireTLS && n.PlaintextReads == spec.PlaintextReads {
			return n, nil
		}
	}
	return Namespace{}, exists
}

// Namespaces lists them by name.
func (a *Admin) Namespaces(ctx context.Context) ([]Namespace, error) {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	var list []Namespace
	err := a.anywhere(ctx, "namespaces", func(ctx context.Context, r *remote) error {
		resp, err := r.cluster.ListNamespaces(ctx, &kvdv1.ListNamespacesRequest{})
		if err != nil {
			return rpcFailed(r.addr, err)
		}
		list = list[:0]
		for _, n := range resp.GetNamespaces() {
			list = append(list, decodeNamespace(n))
		}
		return nil
	})
	slices.SortFunc(list, func(x, y Namespace) int { return strings.Compare(x.Name, y.Name) })
	return list, err
}

func decodeNamespace(n *kvdv1.NamespaceInfo) Namespace {
	ns := Namespace{
		ID: n.GetId(), Name: n.GetName(), Immutable: n.GetImmutable(), OneSided: n.GetOneSided(),
		DefaultTTL: time.Duration(n.GetDefaultTtlMs()) * time.Millisecond, QuotaBytes: n.GetQuotaBytes(),
		RequireTLS: n.GetRequireTls(), PlaintextReads: n.GetPlaintextReads(),
	}
	switch n.GetDefaultLevel() {
	case kvdv1.ReadLevel_READ_LEVEL_SESSION:
		ns.DefaultLevel = Session
	case kvdv1.ReadLevel_READ_LEVEL_STALE:
		ns.DefaultLevel = Stale
	default:
		ns.DefaultLevel = Linearizable
	}
	return ns
}

// TransferLeader moves a shard's leadership to another of its voters; shard 0 is
// the cluster's own. It tries until ctx ends. Errors: ErrInvalid (the node is none of the
// voters), ErrUnavailable (the node can not lead now, or did not take over), ErrDenied.
func (a *Admin) TransferLeader(ctx context.Context, shard uint32, toNode uint64) error {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	var said error // by the leader, why not now
	err := a.anywhere(ctx, "transfer leader", func(ctx context.Context, r *remote) error {
		_, err := r.cluster.TransferLeader(ctx, &kvdv1.TransferLeaderRequest{Shard: shard, ToNode: toNode})
		err = rpcFailed(r.addr, err)
		if reasonOf(err) == kvdv1.ErrorDetail_REASON_NOT_READY {
			said = err
		}
		return err
	})
	if errors.Is(err, ErrUnavailable) && said != nil {
		return fmt.Errorf("transfer leader: %w", said)
	}
	return err
}

// admin uses the Client's connections.
func (c *Client) admin() *Admin {
	cfg := c.cfg
	if k := c.cluster(); k != nil {
		cfg.ClusterID = k.id // a stray endpoint is asked for nothing
	}
	return newAdmin(cfg, c.pool, func() []string {
		var list []string
		for _, n := range c.sortedNodes() {
			list = append(list, n.addr())
		}
		return list
	})
}

// Status asks every known node. See Admin.Status.
func (c *Client) Status(ctx context.Context) ([]NodeStatus, error) { return c.admin().Status(ctx) }

// CreateNamespace: see Admin.CreateNamespace.
func (c *Client) CreateNamespace(ctx context.Context, spec NamespaceSpec) (Namespace, error) {
	return c.admin().CreateNamespace(ctx, spec)
}

// Namespaces: see Admin.Namespaces.
func (c *Client) Namespaces(ctx context.Context) ([]Namespace, error) {
	return c.admin().Namespaces(ctx)
}
