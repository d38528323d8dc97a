package check

import (
	"math/rand/v2"
	"testing"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/jepsen/history"
)

// What reduce leaves out changes no verdict, right or wrong.
func TestReduceChangesNoVerdict(t *testing.T) {
	seed := uint64(20261201)
	rnd := rand.New(rand.NewPCG(seed, 1))
	verdicts := map[bool]int{}
	reduced := 0
	for range 3000 {
		var ops []*history.Op
		valueOf := map[uint64]uint64{}
		for i := range 2 + rnd.IntN(9) {
			call := int64(rnd.IntN(24))
			op := &history.Op{ID: uint64(i), Process: i, Call: call, Return: call + 1 + int64(rnd.IntN(16))}
			switch v := uint64(1 + rnd.IntN(3)); rnd.IntN(4) {
			case 0:
				if valueOf[10*v] == 0 {
					op.Kind, op.Value, op.Version, op.Outcome = history.Put, v, 10*v, history.OK
					valueOf[10*v] = v
					break
				}
				fallthrough
			case 1:
				op.Kind, op.Got, op.Version, op.Outcome = history.Get, v, 10*v, history.OK
			default:
				op.Kind, op.Value, op.Version, op.Outcome = history.Add, 100+uint64(i), 10*v, history.Conflict
			}
			ops = append(ops, op)
		}
		all := operations(ops, valueOf)
		few := reduce(all)
		reduced += len(all) - len(few)
		want := porcupine.CheckOperations(model, all)
		require.Equal(t, want, porcupine.CheckOperations(model, few), "seed %d: %v", seed, ops)
		verdicts[want]++
	}
	require.Greater(t, verdicts[true], 20, "%v", verdicts)
	require.Greater(t, verdicts[false], 100, "%v", verdicts)
	require.NotZero(t, reduced)
}
