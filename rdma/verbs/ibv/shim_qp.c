// Queue pairs and the data path.
#include "shim.h"
#include "shim_lib.h"

#ifdef KVD_HAVE_VERBS

#include <arpa/inet.h>
#include <string.h>
#include <time.h>

int kvd_create_qp(uintptr_t cm_id, uintptr_t pd, uintptr_t scq, uintptr_t rcq, int send_wr, int recv_wr, uintptr_t *qp, uint32_t *num, int *got)
{
	struct ibv_qp_init_attr a;
	memset(&a, 0, sizeof a);
	a.send_cq = (struct ibv_cq *)scq;
	a.recv_cq = (struct ibv_cq *)rcq;
	a.qp_type = IBV_QPT_RC;
	a.cap.max_send_wr = send_wr;
	a.cap.max_recv_wr = recv_wr > 0 ? recv_wr : 1; // soft-iWARP cannot map an empty queue
	a.cap.max_send_sge = 1;
	a.cap.max_recv_sge = 1;
	if (((struct ibv_pd *)pd)->context->device->transport_type == IBV_TRANSPORT_IWARP)
		a.cap.max_inline_data = 8; // kvd_post_word
	errno = 0;
	struct ibv_qp *q;
	if (cm_id) {
		struct rdma_cm_id *id = (struct rdma_cm_id *)cm_id;
		if (kvd_f.rdma_create_qp(id, (struct ibv_pd *)pd, &a))
			return kvd_failed();
		q = id->qp;
	} else {
		q = kvd_f.ibv_create_qp((struct ibv_pd *)pd, &a);
		if (!q)
			return kvd_failed();
	}
	*qp = (uintptr_t)q;
	*num = q->qp_num;
	*got = a.cap.max_send_wr;
	return 0;
}

int kvd_destroy_qp(uintptr_t cm_id, uintptr_t qp)
{
	if (cm_id) {
		kvd_f.rdma_destroy_qp((struct rdma_cm_id *)cm_id);
		return 0;
	}
	return kvd_errno(kvd_f.ibv_destroy_qp((struct ibv_qp *)qp));
}

int kvd_modify_qp(uintptr_t qp, const kvd_qp_attr *p)
{
	struct ibv_qp_attr a;
	int mask = IBV_QP_STATE;
	memset(&a, 0, sizeof a);
	a.qp_state = p->state;
	switch (p->state) {
	case IBV_QPS_INIT:
		a.port_num = p->port;
		a.pkey_index = p->pkey_index;
		a.qp_access_flags = p->access;
		mask |= IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS;
		break;
	case IBV_QPS_RTR:
		a.dest_qp_num = p->dest_qpn;
		a.rq_psn = p->rq_psn;
		a.path_mtu = p->path_mtu;
		a.max_dest_rd_atomic = p->max_dest_rd;
		a.min_rnr_timer = p->min_rnr;
		a.ah_attr.dlid = p->dlid;
		a.ah_attr.sl = p->sl;
		a.ah_attr.src_path_bits = p->src_path_bits;
		a.ah_attr.static_rate = p->static_rate;
		a.ah_attr.port_num = p->port;
		if (p->is_global) {
			a.ah_attr.is_global = 1;
			memcpy(a.ah_attr.grh.dgid.raw, p->dgid, sizeof p->dgid);
			a.ah_attr.grh.sgid_index = p->sgid_index;
			a.ah_attr.grh.hop_limit = p->hop_limit;
			a.ah_attr.grh.traffic_class = p->traffic_class;
			a.ah_attr.grh.flow_label = p->flow_label;
		}
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
		break;
	case IBV_QPS_RTS:
		a.sq_psn = p->sq_psn;
		a.timeout = p->timeout;
		a.retry_cnt = p->retry;
		a.rnr_retry = p->rnr_retry;
		a.max_rd_atomic = p->max_rd;
		mask |= IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
		break;
	}
	errno = 0;
	return kvd_errno(kvd_f.ibv_modify_qp((struct ibv_qp *)qp, &a, mask));
}

int kvd_query_qp(uintptr_t qp, kvd_qp_attr *out)
{
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr init;
	memset(&a, 0, sizeof a);
	memset(&init, 0, sizeof init);
	memset(out, 0, sizeof *out);
	errno = 0;
	int err = kvd_errno(kvd_f.ibv_query_qp((struct ibv_qp *)qp, &a,
		IBV_QP_STATE | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_ACCESS_FLAGS | IBV_QP_MAX_QP_RD_ATOMIC |
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_SQ_PSN | IBV_QP_RQ_PSN, &init));
	if (err)
		return err;
	out->state = a.qp_state;
	out->path_mtu = a.path_mtu;
	out->dest_qpn = a.dest_qp_num;
	out->access = a.qp_access_flags;
	out->max_rd = a.max_rd_atomic;
	out->max_dest_rd = a.max_dest_rd_atomic;
	out->sq_psn = a.sq_psn;
	out->rq_psn = a.rq_psn;
	return 0;
}

static int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ __volatile__("yield");
#endif
}

// CHUNK requests and completions are translated at a time, on the stack.
#define CHUNK 32

static int poll_once(struct ibv_cq *cq, kvd_wc *out, int max)
{
	struct ibv_wc wc[CHUNK];
	int total = 0;
	while (total < max) {
		int want = max - total < CHUNK ? max - total : CHUNK;
		int n = ibv_poll_cq(cq, want, wc);
		if (n < 0) // what was taken before is not lost
			return total ? total : -kvd_errno(n);
		for (int i = 0; i < n; i++) {
			kvd_wc *w = &out[total + i];
			w->id = wc[i].wr_id;
			w->status = wc[i].status;
			w->vendor_err = wc[i].vendor_err;
			w->byte_len = wc[i].byte_len;
			w->opcode = wc[i].opcode;
			w->qpn = wc[i].qp_num;
			w->imm = wc[i].wc_flags & IBV_WC_WITH_IMM ? ntohl(wc[i].imm_data) : 0;
		}
		total += n;
		if (n < want)
			break;
	}
	return total;
}

int kvd_poll(uintptr_t q, kvd_wc *out, int max, int64_t spin_ns)
{
	struct ibv_cq *cq = (struct ibv_cq *)q;
	errno = 0;
	int n = poll_once(cq, out, max);
	if (n || spin_ns <= 0)
		return n;
	int64_t end = now_ns() + spin_ns;
	for (;;) {
		for (int i = 0; i < 8; i++) { // a look costs less than the clock
			relax();
			n = poll_once(cq, out, max);
			if (n)
				return n;
		}
		if (now_ns() >= end)
			return 0;
	}
}

kvd_drive kvd_post_and_poll(uintptr_t qp, uintptr_t cq, const kvd_read *reads, int count, kvd_wc *out, int max, int64_t spin_ns)
{
	struct ibv_send_wr wr[CHUNK];
	struct ibv_sge sge[CHUNK];
	kvd_drive d = { 0, 0, 0 };
	while (d.posted < count) {
		int n = count - d.posted < CHUNK ? count - d.posted : CHUNK;
		const kvd_read *r = reads + d.posted;
		memset(wr, 0, sizeof wr[0] * n);
		for (int i = 0; i < n; i++) {
			sge[i].addr = r[i].local_addr;
			sge[i].length = r[i].length;
			sge[i].lkey = r[i].lkey;
			wr[i].wr_id = r[i].id;
			wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
			wr[i].sg_list = &sge[i];
			wr[i].num_sge = 1;
			wr[i].opcode = IBV_WR_RDMA_READ;
			if (r[i].flags & 1)
				wr[i].send_flags |= IBV_SEND_SIGNALED;
			if (r[i].flags & 2)
				wr[i].send_flags |= IBV_SEND_FENCE;
			wr[i].wr.rdma.remote_addr = r[i].remote_addr;
			wr[i].wr.rdma.rkey = r[i].rkey;
		}
		struct ibv_send_wr *bad = NULL;
		errno = 0;
		int ret = ibv_post_send((struct ibv_qp *)qp, wr, &bad);
		if (ret) {
			d.err = kvd_errno(ret);
			// A provider that does not say which is taken to have posted none.
			if (bad >= wr && bad < wr + n)
				d.posted += bad - wr;
			return d;
		}
		d.posted += n;
	}
	if (max > 0)
		d.n = kvd_poll(cq, out, max, spin_ns);
	return d;
}

#else

#define NONE { return 38; } // ENOSYS

int kvd_create_qp(uintptr_t cm_id, uintptr_t pd, uintptr_t scq, uintptr_t rcq, int send_wr, int recv_wr, uintptr_t *qp, uint32_t *num, int *got) NONE
int kvd_destroy_qp(uintptr_t cm_id, uintptr_t qp) NONE
int kvd_modify_qp(uintptr_t qp, const kvd_qp_attr *p) NONE
int kvd_query_qp(uintptr_t qp, kvd_qp_attr *out) NONE
int kvd_poll(uintptr_t q, kvd_wc *out, int max, int64_t spin_ns) { return -38; }

kvd_drive kvd_post_and_poll(uintptr_t qp, uintptr_t cq, const kvd_read *reads, int count, kvd_wc *out, int max, int64_t spin_ns)
{
	kvd_drive d = { 0, 0, 38 };
	return d;
}

#endif
