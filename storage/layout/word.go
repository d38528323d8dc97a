package layout

import (
	"encoding/binary"
	"math/bits"
	"sync/atomic"
	"unsafe"
)

var bigEndianHost = binary.NativeEndian.Uint16([]byte{0, 1}) == 1

// hostOrder turns a word of the layout (little-endian) into the host's order and
// back, so that an atomic store of it writes the layout's bytes.
func hostOrder(w uint64) uint64 {
	if bigEndianHost {
		return bits.ReverseBytes64(w)
	}
	return w
}

func wordAt(b []byte, at uint64) *uint64 { return (*uint64)(unsafe.Pointer(&b[at : at+8][0])) }

func stateWord(b []byte) *uint64 { return wordAt(b, 0) }

// StoreWord stores a word of the layout at b[at:] by one atomic store; its address
// must be a multiple of 8.
func StoreWord(b []byte, at uint64, w uint64) { atomic.StoreUint64(wordAt(b, at), hostOrder(w)) }

// LoadWord loads the word of the layout at b[at:] by one atomic load; its address
// must be a multiple of 8.
func LoadWord(b []byte, at uint64) uint64 { return hostOrder(atomic.LoadUint64(wordAt(b, at))) }

// AddWord adds to the word of the layout at b[at:] and returns the sum; its address
// must be a multiple of 8.
func AddWord(b []byte, at uint64, n uint64) uint64 {
	for {
		old := LoadWord(b, at)
		if atomic.CompareAndSwapUint64(wordAt(b, at), hostOrder(old), hostOrder(old+n)) {
			return old + n
		}
	}
}

// RaiseWord stores w in the word of the layout at b[at:] where that is higher than
// what is there; the address must be a multiple of 8.
func RaiseWord(b []byte, at uint64, w uint64) {
	for {
		old := LoadWord(b, at)
		if old >= w || atomic.CompareAndSwapUint64(wordAt(b, at), hostOrder(old), hostOrder(w)) {
			return
		}
	}
}

// CopyWords copies len(dst) bytes, a multiple of 8, by atomic loads of 8-byte
// words. src must be at least as long; where it is not 8-byte aligned, nothing is
// atomic.
func CopyWords(dst, src []byte) {
	src = src[:len(dst)]
	if len(src) == 0 {
		return
	}
	if uintptr(unsafe.Pointer(&src[0]))%8 != 0 {
		copy(dst, src)
		return
	}
	for i := 0; i+8 <= len(dst); i += 8 {
		binary.NativeEndian.PutUint64(dst[i:], atomic.LoadUint64((*uint64)(unsafe.Pointer(&src[i]))))
	}
}
