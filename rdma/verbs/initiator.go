package verbs

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// initiator implements rdma.Initiator.
type initiator struct {
	p       Provider // with defaults
	log     *slog.Logger
	timeout time.Duration // of Connect
	fleet   *fleet
	ids     atomic.Uint64
	closing sync.Once

	// topo is read-locked by whoever makes objects on devices, locked while the set of
	// devices changes.
	topo struct {
		sync.RWMutex
		nics map[*nic]*initiatorNIC
	}
	sinks   atomic.Pointer[[]*sink] // of AllocSink, by address; replaced, never changed
	bounces bouncePool
	noHuge  sync.Once
	shunned shunList

	mu struct {
		sync.Mutex
		closed bool
		conns  map[*conn]struct{}
		dials  map[*dial]struct{}
	}
	counters counterTable
	held     atomic.Bool // tests keep READs from being posted
}

// initiatorNIC is the reading side of one device. All connections share its domain,
// which grants a peer nothing.
type initiatorNIC struct{ pd *ibv.PD }

var (
	_ rdma.Initiator = (*initiator)(nil)
	_ rdma.Allocator = (*initiator)(nil)
	_ RailCounter    = (*initiator)(nil)
)

// NewInitiator opens the devices. It returns ErrUnsupported, with the reasons, where none
// can be used.
func (p Provider) NewInitiator(cfg rdma.InitiatorConfig) (rdma.Initiator, error) {
	in := &initiator{p: p.withDefaults(), log: orDiscard(cfg.Logger), timeout: cfg.ConnectTimeout}
	if in.timeout <= 0 {
		in.timeout = defaultConnectTimeout
	}
	in.topo.nics = make(map[*nic]*initiatorNIC)
	in.sinks.Store(&[]*sink{})
	in.mu.conns = make(map[*conn]struct{})
	in.mu.dials = make(map[*dial]struct{})
	var err error
	if in.fleet, err = openFleet(p, in.log, in); err != nil {
		return nil, err
	}
	return in, nil
}

func (in *initiator) nicAdded(n *nic) error {
	in.topo.Lock()
	defer in.topo.Unlock()
	pd, err := n.ctx.NewPD()
	if err != nil {
		return fmt.Errorf("%w: verbs: %w", rdma.ErrExhausted, err)
	}
	in.topo.nics[n] = &initiatorNIC{pd: pd}
	for _, s := range in.allSinks() {
		if err := s.register(n, pd); err != nil {
			in.log.Warn("verbs: buffer not on a device that came: READs through it are copied", "device", n.name, "err", err)
		}
	}
	return nil
}

func (in *initiator) nicRemoved(n *nic, why error) {
	in.topo.Lock()
	defer in.topo.Unlock()
	part := in.topo.nics[n]
	if part == nil {
		return
	}
	delete(in.topo.nics, n)
	in.dropRails(func(r *rail) bool { return r.n == n }, why)
	var errs []error
	for _, s := range in.allSinks() {
		errs = append(errs, s.retract(n))
	}
	errs = append(errs, part.pd.Close())
	if err := errors.Join(errs...); err != nil {
		in.log.Error("verbs: objects not released on a device", "device", n.name, "err", err)
	}
}

func (in *initiator) nicChanged(n *nic) {
	specs := n.specs()
	in.dropRails(func(r *rail) bool { return r.n == n && r.connected.Load() && !stillUsable(specs, r.spec.port, r.gid) },
		fmt.Errorf("%w: verbs: the port of %s, or its address, went away", rdma.ErrConnLost, n.name))
}

// dropRails takes rails down and waits until they are gone.
func (in *initiator) dropRails(chosen func(*rail) bool, why error) {
	in.mu.Lock()
	var rails []*rail
	for c := range in.mu.conns {
		rails = append(rails, c.all...)
	}
	for d := range in.mu.dials {
		rails = append(rails, d.rails...)
	}
	in.mu.Unlock()
	rails = slices.DeleteFunc(rails, func(r *rail) bool { return !chosen(r) })
	for _, r := range rails {
		r.fail(why)
	}
	for _, r := range rails {
		<-r.gone
	}
}

// Close implements rdma.Initiator. Whoever comes second waits for the first. Sinks that
// were not freed stay memory, without a device.
func (in *initiator) Close() (err error) {
	in.closing.Do(func() { err = in.close() })
	return err
}

func (in *initiator) close() error {
	in.mu.Lock()
	in.mu.closed = true
	conns := make([]*conn, 0, len(in.mu.conns))
	for c := range in.mu.conns {
		conns = append(conns, c)
	}
	dials := make([]*dial, 0, len(in.mu.dials))
	for d := range in.mu.dials {
		dials = append(dials, d)
	}
	in.mu.Unlock()
	var wg sync.WaitGroup
	for _, c := range conns {
		wg.Go(func() { _ = c.Close() })
	}
	for _, d := range dials {
		wg.Go(d.Abort)
	}
	wg.Wait()
	in.fleet.close()
	in.bounces.Lock()
	slabs := in.bounces.slabs
	in.bounces.slabs, in.bounces.free = nil, nil
	in.bounces.Unlock()
	var errs []error
	for _, s := range slabs {
		errs = append(errs, s.free())
	}
	return errors.Join(errs...)
}

// Prepare implements rdma.Initiator: it makes a queue pair on each rail.
func (in *initiator) Prepare(ctx context.Context) (rdma.Dial, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%w: verbs: prepare: %w", rdma.ErrTimeout, err)
	}
	in.topo.RLock()
	defer in.topo.RUnlock()
	d := &dial{in: in}
	_, _ = rand.Read(d.offer.nonce[:]) // never fails: crypto/rand ends the process first
	var errs []error
	for n, part := range in.topo.nics {
		for _, spec := range n.specs() {
			if len(d.rails) == maxRails {
				break
			}
			spec.gids = in.shunned.order(n, spec.gids)
			r, own, err := in.newRail(n, part, spec)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			d.rails, d.offer.rails = append(d.rails, r), append(d.offer.rails, own)
		}
	}
	if len(d.rails) == 0 {
		if len(errs) == 0 {
			in.fleet.look()
			return nil, fmt.Errorf("%w: verbs: no device with an active port is there now", rdma.ErrUnsupported)
		}
		return nil, errors.Join(errs...)
	}
	for _, err := range errs {
		in.log.Warn("verbs: rail left out of an offer", "err", err)
	}
	in.mu.Lock()
	if !in.mu.closed {
		in.mu.dials[d] = struct{}{}
		in.mu.Unlock()
		return d, nil
	}
	in.mu.Unlock()
	d.drop(fmt.Errorf("%w: verbs: initiator", rdma.ErrClosed), d.rails)
	return nil, fmt.Errorf("%w: verbs: initiator", rdma.ErrClosed)
}

func (in *initiator) forgetDial(d *dial) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.mu.dials, d)
}

func (in *initiator) forget(c *conn) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.mu.conns, c)
}

// dial implements rdma.Dial.
type dial struct {
	in    *initiator
	offer offer
	rails []*rail
	once  sync.Once
}

// Offer implements rdma.Dial.
func (d *dial) Offer() []byte { return d.offer.encode() }

// Abort implements rdma.Dial.
func (d *dial) Abort() {
	d.once.Do(func() {
		d.drop(fmt.Errorf("%w: verbs: dial aborted", rdma.ErrClosed), d.rails)
		d.in.forgetDial(d)
	})
}

// drop takes down rails that are not, or no more, part of a connection.
func (d *dial) drop(why error, rails []*rail) {
	for _, r := range rails {
		r.fail(why)
	}
	for _, r := range rails {
		<-r.gone
	}
}

// Connect implements rdma.Dial.
func (d *dial) Connect(ctx context.Context, b []byte) (conn rdma.Conn, err error) {
	err = fmt.Errorf("%w: verbs: dial was completed or aborted before", rdma.ErrClosed)
	d.once.Do(func() {
		// The dial is forgotten last: until then, or until the connection is known, the
		// end of a device or of the initiator finds its rails here.
		defer d.in.forgetDial(d)
		conn, err = d.connect(ctx, b)
	})
	return conn, err
}

func (d *dial) connect(ctx context.Context, b []byte) (rdma.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.in.timeout)
	defer cancel()
	fail := func(err error) (rdma.Conn, error) {
		d.drop(err, d.rails)
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return fail(fmt.Errorf("%w: verbs: connect: %w", rdma.ErrTimeout, err))
	}
	a, err := decodeAnswer(b)
	if err != nil {
		return fail(err)
	}
	if a.nonce != d.offer.nonce {
		return fail(fmt.Errorf("%w: verbs: the answer is to another offer, or was used before", rdma.ErrHandshake))
	}
	c := newConn(d.in, a)
	used := make([]bool, len(d.rails))
	for _, ar := range a.rails {
		if int(ar.clientRail) >= len(d.rails) {
			return fail(fmt.Errorf("%w: verbs: the answer names rail %d of %d", rdma.ErrHandshake, ar.clientRail, len(d.rails)))
		}
		r := d.rails[ar.clientRail]
		if r.n.link.kind() != ar.kind {
			return fail(fmt.Errorf("%w: verbs: the answer connects rail %d by %s, it needs %s", rdma.ErrHandshake, ar.clientRail, ar.kind, r.n.link.kind()))
		}
		used[ar.clientRail] = true
		c.adopt(r, ar)
	}
	for i, r := range c.all {
		if err := r.connect(ctx, a.rails[i]); err != nil {
			r.fail(err)
		}
	}
	var idle []*rail
	for i, r := range d.rails {
		if !used[i] {
			idle = append(idle, r)
		}
	}
	d.drop(fmt.Errorf("%w: verbs: rail not used", rdma.ErrClosed), idle)
	alive, errs := c.awaitRails(ctx)
	if alive == 0 {
		d.drop(fmt.Errorf("%w: verbs: connect failed", rdma.ErrClosed), c.all)
		return nil, connectError(ctx, errs)
	}
	for _, err := range errs {
		d.in.log.Warn("verbs: connection without a rail", "node", a.node, "err", err)
	}
	return c.begin()
}

// connectError is the class of a connection that did not come about.
func connectError(ctx context.Context, errs []error) error {
	err := errors.Join(errs...)
	if cause := ctx.Err(); cause != nil {
		return fmt.Errorf("%w: verbs: connect: %w (%v)", rdma.ErrTimeout, cause, err)
	}
	if errors.Is(err, rdma.ErrHandshake) || errors.Is(err, rdma.ErrUnsupported) || errors.Is(err, rdma.ErrClosed) {
		return err
	}
	// A queue pair that is not there does not answer at all.
	return fmt.Errorf("%w: verbs: the target's queue pair does not answer: it is out of reach, or the answer expired or was revoked: %v", rdma.ErrHandshake, err)
}

// shunTime is how long a GID that led nowhere is tried last.
const shunTime = 5 * time.Minute

// shunList remembers GIDs by which connecting failed, so that the next attempt tries
// the next.
type shunList struct {
	sync.Mutex
	until map[shunKey]time.Time
}

type shunKey struct {
	nic   uint32
	index int
	gid   ibv.GID
}

func (l *shunList) add(n *nic, e ibv.GIDEntry) {
	l.Lock()
	defer l.Unlock()
	if l.until == nil {
		l.until = map[shunKey]time.Time{}
	}
	now := time.Now()
	for k, t := range l.until {
		if now.After(t) {
			delete(l.until, k)
		}
	}
	l.until[shunKey{n.instance, e.Index, e.GID}] = now.Add(shunTime)
}

// order puts GIDs that failed lately behind the others.
func (l *shunList) order(n *nic, gids []ibv.GIDEntry) []ibv.GIDEntry {
	l.Lock()
	defer l.Unlock()
	if len(l.until) == 0 {
		return gids
	}
	out := slices.Clone(gids)
	bad := func(e ibv.GIDEntry) int {
		if t, ok := l.until[shunKey{n.instance, e.Index, e.GID}]; ok && time.Now().Before(t) {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(out, func(a, b ibv.GIDEntry) int { return bad(a) - bad(b) })
	return out
}
