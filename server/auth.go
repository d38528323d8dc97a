package server

import (
	"context"
	"crypto/subtle"
	"errors"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// Every call is decided here, before its handler sees it. A method that has no rule is
// refused.

// need is what a method wants of its caller.
type need uint8

const (
	needNothing     need = iota + 1 // whoever reaches the node
	needIdentity                    // any caller that is known
	needSession                     // the caller that opened the session, which the handler looks at
	needNamespaceID                 // the right in the namespace that the request names by its id
	needNamespace                   // the right in the namespace that the request names
	needSomewhere                   // the right in any namespace
	needFrames                      // a known caller; each frame wants the right in its namespace
	needOperator                    // admin in all namespaces
	needPeer                        // a node of this cluster
	needJoiner                      // one that may become such a node
)

type rule struct {
	need  need
	right right
	// forwarded: a peer may call it, for a caller that it has looked at.
	forwarded bool
}

var rules = map[string]rule{
	kvdv1.KV_Get_FullMethodName:        {need: needNamespaceID, right: rightRead},
	kvdv1.KV_List_FullMethodName:       {need: needNamespaceID, right: rightRead},
	kvdv1.KV_Put_FullMethodName:        {need: needNamespaceID, right: rightWrite},
	kvdv1.KV_Delete_FullMethodName:     {need: needNamespaceID, right: rightWrite},
	kvdv1.KV_Write_FullMethodName:      {need: needFrames, right: rightWrite},
	kvdv1.KV_OpenWriter_FullMethodName: {need: needSomewhere, right: rightWrite},

	// Who may only write needs a session too, to learn where; it gets no memory.
	kvdv1.Access_OpenSession_FullMethodName: {need: needNamespace, right: rightRead | rightWrite},
	kvdv1.Access_Connect_FullMethodName:     {need: needSession},
	kvdv1.Access_Regions_FullMethodName:     {need: needSession},
	kvdv1.Access_Routes_FullMethodName:      {need: needSession},

	// These two tell each caller what concerns it.
	kvdv1.Cluster_Status_FullMethodName:          {need: needIdentity},
	kvdv1.Cluster_ListNamespaces_FullMethodName:  {need: needIdentity, forwarded: true},
	kvdv1.Cluster_CreateNamespace_FullMethodName: {need: needOperator, forwarded: true},
	kvdv1.Cluster_TransferLeader_FullMethodName:  {need: needOperator, forwarded: true},
	kvdv1.Cluster_CreateToken_FullMethodName:     {need: needOperator, forwarded: true},
	kvdv1.Cluster_ListTokens_FullMethodName:      {need: needOperator, forwarded: true},
	kvdv1.Cluster_RevokeToken_FullMethodName:     {need: needOperator, forwarded: true},
	kvdv1.Cluster_Members_FullMethodName:         {need: needOperator, forwarded: true},
	kvdv1.Cluster_Drain_FullMethodName:           {need: needOperator, forwarded: true},
	kvdv1.Cluster_Decommission_FullMethodName:    {need: needOperator, forwarded: true},
	kvdv1.Cluster_Rebalance_FullMethodName:       {need: needOperator, forwarded: true},
	kvdv1.Cluster_RotateKeys_FullMethodName:      {need: needNamespace, right: rightAdmin},

	kvdv1.Backup_OpenExport_FullMethodName:    {need: needOperator},
	kvdv1.Backup_ReadExport_FullMethodName:    {need: needOperator},
	kvdv1.Backup_CloseExport_FullMethodName:   {need: needOperator},
	kvdv1.Backup_Import_FullMethodName:        {need: needOperator},
	kvdv1.Backup_ImportCluster_FullMethodName: {need: needOperator},

	kvdv1.Operator_Shards_FullMethodName:  {need: needOperator},
	kvdv1.Operator_Explain_FullMethodName: {need: needNamespaceID, right: rightRead},

	kvdv1.Gossip_Contact_FullMethodName:  {need: needPeer},
	kvdv1.Gossip_Liveness_FullMethodName: {need: needOperator},

	kvdv1.Peer_Hello_FullMethodName:            {need: needPeer},
	kvdv1.Peer_Adopt_FullMethodName:            {need: needPeer},
	kvdv1.Peer_Activate_FullMethodName:         {need: needPeer},
	kvdv1.Peer_Raft_FullMethodName:             {need: needPeer},
	kvdv1.Peer_Snapshot_FullMethodName:         {need: needPeer},
	kvdv1.Peer_SnapshotProgress_FullMethodName: {need: needPeer},
	kvdv1.Peer_Announce_FullMethodName:         {need: needPeer},
	kvdv1.Peer_Replica_FullMethodName:          {need: needPeer},
	kvdv1.Peer_Load_FullMethodName:             {need: needPeer},
	kvdv1.Peer_Configuration_FullMethodName:    {need: needPeer},
	kvdv1.Peer_Join_FullMethodName:             {need: needJoiner},

	healthpb.Health_Check_FullMethodName: {need: needNothing},
	healthpb.Health_Watch_FullMethodName: {need: needNothing},
	healthpb.Health_List_FullMethodName:  {need: needNothing},

	"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo":      {need: needIdentity},
	"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": {need: needIdentity},
}

// auth is what a node knows of who may call it.
type auth struct {
	mode      AuthMode
	tls       *TLS   // nil: plain text
	peerProof string // "": none
	refusals  refusals
}

func (n *Node) openAuth() (err error) {
	n.auth.mode = n.cfg.Auth.Mode
	if n.auth.tls, err = LoadTLS(n.cfg.TLS, n.log); err != nil {
		return err
	}
	if n.auth.peerProof, err = n.cfg.Auth.loadPeerProof(); err != nil {
		return err
	}
	root, err := n.cfg.Auth.loadRootToken()
	if err != nil {
		return err
	}
	n.tokens = newTokens(root)
	return nil
}

// caller is whom a call comes from. Immutable.
type caller struct {
	from   string // address, for logs
	secure bool   // TLS
	peer   bool   // a node, that passes a call on
	open   bool   // there are no tokens: everyone may do everything
	token  *token // nil with peer and open
}

// owner tells one caller from another; "" without tokens.
func (c *caller) owner() string {
	if c == nil || c.token == nil {
		return ""
	}
	return c.token.id()
}

func (c *caller) may(want right, namespace string) bool {
	return c == nil || c.peer || c.open || c.token.may(want, namespace)
}

func (c *caller) operator() bool {
	return c == nil || c.peer || c.open || c.token.may(rightAdmin, anyNamespace)
}

type callerKey struct{}

// callerOf a call; nil for what the node asks itself, which may do everything.
func callerOf(ctx context.Context) *caller {
	c, _ := ctx.Value(callerKey{}).(*caller)
	return c
}

// connection is what is known of a call's connection.
type connection struct {
	from     string
	loopback bool
	tls      *credentials.TLSInfo // nil: plain text
}

func connectionOf(ctx context.Context) connection {
	var c connection
	p, ok := peer.FromContext(ctx)
	if !ok {
		return c
	}
	if p.Addr != nil {
		c.from = p.Addr.String()
		if tcp, ok := p.Addr.(*net.TCPAddr); ok {
			c.loopback = tcp.IP.IsLoopback()
		}
	}
	if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
		c.tls = &info
	}
	return c
}

// peerProofKey carries what nodes without TLS show each other; authorizationKey what
// clients show.
const (
	peerProofKey     = "kvd-peer-proof"
	authorizationKey = "authorization"
	bearer           = "Bearer "
)

func first(ctx context.Context, key string) string {
	in, _ := metadata.FromIncomingContext(ctx)
	if v := in.Get(key); len(v) == 1 {
		return v[0]
	}
	return ""
}

// identify tells whom a call comes from, or refuses it.
func (n *Node) identify(ctx context.Context, r rule) (*caller, error) {
	conn := connectionOf(ctx)
	c := &caller{from: conn.from, secure: conn.tls != nil}
	switch {
	case r.need == needNothing:
		return c, nil
	case r.need == needPeer:
		c.peer = true
		return c, n.provesPeer(ctx, conn, n.peerHosts())
	case r.need == needJoiner:
		return c, nil // authorize sees who it claims to be
	case n.auth.mode != AuthTokens:
		c.open = true
		return c, nil
	}
	shown := first(ctx, authorizationKey)
	if shown == "" {
		if r.forwarded && first(ctx, forwardedKey) != "" {
			c.peer = true
			return c, n.provesPeer(ctx, conn, n.peerHosts())
		}
		return nil, fail(kvdv1.ErrorDetail_REASON_UNAUTHENTICATED, "this node wants a token, and none came: kvctl has --token-file and KVD_TOKEN, the SDK Config.Token")
	}
	if conn.tls == nil && !conn.loopback && !n.cfg.Auth.AllowPlaintext {
		return nil, fail(kvdv1.ErrorDetail_REASON_DENIED, "a token came over a connection without TLS, so it may be known to others: revoke it, and set up TLS (or set auth-allow-plaintext on the node, where the network is trusted)")
	}
	var err error
	c.token, err = n.findToken(shown)
	return c, err
}

// errWrongToken says as little as can be: not even whether there is such an id.
var errWrongToken = fail(kvdv1.ErrorDetail_REASON_UNAUTHENTICATED, "the token is not valid here: it is wrong, or was revoked, or its time is over")

func (n *Node) findToken(shown string) (*token, error) {
	if len(shown) < len(bearer) || !strings.EqualFold(shown[:len(bearer)], bearer) {
		return nil, fail(kvdv1.ErrorDetail_REASON_UNAUTHENTICATED, "the authorization is not a bearer token: want %q followed by the token", bearer)
	}
	id, secret, err := parseToken(shown[len(bearer):])
	if err != nil {
		return nil, fail(kvdv1.ErrorDetail_REASON_UNAUTHENTICATED, "the token can not be one: %v", err)
	}
	if id != rootTokenID && !n.ready.Load() {
		return nil, errStarting
	}
	t := n.tokens.find(id)
	if t == nil {
		// As long as for a token that exists.
		t = &token{&kvdv1.TokenRecord{SecretSha256: make([]byte, secretBytes)}}
	}
	if !t.has(secret) || !n.tokens.alive(t, n.cfg.Clock.Now()) {
		return nil, errWrongToken
	}
	return t, nil
}

// provesJoiner refuses whoever could not be a node of this cluster. It gives its own
// address, so with TLS its certificate must be for that host.
func (n *Node) provesJoiner(ctx context.Context, req *kvdv1.JoinRequest) error {
	hosts := n.peerHosts()
	if host, _, err := net.SplitHostPort(req.GetNode().GetAddress()); err == nil && !isForwarded(ctx) {
		hosts = []string{host}
	}
	return n.provesPeer(ctx, connectionOf(ctx), hosts)
}

// provesPeer refuses whoever does not prove that it is a node of this cluster, on one
// of those hosts.
func (n *Node) provesPeer(ctx context.Context, conn connection, hosts []string) error {
	refuse := func(format string, args ...any) error {
		return fail(kvdv1.ErrorDetail_REASON_DENIED, "this call is for the nodes of the cluster: "+format, args...)
	}
	switch {
	case n.auth.tls != nil && conn.tls == nil:
		return refuse("it came without TLS")
	case n.auth.tls != nil:
		if err := n.auth.tls.provesPeer(conn.tls.State, hosts); err != nil {
			return refuse("%v", err)
		}
		return nil
	case n.auth.mode != AuthTokens:
		return nil
	case !conn.loopback && !n.cfg.Auth.AllowPlaintext:
		return refuse("it came over a connection without TLS from another host: set up TLS, or auth-allow-plaintext where the network is trusted")
	case n.auth.peerProof == "":
		return refuse("this node has neither tls-peer-ca nor auth-peer-secret-file to know one by")
	case subtle.ConstantTimeCompare([]byte(first(ctx, peerProofKey)), []byte(n.auth.peerProof)) != 1:
		return refuse("the caller has not the secret of auth-peer-secret-file")
	}
	return nil
}

// peerHosts are those of all nodes, as configured and as this node knows them.
func (n *Node) peerHosts() []string {
	var hosts []string
	add := func(addr string) {
		if host, _, err := net.SplitHostPort(addr); err == nil && host != "" {
			hosts = append(hosts, host)
		}
	}
	for _, p := range n.cfg.Peers {
		add(p.Address)
	}
	for _, r := range n.directory().nodes {
		if r.GetState() != kvdv1.NodeState_NODE_STATE_GONE {
			add(r.GetAddress())
		}
	}
	for _, j := range n.cfg.Join {
		if host, _, err := splitJoin(j); err == nil {
			hosts = append(hosts, host)
		}
	}
	return hosts
}

// proof is what this node shows its peers with each call, where there is no TLS.
type proof string

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (p proof) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{peerProofKey: string(p)}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (proof) RequireTransportSecurity() bool { return false }

// authorize decides about one request of a caller that is known.
func (n *Node) authorize(ctx context.Context, c *caller, r rule, req any) error {
	switch r.need {
	case needNothing, needIdentity, needSession, needPeer, needFrames:
		return nil
	case needJoiner:
		c.peer = true
		return n.provesJoiner(ctx, req.(*kvdv1.JoinRequest))
	case needOperator:
		if c.operator() {
			return nil
		}
		return failMissing(c, rightAdmin, anyNamespace)
	case needSomewhere:
		if c.peer || c.open || c.token.mayAnywhere(r.right) {
			return nil
		}
		return fail(kvdv1.ErrorDetail_REASON_DENIED, "token %s has the right to %v in no namespace", c.token.name(), r.right)
	case needNamespaceID:
		return n.authorizeID(ctx, c, r.right, req.(interface{ GetNamespaceId() uint32 }).GetNamespaceId())
	case needNamespace:
		name := req.(interface{ GetNamespace() string }).GetNamespace()
		if name == "" {
			name = DefaultNamespace
		}
		return n.authorizeName(c, r.right, name)
	}
	return fail(kvdv1.ErrorDetail_REASON_DENIED, "this node has no rule for this call")
}

func failMissing(c *caller, want right, namespace string) error {
	where := "namespace " + namespace
	if namespace == anyNamespace {
		where = "all namespaces"
	}
	return fail(kvdv1.ErrorDetail_REASON_DENIED, "token %s (id %s) has no right to %v in %s", c.token.name(), c.token.id(), want, where)
}

func (n *Node) authorizeName(c *caller, want right, name string) error {
	if len(name) > maxNamespaceName {
		return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "a namespace's name of %d bytes: want at most %d", len(name), maxNamespaceName)
	}
	if !c.may(want, name) {
		return failMissing(c, want, name)
	}
	if !n.ready.Load() {
		return errStarting
	}
	return wantsSecure(c, n.namespaces.byName(name))
}

func (n *Node) authorizeID(ctx context.Context, c *caller, want right, id uint32) error {
	if c == nil {
		return nil
	}
	if !n.ready.Load() {
		return errStarting
	}
	ns := n.namespaces.byID(id)
	if ns == nil {
		var err error
		switch ns, err = n.namespaceByID(ctx, id); {
		case err != nil && c.may(want, anyNamespace):
			return err
		case reasonOf(err) == kvdv1.ErrorDetail_REASON_UNKNOWN_NAMESPACE:
			return fail(kvdv1.ErrorDetail_REASON_DENIED, "token %s (id %s) has no right to %v in the namespace with id %d", c.token.name(), c.token.id(), want, id)
		case err != nil:
			return err
		}
	}
	if !c.may(want, ns.GetName()) {
		return fail(kvdv1.ErrorDetail_REASON_DENIED, "token %s (id %s) has no right to %v in the namespace with id %d", c.token.name(), c.token.id(), want, id)
	}
	return wantsSecure(c, ns)
}

// wantsSecure refuses plain text for a namespace whose owner wants none.
func wantsSecure(c *caller, ns *kvdv1.NamespaceInfo) error {
	if ns.GetRequireTls() && c != nil && !c.secure {
		return fail(kvdv1.ErrorDetail_REASON_DENIED, "namespace %s requires TLS, and this call came without: give the client the CA of the nodes", ns.GetName())
	}
	return nil
}

// admitCall identifies the caller and decides about what is known of the call so far.
func (n *Node) admitCall(ctx context.Context, method string) (context.Context, *caller, rule, error) {
	r, ok := rules[method]
	if !ok {
		return ctx, nil, r, n.refused(ctx, method, fail(kvdv1.ErrorDetail_REASON_DENIED, "this node has no rule for %s", method))
	}
	c, err := n.identify(ctx, r)
	if err != nil {
		return ctx, nil, r, n.refused(ctx, method, err)
	}
	return context.WithValue(ctx, callerKey{}, c), c, r, nil
}

// guardUnary is the interceptor of all calls.
func (n *Node) guardUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	ctx, c, r, err := n.admitCall(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	if err := n.authorize(ctx, c, r, req); err != nil {
		return nil, n.refused(ctx, info.FullMethod, err)
	}
	if err := n.checkAddressee(ctx); err != nil {
		return nil, err
	}
	if r.need != needNothing { // health answers whatever the load
		leave, err := n.load.enter(c, costOf(req))
		if err != nil {
			return nil, err
		}
		defer leave()
	}
	return handler(ctx, req)
}

// guardStream is the interceptor of all streams. A stream that a token opened ends with
// the token: its context does, and so do its handlers.
func (n *Node) guardStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx, c, r, err := n.admitCall(ss.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	leave, err := n.load.enter(c, loadLimits{streams: 1})
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if c.token != nil {
		defer n.tokens.watch(c.token, cancel, n.cfg.Clock.Now())()
	}
	err = handler(srv, &guardedStream{ServerStream: ss, n: n, ctx: ctx, caller: c, rule: r, method: info.FullMethod})
	if errors.Is(context.Cause(ctx), errTokenEnded) {
		return errTokenEnded
	}
	return err
}

type guardedStream struct {
	grpc.ServerStream
	n      *Node
	ctx    context.Context
	caller *caller
	rule   rule
	method string
}

func (s *guardedStream) Context() context.Context { return s.ctx }

// RecvMsg gives the handler nothing that the caller may not ask for.
func (s *guardedStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	if s.caller.token != nil && errors.Is(context.Cause(s.ctx), errTokenEnded) {
		return errTokenEnded
	}
	if err := s.n.authorize(s.ctx, s.caller, s.rule, m); err != nil {
		return s.n.refused(s.ctx, s.method, err)
	}
	return nil
}

// refused notes a refusal, and returns it.
func (n *Node) refused(ctx context.Context, method string, err error) error {
	why := reasonOf(err)
	if why != kvdv1.ErrorDetail_REASON_UNAUTHENTICATED && why != kvdv1.ErrorDetail_REASON_DENIED {
		return err // starting, for example
	}
	n.metrics.refusals.WithLabelValues(strings.ToLower(strings.TrimPrefix(why.String(), "REASON_"))).Inc()
	if more, log := n.auth.refusals.note(time.Now()); log {
		n.log.Warn("a call was refused", "from", connectionOf(ctx).from, "method", method, "why", status.Convert(err).Message(), "not logged before", more)
	}
	return err
}

// refusalPause is the least time between two lines about refused calls: whoever guesses
// must not fill the disk.
const refusalPause = time.Second

type refusals struct {
	mu struct {
		sync.Mutex
		last    time.Time
		skipped uint64
	}
}

// note tells whether this refusal is to be logged, and how many before it were not.
func (r *refusals) note(now time.Time) (skipped uint64, log bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.mu.last) < refusalPause {
		r.mu.skipped++
		return 0, false
	}
	skipped, r.mu.skipped, r.mu.last = r.mu.skipped, 0, now
	return skipped, true
}
