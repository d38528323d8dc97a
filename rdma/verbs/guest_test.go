//go:build rdmaguest

package verbs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/rdmatest"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

const patience = 60 * time.Second

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline, tick := time.Now().Add(patience), time.NewTicker(2*time.Millisecond)
	defer tick.Stop()
	for !cond() {
		require.True(t, time.Now().Before(deadline), "%s: not after %v", what, patience)
		<-tick.C
	}
}

// pair is a target with one region, and an initiator.
type pair struct {
	t      *testing.T
	rig    rdmatest.Rig
	domain rdma.Domain
	mem    *rdma.Memory
	attr   []byte
}

const pairRegion = 1

func newPair(t *testing.T, server, client Provider, size uint64) *pair {
	t.Helper()
	p := &pair{t: t, rig: newRig(t, server, client)}
	var err error
	p.mem, err = rdma.AllocMemory("verbs-test", size, rdma.MemoryOptions{Shareable: true})
	require.NoError(t, err)
	for i := 0; i < len(p.mem.Bytes()); i += 8 {
		binary.LittleEndian.PutUint64(p.mem.Bytes()[i:], uint64(i)*0x9e3779b97f4a7c15)
	}
	p.domain, err = p.rig.Target.NewDomain("d")
	require.NoError(t, err)
	p.attr, err = p.domain.Register(pairRegion, p.mem)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, p.rig.Initiator.Close())
		require.NoError(t, p.rig.Target.Close())
		require.NoError(t, p.mem.Free())
	})
	return p
}

func (p *pair) dial() (*conn, rdma.Endpoint, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	d, err := p.rig.Initiator.Prepare(ctx)
	if err != nil {
		return nil, nil, err
	}
	answer, ep, err := p.domain.Accept(ctx, rdma.Peer{Name: "test"}, d.Offer())
	if err != nil {
		d.Abort()
		return nil, nil, err
	}
	c, err := d.Connect(ctx, answer)
	if err != nil {
		return nil, nil, errors.Join(err, ep.Close())
	}
	return c.(*conn), ep, c.AddRegion(pairRegion, p.mem.Size(), p.attr)
}

func (p *pair) connect() (*conn, rdma.Endpoint) {
	p.t.Helper()
	c, ep, err := p.dial()
	require.NoError(p.t, err)
	return c, ep
}

func (p *pair) read(c rdma.Conn, dst []byte, offset uint64) error {
	b := &rdma.Batch{Reads: []rdma.Read{{Region: pairRegion, Offset: offset, Dst: dst}}}
	b.Reset()
	c.Post(b)
	if !b.Wait(context.Background(), patience) {
		return fmt.Errorf("no completion within %v", patience)
	}
	if b.Err() == nil && !bytes.Equal(dst, p.mem.Bytes()[offset:offset+uint64(len(dst))]) {
		return errors.New("the bytes are wrong")
	}
	return b.Err()
}

// load reads from several goroutines until stop, and returns how many READs succeeded.
// The bytes must always be right; the connection may end with an error.
func (p *pair) load(c rdma.Conn, workers int) (stop func() (ok int, errs []error)) {
	quit := make(chan struct{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	var ok int
	var errs []error
	for w := range workers {
		wg.Go(func() {
			dst := make([]byte, 4096)
			for i := uint64(0); ; i++ {
				select {
				case <-quit:
					return
				default:
				}
				err := p.read(c, dst, (uint64(w)*4096+i*64)%(p.mem.Size()-4096))
				mu.Lock()
				if err == nil {
					ok++
				} else {
					errs = append(errs, err)
				}
				mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	return func() (int, []error) {
		close(quit)
		wg.Wait()
		return ok, errs
	}
}

func twoRails() Provider {
	p := rxe()
	p.GIDIndexes = []int{1, 2}
	return p
}

// TestRailsSideBySide: a connection over two rails uses both, loses one under load
// without a failed READ, and ends with the other.
func TestRailsSideBySide(t *testing.T) {
	p := newPair(t, twoRails(), twoRails(), 1<<20)
	c, ep := p.connect()
	require.Len(t, c.all, 2)
	stop := p.load(c, 8)
	eventually(t, "both rails used", func() bool { return c.all[0].completions.Load() > 20 && c.all[1].completions.Load() > 20 })
	c.all[0].fail(fmt.Errorf("%w: the test takes it down", rdma.ErrConnLost))
	<-c.all[0].gone
	before := c.all[1].completions.Load()
	eventually(t, "the other rail goes on", func() bool { return c.all[1].completions.Load() > before+100 })
	ok, errs := stop()
	require.Empty(t, errs, "READs move to the rail that is left")
	require.Greater(t, ok, 100)
	require.NoError(t, c.Err())
	stats := p.rig.Initiator.(RailCounter).RailStats()
	require.Len(t, stats, 1, "two rails of one port")
	require.EqualValues(t, 1, stats[0].QueuePairs)
	require.EqualValues(t, 1, stats[0].Failures)
	require.GreaterOrEqual(t, stats[0].Reads, uint64(ok))
	c.all[1].fail(fmt.Errorf("%w: the test takes it down", rdma.ErrConnLost))
	<-c.Done()
	require.ErrorIs(t, c.Err(), rdma.ErrConnLost)
	require.ErrorIs(t, p.read(c, make([]byte, 8), 0), rdma.ErrConnLost)
	require.NoError(t, ep.Close())
}

func TestConformanceTwoRails(t *testing.T) {
	p := twoRails()
	p.RescanInterval = time.Minute
	f := factory(p, p)
	f.Reconnects = 50
	rdmatest.Run(t, f)
}

// TestAttacksRefused: what a client's device could be made to do beyond READs is refused
// by the target's, and changes nothing.
func TestAttacksRefused(t *testing.T) {
	p := newPair(t, rxe(), rxe(), 64<<10)
	sink, err := p.rig.Initiator.(rdma.Allocator).AllocSink(4096)
	require.NoError(t, err)
	defer func() { require.NoError(t, sink.Free()) }()
	copy(sink.Bytes(), bytes.Repeat([]byte{0xee}, 64))
	was := crc32.ChecksumIEEE(p.mem.Bytes())
	for _, attack := range []ibv.Attack{ibv.AttackWrite, ibv.AttackFetchAdd, ibv.AttackCompareSwap} {
		t.Run(attack.String(), func(t *testing.T) {
			c, ep := p.connect()
			r := c.all[0]
			m := (*c.regions.Load())[pairRegion]
			key, ok := r.direct(sink.Bytes())
			require.True(t, ok)
			s := sink.(*sinkAlias)
			r.post.Lock()
			err := r.qp.PostAttack(attack, ibv.ReadWR{ID: r.post.nextID, LocalAddr: uint64(s.start), Length: 8, LKey: key, RemoteAddr: m.addr, RKey: m.keys[0].rkey})
			r.post.Unlock()
			if err == nil { // else the own device refused it already
				r.setup.Lock()
				if !r.isDying() { // else it is over already, and nobody looks any more
					r.poke()
				}
				r.setup.Unlock()
				select {
				case <-c.Done():
				case <-time.After(patience):
					t.Fatal("the connection survived it")
				}
				require.ErrorIs(t, c.Err(), rdma.ErrConnLost)
			}
			require.Equal(t, was, crc32.ChecksumIEEE(p.mem.Bytes()), "the region was changed")
			require.NoError(t, c.Close())
			require.NoError(t, ep.Close())
		})
	}
	c, _ := p.connect()
	require.NoError(t, p.read(c, make([]byte, 64), 0))
}

type sinkAlias = sink

// TestBudget: beyond the limit of queue pairs the connection idle for longest goes, and
// its client hears why.
func TestBudget(t *testing.T) {
	server := rxe()
	server.MaxQueuePairs = 2
	p := newPair(t, server, rxe(), 64<<10)
	first, _ := p.connect()
	second, _ := p.connect()
	// first is used now, as far as the target can know.
	require.NoError(t, first.all[0].say(msgUsed, 0))
	r := second.all[0]
	tn := func() *targetNIC {
		tt := p.rig.Target.(*target)
		tt.topo.RLock()
		defer tt.topo.RUnlock()
		for _, tn := range tt.topo.nics {
			return tn
		}
		return nil
	}()
	eventually(t, "the word arrives", func() bool {
		tn.mu.Lock()
		defer tn.mu.Unlock()
		return tn.mu.rails[1].lastUsed.Load() > tn.mu.rails[2].lastUsed.Load()
	})
	third, _ := p.connect()
	<-second.Done()
	require.ErrorIs(t, second.Err(), rdma.ErrExhausted)
	require.ErrorContains(t, second.Err(), "needs the queue pair for others")
	<-r.gone
	require.NoError(t, p.read(first, make([]byte, 64), 0))
	require.NoError(t, p.read(third, make([]byte, 64), 0))
	require.EqualValues(t, 2, p.rig.Target.Stats().Connections)
	require.EqualValues(t, 1, p.rig.Target.(RailCounter).RailStats()[0].Evicted)
	require.EqualValues(t, 2, p.rig.Target.(RailCounter).RailStats()[0].QueuePairs)
}

// TestPeerDies: a target whose queue pair is gone without a word is noticed by the
// device's retries, and, where these never end, by the own deadline.
func TestPeerDies(t *testing.T) {
	endless := rxe()
	endless.Retry, endless.ReadTimeout = 7, time.Second
	for name, client := range map[string]Provider{"retries": rxe(), "own deadline": endless} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, rxe(), client, 64<<10)
			c, ep := p.connect()
			require.NoError(t, p.read(c, make([]byte, 64), 0))
			for _, r := range ep.(*endpoint).rails() {
				r.sent() // no goodbye
				require.True(t, r.close())
			}
			start := time.Now()
			require.ErrorIs(t, p.read(c, make([]byte, 64), 0), rdma.ErrConnLost)
			t.Logf("noticed after %v", time.Since(start))
			<-c.Done()
			require.ErrorIs(t, c.Err(), rdma.ErrConnLost)
			require.NoError(t, ep.Close())
		})
	}
}

// TestSinks: READs land in registered memory without a copy, anywhere in it, and next to
// ordinary memory in one chain.
func TestSinks(t *testing.T) {
	p := newPair(t, rxe(), rxe(), 1<<20)
	in := p.rig.Initiator.(*initiator)
	s, err := in.AllocSink(600 << 10)
	require.NoError(t, err)
	other, err := in.AllocSink(4096)
	require.NoError(t, err)
	c, _ := p.connect()
	require.Same(t, s, in.sinkOf(s.Bytes()[100:200]))
	require.Nil(t, in.sinkOf(make([]byte, 100)))
	for _, n := range []int{1, 64, 4097, 300 << 10} {
		for _, at := range []int{0, 1, 63, len(s.Bytes()) - n} {
			require.NoError(t, p.read(c, s.Bytes()[at:at+n], uint64(at)))
		}
	}
	heap := make([]byte, 3000)
	b := &rdma.Batch{Reads: []rdma.Read{
		{Region: pairRegion, Offset: 1, Dst: s.Bytes()[:5000]}, {Region: pairRegion, Offset: 77, Dst: heap},
		{Region: pairRegion, Offset: 4242, Dst: other.Bytes()[7:1000]},
	}}
	b.Reset()
	c.Post(b)
	require.True(t, b.Wait(context.Background(), patience))
	require.NoError(t, b.Err())
	for _, r := range b.Reads {
		require.True(t, bytes.Equal(r.Dst, p.mem.Bytes()[r.Offset:r.Offset+uint64(len(r.Dst))]))
	}
	require.NoError(t, other.Free())
	require.NoError(t, other.Free(), "idempotent")
	require.NoError(t, p.read(c, s.Bytes()[:100], 0))
	require.NoError(t, c.Close())
	require.NoError(t, s.Free())
	_, err = in.AllocSink(0)
	require.Error(t, err)
}

// TestMemlockPreflight: a registration beyond the limit says what there is, what is
// needed and where to set it.
func TestMemlockPreflight(t *testing.T) {
	p := newPair(t, rxe(), rxe(), 4096)
	pin := p.rig.Target.(rdma.Pinning)
	require.NoError(t, pin.TryPin(300<<20))
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 1 << 20, Max: old.Max}))
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old)) }()
	err := withoutIPCLock(t, func() error { return pin.TryPin(64 << 20) })
	require.ErrorIs(t, err, rdma.ErrExhausted)
	for _, want := range []string{"refuses to register 64 MiB", "RLIMIT_MEMLOCK is 1 MiB", "ulimit -l", "LimitMEMLOCK=", "Kubernetes"} {
		require.ErrorContains(t, err, want)
	}
	require.NoError(t, pin.TryPin(64<<20), "with the capability")
}

// TestDeviceGoesAndComes: a device that is removed under load ends connections; when it
// is added again, target and initiator have it again, regions and sinks too, with other
// keys.
func TestDeviceGoesAndComes(t *testing.T) {
	before := ibv.Live()
	p := newPair(t, rxe(), rxe(), 1<<20)
	sink, err := p.rig.Initiator.(rdma.Allocator).AllocSink(8192)
	require.NoError(t, err)
	for round := range 2 {
		c, ep := p.connect()
		stop := p.load(c, 4)
		eventually(t, "load", func() bool { return c.all[0].completions.Load() > 50 })
		run(t, "rdma", "link", "delete", "rxe0") // returns when nobody has it open
		<-c.Done()
		<-ep.Done()
		require.ErrorIs(t, c.Err(), rdma.ErrConnLost, "round %d", round)
		_, errs := stop()
		require.Len(t, errs, 4)
		for _, err := range errs {
			require.ErrorIs(t, err, rdma.ErrConnLost)
		}
		var err error
		eventually(t, "no device is there", func() bool {
			_, err = p.domain.(rdma.AttrSource).Attr(pairRegion)
			return errors.Is(err, rdma.ErrExhausted)
		})
		eventually(t, "nor for who connects", func() bool {
			dial, err := p.rig.Initiator.Prepare(context.Background())
			if err == nil {
				dial.Abort()
			}
			return errors.Is(err, rdma.ErrUnsupported)
		})

		run(t, "rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "roce0")
		old := p.attr
		eventually(t, "the target has the device", func() bool {
			p.attr, err = p.domain.(rdma.AttrSource).Attr(pairRegion)
			return err == nil
		})
		require.NotEqual(t, old, p.attr)
		var again *conn
		eventually(t, "connected again", func() bool {
			again, _, err = p.dial()
			return err == nil
		})
		require.NoError(t, p.read(again, make([]byte, 5000), 3))
		require.NoError(t, p.read(again, sink.Bytes(), 3), "the sink is registered anew")
		_, direct := again.all[0].direct(sink.Bytes())
		require.True(t, direct)
		require.NoError(t, again.Close())
	}
	require.NoError(t, sink.Free())
	require.NoError(t, p.rig.Initiator.Close())
	require.NoError(t, p.rig.Target.Close())
	require.Equal(t, before, ibv.Live(), "objects left behind")
}

// TestPortGoesDown: a port that goes down ends its connections at once, and is used
// again when it is up.
func TestPortGoesDown(t *testing.T) {
	p := newPair(t, rxe(), rxe(), 64<<10)
	c, ep := p.connect()
	run(t, "ip", "link", "set", "roce0", "down")
	<-c.Done()
	<-ep.Done()
	require.ErrorIs(t, c.Err(), rdma.ErrConnLost)
	run(t, "ip", "link", "set", "roce0", "up")
	eventually(t, "connected again", func() bool {
		var err error
		c, _, err = p.dial()
		return err == nil
	})
	require.NoError(t, p.read(c, make([]byte, 64), 0))
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	require.NoError(t, err, "%s %v: %s", name, args, out)
}

// TestReconnectsLeaveNothing: a thousand connections, ended in every way, leave no object
// of the device behind.
func TestReconnectsLeaveNothing(t *testing.T) {
	p := newPair(t, rxe(), rxe(), 64<<10)
	c, ep := p.connect()
	require.NoError(t, c.Close())
	<-ep.Done()
	before := ibv.Live()
	for i := range 90 { // rdmatest's Reconnects does a thousand
		d, err := p.rig.Initiator.Prepare(context.Background())
		require.NoError(t, err)
		switch i % 3 {
		case 0:
			d.Abort()
		case 1:
			_, ep, err := p.domain.Accept(context.Background(), rdma.Peer{}, d.Offer())
			require.NoError(t, err)
			d.Abort()
			require.NoError(t, ep.Close())
		case 2:
			answer, ep, err := p.domain.Accept(context.Background(), rdma.Peer{}, d.Offer())
			require.NoError(t, err)
			c, err := d.Connect(context.Background(), answer)
			require.NoError(t, err)
			require.NoError(t, ep.Close())
			<-c.Done()
			require.ErrorIs(t, c.Err(), rdma.ErrRevoked)
			require.NoError(t, c.Close())
		}
	}
	require.Equal(t, before, ibv.Live())
}

// TestTornReads: an object that is rewritten while it is read arrives torn now and then;
// its check sum tells, and whatever passes it is one whole version.
func TestTornReads(t *testing.T) {
	p := newPair(t, rxe(), rxe(), 64<<10)
	c, _ := p.connect()
	const size = 4096
	object := p.mem.Bytes()[:size]
	write := func(version uint64) {
		for i := 0; i < size-8; i += 8 {
			atomic.StoreUint64((*uint64)(unsafe.Pointer(&object[i])), version)
		}
		sum := make([]byte, size-8)
		for i := 0; i < len(sum); i += 8 {
			binary.LittleEndian.PutUint64(sum[i:], version)
		}
		atomic.StoreUint64((*uint64)(unsafe.Pointer(&object[size-8])), uint64(crc32.ChecksumIEEE(sum)))
	}
	write(0)
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for v := uint64(1); ; v++ {
			select {
			case <-stop:
				return
			default:
				write(v)
				runtime.Gosched()
			}
		}
	}()
	torn, whole := 0, 0
	b := &rdma.Batch{Reads: []rdma.Read{{Region: pairRegion, Dst: make([]byte, size)}}}
	for range 500 {
		b.Reset()
		c.Post(b)
		require.True(t, b.Wait(context.Background(), patience))
		require.NoError(t, b.Err())
		got := b.Reads[0].Dst
		if uint64(crc32.ChecksumIEEE(got[:size-8])) != binary.LittleEndian.Uint64(got[size-8:]) {
			torn++
			continue
		}
		whole++
		version := got[:8]
		for i := 8; i < size-8; i += 8 {
			require.Equal(t, version, got[i:i+8], "torn, and the check sum is right")
		}
	}
	close(stop)
	<-done
	t.Logf("of 500 READs of %d bytes %d were torn", size, torn)
	b.Reset()
	c.Post(b)
	require.True(t, b.Wait(context.Background(), patience))
	require.Equal(t, object, b.Reads[0].Dst, "at rest it is whole")
}

// TestRegisterInParallel: chunks are registered at the same time, and each can be read
// as soon as its Register returned.
func TestRegisterInParallel(t *testing.T) {
	p := newPair(t, rxe(), rxe(), 4096)
	c, _ := p.connect()
	const chunks, size = 8, 8 << 20
	mems := make([]*rdma.Memory, chunks)
	var wg sync.WaitGroup
	errs := make([]error, chunks)
	start := time.Now()
	for i := range mems {
		wg.Go(func() {
			id := rdma.RegionID(100 + i)
			var attr []byte
			if mems[i], errs[i] = rdma.AllocMemory("verbs-chunk", size, rdma.MemoryOptions{Shareable: true}); errs[i] != nil {
				return
			}
			mems[i].Bytes()[size-1] = byte(i)
			if attr, errs[i] = p.domain.Register(id, mems[i]); errs[i] != nil {
				return
			}
			if errs[i] = c.AddRegion(id, size, attr); errs[i] != nil {
				return
			}
			dst := []byte{0xff}
			b := &rdma.Batch{Reads: []rdma.Read{{Region: id, Offset: size - 1, Dst: dst}}}
			b.Reset()
			c.Post(b)
			b.Wait(context.Background(), 0)
			if errs[i] = b.Err(); errs[i] == nil && dst[0] != byte(i) {
				errs[i] = fmt.Errorf("read %d, want %d", dst[0], i)
			}
		})
	}
	wg.Wait()
	t.Logf("%d chunks of %d MiB after %v", chunks, size>>20, time.Since(start))
	for i, m := range mems {
		require.NoError(t, errs[i])
		require.NoError(t, p.domain.Deregister(rdma.RegionID(100+i)))
		require.NoError(t, m.Free())
	}
}
