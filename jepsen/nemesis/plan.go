package nemesis

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// The faults.
const (
	Kill          = "kill"           // SIGKILL of one node, restarted after a while
	KillAll       = "kill-all"       // SIGKILL of all nodes at once
	Stop          = "stop"           // SIGSTOP, later SIGCONT: its memory stays readable meanwhile
	Transfer      = "transfer"       // leaders moved to and fro
	Snapshot      = "snapshot"       // SIGKILL while a node installs a snapshot
	Tiny          = "tiny"           // a node restarted with hardly any memory to show: it evicts all the time
	OOM           = "oom"            // the kernel kills a node for lack of memory
	Grow          = "grow"           // so many keys that an index is replaced all the time
	SlowDisk      = "slow-disk"      // every write, sync and read of a node takes longer
	StallSync     = "stall-sync"     // its syncs hang
	FailSync      = "fail-sync"      // its syncs fail: it has to stop itself
	DiskFull      = "disk-full"      // it has less room than it wants: it has to refuse writes
	ClockJump     = "clock-jump"     // its wall clock is another one for a while
	Halves        = "halves"         // two parts, cut from each other
	Ring          = "ring"           // each node hears a majority, no two the same
	Bridge        = "bridge"         // two parts that one node still joins
	OneWay        = "one-way"        // a node hears the others, they do not hear it; or the reverse
	IsolateLeader = "isolate-leader" // cut from the other nodes, not from the clients
	ClientLeader  = "client-leader"  // clients cut from the leader: both ways, requests only, or answers only
	Flap          = "flap"           // a node's cable goes out and in
	Churn         = "churn"          // a node joins; another is drained, and leaves for good or comes back
	Moves         = "moves"          // replicas moved to and fro

	RollingRestart = "rolling-restart" // all nodes, one after the other, by SIGTERM
	Upgrade        = "upgrade"         // the same, each with another kvd; the next time back
	Drain          = "drain"           // all nodes, one after the other, drained and restarted
	Replace        = "replace"         // a node is lost for good, and another takes its place
)

// processKinds need no network of their own, networkKinds do; chaosKinds need a kvd that
// was built with the tag chaos; memberKinds need a spare node.
var (
	processKinds = []string{Kill, KillAll, Stop, Transfer, Snapshot, Tiny, OOM, Grow, RollingRestart, Upgrade}
	chaosKinds   = []string{SlowDisk, StallSync, FailSync, DiskFull, ClockJump}
	networkKinds = []string{Halves, Ring, Bridge, OneWay, IsolateLeader, ClientLeader, Flap}
	memberKinds  = []string{Churn, Moves, Drain, Replace}
)

// Kinds of all faults.
func Kinds() []string { return slices.Concat(processKinds, chaosKinds, networkKinds, memberKinds) }

// NeedsChaos tells whether a fault needs a kvd that was built with the tag chaos.
func NeedsChaos(kind string) bool { return slices.Contains(chaosKinds, kind) }

// NeedsSpare tells whether a fault needs a node that can join.
func NeedsSpare(kind string) bool { return slices.Contains(memberKinds, kind) }

// NeedsNetwork tells whether a fault needs a network that can be cut.
func NeedsNetwork(kind string) bool { return slices.Contains(networkKinds, kind) }

// NeedsOthers tells whether a fault is of something between nodes: with one there is none.
func NeedsOthers(kind string) bool {
	return slices.Contains([]string{Halves, Ring, Bridge, OneWay, IsolateLeader}, kind)
}

// NeedsReplicas tells whether a fault is of something between the replicas of a shard, or
// takes one away for good.
func NeedsReplicas(kind string) bool {
	return slices.Contains([]string{Transfer, Snapshot, Replace}, kind)
}

// ParseKinds reads all, none, process, disk (and clock), network, membership, or names with commas between.
func ParseKinds(s string) ([]string, error) {
	var out []string
	for _, name := range strings.Split(s, ",") {
		switch name = strings.TrimSpace(name); {
		case name == "all":
			out = append(out, Kinds()...)
		case name == "process":
			out = append(out, processKinds...)
		case name == "disk":
			out = append(out, chaosKinds...)
		case name == "network":
			out = append(out, networkKinds...)
		case name == "membership":
			out = append(out, memberKinds...)
		case name == "none" || name == "":
		case slices.Contains(Kinds(), name):
			out = append(out, name)
		default:
			return nil, fmt.Errorf("fault %q is not known: want all, none, process, disk, network, membership or some of %s", name, strings.Join(Kinds(), ","))
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// Event is one planned fault.
type Event struct {
	Kind   string        `json:"kind"`
	At     time.Duration `json:"at"`  // since the run's begin, at the earliest
	For    time.Duration `json:"for"` // how long it lasts
	Node   uint64        `json:"node"`
	Leader bool          `json:"leader"` // whoever leads most shards then, instead of Node
	Order  []uint64      `json:"order"`  // all nodes, a spare one included, shuffled
	Mode   int           `json:"mode"`   // which variant, 0 to 2
	Seed   uint64        `json:"seed"`   // of what is drawn while it lasts
}

// elsewhere is the same fault at the next node of the order, whether it leads or not.
func (e Event) elsewhere() Event {
	e.Order = append(slices.Clone(e.Order[1:]), e.Order[0])
	e.Node, e.Leader = e.Order[0], false
	return e
}

// span of each kind: the shortest and the longest time that it lasts.
var span = map[string][2]time.Duration{
	Kill: {200 * time.Millisecond, 3 * time.Second}, KillAll: {100 * time.Millisecond, time.Second},
	Stop: {time.Second, 6 * time.Second}, Transfer: {2 * time.Second, 4 * time.Second},
	Snapshot: {time.Second, 2 * time.Second}, Tiny: {5 * time.Second, 8 * time.Second}, OOM: {200 * time.Millisecond, 2 * time.Second},
	Grow: {4 * time.Second, 7 * time.Second}, SlowDisk: {2 * time.Second, 6 * time.Second},
	StallSync: {500 * time.Millisecond, 6 * time.Second}, FailSync: {200 * time.Millisecond, 2 * time.Second},
	DiskFull: {3 * time.Second, 6 * time.Second}, ClockJump: {time.Second, 4 * time.Second},
	Halves: {2 * time.Second, 6 * time.Second}, Ring: {2 * time.Second, 6 * time.Second}, Bridge: {2 * time.Second, 6 * time.Second},
	OneWay: {2 * time.Second, 6 * time.Second}, IsolateLeader: {2 * time.Second, 6 * time.Second},
	ClientLeader: {2 * time.Second, 5 * time.Second}, Flap: {2 * time.Second, 5 * time.Second},
	Churn: {time.Second, 4 * time.Second}, Moves: {4 * time.Second, 8 * time.Second},
	// As long as each node is away.
	RollingRestart: {100 * time.Millisecond, 1500 * time.Millisecond}, Upgrade: {100 * time.Millisecond, 1500 * time.Millisecond}, Drain: {100 * time.Millisecond, 500 * time.Millisecond},
	Replace: {100 * time.Millisecond, 200 * time.Millisecond},
}

const (
	firstFault = 1500 * time.Millisecond // a moment of peace, for clients to learn where things are
	gapMin     = 500 * time.Millisecond
	gapMax     = 3 * time.Second
	lastFault  = time.Second // before the end
)

// RoomForOne is how long a run has to be for at least one fault, whatever its seed.
func RoomForOne(tempo float64) time.Duration {
	return faster(firstFault, tempo) + faster(gapMax, tempo)/2 + faster(lastFault, tempo) + time.Millisecond
}

func faster(d time.Duration, tempo float64) time.Duration { return time.Duration(float64(d) / tempo) }

// Lanes are of processes (and their disks and clocks), of the network, and of membership.
type Lanes [3][]Event

// LaneNames, in the order of Lanes.
var LaneNames = [3]string{"process", "network", "members"}

var laneKinds = [3][]string{slices.Concat(processKinds, chaosKinds), networkKinds, memberKinds}

// Plan draws the faults of a run, in lanes, so that faults of different classes overlap and
// those of one class do not. Each lane deals its kinds like cards, so that all come before
// one comes again. Every random choice follows from the seed. nodes do not include the
// spare one. Faults, and the pauses between them, are tempo times as short as usual.
func Plan(seed uint64, kinds []string, length time.Duration, nodes int, tempo float64) Lanes {
	var lanes Lanes
	if slices.ContainsFunc(kinds, NeedsSpare) {
		nodes++
	}
	for i, class := range laneKinds {
		var mine []string
		for _, k := range class {
			if slices.Contains(kinds, k) {
				mine = append(mine, k)
			}
		}
		if len(mine) > 0 {
			lanes[i] = planLane(rand.New(rand.NewPCG(seed, uint64(i+1))), mine, length, nodes, tempo)
		}
	}
	return lanes
}

func planLane(rng *rand.Rand, kinds []string, length time.Duration, nodes int, tempo float64) []Event {
	between := func(a, b time.Duration) time.Duration {
		a, b = faster(a, tempo), faster(b, tempo)
		return a + time.Duration(rng.Int64N(int64(b-a)+1))
	}
	var deck []string
	var events []Event
	for at := faster(firstFault, tempo) + between(0, gapMax/2); at < length-faster(lastFault, tempo); {
		if len(deck) == 0 {
			deck = slices.Clone(kinds)
			rng.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
		}
		kind := deck[0]
		deck = deck[1:]
		e := Event{Kind: kind, At: at, For: between(span[kind][0], span[kind][1]), Mode: rng.IntN(3), Seed: rng.Uint64(), Leader: rng.IntN(2) == 0}
		for _, n := range rng.Perm(nodes) {
			e.Order = append(e.Order, uint64(n+1))
		}
		e.Node = e.Order[0]
		events = append(events, e)
		at += e.For + between(gapMin, gapMax)
	}
	return events
}
