// The libraries' functions, found by dlopen (shim_load.c) and used by the rest of the
// shim. Only for files that saw KVD_HAVE_VERBS.
#ifndef KVD_IBV_SHIM_LIB_H
#define KVD_IBV_SHIM_LIB_H

// KVD_NO_VERBS builds as if the headers were missing, for the test of that.
#if defined(__linux__) && defined(__has_include) && !defined(KVD_NO_VERBS)
#if __has_include(<infiniband/verbs.h>) && __has_include(<rdma/rdma_cma.h>)
#define KVD_HAVE_VERBS 1
#endif
#endif

#ifdef KVD_HAVE_VERBS

#include <errno.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

// The header makes macros of these, which would call the library directly.
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

// A GID entry as _ibv_query_gid_ex writes it; older headers do not have it.
struct kvd_gid_entry {
	union ibv_gid gid;
	uint32_t gid_index, port_num, gid_type, ndev_ifindex;
};

// Name, result, parameters of each function. Required ones first.
#define KVD_VERBS_FUNCS(X) \
	X(ibv_get_device_list, struct ibv_device **, (int *)) \
	X(ibv_free_device_list, void, (struct ibv_device **)) \
	X(ibv_get_device_name, const char *, (struct ibv_device *)) \
	X(ibv_get_device_guid, __be64, (struct ibv_device *)) \
	X(ibv_open_device, struct ibv_context *, (struct ibv_device *)) \
	X(ibv_close_device, int, (struct ibv_context *)) \
	X(ibv_get_async_event, int, (struct ibv_context *, struct ibv_async_event *)) \
	X(ibv_ack_async_event, void, (struct ibv_async_event *)) \
	X(ibv_query_device, int, (struct ibv_context *, struct ibv_device_attr *)) \
	X(ibv_query_port, int, (struct ibv_context *, uint8_t, void *)) \
	X(ibv_query_gid, int, (struct ibv_context *, uint8_t, int, union ibv_gid *)) \
	X(ibv_query_pkey, int, (struct ibv_context *, uint8_t, int, __be16 *)) \
	X(ibv_alloc_pd, struct ibv_pd *, (struct ibv_context *)) \
	X(ibv_dealloc_pd, int, (struct ibv_pd *)) \
	X(ibv_reg_mr, struct ibv_mr *, (struct ibv_pd *, void *, size_t, int)) \
	X(ibv_dereg_mr, int, (struct ibv_mr *)) \
	X(ibv_create_comp_channel, struct ibv_comp_channel *, (struct ibv_context *)) \
	X(ibv_destroy_comp_channel, int, (struct ibv_comp_channel *)) \
	X(ibv_create_cq, struct ibv_cq *, (struct ibv_context *, int, void *, struct ibv_comp_channel *, int)) \
	X(ibv_destroy_cq, int, (struct ibv_cq *)) \
	X(ibv_get_cq_event, int, (struct ibv_comp_channel *, struct ibv_cq **, void **)) \
	X(ibv_ack_cq_events, void, (struct ibv_cq *, unsigned int)) \
	X(ibv_create_qp, struct ibv_qp *, (struct ibv_pd *, struct ibv_qp_init_attr *)) \
	X(ibv_modify_qp, int, (struct ibv_qp *, struct ibv_qp_attr *, int)) \
	X(ibv_query_qp, int, (struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *)) \
	X(ibv_destroy_qp, int, (struct ibv_qp *))

#define KVD_RDMACM_FUNCS(X) \
	X(rdma_create_event_channel, struct rdma_event_channel *, (void)) \
	X(rdma_destroy_event_channel, void, (struct rdma_event_channel *)) \
	X(rdma_create_id, int, (struct rdma_event_channel *, struct rdma_cm_id **, void *, enum rdma_port_space)) \
	X(rdma_destroy_id, int, (struct rdma_cm_id *)) \
	X(rdma_bind_addr, int, (struct rdma_cm_id *, struct sockaddr *)) \
	X(rdma_listen, int, (struct rdma_cm_id *, int)) \
	X(rdma_resolve_addr, int, (struct rdma_cm_id *, struct sockaddr *, struct sockaddr *, int)) \
	X(rdma_resolve_route, int, (struct rdma_cm_id *, int)) \
	X(rdma_create_qp, int, (struct rdma_cm_id *, struct ibv_pd *, struct ibv_qp_init_attr *)) \
	X(rdma_destroy_qp, void, (struct rdma_cm_id *)) \
	X(rdma_connect, int, (struct rdma_cm_id *, struct rdma_conn_param *)) \
	X(rdma_accept, int, (struct rdma_cm_id *, struct rdma_conn_param *)) \
	X(rdma_reject, int, (struct rdma_cm_id *, const void *, uint8_t)) \
	X(rdma_disconnect, int, (struct rdma_cm_id *)) \
	X(rdma_get_cm_event, int, (struct rdma_event_channel *, struct rdma_cm_event **)) \
	X(rdma_ack_cm_event, int, (struct rdma_cm_event *))

#define KVD_FIELD(name, result, params) result (*name) params;
struct kvd_funcs {
	KVD_VERBS_FUNCS(KVD_FIELD)
	KVD_RDMACM_FUNCS(KVD_FIELD)
	// Since rdma-core 32; NULL where the library is older.
	int (*_ibv_query_gid_ex)(struct ibv_context *, uint32_t, uint32_t, struct kvd_gid_entry *, uint32_t, size_t);
};

extern struct kvd_funcs kvd_f;

// kvd_errno makes a positive errno of what providers return: an errno, its negative, or
// -1 with errno set.
static inline int kvd_errno(int ret)
{
	if (ret == 0)
		return 0;
	if (ret == -1)
		return errno > 0 ? errno : EIO;
	return ret < 0 ? -ret : ret;
}

// kvd_failed is errno after a call that returned NULL.
static inline int kvd_failed(void) { return errno > 0 ? errno : EIO; }

#endif
#endif
