// Package health judges a cluster by what its nodes said: one verdict, and the reasons for
// it in sentences that name the thing, what was seen, what was wanted and what to do. It
// asks nobody and keeps nothing: see client.Admin.Survey for the asking.
package health

import (
	"cmp"
	"slices"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
)

// Verdict on a cluster, and the level of a reason: the verdict is that of the weightiest.
type Verdict string

// From the best to the worst.
const (
	Healthy Verdict = "healthy"
	// Info is the level of a reason that is only worth knowing, such as a move under way: the
	// cluster is healthy.
	Info Verdict = "info"
	// Degraded: all keys can be read and written, and something is not as it was wanted.
	Degraded Verdict = "degraded"
	// Unavailable: some keys can not be read, or not be written, as seen from here.
	Unavailable Verdict = "unavailable"
)

var weights = map[Verdict]int{Healthy: 0, Info: 0, Degraded: 1, Unavailable: 2}

// Code of a reason, for programs.
type Code string

// Codes of what can be the matter.
const (
	NoNodeAnswers   Code = "no_node_answers"
	NodeSilent      Code = "node_silent"
	NodeStarting    Code = "node_starting"
	NodeMute        Code = "node_mute" // says who it is and nothing else
	NodeUnheard     Code = "node_unheard"
	NodeJoining     Code = "node_joining"
	NodeDraining    Code = "node_draining"
	NodeLeaving     Code = "node_leaving"
	EndpointUnknown Code = "endpoint_unknown"
	ReadOnly        Code = "read_only"
	Versions        Code = "versions"
	Transports      Code = "transports"
	MembersUnknown  Code = "members_unknown"
	Placement       Code = "placement"
	GossipDoubts    Code = "gossip_doubts"
	NoReplica       Code = "no_replica"
	NoLeader        Code = "no_leader"
	NoQuorum        Code = "no_quorum"
	NotServing      Code = "not_serving" // a leader that does not serve yet
	NoSpare         Code = "no_spare"    // a bare quorum
	TooFewVoters    Code = "too_few_voters"
	Moving          Code = "moving"
	MoveStuck       Code = "move_stuck"
	ReplicaUnheard  Code = "replica_unheard"
	ReplicaBehind   Code = "replica_behind"
)

// Reason is one thing that is the matter.
type Reason struct {
	Level  Verdict  `json:"level"`
	Code   Code     `json:"code"`
	Nodes  []uint64 `json:"nodes,omitempty"`
	Shards []uint32 `json:"shards,omitempty"` // 0: the cluster's own group
	Text   string   `json:"text"`
}

// Report is the judgement.
type Report struct {
	Verdict   Verdict `json:"verdict"`
	ClusterID string  `json:"cluster_id,omitempty"`
	// Nodes that are known, without those that have left; how many of them answer, and
	// gossip.
	Nodes     int `json:"nodes"`
	Answering int `json:"nodes_answering"`
	Gossiping int `json:"nodes_gossiping"`
	// Shards that are known, group 0 not counted, and how many have a leader that serves.
	Shards  int `json:"shards"`
	Serving int `json:"shards_serving"`
	// Reasons, the weightiest first.
	Reasons []Reason `json:"reasons"`
}

// Limits of what still counts as healthy. Zero means the default.
type Limits struct {
	// LagEntries is how many log entries a replica may be behind its leader. Default
	// 10000: nodes are not asked at the same instant, so a busy shard always shows some.
	LagEntries uint64
	// MoveTime is how long a change that was meant may be under way: a move of a replica, a
	// node that joins or leaves, a start, a change of versions. Default 10 minutes.
	MoveTime time.Duration
}

// DefaultLimits are those of the zero Limits.
var DefaultLimits = Limits{LagEntries: 10_000, MoveTime: 10 * time.Minute}

// judge holds what is looked up again and again.
type judge struct {
	s       client.Survey
	limits  Limits
	members map[uint64]*kvdv1.MemberStatus
	nodes   map[uint64]*client.NodeSurvey
	hints   map[uint64]Hint
	report  Report
	merged  map[string]int // place in report.Reasons
}

// Judge is a pure function of the survey and the limits.
func Judge(s client.Survey, l Limits) Report {
	if l.LagEntries == 0 {
		l.LagEntries = DefaultLimits.LagEntries
	}
	if l.MoveTime == 0 {
		l.MoveTime = DefaultLimits.MoveTime
	}
	j := &judge{
		s: s, limits: l, members: map[uint64]*kvdv1.MemberStatus{}, nodes: map[uint64]*client.NodeSurvey{}, merged: map[string]int{},
		report: Report{ClusterID: s.ClusterID, Reasons: []Reason{}},
	}
	views := []View{}
	for _, m := range s.Members {
		j.members[m.GetNode().GetNodeId()] = m
	}
	j.s.Nodes = slices.Clone(s.Nodes)
	for i := range j.s.Nodes {
		n := &j.s.Nodes[i]
		if n.NodeID == 0 { // it was given its id just now, and does not know it yet
			n.NodeID = memberAt(s.Members, n.Address)
		}
		if n.NodeID != 0 {
			j.nodes[n.NodeID] = n
		}
		views = append(views, View{n.NodeID, n.Gossip})
	}
	j.hints = Hints(views...)
	j.judgeNodes()
	if j.report.Answering > 0 {
		j.judgeShards()
		j.judgeMembers()
		j.judgeSameness()
	}
	j.end()
	return j.report
}

func memberAt(members []*kvdv1.MemberStatus, address string) uint64 {
	for _, m := range members {
		if r := m.GetNode(); r.GetAddress() == address && r.GetState() != kvdv1.NodeState_NODE_STATE_GONE {
			return r.GetNodeId()
		}
	}
	return 0
}

// add notes a reason.
func (j *judge) add(level Verdict, code Code, nodes []uint64, text string, shards ...uint32) {
	j.report.Reasons = append(j.report.Reasons, Reason{Level: level, Code: code, Nodes: nodes, Shards: shards, Text: text})
}

// addShard notes a reason whose text is yet to be put behind the names of the shards:
// reasons that are the same but for the shard become one.
func (j *judge) addShard(level Verdict, code Code, shard uint32, nodes []uint64, text string) {
	key := string(level) + "\x00" + string(code) + "\x00" + text
	if i, ok := j.merged[key]; ok {
		j.report.Reasons[i].Shards = append(j.report.Reasons[i].Shards, shard)
		return
	}
	j.merged[key] = len(j.report.Reasons)
	j.report.Reasons = append(j.report.Reasons, Reason{Level: level, Code: code, Nodes: nodes, Shards: []uint32{shard}, Text: text})
}

// end names the shards in the texts, sorts and draws the verdict.
func (j *judge) end() {
	r := &j.report
	r.Verdict = Healthy
	for _, i := range j.merged {
		r.Reasons[i].Text = NameShards(r.Reasons[i].Shards) + ": " + r.Reasons[i].Text
	}
	for _, x := range r.Reasons {
		if weights[x.Level] > weights[r.Verdict] {
			r.Verdict = x.Level
		}
	}
	slices.SortStableFunc(r.Reasons, func(a, b Reason) int { return cmp.Compare(weights[b.Level], weights[a.Level]) })
}
