package raft

import (
	"errors"
	"fmt"
	"math"

	"go.etcd.io/raft/v3/raftpb"
)

const maxNodeID = math.MaxUint64 - 1 // it and the one above are the core's local targets

var (
	// ErrLogLost: a leader knows this replica to hold entries that it does not hold.
	// Its disk was wiped or an old copy was put back; it may have voted and
	// acknowledged what it no longer knows, so it must not go on under its id.
	ErrLogLost = errors.New("raft: log was lost")
	// ErrConfChangeRefused: the change can not follow the present configuration, or
	// another is under way. Nothing changed.
	ErrConfChangeRefused = errors.New("raft: configuration change refused")
	// ErrTransfer: leadership did not go where it was to go. Ask Status.
	ErrTransfer = errors.New("raft: leadership not transferred")

	errNilMessage = errors.New("raft: nil message")
	errNeedsReady = errors.New("raft: must be checked against the newest log")
)

// checkMessageLocked finds what would make the core panic, or believe what can not
// be. The envelope has been checked before.
func (g *Group) checkMessageLocked(m *raftpb.Message) error {
	switch m.GetType() {
	case raftpb.MsgApp:
		return checkAppend(m)
	case raftpb.MsgHeartbeat:
		return g.checkHeartbeatLocked(m)
	case raftpb.MsgAppResp:
		return g.checkAppendRespLocked(m)
	case raftpb.MsgHeartbeatResp:
		return g.checkHeartbeatRespLocked(m)
	case raftpb.MsgSnap:
		return checkSnapshot(m)
	case raftpb.MsgVote, raftpb.MsgPreVote:
		return g.checkVoteLocked(m)
	}
	return nil
}

// checkVoteLocked: a replica that was just made does not vote before it has the state of a
// leader. Its node may have had another before, which acknowledged entries and left; to a
// candidate that was away meanwhile, and goes by the configuration of then, its empty log
// would be the vote that makes a quorum without those entries. A snapshot for a new member
// lies behind all that the one before acknowledged.
func (g *Group) checkVoteLocked(m *raftpb.Message) error {
	if c := &g.mu.core; c.last > 0 {
		return nil
	}
	if g.core.HasReady() {
		return errNeedsReady
	}
	return fmt.Errorf("node %d asks for a vote in term %d, and this replica was just made: it has none before a leader brings it the state", m.GetFrom(), m.GetTerm())
}

// checkAppend: entries follow each other and the entry before them.
func checkAppend(m *raftpb.Message) error {
	index, term := m.GetIndex(), m.GetLogTerm()
	for i, e := range m.GetEntries() {
		switch {
		case e == nil:
			return fmt.Errorf("append from node %d: entry %d of the message is missing", m.GetFrom(), i)
		case e.GetIndex() != index+1:
			return fmt.Errorf("append from node %d: entry %d follows entry %d", m.GetFrom(), e.GetIndex(), index)
		case e.GetTerm() < term || e.GetTerm() > m.GetTerm():
			return fmt.Errorf("append from node %d: entry %d has term %d after term %d in a message of term %d",
				m.GetFrom(), e.GetIndex(), e.GetTerm(), term, m.GetTerm())
		}
		index, term = e.GetIndex(), e.GetTerm()
	}
	return nil
}

// checkHeartbeatLocked: a leader sends at most what this replica acknowledged as
// commit, so this replica must have it.
func (g *Group) checkHeartbeatLocked(m *raftpb.Message) error {
	c := &g.mu.core
	if m.GetTerm() < c.term || m.GetCommit() <= c.last {
		return nil
	}
	if g.core.HasReady() {
		return errNeedsReady
	}
	if c.last == 0 {
		// It never held anything, and so lost nothing: this was said to a replica that was
		// here before.
		return fmt.Errorf("heartbeat from node %d commits entry %d, and this replica was just made", m.GetFrom(), m.GetCommit())
	}
	return fmt.Errorf("%w: node %d, which leads group %d in term %d, says that this node %d acknowledged entry %d, "+
		"but its log ends at %d: remove this node's replica and add it again under a new id",
		ErrLogLost, m.GetFrom(), g.id, m.GetTerm(), g.h.cfg.NodeID, m.GetCommit(), c.last)
}

func (g *Group) checkAppendRespLocked(m *raftpb.Message) error {
	c := &g.mu.core
	if m.GetTerm() != c.term || m.GetReject() || m.GetIndex() <= c.last {
		return nil
	}
	if g.core.HasReady() {
		return errNeedsReady
	}
	return fmt.Errorf("node %d acknowledges entry %d in term %d, but the log ends at %d", m.GetFrom(), m.GetIndex(), m.GetTerm(), c.last)
}

func (g *Group) checkHeartbeatRespLocked(m *raftpb.Message) error {
	ctx := m.GetContext()
	if len(ctx) == 0 || m.GetTerm() != g.mu.core.term {
		return nil
	}
	if len(ctx) != 8 {
		return fmt.Errorf("heartbeat response from node %d has a context of %d bytes, want 8", m.GetFrom(), len(ctx))
	}
	// The core counts the read rounds of a term, and slices by that count.
	var n uint64
	for i := range ctx {
		n |= uint64(ctx[i]) << (8 * i)
	}
	if n > g.mu.core.readSeq {
		return fmt.Errorf("heartbeat response from node %d confirms read %d, but there were %d in this term", m.GetFrom(), n, g.mu.core.readSeq)
	}
	return nil
}

func checkSnapshot(m *raftpb.Message) error {
	meta := m.GetSnapshot().GetMetadata()
	if meta.GetIndex() == 0 || meta.GetTerm() == 0 || meta.GetTerm() > m.GetTerm() {
		return fmt.Errorf("snapshot from node %d is of index %d term %d in a message of term %d",
			m.GetFrom(), meta.GetIndex(), meta.GetTerm(), m.GetTerm())
	}
	if meta.GetConfState() == nil {
		return fmt.Errorf("snapshot from node %d has no configuration", m.GetFrom())
	}
	if err := checkConfState(meta.GetConfState()); err != nil {
		return fmt.Errorf("snapshot from node %d: %w", m.GetFrom(), err)
	}
	return nil
}
