package env

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// cgroup is a memory cgroup of either version.
type cgroup struct {
	dir string
	v2  bool
}

const cgroupRoot = "/sys/fs/cgroup"

// memoryRoot is where memory cgroups can be made.
func memoryRoot() (dir string, v2 bool, err error) {
	v1 := filepath.Join(cgroupRoot, "memory")
	if _, err := os.Stat(filepath.Join(v1, "cgroup.procs")); err == nil {
		return v1, false, nil
	}
	b, err := os.ReadFile(filepath.Join(cgroupRoot, "cgroup.subtree_control"))
	if err != nil || !strings.Contains(string(b), "memory") {
		return "", false, errors.New("no memory cgroup controller that this process may use")
	}
	return cgroupRoot, true, nil
}

func newCgroup(name string) (*cgroup, error) {
	root, v2, err := memoryRoot()
	if err != nil {
		return nil, err
	}
	c := &cgroup{dir: filepath.Join(root, name), v2: v2}
	if err := os.Mkdir(c.dir, 0o755); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *cgroup) file(v1, v2 string) string {
	if c.v2 {
		return filepath.Join(c.dir, v2)
	}
	return filepath.Join(c.dir, v1)
}

func (c *cgroup) add(pid int) error {
	return os.WriteFile(filepath.Join(c.dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
}

func (c *cgroup) usage() (int64, error) {
	b, err := os.ReadFile(c.file("memory.usage_in_bytes", "memory.current"))
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}

// limit in bytes; 0: none.
func (c *cgroup) limit(n int64) error {
	text := strconv.FormatInt(n, 10)
	if n == 0 {
		text = "-1"
		if c.v2 {
			text = "max"
		}
	}
	return os.WriteFile(c.file("memory.limit_in_bytes", "memory.max"), []byte(text), 0)
}

// kills is how many processes the kernel has killed in here for lack of memory.
func (c *cgroup) kills() (int, error) {
	b, err := os.ReadFile(c.file("memory.oom_control", "memory.events"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "oom_kill "); ok {
			return strconv.Atoi(strings.TrimSpace(rest))
		}
	}
	return 0, fmt.Errorf("env: %s does not count kills", c.dir)
}

// remove waits for the last process in here to be gone.
func (c *cgroup) remove() error {
	var err error
	for range 100 {
		if err = os.Remove(c.dir); err == nil || errors.Is(err, os.ErrNotExist) {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}
