package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
)

// mapStore is a store in memory, of which answers can be changed.
type mapStore struct {
	mu     sync.Mutex
	values map[string][]byte
	put    func(key string, value []byte) ([]byte, error) // what is kept; nil: the value
	get    func(key string, value []byte) ([]byte, error)
	shards uint32
}

func newMapStore(shards uint32) *mapStore {
	return &mapStore{values: map[string][]byte{}, shards: shards}
}

func (s *mapStore) ShardOf(key []byte) uint32 {
	sum := uint32(0)
	for _, b := range key {
		sum = sum*31 + uint32(b)
	}
	return sum%s.shards + 1
}

func (s *mapStore) Put(ctx context.Context, key, value []byte, _ ...client.WriteOption) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept, err := bytes.Clone(value), ctx.Err()
	if err == nil && s.put != nil {
		kept, err = s.put(string(key), kept)
	}
	if err == nil && kept != nil {
		s.values[string(key)] = kept
	}
	return 1, err
}

func (s *mapStore) GetInto(ctx context.Context, key, _ []byte, _ ...client.ReadOption) (client.Value, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	value, ok := s.values[string(key)]
	switch {
	case ctx.Err() != nil:
		return client.Value{}, ctx.Err()
	case !ok:
		return client.Value{}, client.ErrNotFound
	case s.get != nil:
		v, err := s.get(string(key), bytes.Clone(value))
		return client.Value{Data: v}, err
	}
	return client.Value{Data: bytes.Clone(value)}, nil
}

func startHeld(t *testing.T, s *mapStore, workers int) *heldLoad {
	l, err := newHeldLoad([]store{s}, int(s.shards), workers, 64, time.Minute, 1)
	require.NoError(t, err)
	t.Cleanup(l.end)
	require.NoError(t, l.start(context.Background()))
	return l
}

func (l *heldLoad) ops(kind access) uint64 {
	return l.completed(l.began, time.Now().Add(time.Second), func(uint32) bool { return true })[kind].ops
}

// untilTrue looks until ok, or the test is given up.
func untilTrue(t *testing.T, ok func() bool) {
	t.Helper()
	for !ok() {
		select {
		case <-time.After(time.Millisecond):
		case <-t.Context().Done():
			t.Fatal("given up")
		}
	}
}

// TestHeldLoad: every shard has workers that read and workers that write, each on keys of
// that shard, no key has two writers, and a store that does what it says is found to.
func TestHeldLoad(t *testing.T) {
	s := newMapStore(4)
	l := startHeld(t, s, 16)
	untilTrue(t, func() bool { return l.ops(read) > 1000 && l.ops(written) > 1000 })
	l.end()
	kinds := map[uint32][accesses]int{}
	writers := map[string]int{}
	for _, w := range l.workers {
		k := kinds[w.shard]
		k[w.kind]++
		kinds[w.shard] = k
		for _, key := range w.keys {
			require.Equal(t, w.shard, s.ShardOf(key.name))
			if w.kind == written {
				writers[string(key.name)]++
			}
		}
	}
	require.Equal(t, map[uint32][accesses]int{1: {2, 2}, 2: {2, 2}, 3: {2, 2}, 4: {2, 2}}, kinds)
	require.Len(t, writers, 8*keysOfWriter)
	for k, n := range writers {
		require.Equal(t, 1, n, k)
	}
	count, wrong, first := l.failures()
	require.Zero(t, count)
	require.Zero(t, wrong, first)
	lost, err := l.verify(context.Background(), s)
	require.NoError(t, err)
	require.Empty(t, lost)
	h := l.latencies()
	require.EqualValues(t, l.ops(read), h[read].TotalCount())
	require.EqualValues(t, l.ops(written), h[written].TotalCount())
	require.Zero(t, l.latencies()[read].TotalCount(), "they were taken")
}

// TestHeldLoadFindsLoss: an acknowledged put that was not kept, and one that was undone.
func TestHeldLoadFindsLoss(t *testing.T) {
	s := newMapStore(1)
	l := startHeld(t, s, 2)
	untilTrue(t, func() bool { return l.ops(written) > 100 })
	l.end()
	victim := l.keys[3]
	s.values[string(victim.name)] = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, victim.index), victim.acked.Load()-1)
	s.values[string(victim.name)] = append(s.values[string(victim.name)], make([]byte, 48)...)
	delete(s.values, string(l.keys[5].name))
	lost, err := l.verify(context.Background(), s)
	require.NoError(t, err)
	require.Len(t, lost, 2)
	require.Contains(t, lost[0], string(victim.name))
	require.Contains(t, lost[1], "is absent")
}

// TestHeldLoadFindsWrongAnswers: an old value, one that nobody sent, and another key's.
func TestHeldLoadFindsWrongAnswers(t *testing.T) {
	for name, change := range map[string]func(v []byte){
		"old":         func(v []byte) { binary.LittleEndian.PutUint64(v[8:], 0) },
		"never sent":  func(v []byte) { binary.LittleEndian.PutUint64(v[8:], math.MaxUint64) },
		"another key": func(v []byte) { binary.LittleEndian.PutUint64(v, math.MaxUint64) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newMapStore(1)
			s.get = func(_ string, v []byte) ([]byte, error) { change(v); return v, nil }
			l := startHeld(t, s, 2)
			untilTrue(t, func() bool { _, wrong, _ := l.failures(); return wrong > 0 })
			l.end()
			count, _, first := l.failures()
			require.Zero(t, count, "they are answers")
			require.Contains(t, first[0], errWrong.Error())
		})
	}
}

// TestHeldLoadCountsFailures: of reads and writes apart. What failed may have been applied.
func TestHeldLoadCountsFailures(t *testing.T) {
	s := newMapStore(1)
	l := startHeld(t, s, 2)
	s.mu.Lock()
	n := 0
	s.put = func(_ string, v []byte) ([]byte, error) {
		if n++; n%2 == 0 {
			return v, nil
		}
		s.values["applied all the same"] = v
		return nil, errors.New("no answer")
	}
	s.get = func(_ string, v []byte) ([]byte, error) { return nil, errors.New("gone") }
	s.mu.Unlock()
	untilTrue(t, func() bool { c, _, _ := l.failures(); return c[read] > 10 && c[written] > 10 })
	l.end()
	_, wrong, first := l.failures()
	require.Zero(t, wrong)
	require.LessOrEqual(t, len(first), keptFailures)
	s.get = nil
	lost, err := l.verify(context.Background(), s)
	require.NoError(t, err)
	require.Empty(t, lost)
}

// TestHeldLoadPace: no worker begins more often than it may.
func TestHeldLoadPace(t *testing.T) {
	s := newMapStore(1)
	l, err := newHeldLoad([]store{s}, 1, 2, 64, time.Minute, 1)
	require.NoError(t, err)
	l.period = 10 * time.Millisecond
	require.NoError(t, l.start(context.Background()))
	untilTrue(t, func() bool { return l.ops(read) > 5 && l.ops(written) > 5 })
	l.end()
	most := uint64(time.Since(l.began)/l.period) + 1
	require.LessOrEqual(t, l.ops(read), most)
	require.LessOrEqual(t, l.ops(written), most)
}

// TestWatch: only what began behind the event counts, each shard and kind once.
func TestWatch(t *testing.T) {
	from := time.Now()
	w := newWatch(from, []uint32{2, 5})
	at := func(ms int) time.Time { return from.Add(time.Duration(ms) * time.Millisecond) }
	w.answered(2, read, at(-1), at(10))
	_, ok := w.since(from, 2, read)
	require.False(t, ok, "it began before")
	w.answered(7, read, at(1), at(2)) // nobody asked
	w.answered(2, read, at(1), at(20))
	w.answered(2, read, at(1), at(30))
	took, ok := w.since(at(-5), 2, read)
	require.True(t, ok)
	require.Equal(t, 25*time.Millisecond, took, "since the signal, and the first of them")
	w.answered(2, written, at(1), at(40))
	w.answered(5, read, at(1), at(50))
	select {
	case <-w.done:
		t.Fatal("shard 5 has answered no write")
	default:
	}
	w.answered(5, written, at(1), at(60))
	<-w.done
	<-newWatch(from, nil).done
}

// TestCompleted sums up what lies within a time, of the shards that are wanted.
func TestCompleted(t *testing.T) {
	s := newMapStore(2)
	l, err := newHeldLoad([]store{s}, 2, 4, 64, time.Minute, 1)
	require.NoError(t, err)
	l.began = time.Now()
	at := func(ms int) time.Time { return l.began.Add(time.Duration(ms) * time.Millisecond) }
	for _, w := range l.workers {
		w.record(at(0), at(15))
		w.record(at(15), at(105))
		w.record(at(105), at(195))
		w.record(at(200), at(201))
	}
	sum := l.completed(at(100), at(200), func(shard uint32) bool { return shard == 2 })
	require.Equal(t, [accesses]tally{{2, 180 * time.Millisecond}, {2, 180 * time.Millisecond}}, sum)
	require.Equal(t, 90*time.Millisecond, sum[read].mean())
	require.Zero(t, tally{}.mean())
	f := fall{before: l.completed(at(0), at(100), func(uint32) bool { return true }), during: sum}
	require.Equal(t, 1.0, f.ratio(read))
	require.Equal(t, 6.0, f.slowness(read))
}

func TestCoresUsed(t *testing.T) {
	s := time.Second
	nodes, clients := coresUsed(map[int]time.Duration{1: 2 * s, 2: 3 * s, 9: s}, map[int]time.Duration{1: 4 * s, 3: s, 9: 2 * s}, 9, 2)
	require.Equal(t, 1.5, nodes, "node 2 has ended, node 3 came")
	require.Equal(t, 0.5, clients)
}

func TestPercentile(t *testing.T) {
	xs := []float64{5, 1, 4, 2, 3}
	require.Equal(t, 3.0, percentile(xs, 50))
	require.Equal(t, 5.0, percentile(xs, 99))
	require.Equal(t, 1.0, percentile(xs, 20))
	require.Equal(t, 2.0, percentile(xs, 21))
	require.Zero(t, percentile(nil, 50))
	require.Equal(t, []float64{5, 1, 4, 2, 3}, xs)
}

func TestOffMean(t *testing.T) {
	require.Zero(t, offMean([]float64{3, 3, 3}))
	require.Equal(t, 0.75, offMean([]float64{2, 2, 2, 0.5, 3.5}))
	require.Equal(t, 0.5, offMean([]float64{1, 2, 3}))
	require.True(t, math.IsInf(offMean([]float64{0, 0}), 1), "nothing is nowhere")
}

// TestLifeReport: both forms say the same, and a bound that was missed is named.
func TestLifeReport(t *testing.T) {
	r := &lifeReport{Run: "failover", Columns: []string{"kill", "ratio"}, Bounds: []bound{
		atMost("failed reads", 0, 0, "reads"), atMost("p99", 3.01, 3, "election timeouts"), atLeast("ratio", 0.9, 0.9, "ratio"),
	}, Notes: []string{"a note"}, Failures: []string{"a failure"}, LoadBefore: "0.10 0.20 0.30", Commit: "abc"}
	r.row(1, 0.123456)
	require.Equal(t, []string{"p99 is 3.01 election timeouts, want <= 3"}, r.missed())
	var table, doc bytes.Buffer
	require.NoError(t, r.write(&table, "table"))
	for _, want := range []string{"0.1235", "3.01", "NO", "a note", "a failure", "0.10 0.20 0.30", "abc"} {
		require.Contains(t, table.String(), want)
	}
	require.NoError(t, r.write(&doc, "json"))
	var back lifeReport
	require.NoError(t, json.Unmarshal(doc.Bytes(), &back))
	require.Equal(t, r.Bounds, back.Bounds)
}

// TestLifeBadInput: each is refused before anything is started.
func TestLifeBadInput(t *testing.T) {
	for _, c := range []struct {
		args []string
		text string
	}{
		{[]string{"failover", "--kills", "0"}, "--kills 0"},
		{[]string{"failover", "--clients", "8", "--shards", "8"}, "two clients at least"},
		{[]string{"rolling", "--rounds", "0"}, "--rounds 0"},
		{[]string{"rolling", "--size", "8"}, "--size 8"},
		{[]string{"rolling", "--rate", "-1"}, "--rate -1"},
		{[]string{"rolling", "--output", "xml"}, `--output "xml"`},
		{[]string{"join", "--bytes", "many"}, "want a size such as"},
		{[]string{"join", "--bytes", "1KiB"}, "one at least"},
	} {
		cmd := newCommand()
		cmd.SetArgs(c.args)
		require.ErrorContains(t, cmd.ExecuteContext(t.Context()), c.text, c.args)
	}
}
