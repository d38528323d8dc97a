package raft

import "sync/atomic"

// A group is processed by one goroutine at a time: the one that has its turn.
// Whoever brings work puts it into the inbox and asks for the turn; if another has
// it, that one is told that there is more, and nobody waits. So a put that finds
// its group free is stepped, sent and handed to the log writer in the caller's own
// goroutine.
type turn struct{ state atomic.Uint32 }

const (
	turnFree uint32 = iota
	turnHeld
	turnMore // held, and the inbox was filled since
)

// ask takes the turn, or leaves word that there is more to do.
func (t *turn) ask() bool {
	for {
		switch t.state.Load() {
		case turnFree:
			if t.state.CompareAndSwap(turnFree, turnHeld) {
				return true
			}
		case turnHeld:
			if t.state.CompareAndSwap(turnHeld, turnMore) {
				return false
			}
		default:
			return false
		}
	}
}

// yield gives the turn back, unless there is more to do: then it is kept and the
// result is false.
func (t *turn) yield() bool {
	if t.state.CompareAndSwap(turnHeld, turnFree) {
		return true
	}
	t.state.Store(turnHeld)
	return false
}

// pass processes some groups and sends what they want sent, in one call a node.
// The turns are kept until that is done, so the messages of a group leave in the
// order in which they were made.
type pass struct {
	h      *Host
	groups []*Group // turns held
	out    outbox
	snaps  []GroupMessage
	events []func()

	wakeWriter bool
	applies    []*Group // to be put on the apply queue
	// answers: somebody waits for these messages, and nothing that can wait goes with them.
	answers bool
}

func (h *Host) newPass() *pass { return &pass{h: h} }

// add asks for the group's turn.
func (p *pass) add(g *Group) {
	if g.turn.ask() {
		p.groups = append(p.groups, g)
	}
}

// takeOver adds a group whose turn the caller already has.
func (p *pass) takeOver(g *Group) { p.groups = append(p.groups, g) }

// roundsPerPass bounds how long a caller works for others who bring more to the
// groups whose turns it has. Then a worker goes on.
const roundsPerPass = 3

func (p *pass) run() {
	for round := 0; len(p.groups) > 0; round++ {
		for _, g := range p.groups {
			g.process(p)
		}
		p.flush()
		more := p.groups[:0]
		for _, g := range p.groups {
			if g.turn.yield() {
				continue
			}
			if round >= roundsPerPass {
				p.h.count.handovers.Add(1)
				p.h.ready.push(g) // with its turn
				continue
			}
			more = append(more, g)
		}
		p.groups = more
	}
}

// flush sends. It is called without a lock held: the transport may report at once.
func (p *pass) flush() {
	sent := len(p.out) > 0
	for i := range p.out {
		msgs := p.out[i].msgs
		if !p.answers {
			msgs = p.h.late.take(p.out[i].to, msgs)
		}
		p.h.send(p.out[i].to, msgs)
	}
	clear(p.out) // the slices are the transport's now
	p.out = p.out[:0]
	for _, g := range p.applies {
		p.h.applies.push(g)
	}
	p.applies = p.applies[:0]
	// Last, since the scheduler begins with what was woken last: a follower has time to
	// apply during the sync.
	if p.wakeWriter {
		p.wakeWriter = false
		p.h.writer.wakeUp(sent)
	}
	for _, gm := range p.snaps {
		p.h.sendSnapshot(gm)
	}
	p.snaps = p.snaps[:0]
	for _, f := range p.events {
		f()
	}
	p.events = p.events[:0]
}

// outbox collects messages by node. There are few nodes: a list is enough.
type outbox []nodeMessages

type nodeMessages struct {
	to   NodeID
	msgs []GroupMessage
}

func (o *outbox) add(to NodeID, gm GroupMessage) {
	for i := range *o {
		if (*o)[i].to == to {
			(*o)[i].msgs = append((*o)[i].msgs, gm)
			return
		}
	}
	*o = append(*o, nodeMessages{to, []GroupMessage{gm}})
}
