package server

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
)

// At the address of a member that is down another may answer: a node of another cluster,
// or a new one of this. What it says must not count for the member's word, and what is
// meant for the member must not be done there. Calls of Peer carry who is asked and who
// asks; calls that clients make too, and nodes pass on, carry it in their metadata.

// addresseeKey has the node that a call is meant for. A call without is for whoever gets it.
const addresseeKey = "kvd-to"

// addressee is how a node is named in metadata.
func addressee(cluster string, id, incarnation uint64) string {
	return fmt.Sprintf("%s/%d/%016x", cluster, id, incarnation)
}

// memberConn is a connection whose calls only that member takes.
type memberConn struct {
	grpc.ClientConnInterface
	to string
}

func (c memberConn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	return c.ClientConnInterface.Invoke(metadata.AppendToOutgoingContext(ctx, addresseeKey, c.to), method, args, reply, opts...)
}

// memberConn gives the way to a member, for unary calls that are not of Peer.
func (n *Node) memberConn(id raft.NodeID) (grpc.ClientConnInterface, error) {
	c, err := n.peers.connTo(id)
	if err != nil {
		return nil, err
	}
	return memberConn{c, addressee(n.ClusterID(), uint64(id), n.recorded(uint64(id)))}, nil
}

// checkAddressee refuses a call that is meant for another node. Nothing was done then, and
// the caller may find the right one later.
func (n *Node) checkAddressee(ctx context.Context) error {
	in, _ := metadata.FromIncomingContext(ctx)
	me := n.self()
	for _, to := range in.Get(addresseeKey) {
		if to != addressee(me.GetClusterId(), me.GetNodeId(), me.GetIncarnation()) {
			return fail(kvdv1.ErrorDetail_REASON_NOT_READY, "the call was for node %s (cluster, id, incarnation), and node %d of cluster %q answers at its address", to, me.GetNodeId(), me.GetClusterId())
		}
	}
	return nil
}

// isMember tells whether it is that member of this cluster that says who it is.
func (n *Node) isMember(self *kvdv1.Identity, id uint64) bool {
	want := n.recorded(id)
	return want != 0 && self.GetClusterId() == n.ClusterID() && self.GetNodeId() == id && self.GetIncarnation() == want
}
