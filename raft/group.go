package raft

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	etcdraft "go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/kvd-io/kvd/internal/chaos"
)

// GroupConfig names a group and its state.
type GroupConfig struct {
	ID           GroupID
	StateMachine StateMachine
}

// Group is this node's replica of one group. Its methods may be called from any
// goroutine.
type Group struct {
	h       *Host
	id      GroupID
	sm      StateMachine
	storage *coreStorage
	inbox   inbox
	turn    turn
	apply   applyQueue
	written writtenState // the log writer's

	role     atomic.Pointer[role]
	commit   atomic.Uint64
	applied  atomic.Uint64
	config   atomic.Pointer[config]
	progress atomic.Pointer[[]FollowerProgress]

	// quiesced: no tick is due. 0: it is not; else liveness.boots, one more, as it was then.
	// Set under the group's lock.
	quiesced atomic.Uint64

	wantTruncate atomic.Bool
	removed      atomic.Bool // from the host: what fails now is of no interest
	logSize      logSize
	needs        logNeeds

	// mu is held while the core is used. Nothing under it waits for a disk sync, an
	// apply, or the network.
	mu struct {
		sync.Mutex
		core     coreState
		waiters  map[uint64]*proposal // proposed and not yet answered
		reads    readers
		handover []*transfer
		held     heldState
		quiesce  quiesceState
		heard    map[NodeID]uint64 // while leading: ticks, when a node said something last
		stopped  error             // why nothing more is done
	}
	core *etcdraft.RawNode // guarded by mu
}

// coreState is what the last Ready said.
type coreState struct {
	term      uint64
	lead      uint64
	leadTerm  uint64            // the term this replica leads, else 0
	leadSince uint64            // in ticks: when leadTerm changed
	serving   uint64            // as published
	last      uint64            // last index of the log, unstable part included
	readSeq   uint64            // read rounds begun in this term
	ticks     uint64            // more than an election timeout from the start, so that what was before it has a time
	queuedHS  *raftpb.HardState // last one given to the log writer
	acked     acknowledged      // see late.go
}

// role changes seldom and together.
type role struct {
	Leader  NodeID
	Term    uint64
	Leading bool
}

// config is the configuration and the index of its entry: they change together, since
// readers take one for the proof of the other.
type config struct {
	id    uint64
	conf  *raftpb.ConfState
	since time.Time
}

func openGroup(h *Host, gc GroupConfig) (*Group, error) {
	st, err := gc.StateMachine.Open()
	if err != nil {
		return nil, fmt.Errorf("raft: group %d: open state: %w", gc.ID, err)
	}
	if st.Conf == nil {
		st.Conf = &raftpb.ConfState{}
	}
	if err := checkConfState(st.Conf); err != nil {
		return nil, fmt.Errorf("raft: group %d: configuration in the state: %w", gc.ID, err)
	}
	ls, err := h.cfg.Log.Open(gc.ID)
	if err != nil {
		return nil, fmt.Errorf("raft: group %d: open log: %w", gc.ID, err)
	}
	if ls, err = reconcile(gc.ID, h.cfg.Log, ls, st); err != nil {
		return nil, err
	}
	if chaos.Broken(chaos.ForgetTerm) && ls.Hard != nil {
		ls.Hard = &raftpb.HardState{Term: new(uint64(0)), Vote: new(uint64(0)), Commit: ls.Hard.Commit}
	}
	g := &Group{h: h, id: gc.ID, sm: gc.StateMachine}
	g.storage = newCoreStorage(g.id, h.cfg.Log, ls, st)
	g.written.hard, g.written.truncated = ls.Hard, ls.Truncated
	g.mu.waiters = make(map[uint64]*proposal)
	g.mu.heard = make(map[NodeID]uint64)
	g.mu.core.term = ls.Hard.GetTerm()
	g.mu.core.last = ls.Last
	g.mu.core.ticks = uint64(h.cfg.ElectionTicks) + 1
	g.mu.core.queuedHS = ls.Hard
	g.commit.Store(ls.Hard.GetCommit())
	g.applied.Store(st.Index)
	g.config.Store(&config{st.ConfigID, st.Conf, g.h.cfg.Clock.Now()})
	g.role.Store(&role{Term: ls.Hard.GetTerm()})
	// Before the core can answer anyone.
	g.sm.SetTerm(ls.Hard.GetTerm())
	g.sm.SetServing(0)
	err = g.guard(func() error {
		var err error
		g.core, err = etcdraft.NewRawNode(h.coreConfig(g, st.Index))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("raft: group %d: %w", gc.ID, err)
	}
	return g, nil
}

// ID is the group's.
func (g *Group) ID() GroupID { return g.id }

// kick has the inbox processed, here and now if nobody else is at it.
func (g *Group) kick() {
	p := g.h.newPass()
	p.add(g)
	p.run()
}

// Propose replicates data and returns when this replica has applied it: what
// StateMachine.Apply returned for it, and its index. data is copied.
//
// Errors: ErrNotLeader, ErrOverloaded, ErrClosed and an error of ctx alone mean
// that nothing was proposed. ErrOutcomeUnknown (it may wrap an error of ctx) means
// that the proposal may be applied, now, later or never.
func (g *Group) Propose(ctx context.Context, data []byte) (result any, index uint64, err error) {
	if err := ctx.Err(); err != nil {
		return nil, 0, err
	}
	g.h.count.proposals.Add(1)
	r := g.propose(ctx, g.newProposal(data))
	return r.value, r.index, r.err
}

// ProposeConfChange replicates a change of the group's members and returns when
// this replica has applied it. cc.Context is kept for the host's own use. A change
// that can not follow the present configuration, or comes while another is under
// way, is refused with ErrConfChangeRefused. Else as Propose.
func (g *Group) ProposeConfChange(ctx context.Context, cc *raftpb.ConfChangeV2) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	w, err := g.newConfProposal(cc)
	if err != nil {
		return err
	}
	return g.propose(ctx, w).err
}

func (g *Group) propose(ctx context.Context, w *proposal) outcome {
	if !g.inbox.addProposal(w, g.h.cfg.MaxUncommittedBytes) {
		g.h.count.overloaded.Add(1)
		return outcome{err: ErrOverloaded}
	}
	g.kick()
	var r outcome
	select {
	case r = <-w.done:
	case <-ctx.Done():
		r = g.abandon(w, ctx.Err())
	}
	switch {
	case errors.Is(r.err, ErrOutcomeUnknown):
		g.h.count.unknown.Add(1)
	case errors.Is(r.err, ErrOverloaded):
		g.h.count.overloaded.Add(1)
	}
	return r
}

// ReadIndex returns an index such that a state which holds it holds everything
// that was committed before the call; this replica's state does when it returns.
// It works at the leader only, which it confirms with a quorum of the group.
//
// Errors: ErrNotLeader, ErrNotReady (a new leader has not yet applied an entry of
// its own term), ErrClosed, those of ctx.
func (g *Group) ReadIndex(ctx context.Context) (index uint64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	g.h.count.reads.Add(1)
	r := &read{done: make(chan outcome, 1)}
	g.inbox.addRead(r)
	g.kick()
	select {
	case o := <-r.done:
		return o.index, o.err
	case <-ctx.Done():
		r.gone.Store(true)
		return 0, ctx.Err()
	}
}

// TransferLeader hands leadership to a voter and returns when this replica knows
// it to lead. What is under way is finished first, for half an election timeout at
// most; new proposals are refused meanwhile. ErrNotLeader: this replica did not lead. ErrTransfer: after two election timeouts, or because another was elected.
func (g *Group) TransferLeader(ctx context.Context, to NodeID) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	t := &transfer{to: to, done: make(chan error, 1)}
	g.inbox.addTransfer(t)
	g.kick()
	select {
	case err := <-t.done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Campaign starts an election, if this replica may.
func (g *Group) Campaign() {
	g.inbox.addOp(func(g *Group) { _ = g.core.Campaign() })
	g.kick()
}

// stop ends the group: everyone who waits is answered, nothing more is done.
func (g *Group) stop(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mu.stopped != nil {
		return
	}
	g.mu.stopped = err
	if g.mu.core.serving != 0 {
		g.mu.core.serving = 0
		g.sm.SetServing(0)
	}
	g.mu.core.leadTerm = 0
	g.publishRoleLocked(nil)
	g.failProposalsLocked(fmt.Errorf("%w: %w", ErrOutcomeUnknown, err))
	g.mu.reads.fail(ErrClosed)
	g.failTransfersLocked(ErrClosed)
	g.refuse(g.inbox.take())
}

// refuse answers what was never begun.
func (g *Group) refuse(in work) {
	for _, w := range in.proposals {
		w.answer(outcome{err: ErrClosed})
	}
	for _, r := range in.reads {
		r.answer(outcome{err: ErrClosed})
	}
	for _, t := range in.transfers {
		t.done <- ErrClosed
	}
}
