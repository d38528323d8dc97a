//go:build rdmaguest

package e2e

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/internal/devcluster"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs"
	"github.com/kvd-io/kvd/storage/layout"
)

// rawClient speaks to one node by the protocol alone: it keeps what it was given, whatever
// the SDK would do with it.
type rawClient struct {
	t      testing.TB
	ctx    context.Context
	access kvdv1.AccessClient
	opened *kvdv1.SessionOpened
	in     rdma.Initiator
}

// rawSession says how a rawClient comes; the zero value is a client in the default
// namespace, without TLS and token.
type rawSession struct {
	namespace, token string
	tls              *tls.Config
	layout           uint32 // 0: the right one
}

func (s rawSession) open(t testing.TB, addr string) (*rawClient, error) {
	t.Helper()
	creds := insecure.NewCredentials()
	if s.tls != nil {
		creds = credentials.NewTLS(s.tls)
	}
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(creds))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	if s.token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+s.token)
	}
	if s.layout == 0 {
		s.layout = layout.Version
	}
	c := &rawClient{t: t, ctx: ctx, access: kvdv1.NewAccessClient(conn)}
	stream, err := c.access.OpenSession(ctx, &kvdv1.OpenSessionRequest{Namespace: s.namespace, LayoutVersion: s.layout, ClientName: "raw"})
	if err != nil {
		return nil, err
	}
	first, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	c.opened = first.GetOpened()
	c.in, err = verbs.Provider{Devices: []string{guestEnv(t, "KVD_GUEST_RXE")}}.NewInitiator(rdma.InitiatorConfig{ConnectTimeout: patience})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.in.Close()) })
	return c, nil
}

func (s rawSession) mustOpen(t testing.TB, addr string) *rawClient {
	t.Helper()
	c, err := s.open(t, addr)
	require.NoError(t, err)
	return c
}

func (c *rawClient) within() (context.Context, context.CancelFunc) {
	return context.WithTimeout(c.ctx, patience)
}

// connect makes a queue pair with the node. It knows no regions.
func (c *rawClient) connect() (rdma.Conn, error) {
	ctx, cancel := c.within()
	defer cancel()
	d, err := c.in.Prepare(ctx)
	require.NoError(c.t, err)
	r, err := c.access.Connect(ctx, &kvdv1.ConnectRequest{SessionId: c.opened.GetSessionId(), Transport: "verbs", Offer: d.Offer()})
	if err != nil {
		d.Abort()
		return nil, err
	}
	return d.Connect(ctx, r.GetAnswer())
}

// control is the region of the control records, as the node describes it now.
func (c *rawClient) control() *kvdv1.Region {
	c.t.Helper()
	ctx, cancel := c.within()
	defer cancel()
	r, err := c.access.Regions(ctx, &kvdv1.RegionsRequest{SessionId: c.opened.GetSessionId(), Transport: "verbs", Regions: []uint32{uint32(rdma.ControlRegion)}})
	require.NoError(c.t, err)
	require.Len(c.t, r.GetRegions(), 1)
	return r.GetRegions()[0]
}

// reading is a queue pair that has read the node's control record.
func (c *rawClient) reading() rdma.Conn {
	c.t.Helper()
	conn, err := c.connect()
	require.NoError(c.t, err)
	r := c.control()
	require.NoError(c.t, conn.AddRegion(rdma.ControlRegion, r.GetLength(), r.GetAttr()))
	require.NoError(c.t, readRecord(conn))
	return conn
}

// readRecord is one READ.
func readRecord(conn rdma.Conn) error {
	b := &rdma.Batch{Reads: []rdma.Read{{Region: rdma.ControlRegion, Dst: make([]byte, layout.RecordSize)}}}
	b.Reset()
	conn.Post(b)
	if !b.Wait(context.Background(), patience) {
		return fmt.Errorf("no completion within %v", patience)
	}
	return b.Err()
}

// doomed are queue pairs with a process that is going to be killed. On some READs go on
// until they fail; the others are idle, so their client knows nothing of the end.
type doomed struct {
	idle []rdma.Conn
	over chan struct{} // closed when the next process serves
	wg   sync.WaitGroup
	mu   struct {
		sync.Mutex
		reads int
		last  time.Time // when the last READ was posted that succeeded
		errs  []error
	}
}

func doom(t testing.TB, n *devcluster.Node) *doomed {
	t.Helper()
	const busy, idle = 2, 3
	d, c := &doomed{over: make(chan struct{})}, rawSession{}.mustOpen(t, n.Address)
	for range idle {
		d.idle = append(d.idle, c.reading())
	}
	for range busy {
		conn := c.reading()
		d.wg.Go(func() { d.read(conn) })
	}
	await(t, "READs go on", func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.mu.reads < 20*busy {
			return fmt.Errorf("%d READs, failed %v", d.mu.reads, d.mu.errs)
		}
		return nil
	})
	return d
}

func (d *doomed) read(conn rdma.Conn) {
	pace := time.NewTicker(time.Millisecond)
	defer pace.Stop()
	for {
		posted := time.Now()
		err := readRecord(conn)
		d.mu.Lock()
		if err != nil {
			d.mu.errs = append(d.mu.errs, err)
			d.mu.Unlock()
			return
		}
		d.mu.reads++
		d.mu.last = posted
		d.mu.Unlock()
		select {
		case <-pace.C:
		case <-d.over:
			d.mu.Lock()
			d.mu.errs = append(d.mu.errs, errors.New("its READs still succeed"))
			d.mu.Unlock()
			return
		}
	}
}

// fenced asserts, when the next process serves, that no READ on a queue pair of the dead one
// succeeds since the next noted itself as the directory's owner, which is before it opens a
// device.
func (d *doomed) fenced(t testing.TB, n *devcluster.Node) {
	t.Helper()
	info, err := os.Stat(filepath.Join(n.DataDir, "RUNNING"))
	require.NoError(t, err)
	errs := make([]error, len(d.idle))
	for i, conn := range d.idle {
		require.NoError(t, conn.Err(), "an idle connection has heard nothing of the end")
		d.wg.Go(func() { errs[i] = readRecord(conn) })
	}
	close(d.over)
	d.wg.Wait()
	for _, err := range append(errs, d.mu.errs...) {
		require.ErrorIs(t, err, rdma.ErrConnLost)
	}
	require.True(t, d.mu.last.Before(info.ModTime()), "a READ posted at %v succeeded; the next process had the directory at %v", d.mu.last, info.ModTime())
	t.Logf("%d READs, the last one %v before the next process had the directory", d.mu.reads, info.ModTime().Sub(d.mu.last).Round(time.Millisecond))
}

// queuePairs counts those that each node's process holds, by the kernel's word.
func queuePairs(t testing.TB, c *cluster) map[uint64]int {
	t.Helper()
	out := runTool(t, "/usr/sbin/rdma", "-j", "resource", "show", "qp")
	var all []struct {
		Thread int `json:"pid"` // which made it
	}
	require.NoError(t, json.Unmarshal([]byte(out), &all), out)
	counts := map[uint64]int{}
	for _, n := range c.Nodes() {
		counts[n.ID] = 0
		for _, qp := range all {
			if _, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", n.PID(), qp.Thread)); err == nil && qp.Thread > 0 {
				counts[n.ID]++
			}
		}
	}
	return counts
}

// awaitQueuePairs waits until the nodes hold so many each.
func awaitQueuePairs(t testing.TB, c *cluster, want int) {
	t.Helper()
	await(t, fmt.Sprintf("each node holds %d queue pairs", want), func() error {
		counts := queuePairs(t, c)
		for _, have := range counts {
			if have != want {
				return fmt.Errorf("they hold %v", counts)
			}
		}
		return nil
	})
}

// readdress takes an address from the device's network interface and gives it back: its
// GID goes, and comes with another index.
func readdress(t testing.TB, addr string) {
	t.Helper()
	netdev := guestEnv(t, "KVD_GUEST_RXE_NETDEV")
	// Else the addresses of the same net would go with the first.
	require.NoError(t, os.WriteFile("/proc/sys/net/ipv4/conf/"+netdev+"/promote_secondaries", []byte("1"), 0o644))
	runTool(t, "/usr/sbin/ip", "addr", "del", addr+"/24", "dev", netdev)
	runTool(t, "/usr/sbin/ip", "addr", "add", addr+"/24", "dev", netdev)
}

// rxeAddrs are the addresses of the RoCE device: nodes 1 to 3 have the first.
func rxeAddrs(t testing.TB) []string {
	return strings.Split(guestEnv(t, "KVD_GUEST_RXE_ADDRS"), ",")
}
