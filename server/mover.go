package server

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.etcd.io/raft/v3/raftpb"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

// The leader of a shard moves its replicas to where group 0 wishes them. It alone can
// change the configuration and sees how far a learner is; and since each step is decided
// from the configuration and the wish, with nothing remembered in between, whoever leads
// next goes on where this one stopped.

const (
	moverPause = 200 * time.Millisecond
	// moveStepWait bounds one step of a move.
	moveStepWait = 5 * time.Second
	// learnerPatience is how long a learner may stay unheard of before it is given up: its
	// node may have lost what was made there.
	learnerPatience = time.Minute
	// straySince is how long an empty replica that nobody wants is kept: its leader may be
	// about to speak to it.
	straySince = time.Minute
	// leavePause is before the leader is asked once more whether a replica was left.
	leavePause = time.Second
)

// moveStep is what is to be done next for one shard. At most one field is set, but for
// enter and leave, which go together.
type moveStep struct {
	learn   uint64   // a node that gets an empty replica, and learns
	forget  uint64   // a learner that nobody wants
	enter   []uint64 // learners that get a vote
	leave   []uint64 // voters that go
	handTo  uint64   // who is to lead
	endOver bool     // the joint configuration is to be left
}

func (s moveStep) none() bool {
	return s.learn == 0 && s.forget == 0 && len(s.enter) == 0 && len(s.leave) == 0 && s.handTo == 0 && !s.endOver
}

// planMove chooses the next step from the configuration and the wish. caughtUp tells of
// another member whether it has nearly all.
//
// Replicas come first as learners and are given their votes together, and others lose
// theirs, in one joint change: at no time is there one copy less than before or after. A
// leader that is to go hands over within the joint configuration, where the others can
// lead already.
func planMove(self uint64, conf *raftpb.ConfState, wish []uint64, caughtUp func(uint64) bool) moveStep {
	voters, learners := conf.GetVoters(), conf.GetLearners()
	if len(conf.GetVotersOutgoing()) > 0 {
		if slices.Contains(voters, self) {
			return moveStep{endOver: true}
		}
		return moveStep{handTo: firstOf(voters, caughtUp)}
	}
	if len(wish) == 0 {
		return moveStep{}
	}
	for _, id := range learners {
		if !slices.Contains(wish, id) {
			return moveStep{forget: id}
		}
	}
	var step moveStep
	ready := true
	for _, id := range wish {
		switch {
		case slices.Contains(voters, id):
		case !slices.Contains(learners, id):
			return moveStep{learn: id}
		case caughtUp(id):
			step.enter = append(step.enter, id)
		default:
			ready = false
		}
	}
	if !ready {
		return moveStep{}
	}
	for _, id := range voters {
		if !slices.Contains(wish, id) {
			step.leave = append(step.leave, id)
		}
	}
	return step
}

func firstOf(ids []uint64, f func(uint64) bool) uint64 {
	if i := slices.IndexFunc(ids, f); i >= 0 {
		return ids[i]
	}
	return 0
}

// mover moves, side by side, the shards that this node leads, and lets go of replicas
// that have been left. How many move at once is up to who wishes.
func (n *Node) mover(ctx context.Context) {
	tick := n.cfg.Clock.NewTicker(moverPause)
	defer tick.Stop()
	var busy sync.Map // shards in the works
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		select {
		case <-tick.C():
		case <-n.moverWake:
		case <-ctx.Done():
			return
		}
		if !n.registry.written() {
			continue // nobody has a wish
		}
		for _, sh := range n.localShards() {
			st := sh.g.Status()
			if !st.Leading {
				if _, working := busy.Load(sh.number); !working && n.seemsLeft(sh, st) {
					busy.Store(sh.number, nil)
					wg.Go(func() {
						defer busy.Delete(sh.number)
						if !n.leaveIfLeft(ctx, sh) {
							pause(ctx, leavePause)
						}
					})
				}
				continue
			}
			if n.planMoveOf(sh, st).none() {
				continue
			}
			if _, working := busy.LoadOrStore(sh.number, nil); working {
				continue
			}
			wg.Go(func() {
				defer busy.Delete(sh.number)
				step, cancel := context.WithTimeout(ctx, moveStepWait)
				defer cancel()
				err := n.takeMoveStep(step, sh)
				if err != nil && ctx.Err() == nil && !errors.Is(err, raft.ErrNotLeader) && !errors.Is(err, raft.ErrConfChangeRefused) {
					n.log.Info("a move does not go on now; it will be tried again", "shard", sh.number, "err", err)
				}
			})
		}
	}
}

func (n *Node) planMoveOf(sh *shard, st raft.Status) moveStep {
	step := planMove(n.id(), st.Conf, n.shardMap.wish(sh.number), func(id uint64) bool { return caughtUp(st, id) })
	if step.none() {
		step.forget = n.staleLearner(sh, st)
	}
	return step
}

// caughtUp tells whether a follower has nearly everything, as its leader sees it.
func caughtUp(st raft.Status, id uint64) bool {
	for _, f := range st.Followers {
		if uint64(f.Node) == id {
			return f.Active && !f.Snapshot && f.Match > 0 && f.Match+caughtUpEntries >= st.Commit
		}
	}
	return false
}

// staleLearner is a learner that was not heard of for too long; 0: there is none.
func (n *Node) staleLearner(sh *shard, st raft.Status) uint64 {
	now := n.cfg.Clock.Now()
	for _, f := range st.Followers {
		if !f.Learner || f.Active || f.Snapshot {
			sh.unheard.Delete(f.Node)
			continue
		}
		since, _ := sh.unheard.LoadOrStore(f.Node, now)
		if now.Sub(since.(time.Time)) > learnerPatience {
			sh.unheard.Delete(f.Node)
			return uint64(f.Node)
		}
	}
	return 0
}

func (n *Node) takeMoveStep(ctx context.Context, sh *shard) error {
	// The wish may have changed, and this node may have been deposed without knowing.
	if _, err := sh.g.ReadIndex(ctx); err != nil {
		return err
	}
	st := sh.g.Status()
	step := n.planMoveOf(sh, st)
	var changes []*raftpb.ConfChangeSingle
	add := func(kind raftpb.ConfChangeType, ids ...uint64) {
		for _, id := range ids {
			changes = append(changes, &raftpb.ConfChangeSingle{Type: kind.Enum(), NodeId: new(id)})
		}
	}
	transition := raftpb.ConfChangeTransitionAuto
	switch {
	case step.none() || !st.Leading:
		return nil
	case step.handTo != 0:
		return sh.g.TransferLeader(ctx, raft.NodeID(step.handTo))
	case step.endOver: // no changes
	case step.learn != 0:
		if _, err := n.askReplica(ctx, sh, st, step.learn, true); err != nil {
			return err
		}
		add(raftpb.ConfChangeAddLearnerNode, step.learn)
	case step.forget != 0:
		add(raftpb.ConfChangeRemoveNode, step.forget)
	default:
		// What a follower acknowledged counts for its vote. That it still has it is asked of
		// itself: an acknowledgement of a replica that was here before may have come late.
		for _, f := range st.Followers {
			if !slices.Contains(step.enter, uint64(f.Node)) {
				continue
			}
			have, err := n.askReplica(ctx, sh, st, uint64(f.Node), false)
			if err != nil {
				return err
			}
			if !have.GetExists() || have.GetLastIndex() < f.Match || have.GetApplied()+caughtUpEntries < st.Commit {
				return nil // not yet
			}
		}
		transition = raftpb.ConfChangeTransitionJointExplicit
		add(raftpb.ConfChangeAddNode, step.enter...)
		add(raftpb.ConfChangeRemoveNode, step.leave...)
	}
	err := sh.g.ProposeConfChange(ctx, &raftpb.ConfChangeV2{Transition: transition.Enum(), Changes: changes})
	if err == nil {
		n.log.Info("a shard's replicas change", "shard", sh.number, "learns", step.learn, "no longer learns", step.forget, "enter", step.enter, "leave", step.leave, "done", step.endOver)
		n.wakeMover()
	}
	return err
}

// askReplica asks a node after its replica, or to make an empty one.
func (n *Node) askReplica(ctx context.Context, sh *shard, st raft.Status, node uint64, makeIt bool) (*kvdv1.ReplicaResponse, error) {
	conn, err := n.peers.connTo(raft.NodeID(node))
	if err != nil {
		return nil, err
	}
	return kvdv1.NewPeerClient(conn).Replica(ctx, &kvdv1.ReplicaRequest{
		From: n.self(), ToIncarnation: n.recorded(node), Shard: sh.number, Term: st.Term, ConfigId: st.ConfigID, Make: makeIt,
	})
}

// seemsLeft tells whether the shard has left this replica, as far as group 0 knows: a
// configuration was reported that is newer than the replica's own, or the same, and has no
// part for this node, and nobody wishes one here.
func (n *Node) seemsLeft(sh *shard, st raft.Status) bool {
	at, me := n.shardMap.whereabouts(sh.number), n.id()
	if holds(at, me) || slices.Contains(n.shardMap.wish(sh.number), me) || at.GetConfigId() < st.ConfigID {
		return false
	}
	// An empty one may have been made a moment ago, for a wish that is not known here yet.
	return st.ConfigID != 0 || n.cfg.Clock.Now().Sub(sh.made) >= straySince
}

// leaveIfLeft lets a replica go that its shard has left, if the shard's present leader
// says so too: what is deleted does not come back, and group 0 only repeats what it was
// told. Where no leader answers the replica stays. It returns false where it does.
func (n *Node) leaveIfLeft(ctx context.Context, sh *shard) bool {
	at := n.askConfiguration(ctx, sh.number)
	n.replicas.Lock()
	defer n.replicas.Unlock()
	st := sh.g.Status()
	if n.shard(sh.number) != sh || at == nil || holds(at, n.id()) || at.GetConfigId() < st.ConfigID || !n.seemsLeft(sh, st) {
		return false
	}
	if err := n.dropReplicaLocked(sh); err != nil && !errors.Is(err, raft.ErrClosed) {
		n.fail(err)
	}
	return true
}

// askConfiguration asks all members which configuration a shard has; its leader knows. nil:
// nobody did.
func (n *Node) askConfiguration(ctx context.Context, number uint32) *kvdv1.ShardReport {
	ctx, cancel := context.WithTimeout(ctx, moveStepWait)
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	var newest *kvdv1.ShardReport
	for _, p := range n.others() {
		wg.Go(func() {
			conn, err := n.peers.connAt(p)
			if err != nil {
				return
			}
			r, err := kvdv1.NewPeerClient(conn).Configuration(ctx, &kvdv1.ConfigurationRequest{From: n.self(), ToIncarnation: n.recorded(p.NodeID), Shard: number})
			if err != nil || !n.isMember(r.GetSelf(), p.NodeID) || r.GetReport().GetShard() != number || len(r.GetReport().GetVoters()) == 0 {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if r.GetReport().GetConfigId() > newest.GetConfigId() {
				newest = r.GetReport()
			}
		})
	}
	wg.Wait()
	return newest
}

// Configuration implements kvdv1.PeerServer.
func (n *Node) Configuration(ctx context.Context, req *kvdv1.ConfigurationRequest) (*kvdv1.ConfigurationResponse, error) {
	if err := n.checkPeer(req.GetFrom(), req.GetToIncarnation()); err != nil {
		return nil, err
	}
	if !n.ready.Load() {
		return nil, errStarting
	}
	sh := n.shard(req.GetShard())
	if sh == nil {
		return nil, failNoReplica(req.GetShard())
	}
	// It leads still, and has applied what was committed.
	if _, err := sh.g.ReadIndex(ctx); err != nil {
		return nil, failRaft(err, sh.number, sh.g)
	}
	return &kvdv1.ConfigurationResponse{Self: n.self(), Report: reportOf(sh.number, sh.g.Status())}, nil
}

func (n *Node) wakeMover() {
	select {
	case n.moverWake <- struct{}{}:
	default:
	}
}
