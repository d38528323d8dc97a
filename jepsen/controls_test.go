//go:build chaos

package main

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/internal/chaos"
	"github.com/kvd-io/kvd/jepsen/nemesis"
	"github.com/kvd-io/kvd/jepsen/workload"
)

// Every variant has exactly one control, and each control can be run.
func TestEveryVariantHasAControl(t *testing.T) {
	var variants []string
	for _, v := range chaos.All() {
		variants = append(variants, v.String())
	}
	names := controlNames()
	slices.Sort(variants)
	slices.Sort(names)
	require.Equal(t, variants, names)
	for _, c := range controls {
		ways := 0
		for _, has := range []bool{c.pkg != "", c.workload != "", c.sim != 0} {
			if has {
				ways++
			}
		}
		require.Equal(t, 1, ways, "%s: want a run, the simulator, or a test", c.variant)
		if c.sim != 0 {
			continue
		}
		if c.pkg != "" {
			require.NotEmpty(t, c.test, c.variant)
			continue
		}
		require.Contains(t, workload.Names(), c.workload, c.variant)
		require.Contains(t, allTransports, c.transport, c.variant)
		_, err := nemesis.ParseKinds(c.nemesis)
		require.NoError(t, err, c.variant)
	}
	_, err := chosenControls("no-confirmation,nonsense")
	require.ErrorContains(t, err, `"nonsense" is not known`)
}
