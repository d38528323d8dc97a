package client

import (
	"errors"
	"fmt"
)

// The classes of failure. Sort by errors.Is.
var (
	// ErrNotFound: the key is absent. For Delete: it was absent already.
	ErrNotFound = errors.New("not found")
	// ErrConflict: a precondition failed, or the namespace is immutable and the key
	// has other content. errors.As with *ConflictError gives the current version.
	ErrConflict = errors.New("conflict")
	// ErrUnavailable: nothing was done; trying again later may work.
	ErrUnavailable = errors.New("unavailable")
	// ErrOutcomeUnknown: the write may or may not have been applied. Read to find out.
	ErrOutcomeUnknown = errors.New("outcome unknown: the write may have been applied")
	// ErrExhausted: memory, disk or a queue is full. Nothing was done; retry after a
	// pause, or make room.
	ErrExhausted = errors.New("exhausted")
	// ErrDenied: the caller may not do that.
	ErrDenied = errors.New("denied")
	// ErrInvalid: the request cannot work as it is (empty or long key, large value,
	// contradicting options, wrong configuration).
	ErrInvalid = errors.New("invalid")
	// ErrTooSmall: the value does not fit into the Buffer. errors.As with *TooSmallError
	// gives its size.
	ErrTooSmall = errors.New("buffer too small")
	// ErrUnknownNamespace: create it first, or correct its name.
	ErrUnknownNamespace = errors.New("unknown namespace")
	// ErrAlreadyExists: a namespace of that name exists.
	ErrAlreadyExists = errors.New("already exists")
	// ErrWrongCluster: the node belongs to another cluster than asked for.
	ErrWrongCluster = errors.New("wrong cluster")
	// ErrIncompatible: the other side is not kvd, or a version that this client does
	// not understand.
	ErrIncompatible = errors.New("incompatible")
	// ErrCorrupt: a node found its data damaged.
	ErrCorrupt = errors.New("corrupt")
	// ErrReadOnly: the shard's leader refuses writes (disk full or failing). It is
	// an ErrUnavailable too.
	ErrReadOnly = fmt.Errorf("read only: %w", ErrUnavailable)
	// ErrNoRDMA: Config.RequireRDMA is set, and a node cannot be read by an RDMA device.
	// It is an ErrUnavailable too.
	ErrNoRDMA = fmt.Errorf("RDMA is required: %w", ErrUnavailable)
	// ErrClosed: the Client was closed.
	ErrClosed = errors.New("client closed")
)

// ConflictError is an ErrConflict with the version that is there.
type ConflictError struct {
	Current uint64 // 0: the key is absent
	// Immutable: nothing was asked of the key, but its namespace is immutable.
	Immutable bool
}

// Error says what is there.
func (e *ConflictError) Error() string {
	switch {
	case e.Current == 0:
		return "conflict: the key is absent"
	case e.Immutable:
		return fmt.Sprintf("conflict: the namespace is immutable, and the key has other content (version %d)", e.Current)
	}
	return fmt.Sprintf("conflict: the key has version %d", e.Current)
}

// Is makes a ConflictError an ErrConflict.
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// Retryable tells whether the same call may succeed later without any change.
// ErrOutcomeUnknown is not: find out first.
func Retryable(err error) bool {
	return errors.Is(err, ErrUnavailable) || errors.Is(err, ErrExhausted)
}
