//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
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

// TestUpgrade: three nodes of an earlier commit become nodes of this one, one after the
// other and under load; while both are there, each leads the other. Not one get fails, no
// put is lost or takes longer than its five seconds, and kvctl of both versions works with
// nodes of both. Then back: nodes of the earlier version run on the directories of this one
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
	}
	useTools("after")
	r.requireUnharmed(t)
	l.pause()
	require.Empty(t, l.errors(), "puts failed, or their outcome is unknown")
	l.verify(t, c.dial(t, nil))
	check(t, c.dial(t, nil), held)
	t.Logf("%d gets and %d puts, none failed", r.gets.Load(), l.acked.Load())
}
