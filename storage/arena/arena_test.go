package arena

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testSeed = 0x5eed

// rig is an arena with one namespace and all its shards.
type rig struct {
	t      testing.TB
	a      *Arena
	n      *Namespace
	clock  *clock.Manual
	shards []*Shard // by shard-1
	recs   []*Record

	// reading is held while a reader touches a chunk: as with a NIC, a chunk that goes
	// away waits for the READ and ends the next one.
	reading sync.RWMutex
}

func newRig(t testing.TB, cfg Config) *rig {
	t.Helper()
	r := &rig{t: t, clock: clock.NewManual(time.Unix(1_700_000_000, 0))}
	cfg.HashSeed, cfg.BootID, cfg.Name = testSeed, 77, "test-"
	if cfg.Clock == nil {
		cfg.Clock = r.clock
	}
	if cfg.Shards == 0 {
		cfg.Shards = 1
	}
	gone := cfg.OnChunkGone
	cfg.OnChunkGone = func(namespace uint32, id rdma.RegionID) {
		r.reading.Lock()
		defer r.reading.Unlock()
		if gone != nil {
			gone(namespace, id)
		}
	}
	a, err := New(cfg)
	require.NoError(t, err)
	r.a, r.n = a, a.OpenNamespace(1, 0)
	for i := range cfg.Shards {
		rec, err := a.NewRecord(uint64(i+1), 9, 3)
		require.NoError(t, err)
		r.recs = append(r.recs, rec)
		r.shards = append(r.shards, r.n.OpenShard(i+1, rec))
	}
	t.Cleanup(func() {
		require.NoError(t, a.Check())
		require.NoError(t, a.Close())
	})
	return r
}

func (r *rig) hash(key string) layout.KeyHash { return layout.HashKey(testSeed, []byte(key)) }

func (r *rig) shard(key string) *Shard {
	return r.shards[r.hash(key).Shard(uint32(len(r.shards)))-1]
}

func (r *rig) put(key, value string, version uint64) bool {
	_, ok := r.shard(key).Put(Item{Key: []byte(key), Value: []byte(value), Version: version})
	return ok
}

// get reads the key's object as the arena has it.
func (r *rig) get(key string) (value string, version uint64, ok bool) {
	loc, ok := r.shard(key).Lookup([]byte(key))
	if !ok {
		return "", 0, false
	}
	raw := r.n.Chunks()[regionID(loc.Place.Chunk)].Bytes()[loc.Place.Offset:][:loc.Length]
	o, verdict := layout.DecodeObject(raw, testSeed, loc.Place)
	require.Equal(r.t, layout.Valid, verdict)
	require.Equal(r.t, layout.StateLive, o.State)
	require.Equal(r.t, key, string(o.Key))
	require.Equal(r.t, loc.Version, o.Version)
	return string(o.Value), o.Version, true
}

func TestPutLookupDelete(t *testing.T) {
	r := newRig(t, Config{Shards: 8})
	for i := range 20000 {
		require.True(t, r.put(fmt.Sprintf("key-%d", i), fmt.Sprintf("value-%d", i), uint64(i+1)))
	}
	require.NoError(t, r.a.Check())
	for i := range 20000 {
		v, version, ok := r.get(fmt.Sprintf("key-%d", i))
		require.True(t, ok)
		require.Equal(t, fmt.Sprintf("value-%d", i), v)
		require.Equal(t, uint64(i+1), version)
	}
	for i := range 20000 {
		key := fmt.Sprintf("key-%d", i)
		if i%2 == 0 {
			r.shard(key).Delete([]byte(key), layout.StateDeleted)
		} else {
			require.True(t, r.put(key, "again", uint64(i+50000)))
		}
	}
	for i := range 20000 {
		v, _, ok := r.get(fmt.Sprintf("key-%d", i))
		require.Equal(t, i%2 == 1, ok)
		if ok {
			require.Equal(t, "again", v)
		}
	}
	require.EqualValues(t, 10000, r.a.Stats().Objects)
}
