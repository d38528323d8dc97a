package verbs

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// rail is the initiator's end of one queue pair. Two locks keep posting and completing
// apart: post guards the send queue and all that waits for it, poll is held by whoever
// looks at the completion queue, for as long as it looks. Lock order: setup, poll, post.
//
// One goroutine (run) waits for completion events, and takes the rail down when it has
// failed; nobody else destroys anything.
type rail struct {
	in   *initiator
	n    *nic
	spec railSpec
	pd   *ibv.PD
	qp   *ibv.QP
	cq   *ibv.CQ
	psn  uint32
	// maxMessage is the longest READ in bytes that the port carries.
	maxMessage int
	index      int          // in conn.all
	device     uint32       // the target's, as attrs name it
	gid        ibv.GIDEntry // the one in use
	extra      any          // the connector's own
	count      *railCounters

	greeted   chan struct{} // closed when the target has our hello
	byeSent   chan struct{} // closed when the target has our goodbye
	dying     chan struct{} // closed when the rail has failed
	gone      chan struct{} // closed when nothing is left of it
	failed    sync.Once
	lost      atomic.Pointer[error] // why it is hung up
	connected atomic.Bool
	greetOnce sync.Once
	byeOnce   sync.Once

	setup sync.Mutex // held by what uses the queue pair beside posting; then by the end

	post struct {
		sync.Mutex
		closed   bool // takes no more batches
		dead     bool // the queue pair is being destroyed
		depth    uint64
		nextID   uint64 // of the next READ
		doneID   uint64 // all READs before it are complete. Invariant: nextID-doneID <= depth
		wrs      []ibv.ReadWR
		slots    []slot  // by id modulo depth: what to do when the READ is complete
		pieces   []piece // ring of what is posted
		first    uint64  // counts of pieces. Invariant: last-first <= len(pieces)
		last     uint64
		bounce   bounce
		waiting  workList // not, or not wholly, posted
		messages int      // outstanding
	}
	poll struct {
		sync.Mutex
		wcs      []ibv.Completion
		retired  []piece
		finished []*work
		broken   bool   // a completion failed
		flushed  uint64 // READs before it have failed
	}

	load        atomic.Int64 // bytes outstanding, and a little for each batch
	batches     atomic.Int64 // outstanding
	completions atomic.Uint64

	// role has a token for a waiter that is to look at the completion queue.
	role   chan struct{}
	parked atomic.Int32

	ticking atomic.Bool
	timer   *time.Timer
	ticks   struct { // the tick's own
		sync.Mutex
		seen     uint64 // completions
		stalled  time.Time
		lastUsed time.Time // when the target was told
	}

	end struct {
		sync.Mutex
		err  error
		c    *conn
		torn bool
	}
}

// slot remembers where the bytes of a READ go from the bounce ring. dst is nil for one
// that went straight to its place.
type slot struct {
	dst []byte
	src []byte
}

// piece is the part of a batch that was posted in one call: READs first to last, of
// which the last is signalled.
type piece struct {
	w           *work
	first, last uint64
	bounceEnd   uint64 // bounce.head behind it
}

// newRail makes the queue pair and its surroundings. The caller holds topo for reading.
func (in *initiator) newRail(n *nic, part *initiatorNIC, spec railSpec) (*rail, side, error) {
	own, port, err := n.side(spec, n.attr.MaxQPInitRdAtomic, in.p)
	if err != nil {
		return nil, side{}, err
	}
	r := &rail{
		in: in, n: n, spec: spec, pd: part.pd, count: in.counters.of(n.name, spec.port),
		greeted: make(chan struct{}), byeSent: make(chan struct{}), dying: make(chan struct{}), gone: make(chan struct{}),
		role: make(chan struct{}, 1),
	}
	depth := in.p.QueueDepth
	if n.attr.MaxQPWR > 0 {
		depth = min(depth, n.attr.MaxQPWR-messageSlots)
	}
	if n.attr.MaxCQE > 0 {
		depth = min(depth, n.attr.MaxCQE-messageSlots-recvSlots)
	}
	depth = max(depth, 1)
	if n.link.kind() == kindExchange { // rdma_cm's connector brings its own
		if r.post.bounce, err = in.takeBounce(n); err != nil {
			return nil, side{}, err
		}
	}
	fail := func(err error) (*rail, side, error) {
		if r.qp != nil {
			err = errors.Join(err, r.qp.Close())
		}
		if r.cq != nil {
			err = errors.Join(err, r.cq.Close())
		}
		in.giveBounce(r.post.bounce)
		return nil, side{}, err
	}
	// It must hold everything that is posted: after a failure each request completes.
	if r.cq, err = n.ctx.NewCQ(ibv.CQConfig{Depth: depth + messageSlots + recvSlots, Channel: true, Vector: int(in.ids.Add(1))}); err != nil {
		r.cq = nil
		return fail(fmt.Errorf("%w: verbs: %w", rdma.ErrExhausted, err))
	}
	r.post.depth = uint64(depth)
	r.post.wrs = make([]ibv.ReadWR, 0, max(depth/4, 1))
	r.post.slots = make([]slot, depth)
	r.post.pieces = make([]piece, depth)
	r.poll.wcs = make([]ibv.Completion, 32)
	if own, err = n.link.prepare(r, own); err != nil {
		return fail(err)
	}
	r.maxMessage = int(min(max(port.MaxMsgSize, minBounceBytes), 1<<30))
	r.timer = time.AfterFunc(time.Hour, r.tick)
	r.timer.Stop()
	r.count.queuePairs.Add(1)
	go r.run()
	return r, own, nil
}

// newQP makes the queue pair; create is what makes it.
func (r *rail) newQP(create func(ibv.QPConfig) (*ibv.QP, error)) (*ibv.QP, error) {
	qp, err := create(ibv.QPConfig{SendCQ: r.cq, RecvCQ: r.cq, MaxSendWR: int(r.post.depth) + messageSlots, MaxRecvWR: recvSlots})
	if err != nil {
		return nil, fmt.Errorf("%w: verbs: %s makes no more queue pairs, its limit is said to be %d: %w", rdma.ErrExhausted, r.n.name, r.n.attr.MaxQP, err)
	}
	r.qp = qp
	return qp, nil
}

// postRecvs makes room for messages of the target.
func (r *rail) postRecvs() error {
	for slot := range uint64(recvSlots) {
		if err := r.n.link.makeRoom(r, slot); err != nil {
			return err
		}
	}
	return nil
}

// connect joins the queue pair with the target's and greets it.
func (r *rail) connect(ctx context.Context, a answerRail) error {
	r.setup.Lock()
	defer r.setup.Unlock()
	if r.isDying() {
		return r.reason()
	}
	if err := r.n.link.connect(ctx, r, a); err != nil {
		return err
	}
	r.connected.Store(true)
	if err := r.say(msgHello, 0); err != nil {
		return fmt.Errorf("%w: verbs: greet: %w", rdma.ErrConnLost, err)
	}
	r.poke()
	return nil
}

// say posts a message. It completes like a READ, without a batch.
func (r *rail) say(m message, value uint32) error {
	r.post.Lock()
	defer r.post.Unlock()
	if r.post.dead || r.qp == nil {
		return fmt.Errorf("%w: verbs: rail", rdma.ErrClosed)
	}
	if r.post.messages >= messageSlots {
		return fmt.Errorf("%w: verbs: %d messages outstanding", rdma.ErrExhausted, r.post.messages)
	}
	if err := r.n.link.tell(r, idMessage|uint64(m), m.with(value)); err != nil {
		return err
	}
	r.post.messages++
	return nil
}

// said: a message of ours arrived.
func (r *rail) said(m message) {
	r.post.Lock()
	r.post.messages--
	r.post.Unlock()
	switch m {
	case msgHello:
		r.greetOnce.Do(func() { close(r.greeted) })
	case msgBye:
		r.byeOnce.Do(func() { close(r.byeSent) })
	}
}

// farewell stops posting and tells the target why, waiting a moment for it to hear.
func (r *rail) farewell(why bye) {
	r.post.Lock()
	r.post.closed = true
	r.post.Unlock()
	r.setup.Lock()
	told := !r.isDying() && r.connected.Load() && r.n.link.leave(r, why)
	if told {
		r.poke()
	}
	r.setup.Unlock()
	if !told {
		return
	}
	t := time.NewTimer(goodbyeTimeout)
	defer t.Stop()
	select {
	case <-r.byeSent:
	case <-r.dying:
	case <-t.C:
	}
}

// poke makes the next completion raise an event. The caller holds setup, so that the
// rail is there.
func (r *rail) poke() {
	r.poll.Lock()
	defer r.poll.Unlock()
	r.armPolled(true)
}

// armPolled asks for an event and looks once more, for what completes in between raises
// none. full: at any completion; otherwise at messages only. The caller holds poll.
func (r *rail) armPolled(full bool) {
	arm := r.cq.ArmSolicited
	if full {
		arm = r.cq.Arm
	}
	if err := arm(); err != nil {
		r.fail(fmt.Errorf("%w: verbs: %w", rdma.ErrConnLost, err))
		return
	}
	r.drainPolled()
}

// drainPolled handles all completions that are there. The caller holds poll.
func (r *rail) drainPolled() {
	for r.lookPolled(0) == len(r.poll.wcs) {
	}
}

// lookPolled handles the completions that are there or come within spin, and returns how
// many. The caller holds poll.
func (r *rail) lookPolled(spin time.Duration) int {
	n, err := r.cq.Poll(r.poll.wcs, spin)
	if err != nil {
		r.fail(fmt.Errorf("%w: verbs: %w", rdma.ErrConnLost, err))
		return 0
	}
	if n > 0 {
		r.handlePolled(r.poll.wcs[:n])
	}
	return n
}

// run waits for events until the rail has failed, then takes it down.
func (r *rail) run() {
	r.poll.Lock()
	r.armPolled(false)
	r.poll.Unlock()
	for !r.isDying() {
		if err := r.cq.WaitEvent(); err != nil {
			r.wokenUp(err)
			break
		}
		r.poll.Lock()
		r.drainPolled()
		// Whoever waits goes on by looking itself; events are for what nobody waits for.
		handed := r.batches.Load() > 0 && r.handRole()
		r.armPolled(r.batches.Load() > 0 && !handed)
		r.poll.Unlock()
	}
	r.teardown()
}

// hangUp ends the rail because its peer is gone, after what arrived before was handled: a
// goodbye says why. It returns at once.
func (r *rail) hangUp(why error) {
	r.lost.CompareAndSwap(nil, &why)
	_ = r.cq.SetDeadline(past) // wakes run
}

// wokenUp: waiting for events ended, because the rail has failed, was hung up, or for
// the reason given.
func (r *rail) wokenUp(err error) {
	if lost := r.lost.Load(); lost != nil && !r.isDying() {
		r.poll.Lock()
		r.drainPolled()
		r.poll.Unlock()
		r.fail(*lost)
	}
	if !r.isDying() {
		r.fail(fmt.Errorf("%w: verbs: %w", rdma.ErrConnLost, err))
	}
}

// handRole gives a parked waiter the role of looking. False: there is none.
func (r *rail) handRole() bool {
	if r.parked.Load() == 0 {
		return false
	}
	select {
	case r.role <- struct{}{}:
	default: // one is on its way
	}
	return true
}

func (r *rail) isDying() bool {
	select {
	case <-r.dying:
		return true
	default:
		return false
	}
}

func (r *rail) reason() error {
	r.end.Lock()
	defer r.end.Unlock()
	return r.end.err
}

// fail ends the rail; the first reason stays. It returns at once: gone is closed when
// it is done.
func (r *rail) fail(why error) {
	r.failed.Do(func() {
		r.end.Lock()
		r.end.err = why
		c := r.end.c
		r.end.Unlock()
		close(r.dying)
		if c != nil {
			c.leaving(r)
		}
		r.post.Lock()
		r.post.closed = true
		r.post.Unlock()
		if !errors.Is(why, rdma.ErrClosed) {
			r.count.failures.Add(1)
		}
		_ = r.cq.SetDeadline(past) // wakes run
	})
}

// drainTimeout bounds the wait for completions of a queue pair in error. It is a
// courtesy: when the queue pair is destroyed, nothing writes to buffers any more.
const drainTimeout = 200 * time.Millisecond

// teardown destroys the queue pair and gives back what was outstanding on it.
func (r *rail) teardown() {
	r.timer.Stop()
	r.setup.Lock() // nobody connects or says goodbye
	r.poll.Lock()  // for good: nobody looks any more
	r.poll.broken = true
	r.post.Lock()
	r.post.closed = true
	last := r.post.nextID
	r.post.Unlock()
	if r.qp != nil {
		if r.connected.Load() && r.qp.ToError() == nil {
			for deadline := time.Now().Add(drainTimeout); r.outstandingPolled(last) && time.Now().Before(deadline); {
				if r.lookPolled(time.Millisecond) == 0 && r.n.link.kind() == kindCM {
					break // such queues lose what is outstanding without a word
				}
			}
		}
		r.post.Lock()
		r.post.dead = true
		r.post.Unlock()
		if err := r.qp.Close(); err != nil {
			r.in.log.Error("verbs: queue pair not released", "device", r.n.name, "err", err)
		}
	}
	r.n.link.drop(r)
	if err := r.cq.Close(); err != nil {
		r.in.log.Error("verbs: completion queue not released", "device", r.n.name, "err", err)
	}
	r.count.queuePairs.Add(-1)
	r.setup.Unlock()
	left := r.collect()
	r.in.giveBounce(r.post.bounce)
	r.end.Lock()
	r.end.torn = true
	c := r.end.c
	r.end.Unlock()
	if c != nil {
		c.railGone(r, left)
	}
	close(r.gone)
}

// outstandingPolled tells whether READs before last have neither completed nor failed.
func (r *rail) outstandingPolled(last uint64) bool {
	r.post.Lock()
	defer r.post.Unlock()
	return max(r.post.doneID, r.poll.flushed) < last
}

// collect takes all batches off the rail, those posted first first.
func (r *rail) collect() []*work {
	r.post.Lock()
	defer r.post.Unlock()
	var out []*work
	take := func(w *work) {
		for _, o := range out[max(0, len(out)-1):] {
			if o == w { // pieces of one batch are neighbours
				return
			}
		}
		out = append(out, w)
	}
	for ; r.post.first < r.post.last; r.post.first++ {
		p := &r.post.pieces[r.post.first%uint64(len(r.post.pieces))]
		take(p.w)
		*p = piece{}
	}
	for w := r.post.waiting.pop(); w != nil; w = r.post.waiting.pop() {
		take(w)
	}
	clear(r.post.slots)
	r.batches.Store(0)
	r.load.Store(0)
	return out
}
