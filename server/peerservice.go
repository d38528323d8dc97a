package server

import (
	"context"
	"errors"
	"io"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

// checkPeer refuses whoever is not a node of this cluster as it was recorded, and
// whoever takes this node for another.
func (n *Node) checkPeer(from *kvdv1.Identity, toIncarnation uint64) error {
	id := n.identity.Load()
	if id == nil || !id.active {
		return errStarting
	}
	refuse := func(format string, args ...any) error {
		return fail(kvdv1.ErrorDetail_REASON_WRONG_CLUSTER, format, args...)
	}
	node := n.directory().find(from.GetNodeId())
	switch want := node.GetIncarnation(); {
	case from.GetClusterId() != id.manifest.GetClusterId():
		return refuse("node %d belongs to cluster %q, this one to %q", from.GetNodeId(), from.GetClusterId(), id.manifest.GetClusterId())
	case want == 0:
		return refuse("node %d is not a member of cluster %s", from.GetNodeId(), id.manifest.GetClusterId())
	case from.GetIncarnation() != want:
		return refuse("node %d has incarnation %016x, recorded is %016x: its directory is a copy or was made anew; an id is never used twice", from.GetNodeId(), from.GetIncarnation(), want)
	case node.GetState() == kvdv1.NodeState_NODE_STATE_GONE:
		return refuse("%s", goneAdvice(node))
	case toIncarnation != id.incarnation():
		return refuse("node %d looks for incarnation %016x, this is %016x", from.GetNodeId(), toIncarnation, id.incarnation())
	}
	return n.checkProtocol(from)
}

// Raft implements kvdv1.PeerServer: it receives one peer's messages.
func (n *Node) Raft(s kvdv1.Peer_RaftServer) error {
	first, err := s.Recv()
	if err != nil {
		return err
	}
	if err := n.checkPeer(first.GetFrom(), first.GetToIncarnation()); err != nil {
		n.log.Warn("refused a peer", "node", first.GetFrom().GetNodeId(), "err", status.Convert(err).Message())
		return err
	}
	if !n.hosting.Load() {
		return errStarting
	}
	from := first.GetFrom().GetNodeId()
	in, err := n.admit(s.Context(), first.GetFrom())
	if err != nil {
		n.log.Warn("refused a peer", "node", from, "err", status.Convert(err).Message())
		return err
	}
	defer n.boots.leave(from, in)
	n.peers.isUp(raft.NodeID(from))
	ended := make(chan error, 1)
	n.background(func(context.Context) { ended <- n.receive(s, from) })
	select {
	case err := <-ended:
		return err
	case <-in.evicted:
		return failTwin(from)
	case <-n.deaf: // returning ends the stream, and with it receive
		return fail(kvdv1.ErrorDetail_REASON_NOT_READY, "node %d is shutting down", n.id())
	}
}

// receive hands a peer's messages to their groups until the stream ends.
func (n *Node) receive(s kvdv1.Peer_RaftServer, from uint64) error {
	for {
		batch, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return s.SendAndClose(&kvdv1.RaftAck{})
		}
		if err != nil {
			return err
		}
		if hb := batch.GetHeartbeat(); hb != nil {
			n.host.Heartbeat(raft.NodeID(from), raft.NodeHeartbeat{Boot: hb.GetBoot()})
		}
		msgs := make([]raft.GroupMessage, 0, len(batch.GetMessages()))
		for _, gm := range batch.GetMessages() {
			m := &raftpb.Message{}
			if err := proto.Unmarshal(gm.GetMessage(), m); err != nil {
				return status.Errorf(codes.InvalidArgument, "a message of group %d from node %d can not be decoded: %v", gm.GetGroup(), from, err)
			}
			if m.GetFrom() != from || m.GetTo() != n.id() {
				return status.Errorf(codes.InvalidArgument, "node %d sent a message of node %d to node %d", from, m.GetFrom(), m.GetTo())
			}
			if m.GetType() == raftpb.MessageType_MsgSnap {
				return status.Errorf(codes.InvalidArgument, "node %d sent a snapshot in the message stream", from)
			}
			msgs = append(msgs, raft.GroupMessage{Group: raft.GroupID(gm.GetGroup()), Message: m, Quiesce: gm.GetQuiesce()})
		}
		if len(msgs) > 0 {
			n.host.Step(msgs)
		}
	}
}
