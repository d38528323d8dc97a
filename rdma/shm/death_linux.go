package shm

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
)

// The kernel keeps, for each thread, the address of a list of "robust" futexes
// which the thread holds. When the thread dies, however it dies, the kernel walks
// the list and replaces the thread's id by FUTEX_OWNER_DIED in each word that holds
// it (see get_robust_list(2), and robust-futex-ABI in the kernel's documentation).
// It does so before the process's files are closed, so before its locks on files
// fall and its sockets hang up.
//
// So one thread that lives as long as the process, and a list with one entry,
// make a word that says whether the process is alive; and no code of ours has to
// run to set it.

// robustList is what the kernel follows. Entry and futex word are futexOffset
// bytes apart, and may so lie on different pages: the links stay with us, the
// word is shared.
type robustList struct {
	next        uintptr // of the head: the first entry; of the last entry: the head
	futexOffset int
	pending     uintptr // entry being locked or unlocked: never used
	_           [5]uint64
	entry       uintptr // the only entry: its next
}

// death is the death word of this process.
type death struct {
	memory  *rdma.Memory // death page
	process uint64
	tid     uint32
}

// processDeath makes the death word on first use. It belongs to the process, not to
// a target, so it is the one global here: the thread, the list and the page are
// needed until the kernel has walked the list, so they are never released.
var processDeath = sync.OnceValues(newDeath)

func newDeath() (*death, error) {
	m, err := rdma.AllocMemory("kvd-shm-death", pageSize, rdma.MemoryOptions{Shareable: true})
	if err != nil {
		return nil, fmt.Errorf("shm: death page: %w", err)
	}
	// MAP_SHARED, like the death page: the OOM reaper may empty private memory of a
	// process that was killed before its threads have exited.
	links, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("shm: page of the robust list: %w", err), m.Free())
	}
	// Without swap the kernel needs no memory to reach the word. Best effort: the
	// limit on locked memory may be 0, and two pages in use are seldom swapped out.
	_ = unix.Mlock(links)
	_ = unix.Mlock(m.Bytes())

	var random [8]byte
	if _, err := rand.Read(random[:]); err != nil {
		return nil, errors.Join(fmt.Errorf("shm: %w", err), m.Free(), unix.Munmap(links))
	}
	d := &death{memory: m, process: binary.LittleEndian.Uint64(random[:])}
	store64(m.Bytes(), offMagic, deathMagic)
	store64(m.Bytes(), offProcess, d.process)

	started := make(chan error, 1)
	go holdDeathWord(d, links, started)
	if err := <-started; err != nil {
		return nil, errors.Join(err, m.Free(), unix.Munmap(links))
	}
	return d, nil
}

// holdDeathWord makes its thread the holder of the word, and keeps it until the
// process ends.
func holdDeathWord(d *death, links []byte, started chan<- error) {
	// Never unlocked: an unlocked thread may be ended by the runtime.
	runtime.LockOSThread()
	list := (*robustList)(unsafe.Pointer(&links[0]))
	head := uintptr(unsafe.Pointer(list))
	entry := uintptr(unsafe.Pointer(&list.entry))
	word := deathWord(d.memory.Bytes())

	list.entry = head
	list.futexOffset = int(uintptr(unsafe.Pointer(word))) - int(entry)
	list.next = entry
	d.tid = uint32(unix.Gettid())
	atomic.StoreUint32(word, d.tid)

	const headSize = 3 * unsafe.Sizeof(uintptr(0))
	if _, _, errno := unix.RawSyscall(unix.SYS_SET_ROBUST_LIST, head, headSize, 0); errno != 0 {
		// Returning ends the thread, with its list still its old one.
		started <- fmt.Errorf("%w: shm: set_robust_list: %w: clients could not tell when this process dies; use tcp", rdma.ErrUnsupported, errno)
		return
	}
	started <- nil
	select {}
}
