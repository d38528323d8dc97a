package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protojson"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

// directory is what a node knows of the nodes of its cluster: as of an index of group 0,
// or, at index 0, of the manifest alone. Immutable. It is needed before group 0 can be
// read, to find those who have it, and so it is also kept in a file; that may be
// behind, and only makes the node ask in vain.
type directory struct {
	index uint64
	nodes []*kvdv1.NodeRecord // by id
}

const directoryFile = "nodes.json"

func (d *directory) find(id uint64) *kvdv1.NodeRecord {
	if d == nil {
		return nil
	}
	return findNode(d.nodes, id)
}

// directory never returns nil.
func (n *Node) directory() *directory {
	if d := n.known.Load(); d != nil {
		return d
	}
	d := &directory{}
	if id := n.identity.Load(); id != nil {
		d.nodes = manifestNodes(id.manifest)
	}
	return d
}

// learn takes in what is known of the nodes as of an index, if that is news. New nodes
// are spoken to at once: each is to hear which boot of this one lives.
func (n *Node) learn(index uint64, nodes []*kvdv1.NodeRecord) {
	next := &directory{index, nodes}
	for {
		have := n.known.Load()
		if have != nil && have.index >= index || index == 0 || len(nodes) == 0 {
			return
		}
		if n.known.CompareAndSwap(have, next) {
			break
		}
	}
	n.topology.stir()
	if n.dir != nil {
		if err := errors.Join(n.raiseFormat(), n.dir.saveDirectory(next)); err != nil {
			n.log.Warn("what is known of the other nodes could not be noted", "err", err)
		}
	}
	if n.hosting.Load() && n.core == nil {
		n.peers.greet()
	}
	if mine := next.find(n.id()); mine.GetState() == kvdv1.NodeState_NODE_STATE_GONE && n.hosting.Load() {
		n.fail(fmt.Errorf("%w: %s", ErrRefused, goneAdvice(mine)))
	}
	select {
	case n.stewardWake <- struct{}{}:
	default:
	}
}

// recorded is the incarnation that a node has; 0: it is not known.
func (n *Node) recorded(id uint64) uint64 { return n.directory().find(id).GetIncarnation() }

// others are the nodes with which this one speaks, this one left out.
func (n *Node) others() []PeerConfig {
	var all []PeerConfig
	seen := map[uint64]bool{n.id(): true}
	for _, p := range n.cfg.Peers {
		if !seen[p.NodeID] {
			seen[p.NodeID] = true
			all = append(all, p)
		}
	}
	for _, r := range n.directory().nodes {
		if id := r.GetNodeId(); !seen[id] && r.GetState() != kvdv1.NodeState_NODE_STATE_GONE {
			seen[id] = true
			if addr, ok := n.peers.addressOf(raft.NodeID(id)); ok {
				all = append(all, PeerConfig{NodeID: id, Address: addr})
			}
		}
	}
	return all
}

type directoryJSON struct {
	Index uint64            `json:"index"`
	Nodes []json.RawMessage `json:"nodes"`
}

func (d *dataDir) saveDirectory(known *directory) error {
	j := directoryJSON{Index: known.index}
	for _, n := range known.nodes {
		b, err := protojson.Marshal(n)
		if err != nil {
			return fmt.Errorf("server: encode node record: %w", err)
		}
		j.Nodes = append(j.Nodes, b)
	}
	b, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return fmt.Errorf("server: encode the nodes: %w", err)
	}
	if err := writeDurably(d.path, directoryFile, append(b, '\n')); err != nil {
		return fmt.Errorf("%w %s: write %s: %w", ErrDataDir, d.path, directoryFile, err)
	}
	return nil
}

// loadDirectory returns nil where there is no file. What it says is a hint, so damage
// is an error that the caller may go on without.
func (d *dataDir) loadDirectory() (*directory, error) {
	path := filepath.Join(d.path, directoryFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	var j directoryJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return nil, fmt.Errorf("%s is damaged: %w", path, err)
	}
	known := &directory{index: j.Index}
	for _, raw := range j.Nodes {
		n := &kvdv1.NodeRecord{}
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, n); err != nil {
			return nil, fmt.Errorf("%s is damaged: %w", path, err)
		}
		known.nodes = append(known.nodes, n)
	}
	if known.index == 0 || len(known.nodes) == 0 {
		return nil, fmt.Errorf("%s is damaged: it holds %d nodes as of index %d", path, len(known.nodes), known.index)
	}
	return known, nil
}
