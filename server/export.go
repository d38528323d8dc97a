package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/dustin/go-humanize"

	"github.com/kvd-io/kvd/rdma"
)

// exporter exposes the arena through the transports: a protection domain for each
// namespace and transport, with the control table as region 0 and the namespace's
// chunks as the others.
type exporter struct {
	node    *Node
	targets []*target    // in the order of preference; fixed once open
	control *rdma.Memory // the arena's
	closing chan struct{}
	work    sync.WaitGroup // registrations beside the node's other work
	noHuge  sync.Once
	mu      struct {
		sync.Mutex
		domains map[domainKey]*domain
		// retired are domains on their way out, which may have chunks registered still.
		retired map[*domain]struct{}
		// chunks of all namespaces, also of those that have no domain yet.
		chunks map[uint32]map[rdma.RegionID]*rdma.Memory
		closed bool
	}
}

type target struct {
	name string
	rdma.Target
	// pins, where not nil, tells that registering takes long: it is done beside the work,
	// a few chunks at a time, and what can not be registered goes without.
	pins rdma.Pinning
	// slots bounds the registrations that run at a time.
	slots chan struct{}
}

// registrationsAtOnce of one target. The kernel pins pages on the caller's CPU, so more
// than a few only take it from the others.
const registrationsAtOnce = 4

func newTarget(name string, t rdma.Target) *target {
	pins, _ := t.(rdma.Pinning)
	return &target{name: name, Target: t, pins: pins, slots: make(chan struct{}, registrationsAtOnce)}
}

type domainKey struct {
	namespace uint32
	transport string
}

func newExporter(n *Node) *exporter {
	e := &exporter{node: n, closing: make(chan struct{})}
	e.mu.domains = map[domainKey]*domain{}
	e.mu.retired = map[*domain]struct{}{}
	e.mu.chunks = map[uint32]map[rdma.RegionID]*rdma.Memory{}
	return e
}

// open starts the targets. A provider that this host can not serve is left out, and said
// so; nothing is exposed yet.
func (e *exporter) open() error {
	cfg := &e.node.cfg
	var without []error
	log := slog.New(newCalmHandler(e.node.log.Handler())) // others can make a target complain
	for _, p := range cfg.Providers {
		t, err := p.NewTarget(rdma.TargetConfig{NodeID: e.node.id(), BootID: e.node.bootID, Logger: log.With("transport", p.Name())})
		if errors.Is(err, rdma.ErrUnsupported) {
			level := slog.LevelWarn
			if cfg.TransportsByDefault {
				level = slog.LevelInfo
			}
			e.node.log.Log(context.Background(), level, "transport is not served on this host", "transport", p.Name(), "reason", err)
			without = append(without, fmt.Errorf("%s: %w", p.Name(), err))
			continue
		}
		if err != nil {
			return fmt.Errorf("%w: transport %s: %w", ErrConfig, p.Name(), err)
		}
		e.targets = append(e.targets, newTarget(p.Name(), t))
	}
	return e.preflight(without)
}

// preflight finds out before anyone depends on it whether the arena can be pinned, and
// whether READs by a NIC, where they are demanded, can be served at all.
func (e *exporter) preflight(without []error) error {
	cfg, able := &e.node.cfg, false
	for _, t := range e.targets {
		if t.pins == nil {
			continue
		}
		able = true
		err := t.pins.TryPin(cfg.ArenaBytes)
		switch {
		case err == nil:
		case cfg.RequireRDMA:
			return fmt.Errorf("%w: RDMA is required, and %s can not register the arena of %s: %w", ErrConfig, t.name, humanize.IBytes(cfg.ArenaBytes), err)
		default:
			e.node.log.Warn("the whole arena can not be registered: what finds no room is read over other transports",
				"transport", t.name, "arena", humanize.IBytes(cfg.ArenaBytes), "reason", err)
		}
	}
	switch {
	case !cfg.RequireRDMA || able:
		return nil
	case len(without) == 0:
		return fmt.Errorf("%w: RDMA is required, and no transport of the configured ones (%v) is one: add verbs", ErrConfig, e.names())
	}
	return fmt.Errorf("%w: RDMA is required, and this host can not serve it: %w", ErrConfig, errors.Join(without...))
}

func (e *exporter) names() []string {
	var names []string
	for _, t := range e.targets {
		names = append(names, t.name)
	}
	return names
}

// onChunk registers a new chunk wherever its namespace has a domain. Targets that pin
// memory do so later: the chunk can be used as soon as the others have it. After an error
// the arena calls onChunkGone.
func (e *exporter) onChunk(namespace uint32, id rdma.RegionID, m *rdma.Memory) error {
	if err := m.HugeErr(); err != nil {
		e.noHuge.Do(func() {
			e.node.log.Warn("no huge pages: plain ones are used, which NICs read and register more slowly; reserve some by vm.nr_hugepages", "reason", err)
		})
	}
	e.mu.Lock()
	if e.mu.chunks[namespace] == nil {
		e.mu.chunks[namespace] = map[rdma.RegionID]*rdma.Memory{}
	}
	e.mu.chunks[namespace][id] = m
	domains := e.domainsLocked(namespace)
	e.mu.Unlock()
	for _, d := range domains {
		if err := d.add(id, m); err != nil {
			return fmt.Errorf("server: expose chunk %d of namespace %d by %s: %w", id, namespace, d.target.name, err)
		}
	}
	return nil
}

func (e *exporter) onChunkGone(namespace uint32, id rdma.RegionID) {
	e.mu.Lock()
	delete(e.mu.chunks[namespace], id)
	domains := e.domainsLocked(namespace)
	e.mu.Unlock()
	for _, d := range domains {
		if err := d.remove(id); err != nil {
			e.node.log.Error("a chunk could not be taken back", "namespace", namespace, "chunk", id, "transport", d.target.name, "err", err)
		}
	}
}

// domainsLocked are the namespace's domains, those on their way out too. Who is not
// among them yet finds in exporter.mu.chunks what there is.
func (e *exporter) domainsLocked(namespace uint32) []*domain {
	var all []*domain
	for key, d := range e.mu.domains {
		if key.namespace == namespace {
			all = append(all, d)
		}
	}
	for d := range e.mu.retired {
		if d.key.namespace == namespace {
			all = append(all, d)
		}
	}
	return all
}

// domain returns the namespace's domain of a transport; it is made when first asked
// for. Only who needs the same one waits for it.
func (e *exporter) domain(namespace uint32, transport string) (*domain, error) {
	key := domainKey{namespace, transport}
	e.mu.Lock()
	if d := e.mu.domains[key]; d != nil {
		e.mu.Unlock()
		<-d.made
		return d, d.failed
	}
	i := slices.IndexFunc(e.targets, func(t *target) bool { return t.name == transport })
	switch {
	case e.mu.closed:
		e.mu.Unlock()
		return nil, fmt.Errorf("%w: this node is stopping", rdma.ErrClosed)
	case i < 0:
		e.mu.Unlock()
		return nil, fmt.Errorf("%w: this node does not serve transport %q, only %v", rdma.ErrUnsupported, transport, e.names())
	}
	d := newDomain(e, key, e.targets[i], maps.Clone(e.mu.chunks[namespace]))
	e.mu.domains[key] = d
	e.mu.Unlock()

	if err := d.make(); err != nil {
		e.retire(d)
		return d, errors.Join(err, d.close())
	}
	return d, nil
}

// retire takes the domain out of use; its owner then closes it.
func (e *exporter) retire(d *domain) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.domains[d.key] == d {
		delete(e.mu.domains, d.key)
		e.mu.retired[d] = struct{}{}
	}
}

func (e *exporter) forget(d *domain) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.mu.retired, d)
}

// rotateKeys makes everything useless that was ever given out of a namespace: its
// connections end, and its memory is registered anew under other keys for those who
// authorize again. After it returned no READ by an old key or connection succeeds, but
// through a mapping of shared memory.
func (e *exporter) rotateKeys(namespace uint32) error {
	e.mu.Lock()
	domains := e.domainsLocked(namespace)
	e.mu.Unlock()
	var errs []error
	for _, d := range domains {
		<-d.made
		e.retire(d)
		if err := d.close(); err != nil {
			errs = append(errs, fmt.Errorf("server: keys of namespace %d by %s: %w", namespace, d.target.name, err))
		}
	}
	return errors.Join(errs...)
}

// retry registers again what was refused, where there may be room now.
func (e *exporter) retry() {
	e.mu.Lock()
	domains := slices.Collect(maps.Values(e.mu.domains))
	e.mu.Unlock()
	for _, d := range domains {
		d.retry()
	}
}

// accept answers a session's offer. Where the keys are rotated just now it does so in
// the domain with the new ones.
func (e *exporter) accept(ctx context.Context, d *domain, s *session, offer []byte) ([]byte, rdma.Endpoint, error) {
	peer := rdma.Peer{Name: s.client, Session: s.short()}
	answer, ep, err := d.Accept(ctx, peer, offer)
	if err == nil || !d.isClosed() {
		return answer, ep, err
	}
	if d, err = e.domain(d.key.namespace, d.key.transport); err != nil {
		return nil, nil, err
	}
	return d.Accept(ctx, peer, offer)
}

// stats of every target, by transport.
func (e *exporter) stats() map[string]rdma.TargetStats {
	out := map[string]rdma.TargetStats{}
	for _, t := range e.targets {
		out[t.name] = t.Stats()
	}
	return out
}

// regionCounts of every target, by transport.
func (e *exporter) regionCounts() map[string]regionCounts {
	out := map[string]regionCounts{}
	for _, t := range e.targets {
		out[t.name] = regionCounts{}
	}
	e.mu.Lock()
	domains := slices.Collect(maps.Values(e.mu.domains))
	e.mu.Unlock()
	for _, d := range domains {
		c := out[d.target.name]
		d.count(&c)
		out[d.target.name] = c
	}
	return out
}

// close ends all access to the arena's memory.
func (e *exporter) close() error {
	e.mu.Lock()
	if !e.mu.closed {
		e.mu.closed = true
		close(e.closing)
	}
	e.mu.Unlock()
	e.work.Wait()
	var err error
	for _, t := range e.targets {
		err = errors.Join(err, t.Close())
	}
	return err
}
