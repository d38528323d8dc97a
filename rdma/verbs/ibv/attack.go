//go:build rdmaguest && linux && cgo

package ibv

/*
#include "attack.h"
*/
import "C"

import "fmt"

// What follows exists in test builds only: it posts what kvd never posts, so that tests
// can see it refused.

// Attack is a request that a reader of kvd must not get through with.
type Attack int

const (
	AttackWrite Attack = iota
	AttackFetchAdd
	AttackCompareSwap
)

func (a Attack) String() string {
	return [...]string{"remote WRITE", "FETCH_ADD", "COMPARE_SWAP"}[a]
}

// PostAttack posts one signalled request on the local memory and the remote address of
// wr. Atomics want 8 bytes.
func (q *QP) PostAttack(a Attack, wr ReadWR) error {
	errno := C.kvd_post_attack(C.uintptr_t(q.handle()), C.int(a), C.uint64_t(wr.ID), C.uint64_t(wr.LocalAddr), C.uint32_t(wr.Length),
		C.uint32_t(wr.LKey), C.uint64_t(wr.RemoteAddr), C.uint32_t(wr.RKey))
	return refused(errnoT(errno), "ibv_post_send", "%s", fmt.Sprintf("%s on queue pair %d", a, q.num))
}
