package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/kvd-io/kvd/client"
)

// report is what the demo prints in the end.
type report struct {
	tree      string
	files     int
	bytes     int64
	left      []file
	loadTook  time.Duration
	differing int

	treeGets  gets
	warmGets  gets
	session   gets
	immutable gets

	victim       uint64
	victimShards []uint32
	failover     []time.Duration

	cpuGets, cpuIdle float64 // seconds of all servers
	cpuTook          time.Duration
	peers            []client.PeerStats
}

// gets sums up a step of gets.
type gets struct {
	count, reads, confirmations, fallbacks uint64
	via                                    string
	p50, p99                               time.Duration
	took                                   time.Duration
}

func getsOf(s client.Stats, t *times, took time.Duration) gets {
	g := gets{
		count: s.TotalGets(), reads: s.TotalReads() + s.Queries, confirmations: s.Confirmations,
		p50: t.quantile(50), p99: t.quantile(99), took: took,
	}
	via := map[string]uint64{}
	for _, c := range s.Gets {
		via[c.Via] += c.Count
	}
	for _, n := range s.Fallbacks {
		g.fallbacks += n
	}
	var parts []string
	for name, n := range via {
		parts = append(parts, fmt.Sprintf("%s %s", name, humanize.Comma(int64(n))))
	}
	sort.Strings(parts)
	g.via = strings.Join(parts, ", ")
	return g
}

func per(n, of uint64) string {
	if of == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", float64(n)/float64(of))
}

func (r *report) print(out io.Writer) {
	t := table.NewWriter()
	t.SetOutputMirror(out)
	t.SetStyle(table.StyleLight)
	t.AppendHeader(table.Row{"", "tree", "warm 1 KiB", "session", "immutable"})
	row := func(name string, f func(g gets) any) {
		t.AppendRow(table.Row{name, f(r.treeGets), f(r.warmGets), f(r.session), f(r.immutable)})
	}
	t.AppendRow(table.Row{"files", humanize.Comma(int64(r.files))})
	t.AppendRow(table.Row{"bytes", humanize.IBytes(uint64(r.bytes))})
	t.AppendRow(table.Row{"loaded in", r.loadTook.Round(time.Millisecond)})
	t.AppendRow(table.Row{"files that differ", r.differing})
	row("gets answered by", func(g gets) any { return g.via })
	row("gets", func(g gets) any { return humanize.Comma(int64(g.count)) })
	row("READs a get", func(g gets) any { return per(g.reads, g.count) })
	row("confirmations a get", func(g gets) any { return per(g.confirmations, g.count) })
	row("fallbacks to gRPC", func(g gets) any { return humanize.Comma(int64(g.fallbacks)) })
	row("p50", func(g gets) any { return g.p50 })
	row("p99", func(g gets) any { return g.p99 })
	t.Render()
	fmt.Fprintf(out, "tree: %s, read by several callers; the other columns are one caller, warm; all but session and immutable are linearizable\n", r.tree)
	fmt.Fprintf(out, "server CPU, all nodes: %.3f s during the %s warm gets, which took %v, and %.3f s during as long a rest\n",
		r.cpuGets, humanize.Comma(int64(r.warmGets.count)), r.cpuTook.Round(time.Millisecond), r.cpuIdle)
	for _, p := range r.peers {
		fmt.Fprintf(out, "node %d read by %s: %s\n", p.NodeID, p.Transport, p.Reason)
	}
	if len(r.failover) > 0 {
		fmt.Fprintln(out, "the tree's READs and confirmations a get include those of gets that waited for the new leader")
		sorted := slices.Sorted(slices.Values(r.failover))
		fmt.Fprintf(out, "node %d, leader of shards %v, was killed in the middle: linearizable gets of these shards went on after %v (median) to %v (last)\n",
			r.victim, r.victimShards, sorted[len(sorted)/2].Round(time.Millisecond), sorted[len(sorted)-1].Round(time.Millisecond))
	}
	if len(r.left) > 0 {
		fmt.Fprintf(out, "left out, above the value limit of %s: %d files\n", humanize.IBytes(demoValueLimit), len(r.left))
		for _, f := range r.left {
			fmt.Fprintf(out, "  %s (%s)\n", f.key, humanize.IBytes(uint64(f.size)))
		}
	}
}

// progress is a bar where a person watches, and a line now and then where not.
type progress struct {
	bar   *progressbar.ProgressBar
	out   io.Writer
	title string
	total int

	mu     sync.Mutex
	done   int
	tenths int
	began  time.Time
}

func newProgress(out io.Writer, title string, total int) *progress {
	p := &progress{out: out, title: title, total: total, began: time.Now()}
	if f, ok := out.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.bar = progressbar.NewOptions(total, progressbar.OptionSetWriter(out), progressbar.OptionSetDescription(title),
			progressbar.OptionShowCount(), progressbar.OptionShowIts(), progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
	}
	return p
}

func (p *progress) add(n int) {
	if p.bar != nil {
		_ = p.bar.Add(n) // a bar that can not be drawn is no reason to stop
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += n
	if t := 10 * p.done / max(p.total, 1); t > p.tenths && t%2 == 0 {
		p.tenths = t
		fmt.Fprintf(p.out, "%s: %d of %d after %v\n", p.title, p.done, p.total, time.Since(p.began).Round(time.Millisecond))
	}
}

func (p *progress) finish() {
	if p.bar != nil {
		_ = p.bar.Finish()
	}
}
