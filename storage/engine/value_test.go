package engine

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

func FuzzDecodeValue(f *testing.F) {
	v := Value{Data: []byte("data"), Version: 7, Expiry: -1, Flags: 3}
	b := make([]byte, encodedValueLen(v))
	encodeValue(b, []byte("key"), v)
	f.Add([]byte("key"), b)
	f.Add([]byte("key"), b[:sumLen])
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, key, b []byte) {
		v, err := decodeValue(key, b)
		if err != nil {
			// Whatever it holds: sealed, it decodes unless it is too short.
			if c := bytes.Clone(b); len(c) >= valueHeaderLen {
				seal(key, c)
				_, err = decodeValue(key, c)
				require.NoError(t, err)
			}
			return
		}
		again := make([]byte, encodedValueLen(v))
		encodeValue(again, key, v)
		require.Equal(t, b, again)
	})
}

func FuzzDecodeEntry(f *testing.F) {
	key := appendEntryKey(nil, 1, 5)
	b, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, sumLen), entry(5, 2, "x"))
	require.NoError(f, err)
	f.Add(key, b)
	f.Add(key[:4], b)
	f.Fuzz(func(t *testing.T, key, b []byte) {
		if len(b) >= sumLen {
			seal(key, b) // get behind the check sum
		}
		e, err := decodeEntry(key, b)
		if err == nil {
			// Not the kind: an iterator's bounds see to that.
			require.Len(t, key, entryKeyLen)
			require.Equal(t, binary.BigEndian.Uint64(key[groupLen+1:]), e.GetIndex())
		}
	})
}

func FuzzDecodeMeta(f *testing.F) {
	b, err := encodeMeta([]byte("k"), Meta{Applied: 1, Conf: &raftpb.ConfState{Voters: []uint64{1}}})
	require.NoError(f, err)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= sumLen {
			seal([]byte("k"), b)
		}
		m, err := decodeMeta([]byte("k"), b)
		if err == nil {
			again, err := encodeMeta([]byte("k"), m)
			require.NoError(t, err)
			m2, err := decodeMeta([]byte("k"), again)
			require.NoError(t, err)
			require.True(t, proto.Equal(m.Conf, m2.Conf))
		}
	})
}

// A value does not validate at any key but its own: not in another group, namespace,
// kind or entry.
func TestValueIsBoundToItsKey(t *testing.T) {
	key := appendKVKey(nil, 1, 2, []byte("key"))
	v := Value{Data: []byte("data"), Version: 1}
	b := make([]byte, encodedValueLen(v))
	encodeValue(b, key, v)
	_, err := decodeValue(key, b)
	require.NoError(t, err)
	for _, other := range [][]byte{
		appendKVKey(nil, 2, 2, []byte("key")),
		appendKVKey(nil, 1, 3, []byte("key")),
		appendKVKey(nil, 1, 2, []byte("kez")),
		appendAuxKey(nil, 1, 2, []byte("key")),
	} {
		_, err := decodeValue(other, b)
		require.ErrorIs(t, err, errSum, describeKey(other))
	}
	for bit := range 8 * len(b) {
		c := bytes.Clone(b)
		c[bit/8] ^= 1 << (bit % 8)
		_, err := decodeValue(key, c)
		require.ErrorIs(t, err, errSum)
	}
}

func TestPrefixEnd(t *testing.T) {
	require.Equal(t, []byte{1, 3}, prefixEnd([]byte{1, 2}))
	require.Equal(t, []byte{2}, prefixEnd([]byte{1, 0xff, 0xff}))
	require.Panics(t, func() { prefixEnd([]byte{0xff}) })
}
