package raft

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"

	etcdraft "go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
)

// Host runs the groups of one node. Its methods may be called from any goroutine.
type Host struct {
	cfg   Config
	log   *slog.Logger
	count counters
	ids   atomic.Uint64 // of proposals and reads

	writer  logWriter
	ready   runQueue // groups whose turn a worker has to finish
	applies runQueue // groups that have something to apply
	// truncates are groups whose log may be long enough to be cut.
	truncates runQueue
	late      lateBox // appends that are put off
	holds     holds   // and those that are held back
	live      liveness
	boot      uint64 // for NodeHeartbeat
	done      chan struct{}
	wg        sync.WaitGroup

	groups atomic.Pointer[groupSet] // copied on write, under mu
	mu     struct {
		sync.Mutex
		started bool
		closed  bool
		fatal   error // why the host stopped, if not by Close
	}
}

type groupSet struct {
	byID map[GroupID]*Group
	list []*Group // in order of id
}

// NewHost checks cfg. Nothing runs before Start.
func NewHost(cfg Config) (*Host, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	h := &Host{cfg: cfg, log: cfg.Logger.With("node", uint64(cfg.NodeID)), done: make(chan struct{})}
	h.groups.Store(&groupSet{})
	h.ids.Store(cfg.Seed)
	if cfg.Seed == 0 {
		h.ids.Store(rand.Uint64())
	}
	h.boot = h.ids.Load()
	h.live.init()
	h.writer.init(h)
	h.ready.init()
	h.applies.init()
	h.truncates.init()
	h.late.init()
	h.holds.init()
	return h, nil
}

// Start begins to tick, to write and to apply.
func (h *Host) Start() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.started || h.mu.closed {
		return
	}
	h.mu.started = true
	h.wg.Go(h.writer.run)
	h.wg.Go(h.tickLoop)
	h.wg.Go(h.truncateLoop)
	h.wg.Go(func() { h.delayLoop(h.late.wake, h.cfg.CommitDelay, h.lateStep) })
	h.wg.Go(func() { h.delayLoop(h.holds.wake, h.cfg.HoldDelay, h.holdStep) })
	for range h.cfg.Workers {
		h.wg.Go(h.workLoop)
	}
	for range h.cfg.Appliers {
		h.wg.Go(h.applyLoop)
	}
}

// Close stops all groups, answers everyone who waits, and returns when the host's
// goroutines are gone. It waits for calls into the state machines and the log
// store that are under way. It returns the error that stopped the host before, if
// there was one.
func (h *Host) Close() error {
	h.mu.Lock()
	first := !h.mu.closed
	h.mu.closed = true
	h.mu.Unlock()
	if first {
		h.stopGroups(ErrClosed)
		close(h.done)
	}
	h.wg.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.fatal
}

// AddGroup opens a group from the log store and its state machine, before or after
// Start. An empty log and an applied index above 0 are a new replica with its
// initial state, or a crash while a snapshot was installed; both are set right and
// synced before the group is used.
func (h *Host) AddGroup(gc GroupConfig) (*Group, error) {
	if gc.StateMachine == nil {
		return nil, fmt.Errorf("raft: group %d: StateMachine is missing", gc.ID)
	}
	if h.Group(gc.ID) != nil {
		return nil, fmt.Errorf("raft: group %d: already there", gc.ID)
	}
	g, err := openGroup(h, gc)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.closed || h.mu.fatal != nil {
		return nil, ErrClosed
	}
	old := h.groups.Load()
	if old.byID[gc.ID] != nil {
		return nil, fmt.Errorf("raft: group %d: already there", gc.ID)
	}
	next := &groupSet{byID: maps.Clone(old.byID)}
	if next.byID == nil {
		next.byID = make(map[GroupID]*Group)
	}
	next.byID[gc.ID] = g
	next.list = append(slices.Clone(old.list), g)
	slices.SortFunc(next.list, byID)
	h.groups.Store(next)
	return g, nil
}

// RemoveGroup stops this node's replica of a group and returns when nothing of it is
// written or applied any more: then its log and state may be deleted. The log's hard
// state must be kept, though, if the replica may ever be made again under this id: it
// would forget a vote otherwise. Who waits for a proposal gets ErrOutcomeUnknown. The
// host must have been started. Errors: ErrNoGroup, and ErrClosed where the host was
// closed meanwhile.
func (h *Host) RemoveGroup(id GroupID) error {
	h.mu.Lock()
	old := h.groups.Load()
	g := old.byID[id]
	if g == nil {
		h.mu.Unlock()
		return fmt.Errorf("raft: group %d: %w", id, ErrNoGroup)
	}
	next := &groupSet{byID: maps.Clone(old.byID)}
	delete(next.byID, id)
	next.list = slices.DeleteFunc(slices.Clone(old.list), func(x *Group) bool { return x == g })
	h.groups.Store(next)
	h.mu.Unlock()

	g.removed.Store(true)
	g.stop(ErrNoGroup)
	h.late.dropGroup(id)
	// What was queued before is worked off in order: first the log, then, since a snapshot
	// gets from there to the applier, what is applied.
	written, applied := make(chan struct{}), make(chan struct{})
	h.writer.queue(&logWork{g: g, end: written})
	h.writer.wakeUp(false)
	select {
	case <-written:
	case <-h.done:
		return ErrClosed
	}
	if g.apply.add(&applyTask{end: applied}) {
		h.applies.push(g)
	}
	select {
	case <-applied:
		return nil
	case <-h.done:
		return ErrClosed
	}
}

// Group returns nil where this node has no replica of the group.
func (h *Host) Group(id GroupID) *Group { return h.groups.Load().byID[id] }

func (h *Host) groupList() []*Group { return h.groups.Load().list }

// Step takes messages that the transport received. It may process them in the
// caller's goroutine, but waits for no disk sync and no apply. What is malformed,
// not for this node, of an unknown group, or too much is dropped and counted. The
// messages are the host's from here on.
func (h *Host) Step(msgs []GroupMessage) {
	h.count.messagesIn.Add(uint64(len(msgs)))
	p := h.newPass()
	var last *Group
	for _, gm := range msgs {
		if err := checkEnvelope(h.cfg.NodeID, gm); err != nil {
			h.count.droppedInvalid.Add(1)
			h.log.Warn("raft: message dropped", "group", uint64(gm.Group), "err", err)
			continue
		}
		g := last
		if g == nil || g.id != gm.Group {
			if g = h.Group(gm.Group); g == nil {
				h.count.droppedNoGroup.Add(1)
				continue
			}
		}
		if !g.inbox.addMessage(gm, h.cfg.MaxInboxMessages) {
			h.count.droppedFull.Add(1)
			continue
		}
		if g != last {
			p.add(g)
			last = g
		}
	}
	p.run()
}

// ReportUnreachable tells all groups that messages to a node were lost, so that
// leaders stop to send ahead of what the node acknowledges. It never blocks.
func (h *Host) ReportUnreachable(node NodeID) {
	p := h.newPass()
	for _, g := range h.groupList() {
		if g.quiesced.Load() != 0 && !g.config.Load().has(node) {
			continue
		}
		if g.role.Load().Leading && g.inbox.addLost(node) {
			p.add(g)
		}
	}
	p.run()
}

func (h *Host) tickLoop() {
	t := h.cfg.Clock.NewTicker(h.cfg.TickInterval)
	defer t.Stop()
	for {
		select {
		case <-t.C():
			h.tick()
		case <-h.done:
			return
		}
	}
}

// groupsPerPass bounds how long a group's turn is held for the sake of others
// whose messages go out in the same call.
const groupsPerPass = 32

// tick lets all groups know that a tick has passed, but for those that are quiesced.
func (h *Host) tick() {
	stalled := h.writer.stalled()
	if stalled {
		h.count.diskStalls.Add(1)
	}
	out := h.live.tick(uint64(h.cfg.ElectionTicks))
	h.sendHeartbeats(out.ticks)
	for chunk := range slices.Chunk(h.groupList(), groupsPerPass) {
		p := h.newPass()
		for _, g := range chunk {
			leaves := stalled && g.role.Load().Leading
			if g.quiesced.Load() != 0 {
				if !leaves && !out.concern(g) {
					if out.ticks%truncateEveryTicks == 0 {
						g.considerTruncation() // the state may have been flushed since
					}
					continue
				}
				g.inbox.addWake()
			}
			g.inbox.addTick()
			if leaves {
				g.inbox.addOp((*Group).leaveToOthersLocked)
			}
			p.add(g)
		}
		p.run()
	}
	// Commits that were put off are written now.
	h.writer.onTick()
}

func (h *Host) workLoop() {
	for h.workStep(true) {
	}
}

// workStep finishes the turn of one group. Without wait it returns false when
// there is none.
func (h *Host) workStep(wait bool) bool {
	g := h.ready.pop(wait, h.done)
	if g == nil {
		return false
	}
	p := h.newPass()
	p.takeOver(g)
	p.run()
	return true
}

// fail stops the host because of an error that it can not go on with. It must not
// be called with a group's lock held.
func (h *Host) fail(g *Group, err error) {
	if g.removed.Load() {
		return
	}
	h.mu.Lock()
	if h.mu.fatal != nil || h.mu.closed {
		h.mu.Unlock()
		return
	}
	h.mu.fatal = err
	h.mu.Unlock()
	h.log.Error("raft: this node stops", "group", uint64(g.id), "err", err)
	h.stopGroups(err)
	if f := h.cfg.Hooks.OnFatal; f != nil {
		f(g.id, err)
	}
}

func (h *Host) failed() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.fatal != nil
}

func (h *Host) stopGroups(err error) {
	for _, g := range h.groupList() {
		g.stop(err)
	}
}

// coreConfig is how every group runs etcd's raft. What is fixed here is what the
// read protocol rests on; see DESIGN.md.
func (h *Host) coreConfig(g *Group, applied uint64) *etcdraft.Config {
	return &etcdraft.Config{
		ID:                        uint64(h.cfg.NodeID),
		ElectionTick:              h.cfg.ElectionTicks,
		HeartbeatTick:             h.cfg.HeartbeatTicks,
		Storage:                   g.storage,
		Applied:                   applied,
		AsyncStorageWrites:        true,
		MaxSizePerMsg:             h.cfg.MaxMessageBytes,
		MaxCommittedSizePerReady:  h.cfg.MaxApplyingBytes,
		MaxUncommittedEntriesSize: h.cfg.MaxUncommittedBytes,
		MaxInflightMsgs:           h.cfg.MaxInflightMessages,
		MaxInflightBytes:          h.cfg.MaxInflightBytes,
		CheckQuorum:               true,
		PreVote:                   true,
		ReadOnlyOption:            etcdraft.ReadOnlySafe,
		Logger:                    coreLogger{h.log.With("group", uint64(g.id))},
		DisableProposalForwarding: true,
		StepDownOnRemoval:         true,
	}
}

// runQueue is a FIFO of groups. A group is in it at most once, by its owner's care.
type runQueue struct {
	mu struct {
		sync.Mutex
		groups []*Group
	}
	wake chan struct{} // capacity 1: there may be something
}

func (q *runQueue) init() { q.wake = make(chan struct{}, 1) }

func (q *runQueue) push(g *Group) {
	q.mu.Lock()
	q.mu.groups = append(q.mu.groups, g)
	q.mu.Unlock()
	signal(q.wake)
}

// pop returns nil when done is closed, or when there is nothing and it may not
// wait.
func (q *runQueue) pop(wait bool, done <-chan struct{}) *Group {
	for {
		select {
		case <-done:
			return nil // what is queued is not begun any more
		default:
		}
		q.mu.Lock()
		if n := len(q.mu.groups); n > 0 {
			g := q.mu.groups[0]
			q.mu.groups[0] = nil
			q.mu.groups = q.mu.groups[1:]
			q.mu.Unlock()
			if n > 1 {
				signal(q.wake) // for the next worker
			}
			return g
		}
		q.mu.Unlock()
		if !wait {
			return nil
		}
		select {
		case <-q.wake:
		case <-done:
			return nil
		}
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// envelope fields that every message must have right, whatever its group.
func checkEnvelope(self NodeID, gm GroupMessage) error {
	m := gm.Message
	switch {
	case m == nil:
		return errNilMessage
	case m.GetTo() != uint64(self):
		return fmt.Errorf("%v from node %d is for node %d, this is node %d", m.GetType(), m.GetFrom(), m.GetTo(), self)
	case m.GetFrom() == 0 || m.GetFrom() == uint64(self) || m.GetFrom() >= maxNodeID:
		return fmt.Errorf("%v claims to be from node %d", m.GetType(), m.GetFrom())
	case !peerMessage(m.GetType()):
		return fmt.Errorf("%v from node %d is not sent between replicas", m.GetType(), m.GetFrom())
	case m.GetTerm() == 0:
		return fmt.Errorf("%v from node %d has no term", m.GetType(), m.GetFrom())
	}
	return nil
}

// peerMessage lists what replicas send each other. All else is local to a node, or
// forwarding, which is off.
func peerMessage(t raftpb.MessageType) bool {
	switch t {
	case raftpb.MsgApp, raftpb.MsgAppResp, raftpb.MsgVote, raftpb.MsgVoteResp,
		raftpb.MsgPreVote, raftpb.MsgPreVoteResp, raftpb.MsgSnap,
		raftpb.MsgHeartbeat, raftpb.MsgHeartbeatResp, raftpb.MsgTimeoutNow:
		return true
	}
	return false
}
