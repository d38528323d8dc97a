package verbs

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// connector brings the two ends of a queue pair together, in the way that a kind of
// device needs. It is a nic's, and may hold state of that nic.
type connector interface {
	kind() kind

	// accept makes the target's end (servedRail.newQP, postRecvs) ready for the client
	// or for its coming, and says what the client must know. ways are the pairs of GIDs
	// to try.
	accept(r *servedRail, client side, ways []gidPair) (answerRail, error)
	// goodbye tells the client of r why it ends, if it can; servedRail.sent is called
	// when it arrived. False: it cannot.
	goodbye(r *servedRail, why bye) bool
	// release frees what accept made besides the queue pair, which is closed. Called
	// once, with r.mu held.
	release(r *servedRail)

	// prepare makes the initiator's end (rail.newQP) and says what the target must know.
	prepare(r *rail, own side) (side, error)
	// connect completes it with the target's answer: READs and messages can be posted
	// when it returns.
	connect(ctx context.Context, r *rail, a answerRail) error
	// leave tells the target that r ends, if it can; rail.said is called when it arrived.
	// False: it cannot.
	leave(r *rail, why bye) bool
	// longest is how much of a READ may be posted in one request.
	longest(remoteAddr uint64, length int) int
	// makeRoom posts a receive for a word of the target, in one of recvSlots places.
	makeRoom(r *rail, slot uint64) error
	// word reads what arrived.
	word(r *rail, wc *ibv.Completion) uint32
	// tell posts a word for the target.
	tell(r *rail, id uint64, imm uint32) error
	// refusal is the class of a failed READ that the target's device refused, nil for
	// other failures.
	refusal(r *rail, s ibv.WCStatus) error
	// drop frees what prepare and connect made besides the queue pair, which is closed.
	drop(r *rail)
}

// exchange connects InfiniBand and RoCE: each side learns the other's numbers from the
// offer or the answer and moves its own queue pair.
type exchange struct{}

func (exchange) kind() kind { return kindExchange }

// randomPSN starts the packet numbers of a connection where a stranger cannot guess it.
func randomPSN() uint32 {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the process first
	return binary.LittleEndian.Uint32(b[:]) & maxNumber24
}

func (exchange) accept(r *servedRail, client side, ways []gidPair) (answerRail, error) {
	n, p := r.tn.n, r.ep.d.t.p
	qp, err := r.newQP(r.pd.NewQP)
	if err != nil {
		return answerRail{}, err
	}
	a := answerRail{side: r.own}
	a.qpn, a.psn = qp.Num(), randomPSN()
	a.mtu = min(client.mtu, r.own.mtu)
	a.depth = uint8(readDepth(int(client.depth), int(r.own.depth), p.MaxReadDepth))
	err = r.withQP(func(qp *ibv.QP) error {
		// Peers may READ through it, and nothing else.
		if err := qp.ToInit(ibv.InitParams{Port: r.spec.port, PKeyIndex: r.spec.pkeyIndex, Access: ibv.AccessRemoteRead}); err != nil {
			return err
		}
		if err := r.postRecvs(qp); err != nil {
			return err
		}
		way, err := tryWays(ways, func(w gidPair) error {
			return qp.ToRTR(rtrParams(p, r.spec, n, client, client.gids[w.client], r.spec.gids[w.server], a.mtu, int(a.depth)))
		})
		if err != nil {
			return err
		}
		r.gid = r.spec.gids[way.server]
		a.clientGID = uint8(way.client)
		a.gids = []wireGID{{typ: r.gid.Type, gid: r.gid.GID}}
		return qp.ToRTS(rtsParams(p, a.psn, 1))
	})
	if err != nil {
		return answerRail{}, fmt.Errorf("%w: verbs: no way from %s port %d to the client (%s): %w",
			rdma.ErrUnsupported, n.name, r.spec.port, describeSides([]side{client}), err)
	}
	return a, nil
}

// tryWays moves a queue pair by the first way that works; a refused move leaves it
// where it was.
func tryWays(ways []gidPair, move func(gidPair) error) (gidPair, error) {
	var last error
	for _, w := range ways {
		if last = move(w); last == nil {
			return w, nil
		}
	}
	return gidPair{}, last
}

// rtrParams lead to the peer's queue pair by one pair of GIDs.
func rtrParams(p Provider, spec railSpec, n *nic, peer side, peerGID wireGID, own ibv.GIDEntry, mtu ibv.MTU, depth int) ibv.RTRParams {
	return ibv.RTRParams{
		DestQPN: peer.qpn, PSN: peer.psn, PathMTU: mtu, MaxDestRdAtomic: depth, MinRNRTimer: p.MinRNRTimer,
		Port: spec.port, DLID: peer.lid, SL: p.ServiceLevel,
		Global: needsGRH(peer.link, spec.grhRequired, own.GID, peerGID.gid), DGID: peerGID.gid, SGIDIndex: own.Index,
		HopLimit: hopLimit, TrafficClass: p.TrafficClass,
	}
}

func rtsParams(p Provider, psn uint32, depth int) ibv.RTSParams {
	return ibv.RTSParams{PSN: psn, Timeout: p.Timeout, RetryCount: p.Retry, RNRRetry: min(p.Retry, 6), MaxRdAtomic: depth}
}

func (exchange) goodbye(r *servedRail, why bye) bool {
	return r.withQP(func(qp *ibv.QP) error { return qp.PostMessage(idMessage|r.id, msgBye.with(uint32(why))) }) == nil
}

func (exchange) release(*servedRail) {}

func (exchange) prepare(r *rail, own side) (side, error) {
	qp, err := r.newQP(r.pd.NewQP)
	if err != nil {
		return side{}, err
	}
	// A peer may do nothing to this side.
	if err := qp.ToInit(ibv.InitParams{Port: r.spec.port, PKeyIndex: r.spec.pkeyIndex}); err != nil {
		return side{}, err
	}
	if err := r.postRecvs(); err != nil {
		return side{}, err
	}
	own.qpn, own.psn = qp.Num(), randomPSN()
	r.psn = own.psn
	return own, nil
}

func (exchange) connect(_ context.Context, r *rail, a answerRail) error {
	if int(a.clientGID) >= len(r.spec.gids) || len(a.gids) != 1 {
		return fmt.Errorf("%w: verbs: answer: GID %d of %d, and %d of the target: want one of each", rdma.ErrHandshake, a.clientGID, len(r.spec.gids), len(a.gids))
	}
	r.gid = r.spec.gids[a.clientGID]
	if err := r.qp.ToRTR(rtrParams(r.in.p, r.spec, r.n, a.side, a.gids[0], r.gid, a.mtu, 1)); err != nil {
		return fmt.Errorf("%w: verbs: no way from %s port %d to %s: %w", rdma.ErrUnsupported, r.n.name, r.spec.port, a.gids[0].gid, err)
	}
	if err := r.qp.ToRTS(rtsParams(r.in.p, r.psn, int(a.depth))); err != nil {
		return fmt.Errorf("%w: verbs: %s: %w", rdma.ErrUnsupported, r.n.name, err)
	}
	return nil
}

func (exchange) leave(r *rail, why bye) bool { return r.say(msgBye, uint32(why)) == nil }

func (exchange) longest(_ uint64, length int) int { return length }

func (exchange) makeRoom(r *rail, slot uint64) error { return r.qp.PostRecv(idRecv | slot) }

func (exchange) word(_ *rail, wc *ibv.Completion) uint32 { return wc.Imm }

func (exchange) tell(r *rail, id uint64, imm uint32) error { return r.qp.PostMessage(id, imm) }

func (exchange) refusal(_ *rail, s ibv.WCStatus) error { return remoteRefusal(s) }

func (exchange) drop(*rail) {}
