package server

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
)

// cutter passes connections on to a node, and breaks all of them when so many bytes went
// there, as often as it is told to.
type cutter struct {
	listener net.Listener
	target   string
	wg       sync.WaitGroup
	mu       sync.Mutex
	conns    map[net.Conn]bool
	every    int64 // bytes; 0: never
	times    int
	gone     int64
	cuts     atomic.Int64
}

func newCutter(t testing.TB, target string) *cutter {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	c := &cutter{listener: l, target: target, conns: map[net.Conn]bool{}}
	c.wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			c.wg.Go(func() { c.pass(in) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		c.breakAll()
		c.wg.Wait()
	})
	return c
}

func (c *cutter) pass(in net.Conn) {
	out, err := net.Dial("tcp", c.target)
	if err != nil {
		_ = in.Close()
		return
	}
	c.mu.Lock()
	c.conns[in], c.conns[out] = true, true
	c.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(in, out)
		_ = in.Close()
	}()
	_, _ = io.Copy(countingWriter{out, c}, in)
	_ = out.Close()
	<-done
	c.mu.Lock()
	delete(c.conns, in)
	delete(c.conns, out)
	c.mu.Unlock()
}

type countingWriter struct {
	net.Conn
	c *cutter
}

func (w countingWriter) Write(b []byte) (int, error) {
	w.c.mu.Lock()
	w.c.gone += int64(len(b))
	cut := w.c.times > 0 && w.c.gone >= w.c.every
	if cut {
		w.c.gone = 0
		w.c.times--
	}
	w.c.mu.Unlock()
	if cut {
		w.c.cuts.Add(1)
		w.c.breakAll()
	}
	return w.Conn.Write(b)
}

func (c *cutter) arm(every int64, times int) {
	c.mu.Lock()
	c.every, c.times, c.gone = every, times, 0
	c.mu.Unlock()
}

func (c *cutter) breakAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.conns {
		_ = conn.Close()
	}
}

// behind is a cluster of which a node was away until the log that it needs was cut.
type behind struct {
	*testCluster
	away, lead int
	ways       []*cutter // to each node
}

// startBehind fills the one shard with so many values of 64 KiB.
func startBehind(t *testing.T, values int, change func(*Config)) *behind {
	b := &behind{}
	b.testCluster = newTestCluster(t, testConfigs(t, 3, 1))
	for i := range b.cfgs {
		b.ways = append(b.ways, newCutter(t, b.cfgs[i].ListenAddr))
		b.cfgs[0].Peers[i].Address = b.ways[i].listener.Addr().String() // of all: it is one list
		b.cfgs[i].LogRetainEntries = 20
		change(&b.cfgs[i])
	}
	errs := make(chan error, len(b.cfgs))
	for i := range b.cfgs {
		go func() { errs <- b.start(i) }()
	}
	for range b.cfgs {
		require.NoError(t, <-errs)
	}
	_, err := b.put("first", "value", nil)
	require.NoError(t, err)
	b.lead = b.leaderOf(1)
	b.away = (b.lead + 1) % 3
	had := b.nodes[b.away].shard(1).appliedIndex()
	b.stopNode(b.away)
	rnd := rand.NewChaCha8([32]byte{1})
	value := make([]byte, 64<<10)
	for i := range values {
		_, _ = rnd.Read(value)
		_, err := b.put(fmt.Sprint("key-", i), string(value), nil)
		require.NoError(t, err)
	}
	b.lead = b.leaderNow()
	require.NoError(t, b.nodes[b.lead].engine.Flush())
	for i := 0; b.nodes[b.lead].host.Group(1).Status().FirstIndex <= had+1; i++ {
		require.Less(t, i, 5000, "the log is not cut")
		_, err := b.put("more", fmt.Sprint(i), nil) // whoever appends looks at what may be cut
		require.NoError(t, err)
	}
	return b
}

// leaderNow is the leader among the nodes that are up.
func (b *behind) leaderNow() (lead int) {
	eventually(b.t, "a leader", func() bool {
		for i, n := range b.nodes {
			if n != nil && n.shard(1).servedTerm() != 0 {
				lead = i
				return true
			}
		}
		return false
	})
	return lead
}

func (b *behind) caughtUp() {
	b.t.Helper()
	eventually(b.t, "the follower has everything", func() bool {
		return b.nodes[b.away].shard(1).appliedIndex() >= b.nodes[b.lead].shard(1).appliedIndex()
	})
	require.Equal(b.t, dump(b.t, b.nodes[b.lead].shard(1).eng), dump(b.t, b.nodes[b.away].shard(1).eng))
}

func (b *behind) counted(node int, name, label string) float64 {
	return counted(b.t, b.nodes[node], name, label)
}

// stateBytes is what a snapshot of the shard has.
func (b *behind) stateBytes() float64 {
	snap, err := b.nodes[b.lead].shard(1).eng.OpenSnapshot()
	require.NoError(b.t, err)
	sum := 0
	require.NoError(b.t, snap.Items(func(k, v []byte) error { sum += len(k) + len(v); return nil }))
	require.NoError(b.t, snap.Close())
	return float64(sum)
}

// nothingKept: no end of a snapshot holds anything any more.
func (b *behind) nothingKept() {
	b.t.Helper()
	for i, n := range b.nodes {
		n.peers.outbox.mu.Lock()
		require.Empty(b.t, n.peers.outbox.mu.kept)
		n.peers.outbox.mu.Unlock()
		require.Empty(b.t, n.keptIncoming())
		left, err := filepath.Glob(filepath.Join(b.cfgs[i].DataDir, "staging", "*"))
		require.NoError(b.t, err)
		require.Empty(b.t, left)
	}
}

// A snapshot whose connections break goes on where it was: each item arrives once.
func TestSnapshotGoesOnAfterBreaks(t *testing.T) {
	b := startBehind(t, 384, func(c *Config) { c.SnapshotRate = 64 << 20 }) // 24 MiB
	way := b.ways[b.away]
	way.arm(6<<20, 3)
	require.NoError(t, b.start(b.away))
	b.caughtUp()
	require.EqualValues(t, 3, way.cuts.Load())
	require.Positive(t, b.counted(b.lead, "kvd_snapshots_resumed_total", ""))
	require.InDelta(t, b.stateBytes(), b.counted(b.away, "kvd_snapshot_received_bytes_total", ""), 4096, "something came twice, or not at all")
	b.nothingKept()
}

// So does one whose receiver is stopped and comes back.
func TestSnapshotGoesOnAfterRestart(t *testing.T) {
	b := startBehind(t, 384, func(c *Config) { c.SnapshotRate = 8 << 20 })
	require.NoError(t, b.start(b.away))
	var came float64
	eventually(t, "some of the snapshot came", func() bool {
		came = b.counted(b.away, "kvd_snapshot_received_bytes_total", "")
		return came > 6<<20
	})
	b.stopNode(b.away)
	require.NoError(t, b.start(b.away))
	b.caughtUp()
	require.EqualValues(t, 1, b.counted(b.lead, "kvd_snapshots_resumed_total", ""))
	require.Less(t, b.counted(b.away, "kvd_snapshot_received_bytes_total", ""), b.stateBytes()-came+4096)
	b.nothingKept()
}

// While a snapshot travels, throttled, the log behind it is kept: the follower goes on by
// it and needs no other.
func TestWritesWhileASnapshotTravels(t *testing.T) {
	b := startBehind(t, 256, func(c *Config) { c.SnapshotRate = 8 << 20 }) // 16 MiB: two seconds
	require.NoError(t, b.start(b.away))
	eventually(t, "the snapshot is on its way", func() bool {
		return b.counted(b.away, "kvd_snapshot_received_bytes_total", "") > 0
	})
	began := b.nodes[b.lead].shard(1).appliedIndex()
	written := 0
	for b.nodes[b.away].shard(1).appliedIndex() == 1 || b.nodes[b.away].shard(1).appliedIndex() < began {
		_, err := b.put("while", fmt.Sprint(written), nil)
		require.NoError(t, err)
		if written++; written%50 == 0 {
			require.NoError(t, b.nodes[b.lead].engine.Flush())
		}
	}
	require.Greater(t, written, 100, "too few to push anything out of the log")
	b.caughtUp()
	require.EqualValues(t, 1, b.counted(b.lead, "kvd_snapshots_sent_total", ""))
	require.Greater(t, b.counted(b.lead, "kvd_snapshot_throttled_seconds_total", ""), 0.5)
	require.InDelta(t, 16<<20, b.counted(b.lead, "kvd_snapshot_sent_bytes_total", ""), 1<<20)
	eventually(t, "the log is cut again", func() bool {
		_, err := b.put("more", "x", nil)
		require.NoError(t, err)
		require.NoError(t, b.nodes[b.lead].engine.Flush())
		return b.nodes[b.lead].host.Group(1).Status().FirstIndex > began
	})
}

func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var waited time.Duration
		p := newPace(8<<20, func(d time.Duration) { waited += d })
		began := time.Now()
		for range 32 {
			require.NoError(t, p.wait(t.Context(), 1<<20))
		}
		require.NoError(t, p.wait(t.Context(), 16<<20)) // one large item
		// 48 MiB, of which the burst was there.
		require.InDelta(t, 5.875, time.Since(began).Seconds(), 0.01)
		require.Equal(t, time.Since(began), waited)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, p.wait(ctx, 32<<20), context.Canceled)

		began = time.Now()
		unlimited := newPace(-1, nil)
		require.NoError(t, unlimited.wait(t.Context(), math.MaxInt))
		require.ErrorIs(t, unlimited.wait(ctx, 1), context.Canceled)
		require.Zero(t, time.Since(began))
	})
}

// spare is a state which the nodes of a test cluster do not have: 40 keys, at an index
// that is far ahead.
func (f fakePeer) spare() (items []*kvdv1.SnapshotItem, index uint64) {
	e, err := engine.Open(engine.Config{Dir: "spare", FS: vfs.NewMem(), UnpreparedLog: true, DiskSlowAfter: -1})
	require.NoError(f.t, err)
	defer func() { require.NoError(f.t, e.Close()) }()
	g := e.Group(1)
	b := g.NewBatch()
	index = 1 << 20
	for i := range 40 {
		require.NoError(f.t, b.Put(1, fmt.Appendf(nil, "key-%d", i), engine.Value{Data: make([]byte, 1000), Version: 7}))
	}
	require.NoError(f.t, b.SetMeta(engine.Meta{Applied: index, AppliedTerm: 1, ConfigID: 1, Conf: &raftpb.ConfState{Voters: []uint64{1, 2, 3}}}))
	require.NoError(f.t, b.Commit())
	snap, err := g.OpenSnapshot()
	require.NoError(f.t, err)
	defer func() { require.NoError(f.t, snap.Close()) }()
	require.NoError(f.t, snap.Items(func(k, v []byte) error {
		items = append(items, &kvdv1.SnapshotItem{Key: append([]byte{}, k...), Value: append([]byte{}, v...)})
		return nil
	}))
	return items, index
}

func positionAfter(items []*kvdv1.SnapshotItem) (at snapshotPosition) {
	for _, it := range items {
		at.add(it.GetKey(), it.GetValue())
	}
	return at
}

// begin opens a stream of the snapshot with that number behind what came already, and
// sends the items up to to.
func (f fakePeer) begin(number uint64, items []*kvdv1.SnapshotItem, index uint64, resume snapshotPosition, to int) kvdv1.Peer_SnapshotClient {
	s, err := f.client().Snapshot(testContext(f.t))
	require.NoError(f.t, err)
	m, err := proto.Marshal(f.snapMessage(index))
	require.NoError(f.t, err)
	_ = s.Send(&kvdv1.SnapshotChunk{Header: &kvdv1.SnapshotHeader{
		From: f.identity(), ToIncarnation: f.incarnation(), Group: 1, Format: snapshotFormat, Message: m,
		SnapshotId: number, ResumeItems: resume.Items, ResumeSum: resume.Sum,
	}})
	_ = s.Send(&kvdv1.SnapshotChunk{Items: items[min(int(resume.Items), to):to]})
	return s
}

func (f fakePeer) end(s kvdv1.Peer_SnapshotClient, t *kvdv1.SnapshotTrailer) (*kvdv1.SnapshotAck, error) {
	_ = s.Send(&kvdv1.SnapshotChunk{Trailer: t})
	return s.CloseAndRecv()
}

func (f fakePeer) progress(number uint64) snapshotPosition {
	r, err := f.client().SnapshotProgress(testContext(f.t), &kvdv1.SnapshotProgressRequest{From: f.identity(), ToIncarnation: f.incarnation(), Group: 1, SnapshotId: number})
	require.NoError(f.t, err)
	return snapshotPosition{r.GetItems(), r.GetLastKey(), r.GetSum()}
}

// What a receiver keeps of a stream that broke, and what it lets a sender do with it.
func TestReceiverGoesOn(t *testing.T) {
	c := startCluster(t, 3, 1)
	lead := c.leaderOf(1)
	f := fakePeer{t: t, c: c, as: lead, to: (lead + 1) % 3}
	n := c.nodes[f.to]
	target := n.shard(1)
	items, index := f.spare()
	whole := positionAfter(items)
	trailer := &kvdv1.SnapshotTrailer{Items: whole.Items, Sum: whole.Sum}
	half := positionAfter(items[:15])
	var none snapshotPosition
	stagings := func() int {
		left, err := filepath.Glob(filepath.Join(c.cfgs[f.to].DataDir, "staging", "*"))
		require.NoError(t, err)
		return len(left)
	}
	// broken leaves a stream of 15 items behind which nothing comes.
	broken := func(number uint64) kvdv1.Peer_SnapshotClient {
		had := counted(t, n, "kvd_snapshot_received_bytes_total", "")
		s := f.begin(number, items, index, none, 15)
		eventually(t, "they came", func() bool {
			return counted(t, n, "kvd_snapshot_received_bytes_total", "") >= had+14*1000
		})
		return s
	}
	require.Equal(t, none, f.progress(7), "there is nothing yet")

	// The sender says that it broke; the receiver had not noticed.
	s := broken(7)
	require.Equal(t, none, f.progress(8), "another snapshot")
	require.NotNil(t, target.mu.receiving, "a question after another one ended it")
	require.True(t, half.same(f.progress(7)))
	_, err := s.CloseAndRecv()
	require.Equal(t, codes.Aborted, status.Code(err), "%v", err)
	require.True(t, half.same(f.progress(7)))

	// It begins where nothing is, or something else.
	for name, at := range map[string]snapshotPosition{
		"further": positionAfter(items[:20]), "sum": {Items: half.Items, Key: half.Key, Sum: half.Sum + 1},
		"items": {Items: half.Items + 1, Key: half.Key, Sum: half.Sum},
	} {
		require.True(t, half.same(f.progress(7)), name)
		_, err = f.end(f.begin(7, items, index, at, len(items)), trailer)
		require.Equal(t, codes.Aborted, status.Code(err), "%s: %v", name, err)
		require.Equal(t, none, f.progress(7), name)
		require.Zero(t, stagings(), name)
		broken(7)
	}

	// A damaged end, and what is kept then.
	require.True(t, half.same(f.progress(7)))
	_, err = f.end(f.begin(7, items, index, half, len(items)), &kvdv1.SnapshotTrailer{Items: whole.Items, Sum: whole.Sum + 1})
	require.Equal(t, codes.DataLoss, status.Code(err), "%v", err)
	require.Equal(t, none, f.progress(7))
	broken(7)
	require.True(t, half.same(f.progress(7)))
	_, err = f.end(f.begin(7, items, index, half, len(items)-1), trailer)
	require.Equal(t, codes.DataLoss, status.Code(err), "%v", err)
	require.Zero(t, stagings())

	// The rest comes: Raft is given the snapshot. (It wants none of that term.)
	broken(7)
	require.True(t, half.same(f.progress(7)))
	ack, err := f.end(f.begin(7, items, index, half, len(items)), trailer)
	require.NoError(t, err)
	require.True(t, ack.GetInstalled(), ack.GetRefusal())
	require.Equal(t, none, f.progress(7))
	require.Len(t, target.mu.staged, 1)
	require.Equal(t, 1, stagings())

	// Another snapshot takes the place of what is kept.
	broken(7)
	require.True(t, half.same(f.progress(7)))
	require.Equal(t, 2, stagings())
	ack, err = f.end(f.begin(8, items, index, none, len(items)), trailer)
	require.NoError(t, err)
	require.True(t, ack.GetInstalled(), ack.GetRefusal())
	require.Equal(t, none, f.progress(7))
	require.Equal(t, 2, stagings())

	// Nothing is kept for long, nor of one that does not go on, nor by who leaves.
	broken(7)
	require.True(t, half.same(f.progress(7)))
	n.sweepIncoming()
	require.True(t, half.same(f.progress(7)))
	target.mu.Lock()
	target.mu.incoming.since = time.Now().Add(-incomingKept - time.Second)
	target.mu.Unlock()
	n.sweepIncoming()
	require.Equal(t, none, f.progress(7))
	require.Equal(t, 2, stagings())
	s = broken(0)
	had := target.mu.receiving
	_ = s.CloseSend()
	<-had.ended
	require.Nil(t, target.mu.incoming)
	// A whole one of an older version has another sum.
	sum := newSnapshotHash()
	for _, it := range items {
		sum.add(it.GetKey(), it.GetValue())
	}
	ack, err = f.end(f.begin(0, items, index, none, len(items)), &kvdv1.SnapshotTrailer{Items: whole.Items, Checksum: sum.h.Sum64()})
	require.NoError(t, err)
	require.True(t, ack.GetInstalled(), ack.GetRefusal())
	broken(7)
	require.True(t, half.same(f.progress(7)))
	require.NoError(t, target.dropStaged())
	require.Zero(t, stagings())
	ack, err = f.end(f.begin(9, items, index, none, len(items)), trailer)
	require.NoError(t, err)
	require.False(t, ack.GetInstalled())
}

// A receiver keeps what came of a few shards at most, a sender that many snapshots; both
// give up the oldest.
func TestKeptSnapshotsAreBounded(t *testing.T) {
	c := startCluster(t, 1, 8)
	n := c.nodes[0]
	now := time.Now()
	for i := range 8 {
		g := raft.GroupID(i + 1)
		o, err := n.peers.outgoing(2, g)
		require.NoError(t, err)
		n.peers.keepOutgoing(o)
		o.broke = now.Add(time.Duration(i-8) * time.Second)
		staging, err := n.engine.NewStaging(uint64(g))
		require.NoError(t, err)
		require.True(t, n.machine(g).keepIncoming(&incoming{
			incomingNote: incomingNote{Name: snapshotName{Number: 1}, Index: math.MaxUint64}, staging: staging, since: o.broke,
		}))
		n.sweepIncoming()
	}
	kept := n.peers.outbox.mu.kept
	require.Len(t, kept, maxOutgoing)
	require.EqualValues(t, 5, kept[0].group)
	in := n.keptIncoming()
	require.Len(t, in, maxIncoming)
	for _, m := range in {
		require.GreaterOrEqual(t, m.group, uint64(5))
	}

	// The same one goes on, if the log does.
	o, err := n.peers.outgoing(2, 6)
	require.NoError(t, err)
	require.Equal(t, kept[1].number, o.number)
	n.peers.keepOutgoing(o)
	kept[2].meta.Applied = 0 // group 7: as if the log began behind it
	o, err = n.peers.outgoing(2, 7)
	require.NoError(t, err)
	require.Greater(t, o.number, uint64(8), "a snapshot behind which there is no log is no use")
	n.peers.giveUp(o)
	require.Len(t, n.peers.outbox.mu.kept, 3)

	// Time ends them, one by one.
	for i, o := range n.peers.outbox.mu.kept {
		o.broke = now.Add(time.Duration(i-1) * (outgoingKept + time.Second))
	}
	n.peers.sweepOutgoing()
	require.Len(t, n.peers.outbox.mu.kept, 2)
	o, err = n.peers.outgoing(3, 5)
	require.NoError(t, err)
	o.opened = now.Add(-outgoingAge - time.Second)
	n.peers.keepOutgoing(o)
	require.Len(t, n.peers.outbox.mu.kept, 2, "it is too old to be kept once more")
	n.peers.forgetOutgoing(8)
	require.Len(t, n.peers.outbox.mu.kept, 1)
	// The others are closed with the node: what is not, its engine complains of.
}

// oldPeer takes snapshots as nodes did before they could go on with one.
type oldPeer struct {
	kvdv1.UnimplementedPeerServer
	breaks atomic.Int64 // streams that are to break after their first items
	got    chan uint64  // items of whole snapshots
}

func (o *oldPeer) Snapshot(s kvdv1.Peer_SnapshotServer) error {
	if _, err := s.Recv(); err != nil {
		return err
	}
	sum, items := newSnapshotHash(), uint64(0)
	for {
		chunk, err := s.Recv()
		if err != nil {
			return err
		}
		for _, it := range chunk.GetItems() {
			sum.add(it.GetKey(), it.GetValue())
			items++
		}
		if o.breaks.Add(-1) >= 0 {
			return status.Error(codes.Unavailable, "the stream broke")
		}
		if t := chunk.GetTrailer(); t != nil {
			if t.GetItems() != items || t.GetChecksum() != sum.h.Sum64() {
				return status.Error(codes.DataLoss, "damaged")
			}
			o.got <- items
			return s.SendAndClose(&kvdv1.SnapshotAck{Installed: true})
		}
	}
}

// A node of an older version is sent the whole snapshot again, with the check sum that it
// knows. (What an older one sends, TestSnapshotIsRefused sends as well.)
func TestSnapshotToAnOlderVersion(t *testing.T) {
	c := startCluster(t, 1, 1)
	for i := range 40 {
		_, err := c.put(fmt.Sprint("key-", i), string(make([]byte, 64<<10)), nil)
		require.NoError(t, err)
	}
	n := c.nodes[0]
	old := &oldPeer{got: make(chan uint64, 1)}
	old.breaks.Store(1)
	srv := grpc.NewServer()
	kvdv1.RegisterPeerServer(srv, old)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	conn, err := grpc.NewClient("passthrough:///"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	p := newPeers(n)
	p.dial = func(raft.NodeID) (grpc.ClientConnInterface, error) { return conn, nil }
	m := &raftpb.Message{Type: raftpb.MessageType_MsgSnap.Enum(), From: proto.Uint64(1), To: proto.Uint64(2), Term: proto.Uint64(1)}
	require.Error(t, p.sendSnapshot(t.Context(), 2, 1, m))
	require.Len(t, p.outbox.mu.kept, 1)
	require.NoError(t, p.sendSnapshot(t.Context(), 2, 1, m))
	require.EqualValues(t, len(dump(t, n.shard(1).eng)), <-old.got)
	require.Zero(t, counted(t, n, "kvd_snapshots_resumed_total", ""))
	require.Empty(t, p.outbox.mu.kept)
	p.close()
	require.NoError(t, conn.Close())
	srv.Stop()
	require.NoError(t, <-served)
}

// A sender goes on only from where it was itself.
func TestSenderKnowsWhereItWas(t *testing.T) {
	c := startCluster(t, 1, 1)
	for i := range 40 {
		_, err := c.put(fmt.Sprint("key-", i), string(make([]byte, 1000)), nil)
		require.NoError(t, err)
	}
	n := c.nodes[0]
	o, err := n.peers.outgoing(2, 1)
	require.NoError(t, err)
	defer n.peers.giveUp(o)
	var all []snapshotPosition
	var at snapshotPosition
	require.NoError(t, o.snap.Items(func(k, v []byte) error {
		at.add(k, v)
		all = append(all, at.clone())
		return nil
	}))
	o.mark(all[9])
	o.mark(all[25])
	o.mark(all[19]) // of a later stream
	require.Len(t, o.marks, 2)
	for i, at := range all {
		ok, err := o.was(at)
		require.NoError(t, err)
		require.True(t, ok, i)
		for _, spoil := range []func(*snapshotPosition){
			func(p *snapshotPosition) { p.Sum++ }, func(p *snapshotPosition) { p.Items++ },
			func(p *snapshotPosition) { p.Items += 100 }, func(p *snapshotPosition) { p.Key = append(p.Key, 'x') },
		} {
			bad := at.clone()
			spoil(&bad)
			ok, err := o.was(bad)
			require.NoError(t, err)
			require.False(t, ok, i)
		}
	}
}
