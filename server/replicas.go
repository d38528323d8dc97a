package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/zeebo/xxh3"
	"go.etcd.io/raft/v3/raftpb"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
)

// Replicas come to a node and leave it while it runs. Which ones it has is in a file,
// once that is something else than the manifest says: a replica whose stores are missing
// was lost if it should be there, and must not begin anew as if it had never voted.

const (
	replicasFile   = "replicas.json"
	replicasFormat = 1
)

// replicaState of a replica in the file.
type replicaState string

const (
	replicaMaking  replicaState = "making"  // its stores may be half there; it never took part
	replicaOpen    replicaState = "open"    // it takes part
	replicaLeaving replicaState = "leaving" // its stores may be half gone; it takes part no more
)

// replicas are those of a node's shards. The lock is held while one comes or goes.
type replicas struct {
	sync.Mutex
	noted map[uint32]replicaState // nil: as the manifest says
}

type replicasJSON struct {
	Format   int                     `json:"format"`
	Replicas map[uint32]replicaState `json:"replicas"`
	Sum      string                  `json:"sum"`
}

func (j replicasJSON) sum() string {
	j.Sum = ""
	b, _ := json.Marshal(j) // maps are encoded in key order
	return fmt.Sprintf("%016x", xxh3.Hash(b))
}

// replicaList is where a node notes its replicas.
type replicaList interface {
	saveReplicas(noted map[uint32]replicaState) error
	// loadReplicas returns nil where the replicas are still those of the manifest.
	loadReplicas() (map[uint32]replicaState, error)
}

// replicaList of this node: in its directory, or, of a Core, on the file system that its
// stores are on.
func (n *Node) replicaList() replicaList {
	if n.core != nil {
		return fsList{n.cfg.FS, n.cfg.DataDir} // with its defaults, which those of n.core lack
	}
	return n.dir
}

func encodeReplicas(noted map[uint32]replicaState) ([]byte, error) {
	j := replicasJSON{Format: replicasFormat, Replicas: noted}
	j.Sum = j.sum()
	b, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("server: encode the replicas: %w", err)
	}
	return append(b, '\n'), nil
}

func (d *dataDir) saveReplicas(noted map[uint32]replicaState) error {
	b, err := encodeReplicas(noted)
	if err != nil {
		return err
	}
	if err := writeDurably(d.path, replicasFile, b); err != nil {
		return fmt.Errorf("%w %s: write %s: %w", ErrDataDir, d.path, replicasFile, err)
	}
	return nil
}

func (d *dataDir) loadReplicas() (map[uint32]replicaState, error) {
	path := filepath.Join(d.path, replicasFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: read %s: %w", ErrDataDir, path, err)
	}
	return decodeReplicas(path, b)
}

func decodeReplicas(path string, b []byte) (map[uint32]replicaState, error) {
	if err := checkFormat(path, b, replicasFormat); err != nil {
		return nil, err
	}
	var j replicasJSON
	switch err := json.Unmarshal(b, &j); {
	case err != nil:
		return nil, fmt.Errorf("%w: %s is damaged (%v): without it this node can not tell a lost replica from one that left: leave this node out, and let another join", ErrDataDir, path, err)
	case j.Sum != j.sum():
		return nil, fmt.Errorf("%w: %s is damaged (check sum %s, want %s): without it this node can not tell a lost replica from one that left: leave this node out, and let another join", ErrDataDir, path, j.Sum, j.sum())
	}
	if j.Replicas == nil {
		j.Replicas = map[uint32]replicaState{}
	}
	return j.Replicas, nil
}

// shard is this node's replica of a shard, or nil.
func (n *Node) shard(number uint32) *shard { return (*n.shards.Load())[number] }

// localShards lists this node's replicas in the order of their shards.
func (n *Node) localShards() []*shard {
	m := *n.shards.Load()
	all := make([]*shard, 0, len(m))
	for _, number := range slices.Sorted(maps.Keys(m)) {
		all = append(all, m[number])
	}
	return all
}

// publishShard lets the replica be found; nil: not any more. One at a time.
func (n *Node) publishShard(number uint32, sh *shard) {
	next := maps.Clone(*n.shards.Load())
	if sh == nil {
		delete(next, number)
	} else {
		next[number] = sh
	}
	n.shards.Store(&next)
	n.topology.stir()
}

// note writes down that a replica is in a state; "": that it is not here.
func (n *Node) noteLocked(number uint32, s replicaState) error {
	next := maps.Clone(n.replicas.noted)
	if next == nil {
		next = map[uint32]replicaState{}
		for _, sh := range n.localShards() {
			next[sh.number] = replicaOpen
		}
	}
	if s == "" {
		delete(next, number)
	} else {
		next[number] = s
	}
	if err := n.raiseFormat(); err != nil {
		return err
	}
	if err := n.replicaList().saveReplicas(next); err != nil {
		return err
	}
	n.replicas.noted = next
	return nil
}

// finishReplicas ends what a crash cut off, and returns the groups of this node; nil:
// they are those of the manifest.
func (n *Node) finishReplicas() ([]uint64, error) {
	n.replicas.Lock()
	defer n.replicas.Unlock()
	noted, err := n.replicaList().loadReplicas()
	if err != nil || noted == nil {
		return nil, err
	}
	n.replicas.noted = noted
	groups := []uint64{0}
	for _, number := range slices.Sorted(maps.Keys(noted)) {
		switch noted[number] {
		case replicaLeaving:
			if err := n.deleteStores(number); err != nil {
				return nil, err
			}
			if err := n.noteLocked(number, ""); err != nil {
				return nil, err
			}
			continue
		case replicaMaking:
			if err := n.makeStores(number); err != nil {
				return nil, err
			}
			if err := n.noteLocked(number, replicaOpen); err != nil {
				return nil, err
			}
		}
		groups = append(groups, uint64(number))
	}
	return groups, nil
}

// makeStores writes what an empty replica has. If the node had one before, its term and
// vote count for this one too: they were promised under the same id.
func (n *Node) makeStores(number uint32) error {
	g := n.engine.Group(uint64(number))
	b := g.NewBatch()
	if err := b.SetMeta(engine.Meta{Conf: &raftpb.ConfState{}}); err != nil {
		b.Discard()
		return err
	}
	if err := b.Commit(); err != nil {
		return err
	}
	if err := n.engine.Flush(); err != nil {
		return err
	}
	return n.emptyLog(number)
}

// emptyLog leaves of a log its term and vote.
func (n *Node) emptyLog(number uint32) error {
	had, err := n.engine.OpenLog(uint64(number))
	if err != nil {
		return err
	}
	b := n.engine.NewLogBatch()
	err = b.Reset(uint64(number), 0, 0)
	if err == nil {
		err = b.SetHardState(uint64(number), &raftpb.HardState{Term: new(had.Hard.GetTerm()), Vote: new(had.Hard.GetVote()), Commit: new(uint64(0))})
	}
	if err != nil {
		b.Discard()
		return err
	}
	return b.Commit(true)
}

func (n *Node) deleteStores(number uint32) error {
	if err := n.emptyLog(number); err != nil {
		return err
	}
	return n.engine.Group(uint64(number)).Destroy()
}

// makeReplica makes an empty replica of a shard, of which there must be none.
func (n *Node) makeReplicaLocked(number uint32) error {
	if err := n.noteLocked(number, replicaMaking); err != nil {
		return err
	}
	if err := n.makeStores(number); err != nil {
		return err
	}
	if err := n.noteLocked(number, replicaOpen); err != nil {
		return err
	}
	if err := n.openShard(number); err != nil {
		return err
	}
	n.log.Info("a replica was made here", "shard", number)
	return nil
}

// dropReplica takes a replica from this node: its record is retired before anything of it
// goes, so no one-sided reader is confirmed by it, nor believes what it read there.
func (n *Node) dropReplicaLocked(sh *shard) error {
	number := sh.number
	if err := n.noteLocked(number, replicaLeaving); err != nil {
		return err
	}
	sh.record.Retire()
	sh.gone.Store(true)
	n.publishShard(number, nil)
	if err := n.host.RemoveGroup(raft.GroupID(number)); err != nil {
		return err
	}
	sh.applyMu.Lock()
	for _, sp := range *sh.spaces.Load() {
		sp.Drop()
	}
	sh.applyMu.Unlock()
	n.peers.forgetOutgoing(raft.GroupID(number))
	if err := sh.dropStaged(); err != nil {
		return err
	}
	if err := n.deleteStores(number); err != nil {
		return err
	}
	if err := n.noteLocked(number, ""); err != nil {
		return err
	}
	n.log.Info("a replica has left this node", "shard", number)
	return nil
}

// Replica implements kvdv1.PeerServer.
func (n *Node) Replica(_ context.Context, req *kvdv1.ReplicaRequest) (*kvdv1.ReplicaResponse, error) {
	if err := n.checkPeer(req.GetFrom(), req.GetToIncarnation()); err != nil {
		return nil, err
	}
	if !n.ready.Load() {
		return nil, errStarting
	}
	number := req.GetShard()
	if number == 0 || number > n.identity.Load().manifest.GetShards() {
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "there is no shard %d", number)
	}
	if req.GetMake() {
		if err := n.makeRoom(req); err != nil {
			return nil, err
		}
	}
	sh := n.shard(number)
	if sh == nil {
		return &kvdv1.ReplicaResponse{}, nil
	}
	st := sh.g.Status()
	return &kvdv1.ReplicaResponse{Exists: true, Applied: st.Applied, LastIndex: st.LastIndex}, nil
}

// makeRoom sees to it that there is an empty replica.
func (n *Node) makeRoom(req *kvdv1.ReplicaRequest) error {
	n.replicas.Lock()
	defer n.replicas.Unlock()
	number := req.GetShard()
	if sh := n.shard(number); sh != nil {
		st := sh.g.Status()
		switch {
		case st.Applied == 0 && st.LastIndex == 0:
			return nil // made before, and the answer was lost
		case st.Term > req.GetTerm():
			return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "shard %d has term %d here, and node %d leads it in term %d only: another may have been elected", number, st.Term, req.GetFrom().GetNodeId(), req.GetTerm())
		case st.ConfigID > req.GetConfigId():
			return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "shard %d has configuration %d here, and node %d goes by configuration %d", number, st.ConfigID, req.GetFrom().GetNodeId(), req.GetConfigId())
		}
		if err := n.dropReplicaLocked(sh); err != nil {
			if errors.Is(err, raft.ErrClosed) {
				return failShuttingDown(n.id())
			}
			n.fail(fmt.Errorf("server: replica of shard %d can not be deleted: %w", number, err))
			return fail(kvdv1.ErrorDetail_REASON_NOT_READY, "%v", err)
		}
	}
	if err := n.makeReplicaLocked(number); err != nil {
		return fail(kvdv1.ErrorDetail_REASON_EXHAUSTED, "shard %d can not be taken in: %v", number, err)
	}
	return nil
}
