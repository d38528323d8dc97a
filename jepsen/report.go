package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"time"

	"github.com/kvd-io/kvd/jepsen/check"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/jepsen/nemesis"
)

// needs says what a run has to contain to count, from its header: a run in which no write
// succeeded, no get was one-sided or a planned kind of fault never happened proves
// nothing about them.
func needs(h *history.History) func(*check.Report) []string {
	return func(r *check.Report) []string {
		var out []string
		stored, read := 0, 0
		for what, n := range r.ByOutcome {
			switch what {
			case "put ok", "add ok", "swap ok":
				stored += n
			case "get ok", "list ok", "many ok":
				read += n
			}
		}
		if stored == 0 || read == 0 {
			out = append(out, fmt.Sprintf("%d writes and %d reads succeeded: nothing was tested", stored, read))
		}
		out = append(out, neverSeen(h)...)
		if h.End != nil && h.End.Progress == "" && !h.End.Stopped {
			for _, via := range wantVias(h.Header) {
				if h.End.Gets[via] == 0 {
					out = append(out, fmt.Sprintf("no get was answered over %s", via))
				}
			}
		}
		return out
	}
}

// neverSeen are the planned kinds of faults that were tried more than once and of which
// none was seen to happen. One that failed once may have met a fault of the other lane.
// Where faults were asked for, some fault has to have been seen, planned or not.
func neverSeen(h *history.History) []string {
	asked, err := nemesis.ParseKinds(h.Header.Nemesis)
	if err != nil {
		return []string{"the faults in the header are not known: " + err.Error()}
	}
	planned, seen := map[string]bool{}, map[string]bool{}
	for _, raw := range h.Header.Schedule {
		var e struct {
			Kind string `json:"kind"`
		}
		if err := json.Unmarshal(raw, &e); err != nil {
			return []string{"the schedule in the header can not be read: " + err.Error()}
		}
		planned[e.Kind] = true
	}
	tried := map[string]int{}
	for _, f := range h.Faults {
		if f.Short {
			continue
		}
		tried[f.Kind]++
		seen[f.Kind] = seen[f.Kind] || f.Seen
	}
	var out []string
	for kind := range planned {
		// A lane that ran late may not have come to its last events.
		if tried[kind] > 1 && !seen[kind] {
			out = append(out, fmt.Sprintf("fault %s was ordered %d times and never seen to happen", kind, tried[kind]))
		}
	}
	if len(asked)+len(planned) > 0 && !slices.ContainsFunc(h.Faults, func(f history.Fault) bool { return f.Seen }) {
		out = append(out, "no fault happened at all")
	}
	sort.Strings(out)
	return out
}

func wantVias(h history.Header) []string {
	if h.Workload == "list" || h.Workload == "set" {
		return nil // mostly lists, which go over gRPC
	}
	switch h.Settings["transport"] {
	case "mixed":
		return []string{"shm", "tcp", "grpc"}
	case verbs:
		return []string{"verbs", "tcp"}
	case "shm", "tcp":
		return []string{h.Settings["transport"]}
	}
	return nil
}

func writeReport(dir, prefix string, r *check.Report, line string) error {
	if err := os.WriteFile(filepath.Join(dir, prefix+"verdict.txt"), []byte(line+"\n"), 0o644); err != nil {
		return err
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, prefix+"report.json"), b, 0o644); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(dir, prefix+"picture.html"))
	if err != nil {
		return err
	}
	if err := r.Picture(f); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}

// summarize prints what there is to know beside the verdict.
func summarize(w io.Writer, h *history.History, r *check.Report, took time.Duration) {
	counts := func(title string, m map[string]int) {
		var names []string
		for k := range m {
			names = append(names, k)
		}
		sort.Strings(names)
		fmt.Fprintf(w, "%s:", title)
		for i, k := range names {
			if i > 0 {
				fmt.Fprint(w, ",")
			}
			fmt.Fprintf(w, " %s %d", k, m[k])
		}
		fmt.Fprintln(w)
	}
	counts("operations", r.ByOutcome)
	counts("reads by level", r.ByLevel)
	if h.End != nil {
		gets := map[string]int{}
		for via, n := range h.End.Gets {
			gets[via] = int(n)
		}
		counts("gets answered over", gets)
		other := map[string]int{}
		for what, n := range h.End.Counts {
			if n > 0 {
				other[what] = int(n)
			}
		}
		counts("clients", other)
	}
	seen, ordered := map[string]int{}, map[string]int{}
	for _, f := range h.Faults {
		ordered[f.Kind]++
		if f.Seen {
			seen[f.Kind]++
		}
	}
	counts("faults seen", seen)
	for kind, n := range ordered {
		if seen[kind] < n {
			fmt.Fprintf(w, "fault %s: %d of %d were not seen to happen\n", kind, n-seen[kind], n)
		}
	}
	fmt.Fprintf(w, "while a node was stopped: %d gets answered by shm\n", duringStops(h))
	fmt.Fprintf(w, "judged in %.1f s, the slowest key in %.3f s\n", took.Seconds(), r.Slowest.Seconds())
	for i, f := range r.Findings {
		if i == 10 {
			fmt.Fprintf(w, "... and %d findings more, in report.json\n", len(r.Findings)-i)
			break
		}
		fmt.Fprintln(w, f)
	}
}

// duringStops counts the gets that shared memory answered while a process was stopped.
func duringStops(h *history.History) uint64 {
	n := uint64(0)
	for _, f := range h.Faults {
		if f.Kind == "stop" && f.Seen {
			n += f.Gets["shm"]
		}
	}
	return n
}
