//go:build rdmaguest

package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRDMAJepsen: readers by verbs and by tcp beside each other, writers, and a cluster
// whose nodes are killed and stopped and hand their shards over; what the clients saw is
// judged. The run itself sees to it that gets were answered by verbs and that faults
// happened, or its verdict is not PASS.
func TestRDMAJepsen(t *testing.T) {
	dir := tempDir(t)
	r := command{bin: "/usr/bin/jepsen", limit: 3 * time.Minute, args: []string{
		"--workload", "register", "--transport", "verbs", "--addresses", strings.Join(rxeAddrs(t)[:3], ","),
		"--node-flags", "--tick=200ms,--rdma-devices=" + guestEnv(t, "KVD_GUEST_RXE"),
		"--nemesis", "kill,stop,transfer", "--time", "16s", "--seed", "25", "--op-timeout", "10s",
		"--shards", "4", "--concurrency", "6", "--rate", "60", "--keys", "6", "--max-size", "16384",
		"--kvd-bin", kvdBin, "--artifacts", dir, "--data-dir", dir,
	}}.run(t)
	t.Logf("%s%s", r.stdout, r.stderr)
	require.Zero(t, r.code)
	require.True(t, strings.HasPrefix(r.stdout, "PASS"), r.stdout)
	// Whether a transfer succeeds within seconds is up to the processors.
	require.Regexp(t, `faults seen: kill \d+, stop \d+`, r.stderr)
	require.Regexp(t, `gets answered over: .*verbs \d+`, r.stderr)
}
