package ibv

import "sync/atomic"

// Counts of the objects that this process has open: for tests of leaks and for metrics.
type Counts struct {
	Contexts, PDs, CQs, MRs, QPs, CMChannels, CMIDs int64
}

var live struct {
	contexts, pds, cqs, mrs, qps, cmChannels, cmIDs atomic.Int64
}

// Live counts what is open now.
func Live() Counts {
	return Counts{
		Contexts: live.contexts.Load(), PDs: live.pds.Load(), CQs: live.cqs.Load(), MRs: live.mrs.Load(),
		QPs: live.qps.Load(), CMChannels: live.cmChannels.Load(), CMIDs: live.cmIDs.Load(),
	}
}
