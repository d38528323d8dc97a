package sim

import (
	"math/rand/v2"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// disk is a file system in memory on which the power can fail before any operation.
type disk struct {
	vfs.FS
	mem  *vfs.MemFS
	boot *boot // that uses it
	mu   struct {
		sync.Mutex
		ops   int        // operations so far
		fails int        // at which the power fails; 0: it does not
		keep  bool       // what was not synced survives that failure
		left  *vfs.MemFS // what it left; nil: it did not happen
	}
}

func newDisk(mem *vfs.MemFS, b *boot) *disk { return &disk{FS: mem, mem: mem, boot: b} }

// image is what a crash leaves: what was synced, or with keep all that was written. What
// lies between is left out: MemFS draws it in the order of a map.
func image(mem *vfs.MemFS, keep bool) *vfs.MemFS {
	if keep {
		return mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(0, 0))})
	}
	return mem.CrashClone(vfs.CrashCloneCfg{})
}

// failIn has the power fail before the n-th operation from now; 0: it does not.
func (d *disk) failIn(n int, keep bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.fails, d.mu.keep = 0, keep; n > 0 {
		d.mu.fails = d.mu.ops + n
	}
}

// step comes before each operation that changes something. From a power failure on the
// process is dead: what it does until it is taken down reaches nobody.
func (d *disk) step() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.ops++
	if d.mu.ops == d.mu.fails && d.mu.left == nil && !d.boot.dead.Swap(true) {
		d.mu.left = image(d.mem, d.mu.keep)
	}
}

// failed is what a power failure left, or nil.
func (d *disk) failed() *vfs.MemFS {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.left
}

func (d *disk) file(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return &file{f, d}, nil
}

func (d *disk) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	d.step()
	return d.file(d.FS.Create(name, c))
}

func (d *disk) Link(oldname, newname string) error {
	d.step()
	return d.FS.Link(oldname, newname)
}

func (d *disk) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return d.file(d.FS.OpenReadWrite(name, c, opts...))
}

func (d *disk) OpenDir(name string) (vfs.File, error) { return d.file(d.FS.OpenDir(name)) }

func (d *disk) Remove(name string) error {
	d.step()
	return d.FS.Remove(name)
}

func (d *disk) Rename(oldname, newname string) error {
	d.step()
	return d.FS.Rename(oldname, newname)
}

func (d *disk) ReuseForWrite(oldname, newname string, c vfs.DiskWriteCategory) (vfs.File, error) {
	d.step()
	return d.file(d.FS.ReuseForWrite(oldname, newname, c))
}

type file struct {
	vfs.File
	d *disk
}

func (f *file) Write(p []byte) (int, error) {
	f.d.step()
	return f.File.Write(p)
}

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	f.d.step()
	return f.File.WriteAt(p, off)
}

func (f *file) Sync() error {
	f.d.step()
	return f.File.Sync()
}

func (f *file) SyncTo(length int64) (bool, error) {
	f.d.step()
	return f.File.SyncTo(length)
}

func (f *file) SyncData() error {
	f.d.step()
	return f.File.SyncData()
}
