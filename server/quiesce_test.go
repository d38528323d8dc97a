package server

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/raft"
)

// Nodes that nobody asks anything send each other their heartbeats, and nothing else,
// however many groups they share. Work, a node that goes and one that comes wake them.
func TestIdleNodesAreQuiet(t *testing.T) {
	const nodes, shards = 3, 16
	c := startCluster(t, nodes, shards)
	stats := func() (all []raft.Stats) {
		for _, n := range c.nodes {
			if n != nil {
				all = append(all, n.host.Stats())
			}
		}
		return all
	}
	quiet := func() bool {
		for _, s := range stats() {
			if s.Quiesced != shards+1 {
				return false
			}
		}
		return true
	}
	within(t, time.Minute, "all groups are quiesced", quiet)
	within(t, time.Minute, "nothing but heartbeats is sent for a while", func() bool {
		before := stats()
		for {
			heard, sent := true, false
			for i, s := range stats() {
				heard = heard && s.NodeHeartbeatsIn >= before[i].NodeHeartbeatsIn+20
				sent = sent || s.MessagesOut != before[i].MessagesOut
			}
			if heard || sent {
				return !sent
			}
			pause(t.Context(), testTick())
		}
	})
	for i := range shards {
		_, err := c.put(fmt.Sprint("key", i), "value", nil)
		require.NoError(t, err)
	}
	within(t, time.Minute, "and are again", quiet)

	c.stopNode(2)
	for i := range shards {
		_, err := c.put(fmt.Sprint("key", i), "without one", nil)
		require.NoError(t, err)
	}
	for _, s := range stats() {
		require.Less(t, s.Quiesced, shards+1, "a replica of each shard is missing")
	}
	require.NoError(t, c.start(2))
	within(t, time.Minute, "and are when it is back", quiet)
	for i := range shards {
		r, err := c.get(fmt.Sprint("key", i))
		require.NoError(t, err)
		require.Equal(t, "without one", string(r.GetValue()))
	}
}
