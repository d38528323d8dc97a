package nemesis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvd-io/kvd/jepsen/env"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/jepsen/worker"
)

// The states of a node, as the cluster names them.
const (
	active         = "active"
	draining       = "draining"
	decommissioned = "decommissioned"
	gone           = "gone"
)

// movePatience is how long replicas may take to move: faults of the other lanes may be in
// the way, a decision of group 0 waits for its leader, and a node keeps an empty replica
// that nobody wants any more for a minute.
const movePatience = 90 * time.Second

// look is how often the cluster is asked how far it is.
const look = 100 * time.Millisecond

// For so long other faults may come in between while replicas move; then, as nothing is
// learnt from replicas that never get where they are wished to go, no new one begins for a
// while.
const (
	noise = 8 * time.Second
	calm  = 12 * time.Second
)

func quietAfter(took time.Duration) bool { return noise < took && took < noise+calm }

// await asks until done, or until patience or ctx ends. It tells how long that took.
func (r *Runner) await(ctx context.Context, patience time.Duration, what string, done func() error) (time.Duration, error) {
	defer r.quiet.Store(false)
	for began := time.Now(); ; {
		err := done()
		took := time.Since(began)
		r.quiet.Store(quietAfter(took))
		if err == nil {
			return took, nil
		}
		if took > patience || !pause(ctx, look) {
			return took, fmt.Errorf("nemesis: %s: not within %.0f s: %w", what, took.Seconds(), err)
		}
	}
}

// member is what the cluster says of a node.
func (r *Runner) member(n *env.Node) (worker.Member, error) {
	all, err := r.Ctl.Members()
	if err != nil {
		return worker.Member{}, err
	}
	return findMember(all, n)
}

// findMember goes by the id, or, where that is not known yet, by the address: of those who
// had it before, all are gone.
func findMember(all []worker.Member, n *env.Node) (worker.Member, error) {
	for _, m := range all {
		if id := n.Member(); id != 0 && m.Node == id || id == 0 && m.Address == n.Address && m.State != gone {
			return m, nil
		}
	}
	return worker.Member{}, fmt.Errorf("the cluster does not list node %d", n.ID)
}

// replicas of a node, by its own word: shards whose state it has, those that count it as a
// voter, and empty ones, which were made and never used.
func (r *Runner) replicas(member uint64) (has, votes, unused int, err error) {
	st, err := r.Ctl.Status()
	if err != nil {
		return 0, 0, 0, err
	}
	if !slices.Contains(st.Answered, member) {
		return 0, 0, 0, fmt.Errorf("the node of id %d does not answer", member)
	}
	for _, rep := range st.Replicas {
		switch {
		case rep.Node != member || rep.Shard == 0:
		case rep.Applied == 0 && len(rep.Voters) == 0:
			unused++
		default:
			has++
			if slices.Contains(rep.Voters, member) {
				votes++
			}
		}
	}
	return has, votes, unused, nil
}

// joins waits until a node that was started anew is a member that votes for a quarter of
// the shards: about a third of what it will hold.
func (r *Runner) joins(ctx context.Context, n *env.Node, f *history.Fault) error {
	votes := 0
	took, err := r.await(ctx, movePatience, fmt.Sprintf("node %d joins and gets replicas", n.ID), func() error {
		m, err := r.member(n)
		if err != nil {
			return err
		}
		if m.State != active {
			return fmt.Errorf("it is %s under id %d", m.State, m.Node)
		}
		n.Joined(m.Node)
		if _, votes, _, err = r.replicas(m.Node); err == nil && votes < max(1, r.Shards/4) {
			err = fmt.Errorf("under id %d it votes for %d shards of %d", m.Node, votes, r.Shards)
		}
		return err
	})
	if err == nil {
		f.Detail += fmt.Sprintf("node %d joined as id %d and votes for %d shards after %.1f s; ", n.ID, n.Member(), votes, took.Seconds())
	}
	return err
}

// startAnew waits for a fault that has to do with the node's process.
func startAnew(n *env.Node) error {
	defer n.Claim()()
	return n.StartAnew()
}

// ready brings what a fault before left unfinished to its end, and lets the spare node in
// if it has not come yet. Then all nodes are active members.
func (r *Runner) ready(ctx context.Context, f *history.Fault) error {
	for _, n := range r.Env.Nodes {
		if n.InUse() {
			continue
		}
		if err := startAnew(n); err != nil {
			return err
		}
	}
	var all []worker.Member
	if _, err := r.await(ctx, patience, "members are told", func() (err error) {
		all, err = r.Ctl.Members()
		return err
	}); err != nil {
		return err
	}
	for _, n := range r.Env.Nodes {
		if n.Leaving() {
			if err := r.replace(ctx, n, f); err != nil {
				return err
			}
		}
		if n.Member() == 0 {
			if err := r.joins(ctx, n, f); err != nil {
				return err
			}
		}
		if m, err := findMember(all, n); err == nil && m.State == draining {
			if err := r.decide(ctx, n, worker.Drain{Undo: true}, active); err != nil {
				return err
			}
		}
	}
	return nil
}

// replace has a node leave for good, waits until it has, and puts another in its place.
func (r *Runner) replace(ctx context.Context, n *env.Node, f *history.Fault) error {
	n.Leave(true)
	if err := r.leaves(ctx, n, f); err != nil {
		return err
	}
	if err := startAnew(n); err != nil {
		return err
	}
	return r.joins(ctx, n, f)
}

// leaves decommissions a node and waits until it is gone.
func (r *Runner) leaves(ctx context.Context, n *env.Node, f *history.Fault) error {
	was := n.Member()
	took, err := r.await(ctx, movePatience, fmt.Sprintf("node %d (id %d) leaves", n.ID, was), func() error {
		m, err := r.member(n)
		switch {
		case err != nil || m.State == gone:
			return err
		case m.State != decommissioned:
			err = r.Ctl.Drain(worker.Drain{Node: was, ForGood: true})
		}
		return fmt.Errorf("it is %s, with %d replicas%s", m.State, m.Replicas, because(err))
	})
	if err == nil {
		f.Detail += fmt.Sprintf("id %d was gone after %.1f s; ", was, took.Seconds())
	}
	return err
}

func because(err error) string {
	if err == nil {
		return ""
	}
	return " (" + err.Error() + ")"
}

// decide asks for a change until the cluster shows it: whether an order that failed was
// carried out is not known.
func (r *Runner) decide(ctx context.Context, n *env.Node, d worker.Drain, state string) error {
	d.Node = n.Member()
	var asked error
	_, err := r.await(ctx, patience, fmt.Sprintf("node %d (id %d) becomes %s", n.ID, d.Node, state), func() error {
		m, err := r.member(n)
		if err != nil || m.State == state {
			return err
		}
		err = fmt.Errorf("it is %s%s", m.State, because(asked))
		asked = r.Ctl.Drain(d)
		return err
	})
	return err
}

// undo also at the run's end.
func (r *Runner) undo(ctx context.Context, n *env.Node) error {
	return r.decide(context.WithoutCancel(ctx), n, worker.Drain{Undo: true}, active)
}

// chosen is the node that a fault of membership drains: whoever leads most shards, or the
// first of the order; not the one that joined for this fault.
func (r *Runner) chosen(ctx context.Context, e Event, came uint64) *env.Node {
	if e.Leader {
		if id, err := r.awaitLeader(ctx); err == nil && id != came {
			return r.Env.Node(id)
		}
	}
	if e.Node == came {
		return r.Env.Node(e.Order[1])
	}
	return r.Env.Node(e.Node)
}

// churn has the spare node join, if it has not, and then another leave: for a while, or
// for good, and then it comes back empty under a new id.
func (r *Runner) churn(ctx context.Context, e Event, f *history.Fault) error {
	f.Nodes, f.Detail = nil, ""
	var came uint64
	for _, n := range r.Env.Nodes {
		if !n.InUse() {
			came = n.ID
			f.Nodes = append(f.Nodes, came)
		}
	}
	if err := r.ready(ctx, f); err != nil {
		return err
	}
	n := r.chosen(ctx, e, came)
	f.Nodes = append(f.Nodes, n.ID)
	took, err := r.empty(ctx, n)
	if err != nil {
		return errors.Join(err, r.undo(ctx, n))
	}
	f.Detail += fmt.Sprintf("node %d (id %d) was drained in %.1f s; ", n.ID, n.Member(), took.Seconds())
	f.Seen = true
	pause(ctx, e.For)
	if e.Mode == 0 || ctx.Err() != nil {
		f.Detail += "set active again"
		return r.undo(ctx, n)
	}
	if err = r.replace(ctx, n, f); err != nil && ctx.Err() != nil {
		f.Detail += "the run's end came before another was in its place"
		return nil // Settle goes on
	}
	return err
}

// empty drains a node and waits until it has no replica, by its own word and by that of
// all others.
func (r *Runner) empty(ctx context.Context, n *env.Node) (time.Duration, error) {
	if err := r.decide(ctx, n, worker.Drain{}, draining); err != nil {
		return 0, err
	}
	return r.await(ctx, movePatience, fmt.Sprintf("node %d (id %d) is drained", n.ID, n.Member()), func() error {
		m, err := r.member(n)
		if err != nil {
			return err
		}
		has, _, unused, err := r.replicas(m.Node)
		if err == nil && (has > 0 || m.Replicas > unused) {
			err = fmt.Errorf("%d replicas are or may be there; it has %d, and %d empty ones", m.Replicas, has, unused)
		}
		return err
	})
}

// moves drains one node after the other and sets it active again before long, so that
// replicas go to and fro.
func (r *Runner) moves(ctx context.Context, e Event, f *history.Fault) error {
	f.Nodes, f.Detail = nil, ""
	if err := r.ready(ctx, f); err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(e.Seed, 0))
	voters := map[uint32][]uint64{}
	r.arrivals(voters)
	var errs []error
	moved, drained := 0, 0
	// Other faults can keep anything from moving for a while.
	for began := time.Now(); ctx.Err() == nil && (time.Since(began) < e.For || moved == 0 && time.Since(began) < e.For+patience); {
		n := r.Env.Node(e.Order[rng.IntN(len(e.Order))])
		hold := time.Duration(300+rng.IntN(1700)) * time.Millisecond
		if r.decide(ctx, n, worker.Drain{}, draining) == nil {
			drained++
		}
		pause(ctx, hold)
		errs = append(errs, r.undo(ctx, n))
		moved += r.arrivals(voters)
	}
	f.Seen = moved > 0
	f.Detail += fmt.Sprintf("%d times a node was drained and set active again, %d replicas seen to come", drained, moved)
	return errors.Join(errs...)
}

// arrivals counts, by the leaders' word, the voters that a shard had not when it was last
// asked, and remembers those that it has.
func (r *Runner) arrivals(voters map[uint32][]uint64) (n int) {
	st, err := r.Ctl.Status()
	if err != nil {
		return 0
	}
	for _, rep := range st.Replicas {
		if rep.Shard == 0 || rep.Leader != rep.Node {
			continue
		}
		if had := voters[rep.Shard]; had != nil {
			for _, v := range rep.Voters {
				if !slices.Contains(had, v) {
					n++
				}
			}
		}
		voters[rep.Shard] = rep.Voters
	}
	return n
}

// Settle ends what faults of membership have begun: no node is drained, joins or leaves,
// and no replica is on its way.
func (r *Runner) Settle(ctx context.Context) error {
	if len(r.Env.InUse()) == len(r.Env.Founders()) {
		return nil // nobody came, so nothing moved
	}
	f := &history.Fault{}
	if err := r.ready(ctx, f); err != nil {
		return err
	}
	took, err := r.await(ctx, movePatience, "replicas are at rest", func() error {
		n, err := r.Ctl.Moving()
		if err == nil && n > 0 {
			err = fmt.Errorf("%d are moving or about to", n)
		}
		return err
	})
	if err == nil {
		r.Say("all nodes are active and no replica moves, %.1f s later; %s", took.Seconds(), f.Detail)
	}
	return err
}
