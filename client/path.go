package client

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// pathReason says why a node is not read by a transport. Each is a word in Stats and in
// metrics.
type pathReason uint8

const (
	pathUsable      pathReason = iota
	pathNotServed              // by the node. This and the next two are no failures
	pathElsewhere              // shared memory, and the node is on another host
	pathPlain                  // its bytes could be read along, and TLS is required
	pathUnsupported            // this host cannot use it (any more)
	pathDenied                 // the node refuses this client
	pathExhausted              // a limit of the node or of a device
	pathRevoked                // the node took the connection back
	pathLost                   // the connection broke
	pathStalled                // READs were not answered
	pathHandshake              // the two sides did not understand each other
	pathTimeout                // no answer while connecting
	pathFailed                 // anything else
	pathReasonCount
)

var pathReasonNames = [pathReasonCount]string{
	pathUsable: "none", pathNotServed: "not_served", pathElsewhere: "another_host", pathPlain: "plaintext",
	pathUnsupported: "unsupported", pathDenied: "denied", pathExhausted: "exhausted", pathRevoked: "revoked",
	pathLost: "connection_lost", pathStalled: "stalled", pathHandshake: "handshake", pathTimeout: "timeout", pathFailed: "failed",
}

func (r pathReason) String() string { return pathReasonNames[r] }

// plainText is why a transport is left alone where TLS is required.
const plainText = "its READs are plain text, and TLS is required: set AllowPlaintextReads where the network is trusted"

// fallback tells whether the node is read in a lesser way because of it.
func (r pathReason) fallback() bool { return r >= pathPlain }

// curable tells whether trying again later may help. What a node serves, where it is,
// and what it is allowed changes only with its boot or this client's configuration.
func (r pathReason) curable() bool { return r >= pathUnsupported }

// transient failures happened to a connection that had worked.
func (r pathReason) transient() bool { return r == pathLost || r == pathStalled || r == pathRevoked }

// classifyPath sorts why a connection could not be made, or ended.
func classifyPath(err error) pathReason {
	for _, c := range [...]struct {
		class  error
		reason pathReason
	}{
		{rdma.ErrUnsupported, pathUnsupported},
		{rdma.ErrExhausted, pathExhausted}, {ErrExhausted, pathExhausted},
		{ErrDenied, pathDenied},
		{rdma.ErrRevoked, pathRevoked},
		{errStalled, pathStalled},
		{rdma.ErrConnLost, pathLost}, {rdma.ErrClosed, pathLost},
		{rdma.ErrHandshake, pathHandshake}, {ErrInvalid, pathHandshake}, {ErrIncompatible, pathHandshake},
		{rdma.ErrTimeout, pathTimeout}, {context.DeadlineExceeded, pathTimeout},
	} {
		if errors.Is(err, c.class) {
			return c.reason
		}
	}
	return pathFailed
}

// boot is what is known of one boot of a node beyond the sessions with it. Locations
// belong to it, not to a connection: they mean the same however they are READ.
type boot struct {
	id  uint64
	ord uint32 // unique in this Client, from 1: names the boot in the cache of locations
	cfg *Config
	mu  struct {
		sync.Mutex
		paths []path // by transport
	}
}

// path is one transport to one boot of a node.
type path struct {
	why   pathReason // of the last failure; pathUsable: none since it last proved steady
	text  string
	again time.Time // not tried before
	pace  *pauses   // grows from failure to failure; nil: none lately
	since time.Time // connected since; zero: it is not
}

const (
	// retryPathMin and retryPathMax bound the pause before a transport that failed is
	// tried again, beside whatever the node is read by meanwhile.
	retryPathMin = 100 * time.Millisecond
	retryPathMax = 30 * time.Second
	// steadyAfter is how long a connection must hold for earlier failures to be
	// forgotten. Sooner, a node whose limit of queue pairs is reached, say, would give
	// one and take it back for ever.
	steadyAfter = 30 * time.Second
	// retryOnlyPath bounds the pause where the node cannot be READ at all meanwhile,
	// though it could a moment ago.
	retryOnlyPath = time.Second
)

// bootOf gives what is known of a node's boot. With another boot everything about the one
// before is forgotten.
func (c *Client) bootOf(node, id uint64) *boot {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := c.mu.boots[node]
	if b == nil || b.id != id {
		b = &boot{id: id, ord: c.ordinals.Add(1), cfg: &c.cfg}
		b.mu.paths = make([]path, len(c.transports))
		c.mu.boots[node] = b
	}
	return b
}

// blocked tells why the path is not to be tried now.
func (b *boot) blocked(i int, now time.Time) (pathReason, string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := &b.mu.paths[i]
	if p.why == pathUsable || !now.Before(p.again) {
		return pathUsable, ""
	}
	return p.why, p.text
}

// failed takes in that the path did not work and gives back what was known before.
func (b *boot) failed(i int, why pathReason, text string) (before path) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := &b.mu.paths[i]
	before = *p
	now := time.Now()
	if p.pace == nil || !p.since.IsZero() && now.Sub(p.since) >= steadyAfter {
		p.pace = b.cfg.newPauses(b.id+uint64(i), retryPathMin, retryPathMax, 0.3)
	}
	p.why, p.text, p.since = why, text, time.Time{}
	p.again = now.Add(p.pace.next())
	return before
}

// forgive takes a failure back which turned out to be the node's.
func (b *boot) forgive(i int, before path) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before.since = time.Time{}
	b.mu.paths[i] = before
}

func (b *boot) connected(i int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.paths[i].why, b.mu.paths[i].text = pathUsable, ""
	b.mu.paths[i].since = time.Now()
}

// nextTry is when one of the transports that the session passed over is to be tried
// again; ok is false where none is.
func (b *boot) nextTry(s *session) (at time.Time, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, o := range s.passed {
		if !o.why.curable() {
			continue
		}
		p := &b.mu.paths[o.transport]
		if s.conn == nil && p.why.transient() {
			if soon := time.Now().Add(retryOnlyPath); soon.Before(p.again) {
				p.again = soon
			}
		}
		if !ok || p.again.Before(at) {
			at, ok = p.again, true
		}
	}
	return at, ok
}
