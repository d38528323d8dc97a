package raft

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// BenchmarkPut puts 1 KiB through three hosts in this process with a simulated
// sync. p50-us is to be read beside sync: a put can not be faster than two syncs
// side by side and a round trip.
func BenchmarkPut(b *testing.B) {
	for _, sync := range []time.Duration{0, time.Millisecond} {
		for _, callers := range []int{1, 64} {
			for _, groups := range []int{1, 16} {
				if groups > callers {
					continue
				}
				b.Run(fmt.Sprintf("sync=%v/callers=%d/groups=%d", sync, callers, groups), func(b *testing.B) {
					benchPut(b, sync, callers, groups)
				})
			}
		}
	}
}

func benchPut(b *testing.B, delay time.Duration, callers, groups int) {
	c := startLive(b, 3, groups, nil, func(l *memLog) { l.syncDelay = delay })
	leads := make([]*Group, groups)
	for g := range leads {
		leads[g] = c.leader(GroupID(g))
	}
	data := make([]byte, 1024)
	before := c.loop.hosts[leads[0].Status().Leader].Stats()
	took := make([]time.Duration, b.N)
	var next atomic.Int64
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	for i := range callers {
		g := leads[i%groups]
		wg.Go(func() {
			for {
				n := next.Add(1) - 1
				if n >= int64(b.N) {
					return
				}
				start := time.Now()
				if _, _, err := g.Propose(context.Background(), data); err != nil {
					b.Error(err)
					return
				}
				took[n] = time.Since(start)
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	after := c.loop.hosts[leads[0].Status().Leader].Stats()
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-us")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-us")
	b.ReportMetric(float64(after.LogSyncs-before.LogSyncs)/float64(b.N), "syncs/put")
	b.ReportMetric(float64(after.MessagesOut-before.MessagesOut)/float64(b.N), "msgs/put")
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "puts/s")
}
