package raft

import (
	"time"

	etcdraft "go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
)

// Status is what a group knew a moment ago. Leader, Term and Leading belong
// together; the others may be a little newer or older.
type Status struct {
	ID         GroupID
	Leader     NodeID // 0: unknown
	Term       uint64
	Leading    bool
	Quiesced   bool // see quiesce.go
	Commit     uint64
	Applied    uint64
	FirstIndex uint64 // of the log
	LastIndex  uint64 // durable
	ConfigID   uint64
	Conf       *raftpb.ConfState // shared: not to be changed
	// ConfigSince is when this replica applied the configuration, or opened with it.
	ConfigSince time.Time
	// Followers is set while leading, as of the last tick.
	Followers []FollowerProgress // shared: not to be changed
}

// FollowerProgress is what a leader knows of another replica.
type FollowerProgress struct {
	Node     NodeID
	Match    uint64 // it has the log up to here
	Next     uint64
	Learner  bool
	Active   bool // heard within the last election timeout: in this term, or its node while quiesced
	Snapshot bool // it is being sent a snapshot
}

// Status is cheap.
func (g *Group) Status() Status {
	r, conf := g.role.Load(), g.config.Load()
	s := Status{
		ID: g.id, Quiesced: g.quiesced.Load() != 0, Leader: r.Leader, Term: r.Term, Leading: r.Leading,
		Commit: g.commit.Load(), Applied: g.applied.Load(),
		ConfigID: conf.id, Conf: conf.conf, ConfigSince: conf.since,
	}
	s.FirstIndex, s.LastIndex = g.storage.bounds()
	if p := g.progress.Load(); p != nil && r.Leading {
		s.Followers = *p
	}
	return s
}

// publishRoleLocked refreshes role; p may be nil when nobody is to be told.
func (g *Group) publishRoleLocked(p *pass) {
	c := &g.mu.core
	next := &role{Leader: NodeID(c.lead), Term: c.term, Leading: c.leadTerm != 0}
	old := g.role.Swap(next)
	if p == nil || (old.Leader == next.Leader && old.Term == next.Term) {
		return
	}
	if f := g.h.cfg.Hooks.OnLeaderChange; f != nil {
		p.events = append(p.events, func() { f(g.id, next.Leader, next.Term) })
	}
}

// heardOfLocked tells whether a node said anything to this leader of late. The core's own
// mark of that is not it: each check of the quorum takes it back from everybody, and who
// looked just then would take all for dead. Who has just begun to lead does not know yet,
// and takes all for living.
func (g *Group) heardOfLocked(n NodeID) bool {
	c := &g.mu.core
	return c.ticks-max(g.mu.heard[n], c.leadSince) <= uint64(g.h.cfg.ElectionTicks)
}

func (g *Group) publishProgressLocked() {
	var all []FollowerProgress
	self := uint64(g.h.cfg.NodeID)
	g.core.WithProgress(func(id uint64, t etcdraft.ProgressType, pr tracker.Progress) {
		if id == self {
			return
		}
		all = append(all, FollowerProgress{
			Node: NodeID(id), Match: pr.Match, Next: pr.Next,
			Learner:  t == etcdraft.ProgressTypeLearner,
			Active:   g.heardOfLocked(NodeID(id)),
			Snapshot: pr.State == tracker.StateSnapshot,
		})
	})
	g.progress.Store(&all)
}
