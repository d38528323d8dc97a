package rdmatest

import (
	"encoding/binary"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/kvd-io/kvd/rdma"
)

// wordAt is the exposed 8-byte word at offset, to be stored to atomically.
func wordAt(m *rdma.Memory, offset uint64) *uint64 {
	b := m.Bytes()[offset : offset+8]
	return (*uint64)(unsafe.Pointer(&b[0]))
}

// evenWord is a word whose eight bytes are equal: half of it from one store and
// half from another shows, unless both have the same byte.
func evenWord(k uint64) uint64 { return (k & 0xff) * 0x0101010101010101 }

// writeUntil runs fn over and over on its own goroutine until stop is called. It
// yields between the rounds, lest it starve a provider on a small machine.
func writeUntil(fn func(round uint64)) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for k := uint64(1); ; k++ {
			select {
			case <-quit:
				return
			default:
				fn(k)
				runtime.Gosched()
			}
		}
	}()
	return func() { close(quit); <-done }
}

// testWordsAreWhole: many connections READ 64-byte records while their words are
// stored to; each word of each record is whole. Long READs over the same memory
// may be torn between words, and still stay within their bounds.
func testWordsAreWhole(t *testing.T, f Factory) {
	conns := 50
	if f.MaxConns > 0 {
		conns = min(conns, f.MaxConns)
	}
	const records = 256
	s := newSide(t, f)
	d := s.domain("d")
	m := s.memory(7, records*64)
	clear(m.Bytes())
	attr := s.register(d, 7, m)
	links := make([]*link, conns)
	var wg sync.WaitGroup
	for i := range links { // at once: accepting must not be serial by accident
		wg.Go(func() {
			l, err := s.tryConnect(d)
			if err != nil {
				t.Errorf("connection %d: %v", i, err)
				return
			}
			links[i] = l
			if err := l.conn.AddRegion(7, m.Size(), attr); err != nil {
				t.Errorf("add region: %v", err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	stop := writeUntil(func(k uint64) {
		for i := range uint64(records * 8) {
			atomic.StoreUint64(wordAt(m, i*8), evenWord(k+i))
		}
	})
	for i, l := range links {
		wg.Go(func() { readRecords(t, l, i, records) })
	}
	wg.Wait()
	stop()
}

func readRecords(t *testing.T, l *link, seed, records int) {
	const guard = 0x5a
	buf := make([]byte, 8192+8)
	long := buf[:8192:8192]
	for i := range scaled(100) {
		b := newBatch(
			rdma.Read{Region: 7, Offset: uint64((seed + i) % records * 64), Dst: make([]byte, 64)},
			rdma.Read{Region: 7, Offset: uint64((seed*7 + i) % records * 64), Dst: make([]byte, 64)},
			rdma.Read{Region: 7, Offset: uint64(i % records * 64), Dst: make([]byte, 8)},
			rdma.Read{Region: 7, Offset: uint64(i % 100 * 64), Dst: long})
		for j := range buf[8192:] {
			buf[8192+j] = guard
		}
		l.conn.Post(b)
		if !b.Wait(t.Context(), patience) || b.Err() != nil {
			t.Errorf("READ of records: complete %v, error %v", b.Completed(), b.Err())
			return
		}
		for _, r := range b.Reads[:3] {
			for o := 0; o < len(r.Dst); o += 8 {
				if w := binary.LittleEndian.Uint64(r.Dst[o:]); w != evenWord(w) {
					t.Errorf("READ of %d bytes at %d: word %d is torn: %#x", len(r.Dst), r.Offset, o/8, w)
					return
				}
			}
		}
		for _, g := range buf[8192:] {
			if g != guard {
				t.Error("a long READ wrote beyond its Dst")
				return
			}
		}
	}
}

// testChainOrder: READs of a chain are executed in order. The writer raises one
// word, then the other; whoever reads the second first never finds it ahead.
func testChainOrder(t *testing.T, f Factory) {
	s := newSide(t, f)
	d := s.domain("d")
	l := s.connect(d)
	first, second := s.memory(1, 4096), s.memory(2, 64<<10)
	clear(first.Bytes())
	clear(second.Bytes())
	l.addRegion(1, first, s.register(d, 1, first))
	l.addRegion(2, second, s.register(d, 2, second))
	stop := writeUntil(func(k uint64) {
		atomic.StoreUint64(wordAt(first, 64), k)
		atomic.StoreUint64(wordAt(second, 32<<10), k)
	})
	defer stop()
	reads := []rdma.Read{
		{Region: 2, Offset: 32 << 10, Dst: make([]byte, 8)},
		{Region: 1, Offset: 64, Dst: make([]byte, 64)},
		{Region: 2, Offset: 0, Dst: make([]byte, 16<<10)}, // something long between
		{Region: 1, Offset: 64, Dst: make([]byte, 8)},
		{Region: 1, Offset: 0, Dst: make([]byte, 4096)},
		{Region: 1, Offset: 64, Dst: make([]byte, 8)},
	}
	b := newBatch(reads...)
	for range scaled(2000) {
		if err := l.run(b); err != nil {
			t.Fatalf("chain: %v", err)
		}
		was := uint64(0)
		for i, r := range b.Reads {
			if i == 2 || i == 4 {
				continue
			}
			w := binary.LittleEndian.Uint64(r.Dst)
			if w < was {
				t.Fatalf("READ %d of the chain saw %d, one before it saw %d: executed out of order", i, w, was)
			}
			was = w
		}
		b.Reset()
	}
}

// testReadsAreFresh: a READ is executed after it was posted, so it sees what was
// stored before.
func testReadsAreFresh(t *testing.T, f Factory) {
	l := newStand(t, f, 4096)
	b := newBatch(rdma.Read{Region: 7, Offset: 128, Dst: make([]byte, 8)})
	for k := range uint64(scaled(2000)) {
		atomic.StoreUint64(wordAt(l.m, 128), k)
		if err := l.run(b); err != nil {
			t.Fatal(err)
		}
		if got := binary.LittleEndian.Uint64(b.Reads[0].Dst); got != k {
			t.Fatalf("READ saw %d, but %d was stored before it was posted", got, k)
		}
		b.Reset()
	}
}
