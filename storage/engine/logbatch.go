package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// A short overwritten suffix is deleted entry by entry: range tombstones make every
// iterator over the memtable sort them.
const pointDeletesAtMost = 32

// LogBatch collects log writes of several groups. Commit is atomic. A batch is used
// by one goroutine, and a group is in one batch at a time.
type LogBatch struct {
	e       *Engine
	b       *pebble.Batch
	pending map[uint64]*pendingLog
	cuts    bool // removes entries from the front: see Engine.cut
	scratch []byte
	done    bool
}

// pendingLog is a group's log as it will be after the commit.
type pendingLog struct {
	g *logGroup
	LogState
	reset bool            // the cached tail is void
	gone  bool            // entries are removed
	added []*raftpb.Entry // contiguous, up to Last
}

// NewLogBatch starts an empty batch: Commit or Discard it.
func (e *Engine) NewLogBatch() *LogBatch {
	return &LogBatch{e: e, pending: make(map[uint64]*pendingLog, 1)}
}

func (b *LogBatch) start(group uint64) (*pendingLog, error) {
	if b.done {
		return nil, errors.New("engine: log batch used after Commit or Discard")
	}
	if err := b.e.writable(); err != nil {
		return nil, err
	}
	if b.b == nil {
		b.b = b.e.log.NewBatch()
	}
	if p := b.pending[group]; p != nil {
		return p, nil
	}
	g, err := b.e.loadedLogGroup(group)
	if err != nil {
		return nil, err
	}
	g.mu.RLock()
	defer g.mu.RUnlock()
	p := &pendingLog{g: g, LogState: g.mu.LogState}
	b.pending[group] = p
	return p, nil
}

// Append stores entries; existing ones from the first one's index on are removed in
// the same batch. The entries must be contiguous, start in (Truncated, Last+1], and
// not be changed afterwards: the cache keeps them.
func (b *LogBatch) Append(group uint64, entries []*raftpb.Entry) error {
	if len(entries) == 0 {
		return nil
	}
	p, err := b.start(group)
	if err != nil {
		return err
	}
	first := entries[0].GetIndex()
	if first <= p.Truncated || first > p.Last+1 {
		return fmt.Errorf("engine: group %d: append at index %d does not fit the log (%d, %d]", group, first, p.Truncated, p.Last)
	}
	for i, e := range entries {
		if e.GetIndex() != first+uint64(i) {
			return fmt.Errorf("engine: group %d: append of index %d where %d was expected", group, e.GetIndex(), first+uint64(i))
		}
	}
	for _, e := range entries {
		if err := b.put(group, e); err != nil {
			return err
		}
	}
	last := first + uint64(len(entries)) - 1
	if err := b.deleteEntries(group, last+1, p.Last); err != nil {
		return err
	}
	p.Last = last
	keep := 0
	for keep < len(p.added) && p.added[keep].GetIndex() < first {
		keep++
	}
	p.added = append(p.added[:keep:keep], entries...)
	return nil
}

// put encodes straight into the batch.
func (b *LogBatch) put(group uint64, e *raftpb.Entry) error {
	size := proto.Size(e)
	op := b.b.SetDeferred(entryKeyLen, sumLen+size)
	appendEntryKey(op.Key[:0], group, e.GetIndex())
	out, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(op.Value[:sumLen], e)
	if err != nil || len(out) != sumLen+size {
		// The batch now has an undefined value: it can not be committed any more.
		b.Discard()
		return fmt.Errorf("engine: group %d: encoding entry %d (%d bytes, got %d): %w", group, e.GetIndex(), size, len(out)-sumLen, err)
	}
	seal(op.Key, op.Value)
	return op.Finish()
}

// deleteEntries removes [from, to].
func (b *LogBatch) deleteEntries(group, from, to uint64) error {
	if from > to {
		return nil
	}
	b.pending[group].gone = true
	if to-from < pointDeletesAtMost {
		for i := from; i <= to; i++ {
			b.scratch = appendEntryKey(b.scratch[:0], group, i)
			if err := b.b.Delete(b.scratch, nil); err != nil {
				return storeError("log", err)
			}
		}
		return nil
	}
	end := appendEntryKey(nil, group, to+1)
	return b.b.DeleteRange(appendEntryKey(nil, group, from), end, nil)
}

// SetHardState stores a copy of hs.
func (b *LogBatch) SetHardState(group uint64, hs *raftpb.HardState) error {
	p, err := b.start(group)
	if err != nil {
		return err
	}
	value, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, sumLen, sumLen+32), hs)
	if err != nil {
		return fmt.Errorf("engine: group %d: encoding the hard state: %w", group, err)
	}
	b.scratch = appendGroup(b.scratch[:0], group, logHard)
	seal(b.scratch, value)
	p.Hard = proto.Clone(hs).(*raftpb.HardState)
	return b.b.Set(b.scratch, value, nil)
}

// Truncate removes the entries up to index, whose term is given. An index at or below
// the present one does nothing; one beyond the last entry is an error (see Reset).
func (b *LogBatch) Truncate(group, index, term uint64) error {
	p, err := b.start(group)
	if err != nil {
		return err
	}
	if index <= p.Truncated {
		return nil
	}
	if index > p.Last {
		return fmt.Errorf("engine: group %d: truncation to %d beyond the last entry %d; use Reset", group, index, p.Last)
	}
	if err := b.deleteEntries(group, p.Truncated+1, index); err != nil {
		return err
	}
	for len(p.added) > 0 && p.added[0].GetIndex() <= index {
		p.added = p.added[1:]
	}
	return b.setTruncated(p, index, term)
}

// Reset empties the log: the next entry is index+1 (a snapshot was installed).
func (b *LogBatch) Reset(group, index, term uint64) error {
	p, err := b.start(group)
	if err != nil {
		return err
	}
	err = b.b.DeleteRange(appendGroup(nil, group, logEntry), appendGroup(nil, group, logEntry+1), nil)
	if err != nil {
		return storeError("log", err)
	}
	p.reset, p.gone, p.added, p.Last = true, true, nil, index
	return b.setTruncated(p, index, term)
}

func (b *LogBatch) setTruncated(p *pendingLog, index, term uint64) error {
	b.cuts = true
	p.Truncated, p.TruncatedTerm = index, term
	value := binary.LittleEndian.AppendUint64(make([]byte, sumLen, sumLen+16), index)
	value = binary.LittleEndian.AppendUint64(value, term)
	b.scratch = appendGroup(b.scratch[:0], p.g.id, logTrunc)
	seal(b.scratch, value)
	return b.b.Set(b.scratch, value, nil)
}

// Commit writes the batch and, with sync, returns once it is durable; only then do
// LogEntries and LogTerm see it. After an error nothing is known about the batch, and
// the engine takes no more writes (ErrFailed). The batch is not used afterwards.
func (b *LogBatch) Commit(sync bool) error {
	if b.done {
		return errors.New("engine: log batch used after Commit or Discard")
	}
	defer b.Discard()
	if err := b.e.writable(); err != nil {
		return err
	}
	if b.b == nil || b.b.Empty() {
		return nil
	}
	if b.cuts {
		b.e.cut.RLock()
		defer b.e.cut.RUnlock()
	}
	o := pebble.NoSync
	if sync {
		o = pebble.Sync
	}
	for _, p := range b.pending {
		p.begin()
	}
	began := time.Now()
	err := b.e.commit(b.b, o)
	if err == nil && sync {
		b.e.cfg.OnSync(time.Since(began))
	}
	for _, p := range b.pending {
		p.end(err == nil)
	}
	return err
}

func (p *pendingLog) begin() {
	if !p.gone {
		return
	}
	p.g.mu.Lock()
	defer p.g.mu.Unlock()
	p.g.mu.removing = make(chan struct{})
}

// end shows the batch to readers, if it was committed.
func (p *pendingLog) end(committed bool) {
	p.g.mu.Lock()
	defer p.g.mu.Unlock()
	if p.gone {
		close(p.g.mu.removing)
		p.g.mu.removing = nil
	}
	if !committed {
		return
	}
	p.g.mu.version++
	t := &p.g.mu.tail
	if p.reset {
		t.clear()
	}
	// What was added may be truncated again in the same batch, and then no longer tells
	// the tail what it overwrote.
	t.cutFrom(p.Last + 1)
	t.add(p.added)
	t.cutTo(p.Truncated)
	p.g.mu.LogState = p.LogState
}

// Discard drops an uncommitted batch.
func (b *LogBatch) Discard() {
	b.done = true
	if b.b != nil {
		_ = b.b.Close() // frees memory only
		b.b = nil
	}
}

// commit is the only way into either store's commit pipeline. Pebble reports a failed
// commit to its logger and then returns nil, or panics: both end in fail.
func (e *Engine) commit(b *pebble.Batch, o *pebble.WriteOptions) (err error) {
	defer func() {
		if r := recover(); r != nil {
			e.fail(fmt.Errorf("engine: commit: %v", r))
			err = e.failure()
		}
	}()
	if err := b.Commit(o); err != nil {
		e.fail(fmt.Errorf("engine: commit: %w", err))
	}
	return e.failure()
}
