package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
)

// counted adds up a counter over its labels.
func counted(t testing.TB, n *Node, name, label string) (sum float64) {
	families, err := n.metrics.registry.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			if l := m.GetLabel(); label == "" || len(l) > 0 && l[0].GetValue() == label {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// A follower that was away for longer than the log is kept comes back by a snapshot:
// its engine and its memory show everything, and nothing that was deleted meanwhile.
func TestFollowerCatchesUpBySnapshot(t *testing.T) {
	c := startCluster(t, 3, 1, func(cfg *Config) { cfg.LogRetainEntries = 20 })
	_, err := c.put("old", "will be deleted", nil)
	require.NoError(t, err)
	leader := c.leaderOf(1)
	away := (leader + 1) % 3
	before := c.nodes[away].shard(1).appliedIndex()
	c.stopNode(away)
	ctx := testContext(t)
	kv := c.kv(leader)
	_, err = kv.Delete(ctx, &kvdv1.DeleteRequest{NamespaceId: 1, Key: []byte("old")})
	require.NoError(t, err)
	write := func(from, to int) {
		for i := from; i < to; i++ {
			_, err := kv.Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: fmt.Appendf(nil, "key-%d", i), Value: fmt.Appendf(nil, "value-%d", i)})
			require.NoError(t, err)
		}
	}
	write(0, 150)
	ln := c.nodes[leader]
	require.NoError(t, ln.engine.Flush())
	for i := 150; ; i += 10 {
		write(i, i+10) // whoever appends looks at what may be cut
		if ln.host.Group(1).Status().FirstIndex > before+1 {
			break
		}
		require.Less(t, i, 5000, "the log is not cut")
	}
	require.NoError(t, c.start(away))
	n := c.nodes[away]
	sent := counted(t, ln, "kvd_snapshots_sent_total", "ok")
	eventually(t, "the follower has everything", func() bool {
		return n.shard(1).appliedIndex() >= ln.shard(1).appliedIndex()
	})
	require.Greater(t, counted(t, ln, "kvd_snapshots_sent_total", "ok"), sent, "it came by the log")
	sh := n.shard(1)
	_, resident := sh.space(1).Lookup([]byte("old"))
	require.False(t, resident)
	for i := range 150 {
		key := fmt.Appendf(nil, "key-%d", i)
		v, ok, err := sh.eng.Get(1, key)
		require.NoError(t, err)
		require.True(t, ok)
		loc, resident := sh.space(1).Lookup(key)
		require.True(t, resident)
		require.Equal(t, v.Version, loc.Version)
	}
	require.NotNil(t, n.route(1, 1).GetLocal().GetTable())
}

// fakePeer speaks to a node as if it were another node of the cluster.
type fakePeer struct {
	t      *testing.T
	c      *testCluster
	as, to int // indexes of nodes
}

func (f fakePeer) identity() *kvdv1.Identity { return f.c.nodes[f.as].self() }

func (f fakePeer) incarnation() uint64 { return f.c.nodes[f.to].identity.Load().incarnation() }

func (f fakePeer) client() kvdv1.PeerClient { return kvdv1.NewPeerClient(f.c.conns[f.to]) }

func (f fakePeer) snapMessage(index uint64) *raftpb.Message {
	return &raftpb.Message{
		Type: raftpb.MessageType_MsgSnap.Enum(), From: proto.Uint64(uint64(f.as + 1)), To: proto.Uint64(uint64(f.to + 1)), Term: proto.Uint64(1),
		Snapshot: &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
			Index: proto.Uint64(index), Term: proto.Uint64(1), ConfState: &raftpb.ConfState{Voters: []uint64{1, 2, 3}},
		}},
	}
}

// snapshot is a whole stream which the cases spoil.
type snapshot struct {
	header  *kvdv1.SnapshotHeader
	message *raftpb.Message
	items   []*kvdv1.SnapshotItem
	trailer *kvdv1.SnapshotTrailer
}

func (f fakePeer) send(s snapshot) (*kvdv1.SnapshotAck, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	stream, err := f.client().Snapshot(ctx)
	require.NoError(f.t, err)
	if s.message != nil {
		s.header.Message, err = proto.Marshal(s.message)
		require.NoError(f.t, err)
	}
	_ = stream.Send(&kvdv1.SnapshotChunk{Header: s.header})
	_ = stream.Send(&kvdv1.SnapshotChunk{Items: s.items})
	if s.trailer != nil {
		_ = stream.Send(&kvdv1.SnapshotChunk{Trailer: s.trailer})
	}
	return stream.CloseAndRecv()
}

func (f fakePeer) whole(index uint64) snapshot {
	snap, err := f.c.nodes[f.to].engine.Group(1).OpenSnapshot()
	require.NoError(f.t, err)
	defer func() { require.NoError(f.t, snap.Close()) }()
	s := snapshot{message: f.snapMessage(index), trailer: &kvdv1.SnapshotTrailer{}}
	s.header = &kvdv1.SnapshotHeader{From: f.identity(), ToIncarnation: f.incarnation(), Group: 1, Format: snapshotFormat}
	require.NoError(f.t, snap.Items(func(k, v []byte) error {
		s.items = append(s.items, &kvdv1.SnapshotItem{Key: append([]byte{}, k...), Value: append([]byte{}, v...)})
		return nil
	}))
	s.sum()
	return s
}

func (s *snapshot) sum() {
	h := newSnapshotHash()
	for _, it := range s.items {
		h.add(it.GetKey(), it.GetValue())
	}
	s.trailer.Items, s.trailer.Checksum = uint64(len(s.items)), h.h.Sum64()
}

// A snapshot that is torn, damaged or not meant for this node is refused, and nothing
// has changed then.
func TestSnapshotIsRefused(t *testing.T) {
	c := startCluster(t, 3, 2)
	var keys [3]string // one of shard 1, at 1, and one of shard 2
	for i := 0; keys[1] == "" || keys[2] == ""; i++ {
		key := fmt.Sprint("key-", i)
		keys[c.shardOf([]byte(key))] = key
	}
	for _, key := range keys[1:] {
		_, err := c.put(key, "value", nil)
		require.NoError(t, err)
	}
	leader := c.leaderOf(1)
	f := fakePeer{t: t, c: c, as: leader, to: (leader + 1) % 3}
	target := c.nodes[f.to].shard(1)
	eventually(t, "the follower has all", func() bool { return target.appliedIndex() == c.nodes[leader].shard(1).appliedIndex() })
	before, index := dump(t, target.eng), target.appliedIndex()
	const far = 1 << 20
	foreign := func(s *snapshot) {
		for i, it := range s.items {
			if p, ok := engine.DecodeItem(it.GetKey(), it.GetValue()); ok && p.Aux == 0 {
				prefix := it.GetKey()[:len(it.GetKey())-len(p.Key)]
				s.items[i].Key = append(append([]byte{}, prefix...), keys[2]...)
			}
		}
		s.sum()
	}
	for name, x := range map[string]struct {
		spoil   func(s *snapshot)
		code    codes.Code // of the stream; OK: an answer that refuses
		refusal string
	}{
		"checksum":            {func(s *snapshot) { s.trailer.Checksum++ }, codes.DataLoss, "damaged"},
		"count":               {func(s *snapshot) { s.trailer.Items++ }, codes.DataLoss, "damaged"},
		"torn":                {func(s *snapshot) { s.trailer = nil }, codes.DataLoss, "without its trailer"},
		"nothing":             {func(s *snapshot) { s.items = nil; s.sum() }, codes.DataLoss, "no meta record"},
		"bad value":           {func(s *snapshot) { s.items[1].Value[9]++; s.sum() }, codes.DataLoss, "check sum"},
		"order":               {func(s *snapshot) { s.items[0], s.items[1] = s.items[1], s.items[0]; s.sum() }, codes.DataLoss, "comes after"},
		"no key":              {func(s *snapshot) { s.items[0].Key = nil; s.sum() }, codes.DataLoss, "empty key"},
		"key of elsewhere":    {foreign, codes.DataLoss, "belongs to shard 2"},
		"other state":         {func(*snapshot) {}, codes.InvalidArgument, "its message says"},
		"old":                 {func(s *snapshot) { s.message = f.snapMessage(index) }, codes.OK, "is at index"},
		"no metadata":         {func(s *snapshot) { s.message.Snapshot = nil }, codes.OK, "is at index"},
		"format":              {func(s *snapshot) { s.header.Format = 9 }, codes.OK, "has format 9, this kvd knows 1: start the newer kvd that node"},
		"no such group":       {func(s *snapshot) { s.header.Group = 77 }, codes.OK, "no replica of group 77"},
		"group beyond 32 bit": {func(s *snapshot) { s.header.Group = 1<<32 | 1 }, codes.OK, "no replica"},
		"no header":           {func(s *snapshot) { s.header, s.message = nil, nil }, codes.FailedPrecondition, "belongs to cluster"},
		"incarnation":         {func(s *snapshot) { s.header.From.Incarnation++ }, codes.FailedPrecondition, "a copy or was made anew"},
		"for another":         {func(s *snapshot) { s.header.ToIncarnation++ }, codes.FailedPrecondition, "looks for incarnation"},
		"no message":          {func(s *snapshot) { s.message = nil }, codes.InvalidArgument, "no proper message"},
		"garbage message":     {func(s *snapshot) { s.message, s.header.Message = nil, []byte{0xff} }, codes.InvalidArgument, "no proper message"},
		"other message":       {func(s *snapshot) { s.message.Type = raftpb.MessageType_MsgApp.Enum() }, codes.InvalidArgument, "no proper message"},
		"from another":        {func(s *snapshot) { s.message.From = proto.Uint64(9) }, codes.InvalidArgument, "no proper message"},
		"to another":          {func(s *snapshot) { s.message.To = proto.Uint64(9) }, codes.InvalidArgument, "no proper message"},
	} {
		s := f.whole(far)
		x.spoil(&s)
		ack, err := f.send(s)
		require.Equal(t, x.code, status.Code(err), "%s: %v", name, err)
		if err == nil {
			require.False(t, ack.GetInstalled(), name)
			require.Contains(t, ack.GetRefusal(), x.refusal, name)
		} else {
			require.ErrorContains(t, err, x.refusal, name)
		}
		require.Equal(t, before, dump(t, target.eng), name)
		require.Equal(t, index, target.appliedIndex(), name)
		require.Nil(t, target.takeStaged([]byte{1, 0, 0, 0, 0, 0, 0, 0}), name)
	}
	// One at a time: the first is still being received.
	r, _ := target.beginReceiving(snapshotName{})
	require.NotNil(t, r)
	ack, err := f.send(f.whole(far))
	require.NoError(t, err)
	require.Contains(t, ack.GetRefusal(), "received already")
	target.endReceiving(r)
	_, err = c.put(keys[1], "later", nil)
	require.NoError(t, err)
}

func dump(t testing.TB, g *engine.Group) (all []string) {
	s, err := g.OpenSnapshot()
	require.NoError(t, err)
	require.NoError(t, s.Items(func(k, v []byte) error {
		all = append(all, fmt.Sprintf("%x=%x", k, v))
		return nil
	}))
	require.NoError(t, s.Close())
	return all
}

// A message stream of somebody who is not that peer, or with what no peer sends there,
// ends with a reason; the node goes on.
func TestRaftStreamIsRefused(t *testing.T) {
	c := startCluster(t, 3, 1)
	f := fakePeer{t: t, c: c, as: 0, to: 1}
	open := func(from *kvdv1.Identity, incarnation uint64, messages ...*kvdv1.GroupMessage) error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		s, err := f.client().Raft(ctx)
		require.NoError(t, err)
		_ = s.Send(&kvdv1.RaftBatch{From: from, ToIncarnation: incarnation})
		if len(messages) > 0 {
			_ = s.Send(&kvdv1.RaftBatch{Messages: messages})
		}
		_, err = s.CloseAndRecv()
		return err
	}
	require.NoError(t, open(f.identity(), f.incarnation()), "the control: a proper peer")
	wrong := func(change func(*kvdv1.Identity)) *kvdv1.Identity {
		id := f.identity()
		change(id)
		return id
	}
	for what, id := range map[string]*kvdv1.Identity{
		"nobody":      nil,
		"cluster":     wrong(func(id *kvdv1.Identity) { id.ClusterId = "other" }),
		"incarnation": wrong(func(id *kvdv1.Identity) { id.Incarnation++ }),
		"node":        wrong(func(id *kvdv1.Identity) { id.NodeId = 9 }),
	} {
		requireReason(t, open(id, f.incarnation()), kvdv1.ErrorDetail_REASON_WRONG_CLUSTER, what)
	}
	requireReason(t, open(f.identity(), f.incarnation()+1), kvdv1.ErrorDetail_REASON_WRONG_CLUSTER)

	message := func(group uint64, m *raftpb.Message) *kvdv1.GroupMessage {
		b, err := proto.Marshal(m)
		require.NoError(t, err)
		return &kvdv1.GroupMessage{Group: group, Message: b}
	}
	of := func(kind raftpb.MessageType, from, to uint64) *raftpb.Message {
		return &raftpb.Message{Type: kind.Enum(), From: &from, To: &to, Term: proto.Uint64(1)}
	}
	for what, m := range map[string]*kvdv1.GroupMessage{
		"garbage":      {Group: 1, Message: []byte{0xff}},
		"nothing":      nil,
		"snapshot":     message(1, f.snapMessage(99)),
		"from another": message(1, of(raftpb.MessageType_MsgHeartbeat, 3, 2)),
		"to another":   message(1, of(raftpb.MessageType_MsgHeartbeat, 1, 3)),
	} {
		require.Equal(t, codes.InvalidArgument, status.Code(open(f.identity(), f.incarnation(), m)), what)
	}
	// What is no business of a peer is dropped by the groups.
	for _, kind := range []raftpb.MessageType{raftpb.MessageType_MsgHup, raftpb.MessageType_MsgBeat, raftpb.MessageType_MsgProp, raftpb.MessageType_MsgStorageApply, raftpb.MessageType_MsgUnreachable, 99} {
		require.NoError(t, open(f.identity(), f.incarnation(), message(1, of(kind, 1, 2)), message(1<<40, of(kind, 1, 2)), message(0, of(kind, 1, 2))))
	}
	_, err := c.put("key", "value", nil)
	require.NoError(t, err)
	for _, n := range c.nodes {
		require.Empty(t, n.fatal)
	}
}

func TestTransferLeader(t *testing.T) {
	c := startCluster(t, 3, 1)
	from := c.leaderOf(1)
	to := (from + 1) % 3
	_, err := kvdv1.NewClusterClient(c.conns[from]).TransferLeader(testContext(t), &kvdv1.TransferLeaderRequest{Shard: 1, ToNode: uint64(to + 1)})
	require.NoError(t, err)
	require.Equal(t, to, c.leaderOf(1))
	_, err = kvdv1.NewClusterClient(c.conns[to]).TransferLeader(testContext(t), &kvdv1.TransferLeaderRequest{Shard: 1, ToNode: 9})
	require.Error(t, err)
}

// A node that stops hands its shards over and answers what it was asked before. No
// put is lost, and none has an unknown outcome.
func TestStopHandsOver(t *testing.T) {
	c := startCluster(t, 3, 4)
	key := []byte("key")
	_, err := c.put("key", "", nil)
	require.NoError(t, err)
	leader := c.leaderOf(c.shardOf(key))
	n := c.nodes[leader]
	// A stream that never ends by itself must not hold it up.
	watch, err := healthpb.NewHealthClient(c.conns[leader]).Watch(testContext(t), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	_, err = watch.Recv()
	require.NoError(t, err)
	var stopping atomic.Bool
	var written atomic.Int64
	var writers errgroup.Group
	kv := c.kv(leader)
	for w := range 4 {
		writers.Go(func() error {
			for i := 0; ; i++ {
				early := !stopping.Load()
				_, err := kv.Put(context.Background(), &kvdv1.PutRequest{NamespaceId: 1, Key: key, Value: fmt.Appendf(nil, "%d/%d", w, i)})
				if err == nil {
					written.Add(1)
					continue
				}
				if status.Code(err) != codes.Unavailable || early && len(status.Convert(err).Details()) == 0 {
					return fmt.Errorf("put %d: %w", i, err)
				}
				return nil
			}
		})
	}
	eventually(t, "puts", func() bool { return written.Load() > 50 })
	stopping.Store(true)
	began := time.Now()
	c.stopNode(leader)
	took := time.Since(began)
	require.NoError(t, writers.Wait())
	requirePrompt(t, took)
	t.Logf("stopped in %v", took)
	require.NoError(t, n.Stop(context.Background()), "again")
	g, err := c.get("key")
	require.NoError(t, err)

	require.GreaterOrEqual(t, g.GetVersion(), uint64(written.Load()))
}

// A node that shows up is spoken to at once, however long it was away.
func TestPeerIsUp(t *testing.T) {
	p := newPeers(&Node{cfg: Config{Peers: []PeerConfig{{NodeID: 2, Address: "127.0.0.1:1"}}}})
	defer p.close()
	p.mu.links[2] = &link{peers: p, to: 2, retry: make(chan struct{}, 1)}
	for range 3 { // nobody has to take it
		p.isUp(2)
	}
	for _, l := range p.mu.links {
		require.True(t, l.pause(context.Background(), time.Hour))
		require.False(t, l.pause(context.Background(), time.Nanosecond))
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		require.False(t, l.pause(ctx, time.Hour))
	}
}

// requirePrompt allows for a busy machine: on a quiet one a stop takes half a second.
func requirePrompt(t testing.TB, took time.Duration) {
	limit := 4 * time.Second
	if raceEnabled {
		limit *= 4
	}
	require.Less(t, took, limit)
}

// What waits for a peer is bounded, keeps its order, and goes in batches.
func TestLinkQueue(t *testing.T) {
	l := &link{wake: make(chan struct{}, 1)}
	message := func(group uint64, size int) raft.GroupMessage {
		return raft.GroupMessage{Group: raft.GroupID(group), Message: &raftpb.Message{Context: make([]byte, size)}}
	}
	require.True(t, l.enqueue([]raft.GroupMessage{message(1, queueLimit+1)}), "one may be larger")
	require.False(t, l.enqueue([]raft.GroupMessage{message(2, 1)}))
	require.Len(t, l.take().GetMessages(), 1)
	require.Nil(t, l.take())
	require.Zero(t, l.mu.bytes)
	for i := range uint64(10) {
		require.True(t, l.enqueue([]raft.GroupMessage{message(i, batchLimit/3)}))
	}
	for next, want := uint64(0), []int{3, 3, 3, 1}; len(want) > 0; want = want[1:] {
		batch := l.take().GetMessages()
		require.Len(t, batch, want[0])
		for _, m := range batch {
			require.Equal(t, next, m.GetGroup())
			next++
		}
	}
	require.Zero(t, l.mu.bytes)
	require.True(t, l.enqueue([]raft.GroupMessage{message(1, 1)}))
	l.clear()
	require.Nil(t, l.take())
	require.Len(t, l.wake, 1)
}

// A heartbeat overtakes what waits for the peer, and is not kept for a new stream.
func TestLinkHeartbeat(t *testing.T) {
	p := &peers{}
	l := &link{wake: make(chan struct{}, 1)}
	p.mu.links = map[raft.NodeID]*link{2: l}
	for i := range 3 {
		require.True(t, l.enqueue([]raft.GroupMessage{{Group: 1, Message: &raftpb.Message{Context: make([]byte, batchLimit)}, Quiesce: uint64(i)}}))
	}
	p.SendHeartbeat(2, raft.NodeHeartbeat{Boot: 6})
	p.SendHeartbeat(2, raft.NodeHeartbeat{Boot: 7})
	require.Len(t, l.wake, 1)
	for i := range 3 {
		b := l.take()
		require.Len(t, b.GetMessages(), 1)
		require.EqualValues(t, i, b.GetMessages()[0].GetQuiesce())
		require.Equal(t, i == 0, b.GetHeartbeat().GetBoot() == 7, "batch %d: %v", i, b.GetHeartbeat())
	}
	require.Nil(t, l.take())
	<-l.wake
	p.SendHeartbeat(2, raft.NodeHeartbeat{Boot: 8})
	require.Len(t, l.wake, 1, "it is sent with nothing else to send")
	b := l.take()
	require.Empty(t, b.GetMessages())
	require.EqualValues(t, 8, b.GetHeartbeat().GetBoot())
	p.SendHeartbeat(2, raft.NodeHeartbeat{Boot: 9})
	l.clear()
	require.Nil(t, l.take())
}

// The hash covers where one item ends and the next begins.
func TestSnapshotHash(t *testing.T) {
	sum := func(parts ...string) uint64 {
		h := newSnapshotHash()
		for i := 0; i < len(parts); i += 2 {
			h.add([]byte(parts[i]), []byte(parts[i+1]))
		}
		return h.h.Sum64()
	}
	seen := map[uint64]string{}
	for _, parts := range [][]string{{}, {"", ""}, {"ab", "c"}, {"a", "bc"}, {"abc", ""}, {"", "abc"}, {"a", "b", "c", ""}, {"a", "", "b", "c"}} {
		s := sum(parts...)
		require.Empty(t, seen[s], "%q", parts)
		seen[s] = fmt.Sprintf("%q", parts)
	}
}

// The writer's chunks hold every item once, and end with the trailer.
func TestSnapshotWriter(t *testing.T) {
	var chunks []*kvdv1.SnapshotChunk
	var marks []snapshotPosition
	w := &snapshotWriter{send: func(c *kvdv1.SnapshotChunk, _ int) error { chunks = append(chunks, c); return nil }, sum: newSnapshotHash()}
	w.mark = func(at snapshotPosition) { marks = append(marks, at.clone()) }
	want, at := newSnapshotHash(), snapshotPosition{}
	key := []byte("key?")
	const items = 4 * snapshotMarkBytes / snapshotChunkBytes
	for i := range items {
		key[3] = byte(i) // borrowed
		value := make([]byte, snapshotChunkBytes/3)
		want.add(key, value)
		at.add(key, value)
		require.NoError(t, w.add(key, value))
	}
	require.NoError(t, w.finish())
	next := 0
	for _, c := range chunks {
		for _, it := range c.GetItems() {
			require.EqualValues(t, next, it.GetKey()[3])
			next++
		}
	}
	require.Equal(t, items, next)
	require.Greater(t, len(chunks), items/4)
	require.Len(t, marks, 1)
	tr := chunks[len(chunks)-1].GetTrailer()
	require.EqualValues(t, items, tr.GetItems())
	require.Equal(t, want.h.Sum64(), tr.GetChecksum())
	require.Equal(t, at.Sum, tr.GetSum())
	w = &snapshotWriter{send: func(*kvdv1.SnapshotChunk, int) error { return io.EOF }, sum: newSnapshotHash()}
	require.True(t, errors.Is(w.finish(), io.EOF))
}
