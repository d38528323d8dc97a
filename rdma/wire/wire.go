// Package wire encodes and decodes the small messages by which providers of rdma come
// together: fixed little-endian numbers and texts with their length before them.
package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/kvd-io/kvd/rdma"
)

// Writer appends in little-endian order.
type Writer []byte

// U8 appends v.
func (w *Writer) U8(v uint8) { *w = append(*w, v) }

// U16 appends v.
func (w *Writer) U16(v uint16) { *w = binary.LittleEndian.AppendUint16(*w, v) }

// U32 appends v.
func (w *Writer) U32(v uint32) { *w = binary.LittleEndian.AppendUint32(*w, v) }

// U64 appends v.
func (w *Writer) U64(v uint64) { *w = binary.LittleEndian.AppendUint64(*w, v) }

// Text appends s, of at most 65,535 bytes, with its length before it.
func (w *Writer) Text(s string) {
	w.U16(uint16(len(s)))
	*w = append(*w, s...)
}

// Reader takes values off the front of a message. The first thing wrong sticks;
// values taken after it are zero.
type Reader struct {
	what string
	rest []byte
	err  error
}

// NewReader reads b, which stays the caller's. Errors name the message by what.
func NewReader(b []byte, what string) *Reader { return &Reader{what: what, rest: b} }

// Magic takes the mark that such a message begins with; other says whose message it
// is not where it begins otherwise.
func (r *Reader) Magic(magic, other string) {
	all := len(r.rest)
	if len(r.rest) < len(magic) || !bytes.Equal(r.Take(len(magic)), []byte(magic)) {
		r.Fail("%d bytes that do not begin like one: %s", all, other)
	}
}

// Version takes the version of the protocol; it must be the one that is known.
func (r *Reader) Version(known uint16) {
	if v := r.U16(); r.err == nil && v != known {
		r.Fail("protocol version %d, want %d: bring both sides to the same release", v, known)
	}
}

// Fail notes what is wrong with the message, unless something was before. Err is an
// rdma.ErrHandshake.
func (r *Reader) Fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: %s: %s", rdma.ErrHandshake, r.what, fmt.Sprintf(format, args...))
	}
	r.rest = nil
}

// Err is the first thing wrong so far.
func (r *Reader) Err() error { return r.err }

// Take returns n bytes, borrowed from the message, or nil after a failure.
func (r *Reader) Take(n int) []byte {
	if r.err != nil {
		return nil
	}
	if len(r.rest) < n {
		r.Fail("cut short: %d bytes left, want %d", len(r.rest), n)
		return nil
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

// U8 takes a number.
func (r *Reader) U8() uint8 {
	if b := r.Take(1); b != nil {
		return b[0]
	}
	return 0
}

// U16 takes a number.
func (r *Reader) U16() uint16 {
	if b := r.Take(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

// U32 takes a number.
func (r *Reader) U32() uint32 {
	if b := r.Take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

// U64 takes a number.
func (r *Reader) U64() uint64 {
	if b := r.Take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// Text takes a text of at most limit bytes.
func (r *Reader) Text(limit int) string {
	n := int(r.U16())
	if n > limit {
		r.Fail("text of %d bytes, want at most %d", n, limit)
	}
	return string(r.Take(n))
}

// Count takes how many things, named by of, follow.
func (r *Reader) Count(limit int, of string) int {
	n := int(r.U8())
	if n > limit {
		r.Fail("%d %s, want at most %d", n, of, limit)
		return 0
	}
	return n
}

// End returns Err; it is an error if anything is left.
func (r *Reader) End() error {
	if r.err == nil && len(r.rest) > 0 {
		r.Fail("%d bytes too many", len(r.rest))
	}
	return r.err
}
