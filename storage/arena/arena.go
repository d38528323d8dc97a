package arena

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// Config of a node's arena.
type Config struct {
	HashSeed uint64 // the cluster's: hashes and check sums depend on it
	BootID   uint64
	Shards   uint32 // data shards are 1..Shards
	Slots    int    // control records; default 4096

	LimitBytes    uint64        // hard cap over all chunks of the node; default 1 GiB
	MinChunkBytes uint64        // first chunk of a namespace; default 2 MiB
	MaxChunkBytes uint64        // default and at most layout.MaxChunkSize
	Quarantine    time.Duration // before tables and slabs serve another purpose; default 10 s
	HugePages     bool
	Name          string // prefix of the memfds' names, shown in /proc/PID/maps

	// OnChunk is called, with no lock held that a reader of the arena needs, when a
	// chunk was made and before anything in it can be found. Namespace.Chunks lists
	// the chunk already, so that whoever lists and listens misses none; it may see
	// one twice. OnChunkGone is called before its memory is freed. An error from
	// OnChunk refuses the chunk; OnChunkGone follows.
	OnChunk     func(namespace uint32, id rdma.RegionID, m *rdma.Memory) error
	OnChunkGone func(namespace uint32, id rdma.RegionID)
	// OnStore, when not nil, is called right after each store that a reader can see, in a
	// control record or elsewhere, so that a simulation can have it READ between two of
	// them. It must not use the arena.
	OnStore func(inRecord bool)

	Clock  clock.Clock  // default clock.System
	Logger *slog.Logger // default: discard
}

const (
	pageShift = 12
	pageSize  = 1 << pageShift // bytes
	hugePage  = 2 << 20        // bytes
)

func (c Config) withDefaults() Config {
	if c.Slots == 0 {
		c.Slots = 4096
	}
	if c.LimitBytes == 0 {
		c.LimitBytes = 1 << 30
	}
	if c.MinChunkBytes == 0 {
		c.MinChunkBytes = 2 << 20
	}
	if c.MaxChunkBytes == 0 {
		c.MaxChunkBytes = max(layout.MaxChunkSize, c.MinChunkBytes)
	}
	if c.Quarantine == 0 {
		c.Quarantine = 10 * time.Second
	}
	if c.Clock == nil {
		c.Clock = clock.System
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate tells the first setting that cannot work. It changes nothing.
func (c Config) Validate() error {
	c = c.withDefaults()
	switch {
	case c.Shards == 0:
		return errors.New("arena: Shards is 0: set the cluster's number of data shards")
	case c.Slots < 1:
		return fmt.Errorf("arena: Slots is %d: want at least 1 control record", c.Slots)
	case c.MinChunkBytes < pageSize || c.MinChunkBytes%pageSize != 0:
		return fmt.Errorf("arena: MinChunkBytes is %d: want a multiple of %d", c.MinChunkBytes, pageSize)
	case c.MaxChunkBytes > layout.MaxChunkSize || c.MaxChunkBytes < c.MinChunkBytes || c.MaxChunkBytes%pageSize != 0:
		return fmt.Errorf("arena: MaxChunkBytes is %d: want a multiple of %d from MinChunkBytes (%d) to %d",
			c.MaxChunkBytes, pageSize, c.MinChunkBytes, uint64(layout.MaxChunkSize))
	case c.LimitBytes < pageSize:
		return fmt.Errorf("arena: LimitBytes is %d: want at least one page of %d", c.LimitBytes, pageSize)
	case c.Quarantine < 0:
		return fmt.Errorf("arena: Quarantine is %v: want a positive duration", c.Quarantine)
	}
	return nil
}

// Arena is all registered memory of one node in one boot. Its methods may be called
// from any goroutine.
type Arena struct {
	cfg     Config
	control *controlTable

	registered atomic.Uint64 // bytes of all chunks; Invariant: <= cfg.LimitBytes
	starved    atomic.Bool   // a namespace met LimitBytes since the last Tick
	tables     atomic.Uint64 // table ids given out

	// hook, set by tests before the first write, sees every store that readers can
	// see, right after it was made.
	hook func(event)

	mu struct {
		sync.Mutex
		namespaces map[uint32]*Namespace
	}
}

// New makes an arena with its control table and no chunk.
func New(cfg Config) (*Arena, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	control, err := newControlTable(cfg)
	if err != nil {
		return nil, err
	}
	a := &Arena{cfg: cfg, control: control}
	if cfg.OnStore != nil {
		a.hook = func(event) { cfg.OnStore(false) }
	}
	a.mu.namespaces = make(map[uint32]*Namespace)
	return a, nil
}

// Close frees all memory. Nothing may have it registered any more, and the arena
// must not be used again.
func (a *Arena) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	err := a.control.mem.Free()
	for _, n := range a.mu.namespaces {
		err = errors.Join(err, n.free())
	}
	clear(a.mu.namespaces)
	return err
}

// ControlMemory is the table of control records (region 0 of every domain).
func (a *Arena) ControlMemory() *rdma.Memory { return a.control.mem }

// OpenNamespace makes the namespace known (or returns it when it is). quota 0
// means the arena's limit alone, or leaves the quota that it has. A quota below what
// is registered takes effect as an end to growing.
func (a *Arena) OpenNamespace(id uint32, quotaBytes uint64) *Namespace {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.mu.namespaces[id]
	if n == nil {
		n = newNamespace(a, id)
		a.mu.namespaces[id] = n
	}
	if quotaBytes > 0 {
		n.quota.Store(quotaBytes)
	}
	return n
}

// Namespace by id; nil where it was not opened.
func (a *Arena) Namespace(id uint32) *Namespace {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.namespaces[id]
}

func (a *Arena) namespaces() []*Namespace {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := make([]*Namespace, 0, len(a.mu.namespaces))
	for _, n := range a.mu.namespaces {
		all = append(all, n)
	}
	return all
}

// Tick frees what has been in quarantine long enough. The node calls it about once
// a second.
func (a *Arena) Tick() {
	now := a.cfg.Clock.Now()
	starved := a.starved.Swap(false)
	for _, n := range a.namespaces() {
		n.tick(now, starved)
	}
}

// nextTableID is never the same twice in a boot, nor, but by a chance of one in
// 2^64, in two boots: an old table's buckets do not pass for a new one's.
func (a *Arena) nextTableID() uint64 {
	for {
		if id := splitMix(splitMix(a.cfg.BootID^a.cfg.HashSeed) + a.tables.Add(1)); id != 0 {
			return id
		}
	}
}

// splitMix is one step of SplitMix64 (Steele, Lea, Flood).
func splitMix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
