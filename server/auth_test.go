package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/tcp"
	"github.com/kvd-io/kvd/storage/layout"
)

const peerSecret = "a secret of the nodes, for tests, of more than 32 bytes"

// secretFile has mode 0600.
func secretFile(t testing.TB, content string) string {
	file := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(file, []byte(content+"\n"), 0o600))
	return file
}

// tokenOf is a token that tests know the secret of.
func tokenOf(id, secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return "kvd_" + id + "_" + hex.EncodeToString(sum[:])
}

func sumOf(t testing.TB, token string) (id string, sum []byte) {
	id, secret, err := parseToken(token)
	require.NoError(t, err)
	s := sha256.Sum256(secret[:])
	return id, s[:]
}

// as makes calls with a token.
func as(ctx context.Context, token string) context.Context {
	if token == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, authorizationKey, "Bearer "+token)
}

// guarded is a cluster with tokens, and the root's.
type guarded struct {
	*testCluster
	root string
	made int
}

func startGuarded(t testing.TB, nodes int, shards uint32, change ...func(*Config)) *guarded {
	g := &guarded{root: tokenOf(rootTokenID, "root")}
	rootFile, peerFile := secretFile(t, g.root), secretFile(t, peerSecret)
	auth := func(c *Config) {
		c.Auth = AuthConfig{Mode: AuthTokens, RootTokenFile: rootFile}
		if nodes > 1 {
			c.Auth.PeerSecretFile = peerFile
		}
	}
	g.testCluster = startCluster(t, nodes, shards, append([]func(*Config){auth}, change...)...)
	for shard := range shards + 1 {
		eventually(t, "a leader", func() bool {
			return slices.ContainsFunc(g.nodes, func(n *Node) bool {
				st := n.host.Group(raft.GroupID(shard))
				return st != nil && st.Status().Leading && (shard == 0 || n.shard(shard).servedTerm() != 0)
			})
		})
	}
	return g
}

func (g *guarded) cluster(i int) kvdv1.ClusterClient { return kvdv1.NewClusterClient(g.conns[i]) }

func (g *guarded) namespace(name string) uint32 {
	r, err := g.cluster(0).CreateNamespace(as(testContext(g.t), g.root), &kvdv1.CreateNamespaceRequest{Name: name})
	require.NoError(g.t, err)
	return r.GetNamespace().GetId()
}

// token makes one with these grants, such as "a:read,write".
func (g *guarded) token(ttl time.Duration, grants ...string) string {
	g.made++
	token := tokenOf(fmt.Sprintf("%016x", g.made), fmt.Sprint("secret ", g.made))
	id, sum := sumOf(g.t, token)
	req := &kvdv1.CreateTokenRequest{Id: id, Name: fmt.Sprintf("token-%d", g.made), SecretSha256: sum, TtlMs: uint64(ttl / time.Millisecond)}
	for _, text := range grants {
		ns, rights, _ := strings.Cut(text, ":")
		grant := &kvdv1.Grant{Namespace: ns}
		for _, r := range strings.Split(rights, ",") {
			switch r {
			case "read":
				grant.Read = true
			case "write":
				grant.Write = true
			case "admin":
				grant.Admin = true
			}
		}
		req.Grants = append(req.Grants, grant)
	}
	_, err := g.cluster(0).CreateToken(as(testContext(g.t), g.root), req)
	require.NoError(g.t, err)
	return token
}

func (g *guarded) revoke(token string) {
	id, _ := sumOf(g.t, token)
	_, err := g.cluster(0).RevokeToken(as(testContext(g.t), g.root), &kvdv1.RevokeTokenRequest{Id: id})
	require.NoError(g.t, err)
}

// Every method of every service has a rule, and every rule a method.
func TestEveryMethodHasARule(t *testing.T) {
	c := startCluster(t, 1, 1)
	served := map[string]bool{}
	for service, info := range c.nodes[0].grpc.GetServiceInfo() {
		for _, m := range info.Methods {
			method := "/" + service + "/" + m.Name
			served[method] = true
			require.Contains(t, rules, method, "who may call it? give it a rule in auth.go and a line in TestWhoMay")
			require.Contains(t, whoMay, method, "give it a line in TestWhoMay")
		}
	}
	for method, r := range rules {
		require.True(t, served[method], "%s has a rule and is not served", method)
		require.NotZero(t, r.need, method)
	}
}

// callers of TestWhoMay, by name. The namespaces are "a" and "b"; requests are about a.
const (
	whoNobody   = "nobody"
	whoWrong    = "wrong secret"
	whoGarbled  = "garbled"
	whoExpired  = "expired"
	whoRevoked  = "revoked"
	whoReads    = "a:read"
	whoWrites   = "a:write"
	whoAdmin    = "a:admin"
	whoElse     = "b:read,write,admin"
	whoReadsAll = "*:read"
	whoOperates = "*:admin"
	whoRoot     = "root"
	whoNode     = "node"
	whoForwards = "node that forwards"
)

var (
	known     = []string{whoReads, whoWrites, whoAdmin, whoElse, whoReadsAll, whoOperates, whoRoot}
	readers   = []string{whoReads, whoAdmin, whoReadsAll, whoOperates, whoRoot}
	writers_  = []string{whoWrites, whoAdmin, whoOperates, whoRoot}
	operators = []string{whoOperates, whoRoot}
	everyone  = append([]string{whoNobody, whoWrong, whoGarbled, whoExpired, whoRevoked, whoNode, whoForwards}, known...)
)

// whoMay lists, for each method, those who are not refused.
var whoMay = map[string][]string{
	kvdv1.KV_Get_FullMethodName:        readers,
	kvdv1.KV_List_FullMethodName:       readers,
	kvdv1.KV_Put_FullMethodName:        writers_,
	kvdv1.KV_Delete_FullMethodName:     writers_,
	kvdv1.KV_Write_FullMethodName:      writers_,
	kvdv1.KV_OpenWriter_FullMethodName: append([]string{whoElse}, writers_...),

	kvdv1.Access_OpenSession_FullMethodName: append([]string{whoWrites}, readers...),
	// The session of these is the reader's.
	kvdv1.Access_Connect_FullMethodName: {whoReads},
	kvdv1.Access_Regions_FullMethodName: {whoReads},
	kvdv1.Access_Routes_FullMethodName:  {whoReads},

	kvdv1.Cluster_Status_FullMethodName:          known,
	kvdv1.Cluster_ListNamespaces_FullMethodName:  append([]string{whoForwards}, known...),
	kvdv1.Cluster_CreateNamespace_FullMethodName: append([]string{whoForwards}, operators...),
	kvdv1.Cluster_TransferLeader_FullMethodName:  append([]string{whoForwards}, operators...),
	kvdv1.Cluster_CreateToken_FullMethodName:     append([]string{whoForwards}, operators...),
	kvdv1.Cluster_ListTokens_FullMethodName:      append([]string{whoForwards}, operators...),
	kvdv1.Cluster_RevokeToken_FullMethodName:     append([]string{whoForwards}, operators...),
	kvdv1.Cluster_Members_FullMethodName:         append([]string{whoForwards}, operators...),
	kvdv1.Cluster_Drain_FullMethodName:           append([]string{whoForwards}, operators...),
	kvdv1.Cluster_Decommission_FullMethodName:    append([]string{whoForwards}, operators...),
	kvdv1.Cluster_Rebalance_FullMethodName:       append([]string{whoForwards}, operators...),
	kvdv1.Cluster_RotateKeys_FullMethodName:      {whoAdmin, whoOperates, whoRoot},

	kvdv1.Backup_OpenExport_FullMethodName:    operators,
	kvdv1.Backup_ReadExport_FullMethodName:    operators,
	kvdv1.Backup_CloseExport_FullMethodName:   operators,
	kvdv1.Backup_Import_FullMethodName:        operators,
	kvdv1.Backup_ImportCluster_FullMethodName: operators,

	kvdv1.Operator_Shards_FullMethodName:  operators,
	kvdv1.Operator_Explain_FullMethodName: readers,

	kvdv1.Gossip_Contact_FullMethodName:  {whoNode, whoForwards},
	kvdv1.Gossip_Liveness_FullMethodName: operators,

	kvdv1.Peer_Hello_FullMethodName:            {whoNode, whoForwards},
	kvdv1.Peer_Adopt_FullMethodName:            {whoNode, whoForwards},
	kvdv1.Peer_Activate_FullMethodName:         {whoNode, whoForwards},
	kvdv1.Peer_Raft_FullMethodName:             {whoNode, whoForwards},
	kvdv1.Peer_Snapshot_FullMethodName:         {whoNode, whoForwards},
	kvdv1.Peer_SnapshotProgress_FullMethodName: {whoNode, whoForwards},
	kvdv1.Peer_Announce_FullMethodName:         {whoNode, whoForwards},
	kvdv1.Peer_Replica_FullMethodName:          {whoNode, whoForwards},
	kvdv1.Peer_Load_FullMethodName:             {whoNode, whoForwards},
	kvdv1.Peer_Configuration_FullMethodName:    {whoNode, whoForwards},
	kvdv1.Peer_Join_FullMethodName:             {whoNode, whoForwards},

	healthpb.Health_Check_FullMethodName: everyone,
	healthpb.Health_Watch_FullMethodName: everyone,
	healthpb.Health_List_FullMethodName:  everyone,

	"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo":      known,
	"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": known,
}

// TestWhoMay calls every method as everyone. A refusal has the reason and the code that
// clients take for one, and does not tell whether the key is there.
func TestWhoMay(t *testing.T) {
	g := startGuarded(t, 1, 1, func(c *Config) {
		c.Providers = []rdma.Provider{tcp.Provider{}}
		c.Auth.PeerSecretFile = secretFile(t, peerSecret)
	})
	a := g.namespace("a")
	g.namespace("b")
	tokens := map[string]string{
		whoNobody: "", whoGarbled: "kvd_0000000000000001_x", whoRoot: g.root, whoNode: "", whoForwards: "",
		whoWrong: tokenOf(rootTokenID, "wrong"),
	}
	for _, grants := range []string{whoReads, whoWrites, whoAdmin, whoElse, whoReadsAll, whoOperates} {
		tokens[grants] = g.token(0, grants)
	}
	tokens[whoRevoked] = g.token(0, whoOperates)
	g.revoke(tokens[whoRevoked])
	tokens[whoExpired] = g.token(time.Millisecond, whoOperates)
	proof := AuthConfig{PeerSecretFile: g.cfgs[0].Auth.PeerSecretFile}
	shown, err := proof.loadPeerProof()
	require.NoError(t, err)
	session := openSessionAs(t, g.testCluster, "a", tokens[whoReads])

	for method, allowed := range whoMay {
		for _, who := range everyone {
			ctx := as(testContext(t), tokens[who])
			if who == whoNode || who == whoForwards {
				ctx = metadata.AppendToOutgoingContext(ctx, peerProofKey, shown)
			}
			if who == whoForwards {
				ctx = metadata.AppendToOutgoingContext(ctx, forwardedKey, "1")
			}
			if rules[method].need == needSession {
				// A new one: those who may rotate the keys end it.
				session = openSessionAs(t, g.testCluster, "a", tokens[whoReads])
			}
			for _, key := range []string{"present", "absent"} {
				err := callMethod(ctx, g.conns[0], method, a, key, session)
				why := reasonOf(err)
				refused := why == kvdv1.ErrorDetail_REASON_DENIED || why == kvdv1.ErrorDetail_REASON_UNAUTHENTICATED || why == kvdv1.ErrorDetail_REASON_SESSION_GONE
				require.Equal(t, slices.Contains(allowed, who), !refused, "%s as %s: %v", method, who, err)
				if !refused {
					continue
				}
				want := kvdv1.ErrorDetail_REASON_DENIED
				switch {
				case slices.Contains([]string{whoNobody, whoWrong, whoGarbled, whoExpired, whoRevoked, whoNode, whoForwards}, who) && rules[method].need != needPeer && rules[method].need != needJoiner:
					want = kvdv1.ErrorDetail_REASON_UNAUTHENTICATED
				case rules[method].need == needSession:
					want = kvdv1.ErrorDetail_REASON_SESSION_GONE
				}
				if who != whoForwards {
					requireReason(t, err, want, method, who)
				}
				require.NotContains(t, err.Error(), key)
				if token := tokens[who]; len(token) > 20 {
					require.NotContains(t, err.Error(), token[len(token)-20:], "a refusal repeats the secret")
				}
			}
		}
	}
}

func openSessionAs(t testing.TB, c *testCluster, namespace, token string) *clientSession {
	ctx, cancel := context.WithCancel(as(context.Background(), token))
	t.Cleanup(cancel)
	s := &clientSession{t: t, access: accessAs{kvdv1.NewAccessClient(c.conns[0]), token}, close: cancel}
	var err error
	s.stream, err = kvdv1.NewAccessClient(c.conns[0]).OpenSession(ctx, &kvdv1.OpenSessionRequest{Namespace: namespace, LayoutVersion: layout.Version})
	require.NoError(t, err)
	first, err := s.stream.Recv()
	require.NoError(t, err)
	s.opened = first.GetOpened()
	return s
}

// accessAs calls with a token.
type accessAs struct {
	kvdv1.AccessClient
	token string
}

func (a accessAs) Connect(ctx context.Context, req *kvdv1.ConnectRequest, o ...grpc.CallOption) (*kvdv1.ConnectResponse, error) {
	return a.AccessClient.Connect(as(ctx, a.token), req, o...)
}

func (a accessAs) Regions(ctx context.Context, req *kvdv1.RegionsRequest, o ...grpc.CallOption) (*kvdv1.RegionsResponse, error) {
	return a.AccessClient.Regions(as(ctx, a.token), req, o...)
}

func (a accessAs) Routes(ctx context.Context, req *kvdv1.RoutesRequest, o ...grpc.CallOption) (*kvdv1.RoutesResponse, error) {
	return a.AccessClient.Routes(as(ctx, a.token), req, o...)
}

// callMethod makes one call, of a kind that changes nothing that matters here. Streams
// are opened, given one message and read once.
func callMethod(ctx context.Context, conn *grpc.ClientConn, method string, namespace uint32, key string, s *clientSession) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	kv, access, cluster, health := kvdv1.NewKVClient(conn), kvdv1.NewAccessClient(conn), kvdv1.NewClusterClient(conn), healthpb.NewHealthClient(conn)
	nodes := kvdv1.NewPeerClient(conn)
	k, id := []byte(key), s.opened.GetSessionId()
	var err error
	switch method {
	case kvdv1.KV_Get_FullMethodName:
		_, err = kv.Get(ctx, &kvdv1.GetRequest{NamespaceId: namespace, Key: k})
	case kvdv1.KV_List_FullMethodName:
		_, err = kv.List(ctx, &kvdv1.ListRequest{NamespaceId: namespace, Shard: 1})
	case kvdv1.KV_Put_FullMethodName:
		_, err = kv.Put(ctx, &kvdv1.PutRequest{NamespaceId: namespace, Key: []byte("present"), Value: k})
	case kvdv1.KV_Delete_FullMethodName:
		_, err = kv.Delete(ctx, &kvdv1.DeleteRequest{NamespaceId: namespace, Key: []byte("absent")})
	case kvdv1.KV_Write_FullMethodName:
		w, werr := kv.Write(ctx)
		if werr != nil {
			return werr
		}
		_ = w.Send(&kvdv1.WriteFrame{Id: 1, Op: &kvdv1.WriteFrame_Put{Put: &kvdv1.PutRequest{NamespaceId: namespace, Key: k, Value: k}}})
		r, rerr := w.Recv()
		if rerr != nil {
			return rerr
		}
		if r.GetDetail() != nil {
			err = failDetail(r.GetDetail(), "%s", r.GetMessage())
		}
	case kvdv1.KV_OpenWriter_FullMethodName:
		_, err = kv.OpenWriter(ctx, &kvdv1.OpenWriterRequest{Shard: 1})
	case kvdv1.Access_OpenSession_FullMethodName:
		st, serr := access.OpenSession(ctx, &kvdv1.OpenSessionRequest{Namespace: "a", LayoutVersion: layout.Version})
		if err = serr; err == nil {
			_, err = st.Recv()
		}
	case kvdv1.Access_Connect_FullMethodName:
		_, err = access.Connect(ctx, &kvdv1.ConnectRequest{SessionId: id, Transport: "tcp", Offer: k})
	case kvdv1.Access_Regions_FullMethodName:
		_, err = access.Regions(ctx, &kvdv1.RegionsRequest{SessionId: id, Transport: "tcp"})
	case kvdv1.Access_Routes_FullMethodName:
		_, err = access.Routes(ctx, &kvdv1.RoutesRequest{SessionId: id})
	case kvdv1.Cluster_Status_FullMethodName:
		_, err = cluster.Status(ctx, &kvdv1.StatusRequest{})
	case kvdv1.Cluster_Members_FullMethodName:
		_, err = cluster.Members(ctx, &kvdv1.MembersRequest{})
	case kvdv1.Cluster_Drain_FullMethodName:
		_, err = cluster.Drain(ctx, &kvdv1.DrainRequest{NodeId: 99})
	case kvdv1.Cluster_Decommission_FullMethodName:
		_, err = cluster.Decommission(ctx, &kvdv1.DecommissionRequest{NodeId: 99})
	case kvdv1.Cluster_Rebalance_FullMethodName:
		_, err = cluster.Rebalance(ctx, &kvdv1.RebalanceRequest{DryRun: true})
	case kvdv1.Peer_Join_FullMethodName:
		_, err = nodes.Join(ctx, &kvdv1.JoinRequest{})
	case kvdv1.Peer_Replica_FullMethodName:
		_, err = nodes.Replica(ctx, &kvdv1.ReplicaRequest{})
	case kvdv1.Peer_Load_FullMethodName:
		_, err = nodes.Load(ctx, &kvdv1.LoadRequest{})
	case kvdv1.Peer_Configuration_FullMethodName:
		_, err = nodes.Configuration(ctx, &kvdv1.ConfigurationRequest{})
	case kvdv1.Peer_Announce_FullMethodName:
		_, err = nodes.Announce(ctx, &kvdv1.AnnounceRequest{})
	case kvdv1.Cluster_ListNamespaces_FullMethodName:
		_, err = cluster.ListNamespaces(ctx, &kvdv1.ListNamespacesRequest{})
	case kvdv1.Cluster_CreateNamespace_FullMethodName:
		_, err = cluster.CreateNamespace(ctx, &kvdv1.CreateNamespaceRequest{Name: "a"})
	case kvdv1.Cluster_TransferLeader_FullMethodName:
		_, err = cluster.TransferLeader(ctx, &kvdv1.TransferLeaderRequest{Shard: 99, ToNode: 1})
	case kvdv1.Cluster_CreateToken_FullMethodName:
		_, err = cluster.CreateToken(ctx, &kvdv1.CreateTokenRequest{Name: "x"})
	case kvdv1.Cluster_ListTokens_FullMethodName:
		_, err = cluster.ListTokens(ctx, &kvdv1.ListTokensRequest{})
	case kvdv1.Cluster_RevokeToken_FullMethodName:
		_, err = cluster.RevokeToken(ctx, &kvdv1.RevokeTokenRequest{Id: "ffffffffffffffff"})
	case kvdv1.Cluster_RotateKeys_FullMethodName:
		// Of a namespace without sessions: that of the others is needed.
		_, err = cluster.RotateKeys(ctx, &kvdv1.RotateKeysRequest{Namespace: "a"})
	case kvdv1.Backup_OpenExport_FullMethodName, kvdv1.Backup_ReadExport_FullMethodName, kvdv1.Backup_CloseExport_FullMethodName,
		kvdv1.Backup_Import_FullMethodName, kvdv1.Backup_ImportCluster_FullMethodName:
		err = callBackup(ctx, kvdv1.NewBackupClient(conn), method, namespace, k)
	case kvdv1.Operator_Shards_FullMethodName:
		_, err = kvdv1.NewOperatorClient(conn).Shards(ctx, &kvdv1.ShardsRequest{})
	case kvdv1.Operator_Explain_FullMethodName:
		_, err = kvdv1.NewOperatorClient(conn).Explain(ctx, &kvdv1.ExplainRequest{NamespaceId: namespace, Key: k})
	case kvdv1.Gossip_Contact_FullMethodName:
		_, err = kvdv1.NewGossipClient(conn).Contact(ctx, &kvdv1.ContactRequest{})
	case kvdv1.Gossip_Liveness_FullMethodName:
		_, err = kvdv1.NewGossipClient(conn).Liveness(ctx, &kvdv1.LivenessRequest{})
	case kvdv1.Peer_Hello_FullMethodName:
		_, err = nodes.Hello(ctx, &kvdv1.HelloRequest{})
	case kvdv1.Peer_Adopt_FullMethodName:
		_, err = nodes.Adopt(ctx, &kvdv1.AdoptRequest{})
	case kvdv1.Peer_Activate_FullMethodName:
		_, err = nodes.Activate(ctx, &kvdv1.ActivateRequest{})
	case kvdv1.Peer_Raft_FullMethodName:
		st, serr := nodes.Raft(ctx)
		if err = serr; err == nil {
			_ = st.Send(&kvdv1.RaftBatch{})
			_, err = st.CloseAndRecv()
		}
	case kvdv1.Peer_Snapshot_FullMethodName:
		st, serr := nodes.Snapshot(ctx)
		if err = serr; err == nil {
			_ = st.Send(&kvdv1.SnapshotChunk{})
			_, err = st.CloseAndRecv()
		}
	case kvdv1.Peer_SnapshotProgress_FullMethodName:
		_, err = nodes.SnapshotProgress(ctx, &kvdv1.SnapshotProgressRequest{})
	case healthpb.Health_Check_FullMethodName:
		_, err = health.Check(ctx, &healthpb.HealthCheckRequest{})
	case healthpb.Health_List_FullMethodName:
		_, err = health.List(ctx, &healthpb.HealthListRequest{})
	case healthpb.Health_Watch_FullMethodName:
		st, serr := health.Watch(ctx, &healthpb.HealthCheckRequest{})
		if err = serr; err == nil {
			_, err = st.Recv()
		}
	default: // reflection: a stream of messages that are of no interest
		st, serr := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
		if err = serr; err == nil {
			_ = st.SendMsg(&healthpb.HealthCheckRequest{Service: "x"})
			err = st.RecvMsg(&healthpb.HealthListRequest{})
		}
	}
	return err
}

// connFrom is the context of a call from an address, in plain text.
func connFrom(addr string) context.Context {
	a, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		panic("server: " + err.Error()) // bug: the tests' addresses are literal
	}
	return peer.NewContext(context.Background(), &peer.Peer{Addr: a})
}

// A token that came in the clear from another host is refused, right or wrong, and so is
// the peers' secret, unless the operator trusts the network. Loopback is no network.
func TestPlaintextFromAfar(t *testing.T) {
	n := startGuarded(t, 1, 1, func(c *Config) { c.Auth.PeerSecretFile = secretFile(t, peerSecret) }).nodes[0]
	shown := tokenOf(rootTokenID, "root")
	with := func(ctx context.Context, kv ...string) context.Context {
		return metadata.NewIncomingContext(ctx, metadata.Pairs(kv...))
	}
	call, between := rules[kvdv1.KV_Get_FullMethodName], rules[kvdv1.Peer_Hello_FullMethodName]
	for _, allowed := range []bool{false, true} {
		n.cfg.Auth.AllowPlaintext = allowed
		for addr, near := range map[string]bool{"127.0.0.1:1": true, "[::1]:1": true, "10.0.0.5:1": false, "[fe80::1]:1": false} {
			_, err := n.identify(with(connFrom(addr), authorizationKey, "bearer "+shown), call)
			require.Equal(t, near || allowed, err == nil, "%s: %v", addr, err)
			_, err = n.identify(with(connFrom(addr), peerProofKey, n.auth.peerProof), between)
			require.Equal(t, near || allowed, err == nil, "%s: %v", addr, err)
			_, err = n.identify(with(connFrom(addr), peerProofKey, n.auth.peerProof+"0"), between)
			requireReason(t, err, kvdv1.ErrorDetail_REASON_DENIED)
		}
	}
	// Two of them, or of another kind, are none.
	for _, kv := range [][]string{{authorizationKey, "Bearer " + shown, authorizationKey, "Bearer " + shown}, {authorizationKey, "Basic " + shown}, {authorizationKey, shown}} {
		_, err := n.identify(with(connFrom("127.0.0.1:1"), kv...), call)
		requireReason(t, err, kvdv1.ErrorDetail_REASON_UNAUTHENTICATED, kv)
	}
}

type listenerAt struct {
	net.Listener
	addr net.Addr
}

func (l listenerAt) Addr() net.Addr { return l.addr }

// A node that anyone may use says so, where anyone can reach it.
func TestOpenDoorsAreSaid(t *testing.T) {
	for addr, want := range map[string]int{"127.0.0.1": 0, "::1": 0, "0.0.0.0": 1, "10.0.0.5": 1} {
		for _, mode := range []AuthMode{AuthOff, AuthTokens} {
			log := &lines{}
			n := &Node{log: slog.New(slog.NewTextHandler(log, nil)), listener: listenerAt{addr: &net.TCPAddr{IP: net.ParseIP(addr)}}}
			n.auth.mode = mode
			n.warnOfOpenDoors()
			if mode == AuthTokens {
				want = 0
			}
			require.Equal(t, want, log.count("ANYONE"), "%s %s", addr, mode)
		}
	}
}
