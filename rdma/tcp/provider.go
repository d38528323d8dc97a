package tcp

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// Provider makes targets and initiators over TCP. Its zero value serves
// loopback only.
type Provider struct {
	// ListenAddr is where a target listens, host:port. Default "127.0.0.1:0": this
	// host only, a free port.
	ListenAddr string
	// AdvertiseAddr is what clients are told to dial, host or host:port; without a
	// port it is the listener's. Default: the listening address, or, where that is a
	// wildcard, every unicast address of the host.
	AdvertiseAddr string
	// ServerTLS, when set, makes a target speak TLS 1.3 and nothing else. It is cloned.
	// To renew certificates while it runs, set GetCertificate, or GetConfigForClient,
	// which renews the client CAs too; both are asked for each connection. Clients are
	// asked for certificates (mTLS) by ClientAuth and ClientCAs. The token of the answer
	// stays what authorizes: a certificate alone reads nothing.
	ServerTLS *tls.Config
	// ServerName is told to clients in the answer: a name that is in the certificate.
	// Default: none where the certificate is for all advertised addresses, else the first
	// of its names. (For that the functions of ServerTLS are called with a hello that is
	// nobody's and has no Conn.) Without a name, and without a ServerName in their own
	// configuration, clients verify the dialled host.
	ServerName string
	// ClientTLS, when set, makes an initiator speak TLS 1.3 and refuse a target that
	// does not; without it, one that does is refused. It is cloned. Its ServerName wins
	// over the target's. Renew a client's certificate by GetClientCertificate.
	ClientTLS *tls.Config

	// MaxConnections of a target, those accepted but not yet connected included.
	// Beyond it Accept gives ErrExhausted. Default 4096.
	MaxConnections int
	// MaxReadBytes is the longest READ that a target answers. Default 16 MiB; at most
	// 4 GiB - 1.
	MaxReadBytes int64
	// MaxInFlight is how many batches may be outstanding on one connection; a Post
	// beyond it completes with ErrExhausted. Default 16384.
	MaxInFlight int

	// AcceptTimeout is how long a client has to connect after Accept. Default 10 s.
	AcceptTimeout time.Duration
	// HandshakeTimeout bounds the exchange on a fresh socket, TLS included, at the
	// target. Default 5 s.
	HandshakeTimeout time.Duration
	// DeadPeerTimeout is how long a peer may leave sent bytes, or probes on a silent
	// connection, without an acknowledgement before the connection is given up.
	// Lower finds a dead host sooner and mistakes a congested one for it. A stopped
	// process still acknowledges and is not found by it. Default 30 s; negative: off.
	DeadPeerTimeout time.Duration
}

const defaultConnectTimeout = 5 * time.Second

var _ rdma.Provider = Provider{}

// Name is "tcp".
func (p Provider) Name() string { return "tcp" }

func (p Provider) withDefaults() Provider {
	setDefault(&p.ListenAddr, "127.0.0.1:0")
	setDefault(&p.MaxConnections, 4096)
	setDefault(&p.MaxReadBytes, 16<<20)
	setDefault(&p.MaxInFlight, 16384)
	setDefault(&p.AcceptTimeout, 10*time.Second)
	setDefault(&p.HandshakeTimeout, 5*time.Second)
	setDefault(&p.DeadPeerTimeout, 30*time.Second)
	return p
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Validate checks the settings and changes nothing.
func (p Provider) Validate() error {
	p = p.withDefaults()
	var errs []error
	bad := func(field string, got any, want string) {
		errs = append(errs, fmt.Errorf("tcp: %s is %v: want %s", field, got, want))
	}
	if _, _, err := net.SplitHostPort(p.ListenAddr); err != nil {
		bad("ListenAddr", p.ListenAddr, "host:port")
	}
	if len(p.AdvertiseAddr) > maxAddrLen-len(":65535") {
		bad("AdvertiseAddr", p.AdvertiseAddr, "at most 249 bytes")
	}
	if p.MaxConnections < 0 {
		bad("MaxConnections", p.MaxConnections, "more than 0")
	}
	if p.MaxReadBytes < 0 || p.MaxReadBytes > math.MaxUint32 {
		bad("MaxReadBytes", p.MaxReadBytes, "1 to 4 GiB - 1")
	}
	if p.MaxInFlight < 0 {
		bad("MaxInFlight", p.MaxInFlight, "more than 0")
	}
	if p.AcceptTimeout < 0 {
		bad("AcceptTimeout", p.AcceptTimeout, "more than 0")
	}
	if p.HandshakeTimeout < 0 {
		bad("HandshakeTimeout", p.HandshakeTimeout, "more than 0")
	}
	if len(p.ServerName) > maxNameLen {
		bad("ServerName", p.ServerName, fmt.Sprintf("at most %d bytes", maxNameLen))
	}
	if t := p.ServerTLS; t != nil && t.GetConfigForClient == nil {
		if len(t.Certificates) == 0 && t.GetCertificate == nil {
			bad("ServerTLS", "without a certificate", "one")
		}
		if t.ClientAuth >= tls.VerifyClientCertIfGiven && t.ClientCAs == nil {
			// crypto/tls would take the system's: any web server's certificate.
			bad("ServerTLS", "without ClientCAs, and is to verify clients", "the CA that signs clients' certificates")
		}
	}
	return errors.Join(errs...)
}

// keepAlive probes a silent peer so that it is given up after about
// DeadPeerTimeout.
func (p Provider) keepAlive() net.KeepAliveConfig {
	if p.DeadPeerTimeout < 0 {
		return net.KeepAliveConfig{}
	}
	step := max(p.DeadPeerTimeout/4, time.Second)
	return net.KeepAliveConfig{Enable: true, Idle: step, Interval: step, Count: 3}
}

func orDiscard(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l
}
