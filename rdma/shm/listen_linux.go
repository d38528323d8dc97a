package shm

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
)

// listener is a listening socket and its place in the file system.
type listener struct {
	*net.UnixListener
	path string
	file fs.FileInfo // of the socket as we made it
}

// lockWait bounds the wait for another process that is just taking a socket.
const lockWait = 5 * time.Second

// socketPath chooses where a target listens, and makes the directory.
func (p *Provider) socketPath(cfg rdma.TargetConfig, private bool) (path, stale string, err error) {
	path = p.SocketPath
	if path == "" {
		dir := p.SocketDir
		if dir == "" {
			base := os.Getenv("XDG_RUNTIME_DIR")
			if base == "" {
				base = os.TempDir()
			}
			dir = filepath.Join(base, fmt.Sprintf("kvd-%d", os.Getuid()))
			if err := checkOwner(dir); err != nil {
				return "", "", err
			}
		}
		if dir, err = filepath.Abs(dir); err != nil {
			return "", "", fmt.Errorf("shm: socket directory: %w", err)
		}
		path = filepath.Join(dir, fmt.Sprintf("%x-%x.sock", cfg.NodeID, cfg.BootID))
		stale = filepath.Join(dir, fmt.Sprintf("%x-*.sock", cfg.NodeID))
	}
	if err := checkSocketPath(path); err != nil {
		return "", "", err
	}
	mode := os.FileMode(0o711)
	if private {
		mode = 0o700
	}
	if err := os.MkdirAll(filepath.Dir(path), mode); err != nil {
		return "", "", fmt.Errorf("shm: socket directory: %w", err)
	}
	return path, stale, nil
}

// checkOwner refuses a default directory which somebody else made first: in a
// temporary directory anybody could.
func checkOwner(dir string) error {
	if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("shm: socket directory: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("shm: socket directory %s: %w", dir, err)
	}
	if st.Uid != uint32(os.Geteuid()) || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return fmt.Errorf("shm: socket directory %s belongs to user %d, or is none: set SocketDir to a directory of user %d", dir, st.Uid, os.Geteuid())
	}
	return nil
}

// listen takes the path. Other sockets that match the pattern stale and have no
// process behind them are removed.
func listen(path, stale string, private bool) (*listener, error) {
	unlock, err := lockFile(path + ".lock")
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := checkVacant(path); err != nil {
		return nil, err
	}
	if stale != "" {
		removeStale(stale)
	}
	// Bound under another name and moved into place with its final permissions, so
	// that nobody finds it before: replacing a dead socket and opening ours is one
	// step.
	temp := path + "~"
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("shm: socket %s: %w", temp, err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: temp, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("shm: listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	mode := os.FileMode(0o666)
	if private {
		mode = 0o600
	}
	err = errors.Join(os.Chmod(temp, mode), os.Rename(temp, path))
	info, statErr := os.Lstat(path)
	if err = errors.Join(err, statErr); err != nil {
		return nil, errors.Join(fmt.Errorf("shm: socket %s: %w", path, err), l.Close())
	}
	return &listener{UnixListener: l, path: path, file: info}, nil
}

// Close stops listening, and removes the socket if it is still ours.
func (l *listener) Close() error {
	err := l.UnixListener.Close()
	if info, statErr := os.Lstat(l.path); statErr == nil && os.SameFile(info, l.file) {
		err = errors.Join(err, os.Remove(l.path), os.Remove(l.path+".lock"))
	}
	return err
}

// checkVacant refuses a path at which somebody listens, or which is no socket.
func checkVacant(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("shm: socket: %w", err)
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("shm: socket %s: there is a %s of that name: remove it or choose another path", path, info.Mode().Type())
	}
	if !answered(path) {
		return nil
	}
	return fmt.Errorf("shm: socket %s: another process listens there: stop it or choose another path", path)
}

// answered tells whether a process listens at path. Only a refused connection
// proves that none does.
func answered(path string) bool {
	c, err := net.DialTimeout("unixpacket", path, time.Second)
	if err == nil {
		_ = c.Close()
		return true
	}
	return !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ENOENT)
}

// removeStale clears away what earlier boots of this node left. Best effort: they
// are in nobody's way.
func removeStale(pattern string) {
	paths, _ := filepath.Glob(pattern)
	for _, path := range paths {
		if info, err := os.Lstat(path); err == nil && info.Mode().Type() == fs.ModeSocket && !answered(path) {
			_ = os.Remove(path)
			_ = os.Remove(path + ".lock")
		}
	}
}

// lockFile takes an exclusive lock, which the kernel drops with the process.
func lockFile(path string) (unlock func(), err error) {
	deadline := time.Now().Add(lockWait)
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, fmt.Errorf("shm: lock of the socket: %w", err)
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		// The file may have been removed by its last holder between open and lock.
		if err == nil && stillThere(f, path) {
			return func() { _ = f.Close() }, nil
		}
		_ = f.Close()
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("shm: lock %s: %w", path, err)
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("shm: lock %s is held by another process for more than %v: is it starting with the same socket path?", path, lockWait)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func stillThere(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Lstat(path)
	return err == nil && os.SameFile(a, b)
}

// uidSet is the configured set of users, never empty.
type uidSet []uint32

func newUIDSet(configured []uint32) uidSet {
	if len(configured) == 0 {
		return uidSet{uint32(os.Geteuid())}
	}
	return slices.Clone(configured)
}

func (s uidSet) has(uid uint32) bool { return slices.Contains(s, uid) }

// private tells that nobody but ourselves is to connect.
func (s uidSet) private() bool {
	return !slices.ContainsFunc(s, func(uid uint32) bool { return uid != uint32(os.Geteuid()) })
}

func (s uidSet) String() string {
	words := make([]string, len(s))
	for i, uid := range s {
		words[i] = fmt.Sprint(uid)
	}
	return strings.Join(words, ", ")
}
