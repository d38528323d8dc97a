package nemesis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvd-io/kvd/jepsen/env"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/jepsen/worker"
)

// Runner makes planned faults happen.
type Runner struct {
	Env *env.Env
	Ctl Control
	// Record takes each fault when it has ended.
	Record func(history.Fault)
	Say    func(format string, args ...any)
	Shards int
	// Gets tells how many gets were answered so far, by what answered them; nil: not counted.
	Gets func() map[string]uint64

	fills uint64 // names the keys of bulk; the process lane alone uses it
	// quiet keeps other lanes than that of membership from beginning a fault: see await.
	quiet atomic.Bool
	net   network // nil: that of Env
	// patient is how long a fault waits for its proof; 0: patience.
	patient time.Duration
}

// Control asks and orders the cluster: a worker that is never cut off.
type Control interface {
	Status() (*worker.Status, error)
	Transfer(worker.Transfer) error
	Fill(worker.Fill) (int, error)
	Members() ([]worker.Member, error)
	Drain(worker.Drain) error
	Moving() (int, error)
}

// network is what can be cut, and tells whether it is.
type network interface {
	Cut(cause string, cuts []env.Cut) error
	VerifyCuts(except ...string) error
	Dropped() (uint64, error)
	Link(host string, up bool) error
	Reachable(from, to string) bool
}

func (r *Runner) network() network {
	if r.net != nil {
		return r.net
	}
	return r.Env
}

// installs is what a node logs when it begins to install a snapshot.
const installs = "installs a snapshot"

// Run makes the faults happen until the plan or ctx ends. Faults under way when ctx ends
// are cut short; Env.Heal undoes what is left.
func (r *Runner) Run(ctx context.Context, lanes Lanes) {
	began := time.Now()
	var wg sync.WaitGroup
	for _, lane := range lanes {
		wg.Go(func() {
			var held time.Duration
			for _, e := range lane {
				if !pause(ctx, time.Until(began.Add(e.At+held))) {
					return
				}
				if !NeedsSpare(e.Kind) {
					held += r.holdBack(ctx)
				}
				f := r.insist(ctx, e)
				r.Record(f)
				r.Say("%5.1f s  %s", time.Since(began).Seconds(), describe(f))
			}
		})
	}
	wg.Wait()
}

// attempts are how often a fault is tried until it is seen to happen: at each node of the
// smallest cluster.
const attempts = 3

// insist makes a fault happen: where it was not seen to it is tried again at another node,
// as this one may be empty, leave the cluster just now, or be cut off by another fault.
func (r *Runner) insist(ctx context.Context, e Event) history.Fault {
	before := ""
	for try := 1; ; try++ {
		f := history.Fault{Kind: e.Kind, Start: worker.Now()}
		err := r.one(ctx, e, &f)
		f.End = worker.Now()
		if err != nil {
			f.Seen = false
			f.Detail += " failed: " + err.Error()
		}
		f.Short = !f.Seen && ctx.Err() != nil
		f.Detail = before + f.Detail
		// Faults of membership have patience of their own, and go on where they were.
		if f.Seen || f.Short || try == attempts || NeedsSpare(e.Kind) {
			return f
		}
		before = fmt.Sprintf("%s; nodes %v, not seen, tried again: ", f.Detail, f.Nodes)
		e = e.elsewhere()
	}
}

// until waits for the proof of a fault, which other faults may keep from showing.
func (r *Runner) until(ctx context.Context, seen func() bool) {
	for began := time.Now(); !seen() && r.lasts(began, 0, false) && pause(ctx, look); {
	}
}

// lasts tells whether a fault that is made of many steps goes on: as long as it is to, and
// then until it was seen, within patience.
func (r *Runner) lasts(began time.Time, least time.Duration, seen bool) bool {
	took := time.Since(began)
	return took < least || !seen && took < least+cmp.Or(r.patient, patience)
}

// holdBack waits while a fault of membership has asked for quiet, and tells for how long.
func (r *Runner) holdBack(ctx context.Context) time.Duration {
	began := time.Now()
	for r.quiet.Load() && pause(ctx, look) {
	}
	return time.Since(began)
}

func describe(f history.Fault) string {
	seen := "seen"
	if !f.Seen {
		seen = "NOT SEEN"
	}
	if f.Short {
		seen = "cut short by the run's end"
	}
	return fmt.Sprintf("%-14s nodes %v, %.1f s, %s: %s", f.Kind, f.Nodes, float64(f.End-f.Start)/1e9, seen, f.Detail)
}

// pause tells whether ctx still lives after d.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (r *Runner) one(ctx context.Context, e Event, f *history.Fault) error {
	id := e.Node
	if !r.Env.Node(id).InUse() { // a spare node that waits suffers nothing
		id = e.Order[1]
	}
	if e.Leader || e.Kind == IsolateLeader || e.Kind == ClientLeader {
		switch leader, err := r.awaitLeader(ctx); {
		case err == nil:
			id = leader
			f.Detail = "leader; "
		case e.Kind == IsolateLeader || e.Kind == ClientLeader:
			return err
		}
	}
	f.Nodes = []uint64{id}
	n := r.Env.Node(id)
	if slices.Contains(laneKinds[0], e.Kind) && e.Kind != KillAll && e.Kind != RollingRestart && e.Kind != Upgrade {
		defer n.Claim()()
	}
	switch e.Kind {
	case Kill:
		return r.kill(ctx, e, n, f)
	case KillAll:
		return r.killAll(ctx, e, f)
	case Stop:
		return r.stop(ctx, e, n, f)
	case Transfer:
		return r.transfer(ctx, e, f)
	case Snapshot:
		return r.snapshot(ctx, e, n, f)
	case Tiny:
		return r.tiny(ctx, e, n, f)
	case OOM:
		return r.oom(ctx, e, n, f)
	case Grow:
		return r.grow(ctx, e, f)
	case SlowDisk:
		return r.slowDisk(ctx, e, n, f)
	case StallSync:
		return r.stallSync(ctx, e, n, f)
	case FailSync:
		return r.failSync(ctx, e, n, f)
	case DiskFull:
		return r.diskFull(ctx, e, n, f)
	case ClockJump:
		return r.clockJump(ctx, e, n, f)
	case Halves:
		f.Nodes = e.Order[:len(e.Order)/2]
		return r.cut(ctx, e, f, halves(e.Order))
	case Bridge:
		f.Nodes = e.Order[len(e.Order)-1:]
		return r.cut(ctx, e, f, bridge(e.Order))
	case Ring:
		f.Nodes = e.Order
		return r.cut(ctx, e, f, ring(e.Order))
	case OneWay:
		f.Detail += map[bool]string{true: "deaf; ", false: "mute; "}[e.Mode == 1]
		return r.cut(ctx, e, f, oneWay(id, e.Order, e.Mode))
	case IsolateLeader:
		return r.cut(ctx, e, f, apart([]uint64{id}, others(id, e.Order)))
	case ClientLeader:
		f.Detail += [3]string{"both ways; ", "requests only; ", "answers only; "}[e.Mode]
		return r.cut(ctx, e, f, fromClients(id, r.Env.ClientHosts(), e.Mode, e.Seed))
	case Flap:
		return r.flap(ctx, e, id, f)
	case RollingRestart:
		return r.rollingRestart(ctx, e, f)
	case Upgrade:
		return r.upgrade(ctx, e, f)
	case Drain:
		return r.drains(ctx, e, f)
	case Replace:
		return r.lost(ctx, e, f)
	case Churn:
		return r.churn(ctx, e, f)
	case Moves:
		return r.moves(ctx, e, f)
	}
	return fmt.Errorf("nemesis: fault %q is not known", e.Kind)
}

// patience is how long a fault waits for the cluster to work: a fault of the other lane
// may be in the way.
const patience = 15 * time.Second

// leaderPatience is how long a fault waits for somebody to lead: the one before may have
// left nobody.
const leaderPatience = 5 * time.Second

func (r *Runner) awaitLeader(ctx context.Context) (uint64, error) {
	for end := time.Now().Add(leaderPatience); ; {
		id, err := r.leader()
		if err == nil || time.Now().After(end) || !pause(ctx, 50*time.Millisecond) {
			return id, err
		}
	}
}

// leader is the node that serves most shards now.
func (r *Runner) leader() (uint64, error) {
	st, err := r.Ctl.Status()
	if err != nil {
		return 0, err
	}
	type claim struct{ term, node uint64 }
	claims := map[uint32]claim{}
	for _, rep := range st.Replicas {
		if rep.Shard != 0 && rep.ServedTerm > claims[rep.Shard].term {
			claims[rep.Shard] = claim{rep.ServedTerm, rep.Node}
		}
	}
	count := map[uint64]int{}
	var best uint64
	for _, c := range claims {
		n := r.Env.ByMember(c.node)
		if n == nil {
			continue // it has joined a moment ago
		}
		count[n.ID]++
		if best == 0 || count[n.ID] > count[best] || (count[n.ID] == count[best] && n.ID < best) {
			best = n.ID
		}
	}
	if best == 0 {
		return 0, errors.New("nemesis: no shard has a leader now")
	}
	return best, nil
}

func (r *Runner) kill(ctx context.Context, e Event, n *env.Node, f *history.Fault) error {
	ran, err := n.Kill()
	f.Seen = ran
	pause(ctx, e.For)
	return errors.Join(err, n.Start())
}

func (r *Runner) killAll(ctx context.Context, e Event, f *history.Fault) error {
	f.Nodes = nil
	var dying []<-chan struct{}
	var all []*env.Node
	for _, n := range r.Env.Nodes {
		defer n.Claim()()
		if n.InUse() {
			all = append(all, n)
		}
	}
	for _, n := range all {
		if done := n.Doom(); done != nil {
			dying = append(dying, done)
			f.Nodes = append(f.Nodes, n.ID)
		}
	}
	var errs []error
	for _, n := range all {
		errs = append(errs, n.Signal(syscall.SIGKILL))
	}
	for _, done := range dying {
		<-done
	}
	f.Seen = len(dying) == len(all)
	f.Detail = fmt.Sprintf("%d of %d ran", len(dying), len(all))
	pause(ctx, e.For)
	for _, n := range all {
		errs = append(errs, n.Start())
	}
	return errors.Join(errs...)
}

func (r *Runner) stop(ctx context.Context, e Event, n *env.Node, f *history.Fault) error {
	if err := n.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	// The signal takes a moment to reach every thread: a long one, where processors are scarce.
	for end := time.Now().Add(patience); !f.Seen && n.PID() != 0 && time.Now().Before(end) && pause(ctx, 2*time.Millisecond); {
		f.Seen = n.Stopped()
	}
	if f.Seen {
		before := r.gets()
		pause(ctx, e.For)
		f.Gets = map[string]uint64{}
		for via, count := range r.gets() {
			f.Gets[via] = more(before[via], count)
		}
		f.Detail += fmt.Sprintf("gets answered meanwhile: %v", f.Gets)
	}
	return n.Signal(syscall.SIGCONT)
}

func (r *Runner) gets() map[string]uint64 {
	if r.Gets == nil {
		return nil
	}
	return r.Gets()
}

func (r *Runner) transfer(ctx context.Context, e Event, f *history.Fault) error {
	rng := rand.New(rand.NewPCG(e.Seed, 0))
	f.Nodes = nil
	done, asked := 0, 0
	for began := time.Now(); r.lasts(began, e.For, done > 0) && ctx.Err() == nil; {
		t := worker.Transfer{Shard: uint32(1 + rng.IntN(r.Shards)), To: r.Env.Node(e.Order[rng.IntN(len(e.Order))]).Member()}
		asked++
		if r.Ctl.Transfer(t) == nil {
			done++
		}
		pause(ctx, time.Duration(rng.IntN(60))*time.Millisecond)
	}
	f.Seen = done > 0
	f.Detail = fmt.Sprintf("%d transfers, %d asked for", done, asked)
	return nil
}

// bulk writes more into a shard than it keeps of its log.
func (r *Runner) bulk(shard uint32, bytes int64, size int) error {
	r.fills++
	_, err := r.Ctl.Fill(worker.Fill{Shard: shard, Bytes: bytes, Size: size, Prefix: fmt.Sprintf("bulk/%d/", r.fills)})
	return err
}

// snapshot brings a node so far behind that it is sent a snapshot, and kills it while it
// installs that.
func (r *Runner) snapshot(ctx context.Context, e Event, n *env.Node, f *history.Fault) error {
	rng := rand.New(rand.NewPCG(e.Seed, 0))
	shard := uint32(1 + rng.IntN(r.Shards))
	st, err := r.awaitStatus(ctx)
	if err != nil {
		return err
	}
	held := map[uint32]uint64{} // what it has applied, by shard
	for _, rep := range st.Replicas {
		if rep.Node == n.Member() && rep.Shard != 0 {
			held[rep.Shard] = rep.Applied
		}
	}
	for range r.Shards { // not each node has a replica of each shard where more nodes joined
		if _, has := held[shard]; has {
			break
		}
		shard = shard%uint32(r.Shards) + 1
	}
	had := held[shard]
	if _, err := n.Kill(); err != nil {
		return err
	}
	wrote, err := r.outrun(ctx, shard, had, n.Member())
	f.Detail += fmt.Sprintf("shard %d, %d MiB written, ", shard, wrote>>20)
	from := n.LogSize()
	if err = errors.Join(err, n.Start()); err != nil {
		return err
	}
	for end := time.Now().Add(20 * time.Second); !n.Logged(installs, from); {
		if time.Now().After(end) || !pause(ctx, 2*time.Millisecond) {
			f.Detail += "no snapshot came"
			return nil
		}
	}
	delay := time.Duration(rng.IntN(30)) * time.Millisecond
	pause(ctx, delay)
	ran, err := n.Kill()
	f.Seen = ran
	f.Detail += fmt.Sprintf("killed %v after it began to install", delay)
	return errors.Join(err, n.Start())
}

const (
	bulkPiece = 8 << 20
	bulkMost  = 160 << 20
)

// awaitStatus asks until somebody answers: another fault may be in the way.
func (r *Runner) awaitStatus(ctx context.Context) (*worker.Status, error) {
	for end := time.Now().Add(patience); ; {
		st, err := r.Ctl.Status()
		if err == nil || time.Now().After(end) || !pause(ctx, 50*time.Millisecond) {
			return st, err
		}
	}
}

// outrun writes until no live replica of the shard has the entry that follows index. How
// much that takes depends on what a log keeps, and on when the state was flushed last.
func (r *Runner) outrun(ctx context.Context, shard uint32, index, away uint64) (wrote int64, err error) {
	last := time.Now()
	for wrote < bulkMost && ctx.Err() == nil {
		if err := r.bulk(shard, bulkPiece, 256<<10); err != nil {
			if time.Since(last) > patience {
				return wrote, err
			}
			continue // a partition may be in the way, and will be healed
		}
		wrote, last = wrote+bulkPiece, time.Now()
		st, err := r.awaitStatus(ctx)
		if err != nil {
			return wrote, err
		}
		left := false
		for _, rep := range st.Replicas {
			left = left || (rep.Shard == shard && rep.Node != away && rep.First <= index+1)
		}
		if !left {
			return wrote, nil
		}
	}
	return wrote, nil
}

// tinyArena is less than what the workloads keep under way.
var tinyArena = []string{"--arena", "4MiB", "--max-chunk", "2MiB"}

func (r *Runner) tiny(ctx context.Context, e Event, n *env.Node, f *history.Fault) error {
	rng := rand.New(rand.NewPCG(e.Seed, 0))
	if _, err := n.Kill(); err != nil {
		return err
	}
	if err := n.Start(tinyArena...); err != nil {
		return err
	}
	var evicted, away uint64
	var last error
	for began := time.Now(); r.lasts(began, e.For, evicted+away > 0) && ctx.Err() == nil; {
		// Bulk drives the rest out; it fails where another fault is in its way.
		last = r.bulk(uint32(1+rng.IntN(r.Shards)), 1<<20, 32<<10)
		if st, err := r.Ctl.Status(); err == nil {
			evicted = max(evicted, st.Evictions[n.Member()])
			now := uint64(0)
			for _, rep := range st.Replicas {
				if rep.Node == n.Member() {
					now += rep.Away
				}
			}
			away = max(away, now)
		}
		pause(ctx, 100*time.Millisecond)
	}
	f.Seen = evicted+away > 0
	f.Detail += fmt.Sprintf("%d evictions, %d keys not in memory", evicted, away)
	if last != nil && !f.Seen {
		f.Detail += fmt.Sprintf(" (%v)", last)
	}
	if _, err := n.Kill(); err != nil {
		return err
	}
	return n.Start()
}

func (r *Runner) oom(ctx context.Context, e Event, n *env.Node, f *history.Fault) error {
	kills, err := r.Env.OOM(ctx, n)
	f.Seen = kills > 0
	f.Detail += fmt.Sprintf("%d kills by the kernel", kills)
	pause(ctx, e.For)
	if n.PID() == 0 {
		err = errors.Join(err, n.Start())
	}
	return err
}

const laneCause = "nemesis"

func (r *Runner) cut(ctx context.Context, e Event, f *history.Fault, cuts []env.Cut) error {
	if err := r.network().Cut(laneCause, cuts); err != nil {
		return err
	}
	verr := r.network().VerifyCuts()
	before, err := r.network().Dropped() // the probes' own packets are behind us
	if err != nil {
		return err
	}
	after, derr := before, error(nil)
	pause(ctx, e.For)
	r.until(ctx, func() bool {
		after, derr = r.network().Dropped()
		return verr != nil || derr != nil || after > before
	})
	f.Seen = verr == nil && derr == nil && after > before
	f.Detail += fmt.Sprintf("%d ways cut, each probed; %d packets dropped", len(cuts), after-before)
	return errors.Join(verr, derr, r.network().Cut(laneCause, nil), r.network().VerifyCuts())
}

func (r *Runner) flap(ctx context.Context, e Event, id uint64, f *history.Fault) error {
	rng := rand.New(rand.NewPCG(e.Seed, 0))
	host := hostOf(id)
	downs, seen := 0, 0
	for began := time.Now(); r.lasts(began, e.For, seen > 0) && ctx.Err() == nil; downs++ {
		if err := r.network().Link(host, false); err != nil {
			return err
		}
		if !r.network().Reachable(env.Control, host) {
			seen++
		}
		pause(ctx, time.Duration(50+rng.IntN(450))*time.Millisecond)
		if err := r.network().Link(host, true); err != nil {
			return err
		}
		pause(ctx, time.Duration(100+rng.IntN(500))*time.Millisecond)
	}
	f.Seen = seen > 0
	f.Detail += fmt.Sprintf("down %d times, seen %d times", downs, seen)
	return r.network().VerifyCuts()
}
