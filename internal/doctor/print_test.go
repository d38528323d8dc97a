package doctor

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma/verbs"
)

func fullReport() Report {
	h, v := roce()
	v.Devices[0].NUMANode = 1
	r := Report{Version: "v1", Host: h, RDMA: v, Cluster: &Cluster{Endpoints: []string{"10.0.0.2:7400"}, Namespace: "default", ReadsMeasured: 300, Nodes: []Node{
		{ID: 2, Address: "10.0.0.2:7400", Transport: "verbs", Reason: "preferred", Paths: []Path{
			{Transport: "shm", Reason: "another_host", Detail: "another host"},
			{Transport: "verbs", Usable: true, Reason: "none", P50NS: 3210, P99NS: 5000, ConnectNS: 1_500_000},
			{Transport: "tcp", Reason: "timeout", Detail: "dial timeout"},
		}},
		{ID: 3, Address: "10.0.0.3:7400", Error: "did not answer in time"},
	}}}
	r.judged(Wish{})
	return r
}

// Everything that a user would act on is on the page, findings above what they rest on.
func TestPrint(t *testing.T) {
	r := fullReport()
	var out bytes.Buffer
	r.Print(&out)
	text := out.String()
	at := -1
	for _, words := range []string{
		"1 problem, 2 notices", "problem", "did not answer in time", "NUMA node 1", "--cpunodebind=1",
		"THIS HOST", "uverbs0", "RDMA DEVICES", "mlx5_0", "RoCE v2, routable",
		"CLUSTER at 10.0.0.2:7400", "verbs (chosen)", "3.21µs", "dial timeout",
	} {
		i := strings.Index(text[at+1:], words)
		require.NotEqual(t, -1, i, "%q is missing behind byte %d of\n%s", words, at, text)
		at += 1 + i
	}
}

func TestPrintWithout(t *testing.T) {
	h, v := bare()
	r := Report{Host: h, RDMA: v}
	r.judged(Wish{})
	var out bytes.Buffer
	r.Print(&out)
	require.Contains(t, out.String(), "nothing to mend, 1 notice")
	require.NotContains(t, out.String(), "CLUSTER")
	require.NotContains(t, out.String(), "GID")
}

// The names of the fields are what scripts rely on.
func TestJSON(t *testing.T) {
	r := fullReport()
	b, err := json.Marshal(r)
	require.NoError(t, err)
	var got struct {
		Healthy  *bool
		Findings []struct{ Level, Area, What, Do string }
		RDMA     struct {
			Verdict string
			Devices []struct {
				Name  string
				Ports []struct {
					GIDs []struct{ Verdict string } `json:"gids"`
				}
			}
		} `json:"rdma"`
		Cluster struct {
			Nodes []struct {
				ID    uint64 `json:"node_id"`
				Error string
				Paths []struct {
					Transport string
					Usable    bool
					P50       int64 `json:"p50_ns"`
				}
			}
		}
	}
	require.NoError(t, json.Unmarshal(b, &got))
	require.False(t, *got.Healthy)
	require.Equal(t, "problem", got.Findings[0].Level)
	require.Equal(t, "node 3", got.Findings[0].Area)
	require.Equal(t, "RoCE v2, routable", got.RDMA.Devices[0].Ports[0].GIDs[0].Verdict)
	require.Equal(t, "verbs", got.Cluster.Nodes[0].Paths[1].Transport)
	require.EqualValues(t, 3210, got.Cluster.Nodes[0].Paths[1].P50)
	require.Equal(t, "did not answer in time", got.Cluster.Nodes[1].Error)
}

func TestLog(t *testing.T) {
	lines := func(r Report) []string {
		var out bytes.Buffer
		r.Log(slog.New(slog.NewTextHandler(&out, nil)))
		return strings.Split(strings.TrimSpace(out.String()), "\n")
	}
	h, v := bare()
	r := Report{Host: h, RDMA: v}
	r.judged(Wish{})
	require.Equal(t, []string{""}, lines(r), "the transport says it by itself")

	r.judged(Wish{RequireRDMA: true})
	require.Len(t, lines(r), 2)
	require.Contains(t, lines(r)[0], "no RDMA device")
	require.Contains(t, lines(r)[1], "level=WARN")

	h, v = roce()
	r = Report{Host: h, RDMA: v}
	r.judged(Wish{})
	require.Len(t, lines(r), 1)
	require.Contains(t, lines(r)[0], "used: mlx5_0 port 1")

	v.Memlock = verbs.Memlock{Soft: 1 << 20}
	r = Report{Host: h, RDMA: v}
	r.judged(Wish{ArenaBytes: 1 << 30})
	require.Len(t, lines(r), 2)
	require.Contains(t, lines(r)[1], "level=WARN")
	require.Contains(t, lines(r)[1], "1.0 GiB are needed")
	require.Contains(t, lines(r)[1], "LimitMEMLOCK")
}
