//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// TestExpiry: a value with a time to live is gone after it, for every way of reading, and
// a put then finds the key absent.
func TestExpiry(t *testing.T) {
	c := sharedNodes(t)
	clients := []*client.Client{c.dial(t, overTransport("shm")), c.dial(t, overTransport("tcp")), c.dial(t, overTransport(client.TransportGRPC))}
	ctx, cancel := within(patience)
	defer cancel()
	key := []byte("expiry/a")
	const ttl = 1500 * time.Millisecond
	before := time.Now()
	version, err := clients[0].Put(ctx, key, []byte("short-lived"), client.TTL(ttl))
	require.NoError(t, err)
	_, err = clients[0].Put(ctx, []byte("expiry/b"), []byte("stays"))
	require.NoError(t, err)
	for _, cl := range clients {
		v, err := cl.Get(ctx, key)
		if time.Since(before) < ttl {
			require.NoError(t, err)
			require.Equal(t, version, v.Version)
			require.WithinDuration(t, before.Add(ttl), v.Expires, 500*time.Millisecond)
		}
	}
	for i, cl := range clients {
		for _, level := range []client.Level{client.Linearizable, client.Session, client.Stale} {
			await(t, "the value is gone", func() error {
				_, err := cl.Get(ctx, key, client.WithLevel(level))
				if !errors.Is(err, client.ErrNotFound) {
					return fmt.Errorf("client %d, %v: %v", i, level, err)
				}
				return nil
			})
		}
	}
	require.GreaterOrEqual(t, time.Since(before), ttl, "it was gone before its time")
	var listed []string
	for item, err := range clients[0].List(ctx, []byte("expiry/")) {
		require.NoError(t, err)
		listed = append(listed, string(item.Key))
	}
	require.Equal(t, []string{"expiry/b"}, listed)
	again, err := clients[1].Put(ctx, key, []byte("again"), client.IfAbsent())
	require.NoError(t, err)
	require.Greater(t, again, version)
	// It leaves the store as well, not only the sight of readers.
	_, err = clients[1].Put(ctx, []byte("expiry/c"), []byte("x"), client.TTL(time.Millisecond))
	require.NoError(t, err)
	require.Equal(t, 2, len(listJSON(t, c, "expiry/")))
}

// rawWriter talks to the leader of one key's shard as a client that repeats itself does.
type rawWriter struct {
	c     *cluster
	shard uint32
	key   []byte
	admin *client.Admin
}

// atLeader calls f at whoever leads the shard until that is answered.
func (w *rawWriter) atLeader(t testing.TB, f func(ctx context.Context, kv kvdv1.KVClient) error) {
	t.Helper()
	await(t, "the leader answers", func() error {
		ctx, cancel := within(5 * time.Second)
		defer cancel()
		l, err := leaders(ctx, w.admin)
		if err != nil {
			return err
		}
		return f(ctx, kvdv1.NewKVClient(connect(t, w.c.Node(l[w.shard]).Address)))
	})
}

func (w *rawWriter) put(t testing.TB, value string, stamp *kvdv1.WriterStamp, p *kvdv1.Precondition) *kvdv1.WriteResponse {
	t.Helper()
	var r *kvdv1.WriteResponse
	w.atLeader(t, func(ctx context.Context, kv kvdv1.KVClient) (err error) {
		r, err = kv.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: w.key, Value: []byte(value), Writer: stamp, Precondition: p})
		return err
	})
	return r
}

// TestRetriedWriteAppliesOnce: the same stamp twice is one write, also at another leader
// and after a restart of all; an older write does not come back over a newer one.
func TestRetriedWriteAppliesOnce(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	cl := c.dial(t, nil)
	w := &rawWriter{c: c, key: []byte("once"), shard: cl.ShardOf([]byte("once")), admin: c.admin(t)}
	var writer uint64
	w.atLeader(t, func(ctx context.Context, kv kvdv1.KVClient) error {
		r, err := kv.OpenWriter(ctx, &kvdv1.OpenWriterRequest{Shard: w.shard})
		writer = r.GetWriterId()
		return err
	})
	require.Positive(t, writer)
	stamp := func(sequence, acked uint64) *kvdv1.WriterStamp {
		return &kvdv1.WriterStamp{WriterId: writer, Sequence: sequence, AckedBelow: acked}
	}
	absent := &kvdv1.Precondition{IfAbsent: true}
	first := w.put(t, "one", stamp(1, 1), absent)
	require.Equal(t, kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, first.GetOutcome())
	same := func(when string) {
		t.Helper()
		r := w.put(t, "one", stamp(1, 1), absent)
		require.Equal(t, first.GetOutcome(), r.GetOutcome(), when)
		require.Equal(t, first.GetVersion(), r.GetVersion(), when)
	}
	same("at once")
	second := w.put(t, "two", stamp(2, 1), nil)
	require.Greater(t, second.GetVersion(), first.GetVersion())
	holds := func(when string) {
		t.Helper()
		ctx, cancel := within(patience)
		defer cancel()
		v, err := cl.Get(ctx, w.key)
		require.NoError(t, err, when)
		require.Equal(t, "two", string(v.Data), when)
		require.Equal(t, second.GetVersion(), v.Version, when)
	}
	same("after a newer write")
	holds("after a retry of an older write")
	for _, id := range []uint64{2, 3} {
		c.lead(t, id)
		same(fmt.Sprintf("at leader %d", id))
		holds(fmt.Sprintf("at leader %d", id))
	}
	require.NoError(t, c.Kill())
	for _, n := range c.Nodes() {
		require.NoError(t, n.Start())
	}
	for _, n := range c.Nodes() {
		c.awaitServing(t, n.ID)
	}
	same("after all were killed")
	holds("after all were killed")
	// Once acknowledged the result may be forgotten, and then that is what is said.
	third := w.put(t, "two", stamp(3, 3), &kvdv1.Precondition{IfVersion: second.GetVersion()})
	require.Equal(t, kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, third.GetOutcome())
	require.Equal(t, kvdv1.WriteOutcome_WRITE_OUTCOME_WRITER_EXPIRED, w.put(t, "one", stamp(1, 1), absent).GetOutcome())
	require.Equal(t, kvdv1.WriteOutcome_WRITE_OUTCOME_WRITER_EXPIRED,
		w.put(t, "one", &kvdv1.WriterStamp{WriterId: writer + 1<<40, Sequence: 1, AckedBelow: 1}, nil).GetOutcome(), "a writer that nobody knows")
}

// TestBadRequests: what our SDK never sends, sent raw.
func TestBadRequests(t *testing.T) {
	c := sharedNodes(t)
	ctx, cancel := within(patience)
	defer cancel()
	conn := connect(t, c.Node(1).Address)
	kv, access, admin := kvdv1.NewKVClient(conn), kvdv1.NewAccessClient(conn), kvdv1.NewClusterClient(conn)
	key := []byte("bad")
	for name, call := range map[string]func() error{
		"no key":            func() error { _, err := kv.Get(ctx, &kvdv1.GetRequest{NamespaceId: 1}); return err },
		"no namespace":      func() error { _, err := kv.Get(ctx, &kvdv1.GetRequest{Key: key}); return err },
		"unknown namespace": func() error { _, err := kv.Put(ctx, &kvdv1.PutRequest{NamespaceId: 4711, Key: key}); return err },
		"delete if absent": func() error {
			_, err := kv.Delete(ctx, &kvdv1.DeleteRequest{NamespaceId: 1, Key: key, Precondition: &kvdv1.Precondition{IfAbsent: true}})
			return err
		},
		"both preconditions": func() error {
			_, err := kv.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: key, Precondition: &kvdv1.Precondition{IfAbsent: true, IfVersion: 1}})
			return err
		},
		"list of shard 0":    func() error { _, err := kv.List(ctx, &kvdv1.ListRequest{NamespaceId: 1}); return err },
		"list of shard 99":   func() error { _, err := kv.List(ctx, &kvdv1.ListRequest{NamespaceId: 1, Shard: 99}); return err },
		"writer of shard 99": func() error { _, err := kv.OpenWriter(ctx, &kvdv1.OpenWriterRequest{Shard: 99}); return err },
		"no session": func() error {
			_, err := access.Routes(ctx, &kvdv1.RoutesRequest{SessionId: []byte("nonsense")})
			return err
		},
		"connect, no session": func() error { _, err := access.Connect(ctx, &kvdv1.ConnectRequest{Transport: "tcp"}); return err },
		"regions, no session": func() error { _, err := access.Regions(ctx, &kvdv1.RegionsRequest{}); return err },
		"namespace, no name":  func() error { _, err := admin.CreateNamespace(ctx, &kvdv1.CreateNamespaceRequest{}); return err },
		"transfer of shard 99": func() error {
			_, err := admin.TransferLeader(ctx, &kvdv1.TransferLeaderRequest{Shard: 99, ToNode: 2})
			return err
		},
	} {
		err := call()
		require.Error(t, err, name)
		code := status.Code(err)
		require.Contains(t, []codes.Code{codes.InvalidArgument, codes.NotFound, codes.Unauthenticated, codes.FailedPrecondition}, code, "%s: %v", name, err)
		require.NotEmpty(t, status.Convert(err).Message(), name)
	}
}
