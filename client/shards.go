package client

import (
	"context"
	"fmt"
	"sync"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// NodeShards is what one node says of its replicas, or why it says nothing.
type NodeShards struct {
	NodeID   uint64 // 0: never learnt
	Address  string
	Replicas []*kvdv1.ShardReplica // in order of shards; nil with Err
	Err      error
}

// Shards asks every node that can be found for its replicas, of some shards or, with
// none, of all. A node that does not answer has Err; the error is set only where none did.
func (a *Admin) Shards(ctx context.Context, shards ...uint32) ([]NodeShards, error) {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	nodes, err := a.Status(ctx)
	if err != nil {
		return nil, fmt.Errorf("shards: %w", err)
	}
	list := make([]NodeShards, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		list[i] = NodeShards{NodeID: n.NodeID, Address: n.Address, Err: n.Err}
		if n.Err != nil {
			continue
		}
		wg.Go(func() {
			list[i].Err = a.at(ctx, n.Address, func(ctx context.Context, r *remote) error {
				resp, err := kvdv1.NewOperatorClient(r.cc).Shards(ctx, &kvdv1.ShardsRequest{Shards: shards})
				list[i].Replicas = resp.GetReplicas()
				return rpcFailed(r.addr, err)
			})
		})
	}
	wg.Wait()
	var failed []error
	for _, n := range list {
		if n.Err != nil {
			failed = append(failed, n.Err)
		}
	}
	if len(failed) == len(list) {
		return list, fmt.Errorf("shards: %w", adminGaveUp(ctx, failed))
	}
	return list, nil
}
