package check

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/jepsen/history"
)

// FuzzJudge: whatever can be read as a history can be judged, and no more than one verdict
// comes of it.
func FuzzJudge(f *testing.F) {
	const run = `{"run":{"workload":"register","nemesis":"none"}}` + "\n"
	const end = `{"end":{"call":9,"gets":{}}}`
	f.Add([]byte(run + `{"op":{"id":1,"kind":"put","key":"k","value":1,"shard":1,"call":1,"return":2,"outcome":"ok","version":3}}` + "\n" +
		`{"op":{"id":2,"kind":"get","level":"session","key":"k","got":1,"shard":1,"call":3,"return":4,"outcome":"ok","version":3}}` + "\n" + end))
	f.Add([]byte(run + `{"op":{"id":1,"kind":"swap","key":"lock/k","value":1,"expect":1,"shard":1,"call":1,"return":2,"outcome":"conflict","version":3}}` + "\n" +
		`{"op":{"id":2,"kind":"drop","key":"lock/k","expect":3,"shard":1,"call":2,"return":4,"outcome":"unknown"}}` + "\n" + end))
	f.Add([]byte(run + `{"op":{"id":1,"kind":"add","key":"d/a","value":1,"shard":1,"call":1,"return":2,"outcome":"unknown"}}` + "\n" +
		`{"op":{"id":2,"kind":"list","key":"d/","call":1,"return":4,"outcome":"ok","items":[{"key":"d/a","got":1,"version":2,"shard":1}]}}` + "\n" +
		`{"op":{"id":3,"kind":"many","keys":["d/a","d/b"],"call":1,"return":4,"outcome":"ok","items":[{"key":"d/a","failed":true,"shard":1},{"key":"d/b","shard":1}]}}` + "\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := history.Read(bytes.NewReader(b))
		if err != nil || len(h.Ops) > 12 {
			return // many operations at once only take time
		}
		r := Judge(h, Options{Timeout: 20 * time.Millisecond})
		require.Contains(t, []Verdict{Pass, Violation, Undecided, Broken}, r.Verdict)
		require.Equal(t, len(r.Findings) > 0, r.Verdict == Violation)
		if h.End == nil {
			require.NotEqual(t, Pass, r.Verdict, "a run that did not end is no pass")
		}
		require.NoError(t, r.Picture(&bytes.Buffer{}))
	})
}
