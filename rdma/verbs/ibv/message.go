package ibv

import "fmt"

// PostMessage posts a message of no bytes: a SEND whose immediate is all there is. It is
// signalled, and wakes a peer that armed its queue by ArmSolicited. It needs a PostRecv of
// the peer's. InfiniBand and RoCE only: iWARP has no immediates.
func (q *QP) PostMessage(id uint64, imm uint32) error {
	return refused(cPostMessage(q.handle(), id, imm), "ibv_post_send", "%s queue pair %d: a message", q.pd.ctx.name, q.num)
}

// MaxWord is the longest word in bytes.
const MaxWord = 8

// PostWord posts a SEND of up to MaxWord bytes, which are copied during the call: what
// PostMessage is where there are no immediates (iWARP). It is signalled and solicited, and
// needs a receive of the peer: PostRecv for a word of no bytes, PostRecvInto for others.
func (q *QP) PostWord(id uint64, word []byte) error {
	if len(word) > MaxWord {
		return fmt.Errorf("ibv: word of %d bytes: want at most %d", len(word), MaxWord)
	}
	return refused(cPostWord(q.handle(), id, word), "ibv_post_send", "%s queue pair %d: a word", q.pd.ctx.name, q.num)
}

// PostRecvInto makes room for one message of up to length bytes at addr, in the region
// of lkey.
func (q *QP) PostRecvInto(id, addr uint64, length, lkey uint32) error {
	return refused(cPostRecvInto(q.handle(), id, addr, length, lkey), "ibv_post_recv", "%s queue pair %d", q.pd.ctx.name, q.num)
}

// PostRecv makes room for one message. Its completion carries Imm, or fails when the
// queue pair does.
func (q *QP) PostRecv(id uint64) error {
	return refused(cPostRecv(q.handle(), id), "ibv_post_recv", "%s queue pair %d", q.pd.ctx.name, q.num)
}

// ArmSolicited is Arm for messages only: completions of READs raise no event.
func (q *CQ) ArmSolicited() error {
	if errno := cArmSolicited(q.handle()); errno != 0 {
		return refused(errno, "ibv_req_notify_cq", "%s", q.ctx.name)
	}
	return nil
}
