package check

import (
	"cmp"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/kvd-io/kvd/jepsen/history"
)

// Verdict in one word.
type Verdict string

// The verdicts. Only Pass is a pass.
const (
	Pass      Verdict = "PASS"
	Violation Verdict = "VIOLATION"
	Undecided Verdict = "UNKNOWN" // the checker ran out of time for some key
	Broken    Verdict = "BROKEN"  // the run itself does not count: no progress, a crash, or too little to judge
)

// Report of a judgement.
type Report struct {
	Verdict    Verdict        `json:"verdict"`
	Findings   []Finding      `json:"findings,omitempty"`
	Undecided  []string       `json:"undecided,omitempty"` // keys
	Problems   []string       `json:"problems,omitempty"`  // why the run does not count
	Operations int            `json:"operations"`          // that took part in the judgement
	ByOutcome  map[string]int `json:"byOutcome"`           // "get ok" and so on
	ByLevel    map[string]int `json:"byLevel"`             // answered reads
	Keys       int            `json:"keys"`
	Slowest    time.Duration  `json:"slowestKey"` // to check
	picture    []porcupine.Operation
	info       porcupine.LinearizationInfo
	model      porcupine.Model
	faults     []history.Fault
	started    int64
}

// Options of a judgement.
type Options struct {
	// Timeout of porcupine for one key; default 30 s.
	Timeout time.Duration
	// Need says what a run has to contain to count; nil: anything.
	Need func(*Report) []string
}

// result of one key.
type result struct {
	k     *key
	ops   []porcupine.Operation
	res   porcupine.CheckResult
	spent time.Duration
}

// Judge judges a history.
func Judge(h *history.History, opt Options) *Report {
	if opt.Timeout <= 0 {
		opt.Timeout = 30 * time.Second
	}
	x := newIndex(h)
	x.levels()
	x.locks()
	r := &Report{ByOutcome: map[string]int{}, ByLevel: map[string]int{}, Keys: len(x.names), faults: h.Faults}
	for i, op := range h.Ops {
		if i == 0 || op.Call < r.started {
			r.started = op.Call
		}
		r.ByOutcome[string(op.Kind)+" "+string(op.Outcome)]++
		if op.Outcome == history.Fail {
			continue
		}
		r.Operations++
		if !op.Kind.Writes() {
			r.ByLevel[cmp.Or(op.Level, "linearizable")]++
		}
	}
	results := x.linearizable(opt.Timeout)
	for _, res := range results {
		r.Slowest = max(r.Slowest, res.spent)
		switch res.res {
		case porcupine.Illegal:
			x.bad = append(x.bad, Finding{Kind: KindLinearizable, Key: res.k.name,
				Text: fmt.Sprintf("the %d operations of this key have no order that explains them", len(res.ops))})
		case porcupine.Unknown:
			r.Undecided = append(r.Undecided, res.k.name)
		}
	}
	r.Findings = x.bad
	if h.End == nil {
		r.Problems = append(r.Problems, "the history has no end: the run was cut off")
	} else {
		r.Problems = append(r.Problems, h.End.Crashes...)
		if h.End.Progress != "" {
			r.Problems = append(r.Problems, "no progress on the healed cluster: "+h.End.Progress)
		}
		if h.End.Stopped {
			r.Problems = append(r.Problems, "stopped by the user")
		}
	}
	if opt.Need != nil {
		r.Problems = append(r.Problems, opt.Need(r)...)
	}
	switch {
	case len(r.Findings) > 0:
		r.Verdict = Violation
	case len(r.Problems) > 0:
		r.Verdict = Broken
	case len(r.Undecided) > 0:
		r.Verdict = Undecided
	default:
		r.Verdict = Pass
	}
	r.choosePicture(x, results, min(opt.Timeout, 5*time.Second))
	return r
}

// linearizable checks every key, several at a time.
func (x *index) linearizable(timeout time.Duration) []result {
	results := make([]result, len(x.names))
	next := make(chan int)
	var wg sync.WaitGroup
	var panicked atomic.Pointer[string]
	for range max(1, runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			defer func() {
				if r := recover(); r != nil {
					text := fmt.Sprintf("%v\n%s", r, debug.Stack())
					panicked.Store(&text)
					for range next {
						continue // whoever gives out keys must come to their end
					}
				}
			}()
			for i := range next {
				k := x.keys[x.names[i]]
				began := time.Now()
				r := result{k: k, ops: operations(k.strong, k.valueOf)}
				r.res = porcupine.CheckOperationsTimeout(model, reduce(r.ops), timeout)
				r.spent = time.Since(began)
				results[i] = r
			}
		})
	}
	for i := range x.names {
		next <- i
	}
	close(next)
	wg.Wait()
	if text := panicked.Load(); text != nil {
		panic("check: " + *text) // bug: where whoever called can see it
	}
	return results
}

// choosePicture takes the first key with a finding; else one that was not decided; else the
// one with most operations. Keys whose finding porcupine did not make are drawn with
// every operation, under a model that allows anything.
func (r *Report) choosePicture(x *index, results []result, timeout time.Duration) {
	if len(results) == 0 {
		return
	}
	want := ""
	for _, f := range r.Findings {
		if want == "" || f.Kind == KindLinearizable {
			want = f.Key
		}
		if f.Kind == KindLinearizable {
			break
		}
	}
	if want == "" && len(r.Undecided) > 0 {
		want = r.Undecided[0]
	}
	best := slices.MaxFunc(results, func(a, b result) int { return cmp.Compare(len(a.ops), len(b.ops)) })
	for _, res := range results {
		if res.k.name == want {
			best = res
		}
	}
	r.model, r.picture = model, best.ops
	if want != "" && best.res == porcupine.Ok {
		r.model.Step = func(st, _, _ any) (bool, any) { return true, st }
		r.picture = operations(slices.Concat(best.k.strong, best.k.weak), best.k.valueOf)
	}
	_, r.info = porcupine.CheckOperationsVerbose(r.model, r.picture, timeout)
}

// Picture writes an HTML page of the key that tells most, with the faults beside it.
func (r *Report) Picture(w io.Writer) error {
	if len(r.picture) == 0 {
		_, err := io.WriteString(w, "<p>The history has no operations.</p>\n")
		return err
	}
	var notes []porcupine.Annotation
	for _, f := range r.faults {
		notes = append(notes, porcupine.Annotation{
			Tag: "faults", Start: f.Start, End: max(f.Start, f.End),
			Description: fmt.Sprintf("%s %v", f.Kind, f.Nodes), Details: f.Detail, BackgroundColor: "#f4b6b6",
		})
	}
	r.info.AddAnnotations(notes)
	return porcupine.Visualize(r.model, r.info, w)
}

// Line is the verdict as one line.
func (r *Report) Line(h *history.History) string {
	seen := 0
	kinds := map[string]bool{}
	missed := map[string]bool{}
	for _, f := range h.Faults {
		if f.Seen {
			seen++
			kinds[f.Kind] = true
		} else {
			missed[f.Kind] = true
		}
	}
	nemesis := h.Header.Nemesis
	if len(h.Header.LeftOut) > 0 {
		nemesis += " (without " + strings.Join(h.Header.LeftOut, ", ") + ": left out here)"
	}
	line := fmt.Sprintf("%s workload %s, nemesis %s, seed %d: %d operations on %d keys, %d faults of %d kinds",
		r.Verdict, h.Header.Workload, nemesis, h.Header.Seed, r.Operations, r.Keys, seen, len(kinds))
	var never []string
	for kind := range missed {
		if !kinds[kind] {
			never = append(never, kind)
		}
	}
	if len(never) > 0 {
		slices.Sort(never)
		line += " (ordered but not seen: " + strings.Join(never, ", ") + ")"
	}
	var why []string
	switch r.Verdict {
	case Violation:
		why = append(why, fmt.Sprintf("%d findings, the first: %v", len(r.Findings), r.Findings[0]))
	case Undecided:
		why = append(why, fmt.Sprintf("%d keys not decided in time", len(r.Undecided)))
	case Broken:
		why = r.Problems
	}
	if len(why) > 0 {
		line += "; " + strings.ReplaceAll(strings.Join(why, "; "), "\n", " ")
	}
	return line
}
