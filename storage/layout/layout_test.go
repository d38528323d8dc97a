package layout

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

const testSeed = 0x0123456789abcdef

// aligned returns n zeroed bytes at a multiple of 64.
func aligned(n int) []byte {
	b := make([]byte, n+64)
	skip := -int(uintptr(unsafe.Pointer(&b[0]))) & 63
	return b[skip : skip+n : skip+n]
}

func sample() (Object, Place) {
	return Object{Flags: FlagImmutable, Version: 0x1122334455667788, Expiry: 1700000000123, Key: []byte("key"), Value: []byte("value")},
		Place{Chunk: 0x0203, Offset: 0x4050}
}

func encoded(o Object, at Place) []byte {
	b := aligned((ObjectSize(len(o.Key), len(o.Value)) + 7) &^ 7)
	return b[:EncodeObject(b, testSeed, at, o)]
}

const (
	goldenObject = "02d48fedbed0380a88776655443322117b68e5cf8b01000001000300050000006b657976616c7565"
	goldenBucket = "a5c9722d01020301050403020109efbe00000000000000000000000000000000000000000000000000000000000000000000000000000000fffffffffffcffff"
	goldenHash   = "488cdbc08d8e7423 90169e50fc3fb66f"
)

// The bytes themselves. A change here is a new Version, not a new expectation.
func TestGoldenBytes(t *testing.T) {
	rec := AppendRecord(nil, Record{Term: 1, ServedTerm: 2, ConfigID: 3, Applied: 4, LayoutGen: 5, Shard: 6, Replica: 7, BootID: 0x0807060504030201})
	require.Equal(t, "01000000000000000200000000000000030000000000000004000000000000000500000000000000060000000000000007000000000000000102030405060708", hex.EncodeToString(rec))

	o, at := sample()
	b := encoded(o, at)
	StoreState(b, StateLive)
	require.Equal(t, goldenObject, hex.EncodeToString(b))

	slots := [SlotsPerBucket]Slot{
		MakeSlot(0xbeef, 9, Place{Chunk: 0x0102, Offset: 0x030405 * Unit}), 0, 0, 0, 0, 0,
		MakeSlot(0xffff, MaxClass, Place{Chunk: MaxChunk, Offset: MaxChunkSize - Unit}),
	}
	bucket := binary.LittleEndian.AppendUint64(nil, BucketHeader(0xa1b2c3d4e5f60718, 5, BucketIncomplete, 0x030201, &slots))
	for _, s := range slots {
		bucket = binary.LittleEndian.AppendUint64(bucket, uint64(s))
	}
	require.Equal(t, goldenBucket, hex.EncodeToString(bucket))

	query := AppendQuery(nil, Table{ID: 1, Place: Place{Chunk: 2, Offset: 64}, Buckets: 3, Overflow: 4}, 5, []byte("k"))
	require.Equal(t, "01000000000000004000000000000000020000000300000004000000010000000500000000000000"+"6b", hex.EncodeToString(query))

	h := HashKey(testSeed, []byte("key"))
	require.Equal(t, goldenHash, fmt.Sprintf("%016x %016x", h.Hi, h.Lo))
}

func TestObjectRoundTrip(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		key, value := make([]byte, 1+rng.IntN(64)), make([]byte, rng.IntN(3000))
		for i := range key {
			key[i] = byte(rng.Uint32())
		}
		for i := range value {
			value[i] = byte(rng.Uint32())
		}
		in := Object{Flags: uint8(rng.Uint32()), Version: rng.Uint64(), Expiry: rng.Int64(), Key: key, Value: value}
		at := Place{Chunk: rng.Uint32N(MaxChunk) + 1, Offset: rng.Uint64N(MaxChunkSize/Unit) * Unit}
		b := encoded(in, at)
		for st := StateNone; st <= StateDropped; st++ {
			StoreState(b, st)
			require.Equal(t, st, LoadState(b))
			out, verdict := DecodeObject(append(b, 1, 2, 3), testSeed, at)
			require.Equal(t, Valid, verdict)
			in.State = st
			require.Equal(t, in, out)
		}
		head, ok := PeekHeader(b)
		require.True(t, ok)
		require.Equal(t, len(b), head.Size())
	}
}

func TestObjectLargestKeyAndValue(t *testing.T) {
	_, at := sample()
	o := Object{Key: make([]byte, MaxKeySize), Value: make([]byte, MaxObjectSize-HeaderSize-MaxKeySize)}
	_, verdict := DecodeObject(encoded(o, at), testSeed, at)
	require.Equal(t, Valid, verdict)
	o.Value = append(o.Value, 0)
	_, verdict = DecodeObject(encoded(o, at), testSeed, at)
	require.Equal(t, Torn, verdict)
}

// Any flipped bit outside of the state makes an object torn (or short, where it is
// in a length), and a flipped bit of the state changes nothing but the state.
func TestObjectBitFlips(t *testing.T) {
	o, at := sample()
	good := encoded(o, at)
	long := make([]byte, MaxObjectSize)
	for bit := range len(good) * 8 {
		b := append([]byte(nil), good...)
		b[bit/8] ^= 1 << (bit % 8)
		got, verdict := DecodeObject(b, testSeed, at)
		if bit < 8 {
			require.Equal(t, Valid, verdict)
			require.Equal(t, StatePending^State(1<<bit), got.State)
			continue
		}
		require.NotEqual(t, Valid, verdict, "bit %d", bit)
		if bit < 24*8 || bit >= HeaderSize*8 {
			require.Equal(t, Torn, verdict, "bit %d", bit)
		}
		// With all the bytes that the flipped length asks for it is torn.
		copy(long, b)
		_, verdict = DecodeObject(long, testSeed, at)
		require.Equal(t, Torn, verdict, "bit %d", bit)
	}
}

func TestObjectIsBoundToPlaceAndCluster(t *testing.T) {
	o, at := sample()
	b := encoded(o, at)
	for _, other := range []Place{{at.Chunk + 1, at.Offset}, {at.Chunk, at.Offset + Unit}, {uint32(at.Offset), uint64(at.Chunk)}, {}} {
		_, verdict := DecodeObject(b, testSeed, other)
		require.Equal(t, Torn, verdict)
	}
	_, verdict := DecodeObject(b, testSeed+1, at)
	require.Equal(t, Torn, verdict)
	_, verdict = DecodeObject(b[:len(b)-1], testSeed, at)
	require.Equal(t, Short, verdict)
	_, verdict = DecodeObject(b[:HeaderSize-1], testSeed, at)
	require.Equal(t, Short, verdict)
}

// A READ may take each word at another moment. While one object gives way to
// another of equal lengths in the same block, every mixture of their words either
// validates as exactly one of them, with a state which that one had, or is torn.
func TestNoMixtureOfTwoObjectsValidates(t *testing.T) {
	_, at := sample()
	older := Object{Version: 1, Key: []byte("key00001"), Value: []byte("the old value...")}
	newer := Object{Version: 2, Key: []byte("key00001"), Value: []byte("the new value...")}
	was := encoded(older, at)
	StoreState(was, StateLive)
	pending := encoded(newer, at) // not live yet: nobody may see it so
	words := len(was) / 8
	for mask := range 1 << words {
		mixed := append([]byte(nil), was...)
		for w := range words {
			if mask>>w&1 != 0 {
				copy(mixed[8*w:8*w+8], pending[8*w:])
			}
		}
		o, verdict := DecodeObject(mixed, testSeed, at)
		if verdict != Valid {
			continue
		}
		switch o.State {
		case StateLive:
			require.EqualValues(t, 1, o.Version, "mask %b", mask)
			require.Equal(t, older.Value, o.Value)
		case StatePending:
			require.EqualValues(t, 2, o.Version, "mask %b", mask)
		default:
			t.Fatalf("mask %b: state %d", mask, o.State)
		}
	}
}

func TestSlotRoundTrip(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 10000 {
		fp, c := uint16(rng.Uint32()), Class(rng.Uint32())
		at := Place{Chunk: rng.Uint32N(MaxChunk) + 1, Offset: rng.Uint64N(MaxChunkSize/Unit) * Unit}
		s := MakeSlot(fp, c, at)
		require.Equal(t, fp, s.Fingerprint())
		require.Equal(t, c, s.Class())
		require.Equal(t, at, s.Place())
		require.NotZero(t, s)
	}
}

func TestBucketRoundTripAndFlips(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 50 {
		var slots [SlotsPerBucket]Slot
		for i := range slots {
			slots[i] = Slot(rng.Uint64())
		}
		id, number, flags, chain := rng.Uint64(), rng.Uint32(), uint8(rng.Uint32()), rng.Uint32()&MaxChain
		b := binary.LittleEndian.AppendUint64(nil, BucketHeader(id, number, flags, chain, &slots))
		for _, s := range slots {
			b = binary.LittleEndian.AppendUint64(b, uint64(s))
		}
		require.Equal(t, Bucket{Sound: true, Flags: flags, Chain: chain, Slots: slots}, DecodeBucket(b, id, number))
		bad := func(id uint64, number uint32) bool { k := DecodeBucket(b, id, number); return k.Sound || k.Complete() }
		require.False(t, bad(id+1, number))
		require.False(t, bad(id, number+1))
		for bit := range 8 * BucketSize {
			b[bit/8] ^= 1 << (bit % 8)
			require.False(t, bad(id, number), "bit %d", bit)
			b[bit/8] ^= 1 << (bit % 8)
		}
	}
	require.Equal(t, Bucket{}, DecodeBucket(make([]byte, BucketSize-1), 1, 1))
}

func TestRecordRoundTrip(t *testing.T) {
	in := Record{1, 2, 3, 4, 5, 6, 7, 8}
	b := AppendRecord([]byte{9}, in)
	out, ok := DecodeRecord(b[1:])
	require.True(t, ok)
	require.Equal(t, in, out)
	_, ok = DecodeRecord(b[2:])
	require.False(t, ok)
}

func TestHashSpreads(t *testing.T) {
	const keys, shards, buckets = 100000, 8, 56
	var perShard [shards + 1]int
	var perBucket [buckets]int
	for i := range keys {
		h := HashKey(testSeed, fmt.Appendf(nil, "key-%d", i))
		perShard[h.Shard(shards)]++
		perBucket[h.HomeBucket(buckets)]++
	}
	require.Zero(t, perShard[0], "shards are numbered from 1")
	for _, n := range perShard[1:] {
		require.InDelta(t, keys/shards, n, keys/shards/10)
	}
	for _, n := range perBucket {
		require.InDelta(t, keys/buckets, n, keys/buckets/5)
	}
}

func TestTableNext(t *testing.T) {
	table := Table{Buckets: 10, Overflow: 3}
	for chain, want := range map[uint32]uint32{1: 10, 3: 12} {
		n, ok := table.Next(chain)
		require.True(t, ok)
		require.Equal(t, want, n)
	}
	for _, chain := range []uint32{0, 4, MaxChain} {
		_, ok := table.Next(chain)
		require.False(t, ok)
	}
	require.EqualValues(t, 13*BucketSize, table.Size())
}

func TestWords(t *testing.T) {
	b := aligned(16)
	StoreWord(b, 8, 0x0102030405060708)
	require.Equal(t, []byte{8, 7, 6, 5, 4, 3, 2, 1}, b[8:])
	RaiseWord(b, 8, 5)
	require.EqualValues(t, 0x0102030405060708, LoadWord(b, 8))
	RaiseWord(b, 8, 0x0102030405060709)
	require.EqualValues(t, 0x010203040506070a, AddWord(b, 8, 1))
	dst := make([]byte, 8)
	CopyWords(dst, b[8:])
	require.Equal(t, b[8:], dst)
	CopyWords(dst[:0], nil)
}
