package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
)

// rollingNodes: with three replicas a node can be emptied only where there is a fourth.
const rollingNodes = 4

func newRolling() *cobra.Command {
	f, rounds := &lifeFlags{}, 0
	cmd := &cobra.Command{
		Use:   "rolling",
		Short: "Restart and drain all nodes, one after another, and count what failed",
		Long: `Under load it ends each of four nodes by SIGTERM and starts it again, one after another, each when
the one before is caught up; then it drains each, waits until it holds and leads nothing, and makes it
an active node again. Not one read may fail, nor a write within its deadline.`,
		Example:       "  go run ./bench rolling --clients 64",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rounds < 1 {
				return fmt.Errorf("--rounds %d: want at least 1", rounds)
			}
			return f.run(cmd, rollingNodes, map[string]string{"rounds": fmt.Sprint(rounds)}, nil, func(ctx context.Context, l *life) error { return l.rolling(ctx, rounds) })
		},
	}
	cmd.Flags().IntVar(&rounds, "rounds", 1, "times that all nodes are restarted, and drained")
	f.define(cmd)
	return cmd
}

func (l *life) rolling(ctx context.Context, rounds int) error {
	l.report.Columns = stepColumns
	if _, err := l.spread(ctx, kvdNodes); err != nil {
		return err
	}
	if err := l.load.start(ctx); err != nil {
		return err
	}
	if err := l.step(ctx, "undisturbed", func(ctx context.Context) error { return sleepFor(ctx, 5*time.Second) }); err != nil {
		return err
	}
	for range rounds {
		for _, n := range l.cluster.Nodes() {
			err := l.step(ctx, fmt.Sprintf("restart of node %d", n.ID), func(ctx context.Context) error {
				if err := n.Stop(ctx); err != nil {
					return err
				}
				if err := n.Start(); err != nil {
					return err
				}
				if err := n.AwaitServing(ctx); err != nil {
					return err
				}
				_, err := l.spread(ctx, kvdNodes)
				return err
			})
			if err != nil {
				return err
			}
		}
		for _, n := range l.cluster.Nodes() {
			if err := l.step(ctx, fmt.Sprintf("drain of node %d", n.ID), func(ctx context.Context) error { return l.drain(ctx, n.ID) }); err != nil {
				return err
			}
		}
	}
	return nil
}

var stepColumns = []string{"step", "seconds", "reads", "p50 ms", "p99 ms", "most ms", "writes", "p50 ms ", "p99 ms ", "most ms ", "cores of nodes", "of clients"}

// cpuOf is the CPU time that each of the nodes' processes, and this one, has used.
func (l *life) cpuOf() map[int]time.Duration {
	used := map[int]time.Duration{}
	for _, n := range l.cluster.Nodes() {
		if t, ok := cpuTime([]int{n.PID()}); ok {
			used[n.PID()] = t
		}
	}
	if t, ok := cpuTime([]int{os.Getpid()}); ok {
		used[os.Getpid()] = t
	}
	return used
}

// coresUsed between two such times. What a process used that has ended since is not known.
func coresUsed(before, after map[int]time.Duration, self int, seconds float64) (nodes, clients float64) {
	for pid, t := range after {
		if used := (t - before[pid]).Seconds() / seconds; pid == self {
			clients = used
		} else {
			nodes += used
		}
	}
	return nodes, clients
}

// step does something under load and notes how long operations took meanwhile.
func (l *life) step(ctx context.Context, name string, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	l.load.latencies()
	began, cpu := time.Now(), l.cpuOf()
	if err := f(ctx); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	h := l.load.latencies()
	row := []any{name, time.Since(began).Seconds()}
	for kind := range accesses {
		row = append(row, h[kind].TotalCount(), millis(h[kind], 50), millis(h[kind], 99), millis(h[kind], 100))
	}
	nodes, clients := coresUsed(cpu, l.cpuOf(), os.Getpid(), time.Since(began).Seconds())
	l.report.row(append(row, nodes, clients)...)
	counts, wrong, _ := l.load.failures()
	l.say("%s: %.1f s, %d reads (most %.0f ms), %d writes (most %.0f ms); failed so far: %d reads, %d writes, %d wrong", name, time.Since(began).Seconds(),
		h[read].TotalCount(), millis(h[read], 100), h[written].TotalCount(), millis(h[written], 100), counts[read], counts[written], wrong)
	return nil
}

// drain empties a node and makes it an active one again.
func (l *life) drain(ctx context.Context, id uint64) error {
	if err := l.admin.Drain(ctx, id, client.DrainOptions{}); err != nil {
		return err
	}
	err := await(ctx, fmt.Sprintf("node %d holds nothing", id), func(ctx context.Context) error {
		m, err := l.member(ctx, id)
		if err == nil && (m.GetReplicas() > 0 || m.GetLeads() > 0) {
			err = fmt.Errorf("it has %d replicas and leads %d shards", m.GetReplicas(), m.GetLeads())
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := l.admin.Drain(ctx, id, client.DrainOptions{Undo: true}); err != nil {
		return err
	}
	return l.balanced(ctx)
}

func (l *life) member(ctx context.Context, id uint64) (*kvdv1.MemberStatus, error) {
	members, err := l.admin.Members(ctx)
	if err != nil {
		return nil, err
	}
	for _, m := range members {
		if m.GetNode().GetNodeId() == id {
			return m, nil
		}
	}
	return nil, fmt.Errorf("node %d is no member", id)
}

// balanced waits until no move is under way nor wanted.
func (l *life) balanced(ctx context.Context) error {
	return await(ctx, "replicas are where they belong", func(ctx context.Context) error {
		plan, err := l.admin.Rebalance(ctx, true)
		if err != nil {
			return err
		}
		if len(plan.GetMoves()) > 0 || plan.GetMoving() > 0 || len(plan.GetProblems()) > 0 {
			return fmt.Errorf("moves wanted: %v; under way: %d; problems: %v", plan.GetMoves(), plan.GetMoving(), plan.GetProblems())
		}
		_, err = l.leaders(ctx, kvdNodes)
		return err
	})
}
