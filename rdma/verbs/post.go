package verbs

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// work is what the provider keeps for a posted batch: in Batch.Work, reused.
type work struct {
	c    *conn
	b    *rdma.Batch
	rail atomic.Pointer[rail] // where it is

	// Guarded by the rail's post lock.
	regions []*remote // of each READ
	bytes   int64
	next    int // READ to post next, and
	offset  int // the byte of it
	pieces  int // posted and not complete
	err     error
	link    *work // in workList

	claimed atomic.Bool // a goroutine is in wait with it
	timer   *time.Timer // that goroutine's
}

func (w *work) posted() bool { return w.next == len(w.b.Reads) }

// rewind makes it ready to be posted from its beginning.
func (w *work) rewind() { w.next, w.offset, w.pieces, w.link = 0, 0, 0, nil }

// workList is a queue of batches.
type workList struct{ first, last *work }

func (l *workList) push(w *work) {
	w.link = nil
	if l.last == nil {
		l.first = w
	} else {
		l.last.link = w
	}
	l.last = w
}

func (l *workList) pop() *work {
	w := l.first
	if w != nil {
		if l.first = w.link; l.first == nil {
			l.last = nil
		}
		w.link = nil
	}
	return w
}

// batchLoad is what a batch adds to a rail's load beside its bytes, so that small ones
// spread too.
const batchLoad = 4096

// Post implements rdma.Conn.
func (c *conn) Post(b *rdma.Batch) {
	w, ok := b.Work.(*work)
	if !ok {
		w = &work{}
		b.Work = w
	}
	w.c, w.b, w.err = c, b, nil
	w.rewind()
	if err := c.check(w); err != nil {
		if end := c.cause(); end != nil {
			err = end
		}
		b.Complete(err)
		return
	}
	if n := c.outstanding.Add(1); n > int64(c.in.p.MaxInFlight) {
		c.complete(w, fmt.Errorf("%w: verbs: %d batches outstanding on this connection: wait for some, or raise MaxInFlight", rdma.ErrExhausted, n-1))
		return
	}
	b.SetWaiter(c.waitFunc)
	c.route(w)
}

// check refuses what this side knows to be wrong, before it costs the connection.
func (c *conn) check(w *work) error {
	reads := w.b.Reads
	if len(reads) == 0 {
		return fmt.Errorf("%w: verbs: a chain of no READs", rdma.ErrAccess)
	}
	regions := *c.regions.Load()
	w.regions, w.bytes = w.regions[:0], batchLoad
	for i := range reads {
		r := &reads[i]
		length := uint64(len(r.Dst))
		m := regions[r.Region]
		switch {
		case m == nil:
			return fmt.Errorf("%w: verbs: READ %d of region %d, which was not added to this connection", rdma.ErrAccess, i, r.Region)
		case length == 0:
			return fmt.Errorf("%w: verbs: READ %d of no bytes", rdma.ErrAccess, i)
		case length > m.length || r.Offset > m.length-length:
			return fmt.Errorf("%w: verbs: READ %d of %d bytes at %d of region %d, which has %d", rdma.ErrAccess, i, length, r.Offset, r.Region, m.length)
		}
		r.N = len(r.Dst)
		w.regions = append(w.regions, m)
		w.bytes += int64(length)
	}
	return nil
}

// reachable tells whether all regions of the batch have a key for the rail.
func (w *work) reachable(r *rail) bool {
	for _, m := range w.regions {
		if !m.keys[r.index].valid {
			return false
		}
	}
	return true
}

// route puts a batch onto the rail with the least outstanding, or completes it where
// there is none.
func (c *conn) route(w *work) {
	for {
		var best *rail
		alive := *c.alive.Load()
		for _, r := range alive {
			if (best == nil || r.load.Load() < best.load.Load()) && w.reachable(r) {
				best = r
			}
		}
		if best != nil && best.enqueue(w) {
			return
		}
		err := c.cause()
		if err == nil && best == nil {
			err = fmt.Errorf("%w: verbs: no rail that is left has keys of all its regions", rdma.ErrConnLost)
		}
		if err != nil {
			c.complete(w, err)
			return
		}
		runtime.Gosched() // the rail is leaving the choice
	}
}

// enqueue posts as much of the batch as there is room for; the rest follows with
// completions. False: the rail takes no more, and w is the caller's.
func (r *rail) enqueue(w *work) bool {
	r.post.Lock()
	if r.post.closed {
		r.post.Unlock()
		return false
	}
	w.rail.Store(r)
	r.load.Add(w.bytes)
	r.batches.Add(1)
	r.count.batches.Add(1)
	r.post.waiting.push(w)
	err := r.pumpLocked()
	r.post.Unlock()
	// The batch may be complete, and the caller's, from here on.
	if err != nil {
		r.fail(err)
	}
	if !r.ticking.Load() && r.ticking.CompareAndSwap(false, true) {
		r.timer.Reset(tick)
	}
	return true
}

// pumpLocked posts what waits, in order, until there is no room.
func (r *rail) pumpLocked() error {
	if r.in.held.Load() {
		return nil
	}
	for w := r.post.waiting.first; w != nil && !r.post.closed; w = r.post.waiting.first {
		ok, err := r.postPieceLocked(w)
		if err != nil || !ok {
			return err
		}
		if w.posted() {
			r.post.waiting.pop()
		}
	}
	return nil
}

// postPieceLocked posts the next READs of w as one chain. ok is false where there is no
// room for any.
func (r *rail) postPieceLocked(w *work) (ok bool, err error) {
	p := &r.post
	room := min(p.depth-(p.nextID-p.doneID), uint64(cap(p.wrs)))
	quarter := uint64(len(p.bounce.buf)) / 4
	wrs, bounced := p.wrs[:0], uint64(0)
	for uint64(len(wrs)) < room && bounced < quarter && !w.posted() {
		rd, m := &w.b.Reads[w.next], w.regions[w.next]
		dst := rd.Dst[w.offset:]
		id := p.nextID + uint64(len(wrs))
		wr := ibv.ReadWR{ID: id, RemoteAddr: m.addr + rd.Offset + uint64(w.offset), RKey: m.keys[r.index].rkey}
		at := &p.slots[id%p.depth]
		if key, direct := r.direct(dst); direct {
			dst = dst[:min(len(dst), r.maxMessage)]
			wr.LocalAddr, wr.LKey = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(dst)))), key
			*at = slot{}
		} else {
			dst = dst[:min(uint64(len(dst)), quarter, uint64(r.maxMessage))]
			dst = dst[:min(len(dst), r.n.link.longest(wr.RemoteAddr, len(dst)))]
			off, ok := p.bounce.take(uint64(len(dst)))
			if !ok {
				break
			}
			bounced += uint64(len(dst))
			wr.LocalAddr, wr.LKey = p.bounce.base+off, p.bounce.lkey
			*at = slot{dst: dst, src: p.bounce.buf[off : off+uint64(len(dst))]}
		}
		wr.Length = uint32(len(dst))
		wrs = append(wrs, wr)
		if w.offset += len(dst); w.offset == len(rd.Dst) {
			w.next, w.offset = w.next+1, 0
		}
	}
	if len(wrs) == 0 {
		return false, nil
	}
	last := p.nextID + uint64(len(wrs)) - 1
	wrs[len(wrs)-1].Flags = ibv.WRSignaled
	p.pieces[p.last%uint64(len(p.pieces))] = piece{w: w, first: p.nextID, last: last, bounceEnd: p.bounce.head}
	p.last++
	w.pieces++
	p.nextID = last + 1
	r.count.reads.Add(uint64(len(wrs)))
	if _, err := r.qp.Post(wrs); err != nil {
		// What went onto the queue ends with the queue pair.
		return false, fmt.Errorf("%w: verbs: %w", rdma.ErrConnLost, err)
	}
	return true, nil
}

// direct finds the key of a Dst that the device can write to itself.
func (r *rail) direct(dst []byte) (key uint32, ok bool) {
	// On iWARP the peer may write where answers go: nothing of the caller's.
	if s := r.in.sinkOf(dst); s != nil && r.n.link.kind() == kindExchange {
		return s.lkey(r.n.instance)
	}
	return 0, false
}

// handlePolled works in completions. The caller holds poll.
func (r *rail) handlePolled(wcs []ibv.Completion) {
	done := uint64(0)
	for i := range wcs {
		wc := &wcs[i]
		failed := wc.Status != ibv.WCSuccess
		switch {
		case wc.ID&idRecv != 0:
			if !failed {
				r.hear(wc)
			}
		case wc.ID&idMessage != 0 && !failed:
			r.said(message(wc.ID & idNumber))
		case failed:
			r.retirePolled(done)
			r.brokenPolled(wc)
		default:
			done = wc.ID + 1
		}
	}
	r.retirePolled(done)
	r.completions.Add(uint64(len(wcs)))
}

// retirePolled gives back what is complete: READs before done. Bytes are copied out of
// the bounce ring without the lock, and their places are free after that.
func (r *rail) retirePolled(done uint64) {
	p := &r.post
	retired, finished := r.poll.retired[:0], r.poll.finished[:0]
	p.Lock()
	if done <= p.doneID {
		p.Unlock()
		return
	}
	for i := p.first; i < p.last; i++ {
		at := p.pieces[i%uint64(len(p.pieces))]
		if at.last >= done {
			break
		}
		retired = append(retired, at)
	}
	p.Unlock()
	bytes := int64(0)
	for _, at := range retired {
		for id := at.first; id <= at.last; id++ {
			if s := &p.slots[id%p.depth]; s.dst != nil {
				copy(s.dst, s.src)
				*s = slot{}
			}
		}
	}
	p.Lock()
	for _, at := range retired {
		p.pieces[p.first%uint64(len(p.pieces))] = piece{}
		p.first++
		p.doneID = at.last + 1
		p.bounce.tail = at.bounceEnd
		if at.w.pieces--; at.w.pieces == 0 && at.w.posted() {
			finished = append(finished, at.w)
			bytes += at.w.bytes
		}
	}
	r.batches.Add(-int64(len(finished)))
	r.load.Add(-bytes)
	err := r.pumpLocked()
	p.Unlock()
	if err != nil {
		r.fail(err)
	}
	r.count.bytes.Add(uint64(bytes - batchLoad*int64(len(finished))))
	for i, w := range finished {
		w.c.complete(w, nil)
		finished[i] = nil
	}
	clear(retired)
	r.poll.retired, r.poll.finished = retired[:0], finished[:0]
}

// brokenPolled works in a failed completion. The first says what is wrong; the others
// are flushed behind it.
func (r *rail) brokenPolled(wc *ibv.Completion) {
	if wc.ID&idMessage == 0 {
		r.poll.flushed = max(r.poll.flushed, wc.ID+1)
	}
	if r.poll.broken {
		return
	}
	r.poll.broken = true
	why := fmt.Errorf("%w: verbs: %s port %d: %s", rdma.ErrConnLost, r.n.name, r.spec.port, wc.Status)
	refusal := r.n.link.refusal(r, wc.Status)
	r.end.Lock()
	c := r.end.c
	r.end.Unlock()
	if wc.ID&idMessage != 0 || refusal == nil || c == nil {
		r.fail(why)
		return
	}
	// The target's device refused a READ, which another rail would not change. Both queue
	// pairs are in error with it.
	r.post.Lock()
	for i := r.post.first; i < r.post.last; i++ {
		at := &r.post.pieces[i%uint64(len(r.post.pieces))]
		if at.first <= wc.ID && wc.ID <= at.last {
			at.w.err = refusal
		}
	}
	r.post.Unlock()
	c.finish(fmt.Errorf("%w: verbs: %s port %d: the connection ended with a READ that failed (%s): %v", rdma.ErrConnLost, r.n.name, r.spec.port, wc.Status, refusal))
}

// remoteRefusal is the class of a READ that the target's device refused, nil for other
// failures.
func remoteRefusal(s ibv.WCStatus) error {
	switch s {
	case ibv.WCRemAccessErr, ibv.WCRemInvReqErr, ibv.WCRemOpErr:
		return fmt.Errorf("%w: verbs: refused by the target's device: %s", rdma.ErrAccess, s)
	}
	return nil
}

// hear works in a message of the target.
func (r *rail) hear(wc *ibv.Completion) {
	imm := r.n.link.word(r, wc)
	r.post.Lock()
	if !r.post.closed {
		_ = r.n.link.makeRoom(r, wc.ID&idNumber) // a failure shows as the end of the rail
	}
	r.post.Unlock()
	m, value := parseMessage(imm)
	if m != msgBye {
		return
	}
	r.end.Lock()
	c := r.end.c
	r.end.Unlock()
	var why error
	switch bye(value) {
	case byeRail:
		r.fail(fmt.Errorf("%w: verbs: the target's port or device goes away", rdma.ErrConnLost))
		return
	case byeBudget:
		why = fmt.Errorf("%w: verbs: the target needs the queue pair for others", rdma.ErrExhausted)
	default:
		why = fmt.Errorf("%w: verbs: by the target", rdma.ErrRevoked)
	}
	if c == nil {
		r.fail(why)
		return
	}
	c.finish(why)
}

// errStalled is for the log: nothing completes though READs are outstanding.
var errStalled = errors.New("no completion")
