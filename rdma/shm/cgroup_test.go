//go:build linux

package shm

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// memoryGroup is a memory cgroup made for one test.
type memoryGroup struct {
	dir    string
	events string // file with a line "oom_kill N"
}

// newMemoryGroup makes a group with the given limit, or skips the test saying why
// there can be none.
func newMemoryGroup(t *testing.T, limitBytes int) *memoryGroup {
	write := func(dir, file, value string) error {
		// Not created: without the right file system in place it must fail.
		f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(value)
		return errors.Join(err, f.Close())
	}
	limit := strconv.Itoa(limitBytes)
	name := "kvd-shm-test-" + strconv.Itoa(os.Getpid())
	for _, v := range []struct{ root, limit, swap, noSwap, events string }{
		{"/sys/fs/cgroup", "memory.max", "memory.swap.max", "0", "memory.events"},
		{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", limit, "memory.oom_control"},
	} {
		dir := filepath.Join(v.root, name)
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		if write(dir, v.limit, limit) != nil { // not a memory hierarchy
			_ = os.Remove(dir)
			continue
		}
		_ = write(dir, v.swap, v.noSwap) // absent without swap accounting
		t.Cleanup(func() { _ = os.Remove(dir) })
		return &memoryGroup{dir: dir, events: v.events}
	}
	t.Skipf("no memory cgroup can be made (v1 or v2) as user %d: the OOM case is not tested here", os.Getuid())
	return nil
}

func (g *memoryGroup) add(t *testing.T, pid int) {
	require.NoError(t, os.WriteFile(filepath.Join(g.dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o644))
}

// kills is how many processes of the group the kernel has killed.
func (g *memoryGroup) kills(t *testing.T) int {
	b, err := os.ReadFile(filepath.Join(g.dir, g.events))
	require.NoError(t, err)
	for line := range bytes.Lines(b) {
		if rest, ok := bytes.CutPrefix(line, []byte("oom_kill ")); ok {
			n, err := strconv.Atoi(string(bytes.TrimSpace(rest)))
			require.NoError(t, err)
			return n
		}
	}
	t.Fatalf("no oom_kill in %s: %q", g.events, b)
	return 0
}
