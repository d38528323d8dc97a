package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/client"
)

// inputLimit bounds, in bytes, what is read before the server is asked for its own
// limit: no value can be larger.
const inputLimit = 64 << 20

func newPut(s *settings) *cobra.Command {
	var (
		file      string
		ifAbsent  bool
		ifVersion uint64
		ttl       time.Duration
	)
	cmd := &cobra.Command{
		Use:   "put KEY [VALUE | - | --file F]",
		Short: "Store a value",
		Long: `Stores a value given as an argument, read from standard input (-) or from a file, and prints
its version. A put that was retried is applied once.`,
		Example: `  kvctl put greeting hello
  gzip -c data | kvctl put data.gz -
  kvctl put model.bin --file ./model.bin
  kvctl put lock me --if-absent
  kvctl put counter 8 --if-version 41
  kvctl put token secret --ttl 10m`,
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return usagef("no key given: want KEY and a VALUE, - or --file F")
			case len(args) == 1 && file == "":
				return usagef("no value given: want a VALUE, - for standard input, or --file F")
			case len(args) == 2 && file != "":
				return usagef("both a value and --file %s given: want one", file)
			case len(args) > 2:
				return usagef("%d arguments: want KEY and one VALUE (quote a value with spaces)", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			var opts []client.WriteOption
			if ifAbsent && cmd.Flags().Changed("if-version") {
				return usagef("--if-absent and --if-version exclude each other")
			}
			if ifAbsent {
				opts = append(opts, client.IfAbsent())
			}
			if cmd.Flags().Changed("if-version") {
				opts = append(opts, client.IfVersion(ifVersion))
			}
			if ttl < 0 {
				return usagef("--ttl %v: want more than 0", ttl)
			}
			if ttl > 0 {
				opts = append(opts, client.TTL(ttl))
			}
			value, err := readValue(cmd.InOrStdin(), args, file)
			if err != nil {
				return err
			}
			return s.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				v, err := c.Put(ctx, []byte(args[0]), value, opts...)
				if err != nil {
					return fmt.Errorf("put %q: %w", args[0], err)
				}
				return s.printVersion(cmd.OutOrStdout(), args[0], v)
			})
		},
	}
	cmd.Flags().StringVar(&file, "file", "", "read the value from this file")
	cmd.Flags().BoolVar(&ifAbsent, "if-absent", false, "only if the key is absent")
	cmd.Flags().Uint64Var(&ifVersion, "if-version", 0, "only if the key has this version (0: is absent)")
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "let the value expire after this time (default: the namespace's)")
	return cmd
}

func readValue(stdin io.Reader, args []string, file string) ([]byte, error) {
	switch {
	case file != "":
		f, err := os.Open(file)
		if err != nil {
			return nil, usagef("--file: %w", err)
		}
		defer func() { _ = f.Close() }()
		return readLimited(f, file)
	case args[1] == "-":
		return readLimited(stdin, "standard input")
	}
	return []byte(args[1]), nil
}

func readLimited(r io.Reader, name string) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, inputLimit+1))
	if err != nil {
		return nil, usagef("read %s: %w", name, err)
	}
	if len(b) > inputLimit {
		return nil, usagef("%s has more than %d bytes, which no value can have", name, inputLimit)
	}
	return b, nil
}

func (s *settings) printVersion(w io.Writer, key string, version uint64) error {
	if s.output == "json" {
		return printJSON(w, map[string]any{"key": keyJSON(key), "version": version})
	}
	_, err := fmt.Fprintln(w, version)
	return err
}

func newDel(s *settings) *cobra.Command {
	var ifVersion uint64
	cmd := &cobra.Command{
		Use:   "del KEY",
		Short: "Delete a key",
		Long:  `Deletes a key and prints the version of the deletion. A key that is absent is an error (exit code 3).`,
		Example: `  kvctl del greeting
  kvctl del counter --if-version 41`,
		Args: exactArgs("KEY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			var opts []client.WriteOption
			if cmd.Flags().Changed("if-version") {
				if ifVersion == 0 {
					return usagef("--if-version 0: a key that is absent can not be deleted")
				}
				opts = append(opts, client.IfVersion(ifVersion))
			}
			return s.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				v, err := c.Delete(ctx, []byte(args[0]), opts...)
				if err != nil {
					return fmt.Errorf("del %q: %w", args[0], err)
				}
				return s.printVersion(cmd.OutOrStdout(), args[0], v)
			})
		},
	}
	cmd.Flags().Uint64Var(&ifVersion, "if-version", 0, "only if the key has this version")
	return cmd
}
