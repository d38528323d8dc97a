package server

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// Bootstrap is two-phase. The node that was told to bootstrap draws the manifest and
// has every node write it down (Adopt); only when all have, it declares the cluster
// active (Activate). No replica votes before it is active, and Adopt is never
// repeated after that: so a node that lost its directory can not be adopted again
// under an id that has voted.

// ErrRefused: this directory must not take part in that cluster. The text says why
// and what to do; nothing was changed.
var ErrRefused = errors.New("server: refused")

const (
	helloTimeout = 2 * time.Second
	retryPause   = 200 * time.Millisecond
)

func randomID() uint64 {
	var b [8]byte
	for {
		if _, err := rand.Read(b[:]); err != nil {
			panic(fmt.Sprintf("server: no randomness: %v", err)) // bug: crypto/rand never fails on Linux
		}
		if id := binary.LittleEndian.Uint64(b[:]); id != 0 {
			return id
		}
	}
}

// drawManifest makes a new cluster of the configured nodes.
func drawManifest(cfg Config) *kvdv1.Manifest {
	m := &kvdv1.Manifest{
		Format:        formatNumber,
		ClusterId:     fmt.Sprintf("%016x%016x", randomID(), randomID()),
		HashSeed:      randomID(),
		Shards:        cfg.Shards,
		CreatedUnixMs: cfg.Clock.Now().UnixMilli(),
	}
	for _, p := range cfg.Peers {
		m.Nodes = append(m.Nodes, &kvdv1.ManifestNode{NodeId: p.NodeID, Incarnation: randomID(), Address: p.Address})
	}
	sort.Slice(m.Nodes, func(i, j int) bool { return m.Nodes[i].NodeId < m.Nodes[j].NodeId })
	m.Replication = min(cfg.Replication, oddAtMost(uint32(len(m.Nodes))))
	if m.Replication < cfg.Replication && len(m.Nodes) == 1 {
		m.WantedReplication = cfg.Replication
	}
	return m
}

// checkManifest refuses what no drawManifest made: the file may be edited, and a peer
// may send anything.
func checkManifest(m *kvdv1.Manifest) error {
	switch {
	case len(m.GetClusterId()) != 32:
		return fmt.Errorf("cluster id %q: want 32 digits", m.GetClusterId())
	case m.GetShards() == 0 || m.GetShards() > maxShards:
		return fmt.Errorf("%d shards: want 1 to %d", m.GetShards(), maxShards)
	case m.GetReplication()%2 == 0 || m.GetReplication() > maxReplication || int(m.GetReplication()) > len(m.GetNodes()):
		return fmt.Errorf("replication %d over %d nodes: want an odd number up to %d and to the number of nodes", m.GetReplication(), len(m.GetNodes()), maxReplication)
	case m.GetWantedReplication() != 0 && (m.GetWantedReplication()%2 == 0 || m.GetWantedReplication() > maxReplication || m.GetWantedReplication() <= m.GetReplication()):
		return fmt.Errorf("replication %d that is to become %d: want an odd number up to %d that is larger", m.GetReplication(), m.GetWantedReplication(), maxReplication)
	}
	seen := map[uint64]bool{}
	for _, n := range m.GetNodes() {
		if n.GetNodeId() == 0 || n.GetIncarnation() == 0 || n.GetAddress() == "" || seen[n.GetNodeId()] {
			return fmt.Errorf("node %d at %q with incarnation %016x: want ids that differ, an address and an incarnation", n.GetNodeId(), n.GetAddress(), n.GetIncarnation())
		}
		seen[n.GetNodeId()] = true
	}
	return nil
}

func oddAtMost(n uint32) uint32 {
	if n%2 == 0 {
		n--
	}
	return n
}

// manifestPlacement of a group in a cluster as it begins: Replication nodes, starting at a
// different one for each shard. Group 0 is on all nodes: each needs its content.
func manifestPlacement(m *kvdv1.Manifest, group uint64) (voters, learners []uint64) {
	n := len(m.GetNodes())
	want := int(m.GetReplication())
	if group == 0 {
		for i, node := range m.GetNodes() {
			if i < max(want, min(int(oddAtMost(uint32(n))), 5)) {
				voters = append(voters, node.GetNodeId())
			} else {
				learners = append(learners, node.GetNodeId())
			}
		}
		return voters, learners
	}
	for i := range want {
		voters = append(voters, m.GetNodes()[(int(group-1)+i)%n].GetNodeId())
	}
	sort.Slice(voters, func(i, j int) bool { return voters[i] < voters[j] })
	return voters, nil
}

// joinCluster returns once this node's identity is durable and its cluster active.
func (n *Node) joinCluster(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, n.cfg.BootstrapTimeout)
	defer cancel()
	if id := n.identity.Load(); id != nil {
		if n.cfg.NodeID != 0 && id.nodeID != n.cfg.NodeID {
			return fmt.Errorf("%w: %s belongs to node %d of cluster %s, and this node was started as node %d: start it as node %d, or use another directory", ErrRefused, n.cfg.DataDir, id.nodeID, id.manifest.GetClusterId(), n.cfg.NodeID, id.nodeID)
		}
		if id.active {
			return n.checkPeersAgree(ctx, id)
		}
	} else if n.cfg.Bootstrap {
		if err := n.draw(ctx); err != nil {
			return err
		}
	}
	if id := n.identity.Load(); id != nil && id.leading {
		return n.activateAll(ctx, id)
	}
	return n.awaitActivation(ctx)
}

// draw makes the manifest and writes it down here, before anyone else hears of it.
func (n *Node) draw(ctx context.Context) error {
	for _, p := range n.cfg.Peers {
		if p.NodeID == n.id() {
			continue
		}
		r, err := n.helloUntilAnswered(ctx, p)
		if err != nil {
			return err
		}
		if id := r.GetSelf().GetClusterId(); id != "" {
			return fmt.Errorf("%w to bootstrap: node %d at %s already belongs to cluster %s. %s", ErrRefused, p.NodeID, p.Address, id, wipedAdvice(n.id(), r))
		}
	}
	id := &identity{manifest: drawManifest(n.cfg), nodeID: n.cfg.NodeID, leading: true}
	if err := n.dir.saveIdentity(id); err != nil {
		return err
	}
	n.identity.Store(id)
	n.log.Info("drew a new cluster", "cluster", id.manifest.GetClusterId(), "nodes", len(id.manifest.GetNodes()), "shards", id.manifest.GetShards(), "replication", id.manifest.GetReplication())
	return nil
}

func wipedAdvice(nodeID uint64, r *kvdv1.HelloResponse) string {
	if r.GetRecordedIncarnation() == 0 {
		return fmt.Sprintf("Node %d is not one of its members: give this node the peers of a cluster of its own, or start it with --join in place of the peers to come into that one", nodeID)
	}
	return fmt.Sprintf("Node %d is one of its voters, with a history that an empty directory does not have: a voter that forgets may vote twice. If the directory was only moved, put it back as it was; if it is lost, leave node %d out: the cluster goes on without it, and a node with an empty directory and --join takes its place under an id that was never used", nodeID, nodeID)
}

// helloUntilAnswered asks a peer who it is until it answers or ctx ends.
func (n *Node) helloUntilAnswered(ctx context.Context, p PeerConfig) (*kvdv1.HelloResponse, error) {
	var logged time.Time
	var told string
	var seen error // last, the end of ctx left out
	for {
		r, err := n.hello(ctx, p)
		if err == nil {
			return r, nil
		}
		if errors.Is(err, ErrRefused) {
			return nil, err
		}
		if seen == nil || ctx.Err() == nil {
			seen = err
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%w to bootstrap: node %d at %s did not answer within %v (%v): start all nodes, then the bootstrap", ErrRefused, p.NodeID, p.Address, n.cfg.BootstrapTimeout, seen)
		}
		// A new reason is told sooner: it may be one that waiting does not cure.
		quiet := 10 * time.Second
		if seen.Error() != told {
			quiet = time.Second
		}
		if time.Since(logged) > quiet {
			n.log.Info("waiting for a peer before bootstrap", "node", p.NodeID, "address", p.Address, "seen", seen)
			logged, told = time.Now(), seen.Error()
		}
		pause(ctx, retryPause)
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// hello asks a peer who it is. Where another answers, that is an error, and its answer is
// returned too. It is ErrRefused but where who answers has no id yet: it is about to get
// one, and may be the peer that is looked for.
func (n *Node) hello(ctx context.Context, p PeerConfig) (*kvdv1.HelloResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	conn, err := n.peers.conn(p.Address)
	if err != nil {
		return nil, err
	}
	r, err := kvdv1.NewPeerClient(conn).Hello(ctx, &kvdv1.HelloRequest{From: n.self(), ExpectNodeId: p.NodeID})
	if err != nil {
		return nil, err
	}
	switch got := r.GetSelf().GetNodeId(); got {
	case p.NodeID:
	case 0:
		return r, fmt.Errorf("server: who answers at %s has no id yet: node %d is starting, or a new node is in its place", p.Address, p.NodeID)
	default:
		return r, fmt.Errorf("%w: %s was expected to be node %d and says that it is node %d: correct the peers", ErrRefused, p.Address, p.NodeID, got)
	}
	return r, nil
}

// activateAll carries out both phases; it may be repeated after a crash.
func (n *Node) activateAll(ctx context.Context, id *identity) error {
	others := func(f func(kvdv1.PeerClient, *kvdv1.ManifestNode) error) error {
		for _, m := range id.manifest.GetNodes() {
			if m.GetNodeId() == n.id() {
				continue
			}
			if err := n.untilDone(ctx, m, f); err != nil {
				return err
			}
		}
		return nil
	}
	if !id.active {
		err := others(func(c kvdv1.PeerClient, m *kvdv1.ManifestNode) error {
			_, err := c.Adopt(ctx, &kvdv1.AdoptRequest{Manifest: id.manifest, NodeId: m.GetNodeId()})
			return err
		})
		if err != nil {
			return err
		}
		if err := n.becomeActive(); err != nil {
			return err
		}
	}
	return others(func(c kvdv1.PeerClient, m *kvdv1.ManifestNode) error {
		_, err := c.Activate(ctx, &kvdv1.ActivateRequest{ClusterId: id.manifest.GetClusterId()})
		return err
	})
}

// untilDone repeats f on one peer until it succeeds, is refused, or ctx ends.
func (n *Node) untilDone(ctx context.Context, m *kvdv1.ManifestNode, f func(kvdv1.PeerClient, *kvdv1.ManifestNode) error) error {
	for {
		conn, err := n.peers.conn(m.GetAddress())
		if err == nil {
			err = f(kvdv1.NewPeerClient(conn), m)
		}
		switch {
		case err == nil:
			return nil
		case status.Code(err) == codes.FailedPrecondition:
			return fmt.Errorf("%w: node %d at %s: %s", ErrRefused, m.GetNodeId(), m.GetAddress(), status.Convert(err).Message())
		case ctx.Err() != nil:
			return fmt.Errorf("server: bootstrap of cluster %s is half done: node %d at %s does not answer (%w): start this node again when it does", n.identity.Load().manifest.GetClusterId(), m.GetNodeId(), m.GetAddress(), err)
		}
		pause(ctx, retryPause)
	}
}

// becomeActive may be asked for twice at a time: by the bootstrapping node, and by this
// one having heard it from a peer.
func (n *Node) becomeActive() error {
	n.adoptMu.Lock()
	defer n.adoptMu.Unlock()
	active := *n.identity.Load()
	if active.active {
		return nil
	}
	active.active = true
	if err := n.dir.saveIdentity(&active); err != nil {
		return err
	}
	n.identity.Store(&active)
	return nil
}

// awaitActivation waits to be adopted and activated by the bootstrapping node.
func (n *Node) awaitActivation(ctx context.Context) error {
	if len(n.cfg.Peers) <= 1 && n.identity.Load() == nil {
		return fmt.Errorf("%w: %s is empty and this node has no peers: start it with --bootstrap to make a new cluster, or with --join to come into one", ErrRefused, n.cfg.DataDir)
	}
	logged := time.Now()
	for {
		if id := n.identity.Load(); id != nil && id.active {
			return nil
		}
		if err := n.askWhetherWiped(ctx); err != nil {
			return err
		}
		select {
		case <-n.activated:
		case <-time.After(retryPause):
		case <-ctx.Done():
			return fmt.Errorf("%w: %s is empty and no peer bootstrapped a cluster within %v: start one node with --bootstrap (once in a cluster's life)", ErrRefused, n.cfg.DataDir, n.cfg.BootstrapTimeout)
		}
		if time.Since(logged) > 10*time.Second {
			n.log.Info("waiting for the node that bootstraps the cluster", "peers", peerList(n.cfg.Peers))
			logged = time.Now()
		}
	}
}

func peerList(peers []PeerConfig) string {
	var b []string
	for _, p := range peers {
		b = append(b, fmt.Sprintf("%d=%s", p.NodeID, p.Address))
	}
	return strings.Join(b, ",")
}

// askWhetherWiped refuses to wait where the peers already have an active cluster:
// then this empty directory is a loss and not a beginning. For a directory that was
// adopted it asks whether activation was missed.
func (n *Node) askWhetherWiped(ctx context.Context) error {
	for _, p := range n.cfg.Peers {
		if p.NodeID == n.id() {
			continue
		}
		r, err := n.hello(ctx, p)
		if errors.Is(err, ErrRefused) {
			return err
		}
		if err != nil || !r.GetActive() {
			continue
		}
		id := n.identity.Load()
		if id == nil {
			return fmt.Errorf("%w: %s is empty, but node %d at %s already belongs to cluster %s. %s", ErrRefused, n.cfg.DataDir, p.NodeID, p.Address, r.GetSelf().GetClusterId(), wipedAdvice(n.id(), r))
		}
		if r.GetSelf().GetClusterId() == id.manifest.GetClusterId() && !id.active {
			return n.becomeActive()
		}
	}
	return nil
}

// checkPeersAgree asks the peers that answer whether this node is who it takes itself
// for. It waits only where one of them hears another boot of this node: of a process
// that has just died, or of a twin.
func (n *Node) checkPeersAgree(ctx context.Context, id *identity) error {
	n.warnOfMoves()
	if err := n.askAddressesToJoin(ctx, id); err != nil {
		return err
	}
	began, heard := time.Now(), ""
	for {
		now, sure, err := n.askPeers(ctx, id)
		if now == "" && (!sure || ctx.Err() != nil) {
			now = heard // who did not answer in time took nothing back
		}
		switch {
		case err != nil:
			return err
		case now == "":
			return nil
		case ctx.Err() != nil || time.Since(began) >= n.cfg.TwinPatience:
			return n.refuseTwin(now)
		case heard == "":
			n.log.Warn("another process speaks as this node: waiting for its end", "node", n.id(), "seen", now, "at most", n.cfg.TwinPatience)
		}
		heard = now
		pause(ctx, twinPoll)
	}
}

// askPeers looks, without waiting for anyone, for a peer that remembers another
// incarnation of this node or belongs to another cluster, which are errors, and for
// one that hears another boot of it: that is returned, as words for the operator. Where
// none is heard, sure tells that nobody ran out of time.
//
// A stranger at one address is no reason to stay away where another peer knows this node,
// nor where only the registry gives that address: somebody got it while its node is down.
// Nobody of this cluster takes him for that node. Another node of this cluster may be where
// one is looked for: it takes the place of one that has left, and this node is behind.
func (n *Node) askPeers(ctx context.Context, id *identity) (heard string, sure bool, err error) {
	heard, sure = n.twinAtHome(ctx, id)
	var stranger error
	known := false
	strange := func(p PeerConfig, err error) {
		if slices.ContainsFunc(n.cfg.Peers, func(c PeerConfig) bool { return c.Address == p.Address }) {
			stranger = errors.Join(stranger, err)
		}
		n.log.Warn("a stranger answers where another node is looked for", "node", p.NodeID, "address", p.Address, "seen", err)
	}
	for _, p := range n.others() {
		if p.Address == n.advertise {
			continue // whoever was there, it is this node now
		}
		r, err := n.hello(ctx, p)
		if self := r.GetSelf(); errors.Is(err, ErrRefused) {
			if self.GetClusterId() != id.manifest.GetClusterId() {
				strange(p, err)
				continue
			}
			if r.GetNodesIndex() == 0 {
				return "", false, err // the manifest alone says who there is: the peers are wrong
			}
			n.log.Info("another node answers where one is looked for", "node", p.NodeID, "address", p.Address, "answers", self.GetNodeId())
			p.NodeID, err = self.GetNodeId(), nil
		}
		sure = sure && !ranOutOfTime(err)
		if err != nil || r.GetSelf().GetClusterId() == "" {
			continue
		}
		if got, want := r.GetSelf().GetClusterId(), id.manifest.GetClusterId(); got != want {
			strange(p, fmt.Errorf("%w: %s belongs to cluster %s, but node %d at %s belongs to cluster %s: correct the peers or the directory", ErrRefused, n.cfg.DataDir, want, p.NodeID, p.Address, got))
			continue
		}
		if err := n.checkProtocol(r.GetSelf()); err != nil {
			return "", false, fmt.Errorf("%w: %s", ErrRefused, status.Convert(err).Message())
		}
		n.learn(r.GetNodesIndex(), r.GetNodes())
		if mine := findNode(r.GetNodes(), id.nodeID); mine.GetState() == kvdv1.NodeState_NODE_STATE_GONE {
			return "", false, fmt.Errorf("%w: %s", ErrRefused, goneAdvice(mine))
		}
		if got := r.GetRecordedIncarnation(); got == 0 && r.GetNodesIndex() < n.directory().index {
			continue // it has not heard of this node yet
		} else if got != id.incarnation() {
			return "", false, fmt.Errorf("%w: node %d at %s remembers incarnation %016x of node %d, this directory has %016x: it is a copy or a leftover; use the directory that the cluster knows", ErrRefused, p.NodeID, p.Address, got, n.id(), id.incarnation())
		}
		known = true
		if len(r.GetOtherBoots()) > 0 {
			heard = fmt.Sprintf("heard by node %d at %s", p.NodeID, p.Address)
		}
	}
	if !known && stranger != nil {
		return "", false, stranger
	}
	return heard, sure, nil
}

// Hello implements kvdv1.PeerServer.
func (n *Node) Hello(_ context.Context, req *kvdv1.HelloRequest) (*kvdv1.HelloResponse, error) {
	r := &kvdv1.HelloResponse{Self: n.self(), Protocol: protocol, Version: n.cfg.Version}
	if id := n.identity.Load(); id != nil {
		r.Active = id.active
		r.RecordedIncarnation = n.recorded(req.GetFrom().GetNodeId())
		if d := n.directory(); d.index > 0 {
			r.Nodes, r.NodesIndex = d.nodes, d.index
		}
		r.OtherBoots = n.boots.others(req.GetFrom().GetNodeId(), req.GetFrom().GetBootId())
	}
	return r, nil
}

// Adopt implements kvdv1.PeerServer.
func (n *Node) Adopt(_ context.Context, req *kvdv1.AdoptRequest) (*kvdv1.AdoptResponse, error) {
	n.adoptMu.Lock()
	defer n.adoptMu.Unlock()
	refuse := func(format string, args ...any) (*kvdv1.AdoptResponse, error) {
		return nil, fail(kvdv1.ErrorDetail_REASON_WRONG_CLUSTER, format, args...)
	}
	m := req.GetManifest()
	switch id := n.identity.Load(); {
	case req.GetNodeId() != n.id():
		return refuse("this is node %d, not node %d", n.id(), req.GetNodeId())
	case m.GetFormat() != formatNumber:
		return refuse("the manifest has format %d, this kvd knows %d: run the same kvd on all nodes to make a cluster", m.GetFormat(), formatNumber)
	case id != nil && !proto.Equal(id.manifest, m):
		return refuse("this directory already belongs to cluster %s", id.manifest.GetClusterId())
	case id != nil:
		return &kvdv1.AdoptResponse{}, nil
	case n.cfg.Bootstrap:
		return refuse("this node was told to bootstrap a cluster of its own: --bootstrap belongs to one node only")
	}
	if err := checkManifest(m); err != nil {
		return refuse("the manifest can not be one: %v", err)
	}
	id := &identity{manifest: m, nodeID: n.id()}
	if id.incarnation() == 0 {
		return refuse("the manifest of cluster %s does not list node %d", m.GetClusterId(), n.id())
	}
	if err := n.dir.saveIdentity(id); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	n.identity.Store(id)
	n.log.Info("adopted into a cluster", "cluster", m.GetClusterId())
	return &kvdv1.AdoptResponse{}, nil
}

// Activate implements kvdv1.PeerServer.
func (n *Node) Activate(_ context.Context, req *kvdv1.ActivateRequest) (*kvdv1.ActivateResponse, error) {
	id := n.identity.Load()
	if id == nil || id.manifest.GetClusterId() != req.GetClusterId() {
		return nil, fail(kvdv1.ErrorDetail_REASON_WRONG_CLUSTER, "this directory was never adopted into cluster %s", req.GetClusterId())
	}
	if !id.active {
		if err := n.becomeActive(); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		select {
		case n.activated <- struct{}{}:
		default:
		}
	}
	return &kvdv1.ActivateResponse{}, nil
}

// self is how this node introduces itself.
func (n *Node) self() *kvdv1.Identity {
	s := &kvdv1.Identity{NodeId: n.id(), BootId: n.bootID, Protocol: protocol, Needs: n.needs()}
	if id := n.identity.Load(); id != nil {
		s.ClusterId, s.Incarnation = id.manifest.GetClusterId(), id.incarnation()
	}
	return s
}
