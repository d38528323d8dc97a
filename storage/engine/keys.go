package engine

import (
	"encoding/binary"
	"fmt"
)

// Keys of both stores start with the group, big endian, so that a group is one
// range, and a kind. The kinds stay below groupEnd, which closes the range.
const (
	groupLen = 8
	groupEnd = 0xff

	// log store
	logHard  = 0x01 // -> raftpb.HardState
	logTrunc = 0x02 // -> truncated index, term
	logEntry = 0x03 // index, big endian -> raftpb.Entry

	// state store
	stateMeta = 0x01 // -> Meta
	stateKV   = 0x02 // namespace, big endian; key -> Value
	stateAux  = 0x03 // kind; key -> bytes

	kvPrefixLen  = groupLen + 1 + 4
	auxPrefixLen = groupLen + 1 + 1
	entryKeyLen  = groupLen + 1 + 8
)

func appendGroup(b []byte, group uint64, kind byte) []byte {
	b = binary.BigEndian.AppendUint64(b, group)
	return append(b, kind)
}

func appendEntryKey(b []byte, group, index uint64) []byte {
	return binary.BigEndian.AppendUint64(appendGroup(b, group, logEntry), index)
}

func appendKVKey(b []byte, group uint64, namespace uint32, key []byte) []byte {
	b = binary.BigEndian.AppendUint32(appendGroup(b, group, stateKV), namespace)
	return append(b, key...)
}

func appendAuxKey(b []byte, group uint64, kind byte, key []byte) []byte {
	b = append(appendGroup(b, group, stateAux), kind)
	return append(b, key...)
}

// groupBounds is the half-open range which holds all of a group.
func groupBounds(group uint64) (lower, upper []byte) {
	return appendGroup(nil, group, 0), appendGroup(nil, group, groupEnd)
}

// prefixEnd is the smallest key above all keys with the prefix. Every prefix in
// use has a kind below 0xff in it, so there is one.
func prefixEnd(prefix []byte) []byte {
	end := append([]byte(nil), prefix...)
	for i := len(end) - 1; i >= 0; i-- {
		if end[i] != 0xff {
			end[i]++
			return end[:i+1]
		}
	}
	panic("engine: prefix without an end")
}

// describeKey names a raw key of the state store in messages.
func describeKey(key []byte) string {
	if len(key) < groupLen+1 {
		return fmt.Sprintf("malformed key %x", key)
	}
	group, rest := binary.BigEndian.Uint64(key), key[groupLen+1:]
	switch kind := key[groupLen]; {
	case kind == stateMeta && len(rest) == 0:
		return fmt.Sprintf("meta of group %d", group)
	case kind == stateKV && len(rest) >= 4:
		return fmt.Sprintf("group %d namespace %d key %q", group, binary.BigEndian.Uint32(rest), rest[4:])
	case kind == stateAux && len(rest) >= 1:
		return fmt.Sprintf("group %d aux kind %d key %q", group, rest[0], rest[1:])
	}
	return fmt.Sprintf("group %d malformed key %x", group, key[groupLen:])
}
