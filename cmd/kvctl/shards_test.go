package main

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
)

// What several nodes say of one shard becomes one row: the leader's word of the highest
// term counts, and each replica is shown as it is.
func TestShardRows(t *testing.T) {
	voters := []uint64{1, 2, 3}
	of := func(r *kvdv1.ShardReplica) []*kvdv1.ShardReplica {
		r.Shard, r.Voters, r.Learners = 7, voters, []uint64{4}
		return []*kvdv1.ShardReplica{r}
	}
	nodes := []client.NodeShards{
		// Node 1 was deposed and does not know it yet.
		{NodeID: 1, Replicas: of(&kvdv1.ShardReplica{Leading: true, LeaderNode: 1, Term: 3, Applied: 50, Keys: 5})},
		{NodeID: 2, Replicas: of(&kvdv1.ShardReplica{Leading: true, LeaderNode: 2, Term: 4, Applied: 90, Keys: 9, Bytes: 99, ConfigId: 6, Others: []*kvdv1.ReplicaProgress{
			{NodeId: 1, Match: 50}, {NodeId: 3, Match: 80, Active: true}, {NodeId: 4, Match: 10, Active: true, Learner: true, Snapshot: true},
		}})},
		{NodeID: 3, Err: errors.New("gone")},
		{NodeID: 4, Replicas: of(&kvdv1.ShardReplica{LeaderNode: 2, Term: 4, Applied: 10, ResidentKeys: 2})},
	}
	rows := shardRows(nodes)
	require.Len(t, rows, 1)
	r := rows[0]
	require.Equal(t, []uint64{2, 4, 6, 9, 99, 90}, []uint64{r.Leader, r.Term, r.ConfigID, r.Keys, r.Bytes, r.Applied})
	require.Equal(t, []replicaRow{
		{Node: 1, Lag: 40, State: "silent"}, {Node: 2, State: "leader"}, {Node: 3, Lag: 10, State: "unreachable"}, {Node: 4, Lag: 80, Resident: 2, State: "snapshot"},
	}, r.Replicas)

	// Without a leader the replica that is furthest has the word.
	nodes[1].Replicas[0].Leading, nodes[1].Replicas[0].LeaderNode, nodes[1].Replicas[0].Others = false, 0, nil
	r = shardRows(nodes)[0]
	require.Zero(t, r.Leader)
	require.Equal(t, uint64(90), r.Applied)
	require.Equal(t, "learner", r.Replicas[3].State)
}
