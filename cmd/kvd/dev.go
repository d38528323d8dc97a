package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-io/kvd/internal/devcluster"
)

type devSettings struct {
	once      bool
	tree      string
	dir       string
	keep      bool
	nodes     int
	shards    int
	transport string
	values    int
	gets      int
	callers   int
	arena     uint64
	hosts     []string
	nodeArgs  []string
	patience  time.Duration
}

func newDev() *cobra.Command {
	s := &devSettings{}
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run a whole cluster on this machine",
		Long: `Starts three kvd processes on loopback, with their data below a temporary directory, and
stays up until an interrupt. Nothing needs to be configured.

With --once it shows what kvd does and ends: it loads a directory tree, reads every file back
by linearizable one-sided gets and compares the SHA-256, kills the leader of half of the shards
in the middle and goes on, and then measures warm gets. It exits with 0 only if every byte
agreed.`,
		Example: `  kvd dev
  kvd dev --once
  kvd dev --once --tree ~/datasets/small --transport tcp

  # by RDMA, over a software device on a network interface with three addresses
  rdma link add rxe0 type rxe netdev eth1
  kvd dev --once --hosts 10.0.0.1,10.0.0.2,10.0.0.3 --node-arg=--require-rdma --transport verbs`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.BoolVar(&s.once, "once", false, "load, read back, fail over, measure, print a table and end")
	fs.StringVar(&s.tree, "tree", "", "with --once: the directory tree to load (default: the Go installation's src)")
	fs.IntVar(&s.values, "values", 10_000, "with --once: how many values of 1 KiB the warm step has")
	fs.IntVar(&s.gets, "gets", 1_000_000, "with --once: how many of them the warm step gets")
	fs.IntVar(&s.callers, "callers", 8, "with --once: concurrent callers of the tree step")
	fs.StringVar(&s.transport, "transport", "auto", "with --once: how to read: auto, shm, verbs or tcp")
	fs.IntVar(&s.nodes, "nodes", 3, "number of nodes: 1, 3, 5 or 7")
	fs.IntVar(&s.shards, "shards", 8, "number of shards")
	fs.Var(newBytes(&s.arena, 1<<30), "arena", "cap of each node's registered memory")
	fs.StringSliceVar(&s.hosts, "hosts", nil, "IP addresses of this machine for the nodes, one each (default: loopback); on an RDMA device each node then has its own GID")
	fs.StringArrayVar(&s.nodeArgs, "node-arg", nil, "argument for every node's kvd start, such as --node-arg=--rdma-max-mtu=1024; may be repeated")
	fs.DurationVar(&s.patience, "start-timeout", time.Minute, "how long the nodes may take to start")
	fs.StringVar(&s.dir, "dir", "", "directory for the nodes' data (default: a new temporary one)")
	fs.BoolVar(&s.keep, "keep", false, "leave the temporary directory in place")
	return cmd
}

func (s *devSettings) run(ctx context.Context, out, errOut io.Writer) (err error) {
	if s.nodes < 1 || s.nodes > 7 || s.nodes%2 == 0 {
		return usageError{fmt.Errorf("--nodes %d: want 1, 3, 5 or 7", s.nodes)}
	}
	if s.once && s.nodes < 3 {
		return usageError{fmt.Errorf("--once with %d node: it kills one and goes on, so it wants at least 3", s.nodes)}
	}
	if s.values < 1 || s.gets < 1 || s.callers < 1 {
		return usageError{errors.New("--values, --gets and --callers: want at least 1 of each")}
	}
	if n := len(s.hosts); n != 0 && n != s.nodes {
		return usageError{fmt.Errorf("--hosts names %d addresses for %d nodes: want one each", n, s.nodes)}
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	dir := s.dir
	if dir == "" {
		if dir, err = os.MkdirTemp("", "kvd-dev-"); err != nil {
			return fmt.Errorf("temporary directory: %w", err)
		}
		if !s.keep {
			defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		}
	} else if err := os.MkdirAll(dir, 0o700); err != nil {
		return usageError{fmt.Errorf("--dir: %w", err)}
	}
	tree := s.tree
	if s.once && tree == "" {
		if tree, err = goSource(); err != nil {
			return err
		}
	}
	start, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	fmt.Fprintf(errOut, "starting %d nodes, %d shards, data below %s\n", s.nodes, s.shards, dir)
	c, err := devcluster.Start(start, devcluster.Config{
		Binary: self, Dir: dir, Nodes: s.nodes, Shards: s.shards, Hosts: s.hosts,
		Args: append([]string{"--arena", fmt.Sprint(s.arena), "--shm-dir", filepath.Join(dir, "shm"), "--replication", fmt.Sprint(min(s.nodes, 3)), "--gossip-listen", "127.0.0.1:0"}, s.nodeArgs...),
	})
	if err != nil {
		return err
	}
	defer func() {
		stop, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		err = errors.Join(err, c.Stop(stop))
	}()
	if s.once {
		d := &demo{settings: s, cluster: c, tree: tree, out: out, errOut: errOut}
		return d.run(ctx)
	}
	printHints(out, c, self)
	<-ctx.Done()
	fmt.Fprintln(errOut, "stopping")
	return nil
}

// goSource finds the Go installation's source tree.
func goSource() (string, error) {
	guesses := []string{os.Getenv("GOROOT")}
	if out, err := exec.Command("go", "env", "GOROOT").Output(); err == nil {
		guesses = append(guesses, strings.TrimSpace(string(out)))
	}
	for _, root := range append(guesses, "/usr/local/go", "/usr/lib/go") {
		src := filepath.Join(root, "src")
		if st, err := os.Stat(src); root != "" && err == nil && st.IsDir() {
			return src, nil
		}
	}
	return "", usageError{errors.New("no Go installation was found to load: name a directory by --tree")}
}

func printHints(out io.Writer, c *devcluster.Cluster, self string) {
	kvctl := filepath.Join(filepath.Dir(self), "kvctl")
	if _, err := os.Stat(kvctl); err != nil {
		kvctl = "kvctl"
	}
	endpoints := strings.Join(c.Endpoints(), ",")
	fmt.Fprintf(out, `
The cluster is up. Try, in another terminal:

  %[1]s --endpoints %[2]s put greeting hello
  %[1]s --endpoints %[2]s get greeting
  %[1]s --endpoints %[2]s status

Metrics: %[3]s
Interrupt (Ctrl-C) stops it.
`, kvctl, endpoints, c.Node(1).Metrics)
}
