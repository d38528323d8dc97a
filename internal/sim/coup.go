package sim

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/raft"
)

// lazy has a node apply nothing for a while.
func (s *sim) lazy(n *node) {
	s.fell("applies late", "node %d", n.id)
	n.lazyUntil = s.steps + 100 + s.rnd.IntN(600)
}

// behind is a node that the others have left behind.
type behind struct {
	n       *node
	shard   raft.GroupID // that it led, and thinks it does; 0: none
	fresh   string       // a key that it does not have: for a node that did not lead
	release func()       // lets the NIC of a client go on; nil: it was not held up
}

// leaveBehind has a node fall behind the others and come back, in a step of its own for
// each: what is right about the node before and after is wrong about it in between.
func (s *sim) leaveBehind() {
	switch n := s.victim(); {
	case s.left != nil:
		s.comeBack()
	case n.boot == nil || n.frozen:
	case s.opt.grows && s.chance(2):
		s.grow(n)
	case s.opt.moves && s.ledBy(n) != 0 && s.chance(3):
		s.strand(n)
	case s.ledBy(n) != 0 && s.chance(2):
		s.coup(n)
	case s.ledBy(n) != 0:
		s.usurp(n)
	default:
		s.fell("left behind", "node %d", n.id)
		s.fresh++
		s.left = &behind{n: n, fresh: fmt.Sprintf("fresh-%d", s.fresh)}
		s.onlyAt(n, s.left.fresh) // clients know the node's index from now on
		s.deafen(n)
	}
}

// onlyAt has the clients read a key, at the level session, while they get at the memory of
// no other node.
func (s *sim) onlyAt(n *node, key string) {
	for _, a := range s.idle() {
		for _, o := range s.nodes {
			if o != n {
				a.fabric.Partition(a.host(), o.host())
			}
		}
		s.call(a, &history.Op{Kind: history.Get, Key: key, Level: "session"})
		s.settle()
		for tries := 0; a.busy != nil && tries < 40; tries++ {
			s.finish(a)
			s.pass(time.Duration(1 + s.rnd.IntN(1_000_000)))
			s.settle()
		}
		for _, o := range s.nodes {
			if !s.cuts[[2]int{o.id, a.id}] && !s.cuts[[2]int{a.id, o.id}] {
				a.fabric.Heal(a.host(), o.host())
			}
		}
	}
}

// driveOut drives a new value out of memory while a client is READing the bucket of its key:
// in that bucket nothing may ever have been driven out before.
func (s *sim) driveOut() {
	a, ok := pick(s, slices.DeleteFunc(slices.Clone(s.clients), func(a *actor) bool { return !a.tears || !a.dialled.Load() }))
	if !ok {
		return
	}
	s.driving = true
	defer func() { s.driving = false }()
	for range 4 {
		if s.finish(a); a.busy != nil || !s.driveOutOne(a) {
			return
		}
	}
}

// driveOutOne does so with one value; false: nobody leads, who does not, or does not say so.
func (s *sim) driveOutOne(a *actor) bool {
	shard := raft.GroupID(1 + s.rnd.IntN(s.opt.shards))
	n, others := s.leads(shard, nil), s.keysOf(shard)
	if n == nil || len(others) == 0 || !n.serves(shard) {
		return false
	}
	key := ""
	for key == "" || raft.GroupID(s.shardOf(key)) != shard {
		s.fresh++
		key = fmt.Sprintf("fresh-%d", s.fresh)
	}
	s.fell("driven out", "%s of shard %d on node %d, while client %d looks", key, shard, n.id, a.id)
	size := s.opt.sizes[len(s.opt.sizes)-1] // one takes the place of another of its size
	if !s.write(n, key, size) {
		return false
	}
	s.call(a, &history.Op{Kind: history.Get, Key: key})
	s.settle()
	for range 1 + s.rnd.IntN(4) {
		at, ok := a.fabric.Next()
		left := at.Sub(s.clock.Now())
		if !ok || left > time.Millisecond {
			break
		}
		if left > 0 {
			s.pass(left)
			s.settle()
		}
		if a.fabric.Step() {
			s.note("READ of client %d", a.id)
			s.settle()
		}
	}
	release := a.fabric.Hold(n.host())
	defer release()
	for i := range 4 + s.rnd.IntN(4) {
		if !s.write(n, others[(i+s.fresh)%len(others)], size) {
			return false // every further write would be of unknown fate, too
		}
	}
	release()
	s.finish(a)
	return true
}

// finish lets what a client does come to its end; false where it does not soon.
func (s *sim) finish(a *actor) bool {
	for range 60 {
		if a.busy == nil {
			return true
		}
		s.pass(time.Duration(1 + s.rnd.IntN(60000)))
		s.settle()
		s.drain()
	}
	return a.busy == nil
}

// catchUp writes a key that the node left behind has never had, makes it catch up by a
// snapshot, and has clients that know of the key look for it there.
func (s *sim) catchUp(b *behind) {
	shard := raft.GroupID(s.shardOf(b.fresh))
	l := s.leads(shard, b.n)
	if l == nil {
		return
	}
	s.write(l, b.fresh, 64)
	for _, a := range s.idle() {
		s.call(a, &history.Op{Kind: history.Get, Key: b.fresh})
		s.finish(a)
	}
	s.outpace(b.n)
	s.mend()
	s.rush(func() bool {
		l := s.leads(shard, b.n)
		return l == nil || b.n.applied(shard) >= l.applied(shard)
	})
	s.count("caught up")
	s.onlyAt(b.n, b.fresh)
}

// applied up to which index; 0: it does not run, or has no replica.
func (n *node) applied(shard raft.GroupID) uint64 {
	if n.boot == nil {
		return 0
	}
	g := n.boot.core.Host().Group(shard)
	if g == nil {
		return 0
	}
	return g.Status().Applied
}

// deafen has a node hear none of the others.
func (s *sim) deafen(n *node) {
	for _, o := range s.nodes {
		if o != n {
			s.cut(o.id, n.id)
		}
	}
}

// usurp has a leader hand over while it hears nobody, so that it goes on in its old term.
// Some clients can not reach it, and write elsewhere.
func (s *sim) usurp(n *node) {
	shard := s.ledBy(n)
	to, _ := pick(s, s.nodes)
	if to == n {
		return
	}
	s.fell("usurp", "shard %d of node %d", shard, n.id)
	s.handOver(n, shard, to)
	s.settle()
	s.deafen(n)
	for _, a := range s.clients {
		if s.chance(2) {
			s.cut(n.id, a.id)
			s.cut(a.id, n.id)
		}
	}
	if s.chance(3) {
		s.lazy(to)
	}
	s.hasty = s.chance(2)
	s.left = &behind{n: n, shard: shard}
}

// comeBack lets a node that was left behind hear the others, who may have cut their logs
// meanwhile, and gives it back what it led. A READ of it may be under way all the time.
func (s *sim) comeBack() {
	b := s.left
	switch l := s.leads(max(b.shard, 1), b.n); {
	case b.n.boot == nil || b.n.frozen:
		s.forget()
	case len(s.cuts) > 0 && l != nil:
		switch {
		case b.shard == 0:
			s.catchUp(b)
		case s.chance(2):
			s.hold(b)
		case s.chance(2):
			s.outpace(b.n)
		}
		s.fell("cuts heal", "")
		s.mend()
	case len(s.cuts) > 0: // nobody leads now
		if s.chance(4) {
			s.forget()
		}
	case b.shard != 0 && l != nil && s.chance(4):
		s.forget()
	case b.shard != 0 && l != nil:
		s.handOver(l, b.shard, b.n)
	default:
		s.count("came back")
		s.forget()
	}
}

// forget ends what is done with the node that was left behind.
func (s *sim) forget() {
	if s.left != nil && s.left.release != nil {
		s.left.release()
	}
	s.left = nil
}

// hold has a client read from the node that was left behind, and its READs there stop
// somewhere on the way.
func (s *sim) hold(b *behind) {
	a, ok := pick(s, s.idle())
	if !ok {
		return
	}
	s.fell("READ held up", "client %d at node %d", a.id, b.n.id)
	s.hasty = true
	s.call(a, &history.Op{Kind: history.Get, Key: s.keys[s.rnd.IntN(2)]})
	s.settle()
	for range s.rnd.IntN(8) {
		s.pass(time.Duration(1 + s.rnd.IntN(50000)))
		s.settle()
		if a.fabric.Step() {
			s.note("READ of client %d", a.id)
			s.settle()
		}
	}
	b.release = a.fabric.Hold(b.n.host())
}

// outpace has the others go on until their logs have no more what the node lacks.
func (s *sim) outpace(n *node) {
	s.fell("outpaced", "node %d", n.id)
	for range 9 {
		for _, o := range s.live() {
			if o == n || o.boot == nil {
				continue
			}
			s.note("node %d: flushes and ticks", o.id)
			if err := o.boot.core.Flush(); err != nil && !o.boot.dead.Load() {
				s.breach("node %d: flush: %v", o.id, err)
			}
			if !o.boot.dead.Load() {
				o.boot.steps.Tick()
			}
			s.settle()
		}
		s.drain()
	}
}

// rush takes steps of nodes and of messages until something is so, and tells whether it is. No
// time passes, and no READ moves on.
func (s *sim) rush(until func() bool) bool {
	for range 800 {
		if len(s.res.Breach) > 0 || until() {
			break
		}
		busy := false
		if s.chance(2) {
			busy = s.deliver()
		} else if n, ok := pick(s, s.live()); ok {
			busy = n.work()
		}
		if busy {
			s.settle()
		}
	}
	return until()
}

// coup is an election and a write that are over before a tick, or the rest of a read, comes:
// a leader that learns of neither, or a new leader that applies late.
func (s *sim) coup(n *node) {
	shard := s.ledBy(n)
	to, _ := pick(s, s.nodes)
	if to == n || to.boot == nil || to.frozen {
		return
	}
	s.fell("coup", "shard %d of node %d", shard, n.id)
	s.mend()
	keys := s.keysOf(shard)
	if len(keys) == 0 {
		return
	}
	key, late := keys[s.rnd.IntN(len(keys))], s.chance(2)
	s.hasty = true
	if late {
		s.lazy(to)
		s.write(n, key, 64)
	}
	s.handOver(n, shard, to)
	s.settle()
	if !late {
		// What it has to hear to hand over is on its way there already, or comes in these steps.
		if s.chance(3) {
			s.rush(func() bool { return s.chance(20) })
		}
		s.deafen(n)
	}
	if !s.rush(func() bool { return s.leads(shard, n) == to }) {
		return
	}
	if !late {
		s.write(to, key, 64)
	}
	s.left = &behind{n: n, shard: shard}
	for _, a := range s.idle() {
		s.call(a, &history.Op{Kind: history.Get, Key: key})
		s.settle()
	}
	if !late && s.chance(2) {
		s.holdAll(s.left)
		s.mend()
		s.handOver(to, shard, n)
		s.settle()
		if s.rush(func() bool { return s.leads(shard, to) == n && n.serves(shard) }) {
			s.count("led again between two READs")
		}
		s.forget()
	}
}

// keysOf a shard.
func (s *sim) keysOf(shard raft.GroupID) (list []string) {
	for _, k := range s.keys {
		if raft.GroupID(s.shardOf(k)) == shard {
			list = append(list, k)
		}
	}
	return list
}

// serves tells whether the node leads and has applied what it has.
func (n *node) serves(shard raft.GroupID) bool {
	if n.boot == nil {
		return false
	}
	g := n.boot.core.Host().Group(shard)
	if g == nil {
		return false
	}
	st := g.Status()
	return st.Leading && st.Applied == st.LastIndex
}

// holdAll stops the READs of all clients at the node somewhere on the way.
func (s *sim) holdAll(b *behind) {
	var releases []func()
	for _, a := range s.clients {
		for moves, tries := s.rnd.IntN(4), 0; moves > 0 && tries < 12; tries++ {
			s.pass(time.Duration(1 + s.rnd.IntN(20000)))
			s.settle()
			if a.fabric.Step() {
				moves--
				s.note("READ of client %d", a.id)
				s.settle()
			}
		}
		releases = append(releases, a.fabric.Hold(b.n.host()))
	}
	b.release = func() {
		for _, r := range releases {
			r()
		}
	}
}

const (
	// directWriter is the process of those writes that know whom to ask.
	directWriter = 900
	directHost   = 99
)

// write puts a value by one call to a node, as a client does that knows it leads, and waits
// for the answer without letting time pass. It tells whether the value was stored.
func (s *sim) write(n *node, key string, size int) bool {
	s.moment++
	s.values++
	op := &history.Op{
		ID: uint64(len(s.ops) + 1), Process: directWriter, Client: "direct", Via: "grpc", Kind: history.Put, Key: key, Shard: s.shardOf(key),
		Value: s.values, Size: size, Call: s.moment, Outcome: history.Unknown,
	}
	s.note("put(%s) value %d at node %d", key, op.Value, n.id)
	req := &kvdv1.PutRequest{NamespaceId: 1, Key: []byte(key), Value: payload(op.Value, op.Size)}
	var answer atomic.Pointer[kvdv1.WriteResponse]
	var over atomic.Bool
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		defer cancel()
		if r, err := kvdv1.NewKVClient(wire{s: s, from: directHost, to: n.id}).Put(ctx, req); err == nil {
			answer.Store(r)
		}
		over.Store(true)
	}()
	s.settle()
	s.rush(over.Load)
	s.moment++
	op.Return = s.moment
	if r := answer.Load(); r != nil && r.GetOutcome() == kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED {
		op.Outcome, op.Version = history.OK, r.GetVersion()
	}
	s.ops = append(s.ops, op)
	s.count("direct put " + string(op.Outcome))
	s.note("put(%s) value %d -> %s version %d", key, op.Value, op.Outcome, op.Version)
	return op.Outcome == history.OK
}
