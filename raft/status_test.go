package raft

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A follower that answers is active at every tick, also at those at which the core checks
// its quorum and forgets whom it heard; one that is silent is not, an election timeout
// later.
func TestActiveFollowers(t *testing.T) {
	m := newManual(t, 3, 1, nil)
	m.elect(1, 0)
	g := m.nodes[1].group(0)
	active := func() map[NodeID]bool {
		who := map[NodeID]bool{}
		for _, f := range g.Status().Followers {
			who[f.Node] = f.Active
		}
		return who
	}
	election := g.h.cfg.ElectionTicks
	for i := range 5 * election {
		m.tick(1)
		require.Equal(t, map[NodeID]bool{2: true, 3: true}, active(), "tick %d", i)
		m.settle()
	}
	m.nodes[3].crash(0)
	for i := range election + 1 {
		require.True(t, active()[3], "silent for %d ticks of %d", i, election)
		m.tick(1)
		m.settle()
	}
	require.Equal(t, map[NodeID]bool{2: true, 3: false}, active())
	// Who has just begun to lead gives everybody one election timeout.
	m.nodes[1].crash(0)
	require.NoError(t, m.nodes[3].start())
	m.elect(2, 0)
	g = m.nodes[2].group(0)
	for range election {
		m.tick(2)
		require.Equal(t, map[NodeID]bool{1: true, 3: true}, active())
		m.settle()
	}
	m.tick(2)
	require.Equal(t, map[NodeID]bool{1: false, 3: true}, active())
}
