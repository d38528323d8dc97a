package verbs

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// minBounceBytes lets a piece of a long READ be worth its completion.
const minBounceBytes = 64 << 10

// bounceSlab is how many rings of bounce memory are registered at a time.
const bounceSlab = 4

// lkey is a key of one device; the zero value is none.
type lkey struct {
	key   uint32
	valid bool
}

// sink implements rdma.Sink: memory registered on every device of the initiator.
type sink struct {
	in         *initiator
	mem        *rdma.Memory
	bytes      []byte
	start, end uintptr

	// keys by nic.instance; replaced, never changed, so that a post finds its key without a lock.
	keys atomic.Pointer[[]lkey]
	mu   struct {
		sync.Mutex
		freed bool
		mrs   map[*nic]*ibv.MR
	}
}

func (s *sink) lkey(instance uint32) (uint32, bool) {
	keys := *s.keys.Load()
	if int(instance) >= len(keys) {
		return 0, false
	}
	return keys[instance].key, keys[instance].valid
}

// newSink maps memory and registers it on all devices that take it; at least one must.
// The caller holds topo for reading.
func (in *initiator) newSink(name string, size int, huge bool) (*sink, error) {
	if size <= 0 {
		return nil, fmt.Errorf("verbs: sink of %d bytes: want at least 1", size)
	}
	mem, err := rdma.AllocMemory(name, uint64(size), rdma.MemoryOptions{HugePages: huge})
	if err != nil {
		return nil, fmt.Errorf("%w: verbs: %w", rdma.ErrExhausted, err)
	}
	if err := mem.HugeErr(); err != nil {
		in.noHuge.Do(func() { in.log.Info("verbs: registered buffers are without huge pages", "err", err) })
	}
	s := &sink{in: in, mem: mem, bytes: mem.Bytes()}
	s.start = uintptr(unsafe.Pointer(unsafe.SliceData(s.bytes)))
	s.end = s.start + uintptr(len(s.bytes))
	s.keys.Store(&[]lkey{})
	s.mu.mrs = make(map[*nic]*ibv.MR)
	populate(s.bytes)
	var errs []error
	for n, in := range in.topo.nics {
		if err := s.register(n, in.pd); err != nil {
			errs = append(errs, err)
		}
	}
	if len(s.mu.mrs) == 0 && len(errs) > 0 {
		return nil, errors.Join(append(errs, mem.Free())...)
	}
	for _, err := range errs {
		in.log.Warn("verbs: buffer not on every device: READs through it are copied", "err", err)
	}
	return s, nil
}

func (s *sink) register(n *nic, pd *ibv.PD) error {
	if n.link.kind() == kindCM {
		return nil // its rails have sinks of their own, see cmRail
	}
	size := uint64(len(s.bytes))
	if n.attr.MaxMRSize > 0 && size > n.attr.MaxMRSize {
		return fmt.Errorf("%w: verbs: buffer of %s, a region on %s has at most %s", rdma.ErrExhausted, sizeText(size), n.name, sizeText(n.attr.MaxMRSize))
	}
	// The peer has no access: READ answers are written by the own device.
	mr, err := pd.RegMR(s.bytes, ibv.AccessLocalWrite)
	if err != nil {
		return refusedRegistration(err, n.name, size, 1, n.attr)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.mrs[n] = mr
	s.setKeyLocked(n.instance, lkey{key: mr.LKey(), valid: true})
	return nil
}

func (s *sink) setKeyLocked(instance uint32, k lkey) {
	keys := slices.Clone(*s.keys.Load())
	for int(instance) >= len(keys) {
		keys = append(keys, lkey{})
	}
	keys[instance] = k
	s.keys.Store(&keys)
}

// retract takes the sink off a device on which nothing is outstanding any more.
func (s *sink) retract(n *nic) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	mr := s.mu.mrs[n]
	if mr == nil {
		return nil
	}
	delete(s.mu.mrs, n)
	s.setKeyLocked(n.instance, lkey{})
	return mr.Close()
}

// Bytes implements rdma.Sink.
func (s *sink) Bytes() []byte { return s.bytes }

// Free implements rdma.Sink.
func (s *sink) Free() error {
	s.in.topo.RLock()
	defer s.in.topo.RUnlock()
	s.in.forgetSink(s)
	return s.free()
}

func (s *sink) free() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.freed {
		return nil
	}
	s.mu.freed = true
	var errs []error
	for n, mr := range s.mu.mrs {
		errs = append(errs, mr.Close())
		delete(s.mu.mrs, n)
	}
	return errors.Join(append(errs, s.mem.Free())...)
}

// AllocSink implements rdma.Allocator. Once the initiator is closed it is ErrClosed.
func (in *initiator) AllocSink(size int) (rdma.Sink, error) {
	in.topo.RLock()
	defer in.topo.RUnlock()
	s, err := in.newSink("kvd-sink", size, size >= 1<<20)
	if err != nil {
		return nil, err
	}
	if err := in.rememberSink(s); err != nil {
		return nil, errors.Join(err, s.free())
	}
	return s, nil
}

func (in *initiator) rememberSink(s *sink) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.mu.closed {
		return fmt.Errorf("%w: verbs: initiator", rdma.ErrClosed)
	}
	sinks := append(slices.Clone(*in.sinks.Load()), s)
	sort.Slice(sinks, func(i, j int) bool { return sinks[i].start < sinks[j].start })
	in.sinks.Store(&sinks)
	return nil
}

func (in *initiator) forgetSink(s *sink) {
	in.mu.Lock()
	defer in.mu.Unlock()
	sinks := slices.DeleteFunc(slices.Clone(*in.sinks.Load()), func(o *sink) bool { return o == s })
	in.sinks.Store(&sinks)
}

// sinkOf finds the sink that b lies in, nil for ordinary memory. Sinks do not overlap
// and are sorted.
func (in *initiator) sinkOf(b []byte) *sink {
	sinks := *in.sinks.Load()
	if len(sinks) == 0 {
		return nil
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	lo, hi := 0, len(sinks)
	for lo < hi {
		mid := (lo + hi) / 2
		if sinks[mid].end <= at {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo < len(sinks) && sinks[lo].start <= at && at+uintptr(len(b)) <= sinks[lo].end {
		return sinks[lo]
	}
	return nil
}

// bounce is a queue pair's ring of registered memory: READs into ordinary memory go
// there and are copied once. Places are freed in the order in which they were taken,
// as completions come in order.
type bounce struct {
	slab *sink
	buf  []byte
	base uint64 // address of buf
	lkey uint32

	head, tail uint64 // bytes taken and freed since the start; head-tail <= len(buf)
}

// bounceAlign keeps what a READ promises about words of one cache line.
const bounceAlign = 64

// take finds n bytes in one piece: their place in buf, and the new head. False: there is
// no room now.
func (b *bounce) take(n uint64) (at uint64, ok bool) {
	size := uint64(len(b.buf))
	n = (n + bounceAlign - 1) &^ (bounceAlign - 1)
	start := b.head
	if off := start % size; off+n > size {
		start += size - off // the rest up to the end is too small
	}
	if start+n-b.tail > size {
		return 0, false
	}
	b.head = start + n
	return start % size, true
}

// bouncePool hands out rings of slabs, which stay for the life of the initiator.
type bouncePool struct {
	sync.Mutex
	slabs []*sink
	free  []bounce
}

// takeBounce returns a ring that is registered on n. The caller holds topo for reading.
func (in *initiator) takeBounce(n *nic) (bounce, error) {
	in.bounces.Lock()
	defer in.bounces.Unlock()
	ring := func(b bounce) (bounce, bool) {
		key, ok := b.slab.lkey(n.instance)
		b.lkey, b.head, b.tail = key, 0, 0
		return b, ok
	}
	for i, b := range in.bounces.free {
		if b, ok := ring(b); ok {
			in.bounces.free = slices.Delete(in.bounces.free, i, i+1)
			return b, nil
		}
	}
	size := (in.p.BounceBytes + 4095) &^ 4095
	count := bounceSlab
	s, err := in.newSink("kvd-bounce", size*count, false)
	if err != nil { // memlock may leave room for one
		count = 1
		if s, err = in.newSink("kvd-bounce", size, false); err != nil {
			return bounce{}, err
		}
	}
	in.bounces.slabs = append(in.bounces.slabs, s)
	for i := range count {
		buf := s.bytes[i*size : (i+1)*size : (i+1)*size]
		in.bounces.free = append(in.bounces.free, bounce{slab: s, buf: buf, base: uint64(s.start) + uint64(i*size)})
	}
	last := len(in.bounces.free) - 1
	b, ok := ring(in.bounces.free[last])
	if !ok {
		return bounce{}, fmt.Errorf("%w: verbs: no memory could be registered on %s", rdma.ErrExhausted, n.name)
	}
	in.bounces.free = in.bounces.free[:last]
	return b, nil
}

func (in *initiator) giveBounce(b bounce) {
	if b.slab == nil {
		return
	}
	in.bounces.Lock()
	defer in.bounces.Unlock()
	in.bounces.free = append(in.bounces.free, b)
}

func (in *initiator) allSinks() []*sink {
	in.bounces.Lock()
	slabs := slices.Clone(in.bounces.slabs)
	in.bounces.Unlock()
	return append(slabs, *in.sinks.Load()...)
}
