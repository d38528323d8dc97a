//go:build chaos

package server

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/internal/faults"
)

// underOrders is a node alone whose disk and clock misbehave as told.
func underOrders(t *testing.T) (c *testCluster, order func(faults.Order) faults.State) {
	socket := filepath.Join(t.TempDir(), "chaos")
	l, err := faults.Listen(socket)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	c = startCluster(t, 1, 1, func(cfg *Config) {
		cfg.FS, cfg.Clock, cfg.MinFreeDisk = l.Disk, l.Clock, 64<<20
	})
	return c, func(o faults.Order) faults.State {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		st, err := faults.Send(ctx, socket, o)
		require.NoError(t, err)
		return st
	}
}

// A sync that fails: what waits for it is not acknowledged, and the node stops itself.
func TestFailingSync(t *testing.T) {
	c, order := underOrders(t)
	for i := range 20 {
		_, err := c.put(fmt.Sprint("key-", i), "before", nil)
		require.NoError(t, err)
	}
	order(faults.Order{FailSync: true})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err := c.kv(0).Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("key-0"), Value: []byte("after")})
	require.Error(t, err, "acknowledged without a sync")
	select {
	case err = <-c.nodes[0].Fatal():
		require.ErrorContains(t, err, "input/output error")
	case <-ctx.Done():
		t.Fatal("the node goes on with a log that it can not write")
	}
	require.NotZero(t, order(faults.Order{}).Failed)
	require.ErrorContains(t, c.nodes[0].Stop(ctx), "stopped after a failed write")
	require.NoError(t, c.conns[0].Close())
	c.nodes[0] = nil
	require.NoError(t, c.start(0))
	for i := range 20 {
		g, err := c.get(fmt.Sprint("key-", i))
		require.NoError(t, err)
		require.True(t, string(g.GetValue()) == "before" || i == 0 && string(g.GetValue()) == "after", "key-%d is %q", i, g.GetValue())
	}
}

// A disk that fills: writes are refused and say why, reads go on, and with room writes go
// on by themselves.
func TestDiskFills(t *testing.T) {
	c, order := underOrders(t)
	_, err := c.put("key", "value", nil)
	require.NoError(t, err)
	order(faults.Order{Full: true, Left: 40 << 20})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	put := func() error {
		_, err := c.kv(0).Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("other"), Value: []byte("value")})
		return err
	}
	require.Eventually(t, func() bool { err = put(); return err != nil }, time.Minute, 10*time.Millisecond)
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	require.ErrorContains(t, err, "MiB left, writes need 64 MiB")
	g, err := c.get("key")
	require.NoError(t, err)
	require.Equal(t, "value", string(g.GetValue()))
	order(faults.Order{})
	require.Eventually(t, func() bool { return put() == nil }, time.Minute, 10*time.Millisecond)
}

// The leader of three whose disk hangs for longer than an election timeout hands over:
// writes go on at another node while the disk still hangs.
func TestStalledLeaderHandsOver(t *testing.T) {
	var sockets []string
	var disks []*faults.Listener
	for range 3 {
		socket := filepath.Join(t.TempDir(), "chaos")
		l, err := faults.Listen(socket)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, l.Close()) })
		sockets, disks = append(sockets, socket), append(disks, l)
	}
	c := startCluster(t, 3, 1, func(cfg *Config) { cfg.FS = disks[cfg.NodeID-1].Disk })
	_, err := c.put("key", "before", nil)
	require.NoError(t, err)
	leader := c.leaderOf(1)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	order := func(o faults.Order) {
		_, err := faults.Send(ctx, sockets[leader], o)
		require.NoError(t, err)
	}
	order(faults.Order{StallSync: true})
	defer order(faults.Order{})
	go func() { // something to sync
		_, _ = c.kv(leader).Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("stuck"), Value: []byte("x")})
	}()
	require.Eventually(t, func() bool {
		for i := range c.nodes {
			if i == leader {
				continue
			}
			if _, err := c.kv(i).Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("key"), Value: []byte("after")}); err == nil {
				return true
			}
		}
		return false
	}, time.Minute, 5*time.Millisecond, "writes do not go on")
	require.Zero(t, c.nodes[leader].shard(1).servedTerm())
}

// A sync that hangs acknowledges nothing until it is done; a slow disk is only slow; and
// the clock is what it is told to be.
func TestHangingSyncAndClock(t *testing.T) {
	c, order := underOrders(t)
	_, err := c.put("key", "before", nil)
	require.NoError(t, err)
	order(faults.Order{StallSync: true})
	done := make(chan error, 1)
	go func() {
		_, err := c.put("key", "after", nil)
		done <- err
	}()
	require.Eventually(t, func() bool { return order(faults.Order{StallSync: true}).Stalled > 0 }, time.Minute, time.Millisecond)
	select {
	case err := <-done:
		t.Fatalf("answered while the sync hangs: %v", err)
	default:
	}
	order(faults.Order{Slow: 5 * time.Millisecond, Shift: time.Hour})
	require.NoError(t, <-done)
	_, err = c.put("key", "slow", nil)
	require.NoError(t, err)
	st := order(faults.Order{Shift: -time.Hour})
	require.NotZero(t, st.Slowed)
	require.WithinDuration(t, time.Now().Add(-time.Hour), st.Now, time.Minute)
	_, err = c.put("key", "again", nil)
	require.NoError(t, err)
	require.NotZero(t, order(faults.Order{}).Shifted)
}
