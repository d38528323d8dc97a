package server

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// session is one client's access to one namespace of this node. It lives as long as
// its stream.
type session struct {
	id        string
	client    string
	owner     string // id of the token that opened it; "": there are none
	namespace *kvdv1.NamespaceInfo
	reads     bool // its owner may read, and so memory is given out

	// evicted is closed when the node ends the session; why was set before.
	evicted  chan struct{}
	why      string
	evicting sync.Once

	mu struct {
		sync.Mutex
		endpoints   map[rdma.Endpoint]struct{}
		connections int // endpoints, and those in the making
		closed      bool
	}
}

// short names the session in logs; it is not enough to use it.
func (s *session) short() string { return hex.EncodeToString([]byte(s.id[:4])) }

const (
	// maxSessions of a node, and maxConnections of one session: what a client can make
	// a node hold.
	maxSessions = 1 << 14
	// maxSessionsOwned is what one token can take of them.
	maxSessionsOwned = maxSessions / 2
	maxConnections   = 256
	// maxClientName is in bytes.
	maxClientName = 256
	// What one call costs is bounded by what it may ask for.
	maxRegionsAsked = 1 << 14
	maxRoutesAsked  = 1 << 12
)

// reserve makes room for one connection, which add or giveBack must follow.
func (s *session) reserve() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.mu.closed:
		return errSessionGone
	case s.mu.connections == maxConnections:
		return fail(kvdv1.ErrorDetail_REASON_EXHAUSTED, "this session has %d connections, the limit: close some", maxConnections)
	}
	s.mu.connections++
	return nil
}

func (s *session) giveBack() {
	s.mu.Lock()
	s.mu.connections--
	s.mu.Unlock()
}

// add ties a connection to the session; false where the session has ended.
func (s *session) add(ep rdma.Endpoint) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return false
	}
	s.mu.endpoints[ep] = struct{}{}
	return true
}

func (s *session) remove(ep rdma.Endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.endpoints, ep)
	s.mu.connections--
}

// evict tells the session's stream to end.
func (s *session) evict(why string) {
	s.evicting.Do(func() {
		s.why = why
		close(s.evicted)
	})
}

// close revokes everything that was given out under the session.
func (s *session) close() {
	s.mu.Lock()
	eps := s.mu.endpoints
	s.mu.endpoints, s.mu.closed = nil, true
	s.mu.Unlock()
	// Side by side: a device may take its time over each, and a client that has lost its
	// rights keeps none of them for the sake of the others.
	var closing sync.WaitGroup
	for ep := range eps {
		closing.Go(func() { _ = ep.Close() })
	}
	closing.Wait()
}

func (s *session) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.closed
}

var errSessionGone = fail(kvdv1.ErrorDetail_REASON_SESSION_GONE, "this session does not exist here (any more): open a new one")

// sessions of a node.
type sessions struct {
	mu struct {
		sync.Mutex
		byID map[string]*session
		// owned counts them by tokens; no entry for none.
		owned map[string]int
		// ended is closed and made anew when a session ends.
		ended chan struct{}
	}
}

func newSessions() *sessions {
	s := &sessions{}
	s.mu.byID, s.mu.owned, s.mu.ended = map[string]*session{}, map[string]int{}, make(chan struct{})
	return s
}

func (s *sessions) open(client string, c *caller, ns *kvdv1.NamespaceInfo) (*session, error) {
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		panic("server: no randomness: " + err.Error()) // bug: crypto/rand never fails on Linux
	}
	x := &session{
		id: string(id[:]), client: client, owner: c.owner(), namespace: ns, reads: c.may(rightRead, ns.GetName()),
		evicted: make(chan struct{}),
	}
	x.mu.endpoints = map[rdma.Endpoint]struct{}{}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.mu.byID) >= maxSessions {
		return nil, failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_EXHAUSTED, RetryAfterMs: 1000}, "this node has %d sessions, the limit: share a client in each process", maxSessions)
	}
	if x.owner != "" {
		if s.mu.owned[x.owner] >= maxSessionsOwned {
			return nil, failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_EXHAUSTED, RetryAfterMs: 1000}, "token %s has %d sessions with this node, the limit of one token: share a client in each process", c.token.name(), maxSessionsOwned)
		}
		s.mu.owned[x.owner]++
	}
	s.mu.byID[x.id] = x
	return x, nil
}

// close ends a session. It is counted, and awaited by awaitOwner, until all that was given
// out under it has ended.
func (s *sessions) close(x *session) {
	x.close()
	s.mu.Lock()
	if s.mu.byID[x.id] != nil && x.owner != "" {
		if s.mu.owned[x.owner]--; s.mu.owned[x.owner] == 0 {
			delete(s.mu.owned, x.owner)
		}
	}
	delete(s.mu.byID, x.id)
	close(s.mu.ended)
	s.mu.ended = make(chan struct{})
	s.mu.Unlock()
}

// get returns a session to the caller that opened it. To others it is not there.
func (s *sessions) get(id []byte, c *caller) (*session, error) {
	s.mu.Lock()
	x := s.mu.byID[string(id)]
	s.mu.Unlock()
	if x == nil || x.owner != c.owner() || x.isClosed() {
		return nil, errSessionGone
	}
	return x, wantsSecure(c, x.namespace)
}

// evict ends the sessions of a namespace and returns how many they are.
func (s *sessions) evict(namespace uint32, why string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.mu.byID {
		if x.namespace.GetId() == namespace {
			x.evict(why)
			n++
		}
	}
	return n
}

// awaitOwner returns once none of the owner's sessions is left, with nil, or ctx has ended,
// with its error.
func (s *sessions) awaitOwner(ctx context.Context, owner string) error {
	for {
		s.mu.Lock()
		ended, left := s.mu.ended, false
		for _, x := range s.mu.byID {
			left = left || x.owner == owner
		}
		s.mu.Unlock()
		if !left {
			return nil
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *sessions) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.mu.byID)
}

// OpenSession implements kvdv1.AccessServer.
func (n *Node) OpenSession(req *kvdv1.OpenSessionRequest, stream kvdv1.Access_OpenSessionServer) error {
	if !n.ready.Load() {
		return errStarting
	}
	id := n.identity.Load()
	if want, have := req.GetClusterId(), id.manifest.GetClusterId(); want != "" && want != have {
		return fail(kvdv1.ErrorDetail_REASON_WRONG_CLUSTER, "this node belongs to cluster %s, the client asked for %s: correct the endpoints", have, want)
	}
	if req.GetLayoutVersion() != layout.Version {
		return fail(kvdv1.ErrorDetail_REASON_LAYOUT_VERSION, "this node lays memory out by version %d, the client reads version %d: use an SDK of the same release", layout.Version, req.GetLayoutVersion())
	}
	if len(req.GetClientName()) > maxClientName {
		return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "a client's name of %d bytes: want at most %d", len(req.GetClientName()), maxClientName)
	}
	name := req.GetNamespace()
	if name == "" {
		name = DefaultNamespace
	}
	ns, err := n.findNamespace(stream.Context(), name)
	if err != nil {
		return err
	}
	// Looked at again: it may have been unknown here before.
	if err := wantsSecure(callerOf(stream.Context()), ns); err != nil {
		return err
	}
	s, err := n.sessions.open(req.GetClientName(), callerOf(stream.Context()), ns)
	if err != nil {
		return err
	}
	defer n.sessions.close(s)
	if n.doubted.Load() { // looked at now that beginDoubt finds the session
		return failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY, RetryAfterMs: 500}, "another process speaks as node %d: one of the two is a copy, and its memory must not be read", n.id())
	}
	_, _, told, _ := n.topology.since(0) // what comes behind it is told on the stream
	members, version := n.members()
	opened := &kvdv1.SessionOpened{
		SessionId: []byte(s.id), ClusterId: id.manifest.GetClusterId(), NodeId: n.id(), BootId: n.bootID,
		NamespaceId: ns.GetId(), Immutable: ns.GetImmutable(), OneSided: ns.GetOneSided() && s.reads,
		Shards: id.manifest.GetShards(), HashSeed: id.manifest.GetHashSeed(), LayoutVersion: layout.Version,
		MaxKeyBytes: layout.MaxKeySize, MaxValueBytes: uint32(n.cfg.MaxValueBytes),
		HostId: n.cfg.HostID, Transports: n.transportsFor(s), Members: members, MembersVersion: version,
	}
	if err := stream.Send(&kvdv1.SessionEvent{Event: &kvdv1.SessionEvent_Opened{Opened: opened}}); err != nil {
		return err
	}
	why := n.serveSession(s, req.GetTopology(), told, stream)
	if why == "" {
		return nil
	}
	// Best effort: the client learns it from the end of the stream as well.
	_ = stream.Send(&kvdv1.SessionEvent{Event: &kvdv1.SessionEvent_Closing{Closing: &kvdv1.SessionClosing{Reason: why}}})
	return nil
}

// transportsFor lists what the session may be read by.
func (n *Node) transportsFor(s *session) []string {
	var names []string
	for _, t := range n.export.targets {
		if s.reads && mayCarry(t.Target, s.namespace) {
			names = append(names, t.name)
		}
	}
	return names
}

// mayCarry keeps what must be under TLS off transports that can be read along.
func mayCarry(t rdma.Target, ns *kvdv1.NamespaceInfo) bool {
	if !ns.GetRequireTls() || ns.GetPlaintextReads() {
		return true
	}
	c, ok := t.(rdma.Confidential)
	return ok && c.Confidential()
}

// Connect implements kvdv1.AccessServer.
func (n *Node) Connect(ctx context.Context, req *kvdv1.ConnectRequest) (*kvdv1.ConnectResponse, error) {
	s, d, err := n.sessionDomain(ctx, req.GetSessionId(), req.GetTransport())
	if err != nil {
		return nil, err
	}
	if err := s.reserve(); err != nil {
		return nil, err
	}
	answer, ep, err := n.export.accept(ctx, d, s, req.GetOffer())
	if err != nil {
		s.giveBack()
		return nil, failTransport(req.GetTransport(), err)
	}
	if !s.add(ep) {
		_ = ep.Close()
		return nil, errSessionGone
	}
	n.background(func(context.Context) {
		<-ep.Done()
		s.remove(ep)
	})
	return &kvdv1.ConnectResponse{Answer: answer}, nil
}

// sessionDomain finds what a session may use of a transport.
func (n *Node) sessionDomain(ctx context.Context, id []byte, transport string) (*session, *domain, error) {
	s, err := n.sessions.get(id, callerOf(ctx))
	if err != nil {
		return nil, nil, err
	}
	switch {
	case !s.reads:
		return nil, nil, failMissing(callerOf(ctx), rightRead, s.namespace.GetName())
	case !s.namespace.GetOneSided():
		return nil, nil, fail(kvdv1.ErrorDetail_REASON_DENIED, "namespace %s is kept out of one-sided reads: read it over gRPC", s.namespace.GetName())
	}
	for _, t := range n.export.targets {
		if t.name == transport && !mayCarry(t.Target, s.namespace) {
			return nil, nil, fail(kvdv1.ErrorDetail_REASON_DENIED, "namespace %s requires TLS, and READs by %s are plain text here: use one of %v, or gRPC", s.namespace.GetName(), transport, n.transportsFor(s))
		}
	}
	d, err := n.export.domain(s.namespace.GetId(), transport)
	if err != nil {
		return nil, nil, failTransport(transport, err)
	}
	return s, d, nil
}

func failTransport(transport string, err error) error {
	switch {
	case errors.Is(err, rdma.ErrUnsupported), errors.Is(err, rdma.ErrHandshake):
		return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "transport %s: %v", transport, err)
	case errors.Is(err, rdma.ErrExhausted):
		return fail(kvdv1.ErrorDetail_REASON_EXHAUSTED, "transport %s: %v", transport, err)
	case errors.Is(err, rdma.ErrRevoked):
		return fail(kvdv1.ErrorDetail_REASON_DENIED, "transport %s: %v", transport, err)
	}
	return status.Errorf(codes.Internal, "transport %s: %v", transport, err)
}

// Regions implements kvdv1.AccessServer.
func (n *Node) Regions(ctx context.Context, req *kvdv1.RegionsRequest) (*kvdv1.RegionsResponse, error) {
	_, d, err := n.sessionDomain(ctx, req.GetSessionId(), req.GetTransport())
	if err != nil {
		return nil, err
	}
	if len(req.GetRegions()) > maxRegionsAsked {
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "%d regions in one call: want at most %d, or none for all", len(req.GetRegions()), maxRegionsAsked)
	}
	return &kvdv1.RegionsResponse{Regions: d.regions(req.GetRegions())}, nil
}

// Routes implements kvdv1.AccessServer.
func (n *Node) Routes(ctx context.Context, req *kvdv1.RoutesRequest) (*kvdv1.RoutesResponse, error) {
	s, err := n.sessions.get(req.GetSessionId(), callerOf(ctx))
	if err != nil {
		return nil, err
	}
	members, version := n.members()
	r := &kvdv1.RoutesResponse{Members: members, MembersVersion: version}
	shards := req.GetShards()
	if len(shards) > maxRoutesAsked {
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "routes of %d shards in one call: want at most %d, or none for all", len(shards), maxRoutesAsked)
	}
	if len(shards) == 0 {
		for i := range n.identity.Load().manifest.GetShards() {
			shards = append(shards, i+1)
		}
	}
	for _, number := range shards {
		if route := n.route(number, s.namespace.GetId()); route != nil {
			r.Routes = append(r.Routes, route)
		}
	}
	return r, nil
}

// route is what this node knows of a shard; nil where there is no such shard.
func (n *Node) route(number, namespace uint32) *kvdv1.Route {
	if number == 0 || number > n.identity.Load().manifest.GetShards() {
		return nil
	}
	r := &kvdv1.Route{Shard: number}
	sh := n.shard(number)
	if sh == nil {
		// Group 0, or the manifest, tells who to ask.
		at := n.shardMap.whereabouts(number)
		r.Voters, r.VotersOutgoing, r.Learners = at.GetVoters(), at.GetVotersOutgoing(), at.GetLearners()
		return r
	}
	st := sh.g.Status()
	r.LeaderNode, r.ConfigId = uint64(st.Leader), st.ConfigID
	r.Voters, r.VotersOutgoing, r.Learners = st.Conf.GetVoters(), st.Conf.GetVotersOutgoing(), st.Conf.GetLearners()
	r.Local = &kvdv1.LocalReplica{Slot: sh.record.Slot(), Record: layout.AppendRecord(nil, sh.record.Load())}
	if sp := sh.space(namespace); sp != nil {
		if t, gen, ok := sp.Table(); ok {
			r.Local.Table = &kvdv1.IndexTable{
				LayoutGen: gen, TableId: t.ID, Chunk: t.Place.Chunk, Offset: t.Place.Offset,
				Buckets: t.Buckets, Overflow: t.Overflow,
			}
		}
	}
	return r
}

// members of the cluster as of an index of group 0; 0: as the manifest says.
func (n *Node) members() (ms []*kvdv1.Member, version uint64) {
	known := n.directory()
	for _, m := range known.nodes {
		if m.GetState() == kvdv1.NodeState_NODE_STATE_GONE {
			continue
		}
		addr := m.GetAddress()
		if a, ok := n.peers.addressOf(raft.NodeID(m.GetNodeId())); ok {
			addr = a
		}
		ms = append(ms, &kvdv1.Member{NodeId: m.GetNodeId(), Address: addr})
	}
	return ms, known.index
}
