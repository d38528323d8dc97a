package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/arena"
	"github.com/kvd-io/kvd/storage/layout"
)

// PeerConfig names one node of a static cluster.
type PeerConfig struct {
	NodeID  uint64
	Address string // gRPC host:port as the other nodes and the clients reach it
}

// Config of a node. The zero value of a field means its default.
type Config struct {
	// NodeID is this node's id, from 1. Ids are never used twice in a cluster. With Peers
	// it must be given; without, 0 is the id that the data directory has, or will have.
	NodeID uint64
	// DataDir belongs to one node at a time; it is locked while the node runs.
	DataDir string
	// ListenAddr is where gRPC listens; AdvertiseAddr is how others reach it (default:
	// the address that was bound).
	ListenAddr    string
	AdvertiseAddr string
	// Peers are all nodes with which a cluster begins, this one included. Empty: this node
	// alone, or one that joins.
	Peers []PeerConfig
	// Bootstrap lets this node draw a new cluster when its data directory is empty. One
	// node of a cluster has it; it means nothing once the directory has a cluster.
	Bootstrap bool
	// Join names members of a cluster, as HOST or HOST:PORT, of which one is to let this
	// node in when its data directory is empty. A name may stand for several. Once the
	// directory has a cluster they are only asked which nodes there are now.
	Join []string
	// Zone, Rack and Host are the failure domains of this node, from the largest to the
	// smallest: replicas of a shard are kept apart by them as far as can be.
	Zone, Rack, Host string
	// Lookup finds the addresses of a host; default: the system's resolver.
	Lookup func(ctx context.Context, host string) ([]string, error)
	// BootstrapTimeout bounds the wait for all peers, for being adopted, and for being let in.
	BootstrapTimeout time.Duration
	// TwinPatience is how long a node suffers that its peers hear another process speak
	// in its name, at its start and later. It has to outlast the keep-alive with which
	// they notice that a host is gone. Default 20 s.
	TwinPatience time.Duration

	// ReplaceAfter is how long a node may be silent until its replicas are made anew on
	// others, if there are others. Default 10 min.
	ReplaceAfter time.Duration

	// Shards and Replication are read at bootstrap and fixed from then on. Shards bounds
	// the number of nodes that can lead.
	Shards      uint32
	Replication uint32

	// ArenaBytes caps all registered memory of the node.
	ArenaBytes uint64
	// MaxChunkBytes bounds a chunk; a device may ask for less.
	MaxChunkBytes uint64
	HugePages     bool
	Quarantine    time.Duration
	// CacheBytes of the engine's block cache.
	CacheBytes int64
	// MaxValueBytes of one value; larger ones are refused.
	MaxValueBytes int

	// TickInterval is Raft's unit of time; ElectionTicks of them without a leader start
	// an election (the real time-out is random between one and two times that).
	TickInterval  time.Duration
	ElectionTicks int
	// QuiesceTicks without anything to do, and a group sends no more heartbeats of its own
	// until there is: those between the nodes stand for them. Default: ElectionTicks; below
	// 0: never.
	QuiesceTicks int

	// LogRetainEntries and LogRetainBytes, for each shard, stay in the Raft log behind
	// what is applied, whichever is reached first: a follower that was away for longer
	// gets a snapshot. For a follower that lives more is kept, up to the shard's size. Defaults 16384 entries, and 512 MiB over all shards but at least
	// 4 MiB for each.
	LogRetainEntries uint64
	LogRetainBytes   uint64

	// SnapshotRate is how many bytes a second of snapshots this node sends to others, all
	// together. Default 32 MiB: a move takes cores and disk from those who wait for answers.
	// Below 0: no limit.
	SnapshotRate int64

	// WriterTTL is how long an idle writer is remembered.
	WriterTTL time.Duration
	// MinFreeDisk is the free space, in bytes, below which writes are refused. They are
	// taken again above one and a half times of it.
	MinFreeDisk uint64

	// Providers serve this node's memory, in the order in which clients should prefer
	// them. HostID is equal for two processes that can share memory.
	Providers []rdma.Provider
	HostID    string
	// TransportsByDefault tells that nobody chose Providers: one that this host can not
	// serve is then not worth a warning.
	TransportsByDefault bool
	// RequireRDMA refuses to start where no provider can have a NIC serve the whole arena.
	RequireRDMA bool
	// FenceDelay is how long a node waits after it took the directory's lock, before it
	// opens a device or serves, when the process before it did not stop by itself: what
	// the kernel tears down for a dead process may answer READs a moment longer. Default
	// 250 ms; below 0: none.
	FenceDelay time.Duration

	// Gossip among the nodes: hints of who lives, and where.
	Gossip GossipConfig

	// TLS of gRPC, and Auth: who may do what.
	TLS  TLSConfig
	Auth AuthConfig

	// Version of the program, for Status.
	Version string

	FS     vfs.FS // of the engine; default the host's
	Clock  clock.Clock
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	def := func(p *time.Duration, d time.Duration) {
		if *p == 0 {
			*p = d
		}
	}
	if c.ListenAddr == "" {
		c.ListenAddr = "127.0.0.1:7400"
	}
	if c.Shards == 0 {
		c.Shards = 128
	}
	if c.Replication == 0 {
		c.Replication = 3
	}
	if c.ArenaBytes == 0 {
		c.ArenaBytes = 1 << 30
	}
	if c.MaxChunkBytes == 0 {
		c.MaxChunkBytes = 64 << 20
	}
	if c.CacheBytes == 0 {
		c.CacheBytes = 64 << 20
	}
	if c.MaxValueBytes == 0 {
		c.MaxValueBytes = 1 << 20
	}
	if c.ElectionTicks == 0 {
		c.ElectionTicks = 10
	}
	if c.QuiesceTicks == 0 {
		c.QuiesceTicks = c.ElectionTicks
	}
	if c.LogRetainBytes == 0 {
		c.LogRetainBytes = max(4<<20, (512<<20)/uint64(c.Shards))
	}
	if c.SnapshotRate == 0 {
		c.SnapshotRate = 32 << 20
	}
	if c.MinFreeDisk == 0 {
		c.MinFreeDisk = 256 << 20
	}
	def(&c.Quarantine, 10*time.Second)
	def(&c.TickInterval, 100*time.Millisecond)
	def(&c.WriterTTL, time.Hour)
	def(&c.BootstrapTimeout, 2*time.Minute)
	def(&c.TwinPatience, 20*time.Second)
	def(&c.ReplaceAfter, 10*time.Minute)
	def(&c.FenceDelay, 250*time.Millisecond)
	if c.Clock == nil {
		c.Clock = clock.System
	}
	if c.Lookup == nil {
		c.Lookup = net.DefaultResolver.LookupHost
	}
	if c.FS == nil {
		c.FS = vfs.Default
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

const (
	maxShards      = 4095
	maxReplication = 7
	// With less a shard's log would be done sooner than its snapshot.
	minSnapshotRate = 64 << 10
)

// ErrConfig is wrapped by every complaint of Validate.
var ErrConfig = errors.New("server: configuration")

// Validate tells what is wrong with the configuration, defaults applied. It changes
// nothing.
func (c Config) Validate() error {
	c = c.withDefaults()
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrConfig, fmt.Sprintf(format, args...))
	}
	switch {
	case c.NodeID == 0 && len(c.Peers) > 0:
		return bad("node id 0: want the number of this node, from 1")
	case len(c.Join) > 0 && c.Bootstrap:
		return bad("a node either makes a new cluster (bootstrap) or joins one (join), not both")
	case len(c.Join) > 0 && len(c.Peers) > 0:
		return bad("peers are for a cluster whose nodes are all named when it is made, join is for a node that comes later: give one of them")
	case c.DataDir == "":
		return bad("no data directory given")
	case c.Shards > maxShards:
		return bad("%d shards: want 1 to %d (one control record each)", c.Shards, maxShards)
	case c.Replication%2 == 0 || c.Replication > maxReplication:
		return bad("replication %d: want 1, 3, 5 or 7", c.Replication)
	case c.MaxValueBytes < 0 || c.MaxValueBytes > MaxValueLimit:
		return bad("value limit %d bytes: want at most %d", c.MaxValueBytes, MaxValueLimit)
	case c.ElectionTicks < 3:
		return bad("election after %d ticks: want at least 3", c.ElectionTicks)
	case c.SnapshotRate > 0 && c.SnapshotRate < minSnapshotRate:
		return bad("snapshot rate of %d bytes a second: want at least %d (0 at the command line: no limit)", c.SnapshotRate, minSnapshotRate)
	case c.TickInterval < time.Millisecond:
		return bad("tick of %v: want at least 1ms", c.TickInterval)
	}
	for _, j := range c.Join {
		if _, _, err := splitJoin(j); err != nil {
			return bad("%v", err)
		}
	}
	for _, t := range []struct{ name, text string }{{"zone", c.Zone}, {"rack", c.Rack}, {"host", c.Host}} {
		if len(t.text) > maxNodeText {
			return bad("%s of %d bytes: want at most %d", t.name, len(t.text), maxNodeText)
		}
	}
	for _, a := range []struct{ name, addr string }{{"listen", c.ListenAddr}, {"advertise", c.AdvertiseAddr}} {
		if _, _, err := net.SplitHostPort(a.addr); a.addr != "" && err != nil {
			return bad("%s address %q: want HOST:PORT, such as 10.0.0.1:7400", a.name, a.addr)
		}
	}
	if err := c.validateAuth(); err != nil {
		return bad("%v", err)
	}
	if err := c.validateGossip(); err != nil {
		return bad("%v", err)
	}
	memory := arena.Config{Shards: c.Shards, LimitBytes: c.ArenaBytes, MaxChunkBytes: c.MaxChunkBytes, Quarantine: c.Quarantine}
	if err := memory.Validate(); err != nil {
		return bad("%v", err)
	}
	seen := map[uint64]string{}
	addrs := map[string]uint64{}
	for _, p := range c.Peers {
		if p.NodeID == 0 || p.Address == "" {
			return bad("peer %d=%q: want ID=HOST:PORT with an id from 1", p.NodeID, p.Address)
		}
		if other, ok := seen[p.NodeID]; ok {
			return bad("node id %d is given to both %s and %s: ids must differ", p.NodeID, other, p.Address)
		}
		if other, ok := addrs[p.Address]; ok {
			return bad("nodes %d and %d have the same address %s", other, p.NodeID, p.Address)
		}
		seen[p.NodeID], addrs[p.Address] = p.Address, p.NodeID
	}
	if _, ok := seen[c.NodeID]; len(c.Peers) > 0 && !ok {
		return bad("node id %d is not among the peers: list every node, this one included", c.NodeID)
	}
	return nil
}

// MaxValueLimit is the largest settable value limit, in bytes.
const MaxValueLimit = layout.MaxObjectSize - layout.HeaderSize - layout.MaxKeySize
