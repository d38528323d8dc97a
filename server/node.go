package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/arena"
	"github.com/kvd-io/kvd/storage/engine"
)

// Node is one running kvd node.
type Node struct {
	kvdv1.UnimplementedKVServer
	kvdv1.UnimplementedAccessServer
	kvdv1.UnimplementedClusterServer
	kvdv1.UnimplementedPeerServer

	cfg       Config
	log       *slog.Logger
	bootID    uint64
	started   time.Time
	advertise string

	dir       *dataDir
	identity  atomic.Pointer[identity]
	adoptMu   sync.Mutex // held by who writes the identity
	activated chan struct{}
	stopOnce  sync.Once

	engine     *engine.Engine
	arena      *arena.Arena
	host       *raft.Host
	peers      *peers
	transport  raft.Transport // peers, but in a Core
	core       *CoreConfig    // nil: this is a whole node
	boots      *boots
	export     *exporter
	namespaces *namespaces
	registry   *registry
	shardMap   *shardMap
	gossip     atomic.Pointer[gossiper]  // nil: this node does not gossip
	known      atomic.Pointer[directory] // nil: what the manifest says
	meta       *machine
	shards     atomic.Pointer[map[uint32]*shard] // replaced, never changed
	replicas   replicas
	heard      atomic.Pointer[keeper] // what keep heard, while it keeps; never changed
	sessions   *sessions
	auth       auth
	tokens     *tokens
	disk       *diskWatch
	leaders    *leaderNews
	topology   *topology
	metrics    *metrics
	pace       *pace     // of snapshots that are sent
	flushed    time.Time // upkeep's: the last flush for the log's sake
	retried    time.Time // upkeep's: when refused memory was offered again

	listener net.Listener
	grpc     *grpc.Server
	health   *health.Server

	ready    atomic.Bool
	hosting  atomic.Bool   // peers' messages are taken; before ready, where the node joins
	doubted  atomic.Bool   // another process may be this node: see beginDoubt
	calls    *gate         // unary calls in progress
	writes   *gate         // proposals in progress
	load     *load         // of clients
	stopping chan struct{} // closed when sessions are to end
	deaf     chan struct{} // closed when peers' streams are to end
	fatal    chan error    // capacity 1: what stopped the node

	lost        lostNodes     // as keep sees it
	stewardWake chan struct{} // capacity 1
	moving      chan struct{} // capacity 1: a node is being drained or taken out; see moveNode
	moverWake   chan struct{} // capacity 1

	bgCtx    context.Context
	bgCancel context.CancelFunc
	bg       sync.WaitGroup
}

const (
	// maxStreams of one connection at a time: calls and sessions. More wait at the
	// client.
	maxStreams = 1 << 16
	// streamGrace is how long Stop waits for streams after it told them to end.
	streamGrace = 500 * time.Millisecond
)

// Start takes the data directory, joins (or makes) the cluster and returns once the
// node serves. ctx bounds the start only.
func Start(ctx context.Context, cfg Config) (*Node, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	n := newNode(cfg, randomID())
	if err := n.start(ctx); err != nil {
		return nil, errors.Join(err, n.release())
	}
	return n, nil
}

func newNode(cfg Config, bootID uint64) *Node {
	n := &Node{
		cfg: cfg, log: cfg.Logger, bootID: bootID, started: cfg.Clock.Now(),
		activated: make(chan struct{}, 1), calls: newGate(), writes: newGate(), load: newLoad(defaultLoadLimits), stopping: make(chan struct{}), deaf: make(chan struct{}), fatal: make(chan error, 1),
		stewardWake: make(chan struct{}, 1), moving: make(chan struct{}, 1), moverWake: make(chan struct{}, 1),
		sessions: newSessions(), metrics: newMetrics(), leaders: newLeaderNews(), topology: newTopology(),
		disk: newDiskWatch(cfg.FS, cfg.DataDir, cfg.MinFreeDisk),
	}
	n.bgCtx, n.bgCancel = context.WithCancel(context.Background())
	n.pace = newPace(cfg.SnapshotRate, func(d time.Duration) { n.metrics.snapshotThrottled.Add(d.Seconds()) })
	n.peers, n.boots, n.export = newPeers(n), newBoots(), newExporter(n)
	n.shards.Store(&map[uint32]*shard{})
	n.transport = n.peers
	return n
}

// start reads as the story of a node's start. Each step needs those before it.
func (n *Node) start(ctx context.Context) (err error) {
	if err := n.openAuth(); err != nil {
		return err
	}
	// The lock comes before everything that could serve this directory's memory.
	if n.dir, err = openDataDir(n.cfg.DataDir); err != nil {
		return err
	}
	if err := n.fence(ctx, time.Now()); err != nil {
		return err
	}
	id, err := n.dir.loadIdentity()
	if err != nil {
		return err
	}
	if err := n.checkFormats(); err != nil {
		return err
	}
	if id != nil {
		n.identity.Store(id)
		if have := id.manifest.GetShards(); have != n.cfg.Shards {
			n.log.Warn("the number of shards was fixed when the cluster was made; the configured one means nothing", "shards", have, "configured", n.cfg.Shards)
		}
	}
	if err := n.findOut(id); err != nil {
		return err
	}
	if err := n.listen(); err != nil {
		return err
	}
	if id == nil && len(n.cfg.Join) > 0 {
		// The transports need the node's id; what can not be is found before it has one.
		if err := n.tryOut(ctx); err != nil {
			return err
		}
		if err := n.join(ctx); err != nil {
			return err
		}
	}
	// Before the node takes part in anything: a transport that can not be opened as it is
	// configured is found while nothing has happened yet.
	if err := n.export.open(); err != nil {
		return err
	}
	// Peers may say hello, adopt and activate from here on; everyone else is told that
	// the node is starting.
	if err := n.joinCluster(ctx); err != nil {
		return err
	}
	if err := n.openGossip(ctx); err != nil {
		return err
	}
	if err := n.openStorage(); err != nil {
		return err
	}
	if err := n.openGroups(); err != nil {
		return err
	}
	if err := n.markOpened(); err != nil {
		return err
	}
	n.metrics.registry.MustRegister(newNodeCollector(n))
	if _, err := n.disk.look(); err != nil {
		return err
	}
	n.hosting.Store(true)
	if n.identity.Load().joined == 0 {
		n.ready.Store(true)
	}
	n.host.Start()
	n.peers.greet() // their answers may end it again: see beginDoubt
	if err := n.awaitRegistry(ctx); err != nil {
		return err
	}
	n.ready.Store(true)
	n.health.SetServingStatus("", healthpb.HealthCheckResponse_SERVING)
	n.background(n.upkeep)
	n.background(n.watchHolders)
	n.background(n.expiry)
	n.background(n.tellLeaders)
	n.background(n.watchTopology)
	n.background(n.steward)
	n.background(n.mover)
	n.background(n.keep)
	n.log.Info("node serves", "cluster", n.identity.Load().manifest.GetClusterId(), "node", n.id(), "boot", fmt.Sprintf("%016x", n.bootID),
		"address", n.advertise, "transports", n.export.names(), "shards", len(n.localShards()))
	return nil
}

// checkFormats refuses what a newer version wrote while nothing is touched yet: who opens
// the one file would have changed others.
func (n *Node) checkFormats() error {
	if _, err := n.dir.loadReplicas(); err != nil {
		return err
	}
	return engine.CheckFormat(n.cfg.FS, n.cfg.DataDir)
}

// findOut takes what can be known of this node's id and of the others before anyone is
// asked. id may be nil.
func (n *Node) findOut(id *identity) error {
	if id == nil {
		switch {
		case n.cfg.NodeID == 0 && n.cfg.Bootstrap:
			n.cfg.NodeID = 1
		case n.cfg.NodeID == 0 && len(n.cfg.Join) == 0:
			return fmt.Errorf("%w: %s is empty: start this node with --bootstrap to make a new cluster, or with --join to come into one", ErrRefused, n.cfg.DataDir)
		case n.cfg.NodeID != 0 && len(n.cfg.Join) > 0:
			return fmt.Errorf("%w: %s is empty, and a node that joins is given its id by the cluster: leave out that it is node %d. If node %d lost its directory, decommission it: a voter that forgets may vote twice", ErrRefused, n.cfg.DataDir, n.cfg.NodeID, n.cfg.NodeID)
		}
		return nil
	}
	known, err := n.dir.loadDirectory()
	if err != nil {
		n.log.Warn("what was known of the other nodes is lost; they are looked for at the addresses that the cluster began with, and at those to join", "err", err)
		return nil
	}
	if known != nil {
		n.known.Store(known)
	}
	return nil
}

func (n *Node) listen() (err error) {
	n.listener, err = net.Listen("tcp", n.cfg.ListenAddr)
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Errorf("%w: listen on %s: %w: is another node running there?", ErrConfig, n.cfg.ListenAddr, err)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return fmt.Errorf("%w: listen on %s: %w: give an address of this host", ErrConfig, n.cfg.ListenAddr, err)
	case err != nil:
		return fmt.Errorf("%w: listen on %s: %w", ErrConfig, n.cfg.ListenAddr, err)
	}
	n.advertise = n.advertised()
	if len(n.cfg.Peers) == 0 {
		n.cfg.Peers = n.alone()
	}
	opts := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessageBytes), grpc.MaxSendMsgSize(maxMessageBytes), grpc.MaxConcurrentStreams(maxStreams),
		// What release closes, a handler may be using: Stop returns after the last.
		grpc.WaitForHandlers(true),
		// Fixed windows: with the default gRPC measures the bandwidth by a ping for every
		// few messages, which costs a small put more than it gains.
		grpc.InitialWindowSize(flowWindow), grpc.InitialConnWindowSize(flowWindow),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		grpc.ChainUnaryInterceptor(n.observe, n.guardUnary), grpc.ChainStreamInterceptor(n.guardStream),
	}
	if n.auth.tls != nil {
		opts = append(opts, grpc.Creds(n.auth.tls.creds()))
	}
	n.grpc = grpc.NewServer(opts...)
	kvdv1.RegisterKVServer(n.grpc, n)
	kvdv1.RegisterAccessServer(n.grpc, n)
	kvdv1.RegisterClusterServer(n.grpc, n)
	kvdv1.RegisterPeerServer(n.grpc, n)
	kvdv1.RegisterGossipServer(n.grpc, gossipService{n: n})
	kvdv1.RegisterBackupServer(n.grpc, newBackups(n))
	kvdv1.RegisterOperatorServer(n.grpc, operator{n: n})
	n.health = health.NewServer()
	n.health.SetServingStatus("", healthpb.HealthCheckResponse_NOT_SERVING)
	healthpb.RegisterHealthServer(n.grpc, n.health)
	reflection.Register(n.grpc)
	n.warnOfOpenDoors()
	n.background(func(context.Context) {
		if err := n.grpc.Serve(n.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			n.fail(fmt.Errorf("server: gRPC on %s: %w", n.listener.Addr(), err))
		}
	})
	return nil
}

// alone is what stands for peers where none are configured: this node, whose id is not
// known yet where it joins.
func (n *Node) alone() []PeerConfig {
	if n.id() == 0 {
		return nil
	}
	return []PeerConfig{{NodeID: n.id(), Address: n.advertise}}
}

// advertised is the address under which others reach this node: what the configuration
// says, or what the list of peers says of this node, or what was bound.
func (n *Node) advertised() string {
	if n.cfg.AdvertiseAddr != "" {
		return n.cfg.AdvertiseAddr
	}
	for _, p := range n.cfg.Peers {
		if p.NodeID == n.id() {
			return p.Address
		}
	}
	bound := n.listener.Addr().String()
	if tcp, ok := n.listener.Addr().(*net.TCPAddr); ok && tcp.IP.IsUnspecified() {
		n.log.Warn("this node listens on every address, and clients on other hosts are told one that means nothing there: give --advertise or --peers", "address", bound)
	}
	return bound
}

// observe counts and times every unary call.
func (n *Node) observe(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if !n.calls.enter() {
		return nil, failShuttingDown(n.id())
	}
	defer n.calls.leave()
	began := time.Now()
	resp, err := handler(ctx, req)
	n.metrics.rpc.WithLabelValues(info.FullMethod, status.Code(err).String()).Inc()
	n.metrics.rpcSeconds.WithLabelValues(info.FullMethod).Observe(time.Since(began).Seconds())
	return resp, err
}

func (n *Node) openStorage() (err error) {
	stores := engine.Config{
		Dir: n.cfg.DataDir, FS: n.cfg.FS, CacheBytes: n.cfg.CacheBytes, Logger: n.log, OnSync: n.metrics.onSync, KeepStagings: true,
		OnFatal: n.fail,
		OnDiskSlow: func(path string, took time.Duration) {
			n.log.Warn("the disk is slow", "path", path, "since", took)
		},
		OnBackgroundError: func(err error) { n.log.Warn("the store could not be flushed; it will be tried again", "err", err) },
	}
	var onStore func(inRecord bool)
	if n.core != nil {
		stores.UnpreparedLog, stores.DiskSlowAfter, onStore = true, -1, n.core.OnStore
	}
	n.engine, err = engine.Open(stores)
	if err != nil {
		return err
	}
	m := n.identity.Load().manifest
	n.arena, err = arena.New(arena.Config{
		HashSeed: m.GetHashSeed(), BootID: n.bootID, Shards: m.GetShards(),
		// A slot is used once in a boot: there must be some for replicas that come back.
		Slots:      max(4096, 4*int(m.GetShards())),
		LimitBytes: n.cfg.ArenaBytes, MaxChunkBytes: n.cfg.MaxChunkBytes, HugePages: n.cfg.HugePages, Quarantine: n.cfg.Quarantine,
		Name:    n.memoryName(),
		OnChunk: n.export.onChunk, OnChunkGone: n.export.onChunkGone, OnStore: onStore,
		Clock: n.cfg.Clock, Logger: n.log,
	})
	if err != nil {
		return err
	}
	n.export.control = n.arena.ControlMemory()
	return nil
}

// machine of a group with a replica here, or nil. The number may be a peer's.
func (n *Node) machine(g raft.GroupID) *machine {
	switch {
	case g == 0:
		return n.meta
	case g > math.MaxUint32:
		return nil
	}
	if sh := n.shard(uint32(g)); sh != nil {
		return sh.machine
	}
	return nil
}

// background runs f until the node stops; f ends when its context does.
func (n *Node) background(f func(context.Context)) {
	n.bg.Add(1)
	go func() {
		defer n.bg.Done()
		f(n.bgCtx)
	}()
}

// fail records what the node can not go on with.
func (n *Node) fail(err error) {
	select {
	case n.fatal <- err:
		n.log.Error("the node can not go on", "err", err)
	default:
	}
}

// Fatal yields the error that the node can not go on with. The owner should Stop it.
func (n *Node) Fatal() <-chan error { return n.fatal }

// id is this node's; 0: it has none yet.
func (n *Node) id() uint64 {
	if id := n.identity.Load(); id != nil {
		return id.nodeID
	}
	return n.cfg.NodeID
}

// Address is how others reach the node's gRPC.
func (n *Node) Address() string { return n.advertise }

// ClusterID of the cluster that the node belongs to.
func (n *Node) ClusterID() string { return n.identity.Load().manifest.GetClusterId() }

// Stop hands leadership over, finishes the calls that are in progress, ends the
// sessions and releases everything. After ctx it stops waiting for either. Stopping
// again does nothing and returns nil.
func (n *Node) Stop(ctx context.Context) (err error) {
	n.stopOnce.Do(func() { err = n.stop(ctx) })
	return err
}

func (n *Node) stop(ctx context.Context) error {
	n.health.Shutdown()
	left := n.leaveGossip(ctx)
	// A proposal that is under way when leadership goes has an unknown outcome. So
	// there are none: for the moment of the hand-over, new ones are told to try again.
	drained, cancel := context.WithTimeout(ctx, time.Duration(n.cfg.ElectionTicks)*n.cfg.TickInterval)
	select {
	case <-n.writes.close():
	case <-drained.Done():
		n.log.Warn("writes in progress were not waited for any longer")
	}
	cancel()
	n.handOver(ctx)
	select {
	case <-n.calls.close():
	case <-ctx.Done():
		n.log.Warn("calls in progress were not waited for any longer")
	}
	close(n.stopping)
	close(n.deaf)
	done := make(chan struct{})
	go func() {
		n.grpc.GracefulStop()
		close(done)
	}()
	// What is left are streams that end by themselves at once, and those that never do
	// (a client that watches the health service).
	grace := time.NewTimer(streamGrace)
	defer grace.Stop()
	select {
	case <-done:
	case <-grace.C:
	case <-ctx.Done():
	}
	<-left
	err := n.release()
	<-done
	return err
}

// handOver gives each shard that this node leads to the follower that is furthest.
func (n *Node) handOver(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(2*n.cfg.ElectionTicks)*n.cfg.TickInterval)
	defer cancel()
	var wg sync.WaitGroup
	moved, kept := atomic.Int64{}, atomic.Int64{}
	for id := range uint64(n.identity.Load().manifest.GetShards()) + 1 {
		g := n.host.Group(raft.GroupID(id))
		if g == nil || !g.Status().Leading {
			continue
		}
		to := bestFollower(g.Status())
		if to == 0 {
			kept.Add(1)
			continue
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := g.TransferLeader(ctx, to); err != nil {
				kept.Add(1)
				return
			}
			moved.Add(1)
		}()
	}
	wg.Wait()
	n.log.Info("leadership handed over", "shards", moved.Load(), "kept", kept.Load())
}

// bestFollower is the live voter with the longest log; 0: none.
func bestFollower(st raft.Status) raft.NodeID {
	var best raft.FollowerProgress
	for _, f := range st.Followers {
		if f.Active && !f.Learner && !f.Snapshot && (best.Node == 0 || f.Match > best.Match) {
			best = f
		}
	}
	return best.Node
}

// release gives up everything that start took, in reverse, as far as it came.
func (n *Node) release() error {
	var errs []error
	n.ready.Store(false)
	n.hosting.Store(false)
	// From here on no one-sided reader is confirmed by this node any more.
	for _, sh := range n.localShards() {
		sh.record.Retire()
	}
	n.bgCancel()
	errs = append(errs, n.closeGossip())
	n.peers.cancel()
	if n.grpc != nil {
		n.grpc.Stop()
	} else if n.listener != nil {
		errs = append(errs, n.listener.Close())
	}
	if n.host != nil {
		errs = append(errs, n.host.Close())
	}
	n.peers.close()
	exposed := n.export.close()
	errs = append(errs, exposed)
	n.bg.Wait()
	if n.arena != nil {
		errs = append(errs, n.arena.Close())
	}
	if n.engine != nil {
		for _, sh := range n.localShards() {
			errs = append(errs, sh.leaveStaged())
		}
		if n.meta != nil {
			errs = append(errs, n.engine.Flush(), n.meta.leaveStaged())
		}
		errs = append(errs, n.engine.Close())
	}
	if n.dir != nil {
		if exposed == nil {
			errs = append(errs, n.dir.leave())
		}
		errs = append(errs, n.dir.close())
	}
	return errors.Join(errs...)
}
