package shm

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// Provider holds the settings of the transport. The zero value is usable. It is
// only read: one value may serve several targets and initiators.
type Provider struct {
	// SocketPath is where a target listens: an absolute path of at most
	// MaxSocketPath bytes. A socket left behind by a dead process is replaced; one on
	// which somebody answers is refused. Empty: a name in SocketDir that is
	// unique for the node's boot.
	SocketPath string
	// SocketDir is used when SocketPath is empty. It is created when missing. Clients
	// in containers must see it under the same path. Default: kvd-UID in
	// $XDG_RUNTIME_DIR, or else in the temporary directory.
	SocketDir string
	// AllowedUIDs are the user ids that may connect to a target. Default: the
	// target's own. Root is like any other user: to be allowed it must be listed, or
	// be the target's own. With foreign uids listed the socket file is open to
	// everybody, and the uid is checked after connecting.
	AllowedUIDs []uint32
	// AcceptTimeout is how long a client may take from Accept to the end of the
	// handshake. Default 10 s.
	AcceptTimeout time.Duration
	// HandshakeTimeout bounds each exchange over the socket on both sides; for an
	// initiator it is also the default of InitiatorConfig.ConnectTimeout. Default 5 s.
	HandshakeTimeout time.Duration
	// MaxConnections bounds the endpoints of a target, connected or expected. Each
	// costs the server a page, two descriptors and a goroutine. Default 4096.
	MaxConnections int
}

// MaxSocketPath is the longest path of a socket in bytes: sun_path holds 108 with
// the ending zero, and binding under a temporary name takes one.
const MaxSocketPath = 106

var _ rdma.Provider = (*Provider)(nil)

// Name implements rdma.Provider.
func (p *Provider) Name() string { return "shm" }

func (p Provider) withDefaults() Provider {
	if p.AcceptTimeout == 0 {
		p.AcceptTimeout = 10 * time.Second
	}
	if p.HandshakeTimeout == 0 {
		p.HandshakeTimeout = 5 * time.Second
	}
	if p.MaxConnections == 0 {
		p.MaxConnections = 4096
	}
	return p
}

// Validate reports settings that cannot work.
func (p *Provider) Validate() error {
	var errs []error
	if p.SocketPath != "" {
		errs = append(errs, checkSocketPath(p.SocketPath))
	}
	if p.AcceptTimeout < 0 || p.HandshakeTimeout < 0 {
		errs = append(errs, fmt.Errorf("shm: accept timeout %v, handshake timeout %v: want 0 (default) or more", p.AcceptTimeout, p.HandshakeTimeout))
	}
	if p.MaxConnections < 0 {
		errs = append(errs, fmt.Errorf("shm: max connections %d: want 0 (default) or more", p.MaxConnections))
	}
	return errors.Join(errs...)
}

// checkSocketPath is applied to configured paths and to those a server sends.
func checkSocketPath(path string) error {
	switch {
	case len(path) > MaxSocketPath:
		return fmt.Errorf("shm: socket path %q has %d bytes: the kernel takes at most %d here; choose a shorter directory", path, len(path), MaxSocketPath)
	case !strings.HasPrefix(path, "/"):
		return fmt.Errorf("shm: socket path %q: want an absolute path", path)
	case strings.ContainsRune(path, 0):
		return fmt.Errorf("shm: socket path %q contains a zero byte", path)
	}
	return nil
}
