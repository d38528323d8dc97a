package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"
)

// Bounds on a leader that is killed.
const (
	resumeP50    = 2.0 // election timeouts
	resumeP99    = 3.0
	othersSlowed = 0.9 // of the throughput before
)

func newFailover() *cobra.Command {
	f, kills := &lifeFlags{}, 0
	cmd := &cobra.Command{
		Use:   "failover",
		Short: "SIGKILL nodes that lead shards, and time until the shards answer again",
		Long: `Kills a node that leads shards, again and again, under load. For each of its shards it takes
the time from the signal until the first read and the first write that began after the process was
gone has succeeded, in election timeouts; for the shards that others lead, their throughput from the
signal until the last shard answers again, beside that in as long a time before. The node is started
again and caught up, and leaders are spread, before the next is killed.`,
		Example:       "  go run ./bench failover --kills 50 --clients 64",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if kills < 1 {
				return fmt.Errorf("--kills %d: want at least 1", kills)
			}
			return f.run(cmd, kvdNodes, map[string]string{"kills": fmt.Sprint(kills)}, nil, func(ctx context.Context, l *life) error { return l.failover(ctx, kills) })
		},
	}
	cmd.Flags().IntVar(&kills, "kills", 50, "how many times a node is killed")
	f.define(cmd)
	return cmd
}

// fall is what one kill did.
type fall struct {
	node    uint64
	shards  []uint32            // that it led
	resumed [accesses][]float64 // election timeouts until each answered again
	window  time.Duration       // until all did
	before  [accesses]tally     // of the other shards in as long a time
	during  [accesses]tally
}

// ratio of the other shards' throughput to that before.
func (f fall) ratio(kind access) float64 {
	return float64(f.during[kind].ops) / float64(max(f.before[kind].ops, 1))
}

// slowness is how much longer their operations took than before.
func (f fall) slowness(kind access) float64 {
	return f.during[kind].mean().Seconds() / max(f.before[kind].mean(), 1).Seconds()
}

func (l *life) failover(ctx context.Context, kills int) error {
	if err := l.load.start(ctx); err != nil {
		return err
	}
	var falls []fall
	for n := range kills {
		by, err := l.spread(ctx, kvdNodes)
		if err != nil {
			return err
		}
		// What is compared with must be free of the restart before.
		if err := sleepFor(ctx, 2*l.f.electionTimeout()+time.Second); err != nil {
			return err
		}
		one, err := l.kill(ctx, uint64(n%kvdNodes)+1, by)
		if err != nil {
			return err
		}
		falls = append(falls, one)
		l.say("kill %d of %d: node %d, %d shards: reads again after %s, writes after %s election timeouts; others at %.2f and %.2f of their throughput",
			n+1, kills, one.node, len(one.shards), spanOf(one.resumed[read]), spanOf(one.resumed[written]), one.ratio(read), one.ratio(written))
	}
	l.reportFalls(falls)
	return nil
}

func spanOf(xs []float64) string { return fmt.Sprintf("%.2f to %.2f", slices.Min(xs), slices.Max(xs)) }

// kill ends a node by SIGKILL, waits until its shards answer, and starts it again.
func (l *life) kill(ctx context.Context, id uint64, by map[uint32]uint64) (fall, error) {
	out := fall{node: id}
	for s, leader := range by {
		if leader == id {
			out.shards = append(out.shards, s)
		}
	}
	slices.Sort(out.shards)
	if len(out.shards) == 0 {
		return out, fmt.Errorf("node %d leads no shard", id)
	}
	node := l.cluster.Node(id)
	signalled := time.Now()
	if err := node.Kill(); err != nil {
		return out, err
	}
	w := newWatch(time.Now(), out.shards)
	l.load.watch.Store(w)
	stuck := time.NewTimer(patience)
	defer stuck.Stop()
	select {
	case <-w.done:
	case <-stuck.C:
		return out, fmt.Errorf("node %d was killed and not all of shards %v answer again after %v", id, out.shards, patience)
	case <-ctx.Done():
		return out, ctx.Err()
	}
	l.load.watch.Store(nil)
	for _, s := range out.shards {
		for kind := range accesses {
			took, _ := w.since(signalled, s, kind)
			out.window = max(out.window, took)
			out.resumed[kind] = append(out.resumed[kind], took.Seconds()/l.f.electionTimeout().Seconds())
		}
	}
	others := func(s uint32) bool { return !slices.Contains(out.shards, s) }
	out.before = l.load.completed(signalled.Add(-out.window), signalled, others)
	out.during = l.load.completed(signalled, signalled.Add(out.window), others)
	if err := node.Start(); err != nil {
		return out, err
	}
	serving, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return out, node.AwaitServing(serving)
}

func (l *life) reportFalls(falls []fall) {
	r := l.report
	r.Columns = []string{"kill", "node", "shards", "reads again, first", "last", "writes again, first", "last ",
		"others' reads before", "during", "their time to before", "others' writes before", "during ", "their time to before "}
	for n, f := range falls {
		row := []any{n + 1, f.node, len(f.shards)}
		for kind := range accesses {
			row = append(row, slices.Min(f.resumed[kind]), slices.Max(f.resumed[kind]))
		}
		for kind := range accesses {
			row = append(row, f.before[kind].ops, f.during[kind].ops, f.slowness(kind))
		}
		r.row(row...)
	}
	for kind := range accesses {
		var resumed, ratios, slowness []float64
		for _, f := range falls {
			resumed, ratios, slowness = append(resumed, f.resumed[kind]...), append(ratios, f.ratio(kind)), append(slowness, f.slowness(kind))
		}
		r.Bounds = append(r.Bounds,
			atMost(kind.String()+"s resume, p50", percentile(resumed, 50), resumeP50, "election timeouts"),
			atMost(kind.String()+"s resume, p99", percentile(resumed, 99), resumeP99, "election timeouts"),
			atLeast("throughput of other shards' "+kind.String()+"s to before, median", median(ratios), othersSlowed, "ratio"))
		r.Notes = append(r.Notes, fmt.Sprintf("%ss resume: p50 %.3f, p90 %.3f, p99 %.3f, most %.3f election timeouts, over %d shards; of other shards: throughput to before %s, time of one to before %s", kind,
			percentile(resumed, 50), percentile(resumed, 90), percentile(resumed, 99), slices.Max(resumed), len(resumed), ratioOf(ratios), ratioOf(slowness)))
	}
}

func ratioOf(xs []float64) *ratio {
	return &ratio{Median: median(xs), Min: slices.Min(xs), Max: slices.Max(xs)}
}
