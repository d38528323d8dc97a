package simnic

import (
	"fmt"

	"github.com/kvd-io/kvd/internal/chaos"
	"github.com/kvd-io/kvd/rdma"
)

// maxPieces is into how many pieces a torn READ is cut at most.
const maxPieces = 4

// progress is how far the chain at the target has got.
type progress struct {
	read    int // index in Reads
	begun   bool
	pieces  [maxPieces]piece // of that READ
	planned int
	moved   int // pieces done
}

// piece is a span of a READ, in bytes from its start.
type piece struct{ from, to int }

// executeLocked carries on with queue[executed] until it is through or has to
// pause.
func (c *conn) executeLocked() {
	switch {
	case c.blockedLocked():
		c.stallLocked()
		return
	case c.t.holds > 0:
		c.held = true
		return
	}
	b := c.queue[c.executed].b
	for c.at.read < len(b.Reads) {
		r := &b.Reads[c.at.read]
		if !c.at.begun && !c.beginLocked(r) {
			return
		}
		for c.at.moved < c.at.planned {
			if err := c.moveLocked(r, c.at.pieces[c.at.moved]); err != nil {
				c.rejectLocked(err)
				return
			}
			if c.at.moved++; c.at.moved < c.at.planned {
				c.f.scheduleLocked(&c.execute, c.f.drawLocked(c.f.cfg.Pause))
				return
			}
		}
		r.N = len(r.Dst)
		c.at.read++
		c.at.begun = false
		if c.at.read < len(b.Reads) {
			if gap := c.f.drawLocked(c.f.cfg.Gap); gap > 0 {
				c.f.scheduleLocked(&c.execute, gap)
				return
			}
		}
	}
	c.executedLocked()
}

// beginLocked draws the fate of one READ; false when it ended the connection.
func (c *conn) beginLocked(r *rdma.Read) bool {
	cfg := &c.f.cfg
	switch {
	case c.f.oneInLocked(cfg.LoseOneIn):
		c.loseLocked("by chance")
		return false
	case c.f.oneInLocked(cfg.RevokeOneIn):
		cfg.Logger.Debug("simnic: revoked by chance", "from", c.ini.host, "to", c.t.host)
		c.ep.endLocked()
		return false
	}
	c.at.begun, c.at.moved = true, 0
	c.at.pieces[0], c.at.planned = piece{0, len(r.Dst)}, 1
	if c.f.oneInLocked(cfg.TearOneIn) {
		c.tearLocked(r)
	}
	return true
}

// tearLocked cuts the READ between words, where the words are those of the target's
// memory, and shuffles the pieces.
func (c *conn) tearLocked(r *rdma.Read) {
	head := int(-r.Offset & 7) // bytes before the first word boundary
	cuts := (len(r.Dst) - head - 1) / 8
	if head > 0 {
		cuts++ // the boundary at head itself
	}
	if len(r.Dst) <= head || cuts <= 0 {
		return
	}
	rnd := c.f.mu.rnd
	p := c.at.pieces[:1]
	for range 1 + rnd.IntN(maxPieces-1) {
		at := head + 8*rnd.IntN(cuts)
		if head == 0 {
			at += 8
		}
		for i := range p { // split the piece that it falls into, if any
			if q := p[i]; q.from < at && at < q.to {
				p[i] = piece{q.from, at}
				p = append(p, piece{at, q.to})
				break
			}
		}
	}
	rnd.Shuffle(len(p), func(i, j int) { p[i], p[j] = p[j], p[i] })
	c.at.planned = len(p)
}

// moveLocked is the target's NIC: look the key up, check it, copy word by word.
func (c *conn) moveLocked(r *rdma.Read, p piece) error {
	key := c.keys[r.Region].key
	mem := c.t.left[key]
	if reg := c.t.keys[key]; reg != nil && reg.d == c.ep.d {
		mem = reg.mem
	}
	if mem == nil {
		return fmt.Errorf("%w: no such key in the domain (region %d)", rdma.ErrAccess, r.Region)
	}
	size := uint64(len(mem))
	if n := uint64(len(r.Dst)); n > size || r.Offset > size-n {
		return fmt.Errorf("%w: %d bytes at %d of region %d, which has %d", rdma.ErrAccess, n, r.Offset, r.Region, size)
	}
	src := mem[r.Offset:]
	for from := p.from; from < p.to; {
		to := min(p.to, from+8-int((r.Offset+uint64(from))&7))
		rdma.CopyExposed(r.Dst[from:to], src[from:to])
		from = to
	}
	return nil
}

// rejectLocked: the target refused a READ. What was executed before it completes
// well, the chain itself with the refusal, and the connection is finished, as a
// queue pair in error is: everything behind is flushed.
func (c *conn) rejectLocked(refusal error) {
	for c.executed > 0 {
		c.popLocked(nil)
	}
	c.popLocked(refusal)
	c.finishLocked(fmt.Errorf("%w: the target refused a READ: %v", rdma.ErrConnLost, refusal))
}

// executedLocked puts the chain among those whose completion is on its way, and
// turns to the next.
func (c *conn) executedLocked() {
	if c.t.dead && !chaos.Broken(chaos.FrozenMapping) {
		c.loseLocked("its process has ended")
		return
	}
	now := c.f.cfg.Clock.Now()
	q := &c.queue[c.executed]
	q.arrives = now.Add(c.f.drawLocked(c.f.cfg.Return))
	c.at = progress{}
	c.executed++
	if c.executed == 1 {
		c.f.scheduleLocked(&c.deliver, q.arrives.Sub(now))
	}
	if c.executed < len(c.queue) {
		c.f.scheduleLocked(&c.execute, max(0, c.queue[c.executed].started.Sub(now)))
	}
}

// deliverLocked completes the first executed chain. Completions arrive in order,
// so a late one holds up those behind it.
func (c *conn) deliverLocked() {
	if c.blockedLocked() {
		c.stallLocked()
		return
	}
	c.popLocked(nil)
	if c.executed > 0 {
		c.f.scheduleLocked(&c.deliver, max(0, c.queue[0].arrives.Sub(c.f.cfg.Clock.Now())))
	}
}

// popLocked completes queue[0]. The batch is its owner's from then on.
func (c *conn) popLocked(err error) {
	b := c.queue[0].b
	c.f.mu.told++
	c.reads -= len(b.Reads)
	n := copy(c.queue, c.queue[1:])
	c.queue[n] = request{}
	c.queue = c.queue[:n]
	c.executed = max(0, c.executed-1)
	b.Complete(err)
}
