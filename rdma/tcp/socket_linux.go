package tcp

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// setUserTimeout bounds how long sent bytes may stay unacknowledged. Keep-alive
// alone does not: it is suspended while bytes are in flight.
func setUserTimeout(raw syscall.RawConn, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	var err error
	if e := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	}); e != nil {
		return e
	}
	return err
}
