package worker

import (
	"bufio"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"sync"
	"time"

	"github.com/kvd-io/kvd/jepsen/history"
)

// ErrGone: the worker's process is no more. What it was doing is of unknown fate.
var ErrGone = errors.New("worker: the process is gone")

// Worker is the parent's side. Its methods may be called from several goroutines.
type Worker struct {
	Name string
	cmd  *exec.Cmd

	wmu sync.Mutex // guards enc
	enc *gob.Encoder
	in  io.WriteCloser

	done chan struct{} // closed when nothing more will be answered
	mu   struct {
		sync.Mutex
		next    uint64
		waiting map[uint64]chan response
		err     error
	}
}

// Start starts a worker. cmd must not have been started; its stdin and stdout are the
// worker's. start is how it is started, as the caller may want that done on a thread of
// his. It returns when all clients are connected.
func Start(ctx context.Context, cfg Config, cmd *exec.Cmd, start func(*exec.Cmd) error) (*Worker, error) {
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := start(cmd); err != nil {
		return nil, fmt.Errorf("worker %s: %w", cfg.Name, err)
	}
	w := &Worker{Name: cfg.Name, cmd: cmd, in: in, enc: gob.NewEncoder(in), done: make(chan struct{})}
	w.mu.waiting = map[uint64]chan response{}
	ready := make(chan response, 1)
	w.mu.waiting[0] = ready
	go w.read(gob.NewDecoder(bufio.NewReader(out)))
	if err := w.enc.Encode(cfg); err != nil {
		return nil, errors.Join(fmt.Errorf("worker %s: %w", cfg.Name, err), w.Close())
	}
	select {
	case r := <-ready:
		if r.Ready {
			return w, nil
		}
		err = errors.New(r.Err)
	case <-ctx.Done():
		err = ctx.Err()
		_ = cmd.Process.Kill() // it has nothing to end in order, and would dial on
	}
	return nil, errors.Join(fmt.Errorf("worker %s is not ready: %w", cfg.Name, err), w.Close())
}

func (w *Worker) read(dec *gob.Decoder) {
	var err error
	for err == nil {
		var r response
		if err = dec.Decode(&r); err != nil {
			break
		}
		w.mu.Lock()
		c := w.mu.waiting[r.ID]
		delete(w.mu.waiting, r.ID)
		w.mu.Unlock()
		if c != nil {
			c <- r
		}
	}
	w.mu.Lock()
	w.mu.err = fmt.Errorf("%w: %s: %v", ErrGone, w.Name, err)
	for id, c := range w.mu.waiting {
		c <- response{ID: id, Err: w.mu.err.Error()}
	}
	w.mu.waiting = nil
	w.mu.Unlock()
	close(w.done)
}

// ask sends a request and waits for the answer, however long that takes: the worker bounds
// each operation, and a worker that is gone answers by its end.
func (w *Worker) ask(req request) (response, error) {
	c := make(chan response, 1)
	w.mu.Lock()
	if w.mu.err != nil {
		defer w.mu.Unlock()
		return response{}, w.mu.err
	}
	w.mu.next++
	req.ID = w.mu.next
	w.mu.waiting[req.ID] = c
	w.mu.Unlock()
	w.wmu.Lock()
	err := w.enc.Encode(req)
	w.wmu.Unlock()
	if err != nil {
		return response{}, fmt.Errorf("%w: %s: %v", ErrGone, w.Name, err)
	}
	r := <-c
	if r.Err != "" {
		return r, errors.New(r.Err)
	}
	return r, nil
}

// Run runs an operation by one of the worker's clients. With an error the operation's fate
// is unknown and the Op has no times.
func (w *Worker) Run(client int, op *history.Op) (*history.Op, error) {
	r, err := w.ask(request{Op: op, Client: client})
	return r.Op, err
}

// Status of the cluster as the worker sees it.
func (w *Worker) Status() (*Status, error) {
	r, err := w.ask(request{Status: true})
	return r.Status, err
}

// Stats of the worker's clients.
func (w *Worker) Stats() (*Stats, error) {
	r, err := w.ask(request{Stats: true})
	return r.Stats, err
}

// Transfer moves a shard's leadership.
func (w *Worker) Transfer(t Transfer) error {
	_, err := w.ask(request{Transfer: &t})
	return err
}

// Fill writes bulk; it returns how many values were acknowledged.
func (w *Worker) Fill(f Fill) (int, error) {
	r, err := w.ask(request{Fill: &f})
	return r.Count, err
}

// Members of the cluster, those that have left too.
func (w *Worker) Members() ([]Member, error) {
	r, err := w.ask(request{Members: true})
	return r.Members, err
}

// Drain has a node drained, decommissioned, or set active again; it returns when that is
// decided.
func (w *Worker) Drain(d Drain) error {
	_, err := w.ask(request{Drain: &d})
	return err
}

// Moving is how many shards have replicas that are on their way, or are to be.
func (w *Worker) Moving() (int, error) {
	r, err := w.ask(request{Moving: true})
	return r.Count, err
}

// closeTimeout is how long a worker may take to close its clients.
const closeTimeout = 10 * time.Second

// Close ends the worker's process, by closing its pipe and else by SIGKILL, and waits for
// it.
func (w *Worker) Close() error {
	_ = w.in.Close()
	timer := time.AfterFunc(closeTimeout, func() { _ = w.cmd.Process.Kill() })
	defer timer.Stop()
	<-w.done
	if err := w.cmd.Wait(); err != nil {
		return fmt.Errorf("worker %s: %w", w.Name, err)
	}
	return nil
}
