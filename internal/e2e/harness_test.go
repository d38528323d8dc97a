//go:build e2e || rdmaguest

package e2e

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// Bounds for a loaded machine; what is measured has bounds of its own.
var (
	startTimeout = patient(60 * time.Second)
	stopTimeout  = patient(40 * time.Second)
	patience     = patient(30 * time.Second) // for a condition
)

const (
	pollEvery = 10 * time.Millisecond

	tick = "50ms" // elections take half a second to one second
)

// inGuest tells that these tests run in a guest of rdmaguest.
func inGuest() bool { return os.Getenv("KVD_GUEST") != "" }

// patient is longer where the processors are emulated, and by KVD_E2E_PATIENCE, a factor
// for hosts that have much else to do.
func patient(d time.Duration) time.Duration {
	if inGuest() {
		d *= 4
	}
	if factor, err := strconv.Atoi(os.Getenv("KVD_E2E_PATIENCE")); err == nil && factor > 0 {
		d *= time.Duration(factor)
	}
	return d
}

// logLimit bounds what one node may log in one test.
const logLimit = 4 << 20

// cluster of real processes, inspected at the end of its test.
type cluster struct {
	*devcluster.Cluster
	dir string
}

func within(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

// tempDir has a short path: unix sockets lie below it.
func tempDir(t testing.TB) string {
	dir, err := os.MkdirTemp("", "kvd-e2e-")
	require.NoError(t, err)
	require.NoError(t, os.Chmod(dir, 0o755))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func newCluster(t testing.TB, cfg devcluster.Config) *cluster {
	t.Helper()
	return newClusterIn(t, tempDir(t), cfg)
}

func newClusterIn(t testing.TB, dir string, cfg devcluster.Config) *cluster {
	t.Helper()
	c, err := startCluster(dir, cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := c.Kill(); err != nil {
			t.Error(err)
		}
		if err := c.inspectLogs(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			c.printLogs(t)
		}
	})
	return c
}

func startCluster(dir string, cfg devcluster.Config) (*cluster, error) {
	cfg.Binary, cfg.Dir = cmp.Or(cfg.Binary, kvdBin), dir
	if cfg.Shards == 0 {
		cfg.Shards = 4
	}
	common := []string{"--tick", tick, "--arena", "64MiB", "--max-chunk", "4MiB", "--min-free-disk", "16MiB", "--shm-dir", filepath.Join(dir, "shm")}
	cfg.Args = append(common, cfg.Args...)
	ctx, cancel := within(startTimeout)
	defer cancel()
	c, err := devcluster.Start(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return &cluster{Cluster: c, dir: dir}, nil
}

// sharedNodes is a cluster that the caller must leave as it is: it may add keys below
// a prefix of its own.
func sharedNodes(t testing.TB) *cluster {
	t.Helper()
	shared.once.Do(func() {
		if shared.dir, shared.err = os.MkdirTemp("", "kvd-e2e-"); shared.err == nil {
			shared.c, shared.err = startCluster(shared.dir, devcluster.Config{})
		}
	})
	require.NoError(t, shared.err)
	t.Cleanup(func() {
		if t.Failed() {
			shared.c.printLogs(t)
		}
	})
	return shared.c
}

// traces are what no log and no output may ever hold.
var traces = []string{"panic:", "goroutine ", "fatal error:", "DATA RACE"}

func findTrace(text string) string {
	for _, trace := range traces {
		if i := strings.Index(text, trace); i >= 0 {
			return text[i:min(len(text), i+4000)]
		}
	}
	return ""
}

func (c *cluster) inspectLogs() error {
	var errs []error
	for _, n := range c.Nodes() {
		b, err := os.ReadFile(n.LogFile)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if trace := findTrace(string(b)); trace != "" {
			errs = append(errs, fmt.Errorf("node %d logged a stack trace: %s", n.ID, trace))
		}
		if len(b) > logLimit {
			errs = append(errs, fmt.Errorf("node %d logged %d bytes: want at most %d", n.ID, len(b), logLimit))
		}
	}
	return errors.Join(errs...)
}

func (c *cluster) printLogs(t testing.TB) {
	for _, n := range c.Nodes() {
		t.Logf("end of node %d's log:\n%s", n.ID, n.LogTail(40))
	}
}

func (c *cluster) logOf(t testing.TB, id uint64) string {
	b, err := os.ReadFile(c.Node(id).LogFile)
	require.NoError(t, err)
	return string(b)
}

func (c *cluster) restart(t testing.TB, id uint64, extra ...string) {
	t.Helper()
	require.NoError(t, c.Node(id).Start(extra...))
	c.awaitServing(t, id)
}

func (c *cluster) awaitServing(t testing.TB, id uint64) {
	t.Helper()
	ctx, cancel := within(startTimeout)
	defer cancel()
	require.NoError(t, c.Node(id).AwaitServing(ctx))
}

// dial opens a client that lives as long as the test. change may be nil.
func (c *cluster) dial(t testing.TB, change func(*client.Config)) *client.Client {
	t.Helper()
	cfg := client.Config{Endpoints: c.Endpoints(), CallTimeout: 20 * time.Second, DialTimeout: patience}
	if change != nil {
		change(&cfg)
	}
	cl, err := client.Dial(context.Background(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = cl.Close() })
	return cl
}

func overTransport(name string) func(*client.Config) {
	return func(c *client.Config) { c.Transport = name }
}

func (c *cluster) admin(t testing.TB) *client.Admin {
	t.Helper()
	a, err := client.DialAdmin(client.Config{Endpoints: c.Endpoints()})
	require.NoError(t, err)
	t.Cleanup(func() { _ = a.Close() })
	return a
}

// lead makes a node the leader of every data shard.
func (c *cluster) lead(t testing.TB, node uint64) {
	t.Helper()
	a := c.admin(t)
	await(t, "one node leads every shard", func() error {
		ctx, cancel := within(10 * time.Second)
		defer cancel()
		leaders, err := leaders(ctx, a)
		if err != nil {
			return err
		}
		for shard, leader := range leaders {
			if leader != node {
				err = errors.Join(err, fmt.Errorf("shard %d is led by node %d: want node %d", shard, leader, node), a.TransferLeader(ctx, shard, node))
			}
		}
		return err
	})
}

// leaders of the data shards: for each, the node that says it serves the highest term.
// It fails where a shard has none.
func leaders(ctx context.Context, a *client.Admin) (map[uint32]uint64, error) {
	nodes, err := a.Status(ctx)
	if err != nil {
		return nil, err
	}
	leader, term := map[uint32]uint64{}, map[uint32]uint64{}
	for _, n := range nodes {
		for _, s := range n.Status.GetShards() {
			if s.GetShard() == 0 {
				continue
			}
			if _, ok := leader[s.GetShard()]; !ok {
				leader[s.GetShard()] = 0
			}
			if s.GetServedTerm() > term[s.GetShard()] {
				leader[s.GetShard()], term[s.GetShard()] = n.NodeID, s.GetServedTerm()
			}
		}
	}
	for shard, l := range leader {
		if l == 0 {
			return nil, fmt.Errorf("shard %d has no leader", shard)
		}
	}
	if len(leader) == 0 {
		return nil, errors.New("no node named a shard")
	}
	return leader, nil
}

// caughtUp waits until every node has applied what every other has.
func (c *cluster) caughtUp(t testing.TB) {
	t.Helper()
	a := c.admin(t)
	await(t, "all nodes have applied the same", func() error {
		ctx, cancel := within(10 * time.Second)
		defer cancel()
		nodes, err := a.Status(ctx)
		if err != nil {
			return err
		}
		applied := map[uint32]uint64{}
		for _, n := range nodes {
			if n.Err != nil {
				return n.Err
			}
			for _, s := range n.Status.GetShards() {
				if have, ok := applied[s.GetShard()]; ok && have != s.GetApplied() {
					return fmt.Errorf("shard %d: indexes %d and %d", s.GetShard(), have, s.GetApplied())
				}
				applied[s.GetShard()] = s.GetApplied()
			}
		}
		return nil
	})
}

// await repeats f until it returns nil.
func await(t testing.TB, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s: %v", patience, what, err)
		}
		<-tick.C
	}
}

// result of a program that ran to its end.
type result struct {
	code           int
	stdout, stderr string
	took           time.Duration
}

// text is all that the program wrote.
func (r result) text() string { return r.stdout + r.stderr }

// command to run to its end. The zero value of a field means nothing special.
type command struct {
	bin   string
	args  []string
	stdin []byte
	env   []string
	user  *syscall.Credential
	limit time.Duration // default patience
}

// run fails the test where the program does not end in time, or shows a stack trace.
func (c command) run(t testing.TB) result {
	t.Helper()
	if c.limit == 0 {
		c.limit = patience
	}
	ctx, cancel := within(c.limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.bin, c.args...)
	cmd.Env = append(os.Environ(), c.env...)
	cmd.Stdin = bytes.NewReader(c.stdin)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.user}
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	began := time.Now()
	err := cmd.Run()
	r := result{stdout: out.String(), stderr: errOut.String(), took: time.Since(began)}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		t.Fatalf("%s %q did not end within %v:\n%s", filepath.Base(c.bin), c.args, c.limit, r.text())
	case errors.As(err, &exit):
		r.code = exit.ExitCode()
	case err != nil:
		t.Fatalf("%s %q: %v", c.bin, c.args, err)
	}
	if trace := findTrace(r.stderr); trace != "" {
		t.Errorf("%s %q showed a stack trace: %s", filepath.Base(c.bin), c.args, trace)
	}
	return r
}

// refused asserts that a node did not start: the exit code, and one line of kvd's own
// that holds the words.
func (r result) refused(t testing.TB, code int, words ...string) {
	t.Helper()
	require.Equal(t, code, r.code, "exit code; output:\n%s", r.text())
	var own []string
	for line := range strings.Lines(r.stderr) {
		if strings.HasPrefix(line, "kvd: ") {
			own = append(own, line)
		}
	}
	require.Len(t, own, 1, "want one sentence; output:\n%s", r.text())
	require.True(t, strings.HasSuffix(r.stderr, own[0]), "the sentence must come last:\n%s", r.text())
	for _, w := range words {
		require.Contains(t, own[0], w)
	}
}

func (c *cluster) kvctl(t testing.TB, args ...string) result {
	t.Helper()
	return c.kvctlIn(t, nil, args...)
}

func (c *cluster) kvctlIn(t testing.TB, stdin []byte, args ...string) result {
	t.Helper()
	return kvctl(t, stdin, append([]string{"--endpoints", strings.Join(c.Endpoints(), ",")}, args...)...)
}

func kvctl(t testing.TB, stdin []byte, args ...string) result {
	t.Helper()
	if inGuest() {
		args = append([]string{"--timeout", "60s"}, args...)
	}
	return command{bin: kvctlBin, args: args, stdin: stdin}.run(t)
}

// failed asserts that kvctl failed as its users may rely on: the exit code, nothing on
// standard output, exactly one line on standard error.
func (r result) failed(t testing.TB, code int, words ...string) {
	t.Helper()
	require.Equal(t, code, r.code, "exit code; output:\n%s", r.text())
	require.Empty(t, r.stdout)
	require.True(t, strings.HasPrefix(r.stderr, "kvctl: "), r.stderr)
	require.Equal(t, 1, strings.Count(r.stderr, "\n"), "want one line:\n%s", r.stderr)
	for _, w := range words {
		require.Contains(t, r.stderr, w)
	}
}
