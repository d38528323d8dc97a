package layout

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/kvd-io/kvd/internal/chaos"
)

// State of an object.
type State uint8

const (
	// StateNone: never an object. Zeroed memory has it.
	StateNone State = iota
	// StatePending: written, not yet the key's value. A reader retries.
	StatePending
	// StateLive: the key's value. Storing it is the linearization point of the write.
	StateLive
	// The others say why the object is no longer the key's value. A reader that came
	// by a remembered location looks the key up again.
	StateSuperseded
	StateDeleted
	StateExpired
	StateEvicted // still the key's value, but no longer in memory
	StateMoved
	StateDropped // the namespace, the shard replica or the table's content was dropped
)

// Object flags.
const (
	// FlagImmutable: the namespace never changes a present key, so a hit needs no
	// confirmation.
	FlagImmutable uint8 = 1 << 0
)

// Place is where bytes lie: offset is in bytes and a multiple of Unit.
type Place struct {
	Chunk  uint32
	Offset uint64
}

// Object is a decoded object. Key and Value alias the buffer given to
// DecodeObject.
type Object struct {
	State   State
	Flags   uint8
	Version uint64
	Expiry  int64 // Unix milliseconds; 0: never
	Key     []byte
	Value   []byte
}

// ObjectSize is the size in bytes of an object with that key and value.
func ObjectSize(keyLen, valueLen int) int { return HeaderSize + keyLen + valueLen }

// StateWord encodes word 0 of an object: its state and the low 56 bits of its check
// sum. They share a word on purpose: whoever reads the word whole knows which object
// the state belongs to, even if the block was given to another object while the
// rest of it was being read.
func StateWord(s State, sum uint64) uint64 { return uint64(s) | sum<<8 }

// WithState is word 0 with another state.
func WithState(word uint64, s State) uint64 { return word&^0xff | uint64(s) }

func sizeWord(flags uint8, keyLen, valueLen int) uint64 {
	return uint64(flags) | uint64(uint16(keyLen))<<16 | uint64(uint32(valueLen))<<32
}

// HeaderInfo is what the first 32 bytes say, unverified.
type HeaderInfo struct {
	State    State
	Flags    uint8
	KeyLen   int
	ValueLen int
	Version  uint64
	Expiry   int64
}

// Size in bytes of the object that the header describes.
func (h HeaderInfo) Size() int { return HeaderSize + h.KeyLen + h.ValueLen }

// plausible: the lengths are those of an object that can exist.
func (h HeaderInfo) plausible() bool {
	return h.KeyLen > 0 && h.KeyLen <= MaxKeySize &&
		h.ValueLen >= 0 && h.ValueLen <= MaxObjectSize && h.Size() <= MaxObjectSize
}

// PeekHeader reads the header without verifying it; ok is false where b is too
// short. Nothing in it may be believed: use it to decide how much to read.
func PeekHeader(b []byte) (h HeaderInfo, ok bool) {
	if len(b) < HeaderSize {
		return HeaderInfo{}, false
	}
	w := binary.LittleEndian.Uint64(b[24:])
	return HeaderInfo{
		State:    State(b[0]),
		Flags:    uint8(w),
		KeyLen:   int(uint16(w >> 16)),
		ValueLen: int(uint32(w >> 32)),
		Version:  binary.LittleEndian.Uint64(b[8:]),
		Expiry:   int64(binary.LittleEndian.Uint64(b[16:])),
	}, true
}

// objectSum is the check sum: everything but the state, bound to its place.
func objectSum(seed uint64, at Place, sizes, version, expiry uint64, keyValue []byte) uint64 {
	h := mix(seed, uint64(at.Chunk))
	h = mix(h, at.Offset)
	h = mix(h, sizes)
	h = mix(h, version)
	h = mix(h, expiry)
	return mix(h, xxh3.Hash(keyValue))
}

// EncodeObject writes header, key and value to dst, whose length must be at
// least ObjectSize and which must be 8-byte aligned, and returns the bytes used.
//
// dst may be memory which readers are looking at, also because another object lay
// there; that object must no longer be live. Word 0 is written by two atomic stores:
// first StatePending without a check sum, before any other byte changes, then
// StatePending with it. So no reader takes the bytes for an object before they are
// one. The writer publishes by StoreState. Key and value are copied.
func EncodeObject(dst []byte, seed uint64, at Place, o Object) int {
	size := ObjectSize(len(o.Key), len(o.Value))
	body := dst[HeaderSize:size]
	word := stateWord(dst)
	atomic.StoreUint64(word, hostOrder(StateWord(StatePending, 0)))
	copy(body, o.Key)
	copy(body[len(o.Key):], o.Value)
	sizes := sizeWord(o.Flags, len(o.Key), len(o.Value))
	binary.LittleEndian.PutUint64(dst[8:], o.Version)
	binary.LittleEndian.PutUint64(dst[16:], uint64(o.Expiry))
	binary.LittleEndian.PutUint64(dst[24:], sizes)
	sum := objectSum(seed, at, sizes, o.Version, uint64(o.Expiry), body)
	atomic.StoreUint64(word, hostOrder(StateWord(StatePending, sum)))
	return size
}

// StoreState changes the state of the object at the start of b by one atomic store.
// b must be 8-byte aligned. One goroutine at a time may change a state.
func StoreState(b []byte, s State) {
	word := stateWord(b)
	atomic.StoreUint64(word, hostOrder(WithState(hostOrder(atomic.LoadUint64(word)), s)))
}

// LoadState reads the state of the object at the start of b, 8-byte aligned.
func LoadState(b []byte) State { return State(hostOrder(atomic.LoadUint64(stateWord(b)))) }

// Verdict on bytes that were read.
type Verdict uint8

const (
	// Valid: the bytes are one whole object that was written at this place. Its
	// state and key are still to be looked at.
	Valid Verdict = iota
	// Short: the header describes more bytes than were read.
	Short
	// Torn: the check sum does not match: read while being written, or never an
	// object of this place.
	Torn
)

// DecodeObject validates b, read from place at. b may be longer than the object.
// The object aliases b and is set only where the verdict is Valid.
func DecodeObject(b []byte, seed uint64, at Place) (Object, Verdict) {
	h, ok := PeekHeader(b)
	if !ok {
		return Object{}, Short
	}
	if !h.plausible() {
		return Object{}, Torn
	}
	if h.Size() > len(b) {
		return Object{}, Short
	}
	word := binary.LittleEndian.Uint64(b)
	body := b[HeaderSize:h.Size()]
	sum := objectSum(seed, at, binary.LittleEndian.Uint64(b[24:]), h.Version, uint64(h.Expiry), body)
	if StateWord(0, sum) != WithState(word, 0) && !chaos.Broken(chaos.ChecksumIgnored) {
		return Object{}, Torn
	}
	return Object{
		State: h.State, Flags: h.Flags, Version: h.Version, Expiry: h.Expiry,
		Key: body[:h.KeyLen:h.KeyLen], Value: body[h.KeyLen:len(body):len(body)],
	}, Valid
}
