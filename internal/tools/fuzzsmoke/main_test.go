package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const fuzzFile = `package m

import "testing"

func FuzzGood(f *testing.F) { f.Fuzz(func(t *testing.T, b []byte) {}) }
func FuzzBad(f *testing.F) {
	f.Add([]byte("x"))
	f.Fuzz(func(t *testing.T, b []byte) { t.Fatal("found") })
}
func FuzzyHelper(n int) {}
func TestFuzzNot(t *testing.T) {}
`

func TestFindsAndRuns(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "sub", "testdata"), 0o755))
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	write("go.mod", "module m\n\ngo 1.24\n")
	write("sub/a_test.go", fuzzFile)
	write("sub/testdata/b_test.go", "not Go at all")

	targets, err := find(dir)
	require.NoError(t, err)
	require.Equal(t, []target{{"./sub", "FuzzBad"}, {"./sub", "FuzzGood"}}, targets)

	t.Chdir(dir)
	b, out, err := build("./sub", filepath.Join(dir, "x.test"), true)
	require.NoError(t, err, string(out))
	out, err = b.run("FuzzBad", time.Second)
	require.Error(t, err)
	require.Contains(t, string(out), "found")
	require.False(t, raceAtTheEnd(out))
	out, err = b.run("FuzzGood", time.Second)
	require.NoError(t, err, string(out))
	require.Contains(t, lastProgress(out), "execs: ")
	require.NotEqual(t, "0 (0/sec)", lastProgress(out))

	for _, unguided := range [][]string{nil, {"./sub"}} {
		passed, failed := runAll(targets, t.TempDir(), time.Second, unguided)
		require.Equal(t, []int{1, 1}, []int{passed, failed})
	}

	write("sub/c_test.go", "package m\n\nvar x int = \"\"\n")
	_, out, err = build("./sub", filepath.Join(dir, "x.test"), true)
	require.ErrorContains(t, err, "build of ./sub")
	require.Contains(t, string(out), "c_test.go:3")
}

func TestDeadlineOfTheEngineIsNoFinding(t *testing.T) {
	ended := "fuzz: elapsed: 5s, execs: 10 (0/sec)\n--- FAIL: FuzzX (5.01s)\n    context deadline exceeded\nFAIL\n"
	require.True(t, raceAtTheEnd([]byte(ended)))
	require.False(t, raceAtTheEnd([]byte(ended+"    Failing input written to testdata/fuzz/FuzzX/1\n")))
	require.False(t, raceAtTheEnd([]byte("--- FAIL: FuzzX (0.01s)\n    panic: index out of range\n")))
}
