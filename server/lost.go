package server

import (
	"slices"
	"sync/atomic"
)

// lostNodes are the nodes that the keeper has not heard for longer than
// Config.ReplaceAfter. It is empty where this node does not keep.
type lostNodes struct{ ids atomic.Pointer[[]uint64] }

func (l *lostNodes) has(id uint64) bool {
	ids := l.ids.Load()
	return ids != nil && slices.Contains(*ids, id)
}

func (l *lostNodes) set(ids []uint64) { l.ids.Store(&ids) }

// silentNodes are those nodes by what the keeper has just heard.
func (n *Node) silentNodes(k *keeper) (ids []uint64) {
	now := n.cfg.Clock.Now()
	for _, r := range n.registry.nodes() {
		heard, ok := k.heard[r.GetNodeId()]
		if !ok {
			heard = k.since
		}
		if now.Sub(heard) > n.cfg.ReplaceAfter {
			ids = append(ids, r.GetNodeId())
		}
	}
	return ids
}
