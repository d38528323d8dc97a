package simnic

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// Fabric is the network and all NICs on it. Its methods may be called from several
// goroutines.
type Fabric struct {
	cfg    Config
	kick   chan struct{} // capacity 1; the next event changed
	quit   chan struct{}
	served chan struct{}
	once   sync.Once

	// One lock for the whole fabric: it is a simulation, and one order of all that
	// happens is what makes it replayable. It is held while words are moved, so that
	// Deregister waits for the READ that it would pull the memory from under, as the
	// real one does. Nothing done under it blocks.
	mu struct {
		sync.Mutex
		rnd        *rand.Rand
		events     eventQueue
		seq        uint64
		lastID     uint64
		told       uint64
		closed     bool
		targets    map[string]*target // by host; the one that serves now
		conns      map[uint64]*conn   // not finished
		endpoints  map[uint64]*endpoint
		partitions map[[2]string]bool
	}
}

// New starts a fabric.
func New(cfg Config) (*Fabric, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	f := &Fabric{
		cfg:    cfg.withDefaults(),
		kick:   make(chan struct{}, 1),
		quit:   make(chan struct{}),
		served: make(chan struct{}),
	}
	f.mu.rnd = rand.New(rand.NewPCG(cfg.Seed, 0x6b76642d6e6963))
	f.mu.targets = make(map[string]*target)
	f.mu.conns = make(map[uint64]*conn)
	f.mu.endpoints = make(map[uint64]*endpoint)
	f.mu.partitions = make(map[[2]string]bool)
	if f.cfg.Stepped {
		close(f.served)
	} else {
		go f.serve()
	}
	return f, nil
}

// Close ends every connection, with rdma.ErrConnLost, and the goroutine. Idempotent.
func (f *Fabric) Close() {
	f.mu.Lock()
	f.mu.closed = true
	for _, id := range slices.Sorted(maps.Keys(f.mu.conns)) {
		f.mu.conns[id].finishLocked(fmt.Errorf("%w: fabric closed", rdma.ErrConnLost))
	}
	for _, id := range slices.Sorted(maps.Keys(f.mu.endpoints)) {
		f.mu.endpoints[id].endLocked()
	}
	f.mu.Unlock()
	f.once.Do(func() { close(f.quit) })
	<-f.served
}

// Host is the provider as one host of the fabric has it. A host has one target at
// a time; a new one takes the place of one that was closed or killed.
func (f *Fabric) Host(name string) rdma.Provider { return host{f, name} }

type host struct {
	f    *Fabric
	name string
}

var _ rdma.Provider = host{}

func (host) Name() string { return "simnic" }

// Partition breaks the path between two hosts: READs stall, and neither side hears
// of what the other ends.
func (f *Fabric) Partition(a, b string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.partitions[pair(a, b)] = true
}

// Heal mends the path between two hosts. Stalled READs are executed again from the
// first of their chain, and each side learns what the other ended meanwhile.
func (f *Fabric) Heal(a, b string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.mu.partitions, pair(a, b))
	f.reconcileLocked()
}

func pair(a, b string) [2]string { return [2]string{min(a, b), max(a, b)} }

// Freeze stops the process of a host's target, as SIGSTOP does: its memory is still
// read, but it accepts no connection, and neither its timers nor the end of a
// connection reach it.
func (f *Fabric) Freeze(name string) { f.setFrozen(name, true) }

// Thaw lets a frozen target go on.
func (f *Fabric) Thaw(name string) { f.setFrozen(name, false) }

func (f *Fabric) setFrozen(name string, frozen bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t := f.mu.targets[name]; t != nil {
		t.frozen = frozen
		f.reconcileLocked()
	}
}

// Kill ends the process of a host's target, as SIGKILL does: nothing answers any
// more, its memory is never read again (but see Config.Mapped), and the clients are not told. NewTarget of
// the same host is its next boot.
func (f *Fabric) Kill(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.mu.targets[name]
	if t == nil {
		return
	}
	t.dead = true // first: the path counts as broken, so no client hears of the rest
	if f.cfg.Mapped {
		t.leaveMemoryLocked()
	}
	t.closeLocked()
}

// Lose breaks every connection between two hosts; both sides are told.
func (f *Fabric) Lose(initiator, target string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(f.mu.conns)) {
		if c := f.mu.conns[id]; c.ini.host == initiator && c.t.host == target {
			c.loseLocked("by request")
		}
	}
}

// Hold keeps the NIC of a host's target from executing READs, and counts no timeout
// for them, until release is called. Holds add up; release is idempotent. It does
// nothing where the host has no target.
func (f *Fabric) Hold(name string) (release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.mu.targets[name]
	if t == nil {
		return func() {}
	}
	t.holds++
	return sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		t.holds--
		for _, id := range slices.Sorted(maps.Keys(f.mu.conns)) {
			if c := f.mu.conns[id]; c.t == t && c.held && t.holds == 0 {
				c.held = false
				f.scheduleLocked(&c.execute, 0)
			}
		}
	})
}

// reconcileLocked lets both ends of every connection learn what could not reach
// them before, and sends what had stalled.
func (f *Fabric) reconcileLocked() {
	for _, id := range slices.Sorted(maps.Keys(f.mu.conns)) {
		c := f.mu.conns[id]
		switch {
		case c.blockedLocked():
		case c.ep.ended && !c.t.dead:
			c.finishLocked(revokedError())
		case c.stalled:
			c.resumeLocked()
		}
	}
	for _, id := range slices.Sorted(maps.Keys(f.mu.endpoints)) {
		if ep := f.mu.endpoints[id]; ep.overdue || ep.conn != nil && ep.conn.err != nil {
			ep.hearLocked()
		}
	}
}

// drawLocked draws from r. Fixed ranges cost no draw.
func (f *Fabric) drawLocked(r Range) time.Duration {
	if r.Max <= r.Min {
		return r.Min
	}
	return r.Min + time.Duration(f.mu.rnd.Int64N(int64(r.Max-r.Min)+1))
}

func (f *Fabric) oneInLocked(n int) bool { return n > 0 && f.mu.rnd.IntN(n) == 0 }

func (f *Fabric) idLocked() uint64 {
	f.mu.lastID++
	return f.mu.lastID
}

func revokedError() error { return fmt.Errorf("%w: the target ended the connection", rdma.ErrRevoked) }
