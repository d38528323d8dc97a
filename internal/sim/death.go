package sim

import (
	"time"

	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/raft"
)

// endedMost is how much later than a node's death a client hears at most that its connection
// to the memory has ended, where that is mapped: the client may not have been running.
const endedMost = 200 * time.Millisecond

// dieUnseen has all nodes die and come back, and a value replaced, while a client hears
// nothing of it. All the memory that it has mapped is of dead processes, which agree with
// each other.
func (s *sim) dieUnseen() {
	a, ok := pick(s, s.idle())
	key := s.keys[s.rnd.IntN(len(s.keys))]
	shard := raft.GroupID(s.shardOf(key))
	if !ok {
		return
	}
	s.call(a, &history.Op{Kind: history.Get, Key: key}) // so that it knows the way
	if !s.finish(a) {
		return
	}
	s.fell("all die unseen", "by client %d, who reads %s", a.id, key)
	s.mend()
	s.asleep, s.driving = a, true
	defer func() { s.asleep, s.driving = nil, false }()
	for _, n := range s.nodes {
		if n.boot != nil {
			n.crash(false)
		}
	}
	s.settle()
	for _, n := range s.nodes {
		n.start()
		s.settle()
	}
	var l *node
	for range 300 {
		if l = s.leads(shard, nil); l != nil && l.serves(shard) || len(s.res.Breach) > 0 {
			break
		}
		s.pass(time.Duration(1 + s.rnd.IntN(500_000)))
		s.settle()
		s.ticks()
		s.drain()
	}
	if l == nil || a.busy != nil || !s.write(l, key, 64) {
		return
	}
	s.count("replaced unseen")
	s.call(a, &history.Op{Kind: history.Get, Key: key})
	s.finish(a)
}
