package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
)

// TLSConfig names the files of a node's TLS. Without a certificate the node speaks plain
// text. The files are looked at for every connection, so a renewed certificate or CA is
// used without a restart; what can not be used is refused with a log line, and the old
// one kept.
type TLSConfig struct {
	// CertFile and KeyFile are PEM. The certificate serves clients and peers, and proves
	// this node to its peers; so it is valid, for servers and for clients, for the host by
	// which the peers know this node.
	CertFile, KeyFile string
	// ClientCAFile holds the CAs of clients' certificates.
	ClientCAFile string
	// ClientCerts tells whether clients must have one: "required", the default with a
	// ClientCAFile, or "optional".
	ClientCerts string
	// PeerCAFile holds the CAs of the nodes' certificates. A cluster of several nodes
	// needs it.
	PeerCAFile string
}

// Enabled tells whether the node speaks TLS.
func (c TLSConfig) Enabled() bool { return c.CertFile != "" }

const (
	clientCertsRequired = "required"
	clientCertsOptional = "optional"
)

func (c TLSConfig) validate(nodes int) error {
	switch {
	case !c.Enabled() && c != TLSConfig{}:
		return errors.New("TLS settings without tls-cert: give tls-cert and tls-key, or none of them")
	case !c.Enabled():
		return nil
	case c.KeyFile == "":
		return errors.New("tls-cert without tls-key: want both")
	case c.ClientCerts != "" && c.ClientCerts != clientCertsRequired && c.ClientCerts != clientCertsOptional:
		return fmt.Errorf("tls-client-certs %q: want required or optional", c.ClientCerts)
	case c.ClientCerts != "" && c.ClientCAFile == "":
		return fmt.Errorf("tls-client-certs %s without tls-client-ca: name the CAs of clients", c.ClientCerts)
	case nodes > 1 && c.PeerCAFile == "":
		return fmt.Errorf("TLS on a cluster of %d nodes without tls-peer-ca: the nodes know each other by certificates of a CA that you name there; it should sign nodes only", nodes)
	}
	return nil
}

// tlsMaterial is what one state of the files says. Immutable.
type tlsMaterial struct {
	cert    tls.Certificate
	leaf    *x509.Certificate
	clients *x509.CertPool // nil: no ClientCAFile
	peers   *x509.CertPool // nil: no PeerCAFile
	all     *x509.CertPool // both; nil: neither
}

func (c TLSConfig) load() (*tlsMaterial, error) {
	m := &tlsMaterial{}
	var err error
	if m.cert, err = tls.LoadX509KeyPair(c.CertFile, c.KeyFile); err != nil {
		return nil, fmt.Errorf("certificate %s with key %s: %w", c.CertFile, c.KeyFile, err)
	}
	m.leaf = m.cert.Leaf
	addTo := func(pool *x509.CertPool, file string) (*x509.CertPool, error) {
		if pool == nil {
			pool = x509.NewCertPool()
		}
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no PEM certificate: want those of one or more CAs", file)
		}
		return pool, nil
	}
	for _, ca := range []struct {
		file string
		pool **x509.CertPool
	}{{c.ClientCAFile, &m.clients}, {c.PeerCAFile, &m.peers}} {
		if ca.file == "" {
			continue
		}
		if *ca.pool, err = addTo(nil, ca.file); err != nil {
			return nil, err
		}
		if m.all, err = addTo(m.all, ca.file); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// fileState tells one content of a file from another without reading it.
type fileState struct {
	info fs.FileInfo // nil: there is none
	file string
}

func (s fileState) same(o fileState) bool {
	if s.info == nil || o.info == nil {
		return s.info == nil && o.info == nil
	}
	return os.SameFile(s.info, o.info) && s.info.ModTime().Equal(o.info.ModTime()) && s.info.Size() == o.info.Size()
}

// TLS is a node's TLS, kept up to date with its files.
type TLS struct {
	cfg TLSConfig
	log *slog.Logger
	mu  struct {
		sync.Mutex
		seen    []fileState
		current *tlsMaterial
	}
}

// LoadTLS reads the files once; they must be usable now. It returns nil where cfg has no
// certificate. Errors: ErrConfig.
func LoadTLS(cfg TLSConfig, log *slog.Logger) (*TLS, error) {
	if !cfg.Enabled() {
		return nil, nil
	}
	t := &TLS{cfg: cfg, log: log}
	t.mu.seen = t.states()
	var err error
	if t.mu.current, err = cfg.load(); err != nil {
		return nil, fmt.Errorf("%w: TLS: %w", ErrConfig, err)
	}
	t.mu.current.warnOfEnd(log, cfg.CertFile)
	warnOfReaders(log, cfg.KeyFile)
	return t, nil
}

// warnOfReaders tells of a private key that others can read. It is used all the same:
// who mounts keys into containers can not always choose the mode.
func warnOfReaders(log *slog.Logger, file string) {
	if info, err := os.Stat(file); err == nil && info.Mode().Perm()&0o077 != 0 {
		log.Warn("TLS: others than its owner can use the private key: chmod 600 it, and if others could read it, renew it", "file", file, "mode", fmt.Sprintf("%04o", info.Mode().Perm()))
	}
}

// renewBefore a certificate's end is when a node starts to say so.
const renewBefore = 7 * 24 * time.Hour

// warnOfEnd tells of a certificate that clients do not take, or soon will not.
func (m *tlsMaterial) warnOfEnd(log *slog.Logger, file string) {
	switch left := time.Until(m.leaf.NotAfter); {
	case left <= 0:
		log.Error("TLS: the certificate has expired, and nobody will take it: renew it in place, it is read again by itself", "file", file, "expired", m.leaf.NotAfter)
	case left < renewBefore:
		log.Warn("TLS: the certificate expires soon: renew it in place, it is read again by itself", "file", file, "expires", m.leaf.NotAfter)
	}
}

func (t *TLS) states() []fileState {
	var all []fileState
	for _, f := range []string{t.cfg.CertFile, t.cfg.KeyFile, t.cfg.ClientCAFile, t.cfg.PeerCAFile} {
		if f == "" {
			continue
		}
		info, err := os.Stat(f)
		if err != nil {
			info = nil
		}
		all = append(all, fileState{info, f})
	}
	return all
}

// material is the newest one that could be used.
func (t *TLS) material() *tlsMaterial {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, changed := t.states(), false
	for i, s := range now {
		changed = changed || !s.same(t.mu.seen[i])
	}
	if !changed {
		return t.mu.current
	}
	t.mu.seen = now
	next, err := t.cfg.load()
	if err != nil {
		t.log.Error("TLS: the changed files can not be used, the old ones stay in use", "err", err)
		return t.mu.current
	}
	t.mu.current = next
	next.warnOfEnd(t.log, t.cfg.CertFile)
	warnOfReaders(t.log, t.cfg.KeyFile)
	t.log.Info("TLS: the files were read again", "certificate", t.cfg.CertFile, "until", next.leaf.NotAfter)
	return next
}

// ServerConfig is for a listener of clients' connections: what it asks of them is asked
// anew for each.
func (t *TLS) ServerConfig() *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return t.serverConfig(), nil },
	}
}

func (t *TLS) serverConfig() *tls.Config {
	m := t.material()
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{m.cert},
		// A session that was resumed would be one under the CAs of yesterday.
		SessionTicketsDisabled: true,
		NextProtos:             []string{"h2"},
	}
	switch {
	case m.clients != nil && t.cfg.ClientCerts != clientCertsOptional:
		cfg.ClientAuth, cfg.ClientCAs = tls.RequireAndVerifyClientCert, m.all
	case m.all != nil:
		cfg.ClientAuth, cfg.ClientCAs = tls.VerifyClientCertIfGiven, m.all
	}
	return cfg
}

// peerConfig is for connections to other nodes.
func (t *TLS) peerConfig() *tls.Config {
	m := t.material()
	pool := m.peers
	if pool == nil {
		pool = x509.NewCertPool() // trusts nobody, where the default would be the host's CAs
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{m.cert}, RootCAs: pool}
}

// provesPeer tells why a certificate is not that of a node of this cluster; nil: it is.
// The peers' CA is not enough where it signs others too: the certificate must also be
// valid for the host of one of the nodes.
func (t *TLS) provesPeer(state tls.ConnectionState, hosts []string) error {
	m := t.material()
	if m.peers == nil {
		return errors.New("this node has no tls-peer-ca")
	}
	if len(state.PeerCertificates) == 0 {
		return errors.New("no certificate was shown")
	}
	leaf, between := state.PeerCertificates[0], x509.NewCertPool()
	for _, c := range state.PeerCertificates[1:] {
		between.AddCert(c)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: m.peers, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		return err
	}
	for _, h := range hosts {
		if leaf.VerifyHostname(h) == nil {
			return nil
		}
	}
	return fmt.Errorf("the certificate of %q is not valid for the host of any node (%v)", leaf.Subject.String(), hosts)
}

// creds are gRPC's view of a TLS, for both directions.
type creds struct {
	credentials.TransportCredentials
	tls *TLS
}

func (t *TLS) creds() credentials.TransportCredentials {
	return &creds{credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS12}), t}
}

// ClientHandshake implements credentials.TransportCredentials.
func (c *creds) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return credentials.NewTLS(c.tls.peerConfig()).ClientHandshake(ctx, authority, conn)
}

// ServerHandshake implements credentials.TransportCredentials.
func (c *creds) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn := tls.Server(raw, c.tls.serverConfig())
	err := conn.Handshake() // gRPC has set the connection's deadline
	var plain tls.RecordHeaderError
	switch {
	case err == nil && conn.ConnectionState().NegotiatedProtocol == "":
		err = errors.New("the client did not negotiate HTTP/2 by ALPN, as gRPC wants")
	case errors.As(err, &plain) && plain.Conn != nil && string(plain.RecordHeader[:3]) == "PRI":
		wantTLS(raw)
	}
	if err != nil {
		hangUp(raw)
		_ = raw.Close()
		return nil, nil, fmt.Errorf("server: TLS with %s: %w", raw.RemoteAddr(), err)
	}
	return conn, credentials.TLSInfo{
		State:          conn.ConnectionState(),
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
	}, nil
}

// wantsTLS is what a client reads that speaks gRPC in plain text.
const wantsTLS = "this port wants TLS: give the client the CA of the nodes"

// wantTLS says it in HTTP/2, which such a client speaks; else it would only see the end
// of the connection. It is a courtesy: a client that is gone gets nothing.
func wantTLS(conn net.Conn) {
	const settings, goAway, inadequateSecurity = 4, 7, 0xc
	b := []byte{0, 0, 0, settings, 0, 0, 0, 0, 0}
	b = append(b, 0, 0, 8+byte(len(wantsTLS)), goAway, 0, 0, 0, 0, 0)
	// Stream 1 counts as seen, so that the client does not try it again by itself.
	b = binary.BigEndian.AppendUint32(b, 1)
	b = binary.BigEndian.AppendUint32(b, inadequateSecurity)
	_ = conn.SetDeadline(time.Now().Add(time.Second))
	_, _ = conn.Write(append(b, wantsTLS...))
}

// hangUp lets the other side hear the last words, an alert of TLS or those of wantTLS: what
// was not read when the connection is closed would take them with it.
func hangUp(conn net.Conn) {
	_ = conn.SetDeadline(time.Now().Add(time.Second))
	if half, ok := conn.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		_, _ = io.CopyN(io.Discard, conn, 64<<10)
	}
}

// Clone implements credentials.TransportCredentials.
func (c *creds) Clone() credentials.TransportCredentials {
	return &creds{c.TransportCredentials.Clone(), c.tls}
}
