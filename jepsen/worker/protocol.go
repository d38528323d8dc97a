package worker

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/jepsen/history"
)

// Config of a worker, the first thing that its parent sends.
type Config struct {
	Name        string
	Endpoints   []string
	Clients     []ClientConfig
	CallTimeout time.Duration
	DialTimeout time.Duration // for the first connection of each client
	// As client.Config has them; 0: its defaults.
	ConnectTimeout, HedgeMin time.Duration
}

// ClientConfig of one SDK client.
type ClientConfig struct {
	Name      string
	Transport string
}

// request to a worker: exactly one of the pointers is set.
type request struct {
	ID       uint64
	Op       *history.Op
	Client   int
	Status   bool
	Stats    bool
	Transfer *Transfer
	Fill     *Fill
	Members  bool
	Drain    *Drain
	Moving   bool
}

// Member is a node as the leader of group 0 knows it.
type Member struct {
	Node     uint64
	Address  string
	State    string // as kvctl names it: joining, active, draining, decommissioned, gone
	Live     bool
	Replicas int // on their way there or away included
}

// Drain has a node's replicas moved away.
type Drain struct {
	Node    uint64
	Undo    bool // it is to be an active one again
	ForGood bool // it is to leave the cluster
}

// Transfer moves a shard's leadership.
type Transfer struct {
	Shard uint32
	To    uint64
}

// Fill writes keys that nobody checks into one shard, to make its log or its memory
// grow.
type Fill struct {
	Shard  uint32
	Bytes  int64
	Prefix string
	Size   int // of a value
	AtOnce int // writes under way; 0: 4
}

// Replica is what a node says of its replica of a shard.
type Replica struct {
	Node       uint64
	Shard      uint32
	Leader     uint64   // as this node sees it
	Voters     []uint64 // likewise
	ServedTerm uint64
	Applied    uint64
	First      uint64 // index of the log's first entry
	Away       uint64 // keys that are not in the memory that clients read
}

// Status of the cluster, as far as it answered.
type Status struct {
	Replicas   []Replica
	Answered   []uint64          // nodes
	Evictions  map[uint64]uint64 // by node
	IndexBytes map[uint64]uint64 // of the tables in use, by node
}

// Stats of all clients of a worker.
type Stats struct {
	Gets       map[string]uint64 // answered, by what answered
	Fallbacks  map[string]uint64
	Retries    map[string]uint64
	Counts     map[string]uint64
	Clients    int
	ClientVias map[string]string
}

// response of a worker.
type response struct {
	ID      uint64
	Ready   bool // the first one
	Op      *history.Op
	Status  *Status
	Stats   *Stats
	Count   int
	Members []Member
	Err     string
}

// Now is the host's monotonic clock in nanoseconds, the same in all processes.
func Now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic("worker: this kernel has no monotonic clock") // bug: every Linux has one
	}
	return ts.Nano()
}
