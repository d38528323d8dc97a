//go:build e2e

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/jepsen/env"
	"github.com/kvd-io/kvd/jepsen/history"
)

// programs builds the program and kvd, once.
var programs = sync.OnceValues(func() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "kvdj-bin-"); err != nil {
		return "", err
	}
	cleanup = func() { _ = os.RemoveAll(dir) }
	cmd := exec.Command("go", "build", "-buildvcs=false", "-tags", "chaos", "-o", dir+string(filepath.Separator), "github.com/kvd-io/kvd/jepsen", "github.com/kvd-io/kvd/cmd/kvd")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return dir, nil
})

func build(t *testing.T) (jepsen, kvd string) {
	t.Helper()
	dir, err := programs()
	require.NoError(t, err)
	return filepath.Join(dir, "jepsen"), filepath.Join(dir, "kvd")
}

// wholeRun makes a whole run on loopback and returns what it printed, and its history.
func wholeRun(t *testing.T, bin, kvd string, args ...string) (out, errOut, file string, h *history.History) {
	t.Helper()
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin, append([]string{"--net", "loopback", "--workload", "register", "--shards", "4", "--rate", "200",
		"--kvd-bin", kvd, "--artifacts", dir}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	require.NoError(t, cmd.Run(), "%s%s", &stdout, &stderr)
	found, err := filepath.Glob(filepath.Join(dir, "*", "history.jsonl"))
	require.NoError(t, err)
	require.Len(t, found, 1)
	h, err = history.ReadFile(found[0])
	require.NoError(t, err)
	return stdout.String(), stderr.String(), found[0], h
}

// A whole run on loopback: three processes, faults of processes, a verdict; and the same
// history judged again.
func TestLoopbackRun(t *testing.T) {
	bin, kvd := build(t)
	out, _, file, h := wholeRun(t, bin, kvd, "--nemesis", "kill,stop,transfer", "--time", "8s", "--seed", "11")
	require.True(t, strings.HasPrefix(out, "PASS"), out)
	require.NotEmpty(t, h.Faults)
	require.NotNil(t, h.End)
	again, err := exec.Command(bin, "--judge", file).Output()
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(again), "PASS"), "%s", again)
}

// Disks and clocks fail on order and are seen to; what a node does about it is no crash.
func TestDiskFaultsAreSeen(t *testing.T) {
	bin, kvd := build(t)
	_, errOut, _, h := wholeRun(t, bin, kvd, "--nemesis", "disk", "--time", "30s", "--seed", "2")
	seen := map[string]bool{}
	for _, f := range h.Faults {
		seen[f.Kind] = seen[f.Kind] || f.Seen
	}
	require.Greater(t, len(seen), 3, "%s", errOut)
	for kind, ok := range seen {
		require.True(t, ok, "%s: %s", kind, errOut)
	}
}

// A node joins, and another is emptied and leaves or comes back, while a third is killed.
func TestMembershipFaultsAreSeen(t *testing.T) {
	bin, kvd := build(t)
	out, errOut, _, h := wholeRun(t, bin, kvd, "--nemesis", "churn,moves,kill", "--time", "50s", "--seed", "1")
	require.True(t, strings.HasPrefix(out, "PASS"), "%s%s", out, errOut)
	seen := map[string]bool{}
	for _, f := range h.Faults {
		seen[f.Kind] = seen[f.Kind] || f.Seen
	}
	for _, kind := range []string{"churn", "moves", "kill"} {
		require.True(t, seen[kind], "%s: %s", kind, errOut)
	}
	require.Contains(t, errOut, "no replica moves", "the run waited for what was on its way")
}

// All nodes are restarted in turn, and drained in turn, and one that is lost is replaced.
func TestPlannedWorkIsSeen(t *testing.T) {
	bin, kvd := build(t)
	out, errOut, _, h := wholeRun(t, bin, kvd, "--nemesis", "rolling-restart,drain,replace", "--time", "45s", "--seed", "2")
	require.True(t, strings.HasPrefix(out, "PASS"), "%s%s", out, errOut)
	seen := map[string]bool{}
	for _, f := range h.Faults {
		seen[f.Kind] = seen[f.Kind] || f.Seen
	}
	for _, kind := range []string{"rolling-restart", "drain", "replace"} {
		require.True(t, seen[kind], "%s: %s", kind, errOut)
	}
}

// A kvd as it is shipped has no orders for its disk; what needs them is left out.
func TestOrdinaryKvd(t *testing.T) {
	kvd := filepath.Join(t.TempDir(), "kvd")
	out, err := exec.Command("go", "build", "-buildvcs=false", "-o", kvd, "github.com/kvd-io/kvd/cmd/kvd").CombinedOutput()
	require.NoError(t, err, "%s", out)
	f := flags{kvdBin: kvd}
	p, err := f.build(context.Background(), t.TempDir(), false)
	require.NoError(t, err)
	require.False(t, p.chaos)
	_, err = f.build(context.Background(), t.TempDir(), true)
	require.ErrorContains(t, err, "not built with the tag chaos")
	_, f.kvdBin = build(t)
	p, err = f.build(context.Background(), t.TempDir(), false)
	require.NoError(t, err)
	require.True(t, p.chaos)
}

// An interrupt ends a run early: everything is cleaned up, the history is kept, and it is
// no pass.
func TestInterrupt(t *testing.T) {
	bin, kvd := build(t)
	dir := t.TempDir()
	data := t.TempDir()
	cmd := exec.Command(bin, "--net", "loopback", "--nemesis", "kill", "--time", "10m", "--shards", "4", "--rate", "100", "--kvd-bin", kvd,
		"--artifacts", dir, "--data-dir", data)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	require.NoError(t, cmd.Start())
	var glob []string
	require.Eventually(t, func() bool {
		glob, _ = filepath.Glob(filepath.Join(dir, "*", "history.jsonl"))
		if len(glob) == 0 {
			return false
		}
		st, err := os.Stat(glob[0])
		return err == nil && st.Size() > 1<<16
	}, 2*time.Minute, 20*time.Millisecond, "no operations were recorded: %s", errOut.String())
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	err := cmd.Wait()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, exitBroken, exit.ExitCode(), "%s%s", out.String(), errOut.String())
	require.Contains(t, out.String(), "stopped by the user")
	left, err := os.ReadDir(data)
	require.NoError(t, err)
	require.Empty(t, left)
}

// What is cut is closed in that direction and no other; what is healed is open. Needs
// root; without, there is nothing to cut and nothing to test.
func TestCutsReallyCut(t *testing.T) {
	if err := env.CanNamespaces(); err != nil {
		t.Logf("not tested: no network namespaces (%v)", err)
		return
	}
	e, err := env.New(env.Config{Binary: "/bin/false", Self: "/bin/false", DataDir: t.TempDir(), LogDir: t.TempDir(), Nodes: 3, Shards: 1,
		Clients: []string{"c"}, Namespaces: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()
	require.NoError(t, e.VerifyCuts())
	require.NoError(t, e.Cut("a", []env.Cut{{From: "n1", To: "n2"}}))
	require.NoError(t, e.VerifyCuts(), "one way closed, all else open")
	require.False(t, e.Reachable("n1", "n2"))
	require.True(t, e.Reachable("n2", "n1"))
	require.NoError(t, e.Cut("b", []env.Cut{{From: "n2", To: "n1"}, {From: "c", To: "n3"}}))
	require.NoError(t, e.VerifyCuts())
	require.False(t, e.Reachable("n2", "n1"))
	require.NoError(t, e.Cut("a", nil))
	require.True(t, e.Reachable("n1", "n2"), "b's cuts stay, a's are gone")
	require.False(t, e.Reachable("n2", "n1"))
	dropped, err := e.Dropped()
	require.NoError(t, err)
	require.NotZero(t, dropped)
	require.NoError(t, e.Link("n3", false))
	require.False(t, e.Reachable("n1", "n3"))
	require.NoError(t, e.Link("n3", true))
	require.NoError(t, e.Cut("b", nil))
	require.NoError(t, e.VerifyCuts())
}
