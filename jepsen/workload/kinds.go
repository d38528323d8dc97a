package workload

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/kvd-io/kvd/jepsen/check"
	"github.com/kvd-io/kvd/jepsen/history"
)

// Process does one operation at a time. It is used by one goroutine.
type Process struct {
	ID  int
	Rng *rand.Rand

	key *Key // of the operation under way; nil: several or none
	// Of the workload lock:
	lock    *Key
	token   uint64 // the value that means: mine
	version uint64 // held with this version; 0: not held, or not known
	look    bool   // find out who holds it
}

// Workload decides what processes do.
type Workload struct {
	Name string
	// Private clients: one for each process, as sessions are judged client by client.
	Private bool
	pool    *Pool
	next    func(w *Workload, p *Process) *history.Op
	done    func(w *Workload, p *Process, op *history.Op)
	dirs    bool
}

// Names of the workloads.
func Names() []string {
	return []string{"register", "set", "session", "stale", "lock", "once", "list"}
}

// New makes a workload.
func New(name string, set Settings) (*Workload, error) {
	w := &Workload{Name: name, done: (*Workload).learn}
	prefix := name + "/"
	switch name {
	case "register":
		w.next = (*Workload).register
	case "set":
		w.next, w.dirs = (*Workload).set, true
		set.Keys = max(1, set.Keys/4)
	case "session":
		w.next, w.Private = (*Workload).session, true
	case "stale":
		w.next = (*Workload).stale
	case "lock":
		w.next, w.done, prefix = (*Workload).locks, (*Workload).learnLock, check.LockPrefix
		// When the cluster is gone for a moment, every process leaves an operation of
		// unknown fate on its lock: more than a few on one, and no checker decides it.
		set.Keys = max(1, set.Keys/4, set.Processes/3)
	case "once":
		w.next = (*Workload).once
	case "list":
		w.next, w.dirs = (*Workload).list, true
		set.Keys = max(1, set.Keys/4)
	default:
		return nil, fmt.Errorf("workload %q is not known: want one of %s", name, strings.Join(Names(), ", "))
	}
	w.pool = newPool(prefix, set)
	return w, nil
}

// Next is the process's next operation.
func (w *Workload) Next(p *Process) *history.Op {
	p.key = nil
	return w.next(w, p)
}

// Done takes in how it ended.
func (w *Workload) Done(p *Process, op *history.Op) { w.done(w, p, op) }

func (w *Workload) learn(p *Process, op *history.Op) {
	if p.key != nil {
		w.pool.saw(p.key, op)
	}
}

// Final are the reads of a healed cluster that decide what was lost: every key once, and
// those in use once by each reader.
func (w *Workload) Final(readers int) [][]*history.Op {
	ops := make([][]*history.Op, readers)
	all, active := w.pool.Names()
	kind := history.Get
	if w.dirs {
		kind = history.List
	}
	for i, name := range all {
		if w.dirs {
			name += "/"
		}
		for r := range readers {
			if r == i%readers || slices.Contains(active, all[i]) {
				ops[r] = append(ops[r], &history.Op{Kind: kind, Key: name})
			}
		}
	}
	return ops
}

// choice is one of several, by weight.
type choice struct {
	weight int
	kind   history.Kind
}

func choose(rng *rand.Rand, choices []choice) history.Kind {
	sum := 0
	for _, c := range choices {
		sum += c.weight
	}
	n := rng.IntN(sum)
	for _, c := range choices {
		if n -= c.weight; n < 0 {
			return c.kind
		}
	}
	panic("workload: the weights do not add up")
}

// on makes an operation of a kind on a key in use. Conditions name the newest version
// that anybody saw, sometimes an older one.
func (w *Workload) on(p *Process, kind history.Kind) *history.Op {
	k, version := w.pool.take(p.Rng)
	p.key = k
	if version == 0 && (kind == history.Swap || kind == history.Drop) {
		kind = history.Add // nothing to name yet
	}
	op := &history.Op{Kind: kind, Key: k.Name}
	if kind.Stores() {
		op = w.pool.store(p.Rng, kind, k.Name)
	}
	if kind == history.Swap || kind == history.Drop {
		op.Expect = version
	}
	return op
}

var registerMix = []choice{{42, history.Get}, {7, history.Many}, {20, history.Put}, {14, history.Swap}, {6, history.Add}, {7, history.Del}, {4, history.Drop}}

func (w *Workload) register(p *Process) *history.Op {
	kind := choose(p.Rng, registerMix)
	if kind == history.Many {
		return &history.Op{Kind: kind, Keys: w.pool.takeSome(p.Rng, 2+p.Rng.IntN(4))}
	}
	return w.on(p, kind)
}

var onceMix = []choice{{25, history.Get}, {15, history.Put}, {40, history.Swap}, {8, history.Add}, {5, history.Del}, {7, history.Drop}}

// once writes much and conditionally, so that a write that is applied a second time is
// seen: under two versions, or as a conflict with itself.
func (w *Workload) once(p *Process) *history.Op { return w.on(p, choose(p.Rng, onceMix)) }

var weakMix = []choice{{68, history.Get}, {18, history.Put}, {5, history.Swap}, {3, history.Add}, {6, history.Del}}

func (w *Workload) session(p *Process) *history.Op {
	op := w.on(p, choose(p.Rng, weakMix))
	if op.Kind == history.Get && p.Rng.IntN(8) > 0 {
		op.Level = "session"
	}
	return op
}

var lags = []int64{0, 0, 1, 3, 10, 100}

func (w *Workload) stale(p *Process) *history.Op {
	op := w.on(p, choose(p.Rng, weakMix))
	if op.Kind == history.Get && p.Rng.IntN(8) > 0 {
		op.Level = "stale"
		if p.Rng.IntN(3) > 0 {
			lag := lags[p.Rng.IntN(len(lags))]
			op.MaxLag = &lag
		}
	}
	return op
}

// setSize is how many elements a set gets: every list of it is a read of each.
const setSize = 50

func (w *Workload) set(p *Process) *history.Op {
	switch n := p.Rng.IntN(10); {
	case n < 7:
		set, e := w.pool.element(p.Rng, setSize)
		return w.pool.store(p.Rng, history.Add, fmt.Sprintf("%s/e%03d", set, e))
	case n < 9:
		k, _ := w.pool.take(p.Rng)
		return &history.Op{Kind: history.Get, Key: fmt.Sprintf("%s/e%03d", k.Name, 1+p.Rng.IntN(setSize))}
	default:
		k, _ := w.pool.take(p.Rng)
		return &history.Op{Kind: history.List, Key: k.Name + "/", Page: 1 + p.Rng.IntN(20)}
	}
}

// dirSize is how many keys a prefix has.
const dirSize = 12

var elementMix = []choice{{12, history.Get}, {35, history.Put}, {15, history.Add}, {25, history.Del}}

func (w *Workload) list(p *Process) *history.Op {
	k, _ := w.pool.take(p.Rng)
	p.key = k
	element := func() string { return fmt.Sprintf("%s/f%02d", k.Name, p.Rng.IntN(dirSize)) }
	if p.Rng.IntN(10) < 6 {
		kind := choose(p.Rng, elementMix)
		if kind.Stores() {
			return w.pool.store(p.Rng, kind, element())
		}
		return &history.Op{Kind: kind, Key: element()}
	}
	op := &history.Op{Kind: history.List, Key: k.Name + "/"}
	switch p.Rng.IntN(3) {
	case 0:
		op.Page = 1 + p.Rng.IntN(4)
	case 1:
		op.After, op.Limit = element(), 1+p.Rng.IntN(6)
	}
	return op
}

// locks takes a lock, holds it for an operation or two, and gives it back. Where an
// answer was lost it looks who holds it.
func (w *Workload) locks(p *Process) *history.Op {
	switch {
	case p.look, p.version != 0 && p.Rng.IntN(3) == 0:
		return &history.Op{Kind: history.Get, Key: p.lock.Name}
	case p.version != 0:
		return &history.Op{Kind: history.Drop, Key: p.lock.Name, Expect: p.version}
	}
	p.lock, _ = w.pool.take(p.Rng)
	op := w.pool.store(p.Rng, history.Add, p.lock.Name)
	p.token = op.Value
	return op
}

func (w *Workload) learnLock(p *Process, op *history.Op) {
	w.pool.saw(p.lock, op)
	switch {
	case op.Kind == history.Add && op.Outcome == history.OK:
		p.version = op.Version
	case op.Kind == history.Get && op.Outcome == history.OK && op.Got == p.token:
		p.version, p.look = op.Version, false
	case op.Kind == history.Get && op.Outcome == history.Fail:
		// Looks again, or goes on holding.
	case op.Outcome == history.Unknown:
		p.version, p.look = 0, true
	case op.Kind == history.Drop && op.Outcome == history.Fail:
		// Not applied: still held.
	default:
		p.version, p.look = 0, false
	}
}
