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

// What no run records is refused, with what is wrong.
func TestDamagedFiles(t *testing.T) {
	const (
		run = `{"run":{"workload":"a"}}` + "\n"
		op  = `{"op":{"id":1,"process":0,"client":"c","via":"","kind":"get","key":"k","shard":1,"call":1,"return":2,"outcome":"ok"}}` + "\n"
		end = `{"end":{"call":1,"progress":"","gets":{}}}` + "\n"
	)
	_, err := Read(strings.NewReader(run + op + end))
	require.NoError(t, err, "what is damaged below is good")
	with := func(old, replacement string) string {
		require.Equal(t, 1, strings.Count(op, old), old)
		return run + strings.Replace(op, old, replacement, 1)
	}
	for name, text := range map[string]string{
		"holds 2 of":                   strings.TrimSuffix(run, "}\n") + "," + op[1:],
		"holds 0 of":                   run + `{"op":null}`,
		"behind the end":               run + end + end,
		"unexpected EOF":               run + end + op[:20],
		"an operation 1 already":       run + op + op,
		"want the run's header":        op,
		`kind "grab"`:                  with(`"get"`, `"grab"`),
		`outcome "okay"`:               with(`"ok"`, `"okay"`),
		`level "Session"`:              with(`"kind"`, `"level":"Session","kind"`),
		`get of outcome "unknown"`:     with(`"ok"`, `"unknown"`),
		`get of outcome "conflict"`:    with(`"ok"`, `"conflict"`),
		`put of level "stale"`:         with(`"kind":"get"`, `"level":"stale","kind":"put"`),
		"maxLag -1":                    with(`"kind"`, `"level":"stale","maxLag":-1,"kind"`),
		`maxLag 1 at level "session"`:  with(`"kind"`, `"level":"session","maxLag":1,"kind"`),
		"returns at 2, before":         with(`"call":1`, `"call":3`),
		`key "k" of shard 0`:           with(`"shard":1,`, `"level":"session",`),
		`key "" of shard 1`:            with(`"key":"k",`, ``),
		"get of 1 items":               with(`"kind"`, `"items":[{"key":"k","shard":1}],"kind"`),
		`item 1 has key "" of shard 0`: with(`"kind":"get"`, `"items":[{"key":"k","shard":1},null],"kind":"list"`),
		"fault kill ends at 1":         run + `{"fault":{"kind":"kill","start":2,"end":1,"seen":true}}`,
	} {
		_, err := Read(strings.NewReader(text))
		require.ErrorContains(t, err, name)
	}
	for name, text := range map[string]string{
		"empty":         "",
		"no header":     `{"op":{"id":1,"process":0,"client":"c","via":"","kind":"get","call":1,"return":2,"outcome":"ok"}}`,
		"two headers":   `{"run":{"workload":"a"}}` + "\n" + `{"run":{"workload":"a"}}`,
		"cut header":    `{"run":{"workload":"a"`,
		"cut within":    `{"run":{"workload":"a"}}` + "\n" + `{"op":{"id":1,` + "\n" + op,
		"unknown field": `{"run":{"workload":"a","colour":"red"}}`,
		"empty entry":   `{"run":{"workload":"a"}}` + "\n{}",
	} {
		_, err := Read(strings.NewReader(text))
		require.Error(t, err, name)
	}
	h, err := Read(strings.NewReader(`{"run":{"workload":"a"}}`))
	require.NoError(t, err)
	require.Nil(t, h.End, "a run that was cut off between lines can be judged, but has no end")
	whole := run + op + end
	for cut := len(run); cut < len(whole)-1; cut++ { // the last is a line's end alone
		h, err = Read(strings.NewReader(whole[:cut]))
		require.NoError(t, err, whole[:cut])
		require.Nil(t, h.End)
	}
	require.Len(t, h.Ops, 1)
	_, err = ReadFile(filepath.Join(t.TempDir(), "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}
