//go:build rdmaguest

package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs"
	"github.com/kvd-io/kvd/storage/layout"
)

// TestRDMABadInput: a node that cannot serve RDMA, and must, says why in one sentence.
func TestRDMABadInput(t *testing.T) {
	host := rxeAddrs(t)[4]
	start := func(args ...string) result {
		dir := tempDir(t)
		return command{bin: kvdBin, limit: patience, args: append([]string{
			"start", "--node-id", "1", "--data-dir", filepath.Join(dir, "data"), "--listen", host + ":0",
			"--bootstrap", "--shards", "1", "--replication", "1", "--arena", "64MiB", "--max-chunk", "4MiB", "--min-free-disk", "16MiB",
			"--transports", "verbs,tcp", "--require-rdma",
		}, args...)}.run(t)
	}
	for name, tc := range map[string]struct {
		args  []string
		words []string
	}{
		"no such device":         {[]string{"--rdma-devices", "mlx5_7"}, []string{"mlx5_7", "rxe0"}},
		"GID index out of range": {[]string{"--rdma-devices", "rxe0", "--rdma-gid-index", "4095"}, []string{"4095", "1024"}},
		"GID index of nothing":   {[]string{"--rdma-devices", "rxe0", "--rdma-gid-index", "900"}, []string{"900"}},
		"no such port":           {[]string{"--rdma-devices", "rxe0", "--rdma-port", "7"}, []string{"7"}},
		"no address":             {[]string{"--rdma-gid-address", "192.0.2.1"}, []string{"192.0.2.1"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(tc.args...)
			require.NotZero(t, r.code, r.text())
			last := lastLine(r.stderr)
			for _, w := range tc.words {
				require.Contains(t, last, w)
			}
			require.Less(t, len(last), 700, "one sentence")
		})
	}
	t.Run("port down", func(t *testing.T) {
		netdev := guestEnv(t, "KVD_GUEST_SIW_NETDEV")
		runTool(t, "/usr/sbin/ip", "link", "set", netdev, "down")
		defer runTool(t, "/usr/sbin/ip", "link", "set", netdev, "up")
		r := start("--rdma-devices", guestEnv(t, "KVD_GUEST_SIW"))
		require.NotZero(t, r.code, r.text())
		require.Contains(t, lastLine(r.stderr), guestEnv(t, "KVD_GUEST_SIW"))
	})
	t.Run("memory that may not be pinned", func(t *testing.T) {
		limitMemlock(t, 8<<20) // iWARP's driver counts it for root, too
		r := start("--rdma-devices", guestEnv(t, "KVD_GUEST_SIW"))
		require.NotZero(t, r.code, r.text())
		for _, words := range []string{"arena of 64 MiB", "RLIMIT_MEMLOCK is 8 MiB", "LimitMEMLOCK="} {
			require.Contains(t, lastLine(r.stderr), words)
		}
	})
}

// limitMemlock is for the processes that the test starts.
func limitMemlock(t *testing.T, bytes uint64) {
	t.Helper()
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: bytes, Max: old.Max}))
	t.Cleanup(func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old)) })
}

// TestRDMAFallsBack: a node that need not serve RDMA, and cannot, says why and is read over
// tcp; a client with lesser settings is served with those, and one of another release is
// told so.
func TestRDMAFallsBack(t *testing.T) {
	addrs := rxeAddrs(t)
	t.Run("refused registrations and no such GID", func(t *testing.T) {
		limitMemlock(t, 64<<10)
		c := newCluster(t, devcluster.Config{Nodes: 2, Hosts: addrs[4:6],
			Args: []string{"--transports", "verbs,tcp", "--tick", "200ms", "--replication", "1"},
			NodeArgs: map[uint64][]string{
				1: {"--rdma-devices", guestEnv(t, "KVD_GUEST_SIW")},
				2: {"--rdma-devices", guestEnv(t, "KVD_GUEST_RXE"), "--rdma-gid-index", "900"},
			}})
		cl := c.dial(t, byAny)
		warmUp(t, cl, fill(t, cl, "other-ways", 16, 900))
		require.Zero(t, via(cl.Stats(), "verbs"))
		require.NotZero(t, via(cl.Stats(), "tcp"))
		require.Contains(t, c.logOf(t, 1), "RLIMIT_MEMLOCK is 64 KiB")
		require.Contains(t, c.logOf(t, 2), "GID index 900")
	})
	c := rdmaNodes(t)
	t.Run("lesser READ depth and MTU", func(t *testing.T) {
		held := fill(t, c.dial(t, byAny), "lesser", 4, 3000)
		cl := c.dial(t, func(cfg *client.Config) {
			byVerbs(cfg)
			cfg.Providers = []rdma.Provider{verbs.Provider{Devices: []string{guestEnv(t, "KVD_GUEST_RXE")}, MaxReadDepth: 1, MaxMTU: 256}}
		})
		warmUp(t, cl, held)
		require.NotZero(t, via(cl.Stats(), "verbs"))
	})
	t.Run("another layout", func(t *testing.T) {
		_, err := rawSession{layout: layout.Version + 1}.open(t, c.Node(1).Address)
		require.Equal(t, codes.FailedPrecondition, status.Code(err), "%v", err)
		for _, version := range []uint32{layout.Version, layout.Version + 1} {
			require.ErrorContains(t, err, fmt.Sprintf("version %d", version))
		}
	})
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}
