package layout

import (
	"math"
	"math/bits"

	"github.com/zeebo/xxh3"
)

// Version of the layout. It changes with any change of meaning of a byte.
const Version = 1

const (
	RecordSize     = 64 // bytes of a control record
	BucketSize     = 64 // bytes of an index bucket
	HeaderSize     = 32 // bytes of an object before its key
	SlotsPerBucket = 7

	// MaxKeySize in bytes. The field would hold more; the limit is the store's.
	MaxKeySize = 4096
	// MaxObjectSize in bytes, header and key included: the largest class.
	MaxObjectSize = 16 << 20

	// Unit is what an offset in a location counts, in bytes.
	Unit = 8
	// MaxChunkSize in bytes: what a location can address.
	MaxChunkSize = (1 << 24) * Unit
	// MaxChunk is the largest chunk number of a namespace in one boot. Chunk 0 does
	// not exist: region 0 is the control table.
	MaxChunk = 1<<16 - 1

	// RetiredTerm in a control record: this replica never confirms anything again.
	RetiredTerm = math.MaxUint64
)

// KeyHash is the 128-bit hash of a key: Lo chooses the shard, Hi the bucket and
// the finger print.
type KeyHash struct{ Lo, Hi uint64 }

// HashKey hashes a key under the cluster's seed. Source: XXH3, 128 bits.
func HashKey(seed uint64, key []byte) KeyHash {
	h := xxh3.Hash128Seed(key, seed)
	return KeyHash{Lo: h.Lo, Hi: h.Hi}
}

// Shard of the key, 1..shards.
func (h KeyHash) Shard(shards uint32) uint32 {
	hi, _ := bits.Mul64(h.Lo, uint64(shards))
	return uint32(hi) + 1
}

// HomeBucket of the key in a table of that many home buckets (at least 1).
func (h KeyHash) HomeBucket(buckets uint32) uint32 {
	hi, _ := bits.Mul64(h.Hi, uint64(buckets))
	return uint32(hi)
}

// Fingerprint of the key.
func (h KeyHash) Fingerprint() uint16 { return uint16(h.Hi) }

// mix folds v into h. Source: the finalizer of SplitMix64 (Steele, Lea, Flood).
func mix(h, v uint64) uint64 {
	h ^= v
	h += 0x9e3779b97f4a7c15
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
