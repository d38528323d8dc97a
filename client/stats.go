package client

// Stats are counts since Dial. A READ is counted when it is posted; a query (a
// look-up run by the target in one round trip, tcp only) counts apart.
type Stats struct {
	// Gets that were answered (also by ErrNotFound), by level and by what answered.
	Gets []GetCount

	ObjectReads uint64 // READs of objects
	BucketReads uint64 // READs of index buckets
	RecordReads uint64 // READs of control records: one may cover many shards
	Queries     uint64

	Confirmations uint64 // proofs that a route was current; each serves one get or more
	Confirmed     uint64 // gets and absences that relied on one

	CacheHits   uint64 // location remembered
	CacheMisses uint64

	BufferDirect uint64 // values that a READ put where they were wanted, in a Buffer
	BufferCopied uint64 // values for a Buffer that were copied there, or to memory of their own

	Hedges    uint64            // voters asked because another was slow
	Retries   map[string]uint64 // one-sided attempts that were repeated, by reason
	Fallbacks map[string]uint64 // gets answered over gRPC, by reason

	// TransportFallbacks count how often a node was to be read in a lesser way than by a
	// transport that it serves, or that was asked for by name, by that transport and why.
	TransportFallbacks []TransportFallback

	Writes          uint64 // writes acknowledged
	WriteRetries    uint64 // writes sent again
	UnknownOutcomes uint64 // ErrOutcomeUnknown returned

	Topologies uint64 // times that a node told of leaders, replicas or members that changed

	Peers []PeerStats
}

// GetCount counts gets of one level that one way of reading answered.
type GetCount struct {
	Level Level
	Via   string // provider's name, or "grpc"
	Count uint64
}

// TransportFallback counts the falls from one transport for one reason.
type TransportFallback struct {
	Transport string // that could not be used
	// Reason is one of not_served, unsupported, plaintext, denied, exhausted, revoked,
	// connection_lost, stalled, handshake, timeout, failed.
	Reason string
	Count  uint64
}

// PeerStats is how one node is read.
type PeerStats struct {
	NodeID      uint64
	Address     string
	Transport   string // provider's name, or "grpc"
	Reason      string // why that one
	Connected   bool
	Sessions    uint64 // gRPC sessions opened so far
	Connections uint64 // one-sided connections that were used so far
}

// TotalGets over all levels and ways.
func (s Stats) TotalGets() uint64 {
	var n uint64
	for _, g := range s.Gets {
		n += g.Count
	}
	return n
}

// TotalReads is how many one-sided READs were posted.
func (s Stats) TotalReads() uint64 { return s.ObjectReads + s.BucketReads + s.RecordReads }

// Sub is what was added since an earlier Stats of the same Client. Peers are those
// of s.
func (s Stats) Sub(earlier Stats) Stats {
	before := make(map[GetCount]uint64, len(earlier.Gets))
	for _, g := range earlier.Gets {
		before[GetCount{Level: g.Level, Via: g.Via}] = g.Count
	}
	d := s
	d.Gets = nil
	for _, g := range s.Gets {
		if n := g.Count - before[GetCount{Level: g.Level, Via: g.Via}]; n > 0 {
			d.Gets = append(d.Gets, GetCount{Level: g.Level, Via: g.Via, Count: n})
		}
	}
	d.ObjectReads -= earlier.ObjectReads
	d.BucketReads -= earlier.BucketReads
	d.RecordReads -= earlier.RecordReads
	d.Queries -= earlier.Queries
	d.Confirmations -= earlier.Confirmations
	d.Confirmed -= earlier.Confirmed
	d.CacheHits -= earlier.CacheHits
	d.CacheMisses -= earlier.CacheMisses
	d.BufferDirect -= earlier.BufferDirect
	d.BufferCopied -= earlier.BufferCopied
	d.Hedges -= earlier.Hedges
	d.Writes -= earlier.Writes
	d.WriteRetries -= earlier.WriteRetries
	d.UnknownOutcomes -= earlier.UnknownOutcomes
	d.Topologies -= earlier.Topologies
	d.TransportFallbacks = nil
	for _, f := range s.TransportFallbacks {
		for _, o := range earlier.TransportFallbacks {
			if o.Transport == f.Transport && o.Reason == f.Reason {
				f.Count -= o.Count
			}
		}
		if f.Count > 0 {
			d.TransportFallbacks = append(d.TransportFallbacks, f)
		}
	}
	d.Retries = subCounts(s.Retries, earlier.Retries)
	d.Fallbacks = subCounts(s.Fallbacks, earlier.Fallbacks)
	return d
}

func subCounts(a, b map[string]uint64) map[string]uint64 {
	d := make(map[string]uint64, len(a))
	for k, n := range a {
		if n -= b[k]; n > 0 {
			d[k] = n
		}
	}
	return d
}
