//go:build rdmaguest

package doctor

import (
	"bytes"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma/verbs"
)

// These tests run in a guest of internal/tools/rdmaguest, which has rxe0 and siw0.

func ip(t *testing.T, args ...string) {
	t.Helper()
	out, err := exec.Command("/usr/sbin/ip", args...).CombinedOutput()
	require.NoError(t, err, "ip %v: %s", args, out)
}

func rxeOnly() verbs.Provider { return verbs.Provider{Devices: []string{"rxe0"}} }

func TestGuestDevices(t *testing.T) {
	r := Here("v", verbs.Provider{}, Wish{RequireRDMA: true, ArenaBytes: 64 << 20})
	require.True(t, r.RDMA.Usable, r.RDMA.Verdict)
	require.ElementsMatch(t, []string{"rxe0", "siw0"}, r.Host.Devices)
	require.True(t, loaded(r.Host, "ib_uverbs"))
	require.True(t, loaded(r.Host, "rdma_ucm"))
	require.NotEmpty(t, r.Host.DeviceFiles)
	var out bytes.Buffer
	r.Print(&out)
	for _, words := range []string{"rxe0", "siw0", "libibverbs.so.1", "10.77.0.1"} {
		require.Contains(t, out.String(), words)
	}
	t.Log("\n" + out.String())
	for _, f := range r.Findings {
		require.Equal(t, Notice, f.Level, "%+v", f)
	}
}

// A device whose interface is down is a problem for who named it, until it is up again.
func TestGuestPortDown(t *testing.T) {
	netdev := os.Getenv("KVD_GUEST_RXE_NETDEV")
	require.NotEmpty(t, netdev, "KVD_GUEST_RXE_NETDEV is not set: this test runs in a guest, by make test-rdma")
	require.True(t, Here("v", rxeOnly(), Wish{}).Healthy)
	ip(t, "link", "set", netdev, "down")
	defer ip(t, "link", "set", netdev, "up")
	r := await(t, func(r Report) bool { return !r.Healthy })
	require.False(t, r.RDMA.Usable)
	require.Equal(t, Problem, r.Findings[0].Level)
	require.Contains(t, r.Findings[0].What, "down")
	ip(t, "link", "set", netdev, "up")
	await(t, func(r Report) bool { return r.Healthy && r.RDMA.Usable })
}

func await(t *testing.T, ok func(Report) bool) Report {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for late := time.After(30 * time.Second); ; {
		r := Here("v", rxeOnly(), Wish{RequireRDMA: true})
		if ok(r) {
			return r
		}
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("not after 30 s: %+v", r.Findings)
		}
	}
}

// A name that does not exist, and memory that may not be pinned: iWARP counts it for root
// too.
func TestGuestProblems(t *testing.T) {
	r := Here("v", verbs.Provider{Devices: []string{"mlx5_0"}}, Wish{})
	require.False(t, r.Healthy)
	require.Contains(t, r.Findings[0].What, "mlx5_0")

	var before unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &before))
	low := before
	low.Cur = 8 << 20
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &low))
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &before)) }()
	r = Here("v", verbs.Provider{Devices: []string{"siw0"}}, Wish{ArenaBytes: 64 << 20})
	require.False(t, r.Healthy)
	require.Equal(t, "memory", r.Findings[0].Area)
	require.Contains(t, r.Findings[0].What, "8.0 MiB")
	require.Contains(t, r.Findings[0].What, "64 MiB are needed")
}
