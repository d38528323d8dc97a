package server

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/engine"
)

// registry is the part of group 0 that says which nodes there are. Records are never
// deleted, so the next id is above all that were ever given. Until the first entry
// that changes it, it is what the manifest says: a cluster whose nodes were all named at
// bootstrap writes nothing that an older version does not know.
type registry struct {
	manifest *kvdv1.Manifest
	// onChange gets what is known as of the index. It must not block.
	onChange func(index uint64, nodes []*kvdv1.NodeRecord)
	// known is replaced, never changed; nil: nothing was ever written.
	known atomic.Pointer[map[uint64]*kvdv1.NodeRecord]
}

// maxNodeText bounds, in bytes, each text of a record.
const maxNodeText = 255

func newRegistry(m *kvdv1.Manifest, onChange func(index uint64, nodes []*kvdv1.NodeRecord)) *registry {
	return &registry{manifest: m, onChange: onChange}
}

// manifestNodes are the nodes with which a cluster begins.
func manifestNodes(m *kvdv1.Manifest) []*kvdv1.NodeRecord {
	var all []*kvdv1.NodeRecord
	for _, n := range m.GetNodes() {
		all = append(all, &kvdv1.NodeRecord{
			NodeId: n.GetNodeId(), Incarnation: n.GetIncarnation(), Address: n.GetAddress(), State: kvdv1.NodeState_NODE_STATE_ACTIVE,
		})
	}
	return all
}

// written tells whether the registry goes beyond the manifest.
func (r *registry) written() bool { return r.known.Load() != nil }

// nodes lists all records, in the order of their ids. They must not be changed.
func (r *registry) nodes() []*kvdv1.NodeRecord {
	known := r.known.Load()
	if known == nil {
		return manifestNodes(r.manifest)
	}
	return slices.SortedFunc(maps.Values(*known), func(a, b *kvdv1.NodeRecord) int { return cmp.Compare(a.GetNodeId(), b.GetNodeId()) })
}

// able counts the nodes that can hold replicas.
func (r *registry) able() (able int) {
	for _, n := range r.nodes() {
		switch n.GetState() {
		case kvdv1.NodeState_NODE_STATE_ACTIVE:
			able++
		case kvdv1.NodeState_NODE_STATE_DRAINING, kvdv1.NodeState_NODE_STATE_DECOMMISSIONED:
			if n.GetLeadersOnly() {
				able++
			}
		}
	}
	return able
}

func (r *registry) find(id uint64) *kvdv1.NodeRecord { return findNode(r.nodes(), id) }

func findNode(nodes []*kvdv1.NodeRecord, id uint64) *kvdv1.NodeRecord {
	i := slices.IndexFunc(nodes, func(n *kvdv1.NodeRecord) bool { return n.GetNodeId() == id })
	if i < 0 {
		return nil
	}
	return nodes[i]
}

func (r *registry) set(index uint64, all []*kvdv1.NodeRecord) {
	if len(all) == 0 {
		r.known.Store(nil)
		return
	}
	next := map[uint64]*kvdv1.NodeRecord{}
	for _, n := range all {
		next[n.GetNodeId()] = n
	}
	r.known.Store(&next)
	r.onChange(index, r.nodes())
}

func nodeKey(id uint64) []byte { return binary.BigEndian.AppendUint64(nil, id) }

// load takes the records from the engine.
func (r *registry) load(eng *engine.Group, index uint64) error {
	var all []*kvdv1.NodeRecord
	err := eng.ScanAux(auxNode, nil, nil, func(key, value []byte) (bool, error) {
		n, err := decodeNode(key, value)
		all = append(all, n)
		return err == nil, err
	})
	if err != nil {
		return err
	}
	r.set(index, all)
	return nil
}

// decodeNode refuses, by ErrCorrupt, what apply can not have stored.
func decodeNode(key, value []byte) (*kvdv1.NodeRecord, error) {
	n := &kvdv1.NodeRecord{}
	if err := proto.Unmarshal(value, n); err != nil {
		return nil, fmt.Errorf("%w: node record: %w", engine.ErrCorrupt, err)
	}
	if len(key) != 8 || binary.BigEndian.Uint64(key) != n.GetNodeId() || n.GetNodeId() == 0 || n.GetIncarnation() == 0 || n.GetState() == kvdv1.NodeState_NODE_STATE_UNSPECIFIED {
		return nil, fmt.Errorf("%w: the node record with key %x has id %d, incarnation %016x and state %v", engine.ErrCorrupt, key, n.GetNodeId(), n.GetIncarnation(), n.GetState())
	}
	return n, nil
}

// nodeResult is the outcome of a NodeOp.
type nodeResult struct {
	node    *kvdv1.NodeRecord
	refused string // why nothing was changed; "": it was, or had been before
}

// apply is a function of the log and the manifest alone.
func (r *registry) apply(b *engine.Batch, index uint64, now int64, op *kvdv1.NodeOp) (nodeResult, error) {
	nodes := r.nodes()
	var changed *kvdv1.NodeRecord
	switch c := op.GetChange().(type) {
	case *kvdv1.NodeOp_Join:
		for _, n := range nodes {
			if n.GetIncarnation() == c.Join.GetIncarnation() {
				return nodeResult{node: n}, nil // the same once more
			}
		}
		changed = proto.Clone(c.Join).(*kvdv1.NodeRecord)
		changed.NodeId, changed.State = 1, kvdv1.NodeState_NODE_STATE_JOINING
		if len(nodes) > 0 {
			changed.NodeId = nodes[len(nodes)-1].GetNodeId() + 1
		}
		changed.JoinedUnixMs, changed.SinceUnixMs = now, now
	case *kvdv1.NodeOp_Update:
		have := findNode(nodes, c.Update.GetNodeId())
		if why := whyNoUpdate(have, c.Update); why != "" {
			return nodeResult{node: have, refused: why}, nil
		}
		changed = proto.Clone(have).(*kvdv1.NodeRecord)
		changed.Address, changed.Version = c.Update.GetAddress(), c.Update.GetVersion()
		changed.Zone, changed.Rack, changed.Host = c.Update.GetZone(), c.Update.GetRack(), c.Update.GetHost()
	case *kvdv1.NodeOp_Move:
		have := findNode(nodes, c.Move.GetNodeId())
		if have != nil && have.GetState() == c.Move.GetTo() && have.GetLeadersOnly() == c.Move.GetLeadersOnly() {
			return nodeResult{node: have}, nil
		}
		if why := whyNoMove(have, c.Move); why != "" {
			return nodeResult{node: have, refused: why}, nil
		}
		changed = proto.Clone(have).(*kvdv1.NodeRecord)
		changed.State, changed.SinceUnixMs = c.Move.GetTo(), now
		changed.LeadersOnly = c.Move.GetLeadersOnly() && changed.State == kvdv1.NodeState_NODE_STATE_DRAINING
	default:
		return nodeResult{}, fmt.Errorf("%w: group 0 has a change of nodes that this version does not know", engine.ErrCorrupt)
	}
	if !r.written() {
		for _, n := range nodes {
			if err := putNode(b, n); err != nil {
				return nodeResult{}, err
			}
		}
	}
	if err := putNode(b, changed); err != nil {
		return nodeResult{}, err
	}
	nodes = slices.DeleteFunc(nodes, func(n *kvdv1.NodeRecord) bool { return n.GetNodeId() == changed.GetNodeId() })
	r.set(index, append(nodes, changed))
	return nodeResult{node: changed}, nil
}

func putNode(b *engine.Batch, n *kvdv1.NodeRecord) error {
	v, err := proto.Marshal(n)
	if err != nil {
		return fmt.Errorf("server: encode node record: %w", err)
	}
	return b.PutAux(auxNode, nodeKey(n.GetNodeId()), v)
}

func whyNoUpdate(have, want *kvdv1.NodeRecord) string {
	switch {
	case have == nil:
		return fmt.Sprintf("there never was a node %d", want.GetNodeId())
	case have.GetIncarnation() != want.GetIncarnation():
		return fmt.Sprintf("node %d has incarnation %016x, not %016x", want.GetNodeId(), have.GetIncarnation(), want.GetIncarnation())
	case have.GetState() == kvdv1.NodeState_NODE_STATE_GONE:
		return fmt.Sprintf("node %d has left the cluster", want.GetNodeId())
	}
	return ""
}

// nodeMoves are the states that may follow each state.
var nodeMoves = map[kvdv1.NodeState][]kvdv1.NodeState{
	kvdv1.NodeState_NODE_STATE_JOINING:        {kvdv1.NodeState_NODE_STATE_ACTIVE, kvdv1.NodeState_NODE_STATE_DECOMMISSIONED},
	kvdv1.NodeState_NODE_STATE_ACTIVE:         {kvdv1.NodeState_NODE_STATE_DRAINING, kvdv1.NodeState_NODE_STATE_DECOMMISSIONED},
	kvdv1.NodeState_NODE_STATE_DRAINING:       {kvdv1.NodeState_NODE_STATE_DRAINING, kvdv1.NodeState_NODE_STATE_ACTIVE, kvdv1.NodeState_NODE_STATE_DECOMMISSIONED},
	kvdv1.NodeState_NODE_STATE_DECOMMISSIONED: {kvdv1.NodeState_NODE_STATE_GONE},
}

func whyNoMove(have *kvdv1.NodeRecord, m *kvdv1.NodeMove) string {
	switch {
	case have == nil:
		return fmt.Sprintf("there never was a node %d: kvctl members lists them", m.GetNodeId())
	case !slices.Contains(nodeMoves[have.GetState()], m.GetTo()):
		return fmt.Sprintf("node %d is %s, which %s can not follow", m.GetNodeId(), stateName(have.GetState()), stateName(m.GetTo()))
	}
	return ""
}

func stateName(s kvdv1.NodeState) string {
	switch s {
	case kvdv1.NodeState_NODE_STATE_JOINING:
		return "joining"
	case kvdv1.NodeState_NODE_STATE_ACTIVE:
		return "active"
	case kvdv1.NodeState_NODE_STATE_DRAINING:
		return "draining"
	case kvdv1.NodeState_NODE_STATE_DECOMMISSIONED:
		return "decommissioned"
	case kvdv1.NodeState_NODE_STATE_GONE:
		return "gone"
	}
	return s.String()
}
