package server

import (
	"context"
	"sync/atomic"
	"time"
)

// leaderNews gathers changes of leaders: they come by the hundred, when a node starts or
// dies, and one line says all of them.
type leaderNews struct {
	changes atomic.Uint64
	wake    chan struct{} // capacity 1
}

// newsPause is how long after a change the others of its burst are waited for.
const newsPause = time.Second

func newLeaderNews() *leaderNews { return &leaderNews{wake: make(chan struct{}, 1)} }

func (l *leaderNews) changed() {
	l.changes.Add(1)
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// tellLeaders logs a line for each burst of changes: how many there were, and how many
// shards this node leads now and how many of its own have no leader.
func (n *Node) tellLeaders(ctx context.Context) {
	for {
		select {
		case <-n.leaders.wake:
		case <-ctx.Done():
			return
		}
		if pause(ctx, newsPause); ctx.Err() != nil {
			return
		}
		changes := n.leaders.changes.Swap(0)
		if changes == 0 {
			continue // told with the burst before
		}
		leads, without := 0, 0
		shards := n.localShards()
		for _, sh := range shards {
			switch st := sh.g.Status(); {
			case st.Leading:
				leads++
			case st.Leader == 0:
				without++
			}
		}
		n.log.Info("leaders changed", "changes", changes, "leads", leads, "without leader", without, "shards", len(shards))
	}
}
