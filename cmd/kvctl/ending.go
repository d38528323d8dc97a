package main

import (
	"context"
	"io"
)

// endingReader ends a Read when its context ends, although the reader below may be stuck.
// Not for use by several at once; ctx may be changed between Reads. Whoever lets a Read
// end early leaves a goroutine behind that waits for the reader below.
type endingReader struct {
	ctx context.Context
	r   io.Reader

	buf  []byte
	rest []byte    // of buf, read and not taken yet
	err  error     // behind rest
	came chan came // not nil: a Read of r is under way
}

type came struct {
	n   int
	err error
}

func (e *endingReader) Read(b []byte) (int, error) {
	if len(e.rest) == 0 && e.err == nil {
		if err := e.ctx.Err(); err != nil {
			return 0, err
		}
		if e.came == nil {
			e.came = make(chan came, 1)
			if e.buf == nil {
				e.buf = make([]byte, readSize)
			}
			c := e.came
			go func() {
				n, err := e.r.Read(e.buf)
				c <- came{n, err}
			}()
		}
		select {
		case c := <-e.came:
			e.rest, e.err, e.came = e.buf[:c.n], c.err, nil
		case <-e.ctx.Done():
			return 0, e.ctx.Err()
		}
	}
	n := copy(b, e.rest)
	e.rest = e.rest[n:]
	if n == 0 {
		return 0, e.err
	}
	return n, nil
}
