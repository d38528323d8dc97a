package nemesis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kvd-io/kvd/internal/faults"
	"github.com/kvd-io/kvd/jepsen/env"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/jepsen/worker"
)

// orderTimeout is how long a node may take to obey once; it may have been killed.
const orderTimeout = 5 * time.Second

// order is given again and again until the node obeys: the fault before may have started
// it a moment ago, and then it does not listen yet. A node that does not run obeys nobody.
func order(ctx context.Context, n *env.Node, o faults.Order) (faults.State, error) {
	// What was ordered has to be taken back also when the run ends.
	ctx = context.WithoutCancel(ctx)
	for end := time.Now().Add(patience); ; {
		once, cancel := context.WithTimeout(ctx, orderTimeout)
		st, err := faults.Send(once, n.Socket, o)
		cancel()
		if err == nil || n.PID() == 0 || time.Now().After(end) {
			return st, err
		}
		pause(ctx, look)
	}
}

// under lets a node suffer an order for a while, and until it was met with; met tells from
// the counts before and after whether it was.
func (r *Runner) under(ctx context.Context, e Event, n *env.Node, f *history.Fault, o faults.Order, met func(before, after faults.State) (uint64, string)) error {
	before, err := order(ctx, n, o)
	if err != nil {
		return err
	}
	pause(ctx, e.For)
	// The same order again changes nothing, and tells how far it is.
	r.until(ctx, func() bool {
		now, err := order(ctx, n, o)
		count, _ := met(before, now)
		return err != nil || count > 0
	})
	after, err := order(ctx, n, faults.Order{})
	if err != nil {
		return err
	}
	count, what := met(before, after)
	f.Seen = count > 0
	f.Detail += fmt.Sprintf("%d %s", count, what)
	return nil
}

// more is what a count grew by; a process that was started anew counts anew.
func more(before, after uint64) uint64 { return after - min(after, before) }

func (r *Runner) slowDisk(ctx context.Context, e Event, n *env.Node, f *history.Fault) error {
	slow := time.Duration(2+rand.New(rand.NewPCG(e.Seed, 0)).IntN(60)) * time.Millisecond
	f.Detail += fmt.Sprintf("%v each, ", slow)
	return r.under(ctx, e, n, f, faults.Order{Slow: slow}, func(before, after faults.State) (uint64, string) {
		return more(before.Slowed, after.Slowed), "operations took longer"
	})
}

func (r *Runner) stallSync(ctx context.Context, e Event, n *env.Node, f *history.Fault) error {
	return r.under(ctx, e, n, f, faults.Order{StallSync: true}, func(before, after faults.State) (uint64, string) {
		return more(before.Stalled, after.Stalled), "syncs hung"
	})
}

// jumps of the clock: around what is measured in it, the quarantine of memory (10 s) and
// what a writer is remembered for (an hour).
var jumps = []time.Duration{
	-26 * time.Hour, -time.Hour, -15 * time.Second, -time.Second,
	time.Second, 15 * time.Second, time.Hour, 26 * time.Hour,
}

func (r *Runner) clockJump(ctx context.Context, e Event, n *env.Node, f *history.Fault) error {
	jump := jumps[rand.New(rand.NewPCG(e.Seed, 0)).IntN(len(jumps))]
	f.Detail += fmt.Sprintf("by %v, ", jump)
	return r.under(ctx, e, n, f, faults.Order{Shift: jump}, func(before, after faults.State) (uint64, string) {
		return more(before.Shifted, after.Shifted), "times told"
	})
}

const syncFailed = "faults: sync: input/output error"

// failSync: the node must stop itself, whatever it was about to acknowledge.
func (r *Runner) failSync(ctx context.Context, e Event, n *env.Node, f *history.Fault) error {
	done := n.Doom()
	if done == nil {
		return fmt.Errorf("nemesis: node %d does not run", n.ID)
	}
	from := n.LogSize()
	if _, err := order(ctx, n, faults.Order{FailSync: true}); err != nil {
		n.Spare()
		return err
	}
	var err error
	select {
	case <-done:
		f.Seen = n.Logged(syncFailed, from)
		f.Detail += "the node stopped itself"
	case <-time.After(patience): // also at the run's end: what stops now was not asked to
		_, kerr := n.Kill()
		err = errors.Join(fmt.Errorf("nemesis: node %d goes on for %v with a disk whose syncs fail", n.ID, patience), kerr)
	}
	pause(ctx, e.For)
	return errors.Join(err, n.Start())
}

const (
	diskLeft    = 40 << 20 // less than a node wants, see MinFreeDisk
	diskRefuses = "writes are refused"
	diskFull    = "no space left on device"
)

// MinFreeDisk is what nodes are told to keep free, so that a full disk is noticed before
// the last byte is written, as it should be.
const MinFreeDisk = "48MiB"

// stopsWithin is how long a node takes at most to end because of a write that failed.
const stopsWithin = 3 * time.Second

// diskFull: the node must refuse writes while it has the room to say so, and stop itself
// if what others replicate to it takes the last of it.
func (r *Runner) diskFull(ctx context.Context, e Event, n *env.Node, f *history.Fault) error {
	done := n.Doom()
	if done == nil {
		return fmt.Errorf("nemesis: node %d does not run", n.ID)
	}
	from := n.LogSize()
	before, err := order(ctx, n, faults.Order{Full: true, Left: diskLeft})
	if err != nil {
		n.Spare()
		return err
	}
	rng := rand.New(rand.NewPCG(e.Seed, 0))
	for began := time.Now(); ctx.Err() == nil && r.lasts(began, e.For, time.Since(began) > e.For && n.Logged(diskRefuses, from)); {
		_ = r.bulk(uint32(1+rng.IntN(r.Shards)), 1<<20, 128<<10) // refused where this node leads
		pause(ctx, 50*time.Millisecond)
		if n.PID() == 0 {
			break
		}
	}
	f.Seen = n.Logged(diskRefuses, from)
	select {
	case <-done:
		f.Seen = f.Seen || n.Logged(diskFull, from)
		f.Detail += "the node stopped itself"
		return n.Start()
	default:
	}
	after, err := order(ctx, n, faults.Order{})
	if err != nil && n.PID() == 0 {
		<-done
		f.Detail += "the node stopped itself"
		return n.Start()
	}
	if err == nil {
		// A node that met the end of its disk may be on its way out, and still answer.
		select {
		case <-done:
			f.Detail += "the node stopped itself"
			f.Seen = f.Seen || after.Refused > before.Refused
			return n.Start()
		case <-time.After(stopsWithin):
		}
	}
	n.Spare()
	f.Seen = f.Seen || after.Refused > before.Refused
	f.Detail += fmt.Sprintf("writes refused: %v, %d operations without room", n.Logged(diskRefuses, from), after.Refused-before.Refused)
	return err
}

// growPiece is how many keys are put before the indexes are looked at again: about what
// the smallest holds.
const growPiece = 400

// grow puts so many small keys into one shard that its index is replaced again and again.
func (r *Runner) grow(ctx context.Context, e Event, f *history.Fault) error {
	shard := uint32(1 + rand.New(rand.NewPCG(e.Seed, 0)).IntN(r.Shards))
	f.Nodes = nil
	size := map[uint64]uint64{}
	grown, keys := 0, 0
	var last error
	for began := time.Now(); r.lasts(began, e.For, grown > 0) && ctx.Err() == nil; {
		r.fills++
		n, err := r.Ctl.Fill(worker.Fill{Shard: shard, Bytes: growPiece * worker.MinSize, Size: worker.MinSize, AtOnce: 64, Prefix: fmt.Sprintf("grow/%d/", r.fills)})
		keys += n
		last = err
		st, err := r.Ctl.Status()
		if err != nil {
			continue
		}
		for node, bytes := range st.IndexBytes {
			if had, ok := size[node]; ok && bytes > had {
				grown++
			}
			size[node] = bytes
		}
	}
	f.Seen = grown > 0
	f.Detail += fmt.Sprintf("shard %d, %d keys, %d times an index seen larger", shard, keys, grown)
	if last != nil && !f.Seen {
		f.Detail += fmt.Sprintf(" (%v)", last)
	}
	return nil
}
