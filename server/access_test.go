package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/shm"
	"github.com/kvd-io/kvd/rdma/tcp"
	"github.com/kvd-io/kvd/storage/layout"
)

// served is a single node that serves its memory, with two namespaces.
func served(t testing.TB) (*testCluster, []rdma.Provider) {
	providers := []rdma.Provider{&shm.Provider{SocketDir: t.TempDir()}, tcp.Provider{}}
	c := startCluster(t, 1, 2, func(cfg *Config) { cfg.Providers, cfg.HostID = providers, "here" })
	c.leaderOf(1)
	c.leaderOf(2)
	return c, providers
}

// clientSession is a client's side of a session.
type clientSession struct {
	t      testing.TB
	access kvdv1.AccessClient
	stream grpc.ServerStreamingClient[kvdv1.SessionEvent]
	opened *kvdv1.SessionOpened
	close  func()
}

func openSession(t testing.TB, c *testCluster, namespace string) *clientSession {
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	s := &clientSession{t: t, access: kvdv1.NewAccessClient(c.conns[0]), close: cancel}
	var err error
	s.stream, err = s.access.OpenSession(ctx, &kvdv1.OpenSessionRequest{Namespace: namespace, LayoutVersion: layout.Version, ClientName: "test"})
	require.NoError(t, err)
	first, err := s.stream.Recv()
	require.NoError(t, err)
	s.opened = first.GetOpened()
	require.Len(t, s.opened.GetSessionId(), 16)
	return s
}

func (s *clientSession) regions(transport string) map[uint32]*kvdv1.Region {
	r, err := s.access.Regions(testContext(s.t), &kvdv1.RegionsRequest{SessionId: s.opened.GetSessionId(), Transport: transport})
	require.NoError(s.t, err)
	all := map[uint32]*kvdv1.Region{}
	for _, reg := range r.GetRegions() {
		all[reg.GetId()] = reg
	}
	return all
}

func (s *clientSession) dial(p rdma.Provider) (rdma.Conn, func(), error) {
	in, err := p.NewInitiator(rdma.InitiatorConfig{Logger: testLogger(s.t)})
	require.NoError(s.t, err)
	d, err := in.Prepare(testContext(s.t))
	require.NoError(s.t, err)
	r, err := s.access.Connect(testContext(s.t), &kvdv1.ConnectRequest{SessionId: s.opened.GetSessionId(), Transport: p.Name(), Offer: d.Offer()})
	if err != nil {
		d.Abort()
		return nil, nil, errors.Join(err, in.Close())
	}
	conn, err := d.Connect(testContext(s.t), r.GetAnswer())
	require.NoError(s.t, err)
	for _, reg := range s.regions(p.Name()) {
		require.NoError(s.t, conn.AddRegion(rdma.RegionID(reg.GetId()), reg.GetLength(), reg.GetAttr()))
	}
	return conn, func() {
		_ = conn.Close()
		require.NoError(s.t, in.Close())
	}, nil
}

func (s *clientSession) connect(p rdma.Provider) rdma.Conn {
	conn, done, err := s.dial(p)
	require.NoError(s.t, err)
	s.t.Cleanup(done)
	return conn
}

func read(conn rdma.Conn, region uint32, offset uint64, length int) ([]byte, error) {
	var b rdma.Batch
	b.Reset()
	dst := make([]byte, length)
	b.Reads = []rdma.Read{{Region: rdma.RegionID(region), Offset: offset, Dst: dst}}
	conn.Post(&b)
	if !b.Wait(context.Background(), 10*time.Second) {
		return nil, errors.New("the READ does not complete")
	}
	return dst, b.Err()
}

func readObject(t testing.TB, conn rdma.Conn, seed uint64, l *kvdv1.Location) layout.Object {
	b, err := read(conn, l.GetChunk(), l.GetOffset(), int(l.GetLength()))
	require.NoError(t, err)
	o, verdict := layout.DecodeObject(b, seed, layout.Place{Chunk: l.GetChunk(), Offset: l.GetOffset()})
	require.Equal(t, layout.Valid, verdict)
	require.Equal(t, layout.StateLive, o.State)
	return o
}

// A session gives what it is for: records, tables and objects of its namespace. When
// its stream ends, reading ends too.
func TestSessionLifetime(t *testing.T) {
	c, providers := served(t)
	w, err := c.put("key", "value", nil)
	require.NoError(t, err)
	for _, p := range providers {
		t.Run(p.Name(), func(t *testing.T) {
			s := openSession(t, c, "")
			require.Equal(t, []string{"shm", "tcp"}, s.opened.GetTransports())
			require.Equal(t, "here", s.opened.GetHostId())
			conn := s.connect(p)
			routes, err := s.access.Routes(testContext(t), &kvdv1.RoutesRequest{SessionId: s.opened.GetSessionId()})
			require.NoError(t, err)
			require.Len(t, routes.GetRoutes(), 2)
			for _, r := range routes.GetRoutes() {
				line, err := read(conn, 0, uint64(r.GetLocal().GetSlot())*layout.RecordSize, layout.RecordSize)
				require.NoError(t, err)
				rec, ok := layout.DecodeRecord(line)
				require.True(t, ok)
				require.EqualValues(t, r.GetShard(), rec.Shard)
				require.NotZero(t, rec.ServedTerm)
				require.Equal(t, s.opened.GetBootId(), rec.BootID)
			}
			o := readObject(t, conn, s.opened.GetHashSeed(), w.GetLocation())
			require.Equal(t, "key=value", string(o.Key)+"="+string(o.Value))
			_, err = read(conn, w.GetLocation().GetChunk()+40, 0, 8)
			require.Error(t, err, "no such region")

			s.close()
			eventually(t, "READs fail", func() bool {
				_, err := read(conn, 0, 0, layout.RecordSize)
				return err != nil
			})
			eventually(t, "the connection has ended at the node", func() bool {
				return c.nodes[0].export.stats()[p.Name()].Connections == 0
			})
			_, err = s.access.Regions(testContext(t), &kvdv1.RegionsRequest{SessionId: s.opened.GetSessionId(), Transport: p.Name()})
			requireReason(t, err, kvdv1.ErrorDetail_REASON_SESSION_GONE)
		})
	}
}

// A connection of one namespace never shows the memory of another, though the numbers
// are the same.
func TestNamespacesAreApart(t *testing.T) {
	c, providers := served(t)
	ctx := testContext(t)
	cluster := kvdv1.NewClusterClient(c.conns[0])
	r, err := cluster.CreateNamespace(ctx, &kvdv1.CreateNamespaceRequest{Name: "b"})
	require.NoError(t, err)
	b := r.GetNamespace().GetId()
	put := func(namespace uint32, key, value string) *kvdv1.Location {
		w, err := c.kv(0).Put(ctx, &kvdv1.PutRequest{NamespaceId: namespace, Key: []byte(key), Value: []byte(value)})
		require.NoError(t, err)
		require.NotNil(t, w.GetLocation())
		return w.GetLocation()
	}
	atA, atB := put(1, "key", "of a"), put(b, "key", "of b")
	require.Equal(t, atA.GetChunk(), atB.GetChunk(), "the control: the same number")
	far := atB
	for i := 0; far.GetChunk() == atA.GetChunk(); i++ {
		far = put(b, fmt.Sprint("big", i), string(make([]byte, 500_000)))
	}
	for _, p := range providers {
		sa, sb := openSession(t, c, ""), openSession(t, c, "b")
		ca, cb := sa.connect(p), sb.connect(p)
		seed := sa.opened.GetHashSeed()
		require.Equal(t, "of a", string(readObject(t, ca, seed, atA).Value))
		require.Equal(t, "of b", string(readObject(t, cb, seed, atB).Value))
		require.NotContains(t, sa.regions(p.Name()), far.GetChunk())
		// Told of b's region by a friend, a's connection gets nothing out of it.
		reg := sb.regions(p.Name())[far.GetChunk()]
		_ = ca.AddRegion(rdma.RegionID(reg.GetId()), reg.GetLength(), reg.GetAttr())
		_, err := read(ca, far.GetChunk(), far.GetOffset(), int(far.GetLength()))
		require.Error(t, err, p.Name())
	}
}

// Who has no session gets nothing, and each refusal has its reason.
func TestAccessIsRefused(t *testing.T) {
	c, _ := served(t)
	ctx := testContext(t)
	cluster := kvdv1.NewClusterClient(c.conns[0])
	_, err := cluster.CreateNamespace(ctx, &kvdv1.CreateNamespaceRequest{Name: "quiet", TwoSidedOnly: true})
	require.NoError(t, err)
	s := openSession(t, c, "")
	guess := make([]byte, 16)
	_, _ = rand.Read(guess)
	for _, id := range [][]byte{nil, guess, s.opened.GetSessionId()[:15], append([]byte{}, append(s.opened.GetSessionId(), 0)...)} {
		_, err = s.access.Connect(ctx, &kvdv1.ConnectRequest{SessionId: id, Transport: "tcp"})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_SESSION_GONE)
		_, err = s.access.Regions(ctx, &kvdv1.RegionsRequest{SessionId: id, Transport: "tcp"})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_SESSION_GONE)
		_, err = s.access.Routes(ctx, &kvdv1.RoutesRequest{SessionId: id})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_SESSION_GONE)
	}
	_, err = s.access.Connect(ctx, &kvdv1.ConnectRequest{SessionId: s.opened.GetSessionId(), Transport: "pigeon"})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	for _, transport := range s.opened.GetTransports() {
		_, err = s.access.Connect(ctx, &kvdv1.ConnectRequest{SessionId: s.opened.GetSessionId(), Transport: transport, Offer: []byte("garbage")})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, transport)
	}
	quiet := openSession(t, c, "quiet")
	require.False(t, quiet.opened.GetOneSided())
	_, err = quiet.access.Connect(ctx, &kvdv1.ConnectRequest{SessionId: quiet.opened.GetSessionId(), Transport: "tcp"})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_DENIED)
	_, err = quiet.access.Regions(ctx, &kvdv1.RegionsRequest{SessionId: quiet.opened.GetSessionId(), Transport: "tcp"})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_DENIED)
	for want, req := range map[kvdv1.ErrorDetail_Reason]*kvdv1.OpenSessionRequest{
		kvdv1.ErrorDetail_REASON_WRONG_CLUSTER:     {ClusterId: "x", LayoutVersion: layout.Version},
		kvdv1.ErrorDetail_REASON_LAYOUT_VERSION:    {LayoutVersion: layout.Version + 1},
		kvdv1.ErrorDetail_REASON_UNKNOWN_NAMESPACE: {LayoutVersion: layout.Version, Namespace: "nowhere"},
	} {
		stream, err := s.access.OpenSession(ctx, req)
		require.NoError(t, err)
		_, err = stream.Recv()
		requireReason(t, err, want)
	}
	// Shards that do not exist have no route.
	routes, err := s.access.Routes(ctx, &kvdv1.RoutesRequest{SessionId: s.opened.GetSessionId(), Shards: []uint32{0, 1, 3, ^uint32(0)}})
	require.NoError(t, err)
	require.Len(t, routes.GetRoutes(), 1)
	// Unknown regions are left out.
	regs, err := s.access.Regions(ctx, &kvdv1.RegionsRequest{SessionId: s.opened.GetSessionId(), Transport: "tcp", Regions: []uint32{0, 99}})
	require.NoError(t, err)
	require.Len(t, regs.GetRegions(), 1)
	// What one call may ask for is bounded, and what a node keeps of it.
	_, err = s.access.Routes(ctx, &kvdv1.RoutesRequest{SessionId: s.opened.GetSessionId(), Shards: make([]uint32, maxRoutesAsked+1)})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	_, err = s.access.Regions(ctx, &kvdv1.RegionsRequest{SessionId: s.opened.GetSessionId(), Transport: "tcp", Regions: make([]uint32, maxRegionsAsked+1)})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	_, err = cluster.RotateKeys(ctx, &kvdv1.RotateKeysRequest{Namespace: strings.Repeat("x", maxNamespaceName+1)})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	stream, err := s.access.OpenSession(ctx, &kvdv1.OpenSessionRequest{LayoutVersion: layout.Version, ClientName: strings.Repeat("x", maxClientName+1)})
	require.NoError(t, err)
	_, err = stream.Recv()
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
}

// heldEndpoint closes when it is let.
type heldEndpoint struct {
	closing *sync.WaitGroup
	let     chan struct{}
	done    chan struct{}
}

func (e *heldEndpoint) Done() <-chan struct{} { return e.done }

func (e *heldEndpoint) Close() error {
	e.closing.Done()
	<-e.let
	close(e.done)
	return nil
}

// What a revoked token had open is awaited to its last connection, and these are closed
// side by side.
func TestEndIsAwaited(t *testing.T) {
	all := newSessions()
	s, err := all.open("x", nil, &kvdv1.NamespaceInfo{})
	require.NoError(t, err)
	var closing sync.WaitGroup
	let := make(chan struct{})
	var eps []*heldEndpoint
	for range 3 {
		closing.Add(1)
		ep := &heldEndpoint{closing: &closing, let: let, done: make(chan struct{})}
		require.NoError(t, s.reserve())
		require.True(t, s.add(ep))
		eps = append(eps, ep)
	}
	go all.close(s)
	closing.Wait()
	_, err = all.get([]byte(s.id), nil)
	requireReason(t, err, kvdv1.ErrorDetail_REASON_SESSION_GONE)
	over, cancel := context.WithCancel(context.Background())
	cancel()
	require.ErrorIs(t, all.awaitOwner(over, ""), context.Canceled)
	close(let)
	require.NoError(t, all.awaitOwner(testContext(t), ""))
	for _, ep := range eps {
		select {
		case <-ep.Done():
		default:
			t.Error("a connection is still open")
		}
	}
}

// The limits hold whatever a client does, and what ended makes room.
func TestAccessLimits(t *testing.T) {
	all := newSessions()
	s, err := all.open("x", nil, &kvdv1.NamespaceInfo{})
	require.NoError(t, err)
	for range maxConnections {
		require.NoError(t, s.reserve())
	}
	requireReason(t, s.reserve(), kvdv1.ErrorDetail_REASON_EXHAUSTED)
	s.giveBack()
	require.NoError(t, s.reserve())
	for range maxSessions - 1 {
		_, err := all.open("x", nil, s.namespace)
		require.NoError(t, err)
	}
	_, err = all.open("x", nil, s.namespace)
	requireReason(t, err, kvdv1.ErrorDetail_REASON_EXHAUSTED)
	all.close(s)
	requireReason(t, s.reserve(), kvdv1.ErrorDetail_REASON_SESSION_GONE)
	require.False(t, s.add(nil))
	_, err = all.open("x", nil, s.namespace)
	require.NoError(t, err)
}

// A node that stops tells its sessions, and nothing can be read from it afterwards.
func TestStopEndsSessions(t *testing.T) {
	c, providers := served(t)
	s := openSession(t, c, "")
	var conns []rdma.Conn
	for _, p := range providers {
		conns = append(conns, s.connect(p))
	}
	began := time.Now()
	c.stopNode(0)
	requirePrompt(t, time.Since(began))
	ev, err := s.stream.Recv()
	require.NoError(t, err)
	require.NotEmpty(t, ev.GetClosing().GetReason())
	_, err = s.stream.Recv()
	require.ErrorIs(t, err, io.EOF)
	for _, conn := range conns {
		eventually(t, "READs fail", func() bool {
			_, err := read(conn, 0, 0, layout.RecordSize)
			return err != nil
		})
	}
}

// Hundreds of sessions that come and go leave nothing behind.
func TestSessionsLeaveNothing(t *testing.T) {
	c, providers := served(t)
	one := func(i int) error {
		s := openSession(t, c, "")
		conn, done, err := s.dial(providers[i%2])
		if err != nil {
			return err
		}
		_, err = read(conn, 0, 0, layout.RecordSize)
		if i%3 == 0 {
			done() // the client's end first
			s.close()
		} else {
			s.close()
			done()
		}
		return err
	}
	require.NoError(t, one(0))
	require.NoError(t, one(1))
	n := c.nodes[0]
	quiet := func() bool {
		for _, st := range n.export.stats() {
			if st.Connections != 0 {
				return false
			}
		}
		return n.sessions.count() == 0
	}
	eventually(t, "all gone", quiet)
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	var g errgroup.Group
	g.SetLimit(8)
	for i := range 300 {
		g.Go(func() error { return one(i) })
	}
	require.NoError(t, g.Wait())
	eventually(t, "all gone again", quiet)
	eventually(t, "goroutines", func() bool { return runtime.NumGoroutine() <= goroutines+8 })
	eventually(t, "files", func() bool { return openFiles(t) <= files+8 })
}

func openFiles(t testing.TB) int {
	all, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(all)
}
