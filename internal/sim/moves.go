package sim

import (
	"context"
	"slices"
	"strings"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/raft"
)

// Replicas move from node to node: the simulation wishes in group 0 what a keeper would,
// tells it where replicas are, and lets each node take the mover's steps.

// moveWait bounds a step of a move, and of what group 0 is told.
const moveWait = 60*time.Millisecond + 419*time.Microsecond

// placement takes one step of where replicas go.
func (s *sim) placement() {
	shard := uint32(1 + s.rnd.IntN(s.opt.shards))
	switch r := s.rnd.IntN(12); {
	case r == 0:
		s.wish(shard, s.place())
	case r < 4:
		s.report(shard)
	default:
		n := s.leads(raft.GroupID(shard), nil)
		if n == nil || s.chance(3) { // who does not lead may have been left
			n, _ = pick(s, s.nodes)
		}
		n.move(shard)
	}
}

// place is any three nodes.
func (s *sim) place() (nodes []uint64) {
	for _, i := range s.rnd.Perm(len(s.nodes))[:s.manifest.GetReplication()] {
		nodes = append(nodes, uint64(s.nodes[i].id))
	}
	return nodes
}

// wish has group 0 wish a shard's replicas at nodes.
func (s *sim) wish(shard uint32, nodes []uint64) bool {
	s.fell("move", "shard %d to nodes %v", shard, nodes)
	s.wishes[shard] = nodes
	return s.tell(&kvdv1.ShardOp{Wishes: []*kvdv1.ShardWish{{Shard: shard, Nodes: nodes}}})
}

// report tells group 0 where a shard's replicas are, by its leader's word.
func (s *sim) report(shard uint32) {
	n := s.leads(raft.GroupID(shard), nil)
	if n == nil {
		return
	}
	conf := n.boot.core.Configuration(shard)
	if conf.GetConfigId() > s.configs[shard] {
		s.configs[shard] = conf.GetConfigId()
		s.count("configuration changed")
	}
	s.note("node %d: shard %d has %v", n.id, shard, conf)
	s.tell(&kvdv1.ShardOp{Reports: []*kvdv1.ShardReport{conf}})
}

// tell has who leads group 0 propose something there; false: nobody does.
func (s *sim) tell(op *kvdv1.ShardOp) bool {
	n := s.leads(0, nil)
	if n == nil {
		return false
	}
	b := n.boot
	go func() {
		ctx, cancel := context.WithTimeout(b.life, moveWait)
		defer cancel()
		_ = b.core.Place(ctx, op) // it may well fail: it comes again
	}()
	return true
}

// move lets the node take the mover's next step for a shard. It lets go of one replica at
// a time: others who want that lock could not be told from those who are at work.
func (n *node) move(shard uint32) {
	b := n.boot
	if b == nil || n.frozen || b.moving[shard].Load() || b.placing.Load() {
		return
	}
	group := b.core.Host().Group(raft.GroupID(shard))
	if group == nil {
		return
	}
	leaves := !group.Status().Leading
	n.s.note("node %d: moves shard %d", n.id, shard)
	b.moving[shard].Store(true)
	b.placing.Store(leaves)
	go func() {
		ctx, cancel := context.WithTimeout(b.life, moveWait)
		defer cancel()
		_ = b.core.Move(ctx, shard) // nor does the mover do more than try again
		if leaves {
			b.placing.Store(false)
		}
		b.moving[shard].Store(false)
	}()
}

// isPlacing tells the calls that make a replica, or see whether it is there: see move.
func isPlacing(method string) bool { return strings.HasSuffix(method, "/Replica") }

// placed tells whether the shard's replicas are where they are wished, by its leader's word.
func (s *sim) placed(shard uint32) bool {
	n := s.leads(raft.GroupID(shard), nil)
	if n == nil {
		return false
	}
	conf, wish := n.boot.core.Configuration(shard), slices.Sorted(slices.Values(s.wishes[shard]))
	return len(wish) == 0 || len(conf.GetVotersOutgoing())+len(conf.GetLearners()) == 0 && slices.Equal(wish, slices.Sorted(slices.Values(conf.GetVoters())))
}

// finishMoves brings the moves of a healed cluster on; false: some are not over.
func (s *sim) finishMoves() bool {
	over := true
	for shard := uint32(1); s.opt.moves && int(shard) <= s.opt.shards; shard++ {
		if s.placed(shard) {
			continue
		}
		over = false
		switch s.rnd.IntN(4) {
		case 0: // group 0 may not have been there when it was told
			s.tell(&kvdv1.ShardOp{Wishes: []*kvdv1.ShardWish{{Shard: shard, Nodes: s.wishes[shard]}}})
		default:
			if n := s.leads(raft.GroupID(shard), nil); n != nil {
				n.move(shard)
			}
		}
		s.settle()
	}
	return over
}

// strand moves a shard away from a voter that hears nobody, and then has the leader deposed
// by one that is there for it, at once: two of the configuration before never learn of the
// new term, and some client knows no other configuration.
func (s *sim) strand(n *node) {
	shard := s.ledBy(n)
	conf := n.boot.core.Configuration(uint32(shard))
	keys := s.keysOf(shard)
	if len(conf.GetVoters()) != 3 || len(conf.GetVotersOutgoing())+len(conf.GetLearners()) > 0 || len(keys) == 0 {
		return
	}
	var lost, to *node
	wish := []uint64{uint64(n.id)}
	for _, i := range s.rnd.Perm(len(s.nodes)) {
		switch o := s.nodes[i]; {
		case o == n:
		case o.boot == nil || o.frozen:
			return
		case !slices.Contains(conf.GetVoters(), uint64(o.id)):
			if len(wish) < 3 {
				wish = append(wish, uint64(o.id))
			}
		case lost == nil:
			lost = o
		default:
			to = o
		}
	}
	if to == nil || len(wish) > 2 {
		wish = wish[:2]
	}
	if to == nil || len(wish) < 2 {
		return
	}
	wish = append(wish, uint64(to.id))
	s.fell("strand", "shard %d of node %d, away from node %d", shard, n.id, lost.id)
	s.mend()
	key := keys[s.rnd.IntN(len(keys))]
	for _, a := range s.idle() {
		s.call(a, &history.Op{Kind: history.Get, Key: key})
		s.finish(a)
	}
	s.deafen(lost)
	s.wish(uint32(shard), wish)
	for range 300 {
		if n.boot == nil || s.placed(uint32(shard)) || len(s.res.Breach) > 0 {
			break
		}
		n.move(uint32(shard))
		s.settle()
		s.pass(time.Duration(1 + s.rnd.IntN(400_000)))
		s.settle()
		s.ticks()
		s.drain()
	}
	if n.boot == nil || to.boot == nil || s.leads(shard, nil) != n || !s.placed(uint32(shard)) {
		return
	}
	s.count("moved away from one that does not hear")
	s.handOver(n, shard, to)
	s.settle()
	s.deafen(n)
	s.hasty = true
	if !s.rush(func() bool { return s.leads(shard, n) == to }) {
		return
	}
	s.write(to, key, 64)
	s.count("stranded")
	s.left = &behind{n: n, shard: shard}
	for _, a := range s.idle() {
		s.call(a, &history.Op{Kind: history.Get, Key: key})
		s.finish(a)
	}
}
