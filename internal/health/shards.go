package health

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// said is one replica by its own node's word.
type said struct {
	node uint64
	*kvdv1.ShardReplica
}

// judgeShards looks at each shard, and at group 0.
func (j *judge) judgeShards() {
	byShard := map[uint32][]said{}
	last, replication, wanted := uint32(0), uint32(0), uint32(0)
	complete := false // one node at least said how many shards there are, or has all
	for _, n := range j.s.Nodes {
		last = max(last, n.Status.GetShardCount())
		complete = complete || n.Err == nil && n.ReplicasErr == nil
		replication, wanted = max(replication, n.Status.GetReplication()), max(wanted, n.Status.GetWantedReplication())
		for _, r := range n.Replicas {
			byShard[r.GetShard()] = append(byShard[r.GetShard()], said{n.NodeID, r})
			last = max(last, r.GetShard())
		}
	}
	j.report.Shards = int(last)
	if !complete {
		j.add(Unavailable, NoReplica, nil, "no node that answers says what replicas it has, so nothing is known of the shards; a node that serves should: see the reasons of the nodes")
		return
	}
	behind := map[uint64]*lagging{}
	for number := range last + 1 {
		if j.judgeShard(number, byShard[number], replication, behind) && number != 0 {
			j.report.Serving++
		}
	}
	j.tellLagging(behind)
	if wanted > replication && replication > 0 {
		j.add(Info, TooFewVoters, nil, fmt.Sprintf(
			"each shard is to have as many voters as the active nodes allow, %d, and %d in the end: more nodes have to join for that (kvd start --join)", replication, wanted))
	}
}

// lost is how bad it is that a group can not decide anything: without group 0 data is
// still read and written, and nothing about the cluster can be changed.
func lost(number uint32) (level Verdict, means string) {
	if number == 0 {
		return Degraded, "until then nodes, namespaces and tokens can not be changed, while keys of shards with a leader are read and written"
	}
	return Unavailable, "until then its keys can not be written, and read only where that is asked for as stale"
}

// judgeShard tells whether the shard serves.
func (j *judge) judgeShard(number uint32, all []said, replication uint32, behind map[uint64]*lagging) bool {
	level, means := lost(number)
	if len(all) == 0 {
		j.addShard(level, NoReplica, number, nil, fmt.Sprintf("no node that answers has a replica; a leader and most of the voters should; %s: start the nodes that do not answer", means))
		return false
	}
	best := slices.MaxFunc(all, func(a, b said) int {
		leads := func(s said) int {
			if s.GetLeading() {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(a.GetTerm(), b.GetTerm()), cmp.Compare(leads(a), leads(b)), cmp.Compare(a.GetConfigId(), b.GetConfigId()), cmp.Compare(a.GetApplied(), b.GetApplied()))
	})
	if !best.GetLeading() {
		j.noLeader(number, best, all)
		return false
	}
	heard := []uint64{best.node}
	for _, o := range best.GetOthers() {
		if o.GetActive() {
			heard = append(heard, o.GetNodeId())
		}
	}
	voters := union(best.GetVoters(), best.GetVotersOutgoing())
	missing := without(voters, heard)
	spare := spareVoters(best.ShardReplica, heard)
	switch {
	case spare < 0:
		j.addShard(level, NoQuorum, number, missing, fmt.Sprintf("its leader, node %d, has not heard lately of %s of its voters %s; it needs most of them; %s: start %s, or mend the network between there and node %d",
			best.node, nameNodes(missing), ranges(voters), means, nameNodes(missing), best.node))
		return false
	case number != 0 && best.GetServedTerm() != best.GetTerm():
		j.addShard(level, NotServing, number, []uint64{best.node}, fmt.Sprintf("node %d was elected leader and does not serve yet; it should within a moment, once it has applied what was committed: look again, and read its log if this lasts", best.node))
		return false
	case spare == 0 && len(voters) > 1 && len(missing) > 0:
		j.addShard(Degraded, NoSpare, number, missing, fmt.Sprintf("no voter may fail any more, as its leader, node %d, has not heard lately of %s of its voters %s; all should be heard: start %s, or have another node take over (kvctl decommission)",
			best.node, nameNodes(missing), ranges(voters), nameNodes(missing)))
	default:
		for _, id := range missing {
			if n := j.nodes[id]; n != nil && n.Err == nil {
				j.addShard(Degraded, ReplicaUnheard, number, []uint64{id}, fmt.Sprintf("its leader, node %d, has not heard lately of its voter on node %d, which answers here; they should be connected: look at the network between the two, and at the log of node %d", best.node, id, id))
			}
		}
	}
	if number != 0 {
		j.judgeConfiguration(number, best, replication)
	} else if len(best.GetVotersOutgoing()) > 0 {
		j.move(number, best, fmt.Sprintf("its voters change from %s to %s", ranges(best.GetVotersOutgoing()), ranges(best.GetVoters())))
	}
	j.judgeLag(number, best, all, heard, behind)
	return true
}

func (j *judge) noLeader(number uint32, best said, all []said) {
	level, means := lost(number)
	voters := union(best.GetVoters(), best.GetVotersOutgoing())
	var here []uint64
	for _, r := range all {
		if slices.Contains(voters, r.node) {
			here = append(here, r.node)
		}
	}
	absent := without(voters, here)
	if named := best.GetLeaderNode(); slices.Contains(absent, named) {
		j.addShard(level, NoLeader, number, absent, fmt.Sprintf("%s name node %d as the leader, which does not answer here; a leader should answer; %s: an election follows within seconds if it is lost and most of the voters %s run; start node %d, or look at the network if it runs",
			nameNodes(nodesOf(all)), named, means, ranges(voters), named))
		return
	}
	if spareVoters(best.ShardReplica, here) < 0 {
		j.addShard(level, NoQuorum, number, absent, fmt.Sprintf("there is no leader, as of its voters %s not enough answer (%s); most of them are needed; %s: start %s",
			ranges(voters), nameNodes(here), means, nameNodes(absent)))
		return
	}
	j.addShard(level, NoLeader, number, nil, fmt.Sprintf("there is no leader, though of its voters %s enough answer (%s); one should be elected within seconds; %s: look again, and if this lasts at the network between these nodes and at their logs",
		ranges(voters), nameNodes(here), means))
}

// judgeConfiguration: who votes in a shard, and whether that is changing.
func (j *judge) judgeConfiguration(number uint32, best said, replication uint32) {
	voters := len(best.GetVoters())
	switch {
	case len(best.GetVotersOutgoing()) > 0:
		j.move(number, best, fmt.Sprintf("its voters change from %s to %s", ranges(best.GetVotersOutgoing()), ranges(best.GetVoters())))
	case len(best.GetLearners()) > 0:
		what := fmt.Sprintf("%s takes in a replica", nameNodes(best.GetLearners()))
		j.move(number, best, what)
		if voters < int(replication) && j.age(best) > j.limits.MoveTime {
			j.fewVoters(Degraded, number, best, replication)
		}
	case voters < int(replication):
		level := Info // nodes have joined, and replicas are spread a few at a time
		if j.age(best) > j.limits.MoveTime {
			level = Degraded
		}
		j.fewVoters(level, number, best, replication)
	}
}

func (j *judge) fewVoters(level Verdict, number uint32, best said, replication uint32) {
	do := "it is given more soon, a few shards at a time"
	if level != Info {
		do = fmt.Sprintf("this has been so for more than %s: kvctl rebalance --dry-run says what stands in the way", length(j.limits.MoveTime))
	}
	j.addShard(level, TooFewVoters, number, nil, fmt.Sprintf("its voters are on %s, and it should have %d voters with the nodes that there are: %s", nameNodes(best.GetVoters()), replication, do))
}

func (j *judge) age(best said) time.Duration {
	return time.Duration(best.GetConfigAgeMs()) * time.Millisecond
}

// move is information, until it takes too long.
func (j *judge) move(number uint32, best said, what string) {
	if j.age(best) > j.limits.MoveTime {
		j.addShard(Degraded, MoveStuck, number, nil, fmt.Sprintf("a move is under way, %s, and has not come further for more than %s; it should be over by then: see that the nodes that it goes to run and have room, and kvctl shards for how far they are",
			what, length(j.limits.MoveTime)))
		return
	}
	j.addShard(Info, Moving, number, nil, fmt.Sprintf("a move is under way, %s; it ends by itself: wait", what))
}

// lagging is in how many shards a node is behind, and by how much at worst.
type lagging struct {
	shards   []uint32
	snapshot []uint32
	worst    uint64
	at       uint32
}

// judgeLag: only of replicas that the leader hears of. Learners are expected to be behind.
func (j *judge) judgeLag(number uint32, best said, all []said, heard []uint64, behind map[uint64]*lagging) {
	of := func(node uint64) *lagging {
		if behind[node] == nil {
			behind[node] = &lagging{}
		}
		return behind[node]
	}
	for _, o := range best.GetOthers() {
		if o.GetLearner() || !slices.Contains(heard, o.GetNodeId()) {
			continue
		}
		lag := minus(best.GetApplied(), o.GetMatch())
		for _, r := range all {
			if r.node == o.GetNodeId() {
				lag = max(lag, minus(best.GetApplied(), r.GetApplied()))
			}
		}
		switch {
		case o.GetSnapshot():
			l := of(o.GetNodeId())
			l.snapshot = append(l.snapshot, number)
		case lag > j.limits.LagEntries:
			l := of(o.GetNodeId())
			l.shards = append(l.shards, number)
			if lag > l.worst {
				l.worst, l.at = lag, number
			}
		}
	}
}

func (j *judge) tellLagging(behind map[uint64]*lagging) {
	var nodes []uint64
	for id := range behind {
		nodes = append(nodes, id)
	}
	slices.Sort(nodes)
	for _, id := range nodes {
		l := behind[id]
		if len(l.shards) > 0 {
			j.add(Degraded, ReplicaBehind, []uint64{id}, fmt.Sprintf("node %d is behind in %s, by up to %d log entries (%s); at most %d are wanted: it catches up by itself if it can; look at its disk, processor and network if this lasts",
				id, NameShards(l.shards), l.worst, NameShards([]uint32{l.at}), j.limits.LagEntries), l.shards...)
		}
		if len(l.snapshot) > 0 {
			j.add(Degraded, ReplicaBehind, []uint64{id}, fmt.Sprintf("node %d is so far behind in %s that it is sent a snapshot; voters should follow by the log: wait until it has caught up before another node is stopped", id, NameShards(l.snapshot)), l.snapshot...)
		}
	}
}

func minus(a, b uint64) uint64 { return a - min(a, b) }

// spareVoters is how many more of those that are heard may fail before there is no quorum;
// below 0 there is none. A joint configuration needs most of both halves.
func spareVoters(r *kvdv1.ShardReplica, heard []uint64) int {
	spare := func(half []uint64) int {
		n := 0
		for _, id := range half {
			if slices.Contains(heard, id) {
				n++
			}
		}
		return n - (len(half)/2 + 1)
	}
	least := spare(r.GetVoters())
	if len(r.GetVotersOutgoing()) > 0 {
		least = min(least, spare(r.GetVotersOutgoing()))
	}
	return least
}

func union(a, b []uint64) []uint64 {
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(a, b))))
}

func without(all, some []uint64) []uint64 {
	return slices.DeleteFunc(slices.Clone(all), func(id uint64) bool { return slices.Contains(some, id) })
}

func nodesOf(all []said) (nodes []uint64) {
	for _, r := range all {
		nodes = append(nodes, r.node)
	}
	return nodes
}
