package client

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/layout"
)

// overGRPC asks a node's engine: the leader's, or at the weaker levels that of any
// replica which has applied enough. why is counted.
func (r *reading) overGRPC(why reason) (Value, error) {
	r.bound()
	r.why = why
	r.g = r.g.fresh() // a READ that is still out must not meet the answer in a Buffer
	sh := r.g.sh
	req := &kvdv1.GetRequest{NamespaceId: r.c.cluster().namespace, Key: r.key, Fallback: why.String()}
	var resp *kvdv1.GetResponse
	var from *node
	ask := func(ctx context.Context, n *node, rem *remote) (err error) {
		resp, err = rem.kv.Get(ctx, req)
		from = n
		return rpcFailed(rem.addr, err)
	}
	var err error
	if r.level == Linearizable {
		req.Level = kvdv1.ReadLevel_READ_LEVEL_LINEARIZABLE
		call := leaderCall{c: r.c, sh: sh, op: "get"}
		err = call.run(r.ctx, ask)
	} else {
		err = r.askReplicas(req, ask)
	}
	if err != nil {
		return Value{}, err
	}
	r.reconsider(from)
	r.c.count.fallbacks[why].Add(1)
	r.c.count.gets[r.level][viaGRPC].Add(1)
	if !resp.GetFound() {
		raise(&sh.index, resp.GetApplied())
		return Value{}, ErrNotFound
	}
	raise(&sh.index, resp.GetVersion())
	r.c.learnLocation(sh, r.g.hash, from, resp.GetLocation(), resp.GetVersion())
	data := resp.GetValue()
	v := Value{Data: data, Version: resp.GetVersion(), Expires: expires(resp.GetExpiresUnixMs())}
	switch {
	case r.buf != nil:
		if v, err = r.deliver(data, resp.GetVersion(), resp.GetExpiresUnixMs()); err != nil {
			return Value{}, err
		}
	case r.dst != nil && cap(r.dst) >= len(data):
		v = r.copyOut(data, resp.GetVersion(), resp.GetExpiresUnixMs())
	case data == nil:
		v.Data = []byte{}
	}
	if v.Expires != (time.Time{}) && !v.Expires.After(r.c.cfg.Clock.Now()) {
		return Value{}, ErrNotFound
	}
	return v, nil
}

// reconsider learns the route again, in the background, where the answer from a node
// shows that it is out of date, or cannot show that it is not. What is read over gRPC is
// confirmed by no record, so nothing else would tell that another node leads by now, one
// that can be read.
func (r *reading) reconsider(from *node) {
	switch r.why {
	case reasonForced, reasonTwoSided:
		return // whoever leads
	}
	rt := r.g.sh.route.Load()
	if rt == nil || r.level != Linearizable || r.why == reasonQuorumSize || from.id != rt.leader.nodeID {
		r.c.learnRouteLater(r.g.sh, rt)
	}
}

// askReplicas asks one replica after the other until one answers, the request turns out
// to be wrong, or the call's time is over.
func (r *reading) askReplicas(req *kvdv1.GetRequest, ask func(ctx context.Context, n *node, rem *remote) error) error {
	pauses := r.c.newBackOff(r.g.sh.id)
	for {
		// Anew in each round: the session may have gone up.
		if req.Level = kvdv1.ReadLevel_READ_LEVEL_STALE; r.level == Session || r.lag.set {
			// A bound of a stale read is an index, too.
			req.Level, req.MinApplied = kvdv1.ReadLevel_READ_LEVEL_SESSION, r.needed()
		}
		for _, n := range r.replicaNodes() {
			if err := r.alive(); err != nil {
				return err
			}
			err := n.try(r.ctx, ask)
			if err == nil {
				return nil
			}
			if r.last = err; permanent(err) {
				return fmt.Errorf("get: %w", err)
			}
		}
		if err := r.alive(); err != nil {
			return err
		}
		r.c.pauseFor(r.ctx, max(pauses.next(), retryAfter(r.last)))
	}
}

// replicaNodes lists who has a replica of the shard, in the order in which they are
// asked. For a session the leader comes first, which never is behind; unbounded reads
// are spread by their keys.
func (r *reading) replicaNodes() []*node {
	return r.c.replicaNodes(r.g.sh, r.g.hash.Lo, r.level == Session || r.lag.set)
}

// replicaNodes lists who has a replica of the shard, the leader first or else in an order
// that turns with spread. Nodes that hang come last.
func (c *Client) replicaNodes(sh *shard, spread uint64, leaderFirst bool) []*node {
	var leader uint64
	var list []*node
	nodes := c.sortedNodes()
	for _, n := range nodes {
		s := n.sess.Load()
		if s == nil || s.ended.Load() {
			continue
		}
		info := s.replicas[sh.id].info.Load()
		if info == nil || !info.local {
			continue
		}
		list = append(list, n)
		if leader == 0 {
			leader = info.leader
		}
	}
	if rt := sh.route.Load(); rt != nil {
		leader = rt.leader.nodeID
	}
	if len(list) == 0 {
		list = nodes // nobody is known: anybody may be back
	}
	if len(list) == 0 {
		return nil
	}
	first := int(spread % uint64(len(list)))
	if i := slices.IndexFunc(list, func(n *node) bool { return n.id == leader }); i >= 0 && leaderFirst {
		first = i
	}
	list = slices.Concat(list[first:], list[:first])
	slices.SortStableFunc(list, func(a, b *node) int { return cmp.Compare(a.muteness(), b.muteness()) })
	return list
}

// learnLocation remembers where the node said that the key's object lies. Nothing
// is believed yet: the object and the record decide at the next read.
func (c *Client) learnLocation(sh *shard, h layout.KeyHash, n *node, l *kvdv1.Location, version uint64) {
	s := n.sess.Load()
	if l == nil || s == nil || s.conn == nil || l.GetBootId() != s.boot {
		return
	}
	at := layout.Place{Chunk: l.GetChunk(), Offset: l.GetOffset()}
	if at.Chunk == 0 || at.Chunk > layout.MaxChunk || at.Offset%layout.Unit != 0 ||
		l.GetLength() <= layout.HeaderSize || l.GetLength() > layout.MaxObjectSize {
		return
	}
	c.cache.put(h, s.ord, location{at: at, length: l.GetLength(), version: version, gen: l.GetLayoutGen()})
	if s.room(at.Chunk, at.Offset) == 0 {
		c.learnRegionLater(s, at.Chunk)
	}
	if info := s.replicas[sh.id].info.Load(); info == nil || info.tableGen < l.GetLayoutGen() {
		c.learnTableLater(sh, s)
	}
}
