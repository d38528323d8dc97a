package main

import (
	"context"
	"fmt"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/client"
)

func newNamespace(s *settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "namespace",
		Aliases: []string{"ns"},
		Short:   "Create and list namespaces, rotate their keys",
		Long: `A namespace is a domain of its own for access and memory. In an immutable one a key, once
present, never changes: a hit then needs no confirmation, one READ is all.`,
		Args: exactArgs(),
		RunE: func(*cobra.Command, []string) error { return usagef("want a command: create, ls or rotate-keys") },
	}
	cmd.AddCommand(newNamespaceCreate(s), newNamespaceLs(s), newRotateKeys(s))
	return cmd
}

func newNamespaceCreate(s *settings) *cobra.Command {
	var spec client.NamespaceSpec
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Create a namespace",
		Example: `  kvctl namespace create embeddings
  kvctl namespace create imagenet --immutable
  kvctl namespace create scratch --default-ttl 24h
  kvctl namespace create secrets --require-tls`,
		Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			spec.Name = args[0]
			if spec.DefaultTTL < 0 {
				return usagef("--default-ttl %v: want more than 0", spec.DefaultTTL)
			}
			if spec.PlaintextReads && !spec.RequireTLS {
				return usagef("--plaintext-reads excepts READs from --require-tls: want both")
			}
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				ns, err := a.CreateNamespace(ctx, spec)
				if err != nil {
					return fmt.Errorf("create namespace %q: %w", spec.Name, err)
				}
				return s.printNamespaces(cmd, []client.Namespace{ns})
			})
		},
	}
	cmd.Flags().BoolVar(&spec.Immutable, "immutable", false, "a key that is present never changes")
	cmd.Flags().BoolVar(&spec.TwoSidedOnly, "two-sided-only", false, "keep it out of one-sided READs: all reads go over gRPC")
	cmd.Flags().DurationVar(&spec.DefaultTTL, "default-ttl", 0, "let values expire after this time (default: never)")
	cmd.Flags().BoolVar(&spec.RequireTLS, "require-tls", false, "refuse calls without TLS, and READs by transports that a network can read along (verbs, tcp without TLS)")
	cmd.Flags().BoolVar(&spec.PlaintextReads, "plaintext-reads", false, "with --require-tls: allow those READs")
	return cmd
}

func newRotateKeys(s *settings) *cobra.Command {
	return &cobra.Command{
		Use:   "rotate-keys NAME",
		Short: "Make useless what was given out of a namespace's memory",
		Long: `Has every node register the namespace's memory under new keys, and ends the namespace's sessions
and connections there; clients open new ones by themselves. Wants the right to admin in the
namespace. It fails where a node does not answer, which then goes on with its old keys.`,
		Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				nodes, err := a.RotateKeys(ctx, args[0])
				if perr := s.printRotated(cmd, nodes); err == nil {
					err = perr
				}
				return err
			})
		},
	}
}

func (s *settings) printRotated(cmd *cobra.Command, nodes []client.KeysRotated) error {
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	if s.output == "json" {
		type row struct {
			Node     uint64 `json:"node"`
			Address  string `json:"address"`
			Rotated  bool   `json:"rotated"`
			Sessions int    `json:"sessions_ended"`
			Error    string `json:"error,omitempty"`
		}
		rows := []row{}
		for _, n := range nodes {
			rows = append(rows, row{n.NodeID, n.Address, n.Err == nil, n.Sessions, text(n.Err)})
		}
		return printJSON(cmd.OutOrStdout(), rows)
	}
	t := newTable(cmd.OutOrStdout(), "node", "address", "rotated", "sessions ended", "error")
	for _, n := range nodes {
		t.AppendRow([]any{n.NodeID, n.Address, n.Err == nil, n.Sessions, text(n.Err)})
	}
	t.Render()
	return nil
}

func newNamespaceLs(s *settings) *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Short:   "List the namespaces",
		Example: `  kvctl namespace ls -o json`,
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				all, err := a.Namespaces(ctx)
				if err != nil {
					return err
				}
				return s.printNamespaces(cmd, all)
			})
		},
	}
}

func (s *settings) printNamespaces(cmd *cobra.Command, all []client.Namespace) error {
	if s.output == "json" {
		type row struct {
			ID         uint32 `json:"id"`
			Name       string `json:"name"`
			Immutable  bool   `json:"immutable"`
			OneSided   bool   `json:"one_sided"`
			DefaultTTL string `json:"default_ttl,omitempty"`
			QuotaBytes uint64 `json:"quota_bytes,omitempty"`
			RequireTLS bool   `json:"require_tls"`
			PlainReads bool   `json:"plaintext_reads"`
		}
		rows := []row{}
		for _, n := range all {
			rows = append(rows, row{n.ID, n.Name, n.Immutable, n.OneSided, ttlText(n.DefaultTTL), n.QuotaBytes, n.RequireTLS, n.PlaintextReads})
		}
		return printJSON(cmd.OutOrStdout(), rows)
	}
	t := newTable(cmd.OutOrStdout(), "name", "id", "immutable", "one-sided", "default TTL", "quota", "TLS")
	for _, n := range all {
		quota := ""
		if n.QuotaBytes > 0 {
			quota = humanize.IBytes(n.QuotaBytes)
		}
		t.AppendRow([]any{n.Name, n.ID, n.Immutable, n.OneSided, ttlText(n.DefaultTTL), quota, tlsText(n)})
	}
	t.Render()
	return nil
}

func tlsText(n client.Namespace) string {
	switch {
	case n.RequireTLS && n.PlaintextReads:
		return "required, but for READs"
	case n.RequireTLS:
		return "required"
	}
	return ""
}

func ttlText(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return d.String()
}
