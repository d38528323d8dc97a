//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/internal/devcluster"
)

// TestConfigFileMistakes are named by file and line.
func TestConfigFileMistakes(t *testing.T) {
	for _, tc := range []struct {
		name, yaml string
		line       int
		words      string
	}{
		{"unknown key", "node-id: 1\nlissen: 127.0.0.1:1\n", 2, `unknown setting "lissen"`},
		{"almost right", "node_id: 1\n", 1, `did you mean "node-id"?`},
		{"duplicate", "node-id: 1\n\nshards: 2\nnode-id: 2\n", 4, "was set in line 1 already"},
		{"wrong type", "node-id: one\n", 1, "node-id"},
		{"wrong size", "# sizes\narena: huge\n", 2, "want a size"},
		{"wrong duration", "tick: 5\n", 1, "tick"},
		{"wrong bool", "bootstrap: perhaps\n", 1, "bootstrap"},
		{"nested", "net:\n  cert: x\n", 1, "net"},
		{"in the section of RDMA", "node-id: 1\nrdma:\n  devices: [rxe0]\n  retry: often\n", 4, `rdma-retry: "often": want a number`},
		{"in a section", "node-id: 1\ntcp:\n  lissen: x\n", 3, `unknown setting "tcp-lissen"`},
		{"nested value", "node-id: 1\nlisten:\n  host: x\n", 3, "want a plain value"},
		{"a list", "- node-id: 1\n", 1, "name: value"},
		{"no YAML", "node-id: [1\n", 0, ""},
		{"two documents", "node-id: 1\n---\nnode-id: 2\n", 0, "more than one document"},
		{"config in config", "config: other.yaml\n", 1, "unknown setting"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			file := filepath.Join(tempDir(t), "kvd.yaml")
			require.NoError(t, os.WriteFile(file, []byte(tc.yaml), 0o600))
			words := []string{file, tc.words}
			if tc.line > 0 {
				words = append(words, fmt.Sprintf("%s:%d:", file, tc.line))
			}
			command{bin: kvdBin, args: []string{"start", "--config", file}}.run(t).refused(t, 2, words...)
		})
	}
	command{bin: kvdBin, args: []string{"start", "--config", "/nonexistent/kvd.yaml"}}.run(t).refused(t, 2, "no such file")
	command{bin: kvdBin, args: []string{"start"}, env: []string{"KVD_TICK=often"}}.run(t).refused(t, 2, "KVD_TICK")
}

// TestStartMistakes: the command line.
func TestStartMistakes(t *testing.T) {
	dir := filepath.Join(tempDir(t), "data")
	for _, tc := range []struct {
		args  []string
		words string
	}{
		{[]string{"start"}, "no data directory"},
		{[]string{"start", "--data-dir", dir, "--peers", "1=127.0.0.1:1"}, "node id 0"},
		{[]string{"start", "--data-dir", dir, "--join", "127.0.0.1:x"}, "want HOST or HOST:PORT"},
		{[]string{"start", "--data-dir", dir, "--join", "127.0.0.1", "--bootstrap"}, "not both"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--peers", "1=127.0.0.1:1", "--replication", "3"}, "at most as many replicas of a shard as nodes"},
		{[]string{"start", "--node-id", "1"}, "no data directory"},
		{[]string{"start", "extra"}, "extra"},
		{[]string{"start", "--nonsense"}, "nonsense"},
		{[]string{"nonsense"}, "nonsense"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--shards", "0x"}, "shards"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--shards", "5000"}, "4095"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--replication", "2"}, "want 1, 3, 5 or 7"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--transports", "rdma"}, "want shm, verbs or tcp"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--rdma-timeout", "32"}, "--rdma-timeout is 32: want 1 to 31"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--rdma-timeout", "0"}, "rdma-timeout is 0: want more than 0"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--rdma-max-mtu", "1500"}, "--rdma-max-mtu is 1500"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--rdma-gid-address", "host"}, "no IP address"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--bootstrap", "--require-rdma", "--transports", "shm,tcp"}, "RDMA is required"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--log-level", "loud"}, "debug, info, warn or error"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--log-format", "xml"}, "text or json"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--shm-uids", "root"}, "user id"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--max-value-bytes", "1TiB"}, "value limit"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--max-chunk", "1MiB"}, "MaxChunkBytes"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--max-chunk", "1GiB"}, "MaxChunkBytes"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--arena", "1"}, "LimitBytes"},
		{[]string{"start", "--node-id", "1", "--data-dir", dir, "--tick", "1us"}, "tick"},
	} {
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) {
			command{bin: kvdBin, args: tc.args}.run(t).refused(t, 2, tc.words)
			require.NoDirExists(t, dir)
		})
	}
	t.Run("address in use", func(t *testing.T) {
		c := sharedNodes(t)
		r := command{bin: kvdBin, args: []string{"start", "--node-id", "1", "--data-dir", dir, "--listen", c.Node(1).Address, "--bootstrap"}}.run(t)
		r.refused(t, 2, "address already in use", "is another node running there?")
	})
	t.Run("no address", func(t *testing.T) {
		r := command{bin: kvdBin, args: []string{"start", "--node-id", "1", "--data-dir", dir, "--listen", "foo", "--bootstrap"}}.run(t)
		r.refused(t, 2, `listen address "foo": want HOST:PORT`)
		require.NotContains(t, r.text(), "another node")
	})
	// Whatever can not be listened on is found before the node is part of anything.
	for _, tc := range []struct {
		name, flag string
		value      func(c *cluster) string
	}{
		{"READs over TCP", "--tcp-listen", func(c *cluster) string { return c.Node(1).TCP }},
		{"metrics", "--metrics-listen", func(c *cluster) string { return c.Node(1).Address }},
		{"metrics at no address", "--metrics-listen", func(*cluster) string { return "foo" }},
		{"shared memory", "--shm-dir", func(c *cluster) string { return filepath.Join(c.Node(1).LogFile, "shm") }},
		{"shared memory, too long", "--shm-dir", func(*cluster) string { return "/" + strings.Repeat("x", 120) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			data := filepath.Join(tempDir(t), "data")
			r := command{bin: kvdBin, args: []string{
				"start", "--node-id", "1", "--data-dir", data, "--listen", "127.0.0.1:0", "--bootstrap", "--shm-dir", filepath.Join(data, "shm"),
				tc.flag, tc.value(sharedNodes(t)),
			}}.run(t)
			r.refused(t, 2)
			require.NoFileExists(t, filepath.Join(data, "cluster.json"))
		})
	}
}

// TestPrecedence: a flag wins over the environment, that over the file, the file over the
// default, as the effective configuration says that is logged once.
func TestPrecedence(t *testing.T) {
	dir := tempDir(t)
	file := filepath.Join(dir, "kvd.yaml")
	require.NoError(t, os.WriteFile(file, []byte("# all four\nquarantine: 11s\nwriter-ttl: 11m\ncache: 11MiB\nshm-uids: [11, 12]\n"), 0o600))
	c := newClusterIn(t, dir, devcluster.Config{
		Nodes: 1,
		Env:   []string{"KVD_CONFIG=" + file, "KVD_QUARANTINE=12s", "KVD_WRITER_TTL=12m", "KVD_STOP_TIMEOUT=12s", "KVD_SERVICE_PORT=tcp://10.0.0.1:1"},
		Args:  []string{"--quarantine", "13s"},
	})
	log := c.logOf(t, 1)
	require.Equal(t, 1, strings.Count(log, "effective configuration"))
	for _, want := range []string{
		"quarantine=13s",    // flag
		"writer-ttl=12m0s",  // environment over file
		"stop-timeout=12s",  // environment over default
		"cache=11MiB",       // file
		"shm-uids=[11,12]",  // a list
		"election-ticks=10", // default
		"config=" + file,
	} {
		require.Contains(t, log, want)
	}
	require.Contains(t, log, "KVD_SERVICE_PORT", "what means nothing is named")
	require.Contains(t, log, "environment variable means nothing here")
}

// TestVersion needs nothing.
func TestVersion(t *testing.T) {
	r := command{bin: kvdBin, args: []string{"version"}}.run(t)
	require.Zero(t, r.code)
	for _, want := range []string{"kvd e2e\n", "commit 0123456789ab\n", "go1.", "memory layout ", "verbs "} {
		require.Contains(t, r.stdout, want)
	}
}

// TestStopWhileStarting: SIGTERM in any phase ends a node soon; also one that waits for
// its peers.
func TestStopWhileStarting(t *testing.T) {
	dir := tempDir(t)
	own := freeAddr(t)
	start := make(chan result, 1)
	log := filepath.Join(dir, "waiting.log")
	go func() {
		// exec, so that the signal reaches kvd itself.
		start <- command{bin: "/bin/sh", args: []string{"-c", `echo $$ > "$0.pid"; exec "$@" 2> "$0"`, log, kvdBin, "start", "--node-id", "1", "--data-dir", filepath.Join(dir, "data"), "--listen", own,
			"--peers", "1=" + own + ",2=" + freeAddr(t), "--shm-dir", filepath.Join(dir, "shm"), "--bootstrap"}}.run(t)
	}()
	await(t, "the node waits for its peer", func() error {
		b, err := os.ReadFile(log)
		if err == nil && !strings.Contains(string(b), "waiting for a peer") {
			err = fmt.Errorf("log: %s", b)
		}
		return err
	})
	var pid int
	b, err := os.ReadFile(log + ".pid")
	require.NoError(t, err)
	_, err = fmt.Sscan(string(b), &pid)
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(pid, syscall.SIGTERM))
	r := <-start
	require.Zero(t, r.code, "to be told to stop is no failure")
	b, err = os.ReadFile(log)
	require.NoError(t, err)
	require.Empty(t, findTrace(string(b)))
	require.Contains(t, string(b), "stopped while starting")
}
