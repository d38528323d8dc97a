package env

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What a dead run left is removed; what a living one has, and what is not ours, stays.
func TestLeftovers(t *testing.T) {
	gone := exec.Command("true")
	require.NoError(t, gone.Run()) // and reaped, so that its id is nobody's
	dir := t.TempDir()
	dead := fmt.Sprintf("kvdj%d-1234", gone.Process.Pid)
	keep := []string{fmt.Sprintf("kvdj%d-1234", os.Getpid()), fmt.Sprintf("kvdj%d-1234", os.Getppid()), "kvdj-kept-99", "other", "kvdj12x-1"}
	for _, name := range append(keep, dead) {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, name, "n1"), 0o700))
	}
	RemoveLeftovers(dir)
	require.NoDirExists(t, filepath.Join(dir, dead))
	for _, name := range keep {
		require.DirExists(t, filepath.Join(dir, name))
	}
}

// A node that ends although nobody ordered it is a crash; one that was doomed is not.
func TestCrashes(t *testing.T) {
	e, err := New(Config{Binary: "/bin/false", Self: "/bin/false", DataDir: t.TempDir(), LogDir: t.TempDir(), Nodes: 1, Shards: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()
	require.False(t, e.CanCut())
	require.Error(t, e.Cut("a", []Cut{{"n1", Control}}))
	n := e.Node(1)
	require.Nil(t, n.Ended())
	require.NoError(t, n.Start())
	<-n.Ended()
	require.Len(t, n.Crashes(), 1)
	require.Contains(t, n.Crashes()[0], "ended by itself")
	require.Zero(t, n.PID())
	require.NoError(t, os.WriteFile(n.LogFile, []byte("x\npanic: boom\n"), 0o600))
	require.Len(t, n.Crashes(), 2)
	require.True(t, n.Logged("boom", 0))
	require.False(t, n.Logged("x", 1))
}
