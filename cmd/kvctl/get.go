package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/client"
)

func newGet(s *settings) *cobra.Command {
	var file, level string
	cmd := &cobra.Command{
		Use:   "get KEY",
		Short: "Print a value, byte for byte",
		Long: `Prints the value as it is, with nothing added, or stores it in a file. With -o json the
answer is an object with the value in base64.

Levels: linearizable (default) sees every write that was acknowledged before; session sees
this client's own writes, which for a single command is not much; stale sees any committed value.`,
		Example: `  kvctl get greeting
  kvctl get model.bin --file /tmp/model.bin
  kvctl get greeting --level stale --transport tcp
  kvctl get greeting -o json`,
		Args: exactArgs("KEY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := parseLevel(level)
			if err == nil && file != "" {
				err = checkFile(file)
			}
			if err != nil {
				return err
			}
			return s.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				v, err := c.Get(ctx, []byte(args[0]), client.WithLevel(l))
				if err != nil {
					return fmt.Errorf("get %q: %w", args[0], err)
				}
				if s.verbose {
					explainRead(cmd.ErrOrStderr(), c.Stats())
				}
				switch {
				case file != "":
					return writeFile(file, v.Data)
				case s.output == "json":
					return printJSON(cmd.OutOrStdout(), valueJSON(args[0], v))
				}
				_, err = cmd.OutOrStdout().Write(v.Data)
				return err
			})
		},
	}
	cmd.Flags().StringVar(&file, "file", "", "store the value in this file instead; it is replaced as a whole")
	addLevel(cmd, &level)
	return cmd
}

func addLevel(cmd *cobra.Command, level *string) {
	cmd.Flags().StringVar(level, "level", "linearizable", "linearizable, session or stale")
	_ = cmd.RegisterFlagCompletionFunc("level", cobra.FixedCompletions([]string{"linearizable", "session", "stale"}, cobra.ShellCompDirectiveNoFileComp))
}

func parseLevel(name string) (client.Level, error) {
	l, err := client.ParseLevel(name)
	if err != nil {
		return 0, usageError{err}
	}
	return l, nil
}

func explainRead(w io.Writer, st client.Stats) {
	for _, g := range st.Gets {
		fmt.Fprintf(w, "answered by %s (%s): %d object READs, %d bucket READs, %d record READs, %d queries, %d confirmations\n",
			g.Via, g.Level, st.ObjectReads, st.BucketReads, st.RecordReads, st.Queries, st.Confirmations)
	}
	for reason, n := range st.Fallbacks {
		fmt.Fprintf(w, "fell back to gRPC %d times: %s\n", n, reason)
	}
}

// checkFile tells what is wrong with the place before anything is read.
func checkFile(path string) error {
	dir := filepath.Dir(path)
	switch info, err := os.Stat(dir); {
	case errors.Is(err, fs.ErrNotExist):
		return usagef("--file %s: there is no folder %s: make it first", path, dir)
	case err != nil:
		return usagef("--file %s: %w", path, err)
	case !info.IsDir():
		return usagef("--file %s: %s is no folder", path, dir)
	}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return usagef("--file %s: that is a folder: want a file", path)
	}
	return nil
}

// writeFile replaces the file as a whole: whoever reads it sees the old or the new
// content.
func writeFile(path string, content []byte) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("--file: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp.Name())
		}
	}()
	_, err = tmp.Write(content)
	if err == nil {
		err = tmp.Chmod(0o644)
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return fmt.Errorf("--file: %w", err)
	}
	if err = os.Rename(tmp.Name(), path); err != nil {
		return fmt.Errorf("--file: %w", err)
	}
	return nil
}
