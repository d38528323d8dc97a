package server

import "sync"

// gate counts calls in progress and can be closed to new ones.
type gate struct {
	mu struct {
		sync.Mutex
		inside  int
		closed  bool
		drained chan struct{} // closed when closed and nobody is inside
	}
}

func newGate() *gate {
	g := &gate{}
	g.mu.drained = make(chan struct{})
	return g
}

// enter is false once the gate is closed; else leave must follow.
func (g *gate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mu.closed {
		return false
	}
	g.mu.inside++
	return true
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.inside--
	if g.mu.closed && g.mu.inside == 0 {
		close(g.mu.drained)
	}
}

// close lets nobody in any more; the channel is closed when the last one has left.
func (g *gate) close() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.mu.closed {
		g.mu.closed = true
		if g.mu.inside == 0 {
			close(g.mu.drained)
		}
	}
	return g.mu.drained
}
