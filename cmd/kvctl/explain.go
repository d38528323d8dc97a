package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/client"
)

func newExplain(s *settings) *cobra.Command {
	return &cobra.Command{
		Use:   "explain KEY",
		Short: "Show where a key lies, how it is read, and why not in a better way",
		Long: `Shows a key's shard with its leader, term and voters; what each replica has of the key: version, where
it lies in memory (chunk, offset, size of its block), or why it is not in memory; and by which
transport this host reads each node, and why not by a better one.

Memory does not remember what it does not have, so where keys were both evicted and refused for lack of
room the reason is one of the two. A key that is in no memory is read over gRPC, which is slower and
right. kvctl makes one get of its own, and shows how that one was answered and whether the key's place
is remembered after it. Wants the right to read the namespace.`,
		Example: `  kvctl explain model/step
  kvctl -n imagenet explain train/0001 -o json
  kvctl explain model/step --transport tcp`,
		Args: exactArgs("KEY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return s.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				return s.explain(ctx, cmd, c, []byte(args[0]))
			})
		},
	}
}

type explainReplica struct {
	Node       uint64   `json:"node"`
	Address    string   `json:"address"`
	Leader     bool     `json:"leader"`
	Transport  string   `json:"transport"`
	Why        string   `json:"transport_reason"`
	PassedOver []string `json:"passed_over,omitempty"`
	Cached     bool     `json:"location_cached"`
	Stored     bool     `json:"stored"`
	Version    uint64   `json:"version,omitempty"`
	Size       uint64   `json:"value_bytes,omitempty"`
	Expires    string   `json:"expires,omitempty"`
	Resident   bool     `json:"resident"`
	Chunk      uint32   `json:"chunk,omitempty"`
	Offset     uint64   `json:"offset,omitempty"`
	Length     uint32   `json:"object_bytes,omitempty"`
	Class      uint32   `json:"class_bytes,omitempty"`
	LayoutGen  uint64   `json:"layout_gen,omitempty"`
	Applied    uint64   `json:"applied,omitempty"`
	Reason     string   `json:"reason,omitempty"`
	Detail     string   `json:"detail,omitempty"`
	Error      string   `json:"error,omitempty"`
}

type explainJSON struct {
	Namespace string           `json:"namespace"`
	Key       string           `json:"key"`
	KeyBase64 string           `json:"key_base64,omitempty"`
	Shard     uint32           `json:"shard"`
	Leader    uint64           `json:"leader"`
	Term      uint64           `json:"term"`
	ConfigID  uint64           `json:"config_id"`
	Voters    []uint64         `json:"voters"`
	Learners  []uint64         `json:"learners,omitempty"`
	Get       string           `json:"get"`
	Replicas  []explainReplica `json:"replicas"`
}

func (s *settings) explain(ctx context.Context, cmd *cobra.Command, c *client.Client, key []byte) error {
	// How a get fares, before anything is asked: asking changes nothing.
	_, err := c.Get(ctx, key)
	if err != nil && !errors.Is(err, client.ErrNotFound) {
		return fmt.Errorf("explain %q: %w", key, err)
	}
	st := c.Stats()
	x, err := c.Explain(ctx, key)
	if err != nil {
		return fmt.Errorf("explain %q: %w", key, err)
	}
	j := explainJSON{
		Namespace: x.Namespace, Key: keyJSON(string(key)), KeyBase64: keyBase64(key), Shard: x.Shard, Leader: x.Leader, Term: x.Term, ConfigID: x.ConfigID,
		Voters: x.Voters, Learners: x.Learns, Get: howRead(st), Replicas: []explainReplica{},
	}
	for _, r := range x.Replicas {
		j.Replicas = append(j.Replicas, explainRow(r, x.Leader))
	}
	if s.output == "json" {
		return printJSON(cmd.OutOrStdout(), j)
	}
	return printExplained(cmd, key, j)
}

// howRead says in words what the only get did.
func howRead(st client.Stats) string {
	var parts []string
	for _, g := range st.Gets {
		parts = append(parts, "answered by "+g.Via)
	}
	for reason := range st.Fallbacks {
		parts = append(parts, "over gRPC because of "+reason)
	}
	parts = append(parts, fmt.Sprintf("%d object, %d bucket, %d record READs, %d queries", st.ObjectReads, st.BucketReads, st.RecordReads, st.Queries))
	return strings.Join(parts, ", ")
}

func explainRow(r client.ReplicaExplanation, leader uint64) explainReplica {
	row := explainReplica{
		Node: r.NodeID, Address: r.Address, Leader: r.NodeID == leader, Transport: r.Transport, Why: r.Reason, PassedOver: r.PassedOver, Cached: r.Cached,
	}
	if r.Err != nil {
		row.Error = r.Err.Error()
		return row
	}
	n := r.Node
	row.Stored, row.Version, row.Size, row.Class, row.LayoutGen = n.GetStored(), n.GetVersion(), n.GetValueBytes(), n.GetClassBytes(), n.GetLayoutGen()
	row.Applied, row.Reason, row.Detail = n.GetReplica().GetApplied(), n.GetReason(), n.GetDetail()
	if ms := n.GetExpiresUnixMs(); ms != 0 {
		row.Expires = time.UnixMilli(ms).Format(time.RFC3339)
	}
	if l := n.GetLocation(); l != nil {
		row.Resident, row.Chunk, row.Offset, row.Length = true, l.GetChunk(), l.GetOffset(), l.GetLength()
	}
	return row
}

func printExplained(cmd *cobra.Command, key []byte, j explainJSON) error {
	out := cmd.OutOrStdout()
	leader := "none known"
	if j.Leader != 0 {
		leader = "node " + strconv.FormatUint(j.Leader, 10)
	}
	_, _ = fmt.Fprintf(out, "key %s of namespace %s: shard %d, leader %s, term %d, voters %s, configuration %d\n", printableKey(key), j.Namespace, j.Shard, leader, j.Term, ids(j.Voters), j.ConfigID)
	_, _ = fmt.Fprintf(out, "a get now: %s\n", j.Get)
	for _, r := range j.Replicas {
		role := ""
		if r.Leader {
			role = " (leader)"
		}
		_, _ = fmt.Fprintf(out, "node %d%s at %s\n", r.Node, role, r.Address)
		if r.Error != "" {
			_, _ = fmt.Fprintf(out, "  does not answer: %s\n", r.Error)
			continue
		}
		if r.Stored {
			_, _ = fmt.Fprintf(out, "  store:     version %d, value of %s%s\n", r.Version, humanize.IBytes(r.Size), expiryText(r.Expires))
		} else {
			_, _ = fmt.Fprintf(out, "  store:     %s\n", r.Detail)
		}
		switch {
		case r.Resident:
			_, _ = fmt.Fprintf(out, "  memory:    chunk %d, offset %d, object of %d bytes in a block of %d, layout %d\n", r.Chunk, r.Offset, r.Length, r.Class, r.LayoutGen)
			if r.Reason != "" {
				_, _ = fmt.Fprintf(out, "             %s: %s\n", r.Reason, r.Detail)
			}
		case r.Stored:
			_, _ = fmt.Fprintf(out, "  memory:    not there: %s: %s\n", r.Reason, r.Detail)
		default:
			_, _ = fmt.Fprintf(out, "  memory:    nothing\n")
		}
		_, _ = fmt.Fprintf(out, "  read by:   %s: %s\n", r.Transport, r.Why)
		for _, p := range r.PassedOver {
			_, _ = fmt.Fprintf(out, "             not by %s\n", p)
		}
		_, _ = fmt.Fprintf(out, "  place:     %s\n", map[bool]string{true: "remembered by this client", false: "not remembered by this client"}[r.Cached])
	}
	return nil
}

func expiryText(expires string) string {
	if expires == "" {
		return ""
	}
	return ", expires " + expires
}
