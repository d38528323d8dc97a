package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/jepsen/check"
	"github.com/kvd-io/kvd/jepsen/env"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/jepsen/nemesis"
	"github.com/kvd-io/kvd/jepsen/worker"
	"github.com/kvd-io/kvd/jepsen/workload"
)

// The exit codes: 0 is a pass and nothing else is.
const (
	exitViolation = 1
	exitUnknown   = 2
	exitBroken    = 3
	exitUsage     = 4
)

// verdictError is a verdict that is not a pass.
type verdictError struct{ verdict check.Verdict }

func (e verdictError) Error() string { return "verdict " + string(e.verdict) }

func (e verdictError) code() int {
	switch e.verdict {
	case check.Violation:
		return exitViolation
	case check.Undecided:
		return exitUnknown
	}
	return exitBroken
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newCommand().ExecuteContext(ctx)
	stop()
	var v verdictError
	switch {
	case errors.As(err, &v):
		if err.Error() != v.Error() { // the verdict itself was printed
			fmt.Fprintln(os.Stderr, "jepsen:", err)
		}
		os.Exit(v.code())
	case err != nil:
		fmt.Fprintln(os.Stderr, "jepsen:", err)
		os.Exit(exitUsage)
	}
}

// flags of the command line.
type flags struct {
	workload  string
	nemesis   string
	length    time.Duration
	tempo     float64
	transport string
	seed      uint64

	nodes       int
	replication int
	shards      int
	concurrency int
	rate        float64
	keys        int
	minSize     int
	maxSize     int
	opTimeout   time.Duration
	arena       string

	network   string
	addresses []string
	nodeFlags []string
	kvdBin    string
	earlier   string // kvd with which the nodes begin
	artifacts string
	dataDir   string
	keepData  bool

	judge        string
	checkTimeout time.Duration
	plan         bool
	control      string

	broken   string    // a variant that nodes and clients run with
	programs *binaries // made already
}

func newCommand() *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   "jepsen",
		Short: "Run kvd under faults and judge what clients saw",
		Example: `  # everything that can go wrong, on readers over shared memory, TCP and gRPC
  go run ./jepsen --workload register --nemesis all --time 60s --transport mixed --seed 7

  # judge a saved history again
  go run ./jepsen --judge artifacts/jepsen/register-7/history.jsonl`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.StringVar(&f.workload, "workload", "register", "what clients do: some of "+strings.Join(workload.Names(), ",")+", or all, one after the other")
	fs.StringVar(&f.nemesis, "nemesis", "all", "faults: all, none, process, disk, network, membership, or some of "+strings.Join(nemesis.Kinds(), ","))
	fs.DurationVar(&f.length, "time", 60*time.Second, "how long clients and faults run, for each workload and transport")
	fs.Float64Var(&f.tempo, "tempo", 1, "faults, and the pauses between them, are so many times as short as usual")
	fs.StringVar(&f.transport, "transport", "mixed", "how clients read: shm, tcp, mixed (shm, tcp, auto and grpc beside each other; one node without shm), or all of these in turn; verbs (and tcp beside it), for hosts that have an RDMA device")
	fs.Uint64Var(&f.seed, "seed", 1, "of faults and operations")
	fs.IntVar(&f.nodes, "nodes", 3, "number of nodes: 1, 3, 5 or 7")
	fs.IntVar(&f.replication, "replication", 0, "replicas of each shard: 1, 3 or 5 (default: as many as there are nodes, 5 at most)")
	fs.IntVar(&f.shards, "shards", 0, "number of shards (default: 32, with faults of membership 8; for list and set 4, as a list needs every shard)")
	fs.IntVar(&f.concurrency, "concurrency", 12, "processes, each with one operation under way")
	fs.Float64Var(&f.rate, "rate", 400, "operations a second, all processes together; 0: as fast as they go")
	fs.IntVar(&f.keys, "keys", 16, "keys in use at a time (sets, locks and prefixes: a quarter; locks at least one for three processes)")
	fs.IntVar(&f.minSize, "min-size", 16, "smallest value, in bytes")
	fs.IntVar(&f.maxSize, "max-size", 65536, "largest value, in bytes: large ones can tear")
	fs.DurationVar(&f.opTimeout, "op-timeout", 3*time.Second, "how long a client tries one operation")
	fs.StringVar(&f.arena, "arena", "64MiB", "memory that each node shows to clients; less than all values together: evictions all the time")
	fs.StringVar(&f.network, "net", "auto", "auto, namespaces (needs root, ip and nft) or loopback (faults of processes only)")
	fs.StringSliceVar(&f.addresses, "addresses", nil, "addresses of this host, one for each node, instead of loopback: for verbs, those of the RDMA device")
	fs.StringSliceVar(&f.nodeFlags, "node-flags", nil, "more flags of every node, such as --tick=200ms; they win over those of the run")
	fs.StringVar(&f.kvdBin, "kvd-bin", "", "kvd: program to run (default: built from this source tree with the tag chaos, so that disks and clocks can fail)")
	fs.StringVar(&f.earlier, "upgrade-from", "", "kvd with which the nodes begin, for the fault upgrade: built as --kvd-bin is, with the tag chaos or without")
	fs.StringVar(&f.artifacts, "artifacts", filepath.Join("artifacts", "jepsen"), "where history, logs, picture and verdict are kept, in a folder for each run")
	fs.StringVar(&f.dataDir, "data-dir", "", "where the nodes' data is kept during the run (default: the temporary directory)")
	fs.BoolVar(&f.keepData, "keep-data", false, "do not remove the nodes' data")
	fs.StringVar(&f.judge, "judge", "", "judge this history instead of running anything")
	fs.DurationVar(&f.checkTimeout, "check-timeout", 60*time.Second, "how long the checker may think about one key; longer is a verdict UNKNOWN")
	fs.StringVar(&f.control, "control", "", "show that broken variants of kvd are caught: all, or some of "+strings.Join(controlNames(), ","))
	fs.BoolVar(&f.plan, "plan", false, "print the faults that the seed means, and do nothing")
	cmd.MarkFlagsMutuallyExclusive("judge", "control", "plan")
	cmd.AddCommand(newWorker(), newBallast())
	return cmd
}

func (f *flags) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for _, name := range f.workloads() {
		if _, err := workload.New(name, f.settings()); err != nil {
			errs = append(errs, err)
		}
	}
	if _, err := nemesis.ParseKinds(f.nemesis); err != nil {
		errs = append(errs, err)
	}
	for _, name := range f.transports() {
		if name != verbs && !slices.Contains(allTransports, name) {
			bad("--transport %q: want shm, tcp, mixed, verbs or all", name)
		}
	}
	if !(f.tempo >= 0.1 && f.tempo <= 10) {
		bad("--tempo %v: want 0.1 to 10", f.tempo)
	}
	if !slices.Contains([]int{1, 3, 5, 7}, f.nodes) {
		bad("--nodes %d: want 1, 3, 5 or 7", f.nodes)
	}
	if n := f.replicas(); !slices.Contains([]int{1, 3, 5}, n) || n > f.nodes {
		bad("--replication %d of %d nodes: want 1, 3 or 5, and at most as many as there are nodes", n, f.nodes)
	}
	if f.shards < 0 || f.concurrency < 1 || f.keys < 1 || !(f.rate >= 0) || math.IsInf(f.rate, 0) || f.length <= 0 || f.opTimeout <= 0 {
		bad("--concurrency, --keys, --time and --op-timeout: want more than 0; --shards and --rate: at least 0, and a number")
	}
	if f.minSize < worker.MinSize || f.maxSize < f.minSize || f.maxSize > 1<<20 {
		bad("--min-size %d, --max-size %d: want %d <= min <= max <= 1 MiB", f.minSize, f.maxSize, worker.MinSize)
	}
	switch {
	case len(f.addresses) > 0 && len(f.addresses) != f.nodes:
		bad("--addresses %v: want one for each of %d nodes", f.addresses, f.nodes)
	case len(f.addresses) > 0 && f.network == "namespaces":
		bad("--addresses are this host's: want no --net namespaces with them")
	}
	if f.network != "auto" && f.network != "namespaces" && f.network != "loopback" {
		bad("--net %q: want auto, namespaces or loopback", f.network)
	}
	return errors.Join(errs...)
}

// replicas of each shard.
func (f *flags) replicas() int { return cmp.Or(f.replication, min(f.nodes, 5)) }

func (f *flags) settings() workload.Settings {
	return workload.Settings{Keys: f.keys, Processes: f.concurrency, MinSize: f.minSize, MaxSize: f.maxSize, OpsPerKey: 200, UnknownsPerKey: 5}
}

func (f *flags) run(cmd *cobra.Command) error {
	if f.judge != "" {
		return f.judgeAgain(cmd)
	}
	if err := f.validate(); err != nil {
		return err
	}
	if f.plan {
		return f.printPlan(cmd)
	}
	if f.control != "" {
		return f.runControls(cmd)
	}
	return f.suite(cmd)
}

// judgeAgain judges a saved history. What no run records is refused, as a judge that does not
// know what it judges may find nothing for that reason alone.
func (f *flags) judgeAgain(cmd *cobra.Command) (err error) {
	// A program that panics ends with 2, which is the code of a verdict.
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("judging %s: panic: %v\n%s", f.judge, r, debug.Stack())
		}
	}()
	h, err := history.ReadFile(f.judge)
	if err != nil {
		return fmt.Errorf("%s: %w", f.judge, err)
	}
	if err := known(h.Header); err != nil {
		return fmt.Errorf("%s: history: the header: %w", f.judge, err)
	}
	o, err := f.conclude(cmd, h, filepath.Dir(f.judge), "again-")
	if err != nil {
		return err
	}
	return o.err()
}

// known tells whether there is such a run: what it has to show depends on that.
func known(h history.Header) error {
	if !slices.Contains(workload.Names(), h.Workload) {
		return fmt.Errorf("workload %q: want one of %s", h.Workload, strings.Join(workload.Names(), ", "))
	}
	if t := h.Settings["transport"]; t != verbs && !slices.Contains(allTransports, t) {
		return fmt.Errorf("transport %q: want verbs or one of %s", t, strings.Join(allTransports, ", "))
	}
	_, err := nemesis.ParseKinds(h.Nemesis)
	return err
}

// once runs and judges one workload over one transport.
func (f *flags) once(cmd *cobra.Command) (*outcome, error) {
	say := func(format string, args ...any) { fmt.Fprintf(cmd.ErrOrStderr(), format+"\n", args...) }
	r, err := f.newRun(say)
	if err != nil {
		return nil, err
	}
	h, err := r.run(cmd.Context())
	if err != nil {
		return nil, err
	}
	return f.conclude(cmd, h, r.dir, "")
}

// conclude judges, writes what is to be kept, and prints the one line.
func (f *flags) conclude(cmd *cobra.Command, h *history.History, dir, prefix string) (*outcome, error) {
	began := time.Now()
	report := check.Judge(h, check.Options{Timeout: f.checkTimeout, Need: needs(h)})
	line := report.Line(h) + "; " + dir
	if err := writeReport(dir, prefix, report, line); err != nil {
		return nil, err
	}
	summarize(cmd.ErrOrStderr(), h, report, time.Since(began))
	fmt.Fprintln(cmd.OutOrStdout(), line)
	return &outcome{h, report}, nil
}

func (f *flags) printPlan(cmd *cobra.Command) error {
	kinds, err := nemesis.ParseKinds(f.nemesis)
	if err != nil {
		return err
	}
	lanes, err := f.planned(kinds)
	if err != nil {
		return err
	}
	for i, lane := range lanes {
		for _, e := range lane {
			fmt.Fprintf(cmd.OutOrStdout(), "%s %6.1f s  %-14s for %4.1f s, node %d, leader %v, mode %d, order %v\n",
				nemesis.LaneNames[i], e.At.Seconds(), e.Kind, e.For.Seconds(), e.Node, e.Leader, e.Mode, e.Order)
		}
	}
	return nil
}

func newWorker() *cobra.Command {
	return &cobra.Command{
		Use: "worker", Short: "What a run starts to use kvd's client; not for people", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return worker.Serve(cmd.Context(), os.Stdin, os.Stdout, newLogger(os.Stderr))
		},
	}
}

func newBallast() *cobra.Command {
	return &cobra.Command{
		Use: "ballast PROCS BYTES", Short: "What a run starts to use up a cgroup's memory; not for people", Hidden: true, Args: cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			n, err := strconv.ParseInt(args[1], 10, 64)
			if err != nil {
				return err
			}
			return env.Ballast(args[0], n)
		},
	}
}
