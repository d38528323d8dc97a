package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/rdma/verbs/ibv"
	"github.com/kvd-io/kvd/storage/layout"
)

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print version, commit, Go, and what is built in",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "kvd %s\ncommit %s\n%s %s/%s\nmemory layout %d\nverbs %s\n",
				version, commit, runtime.Version(), runtime.GOOS, runtime.GOARCH, layout.Version, verbsBuild())
			return err
		},
	}
}

// verbsBuild says whether one-sided READs over RDMA devices are in this binary, and
// whether this host has what they need.
func verbsBuild() string {
	s := ibv.Status()
	switch {
	case !s.Built:
		return "not built in: " + s.BuildNote
	case !s.Verbs.Found:
		return fmt.Sprintf("built in, not usable here: %s: %s", s.Verbs.Name, s.Verbs.Err)
	case !s.RDMACM.Found:
		return fmt.Sprintf("built in (%s), without iWARP here: %s: %s", described(s.Verbs), s.RDMACM.Name, s.RDMACM.Err)
	}
	return fmt.Sprintf("built in (%s, %s)", described(s.Verbs), described(s.RDMACM))
}

func described(l ibv.Library) string {
	if l.Version == "" {
		return l.Name
	}
	return l.Name + " " + l.Version
}

func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("unexpected argument %q", args[0])}
	}
	return nil
}
