package server

import (
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/rdma/verbs"
)

// metrics of one node, in a registry of its own.
type metrics struct {
	registry    *prometheus.Registry
	gets        *prometheus.CounterVec
	fallbacks   *fallbackCounts
	rpc         *prometheus.CounterVec
	rpcSeconds  *prometheus.HistogramVec
	logSync     prometheus.Histogram
	raftDropped prometheus.Counter
	snapshots   *prometheus.CounterVec
	elections   prometheus.Counter

	snapshotBytesSent, snapshotBytesReceived, snapshotsResumed, snapshotThrottled prometheus.Counter

	registering *prometheus.HistogramVec
	refused     *prometheus.CounterVec
	refusals    *prometheus.CounterVec
}

func newMetrics() *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		gets: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvd_gets_total", Help: "Gets that this node's CPU answered, by transport and level. One-sided gets do not show here: clients count them.",
		}, []string{"transport", "level"}),
		fallbacks: newFallbackCounts(),
		rpc: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvd_rpc_total", Help: "gRPC calls by method and code.",
		}, []string{"method", "code"}),
		rpcSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kvd_rpc_seconds", Help: "Duration of gRPC calls by method.",
			Buckets: prometheus.ExponentialBuckets(50e-6, 2, 18),
		}, []string{"method"}),
		logSync: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvd_log_sync_seconds", Help: "Duration of one synced write of the Raft log, all ready groups together.",
			Buckets: prometheus.ExponentialBuckets(20e-6, 2, 18),
		}),
		raftDropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvd_raft_messages_dropped_total", Help: "Raft messages that found their peer's queue full.",
		}),
		snapshots: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvd_snapshots_sent_total", Help: "Raft snapshots sent to followers, by outcome.",
		}, []string{"outcome"}),
		snapshotBytesSent: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvd_snapshot_sent_bytes_total", Help: "Bytes of keys and values in the Raft snapshots that this node sent.",
		}),
		snapshotBytesReceived: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvd_snapshot_received_bytes_total", Help: "Bytes of keys and values in the Raft snapshots that this node received.",
		}),
		snapshotsResumed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvd_snapshots_resumed_total", Help: "Raft snapshots sent whose stream had broken, and which went on where the follower was.",
		}),
		snapshotThrottled: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvd_snapshot_throttled_seconds_total", Help: "Time that sending Raft snapshots waited for --snapshot-rate.",
		}),
		elections: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvd_leader_changes_total", Help: "Changes of leader that this node saw in its groups.",
		}),
		registering: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kvd_transport_registration_seconds", Help: "Duration of registering one chunk or the control table, on all devices of the transport.",
			Buckets: prometheus.ExponentialBuckets(10e-6, 4, 12),
		}, []string{"transport"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvd_transport_registrations_refused_total", Help: "Registrations that the device or a limit of the system refused, by transport.",
		}, []string{"transport"}),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvd_refused_calls_total", Help: "Calls refused for want of a valid token (unauthenticated) or of a right (denied).",
		}, []string{"reason"}),
	}
	m.registry.MustRegister(m.gets, m.fallbacks.counts, m.rpc, m.rpcSeconds, m.logSync, m.raftDropped, m.snapshots, m.snapshotBytesSent, m.snapshotBytesReceived, m.snapshotsResumed, m.snapshotThrottled, m.elections, m.registering, m.refused, m.refusals,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

const (
	// maxFallbackReasons bounds the series that clients can make a node keep.
	maxFallbackReasons = 64
	maxFallbackLength  = 32
	otherFallback      = "other"
)

// fallbackCounts are gets answered over gRPC by the client's word for why it asked.
type fallbackCounts struct {
	counts *prometheus.CounterVec
	mu     struct {
		sync.Mutex
		known map[string]prometheus.Counter
	}
}

func newFallbackCounts() *fallbackCounts {
	f := &fallbackCounts{counts: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "kvd_fallback_gets_total", Help: "Gets answered over gRPC, by the client's reason for not reading by itself.",
	}, []string{"reason"})}
	f.mu.known = map[string]prometheus.Counter{otherFallback: f.counts.WithLabelValues(otherFallback)}
	return f
}

// add counts one get. What is no reason's name, or one too many, is counted as other.
func (f *fallbackCounts) add(reason string) {
	if reason == "" {
		return // the client says nothing, as older ones do
	}
	if !isFallback(reason) {
		reason = otherFallback
	}
	f.counter(reason).Inc()
}

func (f *fallbackCounts) counter(reason string) prometheus.Counter {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.mu.known[reason]
	if c != nil {
		return c
	}
	if len(f.mu.known) >= maxFallbackReasons {
		return f.mu.known[otherFallback]
	}
	c = f.counts.WithLabelValues(reason)
	f.mu.known[reason] = c
	return c
}

func isFallback(s string) bool {
	for _, b := range []byte(s) {
		if b != '_' && (b < 'a' || b > 'z') {
			return false
		}
	}
	return len(s) <= maxFallbackLength
}

func (m *metrics) onSync(took time.Duration) { m.logSync.Observe(took.Seconds()) }

func (m *metrics) snapshotSent(err error) {
	outcome := "ok"
	if err != nil {
		outcome = "failed"
	}
	m.snapshots.WithLabelValues(outcome).Inc()
}

func (m *metrics) registered(transport string, took time.Duration, err error) {
	m.registering.WithLabelValues(transport).Observe(took.Seconds())
	if err != nil {
		m.refused.WithLabelValues(transport).Inc()
	}
}

// MetricsHandler serves the node's metrics in the Prometheus text format.
func (n *Node) MetricsHandler() http.Handler {
	return promhttp.HandlerFor(n.metrics.registry, promhttp.HandlerOpts{})
}

// nodeCollector reads what the node's parts count themselves, when asked.
type nodeCollector struct {
	node *Node

	term, leader, applied, commit, keys          *prometheus.Desc
	arenaLimit, arenaRegistered, arenaUsed       *prometheus.Desc
	arenaObjects, arenaEvictions, arenaNoRoom    *prometheus.Desc
	sessions, connections, reads, queries, bytes *prometheus.Desc
	regions                                      *prometheus.Desc
	railPairs, evicted                           *prometheus.Desc
	readOnly                                     *prometheus.Desc
	logBytes, stateBytes                         *prometheus.Desc
	groups, messages, heartbeats                 *prometheus.Desc
}

func newNodeCollector(n *Node) *nodeCollector {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return &nodeCollector{
		node:    n,
		term:    d("kvd_shard_term", "Raft term of the shard's replica here.", "shard"),
		leader:  d("kvd_shard_leader", "1 where this node leads the shard.", "shard"),
		applied: d("kvd_shard_applied_index", "Raft index applied here.", "shard"),
		commit:  d("kvd_shard_commit_index", "Raft index known to be committed here.", "shard"),
		keys:    d("kvd_shard_keys", "Keys of the shard, resident or not.", "shard"),

		arenaLimit:      d("kvd_arena_limit_bytes", "Cap of registered memory."),
		arenaRegistered: d("kvd_arena_registered_bytes", "Bytes of all chunks."),
		arenaUsed:       d("kvd_arena_used_bytes", "Bytes of slabs and tables that hold something."),
		arenaObjects:    d("kvd_arena_objects", "Objects in memory."),
		arenaEvictions:  d("kvd_arena_evictions_total", "Objects evicted for others."),
		arenaNoRoom:     d("kvd_arena_no_room_total", "Values that found no room in memory."),

		sessions:    d("kvd_sessions", "Open client sessions."),
		connections: d("kvd_transport_connections", "Open connections, by transport.", "transport"),
		reads:       d("kvd_transport_reads_total", "READs that this node's CPU answered, by transport (0 for shm).", "transport"),
		queries:     d("kvd_transport_queries_total", "Look-ups that this node's CPU answered, by transport.", "transport"),
		bytes:       d("kvd_transport_bytes_total", "Bytes sent in answer to READs and look-ups, by transport.", "transport"),
		regions:     d("kvd_transport_regions", "Regions (control table and chunks of the namespaces that are read) by transport and state: registered, pending or refused.", "transport", "state"),
		railPairs:   d("kvd_rail_queue_pairs", "Active queue pairs, by device and port.", "device", "port"),
		evicted:     d("kvd_transport_evicted_total", "Connections closed to keep the budget of queue pairs.", "transport"),
		readOnly:    d("kvd_read_only", "1 while writes are refused for lack of disk."),
		logBytes:    d("kvd_log_bytes", "Bytes of the Raft log on disk."),
		stateBytes:  d("kvd_state_bytes", "Bytes of the applied state on disk."),
		groups:      d("kvd_raft_groups", "Raft groups with a replica on this node, by state: active, or quiesced, which have nothing to do and no heartbeats of their own.", "state"),
		messages:    d("kvd_raft_messages_total", "Raft messages sent to other nodes."),
		heartbeats:  d("kvd_node_heartbeats_total", "Heartbeats sent to other nodes, each for all groups."),
	}
}

// Describe implements prometheus.Collector.
func (c *nodeCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.term, c.leader, c.applied, c.commit, c.keys, c.arenaLimit, c.arenaRegistered, c.arenaUsed, c.arenaObjects,
		c.arenaEvictions, c.arenaNoRoom, c.sessions, c.connections, c.reads, c.queries, c.bytes, c.regions, c.railPairs, c.evicted, c.readOnly, c.logBytes, c.stateBytes,
		c.groups, c.messages, c.heartbeats,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *nodeCollector) Collect(ch chan<- prometheus.Metric) {
	n := c.node
	if !n.ready.Load() {
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
	flag := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	for _, sh := range n.localShards() {
		number := sh.number
		label := strconv.FormatUint(uint64(number), 10)
		st := n.host.Group(raft.GroupID(number)).Status()
		gauge(c.term, float64(st.Term), label)
		gauge(c.leader, flag(st.Leading), label)
		gauge(c.applied, float64(st.Applied), label)
		gauge(c.commit, float64(st.Commit), label)
		if meta, err := sh.eng.Meta(); err == nil {
			gauge(c.keys, float64(meta.Keys), label)
		}
	}
	r := n.host.Stats()
	gauge(c.groups, float64(r.Groups-r.Quiesced), "active")
	gauge(c.groups, float64(r.Quiesced), "quiesced")
	count(c.messages, float64(r.MessagesOut))
	count(c.heartbeats, float64(r.NodeHeartbeatsOut))
	a := n.arena.Stats()
	gauge(c.arenaLimit, float64(n.cfg.ArenaBytes))
	gauge(c.arenaRegistered, float64(a.RegisteredBytes))
	gauge(c.arenaUsed, float64(a.UsedBytes))
	gauge(c.arenaObjects, float64(a.Objects))
	count(c.arenaEvictions, float64(a.Evictions))
	count(c.arenaNoRoom, float64(a.NonResident))
	gauge(c.sessions, float64(n.sessions.count()))
	for name, t := range n.export.stats() {
		gauge(c.connections, float64(t.Connections), name)
		count(c.reads, float64(t.Reads), name)
		count(c.queries, float64(t.Queries), name)
		count(c.bytes, float64(t.Bytes), name)
	}
	for name, r := range n.export.regionCounts() {
		gauge(c.regions, float64(r.registered), name, "registered")
		gauge(c.regions, float64(r.pending), name, "pending")
		gauge(c.regions, float64(r.refused), name, "refused")
	}
	c.collectRails(gauge, count)
	gauge(c.readOnly, flag(n.disk.refusal() != ""))
	em := n.engine.Metrics()
	gauge(c.logBytes, float64(em.LogBytes))
	gauge(c.stateBytes, float64(em.StateBytes))
}

// collectRails: a NIC serves READs without telling anybody, so a node can count the queue
// pairs of a rail and no more. What was read is counted by the clients.
func (c *nodeCollector) collectRails(gauge, count func(*prometheus.Desc, float64, ...string)) {
	for _, t := range c.node.export.targets {
		rails, ok := t.Target.(verbs.RailCounter)
		if !ok {
			continue
		}
		evicted := uint64(0)
		for _, r := range rails.RailStats() {
			gauge(c.railPairs, float64(r.QueuePairs), r.Device, strconv.Itoa(r.Port))
			evicted = r.Evicted // of all the target's devices together
		}
		count(c.evicted, float64(evicted), t.name)
	}
}
