package server

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

const (
	// maxMessageBytes bounds a gRPC message: a raft message of several entries, or one
	// entry of the largest value.
	maxMessageBytes = 64 << 20
	// flowWindow is how many bytes may be on their way on a stream or connection.
	flowWindow = 16 << 20
	// queueLimit bounds, in bytes, what waits for one peer. Raft sends again what is
	// dropped.
	queueLimit = 64 << 20
	// batchLimit bounds, in bytes, one RaftBatch, but for a single larger message.
	batchLimit = 4 << 20
)

// peers holds the connections to the other nodes and carries the messages of all
// groups, one stream a node. It implements raft.Transport.
type peers struct {
	node *Node
	// dial, when not nil, gives the way to a node in place of a connection of gRPC.
	dial func(raft.NodeID) (grpc.ClientConnInterface, error)
	mu   struct {
		sync.Mutex
		conns map[string]*grpc.ClientConn
		links map[raft.NodeID]*link
		done  bool
	}
	outbox outbox // snapshots whose streams broke
	wg     sync.WaitGroup
	ctx    context.Context
	cancel context.CancelFunc
}

func newPeers(n *Node) *peers {
	p := &peers{node: n}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.mu.conns = map[string]*grpc.ClientConn{}
	p.mu.links = map[raft.NodeID]*link{}
	return p
}

// conn returns the connection to an address; it is made when first used.
func (p *peers) conn(addr string) (*grpc.ClientConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.done {
		return nil, context.Canceled
	}
	if c := p.mu.conns[addr]; c != nil {
		return c, nil
	}
	c, err := grpc.NewClient("passthrough:///"+addr, p.options()...)
	if err != nil {
		return nil, fmt.Errorf("server: peer address %q: %w", addr, err)
	}
	p.mu.conns[addr] = c
	return c, nil
}

func (p *peers) options() []grpc.DialOption {
	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
		grpc.WithInitialWindowSize(flowWindow), grpc.WithInitialConnWindowSize(flowWindow),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: 2 * time.Second,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}),
	}
	if a := &p.node.auth; a.tls != nil {
		opts = append(opts, grpc.WithTransportCredentials(a.tls.creds()))
	}
	if p.node.auth.peerProof != "" {
		opts = append(opts, grpc.WithPerRPCCredentials(proof(p.node.auth.peerProof)))
	}
	return opts
}

// addressOf a node: the configuration's word over what the cluster knows, so that a node
// may move.
func (p *peers) addressOf(id raft.NodeID) (string, bool) {
	for _, c := range p.node.cfg.Peers {
		if c.NodeID == uint64(id) {
			return c.Address, true
		}
	}
	addr := p.node.directory().find(uint64(id)).GetAddress()
	return addr, addr != ""
}

func (p *peers) connTo(id raft.NodeID) (grpc.ClientConnInterface, error) {
	if p.dial != nil {
		return p.dial(id)
	}
	addr, ok := p.addressOf(id)
	if !ok {
		return nil, fmt.Errorf("server: no address is known for node %d", id)
	}
	if addr, err := p.reachable(id, addr); err == nil {
		return p.conn(addr)
	}
	return p.conn(addr)
}

// connAt is the way to the node that is said to have the address.
func (p *peers) connAt(at PeerConfig) (grpc.ClientConnInterface, error) {
	if p.dial != nil {
		return p.dial(raft.NodeID(at.NodeID))
	}
	return p.conn(at.Address)
}

// forget closes the connection to an address that is not spoken to any more.
func (p *peers) forget(addr string) {
	p.mu.Lock()
	c := p.mu.conns[addr]
	delete(p.mu.conns, addr)
	p.mu.Unlock()
	if c != nil {
		_ = c.Close()
	}
}

func (p *peers) link(id raft.NodeID) *link {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.mu.links[id]
	if l == nil && !p.mu.done {
		l = &link{peers: p, to: id, wake: make(chan struct{}, 1), retry: make(chan struct{}, 1), snapshots: make(chan struct{}, 1)}
		p.mu.links[id] = l
		p.wg.Add(1)
		go l.run(p.ctx)
	}
	return l
}

// greet opens the streams to all nodes of the cluster, before there is anything to say:
// each node is to hear which boot of this one lives.
func (p *peers) greet() {
	for _, r := range p.node.directory().nodes {
		if r.GetNodeId() != p.node.id() && r.GetState() != kvdv1.NodeState_NODE_STATE_GONE {
			p.link(raft.NodeID(r.GetNodeId()))
		}
	}
}

// Send implements raft.Transport.
func (p *peers) Send(to raft.NodeID, msgs []raft.GroupMessage) {
	l := p.link(to)
	if l == nil {
		return
	}
	if !l.enqueue(msgs) {
		p.node.metrics.raftDropped.Add(float64(len(msgs)))
		p.node.host.ReportUnreachable(to)
	}
}

// SendHeartbeat implements raft.Transport. One that still waits is replaced.
func (p *peers) SendHeartbeat(to raft.NodeID, hb raft.NodeHeartbeat) {
	l := p.link(to)
	if l == nil {
		return
	}
	l.mu.Lock()
	l.mu.heartbeat = &kvdv1.NodeHeartbeat{Boot: hb.Boot}
	l.mu.Unlock()
	l.wakeUp()
}

// isUp is told that a node has just reached this one. A node that comes back is
// spoken to at once then, and not when the pauses are over that grew while it was
// away: it would miss its leader for as long.
func (p *peers) isUp(id raft.NodeID) {
	p.mu.Lock()
	if l := p.mu.links[id]; l != nil {
		select {
		case l.retry <- struct{}{}:
		default:
		}
	}
	p.mu.Unlock()
	if c, err := p.connTo(id); err == nil {
		// In other states there is no pause to end, and a connection that is being set up
		// must not be told: in v1.85 gRPC then reads a map that it is writing.
		if c, ok := c.(*grpc.ClientConn); ok && c.GetState() == connectivity.TransientFailure {
			c.ResetConnectBackoff()
		}
	}
}

func (p *peers) close() {
	p.cancel()
	p.mu.Lock()
	p.mu.done = true
	conns := p.mu.conns
	p.mu.conns = nil
	p.mu.Unlock()
	p.wg.Wait()
	p.giveUp(p.outbox.close()...)
	for _, c := range conns {
		_ = c.Close()
	}
}

// link is the stream of messages to one node.
type link struct {
	peers *peers
	to    raft.NodeID
	wake  chan struct{}
	// retry ends the pause before the next attempt: the peer is known to be up.
	retry chan struct{}
	// snapshots admits one snapshot at a time.
	snapshots chan struct{}

	mu struct {
		sync.Mutex
		queue []*kvdv1.GroupMessage
		bytes int
		// heartbeat goes before the queue; nil: none is due.
		heartbeat *kvdv1.NodeHeartbeat
	}
}

func (l *link) wakeUp() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// enqueue returns false where the queue is full.
func (l *link) enqueue(msgs []raft.GroupMessage) bool {
	encoded := make([]*kvdv1.GroupMessage, 0, len(msgs))
	size := 0
	for _, m := range msgs {
		b, err := proto.Marshal(m.Message)
		if err != nil {
			panic(fmt.Sprintf("server: encode raft message: %v", err)) // bug: raft's own messages encode
		}
		size += len(b) + 16
		encoded = append(encoded, &kvdv1.GroupMessage{Group: uint64(m.Group), Message: b, Quiesce: m.Quiesce})
	}
	l.mu.Lock()
	full := l.mu.bytes+size > queueLimit && l.mu.bytes > 0
	if !full {
		l.mu.queue = append(l.mu.queue, encoded...)
		l.mu.bytes += size
	}
	l.mu.Unlock()
	if full {
		return false
	}
	l.wakeUp()
	return true
}

// take removes a batch from the queue; nil: there is nothing to send.
func (l *link) take() *kvdv1.RaftBatch {
	l.mu.Lock()
	defer l.mu.Unlock()
	size, n := 0, 0
	for n < len(l.mu.queue) && (n == 0 || size < batchLimit) {
		size += len(l.mu.queue[n].GetMessage()) + 16
		n++
	}
	if n == 0 && l.mu.heartbeat == nil {
		return nil
	}
	batch := &kvdv1.RaftBatch{Messages: l.mu.queue[:n:n], Heartbeat: l.mu.heartbeat}
	l.mu.heartbeat = nil
	l.mu.queue = l.mu.queue[n:]
	l.mu.bytes -= size
	if len(l.mu.queue) == 0 {
		l.mu.queue, l.mu.bytes = nil, 0
	}
	return batch
}

func (l *link) clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.queue, l.mu.bytes, l.mu.heartbeat = nil, 0, nil
}

// run keeps a stream to the peer for as long as the node lives.
func (l *link) run(ctx context.Context) {
	defer l.peers.wg.Done()
	log := l.peers.node.log.With("peer", uint64(l.to))
	wait, logged, twin := retryPause, "", twinWatch{}
	for ctx.Err() == nil {
		started := time.Now()
		err := l.stream(ctx)
		if ctx.Err() != nil {
			return
		}
		l.clear()
		l.peers.node.host.ReportUnreachable(l.to)
		if reasonOf(err) == kvdv1.ErrorDetail_REASON_TWIN {
			l.peers.node.beginDoubt(l.to)
		}
		twin.ended(l.peers.node, l.to, started, err)
		if msg := fmt.Sprint(err); msg != logged {
			log.Warn("message stream to peer ended", "err", err)
			logged = msg
		}
		if time.Since(started) > 5*time.Second {
			wait, logged = retryPause/4, ""
		}
		if wait = min(2*wait, 2*time.Second); l.pause(ctx, wait/2) {
			wait = retryPause
		}
	}
}

// pause is true where word came that the peer is up.
func (l *link) pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-l.retry:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return false
}

// keepNothing: as the peer answers nothing before the end of a stream, gRPC would keep the
// first 256 KiB of what was sent, a small object or three for each heartbeat, to send it
// again by itself. Here whoever sends decides that.
var keepNothing = grpc.MaxRetryRPCBufferSize(0)

func (l *link) stream(ctx context.Context) error {
	conn, err := l.peers.connTo(l.to)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := kvdv1.NewPeerClient(conn).Raft(ctx, keepNothing)
	if err != nil {
		return err
	}
	n := l.peers.node
	hello := &kvdv1.RaftBatch{From: n.self(), ToIncarnation: n.recorded(uint64(l.to))}
	if err := s.Send(hello); err != nil {
		return l.refusal(s, err)
	}
	ended := make(chan error, 1)
	l.peers.wg.Add(1)
	go func() {
		defer l.peers.wg.Done()
		ended <- s.RecvMsg(&kvdv1.RaftAck{})
	}()
	for {
		select {
		case <-l.wake:
		case err := <-ended:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
		for batch := l.take(); batch != nil; batch = l.take() {
			if err := s.Send(batch); err != nil {
				return <-ended
			}
		}
	}
}

// refusal prefers what the peer said over the end of the stream.
func (l *link) refusal(s kvdv1.Peer_RaftClient, err error) error {
	if rerr := s.RecvMsg(&kvdv1.RaftAck{}); rerr != nil {
		return rerr
	}
	return err
}
