package server

import (
	"context"
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

// outgoing is a snapshot that is sent to a node. When its stream breaks it is kept for a
// while: the next one goes on where the receiver is.
type outgoing struct {
	to     raft.NodeID
	group  raft.GroupID
	number uint64
	snap   *engine.Snapshot
	meta   engine.Meta
	opened time.Time
	broke  time.Time // zero: no stream of it did
	// marks are positions that went out, snapshotMarkBytes apart.
	marks []snapshotPosition
}

// outbox has the snapshots that are kept.
type outbox struct {
	mu struct {
		sync.Mutex
		kept   []*outgoing // oldest first
		last   uint64      // number given out
		closed bool
	}
}

// takeOut takes out what f chooses.
func (b *outbox) takeOut(f func(i int, o *outgoing) bool) (out []*outgoing) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var keep []*outgoing
	for i, o := range b.mu.kept {
		if f(i, o) {
			out = append(out, o)
		} else {
			keep = append(keep, o)
		}
	}
	b.mu.kept = keep
	return out
}

// put keeps a snapshot; false: nothing is kept any more.
func (b *outbox) put(o *outgoing) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.closed {
		return false
	}
	b.mu.kept = append(b.mu.kept, o)
	return true
}

func (b *outbox) number() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.last++
	return b.mu.last
}

func (b *outbox) close() []*outgoing {
	b.mu.Lock()
	b.mu.closed = true
	b.mu.Unlock()
	return b.takeOut(func(int, *outgoing) bool { return true })
}

// keepOutgoing keeps a snapshot whose stream broke, and gives up what is too much then.
func (p *peers) keepOutgoing(o *outgoing) {
	o.broke = p.node.cfg.Clock.Now()
	if o.broke.Sub(o.opened) > outgoingAge || !p.outbox.put(o) {
		p.giveUp(o)
		return
	}
	p.sweepOutgoing()
}

// sweepOutgoing gives up what nobody asked for in time, and what is too much.
func (p *peers) sweepOutgoing() {
	now := p.node.cfg.Clock.Now()
	n := 0
	p.outbox.mu.Lock()
	n = len(p.outbox.mu.kept)
	p.outbox.mu.Unlock()
	p.giveUp(p.outbox.takeOut(func(i int, o *outgoing) bool {
		return now.Sub(o.broke) > outgoingKept || n-i > maxOutgoing
	})...)
}

// forgetOutgoing gives up what is kept of a group, which leaves this node.
func (p *peers) forgetOutgoing(g raft.GroupID) {
	p.giveUp(p.outbox.takeOut(func(_ int, o *outgoing) bool { return o.group == g })...)
}

func (p *peers) giveUp(all ...*outgoing) {
	for _, o := range all {
		if g := p.node.group(o.group); g != nil {
			g.ReleaseLog(o.to, false)
		}
		if err := o.snap.Close(); err != nil {
			p.node.log.Warn("a snapshot to send was closed with an error", "shard", uint64(o.group), "err", err)
		}
	}
}

// group of that number here, or nil.
func (n *Node) group(g raft.GroupID) *raft.Group {
	if n.host == nil {
		return nil
	}
	return n.host.Group(g)
}

// outgoing returns what is to be sent: what was begun, if the log goes on behind it, or
// the state as it is now.
func (p *peers) outgoing(to raft.NodeID, g raft.GroupID) (*outgoing, error) {
	group := p.node.group(g)
	if group == nil {
		return nil, fmt.Errorf("group %d has left this node", g)
	}
	p.sweepOutgoing()
	kept := p.outbox.takeOut(func(_ int, o *outgoing) bool { return o.to == to && o.group == g })
	if len(kept) == 1 && group.Status().FirstIndex <= kept[0].meta.Applied+1 {
		return kept[0], nil
	}
	p.giveUp(kept...)
	snap, err := p.node.engine.Group(uint64(g)).OpenSnapshot()
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	meta := snap.Meta()
	if meta.Applied == 0 {
		return nil, errors.Join(errors.New("there is no state to send: the replica was just made, or has left"), snap.Close())
	}
	group.KeepLog(to, meta.Applied)
	return &outgoing{to: to, group: g, number: p.outbox.number(), snap: snap, meta: meta, opened: p.node.cfg.Clock.Now()}, nil
}

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
		err := p.sendSnapshot(p.ctx, to, g, m)
		p.node.metrics.snapshotSent(err)
		done(err == nil)
	}()
}

func (p *peers) sendSnapshot(ctx context.Context, to raft.NodeID, g raft.GroupID, m *raftpb.Message) error {
	log := p.node.log.With("shard", uint64(g), "to", uint64(to))
	o, err := p.outgoing(to, g)
	if err != nil {
		log.Warn("snapshot was not sent", "err", err)
		return err
	}
	w, err := p.streamSnapshot(ctx, o, m)
	switch {
	case err == nil:
		log.Info("snapshot sent", "items", w.at.Items, "resumed-after", w.from, "index", o.meta.Applied)
		if group := p.node.group(g); group != nil {
			group.ReleaseLog(to, true)
		}
		if err := o.snap.Close(); err != nil {
			log.Warn("a snapshot that was sent was closed with an error", "err", err)
		}
	case goesOn(err) && ctx.Err() == nil:
		log.Warn("the stream of a snapshot broke; the next one goes on with it", "items", w.at.Items, "err", err)
		p.keepOutgoing(o)
	default:
		log.Warn("snapshot was not taken", "err", err)
		p.giveUp(o)
	}
	return err
}

// errRefused is the peer's own word that it does not want a snapshot.
var errRefused = errors.New("refused")

// goesOn tells whether it was the way that failed, and not what was sent, nor either end.
func goesOn(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.Canceled, codes.DeadlineExceeded, codes.Aborted:
		return true
	}
	return false
}

// streamSnapshot sends it in one stream, from where the receiver is.
func (p *peers) streamSnapshot(ctx context.Context, o *outgoing, m *raftpb.Message) (w *snapshotWriter, err error) {
	n := p.node
	w = &snapshotWriter{sum: newSnapshotHash(), mark: o.mark}
	m.Snapshot = &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
		Index: proto.Uint64(o.meta.Applied), Term: proto.Uint64(o.meta.AppliedTerm), ConfState: o.meta.Conf,
	}}
	raw, err := proto.Marshal(m)
	if err != nil {
		return w, fmt.Errorf("encode: %w", err)
	}
	conn, err := p.connTo(o.to)
	if err != nil {
		return w, err
	}
	peer := kvdv1.NewPeerClient(conn)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// A peer that takes nothing for so long is not waited for.
	stalled := time.AfterFunc(snapshotStall, cancel)
	defer stalled.Stop()
	if w.at, err = p.progress(ctx, peer, o); err != nil {
		return w, err
	}
	w.from = w.at.Items
	s, err := peer.Snapshot(ctx, keepNothing)
	if err != nil {
		return w, err
	}
	w.send = func(c *kvdv1.SnapshotChunk, bytes int) error {
		stalled.Stop() // that it waits here is no fault of the peer's
		if err := n.pace.wait(ctx, bytes); err != nil {
			return status.FromContextError(err).Err()
		}
		stalled.Reset(snapshotStall)
		if err := s.Send(c); err != nil {
			return err
		}
		n.metrics.snapshotBytesSent.Add(float64(bytes))
		return nil
	}
	header := &kvdv1.SnapshotHeader{
		From: n.self(), ToIncarnation: n.recorded(uint64(o.to)),
		Group: uint64(o.group), Message: raw, ConfigId: o.meta.ConfigID, Format: snapshotFormat,
		SnapshotId: o.number, ResumeItems: w.at.Items, ResumeSum: w.at.Sum,
	}
	err = s.Send(&kvdv1.SnapshotChunk{Header: header})
	if err == nil {
		err = o.snap.ItemsAfter(w.at.Key, w.add)
	}
	if err == nil {
		err = w.finish()
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return w, err
	}
	stalled.Reset(snapshotStall)
	// After io.EOF on sending the peer's own answer says what was wrong.
	ack, err := s.CloseAndRecv()
	if err != nil {
		return w, err
	}
	if !ack.GetInstalled() {
		return w, fmt.Errorf("node %d %w it: %s", o.to, errRefused, ack.GetRefusal())
	}
	if w.from > 0 {
		n.metrics.snapshotsResumed.Inc()
	}
	return w, nil
}

// progress asks how far the receiver came in earlier streams. Only what this node can see
// to be what it sent counts; else the snapshot is sent from its start.
func (p *peers) progress(ctx context.Context, peer kvdv1.PeerClient, o *outgoing) (at snapshotPosition, err error) {
	if o.broke.IsZero() {
		return at, nil
	}
	resp, err := peer.SnapshotProgress(ctx, &kvdv1.SnapshotProgressRequest{
		From: p.node.self(), ToIncarnation: p.node.recorded(uint64(o.to)), Group: uint64(o.group), SnapshotId: o.number,
	})
	if status.Code(err) == codes.Unimplemented {
		return at, nil // an older version
	}
	if err != nil || resp.GetItems() == 0 {
		return at, err
	}
	at = snapshotPosition{resp.GetItems(), resp.GetLastKey(), resp.GetSum()}
	ok, err := o.was(at)
	if err != nil {
		return snapshotPosition{}, err
	}
	if !ok {
		p.node.log.Warn("what a node has of a snapshot is not what was sent; it is sent from its start", "shard", uint64(o.group), "to", uint64(o.to), "items", at.Items)
		return snapshotPosition{}, nil
	}
	return at, nil
}

// mark remembers a position; those behind it are of an earlier stream.
func (o *outgoing) mark(at snapshotPosition) {
	for n := len(o.marks); n > 0 && o.marks[n-1].Items >= at.Items; n = len(o.marks) {
		o.marks = o.marks[:n-1]
	}
	o.marks = append(o.marks, at.clone())
}

var errThere = errors.New("there")

// was tells whether the position is one of this snapshot. It reads from the last mark
// before it.
func (o *outgoing) was(at snapshotPosition) (bool, error) {
	var have snapshotPosition
	for _, m := range o.marks {
		if m.Items <= at.Items {
			have = m.clone()
		}
	}
	if have.Items < at.Items {
		err := o.snap.ItemsAfter(have.Key, func(key, value []byte) error {
			if have.add(key, value); have.Items == at.Items {
				return errThere
			}
			return nil
		})
		if err != nil && !errors.Is(err, errThere) {
			return false, err
		}
	}
	return have.same(at), nil
}

// snapshotWriter packs items into chunks.
type snapshotWriter struct {
	send func(c *kvdv1.SnapshotChunk, bytes int) error
	mark func(at snapshotPosition) // may be nil

	sum    snapshotHash // of this stream
	from   uint64       // items of earlier streams
	at     snapshotPosition
	chunk  []*kvdv1.SnapshotItem
	bytes  int // in chunk
	marked int // bytes since the last mark
}

func (w *snapshotWriter) add(key, value []byte) error {
	if w.from == 0 {
		w.sum.add(key, value)
	}
	w.at.add(key, value)
	w.chunk = append(w.chunk, &kvdv1.SnapshotItem{Key: append([]byte(nil), key...), Value: append([]byte(nil), value...)})
	if w.bytes += len(key) + len(value); w.bytes >= snapshotChunkBytes {
		return w.flush()
	}
	return nil
}

func (w *snapshotWriter) flush() error {
	err := w.send(&kvdv1.SnapshotChunk{Items: w.chunk}, w.bytes)
	if w.marked += w.bytes; w.marked >= snapshotMarkBytes && w.mark != nil {
		w.mark(w.at)
		w.marked = 0
	}
	w.chunk, w.bytes = nil, 0
	return err
}

func (w *snapshotWriter) finish() error {
	if err := w.flush(); err != nil {
		return err
	}
	t := &kvdv1.SnapshotTrailer{Items: w.at.Items, Sum: w.at.Sum}
	if w.from == 0 { // a receiver of an older version goes by it
		t.Checksum = w.sum.h.Sum64()
	}
	return w.send(&kvdv1.SnapshotChunk{Trailer: t}, 0)
}
