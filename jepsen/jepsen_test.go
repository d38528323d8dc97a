package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvd-io/kvd/jepsen/check"
	"github.com/kvd-io/kvd/jepsen/env"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/jepsen/nemesis"
)

// cleanup removes what tests share.
var cleanup = func() {}

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		cleanup()
		os.Exit(code)
	}))
}

// judge runs the command on a saved history.
func judge(t *testing.T, path string) (line string, err error) {
	t.Helper()
	cmd := newCommand()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&bytes.Buffer{})
	cmd.SetArgs([]string{"--judge", path})
	err = cmd.ExecuteContext(context.Background())
	return out.String(), err
}

func saved(t *testing.T, change func(h *history.Header, ops []*history.Op, end *history.End)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "history.jsonl")
	header := history.Header{Workload: "register", Nemesis: "none", Seed: 3, Settings: map[string]string{"transport": "shm"}}
	ops := []*history.Op{
		{ID: 1, Kind: history.Put, Key: "k", Value: 1, Call: 1, Return: 2, Outcome: history.OK, Version: 10, Shard: 1},
		{ID: 2, Kind: history.Get, Key: "k", Call: 3, Return: 4, Outcome: history.OK, Got: 1, Version: 10, Shard: 1},
	}
	end := &history.End{Gets: map[string]uint64{"shm": 1}}
	change(&header, ops, end)
	rec, err := history.Create(path, header)
	require.NoError(t, err)
	for _, op := range ops {
		rec.Op(op)
	}
	_, err = rec.Close(end)
	require.NoError(t, err)
	return path
}

func TestJudgeASavedHistory(t *testing.T) {
	path := saved(t, func(*history.Header, []*history.Op, *history.End) {})
	line, err := judge(t, path)
	require.NoError(t, err, line)
	require.Contains(t, line, "PASS")
	for _, name := range []string{"again-verdict.txt", "again-report.json", "again-picture.html"} {
		st, err := os.Stat(filepath.Join(filepath.Dir(path), name))
		require.NoError(t, err)
		require.NotZero(t, st.Size(), name)
	}
}

// Each verdict has an exit code of its own, and a run that tested nothing is no pass.
func TestVerdictsAndExitCodes(t *testing.T) {
	for name, c := range map[string]struct {
		change func(h *history.Header, ops []*history.Op, end *history.End)
		want   check.Verdict
		code   int
		says   string
	}{
		"violation": {func(_ *history.Header, ops []*history.Op, _ *history.End) { ops[1].Outcome = history.Absent }, check.Violation, exitViolation, "linearizability"},
		"nothing":   {func(_ *history.Header, ops []*history.Op, _ *history.End) { ops[1].Outcome = history.Fail }, check.Broken, exitBroken, "nothing was tested"},
		"not shm":   {func(_ *history.Header, _ []*history.Op, end *history.End) { end.Gets = map[string]uint64{"grpc": 1} }, check.Broken, exitBroken, "over shm"},
		"not verbs": {func(h *history.Header, _ []*history.Op, end *history.End) {
			h.Settings["transport"], end.Gets = "verbs", map[string]uint64{"tcp": 1, "grpc": 1}
		}, check.Broken, exitBroken, "over verbs"},
		"no progress": {func(_ *history.Header, _ []*history.Op, end *history.End) { end.Progress = "stuck" }, check.Broken, exitBroken, "no progress"},
		"no fault": {func(h *history.Header, _ []*history.Op, _ *history.End) {
			h.Schedule = []json.RawMessage{[]byte(`{"kind":"kill"}`)}
		}, check.Broken, exitBroken, "no fault happened"},
		"no fault, nor planned": {func(h *history.Header, _ []*history.Op, _ *history.End) { h.Nemesis = "all" }, check.Broken, exitBroken, "no fault happened"},
		"left out is told": {func(h *history.Header, _ []*history.Op, _ *history.End) {
			h.Nemesis, h.LeftOut = "kill,halves", []string{"halves"}
		}, check.Broken, exitBroken, "nemesis kill,halves (without halves: left out here)"},
	} {
		line, err := judge(t, saved(t, c.change))
		var v verdictError
		require.ErrorAs(t, err, &v, name)
		require.Equal(t, c.want, v.verdict, name)
		require.Equal(t, c.code, v.code(), name)
		require.Contains(t, line, c.says, name)
	}
	require.Equal(t, exitUnknown, verdictError{check.Undecided}.code())
}

// What no run records is refused, and is no verdict; a run that was killed is BROKEN.
func TestJudgeDamagedHistories(t *testing.T) {
	for name, change := range map[string]func(h *history.Header, ops []*history.Op, end *history.End){
		`workload "bank"`:     func(h *history.Header, _ []*history.Op, _ *history.End) { h.Workload = "bank" },
		`transport "pigeon"`:  func(h *history.Header, _ []*history.Op, _ *history.End) { h.Settings["transport"] = "pigeon" },
		`transport ""`:        func(h *history.Header, _ []*history.Op, _ *history.End) { h.Settings = nil },
		`fault "rain"`:        func(h *history.Header, _ []*history.Op, _ *history.End) { h.Nemesis = "rain" },
		"before it is called": func(_ *history.Header, ops []*history.Op, _ *history.End) { ops[0].Call = 9 },
		`outcome "okay"`: func(_ *history.Header, ops []*history.Op, _ *history.End) {
			ops[1].Level, ops[1].Outcome = "stale", "okay"
		},
		`key "k" of shard 0`: func(_ *history.Header, ops []*history.Op, _ *history.End) { ops[1].Level, ops[1].Shard = "session", 0 },
		`item 0 has key ""`: func(_ *history.Header, ops []*history.Op, _ *history.End) {
			ops[1].Kind, ops[1].Items = history.List, []history.Item{{}}
		},
		"operation 1 already": func(_ *history.Header, ops []*history.Op, _ *history.End) { ops[1].ID = 1 },
	} {
		line, err := judge(t, saved(t, change))
		require.ErrorContains(t, err, name)
		var v verdictError
		require.NotErrorAs(t, err, &v, "%s: %s", name, line)
		require.Empty(t, line)
	}
	path := saved(t, func(*history.Header, []*history.Op, *history.End) {})
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, b[:len(b)-9], 0o600))
	line, err := judge(t, path)
	require.Equal(t, verdictError{check.Broken}, err)
	require.Contains(t, line, "the history has no end")
}

// brokenPipe is a bug of ours, somewhere below the judge.
type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { panic("boom") }

// A panic is no verdict: Go's exit code for it is that of UNKNOWN.
func TestPanicWhileJudging(t *testing.T) {
	cmd := newCommand()
	cmd.SetOut(&bytes.Buffer{})
	cmd.SetErr(brokenPipe{})
	cmd.SetArgs([]string{"--judge", saved(t, func(*history.Header, []*history.Op, *history.End) {})})
	err := cmd.ExecuteContext(context.Background())
	require.ErrorContains(t, err, "panic: boom")
	var v verdictError
	require.NotErrorAs(t, err, &v)
}

func TestFaultsThatWereNotSeen(t *testing.T) {
	h := &history.History{Header: history.Header{Schedule: []json.RawMessage{[]byte(`{"kind":"kill"}`), []byte(`{"kind":"stop"}`), []byte(`{"kind":"oom"}`)}}}
	h.Faults = []history.Fault{{Kind: "kill", Seen: true}, {Kind: "kill"}, {Kind: "stop"}, {Kind: "stop"}, {Kind: "oom"}}
	require.Equal(t, []string{"fault stop was ordered 2 times and never seen to happen"}, neverSeen(h))
	h.Faults[2].Short = true
	require.Empty(t, neverSeen(h), "the run ended before it could be seen")
	h.Faults = []history.Fault{{Kind: "stop", Short: true}}
	require.Equal(t, []string{"no fault happened at all"}, neverSeen(h))
}

// A run that can have no fault of those asked for is not made; one that asks for none is.
func TestRunsWithoutFaults(t *testing.T) {
	for _, c := range []struct {
		nemesis string
		length  time.Duration
		says    string // empty: no error
		leftOut []string
	}{
		{"none", time.Second, "", nil},
		{"kill", nemesis.RoomForOne(1), "", nil},
		{"kill,halves,fail-sync", time.Minute, "", []string{"fail-sync", "halves"}},
		{"kill", 2 * time.Second, "--time 2s: too short", nil},
		{"halves,kill", 2 * time.Second, "too short", []string{"halves"}},
		{"network", time.Minute, "--nemesis network: this place can have none", []string{"bridge", "client-leader", "flap", "halves", "isolate-leader", "one-way", "ring"}},
	} {
		for seed := range uint64(50) {
			f := &flags{workload: "register", nemesis: c.nemesis, length: c.length, tempo: 1, nodes: 3, seed: seed, programs: &binaries{}}
			r, err := f.newRun(func(string, ...any) {})
			require.NoError(t, err)
			r.env = &env.Env{}
			err = r.dropImpossible()
			if c.says == "" {
				require.NoError(t, err, c.nemesis)
			} else {
				require.ErrorContains(t, err, c.says)
			}
			require.Equal(t, c.leftOut, r.leftOut)
			require.Equal(t, c.leftOut, r.header(false).LeftOut)
		}
	}
}

// With one node there is nothing between nodes, and with one replica nothing between
// replicas, to have faults.
func TestFaultsBySize(t *testing.T) {
	for _, c := range []struct {
		nodes, replication int
		leftOut            []string
	}{
		{1, 0, []string{"isolate-leader", "replace", "transfer"}}, {3, 1, []string{"replace", "transfer"}}, {3, 3, nil}, {7, 0, nil},
	} {
		f := &flags{workload: "register", nemesis: "kill,replace,transfer,isolate-leader", length: time.Minute, nodes: c.nodes, replication: c.replication, programs: &binaries{}}
		r, err := f.newRun(func(string, ...any) {})
		require.NoError(t, err)
		r.leaveOutBySize()
		require.Equal(t, c.leftOut, r.leftOut)
	}
	require.Equal(t, []int{1, 3, 5, 5}, []int{(&flags{nodes: 1}).replicas(), (&flags{nodes: 3}).replicas(), (&flags{nodes: 5}).replicas(), (&flags{nodes: 7}).replicas()})
	require.Equal(t, 1, (&flags{nodes: 7, replication: 1}).replicas())
}

// What counts is what answered: not what a client was told to use, nor what other faults met.
func TestGetsDuringStops(t *testing.T) {
	h := &history.History{Faults: []history.Fault{
		{Kind: "stop", Seen: true, Gets: map[string]uint64{"shm": 5, "grpc": 100}},
		{Kind: "stop", Seen: true, Gets: map[string]uint64{"tcp": 7}},
		{Kind: "stop", Seen: true, Gets: map[string]uint64{"shm": 6}},
		{Kind: "stop", Gets: map[string]uint64{"shm": 1000}},
		{Kind: "kill", Seen: true, Gets: map[string]uint64{"shm": 1000}},
	}}
	h.Ops = append(h.Ops, &history.Op{Kind: history.Get, Via: "shm", Outcome: history.OK, Call: 1, Return: 2})
	require.EqualValues(t, 11, duringStops(h))
}

// A variant that is caught too late is not caught, and no run begins that would be too late.
func TestControlsInTime(t *testing.T) {
	in := caught{by: "a test"}.within(controlLimit)
	require.NoError(t, in.err)
	require.Equal(t, controlLimit, in.took)
	late := caught{by: "a test"}.within(controlLimit + time.Second)
	require.ErrorContains(t, late.err, "caught by a test, but only after 121 s: want at most 120 s")
	missed := caught{err: os.ErrNotExist}.within(2 * controlLimit)
	require.ErrorIs(t, missed.err, os.ErrNotExist, "it was not caught at all")
	require.True(t, another(controlLimit-controlTime, controlTime))
	require.False(t, another(controlLimit-controlTime, controlTime+1))
}

func TestBadFlags(t *testing.T) {
	good := saved(t, func(*history.Header, []*history.Op, *history.End) {})
	for _, args := range [][]string{
		{"--workload", "bank"}, {"--nemesis", "rain"}, {"--transport", "pigeon"}, {"--nodes", "4"}, {"--nodes", "3", "--replication", "5"}, {"--replication", "2"}, {"--keys", "0"},
		{"--time", "0s"}, {"--min-size", "1"}, {"--net", "moon"}, {"--rate", "-1"}, {"--rate", "NaN"}, {"--rate", "Inf"}, {"--judge", "/does/not/exist"},
		{"--plan", "--time", "2s"}, {"--judge", good, "--control", "all"}, {"--judge", good, "--plan"}, {"--control", "all", "--plan"},
		{"--addresses", "10.0.0.1,10.0.0.2"}, {"--addresses", "10.0.0.1,10.0.0.2,10.0.0.3", "--net", "namespaces"},
	} {
		cmd := newCommand()
		cmd.SetArgs(args)
		cmd.SetOut(&bytes.Buffer{})
		cmd.SetErr(&bytes.Buffer{})
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		require.Error(t, cmd.ExecuteContext(ctx), "%v", args)
		cancel()
	}
}

func TestPlanIsPrinted(t *testing.T) {
	print := func(seed string) string {
		cmd := newCommand()
		var out bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetArgs([]string{"--plan", "--seed", seed})
		require.NoError(t, cmd.Execute())
		return out.String()
	}
	require.Equal(t, print("4"), print("4"))
	require.NotEqual(t, print("4"), print("5"))
	require.Contains(t, print("4"), "network")
}

// The worst verdict of several runs is that of all.
func TestWorstVerdict(t *testing.T) {
	rows := func(vs ...check.Verdict) []*outcome {
		var out []*outcome
		for _, v := range vs {
			out = append(out, &outcome{&history.History{Faults: []history.Fault{{Kind: "kill", Seen: true}}}, &check.Report{Verdict: v, Operations: 5}})
		}
		return out
	}
	require.NoError(t, worst(rows(check.Pass, check.Pass)))
	require.Equal(t, verdictError{check.Broken}, worst(rows(check.Pass, check.Broken)))
	require.Equal(t, verdictError{check.Undecided}, worst(rows(check.Undecided, check.Broken)))
	require.Equal(t, verdictError{check.Violation}, worst(rows(check.Undecided, check.Violation, check.Pass)))
	require.Equal(t, []string{"oom", "stop"}, unseen([]*outcome{
		{h: &history.History{Faults: []history.Fault{{Kind: "kill", Seen: true}, {Kind: "stop"}, {Kind: "oom", Short: true}}}},
		{h: &history.History{Faults: []history.Fault{{Kind: "kill"}}}},
	}))
	text := sumUp(rows(check.Pass, check.Undecided))
	require.Contains(t, text, "UNKNOWN")
	require.Contains(t, text, "10")
	require.Contains(t, text, "kill 2")
}
