package simnic

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/kvd-io/kvd/rdma"
)

// target is the serving NIC of a host in one boot. Everything in it is guarded by
// the fabric's lock.
type target struct {
	f      *Fabric
	host   string
	boot   uint64
	frozen bool
	dead   bool
	closed bool
	holds  int

	left map[uint64][]byte // of a dead one whose memory is mapped: what it was, by key

	domains map[*domain]uint64 // to an id, for a fixed order
	keys    map[uint64]*region
	stats   rdma.TargetStats
}

var _ rdma.Target = (*target)(nil)

func (h host) NewTarget(cfg rdma.TargetConfig) (rdma.Target, error) {
	if len(h.name) > math.MaxUint8 {
		return nil, fmt.Errorf("simnic: host name of %d bytes: want at most %d", len(h.name), math.MaxUint8)
	}
	f := h.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.closed {
		return nil, fmt.Errorf("%w: fabric", rdma.ErrClosed)
	}
	if f.mu.targets[h.name] != nil {
		return nil, fmt.Errorf("%w: host %q has a target: close or kill it first", rdma.ErrExhausted, h.name)
	}
	t := &target{
		f: f, host: h.name, boot: cfg.BootID,
		domains: make(map[*domain]uint64), keys: make(map[uint64]*region),
	}
	f.mu.targets[h.name] = t
	return t, nil
}

func (t *target) NewDomain(name string) (rdma.Domain, error) {
	t.f.mu.Lock()
	defer t.f.mu.Unlock()
	if t.closed {
		return nil, fmt.Errorf("%w: target on %q", rdma.ErrClosed, t.host)
	}
	d := &domain{t: t, name: name, regions: make(map[rdma.RegionID]*region), pending: make(map[uint64]*endpoint)}
	t.domains[d] = t.f.idLocked()
	return d, nil
}

func (t *target) Stats() rdma.TargetStats {
	t.f.mu.Lock()
	defer t.f.mu.Unlock()
	return t.stats
}

func (t *target) Close() error {
	t.f.mu.Lock()
	defer t.f.mu.Unlock()
	t.closeLocked()
	return nil
}

func (t *target) closeLocked() {
	if t.closed {
		return
	}
	t.closed = true
	byID := func(a, b *domain) int { return int(t.domains[a]) - int(t.domains[b]) }
	for _, d := range slices.SortedFunc(maps.Keys(t.domains), byID) {
		d.closeLocked()
	}
	if t.f.mu.targets[t.host] == t {
		delete(t.f.mu.targets, t.host)
	}
}

// leaveMemoryLocked keeps the memory of a process that dies for those who have it mapped, who
// hear later that their connections have ended.
func (t *target) leaveMemoryLocked() {
	t.left = map[uint64][]byte{}
	for key, r := range t.keys {
		t.left[key] = make([]byte, len(r.mem))
		rdma.CopyExposed(t.left[key], r.mem)
	}
	for _, id := range slices.Sorted(maps.Keys(t.f.mu.conns)) {
		if c := t.f.mu.conns[id]; c.t == t {
			t.f.scheduleLocked(&c.ended, t.f.drawLocked(t.f.cfg.Ended))
		}
	}
}

type domain struct {
	t       *target
	name    string
	closed  bool
	regions map[rdma.RegionID]*region
	pending map[uint64]*endpoint // by token: accepted, not yet connected
}

// region is one registration. mem is nil once it is gone.
type region struct {
	d   *domain
	key uint64
	mem []byte
}

func (d *domain) Register(id rdma.RegionID, m *rdma.Memory) ([]byte, error) {
	f := d.t.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("%w: domain %q", rdma.ErrClosed, d.name)
	}
	if d.regions[id] != nil {
		return nil, fmt.Errorf("simnic: region %d of domain %q is registered already: want another id", id, d.name)
	}
	r := &region{d: d, key: f.mu.rnd.Uint64(), mem: m.Bytes()}
	for d.t.keys[r.key] != nil {
		r.key = f.mu.rnd.Uint64()
	}
	d.regions[id], d.t.keys[r.key] = r, r
	return encodeAttr(r.key), nil
}

func (d *domain) Deregister(id rdma.RegionID) error {
	d.t.f.mu.Lock()
	defer d.t.f.mu.Unlock()
	r := d.regions[id]
	if r == nil {
		return fmt.Errorf("%w: region %d of domain %q is not registered", rdma.ErrAccess, id, d.name)
	}
	d.deregisterLocked(id, r)
	return nil
}

func (d *domain) deregisterLocked(id rdma.RegionID, r *region) {
	delete(d.regions, id)
	delete(d.t.keys, r.key)
	r.mem = nil
}

func (d *domain) Accept(ctx context.Context, _ rdma.Peer, offer []byte) ([]byte, rdma.Endpoint, error) {
	nonce, err := decodeOffer(offer)
	if err != nil {
		return nil, nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, fmt.Errorf("simnic: accept: %w", err)
	}
	f := d.t.f
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case d.closed:
		return nil, nil, fmt.Errorf("%w: domain %q", rdma.ErrClosed, d.name)
	case d.t.frozen:
		return nil, nil, fmt.Errorf("%w: target on %q is frozen", rdma.ErrTimeout, d.t.host)
	}
	ep := &endpoint{d: d, id: f.idLocked(), nonce: nonce, token: f.mu.rnd.Uint64(), done: make(chan struct{})}
	for d.t.pendingLocked(ep.token) != nil {
		ep.token = f.mu.rnd.Uint64()
	}
	ep.expire.run = ep.expireLocked
	d.pending[ep.token] = ep
	f.mu.endpoints[ep.id] = ep
	f.scheduleLocked(&ep.expire, f.cfg.AcceptTimeout)
	return answer{nonce: nonce, boot: d.t.boot, token: ep.token, target: d.t.host}.encode(), ep, nil
}

// pendingLocked finds the endpoint that waits for a token.
func (t *target) pendingLocked(token uint64) *endpoint {
	for d := range t.domains {
		if ep := d.pending[token]; ep != nil {
			return ep
		}
	}
	return nil
}

func (d *domain) Close() error {
	d.t.f.mu.Lock()
	defer d.t.f.mu.Unlock()
	d.closeLocked()
	return nil
}

func (d *domain) closeLocked() {
	if d.closed {
		return
	}
	d.closed = true
	f := d.t.f
	for _, id := range slices.Sorted(maps.Keys(f.mu.endpoints)) {
		if ep := f.mu.endpoints[id]; ep.d == d {
			ep.endLocked()
		}
	}
	for id, r := range d.regions {
		d.deregisterLocked(id, r)
	}
	delete(d.t.domains, d)
}

type endpoint struct {
	d       *domain
	id      uint64
	nonce   uint64
	token   uint64
	conn    *conn // nil until connected
	ended   bool
	overdue bool // its time was up while the target was frozen
	done    chan struct{}
	expire  event
}

func (ep *endpoint) Done() <-chan struct{} { return ep.done }

func (ep *endpoint) Close() error {
	ep.d.t.f.mu.Lock()
	defer ep.d.t.f.mu.Unlock()
	ep.endLocked()
	return nil
}

// endLocked ends the target's half, and the client's if word reaches it.
func (ep *endpoint) endLocked() {
	if ep.ended {
		return
	}
	ep.ended = true
	close(ep.done)
	f := ep.d.t.f
	f.cancelLocked(&ep.expire)
	delete(f.mu.endpoints, ep.id)
	delete(ep.d.pending, ep.token)
	if ep.conn == nil {
		return
	}
	ep.d.t.stats.Connections--
	if !ep.conn.blockedLocked() && !ep.d.t.dead {
		ep.conn.finishLocked(revokedError())
	}
}

func (ep *endpoint) expireLocked() {
	if ep.d.t.frozen {
		ep.overdue = true
		return
	}
	ep.endLocked()
}

// hearLocked ends the endpoint because of what happened elsewhere, if the target can
// know of it now.
func (ep *endpoint) hearLocked() {
	if ep.d.t.frozen || ep.conn != nil && ep.conn.blockedLocked() {
		return
	}
	ep.endLocked()
}

// connectedLocked makes the endpoint that of c. Its token is used up.
func (ep *endpoint) connectedLocked(c *conn) {
	ep.conn = c
	ep.overdue = false
	delete(ep.d.pending, ep.token)
	ep.d.t.f.cancelLocked(&ep.expire)
	ep.d.t.stats.Connections++
	ep.d.t.stats.Accepted++
}
