package history

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzRead: whatever can be read is valid, and is read again as it was when it is written
// again.
func FuzzRead(f *testing.F) {
	const run = `{"run":{"workload":"a","nemesis":"kill","schedule":[{"kind":"kill"}]}}` + "\n"
	const op = `{"op":{"id":1,"kind":"put","key":"k","shard":1,"call":1,"return":2,"outcome":"unknown"}}` + "\n"
	f.Add([]byte(run + op + `{"fault":{"kind":"kill","start":1,"end":2}}` + "\n" + `{"end":{"call":1,"gets":{"shm":1}}}`))
	f.Add([]byte(run + op[:30]))
	f.Add([]byte(run + `{"op":{"id":2,"kind":"list","call":1,"return":2,"outcome":"ok","items":[{"key":"k","shard":2,"got":1}]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := Read(bytes.NewReader(b))
		if err != nil {
			return
		}
		ids := map[uint64]bool{}
		for _, op := range h.Ops {
			require.False(t, ids[op.ID])
			ids[op.ID] = true
			require.LessOrEqual(t, op.Call, op.Return)
			require.NoError(t, op.valid())
		}
		path := filepath.Join(t.TempDir(), "history.jsonl")
		rec, err := Create(path, h.Header)
		require.NoError(t, err)
		for _, op := range h.Ops {
			rec.Op(op)
		}
		for _, fault := range h.Faults {
			rec.Fault(fault)
		}
		_, err = rec.Close(h.End)
		require.NoError(t, err)
		first, err := os.ReadFile(path)
		require.NoError(t, err)
		again, err := Read(bytes.NewReader(first))
		require.NoError(t, err)
		require.Len(t, again.Ops, len(h.Ops))
		require.Len(t, again.Faults, len(h.Faults))
		require.Equal(t, h.End == nil, again.End == nil)
	})
}
