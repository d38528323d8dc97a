package raft

import (
	crand "crypto/rand"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"go.etcd.io/raft/v3/raftpb"
)

var (
	simSeed  = flag.Uint64("raft.seed", 0, "replay this one seed of TestSim")
	simSeeds = flag.Int("raft.seeds", 60, "number of seeds of TestSim")
)

// TestSim runs whole clusters by hand from a seed, with crashes, lost, late and
// doubled messages, partitions, snapshots, changes of members and of leaders, and
// checks what must hold in every moment. Then all faults end, and the cluster must
// go on and agree.
func TestSim(t *testing.T) {
	if *simSeed != 0 {
		runSim(t, *simSeed)
		return
	}
	for seed := range uint64(*simSeeds) {
		t.Run(fmt.Sprintf("seed=%d", seed+1), func(t *testing.T) { runSim(t, seed+1) })
	}
}

// TestSimReplays: a seed is worth nothing if it does not give the same run again.
func TestSimReplays(t *testing.T) {
	require.Equal(t, runSim(t, 7), runSim(t, 7))
}

const (
	simSteps  = 2500
	simGroups = 2
)

type sim struct {
	t   *testing.T
	rnd *rand.Rand
	m   *manual
	sum interface{ Write([]byte) (int, error) }

	cut      map[[2]NodeID]bool
	pending  []simProposal
	reading  []simRead
	entries  map[GroupID]map[uint64]machineEntry // what any replica applied
	acked    map[GroupID][]machineEntry
	maxAcked map[GroupID]uint64
	burnt    map[GroupID]map[uint64]bool // members that were removed
	rough    bool
	n        int
	answered int
	served   int
}

type simProposal struct {
	node NodeID
	g    GroupID
	data string
	w    *proposal
}

type simRead struct {
	node NodeID
	g    GroupID
	from uint64 // acknowledged when it began
	r    *read
}

func runSim(t *testing.T, seed uint64) uint64 {
	var key [32]byte
	key[0], key[1], key[2] = byte(seed), byte(seed>>8), byte(seed>>16)
	// The core draws its election timeouts from here.
	old := crand.Reader
	crand.Reader = rand.NewChaCha8(key)
	defer func() { crand.Reader = old }()

	hash := fnv.New64a()
	s := &sim{
		t: t, rnd: rand.New(rand.NewPCG(seed, 1)), sum: hash,
		cut: map[[2]NodeID]bool{}, entries: map[GroupID]map[uint64]machineEntry{}, acked: map[GroupID][]machineEntry{},
		maxAcked: map[GroupID]uint64{}, burnt: map[GroupID]map[uint64]bool{},
	}
	voters := 3
	if seed%3 == 0 {
		voters = 5
	}
	s.m = newManual(t, voters, simGroups, func(c *Config) {
		c.LogRetainEntries = 5
		c.ElectionTicks = 5
		c.MaxUncommittedBytes = 400
		c.MaxApplyingBytes = 200
		c.MaxMessageBytes = 150
		c.MaxInflightBytes = 600
		if seed%2 == 0 {
			c.CommitDelay = 1 // what is late is sent by a step and not by the clock
		}
		if seed%4 < 2 {
			c.HoldDelay = 1
		}
		if seed%5 > 0 {
			c.QuiesceTicks = int(seed % 3)
		}
	})
	s.m.addNode(NodeID(voters + 1))
	s.m.addNode(NodeID(voters + 2))
	for _, g := range s.m.groups {
		s.entries[g] = map[uint64]machineEntry{}
		s.burnt[g] = map[uint64]bool{}
		for _, n := range s.m.nodes {
			n.sms[g].applied = func(e machineEntry) { s.onApplied(n.id, g, e) }
		}
	}
	defer func() {
		if t.Failed() {
			t.Logf("replay: go test ./raft -run 'TestSim$' -raft.seed=%d", seed)
		}
	}()
	for i := range simSteps {
		// Faults come in spells, or nothing would ever get going.
		if s.rough = i/200%2 == 1; !s.rough && i%200 == 0 {
			s.calm()
		}
		s.step()
		s.check()
	}
	s.heal()
	s.rest()
	s.report()
	return hash.Sum64()
}

// onApplied: replicas agree on the committed prefix.
func (s *sim) onApplied(n NodeID, g GroupID, e machineEntry) {
	if was, ok := s.entries[g][e.Index]; ok && was != e {
		s.m.breach("group %d: node %d applies %v, another applied %v", g, n, e, was)
	}
	s.entries[g][e.Index] = e
}

func (s *sim) node() *manualNode {
	ids := s.m.ids()
	return s.m.nodes[ids[s.rnd.IntN(len(ids))]]
}

func (s *sim) group() GroupID { return s.m.groups[s.rnd.IntN(len(s.m.groups))] }

func (s *sim) step() {
	n, g := s.node(), s.group()
	s.m.clock.Advance(time.Duration(s.rnd.IntN(100)) * time.Microsecond)
	limit := 1000
	if !s.rough {
		limit = 965
	}
	switch r := s.rnd.IntN(limit); {
	case r < 450:
		s.deliverSome()
	case r < 620:
		n.write()
	case r < 740:
		n.apply()
	case r < 780:
		s.m.tick(n.id)
	case r < 800:
		n.work()
	case r < 815:
		n.truncate()
	case r < 830:
		n.late()
	case r < 910:
		s.propose(n, g)
	case r < 930:
		if n.host != nil {
			s.reading = append(s.reading, simRead{n.id, g, s.maxAcked[g], n.read(g)})
		}
	case r < 940:
		n.sms[g].flush()
	case r < 950:
		if n.host != nil {
			n.transfer(g, s.node().id)
		}
	case r < 965:
		s.changeConf(g)
	case r < 975:
		s.crash(n)
	case r < 985:
		s.restart(n)
	case r < 992:
		s.cut[[2]NodeID{n.id, s.node().id}] = true
	case r < 994:
		for _, o := range s.m.ids() {
			s.cut[[2]NodeID{n.id, o}], s.cut[[2]NodeID{o, n.id}] = true, true
		}
	case r < 997:
		clear(s.cut)
	default:
		if n.host != nil {
			n.host.ReportUnreachable(s.node().id)
		}
	}
}

// calm repairs everything and lets a leader be found.
func (s *sim) calm() {
	clear(s.cut)
	for _, id := range s.m.ids() {
		s.restart(s.m.nodes[id])
	}
	for range 12 {
		for _, id := range s.m.ids() {
			s.m.tick(id)
		}
		s.m.settle()
		s.check()
	}
}

func (s *sim) deliverSome() {
	for range 1 + s.rnd.IntN(4) {
		if len(s.m.net) == 0 {
			return
		}
		i := 0
		if s.rnd.IntN(5) == 0 {
			i = s.rnd.IntN(len(s.m.net)) // out of order
		}
		p := s.m.net[i]
		switch r := s.rnd.IntN(100); {
		case s.cut[[2]NodeID{p.from, p.to}] || s.rough && r < 3:
			s.m.drop(i)
		case s.rough && r < 6 && p.done == nil:
			s.m.net = append(s.m.net, p)
			s.m.deliver(i)
		default:
			s.m.deliver(i)
		}
	}
}

func (s *sim) propose(n *manualNode, g GroupID) {
	if n.host == nil {
		return
	}
	// Mostly at a leader, or little would ever happen.
	if !n.group(g).Status().Leading && s.rnd.IntN(10) > 0 {
		if o := s.leader(g); o != nil {
			n = o
		}
	}
	s.n++
	data := fmt.Sprintf("p%d", s.n)
	s.pending = append(s.pending, simProposal{n.id, g, data, n.propose(g, data)})
}

func (s *sim) leader(g GroupID) *manualNode {
	for _, id := range s.m.ids() {
		if n := s.m.nodes[id]; n.host != nil && n.group(g).Status().Leading {
			return n
		}
	}
	return nil
}

func (s *sim) changeConf(g GroupID) {
	n := s.leader(g)
	if n == nil {
		return
	}
	conf := n.group(g).Status().Conf
	var cc raftpb.ConfChangeV2
	add := func(t raftpb.ConfChangeType, id uint64) {
		cc.Changes = append(cc.Changes, &raftpb.ConfChangeSingle{Type: t.Enum(), NodeId: &id})
	}
	any := uint64(s.node().id)
	if s.burnt[g][any] {
		return
	}
	voter := slices.Contains(conf.GetVoters(), any)
	switch {
	case slices.Contains(conf.GetLearners(), any):
		add(raftpb.ConfChangeAddNode, any)
		if s.rnd.IntN(2) == 0 && len(conf.GetVoters()) > 2 {
			other := conf.GetVoters()[s.rnd.IntN(len(conf.GetVoters()))]
			add(raftpb.ConfChangeAddLearnerNode, other) // joint
		}
	case voter && len(conf.GetVoters()) > 2 && s.rnd.IntN(4) == 0:
		add(raftpb.ConfChangeRemoveNode, any)
		s.burnt[g][any] = true
	case voter && len(conf.GetVoters()) > 2:
		add(raftpb.ConfChangeAddLearnerNode, any)
	case !voter:
		add(raftpb.ConfChangeAddLearnerNode, any)
	}
	if len(cc.Changes) > 0 {
		n.proposeConf(g, &cc)
	}
}

func (s *sim) crash(n *manualNode) {
	if n.host == nil {
		return
	}
	n.crash(s.rnd.IntN(3))
	s.pending = slices.DeleteFunc(s.pending, func(p simProposal) bool { return p.node == n.id })
	s.reading = slices.DeleteFunc(s.reading, func(r simRead) bool { return r.node == n.id })
	for i := len(s.m.net) - 1; i >= 0; i-- {
		if s.m.net[i].done != nil && s.m.net[i].from == n.id {
			s.m.net = slices.Delete(s.m.net, i, i+1) // the stream broke
		}
	}
}

func (s *sim) restart(n *manualNode) {
	if n.host == nil {
		require.NoError(s.t, n.start())
	}
}

// check looks at everything that must hold between any two steps.
func (s *sim) check() {
	s.collect()
	for _, g := range s.m.groups {
		for _, id := range s.m.ids() {
			s.checkConfirmedRead(s.m.nodes[id], g)
		}
	}
	for _, id := range s.m.ids() {
		require.NoError(s.t, s.m.nodes[id].fate, "node %d", id)
	}
	if len(s.m.broken) > 0 {
		tail := s.m.trace[max(0, len(s.m.trace)-60):]
		s.t.Fatalf("%s\nlast events:\n%s", strings.Join(s.m.broken, "\n"), strings.Join(tail, "\n"))
	}
	if len(s.m.trace) > 400 {
		for _, l := range s.m.trace[:300] {
			_, _ = s.sum.Write([]byte(l))
		}
		s.m.trace = slices.Clone(s.m.trace[300:])
	}
}

// collect judges the answers that came.
func (s *sim) collect() {
	s.pending = slices.DeleteFunc(s.pending, func(p simProposal) bool {
		select {
		case o := <-p.w.done:
			if o.err != nil {
				return true
			}
			s.answered++
			e := s.entries[p.g][o.index]
			if e.Data != p.data || e.Term != p.w.term || o.value != fmt.Sprintf("%s@%d", p.data, o.index) {
				s.m.breach("group %d: %q, proposed in term %d, is answered by %v (%v)", p.g, p.data, p.w.term, e, o.value)
			}
			s.acked[p.g] = append(s.acked[p.g], e)
			s.maxAcked[p.g] = max(s.maxAcked[p.g], o.index)
			return true
		default:
			return false
		}
	})
	s.reading = slices.DeleteFunc(s.reading, func(r simRead) bool {
		select {
		case o := <-r.r.done:
			if o.err == nil {
				s.served++
				if o.index < r.from {
					s.m.breach("group %d: a read at node %d got index %d, but %d was acknowledged before it began", r.g, r.node, o.index, r.from)
				}
				if have := s.m.nodes[r.node].sms[r.g].live.Index; have < o.index {
					s.m.breach("group %d: a read at node %d got index %d, but the state is at %d", r.g, r.node, o.index, have)
				}
			}
			return true
		default:
			return false
		}
	})
}

// checkConfirmedRead makes the one-sided read of the protocol, in one instant: if
// a replica shows that it serves term T, and a quorum of its configuration shows
// no higher term, then its state holds everything that was ever acknowledged.
func (s *sim) checkConfirmedRead(l *manualNode, g GroupID) {
	if l.host == nil || l.sms[g].serving == 0 {
		return
	}
	sm := l.sms[g]
	if sm.term > sm.serving || sm.configID != sm.live.ConfigID {
		return
	}
	confirms := func(voters []uint64) bool {
		n := 0
		for _, v := range voters {
			if o := s.m.nodes[NodeID(v)]; o.host != nil && o.sms[g].term <= sm.serving {
				n++
			}
		}
		return 2*n > len(voters)
	}
	conf := sm.live.Conf
	if !confirms(conf.GetVoters()) || len(conf.GetVotersOutgoing()) > 0 && !confirms(conf.GetVotersOutgoing()) {
		return
	}
	if sm.live.Index < s.maxAcked[g] {
		s.m.breach("group %d: node %d serves term %d and is confirmed, but shows index %d of %d acknowledged",
			g, l.id, sm.serving, sm.live.Index, s.maxAcked[g])
	}
}

// heal ends all faults and demands progress and agreement.
func (s *sim) heal() {
	clear(s.cut)
	for _, id := range s.m.ids() {
		s.restart(s.m.nodes[id])
	}
	for _, g := range s.m.groups {
		done := false
		for round := 0; !done; round++ {
			if round > 400 {
				s.t.Fatalf("group %d makes no progress after all faults ended", g)
			}
			for _, id := range s.m.ids() {
				s.m.tick(id)
			}
			s.m.settle()
			s.check()
			if l := s.leader(g); l != nil {
				w := l.propose(g, "last")
				s.m.settle()
				select {
				case o := <-w.done:
					done = o.err == nil
				default:
				}
			}
		}
	}
	for range 60 {
		for _, id := range s.m.ids() {
			s.m.tick(id)
		}
		s.m.settle()
		s.check()
	}
	for _, g := range s.m.groups {
		s.agree(g)
	}
}

// rest demands that what has nothing to do does nothing, on all nodes that are in it. A
// replica that was removed may know nothing of it and ask for votes for ever; the server
// deletes such.
func (s *sim) rest() {
	members := map[GroupID][]uint64{}
	for _, g := range s.m.groups {
		conf := s.leader(g).group(g).Status().Conf
		members[g] = slices.Concat(conf.GetVoters(), conf.GetLearners())
	}
	s.m.cut = func(p packet) bool {
		return p.beat == nil && !slices.Contains(members[p.gm.Group], uint64(p.from))
	}
	for range 20 {
		for _, id := range s.m.ids() {
			s.m.tick(id)
		}
		s.m.settle()
		s.check()
	}
	for _, g := range s.m.groups {
		lead := s.leader(g)
		if lead.host.cfg.QuiesceTicks == 0 {
			continue
		}
		for _, id := range members[g] {
			st := s.m.nodes[NodeID(id)].group(g).Status()
			require.True(s.t, st.Quiesced, "group %d node %d: %+v", g, id, st)
			require.Equal(s.t, lead.id, st.Leader, "group %d node %d", g, id)
		}
	}
}

func (s *sim) agree(g GroupID) {
	lead := s.leader(g)
	require.NotNil(s.t, lead)
	want := lead.sms[g].entries()
	conf := lead.group(g).Status().Conf
	for _, id := range slices.Concat(conf.GetVoters(), conf.GetLearners()) {
		require.Equal(s.t, want, s.m.nodes[NodeID(id)].sms[g].entries(), "group %d node %d", g, id)
	}
	at := map[uint64]machineEntry{}
	for _, e := range want {
		at[e.Index] = e
	}
	for _, e := range s.acked[g] {
		require.Equal(s.t, e, at[e.Index], "group %d: acknowledged", g)
	}
}

// report shows that a run did something.
func (s *sim) report() {
	var snaps, terms, cuts, wakes uint64
	for _, id := range s.m.ids() {
		st := s.m.nodes[id].host.Stats() // of the last run of each node
		snaps += st.SnapshotsGot
		terms += st.LeaderStarts
		cuts += st.Truncations
		wakes += st.Wakes
	}
	s.t.Logf("proposals %d, answered %d, reads %d, leaders %d, since the last restart: snapshots %d, elections won %d, logs cut %d, woken %d, removed %v",
		s.n, s.answered, s.served, len(s.m.leaders[0]), snaps, terms, cuts, wakes, s.burnt)
	require.NotZero(s.t, s.answered)
}
