package client

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"net"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// fakeCluster is a cluster in the test: nodes with real bytes in their memory,
// behind real gRPC servers, whose Raft is a script. Writes reach every node that is
// not partitioned, at once.
type fakeCluster struct {
	t      testing.TB
	layout uint32 // version
	// id of the cluster; "": fake.
	id string
	// held, when set, is what answers of Status wait for.
	held   chan struct{}
	seed   uint64
	shards uint32
	nodes  []*fakeNode // id is index + 1

	mu         sync.Mutex // guards what follows, the nodes' memory and their books
	leader     map[uint32]uint64
	term       map[uint32]uint64
	index      map[uint32]uint64
	truth      map[string]fakeValue
	voters     []uint64
	outgoing   []uint64
	immutable  bool
	twoSided   bool
	transports []string
	writers    map[uint64]map[uint64]*kvdv1.WriteResponse
	onPut      func(n *fakeNode, req *kvdv1.PutRequest) (*kvdv1.WriteResponse, error) // nil, nil: go on
	afterPut   func(n *fakeNode, req *kvdv1.PutRequest) error
	onStream   func(n *fakeNode, stream kvdv1.KV_WriteServer) error // nil: serveWrites
	streams    int                                                  // of writes, that were opened
	calls      int                                                  // writes that came as single calls
	gets       int
	fallback   string // the last get's reason
	admin      int    // calls that an operator makes, but for those of the status
	routes     int    // calls of Routes
	version    uint64 // of the list of members
	left       map[uint64]bool
	// listeners are the sessions, by node, that want to be told of changes.
	listeners map[*fakeNode][]chan *kvdv1.Topology
}

type fakeValue struct {
	value   []byte
	version uint64
	expiry  int64
}

type fakeNode struct {
	kvdv1.UnimplementedAccessServer
	kvdv1.UnimplementedKVServer
	kvdv1.UnimplementedClusterServer

	c       *fakeCluster
	id      uint64
	boot    uint64
	control []byte
	chunk   []byte
	next    uint64 // first free byte of chunk
	tables  map[uint32]*fakeTable
	cut     bool             // partitioned: writes do not reach it
	silent  bool             // its gRPC answers nothing
	refuse  int              // handshakes that it will refuse
	refusal map[string]error // by transport: what handshakes get
	plain   bool             // it serves no transport
	hidden  bool             // its chunk is named only to who asks for it, as if it were new
	addr    string
	mum     bool // too old to tell of changes
	server  *grpc.Server
	real    *realSide // nil: plain bytes and the test's own transport
	stop    chan struct{}
}

type fakeTable struct {
	t        layout.Table
	overflow uint32 // overflow buckets used
}

const (
	fakeBuckets  = 16
	fakeOverflow = 16
	fakeChunk    = 8 << 20
)

type fakeOptions struct {
	nodes, shards int
	immutable     bool
	twoSided      bool
	id            string // of the cluster; "": fake
	// layout of their memory; 0: the right one.
	layout uint32
	// targets serve every node's arena; none: plain bytes and the test's own
	// transport.
	targets func(n *fakeNode) []rdma.Provider
	// server options, such as TLS.
	server []grpc.ServerOption
}

func newFakeCluster(t testing.TB, o fakeOptions) *fakeCluster {
	if o.layout == 0 {
		o.layout = layout.Version
	}
	c := &fakeCluster{
		t: t, layout: o.layout, id: o.id, seed: 0x5eed, transports: []string{"fake", "other"}, shards: uint32(o.shards), immutable: o.immutable, twoSided: o.twoSided,
		leader: map[uint32]uint64{}, term: map[uint32]uint64{}, index: map[uint32]uint64{}, truth: map[string]fakeValue{},
		writers: map[uint64]map[uint64]*kvdv1.WriteResponse{}, left: map[uint64]bool{}, listeners: map[*fakeNode][]chan *kvdv1.Topology{},
	}
	for i := range o.nodes {
		c.nodes = append(c.nodes, &fakeNode{c: c, id: uint64(i + 1), boot: uint64(100 * (i + 1)), stop: make(chan struct{})})
		if i < 3 {
			c.voters = append(c.voters, uint64(i+1))
		}
	}
	for _, n := range c.nodes {
		if o.targets != nil {
			n.real = newRealSide(t, n, o.targets(n))
			continue
		}
		n.control = words(int(c.shards+1) * layout.RecordSize)
		n.chunk = words(fakeChunk)
		n.next = 64
		n.tables = map[uint32]*fakeTable{}
	}
	for s := uint32(1); s <= c.shards; s++ {
		c.index[s] = 10
		for _, n := range c.nodes {
			if n.real != nil {
				continue
			}
			n.writeRecord(s, layout.Record{Term: 5, ConfigID: 1, Applied: 10, LayoutGen: 1, Shard: uint64(s), Replica: n.id, BootID: n.boot})
			n.makeTable(s)
		}
		c.elect(s, uint64((s-1)%uint32(min(o.nodes, 3)))+1, 5)
	}
	for _, n := range c.nodes {
		n.listen(t, o.server...)
	}
	return c
}

func (c *fakeCluster) name() string { return cmp.Or(c.id, "fake") }

// words allocates n bytes at an address that is a multiple of 8.
func words(n int) []byte {
	w := make([]uint64, (n+7)/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(&w[0])), n)
}

func (n *fakeNode) listen(t testing.TB, opts ...grpc.ServerOption) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	n.addr = l.Addr().String()
	// The memory that handlers look at is given back after Stop.
	n.server = grpc.NewServer(append(opts, grpc.WaitForHandlers(true))...)
	kvdv1.RegisterAccessServer(n.server, n)
	kvdv1.RegisterKVServer(n.server, n)
	kvdv1.RegisterClusterServer(n.server, n)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = n.server.Serve(l) // ends with Stop
	}()
	t.Cleanup(func() {
		n.kill()
		<-served
	})
}

// kill ends the node's process: no gRPC, and connections are lost.
func (n *fakeNode) kill() {
	n.c.mu.Lock()
	select {
	case <-n.stop:
	default:
		close(n.stop)
	}
	n.c.mu.Unlock()
	n.server.Stop()
}

func (n *fakeNode) dead() bool {
	select {
	case <-n.stop:
		return true
	default:
		return false
	}
}

// elect makes a node the leader of a term, and tells the voters that are not cut
// off. Others are left to believe what they did.
func (c *fakeCluster) elect(s uint32, id, term uint64) {
	c.leader[s], c.term[s] = id, term
	for _, n := range c.nodes {
		if n.cut || n.dead() {
			continue
		}
		rec := n.readRecord(s)
		rec.Term, rec.ServedTerm = term, 0
		if n.id == id {
			rec.ServedTerm = term
		}
		n.writeRecord(s, rec)
	}
}

func (n *fakeNode) readRecord(s uint32) layout.Record {
	if n.real != nil {
		return n.real.records[s].Load()
	}
	rec, _ := layout.DecodeRecord(n.control[int(s)*layout.RecordSize:])
	return rec
}

func (n *fakeNode) writeRecord(s uint32, rec layout.Record) {
	if n.real != nil {
		n.real.writeRecord(s, rec)
		return
	}
	copy(n.control[int(s)*layout.RecordSize:], layout.AppendRecord(nil, rec))
}

// change edits a node's record of a shard under the lock.
func (c *fakeCluster) change(id uint64, s uint32, f func(r *layout.Record)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.nodes[id-1]
	rec := n.readRecord(s)
	f(&rec)
	n.writeRecord(s, rec)
}

func (n *fakeNode) alloc(size int) layout.Place {
	at := layout.Place{Chunk: 1, Offset: n.next}
	n.next += uint64(size+63) / 64 * 64
	if n.next > uint64(len(n.chunk)) {
		panic("fake chunk is full")
	}
	return at
}

// makeTable gives the shard an empty index.
func (n *fakeNode) makeTable(s uint32) {
	t := layout.Table{ID: n.id<<32 | uint64(s)<<8 | n.readRecord(s).LayoutGen, Buckets: fakeBuckets, Overflow: fakeOverflow}
	t.Place = n.alloc(int(t.Size()))
	n.tables[s] = &fakeTable{t: t}
	for i := range t.Buckets + t.Overflow {
		n.writeBucket(t, i, layout.Bucket{})
	}
}

func (n *fakeNode) bucket(t layout.Table, number uint32) layout.Bucket {
	return layout.DecodeBucket(n.chunk[t.Offset(number):], t.ID, number)
}

func (n *fakeNode) writeBucket(t layout.Table, number uint32, b layout.Bucket) {
	line := n.chunk[t.Offset(number):][:layout.BucketSize]
	binary.LittleEndian.PutUint64(line, layout.BucketHeader(t.ID, number, b.Flags, b.Chain, &b.Slots))
	for i, s := range b.Slots {
		binary.LittleEndian.PutUint64(line[8+8*i:], uint64(s))
	}
}

// find gives the bucket and slot that hold key; ok is false where none does.
func (n *fakeNode) find(s uint32, h layout.KeyHash, key string) (number uint32, slot int, ok bool) {
	t := n.tables[s].t
	for number, more := h.HomeBucket(t.Buckets), true; more; {
		b := n.bucket(t, number)
		for i, e := range b.Slots {
			if e != 0 && n.keyAt(e.Place()) == key {
				return number, i, true
			}
		}
		number, more = t.Next(b.Chain)
	}
	return 0, 0, false
}

func (n *fakeNode) keyAt(at layout.Place) string {
	b := n.chunk[at.Offset:]
	h, _ := layout.PeekHeader(b)
	return string(b[layout.HeaderSize:][:h.KeyLen])
}

func (n *fakeNode) setState(at layout.Place, st layout.State) {
	b := n.chunk[at.Offset:]
	binary.LittleEndian.PutUint64(b, layout.WithState(binary.LittleEndian.Uint64(b), st))
}

// show makes the value visible in the node's memory.
func (n *fakeNode) show(s uint32, key string, v fakeValue) *kvdv1.Location {
	if n.real != nil {
		return n.real.show(s, key, v)
	}
	h := layout.HashKey(n.c.seed, []byte(key))
	size := layout.ObjectSize(len(key), len(v.value))
	at := n.alloc(layout.ClassSize(layout.ClassFor(size)))
	var flags uint8
	if n.c.immutable {
		flags = layout.FlagImmutable
	}
	layout.EncodeObject(n.chunk[at.Offset:], n.c.seed, at, layout.Object{
		Flags: flags, Version: v.version, Expiry: v.expiry, Key: []byte(key), Value: v.value,
	})
	entry := layout.MakeSlot(h.Fingerprint(), layout.ClassFor(size), at)
	t := n.tables[s]
	if number, i, ok := n.find(s, h, key); ok {
		b := n.bucket(t.t, number)
		n.setState(b.Slots[i].Place(), layout.StateSuperseded)
		b.Slots[i] = entry
		n.writeBucket(t.t, number, b)
	} else {
		n.insert(t, h.HomeBucket(t.t.Buckets), entry)
	}
	n.setState(at, layout.StateLive)
	rec := n.readRecord(s)
	rec.Applied = v.version
	n.writeRecord(s, rec)
	return &kvdv1.Location{BootId: n.boot, LayoutGen: rec.LayoutGen, Chunk: at.Chunk, Offset: at.Offset, Length: uint32(size)}
}

func (n *fakeNode) insert(t *fakeTable, number uint32, entry layout.Slot) {
	for {
		b := n.bucket(t.t, number)
		if i := slices.Index(b.Slots[:], 0); i >= 0 {
			b.Slots[i] = entry
			n.writeBucket(t.t, number, b)
			return
		}
		next, more := t.t.Next(b.Chain)
		if !more {
			t.overflow++
			b.Chain = t.overflow
			n.writeBucket(t.t, number, b)
			next, _ = t.t.Next(b.Chain)
		}
		number = next
	}
}

func (n *fakeNode) hide(s uint32, key string, version uint64) {
	if n.real != nil {
		n.real.hide(s, key, version)
		return
	}
	h := layout.HashKey(n.c.seed, []byte(key))
	if number, i, ok := n.find(s, h, key); ok {
		t := n.tables[s].t
		b := n.bucket(t, number)
		n.setState(b.Slots[i].Place(), layout.StateDeleted)
		b.Slots[i] = 0
		n.writeBucket(t, number, b)
	}
	rec := n.readRecord(s)
	rec.Applied = version
	n.writeRecord(s, rec)
}

func (c *fakeCluster) shardOf(key string) uint32 {
	return layout.HashKey(c.seed, []byte(key)).Shard(c.shards)
}

// put writes directly, as if some other client had.
func (c *fakeCluster) put(key, value string) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	v, _ := c.putLocked(key, []byte(value), 0)
	return v.version
}

func (c *fakeCluster) putLocked(key string, value []byte, expiry int64) (fakeValue, *kvdv1.Location) {
	s := c.shardOf(key)
	c.index[s]++
	v := fakeValue{value: bytes.Clone(value), version: c.index[s], expiry: expiry}
	c.truth[key] = v
	var at *kvdv1.Location
	for _, n := range c.nodes {
		if n.cut || n.dead() {
			continue
		}
		l := n.show(s, key, v)
		if n.id == c.leader[s] {
			at = l
		}
	}
	return v, at
}

func (c *fakeCluster) del(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deleteLocked(key)
}

func (c *fakeCluster) deleteLocked(key string) uint64 {
	s := c.shardOf(key)
	c.index[s]++
	delete(c.truth, key)
	for _, n := range c.nodes {
		if !n.cut && !n.dead() {
			n.hide(s, key, c.index[s])
		}
	}
	return c.index[s]
}

func failWith(code codes.Code, d *kvdv1.ErrorDetail) error {
	st, err := status.New(code, d.GetReason().String()).WithDetails(d)
	if err != nil {
		panic(err)
	}
	return st.Err()
}

// ---- gRPC: Access

func (n *fakeNode) OpenSession(req *kvdv1.OpenSessionRequest, stream grpc.ServerStreamingServer[kvdv1.SessionEvent]) error {
	if req.GetNamespace() != "default" {
		return failWith(codes.NotFound, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_UNKNOWN_NAMESPACE})
	}
	if id := req.GetClusterId(); id != "" && id != n.c.name() {
		return failWith(codes.FailedPrecondition, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_WRONG_CLUSTER})
	}
	told := make(chan *kvdv1.Topology, 16)
	n.c.mu.Lock()
	if req.GetTopology() && !n.mum {
		n.c.listeners[n] = append(n.c.listeners[n], told)
	}
	version := n.c.version
	n.c.mu.Unlock()
	o := &kvdv1.SessionOpened{
		SessionId: []byte("0123456789abcdef"), ClusterId: n.c.name(), NodeId: n.id, BootId: n.boot, NamespaceId: 1,
		Immutable: n.c.immutable, OneSided: !n.c.twoSided, Shards: n.c.shards, HashSeed: n.c.seed, LayoutVersion: n.c.layout,
		MaxKeyBytes: layout.MaxKeySize, MaxValueBytes: 1 << 20, HostId: "host", Transports: n.c.transports, Members: n.members(), MembersVersion: version,
	}
	if n.plain {
		o.Transports = nil
	}
	if err := stream.Send(&kvdv1.SessionEvent{Event: &kvdv1.SessionEvent_Opened{Opened: o}}); err != nil {
		return err
	}
	for {
		select {
		case <-stream.Context().Done():
			return nil
		case <-n.stop:
			return nil
		case t := <-told:
			if err := stream.Send(&kvdv1.SessionEvent{Event: &kvdv1.SessionEvent_Topology{Topology: t}}); err != nil {
				return err
			}
		}
	}
}

func (n *fakeNode) Connect(ctx context.Context, req *kvdv1.ConnectRequest) (*kvdv1.ConnectResponse, error) {
	if n.real != nil {
		return n.real.connect(ctx, req)
	}
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	if err := n.refusal[req.GetTransport()]; err != nil {
		return nil, err
	}
	if n.refuse > 0 {
		n.refuse--
		return nil, status.Error(codes.Unavailable, "not now")
	}
	return &kvdv1.ConnectResponse{Answer: []byte{byte(n.id)}}, nil
}

func (n *fakeNode) Regions(_ context.Context, req *kvdv1.RegionsRequest) (*kvdv1.RegionsResponse, error) {
	if n.real != nil {
		return n.real.regions(req.GetTransport()), nil
	}
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	resp := &kvdv1.RegionsResponse{}
	for id, m := range [][]byte{n.control, n.chunk} {
		if len(req.GetRegions()) == 0 && (id == 0 || !n.hidden) || slices.Contains(req.GetRegions(), uint32(id)) {
			resp.Regions = append(resp.Regions, &kvdv1.Region{Id: uint32(id), Length: uint64(len(m))})
		}
	}
	return resp, nil
}

func (n *fakeNode) Routes(ctx context.Context, req *kvdv1.RoutesRequest) (*kvdv1.RoutesResponse, error) {
	if n.hangs() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	n.c.routes++
	resp := &kvdv1.RoutesResponse{Members: n.membersLocked(), MembersVersion: n.c.version}
	for s := uint32(1); s <= n.c.shards; s++ {
		if len(req.GetShards()) > 0 && !slices.Contains(req.GetShards(), s) {
			continue
		}
		resp.Routes = append(resp.Routes, n.routeLocked(s))
	}
	return resp, nil
}

func (n *fakeNode) hangs() bool {
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	return n.silent
}

// ---- gRPC: KV

// leads is nil where this node leads the shard.
func (n *fakeNode) leadsLocked(s uint32) error {
	if n.c.leader[s] != n.id || n.readRecord(s).ServedTerm == 0 || n.cut {
		return failWith(codes.Unavailable, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_LEADER, LeaderNode: n.c.leader[s]})
	}
	return nil
}

func (n *fakeNode) Get(ctx context.Context, req *kvdv1.GetRequest) (*kvdv1.GetResponse, error) {
	if n.hangs() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	n.c.fallback = req.GetFallback()
	s := n.c.shardOf(string(req.GetKey()))
	if req.GetLevel() != kvdv1.ReadLevel_READ_LEVEL_LINEARIZABLE {
		return n.getWeak(s, req)
	}
	if err := n.leadsLocked(s); err != nil {
		return nil, err
	}
	n.c.gets++
	v, ok := n.c.truth[string(req.GetKey())]
	return &kvdv1.GetResponse{Found: ok, Value: v.value, Version: v.version, ExpiresUnixMs: v.expiry, Applied: n.c.index[s]}, nil
}

// getWeak reads what this node has, at the levels below linearizable.
func (n *fakeNode) getWeak(s uint32, req *kvdv1.GetRequest) (*kvdv1.GetResponse, error) {
	rec := n.readRecord(s)
	if req.GetLevel() == kvdv1.ReadLevel_READ_LEVEL_SESSION && rec.Applied < req.GetMinApplied() {
		return nil, failWith(codes.Unavailable, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY})
	}
	n.c.gets++
	key := string(req.GetKey())
	resp := &kvdv1.GetResponse{Applied: rec.Applied}
	number, slot, ok := n.find(s, layout.HashKey(n.c.seed, req.GetKey()), key)
	if !ok {
		return resp, nil
	}
	at := n.bucket(n.tables[s].t, number).Slots[slot].Place()
	o, v := layout.DecodeObject(n.chunk[at.Offset:], n.c.seed, at)
	if v != layout.Valid {
		n.c.t.Errorf("node %d: no object of %q at %v", n.id, key, at)
	}
	resp.Found, resp.Value, resp.Version, resp.ExpiresUnixMs = true, bytes.Clone(o.Value), o.Version, o.Expiry
	return resp, nil
}

func (n *fakeNode) Put(_ context.Context, req *kvdv1.PutRequest) (*kvdv1.WriteResponse, error) {
	n.c.mu.Lock()
	n.c.calls++
	n.c.mu.Unlock()
	return n.put(req)
}

// Write serves a stream of writes, or runs the test's own script.
func (n *fakeNode) Write(stream kvdv1.KV_WriteServer) error {
	n.c.mu.Lock()
	n.c.streams++
	f := n.c.onStream
	n.c.mu.Unlock()
	if f != nil {
		return f(n, stream)
	}
	return n.serveWrites(stream)
}

// serveWrites answers each frame when it is done, in any order.
func (n *fakeNode) serveWrites(stream kvdv1.KV_WriteServer) error {
	if err := stream.SendHeader(nil); err != nil {
		return err
	}
	return n.serveFrames(stream)
}

func (n *fakeNode) serveFrames(stream kvdv1.KV_WriteServer) error {
	var writes sync.WaitGroup
	defer writes.Wait()
	var sending sync.Mutex
	for {
		frame, err := stream.Recv()
		if err != nil {
			return err
		}
		writes.Go(func() {
			r := n.frame(frame)
			sending.Lock()
			defer sending.Unlock()
			_ = stream.Send(r) // the client may be gone
		})
	}
}

// frame does one write and makes its result.
func (n *fakeNode) frame(frame *kvdv1.WriteFrame) *kvdv1.WriteResult {
	r := &kvdv1.WriteResult{Id: frame.GetId()}
	var err error
	if frame.GetPut() != nil {
		r.Response, err = n.put(frame.GetPut())
	} else {
		r.Response, err = n.Delete(context.Background(), frame.GetDelete())
	}
	if err != nil {
		st := status.Convert(err)
		r.Code, r.Message = uint32(st.Code()), st.Message()
		for _, d := range st.Details() {
			r.Detail = d.(*kvdv1.ErrorDetail)
		}
	}
	return r
}

func (n *fakeNode) put(req *kvdv1.PutRequest) (*kvdv1.WriteResponse, error) {
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	if f := n.c.onPut; f != nil {
		if resp, err := f(n, req); resp != nil || err != nil {
			return resp, err
		}
	}
	key := string(req.GetKey())
	s := n.c.shardOf(key)
	if err := n.leadsLocked(s); err != nil {
		return nil, err
	}
	resp := n.c.writeOnce(req.GetWriter(), func() *kvdv1.WriteResponse {
		have := n.c.truth[key].version
		if p := req.GetPrecondition(); p.GetIfAbsent() && have != 0 || p.GetIfVersion() != 0 && p.GetIfVersion() != have {
			return &kvdv1.WriteResponse{Outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_CONFLICT, Version: have, Applied: n.c.index[s]}
		}
		v, at := n.c.putLocked(key, req.GetValue(), 0)
		return &kvdv1.WriteResponse{Outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, Version: v.version, Applied: v.version, Location: at}
	})
	if f := n.c.afterPut; f != nil {
		if err := f(n, req); err != nil {
			return nil, err
		}
	}
	return resp, nil
}

// writeOnce is the replicated state of writers.
func (c *fakeCluster) writeOnce(w *kvdv1.WriterStamp, apply func() *kvdv1.WriteResponse) *kvdv1.WriteResponse {
	if w.GetWriterId() == 0 {
		return apply()
	}
	results := c.writers[w.GetWriterId()]
	if results == nil {
		return &kvdv1.WriteResponse{Outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_WRITER_EXPIRED}
	}
	if r := results[w.GetSequence()]; r != nil {
		return r
	}
	r := apply()
	results[w.GetSequence()] = r
	for seq := range results {
		if seq < w.GetAckedBelow() {
			delete(results, seq)
		}
	}
	return r
}

func (n *fakeNode) Delete(_ context.Context, req *kvdv1.DeleteRequest) (*kvdv1.WriteResponse, error) {
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	key := string(req.GetKey())
	s := n.c.shardOf(key)
	if err := n.leadsLocked(s); err != nil {
		return nil, err
	}
	return n.c.writeOnce(req.GetWriter(), func() *kvdv1.WriteResponse {
		if _, ok := n.c.truth[key]; !ok {
			return &kvdv1.WriteResponse{Outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_NOT_FOUND, Applied: n.c.index[s]}
		}
		v := n.c.deleteLocked(key)
		return &kvdv1.WriteResponse{Outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, Version: v, Applied: v}
	}), nil
}

func (n *fakeNode) OpenWriter(_ context.Context, req *kvdv1.OpenWriterRequest) (*kvdv1.OpenWriterResponse, error) {
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	if err := n.leadsLocked(req.GetShard()); err != nil {
		return nil, err
	}
	id := uint64(len(n.c.writers) + 1000)
	n.c.writers[id] = map[uint64]*kvdv1.WriteResponse{}
	return &kvdv1.OpenWriterResponse{WriterId: id, TtlMs: 60000}, nil
}

func (n *fakeNode) List(_ context.Context, req *kvdv1.ListRequest) (*kvdv1.ListResponse, error) {
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	if err := n.leadsLocked(req.GetShard()); err != nil && req.GetLevel() != kvdv1.ReadLevel_READ_LEVEL_STALE {
		return nil, err
	}
	var keys []string
	for key := range n.c.truth {
		if n.c.shardOf(key) == req.GetShard() && bytes.HasPrefix([]byte(key), req.GetPrefix()) && key > string(req.GetStartAfter()) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	resp := &kvdv1.ListResponse{Applied: n.c.index[req.GetShard()]}
	for i, key := range keys {
		if i == int(req.GetLimit()) {
			resp.More = true
			break
		}
		resp.LastKey = []byte(key)
		v := n.c.truth[key]
		if v.expiry != 0 && v.expiry <= time.Now().UnixMilli() {
			continue // as a node does: it counts for the page and is left out
		}
		it := &kvdv1.ListResponse_Item{Key: []byte(key), Version: v.version, Size: uint64(len(v.value))}
		if !req.GetKeysOnly() {
			it.Value = v.value
		}
		resp.Items = append(resp.Items, it)
	}
	return resp, nil
}

func (n *fakeNode) Status(ctx context.Context, _ *kvdv1.StatusRequest) (*kvdv1.StatusResponse, error) {
	if n.c.held != nil {
		select {
		case <-n.c.held:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return &kvdv1.StatusResponse{ClusterId: n.c.name(), NodeId: n.id, BootId: n.boot, Address: n.addr, Members: n.members()}, nil
}

func (n *fakeNode) CreateNamespace(_ context.Context, req *kvdv1.CreateNamespaceRequest) (*kvdv1.CreateNamespaceResponse, error) {
	n.countAdmin()
	if n.id != 2 {
		return nil, failWith(codes.Unavailable, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_LEADER, LeaderNode: 2})
	}
	return &kvdv1.CreateNamespaceResponse{Namespace: &kvdv1.NamespaceInfo{Id: 2, Name: req.GetName(), OneSided: !req.GetTwoSidedOnly(), Immutable: req.GetImmutable()}}, nil
}

func (n *fakeNode) ListNamespaces(context.Context, *kvdv1.ListNamespacesRequest) (*kvdv1.ListNamespacesResponse, error) {
	n.countAdmin()
	return &kvdv1.ListNamespacesResponse{Namespaces: []*kvdv1.NamespaceInfo{{Id: 1, Name: "default", OneSided: true}}}, nil
}

func (n *fakeNode) TransferLeader(context.Context, *kvdv1.TransferLeaderRequest) (*kvdv1.TransferLeaderResponse, error) {
	n.countAdmin()
	return &kvdv1.TransferLeaderResponse{}, nil
}

func (n *fakeNode) countAdmin() {
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	n.c.admin++
}
