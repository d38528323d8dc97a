package rdma

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestMemorySealed tries all that a peer with the descriptor might.
func TestMemorySealed(t *testing.T) {
	m, err := AllocMemory("kvd-sealed", 8192, MemoryOptions{Shareable: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Free()) }()
	copy(m.Bytes(), "before")

	ro, err := unix.Mmap(m.FD(), 0, 8192, unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err, "a read-only mapping")
	defer func() { require.NoError(t, unix.Munmap(ro)) }()
	require.Equal(t, "before", string(ro[:6]))
	copy(m.Bytes(), "after!")
	require.Equal(t, "after!", string(ro[:6]), "the owner's stores show")

	again, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", m.FD()), os.O_RDWR, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, again.Close()) }()
	for name, fd := range map[string]int{"the descriptor": m.FD(), "opened again": int(again.Fd())} {
		_, err := unix.Mmap(fd, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		require.ErrorIs(t, err, unix.EPERM, "%s: writable mapping", name)
		_, err = unix.Pwrite(fd, []byte("x"), 0)
		require.ErrorIs(t, err, unix.EPERM, "%s: write", name)
		require.ErrorIs(t, unix.Ftruncate(fd, 4096), unix.EPERM, "%s: shrink", name)
		require.ErrorIs(t, unix.Ftruncate(fd, 1<<20), unix.EPERM, "%s: grow", name)
		require.ErrorIs(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096), unix.EPERM, "%s: hole", name)
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
		require.ErrorIs(t, err, unix.EPERM, "%s: another seal", name)
	}
	require.ErrorIs(t, unix.Mprotect(ro, unix.PROT_READ|unix.PROT_WRITE), unix.EACCES, "read-only made writable")
	require.ErrorIs(t, unix.Madvise(ro, unix.MADV_REMOVE), unix.EACCES, "hole through a mapping")
	require.Equal(t, "after!", string(m.Bytes()[:6]))

	cloexec, err := unix.FcntlInt(uintptr(m.FD()), unix.F_GETFD, 0)
	require.NoError(t, err)
	require.NotZero(t, cloexec&unix.FD_CLOEXEC, "children must not inherit it")
}

func TestMemoryFreeReleases(t *testing.T) {
	m, err := AllocMemory("kvd-released", 8192, MemoryOptions{Shareable: true})
	require.NoError(t, err)
	require.Contains(t, maps(t), "kvd-released")
	fd := m.FD()
	require.NoError(t, m.Free())
	require.NotContains(t, maps(t), "kvd-released")
	_, err = unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	require.ErrorIs(t, err, unix.EBADF)
}

func TestMemoryNameShows(t *testing.T) {
	for _, shareable := range []bool{true, false} {
		m, err := AllocMemory("kvd-visible-name", 4096, MemoryOptions{Shareable: shareable})
		require.NoError(t, err)
		shows := strings.Contains(maps(t), "kvd-visible-name")
		if shareable {
			require.True(t, shows)
		} else if !shows {
			t.Log("this kernel does not name anonymous memory")
		}
		require.NoError(t, m.Free())
	}
}

// TestMemoryNotForked: the mapping carries the flag that keeps a child from it.
func TestMemoryNotForked(t *testing.T) {
	for _, shareable := range []bool{true, false} {
		m, err := AllocMemory("kvd-dontfork", 4096, MemoryOptions{Shareable: shareable})
		require.NoError(t, err)
		smaps, err := os.ReadFile("/proc/self/smaps")
		require.NoError(t, err)
		start := fmt.Appendf(nil, "%x-", uintptr(unsafe.Pointer(&m.Bytes()[0])))
		i := bytes.Index(smaps, append([]byte("\n"), start...))
		require.GreaterOrEqual(t, i, 0)
		flags := smaps[i:]
		flags = flags[bytes.Index(flags, []byte("VmFlags:")):]
		flags = flags[:bytes.IndexByte(flags, '\n')]
		require.Contains(t, string(flags), " dc", "do not copy on fork")
		require.Contains(t, string(flags), " dd", "do not dump")
		require.NoError(t, m.Free())
	}
}

// TestMemoryGuarded: the pages before and behind are nobody's.
func TestMemoryGuarded(t *testing.T) {
	for _, opt := range []MemoryOptions{{}, {Shareable: true}, {HugePages: true}} {
		m, err := AllocMemory("kvd-guarded", 8192, opt)
		require.NoError(t, err)
		first := uintptr(unsafe.Pointer(&m.Bytes()[0]))
		guards := 0
		for line := range strings.Lines(maps(t)) {
			var lo, hi uintptr
			var perms string
			_, err := fmt.Sscanf(line, "%x-%x %s", &lo, &hi, &perms)
			require.NoError(t, err, line)
			if hi == first || lo == first+uintptr(m.Size()) {
				require.Equal(t, "---p", perms, "%s", line)
				guards++
			}
		}
		require.Equal(t, 2, guards)
		require.NoError(t, m.Free())
	}
}

func maps(t *testing.T) string {
	b, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return string(b)
}
