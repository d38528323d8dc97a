package raft

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Whoever has a turn works for others for some rounds only. What is left is done
// by a worker, and nothing is forgotten.
func TestTurnIsHandedOver(t *testing.T) {
	m := newManual(t, 1, 1, nil)
	n := m.nodes[1]
	g := n.group(0)
	const want = 20
	did := 0
	var again func(*Group)
	again = func(g *Group) {
		if did++; did < want {
			g.inbox.addOp(again) // others bring more, all the time
			g.kick()
		}
	}
	g.inbox.addOp(again)
	g.kick()
	require.Equal(t, roundsPerPass+1, did)
	for n.host.workStep(false) {
	}
	require.Equal(t, want, did)
	require.NotZero(t, n.host.Stats().Handovers)
	require.True(t, g.turn.ask(), "the turn is free again")
}

func TestTurn(t *testing.T) {
	var turn turn
	require.True(t, turn.ask())
	require.False(t, turn.ask())
	require.False(t, turn.ask())
	require.False(t, turn.yield(), "there is more to do")
	require.True(t, turn.yield())
	require.True(t, turn.ask())
	require.True(t, turn.yield())
}

// A pass sends all that its groups have for a node in one call.
func TestOneCallANode(t *testing.T) {
	m := newManual(t, 3, 5, nil)
	for _, g := range m.groups {
		m.elect(1, g)
	}
	n := m.nodes[1]
	before := n.host.Stats()
	n.host.tick()
	after := n.host.Stats()
	require.EqualValues(t, 10, after.MessagesOut-before.MessagesOut)
	require.EqualValues(t, 2, after.SendCalls-before.SendCalls)
}
