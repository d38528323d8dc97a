package check

import (
	"fmt"
	"slices"

	"github.com/kvd-io/kvd/jepsen/history"
)

// The kinds of findings.
const (
	KindSanity       = "impossible"      // what no store may show
	KindTorn         = "torn"            // bytes that nobody wrote
	KindTwice        = "applied twice"   // one write under two versions
	KindGhost        = "not applied"     // a write that was said to have failed was seen
	KindPhantom      = "phantom"         // a value that nobody wrote there
	KindFuture       = "future"          // read before it was written
	KindLinearizable = "linearizability" // porcupine found no order
	KindSession      = "session"
	KindStale        = "stale"
	KindLock         = "lock"
	KindList         = "list"
)

// Finding is one violation.
type Finding struct {
	Kind string        `json:"kind"`
	Key  string        `json:"key"`
	Text string        `json:"text"`
	Ops  []*history.Op `json:"ops,omitempty"`
}

func (f Finding) String() string { return fmt.Sprintf("%s: %s: %s", f.Kind, f.Key, f.Text) }

func (x *index) report(kind string, op *history.Op, key, format string, args ...any) {
	x.bad = append(x.bad, Finding{Kind: kind, Key: key, Text: fmt.Sprintf(format, args...), Ops: []*history.Op{op}})
}

// sanity looks at what reads show, at any level, against what was written.
func (x *index) sanity() {
	for _, name := range x.names {
		k := x.keys[name]
		versionOf, valueOf := map[uint64]uint64{}, map[uint64]uint64{}
		bind := func(op *history.Op, value, version uint64) {
			if v, ok := versionOf[value]; ok && v != version {
				x.report(KindTwice, op, name, "value %d has version %d and version %d: one write was applied twice", value, v, version)
			}
			if w, ok := valueOf[version]; ok && w != value {
				x.report(KindSanity, op, name, "version %d is that of value %d and of value %d", version, w, value)
			}
			versionOf[value], valueOf[version] = version, value
		}
		for _, op := range k.strong {
			if op.Kind.Stores() && op.Outcome == history.OK {
				bind(op, op.Value, op.Version)
			}
		}
		for _, op := range slices.Concat(k.strong, k.weak) {
			if op.Kind == history.Get && op.Outcome == history.OK {
				x.sane(k, op, bind)
			}
		}
	}
}

func (x *index) sane(k *key, op *history.Op, bind func(*history.Op, uint64, uint64)) {
	if op.Bad != "" {
		x.report(KindTorn, op, k.name, "operation %d found bytes that nobody wrote: %s", op.ID, op.Bad)
		return
	}
	w := x.written[op.Got]
	switch {
	case w == nil:
		x.report(KindPhantom, op, k.name, "operation %d found value %d, which nobody wrote", op.ID, op.Got)
		return
	case w.Key != k.name:
		x.report(KindPhantom, op, k.name, "operation %d found value %d, which was written to %s", op.ID, op.Got, w.Key)
		return
	case w.Outcome != history.OK && w.Outcome != history.Unknown:
		x.report(KindGhost, op, k.name, "operation %d found value %d, but that write (operation %d) was answered %q: not applied", op.ID, op.Got, w.ID, w.Outcome)
	case w.Call > op.Return:
		x.report(KindFuture, op, k.name, "operation %d found value %d before it was written", op.ID, op.Got)
	}
	bind(op, op.Got, op.Version)
}
