package sim

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc"

	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/server"
)

const (
	tickInterval  = 4 * time.Millisecond
	electionTicks = 3
)

// node is one server: a disk that stays, and the boots that come and go.
type node struct {
	s     *sim
	id    int
	mem   *vfs.MemFS
	clock *clock.Manual
	boot  *boot // nil: it is down
	// opened: it was up once, so its stores are not empty.
	opened bool
	tick   time.Time // when the next one is due
	// lazyUntil a step it applies nothing: its disk answers no read, say.
	lazyUntil int
	// frozen: the process is stopped, and its memory can still be read.
	frozen bool
}

// boot is one process.
type boot struct {
	n           *node
	core        *server.Core
	steps       raft.Steps
	disk        *disk
	service     *service
	life        context.Context
	end         context.CancelFunc
	dead        atomic.Bool // nothing that it does reaches anybody any more
	reading     bool        // a read is under way: see isRead
	doneReading atomic.Bool
	moving      []atomic.Bool // by shard: a step of its move is under way
	placing     atomic.Bool   // a replica is made or let go of: see node.move
}

func (n *node) host() string { return fmt.Sprintf("n%d", n.id) }

func (s *sim) node(id int) *node { return s.nodes[id-1] }

// address of a node, which is a name.
func address(id int) string { return fmt.Sprintf("n%d:1", id) }

// nodeOf an address; 0: none.
func nodeOf(addr string) (id int) {
	if _, err := fmt.Sscanf(addr, "n%d:1", &id); err != nil {
		return 0
	}
	return id
}

// provider is a client's network of READs as the others have it. Each client has one of
// its own, so that chance comes to it in the order of what it alone does.
type provider struct {
	rdma.Provider
	name string
}

func (p provider) Name() string { return p.name }

// start boots the node from what is on its disk.
func (n *node) start() {
	s := n.s
	b := &boot{n: n, service: newService(), moving: make([]atomic.Bool, s.opt.shards+1)}
	b.life, b.end = context.WithCancel(context.Background())
	b.disk = newDisk(n.mem, b)
	cfg := server.CoreConfig{
		Config: server.Config{
			NodeID: uint64(n.id), DataDir: "data", ListenAddr: address(n.id), FS: b.disk, Clock: n.clock, Logger: slog.New(slog.DiscardHandler),
			ArenaBytes: s.opt.arenaBytes, MaxChunkBytes: 4 << 20, CacheBytes: 1 << 20, MinFreeDisk: 1, Quarantine: quarantine,
			TickInterval: tickInterval, ElectionTicks: electionTicks, QuiesceTicks: s.opt.quiesce,
			LogRetainEntries: s.opt.logEntries, LogRetainBytes: 1 << 20,
			HostID: n.host(),
		},
		Manifest: s.manifest, Reopened: n.opened, BootID: s.rnd.Uint64() | 1, Seed: s.rnd.Uint64() | 1,
		Send:          func(to raft.NodeID, msgs []raft.GroupMessage) { n.sendRaft(b, to, msgs) },
		SendHeartbeat: func(to raft.NodeID, hb raft.NodeHeartbeat) { n.sendHeartbeat(b, to, hb) },
		OnStore:       func(inRecord bool) { s.between(b, inRecord) },
		Dial: func(to raft.NodeID) (grpc.ClientConnInterface, error) {
			return wire{s: s, from: n.id, to: int(to)}, nil
		},
	}
	for _, c := range s.clients {
		cfg.Providers = append(cfg.Providers, provider{c.fabric.Host(n.host()), c.transport()})
	}
	var err error
	b.core, err = server.OpenCore(cfg)
	if err != nil {
		s.breach("node %d does not start: %v", n.id, err)
		return
	}
	b.core.Register(b.service)
	b.steps = b.core.Host().Steps()
	n.boot, n.opened = b, n.opened || !b.dead.Load()
	n.tick = s.clock.Now().Add(tickInterval)
}

// crash ends the process, and loses what was not synced unless keep says otherwise.
func (n *node) crash(keep bool) {
	b := n.boot
	left := b.disk.failed()
	if left == nil {
		left = image(n.mem, keep)
	}
	st := b.core.Host().Stats()
	n.s.res.Counts["snapshot installed"] += int(st.SnapshotsGot)
	n.s.res.Counts["woken"] += int(st.Wakes)
	n.s.res.Counts["evicted"] += int(b.core.Evictions())
	b.dead.Store(true)
	n.boot, n.frozen = nil, false
	for _, c := range n.s.clients {
		c.fabric.Kill(n.host())
	}
	b.end()
	if err := b.core.Close(); err != nil {
		n.s.note("closing node %d: %v", n.id, err)
	}
	n.mem = left
}

// work takes one step of what the node does by itself; false: there was none.
func (n *node) work() bool {
	s := n.s
	st := n.boot.steps
	// Several kinds, in an order of chance: any of the node's goroutines may come first.
	kinds := []struct {
		name string
		step func() bool
	}{{"write", st.Write}, {"apply", st.Apply}, {"work", st.Work}, {"late", st.SendLate}, {"truncate", st.Truncate}}
	at := s.rnd.IntN(len(kinds))
	for i := range kinds {
		k := kinds[(at+i)%len(kinds)]
		if k.name == "late" && !s.chance(4) || k.name == "apply" && s.rough && s.steps < n.lazyUntil {
			continue
		}
		s.applying.Store(k.name == "apply")
		did := k.step()
		s.applying.Store(false)
		if did {
			s.note("node %d: %s", n.id, k.name)
			return true
		}
	}
	return false
}

// health takes in what the step before did to the process.
func (n *node) health() {
	b := n.boot
	if b == nil {
		return
	}
	if b.doneReading.Swap(false) {
		b.reading = false
	}
	if b.dead.Load() {
		n.s.note("node %d: power failed", n.id)
		n.s.count("power failure")
		n.crash(false)
		return
	}
	select {
	case err := <-b.core.Fatal():
		n.s.breach("node %d can not go on: %v", n.id, err)
	default:
	}
}
