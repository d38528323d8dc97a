package arena

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/storage/layout"
)

func TestRecords(t *testing.T) {
	a, err := New(Config{Shards: 1, Slots: 3, BootID: 55})
	require.NoError(t, err)
	defer func() { require.NoError(t, a.Close()) }()
	for i := range 3 {
		rec, err := a.NewRecord(uint64(i+10), uint64(i+20), 5)
		require.NoError(t, err)
		require.EqualValues(t, i, rec.Slot())
		want := layout.Record{Term: 5, LayoutGen: 1, Shard: uint64(i + 10), Replica: uint64(i + 20), BootID: 55}
		require.Equal(t, want, rec.Load())
		line, ok := layout.DecodeRecord(a.ControlMemory().Bytes()[i*layout.RecordSize:])
		require.True(t, ok)
		require.Equal(t, want, line)

		rec.SetTerm(9)
		rec.SetTerm(8)
		rec.SetServedTerm(9)
		rec.SetConfigID(4)
		rec.SetConfigID(3)
		rec.SetApplied(100)
		rec.SetApplied(99)
		want.Term, want.ServedTerm, want.ConfigID, want.Applied = 9, 9, 3, 100
		require.Equal(t, want, rec.Load())
		rec.SetServedTerm(0)
		require.Zero(t, rec.Load().ServedTerm)

		rec.SetServedTerm(9)
		rec.Retire()
		rec.SetTerm(10)
		rec.SetServedTerm(10)
		require.EqualValues(t, uint64(layout.RetiredTerm), rec.Load().Term)
		require.Zero(t, rec.Load().ServedTerm)
	}
	for range 3 {
		_, err = a.NewRecord(1, 1, 1)
		require.ErrorIs(t, err, ErrNoSlot, "a retired slot is not used again")
	}
}

// Identity is published last: before, the record is nobody's.
func TestRecordIsPublishedLast(t *testing.T) {
	a, err := New(Config{Shards: 1, BootID: 55})
	require.NoError(t, err)
	defer func() { require.NoError(t, a.Close()) }()
	rec, err := a.NewRecord(1, 2, 3)
	require.NoError(t, err)
	require.Equal(t, rec.words, a.ControlMemory().Bytes()[:layout.RecordSize])
	require.EqualValues(t, 4096*layout.RecordSize, a.ControlMemory().Size())
	require.GreaterOrEqual(t, a.ControlMemory().FD(), 0, "it can be handed to other processes")
}

func TestConfigIsChecked(t *testing.T) {
	for name, cfg := range map[string]Config{
		"no shards":       {},
		"slots":           {Shards: 1, Slots: -1},
		"chunk not pages": {Shards: 1, MinChunkBytes: 5000},
		"chunk too large": {Shards: 1, MaxChunkBytes: layout.MaxChunkSize * 2},
		"min over max":    {Shards: 1, MinChunkBytes: 1 << 20, MaxChunkBytes: 1 << 19},
		"no page":         {Shards: 1, LimitBytes: 100},
		"quarantine":      {Shards: 1, Quarantine: -1},
	} {
		_, err := New(cfg)
		require.Error(t, err, name)
	}
}
