// The boundary between Go and the libraries: plain numbers and structs of fixed layout,
// so that Go needs no header of the libraries. Handles are pointers as integers. Calls
// return 0 or a positive errno. The structs have twins in Go, which a test compares.
#ifndef KVD_IBV_SHIM_H
#define KVD_IBV_SHIM_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
	int32_t found;
	char path[1024];
	char err[1280];
} kvd_library;

typedef struct {
	int32_t built; // with the headers
	kvd_library verbs, rdmacm;
} kvd_status;

typedef struct {
	char name[64];
	uint64_t guid;
	int32_t node_type, transport;
} kvd_device;

typedef struct {
	char fw_ver[64];
	uint64_t node_guid, max_mr_size, page_size_cap;
	uint32_t vendor_id, vendor_part_id, hw_ver, cap_flags;
	int32_t ports, max_qp, max_qp_wr, max_sge, max_cq, max_cqe, max_mr, max_pd, max_mw;
	int32_t max_qp_rd_atom, max_qp_init_rd_atom, max_res_rd_atom, max_pkeys, atomic_cap, ack_delay;
	int32_t odp, odp_read_rc;
} kvd_device_attr;

typedef struct {
	uint32_t max_msg_sz, active_speed;
	int32_t gid_tbl_len;
	uint16_t pkey_tbl_len, lid, sm_lid;
	uint8_t state, max_mtu, active_mtu, lmc, sm_sl, active_width, phys_state, link_layer, flags, pad;
} kvd_port;

typedef struct {
	uint8_t gid[16];
	uint32_t type, ifindex;
} kvd_gid;

typedef struct {
	int32_t type, port;
	uint32_t qpn;
} kvd_async;

typedef struct {
	uint8_t dgid[16];
	uint32_t dest_qpn, rq_psn, sq_psn, access, flow_label;
	uint16_t dlid, pkey_index;
	uint8_t state, port, path_mtu, max_rd, max_dest_rd, min_rnr, timeout, retry, rnr_retry;
	uint8_t sl, src_path_bits, static_rate, is_global, sgid_index, hop_limit, traffic_class;
} kvd_qp_attr;

typedef struct {
	uint64_t id, local_addr, remote_addr;
	uint32_t length, lkey, rkey, flags;
} kvd_read;

typedef struct {
	uint64_t id;
	uint32_t status, vendor_err, byte_len, opcode, qpn, imm;
} kvd_wc;

typedef struct {
	int32_t posted; // requests that went onto the queue
	int32_t n;      // completions, or a negative errno of the poll
	int32_t err;    // errno of the post
} kvd_drive;

typedef struct {
	uint64_t id, listen;
	int32_t type, status;
	uint8_t responder_resources, initiator_depth, private_len, pad[5];
	uint8_t private_data[256];
} kvd_cm_event;

typedef struct {
	uint32_t qpn; // of a queue pair that the id does not know
	uint8_t responder_resources, initiator_depth, retry, rnr_retry, private_len, pad[3];
	uint8_t private_data[56];
} kvd_cm_params;

typedef struct {
	uint8_t addr[16];
	uint32_t scope;
	uint16_t port;
	uint8_t family; // 4, 6, or 0 for none
	uint8_t pad;
} kvd_addr;

void kvd_load(kvd_status *out); // call once, before anything else

int kvd_devices(kvd_device *out, int max, int *n); // *n may exceed max
int kvd_open(const char *name, uintptr_t *ctx, int *async_fd);
int kvd_close(uintptr_t ctx);
int kvd_query_device(uintptr_t ctx, kvd_device_attr *out);
int kvd_query_port(uintptr_t ctx, int port, kvd_port *out);
int kvd_query_gid(uintptr_t ctx, int port, int index, kvd_gid *out); // type 3: not known
int kvd_query_pkey(uintptr_t ctx, int port, int index, uint16_t *out);
int kvd_get_async(uintptr_t ctx, kvd_async *out); // EAGAIN: none

int kvd_alloc_pd(uintptr_t ctx, uintptr_t *pd);
int kvd_dealloc_pd(uintptr_t pd);
int kvd_reg_mr(uintptr_t pd, uintptr_t addr, uint64_t length, uint32_t access, uintptr_t *mr, uint32_t *lkey, uint32_t *rkey);
int kvd_dereg_mr(uintptr_t mr);
int kvd_create_cq(uintptr_t ctx, int depth, int with_channel, int vector, uintptr_t *cq, uintptr_t *channel, int *fd, int *got);
int kvd_destroy_cq(uintptr_t cq, uintptr_t channel);
int kvd_arm(uintptr_t cq);
int kvd_get_cq_event(uintptr_t channel); // EAGAIN: none

int kvd_create_qp(uintptr_t cm_id, uintptr_t pd, uintptr_t scq, uintptr_t rcq, int send_wr, int recv_wr, uintptr_t *qp, uint32_t *num, int *got);
int kvd_destroy_qp(uintptr_t cm_id, uintptr_t qp);
int kvd_modify_qp(uintptr_t qp, const kvd_qp_attr *a);
int kvd_query_qp(uintptr_t qp, kvd_qp_attr *out);

kvd_drive kvd_post_and_poll(uintptr_t qp, uintptr_t cq, const kvd_read *reads, int count, kvd_wc *out, int max, int64_t spin_ns);
int kvd_poll(uintptr_t cq, kvd_wc *out, int max, int64_t spin_ns); // completions, or a negative errno

int kvd_cm_create_channel(uintptr_t *channel, int *fd);
void kvd_cm_destroy_channel(uintptr_t channel);
int kvd_cm_get_event(uintptr_t channel, kvd_cm_event *out); // EAGAIN: none
int kvd_cm_create_id(uintptr_t channel, uintptr_t *id);
int kvd_cm_destroy_id(uintptr_t id);
int kvd_cm_bind(uintptr_t id, const kvd_addr *addr);
int kvd_cm_listen(uintptr_t id, int backlog);
void kvd_cm_addr(uintptr_t id, int remote, kvd_addr *out);
const char *kvd_cm_device(uintptr_t id, int *port); // NULL: bound to none
uintptr_t kvd_cm_context(uintptr_t id);
int kvd_cm_resolve_addr(uintptr_t id, const kvd_addr *src, const kvd_addr *dst, int timeout_ms);
int kvd_cm_resolve_route(uintptr_t id, int timeout_ms);
int kvd_cm_connect(uintptr_t id, const kvd_cm_params *p);
int kvd_cm_accept(uintptr_t id, const kvd_cm_params *p);
int kvd_cm_reject(uintptr_t id, const void *data, int len);
int kvd_cm_disconnect(uintptr_t id);

#endif
