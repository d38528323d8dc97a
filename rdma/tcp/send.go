package tcp

import (
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

const (
	// keepBuffer: a larger send buffer is dropped after use.
	keepBuffer = 256 << 10
	// maxFlushRounds: a caller writes what others append meanwhile this many times,
	// then it leaves that to the background writer and sees to its own answer.
	maxFlushRounds = 4
	// brokenGrace is how long after a failed write the other direction may still
	// bring answers and the target's goodbye.
	brokenGrace = time.Second
)

// entry is a request frame that was queued and not yet answered.
type entry struct {
	w     *work
	seq   uint32
	from  int // its first READ in w.b.Reads
	count int // READs
	query bool
	last  bool // the last frame of the batch
}

// sender coalesces the requests of all callers. One of them at a time is the
// flusher and writes; the others append to the buffer and go on.
type sender struct {
	c   *conn
	raw syscall.RawConn
	tls *secured // nil: plain text

	mu struct {
		sync.Mutex
		stopped  error
		seq      uint32
		buf      []byte  // encoded, not yet written
		entries  []entry // queued, not yet taken by the receiver; in the order of buf
		flushing bool    // there is a flusher
	}

	// expected is how many callers were completed by the last burst of answers and
	// have not posted again.
	expected atomic.Int32

	// The flusher's.
	spare []byte
	rest  []byte // what the background writer has to write first, sealed
	kick  chan struct{}

	// try's, bound once so that it does not allocate.
	tryFunc func(fd uintptr) bool
	tryBuf  []byte
	tryN    int
	tryErr  error
}

func (s *sender) init(c *conn, raw syscall.RawConn) {
	s.c, s.raw = c, raw
	s.tls, _ = c.nc.(*secured)
	s.kick = make(chan struct{}, 1)
	s.tryFunc = s.tryWrite
}

// queue encodes the batch. flusher tells that nobody is writing: the caller must
// call flush. A query of nil means READs.
func (s *sender) queue(w *work, query []byte) (flusher bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.stopped != nil {
		return false, s.mu.stopped
	}
	reads := w.b.Reads
	if query != nil {
		limit := uint32(min(uint64(len(reads[0].Dst)), 1<<32-1))
		s.mu.buf = appendQuery(s.mu.buf, s.mu.seq, limit, query)
		s.mu.entries = append(s.mu.entries, entry{w: w, seq: s.mu.seq, count: 1, query: true, last: true})
		s.mu.seq++
	} else {
		for from := 0; from < len(reads); from += maxFrameReads {
			n := min(len(reads)-from, maxFrameReads)
			s.mu.buf = appendReads(s.mu.buf, s.mu.seq, reads[from:from+n])
			s.mu.entries = append(s.mu.entries, entry{w: w, seq: s.mu.seq, from: from, count: n, last: from+n == len(reads)})
			s.mu.seq++
		}
	}
	flusher = !s.mu.flushing
	s.mu.flushing = true
	return flusher, nil
}

// crowd takes the caller off those that are expected, and tells whether there are
// others. It is a guess, and nothing but the number of writes hangs on it.
func (s *sender) crowd() bool {
	return s.expected.Load() > 0 && s.expected.Add(-1) >= 0
}

// entriesInto moves what was queued since the last call into the receiver's own
// (empty) queue.
func (s *sender) entriesInto(empty []entry) []entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	filled := s.mu.entries
	s.mu.entries = empty[:0]
	return filled
}

// stop makes every later post fail with err, and returns what was queued.
func (s *sender) stop(err error) []entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.stopped = err
	rest := s.mu.entries
	s.mu.entries, s.mu.buf = nil, nil
	return rest
}

// takeLocked swaps the buffers; nothing to write ends the flushing.
func (s *sender) takeLocked() []byte {
	if len(s.mu.buf) == 0 {
		s.mu.flushing = false
		return nil
	}
	full := s.mu.buf
	if cap(s.spare) > keepBuffer {
		s.spare = nil
	}
	s.mu.buf, s.spare = s.spare[:0], full
	return full
}

func (s *sender) take() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.takeLocked()
}

// next is what the flusher has to send now, as it goes onto the socket; nil, and no
// longer the flusher, where there is nothing.
func (s *sender) next() ([]byte, error) {
	buf := s.take()
	if buf == nil || s.tls == nil {
		return buf, nil
	}
	return s.tls.seal(buf)
}

// flush writes without waiting for the peer. What the socket does not take is left
// to the background writer: a Post must not hang where the target is stopped, or
// waits for somebody to read its answers.
func (s *sender) flush() {
	for range maxFlushRounds {
		buf, err := s.next()
		if buf == nil && err == nil {
			return
		}
		n := 0
		if err == nil {
			n, err = s.try(buf)
		}
		if err != nil {
			s.broken(err)
			return
		}
		if n < len(buf) {
			s.rest = buf[n:]
			s.kick <- struct{}{}
			return
		}
	}
	// Still the flusher, on paper: that goes to the background writer.
	s.rest = nil
	s.kick <- struct{}{}
}

// try writes as much as the socket takes at once.
func (s *sender) try(buf []byte) (int, error) {
	s.tryBuf, s.tryN, s.tryErr = buf, 0, nil
	if err := s.raw.Write(s.tryFunc); err != nil {
		return 0, err
	}
	s.tryBuf = nil
	return s.tryN, s.tryErr
}

func (s *sender) tryWrite(fd uintptr) bool {
	for s.tryN < len(s.tryBuf) {
		n, err := syscall.Write(int(fd), s.tryBuf[s.tryN:])
		switch err {
		case nil:
			s.tryN += n
		case syscall.EINTR:
		case syscall.EAGAIN:
			return true
		default:
			s.tryErr = err
			return true
		}
	}
	return true
}

// broken: the socket takes no more. What was answered can still be read, and the
// reader will meet the end of it.
func (s *sender) broken(err error) {
	c := s.c
	c.mustEnd.Store(true)
	c.kick()
	time.AfterFunc(brokenGrace, func() { c.abandon(lost(c, err)) })
}

// writeInBackground writes what callers could not without waiting.
func (c *conn) writeInBackground() {
	s := &c.send
	for {
		select {
		case <-c.done:
			return
		case <-s.kick:
		}
		buf := s.rest
		s.rest = nil
		var err error
		if len(buf) == 0 {
			buf, err = s.next()
		}
		for buf != nil && err == nil {
			if _, err = c.sock.Write(buf); err == nil {
				buf, err = s.next()
			}
		}
		if err != nil {
			s.broken(err) // with flushing left true: nobody writes any more
		}
	}
}

var _ rdma.Querier = (*conn)(nil)
