package server

import (
	"sync"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// What clients can make a node hold at a time. A call that waits for a quorum holds its
// request; a list and a page of an export hold their answer. What is beyond is refused,
// with a hint when to try again, and nothing was done.
var defaultLoadLimits = loadLimits{calls: 1 << 14, bytes: 512 << 20, streams: 1 << 15}

const (
	// ownerShare of each limit is what one token can take, so that others find room.
	ownerShare = 2 // a half
	// operatorReserve of each limit is kept for operators.
	operatorReserve = 16 // a sixteenth
	// callBytes is what a call holds besides.
	callBytes = 1 << 10
)

type loadLimits struct {
	calls, bytes, streams int64
}

// load counts what is under way. Nodes of the cluster are not counted: what they send is
// bounded at their side, and must get through when clients are many.
type load struct {
	mu struct {
		sync.Mutex
		limits loadLimits
		all    loadLimits
		owners map[string]*loadLimits // by token; no entry for nothing
	}
}

func newLoad(limits loadLimits) *load {
	l := &load{}
	l.mu.limits, l.mu.owners = limits, map[string]*loadLimits{}
	return l
}

// enter admits a call or a stream. leave must follow where err is nil.
func (l *load) enter(c *caller, cost loadLimits) (leave func(), err error) {
	if c == nil || c.peer {
		return func() {}, nil
	}
	owner := c.owner()
	l.mu.Lock()
	defer l.mu.Unlock()
	limits := l.mu.limits
	if c.token != nil && c.operator() {
		limits.add(limits.over(operatorReserve))
	}
	if what := l.mu.all.exceeds(cost, limits); what != "" {
		return nil, failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_EXHAUSTED, RetryAfterMs: 50}, "this node has its limit of %s: try again in a moment", what)
	}
	if owner != "" {
		mine := l.mu.owners[owner]
		if mine == nil {
			mine = &loadLimits{}
		}
		if what := mine.exceeds(cost, limits.over(ownerShare)); what != "" {
			return nil, failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_EXHAUSTED, RetryAfterMs: 50}, "token %s has its share of what this node takes, half of the limit of %s: try again in a moment", c.token.name(), what)
		}
		mine.add(cost)
		l.mu.owners[owner] = mine
	}
	l.mu.all.add(cost)
	return func() { l.leave(owner, cost) }, nil
}

func (l *load) leave(owner string, cost loadLimits) {
	l.mu.Lock()
	defer l.mu.Unlock()
	cost = loadLimits{-cost.calls, -cost.bytes, -cost.streams}
	l.mu.all.add(cost)
	if mine := l.mu.owners[owner]; mine != nil {
		if mine.add(cost); *mine == (loadLimits{}) {
			delete(l.mu.owners, owner)
		}
	}
}

func (l *loadLimits) add(x loadLimits) {
	l.calls += x.calls
	l.bytes += x.bytes
	l.streams += x.streams
}

func (l loadLimits) over(n int64) loadLimits {
	return loadLimits{l.calls / n, l.bytes / n, l.streams / n}
}

// exceeds names what would be too much. One call may be larger than the limit of bytes
// where it is alone.
func (l loadLimits) exceeds(cost, limits loadLimits) string {
	switch {
	case cost.calls > 0 && l.calls+cost.calls > limits.calls:
		return "calls under way"
	case cost.bytes > 0 && l.bytes > 0 && l.bytes+cost.bytes > limits.bytes:
		return "bytes of calls under way"
	case cost.streams > 0 && l.streams+cost.streams > limits.streams:
		return "streams"
	}
	return ""
}

// costOf a call while it is under way.
func costOf(req any) loadLimits {
	bytes := 0
	switch r := req.(type) {
	case *kvdv1.PutRequest:
		bytes = len(r.GetKey()) + len(r.GetValue())
	case *kvdv1.WriteFrame:
		return costOf(frameOp(r))
	case *kvdv1.ListRequest:
		bytes = listMaxBytes
	case *kvdv1.ReadExportRequest:
		bytes = exportPageBytes
	case *kvdv1.ImportRequest:
		for _, it := range r.GetItems() {
			bytes += len(it.GetKey()) + len(it.GetValue())
		}
	}
	return loadLimits{calls: 1, bytes: callBytes + int64(bytes)}
}

func frameOp(f *kvdv1.WriteFrame) any {
	if put := f.GetPut(); put != nil {
		return put
	}
	return f.GetDelete()
}
