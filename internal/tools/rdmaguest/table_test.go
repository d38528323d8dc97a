//go:build linux

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTable(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		p := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(p, []byte(text), 0o644))
		return p
	}
	results, err := readLines[testResult](write(resultsFile, `{"Package":"github.com/kvd-io/kvd/rdma/verbs","Test":"TestConformance/rxe/reads","Result":"pass","Seconds":0.5}
{"Package":"github.com/kvd-io/kvd/rdma/verbs","Test":"TestConformance/siw/reads","Result":"fail","Seconds":0.5}
{"Package":"github.com/kvd-io/kvd/rdma/verbs","Test":"TestConformance","Result":"fail","Seconds":1.25}
{"Package":"github.com/kvd-io/kvd/rdma/verbs","Test":"TestLatency","Result":"pass","Seconds":2}
{"Package":"github.com/kvd-io/kvd/rdma/verbs/ibv","Test":"","Result":"fail","Seconds":0}
`))
	require.NoError(t, err)
	figures, err := readLines[figure](write(figuresFile, `{"Test":"TestLatency/rxe","What":"READ of 64 B, p50","Value":45,"Unit":"us","Than":"ib_read_lat","Base":36,"AtMost":1.5}
{"Test":"TestLatency","What":"GetMany","Value":50,"Unit":"MB/s","Than":"ib_read_bw","Base":100,"AtLeast":0.7}
{"Test":"TestElsewhere","What":"READs a get","Value":3}
`))
	require.NoError(t, err)
	var out bytes.Buffer
	printTable(&out, results, figures)
	lines := strings.Split(out.String(), "\n")
	for _, want := range [][]string{
		{"rdma/verbs TestConformance", "fail (1 of 2)", "1.2"},
		{"rdma/verbs TestLatency", "pass", "2.0"},
		{"  READ of 64 B, p50", "45 us", "ib_read_lat 36", "1.25", "at most 1.5"},
		{"  GetMany", "50 MB/s", "ib_read_bw 100", "0.50", "at least 0.7: MISSED"},
		{"rdma/verbs/ibv", "fail"},
		{"  READs a get", "3"},
	} {
		found := false
		for _, l := range lines {
			all := true
			for _, w := range want {
				all = all && strings.Contains(l, w)
			}
			found = found || all
		}
		require.True(t, found, "no line has %q:\n%s", want, out.String())
	}
	require.Equal(t, 1, strings.Count(out.String(), "MISSED"))

	none, err := readLines[figure](filepath.Join(dir, "none"))
	require.NoError(t, err)
	require.Empty(t, none)
	_, err = readLines[figure](write("bad", "{\n"))
	require.ErrorContains(t, err, "bad")
}
