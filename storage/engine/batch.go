package engine

import (
	"bytes"
	"errors"
	"slices"

	"github.com/cockroachdb/pebble/v2"
)

// Batch of changes to one group. Get, GetAux and ScanAux see the batch's own writes
// over the committed state. It is used by one goroutine.
//
// Its writes lie in a plain Pebble batch, with a map over them, instead of
// Pebble's indexed batch, whose skip list orders keys that hardly anyone iterates.
type Batch struct {
	g    *Group
	b    *pebble.Batch
	meta Meta
	err  error // of starting: returned by the first call

	// What is known of raw keys, written or looked up. It also spares the second
	// look-up of a key that is read and then written.
	known   map[string]knownValue
	scratch []byte
	auxes   int // aux writes in known
	metaSet bool
	done    bool
}

// knownValue of a raw key.
type knownValue struct {
	exists bool
	// raw value in the batch, borrowed from it; nil where the batch did not write it
	raw     []byte
	written bool
	size    int // of the value's data
}

// NewBatch starts a batch which reads its own writes: Commit or Discard it.
func (g *Group) NewBatch() *Batch {
	b := &Batch{g: g, known: make(map[string]knownValue)}
	if b.err = g.e.writable(); b.err != nil {
		return b
	}
	if b.meta, b.err = g.Meta(); b.err != nil {
		return b
	}
	b.b = g.e.state.NewBatch()
	return b
}

func (b *Batch) usable() error {
	if b.err != nil {
		return b.err
	}
	if b.done {
		return errors.New("engine: batch used after Commit or Discard")
	}
	return nil
}

func (b *Batch) kvKey(namespace uint32, key []byte) []byte {
	b.scratch = appendKVKey(b.scratch[:0], b.g.id, namespace, key)
	return b.scratch
}

// Get sees the batch's own writes. The check sum was verified; Data is the caller's.
func (b *Batch) Get(namespace uint32, key []byte) (Value, bool, error) {
	if err := b.usable(); err != nil {
		return Value{}, false, err
	}
	raw := b.kvKey(namespace, key)
	k, ok := b.known[string(raw)]
	switch {
	case ok && !k.exists:
		return Value{}, false, nil
	case ok && k.written:
		v, err := decodeValue(raw, k.raw)
		if err != nil {
			return Value{}, false, corrupt(describeKey(raw), err)
		}
		v.Data = bytes.Clone(v.Data)
		return v, true, nil
	}
	v, found, err := b.g.e.getValue(raw)
	if err != nil {
		return Value{}, false, err
	}
	b.known[string(raw)] = knownValue{exists: found, size: len(v.Data)}
	return v, found, nil
}

// before tells what is at a key-value's raw key now. A key that was neither read nor
// written in this batch is looked up: the counts need it.
func (b *Batch) before(raw []byte) (knownValue, error) {
	if k, ok := b.known[string(raw)]; ok {
		return k, nil
	}
	value, closer, err := b.g.e.state.Get(raw)
	if errors.Is(err, pebble.ErrNotFound) {
		return knownValue{}, nil
	}
	if err != nil {
		return knownValue{}, storeError(describeKey(raw), err)
	}
	return knownValue{exists: true, size: max(0, len(value)-valueHeaderLen)}, closer.Close()
}

// Put writes a key-value; v.Data and key are copied. It keeps Meta's Keys and Bytes:
// a key that this batch has read (or written) before costs no look-up.
func (b *Batch) Put(namespace uint32, key []byte, v Value) error {
	if err := b.usable(); err != nil {
		return err
	}
	raw := b.kvKey(namespace, key)
	old, err := b.before(raw)
	if err != nil {
		return err
	}
	op := b.b.SetDeferred(len(raw), encodedValueLen(v))
	copy(op.Key, raw)
	encodeValue(op.Value, raw, v)
	value := op.Value
	if err := op.Finish(); err != nil {
		return storeError("state", err)
	}
	b.uncount(key, old)
	b.meta.Keys++
	b.meta.Bytes += uint64(len(key) + len(v.Data))
	b.known[string(raw)] = knownValue{exists: true, written: true, raw: value, size: len(v.Data)}
	return nil
}

// Delete of an absent key does nothing. See Put for the counts.
func (b *Batch) Delete(namespace uint32, key []byte) error {
	if err := b.usable(); err != nil {
		return err
	}
	raw := b.kvKey(namespace, key)
	old, err := b.before(raw)
	if err != nil {
		return err
	}
	if old.exists {
		if err := b.b.Delete(raw, nil); err != nil {
			return storeError("state", err)
		}
	}
	b.uncount(key, old)
	b.known[string(raw)] = knownValue{written: true}
	return nil
}

func (b *Batch) uncount(key []byte, old knownValue) {
	if old.exists {
		b.meta.Keys--
		b.meta.Bytes -= uint64(len(key) + old.size)
	}
}

// GetAux sees the batch's own writes. The value is the caller's.
func (b *Batch) GetAux(kind byte, key []byte) ([]byte, bool, error) {
	if err := b.usable(); err != nil {
		return nil, false, err
	}
	b.scratch = appendAuxKey(b.scratch[:0], b.g.id, kind, key)
	if k, ok := b.known[string(b.scratch)]; ok {
		if !k.exists {
			return nil, false, nil
		}
		return append([]byte{}, k.raw[sumLen:]...), true, nil
	}
	return b.g.e.getAux(b.scratch)
}

// PutAux copies key and value.
func (b *Batch) PutAux(kind byte, key, value []byte) error {
	if err := b.usable(); err != nil {
		return err
	}
	b.scratch = appendAuxKey(b.scratch[:0], b.g.id, kind, key)
	op := b.b.SetDeferred(len(b.scratch), sumLen+len(value))
	copy(op.Key, b.scratch)
	copy(op.Value[sumLen:], value)
	seal(b.scratch, op.Value)
	b.auxes++
	b.known[string(b.scratch)] = knownValue{exists: true, written: true, raw: op.Value}
	return storeError("state", op.Finish())
}

// DeleteAux of an absent key does nothing.
func (b *Batch) DeleteAux(kind byte, key []byte) error {
	if err := b.usable(); err != nil {
		return err
	}
	b.scratch = appendAuxKey(b.scratch[:0], b.g.id, kind, key)
	b.auxes++
	b.known[string(b.scratch)] = knownValue{written: true}
	return storeError("state", b.b.Delete(b.scratch, nil))
}

// ScanAux is Group.ScanAux over the committed state and the batch's own writes. f may
// write to the batch; what it writes is not seen by this scan.
func (b *Batch) ScanAux(kind byte, prefix, start []byte, f func(key, value []byte) (bool, error)) error {
	if err := b.usable(); err != nil {
		return err
	}
	if b.auxes == 0 {
		return b.g.ScanAux(kind, prefix, start, f)
	}
	lower, upper := b.g.auxBounds(kind, prefix, start)
	own := b.ownPairs(lower, upper)
	stopped := false
	// ownBefore hands out the batch's pairs below raw (nil: all that are left).
	ownBefore := func(raw []byte) (bool, error) {
		for len(own) > 0 && (raw == nil || own[0].key < string(raw)) {
			p := own[0]
			own = own[1:]
			if !p.exists {
				continue
			}
			if goOn, err := f([]byte(p.key[auxPrefixLen:]), p.raw[sumLen:]); err != nil || !goOn {
				stopped = true
				return false, err
			}
		}
		return true, nil
	}
	err := b.g.e.iterate(b.g.e.state, lower, upper, func(raw, value []byte) (bool, error) {
		if goOn, err := ownBefore(raw); err != nil || !goOn {
			return false, err
		}
		if len(own) > 0 && own[0].key == string(raw) {
			return ownBefore(append(bytes.Clone(raw), 0))
		}
		p, err := unseal(raw, value)
		if err != nil {
			return false, corrupt(describeKey(raw), err)
		}
		goOn, err := f(raw[auxPrefixLen:], p)
		stopped = !goOn
		return goOn, err
	})
	if err != nil || stopped {
		return err
	}
	_, err = ownBefore(nil)
	return err
}

type ownPair struct {
	key string
	knownValue
}

// ownPairs returns what the batch wrote in [lower, upper), sorted.
func (b *Batch) ownPairs(lower, upper []byte) []ownPair {
	var own []ownPair
	for key, k := range b.known {
		if k.written && key >= string(lower) && key < string(upper) {
			own = append(own, ownPair{key, k})
		}
	}
	slices.SortFunc(own, func(x, y ownPair) int {
		if x.key < y.key {
			return -1
		}
		return 1
	})
	return own
}

// SetMeta sets what Commit writes with the data. Its Keys and Bytes are ignored: the
// batch keeps them. Without SetMeta the other fields stay as they are.
func (b *Batch) SetMeta(m Meta) error {
	if err := b.usable(); err != nil {
		return err
	}
	m = m.clone()
	m.Keys, m.Bytes = b.meta.Keys, b.meta.Bytes
	b.meta, b.metaSet = m, true
	return nil
}

// Commit makes the batch visible at once. It is durable after the next flush.
func (b *Batch) Commit() error {
	if err := b.usable(); err != nil {
		return err
	}
	defer b.Discard()
	if err := b.g.e.writable(); err != nil {
		return err
	}
	if b.b.Empty() && !b.metaSet {
		return nil
	}
	key := appendGroup(nil, b.g.id, stateMeta)
	value, err := encodeMeta(key, b.meta)
	if err != nil {
		return err
	}
	if err := b.b.Set(key, value, nil); err != nil {
		return storeError("state", err)
	}
	if err := b.g.e.commit(b.b, pebble.NoSync); err != nil {
		return err
	}
	b.g.state.set(b.meta)
	return nil
}

// Discard drops an uncommitted batch.
func (b *Batch) Discard() {
	b.done = true
	b.known = nil
	if b.b != nil {
		_ = b.b.Close() // frees memory only
		b.b = nil
	}
}
