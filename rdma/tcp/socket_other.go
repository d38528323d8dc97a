//go:build !linux

package tcp

import (
	"syscall"
	"time"
)

// setUserTimeout: only Linux has the option. Elsewhere the system's own
// retransmission limit finds a dead peer.
func setUserTimeout(syscall.RawConn, time.Duration) error { return nil }
