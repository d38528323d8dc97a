package arena

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// An old table stays readable and unchanged for the quarantine, and layout_gen was
// raised before anything was written to the new one.
func TestOldTableStaysForTheQuarantine(t *testing.T) {
	r := newRig(t, Config{Shards: 1, LimitBytes: 192 << 10, MinChunkBytes: 64 << 10})
	require.True(t, r.put("first", "value", 1))
	old := r.route(0)
	tbl := r.shards[0].table
	var frozen []byte
	for i := 0; i < 6000; i++ {
		r.put(fmt.Sprintf("key-%05d", i), strings.Repeat("v", i%60), uint64(i+2))
		now := r.route(0)
		if frozen == nil && now.table.ID != old.table.ID {
			require.Greater(t, now.gen, old.gen)
			frozen = append(frozen, tbl.mem...)
		}
		if frozen != nil {
			require.True(t, bytes.Equal(frozen, tbl.mem), "put %d changed the old table", i)
		}
		r.clock.Advance(time.Millisecond)
	}
	require.NotNil(t, frozen)
	r.clock.Advance(11 * time.Second)
	r.a.Tick()
	for i := 0; i < 3000 && bytes.Equal(frozen, tbl.mem); i++ {
		r.put(fmt.Sprintf("later-%05d", i), strings.Repeat("v", i%60), uint64(i+20000))
	}
	require.False(t, bytes.Equal(frozen, tbl.mem), "pages are used again after the quarantine")
}

// Pages serve another class only after every shard's layout_gen was raised, with
// nothing live in them, and the quarantine went by.
func TestPagesChangeTheirPurpose(t *testing.T) {
	r := newRig(t, Config{Shards: 3, LimitBytes: 256 << 10, MinChunkBytes: 64 << 10})
	gens := func() (g []uint64) {
		for _, rec := range r.recs {
			g = append(g, rec.layoutGen())
		}
		return g
	}
	for i := range 3000 {
		r.put(fmt.Sprintf("small-%05d", i), strings.Repeat("v", 60), uint64(i+1))
	}
	r.clock.Advance(11 * time.Second)
	r.a.Tick()
	before := gens()
	big := strings.Repeat("B", 30000)
	tries := 0
	for ; !r.put("big", big, 10000); tries++ {
		require.Less(t, tries, 100)
		if tries == 50 {
			for i, g := range gens() {
				require.Greater(t, g, before[i], "shard %d", i+1)
			}
			r.clock.Advance(11 * time.Second)
		}
	}
	require.GreaterOrEqual(t, tries, 50, "used again before the quarantine was over")
	require.NoError(t, r.a.Check())

	// And back: the small ones get their room again.
	evicted := r.a.Stats().Evictions
	for i := range 3000 {
		require.True(t, r.put(fmt.Sprintf("small-%05d", i), strings.Repeat("v", 60), uint64(i+20000)))
	}
	require.Greater(t, r.a.Stats().Evictions, evicted)
}

// Emptied slabs go back to the namespace even if nobody asks.
func TestTickRetiresEmptySlabs(t *testing.T) {
	r := newRig(t, Config{Shards: 1})
	for i := range 3000 {
		require.True(t, r.put(fmt.Sprintf("key-%05d", i), strings.Repeat("v", 200), 1))
	}
	for i := range 3000 {
		r.shards[0].Delete(fmt.Appendf(nil, "key-%05d", i), 4)
	}
	gen := r.recs[0].layoutGen()
	r.a.Tick()
	require.Greater(t, r.recs[0].layoutGen(), gen)
	r.clock.Advance(11 * time.Second)
	r.a.Tick()
	require.LessOrEqual(t, r.a.Stats().UsedBytes, r.a.Stats().IndexBytes)
	require.NoError(t, r.a.Check())
}

// A class that came late to a full memory gets its share in time.
func TestClassesShareTheMemory(t *testing.T) {
	r := newRig(t, Config{Shards: 1, LimitBytes: 1 << 20, MinChunkBytes: 64 << 10})
	for i := range 20000 {
		r.put(fmt.Sprintf("small-%06d", i), strings.Repeat("v", 60), 1)
	}
	resident := 0
	for round := range 60 {
		for i := range 200 {
			if r.put(fmt.Sprintf("large-%06d", round*200+i), strings.Repeat("v", 2000), 1) {
				resident++
			}
		}
		r.clock.Advance(11 * time.Second)
		r.a.Tick()
	}
	held := 0
	for _, p := range r.n.mu.pools {
		if p != nil && p.pages > 0 && len(p.slabs) > 0 && p.slabs[0].size > 2000 {
			held += p.pages
		}
	}
	require.Greater(t, resident, 60*200*9/10)
	require.Greater(t, held, 256/4, "pages held by the class that is written")
}

// The touched are spared, once memory has settled: a slab that is emptied for a table
// goes as a whole.
func TestSecondChance(t *testing.T) {
	r := newRig(t, Config{Shards: 2, LimitBytes: 512 << 10, MinChunkBytes: 64 << 10})
	for i := range 20000 {
		r.put(fmt.Sprintf("old-%06d", i), strings.Repeat("v", 90), 1)
	}
	hot := make([]string, 50)
	for i := range hot {
		hot[i] = fmt.Sprintf("hot-%06d", i)
		r.put(hot[i], strings.Repeat("v", 90), 1)
	}
	for i := range 20000 {
		r.put(fmt.Sprintf("new-%06d", i), strings.Repeat("v", 90), 1)
		if i%100 == 0 {
			for _, key := range hot {
				r.shard(key).Touch([]byte(key))
			}
		}
	}
	for _, key := range hot {
		_, _, ok := r.get(key)
		require.True(t, ok, key)
	}
}

// Every put does a bounded amount of work, however large the run that it asks for.
func TestWorkPerPutIsBounded(t *testing.T) {
	r := newRig(t, Config{Shards: 1, LimitBytes: 8 << 20})
	for i := range 60000 {
		r.put(fmt.Sprintf("small-%06d", i), strings.Repeat("v", 60), 1)
	}
	frees := 0
	r.a.hook = func(e event) {
		if e.Op == opFree {
			frees++
		}
	}
	big := strings.Repeat("B", 1<<20)
	for i := range 300 {
		frees = 0
		r.put("big", big, uint64(i+1))
		require.LessOrEqual(t, frees, reclaimBudget+1)
	}
	r.clock.Advance(11 * time.Second)
	require.True(t, r.put("big", big, 5000))
}
