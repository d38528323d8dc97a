package ibv

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"unsafe"
)

// The shim reads and writes Go's structs as its own.
func TestLayouts(t *testing.T) {
	for _, l := range layouts() {
		if l.goSize != l.cSize || l.goFieldOffset != l.cFieldOffset {
			t.Errorf("%s: Go has size %d and field offset %d, C %d and %d", l.name, l.goSize, l.goFieldOffset, l.cSize, l.cFieldOffset)
		}
	}
	// Both are arrays in C: no padding that an element would add.
	if s := unsafe.Sizeof(ReadWR{}); s != 40 {
		t.Errorf("ReadWR has %d bytes, want 40", s)
	}
	if s := unsafe.Sizeof(Completion{}); s != 32 {
		t.Errorf("Completion has %d bytes, want 32", s)
	}
}

// Whatever this host and this build have: the status is consistent, and what cannot work
// says why with the class that callers look for.
func TestStatusAndRefusals(t *testing.T) {
	s := Status()
	t.Logf("%+v", s)
	if s.BuildNote == "" || s.Verbs.Name != libVerbs || s.RDMACM.Name != libRDMACM {
		t.Errorf("status %+v: want a build note and the names of the libraries", s)
	}
	for _, l := range []Library{s.Verbs, s.RDMACM} {
		if l.Found == (l.Err != "") {
			t.Errorf("%+v: want either found or an error", l)
		}
		if l.Found && !strings.Contains(l.Path, "/") {
			t.Errorf("%+v: found without a path", l)
		}
	}
	if err := Available(); err == nil {
		const none = "kvd-no-such-device"
		if _, err := Open(none); !errors.Is(err, ErrNoDevice) || !strings.Contains(err.Error(), none) {
			t.Errorf("open of no device: %v: want ErrNoDevice with the name", err)
		}
		if _, err := Devices(); err != nil {
			t.Errorf("list of devices: %v", err)
		}
		return
	} else if !errors.Is(err, ErrUnavailable) {
		t.Errorf("%v: want ErrUnavailable", err)
	}
	if _, err := Devices(); !errors.Is(err, ErrUnavailable) {
		t.Errorf("Devices: %v: want ErrUnavailable", err)
	}
	if _, err := Open("x"); !errors.Is(err, ErrUnavailable) {
		t.Errorf("Open: %v: want ErrUnavailable", err)
	}
	if _, err := NewCMChannel(); !errors.Is(err, ErrUnavailable) {
		t.Errorf("NewCMChannel: %v: want ErrUnavailable", err)
	}
}

func TestUnavailableSaysWhatToDo(t *testing.T) {
	l := Library{Name: libRDMACM, Err: "cannot open shared object file"}
	err := l.available("librdmacm1")
	if !errors.Is(err, ErrUnavailable) {
		t.Fatalf("%v: want ErrUnavailable", err)
	}
	for _, want := range []string{libRDMACM, "cannot open", "install librdmacm1"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q lacks %q", err, want)
		}
	}
}

func TestErrorText(t *testing.T) {
	err := refused(syscall.ENOMEM, "ibv_reg_mr", "%d bytes on %s", 4096, "rxe0")
	if want := "ibv: ibv_reg_mr of 4096 bytes on rxe0: cannot allocate memory (errno 12)"; err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
	if !errors.Is(err, syscall.ENOMEM) {
		t.Error("errors.Is does not find the errno")
	}
	if err := refused(0, "x", "y"); err != nil {
		t.Errorf("errno 0: %v", err)
	}
	if err := refused(syscall.EIO, "rdma_x", ""); err.Error() != "ibv: rdma_x: input/output error (errno 5)" {
		t.Errorf("%q", err)
	}
}

func TestLibraryVersion(t *testing.T) {
	for _, c := range []struct{ soname, path, want string }{
		{libVerbs, "/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0", "1.14.44.0"},
		{libVerbs, "/usr/lib/libibverbs.so.1", ""},
		{libVerbs, "/opt/other.so.1.2", ""},
		{libVerbs, "", ""},
		{libRDMACM, "librdmacm.so.1.3.44.0", "1.3.44.0"},
	} {
		if got := libraryVersion(c.soname, c.path); got != c.want {
			t.Errorf("%s: %q, want %q", c.path, got, c.want)
		}
	}
}

func TestPortDecode(t *testing.T) {
	for _, c := range []struct {
		speed uint32
		width uint8
		want  uint64
	}{
		{1, 2, 10_000_000_000},    // SDR 4X
		{32, 2, 100_000_000_000},  // EDR 4X
		{64, 2, 200_000_000_000},  // HDR 4X
		{128, 2, 400_000_000_000}, // NDR 4X
		{16, 8, 168_000_000_000},  // FDR 12X
		{64, 16, 100_000_000_000}, // HDR 2X
		{32, 1, 25_000_000_000},
		{3, 2, 0}, // no such code: not known rather than wrong
		{32, 3, 0},
	} {
		a := rawPort{activeSpeed: c.speed, activeWidth: c.width}.attr()
		if a.BitsPerSecond != c.want {
			t.Errorf("speed %d width %d: %d bit/s, want %d", c.speed, c.width, a.BitsPerSecond, c.want)
		}
	}
	a := rawPort{state: 4, maxMTU: 5, activeMTU: 3, linkLayer: 2, lid: 7, smLID: 1, physState: 5, gidTblLen: 16, pkeyTblLen: 2, flags: 1}.attr()
	if a.State != PortActive || a.State.String() != "active" || a.LinkLayer != LinkEthernet || a.ActiveMTU.Bytes() != 1024 ||
		a.MaxMTU.Bytes() != 4096 || a.PhysState != "link up" || a.LID != 7 || a.SMLID != 1 || a.GIDTableLen != 16 || a.PKeyTblLen != 2 || !a.GRHRequired {
		t.Errorf("%+v", a)
	}
	if l := (rawPort{linkLayer: 77}).attr().LinkLayer; l != LinkUnspecified {
		t.Errorf("link layer 77 is %v", l)
	}
}

func TestParseRate(t *testing.T) {
	for in, want := range map[string]uint64{
		"100 Gb/sec (4X EDR)\n": 100_000_000_000, "2.5 Gb/sec (1X SDR)": 2_500_000_000, "": 0, "fast": 0,
		"-1 Gb/sec": 0, "1 Mb/sec": 0, "1e300 Gb/sec": 0, "NaN Gb/sec": 0,
	} {
		if got := parseRate(in); got != want {
			t.Errorf("%q: %d, want %d", in, got, want)
		}
	}
}

func TestMTU(t *testing.T) {
	for n, want := range map[int]MTU{255: 0, 256: MTU256, 1023: MTU512, 1024: MTU1024, 4095: MTU2048, 4096: MTU4096, 9000: MTU4096} {
		if got := MTUOf(n); got != want {
			t.Errorf("MTUOf(%d) = %d, want %d", n, got, want)
		}
	}
	if MTU(0).Bytes() != 0 || MTU(6).Bytes() != 0 {
		t.Error("a code that is none has bytes")
	}
}

func TestGID(t *testing.T) {
	gid := func(s string) (g GID) {
		b, err := hex.DecodeString(strings.ReplaceAll(s, ":", ""))
		if err != nil || copy(g[:], b) != 16 {
			t.Fatal(s, err)
		}
		return g
	}
	for _, c := range []struct {
		g         GID
		text      string
		linkLocal bool
		zero      bool
	}{
		{gid("0000:0000:0000:0000:0000:ffff:0a4d:0001"), "10.77.0.1", false, false},
		{gid("0000:0000:0000:0000:0000:ffff:a9fe:0001"), "169.254.0.1", true, false},
		{gid("fe80:0000:0000:0000:5054:00ff:fe12:3456"), "fe80::5054:ff:fe12:3456", true, false},
		{gid("2001:0db8:0000:0000:0000:0000:0000:0001"), "2001:db8::1", false, false},
		{GID{}, "::", false, true},
	} {
		if c.g.String() != c.text || c.g.LinkLocal() != c.linkLocal || c.g.IsZero() != c.zero {
			t.Errorf("%s: %s link-local %v zero %v", c.text, c.g, c.g.LinkLocal(), c.g.IsZero())
		}
	}
	for _, c := range []struct {
		word string
		link LinkLayer
		want GIDType
	}{
		{"RoCE v2\n", LinkEthernet, GIDTypeRoCEv2}, {"IB/RoCE v1\n", LinkEthernet, GIDTypeRoCEv1},
		{"IB/RoCE v1\n", LinkInfiniBand, GIDTypeIB}, {"RoCE v9", LinkEthernet, GIDTypeUnknown}, {"", LinkInfiniBand, GIDTypeUnknown},
	} {
		if got := parseGIDType(c.word, c.link); got != c.want {
			t.Errorf("%q on %s: %s, want %s", c.word, c.link, got, c.want)
		}
	}
}

func TestDeviceInfo(t *testing.T) {
	in := rawDevice{name: "kvd-none0", nodeType: 1, transport: 0, guid: 1}.info()
	if in.Transport != TransportIB || in.NodeType != "channel adapter" || in.Unusable != "" || in.NUMANode != -1 {
		t.Errorf("%+v", in)
	}
	if in := (rawDevice{name: "kvd-none0", nodeType: 4, transport: 1}).info(); in.Transport != TransportIWARP || in.Unusable != "" {
		t.Errorf("%+v", in)
	}
	in = rawDevice{name: "kvd-none0", nodeType: 7, transport: 4}.info() // as EFA says
	if in.Transport != TransportUnspecified || !strings.Contains(in.Unusable, "RC") {
		t.Errorf("%+v: want it unusable, with the reason", in)
	}
}

// What C would cut to a byte is refused with the figure, before C sees it: these queue
// pairs exist in name only.
func TestQPParamsRefused(t *testing.T) {
	q := &QP{pd: &PD{ctx: &Context{name: "none"}}}
	gid := GID{15: 1}
	good := RTRParams{DestQPN: 1, PathMTU: MTU1024, MaxDestRdAtomic: 16, MinRNRTimer: 12, Port: 1, Global: true, DGID: gid}
	bad := func(change func(*RTRParams)) RTRParams {
		p := good
		change(&p)
		return p
	}
	for want, p := range map[string]RTRParams{
		"service level 16":      bad(func(p *RTRParams) { p.SL = 16 }),
		"min_rnr_timer 32":      bad(func(p *RTRParams) { p.MinRNRTimer = 32 }),
		"GID index 256":         bad(func(p *RTRParams) { p.SGIDIndex = 256 }),
		"traffic class -1":      bad(func(p *RTRParams) { p.TrafficClass = -1 }),
		"path MTU code 0":       bad(func(p *RTRParams) { p.PathMTU = 0 }),
		"PSN 0x1000000":         bad(func(p *RTRParams) { p.PSN = 1 << 24 }),
		"GID is zero":           bad(func(p *RTRParams) { p.DGID = GID{} }),
		"flow label 0x100000":   bad(func(p *RTRParams) { p.FlowLabel = 1 << 20 }),
		"max_dest_rd_atomic -2": bad(func(p *RTRParams) { p.MaxDestRdAtomic = -2 }),
	} {
		if err := q.ToRTR(p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q", err, want)
		}
	}
	for want, p := range map[string]RTSParams{
		"retry count 8": {RetryCount: 8}, "timeout 32": {Timeout: 32}, "RNR retry 9": {RNRRetry: 9}, "PSN 0x1000000": {PSN: 1 << 24},
		"max_rd_atomic 256": {MaxRdAtomic: 256},
	} {
		if err := q.ToRTS(p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q", err, want)
		}
	}
	if err := q.ToInit(InitParams{Port: 1, PKeyIndex: 1 << 16}); err == nil {
		t.Error("P_Key index 65536 is accepted")
	}
	if _, err := (CMParams{PrivateData: make([]byte, 57)}).raw(); err == nil || !strings.Contains(err.Error(), "56") {
		t.Errorf("57 bytes of private data: %v", err)
	}
	r, err := (CMParams{PrivateData: []byte("token"), QP: &QP{num: 9}, ResponderResources: 1, InitiatorDepth: 16}).raw()
	if err != nil || r.privateLen != 5 || string(r.private[:5]) != "token" || r.qpn != 9 || r.responderResources != 1 || r.initiatorDepth != 16 {
		t.Errorf("%+v %v", r, err)
	}
}

func TestUseAfterClosePanics(t *testing.T) {
	for name, f := range map[string]func(){
		"queue pair":        func() { _ = (&QP{}).ToError() },
		"completion queue":  func() { _ = (&CQ{}).Arm() },
		"protection domain": func() { _, _ = (&PD{}).RegMR(make([]byte, 1), 0) },
		"device context":    func() { _, _ = (&Context{}).QueryDevice() },
		"rdma_cm id":        func() { _ = (&CMID{}).Disconnect() },
	} {
		func() {
			defer func() {
				if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), name) {
					t.Errorf("%s: %v: want a panic that names it", name, r)
				}
			}()
			f()
		}()
	}
	for _, close := range []func() error{(&QP{}).Close, (&CQ{}).Close, (&PD{}).Close, (&MR{}).Close, (&Context{}).Close} {
		if err := close(); err != nil { // as after a first Close
			t.Errorf("second Close: %v", err)
		}
	}
}

func TestCloseOrder(t *testing.T) {
	c := &Context{name: "none"}
	c.h.Store(1)
	c.children.Add(2)
	if err := c.Close(); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "2 ") {
		t.Errorf("context: %v", err)
	}
	p := &PD{ctx: c}
	p.h.Store(1)
	p.children.Add(1)
	if err := p.Close(); !errors.Is(err, ErrBusy) || p.h.Load() != 1 {
		t.Errorf("domain: %v: want ErrBusy, and it stays open", err)
	}
	q := &CQ{ctx: c}
	q.h.Store(1)
	q.children.Add(1)
	if err := q.Close(); !errors.Is(err, ErrBusy) {
		t.Errorf("completion queue: %v", err)
	}
	id := &CMID{}
	id.h.Store(1)
	id.children.Add(1)
	if err := id.Close(); !errors.Is(err, ErrBusy) {
		t.Errorf("id: %v", err)
	}
}

func TestCMEvents(t *testing.T) {
	c := &CMChannel{}
	known := &CMID{channel: c}
	c.mu.ids = map[uintptr]*CMID{8: known}
	before := Live().CMIDs
	raw := rawCMEvent{id: 8, typ: int32(CMRejected), status: -int32(syscall.ECONNREFUSED), privateLen: 3}
	copy(raw.private[:], "why")
	ev, ok := c.decodeLocked(&raw)
	if !ok || ev.ID != known || string(ev.PrivateData) != "why" || !errors.Is(ev.Err(), syscall.ECONNREFUSED) {
		t.Errorf("%+v %v %v", ev, ok, ev.Err())
	}
	if _, ok := c.decodeLocked(&rawCMEvent{id: 16, typ: int32(CMDisconnected)}); ok {
		t.Error("an event of a closed id was delivered")
	}
	ev, ok = c.decodeLocked(&rawCMEvent{id: 24, listen: 8, typ: int32(CMConnectRequest), initiatorDepth: 16, responderResources: 4})
	if !ok || ev.Listen != known || ev.ID == nil || c.mu.ids[24] != ev.ID || ev.InitiatorDepth != 16 || ev.ResponderResources != 4 || ev.Err() != nil {
		t.Errorf("%+v %v", ev, ok)
	}
	if got := Live().CMIDs - before; got != 1 {
		t.Errorf("%d ids counted, want 1", got)
	}
	live.cmIDs.Add(-1) // that id exists in name only
}

func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		WCRemAccessErr.String(): "remote access refused", WCStatus(99).String(): "completion status 99",
		AsyncDeviceFatal.String(): "device fatal", AsyncEventType(77).String(): "async event 77",
		CMTimewaitExit.String(): "timewait exit", CMEventType(77).String(): "cm event 77",
		WCRetryExcErr.String(): "retries exceeded", AsyncGIDChange.String(): "GID change", QPError.String(): "ERR", QPState(9).String(): "state 9",
		(AccessLocalWrite | AccessRemoteRead).String(): "local write+remote read", Access(0).String(): "local read",
		TransportIWARP.String(): "iwarp", GIDTypeRoCEv2.String(): "RoCE v2", WCGeneralErr.String(): "general error",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	// The last name of each table sits where the library's enums end.
	if WCGeneralErr != 21 || AsyncWQFatal != 19 || CMTimewaitExit != 15 {
		t.Error("an enum has shifted")
	}
	if netip.MustParseAddr("10.0.0.1") != (GID{10: 0xff, 11: 0xff, 12: 10, 15: 1}).Addr() {
		t.Error("a mapped GID is not its IPv4 address")
	}
}
