package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	readyTimeout = 30 * time.Second
	stopTimeout  = 10 * time.Second
	probePause   = 20 * time.Millisecond
)

// process is a server that this run started.
type process struct {
	name string
	cmd  *exec.Cmd
	log  string // its output
	done chan struct{}
	err  error // of Wait; read it after done
}

// findBinary looks on PATH and where Debian puts servers.
func findBinary(name, debianPackage string) (string, error) {
	if p, err := exec.LookPath(name); err == nil {
		return p, nil
	}
	for _, dir := range []string{"/usr/bin", "/usr/sbin", "/usr/local/bin"} {
		if p, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s is not on this machine: install it (Debian: apt-get install %s) or leave it out of --systems", name, debianPackage)
}

// startProcess starts a server whose output goes to a file in dir.
func startProcess(dir, name, path string, args ...string) (*process, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	p := &process{name: name, cmd: exec.Command(path, args...), log: filepath.Join(dir, name+".log"), done: make(chan struct{})}
	out, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer out.Close() // the child has its own
	p.cmd.Dir = dir
	p.cmd.Stdout, p.cmd.Stderr = out, out
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func pidsOf(ps []*process) []int {
	var out []int
	for _, p := range ps {
		out = append(out, p.pid())
	}
	return out
}

// died describes why the process is gone, with the end of its log.
func (p *process) died() error {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return fmt.Errorf("%s ended (%v), and its log cannot be read: %w", p.name, p.err, err)
	}
	return fmt.Errorf("%s ended (%v); the end of its log:\n%s", p.name, p.err, tail(string(text), 5))
}

// tail is the last n lines of a text.
func tail(text string, n int) string {
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-n):], "\n")
}

// stop asks, waits, and then kills.
func (p *process) stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // an error means that it is gone
	select {
	case <-p.done:
		return nil
	case <-time.After(stopTimeout):
	}
	_ = p.cmd.Process.Kill()
	<-p.done
	return fmt.Errorf("%s (pid %d) did not stop within %v and was killed", p.name, p.pid(), stopTimeout)
}

func stopAll(ps []*process) error {
	var errs []error
	for _, p := range ps {
		errs = append(errs, p.stop())
	}
	return errors.Join(errs...)
}

// waitReady probes until it succeeds, a process is gone, or the time is up.
func waitReady(ctx context.Context, name string, ps []*process, probe func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for {
		err := probe(ctx)
		if err == nil {
			return nil
		}
		for _, p := range ps {
			select {
			case <-p.done:
				return p.died()
			default:
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready after %v: %w", name, readyTimeout, err)
		case <-time.After(probePause):
		}
	}
}

// freePorts are n different ports of 127.0.0.1 that nobody listened on just now.
func freePorts(n int) ([]int, error) {
	ports := make([]int, n)
	for i := range ports {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // open until all are drawn, else one could come twice
		ports[i] = l.Addr().(*net.TCPAddr).Port
	}
	return ports, nil
}

func loopback(port int) string { return "127.0.0.1:" + strconv.Itoa(port) }

// versionOf runs a program for the first line that it prints.
func versionOf(path string, args ...string) string {
	out, err := exec.Command(path, args...).Output()
	if err != nil {
		return "unknown"
	}
	first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return first
}

// userHZ is the unit of CPU times in /proc, the same on all Linux systems.
const userHZ = 100

// cpuTime that the processes have used so far; ok is false where /proc does not
// tell.
func cpuTime(pids []int) (total time.Duration, ok bool) {
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return 0, false
		}
		ticks, err := parseStat(string(text))
		if err != nil {
			return 0, false
		}
		total += time.Duration(ticks) * time.Second / userHZ
	}
	return total, len(pids) > 0
}

// parseStat adds utime and stime of /proc/PID/stat, see proc(5). The second field,
// in parentheses, may contain anything.
func parseStat(stat string) (ticks uint64, err error) {
	i := strings.LastIndexByte(stat, ')')
	fields := strings.Fields(stat[i+1:])
	if i < 0 || len(fields) < 13 {
		return 0, fmt.Errorf("stat %q: too few fields", stat)
	}
	for _, f := range fields[11:13] {
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return ticks, nil
}
