package raft

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"go.etcd.io/raft/v3/raftpb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// loop connects running hosts by calls: a node's messages are stepped by one
// goroutine, as a connection's reader would.
type loop struct {
	mu    sync.RWMutex
	links map[[2]NodeID]chan []GroupMessage
	hosts map[NodeID]*Host
	sms   map[NodeID]map[GroupID]*machine
	down  map[NodeID]bool
	wg    sync.WaitGroup
	done  chan struct{}
}

func newLoop() *loop {
	return &loop{
		links: map[[2]NodeID]chan []GroupMessage{}, hosts: map[NodeID]*Host{},
		sms: map[NodeID]map[GroupID]*machine{}, down: map[NodeID]bool{}, done: make(chan struct{}),
	}
}

func (l *loop) close() {
	close(l.done)
	l.wg.Wait()
}

func (l *loop) setDown(n NodeID, down bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down[n] = down
}

type loopEnd struct {
	l    *loop
	self NodeID
}

func (e loopEnd) Send(to NodeID, msgs []GroupMessage) {
	l := e.l
	l.mu.Lock()
	key := [2]NodeID{e.self, to}
	c := l.links[key]
	if c == nil {
		c = make(chan []GroupMessage, 1024)
		l.links[key] = c
		l.wg.Go(func() { l.pump(key, c) })
	}
	l.mu.Unlock()
	select {
	case c <- msgs:
	default:
	}
}

func (l *loop) pump(key [2]NodeID, c chan []GroupMessage) {
	for {
		select {
		case msgs := <-c:
			l.mu.RLock()
			h, down := l.hosts[key[1]], l.down[key[0]] || l.down[key[1]]
			l.mu.RUnlock()
			if h != nil && !down {
				h.Step(msgs)
			}
		case <-l.done:
			return
		}
	}
}

func (e loopEnd) SendHeartbeat(to NodeID, hb NodeHeartbeat) {
	l := e.l
	l.mu.RLock()
	h, down := l.hosts[to], l.down[e.self] || l.down[to]
	l.mu.RUnlock()
	if h != nil && !down {
		h.Heartbeat(e.self, hb)
	}
}

func (e loopEnd) SendSnapshot(to NodeID, g GroupID, m *raftpb.Message, done func(bool)) {
	e.l.mu.RLock()
	sm := e.l.sms[e.self][g]
	e.l.mu.RUnlock()
	m = proto.Clone(m).(*raftpb.Message)
	meta, data := sm.encode()
	m.Snapshot = &raftpb.Snapshot{Metadata: meta, Data: data}
	e.Send(to, []GroupMessage{{Group: g, Message: m}})
	done(true)
}

// live is a cluster of running hosts.
type live struct {
	t     testing.TB
	loop  *loop
	logs  map[NodeID]*memLog
	nodes []NodeID
}

func startLive(t testing.TB, nodes, groups int, conf func(*Config), disk func(*memLog)) *live {
	c := &live{t: t, loop: newLoop(), logs: map[NodeID]*memLog{}}
	var voters []uint64
	for i := range nodes {
		c.nodes = append(c.nodes, NodeID(i+1))
		voters = append(voters, uint64(i+1))
	}
	for _, n := range c.nodes {
		c.logs[n] = newMemLog()
		if disk != nil {
			disk(c.logs[n])
		}
		cfg := Config{NodeID: n, Log: c.logs[n], Transport: loopEnd{c.loop, n}, TickInterval: 20 * time.Millisecond, ElectionTicks: 20, // a loaded machine must not elect by itself
			Logger: slog.New(slog.DiscardHandler)}
		if conf != nil {
			conf(&cfg)
		}
		h, err := NewHost(cfg)
		require.NoError(t, err)
		c.loop.sms[n] = map[GroupID]*machine{}
		for g := range groups {
			sm := newMachine(GroupID(g), voters...)
			c.loop.sms[n][GroupID(g)] = sm
			_, err := h.AddGroup(GroupConfig{ID: GroupID(g), StateMachine: sm})
			require.NoError(t, err)
		}
		c.loop.mu.Lock()
		c.loop.hosts[n] = h
		c.loop.mu.Unlock()
	}
	for _, n := range c.nodes {
		c.loop.hosts[n].Start()
	}
	for g := range groups {
		c.group(c.nodes[g%nodes], GroupID(g)).Campaign()
	}
	t.Cleanup(func() {
		for _, n := range c.nodes {
			require.NoError(t, c.loop.hosts[n].Close())
		}
		c.loop.close()
	})
	return c
}

func (c *live) group(n NodeID, g GroupID) *Group { return c.loop.hosts[n].Group(g) }

// leader waits for one that serves.
func (c *live) leader(g GroupID) *Group {
	c.t.Helper()
	var found *Group
	waitFor(c.t, fmt.Sprintf("a leader of group %d", g), func() bool {
		for _, n := range c.nodes {
			gr := c.group(n, g)
			if _, err := gr.ReadIndex(context.Background()); err == nil {
				found = gr
				return true
			}
		}
		return false
	})
	return found
}

// waitFor polls, since what it waits for has no channel of its own.
func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("no %s after 20 s", what)
		}
		<-tick.C
	}
}

func TestLivePut(t *testing.T) {
	c := startLive(t, 3, 4, nil, nil)
	for g := range GroupID(4) {
		lead := c.leader(g)
		for i := range 20 {
			v, index, err := lead.Propose(t.Context(), fmt.Appendf(nil, "v%d", i))
			require.NoError(t, err)
			require.Equal(t, fmt.Sprintf("v%d@%d", i, index), v)
		}
		for _, n := range c.nodes {
			waitFor(t, "replica that caught up", func() bool { return len(c.loop.sms[n][g].entries()) == 20 })
			if n != c.group(n, g).Status().Leader {
				_, _, err := c.group(n, g).Propose(t.Context(), []byte("x"))
				require.ErrorIs(t, err, ErrNotLeader)
				_, err = c.group(n, g).ReadIndex(t.Context())
				require.ErrorIs(t, err, ErrNotLeader)
			}
		}
	}
}
