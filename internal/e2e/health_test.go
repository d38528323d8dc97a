//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/internal/devcluster"
	"github.com/kvd-io/kvd/internal/health"
)

// health asks kvctl, whose exit code, report and standard error have to say the same.
func (c *cluster) health(t testing.TB, args ...string) (health.Report, result) {
	t.Helper()
	r := c.kvctl(t, append([]string{"-o", "json", "cluster", "health"}, args...)...)
	var report health.Report
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &report), "%s", r.text())
	require.Equal(t, map[health.Verdict]int{health.Healthy: 0, health.Degraded: 10, health.Unavailable: 5}[report.Verdict], r.code, r.text())
	if report.Verdict == health.Healthy {
		require.Empty(t, r.stderr)
	} else {
		require.True(t, strings.HasPrefix(r.stderr, "kvctl: "+string(report.Verdict)+": "), r.stderr)
		require.Contains(t, r.stderr, report.Reasons[0].Text)
		require.Equal(t, 1, strings.Count(r.stderr, "\n"), r.stderr)
	}
	return report, r
}

// awaitHealth returns the first report with the verdict and so many shards that serve, that
// has a reason of each code. What a leader hears of others, it knows within an election
// timeout.
func (c *cluster) awaitHealth(t testing.TB, verdict health.Verdict, serving int, codes ...health.Code) (report health.Report) {
	t.Helper()
	await(t, fmt.Sprintf("verdict %s, for %v", verdict, codes), func() error {
		var r result
		if report, r = c.health(t); report.Verdict != verdict || report.Serving != serving {
			return fmt.Errorf("%s", r.text())
		}
		for _, code := range codes {
			if !slices.ContainsFunc(report.Reasons, func(x health.Reason) bool { return x.Code == code }) {
				return fmt.Errorf("no %s: %s", code, r.text())
			}
		}
		return nil
	})
	return report
}

func reasonOf(t testing.TB, r health.Report, code health.Code) health.Reason {
	t.Helper()
	i := slices.IndexFunc(r.Reasons, func(x health.Reason) bool { return x.Code == code })
	require.GreaterOrEqual(t, i, 0, "%v has no %s", r.Reasons, code)
	return r.Reasons[i]
}

// TestClusterHealth: three nodes, one killed, two killed, one stopped in its tracks, all
// back again.
func TestClusterHealth(t *testing.T) {
	nodeArgs := map[uint64][]string{}
	for id := range uint64(3) {
		nodeArgs[id+1] = []string{"--gossip-listen", "127.0.0.1:0"}
	}
	c := newCluster(t, devcluster.Config{NodeArgs: nodeArgs})
	well := func() {
		t.Helper()
		r := c.awaitHealth(t, health.Healthy, shards)
		require.Equal(t, []int{3, 3, 3, shards}, []int{r.Nodes, r.Answering, r.Gossiping, r.Shards})
		for _, x := range r.Reasons {
			require.Equal(t, health.Info, x.Level)
		}
	}
	well()
	table := c.kvctl(t, "cluster", "health")
	require.Zero(t, table.code, table.text())
	require.Contains(t, table.stdout, fmt.Sprintf("healthy: 3 of 3 nodes answer, %d of %d shards serve\n", shards, shards))

	// Gossip is a column where nodes gossip.
	await(t, "gossip hears all", func() error {
		members := c.kvctl(t, "members")
		require.Zero(t, members.code, members.text())
		require.Contains(t, members.stdout, "GOSSIP")
		if n := strings.Count(members.stdout, "alive since "); n != 3 {
			return fmt.Errorf("%d are alive:\n%s", n, members.stdout)
		}
		return nil
	})

	require.NoError(t, c.Node(3).Kill())
	r := c.awaitHealth(t, health.Degraded, shards, health.NodeSilent, health.NoSpare)
	silent := reasonOf(t, r, health.NodeSilent)
	require.Equal(t, []uint64{3}, silent.Nodes)
	require.Contains(t, silent.Text, fmt.Sprintf("node 3 at %s does not answer", c.Node(3).Address))
	require.Contains(t, silent.Text, "gossip at node ")
	spare := reasonOf(t, r, health.NoSpare)
	require.Equal(t, []uint64{3}, spare.Nodes)
	require.Equal(t, []int{3, 2, shards}, []int{r.Nodes, r.Answering, r.Shards})
	table = c.kvctl(t, "cluster", "health")
	require.Equal(t, 10, table.code, table.text())
	require.Contains(t, table.stdout, "degraded: 2 of 3 nodes answer")
	require.Contains(t, table.stdout, "node_silent")

	require.NoError(t, c.Node(2).Kill())
	r = c.awaitHealth(t, health.Unavailable, 0, health.NoQuorum)
	quorum := reasonOf(t, r, health.NoQuorum)
	require.Equal(t, []uint64{2, 3}, quorum.Nodes)
	require.Contains(t, quorum.Text, "start nodes 2, 3")
	require.Equal(t, []int{3, 1}, []int{r.Nodes, r.Answering})

	require.NoError(t, c.Node(1).Kill())
	r = c.awaitHealth(t, health.Unavailable, 0, health.NoNodeAnswers)
	require.Equal(t, []int{3, 0}, []int{r.Nodes, r.Answering})

	for id := range uint64(3) {
		require.NoError(t, c.Node(id+1).Start())
	}
	for id := range uint64(3) {
		c.awaitServing(t, id+1)
	}
	well()

	// A node that hangs takes connections and answers nothing: it costs one wait.
	require.NoError(t, c.Node(2).Signal(syscall.SIGSTOP))
	r = c.awaitHealth(t, health.Degraded, shards, health.NodeSilent)
	require.Equal(t, []uint64{2}, reasonOf(t, r, health.NodeSilent).Nodes)
	require.Contains(t, reasonOf(t, r, health.NodeSilent).Text, "did not answer in time")
	_, hung := c.health(t, "--connect-timeout", "1s")
	t.Logf("with a node that hangs, and a connect timeout of 1 s: %v", hung.took)
	require.NoError(t, c.Node(2).Signal(syscall.SIGCONT))
	well()
}
