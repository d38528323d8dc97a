package shm

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
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
			if dir, err = ownDir(filepath.Join(base, fmt.Sprintf("kvd-%d", os.Getuid())), cfg.Logger); err != nil {
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

// ownDirs is how many names are tried for the default directory.
const ownDirs = 8

// ownDir returns the default directory, or one beside it where somebody else made that
// first: in a temporary directory anybody could, and must not keep a node from being read.
// Clients are told the place with each connection. The next start finds the same one.
func ownDir(dir string, log *slog.Logger) (string, error) {
	first := checkOwner(dir)
	if first == nil || !errors.Is(first, errForeignDir) {
		return dir, first
	}
	for i := 1; i < ownDirs; i++ {
		other := fmt.Sprintf("%s-%d", dir, i)
		if checkOwner(other) == nil {
			if log != nil {
				log.Warn("shm: the usual socket directory is another user's, so one beside it is used: find out who made it, or set the directory (kvd: --shm-dir)", "reason", first, "dir", other)
			}
			return other, nil
		}
	}
	// Without shm a node is read by its other transports.
	if log != nil {
		log.Warn("shm: NO SHARED MEMORY: other users have taken all usual socket directories; clients on this host read by other transports. Set the directory (kvd: --shm-dir)", "reason", first)
	}
	return "", fmt.Errorf("%w: %w, and so do %d beside it", rdma.ErrUnsupported, first, ownDirs-1)
}

var errForeignDir = errors.New("set SocketDir (kvd: --shm-dir) to a directory of your own")

// checkOwner refuses, by errForeignDir, a directory which somebody else made.
func checkOwner(dir string) error {
	if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("shm: socket directory: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("shm: socket directory %s: %w", dir, err)
	}
	if st.Uid != uint32(os.Geteuid()) || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return fmt.Errorf("shm: socket directory %s belongs to user %d, not to %d, or is none: %w", dir, st.Uid, os.Geteuid(), errForeignDir)
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
