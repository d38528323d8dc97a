package check

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/jepsen/history"
)

// seedOf is KVD_SEED or a random one; a failing test prints it.
func seedOf(t *testing.T) uint64 {
	seed := rand.Uint64()
	if s := os.Getenv("KVD_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("KVD_SEED=%d", seed)
		}
	})
	return seed
}

// random makes a history that is right by construction: every operation takes effect at
// one moment of its time, in order, on a store in memory. Some answers are lost, and some
// writes without an answer take effect much later or never.
func random(rng *rand.Rand, n int) *script {
	s := newScript()
	type cell struct{ value, version uint64 }
	now, value, version := int64(0), uint64(0), uint64(10)
	store := map[string]cell{}
	var late []func()
	for range n {
		now += 10
		key := fmt.Sprintf("k%d", rng.IntN(2))
		op := history.Op{Key: key}
		begin, end := now-int64(rng.IntN(25)), now+int64(rng.IntN(25))
		cur := store[key]
		apply := func() {}
		fresh := func() {
			value++
			op.Value = value
		}
		set := func(v uint64) func() {
			return func() {
				version++
				store[key] = cell{v, version}
			}
		}
		switch kind := []history.Kind{history.Get, history.Get, history.Put, history.Add, history.Swap, history.Del, history.Drop}[rng.IntN(7)]; kind {
		case history.Get:
			op.Kind, op.Got, op.Version = kind, cur.value, cur.version
			if cur.value == 0 {
				op.Outcome, op.Version = history.Absent, 0
			}
		case history.Put:
			op.Kind = kind
			fresh()
			apply = set(op.Value)
		case history.Add:
			op.Kind = kind
			fresh()
			if cur.value != 0 {
				op.Outcome, op.Version = history.Conflict, cur.version
			} else {
				apply = set(op.Value)
			}
		case history.Swap, history.Drop:
			if cur.value == 0 {
				continue
			}
			op.Kind, op.Expect = kind, cur.version
			if kind == history.Swap {
				fresh()
			}
			apply = set(op.Value)
		case history.Del:
			op.Kind = kind
			if cur.value == 0 {
				op.Outcome = history.Absent
			} else {
				apply = set(0)
			}
		}
		lost := op.Kind.Writes() && op.Outcome == "" && rng.IntN(12) == 0
		switch {
		case !lost:
			before := version
			apply()
			if version != before {
				op.Version = version
			}
		case rng.IntN(3) == 0:
			op.Outcome = history.Unknown
			apply()
		case rng.IntN(2) == 0 && op.Kind == history.Put:
			op.Outcome = history.Unknown
			late = append(late, apply)
		default:
			op.Outcome = history.Unknown
		}
		if len(late) > 0 && rng.IntN(6) == 0 {
			now += 60 // a moment of its own, after everything so far has returned
			late[0]()
			late = late[1:]
		}
		s.op(len(s.h.Ops), begin, end, op)
	}
	return s
}

// spoilers each make a right history wrong in one place, or say that it has no such place; with
// the kind of finding that must be made of it.
var spoilers = []struct {
	name  string
	kind  string
	spoil func(rng *rand.Rand, s *script) bool
}{
	{"what had been replaced", KindLinearizable, func(rng *rand.Rand, s *script) bool {
		return eachGet(rng, s, func(get *history.Op) bool {
			old, _ := replaced(s, get)
			if old != nil {
				get.Got, get.Version = old.Value, old.Version
			}
			return old != nil
		})
	}},
	{"an acknowledged write is lost", KindLinearizable, func(rng *rand.Rand, s *script) bool {
		return eachGet(rng, s, func(get *history.Op) bool {
			for _, store := range s.h.Ops {
				if store.Kind.Stores() && store.Outcome == history.OK && store.Key == get.Key && store.Return < get.Call && !removed(s, store, get) {
					get.Outcome, get.Got, get.Version = history.Absent, 0, 0
					return true
				}
			}
			return false
		})
	}},
	{"nobody's value", KindPhantom, func(rng *rand.Rand, s *script) bool {
		return eachGet(rng, s, func(get *history.Op) bool {
			get.Got = 1 << 40
			return true
		})
	}},
	{"another key's value", KindPhantom, func(rng *rand.Rand, s *script) bool {
		return eachGet(rng, s, func(get *history.Op) bool {
			for _, store := range s.h.Ops {
				if store.Kind.Stores() && store.Outcome == history.OK && store.Key != get.Key && store.Return < get.Call {
					get.Got, get.Version = store.Value, store.Version
					return true
				}
			}
			return false
		})
	}},
	{"a value before it was written", KindFuture, func(rng *rand.Rand, s *script) bool {
		return eachGet(rng, s, func(get *history.Op) bool {
			for _, store := range s.h.Ops {
				if store.Kind.Stores() && store.Outcome == history.OK && store.Key == get.Key && store.Call > get.Return {
					get.Got, get.Version = store.Value, store.Version
					return true
				}
			}
			return false
		})
	}},
	{"a torn value", KindTorn, func(rng *rand.Rand, s *script) bool {
		return eachGet(rng, s, func(get *history.Op) bool {
			get.Bad = "word 3 is another value's"
			return true
		})
	}},
	{"a refused write", KindGhost, func(rng *rand.Rand, s *script) bool {
		return eachGet(rng, s, func(get *history.Op) bool {
			for _, store := range s.h.Ops {
				if store.Kind.Stores() && store.Value == get.Got {
					store.Outcome, store.Version = history.Fail, 0
					return true
				}
			}
			return false
		})
	}},
	{"one write, two versions", KindTwice, func(rng *rand.Rand, s *script) bool {
		return eachGet(rng, s, func(get *history.Op) bool {
			for _, store := range s.h.Ops {
				if store.Outcome == history.OK && store.Kind.Stores() && store.Value == get.Got {
					get.Version = 1 << 40
					return true
				}
			}
			return false
		})
	}},
	{"back behind what the client had seen", KindSession, func(rng *rand.Rand, s *script) bool {
		return eachGet(rng, s, func(get *history.Op) bool {
			old, newer := replaced(s, get)
			if old != nil {
				get.Got, get.Version, get.Level, get.Client = old.Value, old.Version, "session", newer.Client
			}
			return old != nil
		})
	}},
	{"further behind than was asked for", KindStale, func(rng *rand.Rand, s *script) bool {
		return eachGet(rng, s, func(get *history.Op) bool {
			old, newer := replaced(s, get)
			if old != nil {
				get.Got, get.Version, get.Level, get.MaxLag, get.Client = old.Value, old.Version, "stale", new(int64), newer.Client
			}
			return old != nil
		})
	}},
}

// Random histories that are right pass, and each that was spoilt in one place is found out,
// by the judge whose business that is.
func TestRandomHistories(t *testing.T) {
	rng := rand.New(rand.NewPCG(seedOf(t), 1))
	for _, c := range spoilers {
		t.Run(c.name, func(t *testing.T) {
			spoilt := 0
			for range 40 {
				s := random(rng, 60)
				r := Judge(&s.h, Options{})
				require.Equal(t, Pass, r.Verdict, "%v", r.Findings)
				if !c.spoil(rng, s) {
					continue
				}
				spoilt++
				r = Judge(&s.h, Options{})
				require.Equal(t, Violation, r.Verdict)
				var kinds []string
				for _, f := range r.Findings {
					kinds = append(kinds, f.Kind)
				}
				require.Contains(t, kinds, c.kind)
			}
			require.Greater(t, spoilt, 20)
		})
	}
}

// A right history stays right when less is known: operations took longer, reads are missing,
// an acknowledgement of a put that nobody relies on was lost.
func TestLessIsKnown(t *testing.T) {
	rng := rand.New(rand.NewPCG(seedOf(t), 2))
	for range 100 {
		s := random(rng, 60)
		for _, op := range s.h.Ops {
			op.Call -= int64(rng.IntN(40))
			if op.Outcome != history.Unknown {
				op.Return += int64(rng.IntN(40))
			}
			switch {
			case rng.IntN(8) != 0:
			case op.Kind == history.Get:
				op.Outcome, op.Got, op.Version = history.Fail, 0, 0
			case op.Kind == history.Put && op.Outcome == history.OK:
				op.Outcome, op.Version = history.Unknown, 0
			}
		}
		r := Judge(&s.h, Options{})
		require.Equal(t, Pass, r.Verdict, "%v", r.Findings)
	}
}

// eachGet tries f on the gets that showed a value, in random order, until it did its work.
func eachGet(rng *rand.Rand, s *script, f func(get *history.Op) bool) bool {
	for _, i := range rng.Perm(len(s.h.Ops)) {
		if get := s.h.Ops[i]; get.Kind == history.Get && get.Outcome == history.OK && f(get) {
			return true
		}
	}
	return false
}

// replaced is an acknowledged write of the get's key, and one that had replaced it before the get
// began; nil: there is none.
func replaced(s *script, get *history.Op) (old, newer *history.Op) {
	for _, old := range s.h.Ops {
		if !old.Kind.Stores() || old.Outcome != history.OK || old.Key != get.Key {
			continue
		}
		for _, newer := range s.h.Ops {
			if newer.Kind.Writes() && newer.Outcome == history.OK && newer.Key == get.Key && newer.Version > old.Version && newer.Return < get.Call {
				return old, newer
			}
		}
	}
	return nil, nil
}

// removed tells whether anything may have removed the key between store and get.
func removed(s *script, store, get *history.Op) bool {
	for _, op := range s.h.Ops {
		if (op.Kind == history.Del || op.Kind == history.Drop) && op.Key == get.Key && op.Call <= get.Return && (op.Outcome == history.Unknown || op.Return >= store.Call) {
			return true
		}
	}
	return false
}
