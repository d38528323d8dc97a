//go:build !linux

package rdma

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

var errNoHugePages = errors.New("rdma: huge pages are asked for on Linux only")

// allocMemory makes plain anonymous memory: without memfds it cannot be handed to
// another process, so FD is -1 whatever was asked for.
func allocMemory(name string, size uint64, opt MemoryOptions) (*Memory, error) {
	size = roundUp(size, uint64(os.Getpagesize()))
	b, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("%w: map %d bytes for %q: %w", ErrNoMemory, size, name, err)
	}
	m := &Memory{name: name, size: size, bytes: b, fd: -1, unmap: func() error { return unix.Munmap(b) }}
	if opt.HugePages {
		m.hugeErr = errNoHugePages
	}
	return m, nil
}
