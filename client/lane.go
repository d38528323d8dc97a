package client

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// A lane carries the READs of all gets to one node, in flights, one after the
// other. A flight is one chain: the objects that its gets want, then the control
// records that confirm them, each range of the table once for all. Gets that arrive
// while a flight is out join the next one; a lone get has a flight to itself at
// once.
//
// Two rules of the read protocol rest on this order:
//   - a get joins only a flight that is posted after the get began, so no
//     confirmation is reused for a later get;
//   - a leader's record is READ behind the object that it vouches for, in the same
//     chain, so the object was read while that leader still served its term.
//
// Its fields are guarded by the convoy's lock.
type lane struct {
	s       *session
	waiting []*ask
	flying  bool
	free    []*flight
}

// convoy lets the lanes of a Client start their flights together when there are
// many gets. A get needs at least two nodes; with every lane on a beat of its own it
// would wait for both, and the flights would be more and emptier.
type convoy struct {
	mu struct {
		sync.Mutex
		flights int // out, those that are late left out
		asks    int // waiting or out, those in late flights left out
		lanes   []*lane
	}
}

const (
	// crowd is the number of asks from which on lanes start together. Up to it an idle
	// lane starts at once.
	crowd = 8
	// mergeGap is how many unwanted slots a READ of records spans rather than
	// being split: 4 KiB cost less than another READ.
	mergeGap = 64
)

// States of an ask. Only its get's goroutine and the flight that carries it change
// them.
const (
	askIdle    uint32 = iota
	askWaiting        // in a lane or a flight
	askWatched        // and its get's goroutine must see the flight to its end
	askDone           // results are there
	askLeft           // the get does not want it any more; the flight still owns it
)

// ask is what one get wants of one node: perhaps an object, and a control record.
// From submit to askDone it belongs to the session that it was submitted to.
type ask struct {
	g      *get
	s      *session
	slot   uint32
	voter  uint8 // bit of the voter in the route's quorum; 0: not a voter
	leader bool
	late   bool // given up for another voter
	apart  bool // its get's goroutine waits for other gets too: it cannot watch a flight

	// The object; no bytes: none is wanted.
	at  layout.Place
	dst []byte

	state  atomic.Uint32
	flight *flight // that carries it; guarded by the convoy's lock, but its watcher may read it
	rec    layout.Record
	err    error

	// For connections that need no flights.
	batch rdma.Batch
	reads [2]rdma.Read
	raw   [layout.RecordSize]byte
}

// submit starts the ask.
func (s *session) submit(a *ask) {
	a.s = s
	a.g.refs.Add(1)
	a.state.Store(askWaiting)
	if s.sync {
		s.readNow(a)
		return
	}
	s.c.convoy.add(&s.lane, a, a)
}

// readNow serves an ask on a connection that completes in Post. There is nothing
// to be shared: the record costs less than finding out who else wants it.
func (s *session) readNow(a *ask) {
	b := &a.batch
	b.Reset()
	b.Reads = a.reads[:0]
	if len(a.dst) > 0 {
		b.Reads = append(b.Reads, rdma.Read{Region: rdma.RegionID(a.at.Chunk), Offset: a.at.Offset, Dst: a.dst})
		s.c.count.objectReads.Add(1)
	}
	b.Reads = append(b.Reads, rdma.Read{Region: rdma.ControlRegion, Offset: uint64(a.slot) * layout.RecordSize, Dst: a.raw[:]})
	s.c.count.recordReads.Add(1)
	if a.leader {
		s.c.count.confirmations.Add(1)
	}
	s.conn.Post(b)
	if !b.Completed() {
		b.Wait(context.Background(), 0) // the provider's promise; not met only while it closes
	}
	if a.err = b.Err(); a.err == nil {
		a.rec, _ = layout.DecodeRecord(a.raw[:])
		if s.slow.Load() {
			s.slow.Store(false)
		}
	} else {
		s.readFailed(a.err)
	}
	a.state.Store(askDone)
	a.g.unref()
}

// readFailed ends the session where the connection cannot be used any more.
func (s *session) readFailed(err error) {
	if errors.Is(err, rdma.ErrConnLost) || errors.Is(err, rdma.ErrRevoked) || errors.Is(err, rdma.ErrClosed) {
		s.fail(err)
	}
}

// add puts asks into the lane's next flight, and starts what may start now. prefer
// is the ask of the calling goroutine, which can watch a flight, or nil.
func (v *convoy) add(l *lane, prefer *ask, asks ...*ask) {
	v.mu.Lock()
	if len(l.waiting) == 0 {
		v.mu.lanes = append(v.mu.lanes, l)
	}
	l.waiting = append(l.waiting, asks...)
	v.mu.asks += len(asks)
	ready := v.startLocked()
	v.mu.Unlock()
	postAll(ready, prefer)
}

func postAll(ready *flight, prefer *ask) {
	for f := ready; f != nil; {
		next := f.next
		f.next = nil
		f.post(prefer)
		f = next
	}
}

// startLocked makes flights of the lanes that may start, chained by next.
func (v *convoy) startLocked() (ready *flight) {
	together := v.mu.asks > crowd
	if together && v.mu.flights > 0 {
		return nil
	}
	kept := v.mu.lanes[:0]
	for _, l := range v.mu.lanes {
		if l.flying {
			kept = append(kept, l)
			continue
		}
		if f := v.takeLocked(l); f != nil {
			f.next, ready = ready, f
		}
	}
	clear(v.mu.lanes[len(kept):])
	v.mu.lanes = kept
	return ready
}

// takeLocked turns who waits in the lane into a flight; nil: nobody wants it any
// more.
func (v *convoy) takeLocked(l *lane) *flight {
	var f *flight
	if n := len(l.free); n > 0 {
		f, l.free = l.free[n-1], l.free[:n-1]
	} else {
		f = &flight{s: l.s}
	}
	f.late = false
	for _, a := range l.waiting {
		if a.state.Load() == askLeft {
			v.mu.asks--
			a.g.unref()
			continue
		}
		a.flight = f
		f.asks = append(f.asks, a)
	}
	clear(l.waiting)
	l.waiting = l.waiting[:0]
	if len(f.asks) == 0 {
		l.free = append(l.free, f)
		return nil
	}
	f.posted = time.Now()
	l.flying = true
	v.mu.flights++
	return f
}

// landed ends the flight, whose asks have been answered, and starts others.
func (v *convoy) landed(f *flight, asks int) {
	l := &f.s.lane
	v.mu.Lock()
	l.flying = false
	if !f.late {
		v.mu.flights--
		v.mu.asks -= asks
	}
	l.free = append(l.free, f)
	ready := v.startLocked()
	v.mu.Unlock()
	postAll(ready, nil)
}

// late lets nobody but its own lane wait for the flight that carries the ask.
func (v *convoy) late(a *ask) {
	v.mu.Lock()
	var ready *flight
	f := a.flight
	if f != nil && !f.late {
		f.late = true
		v.mu.flights--
		v.mu.asks -= len(f.asks)
		ready = v.startLocked()
	}
	v.mu.Unlock()
	postAll(ready, nil)
}

// flight is one chain under way. Exactly one goroutine sees it to its end: a get
// that rides in it (askWatched), or one made for it (reap).
type flight struct {
	s      *session
	batch  rdma.Batch
	asks   []*ask
	slots  []uint32
	spans  []span
	raw    []byte    // records, one span after the other
	bytes  int       // that the chain asks for
	posted time.Time // just before it was: what it brings was read later

	// Guarded by the convoy's lock.
	late bool
	next *flight // in a list of flights to be posted
}

// span is a READ of consecutive slots; their records lie in raw from at on.
type span struct {
	first, count uint32
	at           int
}

// post builds the chain and sends it. prefer, when not nil, is the ask of the
// calling goroutine, which watches the flight if it rides in it.
func (f *flight) post(prefer *ask) {
	c := f.s.c
	f.batch.Reset()
	f.batch.Reads = f.batch.Reads[:0]
	f.slots = f.slots[:0]
	for _, a := range f.asks {
		if len(a.dst) > 0 {
			f.batch.Reads = append(f.batch.Reads, rdma.Read{Region: rdma.RegionID(a.at.Chunk), Offset: a.at.Offset, Dst: a.dst})
		}
		if a.leader {
			f.slots = append(f.slots, a.slot)
		}
	}
	c.count.objectReads.Add(uint64(len(f.batch.Reads)))
	c.count.confirmations.Add(distinct(f.slots))
	for _, a := range f.asks {
		if !a.leader {
			f.slots = append(f.slots, a.slot)
		}
	}
	f.planSpans()
	for _, p := range f.spans {
		f.batch.Reads = append(f.batch.Reads, rdma.Read{
			Region: rdma.ControlRegion, Offset: uint64(p.first) * layout.RecordSize,
			Dst: f.raw[p.at:][:p.count*layout.RecordSize],
		})
	}
	c.count.recordReads.Add(uint64(len(f.spans)))
	f.bytes = readBytes(f.batch.Reads)
	f.s.conn.Post(&f.batch)
	if f.s.sync && f.batch.Completed() {
		f.finish()
		return
	}
	f.designate(prefer)
}

// distinct sorts the slots and counts those that differ.
func distinct(slots []uint32) (n uint64) {
	slices.Sort(slots)
	for i, slot := range slots {
		if i == 0 || slot != slots[i-1] {
			n++
		}
	}
	return n
}

// planSpans covers the wanted slots with few READs.
func (f *flight) planSpans() {
	slices.Sort(f.slots)
	f.spans = f.spans[:0]
	total := 0
	for _, slot := range f.slots {
		if n := len(f.spans); n > 0 {
			last := &f.spans[n-1]
			if end := last.first + last.count; slot < end+mergeGap {
				if slot >= end {
					total += int(slot-end+1) * layout.RecordSize
					last.count = slot - last.first + 1
				}
				continue
			}
		}
		f.spans = append(f.spans, span{first: slot, count: 1, at: total})
		total += layout.RecordSize
	}
	if cap(f.raw) < total {
		f.raw = make([]byte, total)
	}
	f.raw = f.raw[:total]
}

// designate gives the watch over the flight to prefer, else to any get that still
// wants its answer, else to a goroutine of its own.
func (f *flight) designate(prefer *ask) {
	if prefer != nil && prefer.s == f.s && f.entrust(prefer) {
		return
	}
	for _, a := range f.asks {
		if a != prefer && f.entrust(a) {
			a.g.signal()
			return
		}
	}
	f.abandon()
}

func (f *flight) entrust(a *ask) bool {
	if a.apart {
		return false
	}
	return a.state.CompareAndSwap(askWaiting, askWatched)
}

// abandon gives the watch to a goroutine made for it.
func (f *flight) abandon() {
	if !f.s.c.tasks.spawn(f.reap) {
		f.reap() // the Client is closing, which completes the batch
	}
}

// reap sees the flight to its end without anybody's goroutine.
func (f *flight) reap() {
	f.s.outlast(&f.batch, f.bytes)
	f.finish()
}

// finish hands out what the flight brought and starts what waited for it. The batch
// must be complete; only the watcher calls it.
func (f *flight) finish() {
	s, err := f.s, f.batch.Err()
	if err == nil {
		s.answered(time.Since(f.posted))
	} else {
		s.readFailed(err)
	}
	v := &s.c.convoy
	v.mu.Lock()
	for _, a := range f.asks {
		a.flight = nil
	}
	v.mu.Unlock()
	posted := f.posted.UnixNano()
	n := len(f.asks)
	for i, a := range f.asks {
		f.asks[i] = nil
		a.err = err
		if err == nil {
			a.rec = f.record(a.slot)
			f.note(a, posted)
		}
		// Who watches is the caller: it needs no wake-up.
		if a.state.Swap(askDone) == askWaiting {
			a.g.signal()
		}
		a.g.unref()
	}
	f.asks = f.asks[:0]
	if n > 1 {
		// Those who were just served come back with their next gets in a moment, if they
		// are let: then one flight carries what two would.
		runtime.Gosched()
	}
	v.landed(f, n)
}

// record finds a slot's record in what was read.
func (f *flight) record(slot uint32) layout.Record {
	i, exact := slices.BinarySearchFunc(f.spans, slot, func(p span, slot uint32) int { return int(p.first) - int(slot) })
	if !exact {
		i--
	}
	p := f.spans[i]
	rec, _ := layout.DecodeRecord(f.raw[p.at+int(slot-p.first)*layout.RecordSize:])
	return rec
}

// note remembers what the record says, if it is the one that was asked for.
func (f *flight) note(a *ask, posted int64) {
	if id := a.g.sh.id; f.s.identifies(&a.rec, id) {
		f.s.replicas[id].saw(&a.rec, posted)
	}
}
