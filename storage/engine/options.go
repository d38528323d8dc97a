package engine

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/sstable/block"
	"github.com/cockroachdb/pebble/v2/vfs"
)

const (
	// One memtable of the log, and so about one WAL segment.
	logMemTableBytes = 16 << 20
	// A batch can pass the memtable's size by its own overhead, and the memtable's
	// overhead for small entries is above the WAL's. A tenth more is Pebble's own
	// estimate for preallocation.
	walSegmentBytes    = logMemTableBytes + logMemTableBytes/10
	logCacheBytes      = 8 << 20
	stateMemTableBytes = 64 << 20
	// Pebble takes the memory of memtables out of the block cache's size: one that is
	// filled, one that is flushed and one that is kept for use again. Without room for
	// them the cache holds nothing, not even filters (measured: Get of 24 µs, not 3).
	memTablesUsual    = 3
	compactionsAtMost = 2
	stagingTableBytes = 64 << 20
)

// logOptions: the log is written once, synced, and cut off soon; it is read from
// disk only at start and for followers that lag far behind.
func (e *Engine) logOptions(fs *walFS) *pebble.Options {
	o := e.commonOptions(fs, "log")
	// A directory of its own, so that walFS can tell its syncs from those for tables.
	// It is always below Dir; Pebble would refuse a Dir that was moved or copied.
	o.WALDir = fs.dir
	o.Unsafe.AllowMissingWALDirs = true
	// Entries that are cut before their memtable is flushed never reach a table. A
	// larger memtable catches more of them, but costs memory and replay at start.
	o.MemTableSize = logMemTableBytes
	// Room for bursts while one memtable is being flushed: no write stall. It also
	// bounds how many WAL files are kept for recycling (one more than this).
	o.MemTableStopWritesThreshold = 4
	// Compactions only serve to drop what was cut off. A few more tables in level 0
	// do not hurt, since hardly anything is read from them.
	o.L0CompactionThreshold = 8
	o.L0CompactionFileThreshold = 1000
	o.L0StopWritesThreshold = 1000
	o.CacheSize = logCacheBytes + memTablesUsual*logMemTableBytes
	// Each commit that matters is synced; a background sync_file_range of the WAL
	// would only compete with it.
	o.WALBytesPerSync = 0
	// No artificial delay: the host already syncs once for all groups that are ready.
	o.WALMinSyncInterval = nil
	o.EnsureDefaults()
	return o
}

// stateOptions: the state is written without a WAL, and read at random.
func (e *Engine) stateOptions(fs vfs.FS) *pebble.Options {
	o := e.commonOptions(fs, "state")
	o.DisableWAL = true
	// The larger, the fewer flushes; the cost is the log that is kept for it, which is
	// replayed after a crash.
	o.MemTableSize = stateMemTableBytes
	o.MemTableStopWritesThreshold = 4
	o.L0CompactionThreshold = 4
	o.L0CompactionFileThreshold = 500
	o.L0StopWritesThreshold = 1000
	o.LBaseMaxBytes = 64 << 20
	o.CacheSize = e.cfg.CacheBytes + memTablesUsual*stateMemTableBytes
	// Get of an absent key should not read a block. Ten bits: one in a hundred does.
	for i := range o.Levels {
		o.Levels[i].FilterPolicy = bloom.FilterPolicy(10)
		o.Levels[i].FilterType = pebble.TableFilter
	}
	// Without a WAL an ingestion that is queued behind memtables would be lost in a
	// crash. This way it is in the MANIFEST, synced, when Install returns.
	o.Experimental.DisableIngestAsFlushable = func() bool { return true }
	o.EnsureDefaults()
	return o
}

func (e *Engine) commonOptions(fs vfs.FS, store string) *pebble.Options {
	o := &pebble.Options{
		FS:                 fs,
		FormatMajorVersion: storeFormat,
		Logger:             &storeLogger{e: e, store: store},
		// Half of a small machine; a flush is not counted.
		CompactionConcurrencyRange: func() (int, int) { return 1, compactionsAtMost },
		EventListener: &pebble.EventListener{
			BackgroundError: func(err error) { e.backgroundError(store, err) },
			DataCorruption: func(info pebble.DataCorruptionInfo) {
				e.cfg.Logger.Error("engine: corrupt file", "store", store, "path", info.Path, "err", info.Details)
			},
			WriteStallBegin: func(info pebble.WriteStallBeginInfo) {
				e.cfg.Logger.Warn("engine: writes stall", "store", store, "reason", info.Reason)
			},
		},
	}
	for i := range o.Levels {
		o.Levels[i].Compression = func() *block.CompressionProfile { return block.FastestCompression }
	}
	return o
}

// healthFS reports file operations that hang.
func (e *Engine) healthFS() vfs.FS {
	if e.cfg.DiskSlowAfter < 0 {
		return e.cfg.FS
	}
	fs, closer := vfs.WithDiskHealthChecks(e.cfg.FS, e.cfg.DiskSlowAfter, nil, func(info vfs.DiskSlowInfo) {
		e.cfg.Logger.Warn("engine: slow disk", "path", info.Path, "op", info.OpType.String(), "took", info.Duration)
		if e.cfg.OnDiskSlow != nil {
			e.cfg.OnDiskSlow(info.Path, info.Duration)
		}
	})
	e.health = closer
	return fs
}

// openStore opens one Pebble store. Damaged files may also make Pebble panic or call
// Fatalf; both become errors here.
func openStore(dir string, o *pebble.Options) (db *pebble.DB, err error) {
	defer func() {
		if r := recover(); r != nil {
			db, err = nil, damaged(dir, fmt.Errorf("%v", r))
		}
	}()
	db, err = pebble.Open(dir, o)
	if err != nil {
		return nil, openStoreError(dir, err)
	}
	return db, nil
}

// openStoreError also takes for damage what Pebble found wrong by itself and does not
// mark so, as a table of another length than the MANIFEST says: it comes from no
// system call.
func openStoreError(dir string, err error) error {
	var errno syscall.Errno
	if !pebble.IsCorruptionError(err) && !errors.As(err, &errno) && !strings.Contains(err.Error(), "lock held") {
		return damaged(dir, err)
	}
	return storeError(dir, err)
}

// damaged keeps Pebble's first line; details follow it on others.
func damaged(where string, err error) error {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return fmt.Errorf("%w: %s: %s; restore it from a backup or rebuild this replica from its peers", ErrCorrupt, where, line)
}

// closeStore turns Pebble's complaint about leaked iterators into an error.
func closeStore(db *pebble.DB) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("engine: closing: %v", r)
		}
	}()
	return db.Close()
}

// storeError sorts what Pebble returned.
func storeError(where string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pebble.ErrClosed):
		return ErrClosed
	case pebble.IsCorruptionError(err):
		return damaged(where, err)
	}
	return openError(where, err)
}

// backgroundError: a flush or compaction failed. Pebble starts it again at once, so
// the next table is held back for a moment (see storeFS).
func (e *Engine) backgroundError(store string, err error) {
	e.background.note()
	e.cfg.Logger.Error("engine: flush or compaction failed; trying again", "store", store, "err", err)
	if e.cfg.OnBackgroundError != nil {
		e.cfg.OnBackgroundError(fmt.Errorf("engine: %s: %w", store, err))
	}
}

// storeLogger is Pebble's logger.
type storeLogger struct {
	e     *Engine
	store string
}

func (l *storeLogger) Infof(format string, args ...any) {
	if l.e.cfg.Logger.Enabled(context.Background(), slogPebble) {
		l.e.cfg.Logger.Log(context.Background(), slogPebble, fmt.Sprintf(format, args...), "store", l.store)
	}
}

func (l *storeLogger) Errorf(format string, args ...any) {
	l.e.cfg.Logger.Error(fmt.Sprintf(format, args...), "store", l.store)
}

// Fatalf is called where Pebble can not go on: mostly a MANIFEST that could not be
// written. It returns, other than Pebble's own, which ends the process: the callers
// then return their error, and each commit of ours asks writable() afterwards.
func (l *storeLogger) Fatalf(format string, args ...any) {
	l.e.fail(fmt.Errorf("engine: %s store: %s", l.store, fmt.Sprintf(format, args...)))
}

// flushStore waits for a flush, but not for a disk that stays full.
func (e *Engine) flushStore(db *pebble.DB, name string) error {
	if err := e.failure(); err != nil {
		return err
	}
	before := e.background.count.Load()
	done, err := db.AsyncFlush()
	if err != nil {
		return storeError(name, err)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return e.failure()
		case <-tick.C:
			if err := e.failure(); err != nil {
				return err
			}
			if n := e.background.count.Load() - before; n >= flushAttempts {
				return fmt.Errorf("engine: flushing the %s store failed %d times (see the log); free space on its disk", name, n)
			}
		}
	}
}
