package sim

import (
	"context"
	"fmt"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/layout"
)

// faults is the first phase: everything may happen, in spells.
func (s *sim) faults() {
	s.settle()
	for i := range s.run.Steps {
		if len(s.res.Breach) > 0 {
			return
		}
		if i%spell == 0 {
			if s.rough = i > 0 && s.chance(2); !s.rough {
				s.repair()
			}
			s.hasty = s.rough && s.chance(3)
		}
		if s.step() {
			s.settle()
		}
	}
}

// spell is how many steps the cluster is left in peace, or not.
const spell = 1500

// step takes one step of chance; false: nothing changed.
func (s *sim) step() bool {
	switch r := s.rnd.IntN(1000); {
	case r < 380:
		return s.deliver()
	case r < 640:
		n, ok := pick(s, s.live())
		return ok && n.work()
	case r < 890:
		return s.read()
	case r < 940:
		s.pass(s.moments())
		s.settle()
		s.ticks()
	case r >= 980 && r < 986 && s.opt.moves:
		s.placement()
	case r < 986:
		a, ok := pick(s, s.idle())
		if !ok {
			return false
		}
		s.call(a, s.operation())
	case r < 988 && s.opt.arenaBytes < 1<<20 && !s.rough:
		s.driveOut()
	case r < 989 && s.opt.mapped:
		s.dieUnseen()
	case r < 992:
		s.upkeep()
	case r < 997 && s.rough:
		s.leaveBehind()
	case s.rough:
		s.fault()
	}
	return true
}

// moments is how long time passes at once. It is of nanoseconds, so that it ends in no
// moment at which a timer of the clients is due.
func (s *sim) moments() time.Duration {
	most := 30 * time.Millisecond
	switch r := s.rnd.IntN(100); {
	case s.hasty:
		most = 40 * time.Microsecond
	case r < 60:
		most = 200 * time.Microsecond
	case r < 96:
		most = 2 * time.Millisecond
	}
	return 1 + time.Duration(s.rnd.Int64N(int64(most)))
}

func (s *sim) operation() *history.Op {
	op := &history.Op{Key: s.keys[s.rnd.IntN(len(s.keys))]}
	if s.chance(2) {
		op.Key = s.keys[s.rnd.IntN(2)] // where things meet
	}
	switch r := s.rnd.IntN(100); {
	case r < 38:
		op.Kind = history.Get
	case r < 51:
		op.Kind, op.Level = history.Get, "session"
	case r < 55:
		op.Kind, op.Level = history.Get, "stale"
	case r < 78:
		op.Kind = history.Put
	case r < 84:
		op.Kind = history.Add
	case r < 90:
		op.Kind = history.Swap
	case r < 97:
		op.Kind = history.Del
	default:
		op.Kind = history.Drop
	}
	return op
}

// upkeep does what nodes do once in a while.
func (s *sim) upkeep() {
	n, ok := pick(s, s.live())
	if !ok {
		return
	}
	what := s.rnd.IntN(4)
	if s.opt.ttl && !s.chance(4) {
		what = 3
	}
	switch what {
	case 0, 1:
		s.note("node %d: flushes", n.id)
		if err := n.boot.core.Flush(); err != nil && !n.boot.dead.Load() {
			s.breach("node %d: flush: %v", n.id, err)
		}
	case 2:
		s.note("node %d: gives memory free", n.id)
		n.boot.core.Tick()
	case 3:
		s.note("node %d: expires", n.id)
		b := n.boot
		go b.core.Expire(b.life)
	}
}

// fault makes one thing go wrong.
func (s *sim) fault() {
	n := s.victim()
	switch r := s.rnd.IntN(100); {
	case n.boot == nil:
		if r < 60 {
			s.fell("restart", "node %d", n.id)
			n.start()
		}
	case r < 12:
		keep := s.chance(3)
		s.fell("crash", "node %d, all that was written survives: %v", n.id, keep)
		n.crash(keep)
	case r < 24:
		in, keep := 1+s.rnd.IntN(12), s.chance(4)
		s.fell("power fails soon", "node %d, in %d operations of its disk", n.id, in)
		n.boot.disk.failIn(in, keep)
	case r < 26:
		s.fell("all crash", "")
		for _, n := range s.nodes {
			if n.boot != nil {
				n.crash(false)
			}
		}
	case r < 42 && !n.frozen:
		s.fell("stop", "node %d", n.id)
		s.freeze(n, true)
	case n.frozen && r < 70:
		s.fell("go on", "node %d", n.id)
		s.freeze(n, false)
	case r < 52:
		s.isolate(n)
	case r < 60:
		a, b := s.process(), s.process()
		s.fell("cut one way", "%d -> %d", a, b)
		s.cut(a, b)
	case r < 78:
		s.fell("cuts heal", "")
		s.mend()
	case r < 90:
		s.transfer(n)
	case r < 94:
		s.lazy(n)
	case r < 97:
		if s.opt.ttl {
			return
		}
		s.fell("clock jumps", "node %d", n.id)
		n.clock.Advance(time.Duration(s.rnd.IntN(5000)) * time.Millisecond)
	default:
		a, _ := pick(s, s.clients)
		s.fell("connection lost", "client %d, node %d", a.id, n.id)
		a.fabric.Lose(a.host(), n.host())
	}
}

// victim is mostly a node that leads.
func (s *sim) victim() *node {
	n, _ := pick(s, s.nodes)
	if s.chance(3) {
		return n
	}
	shard := raft.GroupID(1 + s.rnd.IntN(s.opt.shards))
	for _, o := range s.nodes {
		if o.boot == nil {
			continue
		}
		if g := o.boot.core.Host().Group(shard); g != nil && g.Status().Leading {
			return o
		}
	}
	return n
}

// fell notes a fault.
func (s *sim) fell(kind, format string, args ...any) {
	s.count(kind)
	s.note("fault: %s %s", kind, fmt.Sprintf(format, args...))
}

func (s *sim) freeze(n *node, frozen bool) {
	n.frozen = frozen
	for _, a := range s.clients {
		if frozen {
			a.fabric.Freeze(n.host())
		} else {
			a.fabric.Thaw(n.host())
		}
	}
}

// process is any node or client.
func (s *sim) process() int {
	i := s.rnd.IntN(len(s.nodes) + len(s.clients))
	if i < len(s.nodes) {
		return s.nodes[i].id
	}
	return s.clients[i-len(s.nodes)].id
}

// isolate cuts a node off: from the other nodes, and perhaps from clients.
func (s *sim) isolate(n *node) {
	clients := s.chance(3)
	s.fell("isolate", "node %d, clients too: %v", n.id, clients)
	for _, o := range s.nodes {
		if o != n {
			s.cut(n.id, o.id)
			s.cut(o.id, n.id)
		}
	}
	for _, a := range s.clients {
		if clients && s.chance(2) {
			s.cut(n.id, a.id)
			s.cut(a.id, n.id)
		}
	}
}

func (s *sim) cut(from, to int) {
	s.cuts[[2]int{from, to}] = true
	for _, a := range s.clients {
		// A READ needs both ways.
		switch a.id {
		case from:
			s.partition(a, to)
		case to:
			s.partition(a, from)
		}
	}
}

func (s *sim) partition(a *actor, node int) {
	if node <= len(s.nodes) {
		a.fabric.Partition(a.host(), s.node(node).host())
	}
}

func (s *sim) mend() {
	clear(s.cuts)
	for _, a := range s.clients {
		for _, n := range s.nodes {
			a.fabric.Heal(a.host(), n.host())
		}
	}
}

// leads is the node that leads a shard, as it knows; nil: none. Where two say so it is not
// the one given.
func (s *sim) leads(shard raft.GroupID, not *node) *node {
	for _, n := range s.live() {
		if n == not {
			continue
		}
		if g := n.boot.core.Host().Group(shard); g != nil && g.Status().Leading {
			return n
		}
	}
	return nil
}

// ledBy gives a shard that the node leads; 0: none.
func (s *sim) ledBy(n *node) raft.GroupID {
	for i := range s.opt.shards {
		shard := raft.GroupID(1 + (i+s.steps)%s.opt.shards)
		if g := n.boot.core.Host().Group(shard); g != nil && g.Status().Leading {
			return shard
		}
	}
	return 0
}

// transfer asks a node to hand a shard over.
func (s *sim) transfer(n *node) {
	if n.frozen {
		return
	}
	to, _ := pick(s, s.nodes)
	if shard := s.ledBy(n); shard != 0 {
		s.handOver(n, shard, to)
	}
}

func (s *sim) handOver(n *node, shard raft.GroupID, to *node) {
	b := n.boot
	if b == nil || n.frozen {
		return
	}
	g := b.core.Host().Group(shard)
	if g == nil {
		return
	}
	s.fell("transfer", "shard %d from node %d to %d", shard, n.id, to.id)
	go func() {
		ctx, cancel := context.WithTimeout(b.life, 50*time.Millisecond)
		defer cancel()
		_ = g.TransferLeader(ctx, raft.NodeID(to.id)) // it may well fail: whether it does is no matter here
	}()
}

// grow has keys put that all belong into one chain of their shard's index: once it is longer
// than chains may be the index is replaced by a larger one.
func (s *sim) grow(n *node) {
	shard := s.ledBy(n)
	if shard == 0 {
		return
	}
	s.fell("grow", "shard %d on node %d", shard, n.id)
	b, g := n.boot, n.boot.core.Host().Group(shard)
	for range bulkAtOnce {
		put := &kvdv1.PutOp{NamespaceId: 1, Key: s.bulkKey(uint32(shard)), Value: []byte("bulk")}
		data, err := proto.Marshal(&kvdv1.Command{LeaderUnixMs: n.clock.Now().UnixMilli(), Op: &kvdv1.Command_Put{Put: put}})
		if err != nil {
			panic(fmt.Sprintf("sim: encode a command: %v", err)) // bug: it is made above
		}
		go func() {
			ctx, cancel := context.WithTimeout(b.life, 50*time.Millisecond)
			defer cancel()
			_, _, _ = g.Propose(ctx, data) // nobody reads them: what comes of it is no matter
		}()
		synctest.Wait() // they come in order
	}
}

const (
	bulkAtOnce = 24
	// bulkBuckets is more than the smallest table has: keys of one bucket of so many are of
	// one there, too.
	bulkBuckets = 90
)

// bulkKey is the next key of the shard that goes into the first bucket.
func (s *sim) bulkKey(shard uint32) []byte {
	for {
		s.bulk++
		key := fmt.Appendf(nil, "bulk-%d", s.bulk)
		if h := layout.HashKey(s.manifest.HashSeed, key); h.Shard(uint32(s.opt.shards)) == shard && h.HomeBucket(bulkBuckets) == 0 {
			return key
		}
	}
}

// repair ends all faults.
func (s *sim) repair() {
	s.note("all faults end")
	s.forget()
	s.mend()
	for _, n := range s.nodes {
		if n.frozen {
			s.freeze(n, false)
		}
		if n.boot == nil {
			n.start()
			s.settle()
			continue
		}
		n.boot.disk.failIn(0, false)
	}
}

// healPause is how many ticks a client waits after an operation that failed.
const healPause = 20

// heal is the second phase: all faults end, and then every client must be able to write
// and to read every key.
func (s *sim) heal() {
	s.rough, s.hasty, s.healing = false, false, true
	s.settle()
	if s.run.repair != nil {
		s.run.repair(s)
	} else {
		s.repair()
	}
	todo := map[*actor]int{}  // operations done
	again := map[*actor]int{} // in which tick it tries again; 0: nothing failed
	for tick := range healBound {
		if len(s.res.Breach) > 0 {
			return
		}
		s.pass(tickInterval + time.Duration(s.rnd.IntN(1000)))
		s.settle()
		s.ticks()
		s.drain()
		left := !s.finishMoves()
		for _, a := range s.clients {
			if n := todo[a]; n > 0 && n < 2*len(s.keys)+1 && a.busy == nil && again[a] == 0 && !s.worked(a) {
				todo[a]-- // again, but not at once: each attempt may leave a write of unknown fate
				again[a] = tick + healPause
			}
			n := todo[a]
			left = left || n < 2*len(s.keys) || a.busy != nil
			if n >= 2*len(s.keys) || a.busy != nil || !a.dialled.Load() || tick < again[a] {
				continue
			}
			op := &history.Op{Key: s.keys[n/2], Kind: history.Put}
			if n%2 == 1 {
				op.Kind = history.Get
			}
			todo[a]++
			again[a] = 0
			s.call(a, op)
			s.settle()
		}
		if !left {
			s.res.Healed = tick
			return
		}
	}
	for shard := range uint32(s.opt.shards) {
		if s.opt.moves && !s.placed(shard+1) {
			s.breach("no progress: the replicas of shard %d are not at nodes %v %d ticks after all faults ended", shard+1, s.wishes[shard+1], healBound)
		}
	}
	for _, a := range s.clients {
		if todo[a] == 2*len(s.keys) {
			continue
		}
		s.breach("no progress: client %d has done %d of %d operations %d ticks after all faults ended", a.id, todo[a], 2*len(s.keys), healBound)
	}
}

// worked tells whether the last operation of the client had an answer.
func (s *sim) worked(a *actor) bool {
	for i := len(s.ops) - 1; i >= 0; i-- {
		if op := s.ops[i]; op.Process == a.id {
			return op.Outcome == history.OK
		}
	}
	return false
}

// drain takes steps until there is nothing to do before more time passes.
func (s *sim) drain() {
	for idle := 0; idle < 12; {
		busy := false
		switch s.rnd.IntN(3) {
		case 0:
			busy = s.deliver()
		case 1:
			if n, ok := pick(s, s.live()); ok {
				busy = n.work()
			}
		case 2:
			busy = s.read()
		}
		if idle++; busy {
			idle = 0
			s.settle()
		}
	}
}
