//go:build linux

package shm

import (
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

// TestRevokedAtOnce: the first READ after Endpoint.Close fails, whether or not the
// client has read its socket by then.
func TestRevokedAtOnce(t *testing.T) {
	s := newPair(t, &Provider{})
	for range 100 {
		c, ep := s.connectEndpoint()
		require.NoError(t, s.read(c, 8, 1024))
		require.NoError(t, ep.Close())
		require.ErrorIs(t, s.read(c, 8, 1024), rdma.ErrRevoked)
		ended(t, "connection", c.Done())
		require.ErrorIs(t, c.Err(), rdma.ErrRevoked)
		require.NoError(t, c.Close())
	}
}

// TestDeregisterAtOnce: with readers going on, the first READ of the region after
// Deregister fails, READs of others do not.
func TestDeregisterAtOnce(t *testing.T) {
	s := newPair(t, &Provider{})
	c := s.connect()
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			b := benchBatch(rdma.Read{Region: pairRegion, Offset: 64, Dst: make([]byte, 64)})
			for !stop.Load() {
				b.Reset()
				c.Post(b)
				if b.Err() != nil {
					t.Errorf("READ of a region that stays: %v", b.Err())
					return
				}
				runtime.Gosched()
			}
		})
	}
	_, maps := resources(t)
	for i := range 40 { // slow: the readers leave the sockets' goroutines little time
		m := s.alloc(8192)
		id := rdma.RegionID(1000 + i)
		at, err := s.domain.Register(id, m)
		require.NoError(t, err)
		require.NoError(t, c.AddRegion(id, m.Size(), at))
		b := benchBatch(rdma.Read{Region: id, Offset: 4096, Dst: make([]byte, 64)})
		post := func() error {
			b.Reset()
			c.Post(b)
			return b.Err()
		}
		require.NoError(t, post())
		require.NoError(t, s.domain.Deregister(id))
		require.ErrorIs(t, post(), rdma.ErrAccess)
		require.False(t, c.HasRegion(id))
		require.ErrorIs(t, c.AddRegion(id, m.Size(), at), rdma.ErrAccess)
	}
	stop.Store(true)
	wg.Wait()
	eventually(t, "client's mappings gone", func() bool {
		_, now := resources(t)
		return now <= maps+40 // the server's own
	})
}

// TestCloseUnderReaders: mappings go while goroutines READ through them. A mapping
// that goes too early is a crash of this test.
func TestCloseUnderReaders(t *testing.T) {
	s := newPair(t, &Provider{})
	for round := range 30 {
		c, ep := s.connectEndpoint()
		var wg, started sync.WaitGroup
		for range 4 {
			started.Add(1)
			wg.Go(func() {
				b := benchBatch(rdma.Read{Region: pairRegion, Offset: 4096, Dst: make([]byte, 64<<10)})
				for first := true; ; first = false {
					b.Reset()
					c.Post(b)
					if first {
						started.Done()
					}
					if b.Err() != nil {
						return
					}
				}
			})
		}
		started.Wait()
		if round%2 == 0 {
			require.NoError(t, ep.Close())
		} else {
			require.NoError(t, c.Close())
		}
		wg.Wait()
		require.NoError(t, c.Close())
	}
}

// TestMappedWhileInside: a mapping stays for who is inside, though it was taken
// out of the table, and goes with the last of them.
func TestMappedWhileInside(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(*pair, *conn)
	}{
		{"region taken back", func(s *pair, _ *conn) { require.NoError(t, s.domain.Deregister(pairRegion)) }},
		{"connection closed", func(_ *pair, c *conn) { c.fail(rdma.ErrClosed) }},
		{"socket closed", func(_ *pair, c *conn) { _ = c.sock.Close() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newPair(t, &Provider{})
			conn := s.connect()
			_, before := resources(t)
			inside := conn.readers.enterAny()
			m := conn.table.Load().find(pairRegion)
			c.end(s, conn)
			eventually(t, "out of the table", func() bool { return !conn.HasRegion(pairRegion) })
			for range 300 {
				_, now := resources(t)
				require.GreaterOrEqual(t, now+1, before, "unmapped under a reader") // the server's page may go
				require.Equal(t, s.memory.Bytes()[77], m[77])
			}
			inside.inside.Add(-1)
			eventually(t, "unmapped", func() bool { _, now := resources(t); return now+1 <= before })
			require.NoError(t, conn.Close())
		})
	}
}

// TestReconnects: 1,000 connections leave no descriptor, mapping or goroutine.
func TestReconnects(t *testing.T) {
	s := newPair(t, &Provider{})
	cycle := func(i int) {
		c, ep := s.connectEndpoint()
		require.NoError(t, s.read(c, 0, 64))
		if i%2 == 0 {
			require.NoError(t, c.Close())
			ended(t, "endpoint", ep.Done())
		} else {
			require.NoError(t, ep.Close())
			ended(t, "connection", c.Done())
		}
	}
	cycle(0)
	cycle(1)
	settled := func() bool { return s.target.Stats().Connections == 0 && s.target.endpoints.Load() == 0 }
	eventually(t, "first connections gone", settled)
	eventually(t, "the first goroutines gone", func() bool { return openConns(s.in) == 0 })
	fds, maps := resources(t)
	goroutines := runtime.NumGoroutine()
	for i := range 1000 {
		cycle(i)
	}
	eventually(t, "all is as it was", func() bool {
		nowFDs, nowMaps := resources(t)
		return settled() && nowFDs <= fds && nowMaps <= maps && runtime.NumGoroutine() <= goroutines
	})
	require.Equal(t, uint64(1002), s.target.Stats().Accepted)
}

func openConns(in rdma.Initiator) int {
	i := in.(*initiator)
	i.mu.Lock()
	defer i.mu.Unlock()
	return len(i.mu.conns)
}

// TestWordsWhole: up to maxWordCopy bytes, each word is whole while it changes.
func TestWordsWhole(t *testing.T) {
	s := newPair(t, &Provider{})
	c := s.connect()
	const at = 4096
	var stop atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	clear(s.memory.Bytes()[at : at+maxWordCopy])
	wg.Go(func() {
		for k := uint64(0); !stop.Load(); k++ {
			for i := 0; i < maxWordCopy; i += 8 {
				atomic.StoreUint64((*uint64)(unsafe.Pointer(&s.memory.Bytes()[at+i])), k%251*0x0101010101010101)
			}
		}
	})
	b := benchBatch(rdma.Read{Region: pairRegion, Offset: at, Dst: make([]byte, maxWordCopy)})
	for range 100_000 {
		postOnce(t, c, b)
		for i := 0; i < maxWordCopy; i += 8 {
			w := binary.NativeEndian.Uint64(b.Reads[0].Dst[i:])
			if w != w&0xff*0x0101010101010101 {
				t.Fatalf("torn word %#x", w)
			}
		}
	}
}

func TestBounds(t *testing.T) {
	s := newPair(t, &Provider{})
	c := s.connect()
	size := s.memory.Size()
	for _, r := range []struct{ offset, n uint64 }{
		{size, 8}, {size - 7, 8}, {1 << 63, 8}, {^uint64(0), 8}, {^uint64(0) - 7, 8}, {0, size + 8}, {size - 64, 128},
	} {
		b := benchBatch(
			rdma.Read{Region: pairRegion, Offset: 0, Dst: make([]byte, 8)},
			rdma.Read{Region: pairRegion, Offset: r.offset, Dst: make([]byte, r.n)})
		b.Reset()
		c.Post(b)
		require.ErrorIs(t, b.Err(), rdma.ErrAccess, "%d at %d", r.n, r.offset)
	}
	require.NoError(t, s.read(c, size-64, 64))
	require.NoError(t, s.read(c, 3, 100))
	require.NoError(t, s.read(c, 0, int(size)))
	require.NoError(t, s.read(c, size-1, 1))
}

// TestParallelAddRegion: one request serves all who ask for a region at once.
func TestParallelAddRegion(t *testing.T) {
	s := newPair(t, &Provider{})
	c := s.connect()
	for i := range 50 {
		m := s.alloc(4096)
		id := rdma.RegionID(2000 + i)
		at, err := s.domain.Register(id, m)
		require.NoError(t, err)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if err := c.AddRegion(id, m.Size(), at); err != nil {
					t.Errorf("region %d: %v", id, err)
				}
			})
		}
		wg.Wait()
		require.True(t, c.HasRegion(id))
	}
	require.NoError(t, c.Err())
}

// TestTable compares the table with a map.
func TestTable(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	for range 300 {
		want := make(map[rdma.RegionID][]byte)
		for range rnd.IntN(70) {
			id := rdma.RegionID(rnd.Uint32())
			if rnd.IntN(2) == 0 {
				id %= 64
			}
			want[id] = make([]byte, 1)
		}
		tab := (&table{}).with(want, 3)
		require.Equal(t, uint64(3), tab.count)
		for id, m := range want {
			require.Same(t, &m[0], &tab.find(id)[0])
		}
		for range 200 {
			id := rdma.RegionID(rnd.Uint32() % 128)
			require.Equal(t, want[id] != nil, tab.find(id) != nil, "region %d", id)
		}
	}
}

// TestWaitQuiet: it returns only after those who were inside have left.
func TestWaitQuiet(t *testing.T) {
	var r readers
	b := new(rdma.Batch)
	s := r.enter(b)
	quiet := make(chan struct{})
	var left atomic.Bool
	go func() {
		defer close(quiet)
		r.waitQuiet()
		if !left.Load() {
			t.Error("quiet with a reader inside")
		}
	}()
	for range 1000 {
		runtime.Gosched()
	}
	left.Store(true)
	s.inside.Add(-1)
	ended(t, "quiet", quiet)
}
