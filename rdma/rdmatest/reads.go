package rdmatest

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"testing"

	"github.com/kvd-io/kvd/rdma"
)

func testConnect(t *testing.T, f Factory) {
	l := newStand(t, f, 4096)
	if got := l.conn.Synchronous(); got != f.Synchronous {
		t.Fatalf("Synchronous is %v, want %v as the factory says", got, f.Synchronous)
	}
	if isDone(l.conn.Done()) || isDone(l.ep.Done()) {
		t.Fatal("a live connection shows Done")
	}
	if err := l.conn.Err(); err != nil {
		t.Fatalf("a live connection has Err %v, want nil", err)
	}
	if !l.conn.HasRegion(7) || l.conn.HasRegion(8) {
		t.Fatalf("HasRegion(7), HasRegion(8) = %v, %v; want true, false", l.conn.HasRegion(7), l.conn.HasRegion(8))
	}
	l.mustRead(7, 7, 0, 64)
}

func testReadSizes(t *testing.T, f Factory) {
	l := newStand(t, f, 1<<20)
	for n := 8; n <= 1<<20; n *= 2 {
		l.mustRead(7, 7, 0, n)
		l.mustRead(7, 7, uint64(1<<20-n), n)
	}
}

func testReadUnaligned(t *testing.T, f Factory) {
	l := newStand(t, f, 64<<10)
	for _, n := range []int{1, 2, 3, 5, 7, 9, 63, 64, 65, 127, 1000, 4095, 4097, 33333} {
		for _, off := range []uint64{0, 1, 7, 63, 65, 4095, l.m.Size() - uint64(n)} {
			l.mustRead(7, 7, off, n)
		}
	}
}

// testReadRandomChains posts chains over several regions and compares with the
// pattern: results land in their own Dst whatever the sizes.
func testReadRandomChains(t *testing.T, f Factory) {
	s := newSide(t, f)
	d := s.domain("d")
	l := s.connect(d)
	sizes := map[rdma.RegionID]int{rdma.ControlRegion: 4096, 1: 64 << 10, 9: 1 << 20, 1 << 31: 8192}
	var ids []rdma.RegionID
	for id, size := range sizes {
		m := s.memory(uint64(id), size)
		l.addRegion(id, m, s.register(d, id, m))
		ids = append(ids, id)
	}
	rnd := seeded(t)
	for range 60 {
		reads := make([]rdma.Read, 1+rnd.IntN(64))
		for i := range reads {
			id := ids[rnd.IntN(len(ids))]
			n := 1 + rnd.IntN(min(sizes[id], 1<<(3+rnd.IntN(13))))
			reads[i] = rdma.Read{Region: id, Offset: rnd.Uint64N(uint64(sizes[id]-n) + 1), Dst: make([]byte, n)}
		}
		b := newBatch(reads...)
		if err := l.run(b); err != nil {
			t.Fatalf("chain of %d: %v", len(reads), err)
		}
		for i := range b.Reads {
			mustMatch(t, b.Reads[i].Dst, uint64(b.Reads[i].Region), b.Reads[i].Offset)
			if b.Reads[i].N != len(b.Reads[i].Dst) {
				t.Fatalf("READ %d: N is %d, want len(Dst) = %d", i, b.Reads[i].N, len(b.Reads[i].Dst))
			}
		}
	}
}

// testReadLongChain: a thousand READs, long and short, are one chain like any other.
func testReadLongChain(t *testing.T, f Factory) {
	l := newStand(t, f, 1<<20)
	reads := make([]rdma.Read, 1000)
	for i := range reads {
		n := 64
		if i%100 == 99 {
			n = 1 << 20
		}
		reads[i] = rdma.Read{Region: 7, Offset: uint64(i*1048) % (1<<20 - uint64(n) + 1), Dst: make([]byte, n)}
	}
	b := newBatch(reads...)
	if err := l.run(b); err != nil {
		t.Fatalf("chain of %d READs: %v", len(reads), err)
	}
	for i := range b.Reads {
		mustMatch(t, b.Reads[i].Dst, 7, b.Reads[i].Offset)
	}
}

// testReadCanaries checks that a READ writes its Dst and not a byte around it,
// in the destination as at the last byte of the region.
func testReadCanaries(t *testing.T, f Factory) {
	l := newStand(t, f, 128<<10)
	for _, n := range []int{1, 8, 13, 64, 100, 4096, 65537} {
		for shift := range 9 {
			buf := bytes.Repeat([]byte{0xc5}, n+64)
			dst := buf[16+shift : 16+shift+n : 16+shift+n]
			off := l.m.Size() - uint64(n)
			if err := l.run(newBatch(rdma.Read{Region: 7, Offset: off, Dst: dst})); err != nil {
				t.Fatalf("READ of the last %d bytes: %v", n, err)
			}
			mustMatch(t, dst, 7, off)
			rest := append(bytes.Clone(buf[:16+shift]), buf[16+shift+n:]...)
			if !bytes.Equal(rest, bytes.Repeat([]byte{0xc5}, 64)) {
				t.Fatalf("READ of %d bytes wrote outside of its Dst", n)
			}
		}
	}
}

// testReadEmpty: a READ of nothing, and a chain of none, are the caller's mistakes;
// they complete with an error and leave the process alone.
func testReadEmpty(t *testing.T, f Factory) {
	for name, reads := range map[string][]rdma.Read{
		"no READ":        {},
		"nil Dst":        {{Region: 7}},
		"empty Dst":      {{Region: 7, Dst: []byte{}}},
		"empty in chain": {{Region: 7, Dst: make([]byte, 8)}, {Region: 7, Dst: []byte{}}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newStand(t, f, 4096)
			mustFail(t, name, l.run(newBatch(reads...)), f.refused()...)
		})
	}
}

func testReadOutOfBounds(t *testing.T, f Factory) {
	size := uint64(os.Getpagesize()) // of the region
	for _, c := range []struct {
		offset uint64
		n      int
	}{
		{size, 1}, {size - 1, 2}, {size - 7, 8}, {0, int(size) + 1}, {1, int(size)}, {1 << 20, 8}, {1 << 32, 8}, {1<<32 - 4, 8},
		{math.MaxUint64, 1}, {math.MaxUint64 - 7, 8}, {math.MaxUint64 - 3, 8}, {1 << 63, 64}, {math.MaxInt64, 8},
	} {
		t.Run(fmt.Sprintf("%d+%d", c.offset, c.n), func(t *testing.T) {
			l := newStand(t, f, int(size))
			_, err := l.read(7, c.offset, c.n)
			mustFail(t, "READ outside of the region", err, f.refused()...)
			// At the end of a chain it fails the chain.
			err = l.another().run(newBatch(
				rdma.Read{Region: 7, Dst: make([]byte, 64)},
				rdma.Read{Region: 7, Offset: c.offset, Dst: make([]byte, c.n)}))
			mustFail(t, "chain with a READ outside of the region", err, f.refused()...)
		})
	}
}
