package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-io/kvd/raft"
)

// packet is something on its way from one process to another. It arrives when the
// simulation picks it.
type packet struct {
	from, to int
	what     string // for the trace, and for the order of those that were sent at once
	call     *call  // that it begins; nil: none
	of       *call  // that it is about
	stream   *call  // in order with the others of the same stream and direction; nil: in any order
	seq      int
	read     bool   // a call of which a node answers one at a time: see isRead
	place    bool   // a call of which a node answers one at a time: see node.move
	local    bool   // no network lies between: it arrives through any cut
	arrive   func() // at to
	lose     func() // instead; nil: nobody is told
}

// mail takes what processes send. They run between two steps, some of them at a time, so
// the order in which they send means nothing: what was sent between two steps is sorted.
type mail struct {
	mu   sync.Mutex
	sent []*packet
}

func (m *mail) post(p *packet) {
	m.mu.Lock()
	m.sent = append(m.sent, p)
	m.mu.Unlock()
}

// take gives what was sent since it was last asked, in an order that only depends on what
// it is. What one process sends to one other in one way stays in order.
func (m *mail) take() []*packet {
	m.mu.Lock()
	sent := m.sent
	m.sent = nil
	m.mu.Unlock()
	slices.SortStableFunc(sent, func(a, b *packet) int {
		return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to), cmp.Compare(a.what, b.what), cmp.Compare(a.of.number(), b.of.number()), cmp.Compare(a.seq, b.seq))
	})
	return sent
}

// sum tells requests of the same method apart.
func sum(m any) uint64 {
	h := fnv.New64a()
	if p, ok := m.(proto.Message); ok {
		b, err := proto.MarshalOptions{Deterministic: true}.Marshal(p)
		if err != nil {
			panic(fmt.Sprintf("sim: encode %T: %v", m, err)) // bug: of a message that gRPC could not send
		}
		_, _ = h.Write(b)
	}
	return h.Sum64()
}

// wire is how one process reaches the services of another. It takes the place of a
// connection of gRPC: calls and messages arrive when the simulation says so.
type wire struct {
	s        *sim
	from, to int
}

var _ grpc.ClientConnInterface = wire{}

// call is a call or a stream, from the caller's side.
type call struct {
	s        *sim
	from, to int
	id       int // given when its beginning was taken in; 0: not yet
	method   string
	ctx      context.Context
	request  []proto.Message // of a stream: all that the caller sent
	in       chan item       // what arrives at the caller
	ended    bool            // the last item was taken
	next     [2]int          // seq of the next arrival: at the callee, at the caller
	sent     [2]int
	stop     context.CancelFunc // of the handler; nil: it did not begin. The simulation's
	limit    time.Time          // when it fails without an answer; zero: it does not
	over     atomic.Bool        // it was answered, or nobody waits any more
	once     bool               // the handler's end was sent
}

// item is a message or, with an error, the end.
type item struct {
	m   proto.Message
	err error
}

const (
	// early is how long before a call's deadline the simulation ends it. Timers of the same
	// moment fire in any order, so what waits for them is told before, one by one.
	early = time.Microsecond
	// openLimit is how long a stream may take to begin: less than the clients grant it.
	openLimit = connectTimeout - 5*time.Millisecond
)

// inFlight bounds what lies at a caller that does not look: sessions are told little.
const inFlight = 64

func (w wire) newCall(ctx context.Context, method string) *call {
	return &call{s: w.s, from: w.from, to: w.to, method: method, ctx: ctx, in: make(chan item, inFlight)}
}

func (c *call) number() int {
	if c == nil {
		return 0
	}
	return c.id
}

func (c *call) short() string { return c.method[strings.LastIndexByte(c.method, '/')+1:] }

// begin sends the request.
func (c *call) begin() {
	label := "call " + c.short()
	if len(c.request) > 0 {
		label += fmt.Sprintf(" %016x", sum(c.request[0]))
	}
	c.s.mail.post(&packet{
		call: c, from: c.from, to: c.to, what: label, read: isRead(c.method), place: isPlacing(c.method),
		arrive: func() { c.s.serve(c) },
		lose:   func() { c.fail(errLost) },
	})
}

var (
	errLost    = status.Error(codes.Unavailable, "sim: the connection was lost")
	errLate    = status.Error(codes.DeadlineExceeded, "sim: no answer in time")
	errRefused = status.Error(codes.Unavailable, "sim: nobody listens")
)

// fail ends the call at the caller's side.
func (c *call) fail(err error) {
	select {
	case c.in <- item{err: err}:
	default: // it has ended, or nobody looks
	}
}

// Invoke implements grpc.ClientConnInterface.
func (w wire) Invoke(ctx context.Context, method string, args, reply any, _ ...grpc.CallOption) error {
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	c := w.newCall(ctx, method)
	defer c.over.Store(true)
	if at, ok := ctx.Deadline(); ok {
		c.limit = at.Add(-early)
	}
	c.request = []proto.Message{proto.Clone(args.(proto.Message))}
	c.begin()
	select {
	case it := <-c.in:
		if it.err != nil {
			return it.err
		}
		proto.Merge(reply.(proto.Message), it.m)
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// NewStream implements grpc.ClientConnInterface.
func (w wire) NewStream(ctx context.Context, d *grpc.StreamDesc, method string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	if err := ctx.Err(); err != nil {
		return nil, status.FromContextError(err).Err()
	}
	if d.ClientStreams && d.ServerStreams {
		// Where each message matters it is a packet of its own: see DESIGN.md.
		return nil, status.Errorf(codes.Unimplemented, "sim: %s", method)
	}
	c := w.newCall(ctx, method)
	c.limit = time.Now().Add(openLimit)
	// The handler learns that the caller has gone as a packet.
	context.AfterFunc(ctx, func() {
		c.s.mail.post(&packet{from: c.from, to: c.to, what: "cancel " + c.short(), of: c, arrive: func() {
			if c.stop != nil {
				c.stop()
			}
		}})
	})
	return clientStream{c}, nil
}

// clientStream is the caller's end of a stream: all its messages travel together.
type clientStream struct{ *call }

func (clientStream) Header() (metadata.MD, error) { return metadata.MD{}, nil }
func (clientStream) Trailer() metadata.MD         { return nil }
func (c clientStream) Context() context.Context   { return c.ctx }

func (c clientStream) SendMsg(m any) error {
	c.request = append(c.request, proto.Clone(m.(proto.Message)))
	return nil
}

func (c clientStream) CloseSend() error {
	c.begin()
	return nil
}

func (c clientStream) RecvMsg(m any) error {
	if c.ended {
		return io.EOF
	}
	select {
	case it := <-c.in:
		c.over.Store(true)
		if it.err != nil {
			c.ended = true
			return it.err
		}
		proto.Merge(m.(proto.Message), it.m)
		return nil
	case <-c.ctx.Done():
		c.over.Store(true)
		return status.FromContextError(c.ctx.Err()).Err()
	}
}

// serverStream is the handler's end of a call or stream.
type serverStream struct {
	*call
	boot   *boot
	hctx   context.Context
	unread *[]proto.Message
}

func (serverStream) SetHeader(metadata.MD) error  { return nil }
func (serverStream) SendHeader(metadata.MD) error { return nil }
func (serverStream) SetTrailer(metadata.MD)       {}
func (s serverStream) Context() context.Context   { return s.hctx }

func (s serverStream) SendMsg(m any) error {
	s.answer(s.boot, item{m: proto.Clone(m.(proto.Message))})
	return nil
}

func (s serverStream) RecvMsg(m any) error {
	if len(*s.unread) == 0 {
		return io.EOF
	}
	proto.Merge(m.(proto.Message), (*s.unread)[0])
	*s.unread = (*s.unread)[1:]
	return nil
}

// answer sends an item to the caller. A process that has died sends nothing more: its
// callers see their connections break.
func (c *call) answer(b *boot, it item) {
	p := &packet{from: c.to, to: c.from, what: "answer " + c.short(), of: c, stream: c, seq: c.sent[1]}
	c.sent[1]++
	if b.dead.Load() {
		if c.once {
			return
		}
		it, p.local, p.what = item{err: errLost}, true, "reset "+c.short()
	}
	c.once = c.once || it.err != nil
	switch {
	case it.err != nil:
		p.what += " " + status.Code(it.err).String()
	default:
		p.what += fmt.Sprintf(" %016x", sum(it.m))
	}
	p.arrive = func() {
		select {
		case c.in <- it:
		default:
			panic("sim: a caller does not take its answers") // bug: of the simulation
		}
	}
	p.lose = func() { c.fail(errLost) }
	c.s.mail.post(p)
}

// service is how a process's handlers are found.
type service struct {
	unary  map[string]func(ctx context.Context, c *call) (proto.Message, error)
	stream map[string]func(s grpc.ServerStream) error
}

func newService() *service {
	return &service{map[string]func(context.Context, *call) (proto.Message, error){}, map[string]func(grpc.ServerStream) error{}}
}

// RegisterService implements grpc.ServiceRegistrar.
func (v *service) RegisterService(d *grpc.ServiceDesc, impl any) {
	for _, m := range d.Methods {
		v.unary["/"+d.ServiceName+"/"+m.MethodName] = func(ctx context.Context, c *call) (proto.Message, error) {
			decode := func(into any) error {
				proto.Merge(into.(proto.Message), c.request[0])
				return nil
			}
			r, err := m.Handler(impl, ctx, decode, nil)
			if err != nil {
				return nil, err
			}
			return proto.Clone(r.(proto.Message)), nil
		}
	}
	for _, m := range d.Streams {
		v.stream["/"+d.ServiceName+"/"+m.StreamName] = func(s grpc.ServerStream) error { return m.Handler(impl, s) }
	}
}

// serve begins the handler of a call that has arrived. It runs until it has to wait for
// something.
func (s *sim) serve(c *call) {
	n := s.node(c.to)
	if n.boot == nil {
		c.fail(errRefused)
		return
	}
	b := n.boot
	ctx := b.life
	var stop context.CancelFunc
	if at, ok := c.ctx.Deadline(); ok {
		ctx, stop = context.WithDeadline(ctx, at)
	} else {
		ctx, stop = context.WithCancel(ctx)
	}
	c.stop = stop
	if unary := b.service.unary[c.method]; unary != nil {
		reads, places := isRead(c.method), isPlacing(c.method)
		if reads {
			b.reading = true
		}
		if places {
			b.placing.Store(true)
		}
		go func() {
			defer stop()
			m, err := unary(ctx, c)
			if reads {
				b.doneReading.Store(true)
			}
			if places {
				b.placing.Store(false)
			}
			c.answer(b, item{m, wireError(err)})
		}()
		return
	}
	stream := b.service.stream[c.method]
	if stream == nil {
		c.fail(status.Errorf(codes.Unimplemented, "sim: %s", c.method))
		return
	}
	go func() {
		defer stop()
		err := stream(serverStream{c, b, ctx, &c.request})
		if err == nil {
			err = io.EOF
		}
		c.answer(b, item{err: wireError(err)})
	}()
}

// isRead tells the calls of which a node answers one at a time here: several that are
// let go by one step would run at the same time, and what they do to the memory would
// depend on the scheduler.
func isRead(method string) bool {
	return strings.HasSuffix(method, "/Get") || strings.HasSuffix(method, "/List")
}

// wireError is what arrives of a handler's error.
func wireError(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return status.FromContextError(err).Err()
}

// sendRaft is the transport of Raft's messages.
func (n *node) sendRaft(b *boot, to raft.NodeID, msgs []raft.GroupMessage) {
	if b.dead.Load() {
		return
	}
	s := n.s
	for _, gm := range msgs {
		m, quiesce := proto.Clone(gm.Message).(*raftpb.Message), gm.Quiesce
		what := fmt.Sprintf("g%d %v term %d index %d commit %d entries %d mark %d", gm.Group, m.GetType(), m.GetTerm(), m.GetIndex(), m.GetCommit(), len(m.GetEntries()), quiesce)
		s.mail.post(&packet{
			from: n.id, to: int(to), what: "raft",
			arrive: func() {
				s.note("%s", what)
				if o := s.node(int(to)); o.boot != nil {
					o.boot.core.Host().Step([]raft.GroupMessage{{Group: gm.Group, Message: m, Quiesce: quiesce}})
				}
			},
			lose: func() {
				if n.boot == b && s.chance(2) {
					b.core.Host().ReportUnreachable(to)
				}
			},
		})
	}
}

// sendHeartbeat is the transport of the nodes' own heartbeats.
func (n *node) sendHeartbeat(b *boot, to raft.NodeID, hb raft.NodeHeartbeat) {
	if b.dead.Load() {
		return
	}
	s := n.s
	s.mail.post(&packet{
		from: n.id, to: int(to), what: "heartbeat",
		arrive: func() {
			s.note("node %d lives", n.id)
			if o := s.node(int(to)); o.boot != nil {
				o.boot.core.Host().Heartbeat(raft.NodeID(n.id), hb)
			}
		},
	})
}
