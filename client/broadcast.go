package client

import "sync"

// broadcast wakes everybody who waits for a change.
type broadcast struct {
	mu struct {
		sync.Mutex
		c chan struct{}
	}
}

// wait gives a channel that the next broadcast closes. Ask for it before looking at
// what may change.
func (b *broadcast) wait() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.c == nil {
		b.mu.c = make(chan struct{})
	}
	return b.mu.c
}

func (b *broadcast) broadcast() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.c != nil {
		close(b.mu.c)
		b.mu.c = nil
	}
}
