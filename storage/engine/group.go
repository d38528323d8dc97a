package engine

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3/raftpb"
)

// Meta of a group's state; it is written in the same batch as the data.
type Meta struct {
	Applied     uint64
	AppliedTerm uint64
	ConfigID    uint64
	Conf        *raftpb.ConfState // never nil once written
	Keys        uint64            // live keys; kept by Batch
	Bytes       uint64            // their keys' and values' bytes; kept by Batch
}

// Value is what the state holds for a key.
type Value struct {
	Data    []byte // copied: the caller's
	Version uint64
	Expiry  int64 // Unix milliseconds; 0: never
	Flags   uint8
}

// groupState remembers a group's committed meta, which every batch starts from.
type groupState struct {
	mu struct {
		sync.Mutex
		meta *Meta // nil: not read yet
	}
}

func (e *Engine) groupState(id uint64) *groupState {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.mu.groups[id]
	if s == nil {
		s = &groupState{}
		e.mu.groups[id] = s
	}
	return s
}

func (s *groupState) set(m Meta) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.meta = &m
}

// Group gives access to one group's state. It is cheap; nothing is opened.
func (e *Engine) Group(id uint64) *Group {
	return &Group{e: e, id: id, state: e.groupState(id)}
}

// Group is the state of one group. Reads may run at any time; batches are made by
// one goroutine at a time.
type Group struct {
	e     *Engine
	id    uint64
	state *groupState
}

// Meta returns the zero Meta where the group was never written. It is the caller's.
func (g *Group) Meta() (Meta, error) {
	if err := g.e.usable(); err != nil {
		return Meta{}, err
	}
	g.state.mu.Lock()
	known := g.state.mu.meta
	g.state.mu.Unlock()
	if known != nil {
		return known.clone(), nil
	}
	m, err := readMeta(g.e.state, g.id)
	if err != nil {
		return Meta{}, err
	}
	g.state.mu.Lock()
	defer g.state.mu.Unlock()
	// A commit may have been faster.
	if g.state.mu.meta == nil {
		g.state.mu.meta = &m
	}
	return g.state.mu.meta.clone(), nil
}

func readMeta(r pebble.Reader, group uint64) (m Meta, err error) {
	key := appendGroup(nil, group, stateMeta)
	b, closer, err := r.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return Meta{}, nil
	}
	if err != nil {
		return Meta{}, storeError(describeKey(key), err)
	}
	m, err = decodeMeta(key, b)
	if err != nil {
		err = corrupt(describeKey(key), err)
	}
	return m, errors.Join(err, closer.Close())
}

// DurableApplied is the applied index that is certain to survive a crash.
func (g *Group) DurableApplied() (uint64, error) {
	if err := g.e.usable(); err != nil {
		return 0, err
	}
	key := appendGroup(nil, g.id, stateMeta)
	it, err := g.e.state.NewIter(&pebble.IterOptions{
		LowerBound:                key,
		UpperBound:                appendGroup(nil, g.id, stateMeta+1),
		OnlyReadGuaranteedDurable: true,
	})
	if err != nil {
		return 0, storeError(describeKey(key), err)
	}
	var m Meta
	var derr error
	if it.First() {
		var b []byte
		if b, derr = it.ValueAndErr(); derr == nil {
			if m, derr = decodeMeta(key, b); derr != nil {
				derr = corrupt(describeKey(key), derr)
			}
		}
	}
	if err := cmp.Or(it.Error(), it.Close()); err != nil {
		return 0, storeError(describeKey(key), err)
	}
	return m.Applied, derr
}

// Get reads a committed key-value. The check sum was verified. ErrCorrupt.
func (g *Group) Get(namespace uint32, key []byte) (v Value, ok bool, err error) {
	if err := g.e.usable(); err != nil {
		return Value{}, false, err
	}
	return g.e.getValue(appendKVKey(make([]byte, 0, kvPrefixLen+64), g.id, namespace, key))
}

func (e *Engine) getValue(raw []byte) (v Value, ok bool, err error) {
	b, closer, err := e.state.Get(raw)
	if errors.Is(err, pebble.ErrNotFound) {
		return Value{}, false, nil
	}
	if err != nil {
		return Value{}, false, storeError(describeKey(raw), err)
	}
	v, err = decodeValue(raw, b)
	if err != nil {
		return Value{}, false, errors.Join(corrupt(describeKey(raw), err), closer.Close())
	}
	v.Data = bytes.Clone(v.Data)
	return v, true, closer.Close()
}

// GetAux reads from a small ordered key space beside the key-values, for what else
// is replicated (writers, expiry index, namespaces). kind keeps uses apart. The value
// is the caller's.
func (g *Group) GetAux(kind byte, key []byte) (value []byte, ok bool, err error) {
	if err := g.e.usable(); err != nil {
		return nil, false, err
	}
	return g.e.getAux(appendAuxKey(nil, g.id, kind, key))
}

func (e *Engine) getAux(raw []byte) (value []byte, ok bool, err error) {
	b, closer, err := e.state.Get(raw)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, storeError(describeKey(raw), err)
	}
	p, err := unseal(raw, b)
	if err != nil {
		return nil, false, errors.Join(corrupt(describeKey(raw), err), closer.Close())
	}
	return append([]byte{}, p...), true, closer.Close()
}

// ListOptions of Group.List.
type ListOptions struct {
	Prefix     []byte
	StartAfter []byte // exclusive
	Limit      int    // 0: no limit
	MaxBytes   int    // of keys and values, about; at least one item is returned; 0: no limit
	KeysOnly   bool
}

// Listed is one item of a page; the slices are the caller's.
type Listed struct {
	Key   []byte
	Value Value // with KeysOnly Data is nil
	Size  int   // bytes of the value
}

// List returns a page in key order; more tells that there are further keys.
func (g *Group) List(namespace uint32, o ListOptions) (items []Listed, more bool, err error) {
	if err := g.e.usable(); err != nil {
		return nil, false, err
	}
	lower := appendKVKey(nil, g.id, namespace, o.Prefix)
	upper := prefixEnd(lower)
	if o.StartAfter != nil {
		// The smallest key above k is k and a zero byte.
		after := append(appendKVKey(nil, g.id, namespace, o.StartAfter), 0)
		if bytes.Compare(after, lower) > 0 {
			lower = after
		}
	}
	if bytes.Compare(lower, upper) >= 0 {
		return nil, false, nil
	}
	size := 0
	err = g.e.iterate(g.e.state, lower, upper, func(raw, b []byte) (bool, error) {
		v, err := decodeValue(raw, b)
		if err != nil {
			return false, corrupt(describeKey(raw), err)
		}
		item := Listed{Key: bytes.Clone(raw[kvPrefixLen:]), Value: v, Size: len(v.Data)}
		added := len(item.Key)
		if o.KeysOnly {
			item.Value.Data = nil
		} else {
			item.Value.Data = bytes.Clone(v.Data)
			added += item.Size
		}
		if o.Limit > 0 && len(items) == o.Limit || o.MaxBytes > 0 && len(items) > 0 && size+added > o.MaxBytes {
			more = true
			return false, nil
		}
		size += added
		items = append(items, item)
		return true, nil
	})
	if err != nil {
		return nil, false, err
	}
	return items, more, nil
}

// Scan calls f for every key-value of the group, in order of namespace and key,
// from one consistent view. The slices are borrowed until f returns. An error of f
// ends it.
func (g *Group) Scan(f func(namespace uint32, key []byte, v Value) error) error {
	if err := g.e.usable(); err != nil {
		return err
	}
	lower, upper := appendGroup(nil, g.id, stateKV), appendGroup(nil, g.id, stateKV+1)
	return g.e.iterate(g.e.state, lower, upper, func(raw, b []byte) (bool, error) {
		v, err := decodeValue(raw, b)
		if err == nil && len(raw) < kvPrefixLen {
			err = fmt.Errorf("key of %d bytes", len(raw))
		}
		if err != nil {
			return false, corrupt(describeKey(raw), err)
		}
		return true, f(binary.BigEndian.Uint32(raw[groupLen+1:]), raw[kvPrefixLen:], v)
	})
}

// ScanAux calls f in key order for the keys with the prefix, from start on (inclusive;
// nil: from the first). The slices are borrowed until f returns. f returns false to
// stop.
func (g *Group) ScanAux(kind byte, prefix, start []byte, f func(key, value []byte) (bool, error)) error {
	if err := g.e.usable(); err != nil {
		return err
	}
	lower, upper := g.auxBounds(kind, prefix, start)
	return g.e.iterate(g.e.state, lower, upper, func(raw, b []byte) (bool, error) {
		p, err := unseal(raw, b)
		if err != nil {
			return false, corrupt(describeKey(raw), err)
		}
		return f(raw[auxPrefixLen:], p)
	})
}

func (g *Group) auxBounds(kind byte, prefix, start []byte) (lower, upper []byte) {
	lower = appendAuxKey(nil, g.id, kind, prefix)
	upper = prefixEnd(lower)
	if from := appendAuxKey(nil, g.id, kind, start); bytes.Compare(from, lower) > 0 {
		lower = from
	}
	return lower, upper
}

// iterate calls f for the raw pairs in [lower, upper) of one consistent view, until
// it returns false or an error. The slices are borrowed until f returns.
func (e *Engine) iterate(r pebble.Reader, lower, upper []byte, f func(key, value []byte) (bool, error)) error {
	if bytes.Compare(lower, upper) >= 0 {
		return nil
	}
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return storeError("state", err)
	}
	err = eachPair(it, f)
	return cmp.Or(err, storeError("state", it.Close()))
}

func eachPair(it *pebble.Iterator, f func(key, value []byte) (bool, error)) error {
	return pairsFrom(it, nil, f)
}

// pairsFrom begins at the key or behind it; every key is behind nil.
func pairsFrom(it *pebble.Iterator, from []byte, f func(key, value []byte) (bool, error)) error {
	for ok := it.SeekGE(from); ok; ok = it.Next() {
		b, err := it.ValueAndErr()
		if err != nil {
			return storeError(describeKey(it.Key()), err)
		}
		if goOn, err := f(it.Key(), b); err != nil || !goOn {
			return err
		}
	}
	return storeError("state", it.Error())
}
