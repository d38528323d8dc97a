package raft

import (
	"math"
	"slices"
	"sync"
)

// Nodes tell each other at every heartbeat interval that they live, by one message for
// all the groups that they share. It stands for the heartbeats of the groups that are
// quiesced; see quiesce.go.

// NodeHeartbeat is what a node tells of itself.
type NodeHeartbeat struct {
	// Boot is drawn by the sending Host when it is made. With another one the node has
	// started anew: it leads nothing of what it led, and knows nobody who leads.
	Boot uint64
}

// Heartbeat takes what the transport received from a node. It never blocks.
func (h *Host) Heartbeat(from NodeID, hb NodeHeartbeat) {
	h.count.nodeHeartbeatsIn.Add(1)
	if from != h.cfg.NodeID {
		h.live.heard(from, hb.Boot)
	}
}

// sendHeartbeats tells all nodes with which this one shares a group, unless it stopped.
func (h *Host) sendHeartbeats(ticks uint64) {
	if h.cfg.QuiesceTicks <= 0 || ticks%uint64(h.cfg.HeartbeatTicks) != 0 || h.failed() {
		return
	}
	var nodes []NodeID
	for _, g := range h.groupList() {
		g.config.Load().eachOther(h.cfg.NodeID, func(n NodeID) {
			if !slices.Contains(nodes, n) {
				nodes = append(nodes, n)
			}
		})
	}
	slices.Sort(nodes)
	for _, n := range nodes {
		h.count.nodeHeartbeatsOut.Add(1)
		h.cfg.Transport.SendHeartbeat(n, NodeHeartbeat{Boot: h.boot})
	}
}

// liveness is what this node knows of the life of the others, by their heartbeats.
type liveness struct {
	mu struct {
		sync.Mutex
		ticks uint64 // of the host
		boots uint64 // how many boots were heard, of all nodes
		nodes map[NodeID]nodeLife
	}
}

type nodeLife struct {
	boot  uint64
	heard uint64 // in ticks of the host: when, last
	since uint64 // what boots became when this boot was first heard
}

func (l *liveness) init() { l.mu.nodes = make(map[NodeID]nodeLife) }

func (l *liveness) heard(n NodeID, boot uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was, ok := l.mu.nodes[n]
	if !ok || was.boot != boot {
		l.mu.boots++
		was = nodeLife{boot: boot, since: l.mu.boots}
	}
	was.heard = l.mu.ticks
	l.mu.nodes[n] = was
}

// silence is for how many ticks a node was not heard; of one that never was, for ever.
func (l *liveness) silence(n NodeID) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	life, ok := l.mu.nodes[n]
	if !ok {
		return math.MaxUint64
	}
	return l.mu.ticks - life.heard
}

// boots tells how many were heard. Who asks before it relies on a node sees later, by
// changes, whether that was started anew since.
func (l *liveness) boots() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.boots
}

// tick lets a tick pass.
func (l *liveness) tick(limit uint64) outages {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.ticks++
	o := outages{live: l, ticks: l.mu.ticks, boots: l.mu.boots}
	for n, life := range l.mu.nodes {
		if l.mu.ticks-life.heard >= limit {
			o.silent = append(o.silent, n)
		}
	}
	return o
}

// bootedSince tells whether a boot of the node was first heard after boots were so many.
func (l *liveness) bootedSince(n NodeID, boots uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.nodes[n].since > boots
}

// outages are what a tick found.
type outages struct {
	live   *liveness
	ticks  uint64   // of the host
	boots  uint64   // as liveness.boots
	silent []NodeID // that were not heard for an election timeout
}

// concern tells whether a quiesced group relies on a node that fell silent or was started
// anew: a follower on its leader, a leader on all the others. What does not concern it is
// not asked again.
func (o *outages) concern(g *Group) bool {
	seen := g.quiesced.Load() - 1
	if len(o.silent) == 0 && seen == o.boots {
		return false
	}
	bad := func(n NodeID) bool {
		return slices.Contains(o.silent, n) || seen != o.boots && o.live.bootedSince(n, seen)
	}
	found := false
	if r := g.role.Load(); r.Leading {
		g.config.Load().eachOther(g.h.cfg.NodeID, func(n NodeID) { found = found || bad(n) })
	} else {
		found = bad(r.Leader)
	}
	if !found {
		g.quiesced.CompareAndSwap(seen+1, o.boots+1)
	}
	return found
}
