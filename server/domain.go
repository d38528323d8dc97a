package server

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/rdma"
)

// domain is a namespace's protection domain of one transport.
type domain struct {
	rdma.Domain // nil until made, and where it failed
	export      *exporter
	key         domainKey
	target      *target

	made   chan struct{} // closed when make is over
	failed error         // valid once made: the domain could not be made
	over   chan struct{} // closed when close is over
	ended  sync.Once
	endErr error

	mu struct {
		sync.Mutex
		regions map[rdma.RegionID]*registration
		closed  bool
		// complained tells that a refusal was said and nothing was registered since.
		complained bool
		retrying   bool
	}
}

// registration of one region. Its fields are guarded by the domain's lock.
type registration struct {
	memory *rdma.Memory
	gone   chan struct{} // closed when the region is not wanted any more
	done   chan struct{} // closed when the attempt is over
	region *kvdv1.Region // nil: not registered. Its attr is as Register returned it
	err    error         // why it was refused
}

func newDomain(e *exporter, key domainKey, t *target, chunks map[rdma.RegionID]*rdma.Memory) *domain {
	d := &domain{export: e, key: key, target: t, made: make(chan struct{}), over: make(chan struct{})}
	d.mu.regions = map[rdma.RegionID]*registration{}
	d.beginLocked(rdma.ControlRegion, e.control)
	for id, m := range chunks {
		d.beginLocked(id, m)
	}
	return d
}

func (d *domain) beginLocked(id rdma.RegionID, m *rdma.Memory) *registration {
	r := &registration{memory: m, gone: make(chan struct{}), done: make(chan struct{})}
	d.mu.regions[id] = r
	return r
}

// make makes the transport's domain and registers what there was. After an error the
// caller closes it.
func (d *domain) make() error {
	defer close(d.made)
	began := d.waiting()
	domain, err := d.target.NewDomain(fmt.Sprintf("namespace-%d", d.key.namespace))
	if err != nil {
		for _, r := range began {
			close(r.done)
		}
		d.failed = err
		return err
	}
	d.Domain = domain
	// Nobody reads anything without the control table.
	if err := d.register(rdma.ControlRegion, began[rdma.ControlRegion]); err != nil {
		d.failed = err
	}
	delete(began, rdma.ControlRegion)
	for id, r := range began {
		switch {
		case d.failed != nil:
			close(r.done)
		case d.target.pins != nil:
			d.later(id, r)
		default:
			d.failed = d.register(id, r)
		}
	}
	return d.failed
}

// waiting lists what nobody has tried to register yet.
func (d *domain) waiting() map[rdma.RegionID]*registration {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := map[rdma.RegionID]*registration{}
	for id, r := range d.mu.regions {
		all[id] = r
	}
	return all
}

// add registers one more region; with a target that pins memory it only begins to.
func (d *domain) add(id rdma.RegionID, m *rdma.Memory) error {
	<-d.made
	d.mu.Lock()
	if d.failed != nil || d.mu.closed || d.mu.regions[id] != nil {
		d.mu.Unlock()
		return nil
	}
	r := d.beginLocked(id, m)
	d.mu.Unlock()
	if d.target.pins != nil {
		d.later(id, r)
		return nil
	}
	return d.register(id, r)
}

// remove ends access to a region. When it has returned the memory may go.
func (d *domain) remove(id rdma.RegionID) error {
	d.mu.Lock()
	if d.mu.closed {
		d.mu.Unlock()
		<-d.over
		return nil
	}
	r := d.mu.regions[id]
	delete(d.mu.regions, id)
	if r == nil {
		d.mu.Unlock()
		return nil
	}
	close(r.gone)
	d.mu.Unlock()
	<-r.done
	d.mu.Lock()
	registered := r.region != nil
	d.mu.Unlock()
	if !registered {
		return nil
	}
	return d.Deregister(id)
}

// register carries out a registration that was begun.
func (d *domain) register(id rdma.RegionID, r *registration) error {
	defer close(r.done)
	select {
	case <-r.gone:
		return nil
	default:
	}
	began := time.Now()
	attr, err := d.Register(id, r.memory)
	d.export.node.metrics.registered(d.target.name, time.Since(began), err)
	d.mu.Lock()
	defer d.mu.Unlock()
	if r.err = err; err != nil {
		return err
	}
	r.region = &kvdv1.Region{Id: uint32(id), Length: r.memory.Size(), Attr: attr}
	d.mu.complained = false
	return nil
}

// later registers beside the node's other work, when it is this region's turn.
func (d *domain) later(id rdma.RegionID, r *registration) {
	d.export.spawn(func() { d.inTurn(id, r) }, func() { close(r.done) })
}

// inTurn returns whether the region is registered.
func (d *domain) inTurn(id rdma.RegionID, r *registration) bool {
	select {
	case d.target.slots <- struct{}{}:
	case <-r.gone:
		close(r.done)
		return false
	case <-d.export.closing:
		close(r.done)
		return false
	}
	err := d.register(id, r)
	<-d.target.slots
	if err != nil {
		d.complain(id, err)
	}
	return err == nil
}

// spawn runs f, or otherwise where the exporter is closing.
func (e *exporter) spawn(f, otherwise func()) {
	e.mu.Lock()
	closed := e.mu.closed
	if !closed {
		e.work.Add(1) // under the lock: close waits for it afterwards
	}
	e.mu.Unlock()
	if closed {
		otherwise()
		return
	}
	go func() {
		defer e.work.Done()
		f()
	}()
}

// complain says, once until something is registered again, that clients will read the
// chunk in another way.
func (d *domain) complain(id rdma.RegionID, err error) {
	d.mu.Lock()
	said := d.mu.complained || d.mu.closed
	d.mu.complained = true
	d.mu.Unlock()
	if !said {
		d.export.node.log.Warn("a chunk could not be registered: it is read over other transports, and tried again",
			"namespace", d.key.namespace, "chunk", uint32(id), "transport", d.target.name, "reason", err)
	}
}

// retry tries one of the regions that were refused and, if there is room now, the others.
func (d *domain) retry() {
	d.mu.Lock()
	busy := d.mu.retrying || d.mu.closed
	if !busy {
		d.mu.retrying = len(d.refusedLocked()) > 0
		busy = !d.mu.retrying
	}
	d.mu.Unlock()
	if busy {
		return
	}
	over := func() {
		d.mu.Lock()
		d.mu.retrying = false
		d.mu.Unlock()
	}
	d.export.spawn(func() {
		defer over()
		for {
			d.mu.Lock()
			refused := d.refusedLocked()
			if len(refused) == 0 || d.mu.closed {
				d.mu.Unlock()
				return
			}
			id := refused[0]
			r := d.beginLocked(id, d.mu.regions[id].memory)
			d.mu.Unlock()
			if !d.inTurn(id, r) {
				return
			}
		}
	}, over)
}

func (d *domain) refusedLocked() []rdma.RegionID {
	var all []rdma.RegionID
	for id, r := range d.mu.regions {
		if r.err != nil {
			all = append(all, id)
		}
	}
	return all
}

// regions describes the domain's named regions, or all; unknown ones, and those that can
// not be read (yet), are left out.
func (d *domain) regions(ids []uint32) []*kvdv1.Region {
	d.mu.Lock()
	var found []*kvdv1.Region
	if len(ids) == 0 {
		for _, id := range slices.Sorted(maps.Keys(d.mu.regions)) {
			if r := d.mu.regions[id]; r.region != nil {
				found = append(found, r.region)
			}
		}
	}
	for _, id := range ids {
		if r := d.mu.regions[rdma.RegionID(id)]; r != nil && r.region != nil {
			found = append(found, r.region)
		}
	}
	d.mu.Unlock()
	source, changing := d.Domain.(rdma.AttrSource)
	if !changing {
		return found
	}
	now := found[:0]
	for _, r := range found {
		// An error: it has gone just now, or no device is left to read it through.
		if attr, err := source.Attr(rdma.RegionID(r.GetId())); err == nil {
			now = append(now, &kvdv1.Region{Id: r.GetId(), Length: r.GetLength(), Attr: attr})
		}
	}
	return now
}

// regionCounts are regions by what became of them.
type regionCounts struct{ registered, pending, refused int }

func (d *domain) count(to *regionCounts) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.mu.regions {
		switch {
		case r.region != nil:
			to.registered++
		case r.err != nil:
			to.refused++
		default:
			to.pending++
		}
	}
}

func (d *domain) isClosed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.closed
}

// close revokes the domain's connections and takes its regions back. Idempotent; it
// returns when that is done, whoever does it. The exporter retired the domain before.
func (d *domain) close() error {
	d.ended.Do(func() {
		d.mu.Lock()
		d.mu.closed = true
		regions := d.mu.regions
		d.mu.regions = nil
		for _, r := range regions {
			close(r.gone)
		}
		d.mu.Unlock()
		if d.Domain != nil {
			for _, r := range regions {
				<-r.done
			}
			d.endErr = d.Domain.Close()
		}
		close(d.over)
		d.export.forget(d)
	})
	<-d.over
	if errors.Is(d.endErr, rdma.ErrClosed) {
		return nil
	}
	return d.endErr
}
