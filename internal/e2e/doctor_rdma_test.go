//go:build rdmaguest

package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/internal/doctor"
)

// TestRDMADoctor: the device, its addresses and the READs by it are on the page.
func TestRDMADoctor(t *testing.T) {
	c := rdmaNodes(t)
	args := []string{"--endpoints", strings.Join(c.Endpoints(), ","), "--timeout", "100s", "--connect-timeout", "30s", "-o", "json", "doctor", "--reads", "100", "--rdma-devices", "rxe*"}
	r := diagnosed(t, command{bin: kvctlBin, args: args, limit: 2 * time.Minute}.run(t))
	require.True(t, r.RDMA.Usable, r.RDMA.Verdict)
	require.Contains(t, r.Host.Devices, "rxe0")
	require.NotEmpty(t, r.Host.DeviceFiles)
	for _, f := range r.Host.DeviceFiles {
		require.Empty(t, f.Problem, f.Path)
	}
	var gids []doctorGID
	for _, d := range r.RDMA.Devices {
		require.NotEmpty(t, d.Verdict, d.Name)
		require.Equal(t, d.Name == "rxe0", d.Used, "%s: %s", d.Name, d.Verdict)
		for _, p := range d.Ports {
			for _, g := range p.GIDs {
				require.NotEmpty(t, g.Verdict)
				gids = append(gids, doctorGID{d.Name, g.Address})
			}
		}
	}
	for _, addr := range strings.Split(guestEnv(t, "KVD_GUEST_RXE_ADDRS"), ",") {
		require.Contains(t, gids, doctorGID{"rxe0", addr})
	}
	for _, n := range r.Cluster.Nodes {
		require.Equal(t, "verbs", n.Transport, n.Reason)
		verbs := pathBy(t, n, "verbs")
		require.True(t, verbs.Usable, verbs.Detail)
		require.Equal(t, 100, verbs.Reads)
		require.False(t, verbs.Confidential)
		t.Logf("node %d: a READ of %d bytes p50 %v by verbs, %v by tcp", n.ID, verbs.ReadBytes,
			time.Duration(verbs.P50NS), time.Duration(pathBy(t, n, "tcp").P50NS))
	}
	for _, f := range about(r, "node") {
		require.Equal(t, doctor.Notice, f.Level, "%+v", f)
	}
	for _, id := range []uint64{1, 2, 3} {
		require.Contains(t, c.logOf(t, id), `msg="RDMA devices"`, "kvd says what it uses")
	}
}

type doctorGID struct{ device, address string }
