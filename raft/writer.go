package raft

import (
	"cmp"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"go.etcd.io/raft/v3/raftpb"
)

// logWriter writes the logs of all groups. One goroutine takes everything that is
// queued, writes it as one batch, syncs once if something in it must be durable,
// and then delivers the answers of all. What comes meanwhile makes the next batch:
// under load batches grow by themselves, and alone nobody waits for company.
type logWriter struct {
	h    *Host
	wake chan struct{} // capacity 1
	mu   struct {
		sync.Mutex
		works []*logWork
	}
	yield atomic.Bool // see wakeUp
	// lateDue asks for the late hard states to be written.
	lateDue  atomic.Bool
	haveLate atomic.Bool
	// busySince is when the batch that is being written was begun, in Unix
	// nanoseconds; 0: none is.
	busySince atomic.Int64

	// The rest is the writing goroutine's own.

	spare []*logWork // the queue before, for reuse
	// late are hard states in which only the commit index changed. A commit is worth
	// no batch of its own: it goes with the next one, or with the next tick. If it is
	// lost, it is learnt again.
	late map[*Group]*raftpb.HardState
}

// logWork is one step of one group's log.
type logWork struct {
	g         *Group
	entries   []*raftpb.Entry
	hard      *raftpb.HardState // nil: unchanged
	snap      *raftpb.Snapshot  // to be installed before entries and hard are written
	installed bool              // it has been
	truncate  uint64            // cut the log up to here; nothing else is set then
	cutTerm   uint64
	responses []*raftpb.Message // to be delivered when this, and all before it, is durable
	end       chan struct{}     // the last of a group that was removed: closed when all before it is written
}

// writtenState belongs to the log writer.
type writtenState struct {
	hard       *raftpb.HardState
	truncated  uint64 // the log begins behind it
	installing bool
	ended      bool       // the group was removed: nothing more is written
	held       []*logWork // queued behind the snapshot that is being installed
}

func (w *logWriter) init(h *Host) {
	w.h = h
	w.wake = make(chan struct{}, 1)
	w.late = make(map[*Group]*raftpb.HardState)
}

func (w *logWriter) queue(work *logWork) {
	w.mu.Lock()
	w.mu.works = append(w.mu.works, work)
	w.mu.Unlock()
}

// wakeUp has the queue written. With sent, messages were handed to the transport just
// before: whoever carries them goes first, for followers are to write while this node does,
// and a sync may keep others from the processor.
func (w *logWriter) wakeUp(sent bool) {
	if sent {
		w.yield.Store(true)
	}
	signal(w.wake)
}

// lone tells whether at most one group waits: with more, whoever yields waits for long.
func (w *logWriter) lone() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.mu.works) <= 1
}

// onTick has the commits written that were put off.
func (w *logWriter) onTick() {
	w.mu.Lock()
	queued := len(w.mu.works) > 0
	w.mu.Unlock()
	if queued || w.haveLate.Load() {
		w.lateDue.Store(true)
		w.wakeUp(false)
	}
}

// stalled tells whether the disk has been at one batch for longer than an election
// takes.
func (w *logWriter) stalled() bool {
	since := w.busySince.Load()
	cfg := &w.h.cfg
	return since != 0 && cfg.Clock.Now().UnixNano()-since > int64(cfg.ElectionTicks)*int64(cfg.TickInterval)
}

func (w *logWriter) run() {
	for {
		select {
		case <-w.wake:
			if w.yield.Swap(false) && w.lone() {
				runtime.Gosched()
			}
			w.step()
		case <-w.h.done:
			w.lateDue.Store(true)
			w.step()
			return
		}
	}
}

// step writes one batch. It returns false if there was nothing to do.
func (w *logWriter) step() bool {
	w.mu.Lock()
	works := w.mu.works
	w.mu.works = w.spare[:0]
	w.mu.Unlock()
	w.spare = nil
	lateDue := w.lateDue.Swap(false) && len(w.late) > 0
	if w.h.failed() || len(works) == 0 && !lateDue {
		return false
	}
	b := batchInMaking{log: w.h.cfg.Log}
	if g, err := w.fill(&b, works, lateDue); err != nil {
		if b.batch != nil {
			b.batch.Discard()
		}
		w.h.fail(g, err)
		return false
	}
	if g, err := w.commit(&b); err != nil {
		w.h.fail(g, err)
		return false
	}
	clear(works)
	w.spare = works[:0]
	w.deliver(b.done)
	return true
}

// fill returns the group whose work could not be written.
func (w *logWriter) fill(b *batchInMaking, works []*logWork, lateDue bool) (*Group, error) {
	for _, work := range works {
		if err := w.add(b, work); err != nil {
			return work.g, err
		}
	}
	if len(w.late) > 0 && (b.batch != nil || lateDue) {
		for _, g := range slices.SortedFunc(maps.Keys(w.late), byID) {
			if err := b.open().SetHardState(g.id, w.late[g]); err != nil {
				return g, failed(g, "write hard state", err)
			}
		}
		clear(w.late)
	}
	w.haveLate.Store(len(w.late) > 0)
	return nil, nil
}

// batchInMaking is what one step writes.
type batchInMaking struct {
	log     LogStore
	batch   LogBatch // nil: nothing to write yet
	sync    bool
	entries int
	done    []*logWork // in order
}

func (b *batchInMaking) open() LogBatch {
	if b.batch == nil {
		b.batch = b.log.NewBatch()
	}
	return b.batch
}

func (w *logWriter) add(b *batchInMaking, work *logWork) error {
	s := &work.g.written
	switch {
	case s.ended:
		return nil
	case work.installed:
		s.installing = false
		if err := w.write(b, work); err != nil {
			return err
		}
		held := s.held
		s.held = nil
		for _, later := range held {
			if err := w.add(b, later); err != nil {
				return err
			}
		}
		return nil
	case s.installing:
		s.held = append(s.held, work)
		return nil
	case work.snap != nil:
		// It may take seconds: the state machine's goroutine does it, and queues the
		// work again. Only this group waits.
		s.installing = true
		work.g.queueInstall(work)
		return nil
	case work.end != nil:
		s.ended = true
		delete(w.late, work.g)
		b.done = append(b.done, work)
		return nil
	}
	return w.write(b, work)
}

func (w *logWriter) write(b *batchInMaking, work *logWork) error {
	g, s := work.g, &work.g.written
	if work.truncate > 0 {
		return w.writeTruncate(b, work)
	}
	b.done = append(b.done, work)
	if work.installed {
		b.sync = true
		meta := work.snap.GetMetadata()
		s.truncated = meta.GetIndex()
		if err := b.open().Reset(g.id, meta.GetIndex(), meta.GetTerm()); err != nil {
			return failed(g, "empty the log", err)
		}
	}
	if len(work.entries) > 0 {
		b.sync = true
		b.entries += len(work.entries)
		if err := b.open().Append(g.id, work.entries); err != nil {
			return failed(g, "append", err)
		}
	}
	if work.hard == nil {
		return nil
	}
	voted := !sameVote(work.hard, s.hard)
	s.hard = work.hard
	if !voted && !work.installed && len(work.entries) == 0 {
		w.late[g] = work.hard
		return nil
	}
	b.sync = b.sync || voted
	delete(w.late, g)
	return failed(g, "write hard state", b.open().SetHardState(g.id, work.hard))
}

func (w *logWriter) writeTruncate(b *batchInMaking, work *logWork) error {
	g := work.g
	if work.truncate <= g.written.truncated {
		return nil // a snapshot, or an earlier look at the log, has done it
	}
	g.written.truncated = work.truncate
	g.storage.cut(work.truncate, work.cutTerm)
	b.done = append(b.done, work)
	return failed(g, "cut the log", b.open().Truncate(g.id, work.truncate, work.cutTerm))
}

func failed(g *Group, what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("raft: group %d: %s: %w", g.id, what, err)
}

func byID(a, b *Group) int { return cmp.Compare(a.id, b.id) }

// commit returns, with an error, some group that was in the batch.
func (w *logWriter) commit(b *batchInMaking) (*Group, error) {
	if b.batch == nil {
		return nil, nil
	}
	clk := w.h.cfg.Clock
	start := clk.Now()
	w.busySince.Store(start.UnixNano())
	err := b.batch.Commit(b.sync)
	w.busySince.Store(0)
	if err != nil {
		g := w.h.groupList()[0]
		if len(b.done) > 0 {
			g = b.done[0].g
		}
		return g, fmt.Errorf("raft: write the log: %w", err)
	}
	took := clk.Now().Sub(start)
	groups := countGroups(b.done)
	c := &w.h.count
	c.logBatches.Add(1)
	c.logGroups.Add(uint64(groups))
	c.logEntries.Add(uint64(b.entries))
	c.logNanos.Add(uint64(took))
	if b.sync {
		c.logSyncs.Add(1)
	}
	if f := w.h.cfg.Hooks.OnLogSync; f != nil {
		f(groups, b.sync, took)
	}
	return nil, nil
}

func countGroups(works []*logWork) int {
	if len(works) == 1 {
		return 1
	}
	seen := make(map[*Group]struct{}, len(works))
	for _, work := range works {
		seen[work.g] = struct{}{}
	}
	return len(seen)
}

// deliver tells the core's storage what is there now, and then sends the answers:
// those for other nodes first, since they have further to go.
func (w *logWriter) deliver(done []*logWork) {
	p := w.h.newPass()
	for _, work := range done {
		g := work.g
		if work.end != nil {
			close(work.end)
			continue
		}
		if work.installed {
			g.storage.reset(work.snap.GetMetadata().GetIndex(), work.snap.GetMetadata().GetTerm())
			g.logSize.reset()
		}
		if n := len(work.entries); n > 0 {
			g.storage.appended(work.entries[n-1].GetIndex())
			g.logSize.add(work.entries)
		}
		for _, m := range work.responses {
			if m.GetTo() == uint64(w.h.cfg.NodeID) {
				g.inbox.addLocal(m)
			} else {
				p.out.add(NodeID(m.GetTo()), GroupMessage{Group: g.id, Message: m})
			}
		}
	}
	p.answers = true
	p.flush()
	p.answers = false
	var last *Group
	for _, work := range done {
		if len(work.responses) > 0 && work.g != last {
			p.add(work.g)
			last = work.g
		}
	}
	p.run()
}
