package rdma

import (
	"encoding/binary"
	"runtime"
	"sync/atomic"
	"unsafe"
)

// WholeReadBytes is the length up to which a READ promises whole words (see the
// package comment).
const WholeReadBytes = 64

// loadsInOrder: the processor executes a goroutine's loads in program order, and
// its memory move loads aligned 8-byte words whole or in halves of larger ones.
const loadsInOrder = runtime.GOARCH == "amd64"

// CopyExposed copies len(dst) bytes of exposed memory, which its writer may be
// storing to, as a READ must: up to WholeReadBytes, each aligned word of src is
// loaded whole; and what one call loads, it loads before any later call does, so a
// chain copied READ after READ is executed in order. For providers that move bytes
// by CPU. src must lie in a Memory (or a mapping of one) and be as long as dst.
//
// Do not hand exposed memory of that length to write(2) or sendmsg(2) instead: the
// kernel copies by bytes on some processors.
func CopyExposed(dst, src []byte) {
	if len(dst) != len(src) {
		panic("rdma: CopyExposed of unequal lengths")
	}
	if len(src) == 0 {
		return
	}
	if loadsInOrder && len(src) > WholeReadBytes {
		copy(dst, src)
		return
	}
	copyWords(dst, src)
}

// copyWords loads every 8-byte word that src touches, whole. The first and the last
// may reach beyond src, but not out of the page that it lies in.
func copyWords(dst, src []byte) {
	first := unsafe.Pointer(unsafe.SliceData(src))
	skew := int(uintptr(first) & 7)
	p := unsafe.Add(first, -skew)
	var w [8]byte
	if skew != 0 {
		binary.NativeEndian.PutUint64(w[:], atomic.LoadUint64((*uint64)(p)))
		dst = dst[copy(dst, w[skew:]):]
		p = unsafe.Add(p, 8)
	}
	for ; len(dst) >= 8; dst = dst[8:] {
		if raceEnabled {
			// A store of eight bytes at once: the race detector remembers few accesses
			// and would forget the one to be found while it looks at single bytes.
			binary.NativeEndian.PutUint64(w[:], atomic.LoadUint64((*uint64)(p)))
			*(*[8]byte)(dst) = w
		} else {
			binary.NativeEndian.PutUint64(dst, atomic.LoadUint64((*uint64)(p)))
		}
		p = unsafe.Add(p, 8)
	}
	if len(dst) > 0 {
		binary.NativeEndian.PutUint64(w[:], atomic.LoadUint64((*uint64)(p)))
		copy(dst, w[:])
	}
}
