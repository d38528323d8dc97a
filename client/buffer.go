package client

import (
	"context"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// Buffer is memory outside the Go heap into which the READs of one Client go, so that a
// value needs no copy: what arrives is the object, checked where it lies, and the caller
// gets the part of it that is the value. It has room for the object's header, the longest
// key and the slack of the object's size class around the value, which begins at a page
// border.
//
// With verbs the NIC writes the value to its place. With shm the one copy is the READ
// itself, with tcp the one from the socket, and with gRPC one is made at the end. An
// ordinary slice given to Client.GetInto costs one copy more with shm and tcp, two with
// verbs.
//
// A Buffer serves one get at a time; a second one is refused with ErrInvalid. It may be
// used from several goroutines one after the other.
type Buffer struct {
	c     *Client
	mem   []byte
	size  int
	by    string // transport whose device it is registered with; empty: none
	unmap func() error
	state atomic.Uint32
}

// States of a Buffer.
const (
	bufferIdle    uint32 = iota
	bufferGetting        // a get uses it
	bufferLent           // a READ that its get gave up may still arrive in it
	bufferDropped        // lent and freed: unmapped when the READ is complete
	bufferFreed
)

// valueAt is where values lie in a Buffer: at a page border with room for what precedes a
// value in an object or in the answer to a look-up.
const valueAt = 8192

var _ [valueAt - layout.AnswerHeaderSize - layout.HeaderSize - layout.MaxKeySize]struct{}

// answerMost bounds the room for the answer to a look-up: at the pace of the slowest link
// it arrives within an attempt.
const answerMost = 1 << 20

// AllocBuffer makes a Buffer for values of up to n bytes. Where a configured transport
// reads by a device the memory is registered with that transport's devices (the first, if
// there are several such transports; READs by others are copied once). Free it when it is
// not needed any more; Close does not.
//
// Errors: ErrInvalid (n is less than 1, or more than any value has), ErrExhausted (the
// system or a device refuses that much memory; the text says what to set), ErrClosed.
func (c *Client) AllocBuffer(n int) (*Buffer, error) {
	if limit := layout.MaxObjectSize - layout.HeaderSize - 1; n < 1 || n > limit {
		return nil, fmt.Errorf("%w: buffer for values of %d bytes: want 1 to %d", ErrInvalid, n, limit)
	}
	if c.life.Err() != nil {
		return nil, ErrClosed
	}
	b := &Buffer{c: c, size: n}
	largest := layout.MaxObjectSize
	if k := layout.ClassFor(min(layout.ObjectSize(layout.MaxKeySize, n), layout.MaxObjectSize)); k != 0 {
		largest = layout.ClassSize(k)
	}
	need := valueAt + largest
	for _, t := range c.transports {
		if !c.wants(t) || t.plain && !c.mayReadPlain() {
			continue
		}
		initiator, err := t.start()
		if err != nil {
			continue // no READ will come by it
		}
		if a, ok := initiator.(rdma.Allocator); ok {
			sink, err := a.AllocSink(need)
			if err != nil {
				return nil, fmt.Errorf("%w: buffer of %d bytes for %s: %w", ErrExhausted, need, t.name, err)
			}
			b.mem, b.unmap, b.by = sink.Bytes()[:need:need], sink.Free, t.name
			return b, nil
		}
	}
	m, err := rdma.AllocMemory("kvd-buffer", uint64(need), rdma.MemoryOptions{})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrExhausted, err)
	}
	b.mem, b.unmap = m.Bytes()[:need:need], m.Free
	return b, nil
}

// Cap is the size in bytes of the largest value that fits.
func (b *Buffer) Cap() int { return b.size }

// Registered is the transport with whose devices the memory is registered, or "".
func (b *Buffer) Registered() string { return b.by }

// GetInto reads a key into the buffer, as Client.GetInto does into a slice. Value.Data is
// the part of the buffer that holds the value, until the buffer's next get or Free; only
// while a READ that an earlier get gave up may still arrive in the buffer is it memory of
// its own, which costs an allocation and a copy. With a remembered location it allocates
// nothing else.
//
// After an error the content of the buffer is undefined: a READ may have written to it. A
// value that does not fit is a *TooSmallError, which is an ErrTooSmall and has the size.
// ErrInvalid: another get is using the buffer, or it was freed.
func (b *Buffer) GetInto(ctx context.Context, key []byte, opts ...ReadOption) (Value, error) {
	usable, err := b.begin()
	if err != nil {
		return Value{}, err
	}
	return b.c.getInto(ctx, key, nil, b, usable, opts)
}

// Free gives the memory back. No Value.Data that lies in it may be used afterwards. It is
// refused, with ErrInvalid, while a get uses the buffer. A READ that was given up and may
// still arrive keeps the memory until it has. Idempotent.
func (b *Buffer) Free() error {
	for {
		switch s := b.state.Load(); s {
		case bufferIdle:
			if b.state.CompareAndSwap(s, bufferFreed) {
				return b.unmap()
			}
		case bufferGetting:
			return fmt.Errorf("free buffer: %w: a get is using it", ErrInvalid)
		case bufferLent:
			if b.state.CompareAndSwap(s, bufferDropped) {
				return nil
			}
		default:
			return nil
		}
	}
}

var (
	errBufferInUse = fmt.Errorf("%w: the buffer is in use by another get: a buffer is for one get at a time", ErrInvalid)
	errBufferFreed = fmt.Errorf("%w: the buffer was freed", ErrInvalid)
)

// begin takes the buffer for a get, which end or lend must follow. usable is false where
// the get has to do without its memory.
func (b *Buffer) begin() (usable bool, err error) {
	for {
		switch s := b.state.Load(); s {
		case bufferIdle:
			if b.state.CompareAndSwap(s, bufferGetting) {
				return true, nil
			}
		case bufferGetting:
			return false, errBufferInUse
		case bufferLent:
			return false, nil
		default:
			return false, errBufferFreed
		}
	}
}

func (b *Buffer) end() { b.state.Store(bufferIdle) }

// lend leaves the buffer to a READ that is still outstanding: see returned.
func (b *Buffer) lend() { b.state.Store(bufferLent) }

// returned ends the lending: the READ is complete.
func (b *Buffer) returned() {
	if b.state.CompareAndSwap(bufferLent, bufferIdle) {
		return
	}
	b.state.Store(bufferFreed)
	if err := b.unmap(); err != nil {
		b.c.cfg.Logger.Warn("a buffer could not be given back: " + err.Error())
	}
}

// object is where an object of n bytes goes, so that the value lies at valueAt; nil where
// it does not fit.
func (b *Buffer) object(keyLen, n int) []byte {
	from := valueAt - layout.HeaderSize - keyLen
	if n > len(b.mem)-from {
		return nil
	}
	return b.mem[from:][:n:n]
}

// answer is where the answer to a look-up goes.
func (b *Buffer) answer(keyLen int) []byte {
	from := valueAt - layout.AnswerHeaderSize - layout.HeaderSize - keyLen
	n := min(len(b.mem)-from, answerMost)
	return b.mem[from:][:n:n]
}

// holds tells whether p lies in the buffer. A nil Buffer holds nothing.
func (b *Buffer) holds(p []byte) bool {
	if b == nil || cap(p) == 0 {
		return false
	}
	first, at := uintptr(unsafe.Pointer(unsafe.SliceData(b.mem))), uintptr(unsafe.Pointer(unsafe.SliceData(p)))
	return at >= first && at < first+uintptr(len(b.mem))
}

// TooSmallError is an ErrTooSmall with the size that is needed.
type TooSmallError struct {
	Size int // bytes of the value
	Cap  int // of the buffer
}

// Error names both sizes.
func (e *TooSmallError) Error() string {
	return fmt.Sprintf("the value has %d bytes: the buffer holds %d", e.Size, e.Cap)
}

// Is makes a TooSmallError an ErrTooSmall.
func (e *TooSmallError) Is(target error) bool { return target == ErrTooSmall }

// deliver makes data, which was judged, the caller's.
func (r *reading) deliver(data []byte, version uint64, expiry int64) (Value, error) {
	if r.buf == nil {
		return r.copyOut(data, version, expiry), nil
	}
	v := Value{Version: version, Expires: expires(expiry)}
	switch {
	case len(data) > r.buf.size:
		return Value{}, &TooSmallError{Size: len(data), Cap: r.buf.size}
	case r.g.sink.holds(data):
		v.Data = data[:len(data):len(data)]
		r.c.count.bufferDirect.Add(1)
		return v, nil
	case r.g.sink != nil:
		v.Data = r.buf.mem[valueAt:][:len(data):len(data)]
	default:
		v.Data = make([]byte, len(data))
	}
	copy(v.Data, data)
	r.c.count.bufferCopied.Add(1)
	return v, nil
}

// GetManyInto is GetMany into buffers: bufs has one for each key, or nil for a value that
// is to be newly allocated. See Buffer.GetInto for what the values are, and the errors. A
// buffer that stands at several places is refused at all but the first.
func (c *Client) GetManyInto(ctx context.Context, keys [][]byte, bufs []*Buffer, opts ...ReadOption) []Result {
	if len(bufs) != len(keys) {
		err := fmt.Errorf("%w: %d buffers for %d keys: want one for each", ErrInvalid, len(bufs), len(keys))
		results := make([]Result, len(keys))
		for i := range results {
			results[i].Err = err
		}
		return results
	}
	return c.getMany(ctx, keys, bufs, opts)
}

// sameBuffer finds the places whose buffer stands at an earlier place, too.
func sameBuffer(bufs []*Buffer) map[int]bool {
	seen, again := make(map[*Buffer]bool, len(bufs)), map[int]bool(nil)
	for i, b := range bufs {
		if b != nil && seen[b] {
			if again == nil {
				again = map[int]bool{}
			}
			again[i] = true
		}
		seen[b] = true
	}
	return again
}
