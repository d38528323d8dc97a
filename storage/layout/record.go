package layout

import "encoding/binary"

// Word numbers within a control record.
const (
	WordTerm = iota
	WordServedTerm
	WordConfigID
	WordApplied
	WordLayoutGen
	WordShard
	WordReplica
	WordBootID
	RecordWords
)

// Record is a decoded control record.
type Record struct {
	Term       uint64
	ServedTerm uint64
	ConfigID   uint64
	Applied    uint64
	LayoutGen  uint64
	Shard      uint64
	Replica    uint64
	BootID     uint64
}

// DecodeRecord decodes the first RecordSize bytes of b; ok is false where there
// are fewer.
func DecodeRecord(b []byte) (r Record, ok bool) {
	if len(b) < RecordSize {
		return Record{}, false
	}
	_ = b[RecordSize-1]
	return Record{
		Term:       binary.LittleEndian.Uint64(b[8*WordTerm:]),
		ServedTerm: binary.LittleEndian.Uint64(b[8*WordServedTerm:]),
		ConfigID:   binary.LittleEndian.Uint64(b[8*WordConfigID:]),
		Applied:    binary.LittleEndian.Uint64(b[8*WordApplied:]),
		LayoutGen:  binary.LittleEndian.Uint64(b[8*WordLayoutGen:]),
		Shard:      binary.LittleEndian.Uint64(b[8*WordShard:]),
		Replica:    binary.LittleEndian.Uint64(b[8*WordReplica:]),
		BootID:     binary.LittleEndian.Uint64(b[8*WordBootID:]),
	}, true
}

// AppendRecord appends the encoded record to dst.
func AppendRecord(dst []byte, r Record) []byte {
	for _, w := range [RecordWords]uint64{r.Term, r.ServedTerm, r.ConfigID, r.Applied, r.LayoutGen, r.Shard, r.Replica, r.BootID} {
		dst = binary.LittleEndian.AppendUint64(dst, w)
	}
	return dst
}
