//go:build linux && cgo

package ibv

/*
#cgo LDFLAGS: -ldl

// The calls below keep no pointer and never call Go, so their arguments may stay on the
// stack of the goroutine.
#cgo noescape kvd_post_and_poll
#cgo nocallback kvd_post_and_poll
#cgo noescape kvd_poll
#cgo nocallback kvd_poll
#cgo nocallback kvd_arm
#cgo nocallback kvd_get_cq_event

#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"net/netip"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

var cStatus = sync.OnceValue(func() LibraryStatus {
	var c C.kvd_status
	C.kvd_load(&c)
	if c.built == 0 {
		const note = "built without verbs headers"
		return LibraryStatus{BuildNote: note, Verbs: Library{Name: libVerbs, Err: note}, RDMACM: Library{Name: libRDMACM, Err: note}}
	}
	return LibraryStatus{Built: true, BuildNote: "built with verbs", Verbs: goLibrary(libVerbs, &c.verbs), RDMACM: goLibrary(libRDMACM, &c.rdmacm)}
})

func goLibrary(name string, c *C.kvd_library) Library {
	l := Library{Name: name, Found: c.found != 0, Path: C.GoString(&c.path[0]), Err: C.GoString(&c.err[0])}
	l.Version = libraryVersion(name, l.Path)
	return l
}

func no(rc C.int) errnoT { return errnoT(rc) }

func cDevices() ([]rawDevice, error) {
	list := make([]C.kvd_device, 64)
	for {
		var n C.int
		if errno := no(C.kvd_devices(&list[0], C.int(len(list)), &n)); errno != 0 {
			return nil, refused(errno, "ibv_get_device_list", "this host")
		}
		if int(n) > len(list) {
			list = make([]C.kvd_device, n)
			continue
		}
		out := make([]rawDevice, n)
		for i := range out {
			d := &list[i]
			out[i] = rawDevice{name: C.GoString(&d.name[0]), nodeType: int32(d.node_type), transport: int32(d.transport), guid: uint64(d.guid)}
		}
		return out, nil
	}
}

func cOpen(name string) (uintptr, int, error) {
	cname := C.CString(name)
	defer C.free(unsafe.Pointer(cname))
	var h C.uintptr_t
	var fd C.int
	switch errno := no(C.kvd_open(cname, &h, &fd)); {
	case errno == syscall.ENODEV:
		return 0, -1, fmt.Errorf("%w: %q", ErrNoDevice, name)
	case errno != 0:
		return 0, -1, refused(errno, "ibv_open_device", "%s", name)
	}
	return uintptr(h), int(fd), nil
}

func cClose(h uintptr) errnoT { return no(C.kvd_close(C.uintptr_t(h))) }

func cQueryDevice(h uintptr) (DeviceAttr, errnoT) {
	var a C.kvd_device_attr
	if errno := no(C.kvd_query_device(C.uintptr_t(h), &a)); errno != 0 {
		return DeviceAttr{}, errno
	}
	return DeviceAttr{
		FirmwareVersion: C.GoString(&a.fw_ver[0]), NodeGUID: uint64(a.node_guid), VendorID: uint32(a.vendor_id),
		VendorPartID: uint32(a.vendor_part_id), HWVersion: uint32(a.hw_ver), Ports: int(a.ports),
		MaxQP: int(a.max_qp), MaxQPWR: int(a.max_qp_wr), MaxSGE: int(a.max_sge), MaxCQ: int(a.max_cq), MaxCQE: int(a.max_cqe),
		MaxMR: int(a.max_mr), MaxMRSize: uint64(a.max_mr_size), MaxPD: int(a.max_pd), MaxMW: int(a.max_mw),
		PageSizeCap: uint64(a.page_size_cap), MaxQPRdAtomic: int(a.max_qp_rd_atom), MaxQPInitRdAtomic: int(a.max_qp_init_rd_atom),
		MaxResRdAtomic: int(a.max_res_rd_atom), MaxPKeys: int(a.max_pkeys), AtomicCap: int(a.atomic_cap),
		CapFlags: uint32(a.cap_flags), LocalCAAckDelay: int(a.ack_delay), ODP: a.odp != 0, ODPReadRC: a.odp_read_rc != 0,
	}, 0
}

func cQueryPort(h uintptr, port int) (rawPort, errnoT) {
	var p rawPort
	if port < 1 || port > 255 {
		return p, syscall.EINVAL
	}
	errno := no(C.kvd_query_port(C.uintptr_t(h), C.int(port), (*C.kvd_port)(unsafe.Pointer(&p))))
	return p, errno
}

func cQueryGID(h uintptr, port int, e *GIDEntry) errnoT {
	var g C.kvd_gid
	if errno := no(C.kvd_query_gid(C.uintptr_t(h), C.int(port), C.int(e.Index), &g)); errno != 0 {
		return errno
	}
	e.GID = *(*GID)(unsafe.Pointer(&g.gid))
	e.Type, e.Ifindex = GIDType(g._type), int(g.ifindex)
	return 0
}

func cQueryPKey(h uintptr, port, index int) (uint16, errnoT) {
	var k C.uint16_t
	errno := no(C.kvd_query_pkey(C.uintptr_t(h), C.int(port), C.int(index), &k))
	return uint16(k), errno
}

func cGetAsyncEvent(h uintptr) (AsyncEvent, bool, errnoT) {
	var e C.kvd_async
	switch errno := no(C.kvd_get_async(C.uintptr_t(h), &e)); errno {
	case 0:
		return AsyncEvent{Type: AsyncEventType(e._type), Port: int(e.port), QPN: uint32(e.qpn)}, true, 0
	case syscall.EAGAIN, syscall.EINTR:
		return AsyncEvent{}, false, 0
	default:
		return AsyncEvent{}, false, errno
	}
}

func cAllocPD(ctx uintptr) (uintptr, errnoT) {
	var h C.uintptr_t
	errno := no(C.kvd_alloc_pd(C.uintptr_t(ctx), &h))
	return uintptr(h), errno
}

func cDeallocPD(h uintptr) errnoT { return no(C.kvd_dealloc_pd(C.uintptr_t(h))) }

func cRegMR(pd, addr uintptr, length uint64, access Access) (h uintptr, lkey, rkey uint32, errno errnoT) {
	var ch C.uintptr_t
	var l, r C.uint32_t
	errno = no(C.kvd_reg_mr(C.uintptr_t(pd), C.uintptr_t(addr), C.uint64_t(length), C.uint32_t(access), &ch, &l, &r))
	return uintptr(ch), uint32(l), uint32(r), errno
}

func cDeregMR(h uintptr) errnoT { return no(C.kvd_dereg_mr(C.uintptr_t(h))) }

func cCreateCQ(ctx uintptr, depth int, channel bool, vector int) (h, ch uintptr, fd, got int, errno errnoT) {
	var cq, cch C.uintptr_t
	var cfd, cgot, with C.int
	if channel {
		with = 1
	}
	errno = no(C.kvd_create_cq(C.uintptr_t(ctx), C.int(min(depth, 1<<30)), with, C.int(vector), &cq, &cch, &cfd, &cgot))
	return uintptr(cq), uintptr(cch), int(cfd), int(cgot), errno
}

func cDestroyCQ(h, channel uintptr) errnoT {
	return no(C.kvd_destroy_cq(C.uintptr_t(h), C.uintptr_t(channel)))
}

func cArm(h uintptr) errnoT { return no(C.kvd_arm(C.uintptr_t(h))) }

func cGetCQEvent(channel uintptr) (bool, errnoT) {
	switch errno := no(C.kvd_get_cq_event(C.uintptr_t(channel))); errno {
	case 0:
		return true, 0
	case syscall.EAGAIN, syscall.EINTR:
		return false, 0
	default:
		return false, errno
	}
}

func cPoll(h uintptr, out []Completion, spin time.Duration) int {
	return int(C.kvd_poll(C.uintptr_t(h), (*C.kvd_wc)(unsafe.Pointer(unsafe.SliceData(out))), C.int(len(out)), C.int64_t(spin)))
}

func cPostAndPoll(qp, cq uintptr, wrs []ReadWR, out []Completion, spin time.Duration) (posted, n int, errno errnoT) {
	d := C.kvd_post_and_poll(C.uintptr_t(qp), C.uintptr_t(cq), (*C.kvd_read)(unsafe.Pointer(unsafe.SliceData(wrs))), C.int(len(wrs)),
		(*C.kvd_wc)(unsafe.Pointer(unsafe.SliceData(out))), C.int(len(out)), C.int64_t(spin))
	return int(d.posted), int(d.n), errnoT(d.err)
}

func cCreateQP(cm, pd, scq, rcq uintptr, sendWR, recvWR int) (h uintptr, num uint32, got int, errno errnoT) {
	var qp C.uintptr_t
	var n C.uint32_t
	var g C.int
	errno = no(C.kvd_create_qp(C.uintptr_t(cm), C.uintptr_t(pd), C.uintptr_t(scq), C.uintptr_t(rcq),
		C.int(min(sendWR, 1<<30)), C.int(min(recvWR, 1<<30)), &qp, &n, &g))
	return uintptr(qp), uint32(n), int(g), errno
}

func cDestroyQP(cm, qp uintptr) errnoT {
	return no(C.kvd_destroy_qp(C.uintptr_t(cm), C.uintptr_t(qp)))
}

func cModifyQP(h uintptr, a *rawQPAttr) errnoT {
	return no(C.kvd_modify_qp(C.uintptr_t(h), (*C.kvd_qp_attr)(unsafe.Pointer(a))))
}

func cQueryQP(h uintptr, a *rawQPAttr) errnoT {
	return no(C.kvd_query_qp(C.uintptr_t(h), (*C.kvd_qp_attr)(unsafe.Pointer(a))))
}

func cCMCreateChannel() (uintptr, int, errnoT) {
	var h C.uintptr_t
	var fd C.int
	errno := no(C.kvd_cm_create_channel(&h, &fd))
	return uintptr(h), int(fd), errno
}

func cCMDestroyChannel(h uintptr) { C.kvd_cm_destroy_channel(C.uintptr_t(h)) }

func cCMGetEvent(h uintptr, e *rawCMEvent) (bool, errnoT) {
	switch errno := no(C.kvd_cm_get_event(C.uintptr_t(h), (*C.kvd_cm_event)(unsafe.Pointer(e)))); errno {
	case 0:
		return true, 0
	case syscall.EAGAIN, syscall.EINTR:
		return false, 0
	default:
		return false, errno
	}
}

func cCMCreateID(channel uintptr) (uintptr, errnoT) {
	var h C.uintptr_t
	errno := no(C.kvd_cm_create_id(C.uintptr_t(channel), &h))
	return uintptr(h), errno
}

func cCMDestroyID(h uintptr) errnoT { return no(C.kvd_cm_destroy_id(C.uintptr_t(h))) }

func toCAddr(a netip.AddrPort) (c C.kvd_addr) {
	ip := a.Addr().Unmap()
	c.port = C.uint16_t(a.Port())
	switch {
	case ip.Is4():
		c.family = 4
		b := ip.As4()
		copy((*[16]byte)(unsafe.Pointer(&c.addr))[:], b[:])
	case ip.Is6():
		c.family = 6
		*(*[16]byte)(unsafe.Pointer(&c.addr)) = ip.As16()
		c.scope = C.uint32_t(zoneIndex(ip.Zone()))
	}
	return c
}

func zoneIndex(zone string) int {
	if n, err := strconv.Atoi(zone); err == nil {
		return n
	}
	return ifindexOf(zone)
}

func fromCAddr(c *C.kvd_addr) netip.AddrPort {
	b := (*[16]byte)(unsafe.Pointer(&c.addr))
	switch c.family {
	case 4:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[:4])), uint16(c.port))
	case 6:
		ip := netip.AddrFrom16(*b)
		if c.scope != 0 {
			ip = ip.WithZone(strconv.Itoa(int(c.scope)))
		}
		return netip.AddrPortFrom(ip, uint16(c.port))
	}
	return netip.AddrPort{}
}

func cCMBind(h uintptr, addr netip.AddrPort) errnoT {
	a := toCAddr(addr)
	return no(C.kvd_cm_bind(C.uintptr_t(h), &a))
}

func cCMListen(h uintptr, backlog int) errnoT {
	return no(C.kvd_cm_listen(C.uintptr_t(h), C.int(min(backlog, 1<<30))))
}

func cCMAddr(h uintptr, remote bool) netip.AddrPort {
	var a C.kvd_addr
	var r C.int
	if remote {
		r = 1
	}
	C.kvd_cm_addr(C.uintptr_t(h), r, &a)
	return fromCAddr(&a)
}

func cCMDevice(h uintptr) (string, int) {
	var port C.int
	name := C.kvd_cm_device(C.uintptr_t(h), &port)
	if name == nil {
		return "", 0
	}
	return C.GoString(name), int(port)
}

func cCMContext(h uintptr) uintptr { return uintptr(C.kvd_cm_context(C.uintptr_t(h))) }

// millis rounds up: a limit of 1 us is not "at once".
func millis(d time.Duration) C.int {
	return C.int(min(max((d+time.Millisecond-1)/time.Millisecond, 1), 1<<30))
}

func cCMResolveAddr(h uintptr, src, dst netip.AddrPort, timeout time.Duration) errnoT {
	s, d := toCAddr(src), toCAddr(dst)
	return no(C.kvd_cm_resolve_addr(C.uintptr_t(h), &s, &d, millis(timeout)))
}

func cCMResolveRoute(h uintptr, timeout time.Duration) errnoT {
	return no(C.kvd_cm_resolve_route(C.uintptr_t(h), millis(timeout)))
}

func cCMConnect(h uintptr, p *rawCMParams) errnoT {
	return no(C.kvd_cm_connect(C.uintptr_t(h), (*C.kvd_cm_params)(unsafe.Pointer(p))))
}

func cCMAccept(h uintptr, p *rawCMParams) errnoT {
	return no(C.kvd_cm_accept(C.uintptr_t(h), (*C.kvd_cm_params)(unsafe.Pointer(p))))
}

func cCMReject(h uintptr, reason []byte) errnoT {
	return no(C.kvd_cm_reject(C.uintptr_t(h), unsafe.Pointer(unsafe.SliceData(reason)), C.int(len(reason))))
}

func cCMDisconnect(h uintptr) errnoT { return no(C.kvd_cm_disconnect(C.uintptr_t(h))) }

// layouts compares the twins of the shim's structs: name, size here, size there, and the
// offset of a field near the end in both. For the test.
func layouts() []layout {
	var (
		p  C.kvd_port
		q  C.kvd_qp_attr
		r  C.kvd_read
		w  C.kvd_wc
		e  C.kvd_cm_event
		m  C.kvd_cm_params
		gp rawPort
		gq rawQPAttr
		gr ReadWR
		gw Completion
		ge rawCMEvent
		gm rawCMParams
	)
	return []layout{
		{"port", unsafe.Sizeof(gp), unsafe.Sizeof(p), unsafe.Offsetof(gp.flags), unsafe.Offsetof(p.flags)},
		{"port middle", unsafe.Sizeof(gp), unsafe.Sizeof(p), unsafe.Offsetof(gp.state), unsafe.Offsetof(p.state)},
		{"qp attr", unsafe.Sizeof(gq), unsafe.Sizeof(q), unsafe.Offsetof(gq.trafficClass), unsafe.Offsetof(q.traffic_class)},
		{"qp attr middle", unsafe.Sizeof(gq), unsafe.Sizeof(q), unsafe.Offsetof(gq.dlid), unsafe.Offsetof(q.dlid)},
		{"read", unsafe.Sizeof(gr), unsafe.Sizeof(r), unsafe.Offsetof(gr.Flags), unsafe.Offsetof(r.flags)},
		{"completion", unsafe.Sizeof(gw), unsafe.Sizeof(w), unsafe.Offsetof(gw.QPN), unsafe.Offsetof(w.qpn)},
		{"cm event", unsafe.Sizeof(ge), unsafe.Sizeof(e), unsafe.Offsetof(ge.private), unsafe.Offsetof(e.private_data)},
		{"cm params", unsafe.Sizeof(gm), unsafe.Sizeof(m), unsafe.Offsetof(gm.private), unsafe.Offsetof(m.private_data)},
	}
}
