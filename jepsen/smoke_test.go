package main

import (
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/jepsen/nemesis"
	"github.com/kvd-io/kvd/jepsen/workload"
)

// TestSmokeHasEveryFault: the runs of `make jepsen-smoke` are short; together they have to
// plan every fault that is named there.
func TestSmokeHasEveryFault(t *testing.T) {
	makefile, err := os.ReadFile("../Makefile")
	require.NoError(t, err)
	setting := func(pattern string) string {
		m := regexp.MustCompile(pattern).FindSubmatch(makefile)
		require.NotNil(t, m, pattern)
		return string(m[1])
	}
	kinds, err := nemesis.ParseKinds(setting(`(?m)^SMOKE_FAULTS \?= (\S+)$`))
	require.NoError(t, err)
	first, err := strconv.ParseUint(setting(`(?m)^SMOKE_SEED \?= (\d+)$`), 10, 64)
	require.NoError(t, err)
	length, err := time.ParseDuration(setting(`--seed \$\(SMOKE_SEED\) --time (\S+)`))
	require.NoError(t, err)
	tempo, err := strconv.ParseFloat(setting(`--seed \$\(SMOKE_SEED\) .*--tempo (\S+)`), 64)
	require.NoError(t, err)
	planned := map[string]bool{}
	for i := range workload.Names() {
		faults := 0
		for _, lane := range nemesis.Plan(first+uint64(i), kinds, length, 3, tempo) {
			faults += len(lane)
			for _, f := range lane {
				planned[f.Kind] = true
			}
		}
		require.GreaterOrEqual(t, faults, 4, "of each run")
	}
	for _, k := range kinds {
		require.True(t, planned[k], "%s is never planned", k)
	}
}
