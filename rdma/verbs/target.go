package verbs

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// target implements rdma.Target.
type target struct {
	p     Provider // with defaults
	cfg   rdma.TargetConfig
	log   *slog.Logger
	fleet *fleet

	connections atomic.Int64
	accepted    atomic.Uint64
	evicted     atomic.Uint64
	counters    counterTable
	closing     sync.Once
	work        sync.WaitGroup // endpoints being taken down by what arrived

	// topo is read-locked by whoever makes or releases objects on devices, and locked
	// while the set of devices changes. Lock order: topo, domain.life, then the others,
	// which are never held together.
	topo struct {
		sync.RWMutex
		nics map[*nic]*targetNIC
	}
	mu struct {
		sync.Mutex
		closed  bool
		domains map[*domain]struct{}
	}
}

var (
	_ rdma.Target  = (*target)(nil)
	_ rdma.Pinning = (*target)(nil)
	_ RailCounter  = (*target)(nil)
)

// NewTarget opens the devices. It returns ErrUnsupported, with the reasons, where none can
// be used.
func (p Provider) NewTarget(cfg rdma.TargetConfig) (rdma.Target, error) {
	t := &target{p: p.withDefaults(), cfg: cfg, log: orDiscard(cfg.Logger)}
	t.topo.nics = make(map[*nic]*targetNIC)
	t.mu.domains = make(map[*domain]struct{})
	var err error
	if t.fleet, err = openFleet(p, t.log, t); err != nil {
		return nil, err
	}
	return t, nil
}

var errTargetClosed = fmt.Errorf("%w: verbs: target", rdma.ErrClosed)

// NewDomain implements rdma.Target: a protection domain on each device.
func (t *target) NewDomain(name string) (rdma.Domain, error) {
	t.topo.RLock()
	defer t.topo.RUnlock()
	d := &domain{t: t, name: name, parts: make(map[*nic]*ibv.PD)}
	d.mu.regions = make(map[rdma.RegionID]*region)
	d.mu.endpoints = make(map[*endpoint]struct{})
	var errs []error
	for n := range t.topo.nics {
		pd, err := n.ctx.NewPD()
		if err != nil {
			errs = append(errs, fmt.Errorf("%w: verbs: %s has a limit of %d protection domains: %w", rdma.ErrExhausted, n.name, n.attr.MaxPD, err))
			continue
		}
		d.parts[n] = pd
	}
	if len(d.parts) == 0 && len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	for _, err := range errs {
		t.log.Warn("verbs: domain without a device", "domain", name, "err", err)
	}
	t.mu.Lock()
	if !t.mu.closed {
		t.mu.domains[d] = struct{}{}
		t.mu.Unlock()
		return d, nil
	}
	t.mu.Unlock()
	for _, pd := range d.parts {
		_ = pd.Close() // empty
	}
	return nil, errTargetClosed
}

// Stats implements rdma.Target. Reads stays 0: devices serve them. A connection counts
// from Accept on, for from then on it can be read through.
func (t *target) Stats() rdma.TargetStats {
	return rdma.TargetStats{Connections: t.connections.Load(), Accepted: t.accepted.Load()}
}

// Close implements rdma.Target. Whoever comes second waits for the first.
func (t *target) Close() (err error) {
	t.closing.Do(func() { err = t.close() })
	return err
}

func (t *target) close() error {
	t.mu.Lock()
	t.mu.closed = true
	domains := make([]*domain, 0, len(t.mu.domains))
	for d := range t.mu.domains {
		domains = append(domains, d)
	}
	t.mu.Unlock()
	var wg sync.WaitGroup
	errs := make([]error, len(domains))
	for i, d := range domains {
		wg.Go(func() { errs[i] = d.Close() })
	}
	wg.Wait()
	t.fleet.close()
	t.work.Wait()
	return errors.Join(errs...)
}

func (t *target) forget(d *domain) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.mu.domains, d)
}

func (t *target) allDomains() []*domain {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*domain, 0, len(t.mu.domains))
	for d := range t.mu.domains {
		out = append(out, d)
	}
	return out
}

// nicAdded makes every domain, with its regions, exist on the device.
func (t *target) nicAdded(n *nic) error {
	t.topo.Lock()
	defer t.topo.Unlock()
	tn, err := newTargetNIC(t, n)
	if err != nil {
		return err
	}
	for _, d := range t.allDomains() {
		if err := d.extend(n); err != nil {
			t.log.Error("verbs: domain not on a device that came", "domain", d.name, "device", n.name, "err", err)
		}
	}
	t.topo.nics[n] = tn
	return nil
}

// nicRemoved takes every domain off the device.
func (t *target) nicRemoved(n *nic, why error) {
	t.topo.Lock()
	defer t.topo.Unlock()
	tn := t.topo.nics[n]
	if tn == nil {
		return
	}
	delete(t.topo.nics, n)
	tn.dropRails(func(*servedRail) bool { return true }, why)
	for _, d := range t.allDomains() {
		d.retract(n)
	}
	tn.close()
}

// nicChanged ends the rails whose port or GID is not usable any more.
func (t *target) nicChanged(n *nic) {
	t.topo.RLock()
	defer t.topo.RUnlock()
	if tn := t.topo.nics[n]; tn != nil {
		specs := n.specs()
		tn.dropRails(func(r *servedRail) bool { return !stillUsable(specs, r.spec.port, r.gid) },
			fmt.Errorf("%w: verbs: the port of %s, or its address, went away", rdma.ErrConnLost, n.name))
	}
}

// stillUsable tells whether the rails of a device still have this port with this GID.
func stillUsable(specs []railSpec, port int, gid ibv.GIDEntry) bool {
	for _, s := range specs {
		if s.port != port {
			continue
		}
		for _, g := range s.present {
			if g.Index == gid.Index && g.GID == gid.GID {
				return true
			}
		}
	}
	return false
}

// targetNIC is the serving side of one device: the queue for what its clients say, and
// the budget of queue pairs.
type targetNIC struct {
	t  *target
	n  *nic
	cq *ibv.CQ

	listening sync.WaitGroup
	quit      atomic.Bool

	mu struct {
		sync.Mutex
		lastID uint64
		rails  map[uint64]*servedRail
	}
}

// newTargetNIC makes the completion queue: it holds all that the queue pairs within the
// budget can have posted.
func newTargetNIC(t *target, n *nic) (*targetNIC, error) {
	depth := (t.p.MaxQueuePairs + 8) * (recvSlots + messageSlots)
	if n.attr.MaxCQE > 0 && depth > n.attr.MaxCQE {
		depth = n.attr.MaxCQE
	}
	cq, err := n.ctx.NewCQ(ibv.CQConfig{Depth: depth, Channel: true})
	if err != nil {
		return nil, fmt.Errorf("%w: verbs: %w", rdma.ErrExhausted, err)
	}
	tn := &targetNIC{t: t, n: n, cq: cq}
	tn.mu.rails = make(map[uint64]*servedRail)
	tn.listening.Go(tn.listen)
	return tn, nil
}

// limit is how many queue pairs the device may have: the setting, or what the queue
// holds where the device has none that large.
func (tn *targetNIC) limit() int {
	return min(tn.t.p.MaxQueuePairs, max(tn.cq.Depth()/(recvSlots+messageSlots), 1))
}

func (tn *targetNIC) close() {
	tn.quit.Store(true)
	if err := tn.cq.SetDeadline(past); err != nil {
		tn.t.log.Error("verbs: completion queue not woken", "device", tn.n.name, "err", err)
	}
	tn.listening.Wait()
	if err := tn.cq.Close(); err != nil {
		tn.t.log.Error("verbs: completion queue not released", "device", tn.n.name, "err", err)
	}
}

// listen hears what clients say. READs do not pass here.
func (tn *targetNIC) listen() {
	wcs := make([]ibv.Completion, 64)
	for !tn.quit.Load() {
		if err := tn.cq.Arm(); err != nil {
			tn.t.log.Error("verbs: completion queue does not wait", "device", tn.n.name, "err", err)
			tn.n.fatal.Store(true) // the fleet looks at it with its next scan
			return
		}
		for {
			k, err := tn.cq.Poll(wcs, 0)
			for _, wc := range wcs[:max(k, 0)] {
				tn.hear(wc)
			}
			if err != nil || k == 0 {
				break
			}
		}
		if err := tn.cq.WaitEvent(); err != nil {
			if !tn.quit.Load() && !errors.Is(err, ibv.ErrClosed) {
				tn.t.log.Error("verbs: completion queue does not wait", "device", tn.n.name, "err", err)
			}
			return
		}
	}
}

func (tn *targetNIC) hear(wc ibv.Completion) {
	tn.mu.Lock()
	r := tn.mu.rails[wc.ID&idNumber]
	tn.mu.Unlock()
	if r == nil {
		return // of a queue pair that is gone
	}
	switch {
	case wc.Status != ibv.WCSuccess:
		// Its queue pair is in error: the client did what it may not, or is gone.
		tn.t.work.Go(func() {
			r.ep.railEnded(r, fmt.Errorf("%w: verbs: queue pair of %s in error: %s", rdma.ErrConnLost, tn.n.name, wc.Status))
		})
	case wc.ID&idMessage != 0:
		r.sent()
	case wc.ID&idRecv != 0:
		r.repost()
		r.lastUsed.Store(nowNanos())
		switch m, value := parseMessage(wc.Imm); m {
		case msgHello, 0: // 0 by rdma_cm: it came, or reads
			r.ep.connected()
		case msgBye:
			tn.t.work.Go(func() { r.ep.left(r, bye(value)) })
		}
	}
}

// enter gives a rail its id, within the budget. Where that is used up, the connection
// which was idle for the longest time makes room.
func (tn *targetNIC) enter(r *servedRail) error {
	for {
		tn.mu.Lock()
		if len(tn.mu.rails) < tn.limit() {
			tn.mu.lastID++
			r.id = tn.mu.lastID
			tn.mu.rails[r.id] = r
			tn.mu.Unlock()
			return nil
		}
		var victim *servedRail
		for _, o := range tn.mu.rails {
			if o.ep != r.ep && o.ep.isStarted() && (victim == nil || o.lastUsed.Load() < victim.lastUsed.Load()) {
				victim = o
			}
		}
		tn.mu.Unlock()
		if victim == nil {
			return fmt.Errorf("%w: verbs: %s: all %d queue pairs of MaxQueuePairs are being made", rdma.ErrExhausted, tn.n.name, tn.limit())
		}
		tn.t.evicted.Add(1)
		tn.t.log.Warn("verbs: limit of queue pairs reached, the connection idle for longest is closed: its client reads by another transport",
			"device", tn.n.name, "limit", tn.limit(), "closed", victim.ep.peer.Name, "session", victim.ep.peer.Session, "for", r.ep.peer.Name)
		victim.ep.end(byeBudget, true)
	}
}

func (tn *targetNIC) leave(r *servedRail) {
	tn.mu.Lock()
	defer tn.mu.Unlock()
	delete(tn.mu.rails, r.id)
}

// dropRails takes down the rails that are chosen, and with the last one of an endpoint
// that too.
func (tn *targetNIC) dropRails(chosen func(*servedRail) bool, why error) {
	tn.mu.Lock()
	var drop []*servedRail
	for _, r := range tn.mu.rails {
		if chosen(r) {
			drop = append(drop, r)
		}
	}
	tn.mu.Unlock()
	for _, r := range drop {
		r.farewell(byeRail)
	}
	for _, r := range drop {
		r.ep.railEnded(r, why)
	}
}
