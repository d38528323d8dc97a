package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// DefaultPort is that of an address to join that has none.
const DefaultPort = "7400"

// splitJoin takes HOST[:PORT] apart.
func splitJoin(s string) (host, port string, err error) {
	host, port, err = net.SplitHostPort(s)
	if err != nil {
		host, port = strings.TrimSuffix(strings.TrimPrefix(s, "["), "]"), DefaultPort
		if strings.Contains(host, ":") && net.ParseIP(host) == nil {
			return "", "", fmt.Errorf("address to join %q: want HOST or HOST:PORT, such as kvd-0.kvd:7400", s)
		}
	}
	if n, perr := strconv.ParseUint(port, 10, 16); host == "" || perr != nil || n == 0 {
		return "", "", fmt.Errorf("address to join %q: want HOST or HOST:PORT, such as kvd-0.kvd:7400", s)
	}
	return host, port, nil
}

// joinTarget is one address to ask, and the name by which it was found.
type joinTarget struct{ address, authority string }

// joinTargets looks the configured names up. A name may stand for several nodes, as that
// of a headless service does.
func (n *Node) joinTargets(ctx context.Context) (targets []joinTarget, err error) {
	var errs []error
	for _, j := range n.cfg.Join {
		host, port, err := splitJoin(j)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrConfig, err)
		}
		addrs := []string{host}
		if net.ParseIP(host) == nil {
			addrs, err = n.cfg.Lookup(ctx, host)
		}
		if err == nil && len(addrs) == 0 {
			err = errors.New("no addresses")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s resolves to nothing (%w)", host, err))
			continue
		}
		for _, a := range addrs {
			t := joinTarget{net.JoinHostPort(a, port), net.JoinHostPort(host, port)}
			if !slices.Contains(targets, t) {
				targets = append(targets, t)
			}
		}
	}
	return targets, errors.Join(errs...)
}

// withTarget calls f with a client of the node at an address. The connection has the
// name as its authority: that is what a certificate is for.
func (n *Node) withTarget(t joinTarget, f func(kvdv1.PeerClient) error) error {
	c, err := grpc.NewClient("passthrough:///"+t.address, append(n.peers.options(), grpc.WithAuthority(t.authority))...)
	if err != nil {
		return fmt.Errorf("server: address %q: %w", t.address, err)
	}
	defer func() { _ = c.Close() }()
	return f(kvdv1.NewPeerClient(c))
}

// myRecord is this node as it would have group 0 know it.
func (n *Node) myRecord() *kvdv1.NodeRecord {
	r := &kvdv1.NodeRecord{
		Address: n.advertise, Zone: n.cfg.Zone, Rack: n.cfg.Rack, Host: n.cfg.Host, Version: n.cfg.Version,
	}
	if id := n.identity.Load(); id != nil {
		r.NodeId, r.Incarnation = id.nodeID, id.incarnation()
	}
	return r
}

// tryOut opens and closes what a node that joins will open when it is a member: settings
// that are wrong must not leave a member that never starts.
func (n *Node) tryOut(ctx context.Context) error {
	err := n.export.open()
	for _, t := range n.export.targets {
		err = errors.Join(err, t.Close())
	}
	n.export.targets = nil
	if err != nil || n.cfg.Gossip.Listen == "" {
		return err
	}
	if _, _, err := n.loadGossipKey(""); err != nil {
		return err
	}
	listen := netip.MustParseAddrPort(n.cfg.Gossip.Listen) // Validate looked at it
	if _, err := n.gossipAdvertise(ctx, listen); err != nil {
		return err
	}
	stream, err := net.Listen("tcp", n.cfg.Gossip.Listen)
	if err != nil {
		return fmt.Errorf("%w: gossip-listen: %w", ErrConfig, err)
	}
	defer func() { _ = stream.Close() }()
	packets, err := net.ListenPacket("udp", n.cfg.Gossip.Listen)
	if err != nil {
		return fmt.Errorf("%w: gossip-listen: %w", ErrConfig, err)
	}
	return packets.Close()
}

// join asks a cluster for an id and writes down what it is told. Until that is durable
// nothing was promised, and asking again is harmless.
func (n *Node) join(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, n.cfg.BootstrapTimeout)
	defer cancel()
	inc, err := n.dir.joiningAs()
	if err != nil {
		return err
	}
	req := &kvdv1.JoinRequest{Node: n.myRecord(), BootId: n.bootID, Gossips: n.cfg.Gossip.Listen != ""}
	req.Node.Incarnation = inc
	if req.GossipProof, err = n.gossipProof(inc); err != nil {
		return err
	}
	var told string
	var logged time.Time
	var last error // the end of ctx left out
	for {
		resp, seen := n.askToJoin(ctx, req)
		switch {
		case errors.Is(seen, ErrRefused) || errors.Is(seen, ErrConfig):
			return seen
		case resp != nil:
			return n.acceptJoin(resp, inc)
		case ctx.Err() != nil:
			if last == nil {
				last = seen
			}
			return fmt.Errorf("%w to join: nobody at %s let this node in within %v: %w", ErrRefused, strings.Join(n.cfg.Join, ","), n.cfg.BootstrapTimeout, last)
		}
		last = seen
		if msg := fmt.Sprint(seen); msg != told && time.Since(logged) > time.Second || time.Since(logged) > 10*time.Second {
			n.log.Info("waiting to be let into a cluster", "join", n.cfg.Join, "seen", seen)
			logged, told = time.Now(), msg
		}
		pause(ctx, retryPause)
	}
}

// askToJoin asks one after the other until one has an answer. ErrRefused: asking again
// would bring the same.
func (n *Node) askToJoin(ctx context.Context, req *kvdv1.JoinRequest) (*kvdv1.JoinResponse, error) {
	targets, err := n.joinTargets(ctx)
	if errors.Is(err, ErrConfig) {
		return nil, err
	}
	errs := []error{err}
	for _, t := range targets {
		var resp *kvdv1.JoinResponse
		err := n.withTarget(t, func(c kvdv1.PeerClient) (err error) {
			ctx, cancel := context.WithTimeout(ctx, metaWait+helloTimeout)
			defer cancel()
			resp, err = c.Join(ctx, req)
			return err
		})
		if err == nil {
			return resp, nil
		}
		switch reasonOf(err) {
		case kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, kvdv1.ErrorDetail_REASON_WRONG_CLUSTER, kvdv1.ErrorDetail_REASON_DENIED, kvdv1.ErrorDetail_REASON_PROTOCOL:
			return nil, fmt.Errorf("%w to join by %s: %s", ErrRefused, t.address, status.Convert(err).Message())
		}
		if status.Code(err) == codes.Unimplemented {
			return nil, fmt.Errorf("%w to join by %s: it, or the node that leads group 0, is of a version that takes no nodes in: run this version on all nodes first", ErrRefused, t.address)
		}
		errs = append(errs, fmt.Errorf("%s: %s", t.address, status.Convert(err).Message()))
	}
	return nil, errors.Join(errs...)
}

// askAddressesToJoin learns, for a node that has its cluster, which nodes there are now:
// those that it knew may all be gone. Who does not answer is left out.
func (n *Node) askAddressesToJoin(ctx context.Context, id *identity) error {
	if len(n.cfg.Join) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	targets, err := n.joinTargets(ctx)
	if err != nil {
		n.log.Warn("an address to join is of no use; it is not needed any more, either", "err", err)
	}
	for _, t := range targets {
		var r *kvdv1.HelloResponse
		err := n.withTarget(t, func(c kvdv1.PeerClient) (err error) {
			r, err = c.Hello(ctx, &kvdv1.HelloRequest{From: n.self()})
			return err
		})
		if err != nil || r.GetSelf().GetClusterId() == "" {
			continue
		}
		if got, want := r.GetSelf().GetClusterId(), id.manifest.GetClusterId(); got != want {
			return fmt.Errorf("%w: %s belongs to cluster %s, but %s belongs to cluster %s: correct the addresses to join or the directory", ErrRefused, n.cfg.DataDir, want, t.address, got)
		}
		n.learn(r.GetNodesIndex(), r.GetNodes())
	}
	return nil
}

func (n *Node) acceptJoin(resp *kvdv1.JoinResponse, inc uint64) error {
	m := resp.GetManifest()
	id := &identity{manifest: m, nodeID: resp.GetNodeId(), joined: inc, active: true}
	switch {
	case m.GetFormat() != formatNumber:
		return fmt.Errorf("%w to join: the cluster's manifest has format %d, this kvd knows %d: start the kvd that the others run", ErrRefused, m.GetFormat(), formatNumber)
	case checkManifest(m) != nil:
		return fmt.Errorf("%w to join: the cluster's manifest can not be one: %w", ErrRefused, checkManifest(m))
	case id.nodeID == 0 || id.recorded(id.nodeID) != 0 || findNode(resp.GetNodes(), id.nodeID).GetIncarnation() != inc:
		return fmt.Errorf("%w to join: the answer gives this node id %d, but does not list it with incarnation %016x", ErrRefused, id.nodeID, inc)
	}
	// Who this node is is written last: from then on it is a member.
	known := &directory{resp.GetNodesIndex(), resp.GetNodes()}
	if err := n.dir.saveDirectory(known); err != nil {
		return err
	}
	if err := n.dir.saveIdentity(id); err != nil {
		return err
	}
	n.dir.joinedNow()
	n.known.Store(known)
	n.identity.Store(id)
	n.log.Info("joined a cluster", "cluster", m.GetClusterId(), "node", id.nodeID)
	return nil
}

// awaitRegistry returns once a node that joined holds group 0, which its leader brings.
func (n *Node) awaitRegistry(ctx context.Context) error {
	if n.identity.Load().joined == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, n.cfg.BootstrapTimeout)
	defer cancel()
	for {
		next := n.meta.appliedIndex() + 1
		if r := n.registry.find(n.id()); n.registry.written() && r != nil {
			return nil
		}
		select {
		case err := <-n.fatal:
			return err
		default:
		}
		if err := n.meta.waitApplied(ctx, next); err != nil {
			return fmt.Errorf("server: node %d of cluster %s has its id, but the leader of group 0 has not brought it what it needs within %v: can the other nodes reach it at %s? Start it again when they can", n.id(), n.ClusterID(), n.cfg.BootstrapTimeout, n.advertise)
		}
	}
}

// Join implements kvdv1.PeerServer.
func (n *Node) Join(ctx context.Context, req *kvdv1.JoinRequest) (*kvdv1.JoinResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	if err := checkJoin(req.GetNode()); err != nil {
		return nil, err
	}
	if err := n.checkGossipKey(req); err != nil {
		return nil, err
	}
	var resp *kvdv1.JoinResponse
	err := n.metaLeaderConn(ctx, func(ctx context.Context) (err error) {
		resp, err = n.joinHere(ctx, req)
		return err
	}, func(ctx context.Context, c grpc.ClientConnInterface) (err error) {
		resp, err = kvdv1.NewPeerClient(c).Join(ctx, req)
		return err
	})
	return resp, err
}

func checkJoin(r *kvdv1.NodeRecord) error {
	refuse := func(format string, args ...any) error {
		return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, format, args...)
	}
	switch {
	case r.GetNodeId() != 0:
		return refuse("a node with an empty directory asks to be node %d: ids are given by the cluster and never twice, so leave the node id out; if node %d lost its directory, decommission it", r.GetNodeId(), r.GetNodeId())
	case r.GetIncarnation() == 0:
		return refuse("a node asks to join without an incarnation")
	}
	return checkNodeTexts(r)
}

func checkNodeTexts(r *kvdv1.NodeRecord) error {
	for _, t := range []struct{ what, text string }{
		{"address", r.GetAddress()}, {"zone", r.GetZone()}, {"rack", r.GetRack()}, {"host", r.GetHost()}, {"version", r.GetVersion()},
	} {
		if len(t.text) > maxNodeText {
			return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "the node's %s has %d bytes: want at most %d", t.what, len(t.text), maxNodeText)
		}
	}
	if host, port, err := net.SplitHostPort(r.GetAddress()); err != nil || host == "" || port == "" || port == "0" {
		return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "the node's address is %q: want the HOST:PORT at which the others reach it (advertise)", r.GetAddress())
	}
	return nil
}

// joinHere runs at the leader of group 0.
func (n *Node) joinHere(ctx context.Context, req *kvdv1.JoinRequest) (*kvdv1.JoinResponse, error) {
	if err := n.metaBarrier(ctx); err != nil {
		return nil, err
	}
	if err := n.reachesJoiner(ctx, req); err != nil {
		return nil, err
	}
	if err := n.checkPlaceFree(req.GetNode()); err != nil {
		return nil, err
	}
	if err := n.beginRegistry(ctx); err != nil {
		return nil, err
	}
	r, err := n.proposeNode(ctx, &kvdv1.NodeOp{Change: &kvdv1.NodeOp_Join{Join: req.GetNode()}})
	if err != nil {
		return nil, err
	}
	if s := r.node.GetState(); s == kvdv1.NodeState_NODE_STATE_DECOMMISSIONED || s == kvdv1.NodeState_NODE_STATE_GONE {
		return nil, fail(kvdv1.ErrorDetail_REASON_WRONG_CLUSTER, "%s", goneAdvice(r.node))
	}
	d := n.directory()
	return &kvdv1.JoinResponse{Manifest: n.identity.Load().manifest, NodeId: r.node.GetNodeId(), Nodes: d.nodes, NodesIndex: d.index}, nil
}

// reachesJoiner looks whether it is this joiner that answers at its address, before an id
// is spent on it: the leader has to bring it group 0.
func (n *Node) reachesJoiner(ctx context.Context, req *kvdv1.JoinRequest) error {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	addr := req.GetNode().GetAddress()
	conn, err := n.peers.conn(addr)
	if err != nil {
		return err
	}
	r, err := kvdv1.NewPeerClient(conn).Hello(ctx, &kvdv1.HelloRequest{From: n.self()})
	if err != nil {
		return failJoinLater("node %d, which leads group 0, does not reach the new node at %s (%s): give it an address that the others reach (advertise)", n.id(), addr, status.Convert(err).Message())
	}
	if r.GetSelf().GetBootId() != req.GetBootId() {
		return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "another node answers at %s, the address that the new one gives (node %d of cluster %q): give it an address of its own (advertise)", addr, r.GetSelf().GetNodeId(), r.GetSelf().GetClusterId())
	}
	return n.checkProtocol(r.GetSelf())
}

// checkPlaceFree refuses a new node at the address of one that has not left: the others
// would go on to look for that one there.
func (n *Node) checkPlaceFree(joiner *kvdv1.NodeRecord) error {
	for _, r := range n.registry.nodes() {
		if r.GetAddress() != joiner.GetAddress() || r.GetState() == kvdv1.NodeState_NODE_STATE_GONE || r.GetIncarnation() == joiner.GetIncarnation() {
			continue
		}
		id, first := r.GetNodeId(), ""
		if r.GetState() != kvdv1.NodeState_NODE_STATE_DECOMMISSIONED {
			first = fmt.Sprintf("kvctl decommission %d (if too few nodes would be left, let another join first, at an address of its own), ", id)
		}
		return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "%s is the address of node %d, which is %s. If that node lost its directory: %swait until kvctl members says that it is gone, and start this one again. If not, give this one an address of its own (advertise)", r.GetAddress(), id, stateName(r.GetState()), first)
	}
	return nil
}

// failJoinLater is for what may be otherwise when the joiner asks again. It must not be
// taken for a leader that is missing, which is looked for anew.
func failJoinLater(format string, args ...any) error {
	return status.Errorf(codes.FailedPrecondition, format, args...)
}

func goneAdvice(r *kvdv1.NodeRecord) string {
	return fmt.Sprintf("node %d is %s: its id is never used again. To come back, start it with an empty directory and --join", r.GetNodeId(), stateName(r.GetState()))
}

// announce tells group 0 where this node is, if what it knows is something else.
func (n *Node) announce(ctx context.Context) {
	mine, have := n.myRecord(), n.registry.find(n.id())
	if have == nil || have.GetState() == kvdv1.NodeState_NODE_STATE_GONE {
		return
	}
	same := proto.Clone(have).(*kvdv1.NodeRecord)
	same.State, same.JoinedUnixMs, same.SinceUnixMs, same.LeadersOnly = 0, 0, 0, false
	if proto.Equal(same, mine) {
		return
	}
	req := &kvdv1.AnnounceRequest{Node: mine}
	err := errors.New("no leader of group 0 is known")
	if n.host.Group(0).Status().Leader != 0 {
		_, err = n.Announce(ctx, req)
	}
	// A leader that looks for this node elsewhere does not reach it, so it knows none.
	for _, p := range n.others() {
		if err == nil || ctx.Err() != nil {
			break
		}
		conn, cerr := n.peers.conn(p.Address)
		if cerr != nil {
			continue
		}
		call, cancel := context.WithTimeout(ctx, helloTimeout)
		_, err = kvdv1.NewPeerClient(conn).Announce(call, req)
		cancel()
	}
	if err != nil && ctx.Err() == nil {
		n.log.Info("the cluster has not heard yet where this node is; it will be told again", "err", err)
	}
}

// Announce implements kvdv1.PeerServer.
func (n *Node) Announce(ctx context.Context, req *kvdv1.AnnounceRequest) (*kvdv1.AnnounceResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	if err := checkNodeTexts(req.GetNode()); err != nil {
		return nil, err
	}
	err := n.metaLeaderConn(ctx, func(ctx context.Context) error {
		r, err := n.proposeNode(ctx, &kvdv1.NodeOp{Change: &kvdv1.NodeOp_Update{Update: req.GetNode()}})
		if err == nil && r.refused != "" {
			err = fail(kvdv1.ErrorDetail_REASON_WRONG_CLUSTER, "%s", r.refused)
		}
		return err
	}, func(ctx context.Context, c grpc.ClientConnInterface) error {
		_, err := kvdv1.NewPeerClient(c).Announce(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &kvdv1.AnnounceResponse{}, nil
}

// isForwarded tells that a node passed the call on.
func isForwarded(ctx context.Context) bool {
	in, _ := metadata.FromIncomingContext(ctx)
	return len(in.Get(forwardedKey)) > 0
}
