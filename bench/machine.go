package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
)

// machine on which a run was made. What it does not tell is "unknown".
type machine struct {
	CPU        string `json:"cpu"`
	Cores      int    `json:"cores"` // that Go may use
	Kernel     string `json:"kernel"`
	OS         string `json:"os"`
	Filesystem string `json:"filesystem"` // of the data folders
	Go         string `json:"go"`
}

func (m machine) String() string {
	return fmt.Sprintf("%s, %d cores, %s, kernel %s, data on %s, %s", m.CPU, m.Cores, m.OS, m.Kernel, m.Filesystem, m.Go)
}

func describeMachine(dataDir string) machine {
	m := machine{
		CPU: "unknown", Cores: runtime.GOMAXPROCS(0), Kernel: "unknown", OS: runtime.GOOS + "/" + runtime.GOARCH,
		Filesystem: "unknown", Go: runtime.Version(),
	}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		m.CPU = cpuModel(text)
	}
	if text, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.Kernel = strings.TrimSpace(string(text))
	}
	if text, err := os.ReadFile("/etc/os-release"); err == nil {
		m.OS = osName(text) + " " + runtime.GOARCH
	}
	if text, err := os.ReadFile("/proc/self/mountinfo"); err == nil {
		if resolved, err := filepath.EvalSymlinks(dataDir); err == nil {
			m.Filesystem = filesystemOf(text, resolved)
		}
	}
	return m
}

// cpuModel from /proc/cpuinfo.
func cpuModel(text []byte) string {
	for line := range strings.Lines(string(text)) {
		name, value, ok := strings.Cut(line, ":")
		if ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

func osName(text []byte) string {
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "PRETTY_NAME="); ok {
			return strings.Trim(strings.TrimSpace(value), `"`)
		}
	}
	return runtime.GOOS
}

// filesystemOf finds the mount that holds path (absolute, without symbolic links)
// in /proc/self/mountinfo: the longest mount point above it, the last of equals.
func filesystemOf(mountinfo []byte, path string) string {
	best, found := "", "unknown"
	sc := bufio.NewScanner(bytes.NewReader(mountinfo))
	for sc.Scan() {
		// ID PARENT DEV ROOT MOUNTPOINT OPTIONS [TAGS...] - TYPE SOURCE SUPER
		before, after, ok := strings.Cut(sc.Text(), " - ")
		fields, tail := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 5 || len(tail) < 1 {
			continue
		}
		mount := fields[4]
		above := mount == "/" || path == mount || strings.HasPrefix(path, mount+"/")
		if above && len(mount) >= len(best) {
			best, found = mount, tail[0]
		}
	}
	return found
}

// sourceCommit of the tree in which bench is run. It is asked once, at the start: the
// tree may go on while the run does.
var sourceCommit = sync.OnceValue(func() string {
	out, err := exec.Command("git", "rev-parse", "--short=12", "HEAD").Output()
	if err != nil {
		return "unknown"
	}
	commit := strings.TrimSpace(string(out))
	if changes, err := exec.Command("git", "status", "--porcelain", "--untracked-files=no").Output(); err != nil || len(changes) > 0 {
		commit += "+dirty"
	}
	return commit
})
