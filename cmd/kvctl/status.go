package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/kvd-io/kvd/client"
)

func newStatus(s *settings) *cobra.Command {
	var shards bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the nodes and what they hold",
		Long:  `Asks every node that the endpoints name. A node that does not answer is shown with the reason; exit code 5 if none does.`,
		Example: `  kvctl status
  kvctl status --shards
  kvctl status -o json`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				nodes, err := a.Status(ctx)
				if err != nil {
					return err
				}
				if s.output == "json" {
					return printStatusJSON(cmd, nodes)
				}
				printNodes(cmd, nodes)
				if shards {
					printShards(cmd, nodes)
				}
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&shards, "shards", false, "show every shard as well")
	return cmd
}

func printStatusJSON(cmd *cobra.Command, nodes []client.NodeStatus) error {
	type row struct {
		NodeID  uint64          `json:"node_id"`
		Address string          `json:"address"`
		Error   string          `json:"error,omitempty"`
		Status  json.RawMessage `json:"status,omitempty"`
	}
	rows := []row{}
	for _, n := range nodes {
		r := row{NodeID: n.NodeID, Address: n.Address}
		if n.Err != nil {
			r.Error = n.Err.Error()
		} else {
			b, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(n.Status)
			if err != nil {
				return err
			}
			r.Status = b
		}
		rows = append(rows, r)
	}
	return printJSON(cmd.OutOrStdout(), rows)
}

func printNodes(cmd *cobra.Command, nodes []client.NodeStatus) {
	t := newTable(cmd.OutOrStdout(), "node", "address", "state", "leads", "keys in memory", "memory", "transports", "up", "version")
	cluster := ""
	for _, n := range nodes {
		if n.Err != nil {
			t.AppendRow([]any{n.NodeID, n.Address, "no answer: " + n.Err.Error()})
			continue
		}
		st := n.Status
		cluster = st.GetClusterId()
		if st.GetStartedUnixMs() == 0 {
			t.AppendRow([]any{st.GetNodeId(), st.GetAddress(), "answers; the rest is not shown to this token", "", "", "", strings.Join(st.GetTransports(), " "), "", st.GetVersion()})
			continue
		}
		state := "serving"
		switch {
		case len(st.GetShards()) == 0:
			state = "starting"
		case st.GetReadOnly():
			state = "writes refused"
		}
		leads := 0
		for _, sh := range st.GetShards() {
			if sh.GetShard() != 0 && sh.GetLeaderNode() == st.GetNodeId() {
				leads++
			}
		}
		a := st.GetArena()
		t.AppendRow([]any{
			st.GetNodeId(), st.GetAddress(), state, leads, humanize.Comma(int64(a.GetObjects())),
			fmt.Sprintf("%s of %s", humanize.IBytes(a.GetRegisteredBytes()), humanize.IBytes(a.GetLimitBytes())),
			strings.Join(st.GetTransports(), " "), time.Since(time.UnixMilli(st.GetStartedUnixMs())).Round(time.Second), st.GetVersion(),
		})
	}
	fmt.Fprintf(cmd.OutOrStdout(), "cluster %s\n", cluster)
	t.Render()
}

func printShards(cmd *cobra.Command, nodes []client.NodeStatus) {
	t := newTable(cmd.OutOrStdout(), "shard", "node", "leader", "term", "served", "applied", "commit", "log", "keys", "in memory")
	for _, n := range nodes {
		for _, sh := range n.Status.GetShards() {
			t.AppendRow([]any{
				sh.GetShard(), n.Status.GetNodeId(), sh.GetLeaderNode(), sh.GetTerm(), sh.GetServedTerm(), sh.GetApplied(), sh.GetCommit(),
				fmt.Sprintf("%d..%d", sh.GetFirstIndex(), sh.GetLastIndex()), sh.GetKeys(), sh.GetResidentKeys(),
			})
		}
	}
	t.Render()
}
