package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/jepsen/check"
)

// Only a violation catches a variant: a run that does not count, or that is not decided,
// has shown nothing of it, and one that passes still less.
func TestOnlyAViolationCatches(t *testing.T) {
	c := control{variant: "no-confirmation", workload: "register", nemesis: "stop", transport: "shm"}
	for _, x := range []struct {
		name     string
		verdicts []check.Verdict // of one run after the other; the last again and again
		by       string
		err      string
		runs     int // 0: until time is up
	}{
		{"violation", []check.Verdict{check.Violation}, "register, stop over shm: lost", "", 1},
		{"later", []check.Verdict{check.Broken, check.Undecided, check.Pass, check.Violation}, "register, stop over shm: lost", "", 4},
		{"pass", []check.Verdict{check.Pass}, "", "the last verdict was PASS", 0},
		{"broken", []check.Verdict{check.Broken}, "", "the last verdict was BROKEN", 0},
		{"unknown", []check.Verdict{check.Undecided}, "", "the last verdict was UNKNOWN", 0},
	} {
		t.Run(x.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, runs, began := &flags{seed: 5}, 0, time.Now()
				got := c.byRun(f, func() (*outcome, error) {
					require.Equal(t, uint64(5+runs), f.seed, "a seed of its own for each run")
					<-time.After(f.length)
					v := x.verdicts[min(runs, len(x.verdicts)-1)]
					runs++
					r := &check.Report{Verdict: v}
					if v == check.Violation {
						r.Findings = []check.Finding{{Kind: "lost"}}
					}
					return &outcome{r: r}, nil
				})
				require.Equal(t, x.by, got.by)
				if x.err != "" {
					require.ErrorContains(t, got.err, x.err)
					require.Greater(t, runs, 1)
					require.LessOrEqual(t, time.Since(began), controlLimit+controlTime)
					return
				}
				require.NoError(t, got.err)
				require.Equal(t, x.runs, runs)
				require.Contains(t, got.repeat, "--control no-confirmation")
			})
		})
	}
	got := c.byRun(&flags{}, func() (*outcome, error) { return nil, errors.New("no port") })
	require.ErrorContains(t, got.err, "no port")
	require.Empty(t, got.by)
}

// A variant is caught by a test that runs with it and fails: not by one that passes, and
// not by a package that does not build or has no such test.
func TestOnlyAFailedTestCatches(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir+string(filepath.ListSeparator)+os.Getenv("PATH"))
	told := filepath.Join(dir, "told")
	c := control{variant: "frozen-mapping", pkg: "rdma/shm", test: "TestDeathWord"}
	for name, x := range map[string]struct{ script, by, err string }{
		"fails":          {"echo '--- FAIL: TestDeathWord (0.1s)'; exit 1", "rdma/shm TestDeathWord", ""},
		"subtest fails":  {"echo '--- FAIL: TestDeathWord (0.1s)'; echo '    --- FAIL: TestDeathWord/two (0s)'; exit 1", "rdma/shm TestDeathWord/two", ""},
		"passes":         {"echo ok; exit 0", "", "passes with the variant on"},
		"says FAIL only": {"echo '--- FAIL: TestDeathWord (0.1s)'; exit 0", "", "passes with the variant on"},
		"does not build": {"echo 'undefined: x'; echo 'FAIL [build failed]'; exit 1", "", "did not run"},
		"panics":         {"echo 'panic: boom'; exit 2", "", "did not run"},
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "go"), []byte("#!/bin/sh\necho \"$KVD_CHAOS_BREAK $*\" >"+told+"\n"+x.script+"\n"), 0o700))
		got := c.byTest(context.Background())
		require.Equal(t, x.by, got.by, name)
		if x.err != "" {
			require.ErrorContains(t, got.err, x.err, name)
		} else {
			require.NoError(t, got.err, name)
		}
		b, err := os.ReadFile(told)
		require.NoError(t, err)
		require.Contains(t, string(b), "frozen-mapping test -tags chaos", name)
		require.Contains(t, string(b), "kvd/rdma/shm -run ^(TestDeathWord)$", name)
	}
}

// The simulator catches a variant by a seed that it names, and by nothing else.
func TestSeedIn(t *testing.T) {
	c := control{variant: "config-ignored"}
	got := c.seedIn(caught{}, "=== RUN\nconfig-ignored: caught by seed 36, the 36. seed, after 5.9s: VIOLATION [linearizability: key-17: no order] []\nPASS\n", nil)
	require.NoError(t, got.err)
	require.Equal(t, "internal/sim seed 36: linearizability", got.by)
	for out, err := range map[string]error{
		"PASS\n": nil,
		"retry-twice: caught by seed 1, the 1. seed, after 1s: VIOLATION [once: k] []\n":               nil,
		"config-ignored: caught by seed 36, the 36. seed, after 5.9s: VIOLATION [session: k] []\nFAIL": errors.New("exit 1"),
	} {
		got := c.seedIn(caught{}, out, err)
		require.Error(t, got.err, out)
		require.Empty(t, got.by)
	}
}
