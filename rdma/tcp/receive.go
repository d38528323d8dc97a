package tcp

import (
	"fmt"

	"github.com/kvd-io/kvd/rdma"
)

const (
	// receiveSize: the answers to 64 callers reading 1 KiB each fit.
	receiveSize = 128 << 10
	// directSize: from here on the rest of an answer is read from the socket straight
	// to where it belongs.
	directSize = 8 << 10
)

// receiver parses the stream of answers. It belongs to the holder of the reader
// role, and keeps its place in the stream when the role moves on.
//
// Answers come in the order of the requests, so the queue's head is always what
// the next frame must answer. Anything else is a violation.
type receiver struct {
	c    *conn
	buf  []byte // buf[r:w] is received and not parsed
	r, w int

	queue []entry // queue[head:] is unanswered and known here; more may be in the sender
	head  int

	index int    // READ within the head's frame
	off   int    // bytes of that READ that have arrived
	seg   []byte // the segment in progress, in the Dst
	dst   []byte // what is still missing of it
	guard bool   // it has a check sum:
	sum   uint32
	final bool // the segment completes its READ

	finished []*work // answered, not yet delivered
}

func (r *receiver) init(c *conn) {
	r.c = c
	r.buf = make([]byte, receiveSize)
}

// fill reads from the socket once, by read, and parses what came. It blocks as read
// does. Completed work is in r.finished.
func (r *receiver) fill(read func([]byte) (int, error)) error {
	if len(r.dst) >= directSize {
		n, err := read(r.dst)
		if perr := r.advance(n); perr != nil {
			return perr
		}
		return err
	}
	if r.r > 0 {
		r.w = copy(r.buf, r.buf[r.r:r.w])
		r.r = 0
	}
	n, err := read(r.buf[r.w:])
	r.w += n
	if perr := r.parse(); perr != nil {
		return perr
	}
	return err
}

// parse consumes whole headers and whatever there is of their payload.
func (r *receiver) parse() error {
	for {
		if len(r.dst) > 0 {
			if r.r == r.w {
				return nil
			}
			n := copy(r.dst, r.buf[r.r:r.w])
			r.r += n
			if err := r.advance(n); err != nil {
				return err
			}
			continue
		}
		if r.w-r.r < responseHeaderSize {
			return nil
		}
		h, err := parseResponse(r.buf[r.r:r.w])
		if err != nil {
			return err
		}
		r.r += responseHeaderSize
		if err := r.begin(h); err != nil {
			return err
		}
	}
}

// advance counts n bytes of the segment as arrived. With the last of them it is checked,
// so that no guarded READ completes with bytes that the target did not send.
func (r *receiver) advance(n int) error {
	r.dst = r.dst[n:]
	r.off += n
	if len(r.dst) > 0 {
		return nil
	}
	if r.guard {
		if got := check(r.seg); got != r.sum {
			return fmt.Errorf("%w: check sum of %d bytes of an answer %#x, want %#x", errProtocol, len(r.seg), got, r.sum)
		}
	}
	r.seg = nil
	if r.final {
		r.readDone()
	}
	return nil
}

// front is the frame that the next answer belongs to, nil where nothing was asked.
func (r *receiver) front() *entry {
	if r.head == len(r.queue) {
		clear(r.queue) // so that it keeps no batch alive
		r.queue = r.c.send.entriesInto(r.queue)
		r.head = 0
		if len(r.queue) == 0 {
			return nil
		}
	}
	return &r.queue[r.head]
}

// begin takes up a frame, after checking that it can be the answer to what was
// asked.
func (r *receiver) begin(h response) error {
	if h.kind == kindBye {
		if h.code == codeRevoked {
			return fmt.Errorf("%w: tcp: the target ended the connection", rdma.ErrRevoked)
		}
		return fmt.Errorf("%w: the target says so of what this side sent (code %d)", errProtocol, h.code)
	}
	e := r.front()
	switch {
	case e == nil:
		return fmt.Errorf("%w: an answer (kind %#x) to nothing that was asked", errProtocol, h.kind)
	case h.seq != e.seq || int(h.index) != r.index:
		return fmt.Errorf("%w: answer to READ %d of request %d, want READ %d of %d", errProtocol, h.index, h.seq, r.index, e.seq)
	}
	read := &e.w.b.Reads[e.from+r.index]
	missing := uint64(len(read.Dst) - r.off)
	length := uint64(h.length)
	switch {
	case h.kind == kindError:
		return r.refused(e, h.code)
	case h.kind == kindData && !e.query:
		r.final = h.code == codeLast
		if h.code&^codeLast != 0 || length > missing || r.final != (length == missing) || length == 0 {
			return fmt.Errorf("%w: %d bytes (flags %#x) where %d are missing", errProtocol, length, h.code, missing)
		}
	case h.kind == kindAnswer && e.query:
		r.final = true
		if h.code != codeLast || length > missing {
			return fmt.Errorf("%w: answer of %d bytes (flags %#x) for room of %d", errProtocol, length, h.code, missing)
		}
	default:
		return fmt.Errorf("%w: response of kind %#x to a request of another", errProtocol, h.kind)
	}
	r.seg = read.Dst[r.off:][:length]
	r.dst = r.seg
	r.guard, r.sum = e.query || guarded(read.Region), h.sum
	if !r.guard && h.sum != 0 {
		return fmt.Errorf("%w: check sum %#x of bytes that have none", errProtocol, h.sum)
	}
	if length == 0 {
		return r.advance(0)
	}
	return nil
}

// readDone goes on to the next READ, frame or batch.
func (r *receiver) readDone() {
	e := &r.queue[r.head]
	e.w.b.Reads[e.from+r.index].N = r.off
	r.index++
	r.off, r.final = 0, false
	if r.index == e.count {
		r.frameDone(e)
	}
}

// refused ends a frame with the target's error.
func (r *receiver) refused(e *entry, code uint8) error {
	var err error
	read := &e.w.b.Reads[e.from+r.index]
	switch {
	case code == codeAccess && !e.query:
		err = fmt.Errorf("%w: tcp: the target refuses READ %d (%d bytes at %d of region %d): unknown region, or outside of it",
			rdma.ErrAccess, e.from+r.index, len(read.Dst), read.Offset, read.Region)
	case code == codeExhausted && e.query:
		err = fmt.Errorf("%w: tcp: the answer does not fit into %d bytes", rdma.ErrExhausted, len(read.Dst))
	case code == codeExhausted:
		err = fmt.Errorf("%w: tcp: the target refuses a READ of %d bytes as too long", rdma.ErrExhausted, len(read.Dst))
	default:
		return fmt.Errorf("%w: error code %d", errProtocol, code)
	}
	if e.w.err == nil {
		e.w.err = err
	}
	r.frameDone(e)
	return nil
}

func (r *receiver) frameDone(e *entry) {
	if e.last {
		r.finished = append(r.finished, e.w)
	}
	r.head++
	r.index, r.off, r.final = 0, 0, false
}

// failAll completes what is known here and what the sender still had.
func (r *receiver) failAll(queued []entry, err error) {
	for _, entries := range [][]entry{r.queue[r.head:], queued} {
		for i := range entries {
			e := &entries[i]
			if e.w.err == nil {
				e.w.err = err
			}
			if e.last {
				r.finished = append(r.finished, e.w)
			}
		}
	}
	r.queue, r.head, r.seg, r.dst = nil, 0, nil, nil
	r.c.deliver(nil)
	r.buf = nil
}
