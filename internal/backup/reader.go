package backup

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/xxh3"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/layout"
)

// Record is one record of a file; one field is set. It is the caller's.
type Record struct {
	Cluster    *kvdv1.BackupCluster
	Begin      *kvdv1.BackupShard
	Items      []*kvdv1.BackupItem
	End        *kvdv1.BackupShard
	Namespaces []*kvdv1.NamespaceInfo
	Finish     *kvdv1.BackupEnd
}

// Reader reads one file and refuses everything that Writer can not have written.
type Reader struct {
	r      io.Reader
	unpack *zstd.Decoder
	hash   *xxh3.Hasher
	number uint32
	offset int64

	names map[uint32]bool
	// shard is the one that is being read; got is what came of it so far.
	shard   *kvdv1.BackupShard
	got     counts
	last    uint32 // number of the shard that was read last
	total   counts
	lastNS  uint32
	lastKey []byte
	done    bool
}

// NewReader reads the preamble. Errors: ErrNotBackup, ErrNewer, ErrTruncated, those of r.
func NewReader(r io.Reader) (*Reader, error) {
	x := &Reader{r: r, hash: xxh3.New(), names: map[uint32]bool{}}
	b := make([]byte, preambleLen)
	n, err := io.ReadFull(r, b)
	if m := min(n, len(magic)); m == 0 || !bytes.Equal(b[:m], magic[:m]) {
		if err != nil && !isEnd(err) {
			return nil, err
		}
		return nil, fmt.Errorf("%w: it does not begin as one does", ErrNotBackup)
	}
	if err != nil {
		return nil, cutShort(err, 0)
	}
	switch v := binary.LittleEndian.Uint16(b[len(magic):]); {
	case v > Version:
		return nil, fmt.Errorf("%w: it has version %d, this program reads up to %d: use the kvctl of the kvd that wrote it, or a later one", ErrNewer, v, Version)
	case v == 0 || binary.LittleEndian.Uint16(b[len(magic)+2:]) != 0:
		return nil, damagedf("its preamble says version %d", v)
	}
	_, _ = x.hash.Write(b)
	x.offset = int64(n)
	x.unpack, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxRecord))
	return x, err
}

func isEnd(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }

func cutShort(err error, offset int64) error {
	if isEnd(err) {
		return fmt.Errorf("%w: it ends after byte %d, in front of its last record", ErrTruncated, offset)
	}
	return err
}

// Offset is how many bytes were read so far.
func (x *Reader) Offset() int64 { return x.offset }

// Next returns the next record, and io.EOF behind the last one. Errors: ErrTruncated,
// ErrDamaged, those of the reader below.
func (x *Reader) Next() (Record, error) {
	if x.done {
		var b [1]byte
		if n, err := io.ReadFull(x.r, b[:]); n > 0 {
			return Record{}, damagedf("something follows its last record, at byte %d", x.offset)
		} else if !isEnd(err) {
			return Record{}, err
		}
		x.unpack.Close()
		return Record{}, io.EOF
	}
	sum := x.hash.Sum64() // of all before this record
	at := x.offset
	k, raw, err := x.payload()
	if err != nil {
		return Record{}, err
	}
	r, err := x.decode(k, raw, sum)
	if err != nil {
		return Record{}, fmt.Errorf("%w (record %d, at byte %d)", err, x.number-1, at)
	}
	return r, nil
}

// payload reads one record, and returns its payload unpacked.
func (x *Reader) payload() (kind, []byte, error) {
	at := x.offset
	bad := func(format string, args ...any) (kind, []byte, error) {
		return 0, nil, damagedf("record %d, at byte %d: %s", x.number, at, fmt.Sprintf(format, args...))
	}
	var head [headLen]byte
	if n, err := io.ReadFull(x.r, head[:]); err != nil {
		return 0, nil, cutShort(err, at+int64(n))
	}
	stored, raw := binary.LittleEndian.Uint32(head[4:]), binary.LittleEndian.Uint32(head[8:])
	if stored > maxRecord || raw > maxRecord {
		return bad("it says that it has %d bytes, unpacked %d: at most %d are possible", stored, raw, maxRecord)
	}
	// Not at once: what is damaged may say that there is much.
	var payload bytes.Buffer
	if n, err := io.CopyN(&payload, x.r, int64(stored)); err != nil {
		return 0, nil, cutShort(err, at+headLen+n)
	}
	b := payload.Bytes()
	x.offset += headLen + int64(stored)
	if recordSum(head[:], b) != binary.LittleEndian.Uint64(head[sumAt:]) {
		return bad("its check sum is another one")
	}
	if n := binary.LittleEndian.Uint32(head[12:]); n != x.number {
		return bad("it has number %d", n)
	}
	_, _ = x.hash.Write(head[:])
	_, _ = x.hash.Write(b)
	switch head[1] {
	case 0:
	case flagPacked:
		var err error
		if b, err = x.unpack.DecodeAll(b, make([]byte, 0, min(int(raw), 4<<20))); err != nil {
			return bad("it can not be unpacked: %v", err)
		}
	default:
		return bad("it has flags %#x", head[1])
	}
	if len(b) != int(raw) || head[2] != 0 || head[3] != 0 {
		return bad("it has %d bytes unpacked, and says %d", len(b), raw)
	}
	x.number++
	return kind(head[0]), b, nil
}

func (x *Reader) decode(k kind, raw []byte, sum uint64) (r Record, err error) {
	if (k == kindCluster) != (x.number == 1) {
		return r, damagedf("a record of kind %d in the wrong place", k)
	}
	get := func(m proto.Message) error {
		if err := proto.Unmarshal(raw, m); err != nil {
			return damagedf("%v", err)
		}
		return nil
	}
	between := x.shard == nil
	switch {
	case k == kindCluster:
		r.Cluster = &kvdv1.BackupCluster{}
		if err := get(r.Cluster); err != nil {
			return r, err
		}
		if r.Cluster.GetShards() == 0 {
			return r, damagedf("a cluster without shards")
		}
		return r, x.learnNames(r.Cluster.GetNamespaces())
	case k == kindNamespaces:
		c := &kvdv1.BackupCluster{}
		if err := get(c); err != nil {
			return r, err
		}
		r.Namespaces = c.GetNamespaces()
		return r, x.learnNames(r.Namespaces)
	case k == kindBegin && between:
		r.Begin = &kvdv1.BackupShard{}
		if err := get(r.Begin); err != nil {
			return r, err
		}
		return r, x.begin(r.Begin)
	case k == kindItems && !between:
		m := &kvdv1.BackupItems{}
		if err := get(m); err != nil {
			return r, err
		}
		r.Items = m.GetItems()
		return r, x.items(r.Items)
	case k == kindEnd && !between:
		r.End = &kvdv1.BackupShard{}
		if err := get(r.End); err != nil {
			return r, err
		}
		return r, x.end(r.End)
	case k == kindFinish && between:
		r.Finish = &kvdv1.BackupEnd{}
		if err := get(r.Finish); err != nil {
			return r, err
		}
		t := x.total
		if !proto.Equal(r.Finish, &kvdv1.BackupEnd{Shards: t.shards, Keys: t.keys, Bytes: t.bytes, Checksum: sum}) {
			return r, damagedf("%d shards, %d keys, %d bytes and check sum %016x were read, its end says %d, %d, %d and %016x", t.shards, t.keys, t.bytes, sum, r.Finish.GetShards(), r.Finish.GetKeys(), r.Finish.GetBytes(), r.Finish.GetChecksum())
		}
		x.done = true
		return r, nil
	}
	return r, damagedf("a record of kind %d in the wrong place", k)
}

func (x *Reader) learnNames(all []*kvdv1.NamespaceInfo) error {
	seen := map[string]bool{}
	for _, ns := range all {
		if ns.GetId() == 0 || ns.GetName() == "" || seen[ns.GetName()] {
			return damagedf("namespace %q with id %d", ns.GetName(), ns.GetId())
		}
		seen[ns.GetName()], x.names[ns.GetId()] = true, true
	}
	return nil
}

func (x *Reader) begin(s *kvdv1.BackupShard) error {
	if s.GetShard() <= x.last {
		return damagedf("shard %d behind shard %d", s.GetShard(), x.last)
	}
	x.last, x.shard, x.lastNS, x.lastKey = s.GetShard(), s, 0, nil
	x.got = counts{}
	return nil
}

func (x *Reader) items(items []*kvdv1.BackupItem) error {
	if len(items) == 0 {
		return damagedf("no items where some must be")
	}
	for _, it := range items {
		ns, key := it.GetNamespaceId(), it.GetKey()
		switch {
		case !x.names[ns]:
			return damagedf("key %q in a namespace with id %d, which there is not", key, ns)
		case len(key) == 0 || len(key) > layout.MaxKeySize:
			return damagedf("a key of %d bytes", len(key))
		case it.GetExpiresUnixMs() < 0:
			return damagedf("key %q expires at %d", key, it.GetExpiresUnixMs())
		case ns < x.lastNS || ns == x.lastNS && bytes.Compare(key, x.lastKey) <= 0:
			return damagedf("key %q of namespace %d behind key %q of namespace %d", key, ns, x.lastKey, x.lastNS)
		}
		x.lastNS, x.lastKey = ns, key
		x.got.keys++
		x.got.bytes += ItemBytes(it)
	}
	return nil
}

func (x *Reader) end(s *kvdv1.BackupShard) error {
	if !proto.Equal(s, x.shard) || x.got.keys != s.GetKeys() || x.got.bytes != s.GetBytes() {
		return damagedf("shard %d: %d keys of %d bytes were read, its end says %d of %d", x.shard.GetShard(), x.got.keys, x.got.bytes, s.GetKeys(), s.GetBytes())
	}
	x.shard = nil
	x.total.shards++
	x.total.keys += s.GetKeys()
	x.total.bytes += s.GetBytes()
	return nil
}

// Summary is what a file says of itself.
type Summary struct {
	Cluster *kvdv1.BackupCluster
	// Namespaces are all, those included that were made while the backup ran.
	Namespaces []*kvdv1.NamespaceInfo
	Shards     []*kvdv1.BackupShard
	End        *kvdv1.BackupEnd
	MaxValue   uint64 // bytes of the largest value
	FileBytes  int64
}

// Verify reads a whole file. seen, if it is not nil, is told how many bytes were read so
// far. Errors as those of NewReader and Next.
func Verify(r io.Reader, seen func(bytes int64)) (*Summary, error) {
	x, err := NewReader(r)
	if err != nil {
		return nil, err
	}
	s := &Summary{}
	for {
		rec, err := x.Next()
		if errors.Is(err, io.EOF) {
			s.FileBytes = x.Offset()
			return s, nil
		}
		if err != nil {
			return nil, err
		}
		s.add(rec)
		if seen != nil {
			seen(x.Offset())
		}
	}
}

func (s *Summary) add(rec Record) {
	switch {
	case rec.Cluster != nil:
		s.Cluster, s.Namespaces = rec.Cluster, rec.Cluster.GetNamespaces()
	case rec.Namespaces != nil:
		s.Namespaces = rec.Namespaces
	case rec.End != nil:
		s.Shards = append(s.Shards, rec.End)
	case rec.Finish != nil:
		s.End = rec.Finish
	}
	for _, it := range rec.Items {
		s.MaxValue = max(s.MaxValue, uint64(len(it.GetValue())))
	}
}
