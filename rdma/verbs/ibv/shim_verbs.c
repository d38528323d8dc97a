// Devices and the objects of verbs.
#include "shim.h"
#include "shim_lib.h"

#ifdef KVD_HAVE_VERBS

#include <endian.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void copy_name(char *to, size_t size, const char *from)
{
	size_t n = strnlen(from, size - 1);
	memcpy(to, from, n);
	to[n] = 0;
}

int kvd_devices(kvd_device *out, int max, int *n)
{
	errno = 0;
	*n = 0;
	struct ibv_device **list = kvd_f.ibv_get_device_list(n);
	if (!list) {
		*n = 0;
		// A kernel without RDMA: no devices, and no failure.
		return errno == ENOSYS || errno == 0 ? 0 : errno;
	}
	for (int i = 0; i < *n && i < max; i++) {
		memset(&out[i], 0, sizeof out[i]);
		copy_name(out[i].name, sizeof out[i].name, kvd_f.ibv_get_device_name(list[i]));
		out[i].guid = be64toh(kvd_f.ibv_get_device_guid(list[i]));
		out[i].node_type = list[i]->node_type;
		out[i].transport = list[i]->transport_type;
	}
	kvd_f.ibv_free_device_list(list);
	return 0;
}

int kvd_open(const char *name, uintptr_t *ctx, int *async_fd)
{
	int n = 0, err = ENODEV;
	errno = 0;
	struct ibv_device **list = kvd_f.ibv_get_device_list(&n);
	if (!list)
		return errno == ENOSYS || errno == 0 ? ENODEV : errno;
	for (int i = 0; i < n; i++) {
		if (strcmp(kvd_f.ibv_get_device_name(list[i]), name))
			continue;
		errno = 0;
		struct ibv_context *c = kvd_f.ibv_open_device(list[i]);
		err = c ? 0 : kvd_failed();
		if (c) {
			*ctx = (uintptr_t)c;
			*async_fd = c->async_fd;
		}
		break;
	}
	kvd_f.ibv_free_device_list(list);
	return err;
}

int kvd_close(uintptr_t ctx)
{
	return kvd_errno(kvd_f.ibv_close_device((struct ibv_context *)ctx));
}

int kvd_query_device(uintptr_t ctx, kvd_device_attr *out)
{
	struct ibv_context *c = (struct ibv_context *)ctx;
	struct ibv_device_attr a;
	memset(&a, 0, sizeof a);
	memset(out, 0, sizeof *out);
	int err = kvd_errno(kvd_f.ibv_query_device(c, &a));
	if (err)
		return err;
	copy_name(out->fw_ver, sizeof out->fw_ver, a.fw_ver);
	out->node_guid = be64toh(a.node_guid);
	out->max_mr_size = a.max_mr_size;
	out->page_size_cap = a.page_size_cap;
	out->vendor_id = a.vendor_id;
	out->vendor_part_id = a.vendor_part_id;
	out->hw_ver = a.hw_ver;
	out->cap_flags = a.device_cap_flags;
	out->ports = a.phys_port_cnt;
	out->max_qp = a.max_qp;
	out->max_qp_wr = a.max_qp_wr;
	out->max_sge = a.max_sge;
	out->max_cq = a.max_cq;
	out->max_cqe = a.max_cqe;
	out->max_mr = a.max_mr;
	out->max_pd = a.max_pd;
	out->max_mw = a.max_mw;
	out->max_qp_rd_atom = a.max_qp_rd_atom;
	out->max_qp_init_rd_atom = a.max_qp_init_rd_atom;
	out->max_res_rd_atom = a.max_res_rd_atom;
	out->max_pkeys = a.max_pkeys;
	out->atomic_cap = a.atomic_cap;
	out->ack_delay = a.local_ca_ack_delay;

	struct verbs_context *v = verbs_get_ctx_op(c, query_device_ex);
	if (v) {
		struct ibv_device_attr_ex ex;
		memset(&ex, 0, sizeof ex);
		if (v->query_device_ex(c, NULL, &ex, sizeof ex) == 0) {
			out->odp = (ex.odp_caps.general_caps & IBV_ODP_SUPPORT) != 0;
			out->odp_read_rc = (ex.odp_caps.per_transport_caps.rc_odp_caps & IBV_ODP_SUPPORT_READ) != 0;
		}
	}
	return 0;
}

int kvd_query_port(uintptr_t ctx, int port, kvd_port *out)
{
	struct ibv_context *c = (struct ibv_context *)ctx;
	struct ibv_port_attr a;
	memset(&a, 0, sizeof a);
	memset(out, 0, sizeof *out);
	struct verbs_context *v = verbs_get_ctx_op(c, query_port);
	int err = v ? v->query_port(c, port, &a, sizeof a) : kvd_f.ibv_query_port(c, port, &a);
	if (err)
		return kvd_errno(err);
	out->state = a.state;
	out->max_mtu = a.max_mtu;
	out->active_mtu = a.active_mtu;
	out->gid_tbl_len = a.gid_tbl_len;
	out->pkey_tbl_len = a.pkey_tbl_len;
	out->lid = a.lid;
	out->sm_lid = a.sm_lid;
	out->lmc = a.lmc;
	out->sm_sl = a.sm_sl;
	out->max_msg_sz = a.max_msg_sz;
	out->active_speed = a.active_speed;
	out->active_width = a.active_width;
	out->phys_state = a.phys_state;
	out->link_layer = a.link_layer;
	out->flags = a.flags;
	return 0;
}

int kvd_query_gid(uintptr_t ctx, int port, int index, kvd_gid *out)
{
	struct ibv_context *c = (struct ibv_context *)ctx;
	memset(out, 0, sizeof *out);
	if (kvd_f._ibv_query_gid_ex) {
		struct kvd_gid_entry e;
		memset(&e, 0, sizeof e);
		int err = kvd_errno(kvd_f._ibv_query_gid_ex(c, port, index, &e, 0, sizeof e));
		if (err != EOPNOTSUPP) {
			memcpy(out->gid, e.gid.raw, sizeof out->gid);
			out->type = e.gid_type < 3 ? e.gid_type : 3;
			out->ifindex = e.ndev_ifindex;
			return err;
		}
	}
	union ibv_gid gid;
	memset(&gid, 0, sizeof gid);
	errno = 0;
	if (kvd_f.ibv_query_gid(c, port, index, &gid))
		return errno > 0 ? errno : ENODATA;
	memcpy(out->gid, gid.raw, sizeof out->gid);
	out->type = 3;
	return 0;
}

int kvd_query_pkey(uintptr_t ctx, int port, int index, uint16_t *out)
{
	__be16 k = 0;
	errno = 0;
	int err = kvd_errno(kvd_f.ibv_query_pkey((struct ibv_context *)ctx, port, index, &k));
	*out = be16toh(k);
	return err;
}

int kvd_get_async(uintptr_t ctx, kvd_async *out)
{
	struct ibv_async_event e;
	memset(out, 0, sizeof *out);
	errno = 0;
	if (kvd_f.ibv_get_async_event((struct ibv_context *)ctx, &e))
		return kvd_failed();
	out->type = e.event_type;
	switch (e.event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		out->qpn = e.element.qp->qp_num;
		break;
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
	case IBV_EVENT_GID_CHANGE:
		out->port = e.element.port_num;
		break;
	default:
		break;
	}
	kvd_f.ibv_ack_async_event(&e);
	return 0;
}

int kvd_alloc_pd(uintptr_t ctx, uintptr_t *pd)
{
	errno = 0;
	*pd = (uintptr_t)kvd_f.ibv_alloc_pd((struct ibv_context *)ctx);
	return *pd ? 0 : kvd_failed();
}

int kvd_dealloc_pd(uintptr_t pd)
{
	return kvd_errno(kvd_f.ibv_dealloc_pd((struct ibv_pd *)pd));
}

int kvd_reg_mr(uintptr_t pd, uintptr_t addr, uint64_t length, uint32_t access, uintptr_t *mr, uint32_t *lkey, uint32_t *rkey)
{
	errno = 0;
	struct ibv_mr *m = kvd_f.ibv_reg_mr((struct ibv_pd *)pd, (void *)addr, length, access);
	if (!m)
		return kvd_failed();
	*mr = (uintptr_t)m;
	*lkey = m->lkey;
	*rkey = m->rkey;
	return 0;
}

int kvd_dereg_mr(uintptr_t mr)
{
	return kvd_errno(kvd_f.ibv_dereg_mr((struct ibv_mr *)mr));
}

int kvd_create_cq(uintptr_t ctx, int depth, int with_channel, int vector, uintptr_t *cq, uintptr_t *channel, int *fd, int *got)
{
	struct ibv_context *c = (struct ibv_context *)ctx;
	struct ibv_comp_channel *ch = NULL;
	errno = 0;
	if (with_channel) {
		ch = kvd_f.ibv_create_comp_channel(c);
		if (!ch)
			return kvd_failed();
	}
	int vectors = c->num_comp_vectors > 0 ? c->num_comp_vectors : 1;
	struct ibv_cq *q = kvd_f.ibv_create_cq(c, depth, NULL, ch, (vector & INT32_MAX) % vectors);
	if (!q) {
		int err = kvd_failed();
		if (ch)
			kvd_f.ibv_destroy_comp_channel(ch);
		return err;
	}
	*cq = (uintptr_t)q;
	*channel = (uintptr_t)ch;
	*fd = ch ? ch->fd : -1;
	*got = q->cqe;
	return 0;
}

int kvd_destroy_cq(uintptr_t cq, uintptr_t channel)
{
	int err = kvd_errno(kvd_f.ibv_destroy_cq((struct ibv_cq *)cq));
	if (!channel)
		return err;
	int err2 = kvd_errno(kvd_f.ibv_destroy_comp_channel((struct ibv_comp_channel *)channel));
	return err ? err : err2;
}

int kvd_arm(uintptr_t cq)
{
	return kvd_errno(ibv_req_notify_cq((struct ibv_cq *)cq, 0));
}

int kvd_get_cq_event(uintptr_t channel)
{
	struct ibv_cq *cq;
	void *context;
	errno = 0;
	if (kvd_f.ibv_get_cq_event((struct ibv_comp_channel *)channel, &cq, &context))
		return kvd_failed();
	kvd_f.ibv_ack_cq_events(cq, 1);
	return 0;
}

#else

#define NONE { return 38; } // ENOSYS

int kvd_devices(kvd_device *out, int max, int *n) NONE
int kvd_open(const char *name, uintptr_t *ctx, int *async_fd) NONE
int kvd_close(uintptr_t ctx) NONE
int kvd_query_device(uintptr_t ctx, kvd_device_attr *out) NONE
int kvd_query_port(uintptr_t ctx, int port, kvd_port *out) NONE
int kvd_query_gid(uintptr_t ctx, int port, int index, kvd_gid *out) NONE
int kvd_query_pkey(uintptr_t ctx, int port, int index, uint16_t *out) NONE
int kvd_get_async(uintptr_t ctx, kvd_async *out) NONE
int kvd_alloc_pd(uintptr_t ctx, uintptr_t *pd) NONE
int kvd_dealloc_pd(uintptr_t pd) NONE
int kvd_reg_mr(uintptr_t pd, uintptr_t addr, uint64_t length, uint32_t access, uintptr_t *mr, uint32_t *lkey, uint32_t *rkey) NONE
int kvd_dereg_mr(uintptr_t mr) NONE
int kvd_create_cq(uintptr_t ctx, int depth, int with_channel, int vector, uintptr_t *cq, uintptr_t *channel, int *fd, int *got) NONE
int kvd_destroy_cq(uintptr_t cq, uintptr_t channel) NONE
int kvd_arm(uintptr_t cq) NONE
int kvd_get_cq_event(uintptr_t channel) NONE

#endif
