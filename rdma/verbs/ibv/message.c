//go:build linux && cgo

#include "message.h"
#include "shim_lib.h"

#ifdef KVD_HAVE_VERBS

#include <arpa/inet.h>
#include <string.h>

int kvd_post_message(uintptr_t qp, uint64_t id, uint32_t imm)
{
	struct ibv_send_wr wr, *bad = NULL;
	memset(&wr, 0, sizeof wr);
	wr.wr_id = id;
	wr.opcode = IBV_WR_SEND_WITH_IMM;
	wr.imm_data = htonl(imm);
	wr.send_flags = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;
	errno = 0;
	return kvd_errno(ibv_post_send((struct ibv_qp *)qp, &wr, &bad));
}

int kvd_post_recv(uintptr_t qp, uint64_t id)
{
	struct ibv_sge none = { 0, 0, 0 };
	struct ibv_recv_wr wr, *bad = NULL;
	memset(&wr, 0, sizeof wr);
	wr.wr_id = id;
	if (((struct ibv_qp *)qp)->context->device->transport_type == IBV_TRANSPORT_IWARP) {
		// soft-iWARP refuses a receive without an entry, even of no bytes
		wr.sg_list = &none;
		wr.num_sge = 1;
	}
	errno = 0;
	return kvd_errno(ibv_post_recv((struct ibv_qp *)qp, &wr, &bad));
}

// Inline: the bytes are copied, so they need no region of ours.
int kvd_post_word(uintptr_t qp, uint64_t id, const uint8_t *word, int len)
{
	struct ibv_sge sge = { (uintptr_t)word, len, 0 };
	struct ibv_send_wr wr, *bad = NULL;
	memset(&wr, 0, sizeof wr);
	wr.wr_id = id;
	wr.opcode = IBV_WR_SEND;
	wr.send_flags = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;
	if (len > 0) {
		wr.sg_list = &sge;
		wr.num_sge = 1;
		wr.send_flags |= IBV_SEND_INLINE;
	}
	errno = 0;
	return kvd_errno(ibv_post_send((struct ibv_qp *)qp, &wr, &bad));
}

int kvd_post_recv_into(uintptr_t qp, uint64_t id, uint64_t addr, uint32_t length, uint32_t lkey)
{
	struct ibv_sge sge = { addr, length, lkey };
	struct ibv_recv_wr wr, *bad = NULL;
	memset(&wr, 0, sizeof wr);
	wr.wr_id = id;
	wr.sg_list = &sge;
	wr.num_sge = 1;
	errno = 0;
	return kvd_errno(ibv_post_recv((struct ibv_qp *)qp, &wr, &bad));
}

int kvd_arm_solicited(uintptr_t cq)
{
	errno = 0;
	return kvd_errno(ibv_req_notify_cq((struct ibv_cq *)cq, 1));
}

#else

int kvd_post_message(uintptr_t qp, uint64_t id, uint32_t imm) { return 38; }
int kvd_post_recv(uintptr_t qp, uint64_t id) { return 38; }
int kvd_post_word(uintptr_t qp, uint64_t id, const uint8_t *word, int len) { return 38; }
int kvd_post_recv_into(uintptr_t qp, uint64_t id, uint64_t addr, uint32_t length, uint32_t lkey) { return 38; }
int kvd_arm_solicited(uintptr_t cq) { return 38; }

#endif
