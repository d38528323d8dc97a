package engine

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
)

// writeSample makes a directory with a bit of everything, and closes it.
func writeSample(t *testing.T, dir string) (*logTwin, *stateTwin) {
	rng := rand.New(rand.NewSource(1))
	cfg := Config{Dir: dir, walBytes: 64 << 10}
	e := open(t, cfg)
	log, state := &logTwin{}, newStateTwin()
	for i := range 20 {
		commitLog(t, e, func(b *LogBatch) error {
			es := entriesOf(log.last()+1, log.last()+20, 1)
			log.append(es)
			return b.Append(1, es)
		})
		b := e.Group(1).NewBatch()
		for range 50 {
			state.step(t, rng, b)
		}
		state.meta.Applied = log.last()
		require.NoError(t, b.SetMeta(state.meta))
		require.NoError(t, b.Commit())
		if i == 9 {
			require.NoError(t, e.log.Flush())
			require.NoError(t, e.Flush())
		}
	}
	// A crash: the last entries are in the WAL only.
	require.NoError(t, e.flushStore(e.state, "state"))
	crashed := filepath.Join(t.TempDir(), "crashed")
	copyLive(t, dir, crashed)
	require.NoError(t, e.Close())
	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, os.Rename(crashed, dir))
	return log, state
}

// readDamaged reads everything. Each value that is served must be the one written.
func readDamaged(t *testing.T, dir string, log *logTwin, state *stateTwin) (err error) {
	t.Helper()
	e, err := Open(Config{Dir: dir, walBytes: 64 << 10})
	if err != nil {
		require.ErrorContains(t, err, dir)
		return err
	}
	defer func() {
		if cerr := e.Close(); err == nil {
			err = cerr
		}
	}()
	st, err := e.OpenLog(1)
	if err != nil {
		return err
	}
	for i := uint64(1); i <= st.Last; i++ {
		es, err := e.LogEntries(1, i, i+1, 0)
		if err != nil {
			return err
		}
		require.True(t, proto.Equal(log.entries[i-1], es[0]))
	}
	if st.Last != log.last() {
		return fmt.Errorf("the log ends at %d of %d", st.Last, log.last())
	}
	n := 0
	err = e.Group(1).Scan(func(ns uint32, key []byte, v Value) error {
		if want := state.kv[twinKey(ns, key)]; want.Version == v.Version {
			requireValue(t, want, v)
			n++
		}
		return nil
	})
	if err != nil {
		return err
	}
	if n != len(state.kv) {
		return fmt.Errorf("the state has %d of %d keys", n, len(state.kv))
	}
	return nil
}

func copyDir(t *testing.T, from, to string) {
	require.NoError(t, os.CopyFS(to, os.DirFS(from)))
}

// copyLive copies a directory that an engine has open, as it is at one moment: a
// compaction that ends while it is copied makes and removes files, and the copy is
// begun anew.
func copyLive(t *testing.T, from, to string) {
	deadline := time.Now().Add(30 * time.Second)
	for {
		before := filesOf(t, from)
		err := os.CopyFS(to, os.DirFS(from))
		if err == nil && maps.Equal(before, filesOf(t, from)) {
			return
		}
		if err != nil {
			require.ErrorIs(t, err, fs.ErrNotExist)
		}
		require.False(t, time.Now().After(deadline), "the directory changes all the time")
		require.NoError(t, os.RemoveAll(to))
	}
}

// filesOf tells by name what would show a change of each file.
func filesOf(t *testing.T, dir string) map[string]string {
	files := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		var info fs.FileInfo
		if err == nil && d.Type().IsRegular() {
			info, err = d.Info()
		}
		if info != nil {
			files[path] = fmt.Sprint(info.Size(), info.ModTime().UnixNano())
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}))
	return files
}

// Flipped bits and cut files end in an error, do no harm, or (in the last segment of
// the WAL and the last record of a MANIFEST, which Pebble can not tell from a torn
// write) take the newest data away; never in a wrong value, a panic or the end of the
// process.
func TestDamagedFiles(t *testing.T) {
	rng := newRand(t)
	base := filepath.Join(t.TempDir(), "base")
	log, state := writeSample(t, base)
	whole := filepath.Join(t.TempDir(), "whole") // opening changes files
	copyDir(t, base, whole)
	require.NoError(t, readDamaged(t, whole, log, state))
	var files []string
	require.NoError(t, filepath.WalkDir(base, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && d.Name() != "LOCK" {
			rel, _ := filepath.Rel(base, path)
			files = append(files, rel)
		}
		return err
	}))
	failed := map[string]int{}
	for _, file := range files {
		for try := range 6 {
			dir := filepath.Join(t.TempDir(), "d")
			copyDir(t, base, dir)
			path := filepath.Join(dir, file)
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			used := len(bytes.TrimRight(b, "\x00")) // a segment of the log ends in zeros
			if used == 0 {
				break
			}
			at := rng.Intn(used)
			if try < 4 {
				b[at] ^= 1 << rng.Intn(8)
			} else {
				b = b[:at]
			}
			require.NoError(t, os.WriteFile(path, b, 0o644))
			if err := readDamaged(t, dir, log, state); err != nil {
				failed[filepath.Ext(file)]++
				if strings.HasSuffix(file, ".sst") || strings.Contains(err.Error(), "object size") {
					require.ErrorIs(t, err, ErrCorrupt)
				}
				t.Logf("%s at %d of %d (try %d): %v", file, at, len(b), try, err)
			}
		}
	}
	require.Positive(t, failed[".sst"])
	require.Positive(t, failed[".log"])
	require.Positive(t, failed[""], "MANIFEST and FORMAT")
}

func TestFormat(t *testing.T) {
	mem := vfs.NewMem()
	e := open(t, testConfig(mem))
	require.NoError(t, e.Close())
	write := func(s string) {
		f, err := mem.Create("data/FORMAT", vfs.WriteCategoryUnspecified)
		require.NoError(t, err)
		_, err = f.Write([]byte(s))
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	for _, c := range []struct {
		text string
		is   error
		says string
	}{
		{"kvd-engine 2\n", ErrFormat, "was written with format 2, this version knows up to 1: run the newer kvd"},
		{"kvd-engine", ErrCorrupt, "data/FORMAT"},
		{"", ErrCorrupt, "data/FORMAT"},
		{"kvd-engine 1\n", nil, ""},
	} {
		write(c.text)
		e, err := Open(testConfig(mem))
		if c.is == nil {
			require.NoError(t, err)
			require.NoError(t, e.Close())
			continue
		}
		require.ErrorIs(t, err, c.is)
		require.ErrorContains(t, err, c.says)
	}
	require.NoError(t, mem.Remove("data/FORMAT"))
	_, err := Open(testConfig(mem))
	require.ErrorIs(t, err, ErrFormat)
	require.ErrorContains(t, err, "not made by kvd")
}

// What a newer Pebble raised is not taken for damage. A directory of today's format is
// opened; a new Pebble does not raise it by itself.
func TestNewerStore(t *testing.T) {
	for _, store := range []string{logDir, stateDir} {
		mem := vfs.NewMem()
		e := open(t, testConfig(mem))
		require.Equal(t, storeFormat, e.log.FormatMajorVersion())
		require.Equal(t, storeFormat, e.state.FormatMajorVersion())
		require.NoError(t, e.Close())
		marker, _, err := atomicfs.LocateMarker(mem, "data/"+store, "format-version")
		require.NoError(t, err)
		set := func(version int) {
			require.NoError(t, marker.Move(fmt.Sprintf("%03d", version)))
			_, err = Open(testConfig(mem))
		}
		set(int(storeFormat) + 1)
		require.ErrorIs(t, err, ErrFormat)
		require.ErrorContains(t, err, fmt.Sprintf("data/%s was written with Pebble's format %d, this version knows up to %d: run the newer kvd", store, storeFormat+1, storeFormat))
		set(0)
		require.ErrorIs(t, err, ErrCorrupt, "no version wrote that")
		require.NoError(t, marker.Move(fmt.Sprintf("%03d", storeFormat)))
		require.NoError(t, marker.Close())
		e = open(t, testConfig(mem))
		require.NoError(t, e.Close())
	}
}

func TestReadOnlyDirectory(t *testing.T) {
	if os.Getuid() == 0 {
		// Root ignores permissions: a file in the way of the directory will do.
		path := filepath.Join(t.TempDir(), "file")
		require.NoError(t, os.WriteFile(path, nil, 0o644))
		_, err := Open(Config{Dir: path})
		require.ErrorContains(t, err, path)
		return
	}
	dir := filepath.Join(t.TempDir(), "ro")
	require.NoError(t, os.Mkdir(dir, 0o555))
	_, err := Open(Config{Dir: dir})
	require.ErrorIs(t, err, os.ErrPermission)
	require.ErrorContains(t, err, "write access")
}

func TestConfigIsChecked(t *testing.T) {
	for _, c := range []Config{{}, {Dir: "x", CacheBytes: -1}, {Dir: "x", LogCacheBytes: -1}} {
		_, err := Open(c)
		require.Error(t, err)
	}
}

func TestSecondOpenIsRefused(t *testing.T) {
	cfg := Config{Dir: t.TempDir()}
	openChecked(t, cfg)
	_, err := Open(cfg)
	require.ErrorContains(t, err, cfg.Dir)
}

// The copy opens, and its log explains its state.
func TestCheckpoint(t *testing.T) {
	dir := t.TempDir()
	e := openChecked(t, Config{Dir: filepath.Join(dir, "data")})
	log := &logTwin{}
	for i := range 10 {
		commitLog(t, e, func(b *LogBatch) error {
			es := entriesOf(log.last()+1, log.last()+11, 1)
			log.append(es)
			return b.Append(1, es)
		})
		putAll(t, e.Group(1), uint64(10*i+5), 20, fmt.Sprint(i))
	}
	to := filepath.Join(dir, "copy")
	require.NoError(t, e.Checkpoint(to))
	require.ErrorContains(t, e.Checkpoint(to), "exists")
	putAll(t, e.Group(1), 100, 20, "later")
	c := openChecked(t, Config{Dir: to})
	requireLog(t, c, 1, log)
	m, err := c.Group(1).Meta()
	require.NoError(t, err)
	require.EqualValues(t, 95, m.Applied)
	v, ok, err := c.Group(1).Get(1, benchKey(3))
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, "9", string(v.Data))
}
