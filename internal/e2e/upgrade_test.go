//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// upgradeFrom names the commit from which TestUpgrade upgrades.
const upgradeFrom = "testdata/upgrade-from"

// programs of one version.
type programs struct{ kvd, kvctl string }

// earlier builds the programs of the commit that upgradeFrom names, out of a work tree of
// its own. -trimpath makes the build cache serve the next run, whose folder is another.
func earlier(t testing.TB) programs {
	t.Helper()
	b, err := os.ReadFile(upgradeFrom)
	require.NoError(t, err)
	commit := strings.TrimSpace(regexp.MustCompile(`(?m)^#.*$`).ReplaceAllString(string(b), ""))
	require.Regexp(t, `^[0-9a-f]{40}$`, commit, "%s: want one line with the 40 digits of a commit beside the comments", upgradeFrom)
	dir := tempDir(t)
	tree, bin := filepath.Join(dir, "tree"), filepath.Join(dir, "bin")
	run := func(in, name string, args ...string) (string, error) {
		cmd := exec.Command(name, args...)
		cmd.Dir = in
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	out, err := run(moduleRoot, "git", "cat-file", "-e", commit+"^{commit}")
	require.NoError(t, err, "commit %s, from which the upgrade is tested, is not in this repository (%s): get the whole history (git fetch --unshallow), or name another commit of main in internal/e2e/%s", commit, strings.TrimSpace(out), upgradeFrom)
	out, err = run(moduleRoot, "git", "worktree", "add", "--quiet", "--detach", tree, commit)
	require.NoError(t, err, "a work tree of commit %s: %s", commit, out)
	defer func() {
		out, err := run(moduleRoot, "git", "worktree", "remove", "--force", tree)
		require.NoError(t, err, out)
	}()
	args := []string{"build", "-trimpath", "-buildvcs=false", "-ldflags", "-X main.version=earlier -X main.commit=" + commit[:12], "-o", bin + string(filepath.Separator)}
	if os.Getenv("KVD_E2E_RACE") == "1" {
		args = append(args, "-race")
	}
	out, err = run(tree, "go", append(args, "./cmd/kvd", "./cmd/kvctl")...)
	require.NoError(t, err, "build commit %s, which internal/e2e/%s names: %s", commit, upgradeFrom, out)
	return programs{filepath.Join(bin, "kvd"), filepath.Join(bin, "kvctl")}
}

// hasCaughtUp waits until a node has applied what any had committed when this was called.
func (c *cluster) hasCaughtUp(t testing.TB, id uint64) {
	t.Helper()
	a := c.admin(t)
	ask := func(f func(node uint64, s *kvdv1.ShardStatus)) error {
		ctx, cancel := within(10 * time.Second)
		defer cancel()
		nodes, err := a.Status(ctx)
		for _, n := range nodes {
			err = errors.Join(err, n.Err)
			for _, s := range n.Status.GetShards() {
				f(n.NodeID, s)
			}
		}
		return err
	}
	var want map[uint32]uint64
	await(t, "all nodes tell what is committed", func() error {
		want = map[uint32]uint64{}
		return ask(func(_ uint64, s *kvdv1.ShardStatus) { want[s.GetShard()] = max(want[s.GetShard()], s.GetCommit()) })
	})
	await(t, fmt.Sprintf("node %d has caught up", id), func() (behind error) {
		err := ask(func(node uint64, s *kvdv1.ShardStatus) {
			if node == id && s.GetApplied() < want[s.GetShard()] {
				behind = fmt.Errorf("shard %d is at %d of %d", s.GetShard(), s.GetApplied(), want[s.GetShard()])
			}
		})
		return errors.Join(behind, err)
	})
}

// installsSnapshot stops a node until the others have cut off the log that it needs, and
// waits until it is back.
func (c *cluster) installsSnapshot(t testing.TB, id uint64) {
	t.Helper()
	cl, a := c.dial(t, nil), c.admin(t)
	held := func() (applied, first map[uint32]uint64) {
		applied, first = map[uint32]uint64{}, map[uint32]uint64{}
		ctx, cancel := within(10 * time.Second)
		defer cancel()
		nodes, _ := a.Status(ctx) // who is away is no error here
		for _, n := range nodes {
			for _, s := range n.Status.GetShards() {
				applied[s.GetShard()] = max(applied[s.GetShard()], s.GetApplied())
				if had, ok := first[s.GetShard()]; n.NodeID != id && (!ok || s.GetFirstIndex() < had) {
					first[s.GetShard()] = s.GetFirstIndex()
				}
			}
		}
		return applied, first
	}
	ctx, cancel := within(stopTimeout)
	defer cancel()
	require.NoError(t, c.Node(id).Stop(ctx))
	at, _ := held()
	// The same key all the time: a long log of a small state.
	value := []byte(valueOf("bulk", 512<<10))
	await(t, "the others have cut off a log", func() error {
		var wg sync.WaitGroup
		errs := make([]error, 4)
		for w := range errs {
			wg.Go(func() {
				for range 4 {
					_, err := cl.Put(context.Background(), []byte("bulk"), value)
					errs[w] = errors.Join(errs[w], err)
				}
			})
		}
		wg.Wait()
		_, first := held()
		for shard, index := range first {
			if index > at[shard]+1 {
				return errors.Join(errs...)
			}
		}
		return errors.Join(append(errs, fmt.Errorf("their logs begin at %v, the node needs them from %v", first, at))...)
	})
	before := len(c.logOf(t, id))
	c.restart(t, id)
	c.hasCaughtUp(t, id)
	require.Contains(t, c.logOf(t, id)[before:], "installs a snapshot")
}

// leadMeta makes a node the leader of group 0.
func (c *cluster) leadMeta(t testing.TB, id uint64) {
	t.Helper()
	a := c.admin(t)
	await(t, fmt.Sprintf("node %d leads group 0", id), func() error {
		ctx, cancel := within(10 * time.Second)
		defer cancel()
		nodes, err := a.Status(ctx)
		for _, n := range nodes {
			for _, s := range n.Status.GetShards() {
				if n.NodeID == id && s.GetShard() == 0 && s.GetLeaderNode() == id {
					return nil
				}
			}
		}
		return errors.Join(errors.New("another node leads it"), err, a.TransferLeader(ctx, 0, id))
	})
}

// TestUpgrade: three nodes of an earlier commit become nodes of this one, one after the
// other and under load; while both are there, each leads the other. Not one get fails, no
// put is lost or takes longer than its five seconds, each takes a snapshot of the other,
// and kvctl of both versions works with nodes of both. Then back: nodes of the earlier version run on the directories of this one
// until a node joins, and are refused from then on.
func TestUpgrade(t *testing.T) {
	old := earlier(t)
	c := newCluster(t, devcluster.Config{Binary: old.kvd})
	endpoints := strings.Join(c.Endpoints(), ",")
	tools := map[string]string{"earlier": old.kvctl, "this": kvctlBin}
	// Each version's kvctl reads what both wrote before, and writes.
	written := map[string]string{}
	useTools := func(step string) {
		t.Helper()
		for name, tool := range tools {
			for key, value := range written {
				r := succeeded(t, command{bin: tool, args: []string{"--endpoints", endpoints, "get", key}}.run(t))
				require.Equal(t, value, r.stdout, "%s kvctl, %s: get %s", name, step, key)
			}
			key, value := "tool/"+name+"/"+step, "by "+name+" kvctl "+step
			succeeded(t, command{bin: tool, args: []string{"--endpoints", endpoints, "put", key, value}}.run(t))
			written[key] = value
			r := succeeded(t, command{bin: tool, args: []string{"--endpoints", endpoints, "status"}}.run(t))
			require.Equal(t, 3, strings.Count(r.stdout, "serving"), r.stdout)
		}
	}
	inTime := func(cfg *client.Config) { cfg.CallTimeout = 5 * time.Second }
	held := fill(t, c.dial(t, nil), "held", 200, 1500)
	r := startReaders(t, held, c.dial(t, overTransport("shm")), c.dial(t, overTransport("tcp")), c.dial(t, overTransport("grpc")))
	l := startLoad(t, "load", c.dial(t, inTime), c.dial(t, func(cfg *client.Config) { cfg.Transport = "tcp"; inTime(cfg) }))
	l.awaitProgress(t)
	useTools("before")

	change := func(id uint64, to string) {
		t.Helper()
		ctx, cancel := within(stopTimeout)
		defer cancel()
		require.NoError(t, c.Node(id).Stop(ctx))
		l.awaitProgress(t)
		c.Node(id).Use(to)
		c.restart(t, id)
		c.hasCaughtUp(t, id)
		l.awaitProgress(t)
	}
	for _, n := range c.Nodes() {
		change(n.ID, kvdBin)
		if n.ID == 3 {
			break
		}
		c.lead(t, n.ID) // this version leads the earlier one
		l.awaitProgress(t)
		c.lead(t, 3) // and the earlier one this
		l.awaitProgress(t)
		useTools(fmt.Sprintf("with %d of 3", n.ID))
		if n.ID == 2 { // each takes a snapshot of the other
			l.pause()
			c.lead(t, 1)
			c.installsSnapshot(t, 3)
			c.lead(t, 3)
			c.installsSnapshot(t, 2)
			l.resume()
		}
		// What the earlier version would stop at is not begun.
		dir := filepath.Join(c.dir, "joiner")
		join := withFlags(c.Node(1).Args(), "--data-dir", dir, "--listen", freeAddr(t), "--tcp-listen", "127.0.0.1:0", "--metrics-listen", "", "--join", c.Node(1).Address)
		join = withoutFlag(withoutFlag(withoutFlag(join, "--peers"), "--bootstrap"), "--node-id")
		c.leadMeta(t, n.ID)
		command{bin: kvdBin, args: join}.run(t).refused(t, 3, fmt.Sprintf("node %d at %s", n.ID+1, c.Node(n.ID+1).Address), "can not be in a cluster that grows (it understands protocol 0, and 1 is needed)")
		require.NoFileExists(t, filepath.Join(dir, "cluster.json"))
		require.Contains(t, succeeded(t, c.kvctl(t, "members")).stdout, "protocol of all: 0\n")
	}
	useTools("after")

	// Nothing is there yet that the earlier version does not know.
	change(2, old.kvd)
	c.lead(t, 2)
	l.awaitProgress(t)
	change(2, kvdBin)

	require.Contains(t, succeeded(t, c.kvctl(t, "members")).stdout, "protocol of all: 2\n")
	ctx, cancel := within(patience)
	defer cancel()
	c.Cluster.Use(kvdBin)
	_, err := c.Join(ctx)
	require.NoError(t, err)
	awaitActive(t, c, 4)
	l.awaitProgress(t)
	stop, cancel := within(stopTimeout)
	defer cancel()
	require.NoError(t, c.Node(2).Stop(stop))
	before := read(t, filepath.Join(c.Node(2).DataDir, "cluster.json"))
	command{bin: old.kvd, args: c.Node(2).Args()}.run(t).refused(t, 4, "cluster.json has format 2, this kvd knows 1: start the newer kvd that wrote it")
	require.Equal(t, before, read(t, filepath.Join(c.Node(2).DataDir, "cluster.json")))
	c.restart(t, 2)
	c.hasCaughtUp(t, 2)

	r.requireUnharmed(t)
	l.pause()
	require.Empty(t, l.errors(), "puts failed, or their outcome is unknown")
	l.verify(t, c.dial(t, nil))
	check(t, c.dial(t, nil), held)
	t.Logf("%d gets and %d puts, none failed", r.gets.Load(), l.acked.Load())
}

func read(t testing.TB, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(b)
}

// TestNewerDirectory: a directory that a newer kvd wrote is refused by one sentence that
// names both formats, and is as it was.
func TestNewerDirectory(t *testing.T) {
	c := newCluster(t, devcluster.Config{Nodes: 1})
	held := fill(t, c.dial(t, nil), "held", 20, 500)
	n := c.Node(1)
	ctx, cancel := within(stopTimeout)
	defer cancel()
	require.NoError(t, n.Stop(ctx))
	for _, x := range []struct {
		name  string
		newer func(t *testing.T, dir string)
		says  []string
	}{
		{"cluster.json", func(t *testing.T, dir string) {
			file := filepath.Join(dir, "cluster.json")
			require.NoError(t, os.WriteFile(file, []byte(`{"format": 3, "node": {"id": 1}}`), 0o600))
		}, []string{"cluster.json has format 3, this kvd knows 2: start the newer kvd that wrote it"}},
		{"replicas.json", func(t *testing.T, dir string) {
			file := filepath.Join(dir, "replicas.json")
			require.NoError(t, os.WriteFile(file, []byte(`{"format": 2, "replicas": [1, 2]}`), 0o600))
		}, []string{"replicas.json has format 2, this kvd knows 1: start the newer kvd that wrote it"}},
		{"stores", func(t *testing.T, dir string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, "FORMAT"), []byte("kvd-engine 2\n"), 0o600))
		}, []string{"was written with format 2, this version knows up to 1: run the newer kvd"}},
		{"log of Pebble", newerPebble("log"), []string{"was written with Pebble's format", "run the newer kvd"}},
		{"state of Pebble", newerPebble("state"), []string{"was written with Pebble's format", "run the newer kvd"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			dir := copyOf(t, n.DataDir)
			x.newer(t, dir)
			before := filesIn(t, dir)
			command{bin: kvdBin, args: withFlags(n.Args(), "--data-dir", dir)}.run(t).refused(t, 4, append(x.says, dir)...)
			after := filesIn(t, dir)
			for name := range before {
				require.True(t, before[name] == after[name], "%s was changed", name)
			}
			require.Len(t, after, len(before))
		})
	}
	c.restart(t, 1)
	check(t, c.dial(t, nil), held)
}

// newerPebble marks a store as one that a later Pebble wrote.
func newerPebble(store string) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		files, err := filepath.Glob(filepath.Join(dir, store, "marker.format-version.*"))
		require.NoError(t, err)
		require.Len(t, files, 1)
		newer := strings.TrimSuffix(files[0], filepath.Ext(files[0])) + ".999"
		require.NoError(t, os.Rename(files[0], newer))
	}
}

// filesIn a data directory, by name; what each start writes is left out.
func filesIn(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && d.Name() != "LOCK" && d.Name() != "RUNNING" {
			all[path] = read(t, path)
		}
		return err
	}))
	require.NotEmpty(t, all)
	return all
}
