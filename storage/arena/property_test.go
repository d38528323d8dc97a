package arena

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/storage/layout"
)

// twin is what the keys should have. Residency is the arena's choice; what is
// resident must be right.
type twin map[string]Item

// Random operations against a map, with Check after every few, in arenas so small
// that everything is evicted all the time.
func TestAgainstMap(t *testing.T) {
	sizes := map[string]func(*rand.Rand) int{
		"one class":     func(*rand.Rand) int { return 100 },
		"small classes": func(r *rand.Rand) int { return r.IntN(900) },
		"all classes":   func(r *rand.Rand) int { return 1 << r.IntN(19) },
		"huge":          func(r *rand.Rand) int { return 1<<20 + r.IntN(3<<20) },
		"drifting":      func(r *rand.Rand) int { return r.IntN(400) },
	}
	limits := map[string]Config{
		"one page":  {Shards: 1, LimitBytes: 4 << 10, MinChunkBytes: 4 << 10},
		"few pages": {Shards: 2, LimitBytes: 40 << 10, MinChunkBytes: 8 << 10},
		"small":     {Shards: 4, LimitBytes: 1 << 20, MinChunkBytes: 64 << 10, MaxChunkBytes: 128 << 10},
		"larger":    {Shards: 3, LimitBytes: 24 << 20, MinChunkBytes: 1 << 20},
	}
	for name, size := range sizes {
		for limit, cfg := range limits {
			t.Run(name+"/"+limit, func(t *testing.T) {
				seed := uint64(len(name)*31 + len(limit))
				t.Logf("seed %d", seed)
				againstMap(t, cfg, rand.New(rand.NewPCG(seed, 0)), size, name == "drifting")
			})
		}
	}
}

func againstMap(t *testing.T, cfg Config, rng *rand.Rand, size func(*rand.Rand) int, drift bool) {
	cfg.Quarantine = time.Second
	r := newRig(t, cfg)
	model := twin{}
	keys := make([]string, 200)
	for i := range keys {
		keys[i] = fmt.Sprintf("key-%03d%s", i, strings.Repeat("x", rng.IntN(40)))
	}
	value := make([]byte, 4<<20)
	resident := 0
	const steps = 1500
	for step := range steps {
		key := keys[rng.IntN(len(keys))]
		s := r.shard(key)
		switch p := rng.IntN(100); {
		case p < 70:
			n := size(rng)
			if drift {
				n += step / 300 * 3000
			}
			it := Item{Key: []byte(key), Value: value[:n], Version: uint64(step + 1), Expiry: int64(step), Flags: uint8(step & 1)}
			if n > 0 {
				it.Value[0], it.Value[n-1] = byte(step), byte(step>>8)
			}
			loc, ok := s.Put(it)
			it.Value = append([]byte(nil), it.Value...)
			model[key] = it
			if ok {
				resident++
				require.Equal(t, layout.ObjectSize(len(key), n), loc.Length)
				again, found := s.Lookup([]byte(key))
				require.True(t, found)
				require.Equal(t, loc, again)
			}
		case p < 85:
			why := layout.StateDeleted
			if p%2 == 0 {
				why = layout.StateExpired
			}
			s.Delete([]byte(key), why)
			delete(model, key)
			_, found := s.Lookup([]byte(key))
			require.False(t, found)
		case p < 95:
			s.Touch([]byte(key))
		case p < 96:
			reload(r, s, model)
		default:
			r.clock.Advance(300 * time.Millisecond)
			r.a.Tick()
		}
		if step%100 == 0 {
			compare(r, keys, model)
		}
	}
	compare(r, keys, model)
	if cfg.LimitBytes > 1<<20 {
		require.Greater(t, resident, steps/5, "%+v", r.a.Stats())
	}
}

func reload(r *rig, s *Shard, model twin) {
	l := s.StartLoad()
	for key, it := range model {
		if r.shard(key) == s {
			l.Put(it)
		}
	}
	l.Commit()
}

func compare(r *rig, keys []string, model twin) {
	r.t.Helper()
	require.NoError(r.t, r.a.Check())
	for _, key := range keys {
		want, there := model[key]
		if value, version, ok := r.get(key); ok {
			require.True(r.t, there, key)
			require.Equal(r.t, want.Version, version, key)
			require.True(r.t, string(want.Value) == value, key)
			continue
		}
		if !there {
			continue
		}
		// Not resident: nobody may prove that it is absent.
		s := r.shard(key)
		g := &reader{r: r, rng: rand.New(rand.NewPCG(1, 1)), pause: func() {}}
		_, _, out := g.get(int(s.id-1), r.route(int(s.id-1)), key)
		require.Equal(r.t, unknown, out, "key %q", key)
	}
}
