package health

import (
	"fmt"
	"slices"
	"strings"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
)

// judgeNodes looks at each node by itself.
func (j *judge) judgeNodes() {
	for _, n := range j.s.Nodes {
		if n.Err == nil {
			j.report.Answering++
		}
		if n.Gossip != nil {
			j.report.Gossiping++
		}
	}
	if j.report.Answering == 0 {
		j.add(Unavailable, NoNodeAnswers, nil, fmt.Sprintf(
			"none of %d addresses answers, so nothing is known of the cluster; one answer is enough to say more: see that its nodes run, and that --endpoints names them", len(j.s.Nodes)))
	}
	for _, n := range j.s.Nodes {
		switch {
		case n.NodeID == 0 && n.Err != nil && j.report.Answering > 0:
			j.add(Info, EndpointUnknown, nil, fmt.Sprintf(
				"at %s nothing answers (%v), and no node of the cluster is known to be there; an endpoint should be the gRPC address of a node: correct --endpoints", n.Address, n.Err))
			continue
		case n.Err != nil:
			j.silent(n)
		default:
			j.answering(n)
		}
		j.report.Nodes++
	}
	for _, m := range j.s.Members {
		r := m.GetNode()
		if j.nodes[r.GetNodeId()] == nil && r.GetState() != kvdv1.NodeState_NODE_STATE_GONE {
			j.report.Nodes++
			j.add(Degraded, NodeSilent, []uint64{r.GetNodeId()}, fmt.Sprintf(
				"node %d is a member, and no node that answers tells where it is; its address should be known: start it, and see that it reaches the others", r.GetNodeId()))
		}
	}
}

// silent: a node that does not answer.
func (j *judge) silent(n client.NodeSurvey) {
	m := j.members[n.NodeID]
	level, do := Degraded, "start it, or look at what lies between it and here"
	// It was drained: then it is safe to stop.
	state := m.GetNode().GetState()
	if m != nil && m.GetReplicas() == 0 && m.GetLeads() == 0 && !m.GetNode().GetLeadersOnly() &&
		(state == kvdv1.NodeState_NODE_STATE_DRAINING || state == kvdv1.NodeState_NODE_STATE_DECOMMISSIONED) {
		level, do = Info, fmt.Sprintf("it was drained and holds nothing, so this does no harm: start it and undo (kvctl drain %d --undo), or take it out (kvctl decommission %d)", n.NodeID, n.NodeID)
	}
	who := fmt.Sprintf("node %d at %s", n.NodeID, n.Address)
	if n.NodeID == 0 {
		who = "the node at " + n.Address
	}
	text := fmt.Sprintf("%s does not answer (%s); an answer is wanted within the connect timeout%s: %s", who, shortError(n), j.heardOtherwise(n.NodeID, m), do)
	var nodes []uint64
	if n.NodeID != 0 {
		nodes = []uint64{n.NodeID}
	}
	j.add(level, NodeSilent, nodes, text)
}

// heardOtherwise is what others know of a node that is silent here.
func (j *judge) heardOtherwise(node uint64, m *kvdv1.MemberStatus) (text string) {
	switch {
	case m == nil:
	case m.GetLive():
		text = "; the leader of group 0 still has its connection"
	default:
		text = "; the leader of group 0 does not hear it either"
	}
	if h, ok := j.hints[node]; ok && h.Observer != node {
		text += fmt.Sprintf("; gossip at node %d says: %s", h.Observer, j.sayHint(h))
	}
	return text
}

func (j *judge) sayHint(h Hint) string {
	text := h.Word()
	if !h.Since.IsZero() {
		text += " for " + length(j.s.At.Sub(h.Since))
	}
	if !h.Heard.IsZero() {
		text += ", last heard at " + clockTime(h.Heard.UnixMilli())
	}
	return text
}

// shortError leaves out what the sentence says already.
func shortError(n client.NodeSurvey) string {
	text := strings.TrimPrefix(n.Err.Error(), "node at "+n.Address)
	return strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(text), ":"))
}

// answering: a node that says who it is.
func (j *judge) answering(n client.NodeSurvey) {
	who := fmt.Sprintf("node %d at %s", n.NodeID, n.Address)
	id := []uint64{n.NodeID}
	st := n.Status
	if n.NodeID == 0 {
		who, id = "the node at "+n.Address, nil
	}
	state := j.members[n.NodeID].GetNode().GetState()
	switch {
	case n.ReplicasErr != nil && (n.NodeID == 0 || n.Starting && state == kvdv1.NodeState_NODE_STATE_JOINING):
		j.add(Info, NodeJoining, id, fmt.Sprintf("%s runs, and has no part in the cluster yet; it has one once it was let in and holds what the cluster knows: wait, and read its log if this lasts", who))
		return
	case n.Starting || n.ReplicasErr == nil && st.GetShardCount() == 0 && len(st.GetShards()) == 0:
		up := j.s.At.Sub(time.UnixMilli(st.GetStartedUnixMs()))
		j.add(Degraded, NodeStarting, id, fmt.Sprintf(
			"%s runs for %s and does not serve yet; it should serve once it has read its data: wait, and read its log if it takes longer than the size of its data explains", who, length(up)))
	case n.ReplicasErr != nil:
		j.add(Degraded, NodeMute, id, fmt.Sprintf(
			"%s says who it is, and not what replicas it has (%v); it should say both within the connect timeout: look at its load and its log, or give --connect-timeout more", who, n.ReplicasErr))
	}
	if st.GetReadOnly() {
		j.readOnly(n, who)
	}
	j.lifecycle(n.NodeID)
	if m := j.members[n.NodeID]; m != nil && !m.GetLive() {
		j.add(Degraded, NodeUnheard, id, fmt.Sprintf(
			"%s answers here, and the leader of group 0 does not hear it; nodes should have connections to each other: look at the network between them, and at whether its advertised address is right", who))
	}
	if h, ok := j.hints[n.NodeID]; ok && (h.State == kvdv1.LivenessState_LIVENESS_STATE_SUSPECT || h.State == kvdv1.LivenessState_LIVENESS_STATE_DEAD) {
		j.add(Info, GossipDoubts, id, fmt.Sprintf(
			"%s answers here, and gossip at node %d says: %s; gossip should hear it by UDP and TCP at its --gossip-listen, and is a hint only: let its packets through if this lasts", who, h.Observer, j.sayHint(h)))
	}
}

// readOnly: a node that refuses writes. Only leaders take any.
func (j *judge) readOnly(n client.NodeSurvey, who string) {
	var leads []uint32
	for _, r := range n.Replicas {
		if r.GetLeading() && r.GetShard() != 0 {
			leads = append(leads, r.GetShard())
		}
	}
	why := orElse(n.Status.GetReadOnlyReason(), "its disk has too little space left: make room; reads go on, and writes go on by themselves then")
	if len(leads) == 0 {
		j.add(Degraded, ReadOnly, []uint64{n.NodeID}, fmt.Sprintf("%s would refuse writes, and leads no shard now: %s", who, why))
		return
	}
	j.add(Unavailable, ReadOnly, []uint64{n.NodeID}, fmt.Sprintf("%s refuses the writes of what it leads, %s: %s", who, NameShards(leads), why), leads...)
}

// lifecycle: a node that comes or goes.
func (j *judge) lifecycle(node uint64) {
	m := j.members[node]
	r := m.GetNode()
	var code Code
	var doing, want, do string
	left := fmt.Sprintf("%d replicas, %d leaders", m.GetReplicas(), m.GetLeads())
	limit := j.limits.MoveTime
	switch r.GetState() {
	case kvdv1.NodeState_NODE_STATE_JOINING:
		code, doing, want, do = NodeJoining, "is joining", "it becomes active when it holds what the cluster knows", "see that it reaches the other nodes, and read its log"
	case kvdv1.NodeState_NODE_STATE_DECOMMISSIONED:
		code, doing, want, do = NodeLeaving, "is leaving for good and still has "+left, "it goes when it has none", "kvctl rebalance --dry-run says what stands in the way"
	case kvdv1.NodeState_NODE_STATE_DRAINING:
		has := m.GetReplicas() + m.GetLeads()
		if r.GetLeadersOnly() {
			has = m.GetLeads()
		}
		code, doing, want, do = NodeDraining, "is being drained and still has "+left, "it should have none", "kvctl rebalance --dry-run says what stands in the way"
		if has == 0 {
			doing, want, do = "is drained", "it is safe to stop and gets nothing new", fmt.Sprintf("undo with kvctl drain %d --undo when it is to have its share again", node)
			limit = 0
		}
	default:
		return
	}
	level, since := Info, ""
	if code == NodeDraining && limit == 0 {
		if lost := j.lostWithout(node); len(lost) > 0 {
			level, want = Degraded, "it should be safe to stop, and is not: without it too few of those that vote in "+NameShards(lost)+" would be left"
			do = "start the other nodes that vote there, or see why they do not answer, before it is stopped"
		}
	}
	if ms := r.GetSinceUnixMs(); ms != 0 {
		age := j.s.At.Sub(time.UnixMilli(ms))
		since = " for " + length(age)
		if limit != 0 && age > limit {
			level = Degraded
			want += fmt.Sprintf(", and within %s", length(limit))
		}
	}
	if level == Info && limit != 0 {
		do = "nothing is to be done but wait"
	}
	j.add(level, code, []uint64{node}, fmt.Sprintf("node %d %s%s; %s: %s", node, doing, since, want, do))
}

func (j *judge) lostWithout(node uint64) []uint32 { return LostWithout(j.s, node) }

// LostWithout lists the groups, 0 being the cluster's own, that would have no quorum any
// more if the node stopped now: who does not answer counts as gone.
func LostWithout(s client.Survey, node uint64) (groups []uint32) {
	newest := map[uint32]*kvdv1.ShardReplica{}
	answer := map[uint32][]uint64{} // nodes that have a replica and say so
	for _, n := range s.Nodes {
		for _, r := range n.Replicas {
			answer[r.GetShard()] = append(answer[r.GetShard()], n.NodeID)
			if have := newest[r.GetShard()]; have == nil || have.GetConfigId() < r.GetConfigId() {
				newest[r.GetShard()] = r
			}
		}
	}
	for number, r := range newest {
		for _, voters := range [][]uint64{r.GetVoters(), r.GetVotersOutgoing()} {
			left := 0
			for _, id := range voters {
				if id != node && slices.Contains(answer[number], id) {
					left++
				}
			}
			if slices.Contains(voters, node) && 2*left <= len(voters) && !slices.Contains(groups, number) {
				groups = append(groups, number)
			}
		}
	}
	slices.Sort(groups)
	return groups
}

// judgeMembers: whether it is known who belongs to the cluster, and whether all of it can
// be placed.
func (j *judge) judgeMembers() {
	if j.s.MembersErr != nil {
		j.add(Degraded, MembersUnknown, nil, fmt.Sprintf(
			"who the members are is not known (%v); the leader of group 0 should say so: see that most of the nodes that vote in it run and reach each other", j.s.MembersErr))
	}
	for _, p := range j.s.Placement {
		j.add(Info, Placement, nil, p)
	}
}

// judgeSameness: nodes should not differ for long.
func (j *judge) judgeSameness() {
	versions, transports := map[string][]uint64{}, map[string][]uint64{}
	var served []string
	var lastStart time.Time
	for _, n := range j.s.Nodes {
		if n.Err != nil {
			continue
		}
		versions[n.Status.GetVersion()] = append(versions[n.Status.GetVersion()], n.NodeID)
		if at := time.UnixMilli(n.Status.GetStartedUnixMs()); at.After(lastStart) {
			lastStart = at
		}
		if n.ReplicasErr == nil {
			served = append(served, n.Status.GetTransports()...)
		}
	}
	if len(versions) > 1 {
		level := Info
		ago := j.s.At.Sub(lastStart)
		if ago > j.limits.MoveTime {
			level = Degraded
		}
		j.add(level, Versions, nil, fmt.Sprintf("nodes run different versions (%s), and the last start of a node was %s ago; all should run the same: finish the change, one node after the other", byWhom(versions), length(ago)))
	}
	slices.Sort(served)
	for _, t := range slices.Compact(served) {
		for _, n := range j.s.Nodes {
			if n.Err == nil && n.ReplicasErr == nil && !slices.Contains(n.Status.GetTransports(), t) {
				transports[t] = append(transports[t], n.NodeID)
			}
		}
	}
	if len(transports) > 0 {
		j.add(Info, Transports, nil, fmt.Sprintf("a transport is not served by all nodes (missing: %s); clients fall back there, node by node, to the next best: kvctl doctor says on each host what stands in the way", byWhom(transports)))
	}
}

// byWhom lists what nodes have in common.
func byWhom(groups map[string][]uint64) string {
	var words []string
	for what, nodes := range groups {
		words = append(words, fmt.Sprintf("%s at %s", orElse(what, "unknown"), nameNodes(nodes)))
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}
