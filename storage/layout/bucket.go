package layout

import (
	"encoding/binary"

	"github.com/kvd-io/kvd/internal/chaos"
)

// Slot is an index entry. 0 is empty.
type Slot uint64

// MakeSlot encodes an entry. at must be addressable: chunk 1..MaxChunk, offset a
// multiple of Unit below MaxChunkSize.
func MakeSlot(fp uint16, c Class, at Place) Slot {
	return Slot(at.Offset/Unit | uint64(at.Chunk)<<24 | uint64(c)<<40 | uint64(fp)<<48)
}

func (s Slot) Fingerprint() uint16 { return uint16(s >> 48) }
func (s Slot) Class() Class        { return Class(s >> 40) }
func (s Slot) Place() Place {
	return Place{Chunk: uint32(s>>24) & MaxChunk, Offset: uint64(s&(1<<24-1)) * Unit}
}

// Bucket flags.
const (
	// BucketIncomplete: a key of this home bucket may be in the engine only. It stays
	// set while the table lives.
	BucketIncomplete uint8 = 1 << 0
)

// MaxChain is the largest chain field.
const MaxChain = 1<<24 - 1

// MaxOverflow is the largest number of overflow buckets of a table.
const MaxOverflow = MaxChain - 1

// Bucket is a decoded index bucket.
type Bucket struct {
	// Sound: the check sum matched. Without it the slots may still be used to look
	// for an object, but not to conclude that there is none.
	Sound bool
	Flags uint8
	// Chain is the number of the next overflow bucket plus one; 0 ends the chain.
	Chain uint32
	Slots [SlotsPerBucket]Slot
}

// Complete tells whether the bucket may take part in the proof of an absence.
func (b *Bucket) Complete() bool { return b.Sound && b.Flags&BucketIncomplete == 0 }

func bucketSum(tableID uint64, number uint32, flags uint8, chain uint32, slots *[SlotsPerBucket]Slot) uint32 {
	h := mix(tableID, uint64(number)|uint64(chain)<<32)
	h = mix(h, uint64(flags))
	for _, s := range slots {
		h = mix(h, uint64(s))
	}
	return uint32(h)
}

// BucketHeader encodes word 0 for the given slots. number counts home buckets
// first, then overflow buckets.
func BucketHeader(tableID uint64, number uint32, flags uint8, chain uint32, slots *[SlotsPerBucket]Slot) uint64 {
	return uint64(bucketSum(tableID, number, flags, chain, slots)) | uint64(chain&MaxChain)<<32 | uint64(flags)<<56
}

// DecodeBucket decodes the first BucketSize bytes of b; with fewer the bucket is
// not Sound and empty.
func DecodeBucket(b []byte, tableID uint64, number uint32) Bucket {
	var k Bucket
	if len(b) < BucketSize {
		return k
	}
	w := binary.LittleEndian.Uint64(b)
	k.Chain = uint32(w>>32) & MaxChain
	k.Flags = uint8(w >> 56)
	for i := range k.Slots {
		k.Slots[i] = Slot(binary.LittleEndian.Uint64(b[8+8*i:]))
	}
	k.Sound = uint32(w) == bucketSum(tableID, number, k.Flags, k.Chain, &k.Slots) || chaos.Broken(chaos.BucketSumIgnored)
	return k
}

// Table is the address of an index.
type Table struct {
	ID       uint64 // random; 0: no table
	Place    Place
	Buckets  uint32 // home buckets
	Overflow uint32 // overflow buckets behind them
}

// Size in bytes.
func (t Table) Size() uint64 { return (uint64(t.Buckets) + uint64(t.Overflow)) * BucketSize }

// Offset in the chunk of the bucket with that number.
func (t Table) Offset(number uint32) uint64 { return t.Place.Offset + uint64(number)*BucketSize }

// Next is the number of the bucket that chain names; ok is false where the chain
// ends there or leads out of the table.
func (t Table) Next(chain uint32) (number uint32, ok bool) {
	if chain == 0 || chain > t.Overflow {
		return 0, false
	}
	return t.Buckets + chain - 1, true
}
