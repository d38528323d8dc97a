package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"
)

// TLSFiles name what a client needs for TLS; all files are PEM.
type TLSFiles struct {
	// CA holds the certificates of those who sign the nodes'; default: the system's. It is
	// read once: before nodes get certificates of another CA, clients that run on need a
	// file with both.
	CA string
	// Cert and Key are the client's own, for nodes that ask for one: both or none. They
	// are read again when they change.
	Cert, Key string
	// ServerName is what the nodes' certificates must be for; default: the host of the
	// address that is dialled.
	ServerName string
}

// LoadTLS reads the files. Errors: ErrInvalid, with the file's name.
func LoadTLS(f TLSFiles) (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, ServerName: f.ServerName}
	if f.CA != "" {
		pem, err := os.ReadFile(f.CA)
		if err != nil {
			return nil, fmt.Errorf("%w: CA: %w", ErrInvalid, err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%w: CA file %s: no certificate in it: want PEM", ErrInvalid, f.CA)
		}
	}
	if (f.Cert == "") != (f.Key == "") {
		return nil, fmt.Errorf("%w: a certificate or a key without the other: want both or none", ErrInvalid)
	}
	if f.Cert != "" {
		p := &keyPair{cert: f.Cert, key: f.Key}
		if _, err := p.get(); err != nil {
			return nil, err
		}
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return p.get() }
	}
	return cfg, nil
}

// stamp tells whether a file has changed.
type stamp struct {
	modified time.Time
	size     int64
}

func stampOf(file string) (stamp, error) {
	info, err := os.Stat(file)
	if err != nil {
		return stamp{}, err
	}
	return stamp{info.ModTime(), info.Size()}, nil
}

// keyPair is a certificate that is read again when its files change. While they do not
// fit together, as in the middle of their renewal, the last good one stays.
type keyPair struct {
	cert, key string
	mu        struct {
		sync.Mutex
		of   [2]stamp
		good *tls.Certificate
	}
}

func (p *keyPair) get() (*tls.Certificate, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, cerr := stampOf(p.cert)
	k, kerr := stampOf(p.key)
	now := [2]stamp{c, k}
	if p.mu.good != nil && now == p.mu.of {
		return p.mu.good, nil
	}
	err := errors.Join(cerr, kerr)
	if err == nil {
		var pair tls.Certificate
		if pair, err = tls.LoadX509KeyPair(p.cert, p.key); err == nil {
			p.mu.of, p.mu.good = now, &pair
		}
	}
	if p.mu.good == nil {
		return nil, fmt.Errorf("%w: certificate %s with key %s: %w", ErrInvalid, p.cert, p.key, err)
	}
	return p.mu.good, nil
}

// lookEvery is how often a token's file is looked at for a change.
const lookEvery = time.Second

// bearer sends the token with each call. It implements credentials.PerRPCCredentials.
type bearer struct {
	file string // empty: the token is fixed
	log  *slog.Logger
	mu   struct {
		sync.Mutex
		token  string
		of     stamp
		looked time.Time
		failed bool // to read the file again; was logged
	}
}

// newBearer makes what authenticates the client; nil where nothing does.
func newBearer(cfg *Config) (*bearer, error) {
	if cfg.Token == "" && cfg.TokenFile == "" {
		return nil, nil
	}
	b := &bearer{file: cfg.TokenFile, log: cfg.Logger}
	if b.log == nil {
		b.log = slog.New(slog.DiscardHandler)
	}
	b.mu.token = cfg.Token
	if b.file != "" {
		if err := b.readLocked(); err != nil {
			return nil, err
		}
		if why := OpenSecret(b.file); why != "" {
			b.log.Warn(why)
		}
		return b, nil
	}
	return b, checkToken("Config.Token", cfg.Token)
}

// OpenSecret is a sentence about a file of a token or of a private key that others than
// its owner can read; "" where all is well, or the file can not be looked at.
func OpenSecret(file string) string {
	info, err := os.Stat(file)
	if err != nil || !info.Mode().IsRegular() || info.Mode().Perm()&0o077 == 0 {
		return ""
	}
	return fmt.Sprintf("%s has mode %04o, so others than its owner can read it: chmod 600 %s, and take what it holds for known", file, info.Mode().Perm(), file)
}

// checkToken keeps out what could not be sent as it is.
func checkToken(from, token string) error {
	if i := strings.IndexFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }); i >= 0 {
		return fmt.Errorf("%w: token of %s: byte %d can not be part of a token: want one line of printable ASCII without spaces", ErrInvalid, from, i)
	}
	return nil
}

// readLocked reads the file. The text of its errors never holds what is in it.
func (b *bearer) readLocked() error {
	of, err := stampOf(b.file)
	var content []byte
	if err == nil {
		content, err = os.ReadFile(b.file)
	}
	if err != nil {
		return fmt.Errorf("%w: token file: %w", ErrInvalid, err)
	}
	token := strings.TrimSpace(string(content))
	if token == "" {
		return fmt.Errorf("%w: token file %s is empty", ErrInvalid, b.file)
	}
	if err := checkToken("file "+b.file, token); err != nil {
		return err
	}
	b.mu.token, b.mu.of = token, of
	return nil
}

// current is the token as of now. A file that cannot be read, or holds no token, leaves
// the last one in use.
func (b *bearer) current() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := time.Now(); b.file != "" && now.Sub(b.mu.looked) >= lookEvery {
		b.mu.looked = now
		of, err := stampOf(b.file)
		if err == nil && of != b.mu.of {
			err = b.readLocked()
		}
		if err != nil && !b.mu.failed {
			b.log.Warn("the token is not renewed, the last one stays in use", slog.Any("error", err))
		}
		b.mu.failed = err != nil
	}
	return b.mu.token
}

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b *bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.current()}, nil
}

// RequireTransportSecurity is false: checkPlaintext has seen to it, address by address.
func (b *bearer) RequireTransportSecurity() bool { return false }

// checkPlaintext keeps a token from being sent to another host in the clear.
func (c *Config) checkPlaintext(addr string) error {
	if c.Token == "" && c.TokenFile == "" || c.TLS != nil || c.AllowPlaintextToken || isLoopback(addr) {
		return nil
	}
	return fmt.Errorf("%w: endpoint %s: a token is not sent to another host without TLS: configure TLS, or set AllowPlaintextToken (kvctl: --allow-plaintext-token) where the network is trusted", ErrInvalid, addr)
}

// isLoopback tells whether the address names this host whatever the resolver says.
func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

// FromEnv fills what cfg leaves open from the environment: KVD_ENDPOINTS (comma
// separated), KVD_TOKEN or KVD_TOKEN_FILE, KVD_CA, KVD_CERT, KVD_KEY, KVD_SERVER_NAME (see
// TLSFiles; any of them means TLS), and KVD_TLS=1 for TLS with the system's certificates.
// Errors: ErrInvalid.
func FromEnv(cfg Config) (Config, error) {
	if e := os.Getenv("KVD_ENDPOINTS"); len(cfg.Endpoints) == 0 && e != "" {
		cfg.Endpoints = strings.Split(e, ",")
	}
	if cfg.Token == "" && cfg.TokenFile == "" {
		cfg.Token, cfg.TokenFile = os.Getenv("KVD_TOKEN"), os.Getenv("KVD_TOKEN_FILE")
	}
	if cfg.TLS != nil {
		return cfg, nil
	}
	f := TLSFiles{CA: os.Getenv("KVD_CA"), Cert: os.Getenv("KVD_CERT"), Key: os.Getenv("KVD_KEY"), ServerName: os.Getenv("KVD_SERVER_NAME")}
	if f == (TLSFiles{}) && os.Getenv("KVD_TLS") != "1" {
		return cfg, nil
	}
	var err error
	cfg.TLS, err = LoadTLS(f)
	return cfg, err
}
