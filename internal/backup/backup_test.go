package backup

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// content is what a file is made of: the obvious twin of its records.
type content struct {
	cluster *kvdv1.BackupCluster
	shards  []*kvdv1.BackupShard
	pages   [][][]*kvdv1.BackupItem // by shard
}

func randomContent(rng *rand.Rand) content {
	c := content{cluster: &kvdv1.BackupCluster{
		ClusterId: "c0ffee", HashSeed: rng.Uint64(), Shards: 1 + rng.Uint32N(5), Index: 9, Term: 2, Version: "test",
		Namespaces: []*kvdv1.NamespaceInfo{{Id: 1, Name: "default", OneSided: true}, {Id: 2, Name: "fixed", Immutable: true}},
		Tokens:     []*kvdv1.TokenRecord{{Info: &kvdv1.TokenInfo{Id: "0123456789abcdef", Name: "t"}, SecretSha256: make([]byte, 32)}},
	}}
	for n := range c.cluster.GetShards() {
		s := &kvdv1.BackupShard{Shard: n + 1, Index: rng.Uint64N(1000), Term: rng.Uint64N(9)}
		var pages [][]*kvdv1.BackupItem
		serial := 0
		for ns := uint32(1); ns <= 2; ns++ {
			for range rng.IntN(4) {
				var page []*kvdv1.BackupItem
				for range 1 + rng.IntN(20) {
					value := make([]byte, rng.IntN(300))
					if rng.IntN(2) == 0 { // half of them do not pack
						for i := range value {
							value[i] = byte(rng.Uint32())
						}
					}
					it := &kvdv1.BackupItem{NamespaceId: ns, Key: fmt.Appendf(nil, "key/%06d", serial), Value: value, ExpiresUnixMs: rng.Int64N(3)}
					serial++
					s.Keys++
					s.Bytes += ItemBytes(it)
					page = append(page, it)
				}
				pages = append(pages, page)
			}
		}
		c.shards, c.pages = append(c.shards, s), append(c.pages, pages)
	}
	return c
}

func (c content) write(t testing.TB, w io.Writer) *kvdv1.BackupEnd {
	x, err := NewWriter(w)
	require.NoError(t, err)
	require.NoError(t, x.Cluster(c.cluster))
	for i := range c.shards {
		c.writeShard(t, x, i)
	}
	end, err := x.Finish()
	require.NoError(t, err)
	return end
}

func (c content) writeShard(t testing.TB, x *Writer, i int) {
	require.NoError(t, x.BeginShard(c.shards[i]))
	for _, p := range c.pages[i] {
		require.NoError(t, x.Items(p))
	}
	require.NoError(t, x.EndShard())
}

// read checks that the file holds the content, and returns the first error.
func (c content) read(t testing.TB, r io.Reader) error {
	x, err := NewReader(r)
	if err != nil {
		return err
	}
	shard, page := -1, 0
	for {
		rec, err := x.Next()
		if errors.Is(err, io.EOF) {
			require.Equal(t, len(c.shards), shard+1)
			return nil
		}
		if err != nil {
			return err
		}
		switch {
		case rec.Cluster != nil:
			require.True(t, proto.Equal(c.cluster, rec.Cluster))
		case rec.Begin != nil:
			shard, page = shard+1, 0
			require.True(t, proto.Equal(c.shards[shard], rec.Begin))
		case rec.Items != nil:
			require.True(t, proto.Equal(&kvdv1.BackupItems{Items: c.pages[shard][page]}, &kvdv1.BackupItems{Items: rec.Items}))
			page++
		case rec.End != nil:
			require.Equal(t, len(c.pages[shard]), page)
		}
	}
}

func seeded(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

func TestRoundTrip(t *testing.T) {
	rng := seeded(t)
	for range 20 {
		c := randomContent(rng)
		var file bytes.Buffer
		end := c.write(t, &file)
		require.NoError(t, c.read(t, bytes.NewReader(file.Bytes())))
		var seen int64
		s, err := Verify(bytes.NewReader(file.Bytes()), func(n int64) { seen = n })
		require.NoError(t, err)
		require.Equal(t, int64(file.Len()), seen)
		require.Equal(t, int64(file.Len()), s.FileBytes)
		require.True(t, proto.Equal(end, s.End))
		require.Len(t, s.Shards, len(c.shards))
	}
}

// Every prefix of a file is refused as cut short, and every byte that is another one is
// noticed.
func TestEveryByteCounts(t *testing.T) {
	rng := seeded(t)
	c := randomContent(rng)
	for len(c.shards) > 2 {
		c.shards, c.pages = c.shards[:2], c.pages[:2]
	}
	var buf bytes.Buffer
	c.write(t, &buf)
	file := buf.Bytes()
	for n := range len(file) {
		_, err := Verify(bytes.NewReader(file[:n]), nil)
		if n == 0 {
			require.ErrorIs(t, err, ErrNotBackup)
			continue
		}
		require.ErrorIs(t, err, ErrTruncated, "cut after %d of %d bytes", n, len(file))
	}
	for i := range file {
		b := bytes.Clone(file)
		b[i] ^= byte(1 + rng.IntN(255))
		_, err := Verify(bytes.NewReader(b), nil)
		require.Error(t, err, "byte %d of %d", i, len(file))
		if i >= preambleLen {
			require.True(t, errors.Is(err, ErrDamaged) || errors.Is(err, ErrTruncated), "byte %d: %v", i, err)
		}
	}
	_, err := Verify(bytes.NewReader(append(bytes.Clone(file), 0)), nil)
	require.ErrorIs(t, err, ErrDamaged)
	_, err = Verify(strings.NewReader("PK\x03\x04 something else"), nil)
	require.ErrorIs(t, err, ErrNotBackup)
	newer := bytes.Clone(file)
	binary.LittleEndian.PutUint16(newer[len(magic):], Version+1)
	_, err = Verify(bytes.NewReader(newer), nil)
	require.ErrorIs(t, err, ErrNewer)
}

// records takes a file apart at the borders of its records.
func records(file []byte) (preamble []byte, recs [][]byte) {
	preamble, file = file[:preambleLen], file[preambleLen:]
	for len(file) > 0 {
		n := headLen + int(binary.LittleEndian.Uint32(file[4:]))
		recs, file = append(recs, file[:n]), file[n:]
	}
	return preamble, recs
}

// A record that is missing, doubled or moved is noticed although each is sound by itself.
func TestRecordsInOrder(t *testing.T) {
	var buf bytes.Buffer
	c := randomContent(seeded(t))
	c.write(t, &buf)
	preamble, recs := records(buf.Bytes())
	join := func(recs ...[]byte) io.Reader {
		return bytes.NewReader(append(bytes.Clone(preamble), bytes.Join(recs, nil)...))
	}
	require.NoError(t, c.read(t, join(recs...)))
	for i := range recs {
		without := append(append([][]byte{}, recs[:i]...), recs[i+1:]...)
		_, err := Verify(join(without...), nil)
		require.Error(t, err, "without record %d", i)
		twice := append(append([][]byte{}, recs[:i+1]...), recs[i:]...)
		_, err = Verify(join(twice...), nil)
		require.ErrorIs(t, err, ErrDamaged, "record %d twice", i)
		if i > 0 {
			swapped := append([][]byte{}, recs...)
			swapped[i-1], swapped[i] = swapped[i], swapped[i-1]
			_, err = Verify(join(swapped...), nil)
			require.ErrorIs(t, err, ErrDamaged, "records %d and %d swapped", i-1, i)
		}
	}
}

// What a writer of ours can not have written is refused though all sums are right.
func TestSoundButWrong(t *testing.T) {
	item := func(ns uint32, key string) *kvdv1.BackupItem {
		return &kvdv1.BackupItem{NamespaceId: ns, Key: []byte(key), Value: []byte("v")}
	}
	shard := func(n uint32, keys uint64) *kvdv1.BackupShard {
		return &kvdv1.BackupShard{Shard: n, Keys: keys, Bytes: 2 * keys}
	}
	cluster := &kvdv1.BackupCluster{Shards: 4, Namespaces: []*kvdv1.NamespaceInfo{{Id: 1, Name: "default"}}}
	for _, tc := range []struct {
		name  string
		words string
		write func(x *Writer) error
	}{
		{"unknown namespace", "namespace with id 7", func(x *Writer) error {
			return errors.Join(x.BeginShard(shard(1, 1)), x.Items([]*kvdv1.BackupItem{item(7, "a")}), x.EndShard())
		}},
		{"keys out of order", "behind key", func(x *Writer) error {
			return errors.Join(x.BeginShard(shard(1, 2)), x.Items([]*kvdv1.BackupItem{item(1, "b"), item(1, "a")}), x.EndShard())
		}},
		{"a key twice, in two records", "behind key", func(x *Writer) error {
			return errors.Join(x.BeginShard(shard(1, 2)), x.Items([]*kvdv1.BackupItem{item(1, "b")}), x.Items([]*kvdv1.BackupItem{item(1, "b")}), x.EndShard())
		}},
		{"empty key", "0 bytes", func(x *Writer) error {
			return errors.Join(x.BeginShard(&kvdv1.BackupShard{Shard: 1, Keys: 1, Bytes: 1}), x.Items([]*kvdv1.BackupItem{item(1, "")}), x.EndShard())
		}},
		{"long key", "4097 bytes", func(x *Writer) error {
			return errors.Join(x.BeginShard(&kvdv1.BackupShard{Shard: 1, Keys: 1, Bytes: 4098}), x.Items([]*kvdv1.BackupItem{item(1, strings.Repeat("k", 4097))}), x.EndShard())
		}},
		{"shards out of order", "behind shard", func(x *Writer) error {
			return errors.Join(x.BeginShard(shard(2, 0)), x.EndShard(), x.BeginShard(shard(1, 0)), x.EndShard())
		}},
		{"a shard cut off", "wrong place", func(x *Writer) error {
			err := errors.Join(x.BeginShard(shard(1, 0)))
			x.open = nil
			return err
		}},
		{"second cluster", "wrong place", func(x *Writer) error { return x.Cluster(cluster) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var file bytes.Buffer
			x, err := NewWriter(&file)
			require.NoError(t, err)
			require.NoError(t, x.Cluster(cluster))
			require.NoError(t, tc.write(x))
			_, err = x.Finish()
			require.NoError(t, err)
			_, err = Verify(&file, nil)
			require.ErrorIs(t, err, ErrDamaged)
			require.ErrorContains(t, err, tc.words)
		})
	}
}

// A shard that was begun anew after a rollback leaves no trace, and one that is not what
// its node announced is not ended.
func TestRollback(t *testing.T) {
	c := randomContent(seeded(t))
	var want bytes.Buffer
	c.write(t, &want)

	var file bytes.Buffer
	x, err := NewWriter(&file)
	require.NoError(t, err)
	require.NoError(t, x.Cluster(c.cluster))
	for i, s := range c.shards {
		m := x.Mark()
		require.NoError(t, x.BeginShard(&kvdv1.BackupShard{Shard: s.GetShard(), Keys: 1 << 40}))
		require.NoError(t, x.Items([]*kvdv1.BackupItem{{NamespaceId: 1, Key: []byte("gone"), Value: []byte("x")}}))
		require.ErrorContains(t, x.EndShard(), "had announced 1099511627776")
		file.Truncate(int(m.Offset))
		x.Rollback(m)
		c.writeShard(t, x, i)
	}
	_, err = x.Finish()
	require.NoError(t, err)
	require.True(t, bytes.Equal(want.Bytes(), file.Bytes()))
}

// Namespaces that come up while the backup runs are in front of their first item.
func TestNamespacesLater(t *testing.T) {
	var file bytes.Buffer
	x, err := NewWriter(&file)
	require.NoError(t, err)
	c := &kvdv1.BackupCluster{Shards: 1, Namespaces: []*kvdv1.NamespaceInfo{{Id: 1, Name: "default"}}}
	require.NoError(t, x.Cluster(c))
	require.NoError(t, x.BeginShard(&kvdv1.BackupShard{Shard: 1, Keys: 1, Bytes: 1}))
	require.NoError(t, x.Namespaces(c)) // nothing new: nothing is written
	c.Namespaces = append(c.Namespaces, &kvdv1.NamespaceInfo{Id: 2, Name: "late"})
	require.NoError(t, x.Namespaces(c))
	require.NoError(t, x.Items([]*kvdv1.BackupItem{{NamespaceId: 2, Key: []byte("k")}}))
	require.NoError(t, x.EndShard())
	_, err = x.Finish()
	require.NoError(t, err)
	s, err := Verify(&file, nil)
	require.NoError(t, err)
	require.Len(t, s.Cluster.GetNamespaces(), 1)
	require.Len(t, s.Namespaces, 2)
}

// FuzzReader: whatever the bytes are, a reader ends with an error of one of its kinds, or
// has read a file that says the same when it is written again.
func FuzzReader(f *testing.F) {
	// Small ones: a fuzzer takes its time over large ones.
	for n := range 3 {
		c := content{cluster: &kvdv1.BackupCluster{Shards: 1, Namespaces: []*kvdv1.NamespaceInfo{{Id: 1, Name: "d"}}}}
		var page []*kvdv1.BackupItem
		for i := range n {
			page = append(page, &kvdv1.BackupItem{NamespaceId: 1, Key: []byte{byte('a' + i)}, Value: bytes.Repeat([]byte("v"), 30*i)})
		}
		if n > 0 {
			c.pages = [][][]*kvdv1.BackupItem{{page}}
			c.shards = []*kvdv1.BackupShard{{Shard: 1, Keys: uint64(n), Bytes: uint64(n + 15*n*(n-1))}}
		}
		var file bytes.Buffer
		c.write(f, &file)
		f.Add(file.Bytes())
	}
	f.Add(magic[:])
	f.Fuzz(func(t *testing.T, data []byte) {
		// Most changes break a sum; with the sums put right the decoder behind them is
		// reached as well.
		for _, b := range [][]byte{data, mendSums(data)} {
			r := bytes.NewReader(b)
			s, err := Verify(r, nil)
			if err != nil {
				if !errors.Is(err, ErrNotBackup) && !errors.Is(err, ErrNewer) && !errors.Is(err, ErrTruncated) && !errors.Is(err, ErrDamaged) {
					t.Fatalf("an error of no kind: %v", err)
				}
				continue
			}
			if s.FileBytes != int64(len(b)) || s.Cluster == nil || s.End == nil {
				t.Fatalf("took %d of %d bytes for a whole file", s.FileBytes, len(b))
			}
		}
	})
}

// mendSums puts numbers and sums of whole records right.
func mendSums(data []byte) []byte {
	b := bytes.Clone(data)
	for at, number := preambleLen, uint32(0); at+headLen <= len(b); number++ {
		n := int(binary.LittleEndian.Uint32(b[at+4:]))
		if n > len(b)-at-headLen {
			break
		}
		binary.LittleEndian.PutUint32(b[at+12:], number)
		binary.LittleEndian.PutUint64(b[at+sumAt:], recordSum(b[at:at+headLen], b[at+headLen:at+headLen+n]))
		at += headLen + n
	}
	return b
}
