package placement

import (
	"fmt"
	"slices"
)

// State of a node, as operators and the cluster see it.
type State uint8

// The states of a node.
const (
	// Active nodes hold replicas and get new ones.
	Active State = iota
	// Draining nodes work, but their replicas and leaders are to go.
	Draining
	// Dead nodes are not expected back: their replicas are replaced.
	Dead
)

func (s State) String() string {
	switch s {
	case Active:
		return "active"
	case Draining:
		return "draining"
	case Dead:
		return "dead"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Node is a place for replicas.
type Node struct {
	ID uint64 // not 0
	// Zone, Rack and Host are failure domains, each within the one before. An empty zone
	// or rack is a domain like any other (so without labels all nodes share one); an empty
	// host means that the node has a host of its own.
	Zone, Rack, Host string
	State            State
	// LeadersOnly: of a draining node only the leaders are to go, for it is back soon. Its
	// replicas stay and count as wanted; it gets no new ones.
	LeadersOnly bool
	// Weight is the node's share of the load relative to the other nodes'; 0 means 1.
	Weight uint32
	// LimitBytes is how many bytes of replicas the node can hold; 0 means that there is no
	// limit. A replica that would exceed it is not moved there.
	LimitBytes uint64
}

// Shard is a replicated group.
type Shard struct {
	ID uint32
	// Voters and Learners are node ids. A learner is a replica on its way to be a voter.
	Voters, Learners []uint64
	Leader           uint64 // 0: unknown
	Bytes            uint64 // of one replica
}

// Cluster is what Plan decides upon. A replica on a node that is not among Nodes counts as
// one on a dead node.
type Cluster struct {
	Nodes       []Node
	Shards      []Shard
	Replication int // voters that each shard should have
}

// Limits bound a plan. What is under way already (learners) counts. 0 means no bound.
type Limits struct {
	Moves int // at once
	// MovesPerNode bounds the moves that one node takes part in, as the one that gets the
	// replica or the living one that loses it.
	MovesPerNode int
	Transfers    int // of leaders
}

// Move is one change of a shard's replicas: a replica on Add becomes a voter (first a
// learner, unless it is one already), and then the one on Remove goes. Add or Remove may
// be 0, for none. Whoever carries it out adds before it removes.
type Move struct {
	Shard       uint32
	Add, Remove uint64
	Kind        Kind
	Reason      string // a sentence for people
}

// Kind of a move, in the order in which Plan prefers them.
type Kind uint8

// The kinds of moves.
const (
	Finish  Kind = iota // what is under way
	Repair              // missing and dead replicas
	Drain               // replicas on draining nodes
	Surplus             // more voters than wanted
	Spread              // failure domains
	Balance             // load
)

func (k Kind) String() string {
	names := [...]string{"finish", "repair", "drain", "surplus", "spread", "balance"}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Transfer makes another voter the leader of a shard.
type Transfer struct {
	Shard    uint32
	From, To uint64
	Reason   string
}

// Result of Plan.
type Result struct {
	// Transfers are to be done before Moves.
	Transfers []Transfer
	Moves     []Move
	// Problems tell, in sentences, what can not be reached with these nodes. They change
	// only when the cluster does.
	Problems []string
}

// Empty tells that there is nothing to do. There may be problems still.
func (r Result) Empty() bool { return len(r.Transfers) == 0 && len(r.Moves) == 0 }

// Tolerance is how much fuller than another a node may be, as a fraction of their mean,
// before a replica is moved for the sake of balance. It keeps a cluster whose shards grow
// and shrink from moving all the time.
const Tolerance = 0.05

// ToleranceBytes is how many bytes more than another a node may hold, for each weight of
// 1, whatever fraction of their mean that is: it is less than what a move is worth.
const ToleranceBytes = 64 << 20

// Plan returns the next steps for c within limits l. It keeps nothing of c. The steps of
// one plan do not depend on each other, but for transfers coming before moves; any of them
// may be left out.
func Plan(c Cluster, l Limits) Result {
	s, err := newState(c, l)
	if err != nil {
		return Result{Problems: []string{err.Error()}}
	}
	s.finish()
	s.repair()
	s.surplus()
	s.improveSpread()
	s.balance()
	s.leaders()
	s.clusterProblems()
	return Result{Transfers: s.transfers, Moves: s.moves, Problems: s.problems}
}

// Remaining tells what a node holds: for the progress of a drain, which is over when
// nothing remains.
func Remaining(c Cluster, node uint64) (replicas, leaders int) {
	for _, sh := range c.Shards {
		if slices.Contains(sh.Voters, node) || slices.Contains(sh.Learners, node) {
			replicas++
		}
		if sh.Leader == node {
			leaders++
		}
	}
	return replicas, leaders
}
