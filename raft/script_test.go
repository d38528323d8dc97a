package raft

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"go.etcd.io/raft/v3/raftpb"
)

// TestScripts runs the stories in testdata/scripts. Each opens with what it proves. The
// trace shows, in order, what each node published, wrote, sent and applied.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		s := &script{t: t, proposals: map[string]*proposal{}, reads: map[string]*read{}, transfers: map[string]*transfer{}}
		datadriven.RunTest(t, path, s.run)
		if s.m != nil {
			require.Empty(t, s.m.broken)
		}
	})
}

type script struct {
	t         *testing.T
	m         *manual
	proposals map[string]*proposal
	reads     map[string]*read
	transfers map[string]*transfer
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	if d.Cmd == "cluster" {
		return s.cluster(t, d)
	}
	s.m.t = t
	s.m.trace = nil
	out := s.do(t, d)
	if d.HasArg("quiet") {
		return out
	}
	for i := range s.m.trace {
		s.m.trace[i] += "\n"
	}
	return strings.Join(s.m.trace, "") + out
}

func (s *script) cluster(t *testing.T, d *datadriven.TestData) string {
	var nodes, groups, retain, election, quiesce int
	groups, retain, election = 1, 0, 10
	d.ScanArgs(t, "nodes", &nodes)
	d.MaybeScanArgs(t, "groups", &groups)
	d.MaybeScanArgs(t, "retain", &retain)
	d.MaybeScanArgs(t, "quiesce", &quiesce)
	s.m = newManual(t, nodes, groups, func(c *Config) {
		c.LogRetainEntries = uint64(retain)
		c.ElectionTicks = election
		c.QuiesceTicks = quiesce
	})
	s.m.trace = nil
	return ""
}

func (s *script) do(t *testing.T, d *datadriven.TestData) string {
	var node, from, to uint64
	var typ, id string
	var g uint64
	d.MaybeScanArgs(t, "node", &node)
	d.MaybeScanArgs(t, "group", &g)
	d.MaybeScanArgs(t, "from", &from)
	d.MaybeScanArgs(t, "to", &to)
	d.MaybeScanArgs(t, "type", &typ)
	d.MaybeScanArgs(t, "id", &id)
	n := s.m.nodes[NodeID(node)]
	group := GroupID(g)
	switch d.Cmd {
	case "add-node":
		s.m.addNode(NodeID(node))
	case "campaign":
		n.group(group).Campaign()
	case "propose":
		s.proposals[id] = n.propose(group, id)
	case "conf":
		changes, err := raftpb.ConfChangesFromString(d.Input)
		require.NoError(t, err)
		s.proposals[id] = n.proposeConf(group, &raftpb.ConfChangeV2{Changes: changes})
	case "read":
		s.reads[id] = n.read(group)
	case "transfer":
		s.transfers[id] = n.transfer(group, NodeID(to))
	case "result":
		return s.result(id)
	case "net":
		return s.net(d, NodeID(from), NodeID(to), typ)
	case "write":
		n.write()
	case "apply":
		n.apply()
	case "truncate":
		n.truncate()
	case "settle":
		s.m.settle()
	case "tick":
		count := 1
		d.MaybeScanArgs(t, "n", &count)
		for range count {
			if node != 0 {
				s.m.tick(NodeID(node))
				continue
			}
			for _, id := range s.m.ids() { // with what comes of it
				s.m.tick(id)
			}
			s.m.settle()
		}
	case "lost":
		n.host.ReportUnreachable(NodeID(to))
	case "flush":
		n.sms[group].flush()
	case "crash":
		keep := 0
		d.MaybeScanArgs(t, "keep", &keep)
		n.crash(keep)
	case "lose-log":
		n.log.durable = map[GroupID]*memGroupLog{}
		n.crash(0)
	case "restart":
		if err := n.start(); err != nil {
			return err.Error()
		}
	case "step":
		return s.step(d, n, group)
	case "status":
		return s.status()
	case "quiesced":
		return s.quiesced()
	case "fate":
		return fmt.Sprint(n.fate)
	default:
		t.Fatalf("unknown command %s", d.Cmd)
	}
	return ""
}

// net delivers (do=deliver), drops or doubles the packets that match.
func (s *script) net(d *datadriven.TestData, from, to NodeID, typ string) string {
	do := "list"
	d.MaybeScanArgs(s.t, "do", &do)
	match := func(p packet) bool {
		return (from == 0 || p.from == from) && (to == 0 || p.to == to) && (typ == "" || p.kind() == typ)
	}
	count := len(s.m.net)
	for i, seen := 0, 0; seen < count; seen++ {
		if !match(s.m.net[i]) {
			i++
			continue
		}
		switch do {
		case "deliver":
			s.m.deliver(i)
		case "drop":
			s.m.drop(i)
		case "double":
			s.m.net = append(s.m.net, s.m.net[i])
			i++
		default:
			p := s.m.net[i]
			if p.beat != nil {
				s.m.trace = append(s.m.trace, fmt.Sprintf("%d %s->%d", p.from, p.kind(), p.to))
			} else {
				s.m.trace = append(s.m.trace, fmt.Sprintf("%d g%d %s%s", p.from, p.gm.Group, describe(p.gm.Message), describeMark(p.gm)))
			}
			i++
		}
	}
	return ""
}

// step hands a node a message as a broken or hostile peer might.
func (s *script) step(d *datadriven.TestData, n *manualNode, g GroupID) string {
	var typ string
	m := &raftpb.Message{}
	var from, to, term, index, commit, logTerm uint64
	d.ScanArgs(s.t, "type", &typ)
	d.ScanArgs(s.t, "from", &from)
	to = uint64(n.id)
	d.MaybeScanArgs(s.t, "to", &to)
	d.ScanArgs(s.t, "term", &term)
	d.MaybeScanArgs(s.t, "index", &index)
	d.MaybeScanArgs(s.t, "commit", &commit)
	d.MaybeScanArgs(s.t, "logterm", &logTerm)
	m.Type = raftpb.MessageType(raftpb.MessageType_value[typ]).Enum()
	m.From, m.To, m.Term, m.Index, m.Commit, m.LogTerm = &from, &to, &term, &index, &commit, &logTerm
	var entry uint64
	if d.MaybeScanArgs(s.t, "entry", &entry) {
		m.Entries = []*raftpb.Entry{{Index: new(entry), Term: new(term)}}
	}
	var ctx string
	if d.MaybeScanArgs(s.t, "context", &ctx) {
		m.Context = []byte(ctx)
	}
	before := n.host.Stats()
	n.host.Step([]GroupMessage{{Group: g, Message: m}})
	after := n.host.Stats()
	return fmt.Sprintf("dropped: invalid %d, no group %d\n", after.DroppedInvalid-before.DroppedInvalid, after.DroppedNoGroup-before.DroppedNoGroup)
}

func (s *script) result(id string) string {
	show := func(o outcome) string {
		if o.err != nil {
			return fmt.Sprintf("error: %v", o.err)
		}
		return fmt.Sprintf("%v index %d", o.value, o.index)
	}
	var c chan outcome
	if w := s.proposals[id]; w != nil {
		c = w.done
	} else if r := s.reads[id]; r != nil {
		c = r.done
	} else {
		select {
		case err := <-s.transfers[id].done:
			return fmt.Sprintf("transfer: %v\n", err)
		default:
			return "waits\n"
		}
	}
	select {
	case o := <-c:
		return show(o) + "\n"
	default:
		return "waits\n"
	}
}

// quiesced tells of each replica whether it ticks.
func (s *script) quiesced() string {
	var b strings.Builder
	for _, id := range s.m.ids() {
		n := s.m.nodes[id]
		if n.host == nil {
			fmt.Fprintf(&b, "%d down\n", id)
			continue
		}
		for _, g := range s.m.groups {
			st := n.group(g).Status()
			fmt.Fprintf(&b, "%d g%d lead %d quiesced %t\n", id, g, st.Leader, st.Quiesced)
		}
	}
	return b.String()
}

func (s *script) status() string {
	var b strings.Builder
	for _, id := range s.m.ids() {
		n := s.m.nodes[id]
		if n.host == nil {
			fmt.Fprintf(&b, "%d down\n", id)
			continue
		}
		for _, g := range s.m.groups {
			st := n.group(g).Status()
			sm := n.sms[g]
			fmt.Fprintf(&b, "%d g%d lead %d term %d leading %t commit %d applied %d log [%d,%d] config %d %v published term %d serving %d config %d\n",
				id, g, st.Leader, st.Term, st.Leading, st.Commit, st.Applied, st.FirstIndex, st.LastIndex, st.ConfigID, st.Conf.GetVoters(),
				sm.term, sm.serving, sm.configID)
		}
	}
	return b.String()
}
