package arena

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/storage/layout"
)

// inOverflow puts keys until one lies in an overflow bucket.
func inOverflow(t *testing.T, r *rig) (key string, at slotRef) {
	for i := range 1000 {
		key := fmt.Sprintf("key-%05d", i)
		require.True(t, r.put(key, "value", 1))
		s := r.shards[0]
		if at, _, ok := s.table.find(r.n, r.hash(key), []byte(key)); ok && at.bucket >= s.table.Buckets {
			return key, at
		}
	}
	t.Fatal("no key in an overflow bucket")
	return "", slotRef{}
}

// A reader has seen the home bucket, complete, when a key behind it in the chain is
// made non-resident. The bucket that it reads next has to tell.
func TestEvictionBehindAReaderInTheChain(t *testing.T) {
	for name, remove := range map[string]func(r *rig, key string){
		"evicted": func(r *rig, key string) {
			r.n.mu.Lock()
			defer r.n.mu.Unlock()
			_, b, _ := r.shards[0].table.find(r.n, r.hash(key), []byte(key))
			require.True(r.t, r.n.evictLocked(b))
		},
		"overwritten by what has no room": func(r *rig, key string) {
			_, ok := r.shards[0].Put(Item{Key: []byte(key), Value: make([]byte, layout.MaxObjectSize), Version: 2})
			require.False(r.t, ok)
		},
	} {
		r := newRig(t, Config{Shards: 1})
		key, _ := inOverflow(t, r)
		words := 0
		g := &reader{r: r, rng: rand.New(rand.NewPCG(1, 1))}
		g.pause = func() {
			if words++; words == 9 { // the first word of the second bucket
				remove(r, key)
			}
		}
		_, _, out := g.get(0, r.route(0), key)
		require.Equal(t, unknown, out, name)

		// What the chain knows is inherited when the table grows.
		for i := 0; r.a.Stats().TableGrowths == 0; i++ {
			require.True(t, r.put(fmt.Sprintf("more-%05d", i), "value", 3))
		}
		g.pause = func() {}
		_, _, out = g.get(0, r.route(0), key)
		require.Equal(t, unknown, out, name)
	}
}

// A key that is deleted from an overflow bucket is absent, and the bucket used again.
func TestDeleteInOverflow(t *testing.T) {
	r := newRig(t, Config{Shards: 1})
	key, at := inOverflow(t, r)
	r.shards[0].Delete([]byte(key), layout.StateDeleted)
	g := &reader{r: r, rng: rand.New(rand.NewPCG(1, 1)), pause: func() {}}
	_, _, out := g.get(0, r.route(0), key)
	require.Equal(t, absent, out)
	require.True(t, r.put(key, "again", 2))
	again, _, ok := r.shards[0].table.find(r.n, r.hash(key), []byte(key))
	require.True(t, ok)
	require.Equal(t, at, again)
}
