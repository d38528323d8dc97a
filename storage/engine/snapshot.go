package engine

import (
	"encoding/binary"
	"errors"

	"github.com/cockroachdb/pebble/v2"
)

// OpenSnapshot takes a consistent view of the group.
func (g *Group) OpenSnapshot() (*Snapshot, error) {
	if err := g.e.usable(); err != nil {
		return nil, err
	}
	lower, upper := groupBounds(g.id)
	// An iterator, not a Pebble snapshot: the excision at the end of a staging takes
	// data from under the latter.
	it, err := g.e.state.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return nil, storeError("state", err)
	}
	s := &Snapshot{it: it, group: g.id}
	key := appendGroup(nil, g.id, stateMeta)
	if it.SeekGE(key) && string(it.Key()) == string(key) {
		b, err := it.ValueAndErr()
		if err == nil {
			if s.meta, err = decodeMeta(key, b); err != nil {
				err = corrupt(describeKey(key), err)
			}
		}
		if err != nil {
			return nil, errors.Join(err, it.Close())
		}
	}
	if err := it.Error(); err != nil {
		return nil, errors.Join(storeError("state", err), it.Close())
	}
	return s, nil
}

// Snapshot is a consistent view of one group; it holds memory and disk space until
// Close. It is used by one goroutine.
type Snapshot struct {
	it    *pebble.Iterator
	group uint64
	meta  Meta
}

func (s *Snapshot) Meta() Meta { return s.meta.clone() }

// Items calls f for every raw pair of the group (key below the group's prefix), in
// order. The slices are borrowed until f returns. Check sums were verified.
func (s *Snapshot) Items(f func(key, value []byte) error) error { return s.ItemsAfter(nil, f) }

// ItemsAfter begins behind the pair of that key, as f was given it; nil: with the first.
func (s *Snapshot) ItemsAfter(key []byte, f func(key, value []byte) error) error {
	if s.it == nil {
		return errors.New("engine: snapshot used after Close")
	}
	from, _ := groupBounds(s.group)
	if len(key) > 0 {
		// The smallest key above k is k and a zero byte.
		from = append(append(from[:groupLen], key...), 0)
	}
	return pairsFrom(s.it, from, func(raw, value []byte) (bool, error) {
		if err := verifyPair(raw, value); err != nil {
			return false, err
		}
		return true, f(raw[groupLen:], value)
	})
}

// Close may be called again.
func (s *Snapshot) Close() error {
	if s.it == nil {
		return nil
	}
	err := s.it.Close()
	s.it = nil
	return storeError("state", err)
}

// verifyPair checks a raw pair of the state store.
func verifyPair(raw, value []byte) error {
	var err error
	switch kind := raw[groupLen]; {
	case kind == stateMeta && len(raw) == groupLen+1:
		_, err = decodeMeta(raw, value)
	case kind == stateKV && len(raw) >= kvPrefixLen:
		_, err = decodeValue(raw, value)
	case kind == stateAux && len(raw) >= auxPrefixLen:
		_, err = unseal(raw, value)
	default:
		err = errors.New("no such kind of key")
	}
	if err != nil {
		return corrupt(describeKey(raw), err)
	}
	return nil
}

// Item is what a pair of Snapshot.Items says.
type Item struct {
	Namespace uint32 // of a key-value
	Aux       byte   // kind of an auxiliary pair; 0: it is a key-value
	Key       []byte // borrowed from the pair
	Value     []byte // of an auxiliary pair; borrowed
}

// DecodeItem takes a pair of Snapshot.Items apart, so that a receiver can look at what
// a peer sent before it is installed. ok is false for the group's meta and for what
// is no pair of a group. The check sum is not looked at: Staging.Add does that.
func DecodeItem(key, value []byte) (it Item, ok bool) {
	const kvLen, auxLen = kvPrefixLen - groupLen, auxPrefixLen - groupLen
	switch {
	case len(key) >= kvLen && key[0] == stateKV:
		return Item{Namespace: binary.BigEndian.Uint32(key[1:]), Key: key[kvLen:]}, true
	case len(key) >= auxLen && key[0] == stateAux && len(value) >= sumLen:
		return Item{Aux: key[1], Key: key[auxLen:], Value: value[sumLen:]}, true
	}
	return Item{}, false
}
