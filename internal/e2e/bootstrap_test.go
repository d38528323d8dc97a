//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// TestWipedNode: a node whose directory was lost would have forgotten its votes. It is
// refused, with and without --bootstrap, and leaves nothing behind that could vote.
func TestWipedNode(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	cl := c.dial(t, nil)
	held := fill(t, cl, "wiped", 50, 300)
	n := c.Node(3)
	require.NoError(t, n.Kill())
	require.NoError(t, os.RemoveAll(n.DataDir))
	for _, bootstrap := range []string{"--bootstrap=false", "--bootstrap=true"} {
		r := command{bin: kvdBin, args: append(withoutFlag(n.Args(), "--bootstrap"), bootstrap)}.run(t)
		r.refused(t, 3, "already belongs to cluster", "an empty directory does not have", "under an id that was never used")
		for _, gone := range []string{"cluster.json", "log", "state"} {
			require.NoFileExists(t, filepath.Join(n.DataDir, gone))
			require.NoDirExists(t, filepath.Join(n.DataDir, gone))
		}
	}
	// The other two go on, and with one of them stopped nobody makes a quorum with the
	// wiped one.
	check(t, cl, held)
	fill(t, cl, "after", 20, 300)
	require.NoError(t, c.Node(2).Kill())
	require.NoError(t, n.Start())
	ctx, cancel := within(patience)
	defer cancel()
	require.ErrorContains(t, n.Wait(ctx), "exit status 3")
	require.Contains(t, n.LogTail(1), "already belongs to cluster")
	short, cancel := within(pollEvery * 100)
	defer cancel()
	_, err := cl.Put(short, []byte("wiped/none"), []byte("x"))
	require.Error(t, err, "one of three nodes acknowledged a write")
	// It comes back under its own history.
	c.restart(t, 2)
	check(t, cl, held)
}

// TestForeignDirectory: directories of another cluster, of another node, and stores whose
// identity was lost.
func TestForeignDirectory(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	n := c.Node(3)
	alone := newCluster(t, devcluster.Config{Nodes: 1})
	require.NoError(t, alone.Kill())
	require.NoError(t, n.Kill())

	t.Run("another cluster", func(t *testing.T) {
		dir := copyOf(t, alone.Node(1).DataDir)
		// Node 1 of a cluster of one, so that the ids agree and only the cluster differs.
		args := withFlags(c.Node(1).Args(), "--data-dir", dir, "--listen", freeAddr(t), "--tcp-listen", "127.0.0.1:0", "--metrics-listen", "")
		command{bin: kvdBin, args: args}.run(t).refused(t, 3, "belongs to cluster", "correct the peers or the directory")
	})
	t.Run("another node", func(t *testing.T) {
		require.NoError(t, c.Node(2).Kill())
		dir := copyOf(t, c.Node(2).DataDir)
		c.restart(t, 2)
		args := withFlags(n.Args(), "--data-dir", dir)
		command{bin: kvdBin, args: args}.run(t).refused(t, 3, "belongs to node 2", "was started as node 3", "start it as node 2, or use another directory")
	})
	t.Run("no identity", func(t *testing.T) {
		dir := copyOf(t, n.DataDir)
		require.NoError(t, os.Remove(filepath.Join(dir, "cluster.json")))
		command{bin: kvdBin, args: withFlags(n.Args(), "--data-dir", dir)}.run(t).refused(t, 4, "but no cluster.json", "restore the file")
	})
	t.Run("state lost", func(t *testing.T) {
		dir := copyOf(t, n.DataDir)
		require.NoError(t, os.RemoveAll(filepath.Join(dir, "state")))
		command{bin: kvdBin, args: withFlags(n.Args(), "--data-dir", dir)}.run(t).refused(t, 4, "state")
	})
	t.Run("log lost", func(t *testing.T) {
		dir := copyOf(t, n.DataDir)
		require.NoError(t, os.RemoveAll(filepath.Join(dir, "log")))
		command{bin: kvdBin, args: withFlags(n.Args(), "--data-dir", dir)}.run(t).refused(t, 4, "log")
	})
	t.Run("address of another node", func(t *testing.T) {
		peers := flagOf(t, n.Args(), "--peers")
		// Nodes 1 and 2 exchanged.
		a, b := c.Node(1).Address, c.Node(2).Address
		peers = strings.NewReplacer(a, b, b, a).Replace(peers)
		command{bin: kvdBin, args: withFlags(n.Args(), "--peers", peers)}.run(t).refused(t, 3, "was expected to be node", "correct the peers")
	})
	// After all of that its own directory is as good as before.
	c.restart(t, 3)
	fill(t, c.dial(t, nil), "foreign", 20, 100)
}

// TestCopiedDirectory: a copy of a node's directory, started beside the node at an address
// of its own, is refused, and the cluster does not notice.
func TestCopiedDirectory(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	held := fill(t, c.dial(t, nil), "copied", 20, 100)
	n := c.Node(1)
	require.NoError(t, n.Kill())
	dir := copyOf(t, n.DataDir)
	c.restart(t, 1) // at once, where its peers may still hear the process that was killed
	own := freeAddr(t)
	peers := strings.Replace(flagOf(t, n.Args(), "--peers"), n.Address, own, 1)
	args := withFlags(n.Args(), "--data-dir", dir, "--listen", own, "--peers", peers, "--tcp-listen", "127.0.0.1:0", "--metrics-listen", "")
	r := command{bin: kvdBin, args: args, limit: 2 * patience}.run(t)
	r.refused(t, 3, "node 1 runs already", "is a copy, or the other process must be stopped first")
	require.Contains(t, r.text(), "configured at another address than at bootstrap")
	check(t, c.dial(t, nil), held)
	fill(t, c.dial(t, nil), "beside", 20, 100)
	require.NotContains(t, c.logOf(t, 1), "runs already")
}

// TestPeersThatCanNotBe are found before anything is touched.
func TestPeersThatCanNotBe(t *testing.T) {
	for _, tc := range []struct{ name, peers, words string }{
		{"same id twice", "1=127.0.0.1:1,1=127.0.0.1:2", "node id 1 is given to both"},
		{"same address twice", "1=127.0.0.1:1,2=127.0.0.1:1", "have the same address"},
		{"without itself", "2=127.0.0.1:1,3=127.0.0.1:2", "not among the peers"},
		{"no id", "127.0.0.1:1", "want ID=HOST:PORT"},
		{"id 0", "0=127.0.0.1:1,1=127.0.0.1:2", "id from 1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := filepath.Join(tempDir(t), "data")
			r := command{bin: kvdBin, args: []string{"start", "--node-id", "1", "--data-dir", dir, "--listen", "127.0.0.1:0", "--peers", tc.peers, "--bootstrap"}}.run(t)
			r.refused(t, 2, tc.words)
			require.NoDirExists(t, dir)
		})
	}
}

// TestNobodyBootstraps: nodes that nobody told to make a cluster give up with advice, and
// so does the one that was told and finds no peers.
func TestNobodyBootstraps(t *testing.T) {
	for _, tc := range []struct{ bootstrap, words string }{
		{"--bootstrap=false", "start one node with --bootstrap"},
		{"--bootstrap=true", "did not answer within"},
	} {
		t.Run(tc.bootstrap, func(t *testing.T) {
			own, other := freeAddr(t), freeAddr(t)
			dir := tempDir(t)
			r := command{bin: kvdBin, args: []string{
				"start", "--node-id", "1", "--data-dir", filepath.Join(dir, "data"), "--listen", own, "--peers", "1=" + own + ",2=" + other,
				"--shm-dir", filepath.Join(dir, "shm"), "--bootstrap-timeout", "1s", tc.bootstrap,
			}}.run(t)
			r.refused(t, 3, tc.words)
		})
	}
	t.Run("alone", func(t *testing.T) {
		dir := tempDir(t)
		r := command{bin: kvdBin, args: []string{"start", "--node-id", "1", "--data-dir", dir, "--listen", "127.0.0.1:0"}}.run(t)
		r.refused(t, 3, "start it with --bootstrap")
	})
}

// TestClusterIDOfClient: a client that names a cluster reads no other.
func TestClusterIDOfClient(t *testing.T) {
	c := sharedNodes(t)
	ctx, cancel := within(patience)
	defer cancel()
	_, err := client.Dial(ctx, client.Config{Endpoints: c.Endpoints(), ClusterID: strings.Repeat("0", 32)})
	require.ErrorIs(t, err, client.ErrWrongCluster)
}

func copyOf(t testing.TB, dir string) string {
	t.Helper()
	to := filepath.Join(tempDir(t), "copy")
	require.NoError(t, os.CopyFS(to, os.DirFS(dir)))
	return to
}

func flagOf(t testing.TB, args []string, name string) string {
	t.Helper()
	for i := range args {
		if args[i] == name {
			return args[i+1]
		}
	}
	t.Fatalf("no flag %s in %q", name, args)
	return ""
}
