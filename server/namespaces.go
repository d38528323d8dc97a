package server

import (
	"encoding/binary"
	"fmt"
	"regexp"
	"sort"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/arena"
	"github.com/kvd-io/kvd/storage/engine"
)

// DefaultNamespace exists from the first moment of a cluster.
const DefaultNamespace = "default"

const (
	defaultNamespaceID = 1
	// maxNamespaces is looked at by who proposes one; a few more do no harm.
	maxNamespaces = 1024
)

// maxNamespaceName is in bytes. A name that goes to logs and errors is looked at before.
const maxNamespaceName = 63

var namespaceName = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$`)

// namespaces is the content of group 0.
type namespaces struct {
	arena *arena.Arena
	// known is replaced, never changed.
	known atomic.Pointer[namespaceSet]
}

type namespaceSet struct {
	byID   map[uint32]*kvdv1.NamespaceInfo
	byName map[string]*kvdv1.NamespaceInfo
}

var _ content = metaContent{}

func newNamespaces(a *arena.Arena) *namespaces {
	n := &namespaces{arena: a}
	n.known.Store(&namespaceSet{})
	return n
}

func (n *namespaces) byID(id uint32) *kvdv1.NamespaceInfo     { return n.known.Load().byID[id] }
func (n *namespaces) byName(name string) *kvdv1.NamespaceInfo { return n.known.Load().byName[name] }

func (n *namespaces) count() int { return len(n.known.Load().byID) }

func (n *namespaces) list() []*kvdv1.NamespaceInfo {
	var all []*kvdv1.NamespaceInfo
	for _, ns := range n.known.Load().byID {
		all = append(all, ns)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].GetId() < all[j].GetId() })
	return all
}

func (n *namespaces) set(all []*kvdv1.NamespaceInfo) {
	next := &namespaceSet{byID: map[uint32]*kvdv1.NamespaceInfo{}, byName: map[string]*kvdv1.NamespaceInfo{}}
	for _, ns := range all {
		next.byID[ns.GetId()], next.byName[ns.GetName()] = ns, ns
		n.arena.OpenNamespace(ns.GetId(), ns.GetQuotaBytes())
	}
	n.known.Store(next)
}

// metaContent is all that group 0 holds, with the group to load it from.
type metaContent struct {
	*namespaces
	tokens   *tokens
	registry *registry
	shards   *shardMap
	eng      *engine.Group
}

func (c metaContent) load(meta engine.Meta) error {
	var all []*kvdv1.NamespaceInfo
	err := c.eng.ScanAux(auxNamespace, nil, nil, func(_, value []byte) (bool, error) {
		ns := &kvdv1.NamespaceInfo{}
		if err := proto.Unmarshal(value, ns); err != nil {
			return false, fmt.Errorf("%w: namespace record: %w", engine.ErrCorrupt, err)
		}
		all = append(all, ns)
		return true, nil
	})
	if err != nil {
		return err
	}
	if err := c.tokens.load(c.eng); err != nil {
		return err
	}
	if err := c.registry.load(c.eng, meta.Applied); err != nil {
		return err
	}
	if err := c.shards.load(c.eng); err != nil {
		return err
	}
	c.set(all)
	return nil
}

// check implements content.
func (c metaContent) check(it engine.Item) error {
	switch it.Aux {
	case auxNamespace:
		if err := proto.Unmarshal(it.Value, &kvdv1.NamespaceInfo{}); err != nil {
			return fmt.Errorf("%w: namespace record: %w", engine.ErrCorrupt, err)
		}
	case auxToken:
		_, err := decodeToken(it.Key, it.Value)
		return err
	case auxNode:
		_, err := decodeNode(it.Key, it.Value)
		return err
	case auxShard:
		_, err := decodeShardRecord(it.Key, it.Value)
		return err
	}
	return nil
}

// apply implements content.
func (c metaContent) apply(b *engine.Batch, index uint64, cmd *kvdv1.Command) (any, error) {
	switch op := cmd.GetOp().(type) {
	case *kvdv1.Command_Token:
		return c.tokens.apply(b, cmd.GetLeaderUnixMs(), op.Token)
	case *kvdv1.Command_Node:
		return c.registry.apply(b, index, cmd.GetLeaderUnixMs(), op.Node)
	case *kvdv1.Command_Shard:
		return nil, c.shards.apply(b, op.Shard)
	}
	return c.namespaces.apply(b, index, cmd)
}

// namespaceResult is the outcome of a NamespaceOp.
type namespaceResult struct {
	info    *kvdv1.NamespaceInfo
	existed bool
}

func (n *namespaces) apply(b *engine.Batch, _ uint64, cmd *kvdv1.Command) (any, error) {
	op := cmd.GetNamespace()
	if op.GetCreate() == nil {
		return nil, fmt.Errorf("%w: group 0 has a command of kind %T, which this version does not know", engine.ErrCorrupt, cmd.GetOp())
	}
	want := op.GetCreate()
	if have := n.byName(want.GetName()); have != nil {
		return namespaceResult{info: have, existed: true}, nil
	}
	all := n.list()
	info := proto.Clone(want).(*kvdv1.NamespaceInfo)
	info.Id = defaultNamespaceID
	if len(all) > 0 {
		info.Id = all[len(all)-1].GetId() + 1
	}
	if err := putNamespace(b, info); err != nil {
		return nil, err
	}
	n.set(append(all, info))
	return namespaceResult{info: info}, nil
}

func putNamespace(b *engine.Batch, info *kvdv1.NamespaceInfo) error {
	v, err := proto.Marshal(info)
	if err != nil {
		return fmt.Errorf("server: encode namespace: %w", err)
	}
	return b.PutAux(auxNamespace, binary.BigEndian.AppendUint32(nil, info.GetId()), v)
}
