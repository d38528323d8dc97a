//go:build spin

package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Every search of CI: the protocol as it is has no counterexample, each broken variant has one.
func TestModel(t *testing.T) {
	require.NoError(t, tools())
	for _, c := range checks {
		if c.full {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r, err := run(t.Context(), t.TempDir(), c)
			require.NoError(t, err)
			t.Log(r.line(c))
			require.NoError(t, r.judge(c))
			if c.broken {
				require.Contains(t, r.story, "replica", "a counterexample can be told")
			}
		})
	}
}
