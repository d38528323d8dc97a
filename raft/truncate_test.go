package raft

import (
	"testing"

	"github.com/stretchr/testify/require"

	"go.etcd.io/raft/v3/raftpb"
)

func TestCutPoint(t *testing.T) {
	for _, c := range []struct {
		name      string
		durable   uint64
		last      uint64
		followers []FollowerProgress
		want      uint64
	}{
		{"keeps some", 1000, 1000, nil, 900},
		{"short log", 50, 50, nil, 0},
		{"never beyond what is durable", 300, 1000, nil, 300},
		{"waits for one behind", 1000, 1000, []FollowerProgress{{Match: 800, Active: true}, {Match: 1000, Active: true}}, 800},
		{"not for one that is gone", 1000, 1000, []FollowerProgress{{Match: 800}}, 900},
		{"not for ever", 1000, 1000, []FollowerProgress{{Match: 5, Active: true}}, 600},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := &Group{h: &Host{cfg: Config{LogRetainEntries: 100, LogRetainBytes: 1 << 40, LogWaitFactor: 4}}}
			if c.followers != nil {
				g.progress.Store(&c.followers)
			}
			require.Equal(t, c.want, g.cutPoint(c.durable, 1, c.last))
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
