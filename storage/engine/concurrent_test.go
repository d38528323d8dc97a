package engine

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// Readers, writers of several groups, snapshots and checkpoints at the same time; for
// the race detector, and for what a reader may see: entries that belong together.
func TestConcurrentUse(t *testing.T) {
	cfg := testConfig(vfs.NewMem())
	cfg.LogCacheBytes = 1 // down to tailKeepBytes: some reads go to the disk
	e := openChecked(t, cfg)
	const groups, rounds = 3, 20
	var done atomic.Int64
	w, _ := errgroup.WithContext(context.Background())
	for g := range uint64(groups) {
		w.Go(func() error {
			defer done.Add(1)
			return writeGroup(e, g, rounds)
		})
		w.Go(func() error {
			for done.Load() < groups {
				if err := readGroup(e, g); err != nil {
					return err
				}
			}
			return nil
		})
	}
	w.Go(func() error {
		for i := range 3 {
			if err := e.Checkpoint(fmt.Sprintf("copy-%d", i)); err != nil {
				return err
			}
			e.Metrics()
		}
		return nil
	})
	require.NoError(t, w.Wait())
}

func writeGroup(e *Engine, g uint64, rounds int) error {
	last := uint64(0)
	for i := range rounds {
		b := e.NewLogBatch()
		es := entriesOf(last+1, last+21, uint64(i+1))
		for _, entry := range es {
			entry.Data = make([]byte, 1<<10)
		}
		err := b.Append(g, es)
		last += 20
		if i%7 == 6 && err == nil {
			err = b.Truncate(g, last-50, 0)
		}
		if err == nil {
			err = b.Commit(true)
		}
		b.Discard()
		if err != nil {
			return err
		}
		// Every key holds the same version at any time.
		sb := e.Group(g).NewBatch()
		for k := range 20 {
			if err := sb.Put(1, benchKey(k), Value{Version: last}); err != nil {
				return err
			}
		}
		if err := errors.Join(sb.SetMeta(Meta{Applied: last}), sb.Commit()); err != nil {
			return err
		}
	}
	return nil
}

func readGroup(e *Engine, g uint64) error {
	st, err := e.OpenLog(g)
	if err != nil {
		return err
	}
	es, err := e.LogEntries(g, st.Truncated+1, st.Last+1, 100<<10)
	if err != nil && !errors.Is(err, ErrCompacted) && !errors.Is(err, ErrUnavailable) {
		return err
	}
	for i, entry := range es {
		if want := st.Truncated + 1 + uint64(i); entry.GetIndex() != want || entry.GetTerm() != (want-1)/20+1 {
			return fmt.Errorf("entry %d.%d where index %d was expected", entry.GetTerm(), entry.GetIndex(), want)
		}
	}
	version := uint64(0)
	return e.Group(g).Scan(func(_ uint32, key []byte, v Value) error {
		if version != 0 && v.Version != version {
			return fmt.Errorf("key %q at version %d beside %d", key, v.Version, version)
		}
		version = v.Version
		return nil
	})
}
