package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/client"
)

func newTransfer(s *settings) *cobra.Command {
	return &cobra.Command{
		Use:   "transfer SHARD NODE",
		Short: "Hand a shard's leadership to another of its voters",
		Long: `Hands a shard's leadership to NODE, which must be one of its voters. Writes under way are finished
first; for the moment of the hand-over clients try again by themselves. Shard 0 is the cluster's own.
Nothing happens where NODE leads already. Leadership stays where it went until something else moves
it. Wants an operator's token.`,
		Example: `  kvctl transfer 7 2
  kvctl shards 7`,
		Args: exactArgs("SHARD", "NODE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			shard, err := parseShard(args[0])
			if err != nil {
				return err
			}
			node, err := strconv.ParseUint(args[1], 10, 64)
			if err != nil || node == 0 {
				return usagef("node %q: want the number of a node; kvctl status lists them", args[1])
			}
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				return s.transfer(ctx, cmd, a, shard, node)
			})
		},
	}
}

func (s *settings) transfer(ctx context.Context, cmd *cobra.Command, a *client.Admin, shard uint32, node uint64) error {
	began := time.Now()
	before, err := shardNow(ctx, a, shard)
	if err != nil {
		return err
	}
	if err := a.TransferLeader(ctx, shard, node); err != nil {
		return fmt.Errorf("shard %d was not handed to node %d: %w", shard, node, err)
	}
	after, err := shardNow(ctx, a, shard)
	if err != nil {
		return err
	}
	if s.output == "json" {
		return printJSON(cmd.OutOrStdout(), map[string]uint64{"shard": uint64(shard), "from": before.Leader, "to": node, "term": after.Term})
	}
	if before.Leader == node {
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "node %d leads shard %d already\n", node, shard)
		return err
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "node %d leads shard %d now, in term %d; before: node %d; took %v\n", node, shard, after.Term, before.Leader, time.Since(began).Round(time.Millisecond))
	return err
}

// shardNow is one shard by its nodes' word.
func shardNow(ctx context.Context, a *client.Admin, shard uint32) (shardRow, error) {
	nodes, err := a.Shards(ctx, shard)
	if err != nil {
		return shardRow{}, err
	}
	rows := shardRows(nodes)
	if len(rows) == 0 {
		return shardRow{}, fmt.Errorf("%w: no node that answers has a replica of shard %d: kvctl shards lists them", client.ErrNotFound, shard)
	}
	return rows[0], nil
}
