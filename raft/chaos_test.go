package raft

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestChaos runs real goroutines, for the race detector's eye: callers on all
// nodes, links that come and go, leaders that are moved, disks that take their
// time, logs that are cut, snapshots. What was acknowledged is there in the end,
// once and in the same place on every replica.
func TestChaos(t *testing.T) {
	const groups, callers, each = 6, 12, 60
	c := startLive(t, 3, groups, func(cfg *Config) {
		cfg.LogRetainEntries = 20
		cfg.MaxUncommittedBytes = 4 << 10
	}, func(l *memLog) { l.syncDelay = 200 * time.Microsecond })
	for g := range GroupID(groups) {
		c.leader(g)
	}
	stop := make(chan struct{})
	var trouble sync.WaitGroup
	trouble.Go(func() { c.makeTrouble(stop, groups) })

	var mu sync.Mutex
	acked := map[GroupID]map[string]uint64{}
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(i), 2))
			for k := range each {
				g, n := GroupID(rnd.IntN(groups)), c.nodes[rnd.IntN(3)]
				if l := c.group(n, g).Status().Leader; l != 0 {
					n = l
				}
				data := fmt.Sprintf("c%d-%d", i, k)
				ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
				_, _ = c.group(n, g).ReadIndex(ctx)
				_, index, err := c.group(n, g).Propose(ctx, []byte(data))
				cancel()
				if err == nil {
					mu.Lock()
					if acked[g] == nil {
						acked[g] = map[string]uint64{}
					}
					acked[g][data] = index
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	trouble.Wait()
	for _, n := range c.nodes {
		c.loop.setDown(n, false)
	}
	total := 0
	for g := range GroupID(groups) {
		proposeAnyhow(t, c, g, "last")
		c.leader(g)
		agreed := func() bool {
			a, b, d := c.loop.sms[1][g].entries(), c.loop.sms[2][g].entries(), c.loop.sms[3][g].entries()
			return len(a) == len(b) && len(b) == len(d)
		}
		waitFor(t, "agreement", agreed)
		want := c.loop.sms[1][g].entries()
		require.Equal(t, want, c.loop.sms[2][g].entries())
		require.Equal(t, want, c.loop.sms[3][g].entries())
		at := map[string]uint64{}
		for _, e := range want {
			if e.Data != "last" {
				require.Zero(t, at[e.Data], "%s is there twice", e.Data)
				at[e.Data] = e.Index
			}
		}
		for data, index := range acked[g] {
			require.Equal(t, index, at[data], data)
		}
		total += len(acked[g])
	}
	require.NotZero(t, total)
	t.Logf("%d of %d acknowledged", total, callers*each)
}

func (c *live) makeTrouble(stop chan struct{}, groups int) {
	rnd := rand.New(rand.NewPCG(1, 1))
	tick := time.NewTicker(15 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-stop:
			return
		}
		n, g := c.nodes[rnd.IntN(3)], GroupID(rnd.IntN(groups))
		switch rnd.IntN(6) {
		case 0:
			c.loop.setDown(n, true)
		case 1:
			c.loop.hosts[c.nodes[rnd.IntN(3)]].ReportUnreachable(n)
		case 2:
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			_ = c.group(n, g).TransferLeader(ctx, c.nodes[rnd.IntN(3)])
			cancel()
		case 3:
			c.loop.sms[n][g].flush()
		default:
			c.loop.setDown(n, false)
		}
	}
}
