package engine

import (
	"bytes"
	"fmt"
	"math/rand"
	randv2 "math/rand/v2"
	"sort"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
)

func newRandV2(r *rand.Rand) *randv2.Rand { return randv2.New(randv2.NewPCG(r.Uint64(), r.Uint64())) }

// stateTwin is the obvious state: maps.
type stateTwin struct {
	meta Meta
	kv   map[string]Value // namespace as one byte, key
	aux  map[string]string
}

func newStateTwin() *stateTwin {
	return &stateTwin{kv: map[string]Value{}, aux: map[string]string{}}
}

func (s *stateTwin) clone() *stateTwin {
	c := newStateTwin()
	c.meta = s.meta
	for k, v := range s.kv {
		c.kv[k] = v
	}
	for k, v := range s.aux {
		c.aux[k] = v
	}
	return c
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

func twinKey(ns uint32, key []byte) string { return string([]byte{byte(ns)}) + string(key) }

// auxOf lists what ScanAux should give.
func (s *stateTwin) auxOf(kind byte, prefix, start []byte) []string {
	pairs := []string{}
	for _, k := range sortedKeys(s.aux) {
		if k[0] == kind && strings.HasPrefix(k[1:], string(prefix)) && k[1:] >= string(start) {
			pairs = append(pairs, k[1:]+"="+s.aux[k])
		}
	}
	return pairs
}

type auxScanner interface {
	ScanAux(kind byte, prefix, start []byte, f func(key, value []byte) (bool, error)) error
}

func scanAux(t *testing.T, s auxScanner, kind byte, prefix, start []byte, limit int) []string {
	t.Helper()
	pairs := []string{}
	require.NoError(t, s.ScanAux(kind, prefix, start, func(k, v []byte) (bool, error) {
		pairs = append(pairs, string(k)+"="+string(v))
		return len(pairs) < limit, nil
	}))
	return pairs
}

func requireState(t *testing.T, g *Group, want *stateTwin) {
	t.Helper()
	m, err := g.Meta()
	require.NoError(t, err)
	size := 0
	for k, v := range want.kv {
		size += len(k) - 1 + len(v.Data)
	}
	require.Equal(t, want.meta.Applied, m.Applied)
	require.Equal(t, want.meta.ConfigID, m.ConfigID)
	require.Equal(t, want.meta.Conf.GetVoters(), m.Conf.GetVoters())
	require.EqualValues(t, len(want.kv), m.Keys)
	require.EqualValues(t, size, m.Bytes)
	keys := sortedKeys(want.kv)
	require.NoError(t, g.Scan(func(ns uint32, key []byte, v Value) error {
		require.NotEmpty(t, keys)
		require.Equal(t, keys[0], twinKey(ns, key))
		requireValue(t, want.kv[keys[0]], v)
		keys = keys[1:]
		return nil
	}))
	require.Empty(t, keys)
	for kind := range byte(3) {
		require.Equal(t, want.auxOf(kind, nil, nil), scanAux(t, g, kind, nil, nil, 1<<30))
	}
}

func requireValue(t *testing.T, want, got Value) {
	t.Helper()
	require.True(t, bytes.Equal(want.Data, got.Data))
	require.Equal(t, []any{want.Version, want.Expiry, want.Flags}, []any{got.Version, got.Expiry, got.Flags})
}

func randomKey(rng *rand.Rand) []byte {
	key := make([]byte, rng.Intn(4))
	for i := range key {
		key[i] = []byte{0, 'a', 'b', 0xff}[rng.Intn(4)]
	}
	return key
}

// step does one random operation on a batch and its twin, and compares reads.
func (s *stateTwin) step(t *testing.T, rng *rand.Rand, b *Batch) {
	ns, key, kind := uint32(rng.Intn(3)), randomKey(rng), byte(rng.Intn(3))
	k, a := twinKey(ns, key), string([]byte{kind})+string(key)
	switch rng.Intn(9) {
	case 0, 1, 2:
		v := Value{Data: make([]byte, rng.Intn(300)), Version: rng.Uint64(), Expiry: rng.Int63(), Flags: uint8(rng.Intn(256))}
		rng.Read(v.Data)
		require.NoError(t, b.Put(ns, key, v))
		s.kv[k] = v
	case 3:
		require.NoError(t, b.Delete(ns, key))
		delete(s.kv, k)
	case 4, 5:
		v, ok, err := b.Get(ns, key)
		require.NoError(t, err)
		want, there := s.kv[k]
		require.Equal(t, there, ok)
		requireValue(t, want, v)
	case 6:
		v := fmt.Sprint(rng.Int())
		require.NoError(t, b.PutAux(kind, key, []byte(v)))
		s.aux[a] = v
	case 7:
		require.NoError(t, b.DeleteAux(kind, key))
		delete(s.aux, a)
	case 8:
		v, ok, err := b.GetAux(kind, key)
		require.NoError(t, err)
		want, there := s.aux[a]
		require.Equal(t, there, ok)
		require.Equal(t, want, string(v))
		var prefix, start []byte
		if rng.Intn(2) == 0 {
			prefix = randomKey(rng)
		}
		if rng.Intn(2) == 0 {
			start = randomKey(rng)
		}
		pairs := s.auxOf(kind, prefix, start)
		limit := 1 + rng.Intn(10)
		require.Equal(t, pairs[:min(len(pairs), limit)], scanAux(t, b, kind, prefix, start, limit))
	}
}

// Everything that a batch and a group show equals a map, through reopening; after a
// crash the state is one that was committed, not older than DurableApplied said.
func TestStateAgainstTwin(t *testing.T) {
	rng := newRand(t)
	fs := vfs.NewCrashableMem()
	e := open(t, testConfig(fs))
	const id = 5
	twin := newStateTwin()
	history := map[uint64]*stateTwin{0: twin.clone()}
	for range 300 {
		g := e.Group(id)
		b := g.NewBatch()
		next := twin.clone()
		for range rng.Intn(20) {
			next.step(t, rng, b)
		}
		next.meta.Applied++
		next.meta.ConfigID = rng.Uint64()
		next.meta.Conf = &raftpb.ConfState{Voters: []uint64{rng.Uint64()}}
		require.NoError(t, b.SetMeta(next.meta))
		if rng.Intn(5) == 0 {
			b.Discard()
		} else {
			require.NoError(t, b.Commit())
			twin = next
			history[twin.meta.Applied] = twin
		}
		switch rng.Intn(15) {
		case 0:
			require.NoError(t, e.Close())
			e = open(t, testConfig(fs))
		case 1:
			require.NoError(t, e.Flush())
			durable, err := g.DurableApplied()
			require.NoError(t, err)
			require.Equal(t, twin.meta.Applied, durable)
		case 2:
			durable, err := g.DurableApplied()
			require.NoError(t, err)
			fs = fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.Intn(101), RNG: newRandV2(rng)})
			require.NoError(t, e.Close())
			e = open(t, testConfig(fs))
			m, err := e.Group(id).Meta()
			require.NoError(t, err)
			require.GreaterOrEqual(t, m.Applied, durable)
			require.Contains(t, history, m.Applied)
			twin = history[m.Applied].clone()
		}
		requireState(t, e.Group(id), twin)
	}
	require.NoError(t, e.Check())
	require.NoError(t, e.Close())
}

func TestList(t *testing.T) {
	rng := newRand(t)
	e := openChecked(t, testConfig(vfs.NewMem()))
	g := e.Group(1)
	twin := newStateTwin()
	b := g.NewBatch()
	for range 300 {
		twin.step(t, rng, b)
	}
	require.NoError(t, b.Commit())
	for range 300 {
		ns := uint32(rng.Intn(3))
		o := ListOptions{Limit: rng.Intn(5), MaxBytes: rng.Intn(2) * rng.Intn(600), KeysOnly: rng.Intn(2) == 0}
		if rng.Intn(2) == 0 {
			o.Prefix = randomKey(rng)
		}
		if rng.Intn(2) == 0 {
			o.StartAfter = randomKey(rng)
		}
		var want []string
		for _, k := range sortedKeys(twin.kv) {
			if k[0] == byte(ns) && strings.HasPrefix(k[1:], string(o.Prefix)) && (o.StartAfter == nil || k[1:] > string(o.StartAfter)) {
				want = append(want, k)
			}
		}
		items, more, err := g.List(ns, o)
		require.NoError(t, err)
		size := 0
		for i, item := range items {
			require.Equal(t, want[i], twinKey(ns, item.Key))
			v := twin.kv[want[i]]
			require.Equal(t, len(v.Data), item.Size)
			size += len(item.Key)
			if o.KeysOnly {
				require.Nil(t, item.Value.Data)
				v.Data = nil
			} else {
				size += item.Size
			}
			requireValue(t, v, item.Value)
		}
		require.Equal(t, len(items) < len(want), more)
		require.True(t, o.Limit == 0 || len(items) <= o.Limit)
		require.True(t, o.MaxBytes == 0 || size <= o.MaxBytes || len(items) == 1)
		if o.Limit == 0 && o.MaxBytes == 0 {
			require.False(t, more)
		}
	}
}

func TestScanAuxMayWrite(t *testing.T) {
	e := openChecked(t, testConfig(vfs.NewMem()))
	b := e.Group(1).NewBatch()
	for i := range 10 {
		require.NoError(t, b.PutAux(1, []byte{byte(i)}, []byte("x")))
	}
	n := 0
	require.NoError(t, b.ScanAux(1, nil, nil, func(k, v []byte) (bool, error) {
		n++
		if err := b.PutAux(1, []byte{k[0], 1}, bytes.Repeat([]byte("y"), 1<<16)); err != nil {
			return false, err
		}
		require.Equal(t, "x", string(v))
		return true, b.DeleteAux(1, k)
	}))
	require.Equal(t, 10, n)
	require.NoError(t, b.Commit())
	require.Len(t, scanAux(t, e.Group(1), 1, nil, nil, 100), 10)
}

func TestSnapshotAndStaging(t *testing.T) {
	rng := newRand(t)
	src := openChecked(t, testConfig(vfs.NewMem()))
	fs := vfs.NewCrashableMem()
	dst := open(t, testConfig(fs))
	old, twin, other := newStateTwin(), newStateTwin(), newStateTwin()
	fill := func(g *Group, tw *stateTwin, applied uint64) {
		b := g.NewBatch()
		for range 200 {
			tw.step(t, rng, b)
		}
		tw.meta = Meta{Applied: applied, AppliedTerm: 3, ConfigID: 4, Conf: &raftpb.ConfState{Voters: []uint64{1, 2}}}
		require.NoError(t, b.SetMeta(tw.meta))
		require.NoError(t, b.Commit())
	}
	fill(src.Group(9), twin, 100)
	fill(dst.Group(8), other, 1)
	fill(dst.Group(9), old, 10)
	require.NoError(t, dst.Flush())
	fill(dst.Group(9), old, 20)
	fill(dst.Group(10), newStateTwin(), 1)

	snap, err := src.Group(9).OpenSnapshot()
	require.NoError(t, err)
	fill(src.Group(9), twin.clone(), 101) // not seen by the snapshot
	require.EqualValues(t, 100, snap.Meta().Applied)
	st, err := dst.NewStaging(9)
	require.NoError(t, err)
	require.NoError(t, snap.Items(st.Add))
	require.NoError(t, snap.Close())
	require.NoError(t, st.Finish())
	requireState(t, dst.Group(9), old)

	view, err := dst.Group(9).OpenSnapshot() // stays what it was
	require.NoError(t, err)
	m, err := st.Install()
	require.NoError(t, err)
	require.EqualValues(t, 100, m.Applied)
	requireState(t, dst.Group(9), twin)
	requireState(t, dst.Group(8), other)
	n := 0
	require.NoError(t, view.Items(func(_, _ []byte) error { n++; return nil }))
	require.Equal(t, 1+len(old.kv)+len(old.aux), n)
	require.NoError(t, view.Close())

	durable, err := dst.Group(9).DurableApplied()
	require.NoError(t, err)
	require.EqualValues(t, 100, durable)
	crashed := fs.CrashClone(vfs.CrashCloneCfg{})
	require.NoError(t, dst.Check())
	require.NoError(t, dst.Close())
	dst = openChecked(t, testConfig(crashed))
	requireState(t, dst.Group(9), twin)
}

// A group that is destroyed is gone, also after a crash; its neighbours stay, and it can
// begin anew.
func TestDestroy(t *testing.T) {
	fs := vfs.NewCrashableMem()
	e := open(t, testConfig(fs))
	for _, id := range []uint64{1, 2, 3} {
		b := e.Group(id).NewBatch()
		require.NoError(t, b.SetMeta(Meta{Applied: 5, AppliedTerm: 1, ConfigID: 1, Conf: &raftpb.ConfState{Voters: []uint64{1}}}))
		for i := range 50 {
			require.NoError(t, b.Put(1, fmt.Appendf(nil, "key-%d", i), Value{Data: []byte("value"), Version: 5}))
		}
		require.NoError(t, b.PutAux('x', []byte("aux"), []byte("value")))
		require.NoError(t, b.Commit())
	}
	require.NoError(t, e.Flush())
	require.NoError(t, e.Group(2).Destroy())
	look := func(e *Engine) {
		meta, err := e.Group(2).Meta()
		require.NoError(t, err)
		require.Zero(t, meta)
		_, ok, err := e.Group(2).Get(1, []byte("key-7"))
		require.NoError(t, err)
		require.False(t, ok)
		_, ok, err = e.Group(2).GetAux('x', []byte("aux"))
		require.NoError(t, err)
		require.False(t, ok)
		for _, id := range []uint64{1, 3} {
			meta, err := e.Group(id).Meta()
			require.NoError(t, err)
			require.Equal(t, uint64(50), meta.Keys)
			_, ok, err := e.Group(id).Get(1, []byte("key-7"))
			require.NoError(t, err)
			require.True(t, ok)
		}
		require.NoError(t, e.Check())
	}
	look(e)
	left := fs.CrashClone(vfs.CrashCloneCfg{})
	require.NoError(t, e.Close())
	e = openChecked(t, testConfig(left))
	look(e)
	b := e.Group(2).NewBatch()
	require.NoError(t, b.SetMeta(Meta{Conf: &raftpb.ConfState{}}))
	require.NoError(t, b.Put(1, []byte("new"), Value{Data: []byte("value"), Version: 1}))
	require.NoError(t, b.Commit())
	meta, err := e.Group(2).Meta()
	require.NoError(t, err)
	require.Equal(t, uint64(1), meta.Keys, "it counts from nothing")
}
