package raft

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// A follower whose disk hangs slows nobody: the others make a quorum. What waits for it
// is bounded, and it catches up.
func TestFollowerStall(t *testing.T) {
	c := startLive(t, 3, 1, func(cfg *Config) { cfg.MaxInflightBytes, cfg.MaxMessageBytes = 1<<20, 256<<10 }, nil)
	lead := c.leader(0)
	slow := NodeID(1 + uint64(lead.h.cfg.NodeID)%3)
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	c.logs[slow].gate.Store(&gate)
	const callers, each = 8, 40
	var group sync.WaitGroup
	errs := make(chan error, callers*each)
	for range callers {
		group.Go(func() {
			for range each {
				_, _, err := lead.Propose(t.Context(), make([]byte, 16<<10)) // 5 MiB in all
				errs <- err
			}
		})
	}
	group.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	for _, f := range lead.Status().Followers {
		if f.Node == slow {
			require.Less(t, f.Match, lead.Status().Commit, "it takes part although its disk hangs")
		}
	}
	c.logs[slow].gate.Store(nil)
	open()
	waitFor(t, "it catches up", func() bool { return c.group(slow, 0).Status().Applied >= lead.Status().Commit })
}
