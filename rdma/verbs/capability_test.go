//go:build rdmaguest

package verbs

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// withoutIPCLock runs fn on a thread that has lost CAP_IPC_LOCK, and with it the
// exemption from RLIMIT_MEMLOCK. The thread ends with it.
func withoutIPCLock(t *testing.T, fn func() error) error {
	t.Helper()
	done := make(chan error, 1)
	var setup error
	go func() {
		runtime.LockOSThread() // never unlocked: the runtime ends the thread
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		if setup = unix.Capget(&header, &caps[0]); setup == nil {
			caps[0].Effective &^= 1 << capIPCLock
			setup = unix.Capset(&header, &caps[0])
		}
		if setup != nil {
			done <- setup
			return
		}
		done <- fn()
	}()
	err := <-done
	require.NoError(t, setup)
	return err
}
