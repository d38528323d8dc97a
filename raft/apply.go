package raft

import (
	"fmt"
	"runtime"
	"sync"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// applyQueue is what a group's state machine has to do, in order. One goroutine at
// a time works it off.
type applyQueue struct {
	mu struct {
		sync.Mutex
		tasks []*applyTask
		busy  bool // queued for an applier, or with one
	}
}

// applyTask is a run of committed entries, or a snapshot to install.
type applyTask struct {
	entries   []*raftpb.Entry
	responses []*raftpb.Message // to the core, when applied
	install   *logWork
	end       chan struct{} // the last task of a group that was removed: closed when it is reached
}

// appliedBatch goes back to the group when a task is done.
type appliedBatch struct {
	entries     []*raftpb.Entry
	values      []any // by entry; nil where nobody may be waiting
	responses   []*raftpb.Message
	index, term uint64
}

// add returns true when the group must be given to an applier.
func (q *applyQueue) add(t *applyTask) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.mu.tasks = append(q.mu.tasks, t)
	if q.mu.busy {
		return false
	}
	q.mu.busy = true
	return true
}

// next returns nil, and sets the queue free, when there is nothing to do.
func (q *applyQueue) next() *applyTask {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.mu.tasks) == 0 {
		q.mu.busy = false
		return nil
	}
	t := q.mu.tasks[0]
	q.mu.tasks[0] = nil
	q.mu.tasks = q.mu.tasks[1:]
	return t
}

// empty sets the queue free if there is nothing to do.
func (q *applyQueue) empty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.mu.tasks) == 0 {
		q.mu.busy = false
		return true
	}
	return false
}

func (h *Host) applyLoop() {
	for h.applyStep(true) {
		runtime.Gosched() // who was answered goes first
	}
}

// applyStep does one task of one group. Without wait it returns false when there
// is none.
func (h *Host) applyStep(wait bool) bool {
	g := h.applies.pop(wait, h.done)
	if g == nil {
		return false
	}
	t := g.apply.next()
	if t == nil {
		return true
	}
	if t.end != nil {
		close(t.end)
		g.applyMore()
		return true
	}
	if t.install != nil && wait {
		// Installing may take seconds, which would cost the other groups an applier.
		h.wg.Go(func() {
			g.installSnapshot(t.install)
			g.applyMore()
		})
		return true
	}
	if t.install != nil {
		g.installSnapshot(t.install)
	} else {
		g.applyEntries(t)
	}
	g.applyMore()
	return true
}

// applyMore gives the group to an applier again, behind the others.
func (g *Group) applyMore() {
	if !g.apply.empty() {
		g.h.applies.push(g)
	}
}

// applyEntries brings committed entries to the state machine. Configuration
// changes cut them into runs.
func (g *Group) applyEntries(t *applyTask) {
	if g.h.failed() {
		return
	}
	start := g.h.cfg.Clock.Now()
	b := &appliedBatch{entries: t.entries, values: make([]any, len(t.entries)), responses: t.responses}
	from := 0
	for i, e := range t.entries {
		if e.GetType() == raftpb.EntryNormal {
			continue
		}
		if err := g.applyRun(b, from, i); err != nil {
			g.h.fail(g, err)
			return
		}
		var err error
		if b.values[i], err = g.applyConf(e); err != nil {
			g.h.fail(g, err)
			return
		}
		from = i + 1
	}
	if err := g.applyRun(b, from, len(t.entries)); err != nil {
		g.h.fail(g, err)
		return
	}
	last := t.entries[len(t.entries)-1]
	b.index, b.term = last.GetIndex(), last.GetTerm()
	took := g.h.cfg.Clock.Now().Sub(start)
	c := &g.h.count
	c.applyBatches.Add(1)
	c.appliedEntries.Add(uint64(len(t.entries)))
	c.applyNanos.Add(uint64(took))
	if f := g.h.cfg.Hooks.OnApply; f != nil {
		f(g.id, len(t.entries), took)
	}
	g.inbox.addApplied(b)
	g.kick()
}

// applyRun applies the normal entries [from, to) of b.
func (g *Group) applyRun(b *appliedBatch, from, to int) error {
	if from == to {
		return nil
	}
	run := make([]Entry, 0, to-from)
	at := make([]int, 0, to-from) // where in b
	for i := from; i < to; i++ {
		e := b.entries[i]
		if len(e.GetData()) == 0 {
			continue // a leader's first, or a refused configuration change
		}
		if len(e.GetData()) < headerBytes {
			return fmt.Errorf("raft: group %d: entry %d has %d bytes, want a header of %d", g.id, e.GetIndex(), len(e.GetData()), headerBytes)
		}
		run = append(run, Entry{Index: e.GetIndex(), Term: e.GetTerm(), Data: e.GetData()[headerBytes:]})
		at = append(at, i)
	}
	last := b.entries[to-1]
	results, err := g.sm.Apply(run, last.GetIndex(), last.GetTerm())
	if err != nil {
		return fmt.Errorf("raft: group %d: apply entries up to %d: %w", g.id, last.GetIndex(), err)
	}
	if len(results) != len(run) {
		return fmt.Errorf("raft: group %d: apply entries up to %d: %d results for %d entries", g.id, last.GetIndex(), len(results), len(run))
	}
	for i, v := range results {
		b.values[at[i]] = v
	}
	g.storage.setApplied(last.GetIndex(), last.GetTerm())
	return nil
}

// applyConf applies a configuration change. config_id is published before the
// change takes effect in the core. A change that can not follow the present
// configuration changes nothing, on every replica alike; its error is the result.
func (g *Group) applyConf(e *raftpb.Entry) (result any, err error) {
	old := g.storage.appliedState()
	if e.GetIndex() <= old.Index {
		return nil, nil // below a snapshot that was installed meanwhile
	}
	cc, err := decodeConfChange(e)
	if err != nil {
		return nil, fmt.Errorf("raft: group %d: entry %d: configuration change: %w", g.id, e.GetIndex(), err)
	}
	g.sm.BeginConfig(e.GetIndex())
	conf := old.Conf
	if refused := checkConfChange(old.Conf, cc); refused != nil {
		result = fmt.Errorf("raft: group %d: %w: %w", g.id, ErrConfChangeRefused, refused)
	} else if conf, err = g.changeConf(cc); err != nil {
		return nil, err
	}
	g.config.Store(&config{e.GetIndex(), conf, g.h.cfg.Clock.Now()})
	if err := g.sm.ApplyConfig(e.GetIndex(), e.GetTerm(), conf); err != nil {
		return nil, fmt.Errorf("raft: group %d: apply the configuration of entry %d: %w", g.id, e.GetIndex(), err)
	}
	g.storage.setAppliedState(AppliedState{Index: e.GetIndex(), Term: e.GetTerm(), ConfigID: e.GetIndex(), Conf: conf})
	return result, nil
}

func (g *Group) changeConf(cc *raftpb.ConfChangeV2) (*raftpb.ConfState, error) {
	p := g.h.newPass()
	defer p.flush()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mu.stopped != nil {
		return nil, ErrClosed
	}
	var conf *raftpb.ConfState
	err := g.guard(func() error {
		conf = g.core.ApplyConfChange(cc)
		// A leader that was removed no longer leads: that is published here.
		return g.drainLocked(p)
	})
	return conf, err
}

// finishApplyLocked comes after the state machine shows what b applied.
func (g *Group) finishApplyLocked(p *pass, b *appliedBatch) {
	c := &g.mu.core
	g.applied.Store(max(g.applied.Load(), b.index))
	// Terms of entries only rise: if any is of our term, the last one is.
	if c.leadTerm != 0 && b.term == c.leadTerm && c.serving != c.leadTerm {
		c.serving = c.leadTerm
		g.sm.SetServing(c.leadTerm)
	}
	for i, e := range b.entries {
		if e.GetType() == raftpb.EntryNormal {
			g.resolveLocked(e.GetData(), e, b.values[i])
		} else if cc, err := decodeConfChange(e); err == nil {
			g.resolveLocked(cc.GetContext(), e, b.values[i])
		}
	}
	for _, m := range b.responses {
		_ = g.core.Step(m)
	}
	g.mu.reads.release(g.applied.Load())
	if f := g.h.cfg.Hooks.OnApplied; f != nil {
		index := b.index
		p.events = append(p.events, func() { f(g.id, index) })
	}
}

// queueInstall is called by the log writer, which holds back the group's further
// work until the snapshot's comes again.
func (g *Group) queueInstall(w *logWork) {
	if g.apply.add(&applyTask{install: w}) {
		g.h.applies.push(g)
	}
}

// installSnapshot runs between two applies. When it returns, the state is durable
// and the log is not yet emptied: a crash here is seen at open. The configuration
// took effect in the core when the snapshot was stepped, but this replica can
// neither lead nor apply before the log writer has answered.
func (g *Group) installSnapshot(w *logWork) {
	if g.h.failed() {
		return
	}
	meta := w.snap.GetMetadata()
	g.h.log.Info("raft: installs a snapshot", "group", uint64(g.id), "index", meta.GetIndex(), "term", meta.GetTerm())
	st, err := g.sm.InstallSnapshot(meta, w.snap.GetData())
	if err == nil && (st.Index != meta.GetIndex() || st.Term != meta.GetTerm()) {
		err = fmt.Errorf("the state is then at index %d term %d, want index %d term %d", st.Index, st.Term, meta.GetIndex(), meta.GetTerm())
	}
	if err != nil {
		g.h.fail(g, fmt.Errorf("raft: group %d: install the snapshot at index %d: %w", g.id, meta.GetIndex(), err))
		return
	}
	if st.Conf == nil {
		st.Conf = proto.Clone(meta.GetConfState()).(*raftpb.ConfState)
	}
	g.storage.setAppliedState(st)
	g.applied.Store(st.Index)
	g.config.Store(&config{st.ConfigID, st.Conf, g.h.cfg.Clock.Now()})
	g.h.count.snapsGot.Add(1)
	w.snap.Data = nil // it may be large, and the answers keep the snapshot
	w.installed = true
	g.h.writer.queue(w)
	g.h.writer.wakeUp(false)
}
