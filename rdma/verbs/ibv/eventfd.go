package ibv

import (
	"errors"
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	libVerbs  = "libibverbs.so.1"
	libRDMACM = "librdmacm.so.1"
)

// errnoT is what the shim's calls return: 0 is success.
type errnoT = syscall.Errno

// errnoClosed stands for "closed meanwhile"; no call of the library returns it.
const errnoClosed = syscall.ESHUTDOWN

// eventFD waits for a library's event descriptor in Go's network poller. It works on a
// duplicate, because the library closes its own descriptor itself.
type eventFD struct {
	f      *os.File
	rc     syscall.RawConn
	closed atomic.Bool // before f is: package os names that error differently here and there
}

// wait parks until try returns true; try is called first, and again whenever the
// descriptor became readable; its argument is of no use. When close has returned no try is running.
func (e *eventFD) wait(try func(uintptr) bool) error {
	err := e.rc.Read(try)
	switch {
	case err == nil:
		return nil
	case e.closed.Load():
		return ErrClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ErrDeadline
	}
	return err
}

func (e *eventFD) setDeadline(t time.Time) error { return e.f.SetReadDeadline(t) }

func (e *eventFD) close() {
	e.closed.Store(true)
	_ = e.f.Close() // a duplicate: nothing can be lost with it
}

// layout compares one struct of the shim with its twin.
type layout struct {
	name                                       string
	goSize, cSize, goFieldOffset, cFieldOffset uintptr
}
