package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A cluster that is not healed must be told, or what heal finds proves nothing: here all
// nodes stay cut from each other.
func TestNoProgressWithoutRepair(t *testing.T) {
	const seed, steps = 3, 500
	healed := Run(t, seed, Options{Steps: steps})
	require.Empty(t, healed.Breach, "healed it works")
	r := Run(t, seed, Options{Steps: steps, repair: func(s *sim) {
		s.repair()
		for _, n := range s.nodes {
			for _, o := range s.nodes {
				if o != n {
					s.cut(n.id, o.id)
				}
			}
		}
	}})
	require.NotEmpty(t, r.Breach)
	for _, b := range r.Breach {
		require.Contains(t, b, "no progress")
	}
}

// Nor is a cluster healed whose nodes are left stopped.
func TestNoProgressOfStoppedNodes(t *testing.T) {
	r := Run(t, 4, Options{Steps: 500, repair: func(s *sim) {
		s.repair()
		for _, n := range s.nodes {
			s.freeze(n, true)
		}
	}})
	require.Len(t, r.Breach, 3, "one of each client: %v", r.Breach)
	require.Contains(t, r.Breach[0], "no progress")
	require.Zero(t, r.Healed)
}
