package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
)

// incoming is what came of a snapshot. Between two streams it belongs to its machine,
// during one to the handler.
type incoming struct {
	incomingNote
	staging *engine.Staging
	since   time.Time // when its stream broke, or this node started
}

// incomingNote is what checkpoints of the staging have with them.
type incomingNote struct {
	Name  snapshotName
	Index uint64
	At    snapshotPosition
}

// save makes durable what came.
func (in *incoming) save() error {
	note, err := json.Marshal(in.incomingNote)
	if err != nil {
		return fmt.Errorf("server: encode a snapshot's progress: %w", err)
	}
	return in.staging.Checkpoint(note)
}

// receiving is a stream that brings a snapshot.
type receiving struct {
	name      snapshotName
	displaced chan struct{} // closed: another stream of the same snapshot wants to go on
	ended     chan struct{}
	once      sync.Once
}

// beginReceiving admits one snapshot at a time: each takes the disk of a whole group. It
// returns what there is to go on with, too; either may be nil.
func (m *machine) beginReceiving(name snapshotName) (*receiving, *incoming) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.receiving != nil || m.mu.left {
		return nil, nil
	}
	m.mu.receiving = &receiving{name: name, displaced: make(chan struct{}), ended: make(chan struct{})}
	in := m.mu.incoming
	m.mu.incoming = nil
	return m.mu.receiving, in
}

func (m *machine) endReceiving(r *receiving) {
	m.mu.Lock()
	m.mu.receiving = nil
	m.mu.Unlock()
	close(r.ended)
}

// displace ends a stream of that snapshot which its sender takes for broken: this node may
// not have noticed yet.
func (m *machine) displace(ctx context.Context, name snapshotName) {
	m.mu.Lock()
	r := m.mu.receiving
	m.mu.Unlock()
	if r == nil || r.name != name || name.Number == 0 {
		return
	}
	r.once.Do(func() { close(r.displaced) })
	select {
	case <-r.ended:
	case <-ctx.Done():
	}
}

// keepIncoming keeps what came for the next stream; false: it is not wanted here.
func (m *machine) keepIncoming(in *incoming) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.left || m.mu.incoming != nil {
		return false
	}
	m.mu.incoming = in
	return true
}

// takeIncoming takes out what f chooses; nil: nothing, or something else.
func (m *machine) takeIncoming(f func(in *incoming) bool) *incoming {
	m.mu.Lock()
	defer m.mu.Unlock()
	in := m.mu.incoming
	if in == nil || !f(in) {
		return nil
	}
	m.mu.incoming = nil
	return in
}

// keptIncoming are the machines that keep something.
func (n *Node) keptIncoming() (all []*machine) {
	machines := []*machine{n.meta}
	for _, sh := range n.localShards() {
		machines = append(machines, sh.machine)
	}
	for _, m := range machines {
		if m == nil {
			continue
		}
		m.mu.Lock()
		if m.mu.incoming != nil {
			all = append(all, m)
		}
		m.mu.Unlock()
	}
	return all
}

// sweepIncoming gives up what nobody went on with in time, what is of no use any more,
// and the oldest of what is too much.
func (n *Node) sweepIncoming() {
	now := n.cfg.Clock.Now()
	for {
		kept := n.keptIncoming()
		var oldest *machine
		since := now
		for _, m := range kept {
			n.abortIncoming(m.takeIncoming(func(in *incoming) bool {
				return now.Sub(in.since) > incomingKept || in.Index <= m.appliedIndex()
			}))
			m.mu.Lock()
			if in := m.mu.incoming; in != nil && !in.since.After(since) {
				oldest, since = m, in.since
			}
			m.mu.Unlock()
		}
		if len(n.keptIncoming()) <= maxIncoming || oldest == nil {
			return
		}
		n.abortIncoming(oldest.takeIncoming(func(*incoming) bool { return true }))
	}
}

func (n *Node) abortIncoming(in *incoming) {
	if in == nil {
		return
	}
	if err := in.staging.Abort(); err != nil {
		n.log.Warn("what was received of a snapshot could not be removed; the next start does it", "shard", in.staging.Group(), "err", err)
	}
}

// goOnReceiving takes up what an earlier run of this node received.
func (n *Node) goOnReceiving() {
	for _, s := range n.engine.KeptStagings() {
		in := &incoming{staging: s, since: n.cfg.Clock.Now()}
		err := json.Unmarshal(s.Note(), &in.incomingNote)
		m := n.machine(raft.GroupID(s.Group()))
		if err != nil || m == nil || in.Index <= m.appliedIndex() || !m.keepIncoming(in) {
			n.abortIncoming(in)
			continue
		}
		n.log.Info("what was received of a snapshot is kept, for its sender to go on", "shard", s.Group(), "from", in.Name.Node, "items", in.At.Items)
	}
	n.sweepIncoming()
}

// SnapshotProgress implements kvdv1.PeerServer.
func (n *Node) SnapshotProgress(ctx context.Context, req *kvdv1.SnapshotProgressRequest) (*kvdv1.SnapshotProgressResponse, error) {
	if err := n.checkPeer(req.GetFrom(), req.GetToIncarnation()); err != nil {
		return nil, err
	}
	if !n.hosting.Load() {
		return nil, errStarting
	}
	m := n.machine(raft.GroupID(req.GetGroup()))
	if m == nil {
		return &kvdv1.SnapshotProgressResponse{}, nil
	}
	name := nameOf(req.GetFrom(), req.GetSnapshotId())
	m.displace(ctx, name)
	m.mu.Lock()
	defer m.mu.Unlock()
	in := m.mu.incoming
	if in == nil || in.Name != name {
		return &kvdv1.SnapshotProgressResponse{}, nil
	}
	in.since = n.cfg.Clock.Now()
	return &kvdv1.SnapshotProgressResponse{Items: in.At.Items, LastKey: in.At.Key, Sum: in.At.Sum}, nil
}

// Snapshot implements kvdv1.PeerServer: it collects a snapshot beside the present
// state and then lets Raft decide whether it is installed.
func (n *Node) Snapshot(s kvdv1.Peer_SnapshotServer) error {
	first, err := s.Recv()
	if err != nil {
		return err
	}
	h := first.GetHeader()
	if err := n.checkPeer(h.GetFrom(), h.GetToIncarnation()); err != nil {
		return err
	}
	if !n.hosting.Load() {
		return errStarting
	}
	// The state of a copy would be as old as the copy.
	if len(n.boots.others(h.GetFrom().GetNodeId(), h.GetFrom().GetBootId())) > 0 {
		return failTwin(h.GetFrom().GetNodeId())
	}
	refuse := func(format string, args ...any) error {
		return s.SendAndClose(&kvdv1.SnapshotAck{Refusal: fmt.Sprintf(format, args...)})
	}
	if h.GetFormat() != snapshotFormat {
		return refuse("the snapshot has format %d, this kvd knows %d: start the newer kvd that node %d runs", h.GetFormat(), snapshotFormat, h.GetFrom().GetNodeId())
	}
	m := &raftpb.Message{}
	if err := proto.Unmarshal(h.GetMessage(), m); err != nil || m.GetType() != raftpb.MessageType_MsgSnap ||
		m.GetFrom() != h.GetFrom().GetNodeId() || m.GetTo() != n.id() {
		return status.Error(codes.InvalidArgument, "the snapshot's header has no proper message")
	}
	sm := n.machine(raft.GroupID(h.GetGroup()))
	if sm == nil {
		return refuse("no replica of group %d here", h.GetGroup())
	}
	name := nameOf(h.GetFrom(), h.GetSnapshotId())
	sm.displace(s.Context(), name)
	r, earlier := sm.beginReceiving(name)
	if r == nil {
		return refuse("a snapshot of group %d is being received already", h.GetGroup())
	}
	defer sm.endReceiving(r)
	index := m.GetSnapshot().GetMetadata().GetIndex()
	if have := sm.appliedIndex(); index <= have {
		n.abortIncoming(earlier)
		return refuse("group %d is at index %d here, the snapshot at %d", h.GetGroup(), have, index)
	}
	in, err := n.beginIncoming(h, incomingNote{Name: name, Index: index}, earlier)
	if err != nil {
		return err
	}
	if err := n.receiveItems(s, r, sm.content, in); err != nil {
		return n.brokeOff(sm, in, err)
	}
	if err := sameState(m.GetSnapshot().GetMetadata(), in.staging.Meta()); err != nil {
		return errors.Join(err, in.staging.Abort())
	}
	m.Snapshot.Data = sm.stage(in.staging, index)
	n.host.Step([]raft.GroupMessage{{Group: raft.GroupID(h.GetGroup()), Message: m}})
	return s.SendAndClose(&kvdv1.SnapshotAck{Installed: true})
}

// beginIncoming goes on with what came earlier, or begins anew in its place.
func (n *Node) beginIncoming(h *kvdv1.SnapshotHeader, want incomingNote, earlier *incoming) (*incoming, error) {
	if h.GetResumeItems() > 0 {
		if earlier != nil && earlier.Name == want.Name && earlier.Index == want.Index &&
			earlier.At.Items == h.GetResumeItems() && earlier.At.Sum == h.GetResumeSum() {
			n.log.Info("goes on with a snapshot", "shard", h.GetGroup(), "from", want.Name.Node, "items", earlier.At.Items)
			return earlier, nil
		}
		n.abortIncoming(earlier)
		// The sender asks again how much is here.
		return nil, status.Errorf(codes.Aborted, "the first %d items of snapshot %d of group %d are not here", h.GetResumeItems(), want.Name.Number, h.GetGroup())
	}
	n.abortIncoming(earlier)
	staging, err := n.engine.NewStaging(h.GetGroup())
	if err != nil {
		return nil, status.Errorf(codes.Internal, "staging for group %d: %v", h.GetGroup(), err)
	}
	return &incoming{incomingNote: want, staging: staging}, nil
}

// errBroke: the stream ended before the snapshot did, for no fault of its items.
var errBroke = errors.New("the stream of a snapshot broke")

// brokeOff keeps what came, if the sender can go on with it, and returns err.
func (n *Node) brokeOff(sm *machine, in *incoming, err error) error {
	if errors.Is(err, errBroke) && in.Name.Number != 0 && in.At.Items > 0 {
		in.since = n.cfg.Clock.Now()
		serr := in.save()
		if serr == nil && sm.keepIncoming(in) {
			n.log.Info("the stream of a snapshot broke; what came is kept", "shard", in.staging.Group(), "from", in.Name.Node, "items", in.At.Items, "err", err)
			n.sweepIncoming()
			return err
		}
		err = errors.Join(err, serr)
	}
	return errors.Join(err, in.staging.Abort())
}

// sameState refuses a snapshot whose message, which Raft goes by, tells of another
// state than its items hold. Found after the installation it would be too late.
func sameState(said *raftpb.SnapshotMetadata, got engine.Meta) error {
	if got.Applied != said.GetIndex() || got.AppliedTerm != said.GetTerm() || !proto.Equal(got.Conf, said.GetConfState()) {
		return status.Errorf(codes.InvalidArgument, "the snapshot holds index %d of term %d, configuration %v; its message says %d of %d, %v",
			got.Applied, got.AppliedTerm, got.Conf, said.GetIndex(), said.GetTerm(), said.GetConfState())
	}
	return nil
}

// chunks hands over what a stream brings, up to its end, until done is closed.
func (n *Node) chunks(s kvdv1.Peer_SnapshotServer, done <-chan struct{}) <-chan arrival {
	c := make(chan arrival)
	n.background(func(context.Context) {
		for {
			chunk, err := s.Recv()
			select {
			case c <- arrival{chunk, err}:
			case <-done:
				return
			}
			if err != nil {
				return
			}
		}
	})
	return c
}

type arrival struct {
	chunk *kvdv1.SnapshotChunk
	err   error
}

func (n *Node) receiveItems(s kvdv1.Peer_SnapshotServer, r *receiving, c content, in *incoming) error {
	sum, resumed := newSnapshotHash(), in.At.Items > 0
	done := make(chan struct{})
	defer close(done)
	arrivals := n.chunks(s, done)
	for {
		var a arrival
		select {
		case a = <-arrivals:
		case <-n.deaf:
			return broke(fail(kvdv1.ErrorDetail_REASON_NOT_READY, "node %d is shutting down", n.id()))
		case <-r.displaced:
			return broke(status.Error(codes.Aborted, "another stream goes on with this snapshot"))
		}
		if errors.Is(a.err, io.EOF) {
			return status.Errorf(codes.DataLoss, "the snapshot ended after %d items without its trailer", in.At.Items)
		}
		if a.err != nil {
			return broke(a.err)
		}
		for _, it := range a.chunk.GetItems() {
			if in.Name.Number == 0 {
				sum.add(it.GetKey(), it.GetValue())
			}
			if err := stageItem(it, c, in.staging); err != nil {
				return stagingFailed(fmt.Sprintf("item %d", in.At.Items+1), err)
			}
			in.At.add(it.GetKey(), it.GetValue())
			n.metrics.snapshotBytesReceived.Add(float64(len(it.GetKey()) + len(it.GetValue())))
		}
		t := a.chunk.GetTrailer()
		if t == nil {
			if in.Name.Number != 0 && in.staging.Unsaved() >= snapshotSaveBytes {
				if err := in.save(); err != nil {
					return stagingFailed(fmt.Sprintf("item %d", in.At.Items), err)
				}
			}
			continue
		}
		have, want := in.At.Sum, t.GetSum()
		if in.Name.Number == 0 {
			have, want = sum.h.Sum64(), t.GetChecksum()
		}
		if t.GetItems() != in.At.Items || have != want {
			return status.Errorf(codes.DataLoss, "the snapshot is damaged: %d items with check sum %016x came, %d with %016x were sent (resumed: %v)", in.At.Items, have, t.GetItems(), want, resumed)
		}
		// A crash before Raft installs it need not cost all of it.
		if in.Name.Number != 0 {
			if err := in.save(); err != nil {
				return stagingFailed("the end", err)
			}
		}
		if err := in.staging.Finish(); err != nil {
			return stagingFailed("the end", err)
		}
		return nil
	}
}

// broke wraps what ended the stream; gRPC's code stays what it was.
func broke(err error) error { return &brokenStream{err} }

type brokenStream struct{ err error }

func (b *brokenStream) Error() string              { return b.err.Error() }
func (b *brokenStream) Unwrap() []error            { return []error{errBroke, b.err} }
func (b *brokenStream) GRPCStatus() *status.Status { return status.Convert(b.err) }

func stageItem(it *kvdv1.SnapshotItem, c content, staging *engine.Staging) error {
	if pair, ok := engine.DecodeItem(it.GetKey(), it.GetValue()); ok {
		if err := c.check(pair); err != nil {
			return err
		}
	}
	return staging.Add(it.GetKey(), it.GetValue())
}

// stagingFailed tells what the peer sent from what this node's disk did.
func stagingFailed(at string, err error) error {
	if errors.Is(err, engine.ErrCorrupt) {
		return status.Errorf(codes.DataLoss, "the snapshot is damaged at %s: %v", at, err)
	}
	return status.Errorf(codes.Internal, "the snapshot can not be kept, at %s: %v", at, err)
}
