package engine

import (
	"encoding/binary"
	"errors"
)

// Position of a key-value in the order of namespaces and keys.
type Position struct {
	Namespace uint32
	Key       []byte
}

// KeyValues calls f for the key-values of the group, in order of namespace and key, from
// the first one behind after on; nil: from the first. The slices are borrowed until f
// returns; check sums were verified. f returns false to stop.
func (s *Snapshot) KeyValues(after *Position, f func(namespace uint32, key []byte, v Value) (bool, error)) error {
	if s.it == nil {
		return errors.New("engine: snapshot used after Close")
	}
	from := appendGroup(nil, s.group, stateKV)
	if after != nil {
		// The smallest key above k is k and a zero byte.
		from = append(appendKVKey(nil, s.group, after.Namespace, after.Key), 0)
	}
	for ok := s.it.SeekGE(from); ok; ok = s.it.Next() {
		raw := s.it.Key()
		if raw[groupLen] != stateKV {
			return nil // behind the last one
		}
		b, err := s.it.ValueAndErr()
		if err != nil {
			return storeError(describeKey(raw), err)
		}
		v, err := decodeValue(raw, b)
		if err == nil && len(raw) < kvPrefixLen {
			err = errors.New("the key is cut short")
		}
		if err != nil {
			return corrupt(describeKey(raw), err)
		}
		if more, err := f(binary.BigEndian.Uint32(raw[groupLen+1:]), raw[kvPrefixLen:], v); err != nil || !more {
			return err
		}
	}
	return storeError("state", s.it.Error())
}

// Aux calls f for the auxiliary pairs of a kind, in order of their keys. As KeyValues.
func (s *Snapshot) Aux(kind byte, f func(key, value []byte) (bool, error)) error {
	if s.it == nil {
		return errors.New("engine: snapshot used after Close")
	}
	for ok := s.it.SeekGE(appendAuxKey(nil, s.group, kind, nil)); ok; ok = s.it.Next() {
		raw := s.it.Key()
		if raw[groupLen] != stateAux || len(raw) < auxPrefixLen || raw[groupLen+1] != kind {
			return nil
		}
		b, err := s.it.ValueAndErr()
		if err != nil {
			return storeError(describeKey(raw), err)
		}
		p, err := unseal(raw, b)
		if err != nil {
			return corrupt(describeKey(raw), err)
		}
		if more, err := f(raw[auxPrefixLen:], p); err != nil || !more {
			return err
		}
	}
	return storeError("state", s.it.Error())
}
