//go:build unix

package engine

import (
	"errors"

	"golang.org/x/sys/unix"
)

func isReadOnly(err error) bool { return errors.Is(err, unix.EROFS) }
