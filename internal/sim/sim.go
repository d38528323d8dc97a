package sim

import (
	"context"
	crand "crypto/rand"
	"fmt"
	"hash"
	"hash/fnv"
	"io"
	"maps"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/rdma/simnic"
	"github.com/kvd-io/kvd/storage/layout"
)

// Options of a run. All that is not set is drawn from the seed.
type Options struct {
	// Steps under faults, before everything is healed.
	Steps int
	// Trace gets a line for each step; nil: only the last ones are kept.
	Trace io.Writer

	repair func(*sim) // stands in for the end of all faults; nil: that
}

// Result of a run.
type Result struct {
	Hash    uint64 // of all steps and answers, in order
	History *history.History
	Breach  []string       // what was wrong beyond the history
	Tail    []string       // the last steps
	Counts  map[string]int // faults, answers and what else shows that something happened
	Healed  int            // ticks that the healed cluster took until everything worked
}

const (
	quarantine = 3 * time.Second // above what clients trust an address for
	// healBound is how many ticks a healed cluster may take until every key can be read
	// and written by every client. Clients that were cut off for long pause for up to a
	// second before they try a node again.
	healBound = 1500
	tailLines = 60
	// collectEvery steps the garbage is collected, where nothing else runs.
	collectEvery = 4000
)

// drawn are the settings that the seed chose.
type drawn struct {
	nodes, actors, shards, keys int
	arenaBytes                  uint64
	logEntries                  uint64
	sizes                       []int // of values
	// ttl: some values of mortal keys expire. Then all clocks agree: expiry is as exact as
	// they are.
	ttl     bool
	quiesce int // ticks without anything to do, see raft.Config
	// grows: bulk makes a shard's index grow.
	grows bool
	// moves: replicas move between nodes, of which there are more than a shard needs.
	moves bool
	// mapped: clients have the memory of nodes mapped, as shared memory.
	mapped bool
}

type sim struct {
	seed     uint64
	rnd      *rand.Rand
	opt      drawn
	run      Options
	manifest *kvdv1.Manifest
	clock    *clock.Manual // of networks and ticks; the processes have their own
	nodes    []*node
	clients  []*actor
	mail     mail
	net      []*packet
	lastCall int
	calls    []*call // that were begun, in the order of beginning; some are over
	cuts     map[[2]int]bool
	told     []uint64    // of each client's fabric, when nothing ran
	inside   bool        // between two stores
	applying atomic.Bool // a node applies entries, and has shown them in its records not yet
	rough    bool        // faults may happen
	// hasty: time hardly passes, so that a whole election fits between two READs of a batch,
	// or between two ticks.
	hasty    bool
	healing  bool                // all faults are over
	driving  bool                // a fault is made in a fixed order: no node is slow between two stores meanwhile
	asleep   *actor              // hears nothing just now; nil: nobody
	left     *behind             // a node that was left behind; nil: none
	fresh    int                 // keys that were made for such
	bulk     int                 // number of the last key of bulk
	wishes   map[uint32][]uint64 // by shard: where its replicas shall be; nil: where they are
	configs  map[uint32]uint64   // by shard: the newest configuration that group 0 was told
	expiries []*expiry
	keys     []string
	values   uint64
	moment   int64
	ops      []*history.Op
	steps    int
	sum      hash.Hash64
	res      *Result
}

// Run runs the cluster of a seed. Equal seeds and options give equal results as long as
// the program is the same and GOMAXPROCS is 1.
func Run(t *testing.T, seed uint64, opt Options) *Result {
	// What another run left in pools belongs to its bubble.
	runtime.GC()
	runtime.GC()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	res := &Result{Counts: map[string]int{}}
	old := crand.Reader
	defer func() { crand.Reader = old }()
	synctest.Test(t, func(*testing.T) {
		s := newSim(seed, opt, res)
		s.faults()
		s.heal()
		s.close()
	})
	return res
}

// seededReader stands in for the host's randomness: etcd's raft draws its election
// timeouts from there.
type seededReader struct {
	mu sync.Mutex
	r  *rand.ChaCha8
}

func (r *seededReader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.r.Read(p)
}

func newSim(seed uint64, opt Options, res *Result) *sim {
	s := &sim{
		seed: seed, rnd: rand.New(rand.NewPCG(seed, 0x6b7664)), run: opt, res: res, sum: fnv.New64a(),
		clock: clock.NewManual(time.Now()), cuts: map[[2]int]bool{},
		wishes: map[uint32][]uint64{}, configs: map[uint32]uint64{},
	}
	var key [32]byte
	for i := range 8 {
		key[i] = byte(seed >> (8 * i))
	}
	crand.Reader = &seededReader{r: rand.NewChaCha8(key)}
	s.draw()
	s.manifest = &kvdv1.Manifest{
		Format: 1, ClusterId: fmt.Sprintf("%016x%016x", s.rnd.Uint64(), s.rnd.Uint64()), HashSeed: s.rnd.Uint64() | 1,
		Shards: uint32(s.opt.shards), Replication: 3, CreatedUnixMs: time.Now().UnixMilli(),
	}
	for i := range s.opt.nodes {
		s.manifest.Nodes = append(s.manifest.Nodes, &kvdv1.ManifestNode{NodeId: uint64(i + 1), Incarnation: s.rnd.Uint64() | 1, Address: address(i + 1)})
		s.nodes = append(s.nodes, &node{s: s, id: i + 1, mem: vfs.NewCrashableMem(), clock: clock.NewManual(time.Now().Add(s.skew()))})
	}
	for i := range s.opt.actors {
		s.addActor(101 + i)
	}
	s.told = make([]uint64, len(s.clients))
	for i := range s.opt.keys {
		s.keys = append(s.keys, fmt.Sprintf("key-%d", i))
	}
	for _, n := range s.nodes {
		n.start()
	}
	for _, a := range s.clients {
		ctx, quit := context.WithCancel(context.Background())
		a.quit = quit
		go a.run(ctx)
	}
	return s
}

// draw chooses what kind of run this is.
func (s *sim) draw() {
	o := &s.opt
	o.nodes, o.actors, o.shards, o.keys = 3, 3, 2, 5
	switch r := s.rnd.IntN(12); {
	case r < 2:
		o.nodes = 4 // one of the nodes has no replica of a shard
	case r < 6:
		o.nodes, o.moves = 4+s.rnd.IntN(2), true
	}
	o.arenaBytes, o.sizes = 8<<20, []int{8, 64, 200, 1000}
	if s.chance(2) {
		// Nearly everything that is written makes something else go.
		o.arenaBytes, o.sizes, o.keys = 96<<10, []int{64, 3000, 9000, 20000}, 12+s.rnd.IntN(9)
	}
	o.logEntries = 1 // a replica that was away gets a snapshot
	if s.chance(3) {
		o.logEntries = 1000
	}
	o.ttl = s.chance(3)
	o.quiesce = []int{1, 2, electionTicks, -1}[s.seed%4]
	o.mapped = s.chance(5)
	o.grows = o.arenaBytes > 1<<20 && s.chance(2)
	if s.run.Steps == 0 {
		s.run.Steps = 12000
	}
}

func (s *sim) skew() time.Duration {
	if s.opt.ttl {
		return 0
	}
	return time.Duration(s.rnd.IntN(2000)-1000) * time.Millisecond
}

func (s *sim) addActor(id int) {
	tear := []int{0, 1, 2, 8}[s.rnd.IntN(4)]
	pause := time.Duration(1+s.rnd.IntN(300)) * time.Microsecond
	cfg := simnic.Config{
		Seed: s.rnd.Uint64(), Clock: s.clock, Stepped: true,
		// Posting draws nothing: several goroutines may.
		Delay: simnic.Range{Min: time.Microsecond, Max: time.Microsecond},
		Gap:   simnic.Range{Max: pause}, Return: simnic.Range{Max: pause}, Pause: simnic.Range{Max: pause},
		TearOneIn: tear, LoseOneIn: 300, RevokeOneIn: 400, Timeout: 8 * time.Millisecond, AcceptTimeout: time.Second,
	}
	cfg.Mapped, cfg.Ended = s.opt.mapped, simnic.Range{Max: endedMost}
	f, err := simnic.New(cfg)
	if err != nil {
		panic(fmt.Sprintf("sim: %v", err)) // bug: of the settings above
	}
	s.clients = append(s.clients, &actor{
		s: s, id: id, fabric: f, tears: tear > 0, cold: s.chance(3), clock: clock.NewManual(time.Now().Add(s.skew())),
		work: make(chan *history.Op), over: make(chan struct{}), versions: map[string]uint64{},
	})
}

// chance is true one time in n.
func (s *sim) chance(n int) bool { return s.rnd.IntN(n) == 0 }

func (s *sim) count(what string) { s.res.Counts[what]++ }

func (s *sim) breach(format string, args ...any) {
	s.res.Breach = append(s.res.Breach, fmt.Sprintf(format, args...))
	s.note("BREACH: "+format, args...)
}

// note adds to the trace. Only what the simulation itself does is noted, never from the
// goroutine of a process.
func (s *sim) note(format string, args ...any) {
	line := fmt.Sprintf("%d %s", s.steps, fmt.Sprintf(format, args...))
	_, _ = s.sum.Write([]byte(line))
	if len(s.res.Tail) >= 4*tailLines {
		s.res.Tail = slices.Delete(s.res.Tail, 0, 3*tailLines)
	}
	s.res.Tail = append(s.res.Tail, line)
	if s.run.Trace != nil {
		_, _ = fmt.Fprintln(s.run.Trace, line)
	}
}

// settle waits until no process has anything to do before the next step, and takes in
// what they did.
func (s *sim) settle() {
	synctest.Wait()
	for {
		for _, n := range s.nodes {
			n.health()
		}
		synctest.Wait() // what a node's death let go
		s.collect()
		if !slices.ContainsFunc(s.nodes, func(n *node) bool { return n.boot != nil && n.boot.dead.Load() }) {
			break
		}
	}
	s.answers()
	if s.steps++; s.steps%collectEvery == 0 {
		runtime.GC()
	}
}

// answers takes in what operations have ended.
func (s *sim) answers() {
	for i, a := range s.clients {
		s.told[i] = a.fabric.Told()
		if op := a.done.Swap(nil); op != nil {
			s.returned(a, op)
		}
	}
}

// collect takes in what was sent.
func (s *sim) collect() {
	for _, p := range s.mail.take() {
		s.net = append(s.net, p)
		s.note("sent: %d -> %d %s", p.from, p.to, p.what)
		if p.call == nil {
			continue
		}
		s.lastCall++
		p.call.id = s.lastCall
		if !p.call.limit.IsZero() {
			s.calls = append(s.calls, p.call)
		}
	}
}

// returned takes in an operation that has ended.
func (s *sim) returned(a *actor, op *history.Op) {
	a.busy = nil
	s.moment++
	op.Return = s.moment
	s.ops = append(s.ops, op)
	s.mayExpire(a, op)
	s.count(string(op.Kind) + " " + string(op.Outcome))
	if op.Outcome == history.OK {
		a.versions[op.Key] = op.Version
	}
	s.note("client %d: %s(%s) level %q value %d -> %s value %d version %d %s", a.id, op.Kind, op.Key, op.Level, op.Value, op.Outcome, op.Got, op.Version, op.Bad)
}

// expiry is the end of a value's time to live.
type expiry struct {
	at   time.Time   // the earliest moment at which it may look expired
	from int64       // as the history counts moments; 0: not yet
	gone *history.Op // the removal; nil: the value was not written, or is being written
}

// mayExpire notes that a value with a time to live may go: as a removal of that version
// which may happen at any time from its end on, or not.
func (s *sim) mayExpire(a *actor, op *history.Op) {
	e := a.expiry
	a.expiry = nil
	if e == nil {
		return
	}
	switch op.Outcome {
	case history.OK:
		e.gone = &history.Op{Kind: history.Drop, Expect: op.Version}
	case history.Unknown:
		e.gone = &history.Op{Kind: history.Del} // of a version that is not known
	default:
		return
	}
	e.gone.Process, e.gone.Client, e.gone.Via, e.gone.Outcome = expirer, "expiry", "simnic", history.Unknown
	e.gone.Key, e.gone.Shard = op.Key, op.Shard
}

// expired looks whose time is up.
func (s *sim) expired() {
	for _, e := range s.expiries {
		if e.from == 0 && !time.Now().Before(e.at) {
			s.moment++
			e.from = s.moment
		}
	}
}

// removals are what expiries may have done.
func (s *sim) removals() (list []*history.Op) {
	for _, e := range s.expiries {
		if e.gone == nil || e.from == 0 {
			continue
		}
		e.gone.ID, e.gone.Call, e.gone.Return = uint64(len(s.ops)+len(list)+1), e.from, e.from
		list = append(list, e.gone)
	}
	return list
}

// mortal tells whether values of the key may be given a time to live. Such keys are put and
// got only: a get drops what is past its time by the reader's clock, while a conditional
// write or a delete goes by the time when it was proposed, and may be applied after such a
// get. That a time to live is no more exact than this is promised; the judge knows of none.
func (s *sim) mortal(key string) bool { return s.opt.ttl && (key[len(key)-1]-'0')%2 == 0 }

// expirer is the process that takes away what has expired.
const expirer = 1000

// call begins an operation.
func (s *sim) call(a *actor, op *history.Op) {
	s.moment++
	op.ID, op.Process, op.Client, op.Via, op.Call = uint64(len(s.ops)+1), a.id, a.host(), "simnic", s.moment
	if s.mortal(op.Key) && op.Kind != history.Get && op.Kind != history.List {
		op.Kind = history.Put
	}
	if op.Kind.Stores() {
		s.values++
		op.Value, op.Size = s.values, s.opt.sizes[s.rnd.IntN(len(s.opt.sizes))]
	}
	if op.Kind == history.Swap || op.Kind == history.Drop {
		op.Expect = a.versions[op.Key]
		if op.Expect == 0 {
			op.Kind = map[history.Kind]history.Kind{history.Swap: history.Add, history.Drop: history.Del}[op.Kind]
		}
	}
	if a.ttl = 0; s.mortal(op.Key) && !s.healing && op.Kind == history.Put && !s.chance(4) {
		a.ttl = time.Duration(1+s.rnd.IntN([]int{8, 600}[s.rnd.IntN(2)])) * time.Millisecond
		// A get that met the value alive and ends when it is not says absent, whatever took the
		// value's place meanwhile: that much earlier it may look removed.
		a.expiry = &expiry{at: time.Now().Add(a.ttl - callTimeout).Truncate(time.Millisecond)}
		s.expiries = append(s.expiries, a.expiry)
	}
	s.note("client %d: calls %s(%s) level %q value %d expect %d ttl %v", a.id, op.Kind, op.Key, op.Level, op.Value, op.Expect, a.ttl)
	a.busy = op
	a.work <- op
}

// shardOf a key.
func (s *sim) shardOf(key string) uint32 {
	return layout.HashKey(s.manifest.HashSeed, []byte(key)).Shard(uint32(s.opt.shards))
}

// idle gives the clients that could begin something.
func (s *sim) idle() []*actor {
	var list []*actor
	for _, a := range s.clients {
		if a.dialled.Load() && a.busy == nil {
			list = append(list, a)
		}
	}
	return list
}

// between is called by a node between two stores that a reader can see: some of the READs
// that are under way move on, and the power may fail.
func (s *sim) between(b *boot, inRecord bool) {
	if inRecord {
		s.applying.Store(false) // from here on callers may be answered, who then want the node's locks
	}
	// While replicas are made and dropped it may be the goroutine of that call which stores.
	if b.placing.Load() || s.inside || b.dead.Load() {
		return
	}
	s.inside = true
	defer func() { s.inside = false }()
	if s.applying.Load() && !s.driving && s.chance(16) {
		s.linger(b)
		return
	}
	for range s.rnd.IntN(3) {
		i := s.rnd.IntN(len(s.clients))
		// A client that was told something may be at work: it is let alone until it waits.
		if f := s.clients[i].fabric; f.Told() == s.told[i] && f.Step() {
			s.note("READ of client %d between stores of node %d", s.clients[i].id, b.n.id)
			s.count("READ between stores")
		}
	}
}

// linger lets time pass between two stores, and the clients go on with READs alone. None of
// the node's handlers can be let go meanwhile, so nobody waits for its locks.
func (s *sim) linger(b *boot) {
	s.note("node %d is slow between two stores", b.n.id)
	s.count("lingered")
	for range s.rnd.IntN(60) {
		a := s.clients[s.rnd.IntN(len(s.clients))]
		at, ok := a.fabric.Next()
		switch left := at.Sub(s.clock.Now()); {
		case a.dialled.Load() && a.busy == nil:
			s.call(a, &history.Op{Kind: history.Get, Key: s.keys[s.rnd.IntN(min(len(s.keys), 4))]})
		case ok && left < 500*time.Microsecond:
			if left > 0 {
				s.sleep(left)
			}
			a.fabric.Step()
			s.note("READ of client %d", a.id)
		}
		synctest.Wait()
		s.collect()
		s.answers()
	}
}

// deliver picks a packet. Its delay and its order are the choice itself.
func (s *sim) deliver() bool {
	// Mostly what was sent first, or little would ever come to an end.
	var can []int
	for i, most := 0, 1+s.rnd.IntN(8); i < len(s.net) && len(can) < most; i++ {
		if s.arrives(s.net[i]) {
			can = append(can, i)
		}
	}
	i, ok := pick(s, can)
	if !ok {
		return false
	}
	p := s.net[i]
	switch {
	case !p.local && s.cuts[[2]int{p.from, p.to}]:
		// What meets a cut is lost or waits for its end.
		if p.what != "raft" && !s.chance(20) {
			return false
		}
		s.lose(i)
		return true
	case s.rough && p.what == "raft" && s.chance(60), s.rough && !p.local && s.chance(200):
		s.lose(i)
		return true
	case s.rough && p.what == "raft" && s.chance(80):
		s.net = append(s.net, p) // twice
	}
	s.net = slices.Delete(s.net, i, i+1)
	if p.stream != nil {
		p.stream.next[1]++
	}
	s.note("%d -> %d %s", p.from, p.to, p.what)
	p.arrive()
	return true
}

// arrives tells whether the packet may arrive now: in the order of its stream, and at a
// process that looks.
func (s *sim) arrives(p *packet) bool {
	switch {
	case s.asleep != nil && p.to == s.asleep.id:
		return false
	case p.stream != nil:
		return p.seq == p.stream.next[1]
	case p.to > len(s.nodes):
		return true
	}
	return !s.node(p.to).frozen && !s.waits(p)
}

// waits tells whether a call has to wait for another one at the node: see isRead.
func (s *sim) waits(p *packet) bool {
	b := s.node(p.to).boot
	return b != nil && (b.reading && p.read || p.place && b.placing.Load())
}

func (s *sim) lose(i int) {
	p := s.net[i]
	s.net = slices.Delete(s.net, i, i+1)
	s.note("lost: %d -> %d %s", p.from, p.to, p.what)
	s.count("message lost")
	if p.stream != nil {
		p.stream.next[1]++
	}
	if p.lose != nil {
		p.lose()
	}
}

// pass lets time go by, for everybody alike.
func (s *sim) pass(d time.Duration) {
	s.note("time +%v", d)
	for end := time.Now().Add(d); d > 0; d = time.Until(end) {
		c := s.nextLate(end)
		if c == nil {
			s.sleep(d)
			return
		}
		if left := time.Until(c.limit); left > 0 {
			s.sleep(left)
			s.settle()
		}
		if !c.over.Load() {
			s.note("too late: %d -> %d %s", c.from, c.to, c.short())
			c.over.Store(true)
			c.fail(errLate)
			s.settle()
		}
	}
}

// nextLate is the call whose time is up first, by then.
func (s *sim) nextLate(by time.Time) (first *call) {
	s.calls = slices.DeleteFunc(s.calls, func(c *call) bool { return c.over.Load() })
	for _, c := range s.calls {
		if !c.limit.After(by) && (first == nil || c.limit.Before(first.limit)) {
			first = c
		}
	}
	return first
}

func (s *sim) sleep(d time.Duration) {
	time.Sleep(d)
	s.clock.Advance(d)
	for _, n := range s.nodes {
		n.clock.Advance(d)
	}
	for _, a := range s.clients {
		a.clock.Advance(d)
	}
	s.expired()
}

// live lists the nodes that run.
func (s *sim) live() []*node {
	var list []*node
	for _, n := range s.nodes {
		if n.boot != nil && !n.frozen {
			list = append(list, n)
		}
	}
	return list
}

func pick[T any](s *sim, list []T) (x T, ok bool) {
	if len(list) == 0 {
		return x, false
	}
	return list[s.rnd.IntN(len(list))], true
}

// ticks lets the nodes tick whose time has come.
func (s *sim) ticks() {
	for _, n := range s.live() {
		if n.boot == nil || n.tick.After(s.clock.Now()) {
			continue
		}
		n.tick = s.clock.Now().Add(tickInterval)
		s.note("node %d: tick", n.id)
		n.boot.steps.Tick()
		s.settle()
	}
}

// read lets the NICs of one client's network do something.
func (s *sim) read() bool {
	a := s.clients[s.rnd.IntN(len(s.clients))]
	if !a.fabric.Step() {
		return false
	}
	s.note("READ of client %d", a.id)
	return true
}

// close ends all processes; nobody may be left.
func (s *sim) close() {
	for _, a := range s.clients {
		if !a.dialled.Load() {
			continue
		}
		st := a.c.Stats()
		for _, g := range st.Gets {
			how := "got by READs"
			if g.Via == client.TransportGRPC {
				how = "got over gRPC"
			}
			s.res.Counts[how] += int(g.Count)
		}
		s.res.Counts["confirmation"] += int(st.Confirmations)
		for why, n := range st.Retries {
			s.res.Counts["retried as "+strings.ReplaceAll(why, "_", " ")] += int(n)
		}
	}
	for _, a := range s.clients {
		a.quit()
	}
	for _, a := range s.clients {
		for done := false; !done; {
			synctest.Wait()
			s.net = append(s.net, s.mail.take()...)
			for _, p := range s.net {
				if p.lose != nil {
					p.lose()
				}
			}
			s.net = nil
			select {
			case <-a.over:
				done = true
			default:
				time.Sleep(time.Millisecond)
			}
		}
	}
	for _, n := range s.nodes {
		if n.boot != nil {
			n.crash(true)
		}
	}
	for _, a := range s.clients {
		a.fabric.Close()
	}
	for _, what := range slices.Sorted(maps.Keys(s.res.Counts)) {
		s.note("%s: %d", what, s.res.Counts[what])
	}
	s.res.Hash = s.sum.Sum64()
	s.res.Tail = s.res.Tail[max(0, len(s.res.Tail)-tailLines):]
	s.res.History = &history.History{
		Header: history.Header{Workload: "register", Nemesis: "simulated", Seed: s.seed},
		Ops:    append(s.ops, s.removals()...), End: &history.End{Call: s.moment + 1},
	}
}
