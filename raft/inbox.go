package raft

import (
	"slices"
	"sync"

	"go.etcd.io/raft/v3/raftpb"
)

// inbox holds what waits to be stepped into a group. Its lock is a leaf.
type inbox struct {
	mu struct {
		sync.Mutex
		work
		proposalBytes uint64
	}
}

// work is everything that can happen to a group.
type work struct {
	local     []*raftpb.Message // answers of the log writer; never dropped
	applied   []*appliedBatch
	messages  []GroupMessage // from peers
	ticks     int
	wake      bool           // from being quiesced
	release   bool           // what is held: see hold.go
	ops       []func(*Group) // run under the group's lock
	lost      []NodeID       // messages to them were lost; each once
	transfers []*transfer
	reads     []*read
	proposals []*proposal
}

// maxTicks pending at a time. A group that was stalled for longer does not make up
// for it: its peers' messages may be waiting right behind, and a burst of ticks
// would be taken for their silence.
const maxTicks = 2

func (b *inbox) take() work {
	b.mu.Lock()
	defer b.mu.Unlock()
	w := b.mu.work
	b.mu.work = work{}
	b.mu.proposalBytes = 0
	return w
}

func (b *inbox) addLocal(m *raftpb.Message) {
	b.mu.Lock()
	b.mu.local = append(b.mu.local, m)
	b.mu.Unlock()
}

func (b *inbox) addApplied(a *appliedBatch) {
	b.mu.Lock()
	b.mu.applied = append(b.mu.applied, a)
	b.mu.Unlock()
}

func (b *inbox) addMessage(m GroupMessage, limit int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.mu.messages) >= limit {
		return false
	}
	b.mu.messages = append(b.mu.messages, m)
	return true
}

func (b *inbox) addTick() {
	b.mu.Lock()
	b.mu.ticks = min(b.mu.ticks+1, maxTicks)
	b.mu.Unlock()
}

func (b *inbox) addWake() {
	b.mu.Lock()
	b.mu.wake = true
	b.mu.Unlock()
}

func (b *inbox) addRelease() {
	b.mu.Lock()
	b.mu.release = true
	b.mu.Unlock()
}

func (b *inbox) addOp(f func(*Group)) {
	b.mu.Lock()
	b.mu.ops = append(b.mu.ops, f)
	b.mu.Unlock()
}

// addLost returns false if the group knows already. A transport without a
// connection reports every call.
func (b *inbox) addLost(n NodeID) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if slices.Contains(b.mu.lost, n) {
		return false
	}
	b.mu.lost = append(b.mu.lost, n)
	return true
}

func (b *inbox) addTransfer(t *transfer) {
	b.mu.Lock()
	b.mu.transfers = append(b.mu.transfers, t)
	b.mu.Unlock()
}

func (b *inbox) addRead(r *read) {
	b.mu.Lock()
	b.mu.reads = append(b.mu.reads, r)
	b.mu.Unlock()
}

// addProposal refuses what would make the proposals not yet stepped exceed limit.
func (b *inbox) addProposal(w *proposal, limit uint64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	size := uint64(len(w.entry.GetData()))
	if b.mu.proposalBytes > 0 && b.mu.proposalBytes+size > limit {
		return false
	}
	b.mu.proposalBytes += size
	b.mu.proposals = append(b.mu.proposals, w)
	return true
}
