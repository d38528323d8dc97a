package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/spf13/cobra"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// Bounds on a node that joins.
const (
	unbalanced   = 0.1 // of the mean, replicas and bytes
	p99Disturbed = 2.0 // of that before
)

const fillers = 16 // goroutines that put what there is to move

func newJoin() *cobra.Command {
	f := &lifeFlags{}
	amount, piece := byteSize(2<<30), byteSize(64<<10)
	var calm time.Duration
	cmd := &cobra.Command{
		Use:   "join",
		Short: "Have a fourth node join three that hold data, and time how the load fares",
		Long: `Fills three nodes with values, measures a load of small ones, has a fourth node join, and waits until
replicas and bytes are spread evenly. The latencies of the load from the start of the fourth node
until then stand beside those before.`,
		Example:       "  go run ./bench join --bytes 2GiB --clients 64",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if piece < minHeldBytes || piece > 1<<20 || amount < piece {
				return fmt.Errorf("--bytes %d in values of --fill-size %d: want values of %d bytes to 1 MiB, and one at least", amount, piece, minHeldBytes)
			}
			if !cmd.Flags().Changed("shards") {
				f.shards = 32
			}
			settings := map[string]string{"bytes": amount.String(), "in values of": piece.String()}
			// All values stay in memory: eviction is not what is measured.
			arena := fmt.Sprintf("--arena=%d", max(1<<30, uint64(amount)*3/2))
			return f.run(cmd, kvdNodes, settings, []string{arena}, func(ctx context.Context, l *life) error {
				return l.join(ctx, uint64(amount), int(piece), calm)
			})
		},
	}
	cmd.Flags().Var(&amount, "bytes", "of values that the three nodes hold, each of them all")
	cmd.Flags().Var(&piece, "fill-size", "bytes of each of these values")
	cmd.Flags().DurationVar(&calm, "calm", 20*time.Second, "how long the load is measured before")
	f.define(cmd)
	return cmd
}

func (l *life) join(ctx context.Context, amount uint64, piece int, calm time.Duration) error {
	l.report.Columns = stepColumns
	l.say("putting %d bytes", amount)
	if err := l.fill(ctx, amount, piece); err != nil {
		return err
	}
	if _, err := l.spread(ctx, kvdNodes); err != nil {
		return err
	}
	if err := l.load.start(ctx); err != nil {
		return err
	}
	if err := l.step(ctx, "warm-up", func(ctx context.Context) error { return sleepFor(ctx, calm/4) }); err != nil {
		return err
	}
	var before, during [accesses]float64
	p99s := func(into *[accesses]float64) {
		row := l.report.Rows[len(l.report.Rows)-1]
		into[read], into[written] = row[4].(float64), row[8].(float64)
	}
	if err := l.step(ctx, "before", func(ctx context.Context) error { return sleepFor(ctx, calm) }); err != nil {
		return err
	}
	p99s(&before)
	var spreadBy [2]float64
	err := l.step(ctx, "join", func(ctx context.Context) error {
		if _, err := l.cluster.Join(ctx); err != nil {
			return err
		}
		return await(ctx, "replicas and bytes are spread evenly", func(ctx context.Context) (err error) {
			if spreadBy, err = l.evenness(ctx); err == nil && (spreadBy[0] > unbalanced || spreadBy[1] > unbalanced) {
				err = fmt.Errorf("a node is off the mean by %.3f of its replicas, one by %.3f of its bytes", spreadBy[0], spreadBy[1])
			}
			if err != nil {
				return err
			}
			return l.balanced(ctx)
		})
	})
	if err != nil {
		return err
	}
	p99s(&during)
	if err := l.step(ctx, "after", func(ctx context.Context) error { return sleepFor(ctx, calm/2) }); err != nil {
		return err
	}
	l.report.Bounds = append(l.report.Bounds,
		atMost("replicas off the mean, at most", spreadBy[0], unbalanced, "of it"),
		atMost("bytes off the mean, at most", spreadBy[1], unbalanced, "of it"))
	for kind := range accesses {
		l.report.Bounds = append(l.report.Bounds, atMost(kind.String()+"s' p99 to before", during[kind]/before[kind], p99Disturbed, "ratio"))
	}
	return nil
}

// fill puts values until there are so many bytes.
func (l *life) fill(ctx context.Context, amount uint64, piece int) error {
	values := amount / uint64(piece)
	errs := make([]error, fillers)
	var wg sync.WaitGroup
	for i := range uint64(fillers) {
		wg.Go(func() {
			value := makeValue(piece, l.f.seed+i)
			for n := i; n < values && errs[i] == nil; n += fillers {
				binary.LittleEndian.PutUint64(value, n)
				one, cancel := context.WithTimeout(ctx, readyTimeout)
				_, errs[i] = l.sdks[n%uint64(len(l.sdks))].Put(one, fmt.Appendf(nil, "fill/%d", n), value)
				cancel()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// evenness is how far a node is off the mean, at most, of replicas and of bytes.
func (l *life) evenness(ctx context.Context) (off [2]float64, err error) {
	members, err := l.admin.Members(ctx)
	if err != nil {
		return off, err
	}
	var all [2][]float64
	for _, m := range members {
		if m.GetNode().GetState() != kvdv1.NodeState_NODE_STATE_ACTIVE {
			return off, fmt.Errorf("node %d is %v", m.GetNode().GetNodeId(), m.GetNode().GetState())
		}
		all[0], all[1] = append(all[0], float64(m.GetReplicas())), append(all[1], float64(m.GetBytes()))
	}
	if len(members) != len(l.cluster.Nodes()) {
		return off, fmt.Errorf("%d members of %d nodes", len(members), len(l.cluster.Nodes()))
	}
	return [2]float64{offMean(all[0]), offMean(all[1])}, nil
}

// offMean is the largest distance from the mean, as a part of it.
func offMean(xs []float64) (most float64) {
	sum := 0.0
	for _, x := range xs {
		sum += x
	}
	mean := sum / float64(len(xs))
	if mean == 0 {
		return math.Inf(1)
	}
	for _, x := range xs {
		most = max(most, math.Abs(x-mean)/mean)
	}
	return most
}
