package engine

import (
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

const (
	slogPebble    = slog.LevelDebug - 2
	flushAttempts = 3
	tableBackoff  = 200 * time.Millisecond
)

// background counts failed flushes and compactions.
type background struct {
	count atomic.Uint64
	last  atomic.Int64 // Unix nanoseconds
}

func (b *background) note() {
	b.last.Store(time.Now().UnixNano())
	b.count.Add(1)
}

// storeFS keeps a failing flush from being retried in a tight loop: Pebble has no
// pause of its own, and its callbacks run under its lock, but its tables are created
// with no lock held.
type storeFS struct {
	vfs.FS
	background *background
}

func (f *storeFS) Unwrap() vfs.FS { return f.FS }

func (f *storeFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if strings.HasSuffix(name, ".sst") {
		if wait := tableBackoff - time.Since(time.Unix(0, f.background.last.Load())); wait > 0 {
			time.Sleep(wait)
		}
	}
	return f.FS.Create(name, c)
}
