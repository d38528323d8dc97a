package server

import (
	"bytes"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/layout"
)

const tinyArena = 256 << 10 // bytes

func bigValue(i int) string { return strings.Repeat(string(rune('a'+i%26)), 4000) + fmt.Sprint(i) }

// crowded is a shard with several times as many values as its memory holds.
func crowded(t testing.TB, keys int, expiry int64) *rig {
	r := newRig(t, smallLimits, tinyArena)
	for i := range keys {
		op := put(1, fmt.Sprint("key", i), bigValue(i))
		op.ExpiresUnixMs = expiry
		res := r.one(putCommand(1, op)).(writeResult)
		require.Equal(t, applied, res.outcome, "a write never fails for lack of room")
	}
	return r
}

// What does not fit is in the engine, and the memory owns up to it: it never says
// absent. A key that was asked for comes back, and says where it is.
func TestNonResidentKeys(t *testing.T) {
	const keys = 200
	r := crowded(t, keys, 0)
	missing := 0
	check := func() {
		missing = 0
		for i := range keys {
			key := []byte(fmt.Sprint("key", i))
			o, found := r.lookup(1, key)
			if found == layout.AnswerFound {
				require.Equal(t, bigValue(i), string(o.Value))
				continue
			}
			require.Equal(t, layout.AnswerIncomplete, found)
			missing++
		}
	}
	check()
	require.Greater(t, missing, keys/2)
	for i := range keys {
		key := []byte(fmt.Sprint("key", i))
		loc, resident, err := r.shard.takeBack(1, key)
		require.NoError(t, err)
		require.True(t, resident)
		o, found := r.lookup(1, key)
		require.Equal(t, layout.AnswerFound, found)
		require.Equal(t, bigValue(i), string(o.Value))
		require.Equal(t, loc.Version, o.Version)
		again, resident, err := r.shard.takeBack(1, key)
		require.NoError(t, err)
		require.True(t, resident)
		require.Equal(t, loc, again)
	}
	check()
	_, resident, err := r.shard.takeBack(1, []byte("never"))
	require.NoError(t, err)
	require.False(t, resident)
	// A shard opened from a state that is larger than the memory.
	require.NoError(t, r.eng.Flush())
	r.crash()
	check()
	require.Greater(t, missing, keys/2)
}

// Expiry and deletion reach what is not resident.
func TestNonResidentKeysEnd(t *testing.T) {
	const keys = 120
	r := crowded(t, keys, 50)
	op := &kvdv1.ExpireOp{}
	for i := range keys / 2 {
		op.Keys = append(op.Keys, &kvdv1.ExpireOp_Key{NamespaceId: 1, Key: []byte(fmt.Sprint("key", i)), Version: uint64(i + 2)})
	}
	r.one(expireCommand(100, op))
	for i := keys / 2; i < keys; i++ {
		res := r.one(deleteCommand(1, &kvdv1.DeleteOp{NamespaceId: 1, Key: []byte(fmt.Sprint("key", i))})).(writeResult)
		require.Equal(t, applied, res.outcome)
	}
	for i := range keys {
		key := []byte(fmt.Sprint("key", i))
		_, found := r.lookup(1, key)
		require.NotEqual(t, layout.AnswerFound, found)
		_, resident, err := r.shard.takeBack(1, key)
		require.NoError(t, err)
		require.False(t, resident)
	}
	meta, err := r.shard.eng.Meta()
	require.NoError(t, err)
	require.Zero(t, meta.Keys)
	require.NoError(t, r.shard.eng.ScanAux(auxExpiry, nil, nil, func(k, _ []byte) (bool, error) {
		t.Errorf("expiry %x is left", k)
		return true, nil
	}))
}

// Bringing values back while newer ones are written never shows an older one again.
func TestTakeBackOvertakesNothing(t *testing.T) {
	const keys = 100
	r := crowded(t, keys, 0)
	var done atomic.Bool
	var took atomic.Int64
	var g errgroup.Group
	for w := range 3 {
		g.Go(func() error {
			for i := w; !done.Load(); i++ {
				key := []byte(fmt.Sprint("key", i%keys))
				v, _, err := r.shard.eng.Get(1, key)
				if err != nil {
					return err
				}
				loc, resident, err := r.shard.takeBack(1, key)
				if err != nil {
					return err
				}
				if resident {
					took.Add(1)
				}
				if resident && loc.Version < v.Version {
					return fmt.Errorf("%s was at version %d and is shown at %d", key, v.Version, loc.Version)
				}
			}
			return nil
		})
	}
	for round := 0; round < 300 || took.Load() < 100; round++ {
		from := r.shard.appliedIndex()
		var entries []raft.Entry
		for i := range uint64(4) {
			key := fmt.Sprint("key", (round*7+int(i)*13)%keys)
			entries = append(entries, command(t, from+1+i, putCommand(1, put(1, key, bigValue(round)))))
		}
		r.apply(entries...)
	}
	done.Store(true)
	require.NoError(t, g.Wait())
	for i := range keys {
		key := []byte(fmt.Sprint("key", i))
		v, _, err := r.shard.eng.Get(1, key)
		require.NoError(t, err)
		if o, found := r.lookup(1, key); found == layout.AnswerFound {
			require.Equal(t, v.Version, o.Version)
			require.True(t, bytes.Equal(v.Data, o.Value))
		}
	}
}

// Over gRPC nobody notices, but for the missing location.
func TestSmallMemory(t *testing.T) {
	c := startCluster(t, 1, 2, func(cfg *Config) { cfg.ArenaBytes = 1 << 20 })
	ctx := testContext(t)
	c.leaderOf(1)
	c.leaderOf(2)
	kv := c.kv(0)
	const keys = 100
	for i := range keys {
		_, err := kv.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: []byte(fmt.Sprint("key", i)), Value: []byte(strings.Repeat(bigValue(i), 8))})
		require.NoError(t, err)
	}
	located := 0
	for i := range keys {
		g, err := kv.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1, Key: []byte(fmt.Sprint("key", i))})
		require.NoError(t, err)
		require.Equal(t, strings.Repeat(bigValue(i), 8), string(g.GetValue()))
		if g.GetLocation() != nil {
			located++
		}
	}
	require.Greater(t, located, keys/2, "what was asked for is in memory again, and the answer says where")
	st, err := kvdv1.NewClusterClient(c.conns[0]).Status(ctx, &kvdv1.StatusRequest{})
	require.NoError(t, err)
	require.LessOrEqual(t, st.GetArena().GetRegisteredBytes(), uint64(1<<20))
	resident, all := uint64(0), uint64(0)
	for _, s := range st.GetShards()[1:] {
		resident, all = resident+s.GetResidentKeys(), all+s.GetKeys()
	}
	require.EqualValues(t, keys, all)
	require.Less(t, resident, all)
}
