package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/jepsen/check"
)

// control is a broken variant (see internal/chaos) and what has to catch it: a run; where
// what goes wrong is too short or too rare for a run, the simulator; or a test of the
// package whose rule it is.
type control struct {
	variant string
	// Of a run:
	workload, nemesis, transport string
	set                          func(f *flags) // beside these
	// Of a test:
	pkg, test string
	// sim: a seed of the simulator shows it, of those from sim on.
	sim uint64
}

// controlLimit is how long a variant may take to be caught, all runs together.
const controlLimit = 2 * time.Minute

const (
	controlTime = 20 * time.Second // of one run
	controlHeal = 10 * time.Second // a broken cluster need not make progress
)

// huge values, of which each soon lies where another did, as fast as it goes.
func huge(f *flags) { f.shards, f.keys, f.rate, f.minSize, f.maxSize = 1, 2, 0, 1<<20, 1<<20 }

var controls = []control{
	{variant: "no-confirmation", sim: 1},
	{variant: "route-with-object", pkg: "client", test: "TestRules"},
	{variant: "term-after-message", pkg: "raft", test: "TestScripts"},
	{variant: "served-early", sim: 1},
	{variant: "engine-ahead", workload: "register", nemesis: "none", transport: "mixed"},
	{variant: "frozen-mapping", sim: 1},
	{variant: "forget-term", pkg: "raft", test: "TestSim|TestTermAtOpen"},
	{variant: "snapshot-unannounced", sim: 1},
	{variant: "retry-twice", workload: "once", nemesis: "transfer,kill,client-leader", transport: "mixed"},
	{variant: "expiry-unfenced", pkg: "server", test: "TestContentAgreesWithTwin"},
	{variant: "old-term-acknowledged", workload: "register", nemesis: "isolate-leader,one-way,halves", transport: "mixed"},
	{variant: "config-ignored", sim: 1},
	{variant: "overwrite-reversed", workload: "register", nemesis: "none", transport: "shm",
		set: func(f *flags) { f.shards, f.keys, f.rate, f.maxSize = 4, 4, 0, 256 }},
	{variant: "evict-unmarked", workload: "register", nemesis: "none", transport: "shm",
		set: func(f *flags) { f.arena, f.keys, f.rate = "4MiB", 400, 0 }},
	{variant: "layout-gen-ignored", workload: "register", nemesis: "grow", transport: "shm", set: func(f *flags) { f.shards, f.rate, f.maxSize = 1, 0, 256 }},
	{variant: "bucket-sum-ignored", sim: 1},
	{variant: "checksum-ignored", workload: "register", nemesis: "none", transport: "tcp", set: huge},
}

// caught is how a control ended.
type caught struct {
	by     string
	took   time.Duration
	repeat string
	err    error // it was not caught, or that could not be found out
}

// runControls shows of each variant named that something catches it.
func (f *flags) runControls(cmd *cobra.Command) error {
	chosen, err := chosenControls(f.control)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(f.dataDir, "kvd-controls-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	p, err := f.build(cmd.Context(), dir, true)
	if err != nil {
		return err
	}
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.AppendHeader(table.Row{"variant", "caught by", "after", "to repeat"})
	var errs []error
	for _, c := range chosen {
		one := *f
		one.programs, one.broken = &p, c.variant
		began := time.Now()
		var got caught
		if c.sim != 0 {
			got = c.bySim(cmd.Context())
		} else if c.pkg != "" {
			got = c.byTest(cmd.Context())
		} else {
			got = c.byRun(&one, func() (*outcome, error) { return one.once(cmd) })
		}
		got = got.within(time.Since(began))
		if got.err != nil {
			errs = append(errs, fmt.Errorf("control %s: %w", c.variant, got.err))
			got.by = "NOT CAUGHT"
		}
		t.AppendRow(table.Row{c.variant, got.by, fmt.Sprintf("%.0f s", got.took.Seconds()), got.repeat})
		if err := cmd.Context().Err(); err != nil {
			errs = append(errs, err)
			break
		}
	}
	fmt.Fprintln(cmd.OutOrStdout(), t.Render())
	return errors.Join(errs...)
}

// within is how a control ended that took so long: what is caught too late is not caught.
func (c caught) within(took time.Duration) caught {
	c.took = took
	if c.err == nil && took > controlLimit {
		c.err = fmt.Errorf("caught by %s, but only after %.0f s: want at most %.0f s", c.by, took.Seconds(), controlLimit.Seconds())
	}
	return c
}

// another tells whether a run that takes as long as the one before it can still catch the
// variant in time.
func another(spent, last time.Duration) bool { return spent+last <= controlLimit }

func chosenControls(names string) ([]control, error) {
	if names == "all" {
		return controls, nil
	}
	var out []control
next:
	for _, name := range strings.Split(names, ",") {
		for _, c := range controls {
			if c.variant == name {
				out = append(out, c)
				continue next
			}
		}
		return nil, fmt.Errorf("control %q is not known: want all, or some of %s", name, strings.Join(controlNames(), ","))
	}
	return out, nil
}

func controlNames() []string {
	var names []string
	for _, c := range controls {
		names = append(names, c.variant)
	}
	return names
}

// byRun runs seed after seed until the judge finds a violation or time is up. once makes
// a run of f.
func (c control) byRun(f *flags, once func() (*outcome, error)) caught {
	f.workload, f.nemesis, f.transport, f.length, f.shards = c.workload, c.nemesis, c.transport, controlTime, defaultShards(c.workload, nil)
	if c.set != nil {
		c.set(f)
	}
	for began := time.Now(); ; f.seed++ {
		got := caught{repeat: fmt.Sprintf("go run ./jepsen --control %s --seed %d", c.variant, f.seed)}
		last := time.Now()
		o, err := once()
		switch {
		case err != nil:
			got.err = err
		case o.r.Verdict == check.Violation:
			got.by = fmt.Sprintf("%s, %s over %s: %s", c.workload, c.nemesis, c.transport, o.r.Findings[0].Kind)
		case !another(time.Since(began), time.Since(last)):
			got.err = fmt.Errorf("no violation was found in %.0f s, the last verdict was %s", time.Since(began).Seconds(), o.r.Verdict)
		default:
			continue
		}
		return got
	}
}

var foundSeed = regexp.MustCompile(`(?m)^(\S+): caught by seed (\d+), .*?: (.*)$`)

// bySim has the simulator run seeds until one shows the variant.
func (c control) bySim(ctx context.Context) caught {
	args := []string{"test", "-tags", "chaos", "-count=1", module + "internal/sim", "-run", "^TestControl$", "-v", "-variant", c.variant, "-from", strconv.FormatUint(c.sim, 10)}
	got := caught{repeat: fmt.Sprintf("go test -tags chaos ./internal/sim -run TestControl -v -variant %s -from %d", c.variant, c.sim)}
	ctx, cancel := context.WithTimeout(ctx, 2*controlLimit)
	defer cancel()
	out, err := exec.CommandContext(ctx, "go", args...).CombinedOutput()
	return c.seedIn(got, string(out), err)
}

// seedIn reads what the simulator said.
func (c control) seedIn(got caught, out string, err error) caught {
	m := foundSeed.FindStringSubmatch(out)
	if err != nil || m == nil || m[1] != c.variant {
		got.err = fmt.Errorf("no seed of the simulator shows it: %w\n%s", cmp.Or(err, errNoSeed), out)
		return got
	}
	what := strings.TrimPrefix(m[3], "VIOLATION [")
	kind, _, _ := strings.Cut(what, ":")
	got.by = fmt.Sprintf("internal/sim seed %s: %s", m[2], kind)
	return got
}

var errNoSeed = errors.New("it named none")

var failedTest = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)

// byTest runs a test of the package with the variant on: it has to fail. That it passes
// without is what every other run of the tests shows.
func (c control) byTest(ctx context.Context) caught {
	args := []string{"test", "-tags", "chaos", "-count=1", module + c.pkg, "-run", "^(" + c.test + ")$"}
	got := caught{repeat: fmt.Sprintf("KVD_CHAOS_BREAK=%s go test -tags chaos ./%s -run '^(%s)$'", c.variant, c.pkg, c.test)}
	ctx, cancel := context.WithTimeout(ctx, 2*controlLimit) // so that it is told how much too late it was
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "KVD_CHAOS_BREAK="+c.variant)
	out, err := cmd.CombinedOutput()
	failed := failedTest.FindAllStringSubmatch(string(out), 2)
	switch {
	case err == nil:
		got.err = fmt.Errorf("%s of %s passes with the variant on", c.test, c.pkg)
	case len(failed) == 0:
		got.err = fmt.Errorf("%s of %s did not run: %w\n%s", c.test, c.pkg, err, out)
	default:
		got.by = c.pkg + " " + failed[len(failed)-1][1] // the subtest, where there is one
	}
	return got
}
