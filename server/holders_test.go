package server

import (
	"bytes"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/kvd-io/kvd/rdma"
)

// syncBuffer is a log that a test may read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// holderEnv makes the test's program a client that holds memory: see TestWarnsOfOldMemory.
const holderEnv = "KVD_TEST_HOLD_MEMORY"

func init() {
	if name := os.Getenv(holderEnv); name != "" {
		m, err := rdma.AllocMemory(name, 1<<20, rdma.MemoryOptions{Shareable: true})
		if err != nil {
			panic("holder: no memory") // bug: the test's own child
		}
		// Only mappings by others count, and this process is another than the node's.
		if _, err := unix.Mmap(m.FD(), 0, 1<<20, unix.PROT_READ, unix.MAP_SHARED); err != nil {
			panic("holder: no mapping") // bug: the test's own child
		}
		_, _ = os.Stdout.WriteString("ready\n")
		_, _ = os.Stdin.Read(make([]byte, 1)) // until the test closes it
		os.Exit(0)
	}
}

// TestWarnsOfOldMemory: a process that has memory of an earlier boot mapped is named in
// the log, with its pid.
func TestWarnsOfOldMemory(t *testing.T) {
	cfgs := testConfigs(t, 1, 1)
	log := &syncBuffer{}
	cfgs[0].Logger = slog.New(slog.NewTextHandler(log, nil))
	c := &testCluster{t: t, cfgs: cfgs, nodes: make([]*Node, 1), conns: make([]*grpc.ClientConn, 1)}
	t.Cleanup(c.stop)
	require.NoError(t, c.start(0))
	old := c.nodes[0].memoryName()
	c.stopNode(0)
	require.NotContains(t, log.String(), "earlier boot")

	holder := exec.Command(os.Args[0])
	holder.Env = append(os.Environ(), holderEnv+"="+old+"-chunk")
	in, err := holder.StdinPipe()
	require.NoError(t, err)
	out, err := holder.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, holder.Start())
	defer func() { _ = in.Close(); _ = holder.Wait() }()
	line := make([]byte, 6)
	_, err = out.Read(line)
	require.NoError(t, err)

	require.NoError(t, c.start(0))
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "earlier boot") }, 10*time.Second, 10*time.Millisecond)
	require.Contains(t, log.String(), "pid="+strconv.Itoa(holder.Process.Pid))
}
