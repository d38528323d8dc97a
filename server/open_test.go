package server

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Control records lie in the order of their shards: one READ then brings those of
// neighbours.
func TestRecordsAreInOrder(t *testing.T) {
	c := startCluster(t, 1, 32)
	for range 3 {
		shards := c.nodes[0].localShards()
		require.Len(t, shards, 32)
		for i, sh := range shards[1:] {
			require.Equal(t, shards[i].record.Slot()+1, sh.record.Slot(), "shard %d", sh.number)
		}
		c.stopNode(0)
		require.NoError(t, c.start(0))
	}
}
