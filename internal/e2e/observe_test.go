//go:build e2e

package e2e

import (
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectpb "google.golang.org/grpc/reflection/grpc_reflection_v1"

	"github.com/kvd-io/kvd/client"
)

// connect opens a plain gRPC connection to one node.
func connect(t testing.TB, addr string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// TestMetrics: the named series are there, with values that can be.
func TestMetrics(t *testing.T) {
	c := sharedNodes(t)
	held := fill(t, c.dial(t, nil), "metrics", 10, 100)
	check(t, c.dial(t, overTransport(client.TransportGRPC)), held)
	check(t, c.dial(t, overTransport("tcp")), held)
	all := ""
	for _, n := range c.Nodes() {
		resp, err := http.Get(n.Metrics)
		require.NoError(t, err)
		b, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, http.StatusOK, resp.StatusCode)
		all += string(b)
		for _, series := range []string{
			`kvd_shard_term{shard="1"}`, `kvd_shard_leader{shard="4"}`, `kvd_shard_applied_index{`, `kvd_shard_commit_index{`, `kvd_shard_keys{`,
			"kvd_arena_limit_bytes 6.7108864e+07", "kvd_arena_registered_bytes", "kvd_arena_used_bytes", "kvd_arena_objects", "kvd_arena_evictions_total",
			"kvd_sessions", `kvd_transport_connections{transport="tcp"}`, `kvd_transport_reads_total{transport="tcp"}`, `kvd_transport_reads_total{transport="shm"} 0`,
			"kvd_log_sync_seconds_count", "kvd_log_bytes", "kvd_state_bytes", "kvd_read_only 0", "kvd_rpc_total{", "kvd_rpc_seconds_bucket{", "kvd_leader_changes_total",
			`kvd_raft_groups{state="active"}`, `kvd_raft_groups{state="quiesced"}`, "kvd_raft_messages_total", "kvd_node_heartbeats_total",
			"process_cpu_seconds_total", "go_goroutines",
		} {
			require.Contains(t, string(b), "\n"+series, "node %d", n.ID)
		}
	}
	require.Contains(t, all, `kvd_gets_total{level="linearizable",transport="grpc"}`)
	require.Contains(t, all, `kvd_shard_leader{shard="1"} 1`, "somebody leads")
}

// TestHealthAndReflection: what generic gRPC tools need.
func TestHealthAndReflection(t *testing.T) {
	c := sharedNodes(t)
	ctx, cancel := within(patience)
	defer cancel()
	for _, n := range c.Nodes() {
		conn := connect(t, n.Address)
		h, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
		require.NoError(t, err)
		require.Equal(t, healthpb.HealthCheckResponse_SERVING, h.GetStatus())

		stream, err := reflectpb.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
		require.NoError(t, err)
		require.NoError(t, stream.Send(&reflectpb.ServerReflectionRequest{MessageRequest: &reflectpb.ServerReflectionRequest_ListServices{}}))
		answer, err := stream.Recv()
		require.NoError(t, err)
		var names []string
		for _, s := range answer.GetListServicesResponse().GetService() {
			names = append(names, s.GetName())
		}
		require.Subset(t, names, []string{"kvd.v1.KV", "kvd.v1.Access", "kvd.v1.Cluster", "grpc.health.v1.Health"})
		require.NoError(t, stream.Send(&reflectpb.ServerReflectionRequest{MessageRequest: &reflectpb.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "kvd.v1.KV"}}))
		answer, err = stream.Recv()
		require.NoError(t, err)
		require.NotEmpty(t, answer.GetFileDescriptorResponse().GetFileDescriptorProto())
		require.NoError(t, stream.CloseSend())
	}
}
