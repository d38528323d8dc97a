//go:build chaos

package faults

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvd-io/kvd/internal/clock"
)

// Clock is the host's, shifted on order. Unlike a real wall clock that jumps, it also
// spoils durations that are taken from two answers of Now: the harsher fault of the two.
type Clock struct {
	clock.Clock
	shift   atomic.Int64
	shifted atomic.Uint64
}

// Now implements clock.Clock.
func (c *Clock) Now() time.Time {
	shift := time.Duration(c.shift.Load())
	if shift != 0 {
		c.shifted.Add(1)
	}
	return c.Clock.Now().Add(shift)
}

// Listener carries out orders.
type Listener struct {
	Disk  *Disk
	Clock *Clock

	l  net.Listener
	wg sync.WaitGroup
	mu struct {
		sync.Mutex
		conns  map[net.Conn]struct{}
		closed bool
	}
}

// Listen takes orders on a unix socket. What a process that was killed left at the path is
// removed.
func Listen(path string) (*Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("faults: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("faults: %w", err)
	}
	s := &Listener{Disk: NewDisk(vfs.Default), Clock: &Clock{Clock: clock.System}, l: l}
	s.mu.conns = map[net.Conn]struct{}{}
	s.wg.Go(s.accept)
	return s, nil
}

func (s *Listener) accept() {
	for {
		conn, err := s.l.Accept()
		if err != nil {
			return // closed
		}
		s.mu.Lock()
		if s.mu.closed {
			_ = conn.Close()
		} else {
			s.mu.conns[conn] = struct{}{}
			s.wg.Go(func() { s.talk(conn) })
		}
		s.mu.Unlock()
	}
}

func (s *Listener) talk(conn net.Conn) {
	defer func() {
		_ = conn.Close()
		s.mu.Lock()
		delete(s.mu.conns, conn)
		s.mu.Unlock()
	}()
	in, out := json.NewDecoder(conn), json.NewEncoder(conn)
	in.DisallowUnknownFields()
	for {
		var o Order
		var answer State
		switch err := in.Decode(&o); {
		case err == nil:
			answer = s.obey(o)
		case errors.Is(err, io.EOF) || errors.As(err, new(*net.OpError)):
			return
		default:
			// The rest of the stream can not be told from the mistake.
			answer.Err = err.Error()
			_ = out.Encode(answer)
			return
		}
		if out.Encode(answer) != nil {
			return
		}
	}
}

func (s *Listener) obey(o Order) State {
	s.Disk.obey(o)
	s.Clock.shift.Store(int64(o.Shift))
	d := s.Disk
	return State{
		Slowed: d.slowed.Load(), Stalled: d.stalled.Load(), Failed: d.failed.Load(), Refused: d.refused.Load(),
		Shifted: s.Clock.shifted.Load(), Now: s.Clock.Clock.Now().Add(o.Shift),
	}
}

// Close takes no more orders, and lets disk and clock behave well.
func (s *Listener) Close() error {
	err := s.l.Close()
	s.mu.Lock()
	s.mu.closed = true
	for conn := range s.mu.conns {
		_ = conn.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	s.obey(Order{})
	return err
}
