package ibv

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Transport of a device.
type Transport uint8

const (
	// TransportUnspecified has no reliable connections that kvd could use (EFA, usNIC).
	TransportUnspecified Transport = iota
	TransportIB                    // InfiniBand and RoCE
	TransportIWARP                 // connects by rdma_cm only
)

func (t Transport) String() string {
	switch t {
	case TransportIB:
		return "ib"
	case TransportIWARP:
		return "iwarp"
	}
	return "unspecified"
}

// DeviceInfo describes a device that the library lists.
type DeviceInfo struct {
	Name      string // mlx5_0, rxe0
	NodeType  string // "channel adapter", "RNIC", ...
	Transport Transport
	GUID      uint64
	// NUMANode of the device's slot, -1 where the system does not tell.
	NUMANode int
	// Driver in the kernel (mlx5_core, efa, rdma_rxe), "" where the system does not tell.
	Driver string
	// Unusable says why kvd cannot work with such a device (no reliable connections),
	// "" for all others.
	Unusable string
}

// Devices lists the devices; none is no error. It wraps ErrUnavailable without libraries.
func Devices() ([]DeviceInfo, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	raw, err := cDevices()
	if err != nil {
		return nil, err
	}
	out := make([]DeviceInfo, len(raw))
	for i, d := range raw {
		out[i] = d.info()
	}
	return out, nil
}

// rawDevice is what the shim tells of a device.
type rawDevice struct {
	name      string
	nodeType  int32
	transport int32
	guid      uint64
}

func (d rawDevice) info() DeviceInfo {
	in := DeviceInfo{Name: d.name, NodeType: nodeTypeName(d.nodeType), GUID: d.guid, NUMANode: -1}
	switch d.transport {
	case 0:
		in.Transport = TransportIB
	case 1:
		in.Transport = TransportIWARP
	}
	dev := filepath.Join(sysfsDevices, d.name, "device")
	if b, err := os.ReadFile(filepath.Join(dev, "numa_node")); err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			in.NUMANode = n
		}
	}
	if link, err := os.Readlink(filepath.Join(dev, "driver")); err == nil {
		in.Driver = filepath.Base(link)
	}
	if in.Transport == TransportUnspecified {
		kind := in.NodeType
		if in.Driver != "" {
			kind = in.Driver
		}
		in.Unusable = fmt.Sprintf("no reliable connections (RC) on this kind of device (%s)", kind)
		if in.Driver == "efa" {
			in.Unusable = "EFA has no reliable connections (RC)"
		}
	}
	return in
}

// sysfsDevices is where the kernel describes devices.
const sysfsDevices = "/sys/class/infiniband"

func nodeTypeName(t int32) string {
	switch t {
	case 1:
		return "channel adapter"
	case 2:
		return "switch"
	case 3:
		return "router"
	case 4:
		return "RNIC"
	case 5:
		return "usNIC"
	case 6:
		return "usNIC UDP"
	case 7:
		return "unspecified"
	}
	return "unknown"
}

// Context is an open device. Its methods may be called from several goroutines.
type Context struct {
	name     string
	h        atomic.Uintptr
	shared   bool // librdmacm's: not ours to close
	children atomic.Int64
	async    *eventFD
}

// Open opens the device of that name. It returns ErrNoDevice where there is none.
func Open(name string) (*Context, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	h, asyncFD, err := cOpen(name)
	if err != nil {
		return nil, err
	}
	c := &Context{name: name}
	if c.async, err = newEventFD(asyncFD, name+" async events"); err != nil {
		_ = cClose(h) // the other error is the one to tell
		return nil, fmt.Errorf("ibv: async events of %s: %w", name, err)
	}
	c.h.Store(h)
	live.contexts.Add(1)
	return c, nil
}

// Name of the device.
func (c *Context) Name() string { return c.name }

// Close closes the device; ErrBusy while domains or queues of it are open.
// NextAsyncEvent returns ErrClosed then.
func (c *Context) Close() error {
	h := c.h.Load()
	if h == 0 || c.shared {
		return nil
	}
	if n := c.children.Load(); n > 0 {
		return busy("device "+c.name, n, "domains and completion queues")
	}
	if !c.h.CompareAndSwap(h, 0) {
		return nil
	}
	c.async.close()
	live.contexts.Add(-1)
	return refused(cClose(h), "ibv_close_device", "%s", c.name)
}

func (c *Context) handle() uintptr { return use(c.h.Load(), "device context") }

// use panics for a closed object, which is a bug of ours: C would crash on it, later
// and elsewhere.
func use(h uintptr, what string) uintptr {
	if h == 0 {
		panic("ibv: use of a closed " + what)
	}
	return h
}

// DeviceAttr are a device's limits. They are hints: a request within them may still be
// refused, because other processes use the device too.
type DeviceAttr struct {
	FirmwareVersion string
	NodeGUID        uint64
	VendorID        uint32
	VendorPartID    uint32
	HWVersion       uint32
	Ports           int

	MaxQP       int
	MaxQPWR     int // requests in one queue
	MaxSGE      int
	MaxCQ       int
	MaxCQE      int // completions in one queue
	MaxMR       int
	MaxMRSize   uint64 // bytes
	MaxPD       int
	MaxMW       int    // memory windows; 0: none, whatever the flags say
	PageSizeCap uint64 // bit mask of the page sizes in bytes
	// MaxQPRdAtomic READs of a peer are served at a time on one queue pair;
	// MaxQPInitRdAtomic may be outstanding from here.
	MaxQPRdAtomic     int
	MaxQPInitRdAtomic int
	MaxResRdAtomic    int
	MaxPKeys          int
	AtomicCap         int // 0 none, 1 this device, 2 all
	CapFlags          uint32
	LocalCAAckDelay   int
	// ODP is on-demand paging: ODPReadRC tells that READs of reliable connections can
	// be served from such memory.
	ODP, ODPReadRC bool
}

// QueryDevice asks for the limits.
func (c *Context) QueryDevice() (DeviceAttr, error) {
	a, errno := cQueryDevice(c.handle())
	return a, refused(errno, "ibv_query_device", "%s", c.name)
}

// AsyncEventType of an AsyncEvent. Types that kvd does not know are kept as numbers.
type AsyncEventType int

const (
	AsyncCQErr AsyncEventType = iota
	AsyncQPFatal
	AsyncQPRequestErr
	AsyncQPAccessErr
	AsyncCommEstablished
	AsyncSQDrained
	AsyncPathMigrated
	AsyncPathMigrateErr
	AsyncDeviceFatal
	AsyncPortActive
	AsyncPortErr
	AsyncLIDChange
	AsyncPKeyChange
	AsyncSMChange
	AsyncSRQErr
	AsyncSRQLimitReached
	AsyncQPLastWQEReached
	AsyncClientReregister
	AsyncGIDChange
	AsyncWQFatal
)

var asyncNames = [...]string{
	"completion queue error", "queue pair fatal", "queue pair request error", "queue pair access error",
	"communication established", "send queue drained", "path migrated", "path migration error", "device fatal",
	"port active", "port error", "LID change", "P_Key change", "subnet manager change", "SRQ error", "SRQ limit",
	"last request reached", "client reregister", "GID change", "work queue fatal",
}

func (t AsyncEventType) String() string {
	if t >= 0 && int(t) < len(asyncNames) {
		return asyncNames[t]
	}
	return fmt.Sprintf("async event %d", int(t))
}

// AsyncEvent is something that happened to a device, outside of any request.
type AsyncEvent struct {
	Type AsyncEventType
	Port int    // of port, LID, P_Key, subnet manager and GID events; otherwise 0
	QPN  uint32 // of queue pair events; otherwise 0
}

// NextAsyncEvent parks until the next event (it was acknowledged already), or until the
// context is closed: then ErrClosed. One goroutine at a time.
func (c *Context) NextAsyncEvent() (AsyncEvent, error) {
	var ev AsyncEvent
	var errno errnoT
	err := c.async.wait(func(uintptr) bool {
		h := c.h.Load()
		if h == 0 {
			errno = errnoClosed
			return true
		}
		var got bool
		ev, got, errno = cGetAsyncEvent(h)
		return got || errno != 0
	})
	if err != nil {
		return AsyncEvent{}, err
	}
	if errno == errnoClosed {
		return AsyncEvent{}, ErrClosed
	}
	return ev, refused(errno, "ibv_get_async_event", "%s", c.name)
}

// SetAsyncDeadline makes a NextAsyncEvent, waiting or to come, return ErrDeadline at t;
// the zero time is none.
func (c *Context) SetAsyncDeadline(t time.Time) error { return c.async.setDeadline(t) }
