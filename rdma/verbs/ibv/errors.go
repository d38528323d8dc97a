package ibv

import (
	"errors"
	"fmt"
	"syscall"
)

var (
	// ErrUnavailable: no verbs in this build or on this host; the text says what is
	// missing and what to install.
	ErrUnavailable = errors.New("ibv: verbs not available")
	// ErrNoDevice: no device of that name.
	ErrNoDevice = errors.New("ibv: no such device")
	// ErrBusy: Close of an object that others still live on. It stays open.
	ErrBusy = errors.New("ibv: in use")
	// ErrClosed: the object was closed while waiting for its events.
	ErrClosed = errors.New("ibv: closed")
	// ErrDeadline: the deadline passed while waiting for an event.
	ErrDeadline = errors.New("ibv: deadline passed")
)

// Error is a call that the library or the kernel refused. errors.Is finds its Errno
// (ENOMEM for a registration beyond memlock, EINVAL, ETIMEDOUT, ...).
type Error struct {
	Op    string // the call: ibv_reg_mr
	What  string // on which object, with the figures that matter
	Errno syscall.Errno
}

func (e *Error) Error() string {
	if e.What == "" {
		return fmt.Sprintf("ibv: %s: %s (errno %d)", e.Op, e.Errno.Error(), int(e.Errno))
	}
	return fmt.Sprintf("ibv: %s of %s: %s (errno %d)", e.Op, e.What, e.Errno.Error(), int(e.Errno))
}

func (e *Error) Unwrap() error { return e.Errno }

// refused makes an *Error of a C call's errno, nil of 0.
func refused(errno syscall.Errno, op, what string, args ...any) error {
	if errno == 0 {
		return nil
	}
	return &Error{Op: op, What: fmt.Sprintf(what, args...), Errno: errno}
}

func busy(what string, children int64, of string) error {
	return fmt.Errorf("%w: %s still has %d %s: close them first", ErrBusy, what, children, of)
}
