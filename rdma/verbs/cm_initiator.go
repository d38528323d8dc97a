package verbs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// cmRail is the initiator's end of a connection by rdma_cm: rail.extra. The peer has a
// key to the memory while it answers READs, so nothing but the bounce ring and the
// places for its words are in it.
type cmRail struct {
	pd   *ibv.PD
	mem  *rdma.Memory
	mr   *ibv.MR
	room []byte // for words, wordSize bytes each; follows the ring
	id   *ibv.CMID
}

// wordSize keeps words of the peer apart by cache lines.
const wordSize = 64

// cmDial receives the events of a connection.
type cmDial struct {
	r      *rail
	events chan ibv.CMEvent
	up     bool // it was established; for the goroutine that hands out events alone
}

func (l *cmLink) prepare(r *rail, own side) (side, error) {
	addrs, err := l.addresses()
	if err != nil {
		return side{}, err
	}
	c := &cmRail{}
	r.extra = c
	if err := l.makeEnd(r, c); err != nil {
		if r.qp != nil {
			err = errors.Join(err, r.qp.Close())
			r.qp = nil
		}
		l.drop(r)
		return side{}, err
	}
	own.extra = encodeCMOffer(addrs)
	return own, nil
}

func (l *cmLink) makeEnd(r *rail, c *cmRail) (err error) {
	ring := (l.p.BounceBytes + 4095) &^ 4095
	if c.pd, err = l.n.ctx.NewPD(); err != nil {
		return fmt.Errorf("%w: verbs: %s has a limit of %d protection domains: %w", rdma.ErrExhausted, l.n.name, l.n.attr.MaxPD, err)
	}
	if c.mem, err = rdma.AllocMemory("kvd-iwarp-sink", uint64(ring+recvSlots*wordSize), rdma.MemoryOptions{}); err != nil {
		return fmt.Errorf("%w: verbs: %w", rdma.ErrExhausted, err)
	}
	b := c.mem.Bytes()
	populate(b)
	if c.mr, err = c.pd.RegMR(b, ibv.AccessLocalWrite|ibv.AccessRemoteWrite); err != nil {
		return refusedRegistration(err, l.n.name, uint64(len(b)), 1, l.n.attr)
	}
	c.room = b[ring:]
	r.pd = c.pd
	r.post.bounce = bounce{buf: b[:ring:ring], base: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), lkey: c.mr.LKey()}
	qp, err := r.newQP(c.pd.NewQP)
	if err != nil {
		return err
	}
	if err := qp.ToInit(ibv.InitParams{Port: r.spec.port, Access: ibv.AccessRemoteWrite}); err != nil {
		return fmt.Errorf("%w: verbs: %w", rdma.ErrUnsupported, err)
	}
	return r.postRecvs()
}

// longest: soft-iWARP of Linux 6.1 answers a READ of up to 32 bytes that crosses a page
// with the wrong bytes behind the crossing (siw_try_1seg). Such a one is posted in two.
func (l *cmLink) longest(remoteAddr uint64, length int) int {
	const short, page = 64, 4096
	if length > short {
		return length
	}
	return min(length, int(page-remoteAddr%page))
}

func (l *cmLink) makeRoom(r *rail, slot uint64) error {
	c := r.extra.(*cmRail)
	return r.qp.PostRecvInto(idRecv|slot, c.wordAddr(slot), wordSize, c.mr.LKey())
}

func (c *cmRail) wordAddr(slot uint64) uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(c.room)))) + slot*wordSize
}

func (l *cmLink) word(r *rail, wc *ibv.Completion) uint32 {
	slot := wc.ID & idNumber
	if wc.ByteLen != 4 || slot >= recvSlots {
		return 0
	}
	return binary.LittleEndian.Uint32(r.extra.(*cmRail).room[slot*wordSize:])
}

// tell: the target knows what a word of no bytes means, that the client is there.
func (l *cmLink) tell(r *rail, id uint64, _ uint32) error { return r.qp.PostWord(id, nil) }

func (l *cmLink) connect(ctx context.Context, r *rail, a answerRail) error {
	ca, err := decodeCMAnswer(a.extra)
	if err != nil {
		return err
	}
	if len(r.spec.gids) > 0 {
		r.gid = r.spec.gids[0]
	}
	var errs []error
	for _, at := range ca.at {
		id, err := l.ch.NewID()
		if err != nil {
			return fmt.Errorf("%w: verbs: %w", rdma.ErrExhausted, err)
		}
		d := &cmDial{r: r, events: make(chan ibv.CMEvent, 8)}
		l.own(id, d)
		asked, err := l.dial(ctx, r, d, id, at, ca.token, int(a.depth))
		if err == nil {
			r.extra.(*cmRail).id = id
			return nil
		}
		l.shut(id)
		errs = append(errs, fmt.Errorf("%s: %w", at, err))
		if asked || ctx.Err() != nil || r.isDying() {
			break // the queue pair and the token are used up
		}
	}
	return fmt.Errorf("verbs: %s: connect by rdma_cm: %w", l.n.name, errors.Join(errs...))
}

// dial goes through the steps of rdma_cm. asked tells that the target was sent the token.
func (l *cmLink) dial(ctx context.Context, r *rail, d *cmDial, id *ibv.CMID, at netip.AddrPort, token cmToken, depth int) (asked bool, err error) {
	left := func() time.Duration {
		if end, ok := ctx.Deadline(); ok {
			return time.Until(end)
		}
		return l.p.AcceptTimeout
	}
	var src netip.AddrPort
	if p := l.p.PreferAddress.Unmap(); p.IsValid() && l.leadsHere(p) && p.Is4() == at.Addr().Is4() {
		src = netip.AddrPortFrom(p, 0)
	}
	if err := id.ResolveAddr(src, at, left()); err != nil {
		return false, err
	}
	if err := d.await(ctx, ibv.CMAddrResolved); err != nil {
		return false, err
	}
	if got := id.DeviceName(); got != l.n.name {
		return false, fmt.Errorf("the way there is by device %q, this rail's is %q", got, l.n.name)
	}
	if err := id.ResolveRoute(left()); err != nil {
		return false, err
	}
	if err := d.await(ctx, ibv.CMRouteResolved); err != nil {
		return false, err
	}
	err = id.Connect(ibv.CMParams{
		QP: r.qp, PrivateData: cmPrivate(token), ResponderResources: 1, InitiatorDepth: depth,
		RetryCount: l.p.Retry, RNRRetryCount: min(l.p.Retry, 6),
	})
	if err != nil {
		return true, err
	}
	if err := d.await(ctx, ibv.CMEstablished); err != nil {
		return true, err
	}
	return true, nil
}

func (l *cmLink) leadsHere(ip netip.Addr) bool {
	addrs, err := l.addresses()
	if err != nil {
		return false
	}
	for _, a := range addrs {
		if a == ip {
			return true
		}
	}
	return false
}

// await waits for an event, and no longer than the connection is wanted.
func (d *cmDial) await(ctx context.Context, want ibv.CMEventType) error {
	select {
	case ev := <-d.events:
		if ev.Type == want {
			return nil
		}
		err := ev.Err()
		if err == nil {
			err = fmt.Errorf("%s, want %s", ev.Type, want)
		}
		if ev.Type == ibv.CMRejected {
			return fmt.Errorf("%w: the target refused: the answer was used before, has expired or was revoked: %w", rdma.ErrHandshake, err)
		}
		return err
	case <-d.r.dying:
		return d.r.reason()
	case <-ctx.Done():
		return fmt.Errorf("%w: waiting for %q: %w", rdma.ErrTimeout, want, ctx.Err())
	}
}

// event runs on the goroutine that hands them out.
func (d *cmDial) event(ev ibv.CMEvent) {
	if d.up {
		if err := ev.Err(); err != nil {
			d.r.hangUp(fmt.Errorf("%w: verbs: %s port %d: %w", rdma.ErrConnLost, d.r.n.name, d.r.spec.port, err))
		}
		return
	}
	d.up = ev.Type == ibv.CMEstablished
	select {
	case d.events <- ev:
	default: // more than all its steps have: it is not listened to any more
	}
}

// leave: the end of the queue pair tells the target.
func (l *cmLink) leave(*rail, bye) bool { return false }

// refusal: hardware tells that the target's device refused a READ, soft-iWARP only
// flushes it, as it does when the target dies. Where other rails are left the READ goes
// on there, and ends by whichever class they tell. On the last one it is of both classes: the
// connection has ended, and perhaps the location is wrong.
func (l *cmLink) refusal(r *rail, s ibv.WCStatus) error {
	if err := remoteRefusal(s); err != nil {
		return err
	}
	// Which of the two comes is a race of soft-iWARP with the end of the connection.
	if s != ibv.WCWRFlushErr && s != ibv.WCLocQPOpErr {
		return nil
	}
	r.end.Lock()
	c := r.end.c
	r.end.Unlock()
	if c == nil || c.cause() != nil || r.isDying() || len(*c.alive.Load()) > 1 {
		return nil
	}
	return fmt.Errorf("%w: verbs: refused by the target's device, or %w: %s does not tell which", rdma.ErrAccess, rdma.ErrConnLost, l.n.name)
}

func (l *cmLink) drop(r *rail) {
	c, ok := r.extra.(*cmRail)
	if !ok {
		return
	}
	if c.id != nil {
		l.shut(c.id)
	}
	var errs []error
	if c.mr != nil {
		errs = append(errs, c.mr.Close())
	}
	if c.pd != nil {
		errs = append(errs, c.pd.Close())
	}
	if c.mem != nil {
		errs = append(errs, c.mem.Free())
	}
	if err := errors.Join(errs...); err != nil {
		l.log.Error("verbs: sink not released", "device", l.n.name, "err", err)
	}
}
