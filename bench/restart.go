package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// restart measures how long nodes that hold many values take from the start of the process
// until they serve.
type restart struct {
	nodes, shards, keys, size, clients, rounds int
	seed                                       uint64
	nodeArgs                                   []string
	dir, binary                                string
}

func newRestart() *cobra.Command {
	var o restart
	cmd := &cobra.Command{
		Use:   "restart",
		Short: "Measure how long full nodes take to start",
		Long: `Starts kvd processes on loopback, fills them, and then, round by round, ends them all, once by
SIGTERM and once by SIGKILL, starts them again, and tells when all serve and when a value was got
and another one put.`,
		Example: `  go run ./bench restart --keys 5000000 --size 100 --nodes 1`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return inFolder(o.dir, func(dir string) error { return o.run(cmd.Context(), dir, cmd.OutOrStdout(), cmd.ErrOrStderr()) })
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.IntVar(&o.nodes, "nodes", 1, "number of nodes")
	fs.IntVar(&o.shards, "shards", 128, "number of shards")
	fs.IntVar(&o.keys, "keys", 5_000_000, "number of keys")
	fs.IntVar(&o.size, "size", 100, "bytes of a value")
	fs.IntVar(&o.clients, "clients", 512, "puts under way while filling")
	fs.IntVar(&o.rounds, "rounds", 2, "restarts of each kind")
	fs.Uint64Var(&o.seed, "seed", 1, "of keys and values")
	fs.StringArrayVar(&o.nodeArgs, "node-arg", []string{"--arena=2GiB"}, "argument for every node's kvd start; may be repeated")
	fs.StringVar(&o.dir, "dir", "/var/tmp", "where the data is kept during the run")
	fs.StringVar(&o.binary, "kvd-bin", "", "kvd: program to run (default: built from this source tree)")
	return cmd
}

// restarted is one restart of all nodes: times since the processes were begun.
type restarted struct {
	how     string
	ended   time.Duration // how long ending took
	serving time.Duration // all nodes say that they serve
	got     time.Duration // a value was got
	put     time.Duration // and one put
	cpu     time.Duration // that all nodes used until then
}

func (o *restart) run(ctx context.Context, dir string, out, progress io.Writer) error {
	if o.nodes < 1 || o.shards < 1 || o.keys < 1 || o.clients < 1 || o.rounds < 1 || o.size < minValueBytes {
		return fmt.Errorf("--nodes %d, --shards %d, --keys %d, --clients %d, --rounds %d, --size %d: want at least 1 each, and %d of the last",
			o.nodes, o.shards, o.keys, o.clients, o.rounds, o.size, minValueBytes)
	}
	m := describeMachine(dir)
	commit := sourceCommit()
	c, err := startNodes(ctx, dir, o.binary, devcluster.Config{Nodes: o.nodes, Shards: o.shards, Args: o.nodeArgs})
	if err != nil {
		return err
	}
	defer func() { _ = c.Kill() }()
	keys := makeKeys(o.keys, o.seed)
	began := time.Now()
	if err := o.fill(ctx, c, keys, progress); err != nil {
		return err
	}
	fmt.Fprintf(out, "filled: %d values of %d bytes, %d nodes, %d shards, in %.1f s%s\n",
		o.keys, o.size, o.nodes, o.shards, time.Since(began).Seconds(), withArgs(o.nodeArgs))
	for range o.rounds {
		for _, how := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			r, err := o.restart(ctx, c, how, keys)
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "after %-8s (took %.2f s): serving after %.2f s, a get after %.2f s, a put after %.2f s; CPU %.2f s; load average %s\n",
				r.how, r.ended.Seconds(), r.serving.Seconds(), r.got.Seconds(), r.put.Seconds(), r.cpu.Seconds(), loadAverage())
		}
	}
	_, err = fmt.Fprintf(out, "machine: %s\ncommit: %s\n", m, commit)
	return err
}

func (o *restart) fill(ctx context.Context, c *devcluster.Cluster, keys []key, progress io.Writer) error {
	cl, err := client.Dial(ctx, client.Config{Endpoints: c.Endpoints()})
	if err != nil {
		return err
	}
	defer func() { _ = cl.Close() }()
	if err := waitReady(ctx, "kvd", nil, func(ctx context.Context) error { return kvdReady(ctx, cl) }); err != nil {
		return err
	}
	var (
		next  atomic.Int64
		group sync.WaitGroup
		errs  = make([]error, o.clients)
	)
	for i := range errs {
		group.Go(func() {
			value := makeValue(o.size, o.seed)
			for errs[i] == nil {
				n := int(next.Add(1)) - 1
				if n >= len(keys) {
					return
				}
				if n > 0 && n%1_000_000 == 0 {
					fmt.Fprintf(progress, "put %d of %d values\n", n, len(keys))
				}
				stamp(value, keys[n])
				err := putPatiently(ctx, cl, keys[n].bytes, value)
				if err != nil {
					errs[i] = fmt.Errorf("putting key %s: %w", keys[n].text, err)
				}
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// putPatiently puts again what had no answer in time: a machine with other work may stop
// for longer than a put may take, and to put the same again changes nothing.
func putPatiently(ctx context.Context, cl *client.Client, key, value []byte) error {
	const tries = 20
	for n := 1; ; n++ {
		_, err := cl.Put(ctx, key, value)
		if err == nil || n == tries || ctx.Err() != nil {
			return err
		}
	}
}

func (o *restart) restart(ctx context.Context, c *devcluster.Cluster, how syscall.Signal, keys []key) (restarted, error) {
	r := restarted{how: map[syscall.Signal]string{syscall.SIGTERM: "SIGTERM", syscall.SIGKILL: "SIGKILL"}[how]}
	began := time.Now()
	var err error
	if how == syscall.SIGKILL {
		err = c.Kill()
	} else {
		end, cancel := context.WithTimeout(ctx, time.Minute)
		err = c.Stop(end)
		cancel()
	}
	if err != nil {
		return r, err
	}
	r.ended = time.Since(began)
	began = time.Now()
	for _, n := range c.Nodes() {
		if err := n.Start(); err != nil {
			return r, err
		}
	}
	for _, n := range c.Nodes() {
		if err := n.AwaitServing(ctx); err != nil {
			return r, err
		}
	}
	r.serving = time.Since(began)
	cl, err := client.Dial(ctx, client.Config{Endpoints: c.Endpoints()})
	if err != nil {
		return r, err
	}
	defer func() { _ = cl.Close() }()
	want, k := makeValue(o.size, o.seed), keys[len(keys)/2]
	stamp(want, k)
	err = waitReady(ctx, "kvd", nil, func(ctx context.Context) error {
		v, err := cl.Get(ctx, k.bytes)
		if err != nil {
			return err
		}
		return checkValue(v.Data, want, k)
	})
	if err != nil {
		return r, err
	}
	r.got = time.Since(began)
	if err := waitReady(ctx, "kvd", nil, func(ctx context.Context) error { return kvdReady(ctx, cl) }); err != nil {
		return r, err
	}
	r.put = time.Since(began)
	var pids []int
	for _, n := range c.Nodes() {
		pids = append(pids, n.PID())
	}
	r.cpu, _ = cpuTime(pids)
	return r, nil
}
