//go:build chaos

package faults

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// Disk is a file system that misbehaves on order.
type Disk struct {
	vfs.FS // what it rests on

	mu struct {
		sync.Mutex
		order Order
		left  int64
		moved chan struct{} // closed with the next order
	}
	slowed, stalled, failed, refused atomic.Uint64
}

// NewDisk behaves well.
func NewDisk(fs vfs.FS) *Disk {
	d := &Disk{FS: fs}
	d.mu.moved = make(chan struct{})
	return d
}

func (d *Disk) obey(o Order) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.order, d.mu.left = o, o.Left
	close(d.mu.moved)
	d.mu.moved = make(chan struct{})
}

// delay is before every operation that takes time.
func (d *Disk) delay() {
	d.mu.Lock()
	slow, moved := d.mu.order.Slow, d.mu.moved
	d.mu.Unlock()
	if slow <= 0 {
		return
	}
	d.slowed.Add(1)
	t := time.NewTimer(slow)
	defer t.Stop()
	select {
	case <-t.C:
	case <-moved:
	}
}

// sync is before every sync.
func (d *Disk) sync() error {
	d.delay()
	for hung := false; ; hung = true {
		d.mu.Lock()
		stall, fail, moved := d.mu.order.StallSync, d.mu.order.FailSync, d.mu.moved
		d.mu.Unlock()
		switch {
		case fail:
			d.failed.Add(1)
			return fmt.Errorf("faults: sync: %w", syscall.EIO)
		case !stall:
			return nil
		}
		if !hung {
			d.stalled.Add(1)
		}
		<-moved
	}
}

// take is before a file grows by n bytes.
func (d *Disk) take(n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.mu.order.Full || n <= 0 {
		return nil
	}
	if d.mu.left < n {
		d.refused.Add(1)
		return fmt.Errorf("faults: write: %w", syscall.ENOSPC)
	}
	d.mu.left -= n
	return nil
}

// blockBytes is what the smallest file takes.
const blockBytes = 4096

// Create implements vfs.FS.
func (d *Disk) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if err := d.take(blockBytes); err != nil {
		return nil, err
	}
	return d.wrap(d.FS.Create(name, c))
}

// OpenReadWrite implements vfs.FS.
func (d *Disk) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return d.wrap(d.FS.OpenReadWrite(name, c, opts...))
}

// ReuseForWrite implements vfs.FS.
func (d *Disk) ReuseForWrite(oldname, newname string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.wrap(d.FS.ReuseForWrite(oldname, newname, c))
}

// Remove implements vfs.FS.
func (d *Disk) Remove(name string) error {
	info, serr := d.FS.Stat(name)
	err := d.FS.Remove(name)
	if err == nil && serr == nil {
		d.mu.Lock()
		d.mu.left += info.Size()
		d.mu.Unlock()
	}
	return err
}

// Open implements vfs.FS.
func (d *Disk) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	return d.wrap(d.FS.Open(name, opts...))
}

// OpenDir implements vfs.FS.
func (d *Disk) OpenDir(name string) (vfs.File, error) { return d.wrap(d.FS.OpenDir(name)) }

// GetDiskUsage implements vfs.FS.
func (d *Disk) GetDiskUsage(path string) (vfs.DiskUsage, error) {
	u, err := d.FS.GetDiskUsage(path)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil && d.mu.order.Full {
		u.AvailBytes = min(u.AvailBytes, uint64(d.mu.left))
	}
	return u, err
}

// Unwrap implements vfs.FS.
func (d *Disk) Unwrap() vfs.FS { return d.FS }

func (d *Disk) wrap(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	w := &file{File: f, d: d}
	if info, err := f.Stat(); err == nil {
		w.size = info.Size()
	}
	return w, nil
}

// file is written by one goroutine at a time, as Pebble does.
type file struct {
	vfs.File
	d        *Disk
	at, size int64 // of the next Write; of the file
}

func (f *file) Write(p []byte) (int, error) {
	f.d.delay()
	if err := f.d.take(f.at + int64(len(p)) - f.size); err != nil {
		return 0, err
	}
	n, err := f.File.Write(p)
	f.at += int64(n)
	f.size = max(f.size, f.at)
	return n, err
}

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	f.d.delay()
	if err := f.d.take(off + int64(len(p)) - f.size); err != nil {
		return 0, err
	}
	n, err := f.File.WriteAt(p, off)
	f.size = max(f.size, off+int64(n))
	return n, err
}

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	f.d.delay()
	return f.File.ReadAt(p, off)
}

func (f *file) Sync() error {
	if err := f.d.sync(); err != nil {
		return err
	}
	return f.File.Sync()
}

func (f *file) SyncData() error {
	if err := f.d.sync(); err != nil {
		return err
	}
	return f.File.SyncData()
}

func (f *file) SyncTo(length int64) (fullSync bool, err error) {
	if err := f.d.sync(); err != nil {
		return false, err
	}
	return f.File.SyncTo(length)
}
