//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// inGuest tells whether this process is the first one of a guest, or its child.
func inGuest() bool {
	_, err := os.Stat(jobFile)
	return err == nil && (os.Getpid() == 1 || os.Getenv(runnerEnv) != "")
}

const runnerEnv = "RDMAGUEST_RUNNER"

// guestMain is the guest's init: the first process adopts orphans and ends the guest
// with the second, which does the work.
func guestMain() {
	if os.Getenv(runnerEnv) != "" {
		os.Exit(runnerMain())
	}
	_ = os.Setenv("PATH", guestPath)
	pid, err := syscall.ForkExec(selfFile, []string{selfFile}, &syscall.ProcAttr{
		Env:   append(os.Environ(), runnerEnv+"=1"),
		Files: []uintptr{0, 1, 2},
	})
	if err != nil {
		fmt.Println("rdmaguest: cannot start the runner:", err)
	}
	for err == nil {
		var dead int
		if dead, err = syscall.Wait4(-1, nil, 0, nil); dead == pid || errors.Is(err, syscall.ECHILD) {
			break
		}
		if errors.Is(err, syscall.EINTR) {
			err = nil
		}
	}
	unix.Sync()
	// QEMU runs with -no-reboot: a restart ends it.
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	select {}
}

// runnerMain returns only where it cannot talk to the host.
func runnerMain() int {
	b, err := os.ReadFile(jobFile)
	if err != nil {
		fmt.Println("rdmaguest:", err)
		return 1
	}
	var j job
	if err := json.Unmarshal(b, &j); err != nil {
		fmt.Println("rdmaguest:", err)
		return 1
	}
	port, err := j.setUp()
	if port == nil {
		fmt.Println("rdmaguest:", err)
		return 1
	}
	out := &frames{w: port}
	code := 0
	if err == nil {
		code, err = j.run(out)
	}
	if err == nil {
		err = sendFiles(out, outDir)
	}
	if err != nil {
		_ = out.send(frame{Kind: kindError, Data: []byte(err.Error())})
	}
	_ = out.send(frame{Kind: kindExit, Code: code})
	_ = port.Close()
	return 0
}

// setUp makes a system of the bare kernel. Where the port to the host is there, it is
// returned together with an error that came later.
func (j *job) setUp() (*os.File, error) {
	for _, m := range []struct {
		fstype, dir, data string
	}{
		{"proc", "/proc", ""},
		{"sysfs", "/sys", ""},
		{"devtmpfs", "/dev", ""},
		{"devpts", "/dev/pts", ""},
		{"tmpfs", "/dev/shm", "mode=1777"},
		{"tmpfs", "/tmp", "mode=1777"},
		{"tmpfs", "/run", ""},
		{"cgroup2", "/sys/fs/cgroup", ""},
	} {
		if err := os.MkdirAll(m.dir, 0o755); err != nil {
			return nil, err
		}
		if err := unix.Mount(m.fstype, m.dir, m.fstype, 0, m.data); err != nil && !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("mount %s: %w", m.dir, err)
		}
	}
	for name, target := range map[string]string{"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2"} {
		if err := os.Symlink(target, name); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, err
		}
	}
	for _, m := range j.Modules {
		if err := loadModule(m); err != nil {
			return nil, err
		}
	}
	port, err := openPort(portName)
	if err != nil {
		return nil, err
	}
	for resource, limit := range map[int]uint64{unix.RLIMIT_MEMLOCK: unix.RLIM_INFINITY, unix.RLIMIT_NOFILE: 65536, unix.RLIMIT_CORE: 0} {
		if err := unix.Setrlimit(resource, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
			return port, fmt.Errorf("setrlimit %d to %d: %w", resource, limit, err)
		}
	}
	return port, j.network()
}

func loadModule(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load %s: %w", filepath.Base(file), err)
	}
	return nil
}

// openPort waits a moment for the port: the host adds it while the guest looks.
func openPort(name string) (*os.File, error) {
	var seen []string
	for range 500 {
		seen = nil
		files, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				continue
			}
			has := strings.TrimSpace(string(b))
			if has == name {
				return os.OpenFile(filepath.Join("/dev", filepath.Base(filepath.Dir(f))), os.O_RDWR, 0)
			}
			seen = append(seen, has)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil, fmt.Errorf("no virtio port is named %s; there are %q", name, seen)
}

// network makes the devices: rxe0 on one end of a veth pair and siw0 on a dummy, each
// with several addresses, so that several servers each have an address and a GID.
func (j *job) network() error {
	cmds := [][]string{
		{"ip", "link", "set", "lo", "up"},
		{"ip", "link", "add", "roce0", "type", "veth", "peer", "name", "roce1"},
		{"ip", "link", "set", "roce0", "mtu", fmt.Sprint(j.MTU), "up"},
		{"ip", "link", "set", "roce1", "mtu", fmt.Sprint(j.MTU), "up"},
		{"ip", "link", "add", "iwarp0", "type", "dummy"},
		{"ip", "link", "set", "iwarp0", "mtu", fmt.Sprint(j.MTU), "up"},
	}
	for _, a := range addresses(rxeNet) {
		cmds = append(cmds, []string{"ip", "addr", "add", a + "/24", "dev", "roce0"})
	}
	for _, a := range addresses(siwNet) {
		cmds = append(cmds, []string{"ip", "addr", "add", a + "/24", "dev", "iwarp0"})
	}
	if j.RXE {
		cmds = append(cmds, []string{"rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "roce0"})
	}
	if j.SIW {
		cmds = append(cmds, []string{"rdma", "link", "add", "siw0", "type", "siw", "netdev", "iwarp0"})
	}
	for _, c := range cmds {
		if err := runIn(context.Background(), "/", nil, c[0], c[1:]...); err != nil {
			return err
		}
	}
	return nil
}

const (
	rxeNet        = "10.77.0."
	siwNet        = "10.78.0."
	addressesEach = 8
)

func addresses(net string) []string {
	var a []string
	for i := range addressesEach {
		a = append(a, fmt.Sprint(net, i+1))
	}
	return a
}

// guestEnv tells programs in the guest what is there.
func (j *job) guestEnv() []string {
	env := []string{
		"PATH=" + guestPath, "HOME=/tmp", "TMPDIR=/tmp", "USER=root", "LANG=C", "TERM=dumb",
		"KVD_GUEST=1", "KVD_GUEST_OUT=" + outDir,
	}
	if j.RXE {
		env = append(env, "KVD_GUEST_RXE=rxe0", "KVD_GUEST_RXE_NETDEV=roce0", "KVD_GUEST_RXE_ADDRS="+strings.Join(addresses(rxeNet), ","))
	}
	if j.SIW {
		env = append(env, "KVD_GUEST_SIW=siw0", "KVD_GUEST_SIW_NETDEV=iwarp0", "KVD_GUEST_SIW_ADDRS="+strings.Join(addresses(siwNet), ","))
	}
	return append(env, j.Env...)
}

// run runs the program in a group of its own, which is killed at the end: what it left
// behind must not hold its output open.
func (j *job) run(out *frames) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), j.Timeout)
	defer cancel()
	if err := os.MkdirAll(outDir, 0o755); err != nil {
		return 0, err
	}
	cmd := exec.CommandContext(ctx, j.Argv[0], j.Argv[1:]...)
	cmd.Dir = j.Dir
	cmd.Env = j.guestEnv()
	cmd.Stdout, cmd.Stderr = stream{out, kindStdout}, stream{out, kindStderr}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	err := cmd.Run()
	if cmd.Process != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return 0, fmt.Errorf("%s did not end within %v and was killed", j.Argv[0], j.Timeout)
	case errors.Is(err, exec.ErrWaitDelay):
		return cmd.ProcessState.ExitCode(), nil
	case errors.As(err, &exit):
		if s, ok := exit.Sys().(syscall.WaitStatus); ok && s.Signaled() {
			_ = out.send(frame{Kind: kindStderr, Data: fmt.Appendf(nil, "%s was ended by signal %v\n", j.Argv[0], s.Signal())})
			return 128 + int(s.Signal()), nil
		}
		return exit.ExitCode(), nil
	}
	return 0, err
}

// sendFiles sends what the program left in dir.
func sendFiles(out *frames, dir string) error {
	return filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		name, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		f, err := os.Open(p)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		piece := make([]byte, 256<<10)
		for {
			n, err := f.Read(piece)
			if n > 0 {
				if err := out.send(frame{Kind: kindFile, Name: name, Data: piece[:n]}); err != nil {
					return err
				}
			}
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
		}
	})
}
