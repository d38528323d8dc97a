//go:build !linux || !cgo

package ibv

import (
	"net/netip"
	"syscall"
	"time"
)

// This file stands in for the shim where there is none. Only cStatus is ever asked:
// every way to an object starts with Available, so the others cannot be reached.

const noShim = syscall.ENOSYS

func cStatus() LibraryStatus {
	const note = "built without cgo"
	none := func(name string) Library { return Library{Name: name, Err: note} }
	return LibraryStatus{BuildNote: note, Verbs: none(libVerbs), RDMACM: none(libRDMACM)}
}

func cDevices() ([]rawDevice, error)                { return nil, noShim }
func cOpen(string) (uintptr, int, error)            { return 0, -1, noShim }
func cClose(uintptr) errnoT                         { return noShim }
func cQueryDevice(uintptr) (DeviceAttr, errnoT)     { return DeviceAttr{}, noShim }
func cQueryPort(uintptr, int) (rawPort, errnoT)     { return rawPort{}, noShim }
func cQueryGID(uintptr, int, *GIDEntry) errnoT      { return noShim }
func cQueryPKey(uintptr, int, int) (uint16, errnoT) { return 0, noShim }
func cGetAsyncEvent(uintptr) (AsyncEvent, bool, errnoT) {
	return AsyncEvent{}, false, noShim
}

func cAllocPD(uintptr) (uintptr, errnoT) { return 0, noShim }
func cDeallocPD(uintptr) errnoT          { return noShim }
func cRegMR(uintptr, uintptr, uint64, Access) (h uintptr, lkey, rkey uint32, errno errnoT) {
	return 0, 0, 0, noShim
}
func cDeregMR(uintptr) errnoT { return noShim }
func cCreateCQ(uintptr, int, bool, int) (h, channel uintptr, fd, depth int, errno errnoT) {
	return 0, 0, -1, 0, noShim
}
func cDestroyCQ(_, _ uintptr) errnoT                 { return noShim }
func cPoll(uintptr, []Completion, time.Duration) int { return -int(noShim) }
func cArm(uintptr) errnoT                            { return noShim }
func cGetCQEvent(uintptr) (bool, errnoT)             { return false, noShim }

func cCreateQP(_, _, _, _ uintptr, _, _ int) (h uintptr, num uint32, sendWR int, errno errnoT) {
	return 0, 0, 0, noShim
}
func cDestroyQP(_, _ uintptr) errnoT       { return noShim }
func cModifyQP(uintptr, *rawQPAttr) errnoT { return noShim }
func cQueryQP(uintptr, *rawQPAttr) errnoT  { return noShim }
func cPostAndPoll(_, _ uintptr, _ []ReadWR, _ []Completion, _ time.Duration) (posted, n int, errno errnoT) {
	return 0, 0, noShim
}

func cCMCreateChannel() (uintptr, int, errnoT)        { return 0, -1, noShim }
func cCMDestroyChannel(uintptr)                       {}
func cCMGetEvent(uintptr, *rawCMEvent) (bool, errnoT) { return false, noShim }
func cCMCreateID(uintptr) (uintptr, errnoT)           { return 0, noShim }
func cCMDestroyID(uintptr) errnoT                     { return noShim }
func cCMBind(uintptr, netip.AddrPort) errnoT          { return noShim }
func cCMListen(uintptr, int) errnoT                   { return noShim }
func cCMAddr(uintptr, bool) netip.AddrPort            { return netip.AddrPort{} }
func cCMDevice(uintptr) (string, int)                 { return "", 0 }
func cCMContext(uintptr) uintptr                      { return 0 }
func cCMResolveRoute(uintptr, time.Duration) errnoT   { return noShim }
func cCMConnect(uintptr, *rawCMParams) errnoT         { return noShim }
func cCMAccept(uintptr, *rawCMParams) errnoT          { return noShim }
func cCMReject(uintptr, []byte) errnoT                { return noShim }
func cCMDisconnect(uintptr) errnoT                    { return noShim }
func cCMResolveAddr(_ uintptr, _, _ netip.AddrPort, _ time.Duration) errnoT {
	return noShim
}

func layouts() []layout { return nil }
