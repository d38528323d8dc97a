package server

import (
	"context"
	"encoding/binary"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

const (
	upkeepInterval = time.Second
	expireBatch    = 512
	expireWait     = 2 * time.Second

	flushLogBytes = 256 << 20 // bytes of log on disk
	flushPause    = 30 * time.Second

	// retryRefused is the pause before memory that a device refused is offered again.
	retryRefused = 30 * time.Second
)

// upkeep is what a node does about once a second: it gives quarantined memory free and
// looks at the disk. It waits for no other node.
func (n *Node) upkeep(ctx context.Context) {
	tick := n.cfg.Clock.NewTicker(upkeepInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C():
		case <-ctx.Done():
			return
		}
		n.arena.Tick()
		if changed, err := n.disk.look(); err != nil {
			n.log.Error("the disk can not be looked at", "err", err)
		} else if changed {
			if why := n.disk.refusal(); why != "" {
				n.log.Error("writes are refused", "reason", why)
			} else {
				n.log.Info("writes are taken again: the disk has room")
			}
		}
		n.flushForTheLog()
		n.peers.sweepOutgoing()
		n.sweepIncoming()
		if now := n.cfg.Clock.Now(); now.Sub(n.retried) >= retryRefused {
			n.retried = now
			n.export.retry()
		}
	}
}

// expiry proposes, about once a second, for the shards that this node leads, what is
// to expire. It waits for each entry, and so, where a shard has lost its quorum, for
// a while: then upkeep must not.
func (n *Node) expiry(ctx context.Context) {
	tick := n.cfg.Clock.NewTicker(upkeepInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C():
		case <-ctx.Done():
			return
		}
		n.expireTokens(ctx)
		n.expireOnce(ctx)
	}
}

func (n *Node) expireOnce(ctx context.Context) {
	for _, sh := range n.localShards() {
		for ctx.Err() == nil && sh.g.Status().Leading && n.expireShard(ctx, sh, sh.g) {
		}
	}
}

// flushForTheLog makes what is applied durable once the log has grown: the log is cut
// only below that, and a store that takes few writes flushes seldom by itself.
func (n *Node) flushForTheLog() {
	if n.engine.Metrics().LogBytes < flushLogBytes || n.cfg.Clock.Now().Sub(n.flushed) < flushPause {
		return
	}
	n.flushed = n.cfg.Clock.Now()
	if err := n.engine.Flush(); err != nil {
		n.log.Warn("the state could not be flushed, so the log can not be cut; it will be tried again", "err", err)
	}
}

// expireShard proposes one entry with what is past its time; more tells that there
// may be more. The decision is an entry
// of the leader, so all replicas drop the same keys at the same index; a deposed
// leader's entry never gets there.
func (n *Node) expireShard(ctx context.Context, sh *shard, g *raft.Group) (more bool) {
	now := n.cfg.Clock.Now().UnixMilli()
	op := &kvdv1.ExpireOp{}
	err := sh.eng.ScanAux(auxExpiry, nil, nil, func(key, value []byte) (bool, error) {
		expiry, namespace, k, err := parseExpiryKey(key)
		if err != nil || expiry > now {
			return false, err
		}
		if len(value) == 8 {
			op.Keys = append(op.Keys, &kvdv1.ExpireOp_Key{
				NamespaceId: namespace, Key: append([]byte(nil), k...), Version: binary.BigEndian.Uint64(value),
			})
		}
		return len(op.Keys) < expireBatch, nil
	})
	if err != nil {
		n.log.Error("expiry can not be read", "shard", sh.number, "err", err)
		return false
	}
	op.WritersIdleSinceUnixMs = now - n.cfg.WriterTTL.Milliseconds()
	op.Writers = sh.writers.idle(op.WritersIdleSinceUnixMs, expireBatch)
	if len(op.Keys) == 0 && len(op.Writers) == 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, expireWait)
	defer cancel()
	if _, _, err := n.propose(ctx, sh.number, g, &kvdv1.Command{LeaderUnixMs: now, Op: &kvdv1.Command_Expire{Expire: op}}); err != nil {
		n.log.Info("expiry was not proposed; it will be tried again", "shard", sh.number, "err", err)
		return false
	}
	return len(op.Keys) == expireBatch
}
