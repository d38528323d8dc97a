package engine

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"
)

const (
	formatFile    = "FORMAT"
	formatVersion = 1
	logDir        = "log"
	walDir        = "wal" // below log/
	stateDir      = "state"
	stagingDir    = "staging"

	// storeFormat is Pebble's own format of both stores. Pebble raises what it opens to
	// it, and never goes back; so it is not "the newest", which another Pebble would raise
	// unnoticed. To raise it is to raise formatVersion.
	storeFormat = pebble.FormatValueSeparation
)

// checkStoreFormat refuses a store of a newer version, which Pebble could not tell from a
// damaged one.
func checkStoreFormat(f vfs.FS, dir string) error {
	text, err := atomicfs.ReadMarker(f, dir, "format-version")
	if err != nil || text == "" {
		return nil // none yet; the rest is for Pebble to find
	}
	if n, err := strconv.Atoi(text); err == nil && n > int(storeFormat) {
		return fmt.Errorf("%w %s was written with Pebble's format %d, this version knows up to %d: run the newer kvd, or restore a backup of the older format",
			ErrFormat, dir, n, storeFormat)
	}
	return nil
}

// prepareDir makes the directory, or checks that it has a format that we know. The
// format is written before the stores are made, so stores without one are not ours.
func prepareDir(f vfs.FS, dir string) error {
	if err := makeDir(f, dir); err != nil {
		return err
	}
	if _, err := f.Stat(f.PathJoin(dir, formatFile)); errors.Is(err, fs.ErrNotExist) {
		for _, sub := range []string{logDir, stateDir} {
			if _, err := f.Stat(f.PathJoin(dir, sub)); err == nil {
				return fmt.Errorf("%w %s has %s/ but no %s file: it was not made by kvd, or the file was lost; restore it from a backup or give an empty directory",
					ErrFormat, dir, sub, formatFile)
			}
		}
		return writeFormat(f, dir)
	}
	return CheckFormat(f, dir)
}

// CheckFormat refuses a directory that was written by a newer version, and changes
// nothing. One that has no stores yet is all right. Errors: ErrFormat, ErrCorrupt.
func CheckFormat(f vfs.FS, dir string) error {
	path := f.PathJoin(dir, formatFile)
	file, err := f.Open(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return openError(path, err)
	}
	b, err := io.ReadAll(io.LimitReader(file, 64))
	if err = errors.Join(err, file.Close()); err != nil {
		return openError(path, err)
	}
	var version int
	if n, _ := fmt.Sscanf(string(b), "kvd-engine %d\n", &version); n != 1 || !strings.HasSuffix(string(b), "\n") {
		return fmt.Errorf("%w: %s holds %q, want \"kvd-engine %d\"; restore the file from a backup", ErrCorrupt, path, b, formatVersion)
	}
	if version > formatVersion {
		return fmt.Errorf("%w %s was written with format %d, this version knows up to %d: run the newer kvd, or restore a backup of the older format",
			ErrFormat, dir, version, formatVersion)
	}
	return errors.Join(checkStoreFormat(f, f.PathJoin(dir, logDir)), checkStoreFormat(f, f.PathJoin(dir, stateDir)))
}

// writeFormat creates the file under another name first: there is never half of it.
func writeFormat(f vfs.FS, dir string) error {
	path := f.PathJoin(dir, formatFile)
	tmp := path + ".tmp"
	file, err := f.Create(tmp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return openError(tmp, err)
	}
	_, err = fmt.Fprintf(file, "kvd-engine %d\n", formatVersion)
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return openError(tmp, err)
	}
	if err := f.Rename(tmp, path); err != nil {
		return openError(path, err)
	}
	return syncDir(f, dir)
}

// makeDir makes a directory and what is missing above it, durably: without the syncs
// a crash can take away a directory with all that was synced below it.
func makeDir(f vfs.FS, dir string) error {
	if _, err := f.Stat(dir); err == nil || dir == "" {
		return nil
	}
	parent := f.PathDir(dir)
	if parent != dir {
		if err := makeDir(f, parent); err != nil {
			return err
		}
	}
	if err := f.MkdirAll(dir, 0o755); err != nil {
		return openError(dir, err)
	}
	return syncDir(f, parent)
}

func syncDir(f vfs.FS, dir string) error {
	d, err := f.OpenDir(dir)
	if err != nil {
		return openError(dir, err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return openError(dir, err)
	}
	return nil
}

// openError adds path and advice to what the system said.
func openError(path string, err error) error {
	switch {
	case errors.Is(err, os.ErrPermission) || vfs.IsNoSpaceError(err) || isReadOnly(err):
		return fmt.Errorf("engine: %s can not be written: %w; give the process write access and free space there", path, err)
	}
	return fmt.Errorf("engine: %s: %w", path, err)
}
