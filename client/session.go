package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// session is one connection to one boot of one node, and everything learnt over it:
// regions, slots, tables, and by the boot's ordinal the remembered locations. When it
// ends all of that is dropped together, but for the locations, which are the boot's: so
// nothing of an earlier boot can be mixed with a later one. Another connection to the
// same boot is another session, over the same stream where that still lives.
type session struct {
	c      *Client
	of     *boot
	ord    uint32 // of's
	serial uint32 // unique in this Client
	nodeID uint64
	boot   uint64
	id     []byte
	remote *remote
	stream *stream

	conn  rdma.Conn    // nil: this node is not read one-sidedly; why says for what reason
	query rdma.Querier // nil: the connection runs no look-ups
	sync  bool         // conn.Synchronous
	via   int          // index in Client.via
	why   reason
	note  string // for people: why this transport
	// passed are the transports that were preferred to this one and are not used.
	passed []passedOver
	marks  []mark // what connecting changed of the boot's paths

	replicas []replica                // by shard; [0] unused
	regions  atomic.Pointer[[]uint64] // length of each known region, by id; 0: unknown
	regionMu sync.Mutex               // serializes changes of regions

	lane    lane
	latency atomic.Int64 // ns, moving average of flights
	slow    atomic.Bool  // did not answer in time, and has not answered since
	stalled atomic.Int32 // batches that are out for very long: see outlast

	published atomic.Bool // its node is known to the Client

	broken chan struct{} // closed by fail
	fault  atomic.Pointer[error]
	ended  atomic.Bool // no longer to be used for new reads
}

// replica is what a session knows of one shard's replica on its node.
type replica struct {
	info atomic.Pointer[replicaInfo] // nil: nothing was learnt yet

	// Seen in exchanges that are complete. applied only rises within a boot. seenAt is
	// the time (Unix ns) before the exchange in which gen was last seen.
	gen     atomic.Uint64
	applied atomic.Uint64
	seenAt  atomic.Int64
}

// replicaInfo is one node's answer about one shard. Immutable.
type replicaInfo struct {
	local    bool // the node has a replica
	slot     uint32
	record   layout.Record
	table    layout.Table // ID 0: none is known
	tableGen uint64
	leader   uint64 // node id as the node believes; 0: unknown
	configID uint64
	voters   []uint64
	outgoing []uint64
}

// saw takes in a record of this replica from a complete exchange that began at
// posted (Unix ns; 0: unknown, then freshness is not renewed).
func (p *replica) saw(rec *layout.Record, posted int64) {
	raise(&p.gen, rec.LayoutGen)
	raise(&p.applied, rec.Applied)
	if posted != 0 {
		for {
			have := p.seenAt.Load()
			if have >= posted || p.seenAt.CompareAndSwap(have, posted) {
				return
			}
		}
	}
}

// raise stores v where it is larger.
func raise(to *atomic.Uint64, v uint64) {
	for {
		have := to.Load()
		if have >= v || to.CompareAndSwap(have, v) {
			return
		}
	}
}

// stream is what keeps a node's gRPC session alive: it ends with it.
type stream struct {
	opened *kvdv1.SessionOpened
	in     grpc.ServerStreamingClient[kvdv1.SessionEvent]
	ended  chan error // yields why the stream ended, once it is listened to
	stop   func()     // ends it
}

// passedOver is a transport that a session does without.
type passedOver struct {
	transport int // index in Client.transports
	why       pathReason
	text      string
}

// mark is what was known of a path before connecting changed it.
type mark struct {
	transport int
	before    path
}

// openSession opens a session at addr and prepares it for reading. ctx bounds the
// opening, life the session. want, when not 0, is the node expected there.
func (c *Client) openSession(ctx, life context.Context, addr string, want uint64) (*session, error) {
	r, err := c.pool.get(addr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.ConnectTimeout)
	defer cancel()
	st, err := c.startStream(ctx, life, r)
	if err != nil {
		return nil, err
	}
	id := st.opened.GetNodeId()
	if want != 0 && id != want {
		st.stop()
		return nil, fmt.Errorf("%w: %s is node %d now: want node %d", ErrUnavailable, addr, id, want)
	}
	if err := c.adoptCluster(st.opened); err != nil {
		st.stop()
		if k := c.cluster(); k != nil && k.id != st.opened.GetClusterId() {
			c.stray(addr, st.opened.GetClusterId())
		}
		return nil, fmt.Errorf("node at %s: %w", addr, err)
	}
	s := c.newSession(r, st)
	st.listen(s)
	if err := s.prepare(ctx, len(c.transports)); err != nil {
		s.close()
		st.stop()
		return nil, err
	}
	return s, nil
}

// newSession is over the stream, and not connected yet.
func (c *Client) newSession(r *remote, st *stream) *session {
	of := c.bootOf(st.opened.GetNodeId(), st.opened.GetBootId())
	s := &session{
		c: c, of: of, ord: of.ord, serial: c.serials.Add(1), nodeID: st.opened.GetNodeId(), boot: of.id, id: st.opened.GetSessionId(),
		remote: r, stream: st, broken: make(chan struct{}),
	}
	s.lane.s = s
	s.replicas = make([]replica, c.cluster().shards+1)
	return s
}

// startStream opens the session's stream and waits for its first event.
func (c *Client) startStream(ctx, life context.Context, r *remote) (*stream, error) {
	streamCtx, stop := context.WithCancel(life)
	// The stream outlives ctx, but not before it was opened.
	unbind := context.AfterFunc(ctx, stop)
	fail := func(err error) (*stream, error) {
		unbind()
		stop()
		if ctx.Err() != nil && life.Err() == nil {
			return nil, fmt.Errorf("%w: node at %s did not answer within %v: is it the gRPC port of a kvd node?",
				ErrUnavailable, r.addr, c.cfg.ConnectTimeout)
		}
		return nil, rpcFailed(r.addr, err)
	}
	in, err := r.access.OpenSession(streamCtx, &kvdv1.OpenSessionRequest{
		ClusterId: c.cfg.ClusterID, Namespace: c.cfg.Namespace, LayoutVersion: layout.Version, ClientName: c.cfg.ClientName,
		Topology: true,
	})
	if err != nil {
		return fail(err)
	}
	first, err := in.Recv()
	if err != nil {
		return fail(err)
	}
	opened := first.GetOpened()
	if opened == nil {
		unbind()
		stop()
		return nil, fmt.Errorf("%w: node at %s opened a session without saying so first", ErrIncompatible, r.addr)
	}
	if !unbind() { // ctx ended just now and took the stream with it
		return fail(ctx.Err())
	}
	return &stream{opened: opened, in: in, ended: make(chan error, 1), stop: stop}, nil
}

func closes(e *kvdv1.SessionClosing) error {
	return fmt.Errorf("%w: node closes the session: %s", ErrUnavailable, e.GetReason())
}

// prepare connects by one of the first limit transports and fetches what reading needs.
// Where it fails nothing is held against the transports: it was the node.
func (s *session) prepare(ctx context.Context, limit int) error {
	s.connect(ctx, limit)
	err := s.fetchRoutes(ctx, nil)
	if err != nil {
		for _, m := range slices.Backward(s.marks) {
			s.of.forgive(m.transport, m.before)
		}
	}
	return err
}

// connect chooses the transport: the first that works. That none does is not an error:
// the node is then read over gRPC.
func (s *session) connect(ctx context.Context, limit int) {
	cfg := &s.c.cfg
	switch {
	case cfg.Transport == TransportGRPC:
		s.why, s.note = reasonForced, "gRPC is configured"
		return
	case !s.stream.opened.GetOneSided():
		s.why, s.note = reasonTwoSided, "the namespace is kept out of one-sided READs"
		return
	}
	s.why = reasonNoTransport
	for i, t := range s.c.transports[:limit] {
		if !s.c.wants(t) {
			continue
		}
		why, text := s.skip(i)
		if why == pathUsable {
			err := s.handshake(ctx, i)
			if err == nil {
				s.why = reasonNone
				s.of.connected(i)
				break
			}
			why, text = classifyPath(err), err.Error()
			s.marks = append(s.marks, mark{i, s.of.failed(i, why, text)})
		}
		s.passed = append(s.passed, passedOver{i, why, text})
	}
	s.note = s.describeChoice()
}

// skip tells why a transport need not be tried.
func (s *session) skip(i int) (pathReason, string) {
	t, opened := s.c.transports[i], s.stream.opened
	switch {
	case !slices.Contains(opened.GetTransports(), t.name):
		if len(opened.GetTransports()) == 0 {
			return pathNotServed, "not served by the node"
		}
		return pathNotServed, "not served by the node, which serves " + strings.Join(opened.GetTransports(), ", ")
	case s.c.cfg.Transport == TransportAuto && t.name == shmName && !sameHost(s.c.cfg.HostID, opened.GetHostId()):
		return pathElsewhere, "another host"
	case t.plain && !s.c.mayReadPlain():
		return pathPlain, plainText
	}
	return s.of.blocked(i, time.Now())
}

func (s *session) describeChoice() string {
	configured := s.c.cfg.Transport
	switch {
	case len(s.passed) > 0:
		var parts []string
		for _, p := range s.passed {
			parts = append(parts, s.c.transports[p.transport].name+": "+p.text)
		}
		return strings.Join(parts, "; ")
	case s.conn != nil && configured != TransportAuto:
		return "configured"
	case s.conn != nil:
		return "preferred"
	default:
		return "no provider called " + configured
	}
}

// handshake makes a connection by a transport, and the node's memory known to it. It
// takes at most half of the time that is left: the next transport needs some, too.
func (s *session) handshake(ctx context.Context, i int) error {
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(deadline)/2)
		defer cancel()
	}
	conn, err := s.offer(ctx, s.c.transports[i])
	if err != nil {
		return err
	}
	s.conn, s.via = conn, i+1
	if err := s.fetchRegions(ctx, nil); err != nil {
		s.conn, s.via = nil, viaGRPC
		s.regions.Store(nil)
		return errors.Join(err, conn.Close())
	}
	s.sync = conn.Synchronous()
	s.query, _ = conn.(rdma.Querier)
	return nil
}

func (s *session) offer(ctx context.Context, t *transport) (rdma.Conn, error) {
	initiator, err := t.start()
	if err != nil {
		return nil, err
	}
	dial, err := initiator.Prepare(ctx)
	if err != nil {
		return nil, err
	}
	resp, err := s.remote.access.Connect(ctx, &kvdv1.ConnectRequest{SessionId: s.id, Transport: t.name, Offer: dial.Offer()})
	if err != nil {
		dial.Abort()
		return nil, rpcFailed(s.remote.addr, err)
	}
	return dial.Connect(ctx, resp.GetAnswer())
}

// fetchRegions makes regions known to the connection; none named means all.
func (s *session) fetchRegions(ctx context.Context, ids []uint32) error {
	resp, err := s.remote.access.Regions(ctx, &kvdv1.RegionsRequest{
		SessionId: s.id, Transport: s.c.via[s.via], Regions: ids,
	})
	if err != nil {
		return rpcFailed(s.remote.addr, err)
	}
	s.regionMu.Lock()
	defer s.regionMu.Unlock()
	var lengths []uint64
	if old := s.regions.Load(); old != nil {
		lengths = slices.Clone(*old)
	}
	for _, r := range resp.GetRegions() {
		if r.GetId() > layout.MaxChunk {
			continue // no location can name it
		}
		if err := s.conn.AddRegion(rdma.RegionID(r.GetId()), r.GetLength(), r.GetAttr()); err != nil {
			return fmt.Errorf("node at %s: region %d: %w", s.remote.addr, r.GetId(), err)
		}
		for len(lengths) <= int(r.GetId()) {
			lengths = append(lengths, 0)
		}
		lengths[r.GetId()] = r.GetLength()
	}
	s.regions.Store(&lengths)
	return nil
}

// room is how many bytes lie in the region from offset on; 0 where the region is not
// known.
func (s *session) room(region uint32, offset uint64) uint64 {
	p := s.regions.Load()
	if p == nil || int(region) >= len(*p) || (*p)[region] <= offset {
		return 0
	}
	return (*p)[region] - offset
}

// fetchRoutes asks the node about shards; none named means all. The records in the
// answer count as seen: the exchange is complete.
func (s *session) fetchRoutes(ctx context.Context, shards []uint32) error {
	began := s.c.cfg.Clock.Now().UnixNano()
	resp, err := s.remote.access.Routes(ctx, &kvdv1.RoutesRequest{SessionId: s.id, Shards: shards})
	if err != nil {
		err = rpcFailed(s.remote.addr, err)
		if reasonOf(err) == kvdv1.ErrorDetail_REASON_SESSION_GONE {
			s.fail(err)
		}
		return err
	}
	if n := (*s.c.nodes.Load())[s.nodeID]; n != nil {
		n.mute.Store(false)
	}
	for _, r := range resp.GetRoutes() {
		s.takeRoute(r, began)
	}
	if s.published.Load() {
		s.c.takeMembers(resp.GetMembers(), resp.GetMembersVersion())
	}
	return nil
}

// takeRoute takes in what the node says of a shard: in answer to a question that was asked
// at began (Unix ns), or, with 0, by itself. false: it is of no use, or behind what is known.
func (s *session) takeRoute(r *kvdv1.Route, began int64) bool {
	if r.GetShard() == 0 || int(r.GetShard()) >= len(s.replicas) {
		return false
	}
	info := decodeRoute(r)
	p := &s.replicas[r.GetShard()]
	if info.local && !s.identifies(&info.record, r.GetShard()) {
		return false // retired, or not published yet
	}
	// Answers and what is told come by different ways, and may overtake each other.
	if have := p.info.Load(); began == 0 && have != nil && have.local && info.local && info.record.Applied < have.record.Applied {
		return false
	}
	p.info.Store(info)
	if info.local {
		p.saw(&info.record, began)
	}
	return true
}

// identifies tells whether rec is the record of this node's replica of the shard
// in this boot.
func (s *session) identifies(rec *layout.Record, shard uint32) bool {
	return rec.Shard == uint64(shard) && rec.Replica == s.nodeID && rec.BootID == s.boot
}

func decodeRoute(r *kvdv1.Route) *replicaInfo {
	info := &replicaInfo{
		leader: r.GetLeaderNode(), configID: r.GetConfigId(), voters: r.GetVoters(), outgoing: r.GetVotersOutgoing(),
	}
	l := r.GetLocal()
	if l == nil {
		return info
	}
	info.record, info.local = layout.DecodeRecord(l.GetRecord())
	info.slot = l.GetSlot()
	if t := l.GetTable(); t != nil && t.GetBuckets() > 0 && t.GetOverflow() <= layout.MaxOverflow {
		info.tableGen = t.GetLayoutGen()
		info.table = layout.Table{
			ID: t.GetTableId(), Place: layout.Place{Chunk: t.GetChunk(), Offset: t.GetOffset()},
			Buckets: t.GetBuckets(), Overflow: t.GetOverflow(),
		}
	}
	return info
}

// answered takes in that a flight came back.
func (s *session) answered(took time.Duration) {
	old := s.latency.Load()
	if old == 0 {
		s.latency.Store(int64(took))
	} else {
		s.latency.Store(old + (int64(took)-old)/8)
	}
	if s.slow.Load() {
		s.slow.Store(false)
	}
}

// fail ends the session because of err: the node's loop connects anew. It may be
// called from anywhere and does not wait.
func (s *session) fail(err error) {
	s.ended.Store(true)
	if s.fault.CompareAndSwap(nil, &err) {
		close(s.broken)
	}
}

// close releases the connection. Reads that are outstanding complete with an error.
func (s *session) close() {
	s.ended.Store(true)
	if s.conn != nil {
		if err := s.conn.Close(); err != nil && !errors.Is(err, rdma.ErrClosed) {
			s.c.cfg.Logger.Debug("connection closed badly", slog.String("node", s.remote.addr), slog.Any("error", err))
		}
	}
}
