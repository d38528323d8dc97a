package simnic

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/kvd-io/kvd/rdma"
)

// initiator is the reading NIC of a process on a host.
type initiator struct {
	f      *Fabric
	host   string
	closed bool // guarded by the fabric's lock
}

var _ rdma.Initiator = (*initiator)(nil)

func (h host) NewInitiator(rdma.InitiatorConfig) (rdma.Initiator, error) {
	return &initiator{f: h.f, host: h.name}, nil
}

func (i *initiator) Prepare(ctx context.Context) (rdma.Dial, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("simnic: prepare: %w", err)
	}
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	if i.closed || i.f.mu.closed {
		return nil, fmt.Errorf("%w: initiator on %q", rdma.ErrClosed, i.host)
	}
	return &dial{ini: i, nonce: i.f.mu.rnd.Uint64()}, nil
}

func (i *initiator) Close() error {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	i.closed = true
	for _, id := range slices.Sorted(maps.Keys(i.f.mu.conns)) {
		if c := i.f.mu.conns[id]; c.ini == i {
			c.finishLocked(closedError())
		}
	}
	return nil
}

func closedError() error { return fmt.Errorf("%w: by this side", rdma.ErrClosed) }

type dial struct {
	ini   *initiator
	nonce uint64
	over  bool // guarded by the fabric's lock
}

func (d *dial) Offer() []byte { return encodeOffer(d.nonce) }

func (d *dial) Abort() {
	d.ini.f.mu.Lock()
	defer d.ini.f.mu.Unlock()
	d.over = true
}

func (d *dial) Connect(ctx context.Context, msg []byte) (rdma.Conn, error) {
	f := d.ini.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if d.over {
		return nil, fmt.Errorf("%w: the dial was used or aborted", rdma.ErrClosed)
	}
	d.over = true
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("simnic: connect: %w", err)
	}
	if d.ini.closed || f.mu.closed {
		return nil, fmt.Errorf("%w: initiator on %q", rdma.ErrClosed, d.ini.host)
	}
	a, err := decodeAnswer(msg)
	if err != nil {
		return nil, err
	}
	if f.mu.partitions[pair(d.ini.host, a.target)] {
		return nil, fmt.Errorf("%w: no path from %q to %q", rdma.ErrConnLost, d.ini.host, a.target)
	}
	t := f.mu.targets[a.target]
	if t == nil || t.boot != a.boot {
		return nil, fmt.Errorf("%w: boot %#x of target %q is gone", rdma.ErrRevoked, a.boot, a.target)
	}
	ep := t.pendingLocked(a.token)
	if ep == nil || a.nonce != d.nonce || ep.nonce != d.nonce {
		return nil, fmt.Errorf("%w: target %q does not know this dial: its answer was used, is too old, or is another's", rdma.ErrRevoked, a.target)
	}
	c := newConn(d.ini, t, ep, f.idLocked())
	ep.connectedLocked(c)
	f.mu.conns[c.id] = c
	return c, nil
}
