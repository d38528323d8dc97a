package simnic

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/rdma"
	"github.com/stretchr/testify/require"
)

// TestSameSeedSameHistory runs a program of one goroutine full of faults twice with
// each seed, and with different seeds.
func TestSameSeedSameHistory(t *testing.T) {
	seen := make(map[string]uint64)
	var failed, good int
	for seed := range uint64(40) {
		h := history(t, seed)
		require.Equal(t, h, history(t, seed), "seed %d", seed)
		if other, ok := seen[h]; ok {
			t.Fatalf("seeds %d and %d have the same history: the seed decides nothing", seed, other)
		}
		seen[h] = seed
		failed += strings.Count(h, "rdma: ")
		good += strings.Count(h, ": ok")
	}
	t.Logf("%d READs went well, %d batches or dials failed", good, failed)
	require.NotZero(t, good)
	require.NotZero(t, failed)
}

// history is everything that a client saw, with the times.
func history(t *testing.T, seed uint64) string {
	clk := clock.NewManual(time.Unix(0, 0))
	const us = time.Microsecond
	f, err := New(Config{
		Seed: seed, Clock: clk, Stepped: true, TearOneIn: 2, LoseOneIn: 60, RevokeOneIn: 90, Timeout: 300 * us,
		Delay: Range{us, 90 * us}, Gap: Range{0, 3 * us}, Return: Range{us, 40 * us}, Pause: Range{0, 9 * us},
	})
	require.NoError(t, err)
	defer f.Close()
	p := &player{t: t, f: f, clk: clk, rnd: rand.New(rand.NewPCG(seed, 1))}
	p.mem, err = rdma.AllocMemory("history", 4096, rdma.MemoryOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, p.mem.Free()) }()
	p.ini, err = f.Host("c").NewInitiator(rdma.InitiatorConfig{})
	require.NoError(t, err)
	p.boot()
	p.conns = make([]rdma.Conn, 3)
	for range 400 {
		p.act()
	}
	f.Heal("c", "s")
	p.settle()
	return p.out.String()
}

type player struct {
	t      *testing.T
	f      *Fabric
	clk    *clock.Manual
	rnd    *rand.Rand
	mem    *rdma.Memory
	ini    rdma.Initiator
	domain rdma.Domain
	attr   []byte
	boots  uint64
	conns  []rdma.Conn
	posted []*named
	out    strings.Builder
}

func (p *player) boot() {
	p.boots++
	target, err := p.f.Host("s").NewTarget(rdma.TargetConfig{BootID: p.boots})
	require.NoError(p.t, err)
	p.domain, err = target.NewDomain("d")
	require.NoError(p.t, err)
	p.attr, err = p.domain.Register(0, p.mem)
	require.NoError(p.t, err)
}

func (p *player) act() {
	switch n := p.rnd.IntN(100); {
	case n < 50:
		p.post(p.rnd.IntN(len(p.conns)))
	case n < 80:
		off := 8 * p.rnd.IntN(512)
		atomic.StoreUint64((*uint64)(unsafe.Pointer(&p.mem.Bytes()[off])), p.rnd.Uint64())
	case n < 83:
		p.f.Partition("c", "s")
	case n < 88:
		p.f.Heal("c", "s")
	case n < 89:
		p.f.Kill("s")
		p.boot()
	case n < 90:
		p.f.Lose("c", "s")
	}
	for range p.rnd.IntN(6) {
		p.step()
	}
}

func (p *player) post(i int) {
	c := p.conns[i]
	if c == nil || c.Err() != nil {
		dial, err := p.ini.Prepare(context.Background())
		require.NoError(p.t, err)
		answer, _, err := p.domain.Accept(context.Background(), rdma.Peer{}, dial.Offer())
		require.NoError(p.t, err)
		if c, err = dial.Connect(context.Background(), answer); err != nil {
			fmt.Fprintf(&p.out, "dial: %v\n", err)
			return
		}
		require.NoError(p.t, c.AddRegion(0, p.mem.Size(), p.attr))
		p.conns[i] = c
	}
	b := &rdma.Batch{}
	for range 1 + p.rnd.IntN(3) {
		n := 1 + p.rnd.IntN(200)
		b.Reads = append(b.Reads, rdma.Read{Offset: p.rnd.Uint64N(uint64(4096 - n)), Dst: make([]byte, n)})
	}
	b.Reset()
	p.posted = append(p.posted, &named{name: fmt.Sprintf("%d/%d", i, len(p.posted)), b: b})
	c.Post(b)
}

// step runs the next event and writes down what completed with it.
func (p *player) step() bool {
	at, ok := p.f.Next()
	if !ok {
		return false
	}
	if d := at.Sub(p.clk.Now()); d > 0 {
		p.clk.Advance(d)
	}
	require.True(p.t, p.f.Step())
	p.posted = slices.DeleteFunc(p.posted, func(n *named) bool {
		if !n.b.Completed() {
			return false
		}
		fmt.Fprintf(&p.out, "%v %s: ", at.Sub(epoch), n.name)
		if n.b.Err() != nil {
			fmt.Fprintln(&p.out, n.b.Err())
			return true
		}
		for _, r := range n.b.Reads {
			fmt.Fprintf(&p.out, "%x ", r.Dst)
		}
		fmt.Fprintln(&p.out, ": ok")
		return true
	})
	return true
}

// settle runs until nothing is under way: every batch must have completed.
func (p *player) settle() {
	for p.step() {
	}
	for _, n := range p.posted {
		require.True(p.t, n.b.Completed(), "batch %s never completed", n.name)
	}
}

// TestTornReadsMix: with a writer that always stores one value to all words of a
// long record, torn READs see two values in one record, and always whole words.
func TestTornReadsMix(t *testing.T) {
	f, err := New(Config{Seed: 5, TearOneIn: 2, Pause: Range{Max: 50 * time.Microsecond}})
	require.NoError(t, err)
	defer f.Close()
	p := &player{t: t, f: f}
	p.mem, err = rdma.AllocMemory("torn", 4096, rdma.MemoryOptions{})
	require.NoError(t, err)
	p.ini, err = f.Host("c").NewInitiator(rdma.InitiatorConfig{})
	require.NoError(t, err)
	p.boot()
	dial, err := p.ini.Prepare(context.Background())
	require.NoError(t, err)
	answer, _, err := p.domain.Accept(context.Background(), rdma.Peer{}, dial.Offer())
	require.NoError(t, err)
	c, err := dial.Connect(context.Background(), answer)
	require.NoError(t, err)
	require.NoError(t, c.AddRegion(0, p.mem.Size(), p.attr))

	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for k := uint64(0); ; k++ {
			select {
			case <-stop:
				return
			default:
			}
			for i := 0; i < 4096; i += 8 {
				atomic.StoreUint64((*uint64)(unsafe.Pointer(&p.mem.Bytes()[i])), k&0xff*0x0101010101010101)
			}
		}
	}()
	b := &rdma.Batch{Reads: []rdma.Read{{Dst: make([]byte, 1024)}}}
	mixed := 0
	for deadline := time.Now().Add(20 * time.Second); mixed < 20 && time.Now().Before(deadline); {
		b.Reset()
		c.Post(b)
		require.True(t, b.Wait(context.Background(), 20*time.Second))
		require.NoError(t, b.Err())
		first := binary.NativeEndian.Uint64(b.Reads[0].Dst)
		for i := 0; i < 1024; i += 8 {
			w := binary.NativeEndian.Uint64(b.Reads[0].Dst[i:])
			require.Equal(t, w&0xff*0x0101010101010101, w, "word %d is torn", i/8)
			if w != first {
				mixed++
				break
			}
		}
	}
	close(stop)
	<-done
	require.GreaterOrEqual(t, mixed, 20, "tearing is not real")
	f.Close()
	require.NoError(t, p.mem.Free())
}

// TestManualClockServes: a served fabric on a manual clock completes a READ when the
// clock reaches it, and not before.
func TestManualClockServes(t *testing.T) {
	clk := clock.NewManual(time.Unix(0, 0))
	f, err := New(Config{Clock: clk, Delay: Range{Min: time.Second}})
	require.NoError(t, err)
	defer f.Close()
	b, free := postOne(t, f)
	defer free()
	clk.Advance(time.Second - 1)
	require.False(t, b.Wait(context.Background(), 10*time.Millisecond))
	clk.Advance(1)
	require.True(t, b.Wait(context.Background(), 20*time.Second))
	require.NoError(t, b.Err())
}

// postOne posts a READ of 64 bytes on a fresh fabric.
func postOne(t require.TestingT, f *Fabric) (*rdma.Batch, func()) {
	mem, err := rdma.AllocMemory("one", 4096, rdma.MemoryOptions{})
	require.NoError(t, err)
	target, err := f.Host("s").NewTarget(rdma.TargetConfig{})
	require.NoError(t, err)
	d, err := target.NewDomain("d")
	require.NoError(t, err)
	attr, err := d.Register(0, mem)
	require.NoError(t, err)
	ini, err := f.Host("c").NewInitiator(rdma.InitiatorConfig{})
	require.NoError(t, err)
	dial, err := ini.Prepare(context.Background())
	require.NoError(t, err)
	answer, _, err := d.Accept(context.Background(), rdma.Peer{}, dial.Offer())
	require.NoError(t, err)
	c, err := dial.Connect(context.Background(), answer)
	require.NoError(t, err)
	require.NoError(t, c.AddRegion(0, mem.Size(), attr))
	b := &rdma.Batch{Reads: []rdma.Read{{Dst: make([]byte, 64)}}}
	b.Reset()
	c.Post(b)
	return b, func() {
		f.Close()
		if err := mem.Free(); err != nil {
			panic(err)
		}
	}
}

func TestConfigValidate(t *testing.T) {
	for _, c := range []Config{{TearOneIn: -1}, {LoseOneIn: -1}, {RevokeOneIn: -1}, {QueueDepth: -1}, {Timeout: -1}, {AcceptTimeout: -1}, {Delay: Range{Min: -1}}} {
		_, err := New(c)
		require.ErrorContains(t, err, "want 0 or more", "%+v", c)
	}
}

func TestTargetsOfAHost(t *testing.T) {
	f, err := New(Config{})
	require.NoError(t, err)
	defer f.Close()
	first, err := f.Host("s").NewTarget(rdma.TargetConfig{BootID: 1})
	require.NoError(t, err)
	_, err = f.Host("s").NewTarget(rdma.TargetConfig{BootID: 2})
	require.ErrorIs(t, err, rdma.ErrExhausted)
	require.NoError(t, first.Close())
	second, err := f.Host("s").NewTarget(rdma.TargetConfig{BootID: 2})
	require.NoError(t, err)
	require.NoError(t, first.Close(), "closing the old one again leaves the new one alone")
	_, err = second.NewDomain("d")
	require.NoError(t, err)
	_, err = f.Host(strings.Repeat("x", 256)).NewTarget(rdma.TargetConfig{})
	require.Error(t, err)
}

const misuseEnv = "SIMNIC_TEST_MISUSE"

// misuse touches a Dst between Post and completion.
func misuse() {
	f, err := New(Config{Delay: Range{Min: 20 * time.Millisecond}})
	if err != nil {
		panic(err)
	}
	b, free := postOne(panicker{}, f)
	defer free()
	for !b.Completed() {
		for i := range b.Reads[0].Dst {
			b.Reads[0].Dst[i]++
		}
	}
}

type panicker struct{}

func (panicker) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (panicker) FailNow()                          { panic("failed") }
