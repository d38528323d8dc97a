package rdma

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
)

// Memory is a span of bytes outside the Go heap that can be exposed to peers.
// It is page aligned, zeroed, between two guard pages, and stays at one address until
// Free.
//
// Its bytes are written by this process only. Exposed words that a reader may
// look at while they change are stored with sync/atomic.
type Memory struct {
	name    string
	size    uint64
	bytes   []byte
	fd      int // memfd, or -1 where there is none
	huge    bool
	hugeErr error
	unmap   func() error
	mu      struct {
		sync.Mutex
		freed bool
	}
}

// MemoryOptions of AllocMemory.
type MemoryOptions struct {
	// HugePages asks for huge pages; where there are none it goes on without (see
	// Memory.Huge and Memory.HugeErr).
	HugePages bool
	// Shareable makes the memory a memfd, sealed against growing, shrinking and
	// further writable mappings, so that it can be handed to other processes.
	Shareable bool
}

// Bytes is the memory itself, borrowed until Free. Its owner alone may write it.
func (m *Memory) Bytes() []byte { return m.bytes }

// Size in bytes: what was asked for, rounded up to whole pages. Valid after Free
// too.
func (m *Memory) Size() uint64 { return m.size }

// Name as given to AllocMemory: it shows in /proc/PID/maps.
func (m *Memory) Name() string { return m.name }

// FD is the file descriptor of shareable memory, or -1. It stays Memory's: a user
// duplicates it or passes it on before Free.
func (m *Memory) FD() int { return m.fd }

// Huge tells whether huge pages were asked for and given.
func (m *Memory) Huge() bool { return m.huge }

// HugeErr is why huge pages were asked for and not given, nil otherwise. Worth one
// line in the log: READs and registration are slower without.
func (m *Memory) HugeErr() error { return m.hugeErr }

// Free unmaps the memory. No provider may have it registered any more, and nobody
// may be using Bytes: touching them afterwards is a crash, on purpose. Idempotent.
func (m *Memory) Free() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.freed {
		return nil
	}
	m.mu.freed = true
	m.bytes = nil
	return m.unmap()
}

// ErrNoMemory: the kernel refused the allocation.
var ErrNoMemory = errors.New("rdma: no memory")

// maxMemoryName is what a memfd's name may have in bytes.
const maxMemoryName = 249

// AllocMemory maps size bytes, rounded up to the page size. The name shows in
// /proc/PID/maps and should say what it is for. It returns ErrNoMemory when the
// kernel has no room, ErrUnsupported when it cannot seal shareable memory.
func AllocMemory(name string, size uint64, opt MemoryOptions) (*Memory, error) {
	if size == 0 {
		return nil, fmt.Errorf("rdma: memory %q: size 0: want at least one byte", name)
	}
	if len(name) > maxMemoryName || strings.ContainsRune(name, 0) {
		return nil, fmt.Errorf("rdma: memory name %q: want at most %d bytes, none of them 0", name, maxMemoryName)
	}
	if size > math.MaxInt/2 { // so that rounding up cannot overflow
		return nil, fmt.Errorf("%w: %d bytes for %q is more than any address space", ErrNoMemory, size, name)
	}
	return allocMemory(name, size, opt)
}

func roundUp(n, to uint64) uint64 { return (n + to - 1) / to * to }
