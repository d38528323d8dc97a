package engine

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// Every value of both stores starts with an 8-byte xxh3 of what follows, seeded
// with the xxh3 of its key. So a value that turns up at another key, group or
// namespace does not validate, and no copy is made to bind the two.
//
// Pebble has check sums of its own for blocks. Ours cover the way from the caller's
// memory to the caller's memory, and go along with snapshots.
const (
	sumLen = 8
	// sum, flags, version, expiry
	valueHeaderLen = sumLen + 1 + 8 + 8
	metaFixedLen   = 5 * 8
)

var errSum = errors.New("check sum mismatch")

// seal puts the sum of b[sumLen:] in front.
func seal(key, b []byte) {
	binary.LittleEndian.PutUint64(b, xxh3.HashSeed(b[sumLen:], xxh3.Hash(key)))
}

// unseal verifies b and returns what is behind the sum, borrowed from b.
func unseal(key, b []byte) ([]byte, error) {
	if len(b) < sumLen {
		return nil, fmt.Errorf("%d bytes where the check sum alone has %d", len(b), sumLen)
	}
	if binary.LittleEndian.Uint64(b) != xxh3.HashSeed(b[sumLen:], xxh3.Hash(key)) {
		return nil, errSum
	}
	return b[sumLen:], nil
}

func encodedValueLen(v Value) int { return valueHeaderLen + len(v.Data) }

// encodeValue fills dst, which has encodedValueLen bytes.
func encodeValue(dst, key []byte, v Value) {
	dst[sumLen] = v.Flags
	binary.LittleEndian.PutUint64(dst[sumLen+1:], v.Version)
	binary.LittleEndian.PutUint64(dst[sumLen+9:], uint64(v.Expiry))
	copy(dst[valueHeaderLen:], v.Data)
	seal(key, dst)
}

// decodeValue verifies b. Data is borrowed from b.
func decodeValue(key, b []byte) (Value, error) {
	p, err := unseal(key, b)
	if err != nil {
		return Value{}, err
	}
	if len(b) < valueHeaderLen {
		return Value{}, fmt.Errorf("%d bytes where the header alone has %d", len(b), valueHeaderLen)
	}
	return Value{
		Flags:   p[0],
		Version: binary.LittleEndian.Uint64(p[1:]),
		Expiry:  int64(binary.LittleEndian.Uint64(p[9:])),
		Data:    p[valueHeaderLen-sumLen:],
	}, nil
}

func encodeMeta(key []byte, m Meta) ([]byte, error) {
	b := make([]byte, sumLen, sumLen+metaFixedLen+64)
	for _, x := range []uint64{m.Applied, m.AppliedTerm, m.ConfigID, m.Keys, m.Bytes} {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	conf := m.Conf
	if conf == nil {
		conf = &raftpb.ConfState{}
	}
	b, err := proto.MarshalOptions{}.MarshalAppend(b, conf)
	if err != nil {
		return nil, fmt.Errorf("engine: encoding the configuration: %w", err)
	}
	seal(key, b)
	return b, nil
}

func decodeMeta(key, b []byte) (Meta, error) {
	p, err := unseal(key, b)
	if err != nil {
		return Meta{}, err
	}
	if len(p) < metaFixedLen {
		return Meta{}, fmt.Errorf("%d bytes where a meta record has at least %d", len(p), metaFixedLen)
	}
	u := func(i int) uint64 { return binary.LittleEndian.Uint64(p[8*i:]) }
	m := Meta{Applied: u(0), AppliedTerm: u(1), ConfigID: u(2), Keys: u(3), Bytes: u(4), Conf: &raftpb.ConfState{}}
	if err := proto.Unmarshal(p[metaFixedLen:], m.Conf); err != nil {
		return Meta{}, fmt.Errorf("configuration: %w", err)
	}
	return m, nil
}

func (m Meta) clone() Meta {
	if m.Conf != nil {
		m.Conf = proto.Clone(m.Conf).(*raftpb.ConfState)
	}
	return m
}

// decodeEntry verifies b and that the entry is the one its key names. The entry owns
// its bytes.
func decodeEntry(key, b []byte) (*raftpb.Entry, error) {
	p, err := unseal(key, b)
	if err != nil {
		return nil, err
	}
	e := &raftpb.Entry{}
	if err := proto.Unmarshal(p, e); err != nil {
		return nil, err
	}
	if len(key) != entryKeyLen {
		return nil, fmt.Errorf("key of %d bytes, want %d", len(key), entryKeyLen)
	}
	if want := binary.BigEndian.Uint64(key[groupLen+1:]); e.GetIndex() != want {
		return nil, fmt.Errorf("holds index %d, want %d", e.GetIndex(), want)
	}
	return e, nil
}

// corrupt wraps what a decoder said.
func corrupt(what string, err error) error {
	return fmt.Errorf("%w: %s: %v; do not serve it: rebuild this replica from its peers", ErrCorrupt, what, err)
}
