package clientprom

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
)

// TestCollector: each number of a client's Stats is in one series, under its name.
func TestCollector(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(collector{func() client.Stats {
		return client.Stats{
			Gets: []client.GetCount{
				{Level: client.Linearizable, Via: "shm", Count: 1}, {Level: client.Stale, Via: "shm", Count: 2}, {Level: client.Session, Via: "grpc", Count: 3},
			},
			ObjectReads: 4, BucketReads: 5, RecordReads: 6, Queries: 7, Confirmations: 8, Confirmed: 9, CacheHits: 10, CacheMisses: 11, Hedges: 12,
			Retries: map[string]uint64{"torn": 13, "slow": 14}, Fallbacks: map[string]uint64{"no_transport": 15},
			TransportFallbacks: []client.TransportFallback{{Transport: "verbs", Reason: "revoked", Count: 21}},
			Writes:             16, WriteRetries: 17, UnknownOutcomes: 18, Topologies: 23,
			Peers: []client.PeerStats{
				{NodeID: 1, Address: "a:1", Transport: "shm", Reason: "any text", Connected: true, Sessions: 19, Connections: 22},
				{NodeID: 2, Address: "b:2", Transport: "grpc", Sessions: 20},
				{NodeID: 3, Address: "c:3"},
			},
		}
	}})
	families, err := r.Gather()
	require.NoError(t, err)
	require.Len(t, families, len(all))
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := strings.TrimPrefix(f.GetName(), "kvd_client_")
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			got[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	require.Equal(t, map[string]float64{
		"gets_total linearizable shm": 1, "gets_total stale shm": 2, "gets_total session grpc": 3,
		"reads_total object": 4, "reads_total bucket": 5, "reads_total record": 6, "queries_total": 7,
		"confirmations_total": 8, "confirmed_total": 9, "cache_hits_total": 10, "cache_misses_total": 11, "hedges_total": 12,
		"retries_total torn": 13, "retries_total slow": 14, "fallbacks_total no_transport": 15, "transport_fallbacks_total revoked verbs": 21,
		"writes_total": 16, "write_retries_total": 17, "unknown_outcomes_total": 18, "topologies_total": 23,
		"peer_connected 1": 1, "peer_connected 2": 0, "peer_connected 3": 0,
		"peer_sessions_total 1": 19, "peer_sessions_total 2": 20, "peer_sessions_total 3": 0,
		"peer_connections_total 1": 22, "peer_connections_total 2": 0, "peer_connections_total 3": 0,
		"peer_transport a:1 1 shm": 1, "peer_transport b:2 2 grpc": 1,
	}, got)
}
