//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// hasDevice tells whether the kernel knows an RDMA device. Tests of what happens without
// one want less where there is one.
func hasDevice() bool {
	list, _ := os.ReadDir("/sys/class/infiniband")
	return len(list) > 0
}

// TestRequireRDMA: without a device the command fails at once, with the reason and with
// "unavailable" as its exit code.
func TestRequireRDMA(t *testing.T) {
	c := sharedNodes(t)
	require.Zero(t, c.kvctl(t, "put", "transport/x", "y").code)
	r := c.kvctl(t, "get", "transport/x", "--require-rdma")
	require.Less(t, r.took, 10*time.Second)
	if !hasDevice() {
		r.failed(t, 5, "RDMA is required")
		require.Contains(t, r.stderr, "verbs: ")
	}
	// The nodes are not even asked.
	kvctl(t, nil, "--endpoints", "127.0.0.1:1", "get", "x", "--require-rdma").failed(t, 5, "")
	c.kvctl(t, "get", "transport/x", "--require-rdma", "--transport", "tcp").failed(t, 2, `transport "tcp"`)
	c.kvctl(t, "get", "transport/x", "--require-rdma", "--transport", "shm").failed(t, 2, `transport "shm"`)
}

// TestTransportIsSaid: one line for each node says how it is read and why, and the answer
// says by what it came.
func TestTransportIsSaid(t *testing.T) {
	c := sharedNodes(t)
	require.Zero(t, c.kvctl(t, "put", "transport/x", "y").code)
	for transport, words := range map[string][]string{
		"auto": {"node is read over shm", "reason=preferred", "answered by shm"},
		"shm":  {"node is read over shm", "reason=configured", "answered by shm"},
		"tcp":  {"node is read over tcp", "reason=configured", "answered by tcp"},
		"grpc": {"node is read over grpc", "answered by grpc", "configured"},
	} {
		r := c.kvctl(t, "-v", "get", "transport/x", "--transport", transport)
		require.Zero(t, r.code, r.text())
		require.Equal(t, "y", r.stdout)
		for _, w := range words {
			require.Contains(t, r.stderr, w, transport)
		}
		for _, n := range c.Nodes() {
			require.LessOrEqual(t, strings.Count(r.stderr, "address="+n.Address), 1, r.stderr)
		}
	}
	if hasDevice() {
		return
	}
	r := c.kvctl(t, "-v", "get", "transport/x", "--transport", "verbs")
	require.Zero(t, r.code, r.text())
	require.Equal(t, "y", r.stdout)
	for _, w := range []string{"node is read over grpc", "verbs: not served by the node", "answered by grpc", "fell back to gRPC 1 times: no_transport"} {
		require.Contains(t, r.stderr, w)
	}
}

// TestTransportAfterRestart: a node that is killed takes its connections with it, and is
// read by shared memory again when it is back: none of it is held against the transport.
func TestTransportAfterRestart(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	cl := c.dial(t, nil)
	ctx, cancel := within(2 * patience)
	defer cancel()
	_, err := cl.Put(ctx, []byte("k"), []byte("v"))
	require.NoError(t, err)
	for id := uint64(1); id <= 3; id++ {
		require.NoError(t, c.Node(id).Kill())
		v, err := cl.Get(ctx, []byte("k"))
		require.NoError(t, err)
		require.Equal(t, "v", string(v.Data))
		c.restart(t, id)
		await(t, "the node is read by shm", func() error {
			for _, p := range cl.Stats().Peers {
				if p.NodeID == id && (!p.Connected || p.Transport != "shm") {
					return fmt.Errorf("it is read by %s: %s", p.Transport, p.Reason)
				}
			}
			return nil
		})
	}
	b, err := cl.AllocBuffer(100)
	require.NoError(t, err)
	v, err := b.GetInto(ctx, []byte("k"), client.WithLevel(client.Linearizable))
	require.NoError(t, err)
	require.Equal(t, "v", string(v.Data))
	require.NoError(t, b.Free())
}
