package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A node that does not begin to run is told of at once, with what it said last, and not
// only when time to start is up.
func TestNodeThatDiesAtStart(t *testing.T) {
	dir := t.TempDir()
	script := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o700))
		return path
	}
	// The node ends once the client waits; and a client that is never ready.
	dies := script("kvd", "echo bad flag --bogus; exit 4")
	waits := script("worker", "exec cat 3>&1 >&2")
	f := &flags{workload: "register", nemesis: "none", transport: "mixed", length: time.Second, nodes: 3, shards: 1, concurrency: 1, keys: 1, minSize: 16, maxSize: 16,
		opTimeout: time.Second, network: "loopback", arena: "64MiB", artifacts: dir, dataDir: t.TempDir(), programs: &binaries{kvd: dies, worker: waits}}
	r, err := f.newRun(func(string, ...any) {})
	require.NoError(t, err)
	began := time.Now()
	_, err = r.run(context.Background())
	require.ErrorContains(t, err, "ended by itself (exit status 4): bad flag --bogus")
	require.NotErrorIs(t, err, context.DeadlineExceeded)
	require.Less(t, time.Since(began), startTimeout)
}
