package layout

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// world is one chunk with a table of a few buckets and objects behind it.
type world struct {
	table Table
	mem   []byte
	next  uint64 // where the next object goes
	log   uint64 // bytes handed out by memory
}

func newWorld(buckets, overflow uint32) *world {
	w := &world{table: Table{ID: 42, Place: Place{Chunk: 1, Offset: 64}, Buckets: buckets, Overflow: overflow}, mem: aligned(1 << 16)}
	w.next = w.table.Offset(buckets + overflow)
	for i := range buckets + overflow {
		w.seal(i, 0, 0)
	}
	return w
}

func (w *world) memory(chunk uint32, offset, length uint64) []byte {
	if chunk != 1 || offset > uint64(len(w.mem)) || length > uint64(len(w.mem))-offset {
		return nil
	}
	w.log += length
	return w.mem[offset : offset+length]
}

func (w *world) seal(bucket uint32, flags uint8, chain uint32) {
	var slots [SlotsPerBucket]Slot
	for i := range slots {
		slots[i] = Slot(LoadWord(w.mem, w.table.Offset(bucket)+8+8*uint64(i)))
	}
	StoreWord(w.mem, w.table.Offset(bucket), BucketHeader(w.table.ID, bucket, flags, chain, &slots))
}

// put writes an object and a slot for it that has the finger print of key as.
func (w *world) put(bucket uint32, slot int, key, as, value string, st State) Place {
	at := Place{Chunk: 1, Offset: w.next}
	o := Object{Version: 7, Key: []byte(key), Value: []byte(value)}
	EncodeObject(w.mem[w.next:], testSeed, at, o)
	StoreState(w.mem[w.next:], st)
	size := ClassSize(ClassFor(ObjectSize(len(key), len(value))))
	w.next += uint64(size)
	s := MakeSlot(HashKey(testSeed, []byte(as)).Fingerprint(), ClassFor(size), at)
	StoreWord(w.mem, w.table.Offset(bucket)+8+8*uint64(slot), uint64(s))
	return at
}

func (w *world) ask(key string) Answer {
	return DecodeAnswer(AnswerQuery(w.memory, AppendQuery(nil, w.table, testSeed, []byte(key)), nil))
}

func TestAnswerQuery(t *testing.T) {
	w := newWorld(1, 2)
	require.Equal(t, AnswerAbsent, w.ask("key").Kind)

	at := w.put(0, 3, "key", "key", "value", StateLive)
	require.Equal(t, AnswerFound, w.ask("key").Kind, "a hit needs no valid check sum of the bucket")
	require.Equal(t, AnswerBusy, w.ask("other").Kind, "an absence does")
	w.seal(0, 0, 0)
	require.Equal(t, AnswerAbsent, w.ask("other").Kind)
	got := w.ask("key")
	require.Equal(t, at, got.Place)
	o, verdict := DecodeObject(got.Object, testSeed, got.Place)
	require.Equal(t, Valid, verdict)
	require.Equal(t, "value", string(o.Value))

	for _, st := range []State{StateNone, StatePending, StateSuperseded, StateDeleted, StateEvicted, StateDropped, 99} {
		StoreState(w.mem[at.Offset:], st)
		require.Equal(t, AnswerBusy, w.ask("key").Kind, "state %d", st)
	}

	w.seal(0, BucketIncomplete, 0)
	require.Equal(t, AnswerIncomplete, w.ask("other").Kind)
}

func TestAnswerQueryFollowsTheChain(t *testing.T) {
	w := newWorld(1, 2)
	w.seal(0, 0, 2)
	w.seal(2, 0, 1)
	w.put(1, 6, "key", "key", "far away", StateLive)
	w.seal(1, 0, 0)
	require.Equal(t, AnswerFound, w.ask("key").Kind)
	require.Equal(t, AnswerAbsent, w.ask("other").Kind)
	w.seal(1, BucketIncomplete, 0)
	require.Equal(t, AnswerIncomplete, w.ask("other").Kind)
	w.seal(1, 0, 3)
	require.Equal(t, AnswerBusy, w.ask("other").Kind, "a chain out of the table")
	w.seal(1, 0, 2)
	require.Equal(t, AnswerBusy, w.ask("other").Kind, "a chain in a circle")
}

// A slot with the key's finger print that leads to another key may be what became of
// the key's old block after the bucket was read.
func TestAnswerQueryForeignKeyProvesNothing(t *testing.T) {
	w := newWorld(1, 0)
	w.put(0, 0, "somebody else", "key", "value", StateLive)
	w.seal(0, 0, 0)
	require.Equal(t, AnswerIncomplete, w.ask("key").Kind)
}

func TestAnswerQueryRefuses(t *testing.T) {
	w := newWorld(1, 0)
	good := AppendQuery(nil, w.table, testSeed, []byte("key"))
	for name, spoil := range map[string]func(q []byte) []byte{
		"short":           func(q []byte) []byte { return q[:querySize-1] },
		"no key":          func(q []byte) []byte { return q[:querySize] },
		"key cut":         func(q []byte) []byte { return q[:len(q)-1] },
		"key longer":      func(q []byte) []byte { return append(q, 0) },
		"no buckets":      func(q []byte) []byte { copy(q[20:24], make([]byte, 4)); return q },
		"no such chunk":   func(q []byte) []byte { q[16]++; return q },
		"offset far away": func(q []byte) []byte { q[15] = 0xff; return q },
		"offset odd":      func(q []byte) []byte { q[8] += 8; return q },
		"overflow":        func(q []byte) []byte { q[27] = 0xff; return q },
	} {
		q := spoil(append([]byte(nil), good...))
		require.Equal(t, AnswerBad, DecodeAnswer(AnswerQuery(w.memory, q, nil)).Kind, name)
	}
}

// However the memory was made up, one query costs its target little.
func TestAnswerQueryIsBounded(t *testing.T) {
	w := newWorld(1, 1)
	value := make([]byte, 20000)
	for i := range SlotsPerBucket {
		for _, bucket := range []uint32{0, 1} {
			w.next = 1 << 12
			w.put(bucket, i, "key", "key", string(value), StatePending)
		}
	}
	w.seal(0, 0, 1)
	w.seal(1, 0, 1) // for ever
	w.log = 0
	require.Equal(t, AnswerBusy, w.ask("key").Kind)
	require.Less(t, w.log, uint64(9*21000+maxChainWalk*BucketSize))
}

func TestDecodeAnswerRefuses(t *testing.T) {
	require.Equal(t, Answer{}, DecodeAnswer(nil))
	b := make([]byte, AnswerHeaderSize+4)
	b[0], b[16] = byte(AnswerFound), 5
	require.Equal(t, Answer{}, DecodeAnswer(b))
	b[16] = 4
	require.Len(t, DecodeAnswer(b).Object, 4)
}
