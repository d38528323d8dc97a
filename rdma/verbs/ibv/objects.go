package ibv

import (
	"fmt"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"
)

// Access to a region or a queue pair.
type Access uint32

const (
	AccessLocalWrite   Access = 1 << 0
	AccessRemoteWrite  Access = 1 << 1 // READ sinks on iWARP; otherwise for tests of refusals only
	AccessRemoteRead   Access = 1 << 2
	AccessRemoteAtomic Access = 1 << 3 // for tests of refusals only
)

func (a Access) String() string {
	if a == 0 {
		return "local read"
	}
	var s []string
	for _, f := range []struct {
		bit  Access
		name string
	}{{AccessLocalWrite, "local write"}, {AccessRemoteWrite, "remote write"}, {AccessRemoteRead, "remote read"}, {AccessRemoteAtomic, "remote atomic"}} {
		if a&f.bit != 0 {
			s = append(s, f.name)
		}
	}
	return strings.Join(s, "+")
}

// PD is a protection domain.
type PD struct {
	ctx      *Context
	h        atomic.Uintptr
	children atomic.Int64
}

// NewPD makes a protection domain.
func (c *Context) NewPD() (*PD, error) {
	h, errno := cAllocPD(c.handle())
	if errno != 0 {
		return nil, refused(errno, "ibv_alloc_pd", "%s", c.name)
	}
	p := &PD{ctx: c}
	p.h.Store(h)
	c.children.Add(1)
	live.pds.Add(1)
	return p, nil
}

// Context it belongs to.
func (p *PD) Context() *Context { return p.ctx }

// Close frees the domain; ErrBusy while regions or queue pairs of it are open.
func (p *PD) Close() error {
	if n := p.children.Load(); n > 0 {
		return busy("protection domain of "+p.ctx.name, n, "regions and queue pairs")
	}
	h := p.h.Swap(0)
	if h == 0 {
		return nil
	}
	p.ctx.children.Add(-1)
	live.pds.Add(-1)
	return refused(cDeallocPD(h), "ibv_dealloc_pd", "%s", p.ctx.name)
}

func (p *PD) handle() uintptr { return use(p.h.Load(), "protection domain") }

// MR is a registered memory region.
type MR struct {
	pd         *PD
	h          atomic.Uintptr
	addr       uint64
	length     uint64
	lkey, rkey uint32
}

// RegMR registers b, which must be mapped memory outside the Go heap and stay mapped
// until Close returned. Its pages are pinned: touch them first, that is far faster.
// errors.Is(err, syscall.ENOMEM) is memlock or the device's limit, EFAULT a mapping that
// is not writable.
func (p *PD) RegMR(b []byte, access Access) (*MR, error) {
	if len(b) == 0 {
		return nil, fmt.Errorf("ibv: registration of 0 bytes: want at least one")
	}
	addr := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	h, lkey, rkey, errno := cRegMR(p.handle(), addr, uint64(len(b)), access)
	if errno != 0 {
		return nil, refused(errno, "ibv_reg_mr", "%d bytes on %s for %s", len(b), p.ctx.name, access)
	}
	m := &MR{pd: p, addr: uint64(addr), length: uint64(len(b)), lkey: lkey, rkey: rkey}
	m.h.Store(h)
	p.children.Add(1)
	live.mrs.Add(1)
	return m, nil
}

// Addr is the region's first address, for both local and remote use.
func (m *MR) Addr() uint64 { return m.addr }

// Length in bytes.
func (m *MR) Length() uint64 { return m.length }

// LKey is for own requests.
func (m *MR) LKey() uint32 { return m.lkey }

// RKey is what a peer needs to READ; a capability, not for logs.
func (m *MR) RKey() uint32 { return m.rkey }

// Close deregisters: when it has returned the device touches the memory no more.
func (m *MR) Close() error {
	h := m.h.Swap(0)
	if h == 0 {
		return nil
	}
	m.pd.children.Add(-1)
	live.mrs.Add(-1)
	return refused(cDeregMR(h), "ibv_dereg_mr", "%d bytes on %s", m.length, m.pd.ctx.name)
}

// CQConfig of a completion queue.
type CQConfig struct {
	// Depth is how many completions it must hold; the device may give more.
	Depth int
	// Channel makes it able to wait (Arm, WaitEvent). A queue that is only polled needs
	// none.
	Channel bool
	// Vector of the interrupt, modulo the device's number of them.
	Vector int
}

// CQ is a completion queue.
type CQ struct {
	ctx      *Context
	h        atomic.Uintptr
	channel  uintptr
	events   *eventFD // nil without channel
	depth    int
	children atomic.Int64
	// tryEvent is made once, so that waiting allocates nothing. Its results are valid
	// for the one goroutine that waits.
	tryEvent   func(uintptr) bool
	eventErrno errnoT
}

// NewCQ makes a completion queue.
func (c *Context) NewCQ(cfg CQConfig) (*CQ, error) {
	if cfg.Depth <= 0 {
		return nil, fmt.Errorf("ibv: completion queue of depth %d: want at least 1", cfg.Depth)
	}
	q := &CQ{ctx: c}
	h, channel, fd, depth, errno := cCreateCQ(c.handle(), cfg.Depth, cfg.Channel, cfg.Vector)
	if errno != 0 {
		return nil, refused(errno, "ibv_create_cq", "%s with room for %d", c.name, cfg.Depth)
	}
	if cfg.Channel {
		var err error
		if q.events, err = newEventFD(fd, c.name+" completions"); err != nil {
			cDestroyCQ(h, channel)
			return nil, fmt.Errorf("ibv: completion channel of %s: %w", c.name, err)
		}
		q.tryEvent = func(uintptr) bool {
			var got bool
			got, q.eventErrno = cGetCQEvent(q.channel)
			return got || q.eventErrno != 0
		}
	}
	q.channel, q.depth = channel, depth
	q.h.Store(h)
	c.children.Add(1)
	live.cqs.Add(1)
	return q, nil
}

// Depth is how many completions it holds.
func (q *CQ) Depth() int { return q.depth }

// Poll takes completions, up to len(out). With none there it looks on for spin, at
// most; spin 0 is one look. It may run beside PostAndPoll on the same queue.
func (q *CQ) Poll(out []Completion, spin time.Duration) (int, error) {
	if len(out) == 0 {
		return 0, nil
	}
	n := cPoll(q.handle(), out, spin)
	if n < 0 {
		return 0, refused(errnoT(-n), "ibv_poll_cq", "%s", q.ctx.name)
	}
	return n, nil
}

// Arm asks for an event at the next completion. Poll once more after it, then WaitEvent.
func (q *CQ) Arm() error {
	if errno := cArm(q.handle()); errno != 0 { // the arguments of refused cost an allocation
		return refused(errno, "ibv_req_notify_cq", "%s", q.ctx.name)
	}
	return nil
}

// WaitEvent parks until an armed queue has a completion and acknowledges the event; an
// event may be left from an earlier Arm, so finding nothing afterwards is normal. It
// returns ErrDeadline (SetDeadline) or, when the queue is closed, ErrClosed. One
// goroutine at a time.
func (q *CQ) WaitEvent() error {
	if q.events == nil {
		panic("ibv: WaitEvent on a completion queue without a channel")
	}
	if err := q.events.wait(q.tryEvent); err != nil {
		return err
	}
	if errno := q.eventErrno; errno != 0 {
		return refused(errno, "ibv_get_cq_event", "%s", q.ctx.name)
	}
	return nil
}

// SetDeadline makes a WaitEvent, waiting or to come, return ErrDeadline at t; the zero
// time is none. A past time wakes a waiter up.
func (q *CQ) SetDeadline(t time.Time) error {
	if q.events == nil {
		return nil
	}
	return q.events.setDeadline(t)
}

// Close destroys the queue; ErrBusy while queue pairs use it.
func (q *CQ) Close() error {
	if n := q.children.Load(); n > 0 {
		return busy("completion queue of "+q.ctx.name, n, "queue pairs")
	}
	h := q.h.Swap(0)
	if h == 0 {
		return nil
	}
	if q.events != nil {
		q.events.close()
	}
	q.ctx.children.Add(-1)
	live.cqs.Add(-1)
	return refused(cDestroyCQ(h, q.channel), "ibv_destroy_cq", "%s", q.ctx.name)
}

func (q *CQ) handle() uintptr { return use(q.h.Load(), "completion queue") }
