package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// idle measures what kvd costs while nobody asks it anything.
type idle struct {
	nodes, shards int
	rest, seconds float64
	nodeArgs      []string
	output        string
	dir, binary   string
}

func newIdle() *cobra.Command {
	var o idle
	cmd := &cobra.Command{
		Use:   "idle",
		Short: "Measure the CPU that an idle cluster uses",
		Long: `Starts kvd processes on loopback, puts one value into each shard, waits for --rest seconds, and
then measures for --seconds what CPU time each process uses, from /proc, and what Raft sends.`,
		Example: `  go run ./bench idle --shards 256

  # the same without quiescence
  go run ./bench idle --shards 256 --node-arg=--quiesce-ticks=-1`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return inFolder(o.dir, func(dir string) error { return o.run(cmd.Context(), dir, cmd.OutOrStdout(), cmd.ErrOrStderr()) })
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.IntVar(&o.nodes, "nodes", 3, "number of nodes")
	fs.IntVar(&o.shards, "shards", 256, "number of shards")
	fs.Float64Var(&o.rest, "rest", 10, "seconds without load before the measurement")
	fs.Float64Var(&o.seconds, "seconds", 20, "seconds of the measurement")
	fs.StringArrayVar(&o.nodeArgs, "node-arg", nil, "argument for every node's kvd start; may be repeated")
	fs.StringVarP(&o.output, "output", "o", "table", "table or json")
	fs.StringVar(&o.dir, "dir", "/var/tmp", "where the data is kept during the run")
	fs.StringVar(&o.binary, "kvd-bin", "", "kvd: program to run (default: built from this source tree)")
	return cmd
}

// inFolder runs f with a new folder below dir, which is removed then.
func inFolder(dir string, f func(string) error) (err error) {
	dir, err = os.MkdirTemp(dir, "kvd-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	return f(dir)
}

// idleReport is kept and compared: fields are added, never given another meaning.
type idleReport struct {
	Time    time.Time    `json:"time"`
	Commit  string       `json:"commit"`
	Machine machine      `json:"machine"`
	Load    string       `json:"load_average"` // of the machine, at the end
	Shards  int          `json:"shards"`
	Seconds float64      `json:"seconds"`
	Args    []string     `json:"node_args"`
	Nodes   []idleSample `json:"nodes"`
}

// idleSample is of one node, a second.
type idleSample struct {
	Node       uint64  `json:"node"`
	CPUPercent float64 `json:"cpu_percent"` // of one core
	Quiesced   float64 `json:"groups_quiesced"`
	Groups     float64 `json:"groups"`
	Messages   float64 `json:"raft_messages_per_second"`
	Heartbeats float64 `json:"node_heartbeats_per_second"`
}

func (o *idle) run(ctx context.Context, dir string, out, progress io.Writer) error {
	if o.nodes < 1 || o.shards < 1 || o.rest < 0 || o.seconds <= 0 {
		return fmt.Errorf("--nodes %d, --shards %d, --rest %g, --seconds %g: want at least 1 of the first two, and time", o.nodes, o.shards, o.rest, o.seconds)
	}
	if o.output != "table" && o.output != "json" {
		return fmt.Errorf("--output %q: want table or json", o.output)
	}
	r := idleReport{Commit: sourceCommit(), Machine: describeMachine(dir), Shards: o.shards, Seconds: o.seconds, Args: o.nodeArgs}
	c, err := startNodes(ctx, dir, o.binary, devcluster.Config{Nodes: o.nodes, Shards: o.shards, Args: o.nodeArgs})
	if err != nil {
		return err
	}
	defer func() { _ = c.Kill() }()
	if err := touchShards(ctx, c, o.shards); err != nil {
		return err
	}
	fmt.Fprintf(progress, "%d nodes with %d shards: nothing is asked of them for %g s\n", o.nodes, o.shards, o.rest+o.seconds)
	if err := sleep(ctx, o.rest); err != nil {
		return err
	}
	before, err := readNodes(ctx, c)
	if err != nil {
		return err
	}
	if err := sleep(ctx, o.seconds); err != nil {
		return err
	}
	after, err := readNodes(ctx, c)
	if err != nil {
		return err
	}
	for i, n := range c.Nodes() {
		a, b := before[i], after[i]
		seconds := b.at.Sub(a.at).Seconds()
		r.Nodes = append(r.Nodes, idleSample{
			Node: n.ID, CPUPercent: 100 * (b.cpu - a.cpu).Seconds() / seconds,
			Quiesced: b.metrics[quiescedSeries], Groups: b.metrics[quiescedSeries] + b.metrics[activeSeries],
			Messages:   (b.metrics[messagesSeries] - a.metrics[messagesSeries]) / seconds,
			Heartbeats: (b.metrics[heartbeatsSeries] - a.metrics[heartbeatsSeries]) / seconds,
		})
	}
	r.Time, r.Load = time.Now().UTC().Truncate(time.Second), loadAverage()
	if o.output == "json" {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	return r.write(out)
}

func (r idleReport) write(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "idle, %d nodes, %d shards, for %g s%s\n", len(r.Nodes), r.Shards, r.Seconds, withArgs(r.Args))
	for _, n := range r.Nodes {
		fmt.Fprintf(&b, "node %d: %.2f %% of one core; %.0f of %.0f groups quiesced; %.1f messages of Raft/s, %.1f heartbeats of the node/s\n",
			n.Node, n.CPUPercent, n.Quiesced, n.Groups, n.Messages, n.Heartbeats)
	}
	fmt.Fprintf(&b, "machine: %s; load average %s\ncommit: %s\n", r.Machine, r.Load, r.Commit)
	_, err := io.WriteString(w, b.String())
	return err
}

func withArgs(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return ", " + strings.Join(args, " ")
}

// startNodes builds kvd where no program is given, and starts a cluster below dir.
func startNodes(ctx context.Context, dir, given string, cfg devcluster.Config) (*devcluster.Cluster, error) {
	cfg.Dir = filepath.Join(dir, "kvd")
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, err
	}
	var err error
	if cfg.Binary, err = kvdBinary(ctx, given, cfg.Dir); err != nil {
		return nil, err
	}
	cfg.Args = append([]string{"--log-level", "warn", "--gossip-listen", "127.0.0.1:0", "--shm-dir", filepath.Join(cfg.Dir, "shm")}, cfg.Args...)
	ctx, cancel := context.WithTimeout(ctx, readyTimeout+time.Minute)
	defer cancel()
	return devcluster.Start(ctx, cfg)
}

// touchShards puts so many values that hardly a shard has none.
func touchShards(ctx context.Context, c *devcluster.Cluster, shards int) error {
	cl, err := client.Dial(ctx, client.Config{Endpoints: c.Endpoints()})
	if err != nil {
		return err
	}
	defer func() { _ = cl.Close() }()
	if err := waitReady(ctx, "kvd", nil, func(ctx context.Context) error { return kvdReady(ctx, cl) }); err != nil {
		return err
	}
	for i := range 4 * shards {
		if _, err := cl.Put(ctx, fmt.Appendf(nil, "idle-%d", i), []byte("value")); err != nil {
			return err
		}
	}
	return nil
}

const (
	quiescedSeries   = `kvd_raft_groups{state="quiesced"}`
	activeSeries     = `kvd_raft_groups{state="active"}`
	messagesSeries   = "kvd_raft_messages_total"
	heartbeatsSeries = "kvd_node_heartbeats_total"
)

// reading of one node in one moment.
type reading struct {
	at      time.Time
	cpu     time.Duration
	metrics map[string]float64
}

func readNodes(ctx context.Context, c *devcluster.Cluster) ([]reading, error) {
	var out []reading
	for _, n := range c.Nodes() {
		m, err := readMetrics(ctx, n.Metrics)
		if err != nil {
			return nil, fmt.Errorf("node %d: %w", n.ID, err)
		}
		out = append(out, reading{metrics: m})
	}
	// Together, and so that what the above costs lies before the first and before the last.
	for i, n := range c.Nodes() {
		cpu, ok := cpuTime([]int{n.PID()})
		if !ok {
			return nil, fmt.Errorf("node %d: /proc does not tell the CPU time of process %d", n.ID, n.PID())
		}
		out[i].cpu, out[i].at = cpu, time.Now()
	}
	return out, nil
}

// readMetrics of a node, by series.
func readMetrics(ctx context.Context, url string) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return parseMetrics(resp.Body)
}

// parseMetrics in Prometheus' text format, as far as nodes write it.
func parseMetrics(r io.Reader) (map[string]float64, error) {
	out := map[string]float64{}
	for sc := bufio.NewScanner(r); ; {
		if !sc.Scan() {
			return out, sc.Err()
		}
		line := sc.Text()
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || strings.HasPrefix(line, "#") {
			continue
		}
		v, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("metrics: line %q: %w", line, err)
		}
		out[line[:i]] = v
	}
}

func sleep(ctx context.Context, seconds float64) error {
	select {
	case <-time.After(time.Duration(seconds * float64(time.Second))):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
