package tcp

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// domain is a protection domain: regions, and the endpoints that may READ them.
type domain struct {
	t    *target
	name string

	// memory is read-locked by whoever copies out of a region, for the copying of at
	// most about one output buffer, and never across I/O. So when Deregister has had
	// the write lock nobody is copying from the region any more.
	memory struct {
		sync.RWMutex
		regions map[rdma.RegionID][]byte
	}

	mu struct {
		sync.Mutex
		closed    bool
		endpoints map[*endpoint]struct{}
	}
}

// Register exposes m as region id.
func (d *domain) Register(id rdma.RegionID, m *rdma.Memory) ([]byte, error) {
	d.mu.Lock()
	closed := d.mu.closed
	d.mu.Unlock()
	if closed {
		return nil, fmt.Errorf("%w: tcp: domain %q", rdma.ErrClosed, d.name)
	}
	b := m.Bytes()
	if len(b) == 0 {
		return nil, fmt.Errorf("tcp: region %d of domain %q: memory %q has been freed", id, d.name, m.Name())
	}
	d.memory.Lock()
	defer d.memory.Unlock()
	if _, ok := d.memory.regions[id]; ok {
		return nil, fmt.Errorf("tcp: region %d of domain %q is registered: take another id", id, d.name)
	}
	d.memory.regions[id] = b
	return encodeAttr(id, uint64(len(b))), nil
}

// Deregister ends access to the region. When it has returned nothing touches the
// memory. An unknown region is the caller's mistake.
func (d *domain) Deregister(id rdma.RegionID) error {
	d.memory.Lock()
	defer d.memory.Unlock()
	if _, ok := d.memory.regions[id]; !ok {
		return fmt.Errorf("tcp: region %d of domain %q is not registered", id, d.name)
	}
	delete(d.memory.regions, id)
	return nil
}

// spanRLocked is the bytes [offset, offset+length) of a region, nil where they do
// not exist. They are borrowed until the read lock is released.
func (d *domain) spanRLocked(id rdma.RegionID, offset, length uint64) []byte {
	region, ok := d.memory.regions[id]
	size := uint64(len(region))
	if !ok || offset > size || length > size-offset {
		return nil
	}
	return region[offset : offset+length : offset+length]
}

// Accept answers an offer with a token that is good for one connection within
// the accept timeout.
func (d *domain) Accept(ctx context.Context, peer rdma.Peer, offer []byte) ([]byte, rdma.Endpoint, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, fmt.Errorf("tcp: accept: %w", err)
	}
	if err := checkOffer(offer); err != nil {
		return nil, nil, err
	}
	t := d.t
	if n := t.slots.Add(1); n > int64(t.p.MaxConnections) {
		t.slots.Add(-1)
		return nil, nil, fmt.Errorf("%w: tcp: %d connections: raise MaxConnections or close some", rdma.ErrExhausted, t.p.MaxConnections)
	}
	ep := &endpoint{d: d, peer: peer, done: make(chan struct{})}
	_, _ = rand.Read(ep.token[:]) // never fails: crypto/rand ends the process first
	d.mu.Lock()
	if d.mu.closed {
		d.mu.Unlock()
		t.slots.Add(-1)
		return nil, nil, fmt.Errorf("%w: tcp: domain %q", rdma.ErrClosed, d.name)
	}
	// Under d.mu, so that a Close that sees the endpoint can also take its token.
	d.mu.endpoints[ep] = struct{}{}
	t.mu.Lock()
	t.mu.waiting[ep.token] = ep
	t.mu.Unlock()
	d.mu.Unlock()
	ep.mu.Lock()
	ep.mu.expiry = time.AfterFunc(t.p.AcceptTimeout, ep.expire)
	ep.mu.Unlock()
	a := answer{
		tls: t.p.ServerTLS != nil, nodeID: t.node.NodeID, bootID: t.node.BootID,
		token: ep.token, addrs: t.addrs, name: t.certificateName(),
	}
	return a.encode(), ep, nil
}

// Close revokes the domain's connections, then deregisters its regions.
func (d *domain) Close() error {
	d.mu.Lock()
	d.mu.closed = true
	endpoints := make([]*endpoint, 0, len(d.mu.endpoints))
	for ep := range d.mu.endpoints {
		endpoints = append(endpoints, ep)
	}
	d.mu.Unlock()
	for _, ep := range endpoints {
		_ = ep.Close()
	}
	// All were told at once; each says goodbye within goodbyeTimeout.
	for _, ep := range endpoints {
		<-ep.done
	}
	d.memory.Lock()
	clear(d.memory.regions)
	d.memory.Unlock()
	d.t.mu.Lock()
	delete(d.t.mu.domains, d)
	d.t.mu.Unlock()
	return nil
}
