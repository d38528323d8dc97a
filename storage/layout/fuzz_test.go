package layout

import (
	"encoding/binary"
	"testing"
)

func FuzzDecodeObject(f *testing.F) {
	o, at := sample()
	f.Add(encoded(o, at), uint64(testSeed), at.Chunk, at.Offset)
	f.Add(make([]byte, HeaderSize), uint64(0), uint32(0), uint64(0))
	f.Fuzz(func(t *testing.T, b []byte, seed uint64, chunk uint32, offset uint64) {
		b = b[:len(b):len(b)]
		o, verdict := DecodeObject(b, seed, Place{chunk, offset})
		if verdict != Valid {
			if o.Key != nil || o.Value != nil {
				t.Fatal("an object that is not valid")
			}
			return
		}
		if len(o.Key) == 0 || len(o.Key) > MaxKeySize || ObjectSize(len(o.Key), len(o.Value)) > len(b) {
			t.Fatalf("key %d, value %d of %d bytes", len(o.Key), len(o.Value), len(b))
		}
		again := aligned(len(b) + 8)
		n := EncodeObject(again, seed, Place{chunk, offset}, o)
		StoreState(again, o.State)
		// Byte 25 is covered by the check sum, but no encoder sets it.
		if string(again[:n]) != string(b[:n]) && b[25] == 0 {
			t.Fatal("decoded, but not what the encoder writes")
		}
	})
}

func FuzzDecodeBucket(f *testing.F) {
	f.Add(make([]byte, BucketSize), uint64(1), uint32(2))
	f.Fuzz(func(t *testing.T, b []byte, id uint64, number uint32) {
		k := DecodeBucket(b[:len(b):len(b)], id, number)
		if k.Sound && binary.LittleEndian.Uint64(b) != BucketHeader(id, number, k.Flags, k.Chain, &k.Slots) {
			t.Fatal("sound, but not what the encoder writes")
		}
		for _, s := range k.Slots {
			if at := s.Place(); at.Chunk > MaxChunk || at.Offset >= MaxChunkSize || at.Offset%Unit != 0 {
				t.Fatalf("slot %x leads to %+v", uint64(s), at)
			}
		}
	})
}

func FuzzDecodeRecord(f *testing.F) {
	f.Add(AppendRecord(nil, Record{Term: RetiredTerm}))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, ok := DecodeRecord(b[:len(b):len(b)])
		if ok && string(AppendRecord(nil, r)) != string(b[:RecordSize]) {
			t.Fatal("not what was decoded")
		}
	})
}

func FuzzDecodeAnswer(f *testing.F) {
	f.Add(make([]byte, AnswerHeaderSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		a := DecodeAnswer(b[:len(b):len(b)])
		if len(a.Object)+AnswerHeaderSize > max(len(b), AnswerHeaderSize) {
			t.Fatal("more object than bytes")
		}
	})
}

// FuzzAnswerQuery lets a target answer any query over any memory.
func FuzzAnswerQuery(f *testing.F) {
	w := newWorld(1, 2)
	w.put(0, 0, "key", "key", "value", StateLive)
	w.put(0, 1, "else", "key", "value", StateLive)
	w.seal(0, 0, 1)
	f.Add(w.mem[:w.next], AppendQuery(nil, w.table, testSeed, []byte("key")), uint8(0))
	f.Add(w.mem[:w.next], AppendQuery(nil, w.table, testSeed, []byte("absent")), uint8(3))
	f.Fuzz(func(t *testing.T, raw, query []byte, skew uint8) {
		bytes := aligned(len(raw) + 8)
		skip := uint64(skew % 8) // memory that begins anywhere
		bytes = bytes[skip : int(skip)+len(raw) : int(skip)+len(raw)]
		copy(bytes, raw)
		mem := func(chunk uint32, offset, length uint64) []byte {
			if chunk == 0 || offset > uint64(len(bytes)) || length > uint64(len(bytes))-offset {
				return nil
			}
			return bytes[offset : offset+length : offset+length]
		}
		prefix := []byte("before")
		out := AnswerQuery(mem, query, prefix)
		if string(out[:len(prefix)]) != "before" {
			t.Fatal("answer overwrote what was there")
		}
		a := DecodeAnswer(out[len(prefix):])
		if a.Kind > AnswerBusy {
			t.Fatalf("kind %d", a.Kind)
		}
		if a.Kind == AnswerFound {
			seed := binary.LittleEndian.Uint64(query[32:])
			o, verdict := DecodeObject(a.Object, seed, a.Place)
			if verdict != Valid || o.State != StateLive || string(o.Key) != string(query[querySize:]) {
				t.Fatalf("found an object with verdict %d, state %d", verdict, o.State)
			}
		}
	})
}
