package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const stream = `{"Action":"start","Package":"m/a"}
{"Action":"run","Package":"m/a","Test":"TestGood"}
{"Action":"output","Package":"m/a","Test":"TestGood","Output":"chatter of a good test\n"}
{"Action":"pass","Package":"m/a","Test":"TestGood","Elapsed":0.1}
{"Action":"output","Package":"m/a","Test":"TestBad","Output":"want 1, got 2\n"}
{"Action":"fail","Package":"m/a","Test":"TestBad","Elapsed":0.1}
{"Action":"output","Package":"m/a","Test":"TestLeftOut","Output":"no device\n"}
{"Action":"skip","Package":"m/a","Test":"TestLeftOut","Elapsed":0}
{"Action":"fail","Package":"m/a","Elapsed":0.3}
{"Action":"skip","Package":"m/none","Elapsed":0}
`

func TestCountsAndShowsOnlyWhatMatters(t *testing.T) {
	for _, skipsFail := range []bool{false, true} {
		var out bytes.Buffer
		var results bytes.Buffer
		s := newSummary(&out, skipsFail)
		s.results = &results
		require.NoError(t, s.read(strings.NewReader(stream)))
		require.Equal(t, `{"Package":"m/a","Test":"TestGood","Result":"pass","Seconds":0.1}
{"Package":"m/a","Test":"TestBad","Result":"fail","Seconds":0.1}
{"Package":"m/a","Test":"TestLeftOut","Result":"skip","Seconds":0}
`, results.String())
		require.Equal(t, 1, s.passed)
		require.False(t, s.ok())
		require.Contains(t, out.String(), "want 1, got 2")
		require.Contains(t, out.String(), "no device")
		require.NotContains(t, out.String(), "chatter")
		if skipsFail {
			require.Equal(t, 2, s.failed())
			require.Contains(t, s.line(), "1 passed, 2 failed")
		} else {
			require.Equal(t, 1, s.failed())
			require.Contains(t, s.line(), "1 skipped")
		}
	}
}

func TestSkipAloneFailsOnlyWhereAsked(t *testing.T) {
	events := `{"Action":"skip","Package":"m/a","Test":"TestX"}
{"Action":"pass","Package":"m/a"}
`
	for _, skipsFail := range []bool{false, true} {
		s := newSummary(&bytes.Buffer{}, skipsFail)
		require.NoError(t, s.read(strings.NewReader(events)))
		require.Equal(t, !skipsFail, s.ok())
	}
}

func TestPackageThatFailsWithoutATestIsAFailure(t *testing.T) {
	var out bytes.Buffer
	var results bytes.Buffer
	s := newSummary(&out, false)
	s.results = &results
	require.NoError(t, s.read(strings.NewReader(`{"ImportPath":"m/b","Action":"build-output","Output":"b.go:3:1: no such name\n"}
{"ImportPath":"m/b","Action":"build-fail"}
{"Action":"output","Package":"m/b","Output":"FAIL\tm/b [build failed]\n"}
{"Action":"fail","Package":"m/b","Elapsed":0,"FailedBuild":"m/b"}
`)))
	require.Equal(t, 1, s.failed())
	require.Contains(t, out.String(), "no such name")
	require.Equal(t, "{\"Package\":\"m/b\",\"Test\":\"\",\"Result\":\"fail\",\"Seconds\":0}\n", results.String())
}

func TestOutputOfATestCutOffByAPanicIsShown(t *testing.T) {
	var out bytes.Buffer
	s := newSummary(&out, false)
	require.NoError(t, s.read(strings.NewReader(`{"Action":"output","Package":"m/c","Test":"TestHang","Output":"panic: test timed out\n"}
{"Action":"fail","Package":"m/c","Elapsed":600}
`)))
	require.Equal(t, 1, s.failed())
	require.Contains(t, out.String(), "test timed out")
}

// The real go command, on a module with one test that passes and one that skips.
func TestRunGoTest(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	write("go.mod", "module m\n\ngo 1.24\n")
	write("a_test.go", "package m\n\nimport \"testing\"\n\nfunc TestA(t *testing.T) {}\nfunc TestB(t *testing.T) { t.Skip(\"why\") }\n")
	t.Chdir(dir)
	s := newSummary(&bytes.Buffer{}, true)
	require.NoError(t, runGoTest([]string{"./..."}, s))
	require.Equal(t, 1, s.passed)
	require.Equal(t, 1, s.failed())

	write("a_test.go", "package m\n\nfunc broken( {\n")
	s = newSummary(&bytes.Buffer{}, true)
	err := runGoTest([]string{"./..."}, s)
	require.True(t, err != nil || !s.ok(), "a test file that does not compile must not pass")

	s = newSummary(&bytes.Buffer{}, true)
	err = runGoTest([]string{"./nowhere"}, s)
	require.True(t, err != nil || !s.ok(), "a package that is not there must not pass")
}

func TestTotals(t *testing.T) {
	path := filepath.Join(t.TempDir(), "totals")
	s := newSummary(&bytes.Buffer{}, true)
	require.NoError(t, s.read(strings.NewReader(stream)))
	require.NoError(t, appendTotals(path, "unit", s, nil))
	require.NoError(t, appendTotals(path, "race", s, os.ErrClosed))
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "unit 1 2\nrace 1 3\n", string(got))
}
