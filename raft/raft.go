package raft

import (
	"errors"

	"go.etcd.io/raft/v3/raftpb"
)

// GroupID names a Raft group. Group 0 holds the cluster's own state, the others
// are the data shards.
type GroupID uint64

// NodeID names a node. It is also the id of the node's replica in each group: a
// node has at most one replica of a group, and ids are never used twice.
type NodeID uint64

// What a caller may do about it is said at each.
var (
	// ErrNotLeader: nothing was proposed. Ask Status who leads, and go there.
	ErrNotLeader = errors.New("raft: not the leader")
	// ErrOutcomeUnknown: the proposal may or may not be applied some day. Retry
	// only what is safe to apply twice.
	ErrOutcomeUnknown = errors.New("raft: outcome unknown")
	// ErrOverloaded: nothing was proposed, too much is uncommitted. Retry after a
	// pause.
	ErrOverloaded = errors.New("raft: too many uncommitted proposals")
	// ErrNoGroup: this node has no replica of that group.
	ErrNoGroup = errors.New("raft: no such group here")
	// ErrClosed: the host was closed; nothing was proposed.
	ErrClosed = errors.New("raft: closed")
	// ErrNotReady: no entry of the leader's own term is applied yet; retry.
	ErrNotReady = errors.New("raft: not ready")
)

// Entry is a committed normal entry.
type Entry struct {
	Index uint64
	Term  uint64
	Data  []byte // borrowed until Apply returns
}

// StateMachine is the replicated state of one group, and the place where the
// group's control record is written. The host calls it in exactly the order that
// the read protocol needs; see DESIGN.md.
//
// Apply, ApplyConfig and InstallSnapshot are never called at the same time. The
// Set methods are called while the host holds the group's lock: they only store
// words and must not block. SetTerm, SetServing, BeginConfig and Apply may be
// called from different goroutines.
type StateMachine interface {
	// Open returns what the state holds, at start, before anything else is called.
	Open() (AppliedState, error)
	// SetTerm publishes a term, before any message or storage work of the Ready that
	// brought it is handed on. Terms only rise.
	SetTerm(term uint64)
	// SetServing publishes served_term: T once this replica leads term T and has
	// applied an entry of term T; 0 as soon as it no longer leads, before any
	// message of the Ready that said so is handed on.
	SetServing(term uint64)
	// BeginConfig publishes config_id, before the configuration of the entry at
	// index takes effect in the Raft node.
	BeginConfig(index uint64)
	// ApplyConfig persists, in one batch, the configuration and the applied index.
	ApplyConfig(index, term uint64, conf *raftpb.ConfState) error
	// Apply applies committed entries, in order and without gaps except for those
	// that ApplyConfig took and empty ones. When it returns, both kinds of readers
	// see them: the arena first, then the engine. results[i] belongs to entries[i]
	// and is handed to the waiter, if there is one. An entry at or below the applied
	// index is skipped with a nil result. through is the index up to which the log
	// has now been applied (at least the last entry's).
	//
	// An error stops the node: it means that the replica can not go on.
	Apply(entries []Entry, through, throughTerm uint64) (results []any, err error)
	// InstallSnapshot replaces the whole state, durably, by the snapshot which the
	// transport received; data is what the transport put there. It returns what the
	// state now holds.
	InstallSnapshot(meta *raftpb.SnapshotMetadata, data []byte) (AppliedState, error)
	// DurableApplied is the applied index that would be found after a crash now: the
	// log may be cut up to there.
	DurableApplied() (uint64, error)
	// StateBytes is about how many bytes a snapshot would carry now: log that a follower
	// needs is kept while it is less.
	StateBytes() (uint64, error)
}

// AppliedState is what a state machine holds.
type AppliedState struct {
	Index    uint64 // applied
	Term     uint64 // of the entry at Index
	ConfigID uint64 // index of the last configuration entry applied
	Conf     *raftpb.ConfState
}

// LogState is what the log store holds of one group.
type LogState struct {
	Hard *raftpb.HardState // nil: nothing was ever written
	// Entries (Truncated, Last] are there. Last == Truncated: none.
	Truncated     uint64
	TruncatedTerm uint64
	Last          uint64
}

// LogStore keeps the logs of all groups.
type LogStore interface {
	// Open returns what is there for the group.
	Open(g GroupID) (LogState, error)
	// NewBatch starts a batch.
	NewBatch() LogBatch
	// Entries returns [lo, hi) up to about maxBytes, but at least one. The entries
	// are the caller's to read, never to change.
	Entries(g GroupID, lo, hi, maxBytes uint64) ([]*raftpb.Entry, error)
	// Term of an entry in (Truncated, Last].
	Term(g GroupID, index uint64) (uint64, error)
}

// LogBatch collects the writes of several groups; Commit makes them durable at
// once, all or nothing.
type LogBatch interface {
	// Append stores entries; existing ones from the first one's index on are removed.
	Append(g GroupID, entries []*raftpb.Entry) error
	SetHardState(g GroupID, hs *raftpb.HardState) error
	// Truncate removes the entries up to index, whose term is given.
	Truncate(g GroupID, index, term uint64) error
	// Reset empties the log: the next entry is index+1 (a snapshot was installed).
	Reset(g GroupID, index, term uint64) error
	// Commit writes the batch and, with sync, returns once it is durable. The batch
	// is not used afterwards.
	Commit(sync bool) error
	// Discard drops an uncommitted batch.
	Discard()
}

// GroupMessage is a message between replicas of a group.
type GroupMessage struct {
	Group   GroupID
	Message *raftpb.Message
	// Quiesce marks heartbeats and their answers, see quiesce.go: the last index of the
	// sender's log, if as far as it knows its group has nothing to do. 0: no mark.
	Quiesce uint64
}

// Transport carries messages to other nodes.
type Transport interface {
	// Send hands over messages and never blocks. What can not be queued is dropped
	// and reported with Host.ReportUnreachable. The messages must not be changed.
	Send(to NodeID, msgs []GroupMessage)
	// SendSnapshot streams the group's state to a follower and then delivers m, whose
	// snapshot metadata the transport replaces by that of what it streams. It never
	// blocks and calls done exactly once.
	SendSnapshot(to NodeID, g GroupID, m *raftpb.Message, done func(ok bool))
	// SendHeartbeat hands over a sign of life, for Host.Heartbeat there. It never blocks.
	// It may be dropped without a word, as when another one waits to be sent; it must
	// not wait behind messages of groups for longer than they do.
	SendHeartbeat(to NodeID, hb NodeHeartbeat)
}
