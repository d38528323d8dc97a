package ibv

import (
	"net"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

func newEventFD(fd int, name string) (*eventFD, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	// The flag belongs to the open file, so the library's descriptor gets it too.
	if err := unix.SetNonblock(dup, true); err != nil {
		_ = unix.Close(dup)
		return nil, err
	}
	f := os.NewFile(uintptr(dup), name)
	rc, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return &eventFD{f: f, rc: rc}, nil
}

func ifnameOf(index int) string {
	if in, err := net.InterfaceByIndex(index); err == nil {
		return in.Name
	}
	return ""
}

// ifindexOf reads the system's files instead of asking for every interface: a GID table
// has hundreds of entries.
func ifindexOf(name string) int {
	if name == "" || strings.ContainsAny(name, "/\x00") {
		return 0
	}
	b, err := os.ReadFile("/sys/class/net/" + name + "/ifindex")
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0
	}
	return n
}
