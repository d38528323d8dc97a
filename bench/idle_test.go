package main

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseMetrics(t *testing.T) {
	got, err := parseMetrics(strings.NewReader(`# HELP kvd_raft_groups Raft groups, by state.
# TYPE kvd_raft_groups gauge
kvd_raft_groups{state="active"} 1
kvd_raft_groups{state="quiesced"} 256
kvd_raft_messages_total 1.5e+06
`))
	require.NoError(t, err)
	require.Equal(t, map[string]float64{activeSeries: 1, quiescedSeries: 256, messagesSeries: 1.5e6}, got)
	_, err = parseMetrics(strings.NewReader("kvd_raft_groups many\n"))
	require.ErrorContains(t, err, `line "kvd_raft_groups many"`)
}

func TestIdleReport(t *testing.T) {
	r := idleReport{
		Commit: "abc", Load: "1.00 2.00 3.00", Shards: 256, Seconds: 20, Args: []string{"--tick=1s"},
		Nodes: []idleSample{{Node: 1, CPUPercent: 1.25, Quiesced: 257, Groups: 257, Messages: 0.5, Heartbeats: 20}},
	}
	var b bytes.Buffer
	require.NoError(t, r.write(&b))
	for _, want := range []string{
		"idle, 1 nodes, 256 shards, for 20 s, --tick=1s\n",
		"node 1: 1.25 % of one core; 257 of 257 groups quiesced; 0.5 messages of Raft/s, 20.0 heartbeats of the node/s\n",
		"load average 1.00 2.00 3.00\ncommit: abc\n",
	} {
		require.Contains(t, b.String(), want)
	}
}

// What would measure nothing is refused before anything is started.
func TestIdleAndRestartFlags(t *testing.T) {
	for _, args := range [][]string{
		{"idle", "--nodes=0"}, {"idle", "--shards=0"}, {"idle", "--seconds=0"}, {"idle", "--rest=-1"}, {"idle", "--output=xml"},
		{"restart", "--nodes=0"}, {"restart", "--keys=0"}, {"restart", "--size=7"}, {"restart", "--clients=0"}, {"restart", "--rounds=0"},
	} {
		cmd := newCommand()
		cmd.SetArgs(append(args, "--dir", t.TempDir(), "--kvd-bin", "none"))
		cmd.SetErr(&bytes.Buffer{})
		require.ErrorContains(t, cmd.ExecuteContext(context.Background()), "want", strings.Join(args, " "))
	}
}
