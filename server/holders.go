package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/shm"
)

// holdersInterval is how often a node looks for its own old memory.
const holdersInterval = 30 * time.Second

// memoryName prefixes the names of all memory of this node in one boot, as they show in
// /proc/PID/maps.
func (n *Node) memoryName() string { return fmt.Sprintf("%s%016x", n.memoryPrefix(), n.bootID) }

// memoryPrefix is that of all boots.
func (n *Node) memoryPrefix() string {
	return fmt.Sprintf("kvd-%s-%d-", n.identity.Load().manifest.GetClusterId()[:8], n.id())
}

// watchHolders warns while another process keeps memory of an earlier boot of this node
// allocated: it counts against the host and not against the arena's cap. It ends once
// nobody does, since no more of it can appear.
func (n *Node) watchHolders(ctx context.Context) {
	tick := n.cfg.Clock.NewTicker(holdersInterval)
	defer tick.Stop()
	for {
		found, err := shm.ScanHolders(n.memoryPrefix(), n.memoryName())
		if errors.Is(err, rdma.ErrUnsupported) {
			return
		}
		if err != nil {
			n.log.Warn("it can not be seen whether clients hold memory of an earlier boot", "err", err)
		}
		for _, p := range found.Processes {
			n.log.Warn("a client holds memory of an earlier boot of this node: restart it, or have it close its kvd client",
				"pid", p.PID, "command", p.Command, "memory", humanize.IBytes(p.Bytes))
		}
		if err == nil && len(found.Processes) == 0 {
			return
		}
		select {
		case <-tick.C():
		case <-ctx.Done():
			return
		}
	}
}
