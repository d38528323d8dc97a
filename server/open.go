package server

import (
	"fmt"
	"time"

	"go.etcd.io/raft/v3/raftpb"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
)

// commitDelay is how long a follower may stay behind what is committed when nothing
// else is sent to it.
const commitDelay = 5 * time.Millisecond

// holdDelay is how long a follower that is not needed for the quorum may wait for entries,
// and how much later a write is answered when a follower that was needed fails.
const holdDelay = 2 * time.Millisecond

// openGroups opens this node's replicas, in the order of their shards: their control
// records lie in the same order, so that neighbours are read by one READ.
func (n *Node) openGroups() (err error) {
	hosting := raft.Config{
		NodeID: raft.NodeID(n.id()), Log: logStore{n.engine}, Transport: n.transport, Clock: n.cfg.Clock, Logger: n.log,
		TickInterval: n.cfg.TickInterval, ElectionTicks: n.cfg.ElectionTicks, QuiesceTicks: max(n.cfg.QuiesceTicks, 0),
		CommitDelay: commitDelay, HoldDelay: holdDelay,
		LogRetainEntries: n.cfg.LogRetainEntries, LogRetainBytes: n.cfg.LogRetainBytes,
		DiskLow: func() bool { return n.disk.refusal() != "" },
		Hooks: raft.Hooks{
			OnLeaderChange: func(g raft.GroupID, leader raft.NodeID, term uint64) {
				n.metrics.elections.Inc()
				n.leaders.changed()
				n.topology.stir()
			},
			OnFatal: func(g raft.GroupID, err error) { n.fail(fmt.Errorf("group %d: %w", g, err)) },
		},
	}
	if n.core != nil {
		hosting.Seed = n.core.Seed
	}
	n.host, err = raft.NewHost(hosting)
	if err != nil {
		return err
	}
	m := n.identity.Load().manifest
	local, err := n.localGroups(m)
	if err != nil {
		return err
	}
	if err := n.ensureInitialState(m, local); err != nil {
		return err
	}
	n.namespaces, n.registry = newNamespaces(n.arena), newRegistry(m, n.learn)
	n.shardMap = newShardMap(m, n.wakeMover)
	n.meta = newMachine(0, n.engine.Group(0))
	n.meta.content = metaContent{n.namespaces, n.tokens, n.registry, n.shardMap, n.engine.Group(0)}
	for _, id := range local {
		if id == 0 {
			if _, err := n.host.AddGroup(raft.GroupConfig{ID: 0, StateMachine: n.meta}); err != nil {
				return fmt.Errorf("server: open group 0: %w", err)
			}
			continue
		}
		if err := n.openShard(uint32(id)); err != nil {
			return err
		}
	}
	n.goOnReceiving()
	return nil
}

// markOpened remembers that every group has a durable hard state.
func (n *Node) markOpened() error {
	n.adoptMu.Lock()
	defer n.adoptMu.Unlock()
	id := *n.identity.Load()
	if id.opened {
		return nil
	}
	id.opened = true
	if err := n.dir.saveIdentity(&id); err != nil {
		return err
	}
	n.identity.Store(&id)
	return nil
}

// raiseFormat keeps versions off this directory that would go by the manifest alone.
func (n *Node) raiseFormat() error {
	if n.dir == nil {
		return nil
	}
	n.adoptMu.Lock()
	defer n.adoptMu.Unlock()
	id := *n.identity.Load()
	if id.format >= identityFormat {
		return nil
	}
	id.format = identityFormat
	if err := n.dir.saveIdentity(&id); err != nil {
		return err
	}
	n.identity.Store(&id)
	return nil
}

// localGroups lists, in order, the groups with a replica here. What a crash left half
// made or half deleted is finished first.
func (n *Node) localGroups(m *kvdv1.Manifest) ([]uint64, error) {
	moved, err := n.finishReplicas()
	if err != nil || moved != nil {
		return moved, err
	}
	if n.identity.Load().joined != 0 {
		return []uint64{0}, nil
	}
	var groups []uint64
	for id := uint64(0); id <= uint64(m.GetShards()); id++ {
		voters, learners := manifestPlacement(m, id)
		for _, node := range append(voters, learners...) {
			if node == n.id() {
				groups = append(groups, id)
			}
		}
	}
	return groups, nil
}

// ensureInitialState writes, once in a directory's life, the state from which every
// replica starts: index 1 of term 1, with the configuration and, in group 0, the
// default namespace.
func (n *Node) ensureInitialState(m *kvdv1.Manifest, groups []uint64) error {
	wrote := false
	var empty []uint64
	for _, id := range groups {
		g := n.engine.Group(id)
		meta, err := g.Meta()
		if err != nil {
			return err
		}
		log, err := n.engine.OpenLog(id)
		if err != nil {
			return err
		}
		if err := n.checkWhole(id, meta, log); err != nil {
			return err
		}
		if meta.Conf != nil {
			if meta.Applied == 0 && log.Hard == nil {
				empty = append(empty, id)
			}
			continue
		}
		first := engine.Meta{Conf: &raftpb.ConfState{}} // its leader brings the rest
		bornHere := n.identity.Load().joined == 0
		if !bornHere {
			empty = append(empty, id)
		} else {
			voters, learners := manifestPlacement(m, id)
			first = engine.Meta{Applied: 1, AppliedTerm: 1, ConfigID: 1, Conf: &raftpb.ConfState{Voters: voters, Learners: learners}}
		}
		b := g.NewBatch()
		err = b.SetMeta(first)
		if err == nil && id == 0 && bornHere {
			err = putNamespace(b, &kvdv1.NamespaceInfo{Id: defaultNamespaceID, Name: DefaultNamespace, OneSided: true})
		}
		if err != nil {
			b.Discard()
			return err
		}
		if err := b.Commit(); err != nil {
			return err
		}
		wrote = true
	}
	if wrote {
		if err := n.engine.Flush(); err != nil {
			return err
		}
	}
	return n.markEmpty(empty)
}

// markEmpty gives replicas that begin without anything a hard state, behind their
// durable state: from then on a log without one was lost.
func (n *Node) markEmpty(groups []uint64) error {
	if len(groups) == 0 {
		return nil
	}
	b := n.engine.NewLogBatch()
	for _, id := range groups {
		if err := b.SetHardState(id, &raftpb.HardState{Term: new(uint64(0)), Vote: new(uint64(0)), Commit: new(uint64(0))}); err != nil {
			b.Discard()
			return err
		}
	}
	return b.Commit(true)
}

// checkWhole refuses a group of which one store is missing: a replica that forgot its
// term or its vote must not take part.
func (n *Node) checkWhole(group uint64, meta engine.Meta, log engine.LogState) error {
	lost := ""
	switch {
	case meta.Conf == nil && (log.Hard != nil || n.identity.Load().opened):
		lost = "state"
	case meta.Conf != nil && log.Hard == nil && (meta.Applied > 1 || meta.Applied == 1 && n.identity.Load().opened):
		lost = "log"
	default:
		return nil
	}
	return fmt.Errorf("%w: %s has lost the %s store of group %d: if the store was only moved, put it back as it was; an older copy must not be used, for the node has promised things since; if it is lost, leave this node out", ErrDataDir, n.cfg.DataDir, lost, group)
}

// openShard opens this node's replica of a shard and lets it be found.
func (n *Node) openShard(number uint32) error {
	log, err := n.engine.OpenLog(uint64(number))
	if err != nil {
		return err
	}
	rec, err := n.arena.NewRecord(uint64(number), n.id(), log.Hard.GetTerm())
	if err != nil {
		return err
	}
	m := n.identity.Load().manifest
	sh := newShard(number, keyPlace{m.GetHashSeed(), m.GetShards()}, n.engine.Group(uint64(number)), n.arena, rec, defaultWriterLimits)
	sh.made, sh.onTopology = n.cfg.Clock.Now(), n.topology.stir
	if sh.g, err = n.host.AddGroup(raft.GroupConfig{ID: raft.GroupID(number), StateMachine: sh.machine}); err != nil {
		rec.Retire()
		return fmt.Errorf("server: open group %d: %w", number, err)
	}
	n.publishShard(number, sh)
	return nil
}
