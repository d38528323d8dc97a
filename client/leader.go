package client

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// leaderCall calls the leader of a shard over gRPC, wherever it may be, until the
// call succeeds, fails for good, or ctx ends. ctx must have a deadline.
type leaderCall struct {
	c  *Client
	sh *shard
	op string // for errors

	tries int
	last  error
	at    uint64 // node that was asked last
}

// run calls f until it returns nil or an error that trying elsewhere or later does
// not cure. f gets a context for one try; its errors must come from rpcFailed.
func (l *leaderCall) run(ctx context.Context, f func(ctx context.Context, n *node, r *remote) error) error {
	pauses := l.c.newBackOff(l.sh.id)
	hinted := 0
	for {
		// Before each try: what is sent with no time left may still be applied.
		if l.c.life.Err() != nil || ctx.Err() != nil {
			return l.c.gaveUp(ctx, l.op, "shard "+fmt.Sprint(l.sh.id), l.last)
		}
		err := l.try(ctx, f)
		if err == nil {
			return nil
		}
		l.last = err
		if ctx.Err() != nil {
			continue
		}
		if permanent(err) || errors.Is(err, ErrOutcomeUnknown) || errors.Is(err, ErrExhausted) || errors.Is(err, ErrReadOnly) {
			return fmt.Errorf("%s: %w", l.op, err)
		}
		l.tries++
		if hint := leaderHint(err); hint != 0 && hint != l.at && hinted < 2 {
			hinted++
			l.sh.hint.Store(hint)
			continue
		}
		hinted = 0
		l.sh.hint.Store(0)
		l.c.learnRoute(ctx, l.sh, l.sh.route.Load())
		l.c.pauseFor(ctx, max(pauses.next(), retryAfter(err)))
	}
}

// try makes one call. A node that hangs is given up in time to ask another.
func (l *leaderCall) try(ctx context.Context, f func(ctx context.Context, n *node, r *remote) error) error {
	n := l.c.leaderNode(l.sh, l.tries)
	if n == nil {
		return fmt.Errorf("%w: no node of the cluster can be reached", ErrUnavailable)
	}
	l.at = n.id
	return n.try(ctx, f)
}

// try makes one call to the node, which gets ConnectTimeout for it.
func (n *node) try(ctx context.Context, f func(ctx context.Context, n *node, r *remote) error) error {
	r, err := n.remote()
	if err != nil {
		return err
	}
	limit := n.c.cfg.ConnectTimeout
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	err = f(ctx, n, r)
	// The node is told the limit and may keep it a little before our own timer.
	n.mute.Store(err != nil && time.Since(began) >= limit*9/10)
	return err
}

// muteness sorts nodes that hang behind the others.
func (n *node) muteness() int {
	if n.mute.Load() {
		return 1
	}
	return 0
}

// leaderNode is who most likely leads the shard. With more tries other nodes take
// their turn.
func (c *Client) leaderNode(sh *shard, tries int) *node {
	nodes := *c.nodes.Load()
	if n := nodes[sh.hint.Load()]; n != nil && !n.mute.Load() {
		return n
	}
	if r := sh.route.Load(); r != nil && !r.leader.ended.Load() && tries%3 != 2 {
		if n := nodes[r.leader.nodeID]; n != nil && !n.mute.Load() {
			return n
		}
	}
	sessions := c.liveSessions()
	if tries%3 != 2 {
		for _, s := range sessions {
			info := s.replicas[sh.id].info.Load()
			if info == nil || info.leader == 0 || c.sessionOf(info.leader) == nil {
				continue
			}
			if n := nodes[info.leader]; !n.mute.Load() {
				return n
			}
		}
	}
	// Nobody named can be asked. Nodes that did not answer are the last to be tried again:
	// waiting for one takes longer than hearing from the others who leads now.
	all := c.sortedNodes()
	for i := range all {
		if n := all[(tries+i)%len(all)]; n.sess.Load() != nil && !n.mute.Load() {
			return n
		}
	}
	for i := range all {
		if n := all[(tries+i)%len(all)]; n.sess.Load() != nil {
			return n
		}
	}
	if len(all) > 0 {
		return all[tries%len(all)]
	}
	return nil
}
