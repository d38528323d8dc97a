package client

import "sync/atomic"

// reason says why an attempt was not good enough. Each is a word in Stats and in
// metrics.
type reason uint8

const (
	reasonNone       reason = iota
	reasonNoRoute           // no leader is known
	reasonTerm              // the leader no longer serves its term, or voters show a higher one
	reasonIdentity          // a record of another shard, replica or boot
	reasonConfig            // the configuration changed
	reasonLayout            // remembered addresses became invalid
	reasonVoters            // too few voters could be read
	reasonConn              // the connection was lost
	reasonSlow              // the node did not answer in time
	reasonTorn              // the bytes were being written, or are no object
	reasonPending           // the object is not shown yet
	reasonMoved             // the object is no longer the key's value
	reasonUnsound           // a bucket was being written
	reasonIncomplete        // the key may be in the engine only
	reasonRegion            // the memory is not known (yet)
	reasonNoTable           // the node named no index for the shard
	reasonBehind            // the replica has not applied enough
	reasonNoTransport
	reasonTwoSided   // the namespace is kept out of one-sided READs
	reasonForced     // Config.Transport is grpc
	reasonQuorumSize // the configuration has more voters than this client counts
	reasonTooLong    // the answer to a look-up did not fit
	reasonCount
)

var reasonNames = [reasonCount]string{
	reasonNone:        "none",
	reasonNoRoute:     "no_route",
	reasonTerm:        "term",
	reasonIdentity:    "identity",
	reasonConfig:      "config",
	reasonLayout:      "layout",
	reasonVoters:      "voters",
	reasonConn:        "connection",
	reasonSlow:        "slow",
	reasonTorn:        "torn",
	reasonPending:     "pending",
	reasonMoved:       "moved",
	reasonUnsound:     "unsound_bucket",
	reasonIncomplete:  "incomplete_bucket",
	reasonRegion:      "unknown_region",
	reasonNoTable:     "no_table",
	reasonBehind:      "behind",
	reasonNoTransport: "no_transport",
	reasonTwoSided:    "two_sided_namespace",
	reasonForced:      "configured",
	reasonQuorumSize:  "quorum_size",
	reasonTooLong:     "too_long",
}

func (r reason) String() string { return reasonNames[r] }

const (
	levelCount = int(Stale) + 1
	// maxVia bounds the ways of reading: gRPC and the configured providers.
	maxVia  = 8
	viaGRPC = 0
)

type counters struct {
	gets      [levelCount][maxVia]atomic.Uint64
	retries   [reasonCount]atomic.Uint64
	fallbacks [reasonCount]atomic.Uint64
	paths     [maxVia][pathReasonCount]atomic.Uint64 // by way of reading

	objectReads, bucketReads, recordReads, queries atomic.Uint64
	confirmations, confirmed                       atomic.Uint64
	cacheHits, cacheMisses                         atomic.Uint64
	hedges                                         atomic.Uint64
	bufferDirect, bufferCopied                     atomic.Uint64
	writes, writeRetries, unknownOutcomes          atomic.Uint64
	topologies                                     atomic.Uint64
}

// snapshot reads every counter. via names the ways of reading.
func (k *counters) snapshot(via []string) Stats {
	s := Stats{
		ObjectReads: k.objectReads.Load(), BucketReads: k.bucketReads.Load(),
		RecordReads: k.recordReads.Load(), Queries: k.queries.Load(),
		Confirmations: k.confirmations.Load(), Confirmed: k.confirmed.Load(),
		CacheHits: k.cacheHits.Load(), CacheMisses: k.cacheMisses.Load(),
		BufferDirect: k.bufferDirect.Load(), BufferCopied: k.bufferCopied.Load(),
		Hedges: k.hedges.Load(), Writes: k.writes.Load(),
		WriteRetries: k.writeRetries.Load(), UnknownOutcomes: k.unknownOutcomes.Load(), Topologies: k.topologies.Load(),
		Retries: byReason(&k.retries), Fallbacks: byReason(&k.fallbacks),
	}
	for l := Linearizable; l <= Stale; l++ {
		for i, name := range via {
			if n := k.gets[l][i].Load(); n > 0 {
				s.Gets = append(s.Gets, GetCount{Level: l, Via: name, Count: n})
			}
		}
	}
	for i, name := range via {
		for r := range pathReasonCount {
			if n := k.paths[i][r].Load(); n > 0 {
				s.TransportFallbacks = append(s.TransportFallbacks, TransportFallback{Transport: name, Reason: r.String(), Count: n})
			}
		}
	}
	return s
}

func byReason(counts *[reasonCount]atomic.Uint64) map[string]uint64 {
	m := make(map[string]uint64)
	for r := range counts {
		if n := counts[r].Load(); n > 0 {
			m[reason(r).String()] = n
		}
	}
	return m
}
