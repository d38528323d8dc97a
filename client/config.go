package client

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"

	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/rdma"
)

// Level is the promise of a read.
type Level uint8

const (
	// LevelDefault is Config.Level.
	LevelDefault Level = iota
	// Linearizable sees every write acknowledged, and every value revealed, before
	// the read started.
	Linearizable
	// Session sees this Client's own writes and never goes back behind what this
	// Client has seen. Any replica may answer.
	Session
	// Stale sees committed state, perhaps an old one. See WithMaxLag for a bound.
	Stale
)

// String is the word used in flags, logs and metrics.
func (l Level) String() string {
	switch l {
	case Linearizable:
		return "linearizable"
	case Session:
		return "session"
	case Stale:
		return "stale"
	default:
		return "default"
	}
}

// ParseLevel reads what String writes; "" is LevelDefault.
func ParseLevel(s string) (Level, error) {
	for _, l := range []Level{Linearizable, Session, Stale} {
		if s == l.String() {
			return l, nil
		}
	}
	if s == "" || s == "default" {
		return LevelDefault, nil
	}
	return LevelDefault, fmt.Errorf("%w: level %q: want linearizable, session or stale", ErrInvalid, s)
}

// Choices of Config.Transport beside the name of any configured provider ("shm",
// "tcp", ...).
const (
	// TransportAuto takes shm for nodes on the same host, verbs for others, and tcp where
	// neither works.
	TransportAuto = "auto"
	// TransportGRPC reads nothing one-sidedly.
	TransportGRPC = "grpc"
)

// Config of a Client. Endpoints is the only field without a default.
type Config struct {
	// Endpoints are gRPC addresses (host:port) of some nodes of the cluster. The
	// others are learnt from them.
	Endpoints []string
	// Namespace; default "default".
	Namespace string
	// ClusterID, when set, must be the cluster's: a node of another one is refused
	// with ErrWrongCluster.
	ClusterID string
	// ClientName is shown in the nodes' logs; default program, host and pid.
	ClientName string

	// Transport for one-sided READs: TransportAuto (the default), the name of a
	// provider, or TransportGRPC. With a provider's name nodes that do not serve it
	// are read over gRPC, which Stats and one log line show.
	Transport string
	// RequireRDMA makes Dial fail, with ErrNoRDMA and the reason, unless every node that
	// answers can be read by an RDMA device; shared memory does not count. A node whose
	// device is lost later is read over gRPC until it is back, never over tcp.
	RequireRDMA bool
	// Providers that may be used, in order of preference; nil: all that work on this
	// host. The initiators made from them are closed by Client.Close.
	Providers []rdma.Provider
	// HostID says on which kernel this process runs; shared memory is tried for
	// nodes with the same one. Default: the shm provider's.
	HostID string

	// Level of reads that name none; default Linearizable.
	Level Level

	// Token authenticates the client to nodes that want one. TokenFile names a file that
	// holds it instead; it is looked at each second and read again when it changed, and a
	// session that is opened from then on uses the new one. Set one of the two at most.
	Token, TokenFile string
	// AllowPlaintextToken lets the token be sent to other hosts without TLS, where
	// everybody on the way can take it. Loopback needs no permission.
	AllowPlaintextToken bool
	// TLS, when set, secures gRPC and READs over tcp. See LoadTLS.
	TLS *tls.Config
	// RequireTLS refuses to work without TLS, and to READ by transports whose bytes could
	// be read along on the network: verbs, and tcp without TLS. AllowPlaintextReads
	// excepts the READs.
	RequireTLS          bool
	AllowPlaintextReads bool

	// DialTimeout bounds Dial when its context has no earlier deadline, and each
	// attempt to reach one node is bounded by ConnectTimeout. Defaults 5 s and 2 s.
	DialTimeout    time.Duration
	ConnectTimeout time.Duration
	// CallTimeout bounds a call whose context has no deadline; default 5 s.
	CallTimeout time.Duration
	// RetryMin and RetryMax bound the pause between attempts, which grows from one
	// to the other with jitter; defaults 2 ms and 200 ms.
	RetryMin, RetryMax time.Duration
	// StallTimeout is how long a READ may stay unanswered before its connection is given
	// up and made anew; default 3 s. A process that is stopped for less than that
	// keeps its connections. Gets do not wait for it: they use other ways meanwhile.
	StallTimeout time.Duration
	// HedgeMin is the shortest time after which a slow voter is given up for another;
	// default 1 ms. Lower: more READs; higher: a longer tail when a node dies.
	HedgeMin time.Duration

	// CacheEntries bounds the remembered locations, about 64 bytes each; default
	// 1<<18. Negative: none are remembered.
	CacheEntries int

	// Connect, when set, gives the way to the services of the node at an address in place
	// of a connection of gRPC: for programs that run nodes in their own process. With a
	// Closer's method Close it is closed with the Client.
	Connect func(addr string) (grpc.ClientConnInterface, error)
	// Jitter spreads the pauses between attempts: numbers from 0 to below 1, even. id tells
	// what is tried again: a shard, a node, a boot. It is called from several goroutines.
	// Default math/rand/v2's.
	Jitter func(id uint64) float64

	Logger *slog.Logger // default: discards
	Clock  clock.Clock  // for expiry, freshness and pauses; default the host's
}

func (c Config) withDefaults() Config {
	if c.Namespace == "" {
		c.Namespace = "default"
	}
	if c.ClientName == "" {
		c.ClientName = defaultClientName()
	}
	if c.Transport == "" {
		c.Transport = TransportAuto
	}
	if c.Level == LevelDefault {
		c.Level = Linearizable
	}
	if c.HostID == "" {
		c.HostID = defaultHostID()
	}
	setDefault(&c.DialTimeout, 5*time.Second)
	setDefault(&c.ConnectTimeout, 2*time.Second)
	setDefault(&c.CallTimeout, 5*time.Second)
	setDefault(&c.RetryMin, 2*time.Millisecond)
	setDefault(&c.RetryMax, 200*time.Millisecond)
	setDefault(&c.StallTimeout, 3*time.Second)
	setDefault(&c.HedgeMin, time.Millisecond)
	setDefault(&c.CacheEntries, 1<<18)
	if c.Jitter == nil {
		c.Jitter = func(uint64) float64 { return rand.Float64() }
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Clock == nil {
		c.Clock = clock.System
	}
	return c
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Validate tells what cannot work; every error is an ErrInvalid.
func (c Config) Validate() error {
	if len(c.Endpoints) == 0 {
		return fmt.Errorf("%w: no endpoints: want at least one host:port of a kvd node", ErrInvalid)
	}
	var errs []error
	for _, e := range c.Endpoints {
		if _, _, err := net.SplitHostPort(e); err != nil {
			errs = append(errs, fmt.Errorf("%w: endpoint %q: want host:port (%v)", ErrInvalid, e, err))
		}
	}
	if c.Level > Stale {
		errs = append(errs, fmt.Errorf("%w: level %d: want Linearizable, Session or Stale", ErrInvalid, c.Level))
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"DialTimeout", c.DialTimeout}, {"ConnectTimeout", c.ConnectTimeout}, {"CallTimeout", c.CallTimeout},
		{"RetryMin", c.RetryMin}, {"RetryMax", c.RetryMax}, {"HedgeMin", c.HedgeMin},
		{"StallTimeout", c.StallTimeout},
	} {
		if d.value < 0 {
			errs = append(errs, fmt.Errorf("%w: %s %v: want more than 0", ErrInvalid, d.name, d.value))
		}
	}
	for _, e := range c.Endpoints {
		if err := c.checkPlaintext(e); err != nil {
			errs = append(errs, err)
		}
	}
	if c.Token != "" && c.TokenFile != "" {
		errs = append(errs, fmt.Errorf("%w: both a token and a token file (%s): want one", ErrInvalid, c.TokenFile))
	}
	if c.RequireTLS && c.TLS == nil {
		errs = append(errs, fmt.Errorf("%w: RequireTLS without TLS: want a TLS configuration", ErrInvalid))
	}
	if c.RetryMin > c.RetryMax && c.RetryMax > 0 {
		errs = append(errs, fmt.Errorf("%w: RetryMin %v is above RetryMax %v", ErrInvalid, c.RetryMin, c.RetryMax))
	}
	return errors.Join(errs...)
}

func defaultClientName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s@%s:%d", filepath.Base(os.Args[0]), host, os.Getpid())
}
