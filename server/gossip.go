package server

import (
	"context"
	"crypto/hmac"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/connectivity"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/internal/gossip"
	"github.com/kvd-io/kvd/raft"
)

// GossipConfig of a node. Gossip is a hint: it tells operators which nodes seem to live,
// and nodes where one of them moved to. Nothing decides by it.
type GossipConfig struct {
	// Listen is the IP:PORT of gossip by UDP and TCP; port 0 takes a free one. "": this node
	// does not gossip.
	Listen string
	// KeyFile holds the key of the cluster's gossip, the same on every node; see
	// gossip.ParseKey. Nobody else may read the file. Without one the key is derived from
	// AuthConfig.PeerSecretFile; where there is none either and nodes need no proof, it
	// keeps clusters apart and is no secret.
	KeyFile string
	// Timing of probes; default gossip.BusyLAN.
	Timing gossip.Timing
}

// validateGossip tells what can be told before the node knows its cluster.
func (c Config) validateGossip() error {
	g := c.Gossip
	switch {
	case g.Listen == "" && g.KeyFile != "":
		return errors.New("gossip-key-file without gossip-listen, which means nothing: give the address to gossip at, or leave the key out")
	case g.Listen == "":
		return nil
	case g.KeyFile == "" && c.Auth.PeerSecretFile == "" && c.TLS.PeerCAFile != "":
		return errors.New("gossip-listen, and nodes that have to prove who they are by certificates, which gossip does not know: give every node the same gossip-key-file")
	}
	if _, err := netip.ParseAddrPort(g.Listen); err != nil {
		return fmt.Errorf("gossip-listen %q: want IP:PORT, such as 10.0.0.1:7402", g.Listen)
	}
	return nil
}

// gossiper is the node's part in gossip. A nil gossiper knows nothing.
type gossiper struct {
	node   *Node
	g      *gossip.Gossip
	log    *slog.Logger
	remedy string // the file of what is remembered
	mu     struct {
		sync.Mutex
		addresses map[uint64]string // gRPC, as nodes tell it themselves
	}
}

// gossipFile remembers what the next start needs. What it holds is a hint, but for the
// generation, which has to grow: without the file the clock gives it.
const gossipFile = "gossip.json"

type gossipJSON struct {
	Generation uint64   `json:"generation"`
	Seen       []string `json:"seen"` // where other nodes gossiped
}

// loadGossipKey also finds a key that can not be used before anything has happened. The
// second result is whether it is a secret.
func (n *Node) loadGossipKey(clusterID string) (gossip.Key, bool, error) {
	switch c := n.cfg; {
	case c.Gossip.KeyFile != "":
		b, err := readSecret(c.Gossip.KeyFile)
		if err != nil {
			return gossip.Key{}, false, err
		}
		k, err := gossip.ParseKey(b)
		if err != nil {
			return gossip.Key{}, false, fmt.Errorf("%w: %s: %w", ErrConfig, c.Gossip.KeyFile, err)
		}
		return k, true, nil
	case n.auth.peerProof != "":
		return gossip.DeriveKey([]byte(n.auth.peerProof), clusterID), true, nil
	}
	return gossip.DeriveKey([]byte("no secret"), clusterID), false, nil
}

// gossipProof shows that this node has the key of gossip from a file; nil: it has no such
// file. A key that is derived needs none: who joins has shown the secret behind it.
func (n *Node) gossipProof(incarnation uint64) ([]byte, error) {
	if n.cfg.Gossip.Listen == "" || n.cfg.Gossip.KeyFile == "" {
		return nil, nil
	}
	key, _, err := n.loadGossipKey("")
	if err != nil {
		return nil, err
	}
	return key.Proof(incarnation), nil
}

// checkGossipKey refuses a node that would join and then not be heard in gossip. Later a
// node may have another key than others for a while: keys are changed node by node.
func (n *Node) checkGossipKey(req *kvdv1.JoinRequest) error {
	if n.cfg.Gossip.Listen == "" || !req.GetGossips() {
		return nil
	}
	mine, err := n.gossipProof(req.GetNode().GetIncarnation())
	if err != nil {
		return failJoinLater("node %d can not read its own gossip key: %s", n.id(), err)
	}
	its, seen := req.GetGossipProof(), ""
	switch {
	case hmac.Equal(mine, its):
		return nil
	case len(its) == 0:
		seen = fmt.Sprintf("node %d has a gossip-key-file, and the new node has none", n.id())
	case len(mine) == 0:
		seen = fmt.Sprintf("the new node has a gossip-key-file, and node %d has none", n.id())
	default:
		seen = fmt.Sprintf("the gossip-key-file of the new node is not that of node %d", n.id())
	}
	return fail(kvdv1.ErrorDetail_REASON_DENIED, "%s: give every node the same gossip-key-file. Nothing was changed", seen)
}

// openGossip listens, if this node is to gossip. The cluster must be known.
func (n *Node) openGossip(ctx context.Context) error {
	if n.cfg.Gossip.Listen == "" || n.core != nil {
		return nil
	}
	id := n.identity.Load()
	key, secret, err := n.loadGossipKey(id.manifest.GetClusterId())
	if err != nil {
		return err
	}
	listen := netip.MustParseAddrPort(n.cfg.Gossip.Listen) // Validate looked at it
	advertise, err := n.gossipAdvertise(ctx, listen)
	if err != nil {
		return err
	}
	gs := &gossiper{node: n, log: slog.New(newCalmHandler(n.log.Handler())), remedy: filepath.Join(n.cfg.DataDir, gossipFile)}
	gs.mu.addresses = map[uint64]string{}
	kept := gs.load()
	kept.Generation = max(kept.Generation+1, uint64(max(1, n.cfg.Clock.Now().UnixMilli())))
	if err := gs.save(kept); err != nil {
		return fmt.Errorf("%w %s: write %s: %w", ErrDataDir, n.cfg.DataDir, gossipFile, err)
	}
	gs.g, err = gossip.Start(gossip.Config{
		ClusterID: id.manifest.GetClusterId(), NodeID: id.nodeID, Incarnation: id.incarnation(), Generation: kept.Generation, Key: key,
		ListenAddr: n.cfg.Gossip.Listen, AdvertiseAddr: advertise,
		Meta:   gossip.Meta{Address: n.advertise, Zone: n.cfg.Zone, Rack: n.cfg.Rack, Host: n.cfg.Host, Version: n.cfg.Version, Transports: n.export.names()},
		Seeds:  func(ctx context.Context) []string { return slices.Concat(kept.Seen, n.askContacts(ctx)) },
		Lookup: n.cfg.Lookup, Admit: gs.admit, OnEvent: func(e gossip.Event) { gs.event(e, kept.Generation) },
		Timing: n.cfg.Gossip.Timing, Logger: gs.log,
	})
	switch {
	case errors.Is(err, gossip.ErrConfig):
		return fmt.Errorf("%w: %w", ErrConfig, err)
	case err != nil:
		return err
	}
	if !secret && !listen.Addr().IsLoopback() {
		n.log.Warn("gossip beyond loopback without a secret key: whoever reaches it can tell the nodes what he likes; give every node the same gossip-key-file", "listen", n.cfg.Gossip.Listen)
	}
	n.gossip.Store(gs)
	n.metrics.registry.MustRegister(newGossipCollector(gs.g))
	n.background(gs.joinOthers)
	n.log.Info("gossips", "address", gs.g.Addr().String(), "start", kept.Generation)
	return nil
}

// gossipAdvertise is where others gossip with this node, where it listens on every
// address: at the host of its gRPC. "": where it listens.
func (n *Node) gossipAdvertise(ctx context.Context, listen netip.AddrPort) (string, error) {
	if !listen.Addr().IsUnspecified() {
		return "", nil
	}
	host, _, err := net.SplitHostPort(n.advertise)
	if err != nil {
		return "", fmt.Errorf("%w: advertise address %q: %w", ErrConfig, n.advertise, err)
	}
	hosts := []string{host}
	if _, err := netip.ParseAddr(host); err != nil {
		ctx, cancel := context.WithTimeout(ctx, helloTimeout)
		defer cancel()
		if hosts, err = n.cfg.Lookup(ctx, host); err != nil {
			return "", fmt.Errorf("%w: gossip-listen is on every address, and the host of the advertised one resolves to nothing: %w", ErrConfig, err)
		}
	}
	for _, h := range hosts {
		if a, err := netip.ParseAddr(h); err == nil && !a.IsUnspecified() && listen.Port() != 0 {
			return netip.AddrPortFrom(a, listen.Port()).String(), nil
		}
	}
	return "", fmt.Errorf("%w: gossip-listen %s is on every address or a free port, and it is not known how others reach it: give one address of this host, or advertise", ErrConfig, n.cfg.Gossip.Listen)
}

func (gs *gossiper) load() (kept gossipJSON) {
	b, err := os.ReadFile(gs.remedy)
	if err == nil {
		err = json.Unmarshal(b, &kept)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		gs.log.Warn("what was remembered of gossip is lost; the other nodes are asked by gRPC", "err", err)
		return gossipJSON{}
	}
	return kept
}

func (gs *gossiper) save(kept gossipJSON) error {
	b, err := json.MarshalIndent(kept, "", "  ")
	if err != nil {
		return err
	}
	return writeDurably(filepath.Dir(gs.remedy), gossipFile, append(b, '\n'))
}

// joinOthers looks for the others at the start, a few times in short order: all nodes may
// be starting. After that gossip itself looks.
func (gs *gossiper) joinOthers(ctx context.Context) {
	told := ""
	for wait := 250 * time.Millisecond; wait < 10*time.Second; wait *= 2 {
		seeds := slices.Concat(gs.load().Seen, gs.node.askContacts(ctx))
		joined, err := gs.g.Join(ctx, seeds...)
		if joined > 0 || ctx.Err() != nil || errors.Is(err, gossip.ErrClosed) {
			return
		}
		if errors.Is(err, gossip.ErrForeign) && err.Error() != told {
			told = err.Error()
			gs.log.Warn("gossip was refused by another node", "err", err)
		}
		pause(ctx, wait)
	}
}

// askContacts asks the nodes that this one knows where they gossip.
func (n *Node) askContacts(ctx context.Context) (at []string) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, p := range n.others() {
		wg.Add(1)
		go func() {
			defer wg.Done()
			conn, err := n.peers.connTo(raft.NodeID(p.NodeID))
			if err != nil {
				return
			}
			r, err := kvdv1.NewGossipClient(conn).Contact(ctx, &kvdv1.ContactRequest{})
			if err == nil && r.GetGossipAddress() != "" && r.GetClusterId() == n.ClusterID() {
				mu.Lock()
				at = append(at, r.GetGossipAddress())
				mu.Unlock()
			}
		}()
	}
	wg.Wait()
	slices.Sort(at)
	return at
}

// admit refuses whoever has an id of this cluster and is not the node that was given it.
func (gs *gossiper) admit(m gossip.Meta) error {
	r := gs.node.directory().find(m.NodeID)
	switch {
	case r == nil: // it may have joined a moment ago
		return nil
	case r.GetIncarnation() != m.Incarnation:
		return fmt.Errorf("node %d has incarnation %016x, recorded is %016x: its directory is a copy or was made anew; an id is never used twice", m.NodeID, m.Incarnation, r.GetIncarnation())
	case r.GetState() == kvdv1.NodeState_NODE_STATE_GONE:
		return fmt.Errorf("node %d has left the cluster", m.NodeID)
	}
	return nil
}

// event takes in what gossip tells: where to find a node, and that it can be spoken to.
func (gs *gossiper) event(e gossip.Event, generation uint64) {
	m := e.Member
	gs.mu.Lock()
	gs.mu.addresses[m.NodeID] = m.Address
	gs.mu.Unlock()
	if m.State == gossip.Alive && e.Before.State != gossip.Alive || e.Moved() {
		gs.node.peers.isUp(raft.NodeID(m.NodeID))
	}
	if e.Before.GossipAddr == m.GossipAddr {
		return
	}
	kept := gossipJSON{Generation: generation}
	for _, m := range gs.g.Members() {
		kept.Seen = append(kept.Seen, m.GossipAddr.String())
	}
	if err := gs.save(kept); err != nil {
		gs.log.Warn("where the other nodes gossip could not be noted", "err", err)
	}
}

// addressOf a node, as it tells itself; "": it does not.
func (gs *gossiper) addressOf(id raft.NodeID) string {
	if gs == nil {
		return ""
	}
	gs.mu.Lock()
	defer gs.mu.Unlock()
	return gs.mu.addresses[uint64(id)]
}

// reachable is the connection to use for a node: the one to the address that is recorded,
// but where nobody answers there and the node says that it is elsewhere, that one. Who
// answers has to prove that it is the node, as ever.
func (p *peers) reachable(id raft.NodeID, recorded string) (string, error) {
	c, err := p.conn(recorded)
	if err != nil {
		return "", err
	}
	if told := p.node.gossip.Load().addressOf(id); told != "" && told != recorded && c.GetState() == connectivity.TransientFailure {
		return told, nil
	}
	return recorded, nil
}

// leaveGossip tells the others that this node stops; what it returns is closed when they
// were told, or after a moment.
func (n *Node) leaveGossip(ctx context.Context) <-chan struct{} {
	done := make(chan struct{})
	gs := n.gossip.Load()
	if gs == nil {
		close(done)
		return done
	}
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		if err := gs.g.Leave(ctx); err != nil {
			gs.log.Info("the others may take this node for dead: they were not told that it stops", "err", err)
		}
	}()
	return done
}

func (n *Node) closeGossip() error {
	if gs := n.gossip.Load(); gs != nil {
		return gs.g.Close()
	}
	return nil
}

// gossipService implements kvdv1.GossipServer.
type gossipService struct {
	kvdv1.UnimplementedGossipServer
	n *Node
}

// Contact implements kvdv1.GossipServer.
func (s gossipService) Contact(context.Context, *kvdv1.ContactRequest) (*kvdv1.ContactResponse, error) {
	gs := s.n.gossip.Load()
	if gs == nil {
		return &kvdv1.ContactResponse{}, nil
	}
	return &kvdv1.ContactResponse{ClusterId: s.n.ClusterID(), GossipAddress: gs.g.Addr().String()}, nil
}

// Liveness implements kvdv1.GossipServer.
func (s gossipService) Liveness(context.Context, *kvdv1.LivenessRequest) (*kvdv1.LivenessResponse, error) {
	n := s.n
	gs := n.gossip.Load()
	if gs == nil {
		return &kvdv1.LivenessResponse{}, nil
	}
	r := &kvdv1.LivenessResponse{Enabled: true}
	r.Nodes = append(r.Nodes, &kvdv1.NodeLiveness{
		NodeId: n.id(), State: kvdv1.LivenessState_LIVENESS_STATE_ALIVE, SinceUnixMs: n.started.UnixMilli(), HeardUnixMs: n.cfg.Clock.Now().UnixMilli(),
		Address: n.advertise, GossipAddress: gs.g.Addr().String(), Version: n.cfg.Version, Zone: n.cfg.Zone, Rack: n.cfg.Rack, Host: n.cfg.Host, Transports: n.export.names(),
	})
	for _, m := range gs.g.Members() {
		if gs.admit(m.Meta) == nil {
			r.Nodes = append(r.Nodes, livenessOf(m))
		}
	}
	for _, rec := range n.directory().nodes {
		heard := slices.ContainsFunc(r.GetNodes(), func(l *kvdv1.NodeLiveness) bool { return l.GetNodeId() == rec.GetNodeId() })
		if !heard && rec.GetState() != kvdv1.NodeState_NODE_STATE_GONE {
			r.Nodes = append(r.Nodes, &kvdv1.NodeLiveness{NodeId: rec.GetNodeId(), Address: rec.GetAddress(), Zone: rec.GetZone(), Rack: rec.GetRack(), Host: rec.GetHost()})
		}
	}
	slices.SortFunc(r.Nodes, func(a, b *kvdv1.NodeLiveness) int { return int(int64(a.GetNodeId()) - int64(b.GetNodeId())) })
	return r, nil
}

func livenessOf(m gossip.Member) *kvdv1.NodeLiveness {
	states := map[gossip.State]kvdv1.LivenessState{
		gossip.Alive: kvdv1.LivenessState_LIVENESS_STATE_ALIVE, gossip.Suspect: kvdv1.LivenessState_LIVENESS_STATE_SUSPECT,
		gossip.Dead: kvdv1.LivenessState_LIVENESS_STATE_DEAD, gossip.Left: kvdv1.LivenessState_LIVENESS_STATE_LEFT,
	}
	l := &kvdv1.NodeLiveness{
		NodeId: m.NodeID, State: states[m.State], SinceUnixMs: m.Since.UnixMilli(), Address: m.Address, GossipAddress: m.GossipAddr.String(),
		Version: m.Version, Zone: m.Zone, Rack: m.Rack, Host: m.Host, Transports: m.Transports,
	}
	if !m.Heard.IsZero() {
		l.HeardUnixMs = m.Heard.UnixMilli()
	}
	return l
}

// gossipCollector exports what gossip counts.
type gossipCollector struct {
	g                                                   *gossip.Gossip
	members, packets, bytes, streams, refused, lateness *prometheus.Desc
}

func newGossipCollector(g *gossip.Gossip) *gossipCollector {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return &gossipCollector{
		g:        g,
		members:  d("kvd_gossip_members", "Other nodes by how they seem to this one: alive, suspect, dead or left.", "state"),
		packets:  d("kvd_gossip_packets_total", "Gossip packets by direction.", "direction"),
		bytes:    d("kvd_gossip_bytes_total", "Bytes of gossip packets by direction.", "direction"),
		streams:  d("kvd_gossip_streams_total", "Gossip connections by direction; refused ones found too many open.", "direction"),
		refused:  d("kvd_gossip_refused_total", "Gossip refused: of another cluster (label), of another key, of nodes not let in (member), of two processes as one node (conflict).", "reason"),
		lateness: d("kvd_gossip_lateness", "How late this node is with its own part in gossip, by its own opinion; 0 is good."),
	}
}

// Describe implements prometheus.Collector.
func (c *gossipCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.members, c.packets, c.bytes, c.streams, c.refused, c.lateness} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *gossipCollector) Collect(ch chan<- prometheus.Metric) {
	s := c.g.Stats()
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge(c.members, s.Alive, "alive")
	gauge(c.members, s.Suspect, "suspect")
	gauge(c.members, s.Dead, "dead")
	gauge(c.members, s.Left, "left")
	count(c.packets, s.PacketsIn, "in")
	count(c.packets, s.PacketsOut, "out")
	count(c.bytes, s.BytesIn, "in")
	count(c.bytes, s.BytesOut, "out")
	count(c.streams, s.StreamsIn, "in")
	count(c.streams, s.StreamsOut, "out")
	count(c.streams, s.StreamsRefused, "refused")
	count(c.refused, s.RefusedLabel, "label")
	count(c.refused, s.RefusedKey, "key")
	count(c.refused, s.RefusedMember, "member")
	count(c.refused, s.Conflicts, "conflict")
	gauge(c.lateness, s.Health)
}
