package client

import "sync"

// tasks are the goroutines that Close waits for.
type tasks struct {
	mu struct {
		sync.Mutex
		closed bool
	}
	running sync.WaitGroup
}

// spawn runs f in a goroutine; false: wait was called, and f does not run.
func (t *tasks) spawn(f func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return false
	}
	t.running.Go(f)
	return true
}

// wait lets nothing more start and waits for what runs.
func (t *tasks) wait() {
	t.mu.Lock()
	t.mu.closed = true
	t.mu.Unlock()
	t.running.Wait()
}
