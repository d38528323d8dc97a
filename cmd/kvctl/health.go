package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/health"
)

// errDegraded: the report is printed, and says what is not as it should be.
var errDegraded = errors.New("degraded")

func newCluster(s *settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Judge the cluster as a whole",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q: kvctl cluster --help lists them", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newHealth(s))
	return cmd
}

func newHealth(s *settings) *cobra.Command {
	var limits health.Limits
	cmd := &cobra.Command{
		Use:   "health",
		Short: "Say whether the cluster is healthy, and why not",
		Long: `Asks all nodes at the same time and gives one verdict and its reasons. Each reason names the thing, what
was seen, what was wanted and what to do. As seen from here, the cluster is

  healthy      everything is as it was wanted; what is under way by plan is listed as info
  degraded     all keys can be read and written, but something is not as it was wanted: a node is
               silent, or starts; a shard has no voter to spare, or too few; a replica is far behind; a
               move, a join, a drain or a change of versions takes longer than --move-limit; group 0,
               which decides about nodes and namespaces, has no leader
  unavailable  some keys can not be read, or not be written: a shard has no leader or quorum, its leader
               refuses writes for want of disk space, or no node answers

Nodes that hang cost --connect-timeout once, however many they are; the whole takes at most three times
that (of which the leader of group 0 has 2 s at least), and never more than --timeout. Who leads and is
heard of is what the nodes know: after a failure they find out within an election timeout. What gossip
hears (kvd start --gossip-listen) is added as a hint. It reads no keys and changes nothing. Wants an
operator's token.

Exit code 0 where the verdict is healthy, 10 where it is degraded, 5 where it is unavailable; others as
in kvctl --help. With -o json the fields are: verdict; cluster_id; nodes, nodes_answering,
nodes_gossiping; shards, shards_serving; reasons (level: info, degraded or unavailable; code; nodes;
shards, 0 being group 0; text).`,
		Example: `  kvctl cluster health
  kvctl cluster health --max-lag 100000 --move-limit 1h
  kvctl -o json cluster health | jq '.reasons[] | select(.level != "info")'
  until kvctl cluster health >/dev/null; do sleep 1; done   # before the next node is restarted`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limits.LagEntries == 0 {
				return usagef("--max-lag 0: want 1 or more entries")
			}
			if limits.MoveTime <= 0 {
				return usagef("--move-limit %v: want more than 0", limits.MoveTime)
			}
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				survey, err := a.Survey(ctx)
				if err != nil {
					return err
				}
				r := health.Judge(survey, limits)
				if s.output == "json" {
					err = printJSON(cmd.OutOrStdout(), r)
				} else {
					err = printHealth(cmd.OutOrStdout(), r)
				}
				return errors.Join(err, verdictError(r))
			})
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.Uint64Var(&limits.LagEntries, "max-lag", health.DefaultLimits.LagEntries, "log entries that a voter may be behind its leader")
	fs.DurationVar(&limits.MoveTime, "move-limit", health.DefaultLimits.MoveTime, "how long a move, a join, a drain or a change of versions may take")
	return cmd
}

func printHealth(w io.Writer, r health.Report) error {
	if _, err := fmt.Fprintf(w, "%s: %d of %d nodes answer, %d of %d shards serve\n", r.Verdict, r.Answering, r.Nodes, r.Serving, r.Shards); err != nil {
		return err
	}
	if len(r.Reasons) == 0 {
		return nil
	}
	t := newTable(w, "level", "what", "reason")
	t.SetColumnConfigs([]table.ColumnConfig{{Number: 3, WidthMax: 110, WidthMaxEnforcer: text.WrapSoft}})
	t.Style().Options.SeparateRows = true
	for _, x := range r.Reasons {
		t.AppendRow([]any{x.Level, x.Code, x.Text})
	}
	t.Render()
	return nil
}

// verdictError has the class that the exit code is chosen by, and says the weightiest
// reason.
func verdictError(r health.Report) error {
	class := errDegraded
	switch r.Verdict {
	case health.Healthy:
		return nil
	case health.Unavailable:
		class = client.ErrUnavailable
	}
	more := ""
	if n := len(r.Reasons) - 1; n > 0 {
		more = fmt.Sprintf(" (and %d more)", n)
	}
	return fmt.Errorf("%w: %s%s", class, r.Reasons[0].Text, more)
}
