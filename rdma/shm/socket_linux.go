package shm

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net"

	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
)

// maxFDs is the most descriptors that a message carries. The kernel drops, and
// reports, what a peer sends beyond it.
const maxFDs = 2

// peerUID is the user that connected, as the kernel recorded it.
func peerUID(c *net.UnixConn) (uint32, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, fmt.Errorf("shm: credentials of the peer: %w", credErr)
	}
	return cred.Uid, nil
}

// sendNow sends one message without ever waiting: a peer that does not read gets
// an error here, and so cannot hold up the server.
func sendNow(c *net.UnixConn, msg []byte, fds ...int) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	var sendErr error
	err = raw.Control(func(fd uintptr) {
		sendErr = unix.Sendmsg(int(fd), msg, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
	return errors.Join(err, sendErr)
}

// receive reads one message and up to want descriptors into buf; the message is
// borrowed from buf, the descriptors are the caller's to close. On any error no
// descriptor is left open.
func receive(c *net.UnixConn, buf []byte, want int) (msg []byte, fds []int, err error) {
	var oob []byte
	if want > 0 {
		oob = make([]byte, unix.CmsgSpace(maxFDs*4))
	}
	n, oobn, flags, _, err := c.ReadMsgUnix(buf, oob)
	fds, fdErr := parseFDs(oob[:oobn])
	switch {
	case err != nil:
	case fdErr != nil:
		err = fmt.Errorf("%w: shm: control message: %w", rdma.ErrHandshake, fdErr)
	case n == 0:
		err = io.EOF
	case flags&unix.MSG_TRUNC != 0:
		err = fmt.Errorf("%w: shm: message of more than %d bytes", rdma.ErrHandshake, len(buf))
	case flags&unix.MSG_CTRUNC != 0:
		err = fmt.Errorf("%w: shm: message with more than %d descriptors", rdma.ErrHandshake, len(fds))
	}
	if err != nil {
		closeFDs(fds)
		return nil, nil, err
	}
	return buf[:n], fds, nil
}

func parseFDs(oob []byte) (fds []int, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range msgs {
		got, rightsErr := unix.ParseUnixRights(&msgs[i])
		if rightsErr != nil {
			err = rightsErr
		}
		fds = append(fds, got...)
	}
	return fds, err
}

func closeFDs(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// mapSealed maps a descriptor that a server passed, for reading, and closes it. The
// seals are checked first: on a file that can shrink, a READ could end this
// process with SIGBUS.
func mapSealed(fd int, size uint64, what string) ([]byte, error) {
	defer func() { _ = unix.Close(fd) }()
	const needed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: shm: %s is not a memfd: %w", rdma.ErrHandshake, what, err)
	}
	if seals&needed != needed {
		return nil, fmt.Errorf("%w: shm: %s has seals %#x, want at least %#x (shrink, grow)", rdma.ErrHandshake, what, seals, needed)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("%w: shm: %s: %w", rdma.ErrHandshake, what, err)
	}
	if uint64(st.Size) != size || size == 0 || size > math.MaxInt {
		return nil, fmt.Errorf("%w: shm: %s has %d bytes, want %d", rdma.ErrHandshake, what, st.Size, size)
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("%w: shm: map %d bytes of %s: %w", rdma.ErrExhausted, size, what, err)
	}
	return b, nil
}
