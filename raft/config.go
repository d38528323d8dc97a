package raft

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/kvd-io/kvd/internal/clock"
)

// Config describes a Host. Zero values mean the default that is named at the field.
type Config struct {
	// NodeID is this node. It must not be 0, nor one of the two highest values,
	// which etcd's raft uses for itself.
	NodeID NodeID
	// Log keeps the logs of all groups.
	Log LogStore
	// Transport carries messages to other nodes.
	Transport Transport
	// Clock gives the ticks. Default: the system's.
	Clock clock.Clock
	// Logger gets what an operator should know. Default: slog.Default().
	Logger *slog.Logger

	// TickInterval is the unit of the two below. Default 100 ms. Lower: failures are
	// noticed sooner, at more messages for idle groups.
	TickInterval time.Duration
	// ElectionTicks without word from the leader start an election (each replica adds
	// up to as many again, at random). It must exceed the worst stall of a disk, and
	// HeartbeatTicks by several times. Default 10.
	ElectionTicks int
	// HeartbeatTicks between two heartbeats of a leader. Default 1.
	HeartbeatTicks int

	// QuiesceTicks without anything to do, and a group ticks no more until there is; see
	// quiesce.go. Nodes send each other heartbeats then, one for all groups. 0: never, and
	// so does no group that a replica of this node is in.
	QuiesceTicks int

	// MaxMessageBytes bounds the entries in one append message. Default 1 MiB. One
	// entry may be larger and then travels alone.
	MaxMessageBytes uint64
	// MaxInflightBytes and MaxInflightMessages bound the unacknowledged appends to
	// one follower of one group. Defaults 16 MiB, 256.
	MaxInflightBytes    uint64
	MaxInflightMessages int
	// MaxUncommittedBytes of proposals of one group; above, Propose returns
	// ErrOverloaded. Default 32 MiB.
	MaxUncommittedBytes uint64
	// MaxApplyingBytes of one group handed to the state machine and not yet applied.
	// Default 8 MiB.
	MaxApplyingBytes uint64
	// MaxInboxMessages of one group received and not yet stepped; more are dropped,
	// which raft takes as loss on the network. Default 4096.
	MaxInboxMessages int

	// LogRetainEntries and LogRetainBytes are kept in the log behind what is applied,
	// so that a follower that was away for a moment needs no snapshot; whichever is
	// reached first counts. More is kept for a follower that is alive but behind, or is
	// being sent a snapshot, up to the size of the state. Defaults 16384, 64 MiB.
	LogRetainEntries uint64
	LogRetainBytes   uint64
	// DiskLow tells that the log's disk is short of room: no more than LogRetain is kept
	// then. It must not block. Nil: it never is.
	DiskLow func() bool

	// CommitDelay is how long followers may wait to hear that entries were committed,
	// if nothing else is sent to them meanwhile. 0: they are told at once, by a message
	// of its own. Their answers to readers lag by as much.
	CommitDelay time.Duration
	// HoldDelay is how long a follower whose acknowledgement is not needed may wait for
	// entries, while its group has nothing else under way. It is also what a write takes
	// longer when a follower that was relied upon fails. 0: all are sent them at once.
	HoldDelay time.Duration

	// Workers finish what the goroutines that bring work leave over. Default 2.
	Workers int
	// Appliers is the number of groups that apply at the same time. Default 4.
	Appliers int
	// Seed starts the numbering of proposals; 0 draws it. Only tests set it: two runs
	// of a node must not number alike, or a late entry of the first may answer a
	// caller of the second.
	Seed uint64

	Hooks Hooks
}

// Hooks tell of events. They are called without locks held, must not block, and
// must not wait for a method of Host or Group. Nil ones are skipped.
type Hooks struct {
	// OnLeaderChange: leader 0 is unknown.
	OnLeaderChange func(g GroupID, leader NodeID, term uint64)
	// OnApplied: the state machine holds everything up to index.
	OnApplied func(g GroupID, index uint64)
	// OnFatal: the host stopped working and must be closed. It is called once. g is
	// the group in which the error showed.
	OnFatal func(g GroupID, err error)
	// OnLogSync: one batch for so many groups was written, and synced or not.
	OnLogSync func(groups int, synced bool, took time.Duration)
	// OnApply: so many entries were applied.
	OnApply func(g GroupID, entries int, took time.Duration)
}

func (c Config) withDefaults() Config {
	if c.Clock == nil {
		c.Clock = clock.System
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.TickInterval == 0 {
		c.TickInterval = 100 * time.Millisecond
	}
	setInt(&c.ElectionTicks, 10)
	setInt(&c.HeartbeatTicks, 1)
	setUint(&c.MaxMessageBytes, 1<<20)
	setUint(&c.MaxInflightBytes, 16<<20)
	setInt(&c.MaxInflightMessages, 256)
	setUint(&c.MaxUncommittedBytes, 32<<20)
	setUint(&c.MaxApplyingBytes, 8<<20)
	setInt(&c.MaxInboxMessages, 4096)
	setUint(&c.LogRetainEntries, 16384)
	setUint(&c.LogRetainBytes, 64<<20)
	setInt(&c.Workers, 2)
	setInt(&c.Appliers, 4)
	return c
}

func setInt(v *int, def int) {
	if *v == 0 {
		*v = def
	}
}

func setUint(v *uint64, def uint64) {
	if *v == 0 {
		*v = def
	}
}

// Validate says what is wrong with c after the defaults are filled in. It changes
// nothing.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("raft: config: "+format, args...))
	}
	if c.NodeID == 0 || c.NodeID >= maxNodeID {
		bad("NodeID is %d, want 1 to %d", c.NodeID, uint64(maxNodeID-1))
	}
	if c.Log == nil {
		bad("Log is missing")
	}
	if c.Transport == nil {
		bad("Transport is missing")
	}
	if c.TickInterval < 0 {
		bad("TickInterval is %v, want more than 0", c.TickInterval)
	}
	if c.HeartbeatTicks < 1 {
		bad("HeartbeatTicks is %d, want at least 1", c.HeartbeatTicks)
	}
	if c.ElectionTicks <= c.HeartbeatTicks {
		bad("ElectionTicks is %d, want more than HeartbeatTicks, which is %d", c.ElectionTicks, c.HeartbeatTicks)
	}
	if c.QuiesceTicks < 0 {
		bad("QuiesceTicks is %d, want at least 0", c.QuiesceTicks)
	}
	if c.MaxInflightBytes < c.MaxMessageBytes {
		bad("MaxInflightBytes is %d, want at least MaxMessageBytes, which is %d", c.MaxInflightBytes, c.MaxMessageBytes)
	}
	for _, n := range []struct {
		name string
		v    int
	}{
		{"MaxInflightMessages", c.MaxInflightMessages}, {"MaxInboxMessages", c.MaxInboxMessages},
		{"Workers", c.Workers}, {"Appliers", c.Appliers},
	} {
		if n.v < 1 {
			bad("%s is %d, want at least 1", n.name, n.v)
		}
	}
	return errors.Join(errs...)
}
