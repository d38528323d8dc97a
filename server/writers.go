package server

import (
	"encoding/binary"
	"fmt"
	"sync"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/internal/chaos"
	"github.com/kvd-io/kvd/storage/engine"
)

// writerLimits bound what is remembered of writers. They are part of the meaning of
// the log: all replicas must have the same.
type writerLimits struct {
	writers int // of one shard
	results int // of one writer, not yet acknowledged
}

var defaultWriterLimits = writerLimits{writers: 16384, results: 1024}

// writers remembers the results of stamped writes, so that a retried write is
// answered and not applied again. It mirrors auxiliary keys of the engine; it changes
// by log entries only.
type writers struct {
	limits writerLimits
	mu     struct {
		sync.Mutex // applying writes, looking for idle ones reads
		byID       map[uint64]*writer
	}
}

type writer struct {
	lastUse    int64 // leader's Unix milliseconds of the last entry
	ackedBelow uint64
	results    map[uint64]writeResult
	// owner is the id of the token that opened it, or "": ids are easily guessed, and who
	// wrote under another's could have that one's next write taken for done.
	owner string
}

// maxOwner is the length of a token's id.
const maxOwner = 16

func newWriters(l writerLimits) *writers {
	w := &writers{limits: l}
	w.mu.byID = map[uint64]*writer{}
	return w
}

func writerKey(id uint64) []byte { return binary.BigEndian.AppendUint64(nil, id) }

func resultKey(id, sequence uint64) []byte {
	return binary.BigEndian.AppendUint64(writerKey(id), sequence)
}

func (w *writers) load(g *engine.Group) error {
	byID := map[uint64]*writer{}
	err := g.ScanAux(auxWriter, nil, nil, func(key, value []byte) (bool, error) {
		if len(key) != 8 || len(value) < 16 || len(value) > 16+maxOwner {
			return false, fmt.Errorf("%w: writer record of %d bytes", engine.ErrCorrupt, len(value))
		}
		byID[binary.BigEndian.Uint64(key)] = &writer{
			lastUse:    int64(binary.BigEndian.Uint64(value)),
			ackedBelow: binary.BigEndian.Uint64(value[8:]),
			results:    map[uint64]writeResult{},
			owner:      string(value[16:]),
		}
		return true, nil
	})
	if err != nil {
		return err
	}
	err = g.ScanAux(auxResult, nil, nil, func(key, value []byte) (bool, error) {
		if len(key) != 16 || len(value) != 12 {
			return false, fmt.Errorf("%w: writer result of %d bytes", engine.ErrCorrupt, len(value))
		}
		if wr := byID[binary.BigEndian.Uint64(key)]; wr != nil {
			wr.results[binary.BigEndian.Uint64(key[8:])] = writeResult{
				outcome: kvdv1.WriteOutcome(binary.BigEndian.Uint32(value)),
				version: binary.BigEndian.Uint64(value[4:]),
			}
		}
		return true, nil
	})
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.mu.byID = byID
	w.mu.Unlock()
	return nil
}

// checkWriterRecord is for what a peer sent.
func checkWriterRecord(it engine.Item) error {
	key, value, more := 8, 16, maxOwner
	if it.Aux == auxResult {
		key, value, more = 16, 12, 0
	}
	if len(it.Key) != key || len(it.Value) < value || len(it.Value) > value+more {
		return fmt.Errorf("%w: writer record %q of %d and %d bytes, want %d and %d to %d", engine.ErrCorrupt, it.Aux, len(it.Key), len(it.Value), key, value, value+more)
	}
	return nil
}

// lookup returns the result that a retried write already has. An unknown writer, or a
// sequence that was acknowledged and forgotten, can not be told from one that was
// applied: its result says that the writer is gone. So does that of another's writer.
func (w *writers) lookup(s *kvdv1.WriterStamp, owner string) (writeResult, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	wr := w.mu.byID[s.GetWriterId()]
	if wr == nil || wr.owner != owner || s.GetSequence() < wr.ackedBelow {
		return writeResult{outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_WRITER_EXPIRED}, true
	}
	r, ok := wr.results[s.GetSequence()]
	return r, ok && !chaos.Broken(chaos.RetryTwice)
}

func (w *writers) open(b *engine.Batch, id uint64, now int64, owner string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.mu.byID) >= w.limits.writers {
		if err := w.forgetLocked(b, w.oldestLocked()); err != nil {
			return err
		}
	}
	wr := &writer{lastUse: now, results: map[uint64]writeResult{}, owner: owner}
	w.mu.byID[id] = wr
	return w.save(b, id, wr)
}

func (w *writers) oldestLocked() uint64 {
	var oldest uint64
	for id, wr := range w.mu.byID {
		o := w.mu.byID[oldest]
		if o == nil || wr.lastUse < o.lastUse || wr.lastUse == o.lastUse && id < oldest {
			oldest = id
		}
	}
	return oldest
}

func (w *writers) save(b *engine.Batch, id uint64, wr *writer) error {
	v := binary.BigEndian.AppendUint64(nil, uint64(wr.lastUse))
	v = binary.BigEndian.AppendUint64(v, wr.ackedBelow)
	return b.PutAux(auxWriter, writerKey(id), append(v, wr.owner...))
}

// record remembers a result and forgets what the writer has acknowledged.
func (w *writers) record(b *engine.Batch, s *kvdv1.WriterStamp, now int64, r writeResult) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	id, wr := s.GetWriterId(), w.mu.byID[s.GetWriterId()]
	r.resident = false // a place in memory is not for later
	wr.results[s.GetSequence()] = r
	v := binary.BigEndian.AppendUint32(nil, uint32(r.outcome))
	if err := b.PutAux(auxResult, resultKey(id, s.GetSequence()), binary.BigEndian.AppendUint64(v, r.version)); err != nil {
		return err
	}
	below := max(wr.ackedBelow, min(s.GetAckedBelow(), s.GetSequence()))
	for len(wr.results) > w.limits.results {
		// A writer that never acknowledges keeps its newest results only.
		oldest := s.GetSequence()
		for seq := range wr.results {
			oldest = min(oldest, seq)
		}
		below = max(below, oldest+1)
		if err := w.dropBelowLocked(b, id, wr, below); err != nil {
			return err
		}
	}
	if err := w.dropBelowLocked(b, id, wr, below); err != nil {
		return err
	}
	wr.ackedBelow, wr.lastUse = below, max(wr.lastUse, now)
	return w.save(b, id, wr)
}

func (w *writers) dropBelowLocked(b *engine.Batch, id uint64, wr *writer, below uint64) error {
	for seq := range wr.results {
		if seq < below {
			delete(wr.results, seq)
			if err := b.DeleteAux(auxResult, resultKey(id, seq)); err != nil {
				return err
			}
		}
	}
	return nil
}

// expire forgets the named writers unless they were used after idleSince.
func (w *writers) expire(b *engine.Batch, ids []uint64, idleSince int64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		if wr := w.mu.byID[id]; wr != nil && wr.lastUse <= idleSince {
			if err := w.forgetLocked(b, id); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *writers) forgetLocked(b *engine.Batch, id uint64) error {
	for seq := range w.mu.byID[id].results {
		if err := b.DeleteAux(auxResult, resultKey(id, seq)); err != nil {
			return err
		}
	}
	delete(w.mu.byID, id)
	return b.DeleteAux(auxWriter, writerKey(id))
}

// idle lists up to limit writers that were not used since.
func (w *writers) idle(since int64, limit int) []uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	var ids []uint64
	for id, wr := range w.mu.byID {
		if wr.lastUse <= since && len(ids) < limit {
			ids = append(ids, id)
		}
	}
	return ids
}
