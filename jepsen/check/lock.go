package check

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/kvd-io/kvd/jepsen/history"
)

// LockPrefix of keys that are used as locks: taken by Add, given back by Drop of the
// version that Add made.
const LockPrefix = "lock/"

// holding is the time for which a process certainly held a lock.
type holding struct {
	from, to int64
	op       *history.Op
}

// locks looks for two certain holdings that overlap. Linearizability of the key implies
// it; this says it in the words of who uses a lock.
func (x *index) locks() {
	for _, name := range x.names {
		if !strings.HasPrefix(name, LockPrefix) {
			continue
		}
		k := x.keys[name]
		ends := map[uint64]int64{} // by version: the earliest attempt to give it back
		for _, op := range k.strong {
			if op.Kind == history.Drop {
				if end, ok := ends[op.Expect]; !ok || op.Call < end {
					ends[op.Expect] = op.Call
				}
			}
		}
		var held []holding
		for _, op := range k.strong {
			if op.Kind != history.Add || op.Outcome != history.OK {
				continue
			}
			h := holding{op.Return, math.MaxInt64, op}
			if end, ok := ends[op.Version]; ok {
				h.to = end
			}
			held = append(held, h)
		}
		slices.SortFunc(held, func(a, b holding) int { return cmp.Compare(a.from, b.from) })
		for i := 1; i < len(held); i++ {
			if a, b := held[i-1], held[i]; b.from < a.to {
				x.bad = append(x.bad, Finding{KindLock, name, fmt.Sprintf(
					"process %d was given the lock (version %d) while process %d held it (version %d)",
					b.op.Process, b.op.Version, a.op.Process, a.op.Version), []*history.Op{a.op, b.op}})
			}
		}
	}
}
