package client_test

import (
	"context"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/client/clientprom"
)

// TestMetricsOfClients: what a client did shows in the series of its collector, beside
// those of another client.
func TestMetricsOfClients(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	for _, transport := range []string{"fake", client.TransportGRPC} {
		c := client.StartForTest(t, transport)
		prometheus.WrapRegistererWith(prometheus.Labels{"client": transport}, r).MustRegister(clientprom.Collector(c))
		ctx := context.Background()
		_, err := c.Put(ctx, []byte("a"), []byte("1"))
		require.NoError(t, err)
		for range 3 {
			_, err = c.Get(ctx, []byte("a"))
			require.NoError(t, err)
		}
		_, err = c.Get(ctx, []byte("absent"))
		require.ErrorIs(t, err, client.ErrNotFound)
		_, err = c.Get(ctx, []byte("a"), client.WithLevel(client.Stale))
		require.NoError(t, err)
	}
	families, err := r.Gather()
	require.NoError(t, err)
	sum := func(name string, labels ...string) (sum float64) {
		for _, f := range families {
			if f.GetName() != "kvd_client_"+name {
				continue
			}
			for _, m := range f.GetMetric() {
				has := map[string]bool{}
				for _, l := range m.GetLabel() {
					has[l.GetValue()] = true
				}
				fits := true
				for _, l := range labels {
					fits = fits && has[l]
				}
				if fits {
					sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
				}
			}
		}
		return sum
	}
	for _, transport := range []string{"fake", "grpc"} {
		require.EqualValues(t, 4, sum("gets_total", transport, "linearizable"), transport)
		require.EqualValues(t, 1, sum("gets_total", transport, "stale"), transport)
		require.EqualValues(t, 1, sum("writes_total", transport), transport)
		require.EqualValues(t, 3, sum("peer_connected", transport), transport)
		require.EqualValues(t, 3, sum("peer_transport", transport), transport)
	}
	require.EqualValues(t, 5, sum("fallbacks_total", "grpc", "configured"))
	require.Zero(t, sum("fallbacks_total", "fake"))
	require.Positive(t, sum("confirmations_total", "fake"))
	require.GreaterOrEqual(t, sum("reads_total", "fake", "object"), 4.0)
	require.Positive(t, sum("cache_hits_total", "fake"))
	require.Zero(t, sum("reads_total", "grpc"))
}
