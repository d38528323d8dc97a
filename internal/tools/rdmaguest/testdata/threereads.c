/*
 * threereads DEVICE GID-A GID-B BYTES COUNT: the READs of a confirmed get, posted by a
 * program that does nothing else. Node A (the leader) is read by one queue pair: the
 * object and a control record of 64 bytes, chained in one post. Node B (another voter) by
 * a second one: its record. Both posts go out together, and the get ends when both are
 * complete. Prints one line of JSON with times in microseconds; "single" is one READ of
 * the object.
 *
 * Both ends of each queue pair are in this process: READs are answered by the device.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { RECORD = 64 };

static void die(const char *what)
{
	fprintf(stderr, "threereads: %s: %s\n", what, strerror(errno));
	exit(1);
}

static double now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

struct node {
	struct ibv_qp *client, *server;
	struct ibv_cq *cq; /* of the client */
	struct ibv_mr *memory, *sink;
};

static struct ibv_context *ctx;
static struct ibv_port_attr port;

static struct ibv_qp *make_qp(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 16, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	if (!qp)
		die("create queue pair");
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_READ };
	if ((errno = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)))
		die("queue pair to INIT");
	return qp;
}

static void connect_qp(struct ibv_qp *qp, uint32_t peer, int own_gid, int peer_gid)
{
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_RTR, .path_mtu = port.active_mtu, .dest_qp_num = peer, .rq_psn = 100,
		.max_dest_rd_atomic = 16, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = own_gid, .hop_limit = 64 } },
	};
	if (ibv_query_gid(ctx, 1, peer_gid, &a.ah_attr.grh.dgid))
		die("query GID");
	if ((errno = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)))
		die("queue pair to RTR");
	struct ibv_qp_attr s = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 6, .rnr_retry = 6, .sq_psn = 100, .max_rd_atomic = 16 };
	if ((errno = ibv_modify_qp(qp, &s, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)))
		die("queue pair to RTS");
}

static struct ibv_mr *region(struct ibv_pd *pd, size_t size, int access, int fill)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		die("mmap");
	memset(p, fill, size);
	struct ibv_mr *mr = ibv_reg_mr(pd, p, size, access);
	if (!mr)
		die("register memory");
	return mr;
}

static struct node make_node(size_t size, int client_gid, int server_gid, int fill)
{
	struct node n;
	struct ibv_pd *pd = ibv_alloc_pd(ctx), *own = ibv_alloc_pd(ctx);
	struct ibv_cq *unused = ibv_create_cq(ctx, 16, NULL, NULL, 0);
	n.cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	if (!pd || !own || !unused || !n.cq)
		die("create protection domains and completion queues");
	n.server = make_qp(pd, unused);
	n.client = make_qp(own, n.cq);
	n.memory = region(pd, size, IBV_ACCESS_REMOTE_READ, fill);
	n.sink = region(own, size, IBV_ACCESS_LOCAL_WRITE, 0);
	connect_qp(n.server, n.client->qp_num, server_gid, client_gid);
	connect_qp(n.client, n.server->qp_num, client_gid, server_gid);
	return n;
}

static void post(struct node *n, size_t object, int record)
{
	struct ibv_sge sge[2];
	struct ibv_send_wr wr[2], *bad;
	int count = 0;
	memset(wr, 0, sizeof wr);
	for (int part = 0; part < 2; part++) {
		size_t at = part ? object : 0, length = part ? (record ? RECORD : 0) : object;
		if (!length)
			continue;
		sge[count] = (struct ibv_sge){ (uintptr_t)n->sink->addr + at, (uint32_t)length, n->sink->lkey };
		wr[count] = (struct ibv_send_wr){ .sg_list = &sge[count], .num_sge = 1, .opcode = IBV_WR_RDMA_READ };
		wr[count].wr.rdma.remote_addr = (uintptr_t)n->memory->addr + at;
		wr[count].wr.rdma.rkey = n->memory->rkey;
		if (count)
			wr[count - 1].next = &wr[count];
		count++;
	}
	wr[count - 1].send_flags = IBV_SEND_SIGNALED;
	if ((errno = ibv_post_send(n->client, wr, &bad)))
		die("post");
}

static void wait_for(struct node *n)
{
	struct ibv_wc wc;
	int got;
	while ((got = ibv_poll_cq(n->cq, 1, &wc)) == 0)
		;
	if (got < 0)
		die("poll");
	if (wc.status != IBV_WC_SUCCESS) {
		fprintf(stderr, "threereads: READ: %s\n", ibv_wc_status_str(wc.status));
		exit(1);
	}
}

int main(int argc, char **argv)
{
	if (argc != 6) {
		fprintf(stderr, "usage: threereads DEVICE GID-INDEX-A GID-INDEX-B BYTES COUNT\n");
		return 2;
	}
	int n_devices, gid_a = atoi(argv[2]), gid_b = atoi(argv[3]), count = atoi(argv[5]);
	size_t bytes = strtoul(argv[4], NULL, 10);
	if (bytes < 1 || bytes > 64 << 20 || count < 1) {
		fprintf(stderr, "threereads: want BYTES of 1 to 64 MiB and COUNT of at least 1\n");
		return 2;
	}
	struct ibv_device **list = ibv_get_device_list(&n_devices);
	for (int i = 0; list && i < n_devices; i++)
		if (!strcmp(ibv_get_device_name(list[i]), argv[1]))
			ctx = ibv_open_device(list[i]);
	if (!ctx) {
		fprintf(stderr, "threereads: no device %s among %d\n", argv[1], n_devices);
		return 1;
	}
	if ((errno = ibv_query_port(ctx, 1, &port)))
		die("query port 1");

	struct node a = make_node(bytes + RECORD, gid_b, gid_a, 'a'), b = make_node(RECORD, gid_a, gid_b, 'b');
	double *single = calloc(count, sizeof *single), *three = calloc(count, sizeof *three);
	if (!single || !three)
		die("memory");
	for (int i = -count / 10; i < count; i++) {
		double began = now_us();
		post(&a, bytes, 0);
		wait_for(&a);
		double between = now_us();
		post(&a, bytes, 1);
		post(&b, 0, 1);
		wait_for(&a);
		wait_for(&b);
		double ended = now_us();
		if (i >= 0) {
			single[i] = between - began;
			three[i] = ended - between;
		}
	}
	if (memcmp(a.sink->addr, a.memory->addr, bytes + RECORD) || memcmp(b.sink->addr, b.memory->addr, RECORD)) {
		fprintf(stderr, "threereads: what was read differs from what is there\n");
		return 1;
	}
	qsort(single, count, sizeof *single, by_value);
	qsort(three, count, sizeof *three, by_value);
	printf("{\"bytes\":%zu,\"count\":%d,\"single_p50\":%.2f,\"single_p99\":%.2f,\"three_p50\":%.2f,\"three_p99\":%.2f}\n",
	       bytes, count, single[count / 2], single[count - 1 - count / 100], three[count / 2], three[count - 1 - count / 100]);
	return 0;
}
