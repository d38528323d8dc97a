package raft

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/kvd-io/kvd/internal/clock"
)

// manual is a cluster whose hosts are never started: the test takes each step that
// a goroutine would take, so equal steps give equal results.
type manual struct {
	t      testing.TB
	nodes  map[NodeID]*manualNode
	groups []GroupID
	conf   func(*Config)
	clock  *clock.Manual
	net    []packet
	// cut tells what the net loses; nil: nothing.
	cut   func(packet) bool
	trace []string
	// broken is what the invariants found.
	broken []string
	// leaders by group and term.
	leaders map[GroupID]map[uint64]NodeID
}

type manualNode struct {
	id   NodeID
	log  *memLog
	sms  map[GroupID]*machine
	host *Host // nil: down
	fate error // of OnFatal
	m    *manual
	runs uint64
}

type packet struct {
	from, to NodeID
	gm       GroupMessage
	done     func(bool)     // of a snapshot
	beat     *NodeHeartbeat // in place of gm
}

func (p packet) kind() string {
	if p.beat != nil {
		return "NodeHeartbeat"
	}
	return p.gm.Message.GetType().String()
}

func newManual(t testing.TB, nodes, groups int, conf func(*Config)) *manual {
	m := &manual{t: t, nodes: map[NodeID]*manualNode{}, conf: conf, clock: clock.NewManual(time.Unix(0, 0)), leaders: map[GroupID]map[uint64]NodeID{}}
	var voters []uint64
	for i := range nodes {
		voters = append(voters, uint64(i+1))
	}
	for g := range groups {
		m.groups = append(m.groups, GroupID(g))
		m.leaders[GroupID(g)] = map[uint64]NodeID{}
	}
	for _, v := range voters {
		m.addNode(NodeID(v), voters...)
	}
	return m
}

// addNode without voters makes an empty replica that waits for a snapshot.
func (m *manual) addNode(id NodeID, voters ...uint64) {
	n := &manualNode{id: id, log: newMemLog(), sms: map[GroupID]*machine{}, m: m}
	n.log.onWrite = func(desc string) { n.say(desc) }
	for _, g := range m.groups {
		sm := newMachine(g, voters...)
		sm.tell = n.say
		n.sms[g] = sm
	}
	m.nodes[id] = n
	require.NoError(m.t, n.start())
}

func (n *manualNode) say(s string) { n.m.trace = append(n.m.trace, fmt.Sprintf("%d %s", n.id, s)) }

func (n *manualNode) start() error {
	n.runs++
	cfg := Config{
		NodeID: n.id, Log: n.log, Transport: manualEnd{n}, Clock: n.m.clock, Logger: slog.New(slog.DiscardHandler),
		Seed:  n.runs<<32 | uint64(n.id)<<16,
		Hooks: Hooks{OnFatal: func(_ GroupID, err error) { n.fate = err }},
	}
	if n.m.conf != nil {
		n.m.conf(&cfg)
	}
	h, err := NewHost(cfg)
	if err != nil {
		return err
	}
	for _, g := range n.m.groups {
		if _, err := h.AddGroup(GroupConfig{ID: g, StateMachine: n.sms[g]}); err != nil {
			return err
		}
	}
	n.host = h
	return nil
}

// crash ends the process: what is not durable is gone, except keep batches of the
// log that happened to reach the disk.
func (n *manualNode) crash(keep int) {
	n.host = nil
	n.log.crash(keep)
	for _, sm := range n.sms {
		sm.crash()
	}
}

func (n *manualNode) group(g GroupID) *Group { return n.host.Group(g) }

type manualEnd struct{ n *manualNode }

func (e manualEnd) Send(to NodeID, msgs []GroupMessage) {
	for _, gm := range msgs {
		e.n.checkSend(gm)
		m := gm.Message
		e.n.say(fmt.Sprintf("g%d send %s%s", gm.Group, describe(m), describeMark(gm)))
		e.n.m.net = append(e.n.m.net, packet{from: e.n.id, to: to, gm: GroupMessage{gm.Group, proto.Clone(m).(*raftpb.Message), gm.Quiesce}})
	}
}

// SendHeartbeat is left out of the trace, but on the net like everything else.
func (e manualEnd) SendHeartbeat(to NodeID, hb NodeHeartbeat) {
	e.n.m.net = append(e.n.m.net, packet{from: e.n.id, to: to, beat: &hb})
}

func (e manualEnd) SendSnapshot(to NodeID, g GroupID, m *raftpb.Message, done func(bool)) {
	e.n.checkSend(GroupMessage{Group: g, Message: m})
	m = proto.Clone(m).(*raftpb.Message)
	meta, data := e.n.sms[g].encode()
	m.Snapshot = &raftpb.Snapshot{Metadata: meta, Data: data}
	e.n.say(fmt.Sprintf("g%d send %s", g, describe(m)))
	e.n.m.net = append(e.n.m.net, packet{from: e.n.id, to: to, gm: GroupMessage{Group: g, Message: m}, done: done})
}

func describeMark(gm GroupMessage) string {
	if gm.Quiesce == 0 {
		return ""
	}
	return fmt.Sprintf(" quiesce %d", gm.Quiesce)
}

func describe(m *raftpb.Message) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v->%d term %d", m.GetType(), m.GetTo(), m.GetTerm())
	if n := len(m.GetEntries()); n > 0 {
		fmt.Fprintf(&b, " entries [%d,%d]", m.GetEntries()[0].GetIndex(), m.GetEntries()[n-1].GetIndex())
	} else if m.GetIndex() > 0 {
		fmt.Fprintf(&b, " index %d", m.GetIndex())
	}
	if m.GetCommit() > 0 {
		fmt.Fprintf(&b, " commit %d", m.GetCommit())
	}
	if m.GetReject() {
		b.WriteString(" reject")
	}
	if s := m.GetSnapshot(); s != nil {
		fmt.Fprintf(&b, " snapshot %d", s.GetMetadata().GetIndex())
	}
	return b.String()
}

// checkSend holds the rule that one-sided readers rest on: no message leaves
// before the term it is of is published, nor while an older term is served.
func (n *manualNode) checkSend(gm GroupMessage) {
	sm := n.sms[gm.Group]
	m := gm.Message
	if m.GetType() == raftpb.MsgPreVote || m.GetType() == raftpb.MsgPreVoteResp {
		return // of a term that nobody has adopted
	}
	if m.GetTerm() > sm.term {
		n.m.breach("node %d group %d sends %s but publishes term %d", n.id, gm.Group, describe(m), sm.term)
	}
	if sm.serving != 0 && m.GetTerm() > sm.serving {
		n.m.breach("node %d group %d sends %s but serves term %d", n.id, gm.Group, describe(m), sm.serving)
	}
	leads := m.GetType() == raftpb.MsgApp || m.GetType() == raftpb.MsgHeartbeat || m.GetType() == raftpb.MsgSnap
	// Whom it defeated may have asked for its vote in the same term, and hears of it late.
	refuses := m.GetType() == raftpb.MsgVoteResp && m.GetReject() && m.GetTerm() == sm.serving
	if !leads && !refuses && sm.serving != 0 && m.GetType() != raftpb.MsgTimeoutNow && m.GetType() != raftpb.MsgAppResp && m.GetTerm() >= sm.serving {
		n.m.breach("node %d group %d sends %s while it serves term %d", n.id, gm.Group, describe(m), sm.serving)
	}
	// What is acknowledged must be on the disk: term, vote, and the entries.
	d := n.log.durable[gm.Group]
	if d == nil {
		d = &memGroupLog{}
	}
	switch m.GetType() {
	case raftpb.MsgAppResp:
		if !m.GetReject() && (m.GetIndex() > d.last() || m.GetTerm() > d.hard.GetTerm()) {
			n.m.breach("node %d group %d sends %s but its disk ends at %d in term %d", n.id, gm.Group, describe(m), d.last(), d.hard.GetTerm())
		}
	case raftpb.MsgVoteResp:
		// One batch may hold this vote and, above it, that of a later term, which keeps
		// the replica from voting again in this one as well (seed 126 of TestSim).
		later := d.hard.GetTerm() > m.GetTerm()
		if !m.GetReject() && !later && (d.hard.GetTerm() != m.GetTerm() || d.hard.GetVote() != m.GetTo()) {
			n.m.breach("node %d group %d sends %s but its disk has term %d vote %d", n.id, gm.Group, describe(m), d.hard.GetTerm(), d.hard.GetVote())
		}
	}
	if leads {
		terms := n.m.leaders[gm.Group]
		if was, ok := terms[m.GetTerm()]; ok && was != n.id {
			n.m.breach("group %d: nodes %d and %d both lead term %d", gm.Group, was, n.id, m.GetTerm())
		}
		terms[m.GetTerm()] = n.id
	}
}

func (m *manual) breach(format string, args ...any) {
	m.broken = append(m.broken, fmt.Sprintf(format, args...))
}

// write, apply and truncate take one step; false: nothing to do.
func (n *manualNode) write() bool    { return n.host != nil && n.host.writer.step() }
func (n *manualNode) apply() bool    { return n.host != nil && n.host.applyStep(false) }
func (n *manualNode) truncate() bool { return n.host != nil && n.host.truncateStep(false) }
func (n *manualNode) late() bool     { return n.host != nil && n.host.Steps().SendLate() }
func (n *manualNode) work() bool     { return n.host != nil && n.host.workStep(false) }

// deliver hands over the i-th packet on the net.
func (m *manual) deliver(i int) {
	p := m.net[i]
	m.net = slices.Delete(m.net, i, i+1)
	to, from := m.nodes[p.to], m.nodes[p.from]
	ok := to != nil && to.host != nil && (m.cut == nil || !m.cut(p))
	switch {
	case !ok:
	case p.beat != nil:
		to.host.Heartbeat(p.from, *p.beat)
	default:
		to.host.Step([]GroupMessage{p.gm})
	}
	if p.done != nil && from.host != nil {
		p.done(ok)
	}
}

func (m *manual) drop(i int) {
	p := m.net[i]
	m.net = slices.Delete(m.net, i, i+1)
	if from := m.nodes[p.from]; p.done != nil && from.host != nil {
		p.done(false)
	}
}

func (m *manual) ids() []NodeID {
	var ids []NodeID
	for id := range m.nodes {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// settle takes steps until nothing is left to do without a tick.
func (m *manual) settle() {
	for range 10000 {
		busy := false
		for len(m.net) > 0 {
			busy = true
			m.deliver(0)
		}
		for _, id := range m.ids() {
			n := m.nodes[id]
			for n.work() || n.write() || n.apply() || n.truncate() || n.late() {
				busy = true
			}
		}
		if !busy {
			return
		}
	}
	m.t.Fatal("the cluster does not settle")
}

func (m *manual) tick(id NodeID) {
	if n := m.nodes[id]; n.host != nil {
		n.host.tick()
	}
}

// propose does not wait.
func (n *manualNode) propose(g GroupID, data string) *proposal {
	gr := n.group(g)
	w := gr.newProposal([]byte(data))
	if !gr.inbox.addProposal(w, n.host.cfg.MaxUncommittedBytes) {
		w.answer(outcome{err: ErrOverloaded})
	}
	gr.kick()
	return w
}

func (n *manualNode) proposeConf(g GroupID, cc *raftpb.ConfChangeV2) *proposal {
	gr := n.group(g)
	w, err := gr.newConfProposal(cc)
	require.NoError(n.m.t, err)
	gr.inbox.addProposal(w, n.host.cfg.MaxUncommittedBytes)
	gr.kick()
	return w
}

func (n *manualNode) read(g GroupID) *read {
	gr := n.group(g)
	r := &read{done: make(chan outcome, 1)}
	gr.inbox.addRead(r)
	gr.kick()
	return r
}

func (n *manualNode) transfer(g GroupID, to NodeID) *transfer {
	gr := n.group(g)
	t := &transfer{to: to, done: make(chan error, 1)}
	gr.inbox.addTransfer(t)
	gr.kick()
	return t
}

// elect makes a node lead a group.
func (m *manual) elect(id NodeID, g GroupID) {
	m.nodes[id].group(g).Campaign()
	m.settle()
	require.True(m.t, m.nodes[id].group(g).Status().Leading, "node %d leads group %d", id, g)
}
