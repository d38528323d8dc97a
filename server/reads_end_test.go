package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/shm"
	"github.com/kvd-io/kvd/rdma/simnic"
	"github.com/kvd-io/kvd/rdma/tcp"
	"github.com/kvd-io/kvd/storage/layout"
)

// withNIC is a single node that serves its memory by every transport that needs no
// hardware, the simulated NIC among them: that one executes READs without the node.
func withNIC(t testing.TB) (*testCluster, *simnic.Fabric, []rdma.Provider) {
	f, err := simnic.New(simnic.Config{})
	require.NoError(t, err)
	t.Cleanup(f.Close)
	providers := []rdma.Provider{&shm.Provider{SocketDir: t.TempDir()}, f.Host("node"), tcp.Provider{}}
	c := startCluster(t, 1, 2, func(cfg *Config) { cfg.Providers, cfg.HostID = providers, "here" })
	c.leaderOf(1)
	c.leaderOf(2)
	providers[1] = f.Host("client")
	return c, f, providers
}

// READs by a NIC ask nobody: they end only because the node ends the connection, with
// the session's stream, on rotation of keys, and when the node stops.
func TestReadsEndWithTheSession(t *testing.T) {
	c, _, providers := withNIC(t)
	w, err := c.put("key", "value", nil)
	require.NoError(t, err)
	nic := providers[1]
	fails := func(conn rdma.Conn, why string) {
		t.Helper()
		eventually(t, why, func() bool {
			_, err := read(conn, 0, 0, layout.RecordSize)
			return errors.Is(err, rdma.ErrRevoked)
		})
		<-conn.Done()
		_, err := read(conn, w.GetLocation().GetChunk(), w.GetLocation().GetOffset(), int(w.GetLocation().GetLength()))
		require.ErrorIs(t, err, rdma.ErrRevoked)
	}
	open := func() (*clientSession, rdma.Conn) {
		s := openSession(t, c, "")
		conn := s.connect(nic)
		require.Equal(t, "value", string(readObject(t, conn, s.opened.GetHashSeed(), w.GetLocation()).Value))
		return s, conn
	}
	s, conn := open()
	_, other := open()
	s.close()
	fails(conn, "the stream ended")
	_, err = read(other, 0, 0, layout.RecordSize)
	require.NoError(t, err, "another session goes on")

	s, conn = open()
	old := s.regions(nic.Name())
	require.NoError(t, c.nodes[0].export.rotateKeys(1))
	_, err = read(conn, 0, 0, layout.RecordSize)
	require.ErrorIs(t, err, rdma.ErrRevoked, "at once: rotateKeys has returned")
	fails(other, "all of the namespace's")
	// The session itself may go on. What it was told before is worth nothing on its new
	// connection.
	in, err := nic.NewInitiator(rdma.InitiatorConfig{})
	require.NoError(t, err)
	defer func() { require.NoError(t, in.Close()) }()
	d, err := in.Prepare(testContext(t))
	require.NoError(t, err)
	r, err := s.access.Connect(testContext(t), &kvdv1.ConnectRequest{SessionId: s.opened.GetSessionId(), Transport: nic.Name(), Offer: d.Offer()})
	require.NoError(t, err)
	conn, err = d.Connect(testContext(t), r.GetAnswer())
	require.NoError(t, err)
	for id, reg := range old {
		require.NoError(t, conn.AddRegion(rdma.RegionID(id), reg.GetLength(), reg.GetAttr()))
	}
	_, err = read(conn, 0, 0, layout.RecordSize)
	require.ErrorIs(t, err, rdma.ErrAccess)

	_, conn = open()
	c.stopNode(0)
	fails(conn, "the node stopped")
}

// Under load, with the keys rotated all the time on all nodes, no read is wrong: none
// goes behind what was acknowledged or seen before it, and clients go back to reading by
// themselves.
func TestRotationUnderLoad(t *testing.T) {
	f, err := simnic.New(simnic.Config{Delay: simnic.Range{Min: 5 * time.Microsecond, Max: 50 * time.Microsecond}})
	require.NoError(t, err)
	t.Cleanup(f.Close)
	hosts := 0
	c := startCluster(t, 3, 4, func(cfg *Config) {
		hosts++
		cfg.Providers = []rdma.Provider{f.Host(fmt.Sprint("node", hosts))}
	})
	var endpoints []string
	for _, n := range c.nodes {
		endpoints = append(endpoints, n.Address())
	}
	dial := func(name string) *client.Client {
		cl, err := client.Dial(testContext(t), client.Config{
			Endpoints: endpoints, Providers: []rdma.Provider{f.Host(name)}, Logger: testLogger(t), CallTimeout: 20 * time.Second,
		})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, cl.Close()) })
		return cl
	}
	const keys, writes = 4, 150
	key := func(k int) []byte { return fmt.Appendf(nil, "key-%d", k) }
	writer := dial("writer")
	var acked [keys]atomic.Uint64
	for k := range keys {
		v, err := writer.Put(testContext(t), key(k), []byte("0"))
		require.NoError(t, err)
		acked[k].Store(v)
	}
	stop := make(chan struct{})
	var load errgroup.Group
	var gets atomic.Uint64
	readers := []*client.Client{dial("reader0"), dial("reader1")}
	for i := range 4 {
		load.Go(func() error {
			var seen [keys]uint64
			for n := 0; ; n++ {
				select {
				case <-stop:
					return nil
				default:
				}
				k := n % keys
				least := max(acked[k].Load(), seen[k])
				o, err := readers[i%2].Get(context.Background(), key(k))
				if err != nil {
					return err
				}
				if o.Version < least {
					return fmt.Errorf("key %d was read at version %d, after %d", k, o.Version, least)
				}
				seen[k] = o.Version
				gets.Add(1)
			}
		})
	}
	var rotations sync.WaitGroup
	rotations.Go(func() {
		for {
			for _, n := range c.nodes {
				select {
				case <-stop:
					return
				case <-time.After(5 * time.Millisecond):
				}
				if err := n.export.rotateKeys(1); err != nil {
					t.Error(err)
				}
			}
		}
	})
	for n := range writes {
		k := n % keys
		v, err := writer.Put(testContext(t), key(k), fmt.Append(nil, n))
		require.NoError(t, err)
		acked[k].Store(v)
	}
	close(stop)
	require.NoError(t, load.Wait())
	rotations.Wait()
	t.Logf("%d gets", gets.Load())
	require.Greater(t, gets.Load(), uint64(writes))
	// Without rotations they read by themselves again.
	for i, r := range readers {
		eventually(t, fmt.Sprint("reader ", i, " is back"), func() bool {
			before := oneSided(r)
			for k := range keys {
				_, err := r.Get(testContext(t), key(k))
				require.NoError(t, err)
			}
			return oneSided(r) == before+keys
		})
	}
}

func oneSided(c *client.Client) (n uint64) {
	for _, g := range c.Stats().Gets {
		if g.Via == "simnic" {
			n += g.Count
		}
	}
	return n
}

// A thousand sessions that come and go over every transport leave no domain, connection,
// goroutine, descriptor, mapping or byte behind.
func TestReconnectsLeaveNothing(t *testing.T) {
	c, _, providers := withNIC(t)
	_, err := c.put("key", "value", nil)
	require.NoError(t, err)
	n := c.nodes[0]
	one := func(t *testing.T, i int) error {
		s := openSession(t, c, "")
		var ends []func()
		for _, p := range providers {
			conn, done, err := s.dial(p)
			if err != nil {
				return err
			}
			if _, err := read(conn, 0, 0, layout.RecordSize); err != nil {
				return err
			}
			ends = append(ends, done)
		}
		if i%3 == 0 {
			ends = append([]func(){s.close}, ends...) // the node's end first
		} else {
			ends = append(ends, s.close)
		}
		for _, end := range ends {
			end()
		}
		return nil
	}
	quiet := func() bool {
		for _, st := range n.export.stats() {
			if st.Connections != 0 {
				return false
			}
		}
		return n.sessions.count() == 0
	}
	round := func(sessions int) footprint {
		// A test of its own: what the test itself keeps for its end goes with it.
		t.Run(fmt.Sprint(sessions), func(t *testing.T) {
			var g errgroup.Group
			g.SetLimit(8)
			for i := range sessions {
				g.Go(func() error { return one(t, i) })
			}
			require.NoError(t, g.Wait())
			eventually(t, "all have ended", quiet)
		})
		return footprintOf(t, n)
	}
	before := round(100)
	var after footprint
	after = round(1000)
	// What ends in the background may still be at it.
	t.Cleanup(func() { t.Logf("before %+v, after %+v", before, after) })
	eventually(t, "nothing is left", func() bool {
		after = footprintOf(t, n)
		return after.within(before)
	})
	require.Equal(t, len(providers), before.domains)
	accepted := uint64(0)
	for _, st := range n.export.stats() {
		accepted += st.Accepted
	}
	require.EqualValues(t, 1100*len(providers), accepted)
}

// footprint is what this process holds.
type footprint struct {
	domains, goroutines, files, maps int
	heap                             uint64 // bytes in use after a collection
	registered                       regionCounts
}

func footprintOf(t testing.TB, n *Node) footprint {
	runtime.GC()
	runtime.GC() // the second frees what finalizers of the first let go
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	f := footprint{goroutines: runtime.NumGoroutine(), files: openFiles(t), heap: m.HeapAlloc}
	n.export.mu.Lock()
	f.domains = len(n.export.mu.domains) + len(n.export.mu.retired)
	n.export.mu.Unlock()
	for _, c := range n.export.regionCounts() {
		f.registered.registered += c.registered
		f.registered.pending += c.pending
		f.registered.refused += c.refused
	}
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	f.maps = strings.Count(string(maps), "kvd")
	return f
}

// within tells that nothing grew. The heap and the goroutines of gRPC breathe a little;
// a thousand sessions that left 512 bytes each would show.
func (f footprint) within(before footprint) bool {
	return f.domains == before.domains && f.registered == before.registered && f.files <= before.files+4 && f.maps <= before.maps &&
		f.goroutines <= before.goroutines+8 && f.heap < before.heap+512<<10
}
