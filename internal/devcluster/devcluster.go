// Package devcluster runs a cluster of real kvd processes on loopback, for `kvd dev`,
// for benchmarks and for tests with faults. It starts, kills, stops and restarts the
// processes that it started, and no others.
package devcluster

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// Config of a cluster.
type Config struct {
	Binary string // path of kvd
	Dir    string // everything lies below it; it is not removed
	Nodes  int    // default 3
	Shards int    // default 8
	// Hosts are the IP addresses of the nodes, in the order of their ids: all of this
	// machine. Default: loopback for all. With several a node has its own GID on an RDMA
	// device that carries them.
	Hosts []string
	// Args are added to every node's command line.
	Args []string
	// NodeArgs are added after Args to one node's command line, by node id.
	NodeArgs map[uint64][]string
	// Env is added to every node's environment.
	Env []string
	// TLS is used to ask the nodes whether they serve; nil: they speak plain text.
	TLS *tls.Config
}

// Cluster of processes. Node numbers count from 1.
type Cluster struct {
	cfg   Config
	nodes []*Node
}

// Node is one process of the cluster, or the place of one that was stopped.
type Node struct {
	ID      uint64
	Address string // gRPC
	TCP     string // host:port of READs over TCP
	Metrics string // http://HOST:PORT/metrics
	DataDir string
	LogFile string

	cfg  *Config
	args []string

	mu struct {
		sync.Mutex
		bin  string // in place of cfg.Binary, where not empty
		cmd  *exec.Cmd
		done chan struct{}
		err  error // of Wait
	}
}

// Start starts the processes and returns when every node serves.
func Start(ctx context.Context, cfg Config) (*Cluster, error) {
	if cfg.Nodes == 0 {
		cfg.Nodes = 3
	}
	if cfg.Shards == 0 {
		cfg.Shards = 8
	}
	if len(cfg.Hosts) > 0 && len(cfg.Hosts) != cfg.Nodes {
		return nil, fmt.Errorf("devcluster: %d hosts for %d nodes: want one each, or none", len(cfg.Hosts), cfg.Nodes)
	}
	c := &Cluster{cfg: cfg}
	addrs, err := freeAddrs(cfg)
	if err != nil {
		return nil, err
	}
	var peers []string
	for i, a := range addrs {
		peers = append(peers, fmt.Sprintf("%d=%s", i+1, a.grpc))
	}
	for i, a := range addrs {
		id := uint64(i + 1)
		n := &Node{
			ID: id, cfg: &c.cfg, Address: a.grpc, TCP: a.tcp, Metrics: fmt.Sprintf("http://%s/metrics", a.metrics),
			DataDir: filepath.Join(cfg.Dir, fmt.Sprintf("node%d", id)),
			LogFile: filepath.Join(cfg.Dir, fmt.Sprintf("node%d.log", id)),
		}
		n.args = []string{
			"start", "--node-id", strconv.FormatUint(id, 10), "--data-dir", n.DataDir,
			"--listen", n.Address, "--metrics-listen", a.metrics,
			"--tcp-listen", n.TCP,
			"--peers", strings.Join(peers, ","), "--shards", strconv.Itoa(cfg.Shards),
			"--bootstrap=" + strconv.FormatBool(id == 1),
		}
		n.args = append(append(n.args, cfg.Args...), cfg.NodeArgs[id]...)
		c.nodes = append(c.nodes, n)
	}
	for _, n := range c.nodes {
		if err := n.Start(); err != nil {
			return nil, errors.Join(err, c.Kill())
		}
	}
	for _, n := range c.nodes {
		if err := n.AwaitServing(ctx); err != nil {
			return nil, errors.Join(err, c.Kill())
		}
	}
	return c, nil
}

// Join starts one more node, which joins by way of the first, and returns when it serves.
// Its id is the next where every node of the cluster was started by this package.
func (c *Cluster) Join(ctx context.Context, extra ...string) (*Node, error) {
	one := c.cfg
	one.Nodes, one.Hosts = 1, nil
	addrs, err := freeAddrs(one)
	if err != nil {
		return nil, err
	}
	id := uint64(len(c.nodes) + 1)
	n := &Node{
		ID: id, cfg: &c.cfg, Address: addrs[0].grpc, TCP: addrs[0].tcp, Metrics: fmt.Sprintf("http://%s/metrics", addrs[0].metrics),
		DataDir: filepath.Join(c.cfg.Dir, fmt.Sprintf("node%d", id)),
		LogFile: filepath.Join(c.cfg.Dir, fmt.Sprintf("node%d.log", id)),
	}
	n.args = append([]string{
		"start", "--data-dir", n.DataDir, "--listen", n.Address, "--metrics-listen", addrs[0].metrics,
		"--tcp-listen", n.TCP, "--join", c.nodes[0].Address,
	}, append(slices.Clone(c.cfg.Args), extra...)...)
	c.nodes = append(c.nodes, n)
	if err := n.Start(); err != nil {
		return nil, err
	}
	return n, n.AwaitServing(ctx)
}

// nodeAddrs are the listening addresses of one node.
type nodeAddrs struct{ grpc, metrics, tcp string }

// freeAddrs asks the kernel for ports that nobody uses now.
func freeAddrs(cfg Config) ([]nodeAddrs, error) {
	var held []io.Closer
	defer func() {
		for _, l := range held {
			_ = l.Close()
		}
	}()
	out := make([]nodeAddrs, cfg.Nodes)
	for i := range out {
		host := "127.0.0.1"
		if len(cfg.Hosts) > 0 {
			host = cfg.Hosts[i]
		}
		for _, addr := range []*string{&out[i].grpc, &out[i].metrics, &out[i].tcp} {
			l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
			if err != nil {
				return nil, fmt.Errorf("devcluster: no free port on %s: %w", host, err)
			}
			held = append(held, l)
			*addr = l.Addr().String()
		}
	}
	return out, nil
}

// Endpoints of all nodes, running or not.
func (c *Cluster) Endpoints() []string {
	var e []string
	for _, n := range c.nodes {
		e = append(e, n.Address)
	}
	return e
}

// Nodes in the order of their ids.
func (c *Cluster) Nodes() []*Node { return c.nodes }

// Node by id, from 1.
func (c *Cluster) Node(id uint64) *Node { return c.nodes[id-1] }

// Stop ends every process by SIGTERM, all at once, and waits for them.
func (c *Cluster) Stop(ctx context.Context) error {
	errs := make([]error, len(c.nodes))
	var wg sync.WaitGroup
	for i, n := range c.nodes {
		wg.Add(1)
		go func() {
			defer wg.Done()
			errs[i] = n.Stop(ctx)
		}()
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Kill ends every process by SIGKILL, as close together as it can, and waits for them.
func (c *Cluster) Kill() error {
	var errs []error
	for _, n := range c.nodes {
		errs = append(errs, n.Signal(syscall.SIGKILL))
	}
	for _, n := range c.nodes {
		n.wait()
	}
	return errors.Join(errs...)
}

// Start starts the process; it must not be running.
func (n *Node) Start(extra ...string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.cmd != nil {
		return fmt.Errorf("devcluster: node %d runs already", n.ID)
	}
	out, err := os.OpenFile(n.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }() // the child has its own
	cmd := exec.Command(cmp.Or(n.mu.bin, n.cfg.Binary), append(append([]string{}, n.args...), extra...)...)
	cmd.Env = append(foreignEnv(), n.cfg.Env...)
	cmd.Stdout, cmd.Stderr = out, out
	// An interrupt at the terminal is for the parent, which stops its nodes in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("devcluster: start node %d: %w", n.ID, err)
	}
	done := make(chan struct{})
	n.mu.cmd, n.mu.done, n.mu.err = cmd, done, nil
	go func() {
		err := cmd.Wait()
		n.mu.Lock()
		n.mu.cmd, n.mu.err = nil, err
		n.mu.Unlock()
		close(done)
	}()
	return nil
}

// Use has the next start of the node run another kvd.
func (n *Node) Use(binary string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.bin = binary
}

// Use has nodes that are made from now on run another kvd, and those that were made go on
// with it at their next start.
func (c *Cluster) Use(binary string) { c.cfg.Binary = binary }

// Args of the node's command line, to run it by hand. The caller owns the slice.
func (n *Node) Args() []string { return append([]string{}, n.args...) }

// Wait returns when the process has ended, or ctx. The error says how it ended, where
// it was not with status 0.
func (n *Node) Wait(ctx context.Context) error {
	n.mu.Lock()
	done := n.mu.done
	n.mu.Unlock()
	if done == nil {
		return nil
	}
	select {
	case <-done:
		return n.wait()
	case <-ctx.Done():
		return fmt.Errorf("devcluster: node %d still runs: %w", n.ID, ctx.Err())
	}
}

// foreignEnv is this process's environment without kvd's own settings, which are meant
// for a node started by hand.
func foreignEnv() []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "KVD_") })
}

// Running tells whether the process lives (it may be stopped by a signal).
func (n *Node) Running() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.cmd != nil
}

// PID of the running process, or 0.
func (n *Node) PID() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.cmd == nil {
		return 0
	}
	return n.mu.cmd.Process.Pid
}

// Signal sends a signal; a process that is gone is no error.
func (n *Node) Signal(s syscall.Signal) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.cmd == nil {
		return nil
	}
	if err := n.mu.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("devcluster: signal node %d: %w", n.ID, err)
	}
	return nil
}

func (n *Node) wait() error {
	n.mu.Lock()
	done := n.mu.done
	n.mu.Unlock()
	if done == nil {
		return nil
	}
	<-done
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.err
}

// Kill ends the process by SIGKILL and waits for it.
func (n *Node) Kill() error {
	err := n.Signal(syscall.SIGKILL)
	_ = n.wait() // it says "killed"
	return err
}

// Stop ends the process by SIGTERM and waits; after ctx it is killed. The error says
// how the process ended, where it was not with status 0.
func (n *Node) Stop(ctx context.Context) error {
	if !n.Running() {
		return nil
	}
	if err := n.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	n.mu.Lock()
	done := n.mu.done
	n.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("devcluster: node %d did not stop: %w", n.ID, ctx.Err()), n.Kill())
	}
	if err := n.wait(); err != nil {
		return fmt.Errorf("devcluster: node %d: %w\n%s", n.ID, err, n.LogTail(10))
	}
	return nil
}

// AwaitServing returns when the node says that it serves, or is gone.
func (n *Node) AwaitServing(ctx context.Context) error {
	creds := insecure.NewCredentials()
	if n.cfg.TLS != nil {
		creds = credentials.NewTLS(n.cfg.TLS)
	}
	conn, err := grpc.NewClient("passthrough:///"+n.Address, grpc.WithTransportCredentials(creds))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		call, cancel := context.WithTimeout(ctx, 2*time.Second)
		r, err := healthpb.NewHealthClient(conn).Check(call, &healthpb.HealthCheckRequest{})
		cancel()
		if err == nil && r.GetStatus() == healthpb.HealthCheckResponse_SERVING {
			return nil
		}
		if !n.Running() {
			return fmt.Errorf("devcluster: node %d ended: %w\n%s", n.ID, n.wait(), n.LogTail(10))
		}
		conn.ResetConnectBackoff()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("devcluster: node %d does not serve (%v): %w\n%s", n.ID, err, ctx.Err(), n.LogTail(10))
		}
	}
}

// LogTail is the end of the node's log.
func (n *Node) LogTail(lines int) string {
	b, err := os.ReadFile(n.LogFile)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
