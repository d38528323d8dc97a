package engine

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
)

// Flush makes everything applied durable (at shutdown, before cutting logs). It gives
// up with an error where the disk stays full.
func (e *Engine) Flush() error {
	if err := e.writable(); err != nil {
		return err
	}
	return e.flushStore(e.state, "state")
}

// Checkpoint writes a consistent copy of both stores below dir, which must not exist.
// Tables are hard links where the file system allows it. It can be opened as it is.
//
// The state is copied first: the log, which is copied later, then reaches at least as
// far; and while the two are copied nothing is cut off the log, so it also reaches
// back to what the copied state has applied. Commits that cut wait meanwhile.
func (e *Engine) Checkpoint(dir string) error {
	if err := e.Flush(); err != nil {
		return err
	}
	if _, err := e.fs.Stat(dir); err == nil {
		return fmt.Errorf("engine: checkpoint: %s exists; name a new directory", dir)
	}
	if err := makeDir(e.fs, dir); err != nil {
		return err
	}
	e.cut.Lock()
	defer e.cut.Unlock()
	if err := e.state.Checkpoint(e.fs.PathJoin(dir, stateDir)); err != nil {
		return storeError(dir, err)
	}
	if err := e.log.Checkpoint(e.fs.PathJoin(dir, logDir), pebble.WithFlushedWAL()); err != nil {
		return storeError(dir, err)
	}
	if err := e.moveWALs(e.fs.PathJoin(dir, logDir)); err != nil {
		return err
	}
	// The format comes last: a copy without one is incomplete, and Open refuses it.
	return writeFormat(e.fs, dir)
}

// moveWALs puts the segments of a copied log store, which Pebble leaves beside the
// tables, where Open looks for them.
func (e *Engine) moveWALs(log string) error {
	wals := e.fs.PathJoin(log, walDir)
	if err := makeDir(e.fs, wals); err != nil {
		return err
	}
	names, err := e.fs.List(log)
	if err != nil {
		return openError(log, err)
	}
	for _, name := range names {
		if !isWAL(name) {
			continue
		}
		if err := e.fs.Rename(e.fs.PathJoin(log, name), e.fs.PathJoin(wals, name)); err != nil {
			return openError(log, err)
		}
	}
	return errors.Join(syncDir(e.fs, wals), syncDir(e.fs, log))
}

// Metrics for the status page.
type Metrics struct {
	LogBytes   uint64 // on disk, with the WAL
	StateBytes uint64 // on disk
	FreeBytes  uint64 // of the file system below Dir; 0 where unknown

	LogCachedBytes   int64  // recent entries in memory
	BackgroundErrors uint64 // failed flushes and compactions since Open
	Failed           bool   // see ErrFailed
}

// Metrics returns the zero value after Close.
func (e *Engine) Metrics() Metrics {
	if e.usable() != nil {
		return Metrics{}
	}
	m := Metrics{
		LogBytes:         e.log.Metrics().DiskSpaceUsage(),
		StateBytes:       e.state.Metrics().DiskSpaceUsage(),
		LogCachedBytes:   e.logCached.Load(),
		BackgroundErrors: e.background.count.Load(),
		Failed:           e.failed.Load() != nil,
	}
	if u, err := e.fs.GetDiskUsage(e.cfg.Dir); err == nil {
		m.FreeBytes = u.AvailBytes
	}
	return m
}
