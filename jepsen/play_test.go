package main

import (
	"bufio"
	"context"
	"encoding/gob"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/jepsen/check"
	"github.com/kvd-io/kvd/jepsen/env"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/jepsen/worker"
)

const standInVar = "JEPSEN_STAND_IN"

// The program of the tests is also what stands in for a worker: it speaks as one does, of
// a cluster that is a map.
func init() {
	if how := os.Getenv(standInVar); how != "" {
		standIn(how)
		os.Exit(0)
	}
}

// ask and answer have the fields of a worker's requests and responses that are needed
// here: gob goes by their names.
type ask struct {
	ID     uint64
	Op     *history.Op
	Status bool
	Stats  bool
}

type answer struct {
	ID     uint64
	Ready  bool
	Op     *history.Op
	Status *worker.Status
	Stats  *worker.Stats
}

func standIn(how string) {
	dec, enc := gob.NewDecoder(bufio.NewReader(os.Stdin)), gob.NewEncoder(os.Stdout)
	var cfg worker.Config
	if dec.Decode(&cfg) != nil || enc.Encode(answer{Ready: true}) != nil {
		return
	}
	type stored struct{ value, version uint64 }
	has, version, gets := map[string]stored{}, uint64(0), uint64(0)
	for {
		var q ask
		if dec.Decode(&q) != nil {
			return
		}
		a := answer{ID: q.ID, Op: q.Op}
		switch op := q.Op; {
		case q.Status:
			a.Status = &worker.Status{Answered: []uint64{1, 2, 3}}
			for n := range uint64(3) {
				a.Status.Replicas = append(a.Status.Replicas, worker.Replica{Node: n + 1, Shard: 1, Applied: 9})
			}
			switch how {
			case "silent":
				a.Status.Answered = a.Status.Answered[:2]
			case "behind":
				a.Status.Replicas[2].Applied = 8
			}
		case q.Stats:
			a.Stats = &worker.Stats{Gets: map[string]uint64{"shm": gets}}
		case how == "dies":
			return
		default:
			op.Call, op.Shard, op.Outcome = worker.Now(), 1, history.OK
			v, there := has[op.Key]
			switch {
			case how == "stuck" && strings.HasPrefix(op.Key, "probe/"):
				op.Outcome, op.Err = history.Fail, "nobody leads"
			case op.Kind == history.Put:
				version++
				op.Version = version
				has[op.Key] = stored{op.Value, version}
			case op.Kind == history.Get && there:
				gets++
				op.Got, op.Version = v.value, v.version
			case op.Kind == history.Get:
				op.Outcome = history.Absent
			default:
				op.Outcome = history.Fail
			}
			op.Return = worker.Now()
		}
		if enc.Encode(a) != nil {
			return
		}
	}
}

// played is a run without kvd: the nodes are processes that wait to be killed.
type played struct {
	h            *history.History
	end          *history.End
	began, ended int64
	healed       int64         // when progress was waited for
	final        []*history.Op // that were to come then
}

func play(t *testing.T, how string) played {
	t.Helper()
	dir := t.TempDir()
	bin := filepath.Join(dir, "node")
	require.NoError(t, os.WriteFile(bin, []byte("#!/bin/sh\nexec sleep 1000\n"), 0o700))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var p played
	say := func(format string, args ...any) {
		t.Logf(format, args...)
		if !strings.HasPrefix(format, "healed") {
			return
		}
		p.healed = worker.Now()
		if how != "works" {
			cancel() // there will be no progress
		}
	}
	f := &flags{workload: "register", nemesis: "none", transport: "shm", length: 300 * time.Millisecond, seed: 3, nodes: 3, shards: 1,
		concurrency: 3, rate: 300, keys: 4, minSize: 16, maxSize: 64}
	r, err := f.newRun(say)
	require.NoError(t, err)
	r.env, err = env.New(env.Config{Binary: bin, Self: bin, DataDir: dir, LogDir: dir, Nodes: 3, Shards: 1, Clients: []string{"beside"}})
	require.NoError(t, err)
	defer func() { require.NoError(t, r.close()) }()
	for _, n := range r.env.Nodes {
		require.NoError(t, n.Start())
	}
	start := func(host string) *worker.Worker {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), standInVar+"="+how)
		w, err := worker.Start(ctx, worker.Config{Name: host}, cmd, r.env.Starter(host))
		require.NoError(t, err)
		return w
	}
	r.ctl = start(env.Control)
	w := start("beside")
	r.workers = append(r.workers, w)
	r.clients = append(r.clients, clientAt{w, 0, "one", "shm"}, clientAt{w, 1, "two", "shm"})
	r.rec, err = history.Create(filepath.Join(dir, "history.jsonl"), r.header(false))
	require.NoError(t, err)
	p.began = worker.Now()
	p.end = r.play(ctx)
	p.ended = worker.Now()
	p.h, err = r.rec.Close(p.end)
	require.NoError(t, err)
	for _, ops := range r.load.Final(f.concurrency) {
		p.final = append(p.final, ops...)
	}
	ids := map[uint64]bool{}
	for _, op := range p.h.Ops {
		require.LessOrEqual(t, p.began, op.Call)
		require.LessOrEqual(t, op.Call, op.Return)
		require.LessOrEqual(t, op.Return, p.ended)
		require.False(t, ids[op.ID], "operation %d twice", op.ID)
		ids[op.ID] = true
	}
	return p
}

// A run that works ends with a read of every key by every reader, after it was healed: they
// decide what was lost.
func TestRunEndsWithFinalReads(t *testing.T) {
	p := play(t, "works")
	require.Empty(t, p.end.Progress)
	require.False(t, p.end.Stopped)
	require.Contains(t, p.end.Counts, "milliseconds from healing to progress")
	var last, want []string
	for _, op := range p.h.Ops {
		if op.Call > p.healed {
			last = append(last, fmt.Sprintf("%s %s", op.Kind, op.Key))
		}
	}
	for _, op := range p.final {
		want = append(want, fmt.Sprintf("%s %s", op.Kind, op.Key))
	}
	require.NotEmpty(t, want)
	require.ElementsMatch(t, want, last)
	require.Greater(t, len(p.h.Ops), len(last), "and nothing but them would be no run")
	require.Equal(t, check.Pass, check.Judge(p.h, check.Options{Need: needs(p.h)}).Verdict)
}

// A healed cluster that does not work, or of which a node stays away or behind, makes no
// progress, and the run does not count.
func TestRunWithoutProgress(t *testing.T) {
	for how, says := range map[string]string{
		"stuck":  "worked on 0 of 1 shards",
		"silent": "only nodes [1 2] answer",
		"behind": "node 3 has applied shard 1 up to 8: want 9",
	} {
		p := play(t, how)
		require.Contains(t, p.end.Progress, says, how)
		r := check.Judge(p.h, check.Options{Need: needs(p.h)})
		require.Equal(t, check.Broken, r.Verdict, how)
		require.Contains(t, strings.Join(r.Problems, "\n"), says, how)
	}
}

// What a worker that is gone was doing has times that enclose it, and is of unknown fate
// where it writes.
func TestWorkerThatIsGone(t *testing.T) {
	p := play(t, "dies")
	require.NotEmpty(t, p.h.Ops)
	for _, op := range p.h.Ops {
		want := history.Fail
		if op.Kind.Writes() {
			want = history.Unknown
		}
		require.Equal(t, want, op.Outcome, "%s", op.Kind)
		require.NotEmpty(t, op.Err)
	}
	require.NotEmpty(t, p.end.Progress)
	require.NotEmpty(t, p.end.Crashes, "it did not answer when asked what it had counted")
	require.Equal(t, check.Broken, check.Judge(p.h, check.Options{}).Verdict)
}
