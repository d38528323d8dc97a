package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

// A twin is a second process with the identity of a node: one that was started on a
// copy of its directory. Its control records look like the node's own, but have no
// part in what the node votes for, so a reader that takes them for its vote can be shown
// the past. The directory's lock says nothing of a copy, and so the peers tell: every
// start draws a boot id, and of one node id they carry the messages of one boot only.

// twinPoll is the pause between two questions whether the other boot is gone. Behind a
// process that has just died it is gone within milliseconds.
const twinPoll = 25 * time.Millisecond

// boots are the message streams that reach this node, by the node that sends them.
type boots struct {
	mu struct {
		sync.Mutex
		live map[uint64][]*inbound
	}
}

// inbound is one message stream.
type inbound struct {
	boot uint64
	// evicted is closed where another boot proved to be the node.
	evicted chan struct{}
}

func newBoots() *boots {
	b := &boots{}
	b.mu.live = map[uint64][]*inbound{}
	return b
}

// enter notes a stream of that boot of a node. It returns nil where another boot has
// one; if the new one is proved to be the node, the others are evicted instead.
func (b *boots) enter(node, boot uint64, proved bool) *inbound {
	b.mu.Lock()
	defer b.mu.Unlock()
	var same []*inbound
	for _, in := range b.mu.live[node] {
		switch {
		case in.boot == boot:
			same = append(same, in)
		case !proved:
			return nil
		default:
			close(in.evicted)
		}
	}
	in := &inbound{boot: boot, evicted: make(chan struct{})}
	b.mu.live[node] = append(same, in)
	return in
}

func (b *boots) leave(node uint64, in *inbound) {
	b.mu.Lock()
	defer b.mu.Unlock()
	left := slices.DeleteFunc(b.mu.live[node], func(x *inbound) bool { return x == in })
	if len(left) == 0 {
		delete(b.mu.live, node)
		return
	}
	b.mu.live[node] = left
}

// others lists the boots of a node, other than the given one, that have a stream.
func (b *boots) others(node, boot uint64) []uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []uint64
	for _, in := range b.mu.live[node] {
		if in.boot != boot && !slices.Contains(all, in.boot) {
			all = append(all, in.boot)
		}
	}
	return all
}

// hears tells whether a node has a stream here.
func (b *boots) hears(node uint64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.mu.live[node]) > 0
}

// admit lets a stream of a peer in, or refuses it as that of a twin. Who answers at the
// address at which this node looks for the peer is the peer; where nobody answers there,
// who came first is.
func (n *Node) admit(ctx context.Context, from *kvdv1.Identity) (*inbound, error) {
	there := n.bootAt(ctx, from)
	if there == 0 || there == from.GetBootId() {
		if in := n.boots.enter(from.GetNodeId(), from.GetBootId(), there != 0); in != nil {
			return in, nil
		}
	}
	return nil, failTwin(from.GetNodeId())
}

func failTwin(node uint64) error {
	return fail(kvdv1.ErrorDetail_REASON_TWIN, "node %d runs already, and its streams are heard here: its directory was copied, or the other process must be stopped first", node)
}

// bootAt asks which boot of a peer answers at the peer's address. 0: none does.
func (n *Node) bootAt(ctx context.Context, peer *kvdv1.Identity) uint64 {
	addr, ok := n.peers.addressOf(raft.NodeID(peer.GetNodeId()))
	if !ok {
		return 0
	}
	r, err := n.hello(ctx, PeerConfig{NodeID: peer.GetNodeId(), Address: addr})
	if err != nil || r.GetSelf().GetClusterId() != peer.GetClusterId() || r.GetSelf().GetIncarnation() != peer.GetIncarnation() {
		return 0
	}
	return r.GetSelf().GetBootId()
}

// twinAtHome looks for another boot of this node at the address that the manifest
// gives it: a copy has the manifest of the original. "": there is none, if that is sure.
func (n *Node) twinAtHome(ctx context.Context, id *identity) (heard string, sure bool) {
	home := n.directory().find(n.id()).GetAddress()
	if home == "" || slices.ContainsFunc(n.cfg.Peers, func(p PeerConfig) bool { return p.Address == home }) {
		return "", true // this node itself, or one that took its place
	}
	defer n.peers.forget(home)
	r, err := n.hello(ctx, PeerConfig{NodeID: n.id(), Address: home})
	if self := r.GetSelf(); err != nil || self.GetClusterId() != id.manifest.GetClusterId() || self.GetIncarnation() != id.incarnation() || self.GetBootId() == n.bootID {
		return "", !ranOutOfTime(err)
	}
	return "it answers at " + home, true
}

// ranOutOfTime tells that a peer gave no answer, not even that nobody is there.
func ranOutOfTime(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || status.Code(err) == codes.DeadlineExceeded || status.Code(err) == codes.Canceled
}

func (n *Node) refuseTwin(heard string) error {
	return fmt.Errorf("%w: node %d runs already (%s): %s is a copy, or the other process must be stopped first", ErrRefused, n.id(), heard, n.cfg.DataDir)
}

// warnOfMoves tells where the configuration leads away from the manifest: that is how
// a node moves, and how a copy would be started.
func (n *Node) warnOfMoves() {
	for _, p := range n.cfg.Peers {
		if was := n.directory().find(p.NodeID).GetAddress(); was != "" && was != p.Address {
			n.log.Warn("a node is configured at another address than at bootstrap", "node", p.NodeID, "configured", p.Address, "bootstrap", was)
		}
	}
}

// twinWatch stops the node when one peer has taken it for a twin for too long. Such
// a peer hears another boot of this node: this one may be the copy.
type twinWatch struct{ since time.Time }

// ended is told how a stream to a peer ended that was opened at began.
func (w *twinWatch) ended(n *Node, peer raft.NodeID, began time.Time, err error) {
	if reasonOf(err) != kvdv1.ErrorDetail_REASON_TWIN {
		w.since = time.Time{}
		return
	}
	if w.since.IsZero() || time.Since(began) > n.cfg.TwinPatience { // it was let in meanwhile
		w.since = time.Now()
	}
	if time.Since(w.since) >= n.cfg.TwinPatience {
		addr, _ := n.peers.addressOf(peer)
		n.fail(n.refuseTwin(fmt.Sprintf("heard by node %d at %s, which for %v refused this one", peer, addr, n.cfg.TwinPatience)))
	}
}

// beginDoubt takes this node's memory out of the clients' sight, because a peer hears
// another process speak in its name: until it is known which of the two is the copy, this
// one may show what the cluster left behind. What is answered over gRPC needs no such
// care, for that asks a quorum. The doubt ends when no peer hears the other one any more;
// where that lasts, twinWatch stops the node.
func (n *Node) beginDoubt(peer raft.NodeID) {
	if !n.doubted.CompareAndSwap(false, true) {
		return
	}
	n.log.Warn("a peer hears another process speak as this node: no client may read this one's memory until that is cleared up", "peer", uint64(peer))
	n.health.SetServingStatus("", healthpb.HealthCheckResponse_NOT_SERVING)
	n.sessions.evictAll("another process speaks as this node")
	n.background(func(ctx context.Context) {
		for ctx.Err() == nil {
			if heard, sure, err := n.askPeers(ctx, n.identity.Load()); err == nil && heard == "" && sure {
				n.doubted.Store(false)
				n.health.SetServingStatus("", healthpb.HealthCheckResponse_SERVING)
				n.log.Info("no other process speaks as this node any more")
				return
			}
			pause(ctx, 10*twinPoll)
		}
	})
}

func (s *sessions) evictAll(why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.mu.byID {
		x.evict(why)
	}
}

// reasonOf a status; unspecified where it carries none.
func reasonOf(err error) reason {
	for _, d := range status.Convert(err).Details() {
		if d, ok := d.(*kvdv1.ErrorDetail); ok {
			return d.GetReason()
		}
	}
	return kvdv1.ErrorDetail_REASON_UNSPECIFIED
}
