package verbs

import (
	"sort"
	"sync"
	"sync/atomic"
)

// RailStats counts what one port carried.
type RailStats struct {
	Device string `json:"device"`
	Port   int    `json:"port"`
	// QueuePairs open now.
	QueuePairs int64 `json:"queue_pairs"`
	// Of an initiator: batches and READs posted, bytes arrived, queue pairs that failed.
	Batches  uint64 `json:"batches,omitempty"`
	Reads    uint64 `json:"reads,omitempty"`
	Bytes    uint64 `json:"bytes,omitempty"`
	Failures uint64 `json:"failures,omitempty"`
	// Of a target: connections closed to make room for others, all its devices together.
	Evicted uint64 `json:"evicted,omitempty"`
}

// RailCounter is implemented by the targets and initiators of this provider.
type RailCounter interface {
	// RailStats of every port that was used since the start, by device and port.
	RailStats() []RailStats
}

type railCounters struct {
	queuePairs                      atomic.Int64
	batches, reads, bytes, failures atomic.Uint64
}

type railKey struct {
	device string
	port   int
}

type counterTable struct {
	sync.Mutex
	rails map[railKey]*railCounters
}

func (t *counterTable) of(device string, port int) *railCounters {
	t.Lock()
	defer t.Unlock()
	if t.rails == nil {
		t.rails = map[railKey]*railCounters{}
	}
	k := railKey{device, port}
	if t.rails[k] == nil {
		t.rails[k] = &railCounters{}
	}
	return t.rails[k]
}

func (t *counterTable) stats() []RailStats {
	t.Lock()
	defer t.Unlock()
	out := make([]RailStats, 0, len(t.rails))
	for k, c := range t.rails {
		out = append(out, RailStats{
			Device: k.device, Port: k.port, QueuePairs: c.queuePairs.Load(), Batches: c.batches.Load(), Reads: c.reads.Load(),
			Bytes: c.bytes.Load(), Failures: c.failures.Load(),
		})
	}
	sort.Slice(out, func(i, j int) bool {
		if out[i].Device != out[j].Device {
			return out[i].Device < out[j].Device
		}
		return out[i].Port < out[j].Port
	})
	return out
}

// RailStats implements RailCounter.
func (in *initiator) RailStats() []RailStats { return in.counters.stats() }

// RailStats implements RailCounter.
func (t *target) RailStats() []RailStats {
	out := t.counters.stats()
	for i := range out {
		out[i].Evicted = t.evicted.Load()
	}
	return out
}
