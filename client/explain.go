package client

import (
	"cmp"
	"context"
	"slices"
	"sync"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// Explanation says where a key lies and how this Client reads it.
type Explanation struct {
	Namespace string
	Key       []byte // the caller's
	Shard     uint32
	// Of the shard, by the word of the replica with the highest term; zero where no replica
	// answered.
	Leader, Term, ConfigID   uint64
	Voters, Outgoing, Learns []uint64
	// Replicas of the shard, and the nodes that did not answer, in order of node id.
	Replicas []ReplicaExplanation
}

// ReplicaExplanation is what one node has of the key.
type ReplicaExplanation struct {
	NodeID  uint64
	Address string
	// Transport by which this Client reads the node now, and Reason why that one; PassedOver
	// are the better ones, and why they are not used.
	Transport  string
	Reason     string
	PassedOver []string
	// Cached: this Client remembers where the key lies on this node.
	Cached bool
	Node   *kvdv1.ExplainResponse // nil with Err
	Err    error
}

// Explain asks every node what it has of the key. It reads nothing one-sidedly and
// changes nothing. Errors: ErrInvalid, ErrUnavailable (no node answered).
func (c *Client) Explain(ctx context.Context, key []byte) (Explanation, error) {
	if err := c.checkKey(key); err != nil {
		return Explanation{}, err
	}
	ctx, cancel := c.withDeadline(ctx)
	defer cancel()
	hash, sh := c.cluster().hashKey(key)
	x := Explanation{Namespace: c.cfg.Namespace, Key: key, Shard: sh.id}
	nodes := c.sortedNodes()
	answers := make([]ReplicaExplanation, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() {
			select {
			case <-n.tried:
			case <-ctx.Done():
			}
			st := n.stats()
			a := ReplicaExplanation{NodeID: n.id, Address: st.Address, Transport: st.Transport, Reason: st.Reason}
			if s := n.sess.Load(); s != nil {
				_, a.Cached = c.cache.get(hash, s.ord)
				for _, p := range s.passed {
					why := p.why.String()
					if p.text != "" {
						why += " (" + p.text + ")"
					}
					a.PassedOver = append(a.PassedOver, c.transports[p.transport].name+": "+why)
				}
			}
			a.Err = n.try(ctx, func(ctx context.Context, _ *node, r *remote) (err error) {
				a.Node, err = kvdv1.NewOperatorClient(r.cc).Explain(ctx, &kvdv1.ExplainRequest{NamespaceId: c.cluster().namespace, Key: key})
				return rpcFailed(r.addr, err)
			})
			answers[i] = a
		})
	}
	wg.Wait()
	var failed []error
	for _, a := range answers {
		if a.Err != nil {
			failed = append(failed, a.Err)
			x.Replicas = append(x.Replicas, a)
			continue
		}
		rep := a.Node.GetReplica()
		if rep == nil {
			continue // it has no replica
		}
		x.Replicas = append(x.Replicas, a)
		if rep.GetTerm() > x.Term || rep.GetTerm() == x.Term && x.Leader == 0 {
			x.Leader, x.Term, x.ConfigID = rep.GetLeaderNode(), rep.GetTerm(), rep.GetConfigId()
			x.Voters, x.Outgoing, x.Learns = rep.GetVoters(), rep.GetVotersOutgoing(), rep.GetLearners()
		}
	}
	slices.SortFunc(x.Replicas, func(a, b ReplicaExplanation) int { return cmp.Compare(a.NodeID, b.NodeID) })
	if len(failed) == len(answers) {
		return x, dialFailed(failed)
	}
	return x, nil
}
