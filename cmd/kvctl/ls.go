package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/client"
)

func newLs(s *settings) *cobra.Command {
	var (
		level, after string
		limit        int
	)
	cmd := &cobra.Command{
		Use:   "ls [PREFIX]",
		Short: "List keys by prefix, in order",
		Long: `Lists the keys that begin with PREFIX (all, without one), in the order of their bytes, page by
page from the nodes' stores. With -o json there is one object a line.

Each page of each shard is linearizable; the list as a whole is not one snapshot: keys written
meanwhile may or may not show.`,
		Example: `  kvctl ls train/
  kvctl ls train/ --limit 100 --start-after train/000099
  kvctl ls -o json | jq -r .key`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("%d arguments: want at most one PREFIX", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := parseLevel(level)
			if err != nil {
				return err
			}
			if limit < 0 {
				return usagef("--limit %d: want more than 0", limit)
			}
			prefix := ""
			if len(args) == 1 {
				prefix = args[0]
			}
			opts := []client.ListOption{client.KeysOnly(), client.ListLevel(l)}
			if limit > 0 {
				opts = append(opts, client.Limit(limit))
			}
			if after != "" {
				opts = append(opts, client.StartAfter([]byte(after)))
			}
			return s.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				p := newListPrinter(cmd.OutOrStdout(), s.output)
				for it, err := range c.List(ctx, []byte(prefix), opts...) {
					if err != nil {
						return fmt.Errorf("ls %q: %w", prefix, err)
					}
					if err := p.item(it); err != nil {
						return err
					}
				}
				return p.flush()
			})
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 0, "end after so many keys (default: all)")
	cmd.Flags().StringVar(&after, "start-after", "", "begin behind this key")
	addLevel(cmd, &level)
	return cmd
}

// listPrinter prints as it goes, so that a list of any length needs little memory.
type listPrinter struct {
	json *json.Encoder
	tab  *tabwriter.Writer
	n    int
}

const listPage = 500 // rows that share their column widths

func newListPrinter(w io.Writer, output string) *listPrinter {
	if output == "json" {
		return &listPrinter{json: json.NewEncoder(w)}
	}
	p := &listPrinter{tab: tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)}
	_, _ = fmt.Fprintln(p.tab, "KEY\tSIZE\tVERSION\tEXPIRES") // errors show at flush
	return p
}

func (p *listPrinter) item(it client.Item) error {
	expires := ""
	if !it.Expires.IsZero() {
		expires = it.Expires.Format(time.RFC3339)
	}
	if p.json != nil {
		return p.json.Encode(listJSON{Key: keyJSON(string(it.Key)), KeyBase64: keyBase64(it.Key), Size: it.Size, Version: it.Version, Expires: expires})
	}
	_, _ = fmt.Fprintf(p.tab, "%s\t%s\t%d\t%s\n", printableKey(it.Key), humanize.IBytes(uint64(it.Size)), it.Version, expires)
	if p.n++; p.n%listPage == 0 {
		return p.tab.Flush()
	}
	return nil
}

func (p *listPrinter) flush() error {
	if p.tab == nil {
		return nil
	}
	return p.tab.Flush()
}

type listJSON struct {
	Key       string `json:"key"`
	KeyBase64 string `json:"key_base64,omitempty"`
	Size      int64  `json:"size"`
	Version   uint64 `json:"version"`
	Expires   string `json:"expires,omitempty"`
}
