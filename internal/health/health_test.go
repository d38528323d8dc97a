package health

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
)

const start = int64(1_700_000_000_000) // ms

var now = time.UnixMilli(start).Add(time.Hour)

// scene is a survey that a case changes. Nodes 1 to 3 hold 4 shards; node 1 leads group 0
// and shards 1 and 4, node 2 shard 2, node 3 shard 3.
type scene struct{ client.Survey }

func (s *scene) node(id uint64) *client.NodeSurvey {
	for i := range s.Nodes {
		if s.Nodes[i].NodeID == id {
			return &s.Nodes[i]
		}
	}
	panic("a case names a node that is not there")
}

func (s *scene) replica(node uint64, shard uint32) *kvdv1.ShardReplica {
	for _, r := range s.node(node).Replicas {
		if r.GetShard() == shard {
			return r
		}
	}
	panic("a case names a replica that is not there")
}

// leading is the replica that leads.
func (s *scene) leading(shard uint32) *kvdv1.ShardReplica { return s.replica(leaderOf(shard), shard) }

func (s *scene) member(id uint64) *kvdv1.MemberStatus { return s.Members[id-1] }

func (s *scene) progress(shard uint32, node uint64) *kvdv1.ReplicaProgress {
	others := s.leading(shard).GetOthers()
	return others[slices.IndexFunc(others, func(o *kvdv1.ReplicaProgress) bool { return o.GetNodeId() == node })]
}

// kill: the node does not answer, and all leaders that are left have noticed.
func (s *scene) kill(id uint64) {
	n := s.node(id)
	*n = client.NodeSurvey{NodeID: id, Address: n.Address, Err: fmt.Errorf("node at %s cannot be reached: connection refused", n.Address)}
	if id <= uint64(len(s.Members)) {
		s.member(id).Live = false
	}
	for _, n := range s.Nodes {
		for _, r := range n.Replicas {
			for _, o := range r.GetOthers() {
				if o.GetNodeId() == id {
					o.Active = false
				}
			}
			if r.GetLeaderNode() == id {
				r.LeaderNode = 0
			}
		}
	}
}

// lead has another node lead a shard.
func (s *scene) lead(node uint64, shard uint32, voters ...uint64) {
	for i := range s.Nodes {
		for _, r := range s.Nodes[i].Replicas {
			if r.GetShard() == shard {
				r.Leading, r.LeaderNode, r.ServedTerm, r.Others = false, node, 0, nil
				r.Term++
				if s.Nodes[i].NodeID == node {
					makeLeader(r, node, voters)
				}
			}
		}
	}
	for i := range s.Nodes {
		if n := s.Nodes[i]; n.Err != nil {
			s.kill(n.NodeID)
		}
	}
}

func leaderOf(shard uint32) uint64 { return map[uint32]uint64{0: 1, 1: 1, 2: 2, 3: 3, 4: 1}[shard] }

func makeLeader(r *kvdv1.ShardReplica, node uint64, voters []uint64) {
	r.Leading, r.LeaderNode, r.Others = true, node, nil
	if r.GetShard() != 0 {
		r.ServedTerm = r.GetTerm()
	}
	for _, v := range voters {
		if v != node {
			r.Others = append(r.Others, &kvdv1.ReplicaProgress{NodeId: v, Match: r.GetApplied(), Active: true})
		}
	}
}

func wellCluster() *scene {
	s := &scene{client.Survey{At: now, ClusterID: "c"}}
	voters := []uint64{1, 2, 3}
	for _, id := range voters {
		n := client.NodeSurvey{NodeID: id, Address: fmt.Sprintf("10.0.0.%d:7400", id), Status: &kvdv1.StatusResponse{
			ClusterId: "c", NodeId: id, Version: "1.0", StartedUnixMs: start, Transports: []string{"shm", "tcp"},
			ShardCount: 4, Replication: 3, WantedReplication: 3,
		}}
		for shard := range uint32(5) {
			r := &kvdv1.ShardReplica{
				Shard: shard, Term: 7, LeaderNode: leaderOf(shard), Voters: slices.Clone(voters), Applied: 50_000, Commit: 50_000, ConfigId: 1,
				ConfigAgeMs: uint64(time.Hour.Milliseconds()),
			}
			if leaderOf(shard) == id {
				makeLeader(r, id, voters)
			}
			n.Replicas = append(n.Replicas, r)
		}
		s.Nodes = append(s.Nodes, n)
		s.Members = append(s.Members, &kvdv1.MemberStatus{
			Node: &kvdv1.NodeRecord{NodeId: id, State: kvdv1.NodeState_NODE_STATE_ACTIVE}, Live: true, Voter: true, Replicas: 4, Leads: 1,
		})
	}
	return s
}

// want is a reason that has to be there.
type want struct {
	level  Verdict
	code   Code
	nodes  []uint64
	shards []uint32
	words  []string // in the text
}

func TestJudge(t *testing.T) {
	minute := uint64(time.Minute.Milliseconds())
	gossip := func(of uint64, state kvdv1.LivenessState) *kvdv1.LivenessResponse {
		return &kvdv1.LivenessResponse{Enabled: true, Nodes: []*kvdv1.NodeLiveness{{
			NodeId: of, State: state, SinceUnixMs: now.Add(-35 * time.Second).UnixMilli(), HeardUnixMs: now.Add(-50 * time.Second).UnixMilli(),
		}}}
	}
	documented, err := os.ReadFile("../../docs/health.md")
	require.NoError(t, err)
	for _, c := range []struct {
		name    string
		change  func(s *scene)
		verdict Verdict
		reasons []want // all there are, in order
	}{
		{"all is well", func(*scene) {}, Healthy, nil},
		{"a node is killed, and others lead", func(s *scene) {
			s.node(1).Gossip = gossip(3, kvdv1.LivenessState_LIVENESS_STATE_DEAD)
			s.kill(3)
			s.lead(1, 3, 1, 2, 3)
		}, Degraded, []want{
			{Degraded, NodeSilent, []uint64{3}, nil, []string{"node 3 at 10.0.0.3:7400 does not answer (cannot be reached: connection refused)", "group 0 does not hear it either", "node 1 says: dead for 35s, last heard at 2023-11-14T23:12:30Z", "start it"}},
			{Degraded, NoSpare, []uint64{3}, []uint32{0, 1, 3, 4}, []string{"node 1, has not heard lately of node 3 of its voters 1-3"}},
			{Degraded, NoSpare, []uint64{3}, []uint32{2}, []string{"shard 2: no voter may fail", "node 2"}},
		}},
		{"two nodes are killed, the leader that is left has not stepped down", func(s *scene) {
			s.kill(2)
			s.kill(3)
			s.Members, s.MembersErr = nil, errors.New("members: no leader")
		}, Unavailable, []want{
			{Unavailable, NoQuorum, []uint64{2, 3}, []uint32{1, 4}, []string{"shards 1, 4: its leader, node 1, has not heard lately of nodes 2, 3 of its voters 1-3", "start nodes 2, 3"}},
			{Unavailable, NoQuorum, []uint64{2, 3}, []uint32{2, 3}, []string{"shards 2, 3: there is no leader, as of its voters 1-3 not enough answer (node 1)"}},
			{Degraded, NodeSilent, []uint64{2}, nil, []string{"node 2"}},
			{Degraded, NodeSilent, []uint64{3}, nil, []string{"node 3"}},
			{Degraded, NoQuorum, []uint64{2, 3}, []uint32{0}, []string{"group 0 (the cluster's own): ", "while keys of shards with a leader are read and written"}},
			{Degraded, MembersUnknown, nil, nil, []string{"members: no leader"}},
		}},
		{"nothing answers", func(s *scene) {
			for i := range s.Nodes {
				s.kill(uint64(i + 1))
			}
			s.Members, s.MembersErr = nil, errors.New("nobody")
		}, Unavailable, []want{
			{Unavailable, NoNodeAnswers, nil, nil, []string{"none of 3 addresses answers", "--endpoints"}},
			{Degraded, NodeSilent, []uint64{1}, nil, nil}, {Degraded, NodeSilent, []uint64{2}, nil, nil}, {Degraded, NodeSilent, []uint64{3}, nil, nil},
		}},
		{"an election is under way", func(s *scene) {
			for id := range uint64(3) {
				r := s.replica(id+1, 2)
				r.Leading, r.LeaderNode, r.ServedTerm, r.Others = false, 0, 0, nil
			}
		}, Unavailable, []want{{Unavailable, NoLeader, nil, []uint32{2}, []string{"shard 2: there is no leader", "enough answer (nodes 1-3)", "look again"}}}},
		{"the leader that is named is silent", func(s *scene) {
			s.node(3).Err, s.node(3).Status, s.node(3).Replicas = errors.New("did not answer in time"), nil, nil
		}, Unavailable, []want{
			{Unavailable, NoLeader, []uint64{3}, []uint32{3}, []string{"nodes 1, 2 name node 3 as the leader, which does not answer here"}},
			{Degraded, NodeSilent, []uint64{3}, nil, []string{"the leader of group 0 still has its connection"}},
		}},
		{"a leader of an old term does not count", func(s *scene) {
			for _, id := range []uint64{2, 3} {
				s.replica(id, 1).Term, s.replica(id, 1).LeaderNode = 8, 0
			}
		}, Unavailable, []want{{Unavailable, NoLeader, nil, []uint32{1}, nil}}},
		{"a leader does not serve yet", func(s *scene) { s.leading(4).ServedTerm = 0 }, Unavailable,
			[]want{{Unavailable, NotServing, []uint64{1}, []uint32{4}, []string{"node 1 was elected"}}}},
		{"only group 0 has no leader", func(s *scene) {
			for id := range uint64(3) {
				r := s.replica(id+1, 0)
				r.Leading, r.LeaderNode, r.Others = false, 0, nil
			}
		}, Degraded, []want{{Degraded, NoLeader, nil, []uint32{0}, []string{"group 0 (the cluster's own): there is no leader", "namespaces"}}}},
		{"no replica of the last shards answers", func(s *scene) {
			for i := range s.Nodes {
				s.Nodes[i].Status.ShardCount = 7
			}
		}, Unavailable, []want{{Unavailable, NoReplica, nil, []uint32{5, 6, 7}, []string{"shards 5-7: no node that answers has a replica"}}}},
		{"a voter answers here, and its leader does not hear it", func(s *scene) { s.progress(2, 3).Active = false }, Degraded,
			[]want{{Degraded, NoSpare, []uint64{3}, []uint32{2}, []string{"node 2, has not heard lately of node 3"}}}},
		{"one of five is not heard", func(s *scene) {
			for id := range uint64(3) {
				s.replica(id+1, 2).Voters = []uint64{1, 2, 3, 4, 5}
			}
			r := s.leading(2)
			makeLeader(r, 2, []uint64{1, 2, 3, 4, 5})
			s.progress(2, 3).Active = false
		}, Degraded, []want{{Degraded, ReplicaUnheard, []uint64{3}, []uint32{2}, []string{"node 2, has not heard lately of its voter on node 3, which answers here"}}}},
		{"half of a joint configuration has no quorum", func(s *scene) {
			r := s.leading(2)
			r.VotersOutgoing = []uint64{2, 4, 5}
		}, Unavailable, []want{{Unavailable, NoQuorum, []uint64{4, 5}, []uint32{2}, []string{"nodes 4, 5 of its voters 1-5"}}}},
		{"fewer voters than there should be, for long", func(s *scene) {
			s.leading(1).Voters = []uint64{1}
			s.leading(1).Others = nil
		}, Degraded, []want{{Degraded, TooFewVoters, nil, []uint32{1}, []string{"its voters are on node 1, and it should have 3", "rebalance --dry-run"}}}},
		{"fewer voters than there should be, just now", func(s *scene) {
			r := s.leading(1)
			r.Voters, r.Others, r.ConfigAgeMs = []uint64{1}, nil, minute
		}, Healthy, []want{{Info, TooFewVoters, nil, []uint32{1}, []string{"given more soon"}}}},
		{"nodes are too few for what was asked", func(s *scene) {
			for i := range s.Nodes {
				s.Nodes[i].Status.WantedReplication = 5
			}
			s.Placement = []string{"replication 5 wants 5 active nodes, and there are 3: add nodes"}
		}, Healthy, []want{{Info, TooFewVoters, nil, nil, []string{"as many voters as the active nodes allow, 3, and 5 in the end", "--join"}}, {Info, Placement, nil, nil, []string{"add nodes"}}}},
		{"replicas move", func(s *scene) {
			r := s.leading(1)
			r.Learners, r.ConfigAgeMs = []uint64{4}, minute
			r.Others = append(r.Others, &kvdv1.ReplicaProgress{NodeId: 4, Learner: true, Active: true, Snapshot: true})
			r = s.leading(2)
			r.VotersOutgoing, r.Voters, r.ConfigAgeMs = []uint64{1, 2, 3}, []uint64{1, 2, 4}, minute
			r.Others = append(r.Others, &kvdv1.ReplicaProgress{NodeId: 4, Match: r.Applied, Active: true})
		}, Healthy, []want{{Info, Moving, nil, []uint32{1}, []string{"node 4 takes in a replica"}}, {Info, Moving, nil, []uint32{2}, []string{"from 1-3 to 1, 2, 4"}}}},
		{"a move does not end", func(s *scene) { s.leading(1).Learners, s.leading(4).Learners = []uint64{4}, []uint64{4} }, Degraded,
			[]want{{Degraded, MoveStuck, nil, []uint32{1, 4}, []string{"shards 1, 4: a move is under way", "more than 10m0s"}}}},
		{"learners of group 0 stay what they are", func(s *scene) { s.leading(0).Learners = []uint64{4, 5} }, Healthy, nil},
		{"a joint group 0 for long", func(s *scene) { s.leading(0).VotersOutgoing = []uint64{1, 2} }, Degraded, []want{{Degraded, MoveStuck, nil, []uint32{0}, nil}}},
		{"a replica is far behind", func(s *scene) {
			s.progress(1, 2).Match = 50_000 - 10_001
			s.progress(4, 2).Match, s.progress(2, 3).Match = 20_000, 50_000-10_000
			s.replica(3, 2).Applied = 50_000 - 10_000
		}, Degraded, []want{{Degraded, ReplicaBehind, []uint64{2}, []uint32{1, 4}, []string{"node 2 is behind in shards 1, 4, by up to 30000 log entries (shard 4); at most 10000"}}}},
		{"a replica has the log and does not apply it", func(s *scene) { s.replica(2, 1).Applied = 1 }, Degraded, []want{{Degraded, ReplicaBehind, []uint64{2}, []uint32{1}, []string{"49999"}}}},
		{"a voter is sent a snapshot", func(s *scene) { s.progress(1, 3).Snapshot, s.progress(1, 3).Match = true, 0 }, Degraded,
			[]want{{Degraded, ReplicaBehind, []uint64{3}, []uint32{1}, []string{"node 3 is so far behind in shard 1 that it is sent a snapshot"}}}},
		{"space runs low at a leader", func(s *scene) {
			s.node(2).Status.ReadOnly, s.node(2).Status.ReadOnlyReason = true, "the disk of /d has 3 MiB left, writes need 16 MiB: make room"
		}, Unavailable, []want{{Unavailable, ReadOnly, []uint64{2}, []uint32{2}, []string{"node 2 at 10.0.0.2:7400 refuses the writes of what it leads, shard 2: the disk of /d has 3 MiB left"}}}},
		{"space runs low at a follower", func(s *scene) { s.lead(1, 2, 1, 2, 3); s.node(2).Status.ReadOnly = true }, Degraded,
			[]want{{Degraded, ReadOnly, []uint64{2}, nil, []string{"leads no shard now", "make room"}}}},
		{"a node starts", func(s *scene) {
			s.kill(3)
			s.lead(1, 3, 1, 2, 3)
			n := s.node(3)
			n.Err, n.Status, n.Starting, n.ReplicasErr = nil, &kvdv1.StatusResponse{NodeId: 3, Version: "1.0", StartedUnixMs: now.Add(-4 * time.Second).UnixMilli()}, true, errors.New("starting")
			s.member(3).Live = true
		}, Degraded, []want{
			{Degraded, NodeStarting, []uint64{3}, nil, []string{"node 3 at 10.0.0.3:7400 runs for 4s and does not serve yet"}},
			{Degraded, NoSpare, []uint64{3}, []uint32{0, 1, 3, 4}, nil}, {Degraded, NoSpare, []uint64{3}, []uint32{2}, nil},
		}},
		{"the only node starts", func(s *scene) {
			s.Nodes = s.Nodes[:1]
			s.Members, s.MembersErr = nil, errors.New("starting")
			n := s.node(1)
			n.Replicas, n.Starting, n.ReplicasErr, n.Status.ShardCount = nil, true, errors.New("starting"), 0
		}, Unavailable, []want{
			{Unavailable, NoReplica, nil, nil, []string{"nothing is known of the shards"}},
			{Degraded, NodeStarting, []uint64{1}, nil, nil}, {Degraded, MembersUnknown, nil, nil, nil},
		}},
		{"a node does not say what it has", func(s *scene) {
			n := s.node(3)
			s.lead(1, 3, 1, 2, 3)
			n.Replicas, n.ReplicasErr = nil, errors.New("in time")
		}, Degraded, []want{{Degraded, NodeMute, []uint64{3}, nil, []string{"not what replicas it has (in time)"}}}},
		{"a node joins", func(s *scene) {
			s.member(3).Node.State, s.member(3).Node.SinceUnixMs = kvdv1.NodeState_NODE_STATE_JOINING, now.Add(-time.Minute).UnixMilli()
		}, Healthy, []want{{Info, NodeJoining, []uint64{3}, nil, []string{"node 3 is joining for 1m0s", "wait"}}}},
		{"a node that is being let in does not know its id yet", func(s *scene) {
			s.Nodes = append(s.Nodes, client.NodeSurvey{Address: "10.0.0.4:7400", Status: &kvdv1.StatusResponse{Version: "1.0"}, Starting: true, ReplicasErr: errors.New("starting")})
			s.Members = append(s.Members, &kvdv1.MemberStatus{Node: &kvdv1.NodeRecord{NodeId: 4, Address: "10.0.0.4:7400", State: kvdv1.NodeState_NODE_STATE_JOINING}})
		}, Healthy, []want{{Info, NodeJoining, []uint64{4}, nil, []string{"node 4 at 10.0.0.4:7400 runs, and has no part in the cluster yet"}}}},
		{"a node that nobody knows yet", func(s *scene) {
			s.Nodes = append(s.Nodes, client.NodeSurvey{Address: "10.0.0.4:7400", Status: &kvdv1.StatusResponse{Version: "1.0"}, Starting: true, ReplicasErr: errors.New("starting")})
		}, Healthy, []want{{Info, NodeJoining, nil, nil, []string{"the node at 10.0.0.4:7400 runs"}}}},
		{"a node joins for an hour", func(s *scene) {
			s.member(3).Node.State, s.member(3).Node.SinceUnixMs = kvdv1.NodeState_NODE_STATE_JOINING, start
		}, Degraded, []want{{Degraded, NodeJoining, []uint64{3}, nil, []string{"within 10m0s", "read its log"}}}},
		{"a node is drained for a minute", func(s *scene) {
			s.member(3).Node.State, s.member(3).Node.SinceUnixMs = kvdv1.NodeState_NODE_STATE_DRAINING, now.Add(-time.Minute).UnixMilli()
		}, Healthy, []want{{Info, NodeDraining, []uint64{3}, nil, []string{"still has 4 replicas, 1 leaders"}}}},
		{"a node can not be drained", func(s *scene) {
			s.member(3).Node.State, s.member(3).Node.SinceUnixMs = kvdv1.NodeState_NODE_STATE_DRAINING, start
		}, Degraded, []want{{Degraded, NodeDraining, []uint64{3}, nil, []string{"kvctl rebalance --dry-run"}}}},
		{"a node was drained long ago", func(s *scene) {
			m := s.member(3)
			m.Node.State, m.Node.SinceUnixMs, m.Replicas, m.Leads = kvdv1.NodeState_NODE_STATE_DRAINING, start, 0, 0
		}, Healthy, []want{{Info, NodeDraining, []uint64{3}, nil, []string{"safe to stop", "kvctl drain 3 --undo"}}}},
		{"leaders were drained, replicas are to stay", func(s *scene) {
			m := s.member(3)
			m.Node.State, m.Node.SinceUnixMs, m.Node.LeadersOnly, m.Leads = kvdv1.NodeState_NODE_STATE_DRAINING, start, true, 0
		}, Healthy, []want{{Info, NodeDraining, []uint64{3}, nil, []string{"safe to stop"}}}},
		{"a node is stopped in the middle of its drain", func(s *scene) {
			s.Nodes = append(s.Nodes, client.NodeSurvey{NodeID: 4, Address: "10.0.0.4:7400", Err: errors.New("refused")})
			s.Members = append(s.Members, &kvdv1.MemberStatus{Node: &kvdv1.NodeRecord{NodeId: 4, State: kvdv1.NodeState_NODE_STATE_DRAINING}, Replicas: 1})
		}, Degraded, []want{{Degraded, NodeSilent, []uint64{4}, nil, []string{"start it"}}}},
		{"a node can not leave", func(s *scene) {
			s.member(3).Node.State, s.member(3).Node.SinceUnixMs = kvdv1.NodeState_NODE_STATE_DECOMMISSIONED, start
		}, Degraded, []want{{Degraded, NodeLeaving, []uint64{3}, nil, nil}}},
		{"a drained node was stopped", func(s *scene) {
			n := client.NodeSurvey{NodeID: 4, Address: "10.0.0.4:7400", Err: errors.New("refused")}
			s.Nodes = append(s.Nodes, n)
			s.Members = append(s.Members, &kvdv1.MemberStatus{Node: &kvdv1.NodeRecord{NodeId: 4, State: kvdv1.NodeState_NODE_STATE_DRAINING}})
		}, Healthy, []want{{Info, NodeSilent, []uint64{4}, nil, []string{"it was drained and holds nothing"}}}},
		{"a node that left is not missed", func(s *scene) {
			s.Members = append(s.Members, &kvdv1.MemberStatus{Node: &kvdv1.NodeRecord{NodeId: 4, State: kvdv1.NodeState_NODE_STATE_GONE}})
		}, Healthy, nil},
		{"a member that nobody finds", func(s *scene) {
			s.Members = append(s.Members, &kvdv1.MemberStatus{Node: &kvdv1.NodeRecord{NodeId: 4, State: kvdv1.NodeState_NODE_STATE_ACTIVE}})
		}, Degraded, []want{{Degraded, NodeSilent, []uint64{4}, nil, []string{"node 4 is a member, and no node that answers tells where it is"}}}},
		{"an endpoint is wrong", func(s *scene) {
			s.Nodes = append(s.Nodes, client.NodeSurvey{Address: "10.0.0.9:1", Err: errors.New("refused")})
		}, Healthy, []want{{Info, EndpointUnknown, nil, nil, []string{"at 10.0.0.9:1 nothing answers (refused)", "--endpoints"}}}},
		{"the leader of group 0 does not hear a node", func(s *scene) { s.member(2).Live = false }, Degraded,
			[]want{{Degraded, NodeUnheard, []uint64{2}, nil, []string{"node 2 at 10.0.0.2:7400 answers here"}}}},
		{"gossip doubts a node that answers", func(s *scene) { s.node(1).Gossip = gossip(2, kvdv1.LivenessState_LIVENESS_STATE_SUSPECT) }, Healthy,
			[]want{{Info, GossipDoubts, []uint64{2}, nil, []string{"gossip at node 1 says: suspect for 35s"}}}},
		{"versions change", func(s *scene) {
			s.node(3).Status.Version, s.node(3).Status.StartedUnixMs = "1.1", now.Add(-time.Minute).UnixMilli()
		}, Healthy, []want{{Info, Versions, nil, nil, []string{"1.0 at nodes 1, 2, 1.1 at node 3", "1m0s ago"}}}},
		{"versions differ for long", func(s *scene) { s.node(3).Status.Version = "1.1" }, Degraded, []want{{Degraded, Versions, nil, nil, []string{"1h0m0s ago", "finish the change"}}}},
		{"a node has lost a transport", func(s *scene) { s.node(3).Status.Transports = []string{"tcp"} }, Healthy,
			[]want{{Info, Transports, nil, nil, []string{"missing: shm at node 3", "kvctl doctor"}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := wellCluster()
			c.change(s)
			r := Judge(s.Survey, Limits{})
			var texts []string
			for _, x := range r.Reasons {
				texts = append(texts, fmt.Sprint(x))
			}
			require.Equal(t, c.verdict, r.Verdict, strings.Join(texts, "\n"))
			require.Len(t, r.Reasons, len(c.reasons), strings.Join(texts, "\n"))
			for i, w := range c.reasons {
				got := r.Reasons[i]
				require.Equal(t, []any{w.level, w.code, w.nodes, w.shards}, []any{got.Level, got.Code, got.Nodes, got.Shards}, texts[i])
				require.Contains(t, string(documented), "`"+string(got.Code)+"`")
				for _, word := range w.words {
					require.Contains(t, got.Text, word)
				}
			}
		})
	}
}

// The limits are the caller's, and what is counted is what was seen.
func TestLimitsAndCounts(t *testing.T) {
	s := wellCluster()
	s.progress(1, 2).Match = 50_000 - 600
	require.Equal(t, Healthy, Judge(s.Survey, Limits{LagEntries: 600}).Verdict)
	require.Equal(t, Degraded, Judge(s.Survey, Limits{LagEntries: 599}).Verdict)
	s = wellCluster()
	s.leading(1).Learners = []uint64{4} // for an hour
	require.Equal(t, Healthy, Judge(s.Survey, Limits{MoveTime: time.Hour}).Verdict)
	require.Equal(t, Degraded, Judge(s.Survey, Limits{MoveTime: time.Hour - time.Millisecond}).Verdict)

	s = wellCluster()
	s.node(1).Gossip = &kvdv1.LivenessResponse{Enabled: true}
	s.kill(3)
	r := Judge(s.Survey, Limits{})
	require.Equal(t, []int{3, 2, 1, 4, 3}, []int{r.Nodes, r.Answering, r.Gossiping, r.Shards, r.Serving})
}

func TestHints(t *testing.T) {
	at := func(sec int) int64 { return start + int64(sec)*1000 }
	view := func(observer uint64, nodes ...*kvdv1.NodeLiveness) View {
		return View{observer, &kvdv1.LivenessResponse{Enabled: true, Nodes: nodes}}
	}
	alive, dead := kvdv1.LivenessState_LIVENESS_STATE_ALIVE, kvdv1.LivenessState_LIVENESS_STATE_DEAD
	hints := Hints(
		View{Observer: 9},
		view(1, &kvdv1.NodeLiveness{NodeId: 1, State: alive, HeardUnixMs: at(99)}, &kvdv1.NodeLiveness{NodeId: 2, State: dead, SinceUnixMs: at(20), HeardUnixMs: at(5)}, &kvdv1.NodeLiveness{NodeId: 4}),
		view(3, &kvdv1.NodeLiveness{NodeId: 1, State: alive, HeardUnixMs: at(7)}, &kvdv1.NodeLiveness{NodeId: 2, State: alive, HeardUnixMs: at(4)}, &kvdv1.NodeLiveness{NodeId: 3, State: alive, HeardUnixMs: at(9)}),
	)
	require.Equal(t, uint64(3), hints[1].Observer, "what a node says of itself is no news")
	require.Equal(t, "alive", hints[1].Word())
	require.Equal(t, "dead", hints[2].Word(), "who heard it last knows best")
	require.Equal(t, time.UnixMilli(at(20)), hints[2].Since)
	require.Equal(t, uint64(3), hints[3].Observer, "nobody else said anything")
	require.Equal(t, "never heard", hints[4].Word())
	require.Len(t, hints, 4)
}

func TestNames(t *testing.T) {
	require.Equal(t, "shard 7", NameShards([]uint32{7}))
	require.Equal(t, "group 0 (the cluster's own)", NameShards([]uint32{0}))
	require.Equal(t, "group 0 (the cluster's own) and shards 1-3, 5, 6", NameShards([]uint32{6, 0, 3, 2, 1, 5}))
	require.Equal(t, "nodes 1, 3", nameNodes([]uint64{3, 1}))
	require.Equal(t, "nodes none", nameNodes(nil))
}
