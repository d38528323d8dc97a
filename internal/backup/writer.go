package backup

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/xxh3"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// Writer writes one file. The calls come in the order of the records; after an error
// only Rollback makes sense.
type Writer struct {
	w     io.Writer
	pack  *zstd.Encoder
	state Mark
	open  *kvdv1.BackupShard // the shard that is being written
	got   counts             // what came of it
}

type counts struct {
	shards      uint32
	keys, bytes uint64
}

// Mark is a place between two shards to which Rollback goes back.
type Mark struct {
	// Offset is the length of the file at the mark, in bytes.
	Offset int64

	number uint32
	hash   xxh3.Hasher
	total  counts
	names  int // namespaces written so far
}

// NewWriter writes the preamble. w gets each record by one call of Write.
func NewWriter(w io.Writer) (*Writer, error) {
	pack, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, fmt.Errorf("backup: %w", err)
	}
	x := &Writer{w: w, pack: pack}
	x.state.hash = *xxh3.New()
	b := append([]byte(nil), magic[:]...)
	b = binary.LittleEndian.AppendUint16(b, Version)
	b = binary.LittleEndian.AppendUint16(b, 0)
	return x, x.write(b)
}

func (x *Writer) write(b []byte) error {
	_, _ = x.state.hash.Write(b) // never fails
	n, err := x.w.Write(b)
	x.state.Offset += int64(n)
	return err
}

func (x *Writer) record(k kind, m proto.Message) error {
	raw, err := proto.Marshal(m)
	if err != nil {
		return fmt.Errorf("backup: encode: %w", err)
	}
	if len(raw) > maxRecord {
		return fmt.Errorf("backup: a record of %d bytes: want at most %d", len(raw), maxRecord)
	}
	b := make([]byte, headLen, headLen+len(raw)/2+64)
	b[0] = byte(k)
	if k == kindItems || k == kindCluster || k == kindNamespaces {
		b[1] = flagPacked
		b = x.pack.EncodeAll(raw, b)
	}
	if b[1] == 0 || len(b)-headLen >= len(raw) {
		b[1], b = 0, append(b[:headLen], raw...)
	}
	binary.LittleEndian.PutUint32(b[4:], uint32(len(b)-headLen))
	binary.LittleEndian.PutUint32(b[8:], uint32(len(raw)))
	binary.LittleEndian.PutUint32(b[12:], x.state.number)
	binary.LittleEndian.PutUint64(b[sumAt:], recordSum(b[:headLen], b[headLen:]))
	x.state.number++
	return x.write(b)
}

// recordSum is over a record without its sum.
func recordSum(head, payload []byte) uint64 {
	h := xxh3.New()
	_, _ = h.Write(head[:sumAt])
	_, _ = h.Write(payload)
	return h.Sum64()
}

// Cluster writes where the backup is from; it comes first.
func (x *Writer) Cluster(c *kvdv1.BackupCluster) error {
	x.state.names = len(c.GetNamespaces())
	return x.record(kindCluster, c)
}

// Namespaces writes all namespaces again where there are more than were written before.
func (x *Writer) Namespaces(c *kvdv1.BackupCluster) error {
	if len(c.GetNamespaces()) <= x.state.names {
		return nil
	}
	x.state.names = len(c.GetNamespaces())
	return x.record(kindNamespaces, &kvdv1.BackupCluster{Index: c.GetIndex(), Term: c.GetTerm(), Namespaces: c.GetNamespaces()})
}

// BeginShard begins a shard of which s says what will come.
func (x *Writer) BeginShard(s *kvdv1.BackupShard) error {
	if x.open != nil {
		panic("backup: BeginShard before EndShard") // bug of the caller
	}
	x.open = proto.Clone(s).(*kvdv1.BackupShard)
	x.got = counts{}
	return x.record(kindBegin, s)
}

// Items writes some of the shard, all behind what came before. The items are borrowed
// until it returns.
func (x *Writer) Items(items []*kvdv1.BackupItem) error {
	for _, it := range items {
		x.got.keys++
		x.got.bytes += ItemBytes(it)
	}
	return x.record(kindItems, &kvdv1.BackupItems{Items: items})
}

// EndShard ends it. It fails where not all came that was to come.
func (x *Writer) EndShard() error {
	s := x.open
	if x.got.keys != s.GetKeys() || x.got.bytes != s.GetBytes() {
		return fmt.Errorf("backup: shard %d: %d keys of %d bytes came, its node had announced %d of %d",
			s.GetShard(), x.got.keys, x.got.bytes, s.GetKeys(), s.GetBytes())
	}
	x.open = nil
	x.state.total.shards++
	x.state.total.keys += x.got.keys
	x.state.total.bytes += x.got.bytes
	return x.record(kindEnd, s)
}

// Mark remembers the present place, which lies between two shards.
func (x *Writer) Mark() Mark { return x.state }

// Rollback forgets what was written since the mark. The caller has cut the file back to
// its Offset.
func (x *Writer) Rollback(m Mark) { x.open, x.state = nil, m }

// Finish writes the last record and returns the totals.
func (x *Writer) Finish() (*kvdv1.BackupEnd, error) {
	t := x.state.total
	end := &kvdv1.BackupEnd{Shards: t.shards, Keys: t.keys, Bytes: t.bytes, Checksum: x.state.hash.Sum64()}
	if err := x.record(kindFinish, end); err != nil {
		return nil, err
	}
	return end, x.pack.Close()
}
