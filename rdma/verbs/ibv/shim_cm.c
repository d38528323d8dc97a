// Connections by rdma_cm.
#include "shim.h"
#include "shim_lib.h"

#include <string.h>

#ifdef KVD_HAVE_VERBS

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

static struct rdma_cm_id *ID(uintptr_t id) { return (struct rdma_cm_id *)id; }

// failed makes an errno of the library's -1.
static int failed(int ret) { return ret ? kvd_errno(-1) : 0; }

int kvd_cm_create_channel(uintptr_t *channel, int *fd)
{
	errno = 0;
	struct rdma_event_channel *c = kvd_f.rdma_create_event_channel();
	if (!c)
		return kvd_failed();
	*channel = (uintptr_t)c;
	*fd = c->fd;
	return 0;
}

void kvd_cm_destroy_channel(uintptr_t channel)
{
	kvd_f.rdma_destroy_event_channel((struct rdma_event_channel *)channel);
}

int kvd_cm_get_event(uintptr_t channel, kvd_cm_event *out)
{
	struct rdma_cm_event *e;
	memset(out, 0, sizeof *out);
	errno = 0;
	if (kvd_f.rdma_get_cm_event((struct rdma_event_channel *)channel, &e))
		return kvd_failed();
	out->id = (uintptr_t)e->id;
	out->listen = (uintptr_t)e->listen_id;
	out->type = e->event;
	out->status = e->status;
	out->responder_resources = e->param.conn.responder_resources;
	out->initiator_depth = e->param.conn.initiator_depth;
	if (e->param.conn.private_data) {
		out->private_len = e->param.conn.private_data_len; // 8 bits: it fits
		memcpy(out->private_data, e->param.conn.private_data, out->private_len);
	}
	kvd_f.rdma_ack_cm_event(e);
	return 0;
}

int kvd_cm_create_id(uintptr_t channel, uintptr_t *id)
{
	struct rdma_cm_id *p = NULL;
	errno = 0;
	int err = failed(kvd_f.rdma_create_id((struct rdma_event_channel *)channel, &p, NULL, RDMA_PS_TCP));
	*id = (uintptr_t)p;
	return err;
}

int kvd_cm_destroy_id(uintptr_t id)
{
	errno = 0;
	return failed(kvd_f.rdma_destroy_id(ID(id)));
}

static struct sockaddr *to_sockaddr(const kvd_addr *a, struct sockaddr_storage *s)
{
	memset(s, 0, sizeof *s);
	if (a->family == 4) {
		struct sockaddr_in *in = (struct sockaddr_in *)s;
		in->sin_family = AF_INET;
		in->sin_port = htons(a->port);
		memcpy(&in->sin_addr, a->addr, 4);
	} else if (a->family == 6) {
		struct sockaddr_in6 *in = (struct sockaddr_in6 *)s;
		in->sin6_family = AF_INET6;
		in->sin6_port = htons(a->port);
		in->sin6_scope_id = a->scope;
		memcpy(&in->sin6_addr, a->addr, 16);
	} else {
		return NULL;
	}
	return (struct sockaddr *)s;
}

int kvd_cm_bind(uintptr_t id, const kvd_addr *addr)
{
	struct sockaddr_storage s;
	struct sockaddr *sa = to_sockaddr(addr, &s);
	if (!sa)
		return EAFNOSUPPORT;
	errno = 0;
	return failed(kvd_f.rdma_bind_addr(ID(id), sa));
}

int kvd_cm_listen(uintptr_t id, int backlog)
{
	errno = 0;
	return failed(kvd_f.rdma_listen(ID(id), backlog));
}

void kvd_cm_addr(uintptr_t id, int remote, kvd_addr *out)
{
	struct sockaddr *sa = remote ? rdma_get_peer_addr(ID(id)) : rdma_get_local_addr(ID(id));
	memset(out, 0, sizeof *out);
	if (sa->sa_family == AF_INET) {
		struct sockaddr_in *in = (struct sockaddr_in *)sa;
		out->family = 4;
		out->port = ntohs(in->sin_port);
		memcpy(out->addr, &in->sin_addr, 4);
	} else if (sa->sa_family == AF_INET6) {
		struct sockaddr_in6 *in = (struct sockaddr_in6 *)sa;
		out->family = 6;
		out->port = ntohs(in->sin6_port);
		out->scope = in->sin6_scope_id;
		memcpy(out->addr, &in->sin6_addr, 16);
	}
}

const char *kvd_cm_device(uintptr_t id, int *port)
{
	*port = ID(id)->port_num;
	return ID(id)->verbs ? kvd_f.ibv_get_device_name(ID(id)->verbs->device) : NULL;
}

uintptr_t kvd_cm_context(uintptr_t id) { return (uintptr_t)ID(id)->verbs; }

int kvd_cm_resolve_addr(uintptr_t id, const kvd_addr *src, const kvd_addr *dst, int timeout_ms)
{
	struct sockaddr_storage from, to;
	struct sockaddr *sa = to_sockaddr(dst, &to);
	if (!sa)
		return EAFNOSUPPORT;
	errno = 0;
	return failed(kvd_f.rdma_resolve_addr(ID(id), to_sockaddr(src, &from), sa, timeout_ms));
}

int kvd_cm_resolve_route(uintptr_t id, int timeout_ms)
{
	errno = 0;
	return failed(kvd_f.rdma_resolve_route(ID(id), timeout_ms));
}

static void to_param(const kvd_cm_params *p, struct rdma_conn_param *c)
{
	memset(c, 0, sizeof *c);
	c->private_data = p->private_data;
	c->private_data_len = p->private_len;
	c->responder_resources = p->responder_resources;
	c->initiator_depth = p->initiator_depth;
	c->retry_count = p->retry;
	c->rnr_retry_count = p->rnr_retry;
	c->qp_num = p->qpn;
}

int kvd_cm_connect(uintptr_t id, const kvd_cm_params *p)
{
	struct rdma_conn_param c;
	to_param(p, &c);
	errno = 0;
	return failed(kvd_f.rdma_connect(ID(id), &c));
}

int kvd_cm_accept(uintptr_t id, const kvd_cm_params *p)
{
	struct rdma_conn_param c;
	to_param(p, &c);
	errno = 0;
	return failed(kvd_f.rdma_accept(ID(id), &c));
}

int kvd_cm_reject(uintptr_t id, const void *data, int len)
{
	errno = 0;
	return failed(kvd_f.rdma_reject(ID(id), data, len));
}

int kvd_cm_disconnect(uintptr_t id)
{
	errno = 0;
	return failed(kvd_f.rdma_disconnect(ID(id)));
}

#else

#define NONE { return 38; } // ENOSYS

int kvd_cm_create_channel(uintptr_t *channel, int *fd) NONE
void kvd_cm_destroy_channel(uintptr_t channel) {}
int kvd_cm_get_event(uintptr_t channel, kvd_cm_event *out) NONE
int kvd_cm_create_id(uintptr_t channel, uintptr_t *id) NONE
int kvd_cm_destroy_id(uintptr_t id) NONE
int kvd_cm_bind(uintptr_t id, const kvd_addr *addr) NONE
int kvd_cm_listen(uintptr_t id, int backlog) NONE
void kvd_cm_addr(uintptr_t id, int remote, kvd_addr *out) { memset(out, 0, sizeof *out); }
const char *kvd_cm_device(uintptr_t id, int *port) { *port = 0; return NULL; }
uintptr_t kvd_cm_context(uintptr_t id) { return 0; }
int kvd_cm_resolve_addr(uintptr_t id, const kvd_addr *src, const kvd_addr *dst, int timeout_ms) NONE
int kvd_cm_resolve_route(uintptr_t id, int timeout_ms) NONE
int kvd_cm_connect(uintptr_t id, const kvd_cm_params *p) NONE
int kvd_cm_accept(uintptr_t id, const kvd_cm_params *p) NONE
int kvd_cm_reject(uintptr_t id, const void *data, int len) NONE
int kvd_cm_disconnect(uintptr_t id) NONE

#endif
