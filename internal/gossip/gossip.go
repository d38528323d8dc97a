package gossip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// Gossip is one running node.
type Gossip struct {
	cfg       Config
	table     *table
	transport *transport
	list      *memberlist.Memberlist

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	stop   chan struct{}
	wg     sync.WaitGroup
	leave  sync.Once
	tellMu sync.Mutex // held while memberlist is told something of this node
	close  sync.Once
	closed error
	// joining admits one exchange at a time: what one learns the next need not ask.
	joining chan struct{}
}

// Start listens and tells whoever asks; it asks nobody yet. The owner has to Close it.
func Start(cfg Config) (*Gossip, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	g := &Gossip{cfg: cfg, table: newTable(cfg), stop: make(chan struct{}), joining: make(chan struct{}, 1)}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	lines := &logHandler{cfg.Logger.Handler(), g.table.hear}
	var err error
	if g.transport, err = newTransport(netip.MustParseAddrPort(cfg.ListenAddr), cfg.AdvertiseAddr, lines); err != nil {
		g.cancel()
		return nil, err
	}
	if g.list, err = memberlist.Create(g.listConfig(lines)); err != nil {
		g.cancel()
		return nil, errors.Join(fmt.Errorf("gossip: start memberlist: %w", err), g.transport.Shutdown())
	}
	g.wg.Add(2)
	go func() {
		defer g.wg.Done()
		g.table.deliver(g.stop)
	}()
	go func() {
		defer g.wg.Done()
		g.rejoin()
	}()
	return g, nil
}

// listConfig is memberlist's profile for a LAN with the differences that busy hosts want;
// DESIGN.md says why.
func (g *Gossip) listConfig(log slog.Handler) *memberlist.Config {
	t := g.cfg.Timing
	c := memberlist.DefaultLANConfig()
	c.Name, c.Label, c.SecretKey = g.table.self, g.cfg.ClusterID, slices.Clone(g.cfg.Key[:])
	c.Transport = g.transport
	c.BindPort, c.AdvertisePort = int(g.transport.advertise.Port()), int(g.transport.advertise.Port())
	c.Delegate, c.Events, c.Alive, c.Conflict, c.Ping = g.table, g.table, g.table, g.table, g.table
	c.Logger = slog.NewLogLogger(log, slog.LevelDebug)

	c.ProbeInterval, c.ProbeTimeout = t.ProbeInterval, t.ProbeTimeout
	c.SuspicionMult, c.AwarenessMaxMultiplier = t.SuspicionMult, t.AwarenessMax
	c.GossipInterval, c.PushPullInterval, c.TCPTimeout = t.GossipInterval, t.PushPullInterval, t.StreamTimeout
	c.GossipToTheDeadTime = max(4*t.PushPullInterval, time.Minute)
	c.DeadNodeReclaimTime = time.Nanosecond
	c.EnableCompression = false
	c.RequireNodeNames = false
	return c
}

// Addr is where this node gossips, as others reach it.
func (g *Gossip) Addr() netip.AddrPort { return g.transport.advertise }

// Members lists the other nodes that were ever heard, by their ids. Those that are dead
// or left stay until they are forgotten.
func (g *Gossip) Members() []Member { return g.table.list() }

// Forget drops what is known of a node's incarnations but the given one; 0 drops all.
func (g *Gossip) Forget(nodeID, except uint64) { g.table.forget(nodeID, except) }

// Stats of a node.
type Stats struct {
	Alive, Suspect, Dead, Left               int // other nodes
	PacketsIn, PacketsOut, BytesIn, BytesOut uint64
	StreamsIn, StreamsOut, StreamsRefused    uint64
	RefusedLabel, RefusedKey, RefusedMember  uint64
	Conflicts                                uint64 // two processes that gossip as one node
	// Health is memberlist's opinion of this node's own timeliness; 0 is good.
	Health int
}

// Stats counts since Start.
func (g *Gossip) Stats() Stats {
	t := g.transport
	s := Stats{
		PacketsIn: t.packetsIn.Load(), PacketsOut: t.packetsOut.Load(), BytesIn: t.bytesIn.Load(), BytesOut: t.bytesOut.Load(),
		StreamsIn: t.streamsIn.Load(), StreamsOut: t.streamsOut.Load(), StreamsRefused: t.streamsRefused.Load(),
		Health: g.list.GetHealthScore(),
	}
	g.table.mu.Lock()
	defer g.table.mu.Unlock()
	mu := &g.table.mu
	s.RefusedLabel, s.RefusedKey, s.RefusedMember, s.Conflicts = mu.refusedLabel, mu.refusedKey, mu.refusedMember, mu.conflicts
	for _, m := range mu.members {
		switch m.State {
		case Alive:
			s.Alive++
		case Suspect:
			s.Suspect++
		case Dead:
			s.Dead++
		case Left:
			s.Left++
		}
	}
	return s
}

// Update tells the others something new of this node; the ids of m do not count. ErrConfig:
// it is too large, and nothing was changed. It does not wait for the others to hear it.
func (g *Gossip) Update(m Meta) error {
	c := g.cfg
	c.Meta = m
	m = c.withDefaults().Meta
	if _, err := m.encode(); err != nil {
		return err
	}
	if !g.enter() {
		return ErrClosed
	}
	defer g.wg.Done()
	g.tell(m, time.Nanosecond)
	return nil
}

// enter makes Close wait for wg.Done; false: it was called already.
func (g *Gossip) enter() bool {
	g.table.mu.Lock()
	defer g.table.mu.Unlock()
	if g.table.mu.closed {
		return false
	}
	g.wg.Add(1)
	return true
}

// tell sets this node's metadata and lets memberlist spread it, waiting for at most so
// long until it was handed on.
func (g *Gossip) tell(m Meta, wait time.Duration) (handedOn bool) {
	g.tellMu.Lock()
	defer g.tellMu.Unlock()
	g.table.mu.Lock()
	g.table.mu.meta = m
	g.table.mu.Unlock()
	return g.list.UpdateNode(wait) == nil
}

// Leave tells the others that this node stops, so that they do not take it for dead, and
// waits until they were told or ctx ends. Close comes next, and waits for it.
func (g *Gossip) Leave(ctx context.Context) error {
	err := error(nil)
	g.leave.Do(func() {
		if !g.enter() {
			err = ErrClosed
			return
		}
		limit := g.cfg.Timing.StreamTimeout
		if at, ok := ctx.Deadline(); ok {
			limit = max(time.Millisecond, min(limit, time.Until(at)))
		}
		done := make(chan bool, 1)
		go func() {
			defer g.wg.Done()
			g.table.mu.Lock()
			m := g.table.mu.meta
			g.table.mu.Unlock()
			m.Leaving = true
			told := g.tell(m, limit/2)
			done <- g.list.Leave(limit/2) == nil && told
		}()
		select {
		case told := <-done:
			if !told {
				err = fmt.Errorf("%w: that this node leaves was not handed on within %v", ErrUnreachable, limit)
			}
		case <-ctx.Done():
			err = ctx.Err()
		}
	})
	return err
}

// Close stops at once: to the others this node dies, if it did not leave. It returns when
// no event will come any more.
func (g *Gossip) Close() error {
	g.close.Do(func() {
		g.table.mu.Lock()
		g.table.mu.closed = true
		g.table.mu.Unlock()
		g.cancel()
		close(g.stop)
		// A Leave under way uses the list, which panics when it is told so after its end.
		g.transport.cancelStreams()
		g.wg.Wait()
		g.closed = g.list.Shutdown()
	})
	return g.closed
}

// Join looks for nodes of this cluster at HOST:PORT, one after the other; a name may stand
// for several addresses, and this node's own are left out. It returns how many others
// answered; where none did, the error tells why, of each: ErrForeign where one belongs to
// another cluster or has another key, ErrUnreachable where nobody answers or a name
// resolves to nothing, ErrConfig where an address is none.
func (g *Gossip) Join(ctx context.Context, hostPorts ...string) (int, error) {
	select {
	case g.joining <- struct{}{}:
		defer func() { <-g.joining }()
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-g.ctx.Done():
		return 0, ErrClosed
	}
	var errs []error
	var addrs []netip.AddrPort
	for _, hp := range hostPorts {
		found, err := g.resolve(ctx, hp)
		if err != nil {
			errs = append(errs, err)
		}
		for _, a := range found {
			if !slices.Contains(addrs, a) && !g.own(a) {
				addrs = append(addrs, a)
			}
		}
	}
	n := 0
	for _, a := range addrs {
		if g.ctx.Err() != nil {
			return n, ErrClosed
		}
		if ctx.Err() != nil {
			errs = append(errs, ctx.Err())
			break
		}
		if _, err := g.list.Join([]string{a.String()}); err != nil {
			errs = append(errs, g.explain(a, err))
			continue
		}
		n++
	}
	if n > 0 {
		return n, nil
	}
	return 0, errors.Join(errs...)
}

// explain makes a sentence of what memberlist says about an attempt; it has no errors to
// tell apart, only texts.
func (g *Gossip) explain(a netip.AddrPort, err error) error {
	text := err.Error()
	has := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(text, p) })
	}
	switch {
	case has("no installed keys", "not encrypted", "encryption is not configured"):
		return fmt.Errorf("%w: the node at %s has another gossip key: give this node the key of the cluster that it is to join", ErrForeign, a)
	case has("EOF", "connection reset by peer"):
		return fmt.Errorf("%w: who answers at %s hung up on a node of cluster %s: it belongs to another cluster, or is no gossip port of kvd", ErrForeign, a, g.cfg.ClusterID)
	}
	return fmt.Errorf("%w at %s: %s", ErrUnreachable, a, strings.Join(strings.Fields(text), " "))
}

// resolve a HOST:PORT to addresses.
func (g *Gossip) resolve(ctx context.Context, hostPort string) ([]netip.AddrPort, error) {
	if a, err := netip.ParseAddrPort(hostPort); err == nil {
		return []netip.AddrPort{netip.AddrPortFrom(a.Addr().Unmap(), a.Port())}, nil
	}
	host, portText, err := net.SplitHostPort(hostPort)
	var port int
	if err == nil {
		port, err = net.DefaultResolver.LookupPort(ctx, "tcp", portText)
	}
	if err != nil || host == "" || port == 0 {
		return nil, fmt.Errorf("%w: %q is no place to gossip with: want HOST:PORT", ErrConfig, hostPort)
	}
	found, err := g.cfg.Lookup(ctx, host)
	var out []netip.AddrPort
	for _, f := range found {
		if a, perr := netip.ParseAddr(f); perr == nil {
			out = append(out, netip.AddrPortFrom(a.Unmap(), uint16(port)))
		}
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: the name %q resolves to nothing: %w", ErrUnreachable, host, err)
	case len(out) == 0:
		return nil, fmt.Errorf("%w: the name %q resolves to no address: is there a node behind it?", ErrUnreachable, host)
	}
	return out, nil
}

// own tells whether this node itself is there: a name often stands for all nodes.
func (g *Gossip) own(a netip.AddrPort) bool {
	listen := netip.MustParseAddrPort(g.cfg.ListenAddr).Addr()
	if a == g.transport.advertise || a.Port() == uint16(g.transport.GetAutoBindPort()) && a.Addr() == listen {
		return true
	}
	if a.Port() != uint16(g.transport.GetAutoBindPort()) || !listen.IsUnspecified() {
		return false
	}
	local, _ := net.InterfaceAddrs() // without them one exchange with ourselves, which does no harm
	return slices.ContainsFunc(local, func(l net.Addr) bool {
		n, ok := l.(*net.IPNet)
		ip, _ := netip.AddrFromSlice(n.IP)
		return ok && ip.Unmap() == a.Addr()
	})
}

// rejoin looks, from time to time, for nodes that are not heard: memberlist forgets the
// dead after a while, so two halves of a cluster would not find together again by
// themselves; and it tells others where this node is now that still have it elsewhere.
func (g *Gossip) rejoin() {
	for {
		pause := g.cfg.Timing.RejoinInterval
		pause += rand.N(pause/4 + 1)
		timer := g.cfg.Clock.NewTimer(pause)
		select {
		case <-timer.C():
		case <-g.stop:
			timer.Stop()
			return
		}
		targets := g.table.missing()
		if g.table.alone() {
			targets = append(targets, g.cfg.Seeds(g.ctx)...)
		}
		for _, a := range targets {
			if g.ctx.Err() != nil {
				return
			}
			if _, err := g.Join(g.ctx, a); err != nil {
				g.cfg.Logger.Debug("gossip did not reach a node", "at", a, "err", err)
			}
		}
	}
}

// alone tells whether no other node answers.
func (t *table) alone() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range t.mu.members {
		if m.State == Alive || m.State == Suspect {
			return false
		}
	}
	return true
}

// missing chooses one node, at random, that is dead or has moved and was not reached, and
// one that lives where others have this node at an old address.
func (t *table) missing() (targets []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var lost, live []string
	for _, m := range t.mu.members {
		switch m.State {
		case Dead, Suspect:
			lost = append(lost, m.GossipAddr.String())
		case Alive:
			live = append(live, m.GossipAddr.String())
		}
	}
	if len(lost) > 0 {
		targets = append(targets, lost[rand.IntN(len(lost))])
	}
	if t.mu.stale && len(live) > 0 {
		t.mu.stale = false // it is said again if that is so still
		targets = append(targets, live...)
	}
	return targets
}
