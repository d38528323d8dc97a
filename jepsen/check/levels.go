package check

import (
	"cmp"
	"container/heap"
	"fmt"
	"slices"

	"github.com/kvd-io/kvd/jepsen/history"
)

// The levels session and stale are judged by versions, which are indexes of the shard's
// log. A client that was shown version v knows that its shard has come to index v. A
// session read must show a state at least as new as all that the client knew when the
// read began, in any key of the shard; a read with a bound of n entries, a state at most n
// entries behind that.

// scope is what one client knows of one shard.
type scope struct {
	client string
	shard  uint32
}

// levels judges all reads of the weaker levels.
func (x *index) levels() {
	ops := map[scope][]*history.Op{}
	for _, name := range x.names {
		k := x.keys[name]
		if k.shard == 0 {
			continue
		}
		for _, op := range slices.Concat(k.strong, k.weak) {
			if op.Bad == "" && op.Outcome != history.Fail {
				ops[scope{op.Client, k.shard}] = append(ops[scope{op.Client, k.shard}], op)
			}
		}
	}
	for _, list := range ops {
		x.levelsOf(list)
	}
}

// levelsOf judges one client's operations on one shard. What a read must show is
// what was known when it began, so the ends of operations are taken in before the
// beginnings that follow them.
func (x *index) levelsOf(ops []*history.Op) {
	slices.SortStableFunc(ops, func(a, b *history.Op) int { return cmp.Compare(a.Call, b.Call) })
	var known uint64
	var ends endings
	for _, op := range ops {
		for len(ends) > 0 && ends[0].at < op.Call {
			known = max(known, heap.Pop(&ends).(ending).shows)
		}
		shows := op.Version
		if op.Kind == history.Get && op.Level != "" {
			shows = x.judgeLevel(op, known)
		}
		if op.Outcome != history.Unknown {
			heap.Push(&ends, ending{op.Return, shows})
		}
	}
}

// judgeLevel judges a read whose client knew of that index, and returns the index that
// the read's answer proves.
func (x *index) judgeLevel(op *history.Op, known uint64) uint64 {
	k := x.keys[op.Key]
	kind, need := KindSession, known
	if op.Level == "stale" {
		kind, need = KindStale, 0
		if op.MaxLag != nil {
			need = known - min(known, uint64(*op.MaxLag))
		}
	}
	must := k.at(need)
	if op.Outcome == history.OK {
		if must != nil && op.Version < must.version {
			x.bad = append(x.bad, Finding{kind, op.Key, fmt.Sprintf(
				"operation %d of client %s shows version %d, but had to show version %d or newer (the client knew of index %d)",
				op.ID, op.Client, op.Version, must.version, known), []*history.Op{must.op, op}})
		}
		return op.Version
	}
	if op.Outcome != history.Absent {
		return 0
	}
	since, ok := k.absentSince(need, op.Return)
	if !ok {
		x.bad = append(x.bad, Finding{kind, op.Key, fmt.Sprintf(
			"operation %d of client %s found nothing, but version %d was there at index %d and nobody has removed it since",
			op.ID, op.Client, must.version, need), []*history.Op{must.op, op}})
	}
	if kind == KindStale {
		return 0 // an absence at this level proves nothing about an index
	}
	return since
}

// absentSince finds the earliest index, need or later, at which the key was absent, as far
// as was called before the time given.
func (k *key) absentSince(need uint64, before int64) (uint64, bool) {
	w := k.at(need)
	if w == nil || !w.op.Kind.Stores() {
		return need, true
	}
	for _, del := range k.openDels {
		if del.Call <= before {
			return need, true
		}
	}
	for _, later := range k.versions {
		if later.version > need && !later.op.Kind.Stores() && later.op.Call <= before {
			return later.version, true
		}
	}
	return 0, false
}

// ending of an operation.
type ending struct {
	at    int64
	shows uint64 // the index that its answer proves
}

type endings []ending

func (e endings) Len() int           { return len(e) }
func (e endings) Less(i, j int) bool { return e[i].at < e[j].at }
func (e endings) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *endings) Push(v any)        { *e = append(*e, v.(ending)) }
func (e *endings) Pop() any {
	old := *e
	v := old[len(old)-1]
	*e = old[:len(old)-1]
	return v
}
