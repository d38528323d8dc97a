package workload

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvd-io/kvd/jepsen/history"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var settings = Settings{Keys: 8, MinSize: 16, MaxSize: 4096, OpsPerKey: 200, UnknownsPerKey: 5}

func process(id int, seed uint64) *Process {
	return &Process{ID: id, Rng: rand.New(rand.NewPCG(seed, uint64(id)))}
}

// perKey counts the operations that name a key.
func perKey(count map[string]int, op *history.Op) {
	if op.Kind == history.Many {
		for _, k := range op.Keys {
			count[k]++
		}
		return
	}
	count[op.Key]++
}

func TestKeysAreRetiredAfterTheirOperations(t *testing.T) {
	for _, name := range []string{"register", "session", "stale", "once"} {
		w, err := New(name, settings)
		require.NoError(t, err)
		p, count := process(1, 1), map[string]int{}
		for range 10000 {
			op := w.Next(p)
			perKey(count, op)
			op.Outcome = history.Fail
			w.Done(p, op)
		}
		for key, n := range count {
			require.LessOrEqual(t, n, settings.OpsPerKey, "%s: %s", name, key)
		}
		all, active := w.pool.Names()
		require.Greater(t, len(all), 10000/settings.OpsPerKey, name)
		require.Len(t, active, settings.Keys)
	}
}

func TestKeysAreRetiredAfterUnknowns(t *testing.T) {
	for _, name := range []string{"register", "lock", "once"} {
		w, err := New(name, settings)
		require.NoError(t, err)
		p, unknown := process(1, 1), map[string]int{}
		for range 3000 {
			op := w.Next(p)
			op.Outcome = history.Fail
			if op.Kind.Writes() {
				op.Outcome = history.Unknown
				unknown[op.Key]++
			}
			w.Done(p, op)
			if p.look { // or the workload lock would look for ever
				p.look = false
			}
		}
		for key, n := range unknown {
			require.LessOrEqual(t, n, settings.UnknownsPerKey, "%s: %s", name, key)
		}
		require.Greater(t, len(unknown), 3000/100, name)
	}
}

func TestSetsAreReplacedWhenFull(t *testing.T) {
	w, err := New("set", settings)
	require.NoError(t, err)
	p, elements := process(1, 1), map[string]map[string]bool{}
	for range 3000 {
		op := w.Next(p)
		if op.Kind == history.Add {
			set, element, ok := strings.Cut(strings.TrimPrefix(op.Key, "set/"), "/")
			require.True(t, ok)
			if elements[set] == nil {
				elements[set] = map[string]bool{}
			}
			require.False(t, elements[set][element], "an element is added once")
			elements[set][element] = true
		}
		op.Outcome = history.OK
		w.Done(p, op)
	}
	for set, e := range elements {
		require.LessOrEqual(t, len(e), setSize, set)
	}
	require.Greater(t, len(elements), 10)
}

// The same seed and the same answers give the same operations.
func TestSeedsGiveTheSameOperations(t *testing.T) {
	for _, name := range Names() {
		play := func(seed uint64) []history.Op {
			w, err := New(name, settings)
			require.NoError(t, err)
			p := process(3, seed)
			var ops []history.Op
			for i := range 300 {
				op := w.Next(p)
				ops = append(ops, *op)
				op.Outcome, op.Version = history.OK, uint64(i+1)
				w.Done(p, op)
			}
			return ops
		}
		require.Equal(t, play(5), play(5), name)
		require.NotEqual(t, play(5), play(6), name)
	}
}

// Values are never used twice, sizes stay within bounds, and conditions name versions.
func TestOperationsAreSound(t *testing.T) {
	for _, name := range Names() {
		w, err := New(name, settings)
		require.NoError(t, err)
		p, seen, kinds := process(1, 9), map[uint64]bool{}, map[history.Kind]int{}
		for i := range 2000 {
			op := w.Next(p)
			kinds[op.Kind]++
			if op.Kind.Stores() {
				require.False(t, seen[op.Value])
				seen[op.Value] = true
				require.GreaterOrEqual(t, op.Size, settings.MinSize)
				require.LessOrEqual(t, op.Size, settings.MaxSize)
			}
			if op.Kind == history.Swap || op.Kind == history.Drop {
				require.NotZero(t, op.Expect)
			}
			op.Outcome, op.Version = history.OK, uint64(i+1)
			w.Done(p, op)
		}
		require.GreaterOrEqual(t, len(kinds), 3, "%s: %v", name, kinds)
		for _, ops := range w.Final(4) {
			require.NotEmpty(t, ops)
		}
	}
	_, err := New("bank", settings)
	require.ErrorContains(t, err, "bank")
}

// Who holds a lock gives back the version by which it was taken; after a lost answer it
// looks first.
func TestLockHolder(t *testing.T) {
	w, err := New("lock", settings)
	require.NoError(t, err)
	p := process(1, 1)
	add := w.Next(p)
	require.Equal(t, history.Add, add.Kind)
	add.Outcome = history.Unknown
	w.Done(p, add)
	get := w.Next(p)
	require.Equal(t, history.Get, get.Kind)
	require.Equal(t, add.Key, get.Key)
	get.Outcome = history.Fail
	w.Done(p, get)
	get = w.Next(p)
	require.Equal(t, history.Get, get.Kind, "it looks again")
	get.Outcome, get.Got, get.Version = history.OK, add.Value, 42
	w.Done(p, get)
	for {
		op := w.Next(p)
		if op.Kind == history.Get {
			op.Outcome, op.Got, op.Version = history.OK, add.Value, 42
			w.Done(p, op)
			continue
		}
		require.Equal(t, history.Drop, op.Kind)
		require.Equal(t, uint64(42), op.Expect)
		op.Outcome = history.OK
		w.Done(p, op)
		break
	}
	require.Equal(t, history.Add, w.Next(p).Kind)
}

// More processes have more locks, so that few of them wait for one.
func TestLocksForManyProcesses(t *testing.T) {
	many := settings
	many.Keys, many.Processes = 8, 24
	w, err := New("lock", many)
	require.NoError(t, err)
	require.Len(t, w.pool.mu.active, 8)
	many.Processes = 3
	w, err = New("lock", many)
	require.NoError(t, err)
	require.Len(t, w.pool.mu.active, 2)
}
