package server

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/layout"
)

// openTopology opens a session with a node that is told of changes.
func openTopology(t testing.TB, c *testCluster, node int) *clientSession {
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	s := &clientSession{t: t, access: kvdv1.NewAccessClient(c.conns[node]), close: cancel}
	var err error
	s.stream, err = s.access.OpenSession(ctx, &kvdv1.OpenSessionRequest{LayoutVersion: layout.Version, Topology: true})
	require.NoError(t, err)
	first, err := s.stream.Recv()
	require.NoError(t, err)
	s.opened = first.GetOpened()
	return s
}

// untilTold reads the session's stream until something is told that f accepts.
func (s *clientSession) untilTold(f func(*kvdv1.Topology) bool) *kvdv1.Topology {
	for {
		e, err := s.stream.Recv()
		require.NoError(s.t, err)
		if t := e.GetTopology(); t != nil && f(t) {
			return t
		}
	}
}

// Every node tells of a new leader; the leader itself with a record that shows that it
// serves, which is what clients may read by.
func TestTopologyTellsOfLeaders(t *testing.T) {
	c := startCluster(t, 3, 2)
	was := c.leaderOf(1)
	to := (was + 1) % 3
	var all []*clientSession
	for i := range c.nodes {
		all = append(all, openTopology(t, c, i))
	}
	_, err := kvdv1.NewClusterClient(c.conns[was]).TransferLeader(testContext(t), &kvdv1.TransferLeaderRequest{Shard: 1, ToNode: uint64(to + 1)})
	require.NoError(t, err)
	for i, s := range all {
		s.untilTold(func(e *kvdv1.Topology) bool {
			for _, r := range e.GetRoutes() {
				if r.GetShard() != 1 || r.GetLeaderNode() != uint64(to+1) {
					continue
				}
				rec, ok := layout.DecodeRecord(r.GetLocal().GetRecord())
				require.True(t, ok)
				require.Equal(t, uint64(i+1), rec.Replica)
				require.Equal(t, s.opened.GetBootId(), rec.BootID)
				require.Equal(t, []uint64{1, 2, 3}, r.GetVoters())
				if i != to || rec.ServedTerm != 0 {
					require.Equal(t, i == to, rec.ServedTerm != 0)
					return true
				}
			}
			return false
		})
	}
}

// Who joins is told of, with a version that only rises, and so are the replicas that move.
func TestTopologyTellsOfMembers(t *testing.T) {
	c := startAlone(t, 2)
	s := openTopology(t, c, 0)
	version := s.opened.GetMembersVersion()
	for want := 2; want <= 3; want++ {
		by := c.grow(c.nodes[0].Address())
		require.NoError(t, c.start(by))
		e := s.untilTold(func(e *kvdv1.Topology) bool {
			if e.GetMembersVersion() != 0 {
				require.Greater(t, e.GetMembersVersion(), version)
				version = e.GetMembersVersion()
			}
			return len(e.GetMembers()) == want
		})
		require.Equal(t, c.nodes[by].Address(), e.GetMembers()[want-1].GetAddress())
	}
	moved := map[uint32]bool{}
	s.untilTold(func(e *kvdv1.Topology) bool {
		for _, r := range e.GetRoutes() {
			moved[r.GetShard()] = len(r.GetVoters()) == 3 && len(r.GetVotersOutgoing()) == 0
		}
		return moved[1] && moved[2]
	})
	r, err := s.access.Routes(testContext(t), &kvdv1.RoutesRequest{SessionId: s.opened.GetSessionId()})
	require.NoError(t, err)
	require.GreaterOrEqual(t, r.GetMembersVersion(), version)
}

// A client that does not ask is told nothing: it may be too old to know what it is.
func TestTopologyUnasked(t *testing.T) {
	c := startCluster(t, 1, 1)
	c.leaderOf(1)
	s, asked := openSession(t, c, ""), openTopology(t, c, 0)
	c.nodes[0].topology.change(1)
	asked.untilTold(func(e *kvdv1.Topology) bool { return e.GetRoutes()[0].GetShard() == 1 })
	c.stopNode(0)
	e, err := s.stream.Recv()
	require.NoError(t, err)
	require.NotEmpty(t, e.GetClosing().GetReason(), "the first thing that it hears")
}

// change makes a shard look changed.
func (t *topology) change(number uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.seq++
	m := t.mu.routes[number]
	m.seq = t.mu.seq
	t.mu.routes[number] = m
	close(t.mu.changed)
	t.mu.changed = make(chan struct{})
}

// stuckStream is of a client that reads nothing.
type stuckStream struct {
	grpc.ServerStream
	ctx     context.Context
	sending chan *kvdv1.SessionEvent
	release chan struct{}
}

func (s *stuckStream) Context() context.Context { return s.ctx }
func (s *stuckStream) Send(e *kvdv1.SessionEvent) error {
	s.sending <- e
	<-s.release
	return nil
}

// A client that reads nothing of what it is told loses its rights all the same. What changed
// meanwhile is one event, however often it did.
func TestTopologyUnread(t *testing.T) {
	for name, end := range map[string]func(s *session, cancel func()){
		"evicted":          func(s *session, _ func()) { s.evict("its token was revoked") },
		"the call's end":   func(_ *session, cancel func()) { cancel() },
		"it reads at last": nil,
	} {
		t.Run(name, func(t *testing.T) {
			c := startCluster(t, 1, 2)
			c.leaderOf(1)
			c.leaderOf(2)
			n := c.nodes[0]
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			stream := &stuckStream{ctx: ctx, sending: make(chan *kvdv1.SessionEvent), release: make(chan struct{})}
			ns, err := n.findNamespace(ctx, DefaultNamespace)
			require.NoError(t, err)
			s, err := n.sessions.open("slow", nil, ns)
			require.NoError(t, err)
			_, _, told, _ := n.topology.since(0)
			why := make(chan string, 1)
			go func() { why <- n.serveSession(s, true, told, stream) }()
			n.topology.change(1)
			first := (<-stream.sending).GetTopology()
			require.Len(t, first.GetRoutes(), 1)
			for range 1000 {
				n.topology.change(1)
				n.topology.change(2)
			}
			if end == nil {
				stream.release <- struct{}{}
				require.Len(t, (<-stream.sending).GetTopology().GetRoutes(), 2)
				cancel()
			} else {
				end(s, cancel)
			}
			eventually(t, "it has no session", func() bool { return n.sessions.count() == 0 })
			require.True(t, s.isClosed())
			close(stream.release)
			if name == "evicted" {
				for {
					select {
					case <-stream.sending:
						continue
					case got := <-why:
						require.Equal(t, "its token was revoked", got)
					}
					break
				}
				return
			}
			select {
			case <-stream.sending: // what was left, or not
				require.Empty(t, <-why)
			case got := <-why:
				require.Empty(t, got)
			}
		})
	}
}
