package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/client"
)

func newToken(s *settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "token",
		Short: "Create, list and revoke tokens",
		Long: `A token says what its holder may do in which namespaces. Nodes started with --auth tokens want
one with every call. Only the SHA-256 of its secret is kept, so a lost token can not be shown again: make another.

The first operator's token is in a file of each node (--auth-root-token-file), which
"kvctl token generate" makes.`,
		Args: exactArgs(),
		RunE: func(*cobra.Command, []string) error { return usagef("want a command: create, ls, revoke or generate") },
	}
	cmd.AddCommand(newTokenCreate(s), newTokenLs(s), newTokenRevoke(s), newTokenGenerate())
	return cmd
}

func newTokenCreate(s *settings) *cobra.Command {
	var (
		grants        []string
		expires, file string
	)
	cmd := &cobra.Command{
		Use:   "create NAME --grant NAMESPACE:RIGHT,...",
		Short: "Create a token and show it, once",
		Long: `Creates a token and writes it to standard output, or with --file to a new file that nobody else
can read. It is shown this once.

Rights are read, write and admin, which includes both and allows to rotate the namespace's keys. The
namespace * means all of them; *:admin makes an operator, who may do everything, tokens included.`,
		Example: `  kvctl token create trainer --grant imagenet:read --expires 30d
  kvctl token create loader --grant imagenet:read,write --grant scratch:admin --file loader.token
  kvctl token create alice --grant '*:admin'`,
		Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			spec := client.TokenSpec{Name: args[0]}
			for _, g := range grants {
				grant, err := parseGrant(g)
				if err != nil {
					return err
				}
				spec.Grants = append(spec.Grants, grant)
			}
			if len(spec.Grants) == 0 {
				return usagef("no --grant: a token without rights is of no use; want --grant NAMESPACE:RIGHT,...")
			}
			var err error
			if spec.TTL, err = parseDays(expires); err != nil {
				return err
			}
			return s.createToken(cmd, spec, file)
		},
	}
	cmd.Flags().StringArrayVar(&grants, "grant", nil, "NAMESPACE:RIGHT,... with rights of read, write and admin; may be given several times")
	cmd.Flags().StringVar(&expires, "expires", "", "after this time, such as 12h or 30d (default: never)")
	cmd.Flags().StringVar(&file, "file", "", "write the token to this file, which must not exist, instead of standard output")
	return cmd
}

// createToken opens the file before it makes the token: one that can not be kept is lost.
func (s *settings) createToken(cmd *cobra.Command, spec client.TokenSpec, file string) (err error) {
	out := cmd.OutOrStdout()
	if file != "" {
		f, ferr := newSecretFile(file)
		if ferr != nil {
			return ferr
		}
		defer func() {
			if err = errors.Join(err, f.Close()); err != nil {
				_ = os.Remove(file)
			}
		}()
		out = f
	}
	return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
		text, made, err := a.CreateToken(ctx, spec)
		if err != nil {
			return fmt.Errorf("create token %q: %w", spec.Name, err)
		}
		if file != "" || s.output != "json" {
			if _, err := fmt.Fprintln(out, text); err != nil {
				return fmt.Errorf("token %s was made, and could not be written (%w): revoke it", made.ID, err)
			}
		}
		if s.output == "json" {
			row := tokenRow(made)
			if file == "" {
				row.Token = text
			}
			return printJSON(cmd.OutOrStdout(), row)
		}
		_, err = fmt.Fprintf(cmd.ErrOrStderr(), "token %s (id %s): it is not shown again\n", made.Name, made.ID)
		return err
	})
}

// newSecretFile makes a file that only its owner can read.
func newSecretFile(file string) (*os.File, error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	switch {
	case errors.Is(err, fs.ErrExist):
		return nil, usagef("--file %s exists already: a token is not written over another file", file)
	case err != nil:
		return nil, usageError{err}
	}
	return f, nil
}

func parseGrant(s string) (client.Grant, error) {
	bad := func(why string) (client.Grant, error) {
		return client.Grant{}, usagef("--grant %q: %s: want NAMESPACE:RIGHT,... with rights of read, write and admin", s, why)
	}
	namespace, rights, ok := strings.Cut(s, ":")
	if !ok || namespace == "" {
		return bad("no namespace")
	}
	g := client.Grant{Namespace: namespace}
	for _, r := range strings.Split(rights, ",") {
		switch strings.TrimSpace(r) {
		case "read":
			g.Read = true
		case "write":
			g.Write = true
		case "admin":
			g.Admin = true
		default:
			return bad(fmt.Sprintf("%q is no right", r))
		}
	}
	return g, nil
}

// parseDays takes what time.ParseDuration takes, and days.
func parseDays(s string) (time.Duration, error) {
	if s == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(s)
	if days, ok := strings.CutSuffix(s, "d"); ok {
		var n uint64
		n, err = strconv.ParseUint(days, 10, 16)
		d = time.Duration(n) * 24 * time.Hour
	}
	if err != nil || d < time.Millisecond {
		return 0, usagef("--expires %q: want a time such as 90m, 12h or 30d", s)
	}
	return d, nil
}

type tokenJSON struct {
	ID      string   `json:"id"`
	Name    string   `json:"name"`
	Created string   `json:"created"`
	Expires string   `json:"expires,omitempty"`
	Grants  []string `json:"grants"`
	Token   string   `json:"token,omitempty"`
}

func tokenRow(t client.Token) tokenJSON {
	row := tokenJSON{ID: t.ID, Name: t.Name, Created: t.Created.Format(time.RFC3339)}
	if !t.Expires.IsZero() {
		row.Expires = t.Expires.Format(time.RFC3339)
	}
	for _, g := range t.Grants {
		var rights []string
		for _, r := range []struct {
			has  bool
			word string
		}{{g.Read, "read"}, {g.Write, "write"}, {g.Admin, "admin"}} {
			if r.has {
				rights = append(rights, r.word)
			}
		}
		row.Grants = append(row.Grants, g.Namespace+":"+strings.Join(rights, ","))
	}
	return row
}

func newTokenLs(s *settings) *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Short:   "List the tokens, without their secrets",
		Example: `  kvctl token ls -o json`,
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				all, err := a.Tokens(ctx)
				if err != nil {
					return err
				}
				return s.printTokens(cmd.OutOrStdout(), all)
			})
		},
	}
}

func (s *settings) printTokens(out io.Writer, all []client.Token) error {
	rows := []tokenJSON{}
	for _, t := range all {
		rows = append(rows, tokenRow(t))
	}
	if s.output == "json" {
		return printJSON(out, rows)
	}
	t := newTable(out, "id", "name", "grants", "created", "expires")
	for _, r := range rows {
		t.AppendRow([]any{r.ID, r.Name, strings.Join(r.Grants, " "), r.Created, r.Expires})
	}
	t.Render()
	return nil
}

func newTokenRevoke(s *settings) *cobra.Command {
	return &cobra.Command{
		Use:   "revoke ID",
		Short: "End a token, its sessions and its connections",
		Long: `Ends a token for good. Each node ends the sessions, connections and streams that the token has open
as soon as it applies the change; a node that is cut off from the cluster does when it is back.`,
		Args: exactArgs("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				if err := a.RevokeToken(ctx, args[0]); err != nil {
					return err
				}
				if s.output == "json" {
					return printJSON(cmd.OutOrStdout(), map[string]string{"revoked": args[0]})
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "revoked %s\n", args[0])
				return err
			})
		},
	}
}

func newTokenGenerate() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "generate",
		Short: "Draw the first operator's token, for the nodes' files",
		Long: `Draws a root token and writes it to standard output, or with --file to a new file that nobody
else can read. Give the file to every node (--auth-root-token-file). No node is asked.`,
		Example: `  kvctl token generate --file root.token`,
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			out := cmd.OutOrStdout()
			if file != "" {
				f, ferr := newSecretFile(file)
				if ferr != nil {
					return ferr
				}
				defer func() { err = errors.Join(err, f.Close()) }()
				out = f
			}
			_, err = fmt.Fprintln(out, client.RootToken())
			return err
		},
	}
	cmd.Flags().StringVar(&file, "file", "", "write the token to this file, which must not exist, instead of standard output")
	return cmd
}
