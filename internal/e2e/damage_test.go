//go:build e2e

package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/internal/devcluster"
)

// TestDamagedFiles: each kind of file of the two stores and the identity, cut short,
// emptied and with a flipped bit. The node refuses with a sentence; it neither goes on
// with less than it had nor shows a stack trace. Damage at the end of the log's WAL looks
// like the end itself: there it is the leader who knows what this node acknowledged.
func TestDamagedFiles(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	held := fill(t, c.dial(t, nil), "damage", 300, 3000)
	c.caughtUp(t)
	// When the log is opened again, what was in its WAL becomes a table.
	ctx, cancel := within(stopTimeout)
	defer cancel()
	require.NoError(t, c.Node(2).Stop(ctx))
	c.restart(t, 2)
	c.lead(t, 1)
	fill(t, c.dial(t, nil), "more", 50, 3000)
	c.caughtUp(t)
	n := c.Node(2)
	require.NoError(t, n.Kill())
	for _, kind := range []string{"log/*.sst", "log/MANIFEST-*", "log/wal/*.log", "state/*.sst", "state/MANIFEST-*", "cluster.json"} {
		for _, damage := range []struct {
			name string
			do   func([]byte) []byte
		}{{"cut", cut}, {"flip", flip}, {"empty", func([]byte) []byte { return nil }}} {
			if kind == "log/*.sst" && damage.name == "flip" {
				continue // met only when the entries are read: below
			}
			t.Run(strings.NewReplacer("/*", "", "*", "").Replace(kind)+" "+damage.name, func(t *testing.T) {
				dir := copyOf(t, n.DataDir)
				spoil(t, largest(t, filepath.Join(dir, kind)), damage.do)
				r := command{bin: kvdBin, args: withFlags(n.Args(), "--data-dir", dir)}.run(t)
				r.refused(t, 4)
			})
		}
	}
	t.Run("edited identity", func(t *testing.T) {
		dir := copyOf(t, n.DataDir)
		file := filepath.Join(dir, "cluster.json")
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		edited := bytes.Replace(b, []byte(`"node_id": 2`), []byte(`"node_id": 1`), 1)
		require.NotEqual(t, b, edited)
		require.NoError(t, os.WriteFile(file, edited, 0o600))
		command{bin: kvdBin, args: withFlags(n.Args(), "--data-dir", dir)}.run(t).refused(t, 4, "cluster.json is damaged", "check sum")
	})
	t.Run("old entry of the log", func(t *testing.T) {
		// All of it was applied, so nobody needs it: the node goes on with its state. A byte
		// in the middle of the first of four shards: the middle of the file is where one shard's
		// entries end and the next one's hard state lies, which is needed.
		spoil(t, largest(t, filepath.Join(n.DataDir, "log", "*.sst")), func(b []byte) []byte {
			b[written(b)/8] ^= 1
			return b
		})
		c.restart(t, 2)
		c.caughtUp(t)
		c.lead(t, 2)
		check(t, c.dial(t, nil), held)
	})
}

func spoil(t testing.TB, file string, do func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, do(b), 0o600))
}

// written is the part of a file before the zeros of a preallocated end.
func written(b []byte) int { return len(bytes.TrimRight(b, "\x00")) }

func cut(b []byte) []byte { return b[:written(b)/2] }

func flip(b []byte) []byte {
	b[written(b)/2] ^= 1
	return b
}

func largest(t testing.TB, pattern string) string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	require.NoError(t, err)
	require.NotEmpty(t, files, "no file matches %s", pattern)
	if marker, err := filepath.Glob(filepath.Join(filepath.Dir(pattern), "marker.manifest.*")); err == nil && strings.Contains(pattern, "MANIFEST") {
		// An older one may still lie there.
		require.Len(t, marker, 1)
		_, name, _ := strings.Cut(filepath.Base(marker[0]), ".MANIFEST-")
		return filepath.Join(filepath.Dir(pattern), "MANIFEST-"+name)
	}
	size := func(f string) int {
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		return written(b)
	}
	sort.Slice(files, func(i, j int) bool { return size(files[i]) > size(files[j]) })
	require.Positive(t, size(files[0]), pattern)
	return files[0]
}

// nobody is a user that may write nothing of ours; nil where we are no superuser, and
// file modes bind us.
func nobody() *syscall.Credential {
	if os.Geteuid() != 0 {
		return nil
	}
	return &syscall.Credential{Uid: 65534, Gid: 65534}
}

// TestReadOnlyDirectory: a directory that can not be written, new or used.
func TestReadOnlyDirectory(t *testing.T) {
	one := newCluster(t, devcluster.Config{Nodes: 1})
	require.NoError(t, one.Kill())
	used := copyOf(t, one.Node(1).DataDir)
	fresh := filepath.Join(tempDir(t), "fresh")
	require.NoError(t, os.Mkdir(fresh, 0o755))
	for _, dir := range []string{used, fresh} {
		require.NoError(t, filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
			if err != nil {
				return err
			}
			return os.Chmod(path, 0o444|0o111*dirBit(info))
		}))
		t.Cleanup(func() { _ = os.Chmod(dir, 0o755) })
		r := command{bin: kvdBin, user: nobody(), args: withFlags(one.Node(1).Args(), "--data-dir", dir)}.run(t)
		r.refused(t, 4, dir, "is it writable for this user?")
	}
	t.Run("can not be made", func(t *testing.T) {
		dir := filepath.Join(fresh, "below")
		r := command{bin: kvdBin, user: nobody(), args: withFlags(one.Node(1).Args(), "--data-dir", dir)}.run(t)
		r.refused(t, 4, dir, "can not be made")
	})
	t.Run("is a file", func(t *testing.T) {
		file := filepath.Join(tempDir(t), "file")
		require.NoError(t, os.WriteFile(file, []byte("x"), 0o600))
		r := command{bin: kvdBin, args: withFlags(one.Node(1).Args(), "--data-dir", file)}.run(t)
		r.refused(t, 4, file)
	})
	t.Run("read-only file system", func(t *testing.T) {
		needRoot(t)
		dir := tempDir(t)
		mountTmpfs(t, dir, "8m")
		require.NoError(t, syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
		r := command{bin: kvdBin, args: withFlags(one.Node(1).Args(), "--data-dir", filepath.Join(dir, "data"))}.run(t)
		r.refused(t, 4, dir, "read-only file system")
	})
}

func dirBit(info os.FileInfo) os.FileMode {
	if info.IsDir() {
		return 1
	}
	return 0
}

// needRoot: only a superuser can mount the small file systems that play a full disk.
func needRoot(t testing.TB) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount a small file system")
	}
}

func mountTmpfs(t testing.TB, dir, size string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(dir, 0o755))
	require.NoError(t, syscall.Mount("kvd-e2e", dir, "tmpfs", 0, "size="+size))
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(fmt.Errorf("unmount %s: %w", dir, err))
		}
	})
}

func resizeTmpfs(t testing.TB, dir, size string) {
	t.Helper()
	require.NoError(t, syscall.Mount("", dir, "", syscall.MS_REMOUNT, "size="+size))
}
