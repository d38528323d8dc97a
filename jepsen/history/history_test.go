package history

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWhatIsWrittenIsRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.jsonl")
	header := Header{Workload: "register", Nemesis: "all", Seed: 1 << 63, Settings: map[string]string{"time": "1s"}}
	rec, err := Create(path, header)
	require.NoError(t, err)
	lag := int64(0)
	op := &Op{ID: 1, Process: 2, Client: "c", Via: "shm", Kind: Get, Level: "stale", MaxLag: &lag, Key: "k", Call: 5, Return: 6, Outcome: OK, Got: 3, Version: 4, Shard: 1}
	list := &Op{ID: 2, Kind: List, Key: "d/", Call: 7, Return: 9, Outcome: OK, Items: []Item{{Key: "d/a", Got: 5, Version: 6, Shard: 2}}}
	rec.Op(op)
	rec.Fault(Fault{Kind: "kill", Nodes: []uint64{2}, Start: 1, End: 2, Seen: true, Detail: "leader"})
	rec.Op(list)
	h, err := rec.Close(&End{Gets: map[string]uint64{"shm": 1}})
	require.NoError(t, err)
	again, err := ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, h, again)
	require.Equal(t, []*Op{op, list}, again.Ops)
}

// A file that was cut within a line, or is something else, is refused.
func TestDamagedFiles(t *testing.T) {
	for name, text := range map[string]string{
		"empty":         "",
		"no header":     `{"op":{"id":1,"process":0,"client":"c","via":"","kind":"get","call":1,"return":2,"outcome":"ok"}}`,
		"two headers":   `{"run":{"workload":"a"}}` + "\n" + `{"run":{"workload":"a"}}`,
		"cut":           `{"run":{"workload":"a"}}` + "\n" + `{"op":{"id":1,`,
		"unknown field": `{"run":{"workload":"a","colour":"red"}}`,
		"empty entry":   `{"run":{"workload":"a"}}` + "\n{}",
	} {
		_, err := Read(strings.NewReader(text))
		require.Error(t, err, name)
	}
	h, err := Read(strings.NewReader(`{"run":{"workload":"a"}}`))
	require.NoError(t, err)
	require.Nil(t, h.End, "a run that was cut off between lines can be judged, but has no end")
	_, err = ReadFile(filepath.Join(t.TempDir(), "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}
