package client

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/kvd-io/kvd/storage/layout"
)

const (
	// attemptLimit bounds the wait for the READs of one attempt: past it the route is
	// learnt again. A node that hangs must not hold a get longer than that.
	attemptLimit = 250 * time.Millisecond
	// slowestLink in bytes a second is what longer objects are waited for in addition.
	slowestLink = 10 << 20
	// maxSpins bounds the attempts that met something being written, before the leader
	// is asked over gRPC.
	maxSpins = 24
	// maxFruitless bounds the attempts to learn a better route, before the leader is
	// asked over gRPC (which goes on looking for it until the deadline). While nobody
	// leads gRPC knows no better, so an election is waited for; but not the session of a
	// leader that others name.
	maxFruitless         = 4
	maxFruitlessElection = 40
	// maxFruitlessWeak is the same at the weaker levels, where over gRPC any replica
	// answers.
	maxFruitlessWeak = 1
)

// limitFor is attemptLimit for an attempt that READs n bytes.
func limitFor(n int) time.Duration {
	return attemptLimit + time.Duration(n)*time.Second/slowestLink
}

// reading is one call of Get: what outlives its attempts.
type reading struct {
	c     *Client
	ctx   context.Context
	stop  context.CancelFunc // not nil once ctx is ours
	g     *get
	key   []byte
	dst   []byte
	buf   *Buffer // instead of dst
	level Level
	lag   lagBound

	object layout.Object // of the last judge that found a sound one
	why    reason        // of the last attempt that failed
	last   error         // what went wrong over gRPC, for the error's text

	seen  [4]sighting // of other keys behind slots with this key's finger print
	nSeen int

	spins     int
	fruitless int
	tables    int // times the table was asked for
	pauses    *pauses
}

// verdict on an attempt.
type verdict uint8

const (
	failed verdict = iota // reading.why says why
	present
	absent
)

// GetInto reads a key into dst[:cap(dst)]: Value.Data is dst's memory where that is
// large enough, else newly allocated. With a remembered location and a large enough
// dst it allocates nothing. dst must not be touched by others until it returned.
//
// See Buffer for how a value arrives without a copy.
func (c *Client) GetInto(ctx context.Context, key, dst []byte, opts ...ReadOption) (Value, error) {
	return c.getInto(ctx, key, dst, nil, false, opts)
}

// getInto is a get into dst or buf, which begin was called for.
func (c *Client) getInto(ctx context.Context, key, dst []byte, buf *Buffer, usable bool, opts []ReadOption) (Value, error) {
	level, lag := c.readLevel(opts)
	err := c.checkKey(key)
	// READs of local memory are done before anybody looks at the context again.
	if err == nil && ctx.Err() != nil {
		err = c.gaveUp(ctx, "get", "the context had ended before", nil)
	}
	if err != nil {
		if usable {
			buf.end()
		}
		return Value{}, err
	}
	r := reading{c: c, ctx: ctx, key: key, dst: dst, buf: buf, level: level, lag: lag}
	r.g = c.acquire(key)
	if usable {
		r.g.sink = buf
	}
	v, err := r.get()
	r.g.release()
	if r.stop != nil {
		r.stop()
	}
	return v, err
}

// lagBound of a stale read.
type lagBound struct {
	entries uint64
	set     bool
}

func (c *Client) readLevel(opts []ReadOption) (Level, lagBound) {
	level, lag := c.cfg.Level, lagBound{}
	for i := range opts {
		if opts[i].level != LevelDefault {
			level = opts[i].level
		}
		if opts[i].limitLag {
			lag = lagBound{opts[i].maxLag, true}
		}
	}
	return min(level, Stale), lag
}

func (c *Client) checkKey(key []byte) error {
	switch limit := c.cluster().maxKey; {
	case len(key) == 0:
		return fmt.Errorf("%w: empty key: want 1 to %d bytes", ErrInvalid, c.keyLimit())
	case len(key) > layout.MaxKeySize || limit > 0 && len(key) > limit:
		return fmt.Errorf("%w: key of %d bytes: want at most %d", ErrInvalid, len(key), c.keyLimit())
	}
	return nil
}

func (c *Client) keyLimit() int {
	if limit := c.cluster().maxKey; limit > 0 && limit < layout.MaxKeySize {
		return limit
	}
	return layout.MaxKeySize
}

func (r *reading) get() (Value, error) {
	switch k := r.c.cluster(); {
	case r.c.cfg.Transport == TransportGRPC:
		return r.overGRPC(reasonForced)
	case !k.oneSided:
		return r.overGRPC(reasonTwoSided)
	case k.immutable && r.level == Linearizable:
		if v, err, ok := r.immutable(); ok {
			return v, err
		}
	}
	return r.oneSided()
}

// oneSided reads at the leader, confirmed by a quorum, again and again until it has
// an answer, has to ask over gRPC, or runs out of time. At the weaker levels any
// replica may answer, and they are asked first each time: one of them may be there
// when there is no leader.
func (r *reading) oneSided() (Value, error) {
	sh := r.g.sh
	for {
		if r.level != Linearizable {
			if v, err, ok := r.relaxed(); ok {
				return v, err
			}
		}
		rt := sh.route.Load()
		if rt == nil || rt.leader.ended.Load() {
			r.why = reasonNoRoute
		} else {
			switch r.attempt(rt) {
			case present:
				return r.accept(rt.leader)
			case absent:
				r.countGet(rt.leader)
				return Value{}, ErrNotFound
			}
		}
		if r.why.final() {
			return r.overGRPC(r.why)
		}
		r.c.count.retries[r.why].Add(1)
		if err := r.alive(); err != nil {
			return Value{}, err
		}
		if !r.improve(rt) {
			return r.overGRPC(r.why)
		}
		r.g = r.g.fresh()
	}
}

// final reasons are not cured by reading again.
func (w reason) final() bool {
	switch w {
	case reasonIncomplete, reasonNoTransport, reasonTwoSided, reasonForced, reasonQuorumSize:
		return true
	}
	return false
}

// improve does something about why the attempt failed; false when it is no use.
func (r *reading) improve(rt *route) bool {
	switch r.why {
	case reasonTorn, reasonPending, reasonMoved, reasonUnsound, reasonRegion, reasonTooLong:
		r.spins++
		return r.spin()
	case reasonLayout, reasonNoTable:
		return r.improveTable(rt)
	}
	r.bound()
	if r.why == reasonSlow && rt.leader.stalled.Load() > 0 {
		// Another attempt would wait for nothing, unless another node leads by now.
		sh := r.g.sh
		return sh.route.Load() != rt || !sh.askedLately() && r.c.learnRoute(r.ctx, sh, rt) != nil
	}
	if r.c.learnRoute(r.ctx, r.g.sh, rt) != nil {
		return true
	}
	r.fruitless++
	limit := maxFruitless
	switch {
	case r.why != reasonNoRoute:
	case r.level != Linearizable:
		limit = maxFruitlessWeak
	case r.c.electing(r.g.sh):
		limit = maxFruitlessElection
	}
	return r.fruitless <= limit && r.pause()
}

// improveTable asks for the index unless it is known better than what was tried.
func (r *reading) improveTable(rt *route) bool {
	if r.why == reasonLayout {
		r.spins++
		info := rt.leader.replicas[r.g.sh.id].info.Load()
		if a := &r.g.asks[0]; info != nil && r.g.n > 0 && a.rec.LayoutGen == info.tableGen {
			return r.spin() // only the remembered location was too old
		}
	}
	r.tables++
	if r.why == reasonNoTable && r.tables > 1 || r.tables > maxSpins {
		return false
	}
	r.bound()
	r.c.learnTable(r.ctx, r.g.sh, rt.leader)
	return r.spin()
}

// spin waits for a writer to get on, in the scale of its few stores at first.
func (r *reading) spin() bool {
	switch {
	case r.spins > maxSpins:
		return false
	case r.spins <= 4:
		runtime.Gosched()
		return true
	default:
		r.bound()
		return sleep(r.ctx, min(20*time.Microsecond<<(r.spins-4), 2*time.Millisecond))
	}
}

// pause waits before the next attempt, with jitter, or until a session begins or
// ends.
func (r *reading) pause() bool {
	r.bound()
	if r.pauses == nil {
		r.pauses = r.c.newBackOff(r.g.sh.id)
	}
	return r.c.pauseFor(r.ctx, r.pauses.next())
}

func (c *Client) pauseFor(ctx context.Context, d time.Duration) bool {
	changed := c.changed.wait()
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-changed:
	case <-c.life.Done():
		return false
	case <-ctx.Done():
		return false
	}
	return true
}

// bound gives the call a deadline if it has none. The fast path never gets here, so
// it pays for no context of its own.
func (r *reading) bound() {
	if r.stop == nil {
		r.ctx, r.stop = r.c.withDeadline(r.ctx)
	}
}

// withDeadline bounds ctx by CallTimeout where it has no deadline.
func (c *Client) withDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, c.cfg.CallTimeout)
}

// alive is nil while the call may go on.
func (r *reading) alive() error {
	if r.ctx.Err() == nil && r.c.life.Err() == nil {
		return nil
	}
	return r.c.gaveUp(r.ctx, "get", r.why.String(), r.last)
}

// gaveUp is the error of a call that ended without an answer.
func (c *Client) gaveUp(ctx context.Context, op, why string, last error) error {
	switch err := ctx.Err(); {
	case c.life.Err() != nil:
		return fmt.Errorf("%s: %w", op, ErrClosed)
	case errors.Is(err, context.Canceled):
		return fmt.Errorf("%s: %w", op, err)
	case last != nil:
		return fmt.Errorf("%s: %w in time (%s): %w: %v", op, ErrUnavailable, why, context.DeadlineExceeded, last)
	default:
		return fmt.Errorf("%s: %w in time (%s): %w", op, ErrUnavailable, why, context.DeadlineExceeded)
	}
}

// attempt reads once at the route's leader and confirms.
func (r *reading) attempt(rt *route) verdict {
	g, s, c := r.g, rt.leader, r.c
	switch {
	case s.conn == nil:
		return r.fail(s.why)
	case len(rt.voters) == 0:
		return r.fail(reasonQuorumSize)
	case s.stalled.Load() > 0:
		return r.fail(reasonSlow)
	}
	loc, ok := c.cache.get(g.hash, s.ord)
	if !ok || s.room(loc.at.Chunk, loc.at.Offset) < uint64(loc.length) {
		c.count.cacheMisses.Add(1)
		return r.attemptCold(rt)
	}
	c.count.cacheHits.Add(1)
	buf := g.space(int(loc.length))
	g.begin(rt, loc.at, buf)
	if why := r.confirm(rt, loc.gen); why != reasonNone {
		if why == reasonLayout {
			c.cache.drop(g.hash, s.ord, loc)
		}
		return r.fail(why)
	}
	switch r.judge(buf, loc.at, loc.version) {
	case live:
		return present
	case expired:
		return r.noValue(rt)
	}
	c.cache.drop(g.hash, s.ord, loc)
	c.count.retries[reasonMoved].Add(1)
	r.g = g.fresh()
	return r.attemptCold(rt)
}

// attemptCold looks the key up in the leader's index, then reads and confirms.
func (r *reading) attemptCold(rt *route) verdict {
	s := rt.leader
	info := s.replicas[r.g.sh.id].info.Load()
	if info == nil || info.table.ID == 0 {
		return r.fail(reasonNoTable)
	}
	if s.query != nil {
		if v, ok := r.attemptQuery(rt, info); ok {
			return v
		}
		r.g = r.g.fresh()
	}
	return r.attemptBuckets(rt, info)
}

// attemptBuckets reads the key's chain of buckets. A candidate is tried before the
// rest of its chain is read: mostly it is the key.
func (r *reading) attemptBuckets(rt *route, info *replicaInfo) verdict {
	s := rt.leader
	for f := (found{}); ; {
		if why := r.walk(s, info.table, &f); why != reasonNone {
			return r.fail(why)
		}
		for _, slot := range f.candidates[:f.n] {
			if v, ok := r.attemptSlot(rt, slot, info.tableGen); ok {
				return v
			}
			f.incomplete = true
			r.g = r.g.fresh()
		}
		if !f.ended {
			continue
		}
		if why := f.absence(); why != reasonNone {
			return r.fail(why)
		}
		// The records must be READ behind every bucket, so what confirmed a candidate
		// that was another key does not count.
		r.g.begin(rt, layout.Place{}, nil)
		if why := r.confirm(rt, info.tableGen); why != reasonNone {
			return r.fail(why)
		}
		return r.noValue(rt)
	}
}

// attemptSlot reads and confirms the object of one slot; ok is false where the slot
// is another key's.
func (r *reading) attemptSlot(rt *route, slot layout.Slot, gen uint64) (v verdict, ok bool) {
	s, at := rt.leader, slot.Place()
	buf, why := r.roomFor(s, slot)
	if why != reasonNone {
		return r.fail(why), true
	}
	r.g.begin(rt, at, buf)
	if why := r.confirm(rt, gen); why != reasonNone {
		return r.fail(why), true
	}
	switch j := r.judge(buf, at, 0); j {
	case live:
		r.remember(s, at, gen)
		return present, true
	case expired:
		return r.noValue(rt), true
	case otherKey:
		if !r.isOthers(slot) {
			return r.fail(reasonMoved), true
		}
		return failed, false
	default:
		return r.fail(j.reason()), true
	}
}

// sighting of another key's object where a slot led to.
type sighting struct {
	slot    layout.Slot
	version uint64
}

// isOthers tells whether the slot, behind which another key was just found, is most
// likely that key's own. At first sight it need not be: the slot may have been this
// key's, whose value was replaced, and the block given to another key before it was
// READ; then the look-up is repeated. Seen again, behind the same slot of a bucket
// that was READ since, it is a chance match of finger prints. Even so it does not
// help to prove an absence (see package layout).
func (r *reading) isOthers(slot layout.Slot) bool {
	if layout.HashKey(r.c.cluster().seed, r.object.Key).Fingerprint() != slot.Fingerprint() {
		return false
	}
	now := sighting{slot, r.object.Version}
	for _, s := range r.seen[:r.nSeen] {
		if s == now {
			return true
		}
	}
	r.seen[r.nSeen%len(r.seen)] = now
	r.nSeen = min(r.nSeen+1, len(r.seen))
	return false
}

func (r *reading) fail(why reason) verdict {
	r.why = why
	return failed
}

// noValue ends a confirmed attempt that found no value. Whoever saw an absence must
// not be shown an older presence later, so the session goes up to what the leader
// had applied.
func (r *reading) noValue(rt *route) verdict {
	if a := &r.g.asks[0]; a.state.Load() == askDone && a.leader {
		raise(&r.g.sh.index, a.rec.Applied)
	}
	return absent
}

// accept hands the judged object out.
func (r *reading) accept(s *session) (Value, error) {
	r.countGet(s)
	raise(&r.g.sh.index, r.object.Version)
	return r.deliver(r.object.Value, r.object.Version, r.object.Expiry)
}

func (r *reading) countGet(s *session) { r.c.count.gets[r.level][s.via].Add(1) }

// copyOut copies the value to the caller's memory.
func (r *reading) copyOut(data []byte, version uint64, expiry int64) Value {
	v := Value{Version: version, Expires: expires(expiry)}
	if cap(r.dst) < len(data) || r.dst == nil {
		r.dst = make([]byte, len(data))
	}
	v.Data = r.dst[:len(data)]
	copy(v.Data, data)
	return v
}

// expires decodes an expiry.
func expires(unixMS int64) time.Time {
	if unixMS == 0 {
		return time.Time{}
	}
	return time.UnixMilli(unixMS)
}

// remember keeps the judged object's place. Where the node's look-up named memory that
// is not known here, because it was made since, it is asked for: a place without its
// region is no use.
func (r *reading) remember(s *session, at layout.Place, gen uint64) {
	if s.room(at.Chunk, at.Offset) == 0 {
		r.c.learnRegionLater(s, at.Chunk)
	}
	r.c.cache.put(r.g.hash, s.ord, location{
		at: at, length: uint32(layout.ObjectSize(len(r.object.Key), len(r.object.Value))), version: r.object.Version, gen: gen,
	})
}

// judged is what the bytes of an object turned out to be.
type judged uint8

const (
	live judged = iota
	expired
	otherKey
	pending
	torn
	moved // it was the key's value, and is no longer; or another version lies there now
)

func (j judged) reason() reason {
	switch j {
	case pending:
		return reasonPending
	case torn:
		return reasonTorn
	default:
		return reasonMoved
	}
}

// judge is the one place where the bytes of an object are believed or not, for
// every way of reading. version, when not 0, is what the location was remembered
// with.
func (r *reading) judge(b []byte, at layout.Place, version uint64) judged {
	o, v := layout.DecodeObject(b, r.c.cluster().seed, at)
	if v != layout.Valid {
		return torn
	}
	r.object = o
	switch {
	case string(o.Key) != string(r.key):
		return otherKey
	case o.State == layout.StateNone || o.State == layout.StatePending:
		return pending
	case o.State != layout.StateLive:
		return moved
	case version != 0 && o.Version != version:
		return moved
	}
	if o.Expiry != 0 && o.Expiry <= r.c.cfg.Clock.Now().UnixMilli() {
		return expired
	}
	return live
}
