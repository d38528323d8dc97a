package raft

import (
	"fmt"

	"go.etcd.io/raft/v3/confchange"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
	"google.golang.org/protobuf/proto"
)

// decodeConfChange reads either form of a configuration entry.
func decodeConfChange(e *raftpb.Entry) (*raftpb.ConfChangeV2, error) {
	if e.GetType() == raftpb.EntryConfChange {
		var cc raftpb.ConfChange
		if err := proto.Unmarshal(e.GetData(), &cc); err != nil {
			return nil, err
		}
		return cc.AsV2(), nil
	}
	var cc raftpb.ConfChangeV2
	if err := proto.Unmarshal(e.GetData(), &cc); err != nil {
		return nil, err
	}
	return &cc, nil
}

// changerFor starts from conf as the core would.
func changerFor(conf *raftpb.ConfState) (confchange.Changer, error) {
	c := confchange.Changer{Tracker: tracker.MakeProgressTracker(1, 0)}
	cfg, progress, err := confchange.Restore(c, conf)
	if err != nil {
		return c, err
	}
	c.Tracker.Config, c.Tracker.Progress = cfg, progress
	return c, nil
}

// checkConfState says whether the core could start from conf; it panics otherwise.
func checkConfState(conf *raftpb.ConfState) error {
	c, err := changerFor(conf)
	if err != nil {
		return err
	}
	// A node that is twice in it, say.
	got := c.Tracker.ConfState()
	return got.Equivalent(conf)
}

// checkConfChange says whether cc can follow conf; the core panics otherwise. The
// answer depends on nothing else, so all replicas agree on it.
func checkConfChange(conf *raftpb.ConfState, cc *raftpb.ConfChangeV2) error {
	c, err := changerFor(conf)
	if err != nil {
		return err
	}
	switch t := cc.GetTransition(); t {
	case raftpb.ConfChangeTransitionAuto, raftpb.ConfChangeTransitionJointImplicit, raftpb.ConfChangeTransitionJointExplicit:
	default:
		return fmt.Errorf("unknown transition %d", t)
	}
	if cc.LeaveJoint() {
		_, _, err = c.LeaveJoint()
	} else if autoLeave, joint := cc.EnterJoint(); joint {
		_, _, err = c.EnterJoint(autoLeave, cc.GetChanges()...)
	} else {
		_, _, err = c.Simple(cc.GetChanges()...)
	}
	return err
}

// proposeConfLocked checks before it proposes. The core's own validation stays on
// behind it.
func (g *Group) proposeConfLocked(w *proposal) {
	if err := checkConfChange(g.config.Load().conf, w.conf); err != nil {
		w.answer(outcome{err: fmt.Errorf("raft: group %d: %w: %w", g.id, ErrConfChangeRefused, err)})
		return
	}
	_ = g.stepProposalsLocked([]*proposal{w})
}
