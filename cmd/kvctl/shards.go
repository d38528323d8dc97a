package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
)

// shardRow is one shard by its leader's word; without a leader by that of the replica
// with the highest term.
type shardRow struct {
	Shard    uint32       `json:"shard"`
	Leader   uint64       `json:"leader"` // 0: none
	Term     uint64       `json:"term"`
	ConfigID uint64       `json:"config_id"`
	Voters   []uint64     `json:"voters"`
	Outgoing []uint64     `json:"voters_outgoing,omitempty"`
	Learners []uint64     `json:"learners"`
	Applied  uint64       `json:"applied"`
	Keys     uint64       `json:"keys"`
	Bytes    uint64       `json:"bytes"`
	Replicas []replicaRow `json:"replicas"`
}

type replicaRow struct {
	Node     uint64 `json:"node"`
	Lag      uint64 `json:"lag_entries"` // of what it has applied, behind what its leader has
	Resident uint64 `json:"resident_keys"`
	State    string `json:"state"` // leader, follower, learner, snapshot, silent, unreachable
}

func newShards(s *settings) *cobra.Command {
	return &cobra.Command{
		Use:   "shards [SHARD...]",
		Short: "Show each shard's leader, replicas, size and lag",
		Long: `Shows each shard as its leader sees it: term, index of the configuration, voters and learners, keys and
bytes, and of each replica how many log entries it is behind (0: none). Shard 0 is the cluster's own.
Sizes are those of keys and values. A shard without a leader has - there, and is shown by the word of
the replica that is furthest. Wants an operator's token.

A replica's state is leader, follower, learner, snapshot (it is being sent one), silent (its leader has
not heard of it lately), or unreachable (kvctl can not ask it).`,
		Example: `  kvctl shards
  kvctl shards 1 2 -o json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			var only []uint32
			for _, a := range args {
				n, err := parseShard(a)
				if err != nil {
					return err
				}
				only = append(only, n)
			}
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				nodes, err := a.Shards(ctx, only...)
				if err != nil {
					return err
				}
				rows := shardRows(nodes)
				for _, n := range only {
					if !slices.ContainsFunc(rows, func(r shardRow) bool { return r.Shard == n }) {
						return fmt.Errorf("%w: no node that answers has a replica of shard %d", client.ErrNotFound, n)
					}
				}
				return s.printShardRows(cmd, nodes, rows)
			})
		},
	}
}

func parseShard(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0, usagef("shard %q: want a number; kvctl shards lists them", s)
	}
	return uint32(n), nil
}

// shardRows puts together what the nodes said.
func shardRows(nodes []client.NodeShards) []shardRow {
	type said struct {
		node uint64
		*kvdv1.ShardReplica
	}
	byShard := map[uint32][]said{}
	for _, n := range nodes {
		for _, r := range n.Replicas {
			byShard[r.GetShard()] = append(byShard[r.GetShard()], said{n.NodeID, r})
		}
	}
	rows := []shardRow{}
	for number, all := range byShard {
		best := slices.MaxFunc(all, func(a, b said) int {
			if a.GetLeading() != b.GetLeading() && a.GetTerm() == b.GetTerm() {
				return map[bool]int{true: 1, false: -1}[a.GetLeading()]
			}
			return cmp.Or(cmp.Compare(a.GetTerm(), b.GetTerm()), cmp.Compare(a.GetApplied(), b.GetApplied()))
		})
		row := shardRow{
			Shard: number, Leader: best.GetLeaderNode(), Term: best.GetTerm(), ConfigID: best.GetConfigId(),
			Voters: best.GetVoters(), Outgoing: best.GetVotersOutgoing(), Learners: append([]uint64{}, best.GetLearners()...),
			Applied: best.GetApplied(), Keys: best.GetKeys(), Bytes: best.GetBytes(),
		}
		members := slices.Concat(row.Voters, row.Outgoing, row.Learners)
		slices.Sort(members)
		for _, id := range slices.Compact(members) {
			r := replicaRow{Node: id, State: "unreachable", Lag: best.GetApplied()}
			for _, o := range best.GetOthers() {
				if o.GetNodeId() == id {
					r.Lag = behind(best.GetApplied(), o.GetMatch())
				}
			}
			for _, x := range all {
				if x.node == id {
					r.State, r.Resident = "follower", x.GetResidentKeys()
					r.Lag = behind(best.GetApplied(), x.GetApplied())
				}
			}
			r.State = stateOf(r, best.ShardReplica)
			row.Replicas = append(row.Replicas, r)
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b shardRow) int { return cmp.Compare(a.Shard, b.Shard) })
	return rows
}

func behind(of, is uint64) uint64 { return of - min(of, is) }

func stateOf(r replicaRow, best *kvdv1.ShardReplica) string {
	for _, o := range best.GetOthers() {
		switch {
		case o.GetNodeId() != r.Node:
		case o.GetSnapshot():
			return "snapshot"
		case !o.GetActive() && r.State != "unreachable":
			return "silent"
		}
	}
	switch {
	case r.State == "unreachable":
		return r.State
	case r.Node == best.GetLeaderNode():
		return "leader"
	case slices.Contains(best.GetLearners(), r.Node):
		return "learner"
	}
	return r.State
}

func (s *settings) printShardRows(cmd *cobra.Command, nodes []client.NodeShards, rows []shardRow) error {
	if s.output == "json" {
		return printJSON(cmd.OutOrStdout(), rows)
	}
	for _, n := range nodes {
		if n.Err != nil {
			_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "node %d does not answer: %v\n", n.NodeID, n.Err)
		}
	}
	t := newTable(cmd.OutOrStdout(), "shard", "leader", "term", "config", "voters", "learners", "keys", "size", "lag of each replica")
	for _, r := range rows {
		leader := "-"
		if r.Leader != 0 {
			leader = strconv.FormatUint(r.Leader, 10)
		}
		voters := ids(r.Voters)
		if len(r.Outgoing) > 0 {
			voters += " (joint with " + ids(r.Outgoing) + ")"
		}
		var lags []string
		for _, x := range r.Replicas {
			lag := fmt.Sprintf("%d:%d", x.Node, x.Lag)
			if x.State != "leader" && x.State != "follower" {
				lag += " " + x.State
			}
			lags = append(lags, lag)
		}
		t.AppendRow([]any{r.Shard, leader, r.Term, r.ConfigID, voters, ids(r.Learners), r.Keys, humanize.IBytes(r.Bytes), strings.Join(lags, ", ")})
	}
	t.Render()
	return nil
}

func ids(list []uint64) string {
	var words []string
	for _, id := range list {
		words = append(words, strconv.FormatUint(id, 10))
	}
	return strings.Join(words, " ")
}
