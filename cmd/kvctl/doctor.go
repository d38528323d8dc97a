package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/internal/doctor"
	"github.com/kvd-io/kvd/internal/verbsflags"
	"github.com/kvd-io/kvd/rdma/verbs"
)

// errProblems: the report is printed, and says what is wrong.
var errProblems = errors.New("problems were found")

func newDoctor(s *settings) *cobra.Command {
	var (
		devices verbs.Provider
		wish    doctor.Wish
		arena   string
		local   bool
		reads   int
	)
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say how memory is read from here, and what stands in the way of RDMA",
		Long: `Looks at the RDMA libraries and devices of this host, at what they hang on (memlock, huge pages,
NUMA, kernel modules, device files), and tries and times every transport to every node of the
cluster. Each problem comes with what to do. It is as useful on a host without any device, and
without a cluster: --local leaves that out.

Exit code 0 where nothing is wrong, 9 where problems were found; notices are no problems. With
-o json the fields are: healthy; findings (level, area, what, do); host; rdma (libraries, devices
with their ports and GIDs and a verdict on each, memlock, verdict); cluster (tls, token, error, denied,
nodes with paths: transport, usable, reason, detail, confidential, connect_ns, p50_ns, p99_ns).`,
		Example: `  kvctl doctor
  kvctl doctor --local --arena 16GiB
  kvctl doctor --require-rdma --rdma-devices mlx5_0
  kvctl -o json doctor | jq '.findings[] | select(.level == "problem")'`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if reads < 1 || reads > 1_000_000 {
				return usagef("--reads %d: want 1 to 1000000", reads)
			}
			if arena != "" {
				n, err := humanize.ParseBytes(arena)
				if err != nil {
					return usagef("--arena %q: want a size such as 16GiB", arena)
				}
				wish.ArenaBytes = n
			}
			wish.RequireRDMA = s.rdma
			if err := verbsflags.Validate(devices); err != nil {
				return usageError{err}
			}
			report := doctor.Here(version, devices, wish)
			if !local {
				ctx, cancel := context.WithTimeout(cmd.Context(), s.timeout)
				defer cancel()
				report.AddCluster(ctx, s.config(), devices, reads, wish)
			}
			if s.output == "json" {
				if err := printJSON(cmd.OutOrStdout(), report); err != nil {
					return err
				}
			} else {
				report.Print(cmd.OutOrStdout())
			}
			if !report.Healthy {
				return fmt.Errorf("%w: %s", errProblems, report.Summary())
			}
			return nil
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.BoolVar(&local, "local", false, "look at this host only")
	fs.IntVar(&reads, "reads", doctor.DefaultReads, "READs to measure on each transport to each node")
	fs.StringVar(&arena, "arena", "", "judge by what a node here with this arena would need, such as 16GiB")
	fs.BoolVar(&wish.HugePages, "huge-pages", false, "judge by what a node here with huge pages would need")
	verbsflags.Define(fs, &devices)
	return cmd
}
