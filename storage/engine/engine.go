package engine

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

var (
	// ErrCorrupt: bytes on disk do not have the check sum they were written with, or
	// a file is damaged. The message names the file or key and says what to do.
	ErrCorrupt = errors.New("engine: corrupt")
	// ErrClosed: the engine was closed.
	ErrClosed = errors.New("engine: closed")
	// ErrCompacted: the entry was cut off the log.
	ErrCompacted = errors.New("engine: entry compacted")
	// ErrUnavailable: the entry is not in the log (yet).
	ErrUnavailable = errors.New("engine: entry not in the log")
	// ErrFormat: the directory was written by a newer version, or is none of ours.
	ErrFormat = errors.New("engine: data directory")
	// ErrFailed: a write to the disk failed before. What was acknowledged is safe;
	// nothing more is accepted until the engine is opened again.
	ErrFailed = errors.New("engine: stopped after a failed write")
)

// Config of an engine.
type Config struct {
	Dir        string // below it log/ and state/ are made
	FS         vfs.FS // default: the host's
	CacheBytes int64  // of the state store; default 64 MiB
	Logger     *slog.Logger
	// OnSync is told how long each synced log write took. It must not block.
	OnSync func(took time.Duration)

	// LogCacheBytes bounds the recent entries kept in memory, over all groups;
	// default 64 MiB. Lower: followers that lag are read from disk earlier.
	LogCacheBytes int64
	// OnFatal is told, once and in a goroutine of its own, that a write failed and the
	// engine accepts no more (see ErrFailed). It may call Close.
	OnFatal func(err error)
	// OnDiskSlow is told that a file operation has been going on for longer than
	// DiskSlowAfter. It must not block.
	OnDiskSlow func(path string, took time.Duration)
	// DiskSlowAfter: default 2 s; negative: no check.
	DiskSlowAfter time.Duration
	// OnBackgroundError is told of a failed flush or compaction (a full disk, mostly).
	// Pebble tries again; until it succeeds DurableApplied stands still. It must not
	// block.
	OnBackgroundError func(err error)

	// KeepStagings has Open keep what was received of snapshots up to their last
	// checkpoint, for KeptStagings.
	KeepStagings bool

	// UnpreparedLog leaves out that new segments of the log are filled with zeros: a
	// file system in memory gains nothing by it.
	UnpreparedLog bool

	// walBytes is what new segments of the log are prepared to; negative: not at all.
	walBytes int64
}

func (c Config) withDefaults() Config {
	if c.FS == nil {
		c.FS = vfs.Default
	}
	if c.CacheBytes == 0 {
		c.CacheBytes = 64 << 20
	}
	if c.LogCacheBytes == 0 {
		c.LogCacheBytes = 64 << 20
	}
	if c.UnpreparedLog {
		c.walBytes = -1
	}
	if c.walBytes == 0 {
		c.walBytes = walSegmentBytes
	}
	if c.DiskSlowAfter == 0 {
		c.DiskSlowAfter = 2 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.OnSync == nil {
		c.OnSync = func(time.Duration) {}
	}
	return c
}

// Validate changes nothing.
func (c Config) Validate() error {
	switch {
	case c.Dir == "":
		return errors.New("engine: Dir is empty; name the data directory")
	case c.CacheBytes < 0:
		return fmt.Errorf("engine: CacheBytes is %d; give a positive size or 0 for the default", c.CacheBytes)
	case c.LogCacheBytes < 0:
		return fmt.Errorf("engine: LogCacheBytes is %d; give a positive size or 0 for the default", c.LogCacheBytes)
	}
	return nil
}

// Engine is both stores. Its methods may be called from several goroutines.
type Engine struct {
	cfg    Config
	fs     vfs.FS // cfg.FS, watched and paced
	log    *pebble.DB
	state  *pebble.DB
	health io.Closer
	wals   *walFS

	closed atomic.Bool
	failed atomic.Pointer[failure]

	background background

	logCached atomic.Int64 // bytes of all tail caches

	mu struct {
		sync.Mutex
		logs        map[uint64]*logGroup
		groups      map[uint64]*groupState
		nextStaging uint64
		kept        []*Staging
	}

	// cut is held shared by commits that remove log entries, and exclusively while a
	// checkpoint copies the two stores, so that the copied log still has what the
	// copied state lacks. It is held across I/O on purpose.
	cut sync.RWMutex
}

type failure struct{ err error }

// Open opens or creates the stores. Errors name the path; ErrCorrupt, ErrFormat.
func Open(cfg Config) (_ *Engine, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{cfg: cfg.withDefaults()}
	e.mu.logs = make(map[uint64]*logGroup)
	e.mu.groups = make(map[uint64]*groupState)
	if err := prepareDir(e.cfg.FS, e.cfg.Dir); err != nil {
		return nil, err
	}
	e.fs = &storeFS{FS: e.healthFS(), background: &e.background}
	fs := e.fs
	defer func() {
		if err != nil {
			err = errors.Join(err, e.closeStores())
		}
	}()
	if err := e.findStagings(); err != nil {
		return nil, err
	}
	logPath := fs.PathJoin(e.cfg.Dir, logDir)
	if e.wals, err = newWALFS(fs, fs.PathJoin(logPath, walDir), e.cfg.walBytes, e.fail); err != nil {
		return nil, openError(logPath, err)
	}
	if e.log, err = openStore(logPath, e.logOptions(e.wals)); err != nil {
		return nil, err
	}
	statePath := fs.PathJoin(e.cfg.Dir, stateDir)
	if e.state, err = openStore(statePath, e.stateOptions(fs)); err != nil {
		return nil, err
	}
	return e, nil
}

// Close makes everything applied durable and closes both stores. Snapshots must be
// closed before. After a failure nothing more is written.
func (e *Engine) Close() error {
	if e.closed.Swap(true) {
		return ErrClosed
	}
	var err error
	if e.failed.Load() == nil {
		// The log is in its WAL already. But Pebble takes a damaged record in the last
		// segment for its end, while a damaged table is always noticed.
		err = errors.Join(e.flushStore(e.state, "state"), e.flushStore(e.log, "log"))
	}
	return errors.Join(err, e.closeStores())
}

func (e *Engine) closeStores() error {
	var errs []error
	if e.state != nil {
		errs = append(errs, closeStore(e.state))
	}
	if e.log != nil {
		errs = append(errs, closeStore(e.log))
	}
	if e.wals != nil {
		errs = append(errs, e.wals.Close())
	}
	if e.health != nil {
		errs = append(errs, e.health.Close())
	}
	return errors.Join(errs...)
}

// usable is asked before each operation.
func (e *Engine) usable() error {
	if e.closed.Load() {
		return ErrClosed
	}
	return nil
}

// writable is asked before and after each write: Pebble reports a failed commit to
// its logger only.
func (e *Engine) writable() error {
	if err := e.failure(); err != nil {
		return err
	}
	return e.usable()
}

func (e *Engine) failure() error {
	if f := e.failed.Load(); f != nil {
		return fmt.Errorf("%w: %w", ErrFailed, f.err)
	}
	return nil
}

// fail stops all writing. The first failure counts.
func (e *Engine) fail(err error) {
	if !e.failed.CompareAndSwap(nil, &failure{err}) {
		return
	}
	e.cfg.Logger.Error("engine: a write failed; no more writes are accepted", "dir", e.cfg.Dir, "err", err)
	if e.cfg.OnFatal != nil {
		// Its own goroutine: Pebble holds locks here, and OnFatal may close us.
		go e.cfg.OnFatal(err)
	}
}
