package client

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/shm"
	"github.com/kvd-io/kvd/rdma/tcp"
)

// transport is a provider's reading side in this Client. The initiator is made when it
// is first wanted, and asked for again where there was no device: a host gets devices while
// its processes run. That one goes and comes back is the initiator's own business.
type transport struct {
	name     string
	provider rdma.Provider
	cfg      rdma.InitiatorConfig
	plain    bool // what it READs can be read along on a network
	device   bool // an RDMA device does the READs
	mu       struct {
		sync.Mutex
		closed    bool
		initiator rdma.Initiator // nil: err says why
		err       error
		tried     time.Time
	}
}

// renewInitiator is how often a provider that did not work is asked again, however many
// nodes want it.
const renewInitiator = 100 * time.Millisecond

// start gives the initiator, which it makes where there is none.
func (t *transport) start() (rdma.Initiator, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return nil, ErrClosed
	}
	if t.mu.initiator == nil && (t.mu.tried.IsZero() || time.Since(t.mu.tried) >= renewInitiator) {
		t.mu.tried = time.Now()
		i, err := t.provider.NewInitiator(t.cfg)
		if t.mu.err = err; err == nil {
			t.mu.initiator = i
		}
	}
	if t.mu.initiator == nil {
		return nil, t.mu.err
	}
	return t.mu.initiator, nil
}

// close closes the initiator, and so every connection.
func (t *transport) close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.closed = true
	if t.mu.initiator == nil {
		return nil
	}
	return t.mu.initiator.Close()
}

// startTransports looks at the configured providers. None is started yet, but where an
// RDMA device is required, so that its lack is told at once.
func (c *Client) startTransports() error {
	providers := c.cfg.Providers
	if providers == nil {
		providers = defaultProviders(&c.cfg)
	}
	c.via = []string{TransportGRPC}
	if len(providers) >= maxVia {
		return fmt.Errorf("%w: %d providers: want at most %d", ErrInvalid, len(providers), maxVia-1)
	}
	known := c.cfg.Transport == TransportAuto || c.cfg.Transport == TransportGRPC
	for _, p := range providers {
		t := &transport{
			name: p.Name(), provider: p, cfg: rdma.InitiatorConfig{Logger: c.cfg.Logger, ConnectTimeout: c.cfg.ConnectTimeout},
			plain: !confidential(p), device: usesDevice(p),
		}
		c.transports = append(c.transports, t)
		c.via = append(c.via, t.name)
		known = known || c.cfg.Transport == t.name
	}
	if !known {
		return fmt.Errorf("%w: transport %q: want auto, grpc or one of %s", ErrInvalid, c.cfg.Transport, strings.Join(c.via[1:], ", "))
	}
	if c.cfg.RequireRDMA {
		return c.checkDevices()
	}
	return nil
}

// checkDevices fails where no configured transport with an RDMA device works here.
func (c *Client) checkDevices() error {
	var reasons []string
	for _, t := range c.transports {
		if !t.device || !c.wants(t) {
			continue
		}
		if t.plain && !c.mayReadPlain() {
			reasons = append(reasons, t.name+": "+plainText)
			continue
		}
		_, err := t.start()
		if err == nil {
			return nil
		}
		reasons = append(reasons, t.name+": "+err.Error())
	}
	if len(reasons) == 0 {
		return fmt.Errorf("%w: RDMA is required, but transport %q uses no RDMA device: want auto or verbs", ErrInvalid, c.cfg.Transport)
	}
	return fmt.Errorf("%w: %s", ErrNoRDMA, strings.Join(reasons, "; "))
}

// wants tells whether the configuration lets the transport be used.
func (c *Client) wants(t *transport) bool {
	if c.cfg.RequireRDMA && !t.device {
		return false
	}
	return c.cfg.Transport == TransportAuto || c.cfg.Transport == t.name
}

func (c *Client) mayReadPlain() bool { return !c.cfg.RequireTLS || c.cfg.AllowPlaintextReads }

// confidential tells whether READs by the provider are encrypted or never leave the host.
func confidential(p rdma.Provider) bool {
	switch p := p.(type) {
	case *shm.Provider:
		return true
	case tcp.Provider:
		return p.ClientTLS != nil
	case interface{ Confidential() bool }:
		return p.Confidential()
	}
	return false
}

// usesDevice tells whether an RDMA device, or in tests what behaves like one, does the
// provider's READs.
func usesDevice(p rdma.Provider) bool { return p.Name() != shmName && p.Name() != tcpName }

// awaitRDMA fails where a node cannot be read by an RDMA device. It waits for each to be
// tried once. A node that is not there is no reason: it may come back with its device.
func (c *Client) awaitRDMA(ctx context.Context) error {
	var errs []error
	for _, n := range c.sortedNodes() {
		select {
		case <-n.tried:
		case <-ctx.Done():
			return fmt.Errorf("%w: node %d did not answer in time", ErrNoRDMA, n.id)
		}
		if s := n.sess.Load(); s != nil && s.conn == nil {
			errs = append(errs, fmt.Errorf("node at %s: %s", s.remote.addr, s.note))
		}
	}
	if len(errs) > 0 {
		return &rpcError{class: ErrNoRDMA, text: ErrNoRDMA.Error() + ": " + sentence(errs)}
	}
	return nil
}
