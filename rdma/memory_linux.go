package rdma

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePageSize is the size that MFD_HUGETLB takes by default on amd64 and most
// arm64 kernels. Where it differs the mapping fails and plain pages are used.
const hugePageSize = 2 << 20

func allocMemory(name string, size uint64, opt MemoryOptions) (*Memory, error) {
	var hugeErr error
	if opt.HugePages {
		m, err := mapMemory(name, roundUp(size, hugePageSize), opt.Shareable, true)
		if err == nil {
			return m, nil
		}
		hugeErr = err
	}
	m, err := mapMemory(name, roundUp(size, uint64(os.Getpagesize())), opt.Shareable, false)
	if err != nil {
		return nil, err
	}
	if m.hugeErr = hugeErr; hugeErr != nil {
		// The next best: let the kernel use transparent huge pages if it will.
		_ = unix.Madvise(m.bytes, unix.MADV_HUGEPAGE)
	}
	return m, nil
}

// mapMemory maps size bytes between two guard pages: what runs past either end crashes
// instead of writing into memory that a NIC is reading for others.
func mapMemory(name string, size uint64, shareable, huge bool) (*Memory, error) {
	refused := func(step string, err error) error {
		return fmt.Errorf("%w: %s %d bytes for %q: %w", ErrNoMemory, step, size, name, err)
	}
	fd := -1
	if shareable {
		var err error
		if fd, err = makeMemfd(name, size, huge); err != nil {
			return nil, err
		}
	}
	release := func(err error) error {
		if fd >= 0 {
			err = errors.Join(err, unix.Close(fd))
		}
		return err
	}
	guard := uint64(os.Getpagesize())
	if huge {
		guard = hugePageSize // pages of one size need its alignment
	}
	// Reserved as a whole, and then mapped over: nobody can come in between.
	whole := uintptr(size + 3*guard)
	base, err := unix.MmapPtr(-1, 0, nil, whole, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, release(refused("reserve addresses of", err))
	}
	at := unsafe.Add(base, roundUp(uint64(uintptr(base))+guard, guard)-uint64(uintptr(base)))
	flags := unix.MAP_FIXED
	switch {
	case shareable:
		flags |= unix.MAP_SHARED
	case huge:
		flags |= unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_HUGETLB
	default:
		flags |= unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	}
	if _, err := unix.MmapPtr(fd, 0, at, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, flags); err != nil {
		return nil, release(errors.Join(refused("map", err), unix.MunmapPtr(base, whole)))
	}
	b := unsafe.Slice((*byte)(at), size)
	if shareable {
		if err := sealMemfd(name, fd); err != nil {
			return nil, release(errors.Join(err, unix.MunmapPtr(base, whole)))
		}
	} else {
		nameMapping(name, b)
	}
	// Both best effort, an old kernel without them is no reason to fail. A forked
	// child must not share pages that a NIC reads: copy-on-write would move them. A
	// core dump must not carry the users' data, nor take hours.
	_ = unix.Madvise(b, unix.MADV_DONTFORK)
	_ = unix.Madvise(b, unix.MADV_DONTDUMP)
	return &Memory{name: name, size: size, bytes: b, fd: fd, huge: huge, unmap: func() error {
		if err := release(unix.MunmapPtr(base, whole)); err != nil {
			return fmt.Errorf("rdma: free memory %q: %w", name, err)
		}
		return nil
	}}, nil
}

func makeMemfd(name string, size uint64, huge bool) (int, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	if huge {
		flags |= unix.MFD_HUGETLB
	}
	fd, err := unix.MemfdCreate(name, flags)
	if err != nil {
		return -1, fmt.Errorf("%w: memfd %q: %w", ErrNoMemory, name, err)
	}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return -1, errors.Join(fmt.Errorf("%w: reserve %d bytes for %q: %w", ErrNoMemory, size, name, err), unix.Close(fd))
	}
	return fd, nil
}

// sealMemfd is called after our own writable mapping was made: no other can be made
// then, not even by a peer that was handed the descriptor; nor can it write or punch
// holes through the file.
func sealMemfd(name string, fd int) error {
	seals := unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_FUTURE_WRITE | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("%w: seal memory %q (wants Linux 5.1 or later): %w", ErrUnsupported, name, err)
	}
	return nil
}

// nameMapping makes anonymous memory show as [anon:name] in /proc/PID/maps. Best
// effort: kernels are built with or without it, and refuse some characters.
func nameMapping(name string, b []byte) {
	const longest = 79
	p, err := unix.BytePtrFromString(name[:min(len(name), longest)])
	if err != nil {
		return
	}
	_ = unix.Prctl(unix.PR_SET_VMA, unix.PR_SET_VMA_ANON_NAME,
		uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), uintptr(unsafe.Pointer(p)))
}
