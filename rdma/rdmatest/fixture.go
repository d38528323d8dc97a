package rdmatest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// side is the target's half of a case: a rig, and the memory it exposes.
type side struct {
	tb  testing.TB
	f   Factory
	rig Rig
	mem []*rdma.Memory

	closed bool
}

func newSide(tb testing.TB, f Factory) *side {
	tb.Helper()
	s := &side{tb: tb, f: f, rig: f.New(tb)}
	tb.Cleanup(s.close)
	return s
}

// close releases in the order that the contract asks for: memory last.
func (s *side) close() {
	if s.closed {
		return
	}
	s.closed = true
	if err := s.rig.Initiator.Close(); err != nil {
		s.tb.Errorf("close initiator: %v", err)
	}
	if err := s.rig.Target.Close(); err != nil {
		s.tb.Errorf("close target: %v", err)
	}
	for _, m := range s.mem {
		if err := m.Free(); err != nil {
			s.tb.Errorf("free %s: %v", m.Name(), err)
		}
	}
}

func (s *side) domain(name string) rdma.Domain {
	s.tb.Helper()
	d, err := s.rig.Target.NewDomain(name)
	if err != nil {
		s.tb.Fatalf("new domain %s: %v", name, err)
	}
	return d
}

// memory allocates at least size bytes, each set to what pattern says for it.
func (s *side) memory(salt uint64, size int) *rdma.Memory {
	s.tb.Helper()
	m, err := rdma.AllocMemory(fmt.Sprintf("rdmatest-%d", salt), uint64(size), rdma.MemoryOptions{Shareable: true})
	if err != nil {
		s.tb.Fatalf("allocate %d bytes: %v", size, err)
	}
	s.mem = append(s.mem, m)
	fill(m.Bytes(), salt)
	return m
}

func (s *side) register(d rdma.Domain, id rdma.RegionID, m *rdma.Memory) []byte {
	s.tb.Helper()
	attr, err := d.Register(id, m)
	if err != nil {
		s.tb.Fatalf("register region %d: %v", id, err)
	}
	return attr
}

// link is one connection with both of its ends.
type link struct {
	*side
	conn rdma.Conn
	ep   rdma.Endpoint
}

func (s *side) connect(d rdma.Domain) *link {
	s.tb.Helper()
	l, err := s.tryConnect(d)
	if err != nil {
		s.tb.Fatalf("connect: %v", err)
	}
	return l
}

func (s *side) tryConnect(d rdma.Domain) (*link, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	dial, err := s.rig.Initiator.Prepare(ctx)
	if err != nil {
		return nil, fmt.Errorf("prepare: %w", err)
	}
	answer, ep, err := d.Accept(ctx, peer(), dial.Offer())
	if err != nil {
		dial.Abort()
		return nil, fmt.Errorf("accept: %w", err)
	}
	conn, err := dial.Connect(ctx, answer)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", errors.Join(err, ep.Close()))
	}
	return &link{side: s, conn: conn, ep: ep}, nil
}

func peer() rdma.Peer { return rdma.Peer{Name: "rdmatest", Session: "s1"} }

func (l *link) addRegion(id rdma.RegionID, m *rdma.Memory, attr []byte) {
	l.tb.Helper()
	if err := l.conn.AddRegion(id, m.Size(), attr); err != nil {
		l.tb.Fatalf("add region %d: %v", id, err)
	}
}

// stand is the usual case: one domain with one region (id 7, salt 7), and a link
// that has it.
type stand struct {
	*link
	d    rdma.Domain
	m    *rdma.Memory
	attr []byte
}

func newStand(tb testing.TB, f Factory, size int) *stand {
	tb.Helper()
	s := newSide(tb, f)
	d := s.domain("d")
	m := s.memory(7, size)
	attr := s.register(d, 7, m)
	st := &stand{d: d, m: m, attr: attr}
	st.link = s.connect(d)
	st.addRegion(7, m, attr)
	return st
}

// another is a second link to the same region.
func (s *stand) another() *link {
	s.tb.Helper()
	l := s.side.connect(s.d)
	l.addRegion(7, s.m, s.attr)
	return l
}

// read does one READ and returns the bytes, or the error of the batch.
func (l *link) read(id rdma.RegionID, offset uint64, n int) ([]byte, error) {
	l.tb.Helper()
	b := newBatch(rdma.Read{Region: id, Offset: offset, Dst: make([]byte, n)})
	err := l.run(b)
	return b.Reads[0].Dst, err
}

func newBatch(reads ...rdma.Read) *rdma.Batch {
	b := &rdma.Batch{Reads: reads}
	b.Reset()
	return b
}

// run posts b and waits for it. After that the Dsts are ours: writing to them makes
// a provider that still uses them a data race.
func (l *link) run(b *rdma.Batch) error {
	l.tb.Helper()
	l.conn.Post(b)
	if l.conn.Synchronous() && !b.Completed() {
		l.tb.Errorf("synchronous connection: Post returned with the batch outstanding")
	}
	await(l.tb, b)
	for i := range b.Reads {
		if d := b.Reads[i].Dst; len(d) > 0 {
			d[0] ^= 0xff
			d[0] ^= 0xff
		}
	}
	return b.Err()
}

// await waits for a posted batch, which always completes.
func await(tb testing.TB, b *rdma.Batch) {
	tb.Helper()
	if !b.Wait(context.Background(), patience) {
		tb.Fatalf("batch of %d READs not complete after %v", len(b.Reads), patience)
	}
	if !b.Completed() {
		tb.Fatal("Wait returned true, Completed says false")
	}
}

// mustRead reads and compares with the pattern of salt.
func (l *link) mustRead(id rdma.RegionID, salt, offset uint64, n int) {
	l.tb.Helper()
	got, err := l.read(id, offset, n)
	if err != nil {
		l.tb.Fatalf("READ region %d [%d,+%d): %v", id, offset, n, err)
	}
	mustMatch(l.tb, got, salt, offset)
}

func mustMatch(tb testing.TB, got []byte, salt, offset uint64) {
	tb.Helper()
	want := make([]byte, len(got))
	for i := range want {
		want[i] = pattern(salt, offset+uint64(i))
	}
	if !bytes.Equal(got, want) {
		i := 0
		for got[i] == want[i] {
			i++
		}
		tb.Fatalf("READ [%d,+%d): byte %d is %#x, want %#x", offset, len(got), i, got[i], want[i])
	}
}

// pattern is the byte at offset of memory filled with salt. Its period is far
// longer than any region, so a READ of the wrong place shows.
func pattern(salt, offset uint64) byte {
	return byte(word(salt, offset/8) >> (8 * (offset % 8)))
}

func word(salt, i uint64) uint64 {
	x := (salt<<40 + i + 1) * 0x9e3779b97f4a7c15
	x ^= x >> 29
	x *= 0xbf58476d1ce4e5b9
	return x ^ x>>32
}

func fill(b []byte, salt uint64) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], word(salt, uint64(i/8)))
	}
}

// mustFail checks that err is of one of the classes.
func mustFail(tb testing.TB, what string, err error, classes ...error) {
	tb.Helper()
	if err == nil {
		tb.Fatalf("%s: succeeded, want one of %v", what, classes)
	}
	for _, c := range classes {
		if errors.Is(err, c) {
			return
		}
	}
	tb.Fatalf("%s: got %q, want one of the classes %v", what, err, classes)
}

// finished are the classes that a connection taken down by the other side may show.
var finished = []error{rdma.ErrRevoked, rdma.ErrConnLost}

// refused are the classes of a handshake that was not accepted.
var refused = []error{rdma.ErrHandshake, rdma.ErrRevoked}

func awaitDone(tb testing.TB, what string, done <-chan struct{}) {
	tb.Helper()
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
		tb.Fatalf("%s: Done still open after %v", what, patience)
	}
}

func isDone(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// eventually polls until cond is true; state describes what was seen if it never is.
func eventually(tb testing.TB, what string, cond func() bool, state func() string) {
	tb.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !cond() {
		if time.Now().After(deadline) {
			tb.Fatalf("%s: not after %v; %s", what, patience, state())
		}
		<-tick.C
	}
}

func (s *side) noConnections() {
	s.tb.Helper()
	stats := s.rig.Target.Stats
	eventually(s.tb, "no connection left in Stats", func() bool { return stats().Connections == 0 },
		func() string { return fmt.Sprintf("%+v", stats()) })
}

// seeded is a random source whose seed is in the log, for replay.
func seeded(tb testing.TB) *rand.Rand {
	seed := rand.Uint64()
	tb.Logf("seed %#x", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// scaled is how often a case repeats what only chance shows: n times, and a fifth of
// it where the race detector or -short asks for less.
func scaled(n int) int {
	if raceEnabled || testing.Short() {
		return n / 5
	}
	return n
}
