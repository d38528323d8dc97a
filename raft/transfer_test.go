package raft

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Leadership that is handed over leaves no proposal behind whose outcome is unknown: what
// was under way is finished first, and what comes meanwhile is told to go elsewhere.
func TestTransferFinishesProposals(t *testing.T) {
	c := startLive(t, 3, 1, nil, func(l *memLog) { l.syncDelay = 3 * time.Millisecond })
	var applied, refused, unknown atomic.Int64
	var stop atomic.Bool
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for !stop.Load() {
				lead := c.leader(0)
				_, _, err := lead.Propose(t.Context(), []byte("x"))
				switch {
				case err == nil:
					applied.Add(1)
				case errors.Is(err, ErrOutcomeUnknown):
					unknown.Add(1)
				default:
					refused.Add(1)
				}
			}
		})
	}
	quiet := 0 // hand-overs without an election of a node's own accord
	for range 10 {
		lead := c.leader(0)
		term, before, done := lead.Status().Term, unknown.Load(), applied.Load()
		require.Eventually(t, func() bool { return applied.Load() >= done+20 }, 20*time.Second, time.Millisecond)
		to := NodeID(1 + uint64(lead.h.cfg.NodeID)%3)
		if lead.TransferLeader(t.Context(), to) != nil || lead.Status().Term != term+1 {
			continue // a slow machine elects by itself
		}
		quiet++
		require.Equal(t, before, unknown.Load())
	}
	stop.Store(true)
	callers.Wait()
	t.Logf("%d hand-overs; %d proposals applied, %d refused", quiet, applied.Load(), refused.Load())
	require.Positive(t, quiet)
}
