package server

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/metadata"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/internal/placement"
	"github.com/kvd-io/kvd/raft"
)

// How much the leader of group 0 has under way at once.
const (
	maxMoves        = 4
	maxMovesPerNode = 3
	maxTransfers    = 4
	loadWait        = time.Second
	// keepPause is how often it asks all nodes where the replicas are, while something is
	// under way; else a few times less.
	keepPause = 300 * time.Millisecond
	keepRest  = 2 * time.Second
)

// keeper is what the leader of group 0 knows of the cluster's load. It belongs to the
// goroutine of keep; what counts is in group 0, so a new leader begins with nothing.
type keeper struct {
	since time.Time            // when this node began to keep; zero: it does not
	heard map[uint64]time.Time // last answers
	// answered are those that did when they were asked last.
	answered map[uint64]bool
	next     time.Time
	told     []string // problems, as last logged
	// readOnly are those whose disks have no room, as long as another's has.
	readOnly map[uint64]bool
	// leadersOnly are nodes that are drained of leaders alone.
	leadersOnly map[uint64]bool
}

// keep has group 0's leader see to it that replicas and leaders are where they belong.
func (n *Node) keep(ctx context.Context) {
	tick := n.cfg.Clock.NewTicker(keepPause)
	defer tick.Stop()
	k := &keeper{}
	for {
		select {
		case <-tick.C():
		case <-ctx.Done():
			return
		}
		now := n.cfg.Clock.Now()
		switch {
		case !n.registry.written() || !n.host.Group(0).Status().Leading:
			k.since = time.Time{}
			n.lost.set(nil)
			n.heard.Store(nil)
			continue
		case k.since.IsZero():
			*k = keeper{since: now, heard: map[uint64]time.Time{}}
		case !k.due(now):
			continue
		}
		busy, err := n.keepOnce(ctx, k)
		n.heard.Store(&keeper{since: k.since, heard: maps.Clone(k.heard)})
		if err != nil && ctx.Err() == nil {
			n.log.Debug("where replicas belong could not be looked at", "err", err)
		}
		if !busy {
			k.next = now.Add(keepRest)
		}
	}
}

// due tells whether it is time to ask again. Where it is not for longer than anything
// sets, the clock was set back.
func (k *keeper) due(now time.Time) bool {
	wait := k.next.Sub(now)
	return wait <= 0 || wait > keepRest
}

// keeperNow is a keeper that knows what the running one heard. It is the caller's.
func (n *Node) keeperNow() *keeper {
	if k := n.heard.Load(); k != nil {
		return &keeper{since: k.since, heard: maps.Clone(k.heard)}
	}
	return &keeper{since: n.cfg.Clock.Now(), heard: map[uint64]time.Time{}}
}

// shardFacts is what was found out of one shard.
type shardFacts struct {
	report *kvdv1.ShardReport // the newest that was seen
	leader uint64             // 0: nobody said so
	bytes  uint64
	held   map[uint64]uint64 // bytes, by the node that has a replica
}

// keepOnce asks, notes what is new, and wishes what is better. busy: it is worth looking
// again soon.
func (n *Node) keepOnce(ctx context.Context, k *keeper) (busy bool, err error) {
	facts := n.askLoads(ctx, k)
	n.lost.set(n.silentNodes(k))
	if err := n.metaBarrier(ctx); err != nil {
		return false, err
	}
	op := &kvdv1.ShardOp{}
	for _, number := range slices.Sorted(maps.Keys(facts)) {
		// Only what differs from the manifest, or has, needs to be told.
		if f := facts[number]; f.report.GetConfigId() > n.shardMap.whereabouts(number).GetConfigId() {
			op.Reports = append(op.Reports, f.report)
		}
	}
	plan, moving := n.planNow(k, facts)
	for _, m := range plan.Moves {
		wish := afterMove(n.target(m.Shard), m)
		n.log.Info("a shard is to move", "shard", m.Shard, "to", wish, "why", m.Reason)
		op.Wishes = append(op.Wishes, &kvdv1.ShardWish{Shard: m.Shard, Nodes: wish})
	}
	if !slices.Equal(k.told, plan.Problems) {
		k.told = plan.Problems
		for _, p := range plan.Problems {
			n.log.Warn("the replicas can not be placed as they should", "problem", p)
		}
	}
	if len(op.GetWishes()) > 0 || len(op.GetReports()) > 0 {
		step, cancel := context.WithTimeout(ctx, metaWait)
		_, _, err = n.propose(step, 0, n.host.Group(0), &kvdv1.Command{LeaderUnixMs: n.cfg.Clock.Now().UnixMilli(), Op: &kvdv1.Command_Shard{Shard: op}})
		cancel()
	}
	n.transferLeaders(ctx, plan.Transfers, moving)
	if err == nil {
		err = n.letGo(ctx, facts)
	}
	return len(moving) > 0 || len(op.GetWishes()) > 0 || len(plan.Transfers) > 0, err
}

// letGo ends the life of nodes that are to leave and hold nothing any more. Who does
// not answer is taken at group 0's word.
func (n *Node) letGo(ctx context.Context, facts map[uint32]*shardFacts) error {
	st := n.host.Group(0).Status()
	for _, r := range n.registry.nodes() {
		id := r.GetNodeId()
		if r.GetState() != kvdv1.NodeState_NODE_STATE_DECOMMISSIONED || slices.Contains(st.Conf.GetVoters(), id) || slices.Contains(st.Conf.GetVotersOutgoing(), id) {
			continue
		}
		empty := true
		for number := uint32(1); number <= n.identity.Load().manifest.GetShards(); number++ {
			empty = empty && facts[number] != nil && !n.mayHold(number, facts[number], id)
		}
		if !empty {
			continue
		}
		step, cancel := context.WithTimeout(ctx, metaWait)
		_, err := n.proposeNode(step, &kvdv1.NodeOp{Change: &kvdv1.NodeOp_Move{Move: &kvdv1.NodeMove{NodeId: id, To: kvdv1.NodeState_NODE_STATE_GONE}}})
		cancel()
		if err != nil {
			return err
		}
		n.log.Info("a node has left the cluster", "member", id)
	}
	return nil
}

// planNow is what to do next. Nothing goes to a node that did not answer just now. Of shards that are moving only those get another wish
// whose old one can not, or must not, come true.
func (n *Node) planNow(k *keeper, facts map[uint32]*shardFacts) (placement.Result, map[uint32]bool) {
	cluster, moving := n.clusterNow(k, facts)
	room := maxMoves - len(moving)
	limits := placement.Limits{Moves: maxMoves, MovesPerNode: maxMovesPerNode, Transfers: maxTransfers}
	plan := placement.Plan(cluster, limits)
	var moves []placement.Move
	for _, m := range plan.Moves {
		switch {
		case m.Add != 0 && !k.answered[m.Add]:
			continue // it may be back, or be dead soon
		case m.Kind == placement.Drain && k.leadersOnly[m.Remove]:
			continue
		case moving[m.Shard] && m.Kind != placement.Repair && m.Kind != placement.Drain:
			continue
		case !moving[m.Shard]:
			if room <= 0 {
				continue
			}
			room--
		}
		moves = append(moves, m)
	}
	plan.Moves = moves
	if silent := func(t placement.Transfer) bool { return !k.answered[t.To] }; slices.ContainsFunc(plan.Transfers, silent) {
		// Leaders find others at once; replicas wait until a node is given up.
		for i := range cluster.Nodes {
			if !k.answered[cluster.Nodes[i].ID] {
				cluster.Nodes[i].State = placement.Dead
			}
		}
		plan.Transfers = slices.DeleteFunc(placement.Plan(cluster, limits).Transfers, silent)
	}
	return plan, moving
}

// target is where a shard's replicas are to be, as far as anything was wished.
func (n *Node) target(number uint32) []uint64 {
	if w := n.shardMap.wish(number); len(w) > 0 {
		return w
	}
	return n.shardMap.whereabouts(number).GetVoters()
}

func afterMove(at []uint64, m placement.Move) []uint64 {
	wish := slices.DeleteFunc(slices.Clone(at), func(id uint64) bool { return id == m.Remove })
	if m.Add != 0 && !slices.Contains(wish, m.Add) {
		wish = append(wish, m.Add)
	}
	slices.Sort(wish)
	return wish
}

// settled tells whether a shard is where it was wished.
func settled(wish []uint64, at *kvdv1.ShardReport) bool {
	if len(at.GetVotersOutgoing()) > 0 || len(at.GetLearners()) > 0 {
		return false
	}
	if len(wish) == 0 {
		return true
	}
	have := slices.Sorted(slices.Values(at.GetVoters()))
	return slices.Equal(have, slices.Sorted(slices.Values(wish)))
}

// clusterNow is the cluster as placement is to see it: shards that are moving count as
// if they had arrived. moving are those.
func (n *Node) clusterNow(k *keeper, facts map[uint32]*shardFacts) (placement.Cluster, map[uint32]bool) {
	m := n.identity.Load().manifest
	var c placement.Cluster
	now := n.cfg.Clock.Now()
	k.leadersOnly = map[uint64]bool{}
	for _, r := range n.registry.nodes() {
		node := placement.Node{ID: r.GetNodeId(), Zone: r.GetZone(), Rack: r.GetRack(), Host: r.GetHost()}
		heard, ok := k.heard[node.ID]
		if !ok {
			heard = k.since
		}
		switch r.GetState() {
		case kvdv1.NodeState_NODE_STATE_GONE, kvdv1.NodeState_NODE_STATE_JOINING:
			continue
		case kvdv1.NodeState_NODE_STATE_DRAINING, kvdv1.NodeState_NODE_STATE_DECOMMISSIONED:
			node.State = placement.Draining
			if r.GetLeadersOnly() {
				k.leadersOnly[node.ID], node.LeadersOnly = true, true
			}
		}
		if k.readOnly[node.ID] && node.State != placement.Draining {
			// Who leads takes writes, and a replica that comes takes room.
			node.State, node.LeadersOnly, k.leadersOnly[node.ID] = placement.Draining, true, true
		}
		if now.Sub(heard) > n.cfg.ReplaceAfter {
			node.State = placement.Dead
		}
		c.Nodes = append(c.Nodes, node)
	}
	c.Replication = n.replication(m, n.registry.able())
	moving := map[uint32]bool{}
	for number := uint32(1); number <= m.GetShards(); number++ {
		s := placement.Shard{ID: number, Voters: n.target(number)}
		if f := facts[number]; f != nil {
			s.Leader, s.Bytes = f.leader, f.bytes
			if !settled(n.shardMap.wish(number), f.report) {
				moving[number] = true
			}
		}
		if !settled(n.shardMap.wish(number), n.shardMap.whereabouts(number)) {
			moving[number] = true
		}
		if !slices.Contains(s.Voters, s.Leader) {
			s.Leader = 0
		}
		c.Shards = append(c.Shards, s)
	}
	return c, moving
}

// replication is what it should be with so many nodes. It never falls below what the
// cluster was made with.
func (n *Node) replication(m *kvdv1.Manifest, able int) int {
	wanted := max(m.GetReplication(), m.GetWantedReplication())
	most := 1
	for number := uint32(1); number <= m.GetShards(); number++ {
		most = max(most, len(n.target(number)))
	}
	return max(int(m.GetReplication()), min(int(wanted), max(int(oddAtMost(uint32(max(able, 1)))), most)))
}

// askLoads asks all nodes which replicas they have. Who answers at a member's address and
// is not that member was not heard: its shards are not this cluster's.
func (n *Node) askLoads(ctx context.Context, k *keeper) map[uint32]*shardFacts {
	ctx, cancel := context.WithTimeout(ctx, loadWait)
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	answers := map[uint64]*kvdv1.LoadResponse{n.id(): n.loadHere()}
	for _, p := range n.others() {
		wg.Go(func() {
			conn, err := n.peers.conn(p.Address)
			if err != nil {
				return
			}
			r, err := kvdv1.NewPeerClient(conn).Load(ctx, &kvdv1.LoadRequest{From: n.self(), ToIncarnation: n.recorded(p.NodeID)})
			if err == nil && n.isMember(r.GetSelf(), p.NodeID) {
				mu.Lock()
				answers[p.NodeID] = r
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	facts := map[uint32]*shardFacts{}
	k.answered, k.readOnly = map[uint64]bool{}, map[uint64]bool{}
	for id, r := range answers {
		k.heard[id], k.answered[id] = n.cfg.Clock.Now(), true
		if r.GetReadOnly() {
			k.readOnly[id] = true
		}
		for _, l := range r.GetReplicas() {
			number := l.GetReport().GetShard()
			f := facts[number]
			if f == nil {
				f = &shardFacts{held: map[uint64]uint64{}}
				facts[number] = f
			}
			if f.report == nil || l.GetReport().GetConfigId() > f.report.GetConfigId() {
				f.report = l.GetReport()
			}
			f.held[id] = l.GetBytes()
			f.bytes = max(f.bytes, l.GetBytes())
			if l.GetLeads() {
				f.leader = id
			}
		}
	}
	if len(k.readOnly) == len(answers) {
		clear(k.readOnly) // none is better than another
	}
	return facts
}

// Load implements kvdv1.PeerServer.
func (n *Node) Load(_ context.Context, req *kvdv1.LoadRequest) (*kvdv1.LoadResponse, error) {
	if err := n.checkPeer(req.GetFrom(), req.GetToIncarnation()); err != nil {
		return nil, err
	}
	if !n.ready.Load() {
		return nil, errStarting
	}
	return n.loadHere(), nil
}

func (n *Node) loadHere() *kvdv1.LoadResponse {
	r := &kvdv1.LoadResponse{Self: n.self(), ReadOnly: n.disk.refusal() != ""}
	for _, sh := range n.localShards() {
		l := &kvdv1.ReplicaLoad{Report: reportOf(sh.number, sh.g.Status()), Leads: sh.servedTerm() != 0}
		if meta, err := sh.eng.Meta(); err == nil {
			l.Bytes = meta.Bytes
		}
		r.Replicas = append(r.Replicas, l)
	}
	return r
}

// reportOf a shard tells the configuration that its replica here has applied.
func reportOf(number uint32, st raft.Status) *kvdv1.ShardReport {
	return &kvdv1.ShardReport{
		Shard: number, ConfigId: st.ConfigID, Voters: st.Conf.GetVoters(),
		VotersOutgoing: st.Conf.GetVotersOutgoing(), Learners: st.Conf.GetLearners(),
	}
}

// transferLeaders carries out what it can of the plan; the rest comes up again.
func (n *Node) transferLeaders(ctx context.Context, all []placement.Transfer, moving map[uint32]bool) {
	ctx, cancel := context.WithTimeout(ctx, metaWait)
	defer cancel()
	var wg sync.WaitGroup
	for _, t := range all {
		if moving[t.Shard] {
			continue // its move decides who leads
		}
		wg.Go(func() {
			req := &kvdv1.TransferLeaderRequest{Shard: t.Shard, ToNode: t.To}
			if t.From == n.id() {
				_, _ = n.TransferLeader(ctx, req) // it comes up again
				return
			}
			conn, err := n.memberConn(raft.NodeID(t.From))
			if err == nil {
				_, _ = kvdv1.NewClusterClient(conn).TransferLeader(metadata.AppendToOutgoingContext(ctx, forwardedKey, "1"), req)
			}
		})
	}
	wg.Wait()
}
