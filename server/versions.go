package server

import (
	"context"
	"sync"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// What carries a version, who checks it and how it is raised: docs/versions.md.

const (
	// protocol is what this version understands of what other nodes send and write, of
	// messages and of entries. An entry that a node does not understand would stop it, so
	// the first of a new kind is written only when all nodes are known to (allUnderstand).
	//
	//	0  the first version
	//	1  a registry of nodes in group 0
	//	2  formats of entries, and nodes that say what they need
	protocol = 2
	// oldestProtocol of a node with which this version can be in a cluster.
	oldestProtocol = 0
	// registryProtocol understands that group 0 says which nodes there are.
	registryProtocol = 1
	// entryFormat is the newest of a Command that this version knows.
	entryFormat = 0
)

// needs is what a node has to understand to be in a cluster with this one.
func (n *Node) needs() uint32 {
	if n.directory().index > 0 {
		return max(oldestProtocol, registryProtocol)
	}
	return oldestProtocol
}

// checkProtocol refuses a node whose version does not go together with this one's.
func (n *Node) checkProtocol(from *kvdv1.Identity) error { return goTogether(n.self(), from) }

// goTogether looks whether each of two nodes understands what the other needs. One that
// does not tell is of a version from before that, and is kept out where it must be by the
// format of its directory.
func goTogether(a, b *kvdv1.Identity) error {
	for range 2 {
		if has := b.GetProtocol(); has != 0 && has < a.GetNeeds() {
			return fail(kvdv1.ErrorDetail_REASON_PROTOCOL, "node %d needs protocol %d, and node %d understands %d: start a newer kvd as node %d", a.GetNodeId(), a.GetNeeds(), b.GetNodeId(), has, b.GetNodeId())
		}
		a, b = b, a
	}
	return nil
}

// askHello asks all members who they are, and this node itself. Who does not answer, or is
// another, is left out.
func (n *Node) askHello(ctx context.Context) map[uint64]*kvdv1.HelloResponse {
	ctx, cancel := context.WithTimeout(ctx, loadWait)
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	answers := map[uint64]*kvdv1.HelloResponse{n.id(): {Self: n.self(), Protocol: protocol, Version: n.cfg.Version}}
	for _, p := range n.others() {
		wg.Go(func() {
			if r, err := n.hello(ctx, p); err == nil && n.isMember(r.GetSelf(), p.NodeID) {
				mu.Lock()
				answers[p.NodeID] = r
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return answers
}

// allUnderstand is asked before the first entry that an older version would stop at: all
// nodes have to answer, and to know the protocol. to says what they could not do else.
func (n *Node) allUnderstand(ctx context.Context, need uint32, to string) error {
	for _, p := range n.others() {
		r, err := n.hello(ctx, p)
		switch {
		case err == nil && !n.isMember(r.GetSelf(), p.NodeID):
			return failJoinLater("node %d of cluster %q answers at %s, the address of node %d: whether the version of that one can %s is not known: start it, at an address of its own", r.GetSelf().GetNodeId(), r.GetSelf().GetClusterId(), p.Address, p.NodeID, to)
		case err != nil:
			return failJoinLater("node %d at %s does not answer, and whether its version can %s is not known: start it", p.NodeID, p.Address, to)
		case r.GetProtocol() < need:
			return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "node %d at %s runs a version that can not %s (it understands protocol %d, and %d is needed): run this version there first", p.NodeID, p.Address, to, r.GetProtocol(), need)
		}
	}
	return nil
}
