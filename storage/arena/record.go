package arena

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// ErrNoSlot: every control record of this boot was given out. A restart gives
// fresh ones; a larger Config.Slots more of them.
var ErrNoSlot = errors.New("arena: no control record left in this boot")

// controlTable is the memory of all control records.
type controlTable struct {
	mem   *rdma.Memory
	bytes []byte
	slots uint32
	boot  uint64
	taken atomic.Uint32 // slots given out; never given back: see Record

	onStore func(inRecord bool) // Config's
}

func newControlTable(cfg Config) (*controlTable, error) {
	size := uint64(cfg.Slots) * layout.RecordSize
	mem, err := rdma.AllocMemory(cfg.Name+"control", size, rdma.MemoryOptions{Shareable: true})
	if err != nil {
		return nil, fmt.Errorf("arena: control table of %d records: %w", cfg.Slots, err)
	}
	return &controlTable{mem: mem, bytes: mem.Bytes(), slots: uint32(cfg.Slots), boot: cfg.BootID, onStore: cfg.OnStore}, nil
}

// NewRecord takes a fresh slot for a replica, or returns ErrNoSlot. Slots are given
// out in order, so open replicas in the order of their shards, and are never used
// twice in a boot: who remembers a slot can trust that it is still about the same
// replica. The record is published (all words stored, shard, replica and boot id
// last) before it returns; term starts at the given one.
func (a *Arena) NewRecord(shard, replica, term uint64) (*Record, error) {
	slot := a.control.taken.Add(1) - 1
	if slot >= a.control.slots {
		a.control.taken.Store(a.control.slots)
		return nil, fmt.Errorf("%w: shard %d replica %d wants one, all %d are used: restart the node or raise the number of slots",
			ErrNoSlot, shard, replica, a.control.slots)
	}
	r := &Record{slot: slot, onStore: a.control.onStore, words: a.control.bytes[slot*layout.RecordSize:][:layout.RecordSize]}
	r.store(layout.WordTerm, term)
	r.store(layout.WordServedTerm, 0)
	r.store(layout.WordConfigID, 0)
	r.store(layout.WordApplied, 0)
	r.store(layout.WordLayoutGen, 1)
	r.store(layout.WordShard, shard)
	r.store(layout.WordReplica, replica)
	r.store(layout.WordBootID, a.control.boot)
	return r, nil
}

// Record is the control record of one shard replica. Each setter is one atomic
// store and may be called from any goroutine; terms, applied and layout_gen only
// rise (a lower value is ignored).
type Record struct {
	slot    uint32
	words   []byte // this record's bytes of the control table
	retired atomic.Bool
	onStore func(inRecord bool) // Config's
}

func (r *Record) store(word int, v uint64) {
	layout.StoreWord(r.words, uint64(word)*8, v)
	if r.onStore != nil {
		r.onStore(true)
	}
}

func (r *Record) raise(word int, v uint64) {
	layout.RaiseWord(r.words, uint64(word)*8, v)
	if r.onStore != nil {
		r.onStore(true)
	}
}

func (r *Record) load(word int) uint64 { return layout.LoadWord(r.words, uint64(word)*8) }

// Slot is the record's number in the control table.
func (r *Record) Slot() uint32 { return r.slot }

// SetTerm raises the highest term adopted.
func (r *Record) SetTerm(term uint64) { r.raise(layout.WordTerm, term) }

// SetServedTerm stores the term served, or 0. A retired record serves none.
func (r *Record) SetServedTerm(term uint64) {
	if r.retired.Load() {
		return
	}
	r.store(layout.WordServedTerm, term)
	if r.retired.Load() { // Retire may have come between
		r.store(layout.WordServedTerm, 0)
	}
}

// SetConfigID stores the index of the last configuration applied.
func (r *Record) SetConfigID(index uint64) { r.store(layout.WordConfigID, index) }

// SetApplied raises the index up to which the arena shows the log.
func (r *Record) SetApplied(index uint64) { r.raise(layout.WordApplied, index) }

// Retire stores term = MaxUint64 and served_term = 0, for good.
func (r *Record) Retire() {
	r.retired.Store(true)
	r.store(layout.WordTerm, layout.RetiredTerm)
	r.store(layout.WordServedTerm, 0)
}

// Load reads the record, word by word.
func (r *Record) Load() layout.Record {
	var line [layout.RecordSize]byte
	layout.CopyWords(line[:], r.words)
	rec, _ := layout.DecodeRecord(line[:])
	return rec
}

func (r *Record) layoutGen() uint64 { return r.load(layout.WordLayoutGen) }

// bumpLayoutGen takes the truth from every address remembered under an older
// generation. It comes before the change that would make one lie.
func (r *Record) bumpLayoutGen() uint64 { return layout.AddWord(r.words, layout.WordLayoutGen*8, 1) }
