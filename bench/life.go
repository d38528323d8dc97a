package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/dustin/go-humanize"
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// What a cluster does to its users while nodes die, restart, leave and join: real
// processes, a load that holds every answer against what was written, and bounds. A run
// that misses one ends with status 1.

// lifeFlags are common to these runs.
type lifeFlags struct {
	clients    int
	sdks       int
	rate       float64
	shards     int
	size       int
	transport  string
	tick       time.Duration
	ticks      int
	deadline   time.Duration
	seed       uint64
	output     string
	dir        string
	kvdBinary  string
	keep       bool
	logLevel   string
	extraFlags []string
}

func (f *lifeFlags) define(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.IntVar(&f.clients, "clients", 64, "goroutines, each with one operation under way; every other one writes")
	fs.IntVar(&f.sdks, "sdks", 4, "Clients of the SDK that they share")
	fs.Float64Var(&f.rate, "rate", 4000, "operations a second of all clients together, at most; 0: each begins when the one before is answered, so that they use up the machine")
	fs.IntVar(&f.shards, "shards", 8, "shards of the cluster; each needs two clients at least")
	fs.IntVar(&f.size, "size", 1024, "bytes of a value")
	fs.StringVar(&f.transport, "transport", "auto", "how gets read: auto, shm, tcp or grpc")
	fs.DurationVar(&f.tick, "tick", 100*time.Millisecond, "Raft's unit of time")
	fs.IntVar(&f.ticks, "election-ticks", 10, "ticks of an election timeout")
	fs.DurationVar(&f.deadline, "deadline", 5*time.Second, "of each operation; one without an answer by then has failed")
	fs.Uint64Var(&f.seed, "seed", 1, "of keys, values and the order of operations")
	fs.StringVarP(&f.output, "output", "o", "table", "table or json")
	fs.StringVar(&f.dir, "dir", "/var/tmp", "where the data of the nodes is kept during the run")
	fs.StringVar(&f.kvdBinary, "kvd-bin", "", "program to run (default: built from this source tree)")
	fs.BoolVar(&f.keep, "keep", false, "leave the nodes' directories and logs where they are")
	fs.StringVar(&f.logLevel, "log-level", "warn", "of the nodes")
	fs.StringArrayVar(&f.extraFlags, "kvd-flag", nil, "one more flag of each node, as --name=value; may be repeated")
}

func (f *lifeFlags) check() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if f.sdks < 1 {
		bad("--sdks %d: want at least 1", f.sdks)
	}
	if f.shards < 1 || f.clients < 2*f.shards {
		bad("--clients %d for --shards %d: want two clients at least for each shard, one that reads and one that writes", f.clients, f.shards)
	}
	if f.rate < 0 {
		bad("--rate %g: want operations a second, or 0 for no limit", f.rate)
	}
	if f.size < minHeldBytes {
		bad("--size %d: want at least %d, by which an answer is checked", f.size, minHeldBytes)
	}
	if f.output != "table" && f.output != "json" {
		bad("--output %q: want table or json", f.output)
	}
	return errors.Join(errs...)
}

func (f *lifeFlags) rateText() string {
	if f.rate == 0 {
		return "as fast as answered"
	}
	return fmt.Sprintf("%g operations/s", f.rate)
}

// electionTimeout is the unit of the bounds on failover.
func (f *lifeFlags) electionTimeout() time.Duration { return time.Duration(f.ticks) * f.tick }

// bound that a run must keep.
type bound struct {
	Name string  `json:"name"`
	Want string  `json:"want"`
	Seen float64 `json:"seen"`
	Unit string  `json:"unit"`
	Met  bool    `json:"met"`
}

func atMost(name string, seen, limit float64, unit string) bound {
	return bound{name, fmt.Sprintf("<= %g", limit), seen, unit, seen <= limit}
}

func atLeast(name string, seen, limit float64, unit string) bound {
	return bound{name, fmt.Sprintf(">= %g", limit), seen, unit, seen >= limit}
}

// lifeReport is the result of a run. Its JSON is meant to be kept: fields are added,
// never given another meaning.
type lifeReport struct {
	Time       time.Time         `json:"time"`
	Run        string            `json:"run"`
	Commit     string            `json:"commit"`
	Machine    machine           `json:"machine"`
	LoadBefore string            `json:"load_average_before"` // of the machine, over 1, 5 and 15 minutes
	LoadAfter  string            `json:"load_average_after"`
	Seconds    float64           `json:"seconds"`
	Settings   map[string]string `json:"settings"`
	Bounds     []bound           `json:"bounds"`
	Columns    []string          `json:"columns"` // of Rows
	Rows       [][]any           `json:"rows"`
	Failures   []string          `json:"failures"` // the first of them
	Notes      []string          `json:"notes"`
}

func (r *lifeReport) row(cells ...any) { r.Rows = append(r.Rows, cells) }

func (r *lifeReport) missed() (out []string) {
	for _, b := range r.Bounds {
		if !b.Met {
			out = append(out, fmt.Sprintf("%s is %.4g %s, want %s", b.Name, b.Seen, b.Unit, b.Want))
		}
	}
	return out
}

func (r *lifeReport) write(w io.Writer, output string) error {
	if output == "json" {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n", r.Run, joinSettings(r.Settings))
	details := table.Row{}
	for _, c := range r.Columns {
		details = append(details, c)
	}
	t := newLifeTable(details)
	for _, row := range r.Rows {
		cells := table.Row{}
		for _, c := range row {
			if f, ok := c.(float64); ok {
				c = fmt.Sprintf("%.4g", f)
			}
			cells = append(cells, c)
		}
		t.AppendRow(cells)
	}
	b.WriteString(t.Render() + "\n")
	t = newLifeTable(table.Row{"bound", "seen", "unit", "want", "met"})
	for _, x := range r.Bounds {
		t.AppendRow(table.Row{x.Name, fmt.Sprintf("%.4g", x.Seen), x.Unit, x.Want, map[bool]string{true: "yes", false: "NO"}[x.Met]})
	}
	b.WriteString(t.Render() + "\n")
	for _, n := range append(slices.Clone(r.Notes), r.Failures...) {
		fmt.Fprintln(&b, n)
	}
	fmt.Fprintf(&b, "machine: %s\nload average before: %s; after: %s; the run took %.0f s\ncommit: %s\n", r.Machine, r.LoadBefore, r.LoadAfter, r.Seconds, r.Commit)
	_, err := io.WriteString(w, b.String())
	return err
}

func newLifeTable(header table.Row) table.Writer {
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.Style().Format.Header = text.FormatDefault
	t.AppendHeader(header)
	var columns []table.ColumnConfig
	for n := 2; n <= len(header); n++ {
		columns = append(columns, table.ColumnConfig{Number: n, Align: text.AlignRight, AlignHeader: text.AlignRight})
	}
	t.SetColumnConfigs(columns)
	return t
}

// loadAverage of the machine: figures mean little beside other work.
func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	fields := strings.Fields(string(text))
	if err != nil || len(fields) < 3 {
		return "unknown"
	}
	return strings.Join(fields[:3], " ")
}

// life is one run: the cluster, who asks it, and the load.
type life struct {
	f       *lifeFlags
	say     func(format string, args ...any)
	report  *lifeReport
	cluster *devcluster.Cluster
	admin   *client.Admin
	sdks    []*client.Client
	load    *heldLoad
}

// run starts nodes, has body do its work under load, judges, and stops what it started.
func (f *lifeFlags) run(cmd *cobra.Command, nodes int, settings map[string]string, nodeFlags []string, body func(ctx context.Context, l *life) error) (err error) {
	if err := f.check(); err != nil {
		return err
	}
	ctx := cmd.Context()
	dir, err := os.MkdirTemp(f.dir, "kvd-life-")
	if err != nil {
		return err
	}
	began := time.Now()
	l := &life{f: f, report: &lifeReport{
		Time: began.UTC().Truncate(time.Second), Run: cmd.Name(), Commit: sourceCommit(), Machine: describeMachine(dir), LoadBefore: loadAverage(),
		Rows: [][]any{}, Failures: []string{}, Notes: []string{}, Settings: map[string]string{
			"nodes": fmt.Sprint(nodes), "shards": fmt.Sprint(f.shards), "clients": fmt.Sprintf("%d over %d Clients of the SDK, half of them write", f.clients, f.sdks),
			"value bytes": fmt.Sprint(f.size), "transport": f.transport, "rate": f.rateText(), "election timeout": f.electionTimeout().String(), "deadline": f.deadline.String(),
		},
	}}
	for k, v := range settings {
		l.report.Settings[k] = v
	}
	l.say = func(format string, args ...any) {
		fmt.Fprintf(cmd.ErrOrStderr(), "%7.1f s  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	defer func() {
		err = errors.Join(err, l.close())
		if f.keep {
			l.say("kept: %s", dir)
		} else {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	if err := l.open(ctx, dir, nodes, nodeFlags); err != nil {
		return err
	}
	if err := body(ctx, l); err != nil {
		counts, wrong, first := l.load.failures()
		return fmt.Errorf("%w (so far %d reads and %d writes failed, %d answers were wrong: %q)", err, counts[read], counts[written], wrong, first)
	}
	if err := l.judge(ctx); err != nil {
		return err
	}
	l.report.LoadAfter, l.report.Seconds = loadAverage(), time.Since(began).Seconds()
	if err := l.report.write(cmd.OutOrStdout(), f.output); err != nil {
		return err
	}
	if missed := l.report.missed(); len(missed) > 0 {
		return fmt.Errorf("%s: missed: %s", cmd.Name(), strings.Join(missed, "; "))
	}
	return nil
}

func (l *life) open(ctx context.Context, dir string, nodes int, nodeFlags []string) error {
	binary, err := kvdBinary(ctx, l.f.kvdBinary, dir)
	if err != nil {
		return err
	}
	start, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	l.say("starting %d nodes", nodes)
	args := append([]string{"--log-level", l.f.logLevel, "--tick", l.f.tick.String(), "--election-ticks", fmt.Sprint(l.f.ticks)}, nodeFlags...)
	l.cluster, err = devcluster.Start(start, devcluster.Config{
		Binary: binary, Dir: filepath.Clean(dir), Nodes: nodes, Shards: l.f.shards, Args: append(args, l.f.extraFlags...),
	})
	if err != nil {
		return err
	}
	if l.admin, err = client.DialAdmin(client.Config{Endpoints: l.cluster.Endpoints()}); err != nil {
		return err
	}
	var stores []store
	for range l.f.sdks {
		c, err := l.dial(start)
		if err != nil {
			return err
		}
		l.sdks, stores = append(l.sdks, c), append(stores, c)
	}
	if err := waitReady(ctx, "the cluster", nil, func(ctx context.Context) error { return kvdReady(ctx, l.sdks[0]) }); err != nil {
		return err
	}
	if l.load, err = newHeldLoad(stores, l.f.shards, l.f.clients, l.f.size, l.f.deadline, l.f.seed); err == nil && l.f.rate > 0 {
		l.load.period = time.Duration(float64(time.Second) * float64(l.f.clients) / l.f.rate)
	}
	return err
}

func (l *life) dial(ctx context.Context) (*client.Client, error) {
	return client.Dial(ctx, client.Config{Endpoints: l.cluster.Endpoints(), Transport: l.f.transport})
}

// judge ends the load, reads back what was written by a Client that remembers nothing,
// and adds the bounds that every run has.
func (l *life) judge(ctx context.Context) error {
	l.load.end()
	fresh, err := l.dial(ctx)
	if err != nil {
		return err
	}
	defer fresh.Close()
	l.say("reading back %d keys", len(l.load.keys))
	lost, err := l.load.verify(ctx, fresh)
	if err != nil {
		return err
	}
	l.report.Notes = append(l.report.Notes, sdkNote(l.sdks))
	counts, wrong, first := l.load.failures()
	l.report.Failures = append(l.report.Failures, append(first, lost...)...)
	l.report.Bounds = append(l.report.Bounds,
		atMost("failed reads", float64(counts[read]), 0, "reads"),
		atMost("writes failed within their deadline", float64(counts[written]), 0, "writes"),
		atMost("answers that can not be", float64(wrong), 0, "reads"),
		atMost("acknowledged writes lost", float64(len(lost)), 0, "keys"),
	)
	return nil
}

// sdkNote says what the Clients had to do again, so that who waited can be told why.
func sdkNote(sdks []*client.Client) string {
	var writeRetries, told uint64
	again := map[string]uint64{}
	for _, c := range sdks {
		s := c.Stats()
		writeRetries, told = writeRetries+s.WriteRetries, told+s.Topologies
		for why, n := range s.Retries {
			again["reads tried again, "+why] += n
		}
		for why, n := range s.Fallbacks {
			again["reads over gRPC, "+why] += n
		}
	}
	words := []string{fmt.Sprintf("the Clients: %d times told of changes, %d writes sent again", told, writeRetries)}
	for _, what := range slices.Sorted(maps.Keys(again)) {
		if again[what] > 0 {
			words = append(words, fmt.Sprintf("%s: %d", what, again[what]))
		}
	}
	return strings.Join(words, "; ")
}

func (l *life) close() error {
	if l.load != nil {
		l.load.end()
	}
	var errs []error
	for _, c := range l.sdks {
		errs = append(errs, c.Close())
	}
	if l.admin != nil {
		errs = append(errs, l.admin.Close())
	}
	if l.cluster != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 2*stopTimeout)
		defer cancel()
		errs = append(errs, l.cluster.Stop(ctx))
	}
	return errors.Join(errs...)
}

// percentile of what need not be sorted; 0 for nothing.
func percentile(xs []float64, p float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	s := slices.Clone(xs)
	slices.Sort(s)
	// The smallest value that so many of a hundred do not exceed.
	i := int(float64(len(s))*p/100+0.999999) - 1
	return s[min(max(i, 0), len(s)-1)]
}

func millis(h *hdrhistogram.Histogram, p float64) float64 {
	return float64(h.ValueAtPercentile(p)) / 1e6
}

// byteSize is a flag's value such as 64MiB.
type byteSize uint64

func (b *byteSize) String() string { return strings.ReplaceAll(humanize.IBytes(uint64(*b)), " ", "") }
func (b *byteSize) Type() string   { return "size" }
func (b *byteSize) Set(s string) error {
	n, err := humanize.ParseBytes(s)
	if err != nil {
		return errors.New("want a size such as 64MiB, 2GiB or 4096")
	}
	*b = byteSize(n)
	return nil
}
