package server

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// diskWatch refuses writes before the disk is full, while reads go on, and takes them
// again by itself.
type diskWatch struct {
	path     string
	minFree  uint64 // bytes
	free     func(path string) (uint64, error)
	refusing atomic.Pointer[string]
}

func newDiskWatch(fs vfs.FS, path string, minFree uint64) *diskWatch {
	free := func(path string) (uint64, error) {
		u, err := fs.GetDiskUsage(path)
		if errors.Is(err, vfs.ErrUnsupported) { // in memory
			return math.MaxUint64, nil
		}
		return u.AvailBytes, err
	}
	return &diskWatch{path: path, minFree: minFree, free: free}
}

// refusal says why writes are refused; empty: they are taken.
func (d *diskWatch) refusal() string {
	if why := d.refusing.Load(); why != nil {
		return *why
	}
	return ""
}

// look measures again; changed tells that the answer is another one than before.
func (d *diskWatch) look() (changed bool, err error) {
	free, err := d.free(d.path)
	if err != nil {
		return false, fmt.Errorf("server: free space of %s: %w", d.path, err)
	}
	before := d.refusing.Load() != nil
	switch {
	case !before && free < d.minFree:
		why := fmt.Sprintf("the disk of %s has %d MiB left, writes need %d MiB: make room; reads go on, and writes go on by themselves then", d.path, free>>20, d.minFree>>20)
		d.refusing.Store(&why)
	case before && free > d.minFree+d.minFree/2:
		d.refusing.Store(nil)
	}
	return before != (d.refusing.Load() != nil), nil
}
