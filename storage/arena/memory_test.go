package arena

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A million values of 100 bytes under keys of 20 over 8 shards: registered memory
// per byte of them, index, slack of chunks and everything in quarantine included.
// The puts are spread over simulated time, since tables that were replaced within
// the last ten seconds still take memory.
func TestRegisteredBytesPerObject(t *testing.T) {
	const objects, payload = 1_000_000, 120
	if testing.Short() {
		t.Skip("a million puts")
	}
	fill := func(name string, rate int, most float64, open func(r *rig) (put func(s *Shard, it Item) bool, done func())) {
		r := newRig(t, Config{Shards: 8})
		put, done := open(r)
		key, value := make([]byte, 20), make([]byte, 100)
		for i := range objects {
			binary.LittleEndian.PutUint64(key, uint64(i))
			if !put(r.shard(string(key)), Item{Key: key, Value: value, Version: uint64(i + 1)}) {
				t.Fatalf("put %d is not resident: %+v", i, r.a.Stats())
			}
			if i%1000 == 0 {
				r.clock.Advance(time.Second * 1000 / time.Duration(rate))
				r.a.Tick()
			}
		}
		done()
		st := r.a.Stats()
		ratio := float64(st.RegisteredBytes) / objects / payload
		t.Logf("%s at %d/s: registered %.2f of the values' and keys' bytes: %.1f B each, blocks %.1f, index %.1f, pages in use or quarantine %.1f; %d growths",
			name, rate, ratio, ratio*payload, float64(st.ObjectBytes)/objects, float64(st.IndexBytes)/objects, float64(st.UsedBytes)/objects, st.TableGrowths)
		require.EqualValues(t, objects, st.Objects)
		require.LessOrEqual(t, ratio, most)
	}
	puts := func(*rig) (func(s *Shard, it Item) bool, func()) {
		return func(s *Shard, it Item) bool { _, ok := s.Put(it); return ok }, func() {}
	}
	loads := func(r *rig) (func(s *Shard, it Item) bool, func()) {
		all := make([]*Load, len(r.shards))
		for i, s := range r.shards {
			all[i] = s.StartLoad()
		}
		return func(s *Shard, it Item) bool { return all[s.id-1].Put(it) }, func() {
			for _, l := range all {
				l.Commit()
			}
		}
	}
	fill("puts", 20_000, 1.5, puts)
	fill("load", 1_000_000, 1.5, loads)
}

// Many namespaces times many shards with a key each.
func TestSmallShardsCostLittle(t *testing.T) {
	const shards = 128
	r := newRig(t, Config{Shards: shards, Slots: shards})
	for i := range 2000 {
		r.put(string(rune('a'+i%26))+string(rune(i)), "some value", uint64(i+1))
	}
	st := r.a.Stats()
	require.LessOrEqual(t, st.IndexBytes, uint64(shards*pageSize))
	require.LessOrEqual(t, st.RegisteredBytes, uint64(2<<20))
}
