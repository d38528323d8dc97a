package verbs

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// domain implements rdma.Domain: a protection domain on each device of the target.
type domain struct {
	t    *target
	name string

	// parts is guarded by target.topo: written under its lock, or by Close, which has
	// life.
	parts map[*nic]*ibv.PD

	// life is read-locked by Register, Deregister and Accept, locked by Close.
	life sync.RWMutex
	mu   struct {
		sync.Mutex
		closed    bool
		regions   map[rdma.RegionID]*region
		endpoints map[*endpoint]struct{}
	}
}

var (
	_ rdma.Domain     = (*domain)(nil)
	_ rdma.AttrSource = (*domain)(nil)
)

// region is one registered memory. Its mrs change under target.topo's lock, or by the
// one Register or Deregister that is at work on it.
type region struct {
	id    rdma.RegionID
	bytes []byte
	busy  bool // being registered or deregistered; guarded by domain.mu
	mrs   map[*nic]*ibv.MR
}

func (d *domain) closedErr() error { return fmt.Errorf("%w: verbs: domain %q", rdma.ErrClosed, d.name) }

// Register implements rdma.Domain. Regions may be registered at the same time.
func (d *domain) Register(id rdma.RegionID, m *rdma.Memory) ([]byte, error) {
	d.t.topo.RLock()
	defer d.t.topo.RUnlock()
	d.life.RLock()
	defer d.life.RUnlock()
	r := &region{id: id, bytes: m.Bytes(), busy: true, mrs: make(map[*nic]*ibv.MR)}
	if len(r.bytes) == 0 {
		return nil, fmt.Errorf("verbs: region %d of domain %q: memory %q has been freed", id, d.name, m.Name())
	}
	d.mu.Lock()
	switch _, taken := d.mu.regions[id]; {
	case d.mu.closed:
		d.mu.Unlock()
		return nil, d.closedErr()
	case taken:
		d.mu.Unlock()
		return nil, fmt.Errorf("verbs: region %d of domain %q is registered: take another id", id, d.name)
	}
	d.mu.regions[id] = r
	count := len(d.mu.regions)
	d.mu.Unlock()

	populate(r.bytes)
	err := d.registerOn(r, count)
	d.mu.Lock()
	defer d.mu.Unlock()
	r.busy = false
	if len(d.parts) > 0 && len(r.mrs) == 0 {
		delete(d.mu.regions, id)
		return nil, err
	}
	if err != nil {
		d.t.log.Warn("verbs: region not on every device", "domain", d.name, "region", id, "err", err)
	}
	return d.attrLocked(r), nil
}

// registerOn registers on all devices at the same time.
func (d *domain) registerOn(r *region, count int) error {
	type outcome struct {
		n   *nic
		mr  *ibv.MR
		err error
	}
	results := make(chan outcome, len(d.parts))
	for n, pd := range d.parts {
		go func() {
			mr, err := d.registerAt(n, pd, r, count)
			results <- outcome{n, mr, err}
		}()
	}
	var errs []error
	for range d.parts {
		o := <-results
		if o.err != nil {
			errs = append(errs, o.err)
			continue
		}
		r.mrs[o.n] = o.mr
	}
	return errors.Join(errs...)
}

func (d *domain) registerAt(n *nic, pd *ibv.PD, r *region, count int) (*ibv.MR, error) {
	size := uint64(len(r.bytes))
	if n.attr.MaxMRSize > 0 && size > n.attr.MaxMRSize {
		return nil, fmt.Errorf("%w: verbs: region %d has %s, a region on %s has at most %s: choose smaller chunks",
			rdma.ErrExhausted, r.id, sizeText(size), n.name, sizeText(n.attr.MaxMRSize))
	}
	// Peers may READ, and nothing else.
	mr, err := pd.RegMR(r.bytes, ibv.AccessRemoteRead)
	if err != nil {
		return nil, refusedRegistration(err, n.name, size, count, n.attr)
	}
	return mr, nil
}

// Deregister implements rdma.Domain.
func (d *domain) Deregister(id rdma.RegionID) error {
	d.t.topo.RLock()
	defer d.t.topo.RUnlock()
	d.life.RLock()
	defer d.life.RUnlock()
	d.mu.Lock()
	r := d.mu.regions[id]
	if r == nil || r.busy {
		d.mu.Unlock()
		return fmt.Errorf("verbs: region %d of domain %q is not registered", id, d.name)
	}
	r.busy = true
	d.mu.Unlock()
	err := r.release()
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.mu.regions, id)
	return err
}

func (r *region) release() error {
	var errs []error
	for n, mr := range r.mrs {
		if err := mr.Close(); err != nil {
			errs = append(errs, fmt.Errorf("verbs: deregister region %d on %s: %w", r.id, n.name, err))
		}
		delete(r.mrs, n)
	}
	return errors.Join(errs...)
}

// attrLocked needs d.mu and a topology that stands still.
func (d *domain) attrLocked(r *region) []byte {
	a := attr{id: r.id, boot: d.t.cfg.BootID, addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(r.bytes)))), length: uint64(len(r.bytes))}
	for n, mr := range r.mrs {
		if len(a.keys) < maxAttrKeys {
			a.keys = append(a.keys, attrKey{device: n.instance, rkey: mr.RKey()})
		}
	}
	return a.encode()
}

// Attr implements rdma.AttrSource.
func (d *domain) Attr(id rdma.RegionID) ([]byte, error) {
	d.t.topo.RLock()
	defer d.t.topo.RUnlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.mu.regions[id]
	if r == nil || r.busy {
		return nil, fmt.Errorf("%w: verbs: region %d of domain %q is not registered", rdma.ErrAccess, id, d.name)
	}
	if len(r.mrs) == 0 {
		return nil, fmt.Errorf("%w: verbs: region %d of domain %q: no device is there", rdma.ErrExhausted, id, d.name)
	}
	return d.attrLocked(r), nil
}

// extend makes the domain exist on a device that came. The caller holds topo's lock.
func (d *domain) extend(n *nic) error {
	d.mu.Lock()
	if d.mu.closed {
		d.mu.Unlock()
		return nil
	}
	regions := make([]*region, 0, len(d.mu.regions))
	for _, r := range d.mu.regions {
		regions = append(regions, r)
	}
	d.mu.Unlock()
	pd, err := n.ctx.NewPD()
	if err != nil {
		return fmt.Errorf("%w: verbs: %s has a limit of %d protection domains: %w", rdma.ErrExhausted, n.name, n.attr.MaxPD, err)
	}
	d.parts[n] = pd
	errs := make([]error, len(regions))
	mrs := make([]*ibv.MR, len(regions))
	parallel(len(regions), func(i int) { mrs[i], errs[i] = d.registerAt(n, pd, regions[i], len(regions)) })
	for i, r := range regions {
		if mrs[i] != nil {
			r.mrs[n] = mrs[i]
		}
	}
	return errors.Join(errs...)
}

// parallel runs fn for 0 to n-1, a few at a time: registering is the kernel's work on
// the memory's pages, which more goroutines than processors do not speed up.
func parallel(n int, fn func(int)) {
	const workers = 8
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(workers, n) {
		wg.Go(func() {
			for i := range next {
				fn(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}

// retract takes the domain off a device, whose rails have ended. The caller holds topo's
// lock.
func (d *domain) retract(n *nic) {
	d.mu.Lock()
	var errs []error
	for _, r := range d.mu.regions {
		if mr := r.mrs[n]; mr != nil {
			errs = append(errs, mr.Close())
			delete(r.mrs, n)
		}
	}
	d.mu.Unlock()
	if pd := d.parts[n]; pd != nil {
		errs = append(errs, pd.Close())
		delete(d.parts, n)
	}
	if err := errors.Join(errs...); err != nil {
		d.t.log.Error("verbs: domain not released on a device", "domain", d.name, "device", n.name, "err", err)
	}
}

// Accept implements rdma.Domain: it makes a queue pair for each pair of rails that match
// and has it ready when the client hears of it.
func (d *domain) Accept(ctx context.Context, peer rdma.Peer, b []byte) ([]byte, rdma.Endpoint, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, fmt.Errorf("%w: verbs: accept: %w", rdma.ErrTimeout, err)
	}
	o, err := decodeOffer(b)
	if err != nil {
		return nil, nil, err
	}
	d.t.topo.RLock()
	defer d.t.topo.RUnlock()
	d.life.RLock()
	defer d.life.RUnlock()
	d.mu.Lock()
	closed := d.mu.closed
	d.mu.Unlock()
	if closed {
		return nil, nil, d.closedErr()
	}
	a := answer{nonce: o.nonce, node: d.t.cfg.NodeID, boot: d.t.cfg.BootID, expiry: uint32(d.t.p.AcceptTimeout.Milliseconds())}
	ep := &endpoint{d: d, peer: peer, done: make(chan struct{})}
	rails, err := d.serve(ep, o, &a)
	if err != nil {
		return nil, nil, err
	}
	if !ep.start(rails) {
		for _, r := range rails {
			r.close()
		}
		return nil, nil, fmt.Errorf("%w: verbs: the queue pairs failed at once", rdma.ErrConnLost)
	}
	return a.encode(), ep, nil
}

// serve makes the endpoint's rails and their part of the answer. With an error nothing
// is left of them.
func (d *domain) serve(ep *endpoint, o offer, a *answer) ([]*servedRail, error) {
	type place struct {
		tn   *targetNIC
		spec railSpec
	}
	var places []place
	var own []side
	for n, tn := range d.t.topo.nics {
		if d.parts[n] == nil {
			continue
		}
		for _, spec := range n.specs() {
			s, _, err := n.side(spec, n.attr.MaxQPRdAtomic, d.t.p)
			if err != nil {
				d.t.log.Warn("verbs: rail left out", "device", n.name, "port", spec.port, "err", err)
				continue
			}
			places, own = append(places, place{tn, spec}), append(own, s)
		}
	}
	pairs := pairRails(o.rails, own)
	if len(pairs) == 0 {
		return nil, fmt.Errorf("%w: verbs: client %q has %s; this node has %s: nothing of it matches", rdma.ErrUnsupported, ep.peer.Name, describeSides(o.rails), describeSides(own))
	}
	var errs []error
	var rails []*servedRail
	for _, p := range pairs {
		at := places[p.server]
		r := &servedRail{ep: ep, tn: at.tn, pd: d.parts[at.tn.n], spec: at.spec, own: own[p.server], byeSent: make(chan struct{})}
		r.lastUsed.Store(nowNanos())
		rail, err := r.open(o.rails[p.client], p.gids)
		if err != nil {
			errs = append(errs, err)
			r.close()
			continue
		}
		rail.clientRail = uint8(p.client)
		rail.device = at.tn.n.instance
		a.rails = append(a.rails, rail)
		rails = append(rails, r)
	}
	if len(rails) == 0 {
		return nil, errors.Join(errs...)
	}
	for _, err := range errs {
		d.t.log.Warn("verbs: connection without a rail", "client", ep.peer.Name, "err", err)
	}
	return rails, nil
}

func (d *domain) remember(ep *endpoint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.endpoints[ep] = struct{}{}
}

func (d *domain) forget(ep *endpoint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.mu.endpoints, ep)
}

// Close implements rdma.Domain.
func (d *domain) Close() error {
	d.t.topo.RLock()
	defer d.t.topo.RUnlock()
	d.life.Lock()
	defer d.life.Unlock()
	d.mu.Lock()
	d.mu.closed = true
	endpoints := make([]*endpoint, 0, len(d.mu.endpoints))
	for ep := range d.mu.endpoints {
		endpoints = append(endpoints, ep)
	}
	d.mu.Unlock()
	var wg sync.WaitGroup
	for _, ep := range endpoints {
		wg.Go(func() { ep.end(byeRevoked, true) })
	}
	wg.Wait()
	var errs []error
	d.mu.Lock()
	for id, r := range d.mu.regions {
		errs = append(errs, r.release())
		delete(d.mu.regions, id)
	}
	d.mu.Unlock()
	for n, pd := range d.parts {
		errs = append(errs, pd.Close())
		delete(d.parts, n)
	}
	d.t.forget(d)
	return errors.Join(errs...)
}

// TryPin implements rdma.Pinning. The memory is a few pages mapped over and over: that
// counts in full against the limits and costs nothing to have.
func (t *target) TryPin(size uint64) error {
	if size == 0 {
		return nil
	}
	trial, free, err := trialMemory(size)
	if err != nil {
		return fmt.Errorf("verbs: trial registration of %s: %w", sizeText(size), err)
	}
	defer free()
	t.topo.RLock()
	defer t.topo.RUnlock()
	if len(t.topo.nics) == 0 {
		return fmt.Errorf("%w: verbs: no device is there", rdma.ErrExhausted)
	}
	// All at the same time, because all are needed at the same time.
	var errs []error
	var undo []func() error
	for n := range t.topo.nics {
		pd, err := n.ctx.NewPD()
		if err != nil {
			errs = append(errs, fmt.Errorf("%w: verbs: %w", rdma.ErrExhausted, err))
			continue
		}
		undo = append(undo, pd.Close)
		// In pieces, as chunks will be: no one region has to hold all.
		for at := uint64(0); at < size; at += trialPiece {
			mr, err := pd.RegMR(trial[at:min(at+trialPiece, size)], ibv.AccessRemoteRead)
			if err != nil {
				errs = append(errs, refusedRegistration(err, n.name, size, int(at/trialPiece)+1, n.attr))
				break
			}
			undo = append(undo, mr.Close)
		}
	}
	for i := len(undo) - 1; i >= 0; i-- {
		errs = append(errs, undo[i]())
	}
	return errors.Join(errs...)
}

const trialPiece = 256 << 20

// nowNanos orders uses of rails.
func nowNanos() int64 { return int64(time.Since(processStart)) }

var processStart = time.Now()

// past is a deadline that wakes whoever waits.
var past = time.Unix(1, 0)

// trialMemory maps size bytes, all on the pages of one small file.
func trialMemory(size uint64) (b []byte, free func(), err error) {
	const tile = 64 << 20
	page := uint64(unix.Getpagesize())
	size = (size + page - 1) / page * page
	return mapTiles(size, min(size, tile))
}
