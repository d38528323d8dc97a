// Command kvd is a node of a kvd cluster, and a whole cluster on this machine to try
// it out (kvd dev).
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/server"
)

// Set by the build: see the Makefile.
var (
	version = "dev"
	commit  = "unknown"
)

// Exit codes.
const (
	exitFailed  = 1 // something did not work
	exitUsage   = 2 // the command line, the environment or the configuration file is wrong
	exitRefused = 3 // this data directory must not take part in that cluster
	exitData    = 4 // the data directory can not be used (locked, damaged, read-only)
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newRoot().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvd:", err)
		os.Exit(exitCode(err))
	}
}

// usageError marks what the user wrote wrongly.
type usageError struct{ error }

func (u usageError) Unwrap() error { return u.error }

func exitCode(err error) int {
	var usage usageError
	switch {
	case errors.As(err, &usage), errors.Is(err, server.ErrConfig):
		return exitUsage
	case errors.Is(err, server.ErrRefused):
		return exitRefused
	case errors.Is(err, server.ErrLocked), errors.Is(err, server.ErrDataDir), isEngineError(err), errors.Is(err, raft.ErrLogLost):
		return exitData
	}
	return exitFailed
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvd",
		Short: "A replicated key-value store that is read by one-sided READs",
		Long: `kvd keeps keys and values on several nodes, replicated by Raft, and lets clients read
them from the nodes' registered memory without their CPU.

Exit codes: 0 success, 1 failed, 2 wrong usage or configuration, 3 refused to take part in
the cluster, 4 the data directory can not be used.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("unknown command %q: kvd --help lists them", args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(newStart(), newDev(), newVersion())
	return root
}
