// Command kvctl reads, writes and inspects a kvd cluster.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/client"
)

// Set by the build: see the Makefile.
var (
	version = "dev"
	commit  = "unknown"
)

// Exit codes; the help text of the root command lists them.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitConflict    = 4
	exitUnavailable = 5
	exitDenied      = 6
	exitUnknown     = 7
	exitExhausted   = 8
	exitProblems    = 9
	exitDegraded    = 10
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends what does not heed the first
	err := newRoot().ExecuteContext(ctx)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = fmt.Errorf("%w: %w", errInterrupted, err)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvctl:", err)
		os.Exit(exitCode(err))
	}
}

// errInterrupted: a signal came before the command was done.
var errInterrupted = errors.New("interrupted")

// usageError marks what the user wrote wrongly.
type usageError struct{ error }

func (u usageError) Unwrap() error { return u.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

func exitCode(err error) int {
	var usage usageError
	switch {
	case errors.Is(err, errInterrupted):
		return exitFailed
	case errors.Is(err, errProblems):
		return exitProblems
	case errors.Is(err, errDegraded):
		return exitDegraded
	case errors.As(err, &usage), errors.Is(err, client.ErrInvalid):
		return exitUsage
	case errors.Is(err, client.ErrNotFound), errors.Is(err, client.ErrUnknownNamespace):
		return exitNotFound
	case errors.Is(err, client.ErrConflict), errors.Is(err, client.ErrAlreadyExists):
		return exitConflict
	case errors.Is(err, client.ErrDenied), errors.Is(err, client.ErrWrongCluster):
		return exitDenied
	case errors.Is(err, client.ErrOutcomeUnknown):
		return exitUnknown
	case errors.Is(err, client.ErrExhausted), errors.Is(err, client.ErrReadOnly):
		return exitExhausted
	case errors.Is(err, client.ErrUnavailable), errors.Is(err, client.ErrIncompatible), errors.Is(err, context.DeadlineExceeded):
		return exitUnavailable
	}
	return exitFailed
}

// transports that --transport takes.
var transports = []string{client.TransportAuto, "shm", "verbs", "tcp", client.TransportGRPC}

// settings are the flags of every command.
type settings struct {
	endpoints []string
	namespace string
	clusterID string
	transport string
	rdma      bool
	timeout   time.Duration
	// connectTimeout is for each attempt to reach one node.
	connectTimeout time.Duration
	output         string
	verbose        bool
	credentials
}

func newRoot() *cobra.Command {
	s := &settings{}
	root := &cobra.Command{
		Use:   "kvctl",
		Short: "Read, write and inspect a kvd cluster",
		Long: `kvctl reads and writes keys of a kvd cluster and shows its state. One endpoint is enough:
the other nodes are learnt from it.

Exit codes: 0 success, 1 failed (also: interrupted, or not agreed to), 2 usage (also: empty or
long key, large value), 3 not found (key, namespace, shard or node), 4 conflict (also: the state of
the cluster does not allow it), 5 unavailable, 6 denied (also: another cluster), 7 outcome unknown
(the write may have been applied), 8 exhausted (memory, disk or queue), 9 doctor found problems,
10 the cluster is degraded (cluster health).`,
		Example: `  kvctl put greeting hello
  kvctl get greeting
  kvctl put model.bin --file ./model.bin --if-absent
  kvctl get model.bin --file /tmp/model.bin
  kvctl ls train/ --limit 20
  kvctl -o json status
  source <(kvctl completion bash)`,
		Version:       fmt.Sprintf("%s (commit %s)", version, commit),
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return s.check(cmd.ErrOrStderr())
		},
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q: kvctl --help lists them", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	fs := root.PersistentFlags()
	fs.SortFlags = false
	fs.StringSliceVar(&s.endpoints, "endpoints", endpointsFromEnv(), "gRPC addresses of some nodes, HOST:PORT,... (environment: KVD_ENDPOINTS)")
	fs.StringVarP(&s.namespace, "namespace", "n", "default", "namespace of the keys")
	fs.StringVar(&s.clusterID, "cluster-id", "", "refuse any other cluster than this one")
	fs.StringVar(&s.transport, "transport", "auto", "how to read: "+strings.Join(transports, ", "))
	fs.BoolVar(&s.rdma, "require-rdma", false, "fail unless every node that answers is read by an RDMA device")
	fs.DurationVar(&s.timeout, "timeout", 10*time.Second, "for the whole command")
	fs.DurationVar(&s.connectTimeout, "connect-timeout", 2*time.Second, "for each attempt to reach one node")
	fs.StringVarP(&s.output, "output", "o", "table", "table or json")
	s.addFlags(fs)
	fs.BoolVarP(&s.verbose, "verbose", "v", false, "log to standard error, and show how a read was answered")
	complete := func(flag string, words ...string) {
		_ = root.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
	}
	complete("transport", transports...)
	complete("output", "table", "json")
	root.AddCommand(newGet(s), newPut(s), newDel(s), newLs(s), newNamespace(s), newToken(s), newStatus(s), newDoctor(s), newBackup(s), newRestore(s), newShards(s), newTransfer(s), newExplain(s),
		newMembers(s), newDrain(s), newDecommission(s), newRebalance(s), newCluster(s))
	return root
}

func endpointsFromEnv() []string {
	if e := os.Getenv("KVD_ENDPOINTS"); e != "" {
		return strings.Split(e, ",")
	}
	return []string{"127.0.0.1:7400"}
}

func (s *settings) check(warn io.Writer) error {
	switch s.output {
	case "table", "json":
	default:
		return usagef("-o %s: want table or json", s.output)
	}
	if !slices.Contains(transports, s.transport) {
		return usagef("--transport %s: want one of %s", s.transport, strings.Join(transports, ", "))
	}
	if s.timeout <= 0 {
		return usagef("--timeout %v: want more than 0", s.timeout)
	}
	if s.connectTimeout <= 0 {
		return usagef("--connect-timeout %v: want more than 0", s.connectTimeout)
	}
	return s.load(warn)
}

func (s *settings) config() client.Config {
	cfg := client.Config{
		Endpoints: s.endpoints, Namespace: s.namespace, ClusterID: s.clusterID, Transport: s.transport, RequireRDMA: s.rdma,
		DialTimeout: s.timeout, CallTimeout: s.timeout, ConnectTimeout: s.connectTimeout,
	}
	s.apply(&cfg)
	if s.verbose {
		cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return cfg
}

// withClient runs f with a client, within the timeout.
func (s *settings) withClient(ctx context.Context, f func(context.Context, *client.Client) error) error {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	c, err := client.Dial(ctx, s.config())
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	return f(ctx, c)
}

// withAdmin runs f with an admin client, within the timeout.
func (s *settings) withAdmin(ctx context.Context, f func(context.Context, *client.Admin) error) error {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	a, err := client.DialAdmin(s.config())
	if err != nil {
		return err
	}
	defer func() { _ = a.Close() }()
	return f(ctx, a)
}

// exactArgs is cobra's, with an error that is a usage error and names the arguments.
func exactArgs(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != len(names) {
			want := strings.Join(names, " ")
			if want == "" {
				return usagef("unexpected argument %q", args[0])
			}
			return usagef("%d arguments: want %s", len(args), want)
		}
		return nil
	}
}
