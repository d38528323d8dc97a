package client

import (
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// maxMessageBytes bounds one gRPC message: a page of a list, a value with room to
// spare.
const maxMessageBytes = 64 << 20

// flowWindow is how many bytes of answers may be on their way, on a stream and on a
// connection. It is fixed, and as large as gRPC would make it: gRPC measures what it
// needs by a ping for every few messages, which costs a node as much as a small write.
const flowWindow = 16 << 20

// remote is the gRPC side of one address.
type remote struct {
	addr    string
	cc      grpc.ClientConnInterface
	kv      kvdv1.KVClient
	access  kvdv1.AccessClient
	cluster kvdv1.ClusterClient
	writes  writes
}

// pool keeps one gRPC connection for each address. Connections are made when they
// are first used.
type pool struct {
	cfg    Config
	bearer *bearer // nil: calls carry no token
	mu     struct {
		sync.Mutex
		remotes map[string]*remote
		closed  bool
	}
}

func newPool(cfg Config) (*pool, error) {
	b, err := newBearer(&cfg)
	if err != nil {
		return nil, err
	}
	p := &pool{cfg: cfg, bearer: b}
	p.mu.remotes = make(map[string]*remote)
	return p, nil
}

func (p *pool) get(addr string) (*remote, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		return nil, ErrClosed
	}
	if r := p.mu.remotes[addr]; r != nil {
		return r, nil
	}
	if err := p.cfg.checkPlaintext(addr); err != nil {
		return nil, err
	}
	cc, err := p.connect(addr)
	if err != nil {
		return nil, fmt.Errorf("%w: endpoint %q: %v", ErrInvalid, addr, err)
	}
	r := &remote{
		addr: addr, cc: cc,
		kv: kvdv1.NewKVClient(cc), access: kvdv1.NewAccessClient(cc), cluster: kvdv1.NewClusterClient(cc),
	}
	p.mu.remotes[addr] = r
	return r, nil
}

func (p *pool) connect(addr string) (grpc.ClientConnInterface, error) {
	if p.cfg.Connect != nil {
		return p.cfg.Connect(addr)
	}
	return grpc.NewClient("passthrough:///"+addr, p.options()...)
}

func (p *pool) options() []grpc.DialOption {
	creds := insecure.NewCredentials()
	if p.cfg.TLS != nil {
		creds = credentials.NewTLS(p.cfg.TLS)
	}
	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithUserAgent("kvd-go"),
		// Retrying is ours: only we know which writes may be repeated.
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithInitialWindowSize(flowWindow), grpc.WithInitialConnWindowSize(flowWindow),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: p.cfg.ConnectTimeout,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
	}
	if p.bearer != nil {
		opts = append(opts, grpc.WithPerRPCCredentials(p.bearer))
	}
	return opts
}

// close ends every call.
func (p *pool) close() {
	p.mu.Lock()
	remotes := p.mu.remotes
	p.mu.remotes = nil
	p.mu.closed = true
	p.mu.Unlock()
	for _, r := range remotes {
		if c, ok := r.cc.(io.Closer); ok {
			_ = c.Close() // only says that it was closed before
		}
	}
}
