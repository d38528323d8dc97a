package tcp

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

const (
	// inputSize of a connection at the target: any frame fits.
	inputSize = 32 << 10
	// outputSize is how much is answered before it is sent. One WRITE takes what a
	// burst of 64 callers reading 1 KiB each asks for.
	outputSize = 128 << 10
	// minSegment: where less room is left than that, a READ which does not fit waits
	// for the next output buffer rather than being cut.
	minSegment = 16 << 10
)

// session executes the requests of one connection on one goroutine. It holds one
// input and one output buffer; a client that does not read stops it, and costs
// nobody else anything.
type session struct {
	ep  *endpoint
	nc  net.Conn
	mem layout.Memory

	in   []byte // in[r:w] is received and not yet executed
	r, w int
	out  []byte // answered and not yet sent; at most outputSize and one answer to a query

	// The frame in progress, a part of in; size is 0 where there is none.
	req  request
	size int
	next int    // READ within it
	done uint64 // bytes of that READ answered so far

	reads, queries uint64 // not yet in the target's statistics
}

func newSession(ep *endpoint, nc net.Conn) *session {
	s := &session{ep: ep, nc: nc, in: make([]byte, inputSize)}
	s.mem = func(chunk uint32, offset, length uint64) []byte {
		// The look-up loads 8-byte words atomically: a place that is not aligned is no
		// place, whatever the query says.
		if offset%8 != 0 {
			return nil
		}
		return ep.d.spanRLocked(rdma.RegionID(chunk), offset, length)
	}
	return s
}

// run serves until the connection ends; the error says why. ErrRevoked and
// errProtocol are still to be told to the client, after s.out.
func (s *session) run() error {
	for {
		n, err := s.nc.Read(s.in[s.w:])
		s.w += n
		for more := n > 0; more; {
			var execErr error
			more, execErr = s.execute()
			s.account()
			if execErr != nil {
				return execErr
			}
			if err := s.flush(); err != nil {
				return err
			}
		}
		if err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				// Nobody but Endpoint.Close sets a deadline.
				return fmt.Errorf("%w: tcp", rdma.ErrRevoked)
			}
			return err
		}
		s.compact()
	}
}

// compact makes room at the end of the input for the rest of a frame.
func (s *session) compact() {
	if s.r == s.w {
		s.r, s.w = 0, 0
	} else if len(s.in)-s.r < maxRequestBytes {
		s.w = copy(s.in, s.in[s.r:s.w])
		s.r = 0
	}
}

// account brings the statistics up to date before the answers are sent.
func (s *session) account() {
	t := s.ep.d.t
	if s.reads > 0 {
		t.reads.Add(s.reads)
	}
	if s.queries > 0 {
		t.queries.Add(s.queries)
	}
	s.reads, s.queries = 0, 0
}

func (s *session) flush() error {
	if len(s.out) == 0 {
		return nil
	}
	n, err := s.nc.Write(s.out)
	s.ep.d.t.bytes.Add(uint64(n))
	if cap(s.out) > 4*outputSize {
		s.out = nil // a rare large answer must not keep its memory
	}
	s.out = s.out[:0]
	return err
}

// execute answers requests until the input is used up (more is false) or the
// output is full (more is true).
func (s *session) execute() (more bool, err error) {
	ep := s.ep
	ep.exec.Lock()
	defer ep.exec.Unlock()
	if ep.exec.revoked {
		return false, fmt.Errorf("%w: tcp", rdma.ErrRevoked)
	}
	ep.d.memory.RLock()
	defer ep.d.memory.RUnlock()
	for {
		if s.size == 0 {
			s.req, s.size, err = parseRequest(s.in[s.r:s.w])
			if err != nil || s.size == 0 {
				return false, err
			}
			s.next, s.done = 0, 0
		}
		if len(s.out) >= outputSize {
			return true, nil
		}
		finished := false
		if s.req.kind == kindQuery {
			s.answerQuery()
			finished = true
		} else {
			finished = s.answerReads()
		}
		if !finished {
			return true, nil
		}
		s.r += s.size
		s.size = 0
	}
}

// answerReads goes on with a chain; false: the output is full.
func (s *session) answerReads() bool {
	for s.next < s.req.count {
		id, offset, length := s.req.readAt(s.next)
		src := s.ep.d.spanRLocked(id, offset, length) // nil where there is none
		switch {
		case length > uint64(s.ep.d.t.p.MaxReadBytes):
			s.fail(codeExhausted)
			return true
		case src == nil || length == 0:
			// Also for a region that was deregistered in the middle of a long READ.
			s.fail(codeAccess)
			return true
		}
		for {
			left, room := length-s.done, uint64(max(0, outputSize-len(s.out)))
			if left > room && room < minSegment {
				return false
			}
			n := min(left, room)
			s.segment(src[s.done:s.done+n], n == left, guarded(id))
			if n == left {
				break
			}
			s.done += n
		}
		s.next++
		s.done = 0
		s.reads++
	}
	return true
}

// segment appends a data frame. The bytes are copied, not lent to the kernel: the
// memory may be freed while a slow client's socket is full, and the kernel's copy
// promises nothing about words.
func (s *session) segment(src []byte, last, guard bool) {
	at := len(s.out)
	s.out = slices.Grow(s.out, responseHeaderSize+len(src))[:at+responseHeaderSize+len(src)]
	h := response{kind: kindData, index: uint16(s.next), seq: s.req.seq}
	if last {
		h.code = codeLast
	}
	rdma.CopyExposed(s.out[at+responseHeaderSize:], src)
	h.seal(s.out[at:], guard) // over the copy: the memory may have changed since
}

// answerQuery appends the answer, or that it does not fit.
func (s *session) answerQuery() {
	query, limit := s.req.query()
	at := len(s.out)
	s.out = append(s.out, make([]byte, responseHeaderSize)...)
	s.out = layout.AnswerQuery(s.mem, query, s.out)
	length := uint64(len(s.out) - at - responseHeaderSize)
	s.queries++
	if length > limit {
		s.out = s.out[:at]
		s.fail(codeExhausted)
		return
	}
	response{kind: kindAnswer, code: codeLast, seq: s.req.seq}.seal(s.out[at:], true)
}

// fail ends the request in progress with an error.
func (s *session) fail(code uint8) {
	at := len(s.out)
	s.out = append(s.out, make([]byte, responseHeaderSize)...)
	response{kind: kindError, code: code, index: uint16(s.next), seq: s.req.seq}.seal(s.out[at:], false)
}
