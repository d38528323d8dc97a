//go:build e2e

package e2e

import (
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// TestRollingRestart: each node leaves by SIGTERM with status 0 and hands its shards
// over: no read fails, no write does.
func TestRollingRestart(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	l := startLoad(t, "roll", c.dial(t, nil), c.dial(t, overTransport("tcp")))
	held := fill(t, c.dial(t, nil), "still", 60, 700)
	readers := []*client.Client{c.dial(t, overTransport("shm")), c.dial(t, overTransport("tcp"))}
	stop := readOn(t, held, readers...)
	l.awaitProgress(t)
	for _, n := range c.Nodes() {
		ctx, cancel := within(stopTimeout)
		took := since(func() { require.NoError(t, n.Stop(ctx)) }) // the error is there for any status but 0
		cancel()
		require.Contains(t, n.LogTail(10), "leadership handed over")
		require.Contains(t, n.LogTail(10), "stopped")
		l.awaitProgress(t)
		c.restart(t, n.ID)
		l.awaitProgress(t)
		t.Logf("node %d left in %v", n.ID, took.Round(time.Millisecond))
	}
	gets := stop()
	l.pause()
	require.Empty(t, l.errors(), "a put failed during a rolling restart")
	l.verify(t, c.dial(t, nil))
	t.Logf("%d gets and %d puts, none failed", gets, l.acked.Load())
}

// TestFullRestart: all nodes leave at once, and come back with everything.
func TestFullRestart(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	old := c.dial(t, nil)
	held := fill(t, old, "full", 200, 2000)
	ctx, cancel := within(stopTimeout)
	defer cancel()
	require.NoError(t, c.Stop(ctx))
	for _, n := range c.Nodes() {
		require.NoError(t, n.Start())
	}
	for _, n := range c.Nodes() {
		c.awaitServing(t, n.ID)
	}
	check(t, c.dial(t, nil), held)
	check(t, old, held) // it finds the new boots by itself
	warmUp(t, old, held)
}

// TestLockedDirectory: a second process on a data directory in use is refused, and does
// no harm.
func TestLockedDirectory(t *testing.T) {
	c := sharedNodes(t)
	n := c.Node(2)
	r := command{bin: kvdBin, args: withFlags(n.Args(), "--listen", freeAddr(t), "--tcp-listen", "127.0.0.1:0", "--metrics-listen", "")}.run(t)
	r.refused(t, 4, n.DataDir, "is locked by process", fmt.Sprint(n.PID()))
	check(t, c.dial(t, nil), fill(t, c.dial(t, nil), "locked", 4, 100))
}

// withFlags replaces flags of a node's command line, which has each as two arguments or
// as --name=value.
func withFlags(args []string, pairs ...string) []string {
	out := slices.Clone(args)
	for i := 0; i < len(pairs); i += 2 {
		out = withoutFlag(out, pairs[i])
		out = append(out, pairs[i], pairs[i+1])
	}
	return out
}

func withoutFlag(args []string, name string) []string {
	var out []string
	for i := 0; i < len(args); i++ {
		switch {
		case args[i] == name:
			i++
		case len(args[i]) > len(name) && args[i][:len(name)+1] == name+"=":
		default:
			out = append(out, args[i])
		}
	}
	return out
}

func freeAddr(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}
