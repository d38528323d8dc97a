package server

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/simnic"
)

// watchedProvider is one whose opening is looked at.
type watchedProvider struct {
	rdma.Provider
	opening func()
}

func (p watchedProvider) NewTarget(cfg rdma.TargetConfig) (rdma.Target, error) {
	p.opening()
	return p.Provider.NewTarget(cfg)
}

func watchedConfig(t *testing.T, opening func(dir string)) Config {
	f, err := simnic.New(simnic.Config{})
	require.NoError(t, err)
	t.Cleanup(f.Close)
	cfg := testConfigs(t, 1, 1)[0]
	cfg.Providers = []rdma.Provider{watchedProvider{f.Host("node"), func() { opening(cfg.DataDir) }}}
	return cfg
}

// The directory's lock is held, and the owner noted, before a device is opened.
func TestLockComesBeforeDevices(t *testing.T) {
	opened := false
	cfg := watchedConfig(t, func(dir string) {
		opened = true
		lock, err := os.Open(filepath.Join(dir, lockFile))
		require.NoError(t, err)
		defer func() { require.NoError(t, lock.Close()) }()
		require.ErrorIs(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
		require.Equal(t, self(), readOwner(t, dir))
	})
	n, err := Start(testContext(t), cfg)
	require.NoError(t, err)
	require.True(t, opened)
	require.NoError(t, n.Stop(testContext(t)))
	require.NoFileExists(t, filepath.Join(cfg.DataDir, runningFile), "it stopped by itself")
	lock, err := os.Open(filepath.Join(cfg.DataDir, lockFile))
	require.NoError(t, err)
	require.NoError(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB))
	require.NoError(t, lock.Close())
}

func readOwner(t *testing.T, dir string) owner {
	b, err := os.ReadFile(filepath.Join(dir, runningFile))
	require.NoError(t, err)
	var o owner
	require.NoError(t, json.Unmarshal(b, &o))
	return o
}

func leaveOwner(t *testing.T, dir string, o owner) {
	b, err := json.Marshal(o)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, runningFile), b, 0o600))
}

// child is a process that lives until it is killed.
func child(t *testing.T) (*exec.Cmd, owner) {
	cmd := exec.Command("cat")
	_, err := cmd.StdinPipe() // cat waits for what never comes
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_, _ = cmd.Process.Wait()
	})
	o := self()
	o.PID = cmd.Process.Pid
	_, o.Start, err = processState(o.PID)
	require.NoError(t, err)
	return cmd, o
}

// After a process that did not stop by itself no device is opened before the process is
// gone and the delay is over; after one that did, at once.
func TestFence(t *testing.T) {
	const delay = 300 * time.Millisecond
	var opened atomic.Int64 // Unix ns
	cfg := watchedConfig(t, func(string) { opened.Store(time.Now().UnixNano()) })
	cfg.FenceDelay = delay
	run := func(ctx context.Context) (time.Duration, error) {
		opened.Store(0)
		began := time.Now()
		n, err := Start(ctx, cfg)
		if err != nil {
			return 0, err
		}
		require.NoError(t, n.Stop(testContext(t)))
		return time.Duration(opened.Load() - began.UnixNano()), nil
	}
	_, err := run(testContext(t))
	require.NoError(t, err)

	cmd, o := child(t)
	require.True(t, alive(&o))
	leaveOwner(t, cfg.DataDir, o)
	ctx, cancel := context.WithCancel(testContext(t))
	ended := make(chan error, 1)
	go func() {
		_, err := run(ctx)
		ended <- err
	}()
	select {
	case err := <-ended:
		t.Fatalf("it did not wait for a living process: %v", err)
	case <-time.After(delay + 100*time.Millisecond):
	}
	require.Zero(t, opened.Load())
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.Equal(t, o, readOwner(t, cfg.DataDir), "the next one has to wait too")

	require.NoError(t, cmd.Process.Kill())
	eventually(t, "a process that nobody waits for is gone all the same", func() bool { return !alive(&o) })
	took, err := run(testContext(t))
	require.NoError(t, err)
	require.GreaterOrEqual(t, took, delay)

	reused := o
	reused.PID, reused.Start = os.Getpid(), 1
	require.False(t, alive(&reused), "another process has its number")
	for _, o := range []owner{reused, {Host: "another", Name: "elsewhere", PID: 1}} {
		leaveOwner(t, cfg.DataDir, o)
		took, err = run(testContext(t))
		require.NoError(t, err)
		require.GreaterOrEqual(t, took, delay)
	}
	require.NoError(t, os.WriteFile(filepath.Join(cfg.DataDir, runningFile), []byte("damaged"), 0o600))
	took, err = run(testContext(t))
	require.NoError(t, err)
	require.GreaterOrEqual(t, took, delay)
}
