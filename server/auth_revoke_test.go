package server

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/simnic"
	"github.com/kvd-io/kvd/rdma/tcp"
	"github.com/kvd-io/kvd/storage/layout"
)

// told is the system's clock with a time that the test sets.
type told struct {
	clock.Clock
	now *clock.Manual
}

func (c told) Now() time.Time { return c.now.Now() }

// TestEndOfToken: what a token has open ends with it, on every node: sessions, and with
// them connections, so that a READ fails; streams of writes; and calls are refused. What
// others have open stays.
func TestEndOfToken(t *testing.T) {
	fabric, err := simnic.New(simnic.Config{})
	require.NoError(t, err)
	t.Cleanup(fabric.Close)
	hosts, manual := 0, clock.NewManual(time.Unix(1_700_000_000, 0))
	g := startGuarded(t, 3, 2, func(c *Config) {
		hosts++
		c.Clock = told{clock.System, manual}
		c.Providers = []rdma.Provider{tcp.Provider{}, fabric.Host(fmt.Sprint("node", hosts))}
	})
	readers := map[string]rdma.Provider{"tcp": tcp.Provider{}, "simnic": fabric.Host("client")}
	g.namespace("a")
	for how, end := range map[string]func(token string){
		"revoked": func(token string) { g.revoke(token) },
		"expired": func(string) { manual.Advance(2 * time.Hour) },
	} {
		t.Run(how, func(t *testing.T) {
			ttl := time.Duration(0)
			if how == "expired" {
				ttl = time.Hour
			}
			token, other := g.token(ttl, "a:read,write"), g.token(0, "a:read,write")
			type opened struct {
				*clientSession
				conns []rdma.Conn
			}
			open := func(node int, token string) opened {
				eventually(t, "the token has come", func() bool {
					id, _ := sumOf(t, token)
					return g.nodes[node].tokens.find(id) != nil && g.nodes[node].namespaces.byName("a") != nil
				})
				c := &testCluster{t: t, conns: g.conns[node : node+1]}
				o := opened{clientSession: openSessionAs(t, c, "a", token)}
				for _, name := range o.opened.GetTransports() {
					conn := o.connect(readers[name])
					_, err := read(conn, 0, 0, layout.RecordSize)
					require.NoError(t, err)
					o.conns = append(o.conns, conn)
				}
				require.Len(t, o.conns, 2)
				return o
			}
			var mine, others []opened
			var streams []kvdv1.KV_WriteClient
			for i := range g.nodes {
				mine, others = append(mine, open(i, token)), append(others, open(i, other))
				w, err := g.kv(i).Write(as(testContext(t), token))
				require.NoError(t, err)
				_, err = w.Header()
				require.NoError(t, err)
				streams = append(streams, w)
			}
			end(token)
			for i, o := range mine {
				_, err := o.stream.Recv()
				requireReason(t, err, kvdv1.ErrorDetail_REASON_UNAUTHENTICATED)
				for _, conn := range o.conns {
					eventually(t, "READs fail", func() bool {
						_, err := read(conn, 0, 0, layout.RecordSize)
						return err != nil
					})
				}
				_, err = streams[i].Recv()
				requireReason(t, err, kvdv1.ErrorDetail_REASON_UNAUTHENTICATED)
				_, err = o.access.Connect(testContext(t), &kvdv1.ConnectRequest{SessionId: o.opened.GetSessionId(), Transport: "tcp"})
				requireReason(t, err, kvdv1.ErrorDetail_REASON_UNAUTHENTICATED)
				_, err = g.kv(i).Get(as(testContext(t), token), &kvdv1.GetRequest{NamespaceId: 2, Key: []byte("k")})
				requireReason(t, err, kvdv1.ErrorDetail_REASON_UNAUTHENTICATED)
				for _, conn := range others[i].conns {
					_, err := read(conn, 0, 0, layout.RecordSize)
					require.NoError(t, err, "another's connection")
				}
			}
			for i, n := range g.nodes {
				eventually(t, "only the others' connections are left", func() bool {
					for _, st := range n.export.stats() {
						if st.Connections != 1 {
							return false
						}
					}
					return n.sessions.count() == 1
				})
				others[i].close()
				eventually(t, "nothing is left", func() bool { return n.sessions.count() == 0 })
			}
			eventually(t, "its record is gone", func() bool {
				r, err := g.cluster(1).ListTokens(as(testContext(t), g.root), &kvdv1.ListTokensRequest{})
				require.NoError(t, err)
				id, _ := sumOf(t, token)
				for _, x := range r.GetTokens() {
					if x.GetId() == id {
						return false
					}
				}
				return len(r.GetTokens()) > 0
			})
		})
	}
}

// When RevokeToken has answered, nothing of the token's is open on the node that answered.
func TestRevokeWaits(t *testing.T) {
	g := startGuarded(t, 1, 1, func(c *Config) { c.Providers = []rdma.Provider{tcp.Provider{}} })
	for range 20 {
		token := g.token(0, "default:read")
		s := openSessionAs(t, g.testCluster, "", token)
		conn := s.connect(tcp.Provider{})
		g.revoke(token)
		require.Zero(t, g.nodes[0].sessions.count())
		_, err := read(conn, 0, 0, layout.RecordSize)
		require.Error(t, err)
	}
}

// A session is for the token that opened it; who may only write gets no memory; and what
// a node tells of itself depends on who asks.
func TestSessionIsItsOwners(t *testing.T) {
	g := startGuarded(t, 1, 1, func(c *Config) { c.Providers = []rdma.Provider{tcp.Provider{}} })
	g.namespace("a")
	ctx := testContext(t)
	reads, alsoReads, writes := g.token(0, "a:read"), g.token(0, "a:read"), g.token(0, "a:write")
	s := openSessionAs(t, g.testCluster, "a", reads)
	require.True(t, s.opened.GetOneSided())
	require.Equal(t, []string{"tcp"}, s.opened.GetTransports())
	access := kvdv1.NewAccessClient(g.conns[0])
	_, err := access.Routes(as(ctx, alsoReads), &kvdv1.RoutesRequest{SessionId: s.opened.GetSessionId()})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_SESSION_GONE)
	_, err = access.Routes(as(ctx, g.root), &kvdv1.RoutesRequest{SessionId: s.opened.GetSessionId()})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_SESSION_GONE)

	w := openSessionAs(t, g.testCluster, "a", writes)
	require.False(t, w.opened.GetOneSided())
	require.Empty(t, w.opened.GetTransports())
	_, err = w.access.Regions(ctx, &kvdv1.RegionsRequest{SessionId: w.opened.GetSessionId(), Transport: "tcp"})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_DENIED)
	_, err = w.access.Connect(ctx, &kvdv1.ConnectRequest{SessionId: w.opened.GetSessionId(), Transport: "tcp"})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_DENIED)
	_, err = w.access.Routes(ctx, &kvdv1.RoutesRequest{SessionId: w.opened.GetSessionId()})
	require.NoError(t, err, "a writer finds the leader")

	all, err := g.cluster(0).ListNamespaces(as(ctx, reads), &kvdv1.ListNamespacesRequest{})
	require.NoError(t, err)
	require.Len(t, all.GetNamespaces(), 1)
	require.Equal(t, "a", all.GetNamespaces()[0].GetName())
	all, err = g.cluster(0).ListNamespaces(as(ctx, g.root), &kvdv1.ListNamespacesRequest{})
	require.NoError(t, err)
	require.Len(t, all.GetNamespaces(), 2)

	st, err := g.cluster(0).Status(as(ctx, reads), &kvdv1.StatusRequest{})
	require.NoError(t, err)
	require.NotEmpty(t, st.GetMembers())
	require.Empty(t, st.GetShards())
	require.Nil(t, st.GetArena())
	require.Zero(t, st.GetIncarnation(), "with it a peer could be played")
	st, err = g.cluster(0).Status(as(ctx, g.root), &kvdv1.StatusRequest{})
	require.NoError(t, err)
	require.NotEmpty(t, st.GetShards())
}

// A writer is its owner's: under another's id nothing is written, and nothing of what
// the owner did can be learnt or taken for done.
func TestWriterIsItsOwners(t *testing.T) {
	g := startGuarded(t, 1, 1)
	ctx := testContext(t)
	mine, other := g.token(0, "default:read,write"), g.token(0, "default:write")
	w, err := g.kv(0).OpenWriter(as(ctx, mine), &kvdv1.OpenWriterRequest{Shard: 1})
	require.NoError(t, err)
	put := func(token string, seq uint64, value string) kvdv1.WriteOutcome {
		r, err := g.kv(0).Put(as(ctx, token), &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("k"), Value: []byte(value),
			Writer: &kvdv1.WriterStamp{WriterId: w.GetWriterId(), Sequence: seq}})
		require.NoError(t, err)
		return r.GetOutcome()
	}
	require.Equal(t, kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, put(mine, 1, "one"))
	for seq := uint64(1); seq < 4; seq++ {
		require.Equal(t, kvdv1.WriteOutcome_WRITE_OUTCOME_WRITER_EXPIRED, put(other, seq, "forged"))
	}
	require.Equal(t, kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, put(mine, 2, "two"))
	g.stopNode(0)
	require.NoError(t, g.start(0))
	g.leaderOf(1)
	require.Equal(t, kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, put(mine, 3, "three"), "it survives a restart, and so do tokens")
	require.Equal(t, kvdv1.WriteOutcome_WRITE_OUTCOME_WRITER_EXPIRED, put(other, 4, "forged"))
	v, err := g.kv(0).Get(as(ctx, mine), &kvdv1.GetRequest{NamespaceId: 1, Key: []byte("k")})
	require.NoError(t, err)
	require.Equal(t, "three", string(v.GetValue()))
}

// A stream of writes asks for each of them: a right in one namespace is none in another.
func TestFramesAreJudgedOneByOne(t *testing.T) {
	g := startGuarded(t, 1, 1)
	a, b := g.namespace("a"), g.namespace("b")
	w, err := g.kv(0).Write(as(testContext(t), g.token(0, "a:write", "b:read")))
	require.NoError(t, err)
	for id, ns := range map[uint64]uint32{1: a, 2: b, 3: 1, 4: 77} {
		require.NoError(t, w.Send(&kvdv1.WriteFrame{Id: id, Op: &kvdv1.WriteFrame_Delete{Delete: &kvdv1.DeleteRequest{NamespaceId: ns, Key: []byte("k")}}}))
		r, err := w.Recv()
		require.NoError(t, err)
		require.Equal(t, ns != a, r.GetDetail().GetReason() == kvdv1.ErrorDetail_REASON_DENIED, "namespace %d: %v", ns, r)
	}
	require.NoError(t, w.CloseSend())
	_, err = w.Recv()
	require.ErrorIs(t, err, io.EOF)
}

// Rotating ends the namespace's sessions and connections, and no others'.
func TestRotateKeysEndsSessions(t *testing.T) {
	c, _ := served(t)
	cluster := kvdv1.NewClusterClient(c.conns[0])
	_, err := cluster.CreateNamespace(testContext(t), &kvdv1.CreateNamespaceRequest{Name: "b"})
	require.NoError(t, err)
	w, err := c.put("key", "value", nil)
	require.NoError(t, err)
	s, other := openSession(t, c, ""), openSession(t, c, "b")
	conn, otherConn := s.connect(tcp.Provider{}), other.connect(tcp.Provider{})
	seed := s.opened.GetHashSeed()
	require.Equal(t, "value", string(readObject(t, conn, seed, w.GetLocation()).Value))
	r, err := cluster.RotateKeys(testContext(t), &kvdv1.RotateKeysRequest{})
	require.NoError(t, err)
	require.EqualValues(t, 1, r.GetSessions())
	ev, err := s.stream.Recv()
	require.NoError(t, err)
	require.Contains(t, ev.GetClosing().GetReason(), "rotated")
	_, err = s.stream.Recv()
	require.ErrorIs(t, err, io.EOF)
	_, err = read(conn, 0, 0, layout.RecordSize)
	require.Error(t, err)
	_, err = read(otherConn, 0, 0, layout.RecordSize)
	require.NoError(t, err)
	again := openSession(t, c, "")
	require.Equal(t, "value", string(readObject(t, again.connect(tcp.Provider{}), seed, w.GetLocation()).Value))
	_, err = cluster.RotateKeys(testContext(t), &kvdv1.RotateKeysRequest{Namespace: "nowhere"})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_UNKNOWN_NAMESPACE)
}

// Between the nodes: a call that one passes on is taken, and a message stream of somebody
// without the secret is not, whatever identity it claims.
func TestPeersKnowEachOther(t *testing.T) {
	g := startGuarded(t, 3, 1)
	for i := range g.nodes { // two of them pass it on
		_, err := g.cluster(i).CreateNamespace(as(testContext(t), g.root), &kvdv1.CreateNamespaceRequest{Name: fmt.Sprint("by", i)})
		require.NoError(t, err)
	}
	n := g.nodes[0]
	claim := g.nodes[1].self()
	for name, ctx := range map[string]context.Context{"nobody": testContext(t), "operator": as(testContext(t), g.root)} {
		s, err := kvdv1.NewPeerClient(g.conns[0]).Raft(ctx)
		require.NoError(t, err)
		_ = s.Send(&kvdv1.RaftBatch{From: claim, ToIncarnation: n.identity.Load().incarnation()})
		_, err = s.CloseAndRecv()
		requireReason(t, err, kvdv1.ErrorDetail_REASON_DENIED, name)
	}
}

// Whoever guesses does not fill the disk with log lines.
func TestRefusalsAreLoggedSeldom(t *testing.T) {
	var r refusals
	now := time.Unix(1000, 0)
	_, log := r.note(now)
	require.True(t, log)
	for range 500 {
		_, log = r.note(now.Add(refusalPause / 2))
		require.False(t, log)
	}
	skipped, log := r.note(now.Add(refusalPause))
	require.True(t, log)
	require.EqualValues(t, 500, skipped)
	skipped, log = r.note(now.Add(2 * refusalPause))
	require.True(t, log)
	require.Zero(t, skipped)
}
