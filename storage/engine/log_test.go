package engine

import (
	"fmt"
	"math"
	"math/rand"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// logTwin is the obvious log: a slice.
type logTwin struct {
	hard      *raftpb.HardState
	trunc     uint64
	truncTerm uint64
	entries   []*raftpb.Entry
}

func (l *logTwin) last() uint64 { return l.trunc + uint64(len(l.entries)) }

func (l *logTwin) clone() *logTwin {
	c := *l
	c.entries = append([]*raftpb.Entry(nil), l.entries...)
	return &c
}

func (l *logTwin) append(es []*raftpb.Entry) {
	l.entries = append(l.entries[:es[0].GetIndex()-l.trunc-1:es[0].GetIndex()-l.trunc-1], es...)
}

func (l *logTwin) truncate(index, term uint64) {
	l.entries = l.entries[index-l.trunc:]
	l.trunc, l.truncTerm = index, term
}

func (l *logTwin) reset(index, term uint64) {
	l.entries, l.trunc, l.truncTerm = nil, index, term
}

func (l *logTwin) term(index uint64) uint64 {
	if index == l.trunc {
		return l.truncTerm
	}
	return l.entries[index-l.trunc-1].GetTerm()
}

// requireLog compares a group with its twin, entry by entry.
func requireLog(t *testing.T, e *Engine, group uint64, want *logTwin) {
	t.Helper()
	st, err := e.OpenLog(group)
	require.NoError(t, err)
	require.Equal(t, want.trunc, st.Truncated)
	require.Equal(t, want.truncTerm, st.TruncatedTerm)
	require.Equal(t, want.last(), st.Last)
	require.True(t, proto.Equal(want.hard, st.Hard), "%v, want %v", st.Hard, want.hard)
	var got []*raftpb.Entry
	for i := want.trunc + 1; i <= want.last(); {
		es, err := e.LogEntries(group, i, want.last()+1, 200)
		require.NoError(t, err)
		require.NotEmpty(t, es)
		got = append(got, es...)
		i += uint64(len(es))
	}
	require.Len(t, got, len(want.entries))
	for i := range got {
		require.True(t, proto.Equal(want.entries[i], got[i]), "%v, want %v", got[i], want.entries[i])
		term, err := e.LogTerm(group, got[i].GetIndex())
		require.NoError(t, err)
		require.Equal(t, got[i].GetTerm(), term)
	}
	term, err := e.LogTerm(group, want.trunc)
	require.NoError(t, err)
	require.Equal(t, want.truncTerm, term)
	_, err = e.LogEntries(group, want.last()+1, want.last()+2, 1)
	require.ErrorIs(t, err, ErrUnavailable)
	_, err = e.LogTerm(group, want.last()+1)
	require.ErrorIs(t, err, ErrUnavailable)
	if want.trunc > 0 {
		_, err = e.LogEntries(group, want.trunc, want.trunc+1, 1)
		require.ErrorIs(t, err, ErrCompacted)
		_, err = e.LogTerm(group, want.trunc-1)
		require.ErrorIs(t, err, ErrCompacted)
	}
}

// isLog tells whether the group's log is the twin's.
func isLog(t *testing.T, e *Engine, group uint64, want *logTwin) bool {
	t.Helper()
	st, err := e.OpenLog(group)
	require.NoError(t, err)
	if st.Last != want.last() || st.Truncated != want.trunc || !proto.Equal(st.Hard, want.hard) {
		return false
	}
	es, err := e.LogEntries(group, st.Truncated+1, st.Last+1, math.MaxUint64)
	if st.Last == st.Truncated {
		return true
	}
	require.NoError(t, err)
	return slices.EqualFunc(es, want.entries, func(a, b *raftpb.Entry) bool { return proto.Equal(a, b) })
}

// requireEither is for a crash in the middle of a batch.
func requireEither(t *testing.T, e *Engine, group uint64, before, after *logTwin) {
	t.Helper()
	if isLog(t, e, group, after) {
		before = after
	}
	requireLog(t, e, group, before)
}

// step adds one random operation to the batch and to the twin.
func (l *logTwin) step(t *testing.T, rng *rand.Rand, b *LogBatch, group uint64, maxEntries int) {
	switch p := rng.Intn(100); {
	case p < 60: // append, or overwrite a suffix
		first := l.last() + 1
		if len(l.entries) > 0 && rng.Intn(3) == 0 {
			first -= uint64(rng.Intn(min(len(l.entries), 80)))
		}
		term := uint64(rng.Intn(5)) + l.term(first-1)
		es := entriesOf(first, first+1+uint64(rng.Intn(maxEntries)), term)
		for _, e := range es {
			e.Data = make([]byte, rng.Intn(200))
			rng.Read(e.Data)
		}
		require.NoError(t, b.Append(group, es))
		l.append(es)
	case p < 80:
		hs := hardState(rng.Uint64(), rng.Uint64(), rng.Uint64())
		require.NoError(t, b.SetHardState(group, hs))
		l.hard = hs
	case p < 95:
		if len(l.entries) > 0 {
			index := l.trunc + 1 + uint64(rng.Intn(len(l.entries)))
			term := l.term(index)
			require.NoError(t, b.Truncate(group, index, term))
			l.truncate(index, term)
		}
	default:
		index := l.last() + uint64(rng.Intn(10))
		if rng.Intn(2) == 0 && l.last() > 0 {
			index = 1 + uint64(rng.Intn(int(l.last())))
		}
		require.NoError(t, b.Reset(group, index, 7))
		l.reset(index, 7)
	}
}

// What was acknowledged survives every crash; a batch is there as a whole or not at
// all; the cache never differs from the disk.
func TestLogAgainstTwin(t *testing.T) {
	rng := newRand(t)
	fs := vfs.NewCrashableMem()
	cfg := testConfig(fs)
	cfg.LogCacheBytes = 4 << 10
	e := open(t, cfg)
	const groups = 3
	twins := make([]*logTwin, groups)
	for g := range twins {
		twins[g] = &logTwin{}
	}
	for range 400 {
		b := e.NewLogBatch()
		for range 1 + rng.Intn(4) {
			g := rng.Intn(groups)
			twins[g].step(t, rng, b, uint64(g), 60)
		}
		require.NoError(t, b.Commit(true))
		switch rng.Intn(12) {
		case 0: // in order
			require.NoError(t, e.Close())
			e = open(t, cfg)
		case 1: // crash
			fs = fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.Intn(101), RNG: newRandV2(rng)})
			require.NoError(t, e.Close())
			cfg.FS = fs
			e = open(t, cfg)
		case 2:
			require.NoError(t, e.log.Flush())
		}
		g := rng.Intn(groups)
		requireLog(t, e, uint64(g), twins[g])
	}
	for g := range twins {
		requireLog(t, e, uint64(g), twins[g])
	}
	require.NoError(t, e.Check())
	require.NoError(t, e.Close())
}

// A batch that was not synced may be lost, but never in part.
func TestUnsyncedBatchIsWholeOrAbsent(t *testing.T) {
	rng := newRand(t)
	for range 30 {
		fs := vfs.NewCrashableMem()
		e := open(t, testConfig(fs))
		before, after := &logTwin{}, &logTwin{}
		commitLog(t, e, func(b *LogBatch) error {
			es := entriesOf(1, 50, 1)
			before.append(es)
			return b.Append(1, es)
		})
		after = before.clone()
		b := e.NewLogBatch()
		after.step(t, rng, b, 1, 300)
		after.step(t, rng, b, 1, 300)
		require.NoError(t, b.Commit(false))
		crashed := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.Intn(101), RNG: newRandV2(rng)})
		require.NoError(t, e.Close())
		e = open(t, testConfig(crashed))
		requireEither(t, e, 1, before, after)
		require.NoError(t, e.Close())
	}
}

func TestLogRefusesWhatDoesNotFit(t *testing.T) {
	e := openChecked(t, testConfig(vfs.NewMem()))
	commitLog(t, e, func(b *LogBatch) error { return b.Append(1, entriesOf(1, 11, 1)) })
	commitLog(t, e, func(b *LogBatch) error { return b.Truncate(1, 4, 1) })
	for name, f := range map[string]func(b *LogBatch) error{
		"gap":             func(b *LogBatch) error { return b.Append(1, entriesOf(12, 13, 1)) },
		"truncated":       func(b *LogBatch) error { return b.Append(1, entriesOf(4, 6, 1)) },
		"not contiguous":  func(b *LogBatch) error { return b.Append(1, append(entriesOf(5, 6, 1), entriesOf(7, 8, 1)...)) },
		"truncate beyond": func(b *LogBatch) error { return b.Truncate(1, 11, 1) },
	} {
		b := e.NewLogBatch()
		require.Error(t, f(b), name)
		b.Discard()
		require.Error(t, b.Commit(true), name)
	}
	commitLog(t, e, func(b *LogBatch) error { return b.Truncate(1, 3, 1) }) // done already
	st, err := e.OpenLog(1)
	require.NoError(t, err)
	require.Equal(t, LogState{Truncated: 4, TruncatedTerm: 1, Last: 10}, st)
	es, err := e.LogEntries(1, 5, math.MaxUint64, math.MaxUint64)
	require.NoError(t, err)
	require.Len(t, es, 6)
	es, err = e.LogEntries(1, 5, 5, 1)
	require.NoError(t, err)
	require.Empty(t, es)
}

// What a batch appends and truncates again has still overwritten what followed it.
func TestOverwrittenThenTruncated(t *testing.T) {
	e := openChecked(t, testConfig(vfs.NewMem()))
	commitLog(t, e, func(b *LogBatch) error { return b.Append(1, entriesOf(1, 11, 1)) })
	commitLog(t, e, func(b *LogBatch) error {
		require.NoError(t, b.Append(1, entriesOf(4, 6, 2)))
		return b.Truncate(1, 5, 2)
	})
	for i := uint64(6); i <= 10; i++ {
		_, err := e.LogTerm(1, i)
		require.ErrorIs(t, err, ErrUnavailable, i)
	}
	commitLog(t, e, func(b *LogBatch) error { return b.Append(1, entriesOf(6, 8, 3)) })
	term, err := e.LogTerm(1, 7)
	require.NoError(t, err)
	require.EqualValues(t, 3, term)
	_, err = e.LogTerm(1, 8)
	require.ErrorIs(t, err, ErrUnavailable)
}

func TestTailStaysInItsBounds(t *testing.T) {
	cfg := testConfig(vfs.NewMem())
	cfg.LogCacheBytes = 256 << 10
	e := openChecked(t, cfg)
	next := map[uint64]uint64{}
	for i := range 300 {
		g := uint64(i % 5)
		commitLog(t, e, func(b *LogBatch) error {
			es := entriesOf(next[g]+1, next[g]+11, 1)
			for _, e := range es {
				e.Data = make([]byte, 1<<10)
			}
			next[g] += 10
			return b.Append(g, es)
		})
		require.LessOrEqual(t, e.logCached.Load(), cfg.LogCacheBytes+5*tailKeepBytes, fmt.Sprint(i))
	}
	require.Positive(t, e.Metrics().LogCachedBytes)
	for g := range next {
		commitLog(t, e, func(b *LogBatch) error { return b.Reset(g, 1000, 1) })
	}
	require.Zero(t, e.logCached.Load())
}
