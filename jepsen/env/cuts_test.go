//go:build e2e

package env

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// place is three nodes and a client in namespaces of their own; no kvd runs.
func place(t *testing.T) *Env {
	if err := CanNamespaces(); err != nil {
		t.Skipf("no network namespaces: %v", err)
	}
	e, err := New(Config{Binary: "/bin/false", Self: "/bin/false", DataDir: t.TempDir(), LogDir: t.TempDir(), Nodes: 3, Shards: 1, Clients: []string{"c1"}, Namespaces: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	require.NoError(t, e.VerifyCuts())
	return e
}

// ways says which directions between two hosts carry a stream's bytes: by sockets of the
// test's own, not by the probes that Env itself believes. The connection is as old as the
// returned function, so it is there before what is cut afterwards.
func ways(t *testing.T, e *Env, from, to string) func() (there, back bool) {
	var l net.Listener
	require.NoError(t, e.hosts[to].thread.do(func() (err error) {
		l, err = net.Listen("tcp4", e.hosts[to].Addr+":0")
		return err
	}))
	defer func() { require.NoError(t, l.Close()) }()
	var a net.Conn
	require.NoError(t, e.hosts[from].thread.do(func() (err error) {
		a, err = net.DialTimeout("tcp4", l.Addr().String(), 10*time.Second)
		return err
	}))
	b, err := l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	n := 0
	carries := func(w, r net.Conn, wait time.Duration) bool {
		n++
		msg := fmt.Sprintf("message %06d\n", n)
		_, err := w.Write([]byte(msg))
		require.NoError(t, err) // into the socket's own buffer
		require.NoError(t, r.SetReadDeadline(time.Now().Add(wait)))
		var got strings.Builder
		buf := make([]byte, 256)
		for !strings.Contains(got.String(), msg) {
			k, err := r.Read(buf)
			if err != nil {
				return false
			}
			got.Write(buf[:k])
		}
		return true
	}
	return func() (bool, bool) {
		// A closed way shows by waiting; what is said the other way needs no answer to arrive.
		return carries(a, b, time.Second), carries(b, a, time.Second)
	}
}

// A cut closes its direction to connections that are there already, and no other.
func TestCutCloses(t *testing.T) {
	e := place(t)
	between, beside := ways(t, e, "n1", "n2"), ways(t, e, "n1", "n3")
	both := func(f func() (bool, bool)) [2]bool {
		there, back := f()
		return [2]bool{there, back}
	}
	require.Equal(t, [2]bool{true, true}, both(between))

	// n1 is not heard by n2. What n2 says arrives, but for its acknowledgement: TCP needs both.
	require.NoError(t, e.Cut("a", []Cut{{"n1", "n2"}}))
	require.NoError(t, e.VerifyCuts())
	require.Equal(t, [2]bool{false, true}, both(between))
	require.Equal(t, [2]bool{true, true}, both(beside))
	require.False(t, e.Reachable("n1", "n2"))
	require.True(t, e.Reachable("n2", "n1"))
	dropped, err := e.Dropped()
	require.NoError(t, err)
	require.Positive(t, dropped)

	// The other direction by another cause; ending the first leaves the second.
	require.NoError(t, e.Cut("b", []Cut{{"n2", "n1"}}))
	require.NoError(t, e.VerifyCuts())
	require.False(t, e.Reachable("n1", "n2"))
	require.False(t, e.Reachable("n2", "n1"))
	require.NoError(t, e.Cut("a", nil))
	require.NoError(t, e.VerifyCuts())
	require.True(t, e.Reachable("n1", "n2"))
	require.False(t, e.Reachable("n2", "n1"))
	after, err := e.Dropped()
	require.NoError(t, err)
	require.GreaterOrEqual(t, after, dropped, "drops of ended cuts are still counted")

	require.NoError(t, e.Cut("b", nil))
	require.NoError(t, e.VerifyCuts())
	require.True(t, e.Reachable("c1", "n1"))
}

// What was ordered and did not happen is seen, and so is what happened and was not ordered.
func TestVerifyCutsSees(t *testing.T) {
	e := place(t)
	nft := func(host, rules string) {
		_, err := tool(e.hosts[host].thread, rules, "nft", "-f", "-")
		require.NoError(t, err)
	}
	require.NoError(t, e.Cut("a", []Cut{{"n1", "n2"}}))
	nft("n2", "flush chain inet "+tableName+" in\n")
	require.ErrorContains(t, e.VerifyCuts(), "n1->n2 is open")
	require.NoError(t, e.Cut("a", nil))
	require.NoError(t, e.VerifyCuts())

	nft("n3", fmt.Sprintf("add rule inet %s in ip saddr %s drop\n", tableName, e.hosts["c1"].Addr))
	err := e.VerifyCuts()
	require.ErrorContains(t, err, "c1->n3 is closed")
	require.NotContains(t, err.Error(), "n3->c1")
	nft("n3", "flush chain inet "+tableName+" in\n")

	require.NoError(t, e.Link("n3", false))
	err = e.VerifyCuts()
	require.ErrorContains(t, err, "n3->n1 is closed")
	require.ErrorContains(t, err, "n1->n3 is closed")
	require.NoError(t, e.VerifyCuts("n3"))
	require.NoError(t, e.Link("n3", true))
	require.NoError(t, e.VerifyCuts())
}
