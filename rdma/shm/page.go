package shm

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/kvd-io/kvd/rdma"
)

// Two pages tell a client whether what it copied may be used. The server writes
// them, the client maps them for reading only.
//
// The death page is one for each serving process:
//
//	offset  0  u64  deathMagic
//	        8  u64  process: random, drawn when the page was made
//	       64  u32  the death word: the id of the thread that holds it; the kernel
//	                replaces it by ownerDied when that thread, so the process, dies
//
// The connection page is one for each connection:
//
//	offset  0  u64  connMagic
//	        8  u64  process: the same as in the death page, which ties the two
//	       16  u64  node id
//	       24  u64  boot id
//	       64  u64  the state: while the connection is open, the number of regions
//	                that were taken from it; when it has ended, stateEnded and the reason
//
// The words that change lie on a cache line of their own.
const (
	pageSize   = 4096
	deathMagic = 0x6b76642d64656164
	connMagic  = 0x6b76642d636f6e6e

	offMagic   = 0
	offProcess = 8
	offNode    = 16
	offBoot    = 24
	offWord    = 64

	// ownerDied is the kernel's FUTEX_OWNER_DIED.
	ownerDied = 0x40000000

	stateEnded uint64 = 1 << 63
)

// Reasons for the end of a connection, in the low bits of the state.
const (
	endRevoked uint64 = iota + 1
	endDomain
	endTarget
	endProtocol
	endStuck
	endGone
)

// endError explains the state of an ended connection to the client.
func endError(state uint64) error {
	switch state &^ stateEnded {
	case endRevoked:
		return fmt.Errorf("%w: shm: the server ended this connection; authorize again", rdma.ErrRevoked)
	case endDomain:
		return fmt.Errorf("%w: shm: the server closed the namespace; authorize again", rdma.ErrRevoked)
	case endTarget:
		return fmt.Errorf("%w: shm: the server is shutting down; authorize again", rdma.ErrRevoked)
	case endProtocol:
		return fmt.Errorf("%w: shm: the server did not understand a message of ours", rdma.ErrHandshake)
	case endStuck:
		return fmt.Errorf("%w: shm: the server gave up on us: its messages were not read", rdma.ErrConnLost)
	default:
		return fmt.Errorf("%w: shm: the server ended the connection, reason %d", rdma.ErrConnLost, state&^stateEnded)
	}
}

func wordAt(page []byte, off int) *uint64 { return (*uint64)(unsafe.Pointer(&page[off])) }

func load64(page []byte, off int) uint64     { return atomic.LoadUint64(wordAt(page, off)) }
func store64(page []byte, off int, v uint64) { atomic.StoreUint64(wordAt(page, off), v) }

func deathWord(page []byte) *uint32 { return (*uint32)(unsafe.Pointer(&page[offWord])) }

// checkPages verifies what a server passed as its two pages.
func checkPages(death, conn []byte, a answer, tid uint32) error {
	bad := func(what string, got, want uint64) error {
		return fmt.Errorf("%w: shm: %s is %#x, want %#x: the socket leads to another server", rdma.ErrHandshake, what, got, want)
	}
	if got := load64(death, offMagic); got != deathMagic {
		return bad("death page's magic", got, deathMagic)
	}
	if got := load64(conn, offMagic); got != connMagic {
		return bad("connection page's magic", got, connMagic)
	}
	if got, want := load64(conn, offProcess), load64(death, offProcess); got != want {
		return bad("connection page's process", got, want)
	}
	if got := load64(conn, offNode); got != a.node {
		return bad("node id", got, a.node)
	}
	if got := load64(conn, offBoot); got != a.boot {
		return bad("boot id", got, a.boot)
	}
	if tid == 0 || tid&ownerDied != 0 {
		return fmt.Errorf("%w: shm: thread id %#x of the death word cannot be one", rdma.ErrHandshake, tid)
	}
	return nil
}
