package verbs

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// Memlock says how much memory this process may pin.
type Memlock struct {
	// Soft and Hard are RLIMIT_MEMLOCK in bytes, -1 for unlimited or unknown.
	Soft int64 `json:"soft_bytes"`
	Hard int64 `json:"hard_bytes"`
	// Pinned by this process now.
	Pinned int64 `json:"pinned_bytes"`
	// Exempt: CAP_IPC_LOCK lifts the limit, for all devices but soft-iWARP.
	Exempt  bool   `json:"exempt"`
	Verdict string `json:"verdict"`
}

const capIPCLock = 14

func memlock() Memlock {
	m := Memlock{Soft: -1, Hard: -1}
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim); err == nil {
		m.Soft, m.Hard = limitBytes(lim.Cur), limitBytes(lim.Max)
	}
	if b, err := os.ReadFile("/proc/self/status"); err == nil {
		m.Pinned = statusField(string(b), "VmPin", 10) * 1024
		m.Exempt = uint64(statusField(string(b), "CapEff", 16))&(1<<capIPCLock) != 0
	}
	switch {
	case m.Soft < 0:
		m.Verdict = "no limit"
	case m.Exempt:
		m.Verdict = fmt.Sprintf("%s, lifted by CAP_IPC_LOCK (not for iWARP)", sizeText(uint64(m.Soft)))
	default:
		m.Verdict = fmt.Sprintf("%s: want the arena times the devices; %s", sizeText(uint64(m.Soft)), memlockRemedy)
	}
	return m
}

func limitBytes(v uint64) int64 {
	if v > 1<<62 {
		return -1
	}
	return int64(v)
}

// statusField finds "Name: value" in /proc/self/status; 0 where it is missing.
func statusField(status, name string, base int) int64 {
	for line := range strings.Lines(status) {
		rest, ok := strings.CutPrefix(line, name+":")
		if !ok {
			continue
		}
		f := strings.Fields(rest)
		if len(f) == 0 {
			return 0
		}
		v, _ := strconv.ParseUint(f[0], base, 64)
		return int64(v)
	}
	return 0
}

const memlockRemedy = "raise it by ulimit -l, LimitMEMLOCK= in the systemd unit, or in Kubernetes by the container runtime's limit or the capability IPC_LOCK"

// refusedRegistration turns a device's refusal into a sentence with have, need and where
// to set it. need is what was asked for, on that device.
func refusedRegistration(err error, device string, need uint64, regions int, limits ibv.DeviceAttr) error {
	if !errors.Is(err, syscall.ENOMEM) && !errors.Is(err, syscall.EAGAIN) && !errors.Is(err, syscall.EPERM) {
		return fmt.Errorf("%w: verbs: %s refuses to register %s: %w", rdma.ErrExhausted, device, sizeText(need), err)
	}
	m := memlock()
	have := "unlimited"
	if m.Soft >= 0 {
		have = sizeText(uint64(m.Soft))
	}
	return fmt.Errorf("%w: verbs: %s refuses to register %s more: this process has pinned %s, RLIMIT_MEMLOCK is %s (needed is the arena times the devices): %s; the device's own limits are %d regions (%d here) of %s each: %w",
		rdma.ErrExhausted, device, sizeText(need), sizeText(uint64(m.Pinned)), have, memlockRemedy, limits.MaxMR, regions, sizeText(limits.MaxMRSize), err)
}

func sizeText(n uint64) string {
	for _, u := range []struct {
		unit string
		size uint64
	}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n >= u.size {
			return fmt.Sprintf("%.4g %s", float64(n)/float64(u.size), u.unit)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}
