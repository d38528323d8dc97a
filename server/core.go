package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/cockroachdb/pebble/v2/vfs"
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
	// SendHeartbeat carries the nodes' own heartbeats; it must not call back either.
	SendHeartbeat func(to raft.NodeID, hb raft.NodeHeartbeat)
	// Dial gives the way to the services of another node, for snapshots.
	Dial func(to raft.NodeID) (grpc.ClientConnInterface, error)
	// OnStore is arena.Config's.
	OnStore func(inRecord bool)
}

// coreTransport sends snapshots as every node does, and the rest by the owner's hand.
type coreTransport struct {
	*peers
	cfg *CoreConfig
}

func (t coreTransport) Send(to raft.NodeID, msgs []raft.GroupMessage) { t.cfg.Send(to, msgs) }

func (t coreTransport) SendHeartbeat(to raft.NodeID, hb raft.NodeHeartbeat) {
	t.cfg.SendHeartbeat(to, hb)
}

// OpenCore opens storage, memory and groups from what cfg.FS has.
func OpenCore(cfg CoreConfig) (*Core, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	n := newNode(cfg.Config.withDefaults(), cfg.BootID)
	n.core = &cfg
	n.peers.dial = cfg.Dial
	n.transport = coreTransport{n.peers, &cfg}
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

// Place proposes to group 0, which this node must lead, where the replicas of shards should
// be, or where they are.
func (c *Core) Place(ctx context.Context, op *kvdv1.ShardOp) error {
	cmd := &kvdv1.Command{LeaderUnixMs: c.n.cfg.Clock.Now().UnixMilli(), Op: &kvdv1.Command_Shard{Shard: op}}
	_, _, err := c.n.propose(ctx, 0, c.n.host.Group(0), cmd)
	return err
}

// Configuration is what the replica here knows of its shard's; nil: there is none here.
func (c *Core) Configuration(shard uint32) *kvdv1.ShardReport {
	sh := c.n.shard(shard)
	if sh == nil {
		return nil
	}
	return reportOf(shard, sh.g.Status())
}

// Move takes, where this node leads the shard, the next step of a move that group 0 wishes,
// and else lets the replica go, if the shard has left it. There must be one Move of a shard
// at a time.
func (c *Core) Move(ctx context.Context, shard uint32) error {
	sh := c.n.shard(shard)
	if sh == nil {
		return nil
	}
	st := sh.g.Status()
	switch {
	case !st.Leading && c.n.seemsLeft(sh, st):
		c.n.leaveIfLeft(ctx, sh)
		return nil
	case !st.Leading || c.n.planMoveOf(sh, st).none():
		return nil
	}
	return c.n.takeMoveStep(ctx, sh)
}

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

// fsList is the list of a Core's replicas, in a file beside its stores.
type fsList struct {
	fs  vfs.FS
	dir string
}

func (l fsList) path() string { return l.fs.PathJoin(l.dir, replicasFile) }

func (l fsList) saveReplicas(noted map[uint32]replicaState) (err error) {
	b, err := encodeReplicas(noted)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w %s: write %s: %w", ErrDataDir, l.dir, replicasFile, err)
		}
	}()
	f, err := l.fs.Create(l.path()+".tmp", vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := l.fs.Rename(l.path()+".tmp", l.path()); err != nil {
		return err
	}
	d, err := l.fs.OpenDir(l.dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (l fsList) loadReplicas() (map[uint32]replicaState, error) {
	f, err := l.fs.Open(l.path())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: open %s: %w", ErrDataDir, l.path(), err)
	}
	b, err := io.ReadAll(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("%w: read %s: %w", ErrDataDir, l.path(), err)
	}
	return decodeReplicas(l.path(), b)
}
