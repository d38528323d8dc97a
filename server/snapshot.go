package server

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/zeebo/xxh3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
)

const (
	snapshotFormat = 1
	// snapshotChunkBytes is about how much one message of a snapshot stream carries.
	snapshotChunkBytes = 1 << 20
)

// SendSnapshot implements raft.Transport.
func (p *peers) SendSnapshot(to raft.NodeID, g raft.GroupID, m *raftpb.Message, done func(ok bool)) {
	l := p.link(to)
	if l == nil {
		done(false)
		return
	}
	p.wg.Add(1)
	go func() {
		defer p.wg.Done()
		select {
		case l.snapshots <- struct{}{}:
			defer func() { <-l.snapshots }()
		case <-p.ctx.Done():
			done(false)
			return
		}
		log := p.node.log.With("shard", uint64(g), "to", uint64(to))
		items, err := p.streamSnapshot(p.ctx, to, g, m)
		if err != nil {
			log.Warn("snapshot was not taken", "err", err)
		} else {
			log.Info("snapshot sent", "items", items, "index", m.GetSnapshot().GetMetadata().GetIndex())
		}
		p.node.metrics.snapshotSent(err)
		done(err == nil)
	}()
}

// snapshotHash is the check sum of a stream: all items in order, with their lengths.
type snapshotHash struct{ h *xxh3.Hasher }

func newSnapshotHash() snapshotHash { return snapshotHash{xxh3.New()} }

func (s snapshotHash) add(key, value []byte) {
	var n [8]byte
	binary.LittleEndian.PutUint32(n[:], uint32(len(key)))
	binary.LittleEndian.PutUint32(n[4:], uint32(len(value)))
	_, _ = s.h.Write(n[:])
	_, _ = s.h.Write(key)
	_, _ = s.h.Write(value)
}

func (p *peers) streamSnapshot(ctx context.Context, to raft.NodeID, g raft.GroupID, m *raftpb.Message) (items uint64, err error) {
	n := p.node
	snap, err := n.engine.Group(uint64(g)).OpenSnapshot()
	if err != nil {
		return 0, fmt.Errorf("open: %w", err)
	}
	defer func() { err = errors.Join(err, snap.Close()) }()
	meta := snap.Meta()
	if meta.Applied == 0 {
		return 0, errors.New("there is no state to send: the replica was just made, or has left")
	}
	m.Snapshot = &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
		Index: proto.Uint64(meta.Applied), Term: proto.Uint64(meta.AppliedTerm), ConfState: meta.Conf,
	}}
	raw, err := proto.Marshal(m)
	if err != nil {
		return 0, fmt.Errorf("encode: %w", err)
	}
	conn, err := p.connTo(to)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := kvdv1.NewPeerClient(conn).Snapshot(ctx, keepNothing)
	if err != nil {
		return 0, err
	}
	out := &snapshotWriter{send: s.Send, sum: newSnapshotHash()}
	header := &kvdv1.SnapshotHeader{
		From: n.self(), ToIncarnation: n.recorded(uint64(to)),
		Group: uint64(g), Message: raw, ConfigId: meta.ConfigID, Format: snapshotFormat,
	}
	err = s.Send(&kvdv1.SnapshotChunk{Header: header})
	if err == nil {
		err = snap.Items(out.add)
	}
	if err == nil {
		err = out.finish()
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return out.items, err
	}
	// After io.EOF on sending the peer's own answer says what was wrong.
	ack, err := s.CloseAndRecv()
	if err != nil {
		return out.items, err
	}
	if !ack.GetInstalled() {
		return out.items, fmt.Errorf("node %d refused: %s", to, ack.GetRefusal())
	}
	return out.items, nil
}

type snapshotWriter struct {
	send  func(*kvdv1.SnapshotChunk) error
	sum   snapshotHash
	chunk []*kvdv1.SnapshotItem
	bytes int
	items uint64
}

func (w *snapshotWriter) add(key, value []byte) error {
	w.sum.add(key, value)
	w.items++
	w.chunk = append(w.chunk, &kvdv1.SnapshotItem{Key: append([]byte(nil), key...), Value: append([]byte(nil), value...)})
	if w.bytes += len(key) + len(value); w.bytes >= snapshotChunkBytes {
		return w.flush()
	}
	return nil
}

func (w *snapshotWriter) flush() error {
	err := w.send(&kvdv1.SnapshotChunk{Items: w.chunk})
	w.chunk, w.bytes = nil, 0
	return err
}

func (w *snapshotWriter) finish() error {
	if err := w.flush(); err != nil {
		return err
	}
	return w.send(&kvdv1.SnapshotChunk{Trailer: &kvdv1.SnapshotTrailer{Items: w.items, Checksum: w.sum.h.Sum64()}})
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
	if !sm.beginReceiving() {
		return refuse("a snapshot of group %d is being received already", h.GetGroup())
	}
	defer sm.endReceiving()
	if have := sm.appliedIndex(); m.GetSnapshot().GetMetadata().GetIndex() <= have {
		return refuse("group %d is at index %d here, the snapshot at %d", h.GetGroup(), have, m.GetSnapshot().GetMetadata().GetIndex())
	}
	staging, err := n.engine.NewStaging(h.GetGroup())
	if err != nil {
		return status.Errorf(codes.Internal, "staging for group %d: %v", h.GetGroup(), err)
	}
	if err := n.receiveItems(s, sm.content, staging); err != nil {
		return errors.Join(err, staging.Abort())
	}
	if err := sameState(m.GetSnapshot().GetMetadata(), staging.Meta()); err != nil {
		return errors.Join(err, staging.Abort())
	}
	m.Snapshot.Data = sm.stage(staging, m.GetSnapshot().GetMetadata().GetIndex())
	n.host.Step([]raft.GroupMessage{{Group: raft.GroupID(h.GetGroup()), Message: m}})
	return s.SendAndClose(&kvdv1.SnapshotAck{Installed: true})
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

func (n *Node) receiveItems(s kvdv1.Peer_SnapshotServer, c content, staging *engine.Staging) error {
	sum, items := newSnapshotHash(), uint64(0)
	for {
		select {
		case <-n.deaf:
			return fail(kvdv1.ErrorDetail_REASON_NOT_READY, "node %d is shutting down", n.id())
		default:
		}
		chunk, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return status.Errorf(codes.DataLoss, "the snapshot ended after %d items without its trailer", items)
		}
		if err != nil {
			return err
		}
		for _, it := range chunk.GetItems() {
			sum.add(it.GetKey(), it.GetValue())
			items++
			if err := stageItem(it, c, staging); err != nil {
				return stagingFailed(fmt.Sprintf("item %d", items), err)
			}
		}
		if t := chunk.GetTrailer(); t != nil {
			if t.GetItems() != items || t.GetChecksum() != sum.h.Sum64() {
				return status.Errorf(codes.DataLoss, "the snapshot is damaged: %d items with check sum %016x came, %d with %016x were sent", items, sum.h.Sum64(), t.GetItems(), t.GetChecksum())
			}
			if err := staging.Finish(); err != nil {
				return stagingFailed("the end", err)
			}
			return nil
		}
	}
}

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
