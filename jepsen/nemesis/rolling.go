package nemesis

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/kvd-io/kvd/jepsen/env"
	"github.com/kvd-io/kvd/jepsen/history"
)

// What an operator does to nodes that are well: restart one after the other, drain one
// after the other; and what is done about one that is lost.

// stopPatience is how long a node may take to stop when it is told to: it waits for
// followers and for streams, which faults of the other lanes may hold up.
const stopPatience = 40 * time.Second

// stoppedWell are the last words of a node that stopped in order.
var stoppedWell = []string{"msg=stopped", `msg="stopped while starting"`}

// restart ends a node by SIGTERM and starts it again after a while.
func restart(ctx context.Context, n *env.Node, away time.Duration) error {
	defer n.Claim()()
	from := n.LogSize()
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopPatience)
	err := n.Term(stop)
	cancel()
	if err == nil && !slices.ContainsFunc(stoppedWell, func(word string) bool { return n.Logged(word, from) }) {
		err = fmt.Errorf("nemesis: node %d did not stop in order", n.ID)
	}
	pause(ctx, away)
	return errors.Join(err, n.Start())
}

// rollingRestart restarts all nodes, one after the other.
func (r *Runner) rollingRestart(ctx context.Context, e Event, f *history.Fault) error {
	return r.inTurn(ctx, e, f, func(n *env.Node) error { return restart(ctx, n, e.For) }, func(*env.Node) error { return nil })
}

// upgrade restarts all nodes as a rolling restart does, each with the other kvd: a later
// one, and the next time the earlier one again. It was seen when the kernel says that each
// runs it.
func (r *Runner) upgrade(ctx context.Context, e Event, f *history.Fault) error {
	program := ""
	err := r.inTurn(ctx, e, f, func(n *env.Node) error {
		program = n.Switch()
		return restart(ctx, n, e.For)
	}, func(n *env.Node) error {
		runs, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", n.PID()))
		if err != nil || runs != program {
			return fmt.Errorf("nemesis: node %d runs %s (%v): want %s", f.Nodes[len(f.Nodes)-1], runs, err, program)
		}
		return nil
	})
	if err == nil {
		f.Detail += "all run the other kvd"
	}
	return err
}

// inTurn restarts all nodes that are in use: the next one when the one before serves, has
// what was committed when it came back, and is as check wants it.
func (r *Runner) inTurn(ctx context.Context, e Event, f *history.Fault, again, check func(*env.Node) error) error {
	f.Nodes, f.Detail = nil, ""
	for _, id := range e.Order {
		n := r.Env.Node(id)
		if !n.InUse() || n.Leaving() {
			continue
		}
		f.Nodes = append(f.Nodes, id)
		if err := again(n); err != nil {
			return err
		}
		took, err := r.catchesUp(ctx, n)
		if err != nil {
			return err
		}
		if err := check(n); err != nil {
			return err
		}
		f.Detail += fmt.Sprintf("node %d had caught up after %.1f s; ", id, took.Seconds())
	}
	f.Seen = len(f.Nodes) > 0
	return nil
}

// catchesUp waits until a node has applied what others had when this was called, of the
// shards that it has. One that is to leave meanwhile, or left, is not waited for.
func (r *Runner) catchesUp(ctx context.Context, n *env.Node) (time.Duration, error) {
	began, member := time.Now(), n.Member()
	goal := map[uint32]uint64{}
	st, err := r.awaitStatus(ctx)
	if err != nil {
		return 0, err
	}
	for _, rep := range st.Replicas {
		goal[rep.Shard] = max(goal[rep.Shard], rep.Applied)
	}
	for {
		st, err := r.Ctl.Status()
		if err == nil {
			has := 0
			for _, rep := range st.Replicas {
				switch {
				case rep.Node != member:
				case rep.Applied < goal[rep.Shard]:
					err = fmt.Errorf("shard %d is at %d of %d", rep.Shard, rep.Applied, goal[rep.Shard])
				default:
					has++
				}
			}
			if err == nil && has == 0 {
				err = errors.New("it does not answer")
			}
		}
		took := time.Since(began)
		if err == nil || n.Leaving() || n.Member() != member {
			return took, nil
		}
		if took > movePatience || !pause(ctx, look) {
			return took, fmt.Errorf("nemesis: node %d was not back after %.0f s: %w", n.ID, took.Seconds(), err)
		}
	}
}

// drains empties all nodes, one after the other. Each is restarted while it has nothing,
// and set active again.
func (r *Runner) drains(ctx context.Context, e Event, f *history.Fault) error {
	f.Nodes, f.Detail = nil, ""
	if err := r.ready(ctx, f); err != nil {
		return err
	}
	for _, id := range e.Order {
		n := r.Env.Node(id)
		f.Nodes = append(f.Nodes, id)
		took, err := r.empty(ctx, n)
		if err == nil {
			f.Detail += fmt.Sprintf("node %d (id %d) was drained in %.1f s; ", n.ID, n.Member(), took.Seconds())
			err = restart(ctx, n, e.For)
		}
		if err = errors.Join(err, r.undo(ctx, n)); err != nil {
			return err
		}
	}
	f.Seen = true
	return nil
}

// lost has a node die for good: it is decommissioned while it is dead, and another, which
// is empty, takes its place under a new id.
func (r *Runner) lost(ctx context.Context, e Event, f *history.Fault) error {
	f.Nodes, f.Detail = nil, ""
	if err := r.ready(ctx, f); err != nil {
		return err
	}
	n := r.chosen(ctx, e, 0)
	f.Nodes = []uint64{n.ID}
	if err := r.bury(ctx, n, f); err != nil {
		if ctx.Err() != nil {
			f.Detail += "the run's end came before another was in its place"
			return nil // Settle goes on
		}
		return err
	}
	f.Seen = true
	return r.joins(ctx, n, f)
}

// bury ends with an empty node in the place of the dead one, which nobody starts meanwhile.
func (r *Runner) bury(ctx context.Context, n *env.Node, f *history.Fault) error {
	defer n.Claim()()
	n.Leave(true)
	if _, err := n.Kill(); err != nil {
		return err
	}
	if err := r.leaves(ctx, n, f); err != nil {
		return err
	}
	return n.StartAnew()
}
