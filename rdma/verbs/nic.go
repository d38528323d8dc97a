package verbs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// nic is one device, open in one target or initiator from when it was found until it
// goes. A device that comes back is another nic.
type nic struct {
	name string
	// instance is the nic's number in its owner: attrs name it, and slices of keys are
	// indexed by it. Never used twice.
	instance uint32
	info     ibv.DeviceInfo
	attr     ibv.DeviceAttr
	ctx      *ibv.Context // all objects on the device are made with it
	events   *ibv.Context // tells what happens to the device; may be nil
	link     connector
	fill     *ibv.CQ      // nil but on soft-iWARP, see fillRefusedKey
	release  func() error // closes what opening it made besides ctx; may be nil
	identity string       // of the device's node in the system; "" unknown

	rails atomic.Pointer[[]railSpec] // what may be used of it now; replaced, never changed
	fatal atomic.Bool                // it said so itself
	dirty atomic.Bool                // something about its ports changed
}

func (n *nic) specs() []railSpec {
	if s := n.rails.Load(); s != nil {
		return *s
	}
	return nil
}

// side fills in what a peer must know of a rail before there is a queue pair.
func (n *nic) side(spec railSpec, depth int, p Provider) (side, ibv.PortAttr, error) {
	port, err := n.ctx.QueryPort(spec.port)
	if err != nil {
		return side{}, port, err
	}
	s := side{
		kind: n.link.kind(), link: port.LinkLayer, lid: port.LID, depth: uint8(readDepth(depth, 255, p.MaxReadDepth)),
		mtu: lesserMTU(max(port.ActiveMTU, ibv.MTU256), ibv.MTU4096, p.MaxMTU),
	}
	for _, e := range spec.gids {
		s.gids = append(s.gids, wireGID{typ: e.Type, gid: e.GID})
	}
	return s, port, nil
}

// nicOwner is told of every change of the devices, one at a time.
type nicOwner interface {
	// nicAdded prepares the owner's objects on a nic; an error leaves it unused.
	nicAdded(n *nic) error
	// nicRemoved releases every object on it; when it returned the device is closed.
	nicRemoved(n *nic, why error)
	// nicChanged: the rails of it are others (a port went down, GIDs changed).
	nicChanged(n *nic)
}

// fleet is the devices of one target or initiator: it finds them, opens those to be
// used, and follows their comings and goings.
type fleet struct {
	p     Provider
	log   *slog.Logger
	owner nicOwner

	kick chan struct{}
	quit context.CancelFunc
	// watching is the one goroutine that changes the set, following one for each nic.
	watching, following sync.WaitGroup

	open atomic.Pointer[[]*nic] // replaced, never changed

	// The rest is the one goroutine's that watches, and the opener's before it runs.
	instances uint32
	known     string            // names of the devices at the last survey
	refused   map[string]string // device to why it is not used, as last logged
	age       int               // looks since the last survey
}

// surveyEvery looks for devices, all of them are asked for their state though none came
// or went, where there are some that are not used.
const surveyEvery = 10

// openFleet opens what can be used now. It returns ErrUnsupported with the reasons where
// nothing can be.
func openFleet(p Provider, log *slog.Logger, owner nicOwner) (*fleet, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	if err := ibv.Available(); err != nil {
		return nil, unsupported(err)
	}
	f := &fleet{p: p.withDefaults(), log: log, owner: owner, kick: make(chan struct{}, 1), refused: map[string]string{}}
	f.open.Store(&[]*nic{})
	views, err := survey()
	if err != nil {
		return nil, unsupported(err)
	}
	c := choose(f.p, views, cmAvailable())
	if err := c.refusal(); err != nil {
		return nil, unsupported(err)
	}
	f.known = namesOf(views)
	if err := f.adopt(c, views); len(f.nics()) == 0 {
		f.closeAll()
		return nil, unsupported(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	f.quit = cancel
	f.watching.Go(func() { f.watch(ctx) })
	return f, nil
}

func (f *fleet) nics() []*nic { return *f.open.Load() }

// close ends the watching and removes every nic.
func (f *fleet) close() {
	f.quit()
	f.watching.Wait()
	f.closeAll()
	f.following.Wait()
}

func (f *fleet) closeAll() {
	for _, n := range f.nics() {
		f.remove(n, fmt.Errorf("%w: verbs", rdma.ErrClosed))
	}
}

func (f *fleet) look() {
	select {
	case f.kick <- struct{}{}:
	default:
	}
}

// watch follows the devices. Everything that changes the set of nics runs here.
func (f *fleet) watch(ctx context.Context) {
	tick := time.NewTicker(f.p.RescanInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.kick:
		case <-tick.C:
		}
		f.rescan()
	}
}

func (f *fleet) rescan() {
	for _, n := range f.nics() {
		switch {
		case n.fatal.Load():
			f.remove(n, fmt.Errorf("%w: verbs: device %s reported a fatal error", rdma.ErrConnLost, n.name))
		case n.identity != "" && deviceIdentity(n.name) != n.identity:
			f.remove(n, fmt.Errorf("%w: verbs: device %s was removed", rdma.ErrConnLost, n.name))
		}
	}
	infos, err := ibv.Devices()
	if err != nil {
		f.complain("(list of devices)", err)
		return
	}
	views := make([]deviceView, len(infos))
	dirty := false
	for i := range infos {
		views[i].info = infos[i]
	}
	for _, n := range f.nics() {
		dirty = n.dirty.Swap(false) || dirty
	}
	f.age++
	known := namesOf(views)
	if known == f.known && !dirty && (f.age < surveyEvery || !f.leavesOut(views)) {
		return
	}
	f.known, f.age = known, 0
	for i := range views {
		if ok, _ := f.p.allows(views[i].info.Name); !ok || views[i].info.Unusable != "" {
			continue
		}
		if n := f.find(views[i].info.Name); n != nil {
			views[i].view(n.ctx)
		} else {
			views[i] = lookAt(views[i].info)
		}
	}
	if err := f.adopt(choose(f.p, views, cmAvailable()), views); err != nil {
		f.log.Debug("verbs: devices left out", "err", err)
	}
}

// leavesOut tells whether there is a device that could be used and is not: its port may
// have come up. Those that are used say so themselves.
func (f *fleet) leavesOut(views []deviceView) bool {
	for _, v := range views {
		if ok, _ := f.p.allows(v.info.Name); ok && v.info.Unusable == "" && f.find(v.info.Name) == nil {
			return true
		}
	}
	return false
}

func (f *fleet) find(name string) *nic {
	for _, n := range f.nics() {
		if n.name == name {
			return n
		}
	}
	return nil
}

func namesOf(views []deviceView) string {
	var b strings.Builder
	for _, v := range views {
		b.WriteString(v.info.Name + "=" + deviceIdentity(v.info.Name) + " ")
	}
	return b.String()
}

// adopt makes the open nics what was chosen. The error says what could not be opened.
func (f *fleet) adopt(c choice, views []deviceView) error {
	byDevice := map[string][]railSpec{}
	for _, s := range c.rails {
		byDevice[s.device] = append(byDevice[s.device], s)
	}
	var errs []error
	for _, v := range views {
		specs := byDevice[v.info.Name]
		n := f.find(v.info.Name)
		switch {
		case n != nil && !sameSpecs(n.specs(), specs):
			n.rails.Store(&specs)
			f.log.Info("verbs: rails changed", "device", n.name, "rails", specText(specs))
			f.owner.nicChanged(n)
		case n == nil && len(specs) > 0:
			if err := f.add(v, specs); err != nil {
				errs = append(errs, err)
				f.complain(v.info.Name, err)
			}
		}
	}
	return errors.Join(errs...)
}

// complain logs why a device is not used, once for each reason.
func (f *fleet) complain(device string, err error) {
	if f.refused[device] != err.Error() {
		f.refused[device] = err.Error()
		f.log.Warn("verbs: device not used", "device", device, "err", err)
	}
}

// sameSpecs compares all there is, GIDs that are not chosen too.
func sameSpecs(a, b []railSpec) bool { return fmt.Sprintf("%+v", a) == fmt.Sprintf("%+v", b) }

func specText(specs []railSpec) string {
	var parts []string
	for _, s := range specs {
		t := fmt.Sprintf("port %d", s.port)
		for _, g := range s.gids {
			t += fmt.Sprintf(" %d=%s(%s)", g.Index, g.GID, g.Type)
		}
		parts = append(parts, t)
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, "; ")
}

func (f *fleet) add(v deviceView, specs []railSpec) error {
	f.instances++
	n := &nic{name: v.info.Name, instance: f.instances, info: v.info, attr: v.attr, identity: deviceIdentity(v.info.Name)}
	if n.identity == identityGone {
		n.identity = "" // the class has no entry for it, so its going cannot be seen there
	}
	n.rails.Store(&specs)
	var err error
	if v.info.Transport == ibv.TransportIWARP {
		err = openCM(n, f.p, f.log)
	} else {
		n.link = exchange{}
		n.ctx, err = ibv.Open(n.name)
		n.events = n.ctx
	}
	if err != nil {
		return fmt.Errorf("verbs: open %s: %w", n.name, err)
	}
	if err := f.owner.nicAdded(n); err != nil {
		return errors.Join(err, f.shut(n))
	}
	nics := append(append([]*nic(nil), f.nics()...), n)
	f.open.Store(&nics)
	delete(f.refused, n.name)
	f.log.Info("verbs: device open", "device", n.name, "driver", n.info.Driver, "numa_node", n.info.NUMANode, "rails", specText(specs))
	if n.events != nil {
		f.following.Go(func() { f.follow(n) })
	}
	f.owner.nicChanged(n)
	return nil
}

func (f *fleet) remove(n *nic, why error) {
	var nics []*nic
	for _, o := range f.nics() {
		if o != n {
			nics = append(nics, o)
		}
	}
	f.open.Store(&nics)
	n.rails.Store(&[]railSpec{})
	if !errors.Is(why, rdma.ErrClosed) {
		f.log.Warn("verbs: device gone", "device", n.name, "err", why)
	}
	f.owner.nicRemoved(n, why)
	if err := f.shut(n); err != nil {
		f.log.Error("verbs: device not released", "device", n.name, "err", err)
	}
	f.known = "" // it may be back already
}

func (f *fleet) shut(n *nic) error {
	var err error
	if n.fill != nil {
		err = n.fill.Close()
	}
	err = errors.Join(err, n.ctx.Close())
	if n.release != nil {
		err = errors.Join(err, n.release())
	}
	return err
}

// follow waits for what the device itself has to say.
func (f *fleet) follow(n *nic) {
	for {
		ev, err := n.events.NextAsyncEvent()
		if errors.Is(err, ibv.ErrClosed) {
			return
		}
		if err != nil {
			f.log.Warn("verbs: no more events of a device", "device", n.name, "err", err)
			n.fatal.Store(true)
			f.look()
			return
		}
		switch ev.Type {
		case ibv.AsyncDeviceFatal:
			n.fatal.Store(true)
			f.look()
		case ibv.AsyncPortActive, ibv.AsyncPortErr, ibv.AsyncLIDChange, ibv.AsyncPKeyChange, ibv.AsyncGIDChange, ibv.AsyncClientReregister, ibv.AsyncSMChange:
			f.log.Info("verbs: event", "device", n.name, "event", ev.Type.String(), "port", ev.Port)
			n.dirty.Store(true)
			f.look()
		case ibv.AsyncCQErr:
			// Queues hold all that is posted, so this is the device's failure.
			f.log.Error("verbs: completion queue failed", "device", n.name)
			n.fatal.Store(true)
			f.look()
		default:
			// Of a queue pair: its own completions say so too.
			f.log.Debug("verbs: event", "device", n.name, "event", ev.Type.String(), "qpn", ev.QPN)
		}
	}
}

// uverbsClass is where the kernel lists the nodes through which devices are used.
const uverbsClass = "/sys/class/infiniband_verbs"

const identityGone = "gone"

// deviceIdentity tells a device from one of the same name that came after it: the node
// through which it is used, which goes first when a driver wants the device back. The
// driver then waits until we let go of it and says nothing. "" where the system does
// not tell.
func deviceIdentity(name string) string {
	nodes, err := os.ReadDir(uverbsClass)
	if err != nil {
		return ""
	}
	for _, e := range nodes {
		dir := filepath.Join(uverbsClass, e.Name())
		b, err := os.ReadFile(filepath.Join(dir, "ibdev"))
		if err != nil || strings.TrimSpace(string(b)) != name {
			continue
		}
		st, err := os.Stat(dir)
		if err != nil {
			continue
		}
		if sys, ok := st.Sys().(*syscall.Stat_t); ok {
			return fmt.Sprintf("%s/%d", e.Name(), sys.Ino)
		}
		return e.Name()
	}
	return identityGone
}
