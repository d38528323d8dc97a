package server

import (
	"context"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// TestFallbackReasons: clients say why they ask, and whatever they say, a node keeps a
// bounded number of series.
func TestFallbackReasons(t *testing.T) {
	f := newFallbackCounts()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(f.counts)
	series := func() map[string]float64 {
		families, err := registry.Gather()
		require.NoError(t, err)
		got := map[string]float64{}
		for _, m := range families[0].GetMetric() {
			got[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
		}
		return got
	}
	long := strings.Repeat("a", maxFallbackLength)
	for _, reason := range []string{"torn", "", "no_transport", "torn", long, long + "a", "Torn", "to rn", "torn1", "\xff", "other"} {
		f.add(reason)
	}
	require.Equal(t, map[string]float64{"torn": 2, "no_transport": 1, long: 1, "other": 6}, series())
	for i := range 1000 {
		f.add("x_" + string([]byte{'a' + byte(i%26), 'a' + byte(i/26%26), 'a' + byte(i/676)}))
	}
	f.add("torn")
	got := series()
	require.Len(t, got, maxFallbackReasons)
	require.EqualValues(t, 3, got["torn"])
	require.EqualValues(t, 6+1000-(maxFallbackReasons-4), got["other"])
}

// TestFallbackGets: a get that was answered is counted under its reason; one that was
// refused will be asked elsewhere, and counted there.
func TestFallbackGets(t *testing.T) {
	c := startCluster(t, 1, 1)
	_, err := c.put("key", "value", nil)
	require.NoError(t, err)
	n := c.nodes[0]
	get := func(namespace uint32, reason string) error {
		_, err := n.Get(context.Background(), &kvdv1.GetRequest{NamespaceId: namespace, Key: []byte("key"), Fallback: reason})
		return err
	}
	require.NoError(t, get(1, "torn"))
	require.NoError(t, get(1, "torn"))
	require.NoError(t, get(1, ""))
	require.NoError(t, get(1, "No!"))
	require.Error(t, get(99, "torn"))
	require.EqualValues(t, 2, counted(t, n, "kvd_fallback_gets_total", "torn"))
	require.EqualValues(t, 1, counted(t, n, "kvd_fallback_gets_total", "other"))
	require.EqualValues(t, 3, counted(t, n, "kvd_fallback_gets_total", ""))
}
