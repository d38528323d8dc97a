package client

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

// lockedBuffer is written by loggers of several goroutines.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// Endpoints of two clusters are refused, in whichever order they are named: one of them is
// not the one that is meant. The id of the one that is meant decides.
func TestDialOfTwoClusters(t *testing.T) {
	mine := newFakeCluster(t, fakeOptions{nodes: 3, shards: 1})
	stray := newFakeCluster(t, fakeOptions{nodes: 1, shards: 1, id: "stray"})
	a, b, s := mine.nodes[0].addr, mine.nodes[1].addr, stray.nodes[0].addr
	dial := func(id string, endpoints ...string) (*Client, error) {
		return Dial(context.Background(), Config{
			Endpoints: endpoints, ClusterID: id, HostID: "host", DialTimeout: 10 * time.Second,
			Providers: []rdma.Provider{&fakeNet{c: mine, name: "fake"}},
		})
	}
	for _, endpoints := range [][]string{{s, a, b}, {a, b, s}, {a, "127.0.0.1:1", s, b}} {
		c, err := dial("", endpoints...)
		require.Nil(t, c)
		require.ErrorIs(t, err, ErrWrongCluster)
		first, second := a, b
		if first > second {
			first, second = second, first
		}
		require.ErrorContains(t, err, "the endpoints are of 2 clusters: cluster fake at "+first+", "+second+"; cluster stray at "+s)
	}
	for _, endpoints := range [][]string{{s, a, b}, {a, b, s}} {
		c, err := dial("fake", endpoints...)
		require.NoError(t, err)
		require.Equal(t, "fake", c.cluster().id)
		require.NoError(t, c.Close())
	}
	c, err := dial("", a, b, "127.0.0.1:1")
	require.NoError(t, err)
	require.NoError(t, c.Close())
}

// An endpoint that hangs is not waited for until the end; one that turns out late to be of
// another cluster is logged as an error, and asked for nothing.
func TestDialDoesNotWaitForStrays(t *testing.T) {
	mine := newFakeCluster(t, fakeOptions{nodes: 1, shards: 1})
	stray := newFakeCluster(t, fakeOptions{nodes: 1, shards: 1, id: "stray"})
	stray.held = make(chan struct{})
	hangs := listen(t, func(net.Conn) {})
	var log lockedBuffer
	c, err := Dial(context.Background(), Config{
		Endpoints: []string{mine.nodes[0].addr, stray.nodes[0].addr, hangs}, HostID: "host",
		DialTimeout: time.Minute, ConnectTimeout: time.Minute, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		Providers: []rdma.Provider{&fakeNet{c: mine, name: "fake"}},
	})
	require.NoError(t, err, "it was not waited for")
	defer func() { require.NoError(t, c.Close()) }()
	require.NotContains(t, log.String(), "another cluster")
	close(stray.held)
	eventually(t, "it is logged", func() bool { return bytes.Contains([]byte(log.String()), []byte("level=ERROR")) })
	require.Contains(t, log.String(), "a node of another cluster answers")
	require.Contains(t, log.String(), "address="+stray.nodes[0].addr+" cluster=stray want=fake")

	// What the client asks as an operator goes to its own cluster alone.
	mine.nodes[0].server.Stop()
	_, err = c.CreateNamespace(ctxFor(t, time.Second), NamespaceSpec{Name: "train"})
	require.ErrorIs(t, err, ErrWrongCluster)
	require.Zero(t, stray.admin)
}

// What an operator asks for goes to one cluster too, and with endpoints of two to none.
func TestAdminOfTwoClusters(t *testing.T) {
	mine := newFakeCluster(t, fakeOptions{nodes: 3, shards: 1})
	stray := newFakeCluster(t, fakeOptions{nodes: 3, shards: 1, id: "stray"})
	asked := func(c *fakeCluster) int {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.admin
	}
	ctx := ctxFor(t, time.Minute)
	both, err := DialAdmin(Config{Endpoints: []string{stray.nodes[0].addr, mine.nodes[0].addr}})
	require.NoError(t, err)
	defer func() { require.NoError(t, both.Close()) }()
	_, err = both.CreateNamespace(ctx, NamespaceSpec{Name: "train"})
	require.ErrorIs(t, err, ErrWrongCluster)
	require.ErrorContains(t, err, "cluster fake at "+mine.nodes[0].addr+"; cluster stray at "+stray.nodes[0].addr)
	require.Zero(t, asked(mine)+asked(stray))

	// One that answers too late to be refused is asked for nothing either.
	stray.held = make(chan struct{})
	late, err := DialAdmin(Config{Endpoints: []string{stray.nodes[0].addr, mine.nodes[0].addr}, ConnectTimeout: time.Second, CallTimeout: 20 * time.Second})
	require.NoError(t, err)
	defer func() { require.NoError(t, late.Close()) }()
	_, err = late.CreateNamespace(ctx, NamespaceSpec{Name: "train"})
	require.NoError(t, err)
	close(stray.held)
	_, err = late.CreateNamespace(ctx, NamespaceSpec{Name: "again"})
	require.ErrorIs(t, err, ErrWrongCluster)
	require.Zero(t, asked(stray))
}
