//go:build rdmaguest

package ibv

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// These tests run in a guest that has soft devices: see internal/tools/rdmaguest.

func guestEnv(t testing.TB, name string) string {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		t.Fatalf("%s is not set: run this in the guest (internal/tools/rdmaguest)", name)
	}
	return v
}

func rxeName(t testing.TB) string { return guestEnv(t, "KVD_GUEST_RXE") }
func siwName(t testing.TB) string { return guestEnv(t, "KVD_GUEST_SIW") }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// noLeaks fails when the test leaves objects behind.
func noLeaks(t testing.TB) {
	t.Helper()
	before := Live()
	t.Cleanup(func() {
		if after := Live(); after != before {
			t.Errorf("objects left: %+v, before %+v", after, before)
		}
	})
}

func openFiles(t testing.TB) int {
	e, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(e)
}

func openDevice(t testing.TB, name string) *Context {
	t.Helper()
	c, err := Open(name)
	must(t, err)
	t.Cleanup(func() { must(t, c.Close()) })
	return c
}

func mapped(t testing.TB, size int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	must(t, err)
	t.Cleanup(func() { must(t, unix.Munmap(b)) })
	return b
}

// end is one side of a connection, with one region.
type end struct {
	pd  *PD
	cq  *CQ
	mr  *MR
	qp  *QP
	mem []byte
	psn uint32
	gid GIDEntry
}

const testSize = 4 << 20

// newEnd makes everything but the connection. access is that of the region.
func newEnd(t testing.TB, c *Context, access Access, gid GIDEntry) *end {
	t.Helper()
	e := &end{gid: gid, psn: rand.Uint32() & maxPSN, mem: mapped(t, testSize)}
	var err error
	e.pd, err = c.NewPD()
	must(t, err)
	t.Cleanup(func() { must(t, e.pd.Close()) })
	e.cq, err = c.NewCQ(CQConfig{Depth: 256, Channel: true})
	must(t, err)
	t.Cleanup(func() { must(t, e.cq.Close()) })
	e.mr, err = e.pd.RegMR(e.mem, access)
	must(t, err)
	t.Cleanup(func() { must(t, e.mr.Close()) })
	e.qp, err = e.pd.NewQP(QPConfig{SendCQ: e.cq, RecvCQ: e.cq, MaxSendWR: 128})
	must(t, err)
	t.Cleanup(func() { must(t, e.qp.Close()) })
	return e
}

// connect moves both queue pairs through their states, as two peers would.
func connect(t testing.TB, port int, mtu MTU, timeout int, ends ...*end) {
	t.Helper()
	for i, e := range ends {
		peer := ends[1-i]
		must(t, e.qp.ToInit(InitParams{Port: port, Access: AccessRemoteRead}))
		must(t, e.qp.ToRTR(RTRParams{
			DestQPN: peer.qp.Num(), PSN: peer.psn, PathMTU: mtu, MaxDestRdAtomic: 16, MinRNRTimer: 12, Port: port,
			Global: true, DGID: peer.gid.GID, SGIDIndex: e.gid.Index, HopLimit: 64,
		}))
		must(t, e.qp.ToRTS(RTSParams{PSN: e.psn, Timeout: timeout, RetryCount: 6, RNRRetry: 6, MaxRdAtomic: 16}))
	}
}

// rxePair is a reader and a target on two GIDs of one soft device.
func rxePair(t testing.TB) (reader, target *end) {
	t.Helper()
	c := openDevice(t, rxeName(t))
	gids := routable(t, c)
	p, err := c.QueryPort(1)
	must(t, err)
	reader = newEnd(t, c, AccessLocalWrite, gids[0])
	target = newEnd(t, c, AccessLocalWrite|AccessRemoteRead, gids[1])
	connect(t, 1, p.ActiveMTU, 8, reader, target)
	for i := range target.mem {
		target.mem[i] = byte(i*7 + i>>9)
	}
	return reader, target
}

func routable(t testing.TB, c *Context) []GIDEntry {
	t.Helper()
	all, err := c.GIDs(1)
	must(t, err)
	var out []GIDEntry
	for _, g := range all {
		if g.Type == GIDTypeRoCEv2 && g.GID.Addr().Is4() {
			out = append(out, g)
		}
	}
	if len(out) < 2 {
		t.Fatalf("%s has %d IPv4 GIDs, want 2: %+v", c.Name(), len(out), all)
	}
	return out
}

func (e *end) read(id uint64, target *end, localOff, remoteOff, n int) ReadWR {
	return ReadWR{
		ID: id, LocalAddr: e.mr.Addr() + uint64(localOff), RemoteAddr: target.mr.Addr() + uint64(remoteOff),
		Length: uint32(n), LKey: e.mr.LKey(), RKey: target.mr.RKey(), Flags: WRSignaled,
	}
}

// wait polls until a completion is there.
func (e *end) wait(t testing.TB) Completion {
	t.Helper()
	var out [1]Completion
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); {
		n, err := e.cq.Poll(out[:], 10*time.Millisecond)
		must(t, err)
		if n == 1 {
			return out[0]
		}
	}
	t.Fatal("no completion within 20 s")
	return Completion{}
}

func (e *end) one(t testing.TB, wr ReadWR) WCStatus {
	t.Helper()
	posted, err := e.qp.Post([]ReadWR{wr})
	must(t, err)
	if posted != 1 {
		t.Fatalf("%d posted, want 1", posted)
	}
	c := e.wait(t)
	if c.ID != wr.ID {
		t.Fatalf("completion of %d, want %d", c.ID, wr.ID)
	}
	return c.Status
}

func TestGuestDevices(t *testing.T) {
	noLeaks(t)
	devs, err := Devices()
	must(t, err)
	seen := map[string]DeviceInfo{}
	for _, d := range devs {
		t.Logf("%+v", d)
		seen[d.Name] = d
	}
	if d := seen[rxeName(t)]; d.Transport != TransportIB || d.GUID == 0 || d.Unusable != "" {
		t.Errorf("%+v: want an ib device with a GUID", d)
	}
	if d := seen[siwName(t)]; d.Transport != TransportIWARP || d.NodeType != "RNIC" {
		t.Errorf("%+v: want an iWARP device", d)
	}
	for _, name := range []string{rxeName(t), siwName(t)} {
		c := openDevice(t, name)
		a, err := c.QueryDevice()
		must(t, err)
		t.Logf("%s: %+v", name, a)
		if a.Ports != 1 || a.MaxQP <= 0 || a.MaxCQE <= 0 || a.MaxMR <= 0 || a.MaxMRSize == 0 || a.MaxQPRdAtomic <= 0 || a.MaxQPInitRdAtomic <= 0 || a.MaxQPWR <= 0 {
			t.Errorf("%s: %+v: want limits", name, a)
		}
		p, err := c.QueryPort(1)
		must(t, err)
		t.Logf("%s: %+v", name, p)
		if p.State != PortActive || p.ActiveMTU != MTU1024 || p.LinkLayer != LinkEthernet {
			t.Errorf("%s: %+v: want an active Ethernet port of MTU 1024", name, p)
		}
		if _, err := c.QueryPort(2); err == nil {
			t.Errorf("%s: port 2 exists", name)
		}
		gids, err := c.GIDs(1)
		must(t, err)
		t.Logf("%s: %+v", name, gids)
		if len(gids) == 0 {
			t.Errorf("%s has no GIDs", name)
		}
		if _, _, err := c.GID(1, 1<<20); err == nil || !strings.Contains(err.Error(), "want 0 to") {
			t.Errorf("%s: GID index 2^20: %v", name, err)
		}
		keys, err := c.PKeys(1)
		must(t, err)
		t.Logf("%s: P_Keys %#x", name, keys)
	}
	c := openDevice(t, rxeName(t))
	want := strings.Split(guestEnv(t, "KVD_GUEST_RXE_ADDRS"), ",")
	netdev := guestEnv(t, "KVD_GUEST_RXE_NETDEV")
	found := map[string]bool{}
	for _, g := range routable(t, c) {
		found[g.GID.String()] = true
		if g.Netdev != netdev || g.Ifindex == 0 {
			t.Errorf("%+v: want netdev %s and its index", g, netdev)
		}
	}
	for _, a := range want {
		if !found[a] {
			t.Errorf("no GID for address %s: %v", a, found)
		}
	}
	keys, err := c.PKeys(1)
	must(t, err)
	if len(keys) == 0 || keys[0] != 0xffff {
		t.Errorf("P_Keys %#x, want ffff first", keys)
	}
}

func TestGuestRead(t *testing.T) {
	noLeaks(t)
	r, target := rxePair(t)
	for i, n := range []int{1, 8, 64, 1000, 1024, 4096, 65536, 1 << 20} {
		off := i * 13
		if s := r.one(t, r.read(uint64(100+i), target, 0, off, n)); s != WCSuccess {
			t.Fatalf("%d bytes: %s", n, s)
		}
		if !bytes.Equal(r.mem[:n], target.mem[off:off+n]) {
			t.Fatalf("%d bytes: other bytes than the target's", n)
		}
	}
	// A chain longer than what the shim translates at a time, its last READ signalled.
	const links, each = 100, 777
	chain := make([]ReadWR, links)
	for i := range chain {
		chain[i] = r.read(uint64(i), target, i*each, i*5000, each)
		chain[i].Flags = 0
	}
	chain[links-1].Flags = WRSignaled
	var out [4]Completion
	posted, n, err := r.qp.PostAndPoll(chain, out[:], 5*time.Second)
	must(t, err)
	if posted != links || n != 1 || out[0].ID != links-1 || out[0].Status != WCSuccess || out[0].QPN != r.qp.Num() {
		t.Fatalf("posted %d, %d completions, first %+v: want one of the last READ", posted, n, out[0])
	}
	for i := range chain {
		if !bytes.Equal(r.mem[i*each:(i+1)*each], target.mem[i*5000:i*5000+each]) {
			t.Fatalf("READ %d of the chain brought other bytes", i)
		}
	}
	if n, err := r.cq.Poll(out[:], 0); n != 0 || err != nil {
		t.Errorf("%d more completions, %v: want none", n, err)
	}
	a, err := r.qp.Query()
	must(t, err)
	if a.State != QPRTS || a.DestQPN != target.qp.Num() || a.PathMTU != MTU1024 || a.MaxRdAtomic != 16 {
		t.Errorf("%+v: want RTS to the target's queue pair", a)
	}
	if a, err := target.qp.Query(); err != nil || a.Access != AccessRemoteRead {
		t.Errorf("%+v %v: want remote read, and nothing else", a, err)
	}
}

func TestGuestWaitForEvent(t *testing.T) {
	noLeaks(t)
	r, target := rxePair(t)
	var out [8]Completion
	for range 200 {
		must(t, r.cq.Arm())
		if n, err := r.cq.Poll(out[:], 0); n != 0 || err != nil {
			t.Fatalf("%d %v: want an empty queue", n, err)
		}
		_, err := r.qp.Post([]ReadWR{r.read(1, target, 0, 0, 64)})
		must(t, err)
		must(t, r.cq.WaitEvent())
		if n, err := r.cq.Poll(out[:], 0); n != 1 || err != nil || out[0].Status != WCSuccess {
			t.Fatalf("%d %v %+v: want one completion after the event", n, err, out[0])
		}
	}
	must(t, r.cq.SetDeadline(time.Now().Add(20*time.Millisecond)))
	must(t, r.cq.Arm())
	if err := r.cq.WaitEvent(); !errors.Is(err, ErrDeadline) {
		t.Errorf("%v, want ErrDeadline", err)
	}
	must(t, r.cq.SetDeadline(time.Time{}))
	// A waiter is let go by Close of the queue: here of one that nothing uses.
	cq, err := r.pd.Context().NewCQ(CQConfig{Depth: 1, Channel: true})
	must(t, err)
	got := make(chan error, 1)
	go func() { got <- cq.WaitEvent() }()
	must(t, cq.Close())
	if err := <-got; !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
}

func TestGuestPostAllocatesNothing(t *testing.T) {
	r, target := rxePair(t)
	wrs := []ReadWR{r.read(1, target, 0, 0, 64)}
	out := make([]Completion, 8)
	n := testing.AllocsPerRun(200, func() {
		if _, n, err := r.qp.PostAndPoll(wrs, out, time.Second); n != 1 || err != nil || out[0].Status != WCSuccess {
			t.Fatalf("%d %v %+v", n, err, out[0])
		}
	})
	if n != 0 {
		t.Errorf("%v allocations a READ by spinning, want 0", n)
	}
	n = testing.AllocsPerRun(200, func() {
		_ = r.cq.Arm()
		if _, err := r.qp.Post(wrs); err != nil {
			t.Fatal(err)
		}
		if err := r.cq.WaitEvent(); err != nil {
			t.Fatal(err)
		}
		if n, err := r.cq.Poll(out, 0); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations a READ by waiting, want 0", n)
	}
}

// What a reader must not get through with. After each refusal both queue pairs are
// finished, so each is tried on a pair of its own.
func TestGuestRefusals(t *testing.T) {
	noLeaks(t)
	attack := func(kind Attack) func(*testing.T, *end, *end) WCStatus {
		return func(t *testing.T, r, target *end) WCStatus {
			wr := r.read(5, target, 0, 64, 8)
			binary.NativeEndian.PutUint64(r.mem, ^uint64(0))
			must(t, r.qp.PostAttack(kind, wr))
			return r.wait(t).Status
		}
	}
	for name, c := range map[string]struct {
		run  func(*testing.T, *end, *end) WCStatus
		want []WCStatus
	}{
		"remote write":  {attack(AttackWrite), []WCStatus{WCRemAccessErr, WCRemInvReqErr}},
		"fetch and add": {attack(AttackFetchAdd), []WCStatus{WCRemAccessErr, WCRemInvReqErr}},
		"compare swap":  {attack(AttackCompareSwap), []WCStatus{WCRemAccessErr, WCRemInvReqErr}},
		"wrong rkey": {func(t *testing.T, r, target *end) WCStatus {
			w := r.read(5, target, 0, 0, 64)
			w.RKey ^= 0x55
			return r.one(t, w)
		}, []WCStatus{WCRemAccessErr}},
		"beyond the end":   {func(t *testing.T, r, target *end) WCStatus { return r.one(t, r.read(5, target, 0, testSize-8, 64)) }, []WCStatus{WCRemAccessErr}},
		"before the start": {func(t *testing.T, r, target *end) WCStatus { return r.one(t, r.read(5, target, 0, -8, 64)) }, []WCStatus{WCRemAccessErr}},
		"another domain's rkey": {func(t *testing.T, r, target *end) WCStatus {
			pd, err := target.pd.Context().NewPD()
			must(t, err)
			defer func() { must(t, pd.Close()) }()
			mr, err := pd.RegMR(target.mem, AccessLocalWrite|AccessRemoteRead)
			must(t, err)
			defer func() { must(t, mr.Close()) }()
			w := r.read(5, target, 0, 0, 64)
			w.RKey = mr.RKey()
			return r.one(t, w)
		}, []WCStatus{WCRemAccessErr}},
		"deregistered": {func(t *testing.T, r, target *end) WCStatus {
			w := r.read(5, target, 0, 0, 64)
			must(t, target.mr.Close())
			return r.one(t, w)
		}, []WCStatus{WCRemAccessErr}},
		"queue pair in error": {func(t *testing.T, r, target *end) WCStatus {
			must(t, target.qp.ToError())
			return r.one(t, r.read(5, target, 0, 0, 64))
		}, []WCStatus{WCRetryExcErr}},
		"queue pair destroyed": {func(t *testing.T, r, target *end) WCStatus {
			must(t, target.qp.Close())
			return r.one(t, r.read(5, target, 0, 0, 64))
		}, []WCStatus{WCRetryExcErr}},
		"local key": {func(t *testing.T, r, target *end) WCStatus {
			w := r.read(5, target, 0, 0, 64)
			w.LKey ^= 0x55
			return r.one(t, w)
		}, []WCStatus{WCLocProtErr}},
	} {
		t.Run(name, func(t *testing.T) {
			r, target := rxePair(t)
			if s := r.one(t, r.read(1, target, 0, 0, 64)); s != WCSuccess {
				t.Fatalf("a READ before: %s", s)
			}
			before := bytes.Clone(target.mem[:4096])
			s := c.run(t, r, target)
			ok := false
			for _, w := range c.want {
				ok = ok || s == w
			}
			if !ok {
				t.Errorf("status %q, want one of %v", s, c.want)
			}
			if !bytes.Equal(before, target.mem[:4096]) {
				t.Error("the target's memory changed")
			}
			// The queue pair is finished: what is posted now is flushed.
			if s := r.one(t, r.read(9, target, 0, 0, 64)); s != WCWRFlushErr {
				t.Errorf("a READ after the error: %s, want flushed", s)
			}
		})
	}
}

// An error amid a chain completes every request behind it, unsignalled ones too.
func TestGuestErrorInChain(t *testing.T) {
	noLeaks(t)
	r, target := rxePair(t)
	const links = 64
	chain := make([]ReadWR, links)
	for i := range chain {
		chain[i] = r.read(uint64(i), target, i*64, i*64, 64)
		chain[i].Flags = 0
	}
	chain[links-1].Flags = WRSignaled
	chain[10].RKey ^= 0x55
	_, err := r.qp.Post(chain)
	must(t, err)
	first := r.wait(t)
	if first.ID != 10 || first.Status != WCRemAccessErr {
		t.Fatalf("%+v: want READ 10 refused", first)
	}
	for i := uint64(11); i < links; i++ {
		if c := r.wait(t); c.ID != i || c.Status != WCWRFlushErr {
			t.Fatalf("%+v: want READ %d flushed", c, i)
		}
	}
}

func TestGuestRegistrationRefused(t *testing.T) {
	noLeaks(t)
	ro, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	must(t, err)
	defer func() { must(t, unix.Munmap(ro)) }()
	pd := func(name string) *PD {
		p, err := openDevice(t, name).NewPD()
		must(t, err)
		t.Cleanup(func() { must(t, p.Close()) })
		return p
	}
	if _, err := pd(rxeName(t)).RegMR(ro, AccessLocalWrite|AccessRemoteRead); !errors.Is(err, syscall.EFAULT) {
		t.Errorf("a read-only mapping for writing: %v, want EFAULT", err)
	}
	// soft-iWARP counts memlock for root too.
	var was unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &was))
	must(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 64 << 10, Max: was.Max}))
	_, err = pd(siwName(t)).RegMR(mapped(t, 1<<20), AccessLocalWrite)
	must(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &was))
	if !errors.Is(err, syscall.ENOMEM) || !strings.Contains(err.Error(), "1048576 bytes") {
		t.Errorf("1 MiB with 64 KiB of memlock: %v, want ENOMEM with the size", err)
	}
}

func TestGuestBadPaths(t *testing.T) {
	noLeaks(t)
	c := openDevice(t, rxeName(t))
	gids := routable(t, c)
	e := newEnd(t, c, AccessLocalWrite, gids[0])
	must(t, e.qp.ToInit(InitParams{Port: 1}))
	p := RTRParams{DestQPN: 77, PathMTU: MTU1024, MaxDestRdAtomic: 1, MinRNRTimer: 12, Port: 1, Global: true, DGID: gids[1].GID, SGIDIndex: 250, HopLimit: 64}
	if err := e.qp.ToRTR(p); err == nil || !strings.Contains(err.Error(), "index 250") {
		t.Errorf("GID index 250: %v: want an error that names it", err)
	}
	p.SGIDIndex, p.DGID = gids[0].Index, GID{0: 0xfe, 1: 0x80, 15: 9}
	if err := e.qp.ToRTR(p); err == nil {
		t.Error("a destination of another address family is accepted")
	} else {
		t.Log(err)
	}
	if _, err := c.NewCQ(CQConfig{Depth: 1 << 29}); err == nil {
		t.Error("a completion queue of 2^29 is made")
	} else {
		t.Log(err)
	}
	if _, err := e.pd.NewQP(QPConfig{SendCQ: e.cq, RecvCQ: e.cq, MaxSendWR: 1 << 29}); err == nil {
		t.Error("a queue pair of 2^29 requests is made")
	} else {
		t.Log(err)
	}
}

// Objects come and go without a trace, in the process and in the kernel.
func TestGuestReconnects(t *testing.T) {
	noLeaks(t)
	c := openDevice(t, rxeName(t))
	gids := routable(t, c)
	kernel := kernelObjects(t)
	var files int
	for i := range 60 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			r := newEnd(t, c, AccessLocalWrite, gids[0])
			target := newEnd(t, c, AccessLocalWrite|AccessRemoteRead, gids[1])
			connect(t, 1, MTU1024, 14, r, target)
			if s := r.one(t, r.read(1, target, 0, 0, 4096)); s != WCSuccess {
				t.Fatal(s)
			}
		})
		if n := openFiles(t); i == 0 {
			files = n // the first wait opened the poller's descriptors
		} else if n > files {
			t.Fatalf("%d open files after round %d, %d after the first", n, i, files)
		}
	}
	if after := kernelObjects(t); after != kernel {
		t.Errorf("the kernel holds %q, before %q", after, kernel)
	}
}

// kernelObjects is what the kernel counts for the device.
func kernelObjects(t testing.TB) string {
	out, err := exec.Command("rdma", "resource", "show", rxeName(t)).CombinedOutput()
	if err != nil {
		t.Fatalf("rdma resource show: %v: %s", err, out)
	}
	return strings.TrimSpace(string(out))
}

func TestGuestAsyncEvents(t *testing.T) {
	noLeaks(t)
	c, err := Open(rxeName(t))
	must(t, err)
	netdev := guestEnv(t, "KVD_GUEST_RXE_NETDEV")
	events := make(chan AsyncEvent, 64)
	done := make(chan error, 1)
	go func() {
		for {
			ev, err := c.NextAsyncEvent()
			if err != nil {
				done <- err
				return
			}
			events <- ev
		}
	}()
	expect := func(want AsyncEventType) {
		t.Helper()
		for {
			select {
			case ev := <-events:
				t.Logf("%s, port %d", ev.Type, ev.Port)
				if ev.Type == want {
					if want != AsyncDeviceFatal && ev.Port != 1 {
						t.Errorf("%+v: want port 1", ev)
					}
					return
				}
			case <-time.After(20 * time.Second):
				t.Fatalf("no event %q", want)
			}
		}
	}
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("/usr/sbin/ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	ip("address", "add", "10.99.0.1/24", "dev", netdev)
	expect(AsyncGIDChange)
	ip("address", "del", "10.99.0.1/24", "dev", netdev)
	expect(AsyncGIDChange)
	must(t, c.Close())
	if err := <-done; !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
}

// BenchmarkGuestRead is one READ after the other by spinning.
func BenchmarkGuestRead(b *testing.B) {
	r, target := rxePair(b)
	for _, size := range []int{64, 1024, 16384} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			wrs := []ReadWR{r.read(1, target, 0, 0, size)}
			out := make([]Completion, 8)
			for b.Loop() {
				if _, n, err := r.qp.PostAndPoll(wrs, out, time.Second); n != 1 || err != nil || out[0].Status != WCSuccess {
					b.Fatalf("%d %v %+v", n, err, out[0])
				}
			}
		})
	}
}

func firstAddr(t testing.TB, env string) netip.Addr {
	t.Helper()
	a, err := netip.ParseAddr(strings.Split(guestEnv(t, env), ",")[0])
	must(t, err)
	return a
}
