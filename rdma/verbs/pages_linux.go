package verbs

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapTiles maps a file of tile bytes again and again until size is covered.
func mapTiles(size, tile uint64) (b []byte, free func(), err error) {
	fd, err := unix.MemfdCreate("kvd-trial", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, nil, fmt.Errorf("memfd: %w", err)
	}
	defer func() { _ = unix.Close(fd) }() // the mappings stay
	if err := unix.Ftruncate(fd, int64(tile)); err != nil {
		return nil, nil, fmt.Errorf("reserve %d bytes: %w", tile, err)
	}
	base, err := unix.MmapPtr(-1, 0, nil, uintptr(size), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, nil, fmt.Errorf("reserve %d bytes of addresses: %w", size, err)
	}
	free = func() { _ = unix.MunmapPtr(base, uintptr(size)) } // ours alone: cannot fail
	for at := uint64(0); at < size; at += tile {
		n := min(tile, size-at)
		if _, err := unix.MmapPtr(fd, 0, unsafe.Add(base, at), uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
			free()
			return nil, nil, fmt.Errorf("map %d bytes: %w", n, err)
		}
	}
	return unsafe.Slice((*byte)(base), size), free, nil
}

// populate makes the pages of b exist, all at once: registering one by one is many times
// slower. Best effort, kernels before 5.14 do not know it.
func populate(b []byte) { _ = unix.Madvise(b, unix.MADV_POPULATE_WRITE) }
