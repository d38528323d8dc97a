package env

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// Node is one kvd process, or the place of one that is dead or has yet to come.
type Node struct {
	ID      uint64 // of the place, from 1; the cluster's for it is Member
	Host    *Host
	Address string // gRPC
	LogFile string
	Socket  string // for package faults; empty: the program was not built for that

	bin     string // guarded by mu
	other   string // likewise; see Switch
	args    []string
	join    []string // what a node of an empty directory is told beside args
	dataDir string
	environ []string // beside ours
	cg      *cgroup  // nil: none

	claim sync.Mutex // see Claim

	mu struct {
		sync.Mutex
		cmd     *exec.Cmd
		done    chan struct{}
		doomed  bool     // whoever kills it says so before
		comes   []string // what it is told beside args: how it came to the cluster
		member  uint64   // the cluster's id for it; 0: not known
		inUse   bool     // false: a spare one, which does not run yet
		leaving bool     // it leaves the cluster, and ends when it has
		crashes []string // ends that nobody had ordered
		starts  int
	}
}

// Start starts the process; it must not be running. extra flags win over the node's own.
func (n *Node) Start(extra ...string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.cmd != nil {
		return fmt.Errorf("env: node %d runs already", n.ID)
	}
	out, err := os.OpenFile(n.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }() // the child has its own
	cmd := exec.Command(n.bin, slices.Concat([]string{"start"}, n.mu.comes, n.args, extra)...)
	// kvd's own settings in our environment are meant for a node started by hand.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "KVD_") })
	cmd.Env = append(cmd.Env, n.environ...)
	cmd.Stdout, cmd.Stderr = out, out
	if err := n.Host.thread.start(cmd); err != nil {
		return fmt.Errorf("env: start node %d: %w", n.ID, err)
	}
	if n.cg != nil {
		if err := n.cg.add(cmd.Process.Pid); err != nil {
			err = errors.Join(err, cmd.Process.Kill(), cmd.Wait())
			return fmt.Errorf("env: node %d: %w", n.ID, err)
		}
	}
	done := make(chan struct{})
	n.mu.cmd, n.mu.done, n.mu.doomed = cmd, done, false
	n.mu.starts++
	go func() {
		err := cmd.Wait()
		n.mu.Lock()
		defer n.mu.Unlock()
		if !n.mu.doomed && !n.mu.leaving {
			n.mu.crashes = append(n.mu.crashes, fmt.Sprintf("node %d ended by itself (%v): %s", n.ID, err, n.lastWords()))
		}
		n.mu.cmd = nil
		close(done)
	}()
	return nil
}

// Switch has the next start run the other kvd: the one before the present, or the one after.
func (n *Node) Switch() (program string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.bin, n.other = n.other, n.bin
	return n.bin
}

// Claim keeps others who end and start the process from doing so until release is
// called. Whoever claims several does so in the order of their ids.
func (n *Node) Claim() (release func()) {
	n.claim.Lock()
	return n.claim.Unlock
}

// Ended is closed when the process that was started last has ended; nil: none ever was. If
// nobody had ordered that, Crashes tells of it by then.
func (n *Node) Ended() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.done
}

// InUse tells whether the node is part of the cluster, or on its way there.
func (n *Node) InUse() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.inUse
}

// Member is the cluster's id for the node, or 0 where that is not known.
func (n *Node) Member() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.member
}

// Joined notes the id that the cluster gave to the node.
func (n *Node) Joined(member uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.member = member
}

// Leave says that the node is to leave the cluster for good: then it ends, and refuses to
// start, which is no crash.
func (n *Node) Leave(leaving bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.leaving = leaving
}

// Leaving tells whether the node is to leave, or has left.
func (n *Node) Leaving() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.leaving
}

// StartAnew has an empty node come to the cluster by joining it: a spare one, or another
// in the place of one that has left. Whoever calls it has claimed the node.
func (n *Node) StartAnew() error {
	if _, err := n.Kill(); err != nil {
		return err
	}
	if err := os.RemoveAll(n.dataDir); err != nil {
		return fmt.Errorf("env: wipe node %d: %w", n.ID, err)
	}
	n.mu.Lock()
	n.mu.comes, n.mu.member, n.mu.inUse, n.mu.leaving = n.join, 0, true, false
	n.mu.Unlock()
	return n.Start()
}

// lastWords is the end of the node's log.
func (n *Node) lastWords() string {
	b, err := os.ReadFile(n.LogFile)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-3):], " | ")
}

// PID of the running process, or 0.
func (n *Node) PID() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.cmd == nil {
		return 0
	}
	return n.mu.cmd.Process.Pid
}

// Doom says that the process is about to be killed, so that its end is no crash. It
// returns what is closed when the process has ended, or nil if none runs.
func (n *Node) Doom() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.cmd == nil {
		return nil
	}
	n.mu.doomed = true
	return n.mu.done
}

// Spare takes a Doom back.
func (n *Node) Spare() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.doomed = false
}

// Signal sends a signal; a process that is gone is no error.
func (n *Node) Signal(s syscall.Signal) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.cmd == nil {
		return nil
	}
	if err := n.mu.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("env: signal node %d: %w", n.ID, err)
	}
	return nil
}

// Kill ends the process by SIGKILL and waits for it. It tells whether one ran.
func (n *Node) Kill() (bool, error) {
	done := n.Doom()
	if done == nil {
		return false, nil
	}
	err := n.Signal(syscall.SIGKILL)
	<-done
	return true, err
}

// Term ends the process by SIGTERM and waits for it, but not longer than ctx.
func (n *Node) Term(ctx context.Context) error {
	done := n.Doom()
	if done == nil {
		return nil
	}
	if err := n.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		_, err := n.Kill()
		return errors.Join(fmt.Errorf("env: node %d did not end by itself: %w", n.ID, ctx.Err()), err)
	}
}

// Stopped tells whether the kernel says that the process is stopped.
func (n *Node) Stopped() bool {
	pid := n.PID()
	if pid == 0 {
		return false
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, ok := bytes.Cut(b[bytes.LastIndexByte(b, ')'):], []byte(" "))
	return ok && len(rest) > 0 && rest[0] == 'T'
}

// Crashes are the ends that nobody had ordered, and the traces of panics in the log.
func (n *Node) Crashes() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := slices.Clone(n.mu.crashes)
	b, err := os.ReadFile(n.LogFile)
	if err != nil {
		return append(out, err.Error())
	}
	for _, trace := range []string{"panic: ", "fatal error: ", "DATA RACE"} {
		if i := bytes.Index(b, []byte(trace)); i >= 0 {
			text := string(b[i:min(len(b), i+300)])
			out = append(out, fmt.Sprintf("node %d logged %q (%s)", n.ID, text, filepath.Base(n.LogFile)))
		}
	}
	return out
}

// LogSize is how much the node has logged so far, in bytes.
func (n *Node) LogSize() int64 {
	st, err := os.Stat(n.LogFile)
	if err != nil {
		return 0
	}
	return st.Size()
}

// Logged tells whether the log holds the text behind an offset.
func (n *Node) Logged(text string, from int64) bool {
	b, err := os.ReadFile(n.LogFile)
	return err == nil && int64(len(b)) > from && bytes.Contains(b[from:], []byte(text))
}
