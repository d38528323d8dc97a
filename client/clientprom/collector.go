package clientprom

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-io/kvd/client"
)

var (
	gets          = desc("gets_total", "Gets that were answered, also by not found, by what answered and by level.", "transport", "level")
	reads         = desc("reads_total", "One-sided READs posted, by what they read: object, bucket (of the index) or record (of control).", "kind")
	queries       = desc("queries_total", "Look-ups that a node ran in one round trip (tcp only).")
	confirmations = desc("confirmations_total", "Proofs that a shard's leader still led; each serves one get or more.")
	confirmed     = desc("confirmed_total", "Gets and absences that relied on a confirmation.")
	retries       = desc("retries_total", "One-sided attempts that were repeated, by reason.", "reason")
	fallbacks     = desc("fallbacks_total", "Gets answered over gRPC, by reason.", "reason")
	pathFallbacks = desc("transport_fallbacks_total", "Nodes that had to be read in a lesser way than by a transport that they serve, by that transport and by reason.", "transport", "reason")
	hedges        = desc("hedges_total", "Voters asked because another was slow.")
	cacheHits     = desc("cache_hits_total", "Gets whose key's place was remembered.")
	cacheMisses   = desc("cache_misses_total", "Gets whose key had to be looked up.")
	writes        = desc("writes_total", "Writes acknowledged.")
	writeRetries  = desc("write_retries_total", "Writes sent again.")
	unknown       = desc("unknown_outcomes_total", "Writes of which it could not be learnt whether they were applied.")
	topologies    = desc("topologies_total", "Times that a node told of leaders, replicas or members that changed.")
	peer          = desc("peer_transport", "How a node is read: 1 for its transport.", "node", "address", "transport")
	connected     = desc("peer_connected", "1 while there is a session with the node.", "node")
	sessions      = desc("peer_sessions_total", "Sessions opened with the node.", "node")
	connections   = desc("peer_connections_total", "One-sided connections to the node that came into use.", "node")

	all = []*prometheus.Desc{
		gets, reads, queries, confirmations, confirmed, retries, fallbacks, pathFallbacks, hedges, cacheHits, cacheMisses,
		writes, writeRetries, unknown, topologies, peer, connected, sessions, connections,
	}
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvd_client_"+name, help, labels, nil)
}

// Collector exports c's Stats, read anew at each gathering. It may be gathered from
// several goroutines, and after c was closed: the counts stay.
func Collector(c *client.Client) prometheus.Collector { return collector{c.Stats} }

type collector struct {
	stats func() client.Stats
}

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range all {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	s := c.stats()
	count := func(d *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	for _, g := range s.Gets {
		count(gets, g.Count, g.Via, g.Level.String())
	}
	count(reads, s.ObjectReads, "object")
	count(reads, s.BucketReads, "bucket")
	count(reads, s.RecordReads, "record")
	for reason, n := range s.Retries {
		count(retries, n, reason)
	}
	for reason, n := range s.Fallbacks {
		count(fallbacks, n, reason)
	}
	for _, f := range s.TransportFallbacks {
		count(pathFallbacks, f.Count, f.Transport, f.Reason)
	}
	for d, n := range map[*prometheus.Desc]uint64{
		queries: s.Queries, confirmations: s.Confirmations, confirmed: s.Confirmed, hedges: s.Hedges,
		cacheHits: s.CacheHits, cacheMisses: s.CacheMisses,
		writes: s.Writes, writeRetries: s.WriteRetries, unknown: s.UnknownOutcomes, topologies: s.Topologies,
	} {
		count(d, n)
	}
	for _, p := range s.Peers {
		node, is := strconv.FormatUint(p.NodeID, 10), 0.0
		if p.Connected {
			is = 1
		}
		ch <- prometheus.MustNewConstMetric(connected, prometheus.GaugeValue, is, node)
		count(sessions, p.Sessions, node)
		count(connections, p.Connections, node)
		if p.Transport != "" { // else it was never reached
			ch <- prometheus.MustNewConstMetric(peer, prometheus.GaugeValue, 1, node, p.Address, p.Transport)
		}
	}
}
