package env

import (
	"fmt"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// thread is one OS thread, perhaps in a network namespace of its own. What is started or
// opened on it belongs to that namespace. It lives until close: PDEATHSIG is sent when the
// thread that started a process ends, not when its process does.
type thread struct {
	jobs chan func()
	done chan struct{}
}

// newThread makes a thread in the namespace whose file is given; "": in the present one.
func newThread(netns string) (*thread, error) {
	t := &thread{jobs: make(chan func()), done: make(chan struct{})}
	ready := make(chan error, 1)
	go func() {
		defer close(t.done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := enter(netns)
		ready <- err
		if err != nil {
			return
		}
		for f := range t.jobs {
			f()
		}
	}()
	if err := <-ready; err != nil {
		return nil, err
	}
	return t, nil
}

func enter(netns string) error {
	if netns == "" {
		return nil
	}
	fd, err := unix.Open(netns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("env: network namespace %s: %w", netns, err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("env: enter network namespace %s: %w", netns, err)
	}
	return nil
}

// do runs f on the thread and waits for it.
func (t *thread) do(f func() error) error {
	result := make(chan error, 1)
	t.jobs <- func() { result <- f() }
	return <-result
}

// start starts a process that dies with this one.
func (t *thread) start(cmd *exec.Cmd) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	// An interrupt at the terminal is for us: we end our processes in order.
	cmd.SysProcAttr.Setpgid = true
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	return t.do(cmd.Start)
}

func (t *thread) close() {
	close(t.jobs)
	<-t.done
}
