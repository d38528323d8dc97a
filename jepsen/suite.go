package main

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/jepsen/check"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/jepsen/nemesis"
	"github.com/kvd-io/kvd/jepsen/workload"
)

// allTransports are those that every Linux host has.
var allTransports = []string{"shm", "tcp", "mixed"}

const verbs = "verbs"

// outcome of one run.
type outcome struct {
	h *history.History
	r *check.Report
}

// err is what the exit code is made of; nil only for a pass.
func (o *outcome) err() error {
	if o.r.Verdict == check.Pass {
		return nil
	}
	return verdictError{o.r.Verdict}
}

// named turns "all" and lists into names.
func named(s string, all []string) []string {
	if s == "all" {
		return all
	}
	return strings.Split(s, ",")
}

func (f *flags) workloads() []string  { return named(f.workload, workload.Names()) }
func (f *flags) transports() []string { return named(f.transport, allTransports) }

// defaultShards: a list needs every shard, and a node that is drained has to get rid of a
// replica of most of them, between faults of other kinds.
func defaultShards(workload string, kinds []string) int {
	switch {
	case workload == "list" || workload == "set":
		return 4
	case slices.ContainsFunc(kinds, nemesis.NeedsSpare):
		return 8
	}
	return 32
}

// suite runs every workload over every transport that was asked for, one after the other,
// each with a seed of its own. A run that can not even start does not keep the others
// from running. The worst verdict is the suite's.
func (f *flags) suite(cmd *cobra.Command) error {
	var rows []*outcome
	kinds, err := nemesis.ParseKinds(f.nemesis)
	if err != nil {
		return err
	}
	var errs []error
	seed := f.seed
	for _, w := range f.workloads() {
		for _, t := range f.transports() {
			one := *f
			one.workload, one.transport, one.seed = w, t, seed
			seed++
			if one.shards == 0 {
				one.shards = defaultShards(w, kinds)
			}
			o, err := one.once(cmd)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s over %s, seed %d: %w", w, t, one.seed, err))
			} else {
				rows = append(rows, o)
			}
			if err := cmd.Context().Err(); err != nil {
				return errors.Join(append(errs, worst(rows))...)
			}
		}
	}
	if len(rows) > 1 {
		fmt.Fprintln(cmd.OutOrStdout(), sumUp(rows))
	}
	if kinds := unseen(rows); len(rows) > 1 && len(kinds) > 0 {
		errs = append(errs, fmt.Errorf("%w: faults that were ordered and in no run seen to happen: %s", verdictError{check.Broken}, strings.Join(kinds, ", ")))
	}
	if err := worst(rows); err != nil {
		errs = append([]error{err}, errs...)
	}
	return errors.Join(errs...)
}

// worst verdict: a violation before what could not be decided before what does not count.
func worst(rows []*outcome) error {
	var err error
	rank := []check.Verdict{check.Pass, check.Broken, check.Undecided, check.Violation}
	highest := 0
	for _, o := range rows {
		if i := slices.Index(rank, o.r.Verdict); i > highest {
			highest, err = i, o.err()
		}
	}
	return err
}

// unseen are the kinds of faults that were ordered and in no run seen.
func unseen(rows []*outcome) []string {
	seen := map[string]bool{}
	for _, o := range rows {
		for _, f := range o.h.Faults {
			seen[f.Kind] = seen[f.Kind] || f.Seen
		}
	}
	var out []string
	for kind, ok := range seen {
		if !ok {
			out = append(out, kind)
		}
	}
	sort.Strings(out)
	return out
}

// sumUp is the table of a suite.
func sumUp(rows []*outcome) string {
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.AppendHeader(table.Row{"workload", "transport", "seed", "operations", "unknown", "keys", "faults seen", "verdict"})
	ops, unknowns, keys, faults := 0, 0, 0, 0
	kinds := map[string]int{}
	for _, o := range rows {
		seen, unknown := 0, 0
		for _, f := range o.h.Faults {
			if f.Seen {
				seen++
				kinds[f.Kind]++
			}
		}
		for what, n := range o.r.ByOutcome {
			if strings.HasSuffix(what, " unknown") {
				unknown += n
			}
		}
		ops, unknowns, keys, faults = ops+o.r.Operations, unknowns+unknown, keys+o.r.Keys, faults+seen
		t.AppendRow(table.Row{o.h.Header.Workload, o.h.Header.Settings["transport"], o.h.Header.Seed, o.r.Operations, unknown, o.r.Keys, seen, o.r.Verdict})
	}
	t.AppendFooter(table.Row{"all", "", "", ops, unknowns, keys, faults, ""})
	var names []string
	for k := range kinds {
		names = append(names, k)
	}
	sort.Strings(names)
	text := t.Render() + "\nfaults seen:"
	for i, k := range names {
		if i > 0 {
			text += ","
		}
		text += fmt.Sprintf(" %s %d", k, kinds[k])
	}
	return text
}
