package server

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// What a verdict on the cluster needs beyond the replicas: how many shards there are, how
// many voters each should have, and how long a configuration is in force.
func TestStatusSaysWhatIsWanted(t *testing.T) {
	const shards = 3
	c := startAlone(t, shards)
	status := func() *kvdv1.StatusResponse {
		r, err := c.cluster(0).Status(testContext(t), &kvdv1.StatusRequest{})
		require.NoError(t, err)
		return r
	}
	replica := func() *kvdv1.ShardReplica {
		r, err := kvdv1.NewOperatorClient(c.conns[0]).Shards(testContext(t), &kvdv1.ShardsRequest{Shards: []uint32{1}})
		require.NoError(t, err)
		if len(r.GetReplicas()) == 0 {
			return nil // of two nodes the other may have it for a while
		}
		return r.GetReplicas()[0]
	}
	st := status()
	require.Equal(t, []uint32{shards, 1, 3}, []uint32{st.GetShardCount(), st.GetReplication(), st.GetWantedReplication()})
	require.Empty(t, st.GetReadOnlyReason())
	require.False(t, st.GetReadOnly())
	before := replica()

	began := time.Now()
	for range 2 {
		require.NoError(t, c.start(c.grow(c.nodes[0].Address())))
	}
	within(t, time.Minute, "three are wanted, and there are three", func() bool {
		return status().GetReplication() == 3 && len(replica().GetVoters()) == 3
	})
	after := replica()
	require.Greater(t, after.GetConfigId(), before.GetConfigId())
	require.LessOrEqual(t, after.GetConfigAgeMs(), uint64(time.Since(began).Milliseconds()), "it was changed since")
	within(t, time.Minute, "it is in force", func() bool {
		now := replica()
		return now.GetConfigId() > after.GetConfigId() || now.GetConfigAgeMs() > after.GetConfigAgeMs()
	})

	why := "the disk has 1 MiB left"
	c.nodes[0].disk.refusing.Store(&why)
	st = status()
	require.True(t, st.GetReadOnly())
	require.Equal(t, why, st.GetReadOnlyReason())
}
