package engine

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

const (
	preparedPrefix = "prepared-"
	// Zeros are written and synced little by little, with pauses, so that the log's own
	// syncs are not held up behind them: 17 MiB take about half a second.
	zeroChunk = 128 << 10
	zeroPause = 2 * time.Millisecond
	// Segments that are written with zeros in one run of the process. After these,
	// Pebble recycles them.
	preparedAtMost = 8
	// roomFactor times a segment has to be free for one to be prepared.
	roomFactor = 4
)

// walFS gives Pebble's write-ahead log two things:
//
// New segments have been filled with zeros and synced beforehand, in the background.
// A sync of a file that grows must also write its size and its extents; of a file whose blocks
// are written already it is the data alone. Pebble recycles old segments for that
// reason, but its first ones are new and small. Its reader takes zeros as the end of
// the log (record.ErrZeroedChunk, then no synced offset beyond).
//
// An error while writing the log is reported to fail and hidden from Pebble, which
// would panic with its locks held. After it nothing is written any more: every commit
// asks Engine.writable after Pebble returned, so nothing that was not written is
// acknowledged.
type walFS struct {
	vfs.FS
	dir   string
	bytes int64
	fail  func(error)
	dead  atomic.Bool

	wg      sync.WaitGroup
	closing chan struct{}
	mu      struct {
		sync.Mutex
		ready   string // path of a prepared segment, or empty
		running bool
		made    int
		closed  bool
	}
}

// newWALFS removes what a crash left and prepares the first segment: Pebble asks for
// it at once. (Some 40 ms on a disk that takes 500 MB/s.)
func newWALFS(fs vfs.FS, dir string, bytes int64, fail func(error)) (*walFS, error) {
	w := &walFS{FS: fs, dir: dir, bytes: bytes, fail: fail, closing: make(chan struct{})}
	if err := makeDir(fs, dir); err != nil {
		return nil, err
	}
	names, err := fs.List(dir)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if strings.HasPrefix(name, preparedPrefix) {
			if err := fs.Remove(fs.PathJoin(dir, name)); err != nil {
				return nil, err
			}
		}
	}
	w.prepareNext(0)
	w.wg.Wait()
	return w, nil
}

// Close waits for the preparing and removes what was not used.
func (w *walFS) Close() error {
	w.mu.Lock()
	w.mu.closed = true
	w.mu.Unlock()
	close(w.closing)
	w.wg.Wait()
	w.mu.Lock()
	ready := w.mu.ready
	w.mu.ready = ""
	w.mu.Unlock()
	if ready == "" {
		return nil
	}
	return w.FS.Remove(ready)
}

func (w *walFS) Unwrap() vfs.FS { return w.FS }

// prepareNext starts the preparing of one segment, if none is there or on the way.
func (w *walFS) prepareNext(pause time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.bytes <= 0 || w.mu.closed || w.mu.running || w.mu.ready != "" || w.mu.made >= preparedAtMost || !w.room() {
		return
	}
	w.mu.running = true
	w.mu.made++
	path := w.FS.PathJoin(w.dir, fmt.Sprintf("%s%d", preparedPrefix, w.mu.made))
	w.wg.Add(1)
	go func() {
		defer w.wg.Done()
		err := w.fill(path, pause)
		if err != nil {
			// Only speed is lost; a full disk will be met elsewhere.
			_ = w.FS.Remove(path)
			path = ""
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		w.mu.running, w.mu.ready = false, path
	}()
}

// room tells whether the disk has so much that a segment more is not the end of it: the last
// of a disk is for what was acknowledged. A file system that can not tell has room.
func (w *walFS) room() bool {
	u, err := w.FS.GetDiskUsage(w.dir)
	return err != nil || u.AvailBytes >= uint64(roomFactor*w.bytes)
}

func (w *walFS) fill(path string, pause time.Duration) error {
	f, err := w.FS.Create(path, "kvd-wal-prepare")
	if err != nil {
		return err
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for left := w.bytes; left > 0 && err == nil; left -= zeroChunk {
		// Made anew: File.Write may change what it is given.
		if _, err = f.Write(make([]byte, min(left, zeroChunk))); err != nil {
			break
		}
		if err = f.Sync(); err != nil || pause == 0 {
			continue
		}
		timer.Reset(pause)
		select {
		case <-timer.C:
		case <-w.closing:
			err = ErrClosed
		}
	}
	return errors.Join(err, f.Close())
}

func (w *walFS) take() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	path := w.mu.ready
	w.mu.ready = ""
	return path
}

func isWAL(name string) bool { return strings.HasSuffix(name, ".log") }

func (w *walFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if !isWAL(name) {
		return w.FS.Create(name, c)
	}
	if f := w.prepared(name, c); f != nil {
		return f, nil
	}
	return w.wrap(w.FS.Create(name, c))
}

// ReuseForWrite may by its contract leave oldname alone and take another file, which
// it does for an old segment that is short and would grow.
func (w *walFS) ReuseForWrite(oldname, newname string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if info, err := w.FS.Stat(oldname); err == nil && info.Size() < w.bytes {
		if f := w.prepared(newname, c); f != nil {
			if err := w.FS.Remove(oldname); err != nil {
				w.failed(err)
			}
			return f, nil
		}
	}
	return w.wrap(w.FS.ReuseForWrite(oldname, newname, c))
}

// prepared gives the prepared segment, if there is one, its new name.
func (w *walFS) prepared(name string, c vfs.DiskWriteCategory) vfs.File {
	defer w.prepareNext(zeroPause)
	path := w.take()
	if path == "" || w.dead.Load() {
		return nil
	}
	f, err := w.FS.ReuseForWrite(path, name, c)
	if err != nil {
		_ = w.FS.Remove(path) // the usual way will show whether the disk is at fault
		return nil
	}
	return &walFile{File: f, w: w}
}

// OpenDir is what Pebble syncs after it created a segment; nothing else lies there.
func (w *walFS) OpenDir(name string) (vfs.File, error) {
	f, err := w.FS.OpenDir(name)
	if err != nil || name != w.dir {
		return f, err
	}
	return &walDirFile{File: f, w: w}, nil
}

func (w *walFS) wrap(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		w.failed(err)
		f = vfs.NewMemFile(nil)
	}
	return &walFile{File: f, w: w}, nil
}

func (w *walFS) failed(err error) {
	// In this order: whoever sees success after this sees the failure as well.
	w.fail(fmt.Errorf("engine: writing the log in %s: %w", w.dir, err))
	w.dead.Store(true)
}

// walFile hides errors, see walFS.
type walFile struct {
	vfs.File
	w *walFS
}

func (f *walFile) do(op func() error) error {
	if f.w.dead.Load() {
		return nil
	}
	if err := op(); err != nil {
		f.w.failed(err)
	}
	return nil
}

func (f *walFile) Write(p []byte) (int, error) {
	return len(p), f.do(func() error {
		_, err := f.File.Write(p)
		return err
	})
}

func (f *walFile) Sync() error     { return f.do(f.File.Sync) }
func (f *walFile) SyncData() error { return f.do(f.File.SyncData) }

// Preallocate does nothing: fallocated blocks are unwritten extents, whose first
// write changes metadata just as growth does.
func (f *walFile) Preallocate(int64, int64) error { return nil }

// Close always closes.
func (f *walFile) Close() error {
	if err := f.File.Close(); err != nil && !f.w.dead.Load() {
		f.w.failed(err)
	}
	return nil
}

type walDirFile struct {
	vfs.File
	w *walFS
}

func (f *walDirFile) Sync() error {
	if f.w.dead.Load() {
		return nil
	}
	if err := f.File.Sync(); err != nil {
		f.w.failed(err)
	}
	return nil
}
