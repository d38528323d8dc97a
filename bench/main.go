package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := newCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// flags of the command line.
type flags struct {
	systems string
	op      string
	clients int
	size    int
	keys    int
	seconds float64
	warmup  float64
	rounds  int
	seed    uint64
	output  string
	dir     string
	opt     options
}

func newCommand() *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Load kvd and its peers by one loop and compare them; or kvd alone while its nodes come and go",
		Example: `  # throughput of gets over TCP, as many at once as memcached gets
  go run ./bench --systems kvd,memcached --op get --clients 64 --transport tcp

  # latency of one durable, replicated put
  go run ./bench --systems kvd,etcd --op put --clients 1 --size 1024

  # what users notice when nodes die, restart, leave or join
  go run ./bench failover --kills 50 --clients 64
  go run ./bench rolling
  go run ./bench join --bytes 2GiB`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.StringVar(&f.systems, "systems", "kvd,memcached,etcd,redis", "what to measure, in this order: kvd, memcached, etcd, redis")
	fs.StringVar(&f.op, "op", "get", "operation: get or put")
	fs.IntVar(&f.clients, "clients", 16, "workers, each with one operation under way")
	fs.IntVar(&f.size, "size", 1024, "bytes of a value")
	fs.IntVar(&f.keys, "keys", 10000, "number of keys, drawn uniformly")
	fs.Float64Var(&f.seconds, "seconds", 5, "seconds of each measurement")
	fs.Float64Var(&f.warmup, "warmup", 1, "seconds of load before each measurement")
	fs.IntVar(&f.rounds, "rounds", 3, "measurements of each system, taken by turns")
	fs.Uint64Var(&f.seed, "seed", 1, "of keys, values and the order of operations")
	fs.StringVarP(&f.output, "output", "o", "table", "table or json")
	fs.StringVar(&f.dir, "dir", "/var/tmp", "where the data of all systems is kept during the run; not on a tmpfs, which makes syncing free")
	fs.StringVar(&f.opt.transport, "transport", "auto", "kvd: how gets read: auto, shm, tcp or grpc")
	fs.StringVar(&f.opt.level, "level", "linearizable", "kvd: promise of gets: linearizable, session or stale")
	fs.StringVar(&f.opt.kvdBinary, "kvd-bin", "", "kvd: program to run (default: built from this source tree)")
	cmd.AddCommand(newFailover(), newRolling(), newJoin(), newIdle(), newRestart())
	return cmd
}

// workload that the flags describe.
func (f flags) workload() (workload, error) {
	w := workload{
		op: operation(f.op), clients: f.clients, size: f.size, seed: f.seed,
		warmup:  time.Duration(f.warmup * float64(time.Second)),
		measure: time.Duration(f.seconds * float64(time.Second)),
	}
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if w.op != opGet && w.op != opPut {
		bad("--op %q: want get or put", f.op)
	}
	if f.clients < 1 {
		bad("--clients %d: want at least 1", f.clients)
	}
	if f.size < minValueBytes {
		bad("--size %d: want at least %d, by which an answer is checked", f.size, minValueBytes)
	}
	if f.keys < 1 {
		bad("--keys %d: want at least 1", f.keys)
	}
	if w.measure <= 0 || w.warmup < 0 {
		bad("--seconds %g, --warmup %g: want more than 0, and at least 0", f.seconds, f.warmup)
	}
	if f.rounds < 1 {
		bad("--rounds %d: want at least 1", f.rounds)
	}
	if f.output != "table" && f.output != "json" {
		bad("--output %q: want table or json", f.output)
	}
	if len(errs) > 0 {
		return workload{}, errors.Join(errs...)
	}
	w.keys = makeKeys(f.keys, f.seed)
	return w, nil
}

func (f flags) run(cmd *cobra.Command) error {
	w, err := f.workload()
	if err != nil {
		return err
	}
	systems, err := makeSystems(f.systems, f.opt)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(f.dir, "kvd-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	m := describeMachine(dir)
	_ = sourceCommit()
	if m.Filesystem == "tmpfs" && w.op == opPut {
		return fmt.Errorf("--dir %s is on a tmpfs: syncing costs nothing there, so durable puts would look free; choose a folder on a disk", f.dir)
	}
	say := func(line string) { fmt.Fprintln(cmd.ErrOrStderr(), line) }
	subjects, err := compare(cmd.Context(), systems, w, f.rounds, dir, say)
	if err != nil {
		return err
	}
	r := makeReport(subjects, w, f.rounds)
	r.Machine = m
	write := r.writeTable
	if f.output == "json" {
		write = r.writeJSON
	}
	if err := write(cmd.OutOrStdout()); err != nil {
		return err
	}
	if failed := r.failedSystems(); len(failed) > 0 {
		return fmt.Errorf("figures with errors are worth nothing: %s", strings.Join(failed, "; "))
	}
	return nil
}
