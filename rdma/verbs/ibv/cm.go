package ibv

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// CMEventType of a CMEvent.
type CMEventType int

const (
	CMAddrResolved CMEventType = iota
	CMAddrError
	CMRouteResolved
	CMRouteError
	CMConnectRequest
	CMConnectResponse
	CMConnectError
	CMUnreachable
	CMRejected
	CMEstablished
	CMDisconnected
	CMDeviceRemoval
	CMMulticastJoin
	CMMulticastError
	CMAddrChange
	CMTimewaitExit
)

var cmNames = [...]string{
	"address resolved", "address error", "route resolved", "route error", "connect request", "connect response",
	"connect error", "unreachable", "rejected", "established", "disconnected", "device removal", "multicast join",
	"multicast error", "address change", "timewait exit",
}

func (t CMEventType) String() string {
	if t >= 0 && int(t) < len(cmNames) {
		return cmNames[t]
	}
	return fmt.Sprintf("cm event %d", int(t))
}

// MaxCMPrivateData is what a connect request carries at most, in bytes.
const MaxCMPrivateData = 56

// CMEvent is an event of a connection id. It was acknowledged already.
type CMEvent struct {
	Type CMEventType
	// Status is a negative errno for errors, a transport's reason for CMRejected.
	Status int
	ID     *CMID // for CMConnectRequest the new id, now the receiver's to close
	Listen *CMID // of CMConnectRequest: the id that listens
	// PrivateData of the peer, a copy; may be longer than what was sent (zeros).
	PrivateData        []byte
	ResponderResources int // READs the peer will have outstanding (of a request)
	InitiatorDepth     int // READs the peer serves at a time (of a request)
}

// Err is the event as an error: nil for those that are none.
func (e CMEvent) Err() error {
	switch e.Type {
	case CMAddrError, CMRouteError, CMConnectError, CMUnreachable, CMRejected, CMDeviceRemoval, CMDisconnected:
		err := fmt.Errorf("ibv: rdma_cm: %s (status %d)", e.Type, e.Status)
		if e.Status < 0 {
			err = fmt.Errorf("%w: %w", err, syscall.Errno(-e.Status))
		}
		return err
	}
	return nil
}

// CMChannel delivers the events of its connection ids.
type CMChannel struct {
	events *eventFD
	// mu also makes taking an event and destroying an id exclude each other: the
	// library may give a new id the address of an old one.
	mu struct {
		sync.Mutex
		h      uintptr
		closed bool
		ids    map[uintptr]*CMID
	}
}

// NewCMChannel opens a channel. It wraps ErrUnavailable without librdmacm.
func NewCMChannel() (*CMChannel, error) {
	if err := RDMACMAvailable(); err != nil {
		return nil, err
	}
	h, fd, errno := cCMCreateChannel()
	if errno != 0 {
		return nil, refused(errno, "rdma_create_event_channel", "this host (is the module rdma_ucm loaded?)")
	}
	c := &CMChannel{}
	var err error
	if c.events, err = newEventFD(fd, "rdma_cm events"); err != nil {
		cCMDestroyChannel(h)
		return nil, fmt.Errorf("ibv: rdma_cm event channel: %w", err)
	}
	c.mu.h = h
	c.mu.ids = map[uintptr]*CMID{}
	live.cmChannels.Add(1)
	return c, nil
}

// Close closes the channel; ErrBusy while ids of it are open. Next returns ErrClosed.
func (c *CMChannel) Close() error {
	c.mu.Lock()
	if c.mu.closed {
		c.mu.Unlock()
		return nil
	}
	if n := len(c.mu.ids); n > 0 {
		c.mu.Unlock()
		return busy("rdma_cm event channel", int64(n), "connection ids")
	}
	c.mu.closed = true
	c.mu.Unlock()
	c.events.close() // waits for Next's look at the descriptor, which takes the lock
	cCMDestroyChannel(c.mu.h)
	live.cmChannels.Add(-1)
	return nil
}

// SetDeadline makes a Next, waiting or to come, return ErrDeadline at t; the zero time
// is none.
func (c *CMChannel) SetDeadline(t time.Time) error { return c.events.setDeadline(t) }

// Next parks until the next event of an id that is still open. It returns ErrClosed
// after Close. One goroutine at a time.
func (c *CMChannel) Next() (CMEvent, error) {
	for {
		var ev CMEvent
		var have bool
		var errno errnoT
		err := c.events.wait(func(uintptr) bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.mu.closed {
				errno = errnoClosed
				return true
			}
			var raw rawCMEvent
			var got bool
			got, errno = cCMGetEvent(c.mu.h, &raw)
			if !got {
				return errno != 0
			}
			ev, have = c.decodeLocked(&raw)
			return true
		})
		switch {
		case err != nil:
			return CMEvent{}, err
		case errno == errnoClosed:
			return CMEvent{}, ErrClosed
		case errno != 0:
			return CMEvent{}, refused(errno, "rdma_get_cm_event", "")
		case have:
			return ev, nil
		}
	}
}

// rawCMEvent has the shim's layout.
type rawCMEvent struct {
	id, listen         uint64
	typ                int32
	status             int32
	responderResources uint8
	initiatorDepth     uint8
	privateLen         uint8
	_                  [5]uint8
	private            [256]byte
}

// decodeLocked also gives an id that a request made its Go side. ok is false for events
// of ids that were closed meanwhile.
func (c *CMChannel) decodeLocked(raw *rawCMEvent) (ev CMEvent, ok bool) {
	ev = CMEvent{
		Type: CMEventType(raw.typ), Status: int(raw.status), PrivateData: append([]byte(nil), raw.private[:raw.privateLen]...),
		ResponderResources: int(raw.responderResources), InitiatorDepth: int(raw.initiatorDepth),
	}
	if ev.Type == CMConnectRequest {
		ev.Listen = c.mu.ids[uintptr(raw.listen)]
		ev.ID = c.adoptLocked(uintptr(raw.id))
		return ev, true
	}
	ev.ID = c.mu.ids[uintptr(raw.id)]
	return ev, ev.ID != nil
}

func (c *CMChannel) adoptLocked(h uintptr) *CMID {
	id := &CMID{channel: c}
	id.h.Store(h)
	c.mu.ids[h] = id
	live.cmIDs.Add(1)
	return id
}

// CMID is a connection, or a listener, of rdma_cm. Calls return at once; their outcome
// is an event of the channel.
type CMID struct {
	channel  *CMChannel
	h        atomic.Uintptr
	children atomic.Int64 // queue pairs
	// Value is the owner's to use.
	Value any
}

// NewID makes a connection id for reliable connections.
func (c *CMChannel) NewID() (*CMID, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return nil, ErrClosed
	}
	h, errno := cCMCreateID(c.mu.h)
	if errno != 0 {
		return nil, refused(errno, "rdma_create_id", "")
	}
	return c.adoptLocked(h), nil
}

// Close destroys the id; ErrBusy while its queue pair is open. A connection that is up
// is taken down.
func (id *CMID) Close() error {
	if n := id.children.Load(); n > 0 {
		return busy("rdma_cm id", n, "queue pairs")
	}
	c := id.channel
	c.mu.Lock()
	defer c.mu.Unlock()
	h := id.h.Swap(0)
	if h == 0 {
		return nil
	}
	delete(c.mu.ids, h)
	live.cmIDs.Add(-1)
	return refused(cCMDestroyID(h), "rdma_destroy_id", "")
}

func (id *CMID) handle() uintptr { return use(id.h.Load(), "rdma_cm id") }

// Bind binds the id to a local address (port 0: any), and so to a device.
func (id *CMID) Bind(addr netip.AddrPort) error {
	return refused(cCMBind(id.handle(), addr), "rdma_bind_addr", "%s", addr)
}

// Listen starts listening on a bound id.
func (id *CMID) Listen(backlog int) error {
	return refused(cCMListen(id.handle(), backlog), "rdma_listen", "backlog %d", backlog)
}

// LocalAddr and RemoteAddr are the id's addresses; not valid before it is bound or
// resolved.
func (id *CMID) LocalAddr() netip.AddrPort { return cCMAddr(id.handle(), false) }

// RemoteAddr is the peer's address.
func (id *CMID) RemoteAddr() netip.AddrPort { return cCMAddr(id.handle(), true) }

// DeviceName is the device that the id is bound to, "" while it is bound to none.
func (id *CMID) DeviceName() string {
	name, _ := cCMDevice(id.handle())
	return name
}

// Port is the device's port that the id is bound to, 0 while it is bound to none.
func (id *CMID) Port() int {
	_, port := cCMDevice(id.handle())
	return port
}

// ResolveAddr finds the device for dst: CMAddrResolved or CMAddrError follows. src may be
// the zero AddrPort.
func (id *CMID) ResolveAddr(src, dst netip.AddrPort, timeout time.Duration) error {
	return refused(cCMResolveAddr(id.handle(), src, dst, timeout), "rdma_resolve_addr", "%s", dst)
}

// ResolveRoute follows CMAddrResolved: CMRouteResolved or CMRouteError follows.
func (id *CMID) ResolveRoute(timeout time.Duration) error {
	return refused(cCMResolveRoute(id.handle(), timeout), "rdma_resolve_route", "")
}

// Context is the device that the id is bound to, as librdmacm opened it: queue pairs
// made by NewQP of the id, and their domains, queues and regions, must be made on it. It is
// valid while any id bound to the device is open; Close of it does nothing.
func (id *CMID) Context() (*Context, error) {
	h := cCMContext(id.handle())
	if h == 0 {
		return nil, errors.New("ibv: rdma_cm id is bound to no device: bind it to an address of one or resolve an address first")
	}
	c := &Context{name: id.DeviceName(), shared: true}
	c.h.Store(h)
	return c, nil
}

// NewQP makes the id's queue pair, in a domain of the id's Context; rdma_cm moves it
// through its states. Close the QP before the id.
func (id *CMID) NewQP(pd *PD, cfg QPConfig) (*QP, error) {
	return pd.newQP(cfg, id)
}

// CMParams of Connect and Accept.
type CMParams struct {
	// QP is the connection's queue pair where it is not the id's own (NewQP): made on any
	// context of the device, in state INIT. On iWARP the kernel moves it on, and its access
	// rights are those of INIT; on InfiniBand and RoCE the caller would have to.
	QP                 *QP
	PrivateData        []byte // at most MaxCMPrivateData for Connect; copied
	ResponderResources int    // READs of the peer that are served at a time
	InitiatorDepth     int    // own READs outstanding at a time
	RetryCount         int    // 0 to 7; not on iWARP
	RNRRetryCount      int    // 0 to 7; not on iWARP
}

func (p CMParams) raw() (r rawCMParams, err error) {
	if len(p.PrivateData) > MaxCMPrivateData {
		return r, fmt.Errorf("ibv: rdma_cm private data of %d bytes: want at most %d", len(p.PrivateData), MaxCMPrivateData)
	}
	if p.QP != nil {
		r.qpn = p.QP.num
	}
	r.privateLen = uint8(copy(r.private[:], p.PrivateData))
	r.responderResources = byteOf(p.ResponderResources, "responder resources", 255, &err)
	r.initiatorDepth = byteOf(p.InitiatorDepth, "initiator depth", 255, &err)
	r.retry = byteOf(p.RetryCount, "retry count", 7, &err)
	r.rnrRetry = byteOf(p.RNRRetryCount, "RNR retry count", 7, &err)
	return r, err
}

// rawCMParams has the shim's layout.
type rawCMParams struct {
	qpn                uint32
	responderResources uint8
	initiatorDepth     uint8
	retry              uint8
	rnrRetry           uint8
	privateLen         uint8
	_                  [3]uint8
	private            [MaxCMPrivateData]byte
}

// Connect follows CMRouteResolved, with the queue pair made: CMEstablished, CMRejected,
// CMUnreachable or CMConnectError follows. The connecting side must send first on iWARP.
func (id *CMID) Connect(p CMParams) error {
	r, err := p.raw()
	if err != nil {
		return err
	}
	return refused(cCMConnect(id.handle(), &r), "rdma_connect", "")
}

// Accept answers a CMConnectRequest, with the queue pair made: CMEstablished follows, or
// an error.
func (id *CMID) Accept(p CMParams) error {
	r, err := p.raw()
	if err != nil {
		return err
	}
	return refused(cCMAccept(id.handle(), &r), "rdma_accept", "")
}

// Reject refuses a CMConnectRequest; reason is private data for the peer. Close the id
// afterwards.
func (id *CMID) Reject(reason []byte) error {
	if len(reason) > MaxCMPrivateData {
		reason = reason[:MaxCMPrivateData]
	}
	return refused(cCMReject(id.handle(), reason), "rdma_reject", "")
}

// Disconnect ends the connection: CMDisconnected follows on both sides.
func (id *CMID) Disconnect() error {
	return refused(cCMDisconnect(id.handle()), "rdma_disconnect", "")
}
