package server

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"golang.org/x/sync/errgroup"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
	"github.com/kvd-io/kvd/storage/layout"
)

// watched looks, at each entry and each load, at what readers can see just then.
type watched struct {
	*shard
	rig *rig
}

func (w watched) apply(b *engine.Batch, index uint64, cmd *kvdv1.Command) (any, error) {
	t, before := w.rig.t, w.appliedIndex()
	meta, err := w.eng.Meta()
	require.NoError(t, err)
	require.Equal(t, before, meta.Applied, "the engine is ahead of the memory")
	require.Equal(t, before, w.record.Load().Applied, "applied is ahead of the memory")
	result, err := w.shard.apply(b, index, cmd)
	if op := cmd.GetPut(); op != nil {
		o, found := w.rig.lookup(op.GetNamespaceId(), op.GetKey())
		require.Equal(t, layout.AnswerFound, found, "the memory does not show the entry when it was applied")
		require.Equal(t, index, o.Version)
	}
	return result, err
}

func (w watched) load(meta engine.Meta) error {
	require.Less(w.rig.t, w.record.Load().Applied, meta.Applied, "applied is ahead of the memory")
	require.Less(w.rig.t, w.appliedIndex(), meta.Applied)
	require.GreaterOrEqual(w.rig.t, w.revealedIndex(), meta.Applied, "the engine shows more than what is owned up to")
	return w.shard.load(meta)
}

// The memory shows an entry before the control record counts it, before the engine
// shows it and before its result is returned.
func TestOrderOfApplying(t *testing.T) {
	r := newRig(t, smallLimits, 16<<20)
	r.shard.machine.content = watched{r.shard, r}
	for range 20 {
		var entries []raft.Entry
		from := r.shard.appliedIndex()
		for i := range uint64(10) {
			entries = append(entries, command(t, from+1+i, putCommand(1, put(1, fmt.Sprint("key", i%4), fmt.Sprint(i)))))
		}
		for i, res := range r.apply(entries...) {
			require.Equal(t, twinResult{applied, from + 1 + uint64(i)}, comparable(res))
		}
		require.Equal(t, from+10, r.record.Load().Applied)
		require.Equal(t, from+10, r.shard.appliedIndex())
		v, _, err := r.shard.eng.Get(1, []byte("key1"))
		require.NoError(t, err)
		require.Equal(t, from+10, v.Version)
	}
	to := newRig(t, smallLimits, 16<<20)
	to.shard.machine.content = watched{to.shard, to}
	r.send(to)
	require.Equal(t, r.shard.appliedIndex(), to.record.Load().Applied)
}

// breaking closes the engine under the batch, so that its commit fails.
type breaking struct {
	*shard
	rig *rig
}

func (w breaking) apply(b *engine.Batch, index uint64, cmd *kvdv1.Command) (any, error) {
	result, err := w.shard.apply(b, index, cmd)
	require.NoError(w.rig.t, w.rig.eng.Close())
	return result, err
}

// A commit that fails shows nothing and answers nobody; what it might have shown is
// covered by revealed all the same.
func TestFailedCommitIsNotCounted(t *testing.T) {
	r := &rig{t: t, fs: vfs.NewMem(), limits: smallLimits, bytes: 16 << 20, shards: 1}
	r.open()
	defer func() { require.NoError(t, r.arena.Close()) }()
	r.shard.machine.content = breaking{r.shard, r}
	_, err := r.shard.Apply([]raft.Entry{command(t, 2, putCommand(1, put(1, "key", "v")))}, 2, 1)
	require.ErrorIs(t, err, engine.ErrClosed)
	require.EqualValues(t, 1, r.shard.appliedIndex())
	require.EqualValues(t, 2, r.shard.revealedIndex())
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	require.Error(t, r.shard.waitApplied(ctx, 2))
	require.Empty(t, r.shard.mu.waiters, "who stopped waiting is forgotten")
}

// Readers that run all the while never catch the engine or the counts ahead of the
// memory, and an answer's index covers what it reveals.
func TestOrderSeenByReaders(t *testing.T) {
	r := newRig(t, smallLimits, 16<<20)
	key := []byte("key")
	r.one(putCommand(1, put(1, "key", "v")))
	var done atomic.Bool
	var readers errgroup.Group
	see := func(what string, read func() (uint64, error), at func() uint64) {
		readers.Go(func() error {
			for !done.Load() {
				seen, err := read()
				if err != nil {
					return err
				}
				if now := at(); now < seen {
					return fmt.Errorf("%s: %d, but then %d", what, seen, now)
				}
			}
			return nil
		})
	}
	inMemory := func() uint64 {
		loc, _ := r.shard.space(1).Lookup(key)
		return loc.Version
	}
	inEngine := func() (uint64, error) {
		v, _, err := r.shard.eng.Get(1, key)
		return v.Version, err
	}
	see("engine, then memory", inEngine, inMemory)
	see("engine, then revealed", inEngine, r.shard.revealedIndex)
	see("applied word, then memory", func() (uint64, error) { return r.record.Load().Applied, nil }, inMemory)
	see("waited, then engine", func() (uint64, error) {
		next := r.shard.appliedIndex() + 1
		return next, r.shard.waitApplied(context.Background(), next)
	}, func() uint64 {
		v, _ := inEngine()
		return v
	})
	for range 150 {
		var entries []raft.Entry
		from := r.shard.appliedIndex()
		for i := range uint64(50) {
			entries = append(entries, command(t, from+1+i, putCommand(1, put(1, "key", fmt.Sprint(i)))))
		}
		r.apply(entries...)
	}
	done.Store(true)
	r.one(putCommand(1, put(1, "key", "last"))) // lets the waiter go
	require.NoError(t, readers.Wait())
}

// TestSnapshotComesTwice: a leader that hears nothing sends again, and Raft may install
// the first copy after the second has come. What Raft ignored does not pile up.
func TestSnapshotComesTwice(t *testing.T) {
	from, to := newRig(t, smallLimits, 64<<20), newRig(t, smallLimits, 64<<20)
	from.one(putCommand(1, put(1, "k", "v")))
	first, firstName := from.stage(to)
	from.one(putCommand(1, put(1, "l", "w")))
	second, secondName := from.stage(to)
	for _, s := range []struct {
		said *raftpb.SnapshotMetadata
		name []byte
	}{{first, firstName}, {second, secondName}} {
		st, err := to.shard.InstallSnapshot(s.said, s.name)
		require.NoError(t, err)
		require.Equal(t, s.said.GetIndex(), st.Index)
		_, err = to.shard.InstallSnapshot(s.said, s.name)
		require.ErrorContains(t, err, "was not received here")
	}
	require.Equal(t, from.items(), to.items())
	from.stage(to)
	require.Len(t, to.shard.mu.staged, 1)
	from.one(putCommand(1, put(1, "m", "x")))
	for range 5 {
		from.stage(to)
		require.LessOrEqual(t, len(to.shard.mu.staged), maxStaged)
	}
	said, name := from.stage(to)
	_, err := to.shard.InstallSnapshot(said, name)
	require.NoError(t, err)
	require.Empty(t, to.shard.mu.staged)
}
