package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

const (
	// patience is how long a cluster may take to come to rest: much longer than it ever
	// should, so that a run which hangs ends.
	patience  = 5 * time.Minute
	lookPause = 50 * time.Millisecond
	// lagAllowed in entries: under load a follower is always a little behind.
	lagAllowed = 1000
)

// await looks until f is nil.
func await(ctx context.Context, what string, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var last error
	for {
		one, stop := context.WithTimeout(ctx, 10*time.Second)
		err := f(one)
		stop()
		switch {
		case err == nil:
			return nil
		case ctx.Err() == nil || last == nil:
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: not within %v: %w", what, patience, last)
		case <-time.After(lookPause):
		}
	}
}

// leaders of all shards as they see them, once every shard has one that serves, as many
// voters as wanted, and nobody far behind.
func (l *life) leaders(ctx context.Context, voters int) (map[uint32]*kvdv1.ShardReplica, error) {
	nodes, err := l.admin.Shards(ctx)
	if err != nil {
		return nil, err
	}
	leads := map[uint32]*kvdv1.ShardReplica{}
	for _, n := range nodes {
		if n.Err != nil {
			return nil, n.Err
		}
		for _, r := range n.Replicas {
			serves := r.GetServedTerm() == r.GetTerm() || r.GetShard() == 0 // which has no control record
			if r.GetLeading() && serves && (leads[r.GetShard()] == nil || leads[r.GetShard()].GetTerm() < r.GetTerm()) {
				leads[r.GetShard()] = r
			}
		}
	}
	for s := range uint32(l.f.shards) + 1 { // group 0 too
		r := leads[s]
		switch {
		case r == nil:
			return nil, fmt.Errorf("shard %d has no leader that serves", s)
		case s != 0 && (len(r.GetVoters()) != voters || len(r.GetVotersOutgoing())+len(r.GetLearners()) > 0):
			return nil, fmt.Errorf("shard %d has voters %v, outgoing %v and learners %v: want %d voters", s, r.GetVoters(), r.GetVotersOutgoing(), r.GetLearners(), voters)
		}
		for _, o := range r.GetOthers() {
			if !o.GetActive() || o.GetSnapshot() || o.GetMatch()+lagAllowed < r.GetLastIndex() {
				return nil, fmt.Errorf("shard %d: node %d has the log up to %d of %d, active %v, waiting for a snapshot %v", s, o.GetNodeId(), o.GetMatch(), r.GetLastIndex(), o.GetActive(), o.GetSnapshot())
			}
		}
	}
	delete(leads, 0)
	return leads, nil
}

// spread waits until every replica is caught up and has the nodes lead about as many shards
// each. It returns the leader of each shard.
func (l *life) spread(ctx context.Context, voters int) (by map[uint32]uint64, err error) {
	err = await(ctx, "replicas are caught up and leaders spread over the nodes", func(ctx context.Context) error {
		leads, err := l.leaders(ctx, voters)
		if err != nil {
			return err
		}
		by = map[uint32]uint64{}
		led := map[uint64]int{}
		for s, r := range leads {
			by[s] = r.GetLeaderNode()
			led[by[s]]++
		}
		for _, s := range slices.Sorted(maps.Keys(leads)) {
			for _, to := range leads[s].GetVoters() {
				if led[by[s]]-led[to] < 2 {
					continue
				}
				if err := l.admin.TransferLeader(ctx, s, to); err != nil {
					return err
				}
				return fmt.Errorf("node %d leads %d shards, node %d %d", by[s], led[by[s]], to, led[to])
			}
		}
		return nil
	})
	return by, err
}

func sleepFor(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
