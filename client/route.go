package client

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/kvd-io/kvd/storage/layout"
)

// shard is what the Client knows of one shard.
type shard struct {
	id    uint32
	route atomic.Pointer[route] // the last one learnt; it may be out of date at any time
	// index is the session's: no read at level Session goes back behind it.
	index atomic.Uint64
	// hint is the node that was last named as leader over gRPC; 0: none.
	hint   atomic.Uint64
	asked  atomic.Int64 // when all nodes were last asked for the route (Unix ns)
	near   atomic.Pointer[nearList]
	writer writer
}

// route says who leads a shard and who can confirm it. Immutable.
//
// Invariant: the leader's record showed served_term = term in an exchange that was
// complete before the route was made. So whatever is READ through a route is READ
// after that, which the proof of the read protocol needs.
type route struct {
	leader   *session
	slot     uint32
	term     uint64
	configID uint64
	voters   []uint64 // node ids, numbered as in quorum
	quorum   quorum
	self     uint8 // the leader's bit; 0: it is no voter
}

// same tells whether o would confirm and fail exactly as r does.
func (r *route) same(o *route) bool {
	return o != nil && r.leader == o.leader && r.slot == o.slot && r.term == o.term && r.configID == o.configID
}

// derive makes a route from what the sessions have been told: the newest term that
// anybody was seen to serve. nil where there is none.
func (c *Client) derive(sh *shard) *route {
	var best *route
	for _, n := range *c.nodes.Load() {
		s := n.sess.Load()
		if s == nil || s.ended.Load() {
			continue
		}
		info := s.replicas[sh.id].info.Load()
		if info == nil || !info.local || best != nil && info.record.ServedTerm <= best.term {
			continue
		}
		if r := info.route(s); r != nil {
			best = r
		}
	}
	return best
}

// route is what this answer makes of its own node, or nil where it does not lead.
func (info *replicaInfo) route(s *session) *route {
	rec := &info.record
	if rec.ServedTerm == 0 || rec.Term > rec.ServedTerm || rec.ConfigID != info.configID {
		return nil
	}
	r := &route{leader: s, slot: info.slot, term: rec.ServedTerm, configID: rec.ConfigID}
	var ok bool
	if r.voters, r.quorum, ok = makeQuorum(info.voters, info.outgoing); !ok {
		// Not even one read can be confirmed. The route still tells who leads.
		r.voters, r.quorum = nil, quorum{}
		return r
	}
	if i := slices.Index(r.voters, s.nodeID); i >= 0 {
		r.self = 1 << i
	}
	return r
}

// reroute replaces the routes that lead to a session which another one to the same boot
// has taken the place of, so that no read has to find out.
func (c *Client) reroute(old *session) {
	k := c.cluster()
	for i := range k.shard {
		sh := &k.shard[i]
		if r := sh.route.Load(); r != nil && r.leader == old {
			if next := c.derive(sh); next != nil && next.term >= r.term {
				sh.route.CompareAndSwap(r, next)
			}
		}
	}
}

// electing tells whether a route can be expected soon: some node that is there knows of no
// leader, or names one that there is a session with.
func (c *Client) electing(sh *shard) bool {
	for _, s := range c.liveSessions() {
		info := s.replicas[sh.id].info.Load()
		if info != nil && info.local && (info.leader == 0 || c.sessionOf(info.leader) != nil) {
			return true
		}
	}
	return false
}

// askTimeout bounds one question about a route: a node that does not answer by then
// is asked again with the next refresh.
const askTimeout = time.Second

// learnRoute returns a route other than stale, or nil when nobody names one now.
// It asks every node at once and takes the first answer that tells something new.
func (c *Client) learnRoute(ctx context.Context, sh *shard, stale *route) *route {
	if r := sh.route.Load(); r != nil && r != stale && !r.leader.ended.Load() {
		return r
	}
	if r := c.derive(sh); r != nil && !r.same(stale) {
		sh.route.Store(r)
		return r
	}
	answer := c.asking.DoChan("route "+strconv.FormatUint(uint64(sh.id), 10), func() (any, error) {
		return c.askRoute(sh, stale), nil
	})
	select {
	case <-ctx.Done():
		return nil
	case r := <-answer:
		if r := r.Val.(*route); r != nil && !r.same(stale) {
			return r
		}
		return nil
	}
}

// relearnEvery bounds how often reads that fall back ask for a better route.
const relearnEvery = 250 * time.Millisecond

// askedLately tells whether asking for the route again would most likely bring nothing.
func (sh *shard) askedLately() bool {
	return time.Now().UnixNano()-sh.asked.Load() < int64(relearnEvery)
}

// learnRouteLater is learnRoute without waiting. It does nothing where that was done a
// moment ago.
func (c *Client) learnRouteLater(sh *shard, stale *route) {
	if have, now := sh.asked.Load(), time.Now().UnixNano(); now-have >= int64(relearnEvery) && sh.asked.CompareAndSwap(have, now) {
		c.tasks.spawn(func() { c.learnRoute(c.life, sh, stale) })
	}
}

// askRoute asks all nodes and stores the route that comes of it.
func (c *Client) askRoute(sh *shard, stale *route) *route {
	sh.asked.Store(time.Now().UnixNano())
	ctx, cancel := context.WithTimeout(c.life, askTimeout)
	sessions := c.liveSessions()
	answers := make(chan struct{}, len(sessions))
	started := 0
	for _, s := range sessions {
		if c.tasks.spawn(func() {
			// A failure shows in what derive does not find.
			_ = s.fetchRoutes(ctx, []uint32{sh.id})
			answers <- struct{}{}
		}) {
			started++
		}
	}
	// The slower answers are worked in too, but nobody waits for them.
	rest := started
	defer func() {
		if !c.tasks.spawn(func() {
			for range rest {
				<-answers
			}
			cancel()
		}) {
			cancel()
		}
	}()
	for rest > 0 {
		<-answers
		rest--
		if r := c.derive(sh); r != nil && !r.same(stale) {
			sh.route.Store(r)
			return r
		}
	}
	r := c.derive(sh)
	sh.route.Store(r)
	return r
}

// learnTable asks the session's node for the shard's index again.
func (c *Client) learnTable(ctx context.Context, sh *shard, s *session) {
	select {
	case <-ctx.Done():
	case <-c.learnTableLater(sh, s):
	}
}

// learnTableLater is learnTable without waiting.
func (c *Client) learnTableLater(sh *shard, s *session) <-chan singleflight.Result {
	return c.once(fmt.Sprintf("table %d %d", s.serial, sh.id), func(ctx context.Context) error {
		return s.fetchRoutes(ctx, []uint32{sh.id})
	})
}

// learnRegion makes a chunk known to the session.
func (c *Client) learnRegion(ctx context.Context, s *session, chunk uint32) {
	select {
	case <-ctx.Done():
	case <-c.learnRegionLater(s, chunk):
	}
}

// learnRegionLater is learnRegion without waiting.
func (c *Client) learnRegionLater(s *session, chunk uint32) <-chan singleflight.Result {
	return c.once(fmt.Sprintf("region %d %d", s.serial, chunk), func(ctx context.Context) error {
		return s.fetchRegions(ctx, []uint32{chunk})
	})
}

// once asks a question unless it is being asked already.
func (c *Client) once(key string, ask func(ctx context.Context) error) <-chan singleflight.Result {
	return c.asking.DoChan(key, func() (any, error) {
		answer := make(chan error, 1)
		if !c.tasks.spawn(func() {
			ctx, cancel := context.WithTimeout(c.life, askTimeout)
			defer cancel()
			answer <- ask(ctx)
		}) {
			return nil, ErrClosed
		}
		return nil, <-answer
	})
}

// liveSessions lists the sessions that there are now, in the order of their nodes.
func (c *Client) liveSessions() []*session {
	var list []*session
	for _, n := range c.sortedNodes() {
		if s := n.sess.Load(); s != nil && !s.ended.Load() {
			list = append(list, s)
		}
	}
	return list
}

func (c *Client) sortedNodes() []*node {
	var list []*node
	for _, n := range *c.nodes.Load() {
		list = append(list, n)
	}
	slices.SortFunc(list, func(a, b *node) int { return cmp.Compare(a.id, b.id) })
	return list
}

// sessionOf is the node's session, or nil.
func (c *Client) sessionOf(id uint64) *session {
	n := (*c.nodes.Load())[id]
	if n == nil {
		return nil
	}
	s := n.sess.Load()
	if s == nil || s.ended.Load() {
		return nil
	}
	return s
}

// slotOn is where the session's node keeps the shard's record; ok is false where
// it is not known or the node cannot be read one-sidedly.
func (s *session) slotOn(shard uint32) (slot uint32, ok bool) {
	info := s.replicas[shard].info.Load()
	if info == nil || !info.local || s.conn == nil || s.ended.Load() {
		return 0, false
	}
	return info.slot, true
}

// nearList orders the replicas of a shard by how soon they answer.
type nearList struct {
	made     time.Time
	sessions []*session
}

// nearFor is how long an order is kept. Which replica is read at the weaker levels
// is a matter of speed only.
const nearFor = time.Second

// nearest lists the sessions that may answer reads of the weaker levels, the nearest
// first. The list must not be changed.
func (c *Client) nearest(sh *shard, now time.Time) []*session {
	if l := sh.near.Load(); l != nil && now.Sub(l.made) < nearFor && l.usable() {
		return l.sessions
	}
	l := &nearList{made: now}
	leader := sh.route.Load()
	for _, s := range c.liveSessions() {
		if _, ok := s.slotOn(sh.id); ok {
			l.sessions = append(l.sessions, s)
		}
	}
	slices.SortStableFunc(l.sessions, func(a, b *session) int {
		if d := cmp.Compare(a.distance(), b.distance()); d != 0 {
			return d
		}
		// The leader's locations come with its answers to writes.
		if leader != nil && leader.leader == a {
			return -1
		}
		if leader != nil && leader.leader == b {
			return 1
		}
		return cmp.Compare(a.nodeID, b.nodeID)
	})
	sh.near.Store(l)
	return l.sessions
}

// usable tells whether anybody on the list can still be asked. A list without such a
// node is made again: a session may have begun since.
func (l *nearList) usable() bool {
	return slices.ContainsFunc(l.sessions, func(s *session) bool { return !s.ended.Load() })
}

// distance compares sessions: the same host, then by the time of a flight.
func (s *session) distance() int64 {
	if s.sync {
		return -1
	}
	if s.slow.Load() {
		return 1 << 62
	}
	return s.latency.Load() / int64(100*time.Microsecond)
}

// hashKey hashes under the cluster's seed.
func (k *cluster) hashKey(key []byte) (layout.KeyHash, *shard) {
	h := layout.HashKey(k.seed, key)
	return h, &k.shard[h.Shard(k.shards)]
}
