package client

import (
	"cmp"
	"log/slog"
	"slices"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// Nodes tell on the streams of their sessions who leads what, where replicas are, and who
// the members are. What they tell is taken where it is newer than what is known, whoever
// says it: of leaders by the term, of replicas by the configuration, of members by the
// index of group 0. A node that is too old to tell is asked when something fails.

// listen takes in what comes on the stream, until it ends. s is the first session over it.
func (st *stream) listen(s *session) {
	s.c.tasks.spawn(func() {
		for {
			e, err := st.in.Recv()
			if closing := e.GetClosing(); err == nil && closing != nil {
				err = closes(closing)
			}
			if err != nil {
				st.ended <- err
				return
			}
			if t := e.GetTopology(); t != nil {
				s.c.told(s, t)
			}
		}
	})
}

// told takes in what a node tells by itself. first is the session that was made with the
// stream; another over the same stream may have taken its place.
func (c *Client) told(first *session, t *kvdv1.Topology) {
	defer c.count.topologies.Add(1)
	s := first
	if n := (*c.nodes.Load())[first.nodeID]; n != nil {
		if now := n.sess.Load(); now != nil && now.stream == first.stream {
			s = now
		}
	}
	for _, r := range t.GetRoutes() {
		if s.takeRoute(r, 0) {
			c.follow(&c.cluster().shard[r.GetShard()])
		}
	}
	if t.GetMembersVersion() != 0 {
		c.takeMembers(t.GetMembers(), t.GetMembersVersion())
	}
}

// follow takes the route that the sessions know of, where it is newer than the one in use:
// no read or write has to fail to find out.
func (c *Client) follow(sh *shard) {
	for {
		have, next := sh.route.Load(), c.derive(sh)
		if next == nil || have != nil && !next.newer(have) {
			return
		}
		if sh.route.CompareAndSwap(have, next) {
			sh.hint.Store(0)
			c.changed.broadcast() // some may be waiting for a leader
			return
		}
	}
}

// newer tells whether r is of a later term than o, or of a later configuration.
func (r *route) newer(o *route) bool {
	return cmp.Or(cmp.Compare(r.term, o.term), cmp.Compare(r.configID, o.configID)) > 0
}

// membership is what is known of who the members are.
type membership struct {
	version uint64 // index of group 0 as of which the list was; 0: it never said
	newest  uint64 // the largest id of a node that was known with such a list
}

// takeMembers takes in who the members are as of an index of group 0; 0: the node does not
// say. Then none is forgotten, and none that has left comes back.
func (c *Client) takeMembers(members []*kvdv1.Member, version uint64) {
	c.membersMu.Lock() // an older list must not be worked in behind a newer one
	defer c.membersMu.Unlock()
	m := &c.members
	switch {
	case version != 0 && version < m.version:
		return
	case version != 0 && len(members) > 0:
		m.version = version
		for _, x := range members {
			m.newest = max(m.newest, x.GetNodeId())
		}
		for id := range *c.nodes.Load() {
			m.newest = max(m.newest, id)
		}
		c.forgetOthers(members)
	case m.version != 0:
		// Ids only rise: who has a larger one came later, the others have left.
		members = slices.DeleteFunc(slices.Clone(members), func(x *kvdv1.Member) bool {
			return x.GetNodeId() <= m.newest && (*c.nodes.Load())[x.GetNodeId()] == nil
		})
	}
	c.addMembers(members)
}

// forgetOthers ends what there is with nodes that are no members any more.
func (c *Client) forgetOthers(members []*kvdv1.Member) {
	c.mu.Lock()
	next := make(map[uint64]*node)
	var gone []*node
	for id, n := range *c.nodes.Load() {
		if slices.ContainsFunc(members, func(m *kvdv1.Member) bool { return m.GetNodeId() == id }) {
			next[id] = n
		} else {
			gone = append(gone, n)
		}
	}
	if len(gone) > 0 {
		c.nodes.Store(&next)
	}
	c.mu.Unlock()
	for _, n := range gone {
		c.cfg.Logger.Info("a node has left the cluster", slog.Uint64("node", n.id), slog.String("address", n.addr()))
		n.leave()
	}
}
