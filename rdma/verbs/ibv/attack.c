//go:build rdmaguest && linux && cgo

#include "attack.h"
#include "shim_lib.h"

#ifdef KVD_HAVE_VERBS

#include <string.h>

int kvd_post_attack(uintptr_t qp, int kind, uint64_t id, uint64_t local_addr, uint32_t length, uint32_t lkey, uint64_t remote_addr, uint32_t rkey)
{
	struct ibv_sge sge = { local_addr, length, lkey };
	struct ibv_send_wr wr, *bad = NULL;
	memset(&wr, 0, sizeof wr);
	wr.wr_id = id;
	wr.sg_list = &sge;
	wr.num_sge = 1;
	wr.send_flags = IBV_SEND_SIGNALED;
	if (kind == 0) {
		wr.opcode = IBV_WR_RDMA_WRITE;
		wr.wr.rdma.remote_addr = remote_addr;
		wr.wr.rdma.rkey = rkey;
	} else {
		wr.opcode = kind == 1 ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP;
		wr.wr.atomic.remote_addr = remote_addr;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = 1;
		wr.wr.atomic.swap = 2;
	}
	errno = 0;
	return kvd_errno(ibv_post_send((struct ibv_qp *)qp, &wr, &bad));
}

#else

int kvd_post_attack(uintptr_t qp, int kind, uint64_t id, uint64_t local_addr, uint32_t length, uint32_t lkey, uint64_t remote_addr, uint32_t rkey) { return 38; }

#endif
