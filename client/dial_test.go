package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/storage/layout"
)

func listen(t *testing.T, serve func(net.Conn)) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serve(c)
			t.Cleanup(func() { _ = c.Close() })
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return l.Addr().String()
}

func TestDialFailures(t *testing.T) {
	cluster := newFakeCluster(t, fakeOptions{nodes: 1, shards: 1})
	newer := newFakeCluster(t, fakeOptions{nodes: 1, shards: 1, layout: layout.Version + 1})
	closed := listen(t, func(net.Conn) {})
	if l, err := net.Listen("tcp", "127.0.0.1:0"); err == nil {
		closed = l.Addr().String()
		_ = l.Close()
	}
	web := httptest.NewServer(http.NotFoundHandler())
	defer web.Close()
	for _, c := range []struct {
		name string
		cfg  Config
		err  error
		text string
	}{
		{"nobody listens", Config{Endpoints: []string{closed}}, ErrUnavailable, "connection refused"},
		{"not gRPC", Config{Endpoints: []string{listen(t, func(c net.Conn) { _, _ = c.Write([]byte("SSH-2.0-OpenSSH_9.9\r\n")) })}}, ErrIncompatible, "does not speak gRPC"},
		{"silence", Config{Endpoints: []string{listen(t, func(net.Conn) {})}}, ErrUnavailable, "did not answer"},
		{"hangs up", Config{Endpoints: []string{listen(t, func(c net.Conn) { _ = c.Close() })}}, ErrUnavailable, "closed the connection"},
		{"plain HTTP", Config{Endpoints: []string{web.Listener.Addr().String()}}, ErrIncompatible, "does not speak gRPC"},
		{"no endpoint", Config{}, ErrInvalid, "endpoints"},
		{"bad endpoint", Config{Endpoints: []string{"nonsense"}}, ErrInvalid, "host:port"},
		{"unknown namespace", Config{Endpoints: []string{cluster.nodes[0].addr}, Namespace: "nope"}, ErrUnknownNamespace, ""},
		{"wrong cluster", Config{Endpoints: []string{cluster.nodes[0].addr}, ClusterID: "other"}, ErrWrongCluster, ""},
		{"another layout of memory", Config{Endpoints: []string{newer.nodes[0].addr}}, ErrIncompatible, fmt.Sprintf("this client reads layout %d", layout.Version)},
		{"unknown transport", Config{Endpoints: []string{cluster.nodes[0].addr}, Transport: "pigeon"}, ErrInvalid, "pigeon"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.cfg.ConnectTimeout, c.cfg.DialTimeout = 300*time.Millisecond, time.Second
			began := time.Now()
			client, err := Dial(context.Background(), c.cfg)
			require.Nil(t, client)
			require.Error(t, err)
			if c.err != nil {
				require.ErrorIs(t, err, c.err)
			}
			require.Contains(t, err.Error(), c.text)
			require.NotContains(t, err.Error(), "\n")
			require.Less(t, time.Since(began), 3*time.Second)
		})
	}
}

// TestDialTriesEndpointsInTurn: dead endpoints before a living one do not matter, and
// one endpoint is enough to find all nodes.
func TestDialTriesEndpointsInTurn(t *testing.T) {
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: 3})}
	f.net = &fakeNet{c: f.fakeCluster, name: "fake"}
	f.c = f.dial(t, f.net, func(c *Config) { c.Endpoints = []string{"127.0.0.1:1", f.nodes[2].addr} })
	f.ready(t)
	f.put("a", "1")
	f.want(t, "a", "1")
	require.Len(t, f.c.Stats().Peers, 3)
	for _, p := range f.c.Stats().Peers {
		require.Equal(t, "fake", p.Transport)
		require.True(t, p.Connected)
	}
}

// TestReopen: a session that ended is opened again. What was known of the boot is kept,
// and forgotten with the next boot.
func TestReopen(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{}, nil)
	f.put(theKey, "1")
	f.want(t, theKey, "1")
	reopened := func(old *session) *session {
		var s *session
		eventually(t, "another session", func() bool { s = f.c.sessionOf(1); return s != nil && s != old })
		return s
	}
	old := f.c.sessionOf(1)
	old.stream.stop()
	next := reopened(old)
	require.Equal(t, old.ord, next.ord)
	s := f.during(func() { f.want(t, theKey, "1") })
	require.EqualValues(t, 1, s.CacheHits)
	require.Zero(t, s.BucketReads)

	f.locked(func() {
		n := f.nodes[0]
		n.boot++
		rec := n.readRecord(1)
		rec.BootID = n.boot
		n.writeRecord(1, rec)
	})
	next.stream.stop()
	require.Greater(t, reopened(next).ord, next.ord)
	s = f.during(func() { f.want(t, theKey, "1") })
	require.Zero(t, s.CacheHits)
	require.Positive(t, s.BucketReads)
}

func TestClosedClient(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{}, nil)
	f.put(theKey, "1")
	require.NoError(t, f.c.Close())
	require.NoError(t, f.c.Close())
	_, err := f.c.Get(context.Background(), []byte(theKey))
	require.ErrorIs(t, err, ErrClosed)
	_, err = f.c.Put(context.Background(), []byte(theKey), nil)
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, f.c.GetMany(context.Background(), [][]byte{[]byte(theKey)})[0].Err, ErrClosed)
}

func TestAdmin(t *testing.T) {
	cluster := newFakeCluster(t, fakeOptions{nodes: 3, shards: 1})
	a, err := DialAdmin(Config{Endpoints: []string{"127.0.0.1:1", cluster.nodes[0].addr}, ConnectTimeout: time.Second})
	require.NoError(t, err)
	defer func() { require.NoError(t, a.Close()) }()
	list, err := a.Status(context.Background())
	require.NoError(t, err)
	require.Len(t, list, 4)
	var answered []uint64
	for _, s := range list {
		if s.Err == nil {
			answered = append(answered, s.NodeID)
		} else {
			require.ErrorIs(t, s.Err, ErrUnavailable)
		}
	}
	require.Equal(t, []uint64{1, 2, 3}, answered)
	ns, err := a.CreateNamespace(context.Background(), NamespaceSpec{Name: "train", Immutable: true})
	require.NoError(t, err)
	require.Equal(t, Namespace{ID: 2, Name: "train", Immutable: true, OneSided: true, DefaultLevel: Linearizable}, ns)
	_, err = a.CreateNamespace(context.Background(), NamespaceSpec{})
	require.ErrorIs(t, err, ErrInvalid)

	dead, err := DialAdmin(Config{Endpoints: []string{"127.0.0.1:1"}, CallTimeout: 300 * time.Millisecond})
	require.NoError(t, err)
	defer func() { require.NoError(t, dead.Close()) }()
	_, err = dead.Status(context.Background())
	require.ErrorIs(t, err, ErrUnavailable)
	_, err = dead.Namespaces(context.Background())
	require.ErrorIs(t, err, ErrUnavailable)
	require.NotContains(t, err.Error(), "\n")
}

// TestAdminOfAnotherCluster: who asks for another cluster than the nodes are of is
// refused before anything is done.
func TestAdminOfAnotherCluster(t *testing.T) {
	cluster := newFakeCluster(t, fakeOptions{nodes: 3, shards: 1})
	admin := func(id string) *Admin {
		cfg := Config{ClusterID: id, ConnectTimeout: time.Second, CallTimeout: 3 * time.Second}
		for _, n := range cluster.nodes {
			cfg.Endpoints = append(cfg.Endpoints, n.addr)
		}
		a, err := DialAdmin(cfg)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, a.Close()) })
		return a
	}
	ctx := ctxFor(t, time.Minute)
	asked := func() int {
		cluster.mu.Lock()
		defer cluster.mu.Unlock()
		return cluster.admin
	}
	wrong := admin("other")
	_, err := wrong.CreateNamespace(ctx, NamespaceSpec{Name: "train"})
	require.ErrorIs(t, err, ErrWrongCluster)
	_, err = wrong.Namespaces(ctx)
	require.ErrorIs(t, err, ErrWrongCluster)
	require.ErrorIs(t, wrong.TransferLeader(ctx, 1, 2), ErrWrongCluster)
	_, err = wrong.Status(ctx)
	require.ErrorIs(t, err, ErrWrongCluster)
	require.Equal(t, 1, strings.Count(err.Error(), "it is of cluster fake: want other"), "%v", err)
	for _, n := range cluster.nodes {
		require.Contains(t, err.Error(), n.addr)
	}
	require.Zero(t, asked())

	right := admin("fake")
	_, err = right.CreateNamespace(ctx, NamespaceSpec{Name: "train"})
	require.NoError(t, err)
	_, err = right.Namespaces(ctx)
	require.NoError(t, err)
	require.NoError(t, right.TransferLeader(ctx, 1, 2))
	require.Positive(t, asked())
}

func TestSentence(t *testing.T) {
	require.Equal(t, "nodes at a:1, [::1]:2: no; node at c:3: yes; what listens at d:4 is odd; no", sentence([]error{
		errors.New("node at a:1: no"), errors.New("node at c:3: yes"), errors.New("node at [::1]:2: no"), errors.New("node at a:1: no"),
		errors.New("what listens at d:4 is odd"), errors.New("what listens at d:4 is odd"), errors.New("no"),
	}))
}

// TestEndedContext: a call whose context ended before it reads nothing, however near
// the answer is.
func TestEndedContext(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	f.put(theKey, "1")
	f.want(t, theKey, "1") // its place is known now
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	expired, cancel := context.WithDeadline(context.Background(), time.Unix(1, 0))
	defer cancel()
	for ctx, wants := range map[context.Context][]error{
		cancelled: {context.Canceled}, expired: {context.DeadlineExceeded, ErrUnavailable},
	} {
		for _, level := range []Level{Linearizable, Session, Stale} {
			_, got := f.c.Get(ctx, []byte(theKey), WithLevel(level))
			_, into := f.c.GetInto(ctx, []byte(theKey), make([]byte, 10), WithLevel(level))
			errs := []error{got, into}
			for _, r := range f.c.GetMany(ctx, [][]byte{[]byte(theKey), []byte(theKey)}, WithLevel(level)) {
				require.Nil(t, r.Value.Data)
				errs = append(errs, r.Err)
			}
			for _, err := range errs {
				for _, want := range wants {
					require.ErrorIs(t, err, want, fmt.Sprint(level))
				}
			}
		}
	}
}
