//go:build !race

package sim

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// usualSeeds are run where -seeds does not say.
const usualSeeds = 200

// TestReplay (not under the race detector, where sync.Pool forgets at random): a seed gives the same steps again, in this process and in another one.
func TestReplay(t *testing.T) {
	const from, n = 1001, 4
	there := map[string]string{}
	for _, m := range seedLine.FindAllStringSubmatch(child(t, from, n), -1) {
		there[m[1]] = m[2]
	}
	require.Len(t, there, n)
	for seed := uint64(from); seed < from+n; seed++ {
		for range 2 {
			r := runSeed(t, seed)
			require.Equal(t, there[fmt.Sprint(seed)], fmt.Sprintf("%016x", r.Hash), "seed %d", seed)
		}
	}
}
