package worker

import (
	"encoding/binary"
	"fmt"
)

// MinSize of a value, in bytes.
const MinSize = 16

// Value makes the bytes of value id: each word follows from the id and its place, so that
// a value made of parts of others is seen, whatever its parts.
func Value(id uint64, size int) []byte {
	b := make([]byte, max(size, MinSize))
	binary.LittleEndian.PutUint64(b, id)
	binary.LittleEndian.PutUint64(b[8:], uint64(len(b)))
	fill(b[MinSize:], id)
	return b
}

func fill(b []byte, id uint64) {
	x := id*0x9e3779b97f4a7c15 | 1
	for len(b) > 0 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], x)
		b = b[copy(b, word[:]):]
	}
}

// Identify finds out which value the bytes are; bad says what is wrong with them.
func Identify(b []byte) (id uint64, bad string) {
	if len(b) < MinSize {
		return 0, fmt.Sprintf("%d bytes: want at least %d", len(b), MinSize)
	}
	id = binary.LittleEndian.Uint64(b)
	if size := binary.LittleEndian.Uint64(b[8:]); size != uint64(len(b)) {
		return id, fmt.Sprintf("value %d has %d bytes: want %d", id, len(b), size)
	}
	want := make([]byte, len(b)-MinSize)
	fill(want, id)
	for i, w := range want {
		if b[MinSize+i] != w {
			return id, fmt.Sprintf("value %d of %d bytes differs at byte %d", id, len(b), MinSize+i)
		}
	}
	return id, ""
}
