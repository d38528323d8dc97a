package raft

import (
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"go.etcd.io/raft/v3/raftpb"
)

// An entry of the log in this test has a mark's bytes, so 100 entries are behind 900.
func TestCutPoint(t *testing.T) {
	const last, small, large = 1000, 150 * markBytes, 450 * markBytes
	at := func(match uint64) FollowerProgress { return FollowerProgress{Node: 2, Match: match, Active: true} }
	silent := func(match uint64) FollowerProgress { return FollowerProgress{Node: 2, Match: match} }
	type need struct {
		index    uint64
		released bool // and the node took the snapshot
	}
	for _, c := range []struct {
		name      string
		durable   uint64 // 0: all
		first     uint64 // 0: 1
		state     uint64
		bytes     uint64 // LogRetainBytes, in entries; 0: no bound
		followers []FollowerProgress
		need      *need
		low       bool
		want      uint64
	}{
		{name: "keeps some", state: small, want: 900},
		{name: "keeps fewer bytes", state: small, bytes: 30, want: 970},
		{name: "never beyond what is durable", durable: 300, state: small, want: 300},
		{name: "waits for one behind", state: small, followers: []FollowerProgress{at(860), at(1000)}, want: 860},
		{name: "for the slowest", state: large, followers: []FollowerProgress{at(860), at(600), at(1000)}, want: 600},
		{name: "not for one that is gone", state: large, followers: []FollowerProgress{silent(860)}, want: 900},
		{name: "nor for one that needs what is no more", first: 10, state: 2000 * markBytes, followers: []FollowerProgress{at(5)}, want: 900},
		{name: "for one at the log's begin", first: 10, state: 2000 * markBytes, followers: []FollowerProgress{at(9)}, want: 9},
		{name: "a snapshot is as dear", state: large, followers: []FollowerProgress{at(550)}, want: 550},
		{name: "a snapshot is cheaper", state: large, followers: []FollowerProgress{at(549)}, want: 900},
		{name: "cheaper for one, not for the other", state: large, followers: []FollowerProgress{at(400), at(700)}, want: 700},
		{name: "an empty state", followers: []FollowerProgress{at(899)}, want: 900},
		{name: "one ahead of the cut", followers: []FollowerProgress{at(950)}, want: 900},
		{name: "a disk that is nearly full", state: large, low: true, followers: []FollowerProgress{at(860)}, want: 900},
		{name: "a snapshot on its way", state: large, followers: []FollowerProgress{at(0)}, need: &need{index: 700}, want: 700},
		{name: "kept for one that is silent", state: large, followers: []FollowerProgress{silent(0)}, need: &need{index: 700}, want: 700},
		{name: "the next one is cheaper", state: small, followers: []FollowerProgress{at(0)}, need: &need{index: 700}, want: 900},
		{name: "taken, and being installed", state: large, followers: []FollowerProgress{at(0)}, need: &need{index: 700, released: true}, want: 700},
		{name: "taken, then silent", state: large, followers: []FollowerProgress{silent(0)}, need: &need{index: 700, released: true}, want: 900},
		{name: "installed", state: large, followers: []FollowerProgress{at(720)}, need: &need{index: 700, released: true}, want: 720},
		{name: "of a node that has left", state: large, followers: []FollowerProgress{{Node: 3, Match: 1000, Active: true}}, need: &need{index: 700}, want: 900},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := Config{LogRetainEntries: 100, LogRetainBytes: max(c.bytes, 1) * markBytes, DiskLow: func() bool { return c.low }}
			if c.bytes == 0 {
				cfg.LogRetainBytes = 1 << 40
			}
			g := &Group{h: &Host{cfg: cfg}}
			for i := range uint64(last) {
				g.logSize.mu.marks = append(g.logSize.mu.marks, logMark{last: 1 + i, bytes: markBytes})
			}
			if c.followers != nil {
				g.progress.Store(&c.followers)
			}
			if c.need != nil {
				g.KeepLog(2, c.need.index)
				if c.need.released {
					g.ReleaseLog(2, true)
				}
			}
			durable, first := c.durable, max(c.first, 1)
			if durable == 0 {
				durable = last
			}
			require.Equal(t, c.want, g.cutPoint(durable, first, last, c.state))
		})
	}
	short := &Group{h: &Host{cfg: Config{LogRetainEntries: 100, LogRetainBytes: 1 << 40}}}
	require.Zero(t, short.cutPoint(50, 1, 50, 0))
}

// What a snapshot keeps of the log is given up when the transport says so, when it
// shows, and when nobody is left to whom it could.
func TestKeepLogEnds(t *testing.T) {
	g := &Group{h: &Host{cfg: Config{LogRetainEntries: 10, LogRetainBytes: 1 << 40}}}
	cut := func(followers ...FollowerProgress) uint64 {
		g.progress.Store(&followers)
		return g.cutPoint(100, 1, 100, 1<<40)
	}
	behind := FollowerProgress{Node: 2, Active: false}
	g.KeepLog(2, 50)
	require.EqualValues(t, 50, cut(behind))
	g.KeepLog(2, 60)
	require.EqualValues(t, 60, cut(behind), "the last one counts")
	g.ReleaseLog(2, false)
	require.EqualValues(t, 90, cut(behind))
	g.ReleaseLog(2, true) // of none
	require.Empty(t, g.needs.mu.at)

	g.KeepLog(2, 60)
	g.ReleaseLog(2, true)
	behind.Active = true
	require.EqualValues(t, 60, cut(behind))
	behind.Match = 60
	require.EqualValues(t, 60, cut(behind), "it is a follower as any")
	require.Empty(t, g.needs.mu.at)

	g.KeepLog(2, 60)
	g.ReleaseLog(2, true)
	require.EqualValues(t, 90, cut())
	require.Empty(t, g.needs.mu.at, "it was removed from the group")
}

// A live follower whose disk hangs for a while comes back by the log where the state is
// large, and by a snapshot where it is smaller than that.
func TestSlowFollowerKeepsTheLog(t *testing.T) {
	for name, size := range map[string]uint64{"by the log": 1 << 30, "by a snapshot": 1} {
		t.Run(name, func(t *testing.T) {
			c := startLive(t, 3, 1, func(cfg *Config) { cfg.LogRetainEntries = 20 }, nil)
			lead := c.leader(0)
			slow := NodeID(1 + uint64(lead.h.cfg.NodeID)%3)
			waitFor(t, "who has just begun to lead hears of all", func() bool {
				fs := lead.Status().Followers
				return len(fs) == 2 && fs[0].Match > 0 && fs[1].Match > 0
			})
			for _, sms := range c.loop.sms {
				sms[0].size.Store(size)
			}
			gate := make(chan struct{})
			open := sync.OnceFunc(func() { close(gate) })
			t.Cleanup(open)
			c.logs[slow].gate.Store(&gate)
			stalled := c.group(slow, 0).Status().LastIndex
			for i := range 300 {
				proposeAnyhow(t, c, 0, fmt.Sprint(i))
			}
			looked := lead.h.count.truncations.Load()
			for i := 0; lead.Status().FirstIndex <= stalled+50 && (size == 1 || i < 100); i++ {
				c.loop.sms[lead.h.cfg.NodeID][0].flush()
				lead.truncate()
				proposeAnyhow(t, c, 0, "more")
			}
			c.logs[slow].gate.Store(nil)
			open()
			waitFor(t, "it catches up", func() bool { return c.group(slow, 0).Status().Applied >= lead.Status().Commit })
			if size == 1 {
				require.NotZero(t, c.loop.hosts[slow].Stats().SnapshotsGot)
				return
			}
			require.Zero(t, c.loop.hosts[slow].Stats().SnapshotsGot)
			waitFor(t, "the log is cut when nobody needs it any more", func() bool {
				c.loop.sms[lead.h.cfg.NodeID][0].flush()
				proposeAnyhow(t, c, 0, "more")
				return lead.h.count.truncations.Load() > looked && lead.Status().FirstIndex > stalled+50
			})
		})
	}
}

func TestLogSize(t *testing.T) {
	var s logSize
	add := func(first, n uint64) {
		var es []*raftpb.Entry
		for i := range n {
			es = append(es, &raftpb.Entry{Index: new(first + i), Data: make([]byte, markBytes)})
		}
		s.add(es)
	}
	for i := range uint64(10) {
		add(1+i, 1)
	}
	require.EqualValues(t, 7, s.keep(3*markBytes))
	require.Zero(t, s.keep(100*markBytes))
	add(5, 1) // overwrites 5 to 10
	require.EqualValues(t, 2, s.keep(3*markBytes))
	s.cut(3)
	require.Zero(t, s.keep(3*markBytes))
	s.reset()
	require.Zero(t, s.keep(1))
}

// Two looks at the log may ask for the same cut, or a snapshot be faster.
func TestCutTwice(t *testing.T) {
	m := newManual(t, 1, 1, nil)
	m.elect(1, 0)
	n := m.nodes[1]
	for i := range 5 {
		n.propose(0, string(rune('a'+i)))
		m.settle()
	}
	for range 2 {
		n.host.writer.queue(&logWork{g: n.group(0), truncate: 4, cutTerm: 2})
	}
	n.host.writer.queue(&logWork{g: n.group(0), truncate: 3, cutTerm: 2})
	m.settle()
	require.NoError(t, n.fate)
	require.EqualValues(t, 5, n.group(0).Status().FirstIndex)
	term, err := n.group(0).storage.Term(4)
	require.NoError(t, err)
	require.EqualValues(t, 2, term)
}
