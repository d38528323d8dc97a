package check

import (
	"bytes"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvd-io/kvd/jepsen/history"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// script builds histories by hand.
type script struct{ h history.History }

func newScript() *script {
	return &script{history.History{Header: history.Header{Workload: "hand"}, End: &history.End{}}}
}

// op adds an operation of a process, which is its own client, on key k of shard 1.
func (s *script) op(process int, call, ret int64, op history.Op) *history.Op {
	op.ID = uint64(len(s.h.Ops) + 1)
	op.Process, op.Client, op.Call, op.Return = process, fmt.Sprintf("c%d", process), call, ret
	if op.Key == "" {
		op.Key = "k"
	}
	if op.Shard == 0 {
		op.Shard = 1
	}
	if op.Outcome == "" {
		op.Outcome = history.OK
	}
	s.h.Ops = append(s.h.Ops, &op)
	return &op
}

func put(value, version uint64) history.Op {
	return history.Op{Kind: history.Put, Value: value, Version: version}
}

func got(value, version uint64) history.Op {
	return history.Op{Kind: history.Get, Got: value, Version: version}
}

func none() history.Op { return history.Op{Kind: history.Get, Outcome: history.Absent} }

func del(version uint64) history.Op { return history.Op{Kind: history.Del, Version: version} }

func unknown(op history.Op) history.Op {
	op.Outcome, op.Version = history.Unknown, 0
	return op
}

func at(level string, op history.Op) history.Op {
	op.Level = level
	return op
}

func lag(n int64, op history.Op) history.Op {
	op.Level, op.MaxLag = "stale", &n
	return op
}

func on(key string, op history.Op) history.Op {
	op.Key = key
	return op
}

func list(items ...history.Item) history.Op {
	return history.Op{Kind: history.List, Key: "d/", Items: items}
}

func item(key string, got, version uint64) history.Item {
	return history.Item{Key: key, Got: got, Version: version, Shard: 1}
}

// Each case is a history and the kinds of what must be found in it; none: it must pass.
func TestVerdicts(t *testing.T) {
	for _, c := range []struct {
		name  string
		build func(s *script)
		want  []string
	}{
		// register
		{"register: what was written is read", func(s *script) {
			s.op(1, 1, 2, none())
			s.op(1, 3, 4, put(1, 10))
			s.op(2, 5, 6, got(1, 10))
			s.op(2, 7, 8, del(11))
			s.op(1, 9, 10, none())
			s.op(1, 11, 12, history.Op{Kind: history.Del, Outcome: history.Absent})
		}, nil},
		{"register: stale read", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, put(2, 11))
			s.op(2, 5, 6, got(1, 10))
		}, []string{KindLinearizable}},
		{"register: reads at the same time may differ", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 9, put(2, 11))
			s.op(2, 4, 8, got(1, 10))
			s.op(3, 4, 8, got(2, 11))
		}, nil},
		{"register: new, then old", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 9, put(2, 11))
			s.op(2, 4, 5, got(2, 11))
			s.op(3, 6, 7, got(1, 10))
		}, []string{KindLinearizable}},
		{"register: lost write", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(2, 3, 4, none())
		}, []string{KindLinearizable}},
		{"register: a write of unknown fate may be lost", func(s *script) {
			s.op(1, 1, 2, unknown(put(1, 0)))
			s.op(2, 3, 4, none())
		}, nil},
		{"register: or come late", func(s *script) {
			s.op(1, 1, 2, unknown(put(1, 0)))
			s.op(2, 3, 4, none())
			s.op(2, 5, 6, got(1, 10))
		}, nil},
		{"register: but not go again", func(s *script) {
			s.op(1, 1, 2, unknown(put(1, 0)))
			s.op(2, 3, 4, got(1, 10))
			s.op(2, 5, 6, none())
		}, []string{KindLinearizable}},
		{"register: a delete of unknown fate may come late", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, unknown(del(0)))
			s.op(2, 5, 6, got(1, 10))
			s.op(2, 7, 8, none())
		}, nil},
		{"register: a failed read says nothing", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(2, 3, 4, history.Op{Kind: history.Get, Outcome: history.Fail})
		}, nil},
		{"register: a write that was refused shows", func(s *script) {
			s.op(1, 1, 2, history.Op{Kind: history.Put, Value: 1, Outcome: history.Fail})
			s.op(2, 3, 4, got(1, 10))
		}, []string{KindGhost, KindLinearizable}},
		{"register: swap", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, history.Op{Kind: history.Swap, Value: 2, Expect: 10, Version: 12})
			s.op(2, 5, 6, history.Op{Kind: history.Swap, Value: 3, Expect: 10, Version: 12, Outcome: history.Conflict})
			s.op(2, 7, 8, history.Op{Kind: history.Drop, Expect: 12, Version: 13})
			s.op(2, 9, 10, history.Op{Kind: history.Swap, Value: 4, Expect: 12, Outcome: history.Conflict})
			s.op(2, 11, 12, history.Op{Kind: history.Add, Value: 5, Version: 14})
			s.op(2, 13, 14, history.Op{Kind: history.Add, Value: 6, Version: 14, Outcome: history.Conflict})
		}, nil},
		{"register: two swaps of one version", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, history.Op{Kind: history.Swap, Value: 2, Expect: 10, Version: 12})
			s.op(2, 3, 4, history.Op{Kind: history.Swap, Value: 3, Expect: 10, Version: 13})
		}, []string{KindLinearizable}},
		{"register: a conflict names what had been replaced", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, put(2, 11))
			s.op(2, 5, 6, history.Op{Kind: history.Swap, Value: 3, Expect: 9, Outcome: history.Conflict, Version: 10})
		}, []string{KindLinearizable}},
		{"register: a conflict that was none", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, history.Op{Kind: history.Swap, Value: 2, Expect: 10, Version: 10, Outcome: history.Conflict})
		}, []string{KindLinearizable}},
		{"register: a swap of unknown fate shows", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, unknown(history.Op{Kind: history.Swap, Value: 2, Expect: 10}))
			s.op(2, 5, 6, got(2, 12))
		}, nil},
		{"register: a swap of unknown fate on what was gone", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, put(2, 11))
			s.op(1, 5, 6, unknown(history.Op{Kind: history.Swap, Value: 3, Expect: 10}))
			s.op(2, 7, 8, got(3, 12))
		}, []string{KindLinearizable}},
		{"register: versions fall", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, put(2, 9))
		}, []string{KindLinearizable}},
		{"register: torn", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			op := got(1, 10)
			op.Bad = "value 1 of 64 bytes differs at byte 40"
			s.op(2, 3, 4, op)
		}, []string{KindTorn}},
		{"register: a value from nowhere", func(s *script) {
			s.op(2, 3, 4, got(7, 10))
		}, []string{KindPhantom, KindLinearizable}},
		{"register: another key's value", func(s *script) {
			s.op(1, 1, 2, on("other", put(1, 10)))
			s.op(2, 3, 4, got(1, 10))
		}, []string{KindPhantom, KindLinearizable}},
		{"register: read before it was written", func(s *script) {
			s.op(2, 1, 2, got(1, 10))
			s.op(1, 3, 4, put(1, 10))
		}, []string{KindFuture, KindLinearizable}},
		{"register: GetMany is a get of each", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, put(2, 11))
			s.op(2, 5, 6, history.Op{Kind: history.Many, Keys: []string{"k", "l"}, Items: []history.Item{item("k", 1, 10), item("l", 0, 0)}})
		}, []string{KindLinearizable}},

		// once
		{"once: applied twice, under two versions", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(2, 3, 4, put(2, 11))
			s.op(2, 5, 6, at("stale", got(1, 12)))
		}, []string{KindTwice}},
		{"once: the second time overwrites a later write", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(2, 3, 4, put(2, 11))
			s.op(2, 5, 6, got(1, 12))
		}, []string{KindTwice, KindLinearizable}},
		{"once: a retried swap conflicts with itself", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, history.Op{Kind: history.Swap, Value: 2, Expect: 10, Version: 11, Outcome: history.Conflict})
			s.op(2, 5, 6, got(2, 11))
		}, []string{KindGhost, KindLinearizable}},
		{"once: two values of one version", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(2, 3, 4, put(2, 10))
		}, []string{KindSanity, KindLinearizable}},

		// session
		{"session: own writes, never back", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, at("session", got(1, 10)))
			s.op(2, 5, 6, put(2, 11))
			s.op(1, 7, 8, at("session", got(1, 10))) // not seen yet: allowed
			s.op(1, 9, 10, at("session", got(2, 11)))
		}, nil},
		{"session: own write not seen", func(s *script) {
			s.op(2, 1, 2, put(1, 10))
			s.op(1, 3, 4, put(2, 11))
			s.op(1, 5, 6, at("session", got(1, 10)))
		}, []string{KindSession}},
		{"session: non-monotonic", func(s *script) {
			s.op(2, 1, 2, put(1, 10))
			s.op(2, 3, 4, put(2, 11))
			s.op(1, 5, 6, at("session", got(2, 11)))
			s.op(1, 7, 8, at("session", got(1, 10)))
		}, []string{KindSession}},
		{"session: back behind what another key of the shard showed", func(s *script) {
			s.op(2, 1, 2, put(1, 10))
			s.op(2, 3, 4, put(2, 11))
			s.op(2, 5, 6, on("l", put(3, 12)))
			s.op(1, 7, 8, on("l", at("session", got(3, 12))))
			s.op(1, 9, 10, at("session", got(1, 10)))
		}, []string{KindSession}},
		{"session: another shard says nothing", func(s *script) {
			s.op(2, 1, 2, put(1, 10))
			s.op(2, 3, 4, put(2, 11))
			other := on("l", put(3, 12))
			other.Shard = 2
			s.op(2, 5, 6, other)
			seen := on("l", at("session", got(3, 12)))
			seen.Shard = 2
			s.op(1, 7, 8, seen)
			s.op(1, 9, 10, at("session", got(1, 10)))
		}, nil},
		{"session: the key was deleted meanwhile", func(s *script) {
			s.op(2, 1, 2, put(1, 10))
			s.op(2, 3, 4, del(11))
			s.op(2, 5, 6, put(2, 12))
			s.op(1, 7, 8, at("session", got(1, 10)))
			s.op(1, 9, 10, at("session", none()))
			s.op(1, 11, 12, at("session", got(2, 12)))
		}, nil},
		{"session: back behind an absence", func(s *script) {
			s.op(2, 1, 2, put(1, 10))
			s.op(2, 3, 4, del(11))
			s.op(1, 5, 6, at("session", got(1, 10)))
			s.op(1, 7, 8, at("session", none()))
			s.op(1, 9, 10, at("session", got(1, 10)))
		}, []string{KindSession}},
		{"session: own write gone", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, at("session", none()))
		}, []string{KindSession}},

		// stale
		{"stale: an old value", func(s *script) {
			s.op(2, 1, 2, put(1, 10))
			s.op(2, 3, 4, put(2, 11))
			s.op(2, 5, 6, at("stale", got(1, 10)))
			s.op(1, 5, 6, at("stale", none()))
		}, nil},
		{"stale: not committed", func(s *script) {
			s.op(2, 1, 2, history.Op{Kind: history.Put, Value: 1, Outcome: history.Fail})
			s.op(1, 3, 4, at("stale", got(1, 10)))
		}, []string{KindGhost}},
		{"stale: within the bound", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, put(2, 15))
			s.op(1, 5, 6, lag(5, got(1, 10)))
			s.op(1, 7, 8, lag(0, got(2, 15)))
			s.op(2, 9, 10, lag(0, got(1, 10))) // this client knows of nothing newer
		}, nil},
		{"stale: beyond the bound", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 3, 4, put(2, 15))
			s.op(1, 5, 6, on("l", put(3, 20)))
			s.op(1, 7, 8, lag(5, got(1, 10)))
		}, []string{KindStale}},
		{"stale: absent beyond the bound", func(s *script) {
			s.op(1, 1, 2, put(1, 10))
			s.op(1, 5, 6, on("l", put(3, 20)))
			s.op(1, 7, 8, lag(10, none()))
		}, []string{KindStale}},

		// lock
		{"lock: one after the other", func(s *script) {
			s.op(1, 1, 2, on("lock/a", history.Op{Kind: history.Add, Value: 1, Version: 10}))
			s.op(2, 2, 3, on("lock/a", history.Op{Kind: history.Add, Value: 2, Version: 10, Outcome: history.Conflict}))
			s.op(1, 5, 7, on("lock/a", history.Op{Kind: history.Drop, Expect: 10, Version: 11}))
			s.op(2, 6, 8, on("lock/a", history.Op{Kind: history.Add, Value: 3, Version: 12}))
		}, nil},
		{"lock: lost to another", func(s *script) {
			s.op(1, 1, 2, on("lock/a", history.Op{Kind: history.Add, Value: 1, Version: 10}))
			s.op(2, 3, 4, on("lock/a", history.Op{Kind: history.Add, Value: 2, Version: 11}))
			s.op(1, 5, 6, on("lock/a", history.Op{Kind: history.Drop, Expect: 10, Version: 11, Outcome: history.Conflict}))
		}, []string{KindLock, KindLinearizable}},
		{"lock: taken by a write of unknown fate", func(s *script) {
			s.op(1, 1, 2, on("lock/a", unknown(history.Op{Kind: history.Add, Value: 1})))
			s.op(2, 3, 4, on("lock/a", history.Op{Kind: history.Add, Value: 2, Version: 10, Outcome: history.Conflict}))
			s.op(1, 5, 6, on("lock/a", got(1, 10)))
			s.op(1, 7, 8, on("lock/a", history.Op{Kind: history.Drop, Expect: 10, Version: 11}))
			s.op(2, 9, 10, on("lock/a", history.Op{Kind: history.Add, Value: 3, Version: 12}))
		}, nil},

		// set
		{"set: all there", func(s *script) {
			s.op(1, 1, 2, on("d/a", history.Op{Kind: history.Add, Value: 1, Version: 10}))
			s.op(1, 1, 2, on("d/b", history.Op{Kind: history.Add, Value: 2, Version: 11}))
			s.op(2, 3, 4, list(item("d/a", 1, 10), item("d/b", 2, 11)))
		}, nil},
		{"set: an acknowledged element is lost", func(s *script) {
			s.op(1, 1, 2, on("d/a", history.Op{Kind: history.Add, Value: 1, Version: 10}))
			s.op(1, 1, 2, on("d/b", history.Op{Kind: history.Add, Value: 2, Version: 11}))
			s.op(2, 3, 4, list(item("d/b", 2, 11)))
		}, []string{KindLinearizable}},

		// list
		{"list: phantom", func(s *script) {
			s.op(1, 1, 2, on("d/a", put(1, 10)))
			s.op(1, 3, 4, on("d/a", del(11)))
			s.op(2, 5, 6, list(item("d/a", 1, 10)))
		}, []string{KindLinearizable}},
		{"list: a key that nobody wrote", func(s *script) {
			s.op(2, 5, 6, list(item("d/x", 9, 10)))
		}, []string{KindPhantom, KindLinearizable}},
		{"list: twice", func(s *script) {
			s.op(1, 1, 2, on("d/a", put(1, 10)))
			s.op(2, 5, 6, list(item("d/a", 1, 10), item("d/a", 1, 10)))
		}, []string{KindList}},
		{"list: a foreign key", func(s *script) {
			s.op(1, 1, 2, on("e/a", put(1, 10)))
			s.op(2, 5, 6, list(item("e/a", 1, 10)))
		}, []string{KindList}},
		{"list: a part", func(s *script) {
			for i, name := range []string{"d/a", "d/b", "d/c", "d/d"} {
				s.op(1, 1, 2, on(name, put(uint64(i+1), uint64(i+10))))
			}
			op := list(item("d/b", 2, 11), item("d/c", 3, 12))
			op.After, op.Limit = "d/a", 2
			s.op(2, 3, 4, op)
		}, nil},
		{"list: a gap in a part", func(s *script) {
			for i, name := range []string{"d/a", "d/b", "d/c", "d/d"} {
				s.op(1, 1, 2, on(name, put(uint64(i+1), uint64(i+10))))
			}
			op := list(item("d/b", 2, 11), item("d/d", 4, 13))
			op.After, op.Limit = "d/a", 2
			s.op(2, 3, 4, op)
		}, []string{KindLinearizable}},
		{"list: keys changed while it ran", func(s *script) {
			s.op(1, 1, 9, on("d/a", put(1, 10)))
			s.op(3, 1, 9, on("d/b", put(2, 11)))
			s.op(2, 3, 4, list(item("d/b", 2, 11)))
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newScript()
			c.build(s)
			r := Judge(&s.h, Options{})
			var kinds []string
			for _, f := range r.Findings {
				kinds = append(kinds, f.Kind)
			}
			require.ElementsMatch(t, c.want, kinds, "%v", r.Findings)
			want := Pass
			if len(c.want) > 0 {
				want = Violation
			}
			require.Equal(t, want, r.Verdict)
			require.Contains(t, r.Line(&s.h), string(want))
			var page bytes.Buffer
			require.NoError(t, r.Picture(&page))
			require.True(t, strings.Contains(page.String(), "</html>"), "no page: %d bytes", page.Len())
		})
	}
}

// A checker that ran out of time has not passed anything.
func TestUndecidedIsNoPass(t *testing.T) {
	s := newScript()
	// Many writes at once, of which nobody knows anything, and a last one that can not be:
	// the checker has to try every order.
	for i := range 40 {
		s.op(i, 1, 100, unknown(put(uint64(i+1), 0)))
		s.op(100+i, 2, 100, history.Op{Kind: history.Del, Version: 0, Outcome: history.Unknown})
	}
	s.op(200, 101, 102, history.Op{Kind: history.Swap, Value: 900, Expect: 5, Version: 4, Outcome: history.OK})
	r := Judge(&s.h, Options{Timeout: 20 * time.Millisecond})
	require.Equal(t, Undecided, r.Verdict)
	require.Equal(t, []string{"k"}, r.Undecided)
	require.Contains(t, r.Line(&s.h), "not decided")
}

// A run that did not come to its end, made no progress or lost a node does not count.
func TestBroken(t *testing.T) {
	good := func() *script {
		s := newScript()
		s.op(1, 1, 2, put(1, 10))
		s.op(2, 3, 4, got(1, 10))
		return s
	}
	for name, spoil := range map[string]func(h *history.History){
		"cut off":     func(h *history.History) { h.End = nil },
		"no progress": func(h *history.History) { h.End.Progress = "client c1 worked on 3 of 4 shards" },
		"crash":       func(h *history.History) { h.End.Crashes = []string{"node 1 ended by itself"} },
		"interrupted": func(h *history.History) { h.End.Stopped = true },
	} {
		s := good()
		spoil(&s.h)
		r := Judge(&s.h, Options{})
		require.Equal(t, Broken, r.Verdict, name)
		require.Len(t, r.Problems, 1, name)
	}
	s := good()
	require.Equal(t, Pass, Judge(&s.h, Options{}).Verdict)
	require.Equal(t, Broken, Judge(&s.h, Options{Need: func(*Report) []string { return []string{"nothing was tested"} }}).Verdict)
	// A violation stays one, whatever else is wrong with the run.
	s.op(2, 5, 6, none())
	s.h.End = nil
	require.Equal(t, Violation, Judge(&s.h, Options{}).Verdict)
}

// What is judged stays as it was recorded, so that it can be judged again.
func TestJudgeChangesNothing(t *testing.T) {
	s := newScript()
	s.op(1, 1, 2, unknown(put(1, 0)))
	s.op(2, 3, 4, got(1, 10))
	before := *s.h.Ops[0]
	first := Judge(&s.h, Options{})
	require.Equal(t, before, *s.h.Ops[0])
	require.Equal(t, first.Verdict, Judge(&s.h, Options{}).Verdict)
	require.Equal(t, int64(math.MaxInt64), operations([]*history.Op{s.h.Ops[0]}, nil)[0].Return)
}

// A bug of ours that shows on a goroutine of the judge shows where it was called.
func TestPanicsReachTheCaller(t *testing.T) {
	x := &index{keys: map[string]*key{}, names: []string{"a", "b", "c", "d", "e", "f", "g"}}
	require.Panics(t, func() { x.linearizable(time.Second) })
}
