//go:build linux

package shm

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestScanHolders(t *testing.T) {
	prefix := "kvd-shm-scan-" + itoa(os.Getpid()) + "-"
	find := func(current string) []Holder {
		h, err := ScanHolders(prefix, current)
		require.NoError(t, err)
		return h.Processes
	}
	require.Empty(t, find(""))
	old := startChild(t, "holder", prefix+"boot1-chunk")
	old.expect("mapped")
	now := startChild(t, "holder", prefix+"boot2-chunk")
	now.expect("mapped")

	got := find(prefix + "boot2-")
	require.Len(t, got, 1)
	require.Equal(t, old.cmd.Process.Pid, got[0].PID)
	require.Equal(t, uint64(3<<20), got[0].Bytes)
	require.Equal(t, []string{prefix + "boot1-chunk"}, got[0].Names)
	comm, err := os.ReadFile("/proc/self/comm")
	require.NoError(t, err)
	require.Equal(t, strings.TrimSpace(string(comm)), got[0].Command)
	require.Len(t, find(""), 2)

	require.NoError(t, old.in.Close())
	require.NoError(t, old.cmd.Wait())
	require.Empty(t, find(prefix+"boot2-"))
}

func TestHolderIn(t *testing.T) {
	const maps = "55d000000000-55d000001000 r--p 00000000 fe:00 12  /usr/bin/x\n" +
		"7f0000000000-7f0000002000 r--s 00000000 00:01 1042                       /memfd:kvd-1-a-chunk (deleted)\n" +
		"7f0000100000-7f0000101000 r--s 00002000 00:01 1042                       /memfd:kvd-1-a-chunk (deleted)\n" +
		"7f0000200000-7f0000300000 r--s 00000000 00:01 1043                       /memfd:kvd-1-b-chunk (deleted)\n" +
		"7f0000400000-7f0000500000 r--s 00000000 00:01 1044                       /memfd:kvd-12-a-chunk (deleted)\n" +
		"noise /memfd:kvd-1-c"
	require.Equal(t, Holder{Bytes: 0x3000, Names: []string{"kvd-1-a-chunk", "kvd-1-c"}}, holderIn([]byte(maps), "kvd-1-", "kvd-1-b-"))
	require.Equal(t, Holder{}, holderIn([]byte(maps), "other", ""))
	require.Equal(t, Holder{}, holderIn(nil, "kvd", ""))
}

func BenchmarkScanHolders(b *testing.B) {
	before := cpuTime(b)
	for b.Loop() {
		_, err := ScanHolders("kvd-", "")
		require.NoError(b, err)
	}
	b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
}
