package engine

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
)

// A snapshot is read in pages of any size, from any key on, and stays what it was.
func TestSnapshotPages(t *testing.T) {
	rng := newRand(t)
	e := openChecked(t, testConfig(vfs.NewMem()))
	g, twin := e.Group(3), newStateTwin()
	next := e.Group(4).NewBatch() // a neighbour, whose keys are not ours
	require.NoError(t, next.Put(1, []byte("k"), Value{Data: []byte("other")}))
	require.NoError(t, next.SetMeta(Meta{Applied: 1, Conf: &raftpb.ConfState{}}))
	require.NoError(t, next.Commit())
	change := func(applied uint64) {
		b := g.NewBatch()
		for range 40 {
			twin.step(t, rng, b)
		}
		require.NoError(t, b.SetMeta(Meta{Applied: applied, Conf: &raftpb.ConfState{}}))
		require.NoError(t, b.Commit())
	}
	for round := range uint64(10) {
		change(2*round + 1)
		s, err := g.OpenSnapshot()
		require.NoError(t, err)
		was := twin.clone()
		change(2*round + 2)
		require.Equal(t, 2*round+1, s.Meta().Applied)
		want := sortedKeys(was.kv)
		var got []string
		var at *Position
		for more := true; more; {
			limit := 1 + rng.Intn(7)
			more = false
			require.NoError(t, s.KeyValues(at, func(n uint32, k []byte, v Value) (bool, error) {
				if limit == 0 {
					more = true
					return false, nil
				}
				limit--
				requireValue(t, was.kv[twinKey(n, k)], Value{Data: bytes.Clone(v.Data), Version: v.Version, Expiry: v.Expiry, Flags: v.Flags})
				got, at = append(got, twinKey(n, k)), &Position{n, bytes.Clone(k)}
				return true, nil
			}))
		}
		require.Equal(t, want, append([]string{}, got...))
		require.Equal(t, uint64(len(want)), s.Meta().Keys)
		for kind := byte(1); kind < 4; kind++ {
			pairs := []string{}
			require.NoError(t, s.Aux(kind, func(k, v []byte) (bool, error) {
				pairs = append(pairs, fmt.Sprintf("%s=%s", k, v))
				return true, nil
			}))
			require.Equal(t, was.auxOf(kind, nil, nil), pairs)
		}
		require.NoError(t, s.Close())
		require.Error(t, s.KeyValues(nil, nil))
		require.Error(t, s.Aux(1, nil))
	}
}
