package raft

import "sync/atomic"

// Stats counts since the host was made. Durations are sums, in nanoseconds.
type Stats struct {
	Groups  int
	Leading int
	// Quiesced groups have no tick due.
	Quiesced int

	LogBatches      uint64 // written
	LogSyncs        uint64 // of these, synced
	LogGroups       uint64 // groups in all batches
	LogEntries      uint64
	LogNanos        uint64 // in Commit
	ApplyBatches    uint64
	AppliedEntries  uint64
	ApplyNanos      uint64 // in Apply
	Proposals       uint64
	Overloaded      uint64 // proposals refused for that
	OutcomeUnknown  uint64
	ReadIndexes     uint64
	ReadIndexRounds uint64 // each confirms all reads that waited for it
	TermChanges     uint64
	LeaderStarts    uint64 // times that a group began to lead here
	MessagesIn      uint64
	MessagesOut     uint64
	SendCalls       uint64
	DroppedFull     uint64 // inbox of the group full
	DroppedInvalid  uint64 // malformed, or not for this node
	DroppedNoGroup  uint64
	SnapshotsSent   uint64
	SnapshotsFailed uint64
	SnapshotsGot    uint64
	Truncations     uint64
	DiskStalls      uint64 // ticks during which one batch took longer than an election
	Wakes           uint64 // times that a quiesced group woke
	// NodeHeartbeats are no messages of groups, and not counted among them.
	NodeHeartbeatsIn  uint64
	NodeHeartbeatsOut uint64
	Handovers         uint64 // times that a worker had to finish a group's work
}

type counters struct {
	logBatches, logSyncs, logGroups, logEntries, logNanos    atomic.Uint64
	applyBatches, appliedEntries, applyNanos                 atomic.Uint64
	proposals, overloaded, unknown, reads, readRounds        atomic.Uint64
	terms, leaderStarts                                      atomic.Uint64
	messagesIn, messagesOut, sendCalls                       atomic.Uint64
	droppedFull, droppedInvalid, droppedNoGroup              atomic.Uint64
	snapsSent, snapsFailed, snapsGot, truncations, handovers atomic.Uint64
	diskStalls, wakes, nodeHeartbeatsIn, nodeHeartbeatsOut   atomic.Uint64
}

// Stats reads the counters.
func (h *Host) Stats() Stats {
	c := &h.count
	s := Stats{
		LogBatches: c.logBatches.Load(), LogSyncs: c.logSyncs.Load(), LogGroups: c.logGroups.Load(),
		LogEntries: c.logEntries.Load(), LogNanos: c.logNanos.Load(),
		ApplyBatches: c.applyBatches.Load(), AppliedEntries: c.appliedEntries.Load(), ApplyNanos: c.applyNanos.Load(),
		Proposals: c.proposals.Load(), Overloaded: c.overloaded.Load(), OutcomeUnknown: c.unknown.Load(),
		ReadIndexes: c.reads.Load(), ReadIndexRounds: c.readRounds.Load(),
		TermChanges: c.terms.Load(), LeaderStarts: c.leaderStarts.Load(),
		MessagesIn: c.messagesIn.Load(), MessagesOut: c.messagesOut.Load(), SendCalls: c.sendCalls.Load(),
		DroppedFull: c.droppedFull.Load(), DroppedInvalid: c.droppedInvalid.Load(), DroppedNoGroup: c.droppedNoGroup.Load(),
		SnapshotsSent: c.snapsSent.Load(), SnapshotsFailed: c.snapsFailed.Load(), SnapshotsGot: c.snapsGot.Load(),
		Truncations: c.truncations.Load(), DiskStalls: c.diskStalls.Load(), Handovers: c.handovers.Load(), Wakes: c.wakes.Load(),
		NodeHeartbeatsIn: c.nodeHeartbeatsIn.Load(), NodeHeartbeatsOut: c.nodeHeartbeatsOut.Load(),
	}
	for _, g := range h.groupList() {
		s.Groups++
		if g.role.Load().Leading {
			s.Leading++
		}
		if g.quiesced.Load() != 0 {
			s.Quiesced++
		}
	}
	return s
}
