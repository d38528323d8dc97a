package ibv

import (
	"fmt"
	"sync/atomic"
	"time"
)

// QPConfig of a reliable connection (RC).
type QPConfig struct {
	SendCQ, RecvCQ *CQ
	MaxSendWR      int // requests posted at a time
	MaxRecvWR      int // 0 is well: READs need no receives
}

// QP is a queue pair of a reliable connection.
type QP struct {
	pd     *PD
	h      atomic.Uintptr
	cm     *CMID // which made it, or nil
	num    uint32
	sendWR int
	scq    *CQ
	rcq    *CQ
}

// NewQP makes a queue pair in state RESET.
func (p *PD) NewQP(cfg QPConfig) (*QP, error) {
	return p.newQP(cfg, nil)
}

func (p *PD) newQP(cfg QPConfig, id *CMID) (*QP, error) {
	if cfg.SendCQ == nil || cfg.RecvCQ == nil || cfg.MaxSendWR <= 0 || cfg.MaxRecvWR < 0 {
		return nil, fmt.Errorf("ibv: queue pair: want two completion queues and at least one send request, have %d", cfg.MaxSendWR)
	}
	var cmHandle uintptr
	op := "ibv_create_qp"
	if id != nil {
		cmHandle, op = id.handle(), "rdma_create_qp"
	}
	h, num, sendWR, errno := cCreateQP(cmHandle, p.handle(), cfg.SendCQ.handle(), cfg.RecvCQ.handle(), cfg.MaxSendWR, cfg.MaxRecvWR)
	if errno != 0 {
		return nil, refused(errno, op, "%s with %d send requests", p.ctx.name, cfg.MaxSendWR)
	}
	q := &QP{pd: p, num: num, sendWR: sendWR, scq: cfg.SendCQ, rcq: cfg.RecvCQ, cm: id}
	q.h.Store(h)
	p.children.Add(1)
	q.scq.children.Add(1)
	q.rcq.children.Add(1)
	if id != nil {
		id.children.Add(1)
	}
	live.qps.Add(1)
	return q, nil
}

// Num is the queue pair's number.
func (q *QP) Num() uint32 { return q.num }

// MaxSendWR is how many requests may be posted at a time: at least what was asked for.
func (q *QP) MaxSendWR() int { return q.sendWR }

// PD it belongs to.
func (q *QP) PD() *PD { return q.pd }

// Close destroys the queue pair: afterwards the device answers no READ on it and raises
// no completions for it. What was outstanding is lost without a completion, so go
// through ToError and drain first where buffers are to be reused.
func (q *QP) Close() error {
	h := q.h.Swap(0)
	if h == 0 {
		return nil
	}
	var cm uintptr
	if q.cm != nil {
		cm = q.cm.h.Load()
		q.cm.children.Add(-1)
	}
	q.pd.children.Add(-1)
	q.scq.children.Add(-1)
	q.rcq.children.Add(-1)
	live.qps.Add(-1)
	return refused(cDestroyQP(cm, h), "ibv_destroy_qp", "%s number %d", q.pd.ctx.name, q.num)
}

func (q *QP) handle() uintptr { return use(q.h.Load(), "queue pair") }

// InitParams of the step RESET to INIT.
type InitParams struct {
	Port      int
	PKeyIndex int
	// Access that the peer has through this queue pair, at most: AccessRemoteRead for a
	// target, 0 for an initiator.
	Access Access
}

// RTRParams of the step INIT to RTR (ready to receive).
type RTRParams struct {
	DestQPN         uint32
	PSN             uint32 // the peer's first packet number, 24 bits
	PathMTU         MTU
	MaxDestRdAtomic int // READs of the peer that are served at a time
	MinRNRTimer     int // code; 12 is 0.64 ms, 0 is 655 ms

	Port        int
	DLID        uint16 // InfiniBand; 0 on Ethernet
	SL          int
	SrcPathBits int
	StaticRate  int

	// Global adds a routing header: always on Ethernet, on InfiniBand between subnets.
	Global       bool
	DGID         GID
	SGIDIndex    int
	HopLimit     int // 64 where routed
	TrafficClass int
	FlowLabel    uint32
}

// RTSParams of the step RTR to RTS (ready to send).
type RTSParams struct {
	PSN         uint32 // own first packet number, 24 bits
	Timeout     int    // code: 4.096 us x 2^Timeout a try; 0 is endless
	RetryCount  int    // 0 to 7
	RNRRetry    int    // 0 to 7; 7 is endless
	MaxRdAtomic int    // own READs outstanding, at most
}

// QPState of a queue pair.
type QPState uint8

const (
	QPReset QPState = iota
	QPInit
	QPRTR
	QPRTS
	QPSQD
	QPSQError
	QPError
)

func (s QPState) String() string {
	names := [...]string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("state %d", int(s))
}

// QPAttr is what Query tells.
type QPAttr struct {
	State           QPState // soft-iWARP always says RESET
	PathMTU         MTU
	MaxRdAtomic     int
	MaxDestRdAtomic int
	DestQPN         uint32
	Access          Access
}

// rawQPAttr has the shim's layout: one struct for all modifications and the query.
type rawQPAttr struct {
	dgid         [16]byte
	destQPN      uint32
	rqPSN        uint32
	sqPSN        uint32
	access       uint32
	flowLabel    uint32
	dlid         uint16
	pkeyIndex    uint16
	state        uint8
	port         uint8
	pathMTU      uint8
	maxRd        uint8
	maxDestRd    uint8
	minRNR       uint8
	timeout      uint8
	retry        uint8
	rnrRetry     uint8
	sl           uint8
	srcPathBits  uint8
	staticRate   uint8
	isGlobal     uint8
	sgidIndex    uint8
	hopLimit     uint8
	trafficClass uint8
}

// byteOf checks that a setting fits; the library would cut it silently.
func byteOf(v int, what string, limit int, err *error) uint8 {
	if v < 0 || v > limit {
		if *err == nil {
			*err = fmt.Errorf("ibv: %s %d: want 0 to %d", what, v, limit)
		}
		return 0
	}
	return uint8(v)
}

const maxPSN = 1<<24 - 1

// ToInit moves the queue pair from RESET to INIT.
func (q *QP) ToInit(p InitParams) error {
	var err error
	a := rawQPAttr{state: uint8(QPInit), port: byteOf(p.Port, "port", 255, &err), access: uint32(p.Access)}
	if p.PKeyIndex < 0 || p.PKeyIndex > 65535 {
		return fmt.Errorf("ibv: P_Key index %d: want 0 to 65535", p.PKeyIndex)
	}
	a.pkeyIndex = uint16(p.PKeyIndex)
	if err != nil {
		return err
	}
	return q.modify(&a, fmt.Sprintf("port %d, P_Key index %d", p.Port, p.PKeyIndex))
}

// ToRTR moves the queue pair from INIT to RTR.
func (q *QP) ToRTR(p RTRParams) error {
	var err error
	a := rawQPAttr{
		state: uint8(QPRTR), destQPN: p.DestQPN, rqPSN: p.PSN, pathMTU: uint8(p.PathMTU), dlid: p.DLID,
		maxDestRd: byteOf(p.MaxDestRdAtomic, "max_dest_rd_atomic", 255, &err), minRNR: byteOf(p.MinRNRTimer, "min_rnr_timer", 31, &err),
		port: byteOf(p.Port, "port", 255, &err), sl: byteOf(p.SL, "service level", 15, &err),
		srcPathBits: byteOf(p.SrcPathBits, "source path bits", 127, &err), staticRate: byteOf(p.StaticRate, "static rate", 255, &err),
	}
	if p.PathMTU.Bytes() == 0 {
		err = fmt.Errorf("ibv: path MTU code %d: want 1 to 5", p.PathMTU)
	}
	if p.PSN > maxPSN || p.DestQPN > maxPSN {
		err = fmt.Errorf("ibv: PSN %#x, queue pair %#x: want 24 bits", p.PSN, p.DestQPN)
	}
	dest := fmt.Sprintf("LID %d", p.DLID)
	if p.Global {
		if p.DGID.IsZero() {
			err = fmt.Errorf("ibv: destination GID is zero")
		}
		if p.FlowLabel > 1<<20-1 {
			err = fmt.Errorf("ibv: flow label %#x: want 20 bits", p.FlowLabel)
		}
		a.isGlobal, a.dgid, a.flowLabel = 1, p.DGID, p.FlowLabel
		a.sgidIndex = byteOf(p.SGIDIndex, "GID index", 255, &err)
		a.hopLimit = byteOf(p.HopLimit, "hop limit", 255, &err)
		a.trafficClass = byteOf(p.TrafficClass, "traffic class", 255, &err)
		dest = fmt.Sprintf("GID %s by own GID index %d", p.DGID, p.SGIDIndex)
	}
	if err != nil {
		return err
	}
	return q.modify(&a, fmt.Sprintf("queue pair %d at %s, path MTU %d", p.DestQPN, dest, p.PathMTU.Bytes()))
}

// ToRTS moves the queue pair from RTR to RTS.
func (q *QP) ToRTS(p RTSParams) error {
	var err error
	a := rawQPAttr{
		state: uint8(QPRTS), sqPSN: p.PSN, timeout: byteOf(p.Timeout, "timeout", 31, &err), retry: byteOf(p.RetryCount, "retry count", 7, &err),
		rnrRetry: byteOf(p.RNRRetry, "RNR retry", 7, &err), maxRd: byteOf(p.MaxRdAtomic, "max_rd_atomic", 255, &err),
	}
	if p.PSN > maxPSN {
		err = fmt.Errorf("ibv: PSN %#x: want 24 bits", p.PSN)
	}
	if err != nil {
		return err
	}
	return q.modify(&a, fmt.Sprintf("READ depth %d", p.MaxRdAtomic))
}

// ToError ends the connection: everything outstanding completes (flushed), and the
// device answers no READ of the peer any more.
func (q *QP) ToError() error {
	return q.modify(&rawQPAttr{state: uint8(QPError)}, "")
}

func (q *QP) modify(a *rawQPAttr, detail string) error {
	errno := cModifyQP(q.handle(), a)
	if errno == 0 {
		return nil
	}
	what := fmt.Sprintf("%s queue pair %d to %s", q.pd.ctx.name, q.num, QPState(a.state))
	if detail != "" {
		what += " (" + detail + ")"
	}
	return refused(errno, "ibv_modify_qp", "%s", what)
}

// Query asks the device for the queue pair's state.
func (q *QP) Query() (QPAttr, error) {
	var a rawQPAttr
	if errno := cQueryQP(q.handle(), &a); errno != 0 {
		return QPAttr{}, refused(errno, "ibv_query_qp", "%s number %d", q.pd.ctx.name, q.num)
	}
	return QPAttr{
		State: QPState(a.state), PathMTU: MTU(a.pathMTU), MaxRdAtomic: int(a.maxRd), MaxDestRdAtomic: int(a.maxDestRd),
		DestQPN: a.destQPN, Access: Access(a.access),
	}, nil
}

// ReadWR is one READ. The layout is the shim's.
type ReadWR struct {
	ID         uint64 // comes back in the completion
	LocalAddr  uint64 // sink, within the region of LKey
	RemoteAddr uint64
	Length     uint32 // bytes, at least 1
	LKey       uint32
	RKey       uint32
	// Flags: WRSignaled on at least the last of a chain. Slots of the send queue are
	// free again when a later signalled request has completed.
	Flags uint32
}

const (
	// WRSignaled asks for a completion also when the request succeeds.
	WRSignaled = 1 << 0
	// WRFence waits for earlier READs before this request starts.
	WRFence = 1 << 1
)

// Completion of a request. The layout is the shim's. After a Status other than WCSuccess
// only ID, Status, VendorErr and QPN mean something.
type Completion struct {
	ID        uint64
	Status    WCStatus
	VendorErr uint32
	ByteLen   uint32
	Opcode    uint32
	QPN       uint32
	Imm       uint32 // of a message that was received (see PostMessage), otherwise 0
}

// Post posts a chain of READs in one call. posted tells how many went onto the queue:
// fewer than len(wrs) only with an error (ENOMEM: the send queue is full). What was
// posted will complete, but a chain cut before its signalled end gives no completion
// while all goes well: close the connection, or post a signalled one behind it.
// wrs is borrowed until Post returns.
func (q *QP) Post(wrs []ReadWR) (posted int, err error) {
	posted, _, err = q.PostAndPoll(wrs, nil, 0)
	return posted, err
}

// PostAndPoll is Post followed by Poll of the send queue's completions, in one crossing
// into C. An error is that of the post, on which it does not poll, or that of the poll.
func (q *QP) PostAndPoll(wrs []ReadWR, out []Completion, spin time.Duration) (posted, n int, err error) {
	posted, n, postErrno := cPostAndPoll(q.handle(), q.scq.handle(), wrs, out, spin)
	if postErrno != 0 {
		return posted, 0, refused(postErrno, "ibv_post_send", "%s queue pair %d: %d READs, of which %d were posted", q.pd.ctx.name, q.num, len(wrs), posted)
	}
	if n < 0 {
		return posted, 0, refused(errnoT(-n), "ibv_poll_cq", "%s", q.pd.ctx.name)
	}
	return posted, n, nil
}

// WCStatus of a completion.
type WCStatus uint32

const (
	WCSuccess WCStatus = iota
	WCLocLenErr
	WCLocQPOpErr
	WCLocEECOpErr
	WCLocProtErr
	WCWRFlushErr
	WCMWBindErr
	WCBadRespErr
	WCLocAccessErr
	WCRemInvReqErr
	WCRemAccessErr
	WCRemOpErr
	WCRetryExcErr
	WCRNRRetryExcErr
	WCLocRDDViolErr
	WCRemInvRDReqErr
	WCRemAbortErr
	WCInvEECNErr
	WCInvEECStateErr
	WCFatalErr
	WCRespTimeoutErr
	WCGeneralErr
)

var wcNames = [...]string{
	"success", "local length error", "local queue pair operation error", "local EE context error", "local protection error",
	"flushed", "memory window bind error", "bad response", "local access error", "remote invalid request",
	"remote access refused", "remote operation error", "retries exceeded", "receiver not ready, retries exceeded",
	"local RDD violation", "remote invalid RD request", "remote aborted", "invalid EE context number",
	"invalid EE context state", "fatal error", "response timeout", "general error",
}

func (s WCStatus) String() string {
	if int(s) < len(wcNames) {
		return wcNames[s]
	}
	return fmt.Sprintf("completion status %d", uint32(s))
}
