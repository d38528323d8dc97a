package gossip

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const clusterA, clusterB = "0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210"

// node is a Gossip whose events are kept.
type node struct {
	*Gossip
	t  *testing.T
	mu struct {
		sync.Mutex
		events []Event
	}
	news chan struct{}
}

func config(id uint64) Config {
	return Config{
		ClusterID: clusterA, NodeID: id, Incarnation: 1000 + id, Generation: 1, Key: Key{31: 1},
		ListenAddr: fmt.Sprintf("127.0.0.%d:0", id),
		Meta:       Meta{Address: fmt.Sprintf("127.0.0.%d:7400", id), Zone: "z", Version: "test"},
		Timing:     Loopback(),
		Logger:     testLog(),
	}
}

func testLog() *slog.Logger {
	if os.Getenv("GOSSIP_LOG") == "" {
		return slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func start(t *testing.T, cfg Config) *node {
	t.Helper()
	n := &node{t: t, news: make(chan struct{}, 1)}
	cfg.OnEvent = func(e Event) {
		n.mu.Lock()
		n.mu.events = append(n.mu.events, e)
		n.mu.Unlock()
		select {
		case n.news <- struct{}{}:
		default:
		}
	}
	var err error
	n.Gossip, err = Start(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.Close()) })
	return n
}

// await returns the first event for which ok holds, waiting for it as long as the test may
// run.
func (n *node) await(what string, ok func(Event) bool) Event {
	n.t.Helper()
	seen := 0
	for {
		n.mu.Lock()
		events := n.mu.events
		n.mu.Unlock()
		for ; seen < len(events); seen++ {
			if ok(events[seen]) {
				return events[seen]
			}
		}
		select {
		case <-n.news:
		case <-time.After(time.Minute):
			require.FailNow(n.t, "not seen: "+what, "node %d: events %+v\nmembers %+v", n.cfg.NodeID, events, n.Members())
		}
	}
}

func is(id uint64, s State) func(Event) bool {
	return func(e Event) bool { return e.Member.NodeID == id && e.Member.State == s }
}

func (n *node) find(id uint64) Member {
	for _, m := range n.Members() {
		if m.NodeID == id {
			return m
		}
	}
	return Member{}
}

func (n *node) join(others ...*node) {
	n.t.Helper()
	for _, o := range others {
		joined, err := n.Join(context.Background(), o.Addr().String())
		require.NoError(n.t, err)
		require.Equal(n.t, 1, joined)
	}
}

// three nodes that know each other.
func three(t *testing.T) []*node {
	ns := []*node{start(t, config(1)), start(t, config(2)), start(t, config(3))}
	ns[1].join(ns[0])
	ns[2].join(ns[0])
	for _, n := range ns {
		for id := uint64(1); id <= 3; id++ {
			if id != n.cfg.NodeID {
				n.await("all nodes", is(id, Alive))
			}
		}
	}
	return ns
}

func TestThreeNodes(t *testing.T) {
	ns := three(t)
	for _, n := range ns {
		require.Len(t, n.Members(), 2)
		for _, m := range n.Members() {
			want := config(m.NodeID).withDefaults().Meta
			require.Equal(t, want, m.Meta)
			require.Equal(t, ns[m.NodeID-1].Addr(), m.GossipAddr)
			require.False(t, m.Since.IsZero())
		}
		s := n.Stats()
		require.Equal(t, 2, s.Alive+s.Suspect)
		require.Zero(t, s.Dead+s.Left)
	}
	require.Eventually(t, func() bool { return !ns[0].find(2).Heard.IsZero() }, time.Minute, time.Millisecond, "no probe was answered")
	s := ns[0].Stats()
	require.NotZero(t, s.PacketsIn)
	require.NotZero(t, s.PacketsOut)
	require.NotZero(t, s.BytesIn)
	require.NotZero(t, s.BytesOut)
	require.NotZero(t, s.StreamsIn)
	require.NotZero(t, ns[1].Stats().StreamsOut)
}

// TestKilled: a node that stops without a word is suspect and then dead, in the eyes of
// all; and when it comes back under a later start it is alive.
func TestKilled(t *testing.T) {
	ns := three(t)
	addr := ns[2].Addr()
	require.NoError(t, ns[2].Close())
	for _, n := range ns[:2] {
		n.await("its death", is(3, Dead))
		require.Equal(t, Dead, n.find(3).State)
		require.Equal(t, 1, n.Stats().Dead)
	}
	// At least one of them found out by its own probes first; that it says so is read in
	// memberlist's log, which a new version may word in another way.
	suspected := false
	for _, n := range ns[:2] {
		n.mu.Lock()
		for _, e := range n.mu.events {
			suspected = suspected || is(3, Suspect)(e)
		}
		n.mu.Unlock()
	}
	require.True(t, suspected, "dead without having been suspect")

	cfg := config(3)
	cfg.ListenAddr, cfg.Generation = addr.String(), 2
	start(t, cfg).join(ns[0])
	for _, n := range ns[:2] {
		n.await("its return", func(e Event) bool { return is(3, Alive)(e) && e.Member.Generation == 2 })
	}
}

func TestLeave(t *testing.T) {
	ns := three(t)
	require.NoError(t, ns[2].Leave(context.Background()))
	require.NoError(t, ns[2].Close())
	for _, n := range ns[:2] {
		n.await("its farewell", is(3, Left))
		n.mu.Lock()
		for _, e := range n.mu.events {
			require.False(t, is(3, Dead)(e), "a node that said that it stops was taken for dead: %+v", e)
		}
		n.mu.Unlock()
	}
	require.ErrorIs(t, ns[2].Update(Meta{}), ErrClosed)
	_, err := ns[2].Join(context.Background(), ns[0].Addr().String())
	require.ErrorIs(t, err, ErrClosed)
}

// TestMoves: a later start of the same incarnation at another address is believed, whether
// the node said that it stops, was killed long ago, or was killed just now and is taken
// for alive still.
func TestMoves(t *testing.T) {
	for _, how := range []string{"left", "dead", "killed just now"} {
		t.Run(how, func(t *testing.T) {
			ns := three(t)
			if how == "left" {
				require.NoError(t, ns[2].Leave(context.Background()))
			}
			require.NoError(t, ns[2].Close())
			switch how {
			case "left":
				ns[0].await(how, is(3, Left))
			case "dead":
				ns[0].await(how, is(3, Dead))
			}
			cfg := config(3)
			cfg.ListenAddr, cfg.Generation = "127.0.0.33:0", 2
			cfg.Meta.Address = "127.0.0.33:7400"
			moved := start(t, cfg)
			moved.join(ns[0])
			for _, n := range ns[:2] {
				e := n.await("its new address", func(e Event) bool { return e.Member.NodeID == 3 && e.Member.Address == "127.0.0.33:7400" })
				require.True(t, e.Moved())
				require.EqualValues(t, 2, e.Member.Generation)
				n.await("that it lives there", func(e Event) bool {
					return is(3, Alive)(e) && e.Member.GossipAddr == moved.Addr()
				})
			}
			moved.await("the others", is(1, Alive))
			moved.await("the others", is(2, Alive))
			// The old message does not come back: nobody takes it for the node that was.
			require.Eventually(t, func() bool { return !ns[0].find(3).Heard.IsZero() && ns[0].find(3).State == Alive }, time.Minute, time.Millisecond)
			require.Equal(t, moved.Addr(), ns[0].find(3).GossipAddr)
		})
	}
}

// TestMoveIsBelievedAtOnce: while the others still wait for the old address to be dead,
// they know the new one; it is in doubt until it was reached.
func TestMoveIsBelievedAtOnce(t *testing.T) {
	patient := config(1)
	patient.Timing.SuspicionMult = 10_000 // nobody dies in this test
	one, three := start(t, patient), start(t, config(3))
	three.join(one)
	one.await("the other", is(3, Alive))
	require.NoError(t, three.Close())
	cfg := config(3)
	cfg.ListenAddr, cfg.Generation, cfg.Meta.Address = "127.0.0.33:0", 2, "127.0.0.33:7400"
	moved := start(t, cfg)
	moved.join(one)
	e := one.await("its new address", func(e Event) bool { return e.Member.Address == "127.0.0.33:7400" })
	require.Equal(t, Suspect, e.Member.State)
	require.Equal(t, moved.Addr(), e.Member.GossipAddr)
	require.True(t, e.Moved())
}

// TestOldMessages: what was said at an earlier start is not believed again, nor that the
// address that a node left is dead.
func TestOldMessages(t *testing.T) {
	tb := newTable(config(1).withDefaults())
	message := func(generation uint64, addr string) *memberlist.Node {
		m := config(3).withDefaults().Meta
		m.Generation = generation
		b, err := m.encode()
		require.NoError(t, err)
		return &memberlist.Node{Name: m.name(), Meta: b, Addr: net.ParseIP(addr).To4(), Port: 7}
	}
	before, now := message(1, "127.0.0.3"), message(2, "127.0.0.33")
	require.NoError(t, tb.NotifyAlive(before))
	tb.NotifyJoin(before)
	tb.NotifyConflict(before, now)
	there := func(s State) {
		t.Helper()
		m := tb.list()[0]
		require.EqualValues(t, 2, m.Generation)
		require.Equal(t, "127.0.0.33:7", m.GossipAddr.String())
		require.Equal(t, s, m.State)
	}
	there(Suspect)
	tb.NotifyPingComplete(before, 0, nil)
	there(Suspect)
	tb.NotifyLeave(before)
	there(Suspect)
	require.ErrorContains(t, tb.NotifyAlive(before), "an old message: start 1, and 2 is known")
	require.Zero(t, tb.mu.refusedMember, "it is no stranger")
	tb.NotifyConflict(now, before)
	tb.NotifyUpdate(before)
	there(Suspect)
	require.NoError(t, tb.NotifyAlive(now))
	tb.NotifyJoin(now)
	there(Alive)
	tb.NotifyLeave(now)
	there(Dead)
}

// TestTwin: of two processes with one identity and the same start the first stays where it
// is known, and it is told that there are two.
func TestTwin(t *testing.T) {
	ns := three(t)
	cfg := config(3)
	cfg.ListenAddr, cfg.Meta.Address = "127.0.0.33:0", "127.0.0.33:7400"
	twin := start(t, cfg)
	twin.join(ns[0])
	require.Eventually(t, func() bool { return ns[0].Stats().Conflicts > 0 }, time.Minute, time.Millisecond)
	require.Equal(t, ns[2].Addr(), ns[0].find(3).GossipAddr)
	require.Equal(t, "127.0.0.3:7400", ns[0].find(3).Address)
}

// refusedBothWays: neither side knows of the other, or of anyone whom the other knows.
func refusedBothWays(t *testing.T, ns []*node, stranger *node) {
	t.Helper()
	require.Empty(t, stranger.Members())
	for _, n := range ns {
		require.Len(t, n.Members(), len(ns)-1)
		require.Zero(t, n.find(stranger.cfg.NodeID))
	}
}

func TestForeignCluster(t *testing.T) {
	ns := []*node{start(t, config(1)), start(t, config(2))}
	ns[1].join(ns[0])
	ns[0].await("the other", is(2, Alive))
	cfg := config(9)
	cfg.ClusterID = clusterB
	stranger := start(t, cfg)
	_, err := stranger.Join(context.Background(), ns[0].Addr().String())
	require.ErrorIs(t, err, ErrForeign)
	require.Equal(t, fmt.Sprintf("gossip: refused: who answers at %s hung up on a node of cluster %s: it belongs to another cluster, or is no gossip port of kvd", ns[0].Addr(), clusterB), err.Error())
	require.Eventually(t, func() bool { return ns[0].Stats().RefusedLabel > 0 }, time.Minute, time.Millisecond)
	refusedBothWays(t, ns, stranger)
}

// TestReusedAddress: a node that looks for its cluster at an address where another one's
// node is now, as happens where addresses are given again, finds none, again and again.
func TestReusedAddress(t *testing.T) {
	other := config(1)
	other.ClusterID = clusterB
	there := start(t, other)
	cfg := config(2)
	asked := make(chan struct{}, 100)
	cfg.Seeds = func(context.Context) []string {
		select {
		case asked <- struct{}{}:
		default:
		}
		return []string{there.Addr().String()}
	}
	n := start(t, cfg)
	for range 3 {
		<-asked
	}
	require.Empty(t, n.Members())
	require.Empty(t, there.Members())
}

func TestWrongKey(t *testing.T) {
	ns := []*node{start(t, config(1)), start(t, config(2))}
	ns[1].join(ns[0])
	ns[0].await("the other", is(2, Alive))
	cfg := config(9)
	cfg.Key[0]++
	stranger := start(t, cfg)
	_, err := stranger.Join(context.Background(), ns[0].Addr().String())
	require.ErrorIs(t, err, ErrForeign)
	require.Equal(t, fmt.Sprintf("gossip: refused: the node at %s has another gossip key: give this node the key of the cluster that it is to join", ns[0].Addr()), err.Error())
	require.Eventually(t, func() bool { return ns[0].Stats().RefusedKey > 0 }, time.Minute, time.Millisecond)
	refusedBothWays(t, ns, stranger)
}

// TestNotAdmitted: a node with the key that is not the recorded one is not let in, neither
// by those whom it asks nor by those who hear of it.
func TestNotAdmitted(t *testing.T) {
	admit := func(m Meta) error {
		if m.NodeID == 3 && m.Incarnation != 1003 {
			return fmt.Errorf("node 3 has incarnation %d, recorded is 1003", m.Incarnation)
		}
		return nil
	}
	one, two := config(1), config(2)
	one.Admit, two.Admit = admit, admit
	ns := []*node{start(t, one), start(t, two)}
	ns[1].join(ns[0])
	ns[0].await("the other", is(2, Alive))
	wiped := config(3)
	wiped.Incarnation = 77
	stranger := start(t, wiped)
	_, err := stranger.Join(context.Background(), ns[0].Addr().String())
	require.NoError(t, err) // it has the key, and learns who is there
	require.Eventually(t, func() bool { return ns[0].Stats().RefusedMember > 0 }, time.Minute, time.Millisecond)
	ok := start(t, config(3))
	ok.join(ns[0])
	for _, n := range ns {
		e := n.await("the recorded one", is(3, Alive))
		require.EqualValues(t, 1003, e.Member.Incarnation)
		require.Len(t, n.Members(), 2)
	}
}

func TestUpdate(t *testing.T) {
	ns := three(t)
	m := config(1).Meta
	m.Zone, m.Transports = "elsewhere", []string{"tcp", "verbs"}
	require.NoError(t, ns[0].Update(m))
	for _, n := range ns[1:] {
		e := n.await("the update", func(e Event) bool { return e.Member.NodeID == 1 && e.Member.Zone == "elsewhere" })
		require.Equal(t, Alive, e.Member.State)
		require.Equal(t, m.Transports, e.Member.Transports)
		require.EqualValues(t, 1001, e.Member.Incarnation, "the ids are the node's own")
	}
	m.Zone = strings.Repeat("z", maxMeta)
	require.ErrorIs(t, ns[0].Update(m), ErrConfig)
	require.Equal(t, "elsewhere", ns[1].find(1).Zone)
}

// TestFoundAgain: a node that comes back and knows nobody is found by those who know it.
func TestFoundAgain(t *testing.T) {
	ns := []*node{start(t, config(1)), start(t, config(2))}
	ns[1].join(ns[0])
	ns[0].await("the other", is(2, Alive))
	addr := ns[1].Addr()
	require.NoError(t, ns[1].Close())
	ns[0].await("its death", is(2, Dead))
	cfg := config(2)
	cfg.Generation, cfg.ListenAddr = 2, addr.String()
	again := start(t, cfg) // knows nobody
	ns[0].await("its return", func(e Event) bool { return is(2, Alive)(e) && e.Member.Generation == 2 })
	again.await("the other", is(1, Alive))
}

func TestForget(t *testing.T) {
	ns := three(t)
	require.NoError(t, ns[2].Leave(context.Background()))
	require.NoError(t, ns[2].Close())
	ns[0].await("its farewell", is(3, Left))
	ns[0].Forget(3, 1003)
	require.Len(t, ns[0].Members(), 2)
	ns[0].Forget(3, 0)
	require.Len(t, ns[0].Members(), 1)
}

func TestJoinByName(t *testing.T) {
	ns := []*node{start(t, config(1)), start(t, config(2))}
	cfg := config(3)
	cfg.ListenAddr = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.3"), ns[0].Addr().Port()).String()
	two := config(2)
	two.NodeID, two.Incarnation = 4, 1004
	two.ListenAddr = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.4"), ns[0].Addr().Port()).String()
	ns = append(ns, start(t, two))
	names := map[string][]string{
		"kvd.ns.svc": {"127.0.0.1", "127.0.0.4", "127.0.0.3"}, // this node is among them
		"self":       {"127.0.0.3"},
		"nothing":    {},
		"strange":    {"not an address"},
	}
	cfg.Lookup = func(_ context.Context, host string) ([]string, error) {
		if a, ok := names[host]; ok {
			return a, nil
		}
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	n := start(t, cfg)
	port := fmt.Sprint(ns[0].Addr().Port())
	for _, test := range []struct {
		hostPort, want string
		kind           error
	}{
		{"nothing:" + port, `gossip: nobody reached: the name "nothing" resolves to no address: is there a node behind it?`, ErrUnreachable},
		{"strange:" + port, `gossip: nobody reached: the name "strange" resolves to no address: is there a node behind it?`, ErrUnreachable},
		{"nowhere:" + port, `gossip: nobody reached: the name "nowhere" resolves to nothing: lookup nowhere: no such host`, ErrUnreachable},
		{"nothing", `gossip: configuration: "nothing" is no place to gossip with: want HOST:PORT`, ErrConfig},
		{":" + port, `gossip: configuration: ":` + port + `" is no place to gossip with: want HOST:PORT`, ErrConfig},
		{"nothing:0", `gossip: configuration: "nothing:0" is no place to gossip with: want HOST:PORT`, ErrConfig},
	} {
		joined, err := n.Join(context.Background(), test.hostPort)
		require.ErrorIs(t, err, test.kind)
		require.EqualError(t, err, test.want)
		require.Zero(t, joined)
	}
	joined, err := n.Join(context.Background(), "self:"+port)
	require.NoError(t, err, "a node that is alone behind its name is no failure")
	require.Zero(t, joined)
	joined, err = n.Join(context.Background(), "kvd.ns.svc:"+port, "nothing:"+port)
	require.NoError(t, err)
	require.Equal(t, 2, joined)
	n.await("the others", is(1, Alive))
	n.await("the others", is(4, Alive))
}

func TestNobodyThere(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := free.Addr().String()
	require.NoError(t, free.Close())
	n := start(t, config(1))
	_, err = n.Join(context.Background(), addr)
	require.ErrorIs(t, err, ErrUnreachable)
	require.Contains(t, err.Error(), "connection refused")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = n.Join(ctx, addr)
	require.ErrorIs(t, err, context.Canceled)
}

func TestAddressTaken(t *testing.T) {
	n := start(t, config(1))
	cfg := config(2)
	cfg.ListenAddr = n.Addr().String()
	_, err := Start(cfg)
	require.ErrorIs(t, err, ErrConfig)
	require.Contains(t, err.Error(), "gossip can not listen on "+n.Addr().String()+" by UDP and TCP")
}

// TestIdleStreams: connections that say nothing take no more than their places, and do not
// keep a node from closing.
func TestIdleStreams(t *testing.T) {
	n := start(t, config(1))
	var conns []net.Conn
	for range maxStreams + 8 {
		c, err := net.Dial("tcp", n.Addr().String())
		require.NoError(t, err)
		conns = append(conns, c)
	}
	require.Eventually(t, func() bool { return n.Stats().StreamsRefused >= 8 }, time.Minute, time.Millisecond)
	require.NoError(t, n.Close())
	for _, c := range conns {
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err)
		require.NoError(t, c.Close())
	}
}

// TestSlowListener: while OnEvent does not return, changes are put together; the last
// one comes.
func TestSlowListener(t *testing.T) {
	cfg := config(1)
	hold, events := make(chan struct{}), make(chan Event, 1000)
	cfg.OnEvent = func(e Event) {
		events <- e
		<-hold
	}
	slow, err := Start(cfg)
	require.NoError(t, err)
	two := start(t, config(2))
	_, err = two.Join(context.Background(), slow.Addr().String())
	require.NoError(t, err)
	require.Equal(t, Alive, (<-events).Member.State)
	const updates = 50
	for i := range updates {
		m := config(2).Meta
		m.Version = fmt.Sprint(i)
		require.NoError(t, two.Update(m))
	}
	last := fmt.Sprint(updates - 1)
	require.Eventually(t, func() bool { return slow.Members()[0].Version == last }, time.Minute, time.Millisecond)
	close(hold)
	e := <-events
	require.Equal(t, last, e.Member.Version, "what was in between is left out")
	require.Equal(t, "test", e.Before.Version)
	require.NoError(t, slow.Close())
}
