// Package backup writes and reads the file that kvctl backup makes. It knows bytes and
// no cluster: what is in the records is api's (backup.proto).
//
// A file is a preamble and then records, with nothing between them and nothing behind
// the last one. All numbers are little endian.
//
//	preamble  "\x89KVDBAK\n", version u16, 0 u16
//	record    kind u8, flags u8, 0 u16, stored u32, raw u32, number u32, sum u64, payload
//
// stored is the payload's length in the file, raw its length when it is unpacked (flag 1:
// packed by zstd; else both are equal), number counts the records from 0, and sum is the
// xxh3 of the record without sum. So each record is checked by itself, and one that is
// missing, doubled or moved shows by its number. The payload is a protobuf message:
//
//	1 cluster     BackupCluster  the first record: where from, namespaces, tokens
//	2 begin       BackupShard    a shard, its index and term, what will come
//	3 items       BackupItems    key-values, in order of namespace and key
//	4 end         BackupShard    the same as at the beginning, with what came
//	5 namespaces  BackupCluster  namespaces that were made while the backup ran: all
//	                             that there are now; in front of the items that need them
//	6 finish      BackupEnd      the last record: totals, and the xxh3 of all before it
//
// Shards come in the order of their numbers, each once. A record is 64 MiB at most,
// unpacked; a reader needs memory for two of them.
//
// The version is raised when an older reader would take a new file for something else;
// fields of the messages and kinds of records are not added without that.
package backup

import (
	"errors"
	"fmt"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// Version of the files that this package writes, and the newest that it reads.
const Version = 1

var magic = [8]byte{0x89, 'K', 'V', 'D', 'B', 'A', 'K', '\n'}

const (
	preambleLen = len(magic) + 4
	headLen     = 24 // of a record
	sumAt       = 16

	// maxRecord bounds a payload, stored and unpacked: the largest page of keys, which
	// is one value of the largest size, has room to spare.
	maxRecord = 64 << 20

	flagPacked = 1
)

type kind byte

const (
	kindCluster kind = iota + 1
	kindBegin
	kindItems
	kindEnd
	kindNamespaces
	kindFinish
)

// What is wrong with a file that can not be read.
var (
	// ErrNotBackup: the file is something else.
	ErrNotBackup = errors.New("not a backup of kvd")
	// ErrNewer: a later version of kvd wrote it. Use that one's kvctl.
	ErrNewer = errors.New("the backup's format is newer than this program")
	// ErrTruncated: it ends before its last record.
	ErrTruncated = errors.New("the backup is cut short")
	// ErrDamaged: its bytes are not those that were written.
	ErrDamaged = errors.New("the backup is damaged")
)

func damagedf(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrDamaged, fmt.Sprintf(format, args...))
}

// ItemBytes is what an item counts in the sums of a shard: its key and its value.
func ItemBytes(it *kvdv1.BackupItem) uint64 { return uint64(len(it.GetKey()) + len(it.GetValue())) }
