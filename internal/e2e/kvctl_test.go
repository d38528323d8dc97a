//go:build e2e

package e2e

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// TestKvctlBinary: values of any size and content go through standard input and output,
// and through files, unchanged.
func TestKvctlBinary(t *testing.T) {
	c := sharedNodes(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	sizes := []int{0, 1, 4095, 64 << 10, 1 << 20}
	for range 5 {
		sizes = append(sizes, rng.IntN(1<<20))
	}
	file := filepath.Join(tempDir(t), "value")
	for i, size := range sizes {
		value := make([]byte, size)
		for j := range value {
			value[j] = byte(rng.Uint32())
		}
		key := fmt.Sprintf("binary/%d/ü \"x\"", i)
		require.Zero(t, c.kvctlIn(t, value, "put", key, "-").code)
		transport := []string{"auto", "shm", "tcp", "grpc"}[i%4]
		got := c.kvctl(t, "get", key, "--transport", transport)
		require.Zero(t, got.code, got.stderr)
		require.True(t, string(value) == got.stdout, "%d bytes came back as %d others by %s", size, len(got.stdout), transport)
		require.Empty(t, got.stderr)

		require.NoError(t, os.WriteFile(file, value, 0o600))
		require.Zero(t, c.kvctl(t, "put", key+"f", "--file", file).code)
		require.Zero(t, c.kvctl(t, "get", key+"f", "--file", file+".out").code)
		back, err := os.ReadFile(file + ".out")
		require.NoError(t, err)
		require.True(t, bytes.Equal(value, back))
	}
}

// TestKvctlJSON: what -o json prints is JSON with what it should hold.
func TestKvctlJSON(t *testing.T) {
	c := sharedNodes(t)
	var put struct {
		Key     string
		Version uint64
	}
	decode(t, c.kvctl(t, "-o", "json", "put", "json/a", "value", "--ttl", "1h"), &put)
	require.Equal(t, "json/a", put.Key)
	require.Positive(t, put.Version)
	var got struct {
		Key     string
		Value   string `json:"value_base64"`
		Size    int
		Version uint64
		Expires time.Time
	}
	decode(t, c.kvctl(t, "-o", "json", "get", "json/a"), &got)
	value, err := base64.StdEncoding.DecodeString(got.Value)
	require.NoError(t, err)
	require.Equal(t, "value", string(value))
	require.Equal(t, put.Version, got.Version)
	require.WithinDuration(t, time.Now().Add(time.Hour), got.Expires, time.Minute)
	var nodes []struct {
		NodeID uint64 `json:"node_id"`
		Status struct {
			ClusterID string `json:"cluster_id"`
			Shards    []any
		}
	}
	decode(t, c.kvctl(t, "-o", "json", "status"), &nodes)
	require.Len(t, nodes, 3)
	for i, n := range nodes {
		require.Equal(t, uint64(i+1), n.NodeID)
		require.Len(t, n.Status.ClusterID, 32)
		require.Len(t, n.Status.Shards, 5)
	}
	var made, listed []struct {
		Name      string
		Immutable bool
	}
	decode(t, c.kvctl(t, "-o", "json", "namespace", "create", "json-made", "--immutable"), &made)
	require.True(t, made[0].Immutable)
	decode(t, c.kvctl(t, "-o", "json", "namespace", "ls"), &listed)
	require.Contains(t, listed, made[0])
	c.kvctl(t, "namespace", "create", "json-made").failed(t, 4, "exists already")
}

func decode(t testing.TB, r result, v any) {
	t.Helper()
	require.Zero(t, r.code, r.stderr)
	require.Empty(t, r.stderr)
	require.NoError(t, json.Unmarshal([]byte(r.stdout), v), r.stdout)
}

// TestKvctlBadInput: each mistake gives its exit code and one sentence, from every
// server, at once.
func TestKvctlBadInput(t *testing.T) {
	c := sharedNodes(t)
	long := strings.Repeat("k", 4097)
	big := make([]byte, 1<<20+1)
	for _, tc := range []struct {
		name  string
		stdin []byte
		args  []string
		code  int
		words string
	}{
		{"put empty key", nil, []string{"put", "", "x"}, 2, "empty"},
		{"get empty key", nil, []string{"get", ""}, 2, "empty"},
		{"del empty key", nil, []string{"del", ""}, 2, "empty"},
		{"put long key", nil, []string{"put", long, "x"}, 2, "4097"},
		{"get long key", nil, []string{"get", long}, 2, "4097"},
		{"value too large", big, []string{"put", "big", "-"}, 2, "1048577"},
		{"unknown namespace", nil, []string{"-n", "nowhere", "get", "x"}, 3, "nowhere"},
		{"unknown namespace, put", nil, []string{"-n", "nowhere", "put", "x", "y"}, 3, "nowhere"},
		{"wrong cluster", nil, []string{"--cluster-id", strings.Repeat("0", 32), "get", "x"}, 6, "cluster"},
		{"absent key", nil, []string{"get", "absent"}, 3, "not found"},
		{"absent key, del", nil, []string{"del", "absent"}, 3, "not found"},
		{"unknown flag", nil, []string{"get", "x", "--nonsense"}, 2, "nonsense"},
		{"unknown command", nil, []string{"nonsense"}, 2, "nonsense"},
		{"no key", nil, []string{"get"}, 2, "KEY"},
		{"no value", nil, []string{"put", "x"}, 2, "VALUE"},
		{"no such file", nil, []string{"put", "x", "--file", "/nonexistent/x"}, 2, "no such file"},
		{"no folder for the file", nil, []string{"get", "x", "--file", "/nonexistent/x"}, 2, "there is no folder /nonexistent"},
		{"folder for a file", nil, []string{"get", "x", "--file", "/tmp"}, 2, "want a file"},
		{"require-tls without TLS", nil, []string{"get", "x", "--require-tls"}, 2, "--ca"},
		{"no such CA", nil, []string{"get", "x", "--ca", "/nonexistent/ca.pem"}, 2, "/nonexistent/ca.pem"},
		{"certificate without a key", nil, []string{"get", "x", "--cert", "/tmp/x.pem"}, 2, "want both or none"},
		{"no such token file", nil, []string{"get", "x", "--token-file", "/nonexistent/token"}, 2, "/nonexistent/token"},
		{"bad level", nil, []string{"get", "x", "--level", "fresh"}, 2, "linearizable, session or stale"},
		{"bad transport", nil, []string{"get", "x", "--transport", "pigeon"}, 2, "want one of auto, shm"},
		{"bad output", nil, []string{"get", "x", "-o", "xml"}, 2, "table or json"},
		{"bad timeout", nil, []string{"get", "x", "--timeout", "0"}, 2, "timeout"},
		{"bad limit", nil, []string{"ls", "--limit", "-1"}, 2, "limit"},
		{"bad version", nil, []string{"put", "x", "y", "--if-version", "z"}, 2, "if-version"},
		{"both conditions", nil, []string{"put", "x", "y", "--if-version", "1", "--if-absent"}, 2, "exclude"},
		{"bad endpoint", nil, []string{"--endpoints", "nonsense", "get", "x"}, 2, "host:port"},
		{"namespace without a command", nil, []string{"namespace"}, 2, "create, ls or rotate-keys"},
		{"conflict by version", nil, []string{"put", "absent", "y", "--if-version", "7"}, 4, "conflict"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := c.kvctlIn(t, tc.stdin, tc.args...)
			r.failed(t, tc.code, tc.words)
			require.Less(t, r.took, 10*time.Second)
		})
	}
	require.Zero(t, c.kvctl(t, "put", "once", "x", "--if-absent").code)
	c.kvctl(t, "put", "once", "x", "--if-absent").failed(t, 4, "conflict")
}

// TestKvctlWrongServer: what is no kvd node, or none at all, is told apart where that is
// possible, and never waited for beyond the time-out.
func TestKvctlWrongServer(t *testing.T) {
	c := sharedNodes(t)
	web := httptest.NewServer(http.NotFoundHandler())
	defer web.Close()
	silent := listen(t, func(net.Conn) {})
	rude := listen(t, func(conn net.Conn) { _ = conn.Close() })
	banner := listen(t, func(conn net.Conn) { _, _ = conn.Write([]byte("SSH-2.0-OpenSSH_9.9\r\n")) })
	other := grpc.NewServer()
	healthpb.RegisterHealthServer(other, health.NewServer())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- other.Serve(l) }()
	defer func() { other.Stop(); <-done }()

	const timeout = time.Second
	for _, tc := range []struct{ name, addr, words string }{
		{"nobody listens", freeAddr(t), "connection refused"},
		{"plain HTTP", web.Listener.Addr().String(), "gRPC"},
		{"silence", silent, "did not answer"},
		{"hangs up", rude, ""},
		{"SSH", banner, "gRPC"},
		{"another gRPC service", l.Addr().String(), "not a kvd node"},
		{"the port of READs", c.Node(1).TCP, ""},
		{"the port of metrics", strings.TrimSuffix(strings.TrimPrefix(c.Node(1).Metrics, "http://"), "/metrics"), "gRPC"},
		{"no such host", "kvd.invalid:7400", "kvd.invalid"},
	} {
		for _, args := range [][]string{{"get", "x"}, {"put", "x", "y"}, {"ls"}, {"namespace", "ls"}, {"status"}} {
			t.Run(tc.name+" "+args[0], func(t *testing.T) {
				r := kvctl(t, nil, append([]string{"--endpoints", tc.addr, "--timeout", timeout.String()}, args...)...)
				r.failed(t, 5, tc.words)
				require.Less(t, r.took, timeout+2*time.Second)
			})
		}
	}
	t.Run("one of several is right", func(t *testing.T) {
		r := kvctl(t, nil, "--endpoints", freeAddr(t)+","+silent+","+c.Node(2).Address, "put", "several", "x")
		require.Zero(t, r.code, r.text())
	})
}

// listen serves connections until the test ends.
func listen(t testing.TB, serve func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan []net.Conn, 1)
	go func() {
		var conns []net.Conn
		for {
			conn, err := l.Accept()
			if err != nil {
				done <- conns
				return
			}
			conns = append(conns, conn)
			serve(conn)
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		for _, conn := range <-done {
			_ = conn.Close()
		}
	})
	return l.Addr().String()
}

// TestKvctlHalfTheServers: with one of three nodes a linearizable read is refused in
// time, and a stale one answered.
func TestKvctlHalfTheServers(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	fill(t, c.dial(t, nil), "half", 8, 100)
	c.caughtUp(t)
	for _, id := range []uint64{1, 2} {
		require.NoError(t, c.Node(id).Kill())
	}
	const timeout = 2 * time.Second
	for _, transport := range []string{"auto", "tcp", "grpc"} {
		for _, args := range [][]string{{"get", "half/000003"}, {"put", "half/000003", "x"}, {"del", "half/000003"}, {"ls", "half/"}} {
			if transport != "auto" && args[0] != "get" {
				continue
			}
			r := c.kvctl(t, append(args, "--timeout", timeout.String(), "--transport", transport)...)
			require.Contains(t, []int{5, 7}, r.code, "%v: %s", args, r.text())
			if args[0] == "get" || args[0] == "ls" {
				require.Equal(t, 5, r.code, r.text())
			}
			r.failed(t, r.code)
			require.Less(t, r.took, timeout+2*time.Second)
		}
		t.Run("stale by "+transport, func(t *testing.T) {
			r := c.kvctl(t, "get", "half/000003", "--level", "stale", "--timeout", "5s", "--transport", transport)
			require.Zero(t, r.code, r.text())
			require.Equal(t, valueOf("half/000003", 100), r.stdout)
		})
	}
	r := c.kvctl(t, "status", "--timeout", "5s")
	require.Zero(t, r.code)
	require.Equal(t, 2, strings.Count(r.stdout, "no answer"), r.stdout)
	require.NoError(t, c.Node(3).Kill())
	c.kvctl(t, "get", "half/000003", "--timeout", timeout.String()).failed(t, 5, "connection refused")
	c.kvctl(t, "status", "--timeout", timeout.String()).failed(t, 5, "connection refused")
}

// TestKvctlList: pages, prefixes, limits and starts, with keys of any bytes.
func TestKvctlList(t *testing.T) {
	c := sharedNodes(t)
	cl := c.dial(t, nil)
	held := fill(t, cl, "list/many", 3000, 10)
	want := []string{"list/bin/\x00\xff", "list/bin/a\nb", "list/bin/\x1b[31m", "list/bin/ä"}
	for _, k := range want {
		ctx, cancel := within(patience)
		_, err := cl.Put(ctx, []byte(k), []byte("x"))
		cancel()
		require.NoError(t, err)
	}
	slices.Sort(want)
	require.Equal(t, want, listJSON(t, c, "list/bin/"))
	table := c.kvctl(t, "ls", "list/bin/")
	require.Zero(t, table.code)
	require.Equal(t, 1+len(want), strings.Count(table.stdout, "\n"), "one line a key:\n%q", table.stdout)
	require.NotContains(t, table.stdout, "\x1b")

	var keys []string
	for k := range held {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	require.Equal(t, keys, listJSON(t, c, "list/many/"))
	require.Equal(t, keys[:17], listJSON(t, c, "list/many/", "--limit", "17"))
	require.Equal(t, keys[1000:1700], listJSON(t, c, "list/many/", "--limit", "700", "--start-after", keys[999]))
	require.Equal(t, keys[2990:], listJSON(t, c, "list/many/00299"))
	require.Empty(t, listJSON(t, c, "list/none"))
	require.Empty(t, listJSON(t, c, "list/many/", "--start-after", "list/many/9"))
	require.Equal(t, keys, listJSON(t, c, "list/many/", "--level", "session"))
}

func listJSON(t testing.TB, c *cluster, args ...string) []string {
	t.Helper()
	r := c.kvctl(t, append([]string{"ls", "-o", "json"}, args...)...)
	require.Zero(t, r.code, r.stderr)
	var keys []string
	for dec := json.NewDecoder(strings.NewReader(r.stdout)); dec.More(); {
		var item struct {
			Key    string
			Base64 string `json:"key_base64"`
		}
		require.NoError(t, dec.Decode(&item))
		if item.Base64 != "" {
			b, err := base64.StdEncoding.DecodeString(item.Base64)
			require.NoError(t, err)
			item.Key = string(b)
		}
		keys = append(keys, item.Key)
	}
	return keys
}

// TestKvctlHelp: completion, help and version need no server.
func TestKvctlHelp(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		r := kvctl(t, nil, "completion", shell)
		require.Zero(t, r.code)
		require.Contains(t, r.stdout, "kvctl")
		require.Empty(t, r.stderr)
	}
	for _, cmd := range []string{"get", "put", "del", "ls", "status", "namespace create"} {
		r := kvctl(t, nil, append(strings.Fields(cmd), "--help")...)
		require.Zero(t, r.code)
		require.Contains(t, r.stdout, "Examples:", cmd)
	}
	r := kvctl(t, nil, "--help")
	require.Contains(t, r.stdout, "Exit codes:")
	require.Contains(t, kvctl(t, nil, "--version").stdout, "e2e")
}

// TestKvctlNamespaces keep their keys apart, and an immutable one keeps its values.
func TestKvctlNamespaces(t *testing.T) {
	c := sharedNodes(t)
	require.Zero(t, c.kvctl(t, "namespace", "create", "apart", "--immutable").code)
	put := func(args ...string) result { return c.kvctl(t, append([]string{"-n", "apart"}, args...)...) }
	require.Zero(t, put("put", "k", "one").code)
	require.Zero(t, put("put", "k", "one").code, "the same content again is no conflict")
	put("put", "k", "two").failed(t, 4, "conflict")
	require.Equal(t, "one", put("get", "k").stdout)
	c.kvctl(t, "get", "k").failed(t, 3, client.ErrNotFound.Error())
}
