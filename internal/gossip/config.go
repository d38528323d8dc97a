package gossip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/kvd-io/kvd/internal/clock"
)

var (
	// ErrConfig: the configuration can not be used. The text says what to correct.
	ErrConfig = errors.New("gossip: configuration")
	// ErrForeign: who answers belongs to another cluster, or has another key. Trying again
	// is of no use; nothing was changed on either side.
	ErrForeign = errors.New("gossip: refused")
	// ErrUnreachable: nobody answers, or a name resolves to nothing. It may be tried again.
	ErrUnreachable = errors.New("gossip: nobody reached")
	// ErrClosed: Close was called.
	ErrClosed = errors.New("gossip: closed")
)

// Config of a node. Fields without a default must be set.
type Config struct {
	ClusterID   string // the label of every packet
	NodeID      uint64
	Incarnation uint64 // the node's in its cluster: it never changes, and no other has it
	// Generation has to be larger than at each earlier start of this node: it is what tells
	// a node that moved from an old message.
	Generation uint64
	Key        Key

	// ListenAddr is IP:PORT for UDP and TCP; port 0 takes a free one. AdvertiseAddr is how
	// others reach it; default: what was bound.
	ListenAddr    string
	AdvertiseAddr string
	// Meta is what the others are told; its ids are filled in.
	Meta Meta

	// Seeds lists, whenever it is asked, where other nodes may be found, as HOST:PORT;
	// default: none. It is asked from time to time while no other node is heard.
	Seeds func(ctx context.Context) []string
	// Lookup finds the addresses of a host; default: the system's resolver.
	Lookup func(ctx context.Context, host string) ([]string, error)
	// Admit may refuse a node; default: every node that has the key and the label is let in.
	// It must not block nor call into the Gossip.
	Admit func(Meta) error
	// OnEvent is called for each change, by one goroutine; while it does not return, changes
	// of one node are put together. It must not call Close.
	OnEvent func(Event)

	Timing Timing // default: BusyLAN
	Logger *slog.Logger
	Clock  clock.Clock // default: the system's
}

// Timing of probes and gossip.
type Timing struct {
	// ProbeInterval is the pause between two probes, of one node each; ProbeTimeout is how
	// long an answer to the first packet may take before others are asked to try.
	ProbeInterval, ProbeTimeout time.Duration
	// SuspicionMult: a node that does not answer is dead after SuspicionMult * ProbeInterval,
	// times log10 of the number of nodes where that is above 1.
	SuspicionMult int
	// AwarenessMax: a node that is itself behind slows its probes up to so many times.
	AwarenessMax int
	// GossipInterval is the pause between two rounds of news, PushPullInterval that between
	// two exchanges of everything with one node.
	GossipInterval, PushPullInterval time.Duration
	// StreamTimeout bounds a connection.
	StreamTimeout time.Duration
	// RejoinInterval is the pause between attempts to reach nodes that are not heard.
	RejoinInterval time.Duration
}

// BusyLAN suits nodes of one site whose processors are busy. A node is dead some 15 to 20
// s after its last answer.
func BusyLAN() Timing {
	return Timing{
		ProbeInterval: 2 * time.Second, ProbeTimeout: time.Second, SuspicionMult: 6, AwarenessMax: 8,
		GossipInterval: 200 * time.Millisecond, PushPullInterval: 30 * time.Second,
		StreamTimeout: 10 * time.Second, RejoinInterval: 10 * time.Second,
	}
}

// Loopback suits tests, with all nodes on one machine.
func Loopback() Timing {
	return Timing{
		ProbeInterval: 200 * time.Millisecond, ProbeTimeout: 100 * time.Millisecond, SuspicionMult: 5, AwarenessMax: 2,
		GossipInterval: 20 * time.Millisecond, PushPullInterval: time.Second,
		StreamTimeout: 2 * time.Second, RejoinInterval: 200 * time.Millisecond,
	}
}

func (c Config) withDefaults() Config {
	if c.Timing == (Timing{}) {
		c.Timing = BusyLAN()
	}
	if c.Seeds == nil {
		c.Seeds = func(context.Context) []string { return nil }
	}
	if c.Lookup == nil {
		c.Lookup = net.DefaultResolver.LookupHost
	}
	if c.Admit == nil {
		c.Admit = func(Meta) error { return nil }
	}
	if c.OnEvent == nil {
		c.OnEvent = func(Event) {}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Clock == nil {
		c.Clock = clock.System
	}
	c.Meta.NodeID, c.Meta.Incarnation, c.Meta.Generation, c.Meta.Leaving = c.NodeID, c.Incarnation, c.Generation, false
	return c
}

// maxLabel is the largest label, in bytes.
const maxLabel = 255

// Validate tells what is wrong with the configuration. It changes nothing.
func (c Config) Validate() error {
	c = c.withDefaults()
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrConfig, fmt.Sprintf(format, args...))
	}
	switch {
	case c.ClusterID == "" || len(c.ClusterID) > maxLabel:
		return bad("cluster id of %d bytes: want 1 to %d", len(c.ClusterID), maxLabel)
	case c.NodeID == 0 || c.Incarnation == 0 || c.Generation == 0:
		return bad("node %d with incarnation %016x and generation %d: want all of them above 0", c.NodeID, c.Incarnation, c.Generation)
	case c.Key == Key{}:
		return bad("the key is all zero")
	case c.Timing.ProbeInterval <= 0 || c.Timing.ProbeTimeout <= 0 || c.Timing.ProbeTimeout > c.Timing.ProbeInterval:
		return bad("probes every %v with a time-out of %v: want both above 0, and the time-out not above the pause", c.Timing.ProbeInterval, c.Timing.ProbeTimeout)
	case c.Timing.SuspicionMult < 1 || c.Timing.AwarenessMax < 1 || c.Timing.GossipInterval <= 0 || c.Timing.PushPullInterval <= 0 || c.Timing.StreamTimeout <= 0 || c.Timing.RejoinInterval <= 0:
		return bad("timing %+v: want all of it above 0", c.Timing)
	}
	listen, err := netip.ParseAddrPort(c.ListenAddr)
	if err != nil {
		return bad("listen address %q: want IP:PORT, such as 10.0.0.1:7946", c.ListenAddr)
	}
	if c.AdvertiseAddr != "" {
		if adv, err := netip.ParseAddrPort(c.AdvertiseAddr); err != nil || adv.Port() == 0 || adv.Addr().IsUnspecified() {
			return bad("advertise address %q: want the IP:PORT at which the others reach this node", c.AdvertiseAddr)
		}
	} else if listen.Addr().IsUnspecified() {
		return bad("listening on every address (%s): give the one that the others are to use (advertise)", c.ListenAddr)
	}
	if _, err := c.Meta.encode(); err != nil {
		return err
	}
	return nil
}
