package server

import (
	"context"

	"google.golang.org/grpc"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

// Core is a node without its surroundings: storage, memory, groups and services, but no
// lock on a directory, no bootstrap, no listener, and nothing that runs by itself. Its
// owner carries what it sends, calls what it serves, and takes the steps of its groups.
// It is what a simulation runs.
type Core struct {
	n *Node
}

// CoreConfig is what a Core is told that a Node finds out or makes.
type CoreConfig struct {
	Config

	Manifest *kvdv1.Manifest // of the cluster that the node belongs to
	// Reopened tells that a Core was opened on this state before: stores that are empty
	// are lost ones then.
	Reopened bool
	BootID   uint64
	// Seed of the numbers by which proposals find who waits for them. It must not be
	// that of an earlier boot.
	Seed uint64

	// Send carries Raft's messages. They are the receiver's from then on; it must not
	// call back.
	Send func(to raft.NodeID, msgs []raft.GroupMessage)
	// Dial gives the way to the services of another node, for snapshots.
	Dial func(to raft.NodeID) (grpc.ClientConnInterface, error)
	// OnStore is arena.Config's.
	OnStore func(inRecord bool)
}

// coreTransport sends snapshots as every node does, and messages by the owner's hand.
type coreTransport struct {
	*peers
	send func(to raft.NodeID, msgs []raft.GroupMessage)
}

func (t coreTransport) Send(to raft.NodeID, msgs []raft.GroupMessage) { t.send(to, msgs) }

// OpenCore opens storage, memory and groups from what cfg.FS has.
func OpenCore(cfg CoreConfig) (*Core, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	n := newNode(cfg.Config.withDefaults(), cfg.BootID)
	n.core = &cfg
	n.peers.dial = cfg.Dial
	n.transport = coreTransport{n.peers, cfg.Send}
	n.advertise = n.cfg.ListenAddr
	n.identity.Store(&identity{manifest: cfg.Manifest, nodeID: cfg.NodeID, active: true, opened: cfg.Reopened})
	c := &Core{n: n}
	for _, step := range []func() error{n.openAuth, n.export.open, n.openStorage, n.openGroups} {
		if err := step(); err != nil {
			_ = n.release() // the step's error says it
			return nil, err
		}
	}
	n.hosting.Store(true)
	n.ready.Store(true)
	return c, nil
}

// Register adds the services to r. Calls get to them without the interceptors that say
// who calls, and so may do everything.
func (c *Core) Register(r grpc.ServiceRegistrar) {
	kvdv1.RegisterKVServer(r, c.n)
	kvdv1.RegisterAccessServer(r, c.n)
	kvdv1.RegisterClusterServer(r, c.n)
	kvdv1.RegisterPeerServer(r, c.n)
}

// Host has the groups: the data shards, by number, and group 0.
func (c *Core) Host() *raft.Host { return c.n.host }

// Flush makes durable what is applied, without which no log is cut.
func (c *Core) Flush() error { return c.n.engine.Flush() }

// Tick gives free what was in quarantine for long enough.
func (c *Core) Tick() { c.n.arena.Tick() }

// Expire proposes, where this node leads, what is past its time, and waits for it.
func (c *Core) Expire(ctx context.Context) { c.n.expireOnce(ctx) }

// Evictions counts the values that made room in memory for others.
func (c *Core) Evictions() uint64 { return c.n.arena.Stats().Evictions }

// Fatal yields the error that the node can not go on with.
func (c *Core) Fatal() <-chan error { return c.n.fatal }

// Close gives everything up at once, as far as a process that dies would: nothing is
// handed over. Calls that are under way are answered.
func (c *Core) Close() error {
	close(c.n.stopping)
	close(c.n.deaf)
	return c.n.release()
}
