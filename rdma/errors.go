package rdma

import "errors"

// The classes of failure. Providers wrap them with what was seen and wanted;
// callers sort by errors.Is.
var (
	// ErrConnLost: the connection is finished (peer gone, socket closed, queue pair
	// in error). Nothing read on it since may be used. Dial again.
	ErrConnLost = errors.New("rdma: connection lost")
	// ErrRevoked: the target took the connection down or refuses its credentials.
	// Authorize again before dialling.
	ErrRevoked = errors.New("rdma: access revoked")
	// ErrAccess: the region is unknown to the target or the READ is outside of it.
	// The connection may be finished with it (as on real queue pairs).
	ErrAccess = errors.New("rdma: access refused")
	// ErrClosed: this side closed the connection.
	ErrClosed = errors.New("rdma: closed")
	// ErrUnsupported: the provider does not work on this host; the text says why.
	ErrUnsupported = errors.New("rdma: not supported here")
	// ErrExhausted: a limit of the device or of the configuration was reached.
	ErrExhausted = errors.New("rdma: exhausted")
	// ErrHandshake: the peer did not speak the provider's protocol, or another
	// version of it.
	ErrHandshake = errors.New("rdma: handshake failed")
	// ErrTimeout: a deadline passed while connecting.
	ErrTimeout = errors.New("rdma: timed out")
)
