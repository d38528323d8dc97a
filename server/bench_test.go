package server

import (
	"context"
	"fmt"
	"testing"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/layout"
	"time"
)

// BenchmarkPut replicates values of 1 KiB over three nodes in this process, each on a
// real disk (TMPDIR), from one caller.
func BenchmarkPut(b *testing.B) {
	c := startCluster(b, 3, 8)
	value := make([]byte, 1024)
	leaders := map[uint32]kvdv1.KVClient{}
	put := func(i int) error {
		key := fmt.Appendf(nil, "key-%d", i%1000)
		shard := layout.HashKey(c.nodes[0].identity.Load().manifest.GetHashSeed(), key).Shard(8)
		if leaders[shard] == nil {
			for n := range c.nodes {
				if c.nodes[n].shard(shard).record.Load().ServedTerm != 0 {
					leaders[shard] = c.kv(n)
				}
			}
		}
		_, err := leaders[shard].Put(context.Background(), &kvdv1.PutRequest{NamespaceId: 1, Key: key, Value: value})
		return err
	}
	_, err := c.put("key-0", "", nil)
	require.NoError(b, err)
	for i := range 1000 {
		_, err := c.put(fmt.Sprintf("key-%d", i), "warm", nil)
		require.NoError(b, err)
	}
	h := hdrhistogram.New(1, int64(time.Minute), 3)
	b.ResetTimer()
	for i := range b.N {
		began := time.Now()
		if err := put(i); err != nil {
			b.Fatal(err)
		}
		_ = h.RecordValue(int64(time.Since(began)))
	}
	b.ReportMetric(float64(h.ValueAtQuantile(50))/1e3, "p50-us")
	b.ReportMetric(float64(h.ValueAtQuantile(99))/1e3, "p99-us")
}
