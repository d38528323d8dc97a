//go:build e2e || rdmaguest

package e2e

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/internal/doctor"
)

const doctorFoundProblems = 9

// diagnosed is a report of kvctl doctor, whose exit code and standard error say the same.
func diagnosed(t testing.TB, r result) doctor.Report {
	t.Helper()
	var report doctor.Report
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &report), r.text())
	if report.Healthy {
		require.Zero(t, r.code, r.text())
		require.Empty(t, r.stderr)
	} else {
		require.Equal(t, doctorFoundProblems, r.code, r.text())
		require.True(t, strings.HasPrefix(r.stderr, "kvctl: problems were found: "), r.stderr)
		require.Equal(t, 1, strings.Count(r.stderr, "\n"), r.stderr)
	}
	for _, f := range report.Findings {
		require.NotEmpty(t, f.Do, "%+v", f)
	}
	return report
}

// about are the findings on the cluster, or on one area of it: what the test's host has in
// it is not the test's.
func about(r doctor.Report, area string) (list []doctor.Finding) {
	for _, f := range r.Findings {
		if strings.HasPrefix(f.Area, area) {
			list = append(list, f)
		}
	}
	return list
}

func pathBy(t testing.TB, n doctor.Node, transport string) doctor.Path {
	t.Helper()
	i := slices.IndexFunc(n.Paths, func(p doctor.Path) bool { return p.Transport == transport })
	require.NotEqual(t, -1, i, "%+v", n)
	return n.Paths[i]
}
