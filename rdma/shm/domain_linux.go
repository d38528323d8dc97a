package shm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
)

// region is registered memory. Its file is a duplicate of the memory's
// descriptor, so that handing it out cannot meet a closed one.
type region struct {
	file *os.File
	size uint64
}

// domain implements rdma.Domain.
type domain struct {
	target *target
	name   string

	mu struct {
		sync.Mutex
		regions   map[rdma.RegionID]*region
		endpoints map[*endpoint]struct{}
		closed    bool
	}
}

func (d *domain) errClosed() error { return fmt.Errorf("%w: shm: domain %q", rdma.ErrClosed, d.name) }

// Register implements rdma.Domain. The memory must have been allocated with
// MemoryOptions.Shareable.
func (d *domain) Register(id rdma.RegionID, m *rdma.Memory) ([]byte, error) {
	if m.FD() < 0 {
		return nil, fmt.Errorf("%w: shm: memory %q is not a memfd: allocate it with MemoryOptions.Shareable", rdma.ErrUnsupported, m.Name())
	}
	fd, err := unix.FcntlInt(uintptr(m.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: shm: descriptor for memory %q: %w", rdma.ErrExhausted, m.Name(), err)
	}
	r := &region{file: os.NewFile(uintptr(fd), m.Name()), size: m.Size()}
	if err := d.add(id, r); err != nil {
		return nil, errors.Join(err, r.file.Close())
	}
	return attr{id: id, size: r.size, boot: d.target.cfg.BootID}.encode(), nil
}

func (d *domain) add(id rdma.RegionID, r *region) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return d.errClosed()
	}
	if d.mu.regions[id] != nil {
		return fmt.Errorf("shm: domain %q: region %d is registered already", d.name, id)
	}
	d.mu.regions[id] = r
	return nil
}

func (d *domain) region(id rdma.RegionID) *region {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.regions[id]
}

// Deregister implements rdma.Domain. READs of this package's clients that are
// posted after it returned fail, and their mappings go; what a hostile client mapped
// stays mapped (see DESIGN.md).
func (d *domain) Deregister(id rdma.RegionID) error {
	d.mu.Lock()
	r := d.mu.regions[id]
	delete(d.mu.regions, id)
	endpoints := make([]*endpoint, 0, len(d.mu.endpoints))
	for e := range d.mu.endpoints {
		endpoints = append(endpoints, e)
	}
	d.mu.Unlock()
	if r == nil {
		return fmt.Errorf("%w: shm: domain %q: region %d is not registered", rdma.ErrAccess, d.name, id)
	}
	for _, e := range endpoints {
		e.take(id)
	}
	return r.file.Close()
}

// Accept implements rdma.Domain.
func (d *domain) Accept(ctx context.Context, peer rdma.Peer, offer []byte) ([]byte, rdma.Endpoint, error) {
	answer, e, err := d.target.accept(ctx, d, peer, offer)
	if err != nil {
		return nil, nil, err
	}
	return answer, e, nil
}

// Close implements rdma.Domain.
func (d *domain) Close() error {
	d.target.forget(d)
	return d.end(endDomain)
}

func (d *domain) enter(e *endpoint) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return d.errClosed()
	}
	d.mu.endpoints[e] = struct{}{}
	return nil
}

func (d *domain) leave(e *endpoint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.mu.endpoints, e)
}

func (d *domain) end(reason uint64) error {
	d.mu.Lock()
	d.mu.closed = true
	endpoints, regions := d.mu.endpoints, d.mu.regions
	d.mu.endpoints, d.mu.regions = nil, nil
	d.mu.Unlock()
	for e := range endpoints {
		e.end(reason)
	}
	var err error
	for _, r := range regions {
		err = errors.Join(err, r.file.Close())
	}
	return err
}
