//go:build e2e

package e2e

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// TestKill: SIGKILL of each node in turn, and of all at once, while writers write. What
// was acknowledged is there afterwards; what was said to have failed is not.
func TestKill(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	reader := c.dial(t, nil)
	l := startLoad(t, "kill", c.dial(t, overTransport("shm")), c.dial(t, overTransport("tcp")))
	l.awaitProgress(t)
	for _, n := range c.Nodes() {
		require.NoError(t, n.Kill())
		l.awaitProgress(t) // two of three go on, every shard
		l.pause()
		l.verify(t, reader)
		l.resume()
		c.restart(t, n.ID)
		l.awaitProgress(t)
	}
	require.NoError(t, c.Kill())
	l.pause()
	for _, n := range c.Nodes() {
		require.NoError(t, n.Start())
	}
	for _, n := range c.Nodes() {
		c.awaitServing(t, n.ID)
	}
	l.verify(t, reader)
	// A client that knows nothing of before sees the same, also from the engine.
	l.verify(t, c.dial(t, overTransport(client.TransportGRPC)))
	l.resume()
	l.awaitProgress(t)
	l.pause()
	l.verify(t, reader)
	t.Logf("%d puts acknowledged, %d of unknown outcome, %d refused", l.acked.Load(), l.unsure.Load(), l.refused.Load())
}
