//go:build linux

package shm

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

// deadSocket leaves a socket file without a process behind it.
func deadSocket(t *testing.T, path string) {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	_, err = os.Lstat(path)
	require.NoError(t, err)
}

func newTarget(t *testing.T, p *Provider) (*target, error) {
	tg, err := p.NewTarget(rdma.TargetConfig{NodeID: 1, BootID: 2})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { require.NoError(t, tg.Close()) })
	return tg.(*target), nil
}

func TestSocketPath(t *testing.T) {
	t.Run("stale replaced, removed at the end", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s")
		deadSocket(t, path)
		tg, err := newTarget(t, &Provider{SocketPath: path})
		require.NoError(t, err)
		require.True(t, answered(path))
		require.NoError(t, tg.Close())
		left, err := os.ReadDir(filepath.Dir(path))
		require.NoError(t, err)
		require.Empty(t, left)
	})
	t.Run("live refused", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s")
		_, err := newTarget(t, &Provider{SocketPath: path})
		require.NoError(t, err)
		_, err = newTarget(t, &Provider{SocketPath: path})
		require.ErrorContains(t, err, "another process listens there")
		require.True(t, answered(path))
	})
	t.Run("a file is not touched", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "precious")
		require.NoError(t, os.WriteFile(path, []byte("data"), 0o600))
		_, err := newTarget(t, &Provider{SocketPath: path})
		require.ErrorContains(t, err, "remove it or choose another path")
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, "data", string(b))
	})
	t.Run("replaced under our feet", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s")
		tg, err := newTarget(t, &Provider{SocketPath: path})
		require.NoError(t, err)
		require.NoError(t, os.Remove(path))
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		require.NoError(t, tg.Close())
		require.FileExists(t, path, "what is not ours stays")
	})
	t.Run("length", func(t *testing.T) {
		dir := t.TempDir()
		longest := filepath.Join(dir, strings.Repeat("x", MaxSocketPath-len(dir)-1))
		require.Len(t, longest, MaxSocketPath)
		s := newPair(t, &Provider{SocketPath: longest})
		require.NoError(t, s.read(s.connect(), 0, 8))
		_, err := newTarget(t, &Provider{SocketPath: longest + "x"})
		require.ErrorContains(t, err, "at most 106")
		_, err = newTarget(t, &Provider{SocketDir: longest})
		require.ErrorContains(t, err, "at most 106")
	})
	t.Run("relative", func(t *testing.T) {
		_, err := newTarget(t, &Provider{SocketPath: "s"})
		require.ErrorContains(t, err, "absolute")
	})
	t.Run("directory", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "new")
		require.NoError(t, os.Mkdir(dir, 0o700))
		deadSocket(t, filepath.Join(dir, "1-77.sock"))
		deadSocket(t, filepath.Join(dir, "2-77.sock"))
		tg, err := newTarget(t, &Provider{SocketDir: dir})
		require.NoError(t, err)
		require.Equal(t, filepath.Join(dir, "1-2.sock"), tg.listener.path)
		require.NoFileExists(t, filepath.Join(dir, "1-77.sock"), "an earlier boot of this node")
		_, err = os.Lstat(filepath.Join(dir, "2-77.sock"))
		require.NoError(t, err, "another node's")
	})
	t.Run("default directory", func(t *testing.T) {
		base := t.TempDir()
		t.Setenv("XDG_RUNTIME_DIR", base)
		tg, err := newTarget(t, &Provider{})
		require.NoError(t, err)
		dir := filepath.Join(base, "kvd-"+itoa(os.Getuid()))
		require.Equal(t, filepath.Join(dir, "1-2.sock"), tg.listener.path)
		require.NoError(t, tg.Close())
	})
	t.Run("permissions", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "made")
		tg, err := newTarget(t, &Provider{SocketDir: dir})
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), mode(t, tg.listener.path))
		require.Equal(t, os.FileMode(0o700), mode(t, dir))
		other := filepath.Join(t.TempDir(), "s")
		_, err = newTarget(t, &Provider{SocketPath: other, AllowedUIDs: []uint32{1}})
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o666), mode(t, other))
	})
	t.Run("two at a time", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s")
		results := make(chan error, 4)
		for range 4 {
			go func() {
				l, err := listen(path, "", true)
				if err == nil {
					t.Cleanup(func() { require.NoError(t, l.Close()) })
				}
				results <- err
			}()
		}
		winners := 0
		for range 4 {
			if err := <-results; err == nil {
				winners++
			} else {
				require.ErrorContains(t, err, "another process listens there")
			}
		}
		require.Equal(t, 1, winners)
	})
}

func mode(t *testing.T, path string) os.FileMode {
	info, err := os.Lstat(path)
	require.NoError(t, err)
	return info.Mode().Perm()
}

func TestValidate(t *testing.T) {
	require.NoError(t, (&Provider{}).Validate())
	require.Error(t, (&Provider{AcceptTimeout: -time.Second}).Validate())
	require.Error(t, (&Provider{HandshakeTimeout: -time.Second}).Validate())
	require.Error(t, (&Provider{MaxConnections: -1}).Validate())
	require.Error(t, (&Provider{SocketPath: "/a\x00b"}).Validate())
	require.Equal(t, "shm", (&Provider{}).Name())
}

// A default directory that somebody else made does not keep a node from being read: one
// beside it is used, the same at the next start, and a line says so.
func TestForeignDefaultDirectory(t *testing.T) {
	base := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", base)
	usual := filepath.Join(base, fmt.Sprintf("kvd-%d", os.Getuid()))
	require.NoError(t, os.Symlink(t.TempDir(), usual)) // as another user's would be: not ours
	for range 2 {
		var said bytes.Buffer
		tg, err := (&Provider{}).NewTarget(rdma.TargetConfig{NodeID: 1, BootID: 2, Logger: slog.New(slog.NewTextHandler(&said, nil))})
		require.NoError(t, err)
		require.True(t, answered(filepath.Join(usual+"-1", "1-2.sock")))
		require.Contains(t, said.String(), "level=WARN")
		require.Contains(t, said.String(), "--shm-dir")
		require.NoError(t, tg.Close())
	}
	for i := 2; i < ownDirs; i++ {
		require.NoError(t, os.WriteFile(fmt.Sprintf("%s-%d", usual, i), nil, 0o600))
	}
	require.NoError(t, os.RemoveAll(usual+"-1"))
	require.NoError(t, os.Symlink(t.TempDir(), usual+"-1"))
	var said bytes.Buffer
	_, err := (&Provider{}).NewTarget(rdma.TargetConfig{NodeID: 1, BootID: 2, Logger: slog.New(slog.NewTextHandler(&said, nil))})
	require.ErrorIs(t, err, rdma.ErrUnsupported, "the node goes on without")
	require.Contains(t, said.String(), "NO SHARED MEMORY")
	// A directory that was asked for by name is that one or none.
	_, err = (&Provider{SocketDir: filepath.Join(usual+"-2", "x")}).NewTarget(rdma.TargetConfig{NodeID: 1, BootID: 2})
	require.Error(t, err)
	require.NotErrorIs(t, err, rdma.ErrUnsupported)
}
