package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// membersWait is the least that the leader of group 0 is given to say who the members are:
// it asks the nodes itself, and waits for one that hangs.
const membersWait = 2 * time.Second

// Survey is what all nodes said of the cluster at about one time. It is the caller's.
type Survey struct {
	At        time.Time // by the clock of this host, when it was complete
	ClusterID string    // empty: no node answered
	// Nodes are the endpoints and every node that one of them names, in order of node id;
	// those whose id was never learnt come last.
	Nodes []NodeSurvey
	// Members, those that have left too, by the word of the leader of group 0; nil with
	// MembersErr.
	Members    []*kvdv1.MemberStatus
	MembersErr error
	// Placement are sentences on what can not be reached with these nodes; none where the
	// leader of group 0 did not answer.
	Placement []string
}

// NodeSurvey is what one node said. What it did not say is nil, and an error says why.
type NodeSurvey struct {
	NodeID  uint64 // 0: never learnt
	Address string
	Status  *kvdv1.StatusResponse
	Err     error // of Status; then nothing else is set
	// Replicas in order of shards.
	Replicas    []*kvdv1.ShardReplica
	ReplicasErr error
	// Starting: ReplicasErr is that the node does not serve yet.
	Starting bool
	// Gossip is nil where the node does not gossip, or did not say.
	Gossip *kvdv1.LivenessResponse
}

// Survey asks every node that can be found what it is, what replicas it has and whom it
// hears; and the leader of group 0 for the members. All nodes are asked at the same time,
// and each has Config.ConnectTimeout to answer: a node that is stopped, or hangs, costs
// that once, however many there are. The leader of group 0 has as long, and 2 s at least.
// Where a node was silent the others are asked again for their replicas in the end, so that
// these are not older than the silence.
//
// A node that does not answer, and even that none does, is no error. Errors: ErrDenied
// (the token is no operator's), ErrWrongCluster (the endpoints are of two clusters, or of
// another one than Config.ClusterID), ErrIncompatible (nothing at the endpoints is a kvd
// node), ErrInvalid (no node may be asked with this configuration), context.Canceled.
func (a *Admin) Survey(ctx context.Context) (Survey, error) {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	byAddr := a.interviewAll(ctx)
	if errors.Is(ctx.Err(), context.Canceled) {
		return Survey{}, context.Canceled
	}
	said := make(map[string]NodeStatus, len(byAddr))
	for addr, n := range byAddr {
		said[addr] = NodeStatus{NodeID: n.NodeID, Address: addr, Status: n.Status, Err: n.Err}
	}
	merged, none := a.mergeStatus(said)
	s := Survey{}
	var failures []error
	for _, m := range merged {
		n := byAddr[m.Address]
		n.NodeID = m.NodeID
		s.Nodes = append(s.Nodes, n)
		failures = append(failures, n.Err)
	}
	if none != nil {
		if err := adminGaveUp(ctx, failures); !errors.Is(err, ErrUnavailable) {
			return Survey{}, fmt.Errorf("survey: %w", err)
		}
	}
	if err := s.check(); err != nil {
		return Survey{}, err
	}
	a.askMembers(ctx, &s)
	a.askAgain(ctx, &s)
	s.At = time.Now()
	return s, nil
}

// check that the nodes are of one cluster and answered an operator.
func (s *Survey) check() error {
	var denied error
	allowed := false
	for i, n := range s.Nodes {
		if n.Err != nil {
			continue
		}
		id := n.Status.GetClusterId()
		switch {
		case id != "" && s.ClusterID == "":
			s.ClusterID = id
		case id != "" && id != s.ClusterID:
			return fmt.Errorf("survey: node at %s: %w: it is of cluster %s, and others at these endpoints are of cluster %s: give the endpoints of one cluster", n.Address, ErrWrongCluster, id, s.ClusterID)
		}
		if errors.Is(n.ReplicasErr, ErrDenied) {
			denied = n.ReplicasErr
		} else {
			allowed = true
		}
		s.Nodes[i].Starting = reasonOf(n.ReplicasErr) == kvdv1.ErrorDetail_REASON_NOT_READY
	}
	if denied != nil && !allowed {
		return fmt.Errorf("survey: %w", denied)
	}
	return nil
}

// interviewAll interviews the nodes at all addresses that are known, and at those that
// they name, as soon as they do.
func (a *Admin) interviewAll(ctx context.Context) map[string]NodeSurvey {
	type news struct {
		n    NodeSurvey
		done bool
	}
	heard := make(chan news)
	byAddr := make(map[string]NodeSurvey)
	pending := 0
	ask := func() {
		for _, addr := range a.addresses() {
			if _, asked := byAddr[addr]; asked {
				continue
			}
			byAddr[addr] = NodeSurvey{}
			pending++
			go func() {
				n := NodeSurvey{Address: addr}
				ctx, cancel := context.WithTimeout(ctx, a.cfg.ConnectTimeout)
				defer cancel()
				if n.Status, n.Err = a.statusOf(ctx, addr); n.Err == nil {
					n.NodeID = n.Status.GetNodeId()
					heard <- news{n: n} // it may have named others
					a.interview(ctx, &n)
				}
				heard <- news{n, true}
			}()
		}
	}
	for ask(); pending > 0; ask() {
		if got := <-heard; got.done {
			byAddr[got.n.Address] = got.n
			pending--
		}
	}
	return byAddr
}

// interview asks a node that answers for the rest.
func (a *Admin) interview(ctx context.Context, n *NodeSurvey) {
	r, err := a.pool.get(n.Address)
	if err != nil {
		n.ReplicasErr = err
		return
	}
	var wg sync.WaitGroup
	wg.Go(func() { n.Replicas, n.ReplicasErr = askReplicas(ctx, r) })
	wg.Go(func() { n.Gossip = askLiveness(ctx, r) })
	wg.Wait()
}

func askReplicas(ctx context.Context, r *remote) ([]*kvdv1.ShardReplica, error) {
	resp, err := kvdv1.NewOperatorClient(r.cc).Shards(ctx, &kvdv1.ShardsRequest{})
	return resp.GetReplicas(), rpcFailed(r.addr, err)
}

// askLiveness returns nil where the node does not gossip, is too old to say so, or does
// not answer: it is a hint.
func askLiveness(ctx context.Context, r *remote) *kvdv1.LivenessResponse {
	resp, err := kvdv1.NewGossipClient(r.cc).Liveness(ctx, &kvdv1.LivenessRequest{})
	if err != nil || !resp.GetEnabled() {
		return nil
	}
	return resp
}

// askAgain asks those that answered once more for their replicas, where another was
// silent. What a node said before stays where it says nothing now.
func (a *Admin) askAgain(ctx context.Context, s *Survey) {
	if !slices.ContainsFunc(s.Nodes, func(n NodeSurvey) bool { return n.Err != nil }) {
		return
	}
	var wg sync.WaitGroup
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if n.Err != nil || n.ReplicasErr != nil {
			continue
		}
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, a.cfg.ConnectTimeout)
			defer cancel()
			if r, err := a.pool.get(n.Address); err == nil {
				if again, err := askReplicas(ctx, r); err == nil {
					n.Replicas = again
				}
			}
		})
	}
	wg.Wait()
}

// askMembers asks who the members are, and whether they can hold what they should.
func (a *Admin) askMembers(ctx context.Context, s *Survey) {
	var answered []NodeSurvey
	for _, n := range s.Nodes {
		if n.Err == nil {
			answered = append(answered, n)
		}
	}
	leads := func(n NodeSurvey) int {
		if len(n.Replicas) > 0 && n.Replicas[0].GetShard() == 0 && n.Replicas[0].GetLeading() {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(answered, func(x, y NodeSurvey) int { return cmp.Compare(leads(x), leads(y)) })
	if len(answered) == 0 {
		s.MembersErr = fmt.Errorf("members: %w: no node answers", ErrUnavailable)
		return
	}
	// The leader of group 0, or whoever passes it on; one more, because it may just have
	// lost the lead.
	answered = answered[:min(2, len(answered))]
	ctx, cancel := context.WithTimeout(ctx, max(a.cfg.ConnectTimeout, membersWait))
	defer cancel()
	type answer struct {
		members []*kvdv1.MemberStatus
		plan    *kvdv1.RebalanceResponse
		err     error
	}
	answers := make([]answer, len(answered))
	var wg sync.WaitGroup
	for i, n := range answered {
		wg.Go(func() {
			r, err := a.pool.get(n.Address)
			if err != nil {
				answers[i].err = err
				return
			}
			resp, err := r.cluster.Members(ctx, &kvdv1.MembersRequest{})
			answers[i].members, answers[i].err = resp.GetMembers(), rpcFailed(r.addr, err)
		})
	}
	wg.Go(func() {
		if r, err := a.pool.get(answered[0].Address); err == nil {
			// It is a hint: where it fails, the members say why.
			answers[0].plan, _ = r.cluster.Rebalance(ctx, &kvdv1.RebalanceRequest{DryRun: true})
		}
	})
	wg.Wait()
	s.Placement = answers[0].plan.GetProblems()
	for _, x := range answers {
		if s.Members, s.MembersErr = x.members, x.err; x.err == nil {
			return
		}
	}
	s.MembersErr = fmt.Errorf("members: %w", answers[0].err)
}

// Liveness is what nodes hear of each other by gossip, by the id of the node that says so;
// at holds their addresses by id. Nodes that do not gossip or do not answer are left out:
// gossip is a hint. All are asked at the same time, for Config.ConnectTimeout at most.
func (a *Admin) Liveness(ctx context.Context, at map[uint64]string) map[uint64]*kvdv1.LivenessResponse {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.ConnectTimeout)
	defer cancel()
	var mu sync.Mutex
	said := make(map[uint64]*kvdv1.LivenessResponse)
	var wg sync.WaitGroup
	for id, addr := range at {
		wg.Go(func() {
			r, err := a.pool.get(addr)
			if err != nil {
				return
			}
			if l := askLiveness(ctx, r); l != nil {
				mu.Lock()
				said[id] = l
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return said
}
