package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

func (l *load) setLimits(limits loadLimits) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.limits = limits
}

// idle tells whether nothing is counted.
func (l *load) idle() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.all == loadLimits{} && len(l.mu.owners) == 0
}

func testToken(id string, grants ...*kvdv1.Grant) *caller {
	return &caller{token: &token{&kvdv1.TokenRecord{Info: &kvdv1.TokenInfo{Id: id, Name: id, Grants: grants}}}}
}

// Whatever comes and goes: no limit is passed, no token has more than its share, nobody is
// refused while there is room, and nothing stays behind.
func TestLoadAgainstTwin(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	limits := loadLimits{calls: 32, bytes: 6400, streams: 16}
	l := newLoad(limits)
	callers := []*caller{testToken("a"), testToken("b"), testToken("op", &kvdv1.Grant{Namespace: anyNamespace, Admin: true}), {open: true}}
	type inside struct {
		who   int
		cost  loadLimits
		leave func()
	}
	var all []inside
	refused := 0
	for range 20_000 {
		if len(all) > 0 && rng.IntN(2) == 0 {
			i := rng.IntN(len(all))
			all[i].leave()
			all[i] = all[len(all)-1]
			all = all[:len(all)-1]
			continue
		}
		who, cost := rng.IntN(len(callers)), loadLimits{calls: 1, bytes: rng.Int64N(900)}
		if rng.IntN(3) == 0 {
			cost = loadLimits{streams: 1}
		}
		total, mine := cost, cost
		for _, x := range all {
			total.add(x.cost)
			if x.who == who {
				mine.add(x.cost)
			}
		}
		of, share := limits, int64(1<<40)
		if who == 2 {
			of = loadLimits{limits.calls + 2, limits.bytes + 400, limits.streams + 1}
		}
		if who < 3 {
			share = 2
		}
		fits := func(sum, limit loadLimits) bool {
			return (cost.calls == 0 || sum.calls <= limit.calls) && (cost.bytes == 0 || sum.bytes <= limit.bytes || sum.bytes == cost.bytes) && (cost.streams == 0 || sum.streams <= limit.streams)
		}
		room := fits(total, of) && (share != 2 || fits(mine, of.over(2)))
		leave, err := l.enter(callers[who], cost)
		require.Equal(t, room, err == nil, "caller %d with %+v: %v", who, cost, err)
		if err != nil {
			refused++
			require.Positive(t, requireReason(t, err, kvdv1.ErrorDetail_REASON_EXHAUSTED).GetRetryAfterMs())
			continue
		}
		all = append(all, inside{who, cost, leave})
	}
	require.Positive(t, refused)
	for _, x := range all {
		x.leave()
	}
	require.True(t, l.idle())
	_, err := l.enter(&caller{peer: true}, loadLimits{calls: 1 << 40})
	require.NoError(t, err, "nodes are not counted")
	require.True(t, l.idle())
}

// A token that holds all it can leaves room for others; what is refused was not done, and
// is taken once there is room.
func TestOverload(t *testing.T) {
	g := startGuarded(t, 1, 1)
	id := g.namespace("a")
	hog, other := g.token(0, "a:read,write"), g.token(0, "a:read,write")
	ctx := testContext(t)
	put := func(token, key string) error {
		_, err := g.kv(0).Put(as(ctx, token), &kvdv1.PutRequest{NamespaceId: id, Key: []byte(key), Value: []byte("v")})
		return err
	}
	require.NoError(t, put(hog, "first"))
	n := g.nodes[0]
	n.load.setLimits(loadLimits{calls: 8, bytes: 1 << 20, streams: 8})
	goOn := g.stall(0, 1)
	held := make(chan error, 4)
	for i := range 4 {
		go func() { held <- put(hog, fmt.Sprintf("held-%d", i)) }()
	}
	eventually(t, "four calls under way", func() bool {
		n.load.mu.Lock()
		defer n.load.mu.Unlock()
		return n.load.mu.all.calls == 4
	})
	err := put(hog, "refused")
	require.Positive(t, requireReason(t, err, kvdv1.ErrorDetail_REASON_EXHAUSTED).GetRetryAfterMs())
	require.ErrorContains(t, err, "half of the limit of calls under way")
	_, err = kvdv1.NewClusterClient(g.conns[0]).ListNamespaces(as(ctx, other), &kvdv1.ListNamespacesRequest{})
	require.NoError(t, err, "another token finds room")

	// A frame on a stream is a call like others.
	w, err := g.kv(0).Write(as(ctx, hog))
	require.NoError(t, err)
	require.NoError(t, w.Send(&kvdv1.WriteFrame{Id: 1, Op: &kvdv1.WriteFrame_Put{Put: &kvdv1.PutRequest{NamespaceId: id, Key: []byte("k")}}}))
	r, err := w.Recv()
	require.NoError(t, err)
	require.Equal(t, kvdv1.ErrorDetail_REASON_EXHAUSTED, r.GetDetail().GetReason())
	require.Positive(t, r.GetDetail().GetRetryAfterMs())

	// Streams: four of eight for one token.
	var opened []context.CancelFunc
	for range 3 {
		sctx, cancel := context.WithCancel(as(ctx, hog))
		opened = append(opened, cancel)
		s, err := g.kv(0).Write(sctx)
		require.NoError(t, err)
		_, err = s.Header()
		require.NoError(t, err)
	}
	s, err := g.kv(0).Write(as(ctx, hog))
	require.NoError(t, err)
	_, err = s.Recv()
	requireReason(t, err, kvdv1.ErrorDetail_REASON_EXHAUSTED)
	_, err = healthpb.NewHealthClient(g.conns[0]).Check(ctx, &healthpb.HealthCheckRequest{})
	require.NoError(t, err)

	goOn()
	for range 4 {
		require.NoError(t, <-held)
	}
	require.NoError(t, put(hog, "refused"))
	for _, cancel := range opened {
		cancel()
	}
	require.NoError(t, w.CloseSend())
	eventually(t, "nothing is counted any more", n.load.idle)
}

// One token can not have all sessions of a node.
func TestSessionsOfOneToken(t *testing.T) {
	all, hog := newSessions(), testToken("hog", &kvdv1.Grant{Namespace: anyNamespace, Read: true})
	ns := &kvdv1.NamespaceInfo{Name: "default"}
	var some []*session
	for range maxSessionsOwned {
		s, err := all.open("x", hog, ns)
		require.NoError(t, err)
		some = append(some, s)
	}
	_, err := all.open("x", hog, ns)
	require.Positive(t, requireReason(t, err, kvdv1.ErrorDetail_REASON_EXHAUSTED).GetRetryAfterMs())
	require.ErrorContains(t, err, "token hog has 8192 sessions")
	_, err = all.open("x", testToken("other"), ns)
	require.NoError(t, err)
	all.close(some[0])
	all.close(some[0]) // again counts nothing
	_, err = all.open("x", hog, ns)
	require.NoError(t, err)
	_, err = all.open("x", hog, ns)
	requireReason(t, err, kvdv1.ErrorDetail_REASON_EXHAUSTED)
}

// Clients that take nothing of what they asked for, answers to writes on a stream and
// pages of large values, hold up nobody else on the same shard.
func TestSlowClientsSlowNobody(t *testing.T) {
	c := startCluster(t, 1, 1)
	c.leaderOf(1)
	n := c.nodes[0]
	ctx := testContext(t)
	value := make([]byte, 512<<10)
	for i := range 8 {
		_, err := c.kv(0).Put(ctx, &kvdv1.PutRequest{NamespaceId: 1, Key: fmt.Appendf(nil, "large-%d", i), Value: value})
		require.NoError(t, err)
	}
	// The slow ones' connection has the smallest windows that there are, and nobody reads.
	slow, err := grpc.NewClient("passthrough:///"+n.Address(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStaticStreamWindowSize(1<<16), grpc.WithStaticConnWindowSize(1<<16))
	require.NoError(t, err)
	defer func() { require.NoError(t, slow.Close()) }()
	sctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pages, err := slow.NewStream(sctx, &grpc.StreamDesc{ServerStreams: true}, kvdv1.KV_List_FullMethodName)
	require.NoError(t, err)
	require.NoError(t, pages.SendMsg(&kvdv1.ListRequest{NamespaceId: 1, Shard: 1}))
	require.NoError(t, pages.CloseSend())
	writes, err := kvdv1.NewKVClient(slow).Write(sctx)
	require.NoError(t, err)
	var stuck atomic.Uint64 // frames that were sent
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for id := uint64(1); ; id++ {
			put := &kvdv1.PutRequest{NamespaceId: 1, Key: fmt.Appendf(nil, "slow-%d", id%8), Value: []byte("v")}
			if writes.Send(&kvdv1.WriteFrame{Id: id, Op: &kvdv1.WriteFrame_Put{Put: put}}) != nil {
				return
			}
			stuck.Store(id)
		}
	}()
	// Until the node takes no more of it.
	before, same := uint64(0), 0
	require.Eventually(t, func() bool {
		now := stuck.Load()
		if same++; now != before || now < maxStreamWrites {
			before, same = now, 0
		}
		return same > 250
	}, 2*time.Minute, 2*time.Millisecond, "the slow client is not stuck")
	for i := range 100 {
		key := fmt.Appendf(nil, "key-%d", i)
		cctx, cancel := context.WithTimeout(ctx, time.Minute)
		_, err := c.kv(0).Put(cctx, &kvdv1.PutRequest{NamespaceId: 1, Key: key, Value: key})
		require.NoError(t, err)
		r, err := c.kv(0).Get(cctx, &kvdv1.GetRequest{NamespaceId: 1, Key: key})
		cancel()
		require.NoError(t, err)
		require.Equal(t, key, r.GetValue())
	}
	cancel()
	<-ended
	eventually(t, "nothing is counted any more", n.load.idle)
}
