package client

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/tcp"
)

func testTLS() *tls.Config { return &tls.Config{MinVersion: tls.VersionTLS13} }

// authority signs certificates for a test.
type authority struct {
	t    testing.TB
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.sign("ca", nil)
	return a
}

// sign makes a certificate and its key, in files NAME.pem and NAME.key.
func (a *authority) sign(name string, hosts []string) (*x509.Certificate, *ecdsa.PrivateKey) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, h)
		}
	}
	parent, by := a.cert, a.key
	if parent == nil {
		template.IsCA, template.BasicConstraintsValid, template.KeyUsage = true, true, x509.KeyUsageCertSign
		parent, by = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
	require.NoError(a.t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(a.t, err)
	pkcs, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(a.t, err)
	a.write(name+".pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	a.write(name+".key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs}))
	return cert, key
}

func (a *authority) write(name string, b []byte) {
	require.NoError(a.t, os.WriteFile(a.path(name), b, 0o600))
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

// server is the nodes' side, which wants certificates of clients.
func (a *authority) server() *tls.Config {
	a.sign("node", []string{"127.0.0.1", "node.test"})
	pair, err := tls.LoadX509KeyPair(a.path("node.pem"), a.path("node.key"))
	require.NoError(a.t, err)
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
	}
}

// TestTLS: with certificates on both sides everything is encrypted, READs over tcp too;
// without the right ones the sentence says what is wrong.
func TestTLS(t *testing.T) {
	a := newAuthority(t)
	a.sign("client", nil)
	server := a.server()
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{
		nodes: 3, shards: 2, server: []grpc.ServerOption{grpc.Creds(credentials.NewTLS(server))},
		targets: func(*fakeNode) []rdma.Provider { return []rdma.Provider{tcp.Provider{ServerTLS: server}} },
	})}
	files := TLSFiles{CA: a.path("ca.pem"), Cert: a.path("client.pem"), Key: a.path("client.key")}
	both, err := LoadTLS(files)
	require.NoError(t, err)
	f.c = f.dial(t, nil, func(c *Config) {
		c.Providers, c.TLS, c.RequireTLS, c.HostID = nil, both, true, "elsewhere"
	})
	f.ready(t)
	f.put(theKey, "secret")
	_, err = f.get(t, theKey) // learns the index
	require.NoError(t, err)
	s := f.during(func() { f.want(t, theKey, "secret") })
	require.EqualValues(t, 1, s.gets(Linearizable, "tcp"))
	_, err = f.c.Put(ctxFor(t, time.Minute), []byte("k"), []byte("v"))
	require.NoError(t, err)

	other := newAuthority(t)
	for name, c := range map[string]struct {
		tls   func() *tls.Config
		words string
	}{
		"no TLS": {func() *tls.Config { return nil }, "TLS"},
		"another authority": {func() *tls.Config {
			return mustTLS(t, TLSFiles{CA: other.path("ca.pem"), Cert: files.Cert, Key: files.Key})
		}, "unknown authority"},
		"another name":       {func() *tls.Config { f := files; f.ServerName = "wrong.test"; return mustTLS(t, f) }, "wrong.test"},
		"no own certificate": {func() *tls.Config { return mustTLS(t, TLSFiles{CA: files.CA}) }, "TLS"}, // the alert, or, where the end of the connection overtook it, a hint
	} {
		_, err := Dial(context.Background(), Config{Endpoints: []string{f.nodes[0].addr}, TLS: c.tls(), DialTimeout: 2 * time.Second})
		require.True(t, errors.Is(err, ErrUnavailable) || errors.Is(err, ErrDenied), "%s: %v", name, err)
		require.Contains(t, err.Error(), c.words, name)
		require.NotContains(t, err.Error(), "\n", name)
	}
	named := files
	named.ServerName = "node.test"
	c := f.dial(t, nil, func(c *Config) { c.Providers, c.TLS, c.HostID = nil, mustTLS(t, named), "elsewhere" })
	require.Equal(t, "tcp", c.Stats().Peers[0].Transport)
}

func mustTLS(t testing.TB, f TLSFiles) *tls.Config {
	cfg, err := LoadTLS(f)
	require.NoError(t, err)
	return cfg
}

func TestLoadTLSMistakes(t *testing.T) {
	a := newAuthority(t)
	a.sign("client", nil)
	a.write("empty", nil)
	for _, f := range []TLSFiles{
		{CA: a.path("none")}, {CA: a.path("empty")}, {Cert: a.path("client.pem")}, {Key: a.path("client.key")},
		{Cert: a.path("none"), Key: a.path("client.key")}, {Cert: a.path("client.pem"), Key: a.path("ca.key")},
	} {
		_, err := LoadTLS(f)
		require.ErrorIs(t, err, ErrInvalid, "%+v", f)
	}
	cfg := mustTLS(t, TLSFiles{Cert: a.path("client.pem"), Key: a.path("client.key")})
	serial := func() *big.Int {
		pair, err := cfg.GetClientCertificate(nil)
		require.NoError(t, err)
		return pair.Leaf.SerialNumber
	}
	first := serial()
	a.write("client.key", []byte("half a key")) // in the middle of a renewal
	require.Equal(t, first, serial())
	a.sign("client", nil)
	require.NoError(t, os.Chtimes(a.path("client.pem"), time.Time{}, time.Now().Add(time.Minute)))
	require.NotEqual(t, first, serial())
}

// TestRequireTLS: nothing is read in the clear, unless the caller says so.
func TestRequireTLS(t *testing.T) {
	a := newAuthority(t)
	a.sign("client", nil)
	for _, allow := range []bool{false, true} {
		f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: 1, server: []grpc.ServerOption{grpc.Creds(credentials.NewTLS(a.server()))}})}
		f.net = &fakeNet{c: f.fakeCluster, name: "fake"}
		f.c = f.dial(t, f.net, func(c *Config) {
			c.TLS = mustTLS(t, TLSFiles{CA: a.path("ca.pem"), Cert: a.path("client.pem"), Key: a.path("client.key")})
			c.RequireTLS, c.AllowPlaintextReads = true, allow
		})
		f.ready(t)
		f.put(theKey, "value")
		f.want(t, theKey, "value")
		p := f.c.Stats().Peers[0]
		if allow {
			require.Equal(t, "fake", p.Transport)
			continue
		}
		require.Equal(t, TransportGRPC, p.Transport)
		require.Contains(t, p.Reason, "plain text")
		require.EqualValues(t, 3, f.c.Stats().fell("fake", pathPlain))
		require.Empty(t, f.net.conns)
	}
	_, err := Dial(context.Background(), Config{Endpoints: []string{"127.0.0.1:1"}, RequireTLS: true})
	require.ErrorIs(t, err, ErrInvalid)
}

// wantsToken is a node's rule about tokens, in the test.
type wantsToken struct {
	mu    sync.Mutex
	token string
	calls int
	plain bool // no token came with some call
}

func (w *wantsToken) check(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls++
	md, _ := metadata.FromIncomingContext(ctx)
	got := md.Get("authorization")
	w.plain = w.plain || len(got) == 0
	if len(got) != 1 || got[0] != "Bearer "+w.token {
		return failWith(codes.Unauthenticated, &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_UNAUTHENTICATED})
	}
	return nil
}

func (w *wantsToken) set(token string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.token, w.calls = token, 0
}

func (w *wantsToken) options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			if err := w.check(ctx); err != nil {
				return nil, err
			}
			return h(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, h grpc.StreamHandler) error {
			if err := w.check(s.Context()); err != nil {
				return err
			}
			return h(srv, s)
		}),
	}
}

// TestTokenFile: the token goes with each call; a renewed file is used from then on; one
// that the nodes refuse is an ErrDenied at once, for every kind of call, and no more than
// that.
func TestTokenFile(t *testing.T) {
	w := &wantsToken{token: "kvd_1_a"}
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: 1, server: w.options()})}
	f.net = &fakeNet{c: f.fakeCluster, name: "fake"}
	file := filepath.Join(t.TempDir(), "token")
	write := func(text string, age time.Duration) {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		require.NoError(t, os.Chtimes(file, time.Time{}, time.Now().Add(-age)))
	}
	write("kvd_1_a\n", time.Hour)
	f.c = f.dial(t, f.net, func(c *Config) { c.TokenFile = file })
	f.ready(t)
	ctx := ctxFor(t, 20*time.Second)
	_, err := f.c.Put(ctx, []byte(theKey), []byte("value"))
	require.NoError(t, err)
	f.want(t, theKey, "value")
	require.False(t, w.plain)

	w.set("kvd_2_b") // and what is open ends, as at a node that revoked the token
	end := func() {
		for _, s := range f.c.liveSessions() {
			s.fail(fmt.Errorf("over: %w", &rpcError{class: ErrUnavailable, detail: &kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_SESSION_GONE}}))
		}
	}
	end()
	eventually(t, "the end of the sessions", func() bool { return len(f.c.liveSessions()) == 0 })
	began := time.Now()
	_, err = f.c.Get(ctx, []byte(theKey))
	require.ErrorIs(t, err, ErrDenied)
	_, err = f.c.Get(ctx, []byte(theKey), WithLevel(Stale))
	require.ErrorIs(t, err, ErrDenied)
	for _, err := range f.c.List(ctx, nil) {
		require.ErrorIs(t, err, ErrDenied)
	}
	_, err = f.c.Namespaces(ctx)
	require.ErrorIs(t, err, ErrDenied)
	for _, n := range f.nodes { // a write that has to open its stream anew
		r, err := f.c.pool.get(n.addr)
		require.NoError(t, err)
		r.writes.mu.Lock()
		r.writes.mu.current = nil
		r.writes.mu.Unlock()
	}
	_, err = f.c.Put(ctx, []byte(theKey), []byte("value"))
	require.ErrorIs(t, err, ErrDenied)
	require.Less(t, time.Since(began), 5*time.Second)
	_, err = Dial(ctx, Config{Endpoints: f.endpoints(), Token: "kvd_1_a"})
	require.ErrorIs(t, err, ErrDenied)
	require.NotContains(t, err.Error(), "kvd_1_a")
	w.mu.Lock()
	require.Less(t, w.calls, 60, "what is refused is not tried for ever")
	w.mu.Unlock()

	write("", 30*time.Minute) // in the middle of a renewal
	write("kvd_2_b", 0)
	f.ready(t)
	f.want(t, theKey, "value")
}

func (c *fakeCluster) endpoints() (list []string) {
	for _, n := range c.nodes {
		list = append(list, n.addr)
	}
	return list
}

func TestCredentialMistakes(t *testing.T) {
	dir := t.TempDir()
	empty, odd := filepath.Join(dir, "empty"), filepath.Join(dir, "odd")
	require.NoError(t, os.WriteFile(empty, []byte(" \n"), 0o600))
	require.NoError(t, os.WriteFile(odd, []byte("kvd_1 hidden"), 0o600))
	for words, cfg := range map[string]Config{
		"AllowPlaintextToken": {Token: "t", Endpoints: []string{"10.1.2.3:7400"}},
		"node.example:7400":   {Token: "t", Endpoints: []string{"127.0.0.1:1", "node.example:7400"}},
		"both a token":        {Token: "t", TokenFile: empty},
		"no such file":        {TokenFile: filepath.Join(dir, "none")},
		"is empty":            {TokenFile: empty},
		"byte 5":              {TokenFile: odd},
		"byte 1":              {Token: "t\nx"},
	} {
		if cfg.Endpoints == nil {
			cfg.Endpoints = []string{"127.0.0.1:1"}
		}
		_, err := Dial(context.Background(), cfg)
		require.ErrorIs(t, err, ErrInvalid, words)
		require.Contains(t, err.Error(), words)
		require.NotContains(t, err.Error(), "hidden")
		_, err = DialAdmin(cfg)
		require.ErrorIs(t, err, ErrInvalid, words)
	}
	for addr, want := range map[string]bool{
		"127.0.0.1:1": true, "127.9.9.9:1": true, "[::1]:1": true, "localhost:1": true, "[::ffff:127.0.0.1]:1": true,
		"10.0.0.1:1": false, "localhost.evil.example:1": false, "[fe80::1%eth0]:1": false, "nonsense": false, "0.0.0.0:1": false,
	} {
		require.Equal(t, want, isLoopback(addr), addr)
	}
	cfg := Config{Token: "t"}
	require.NoError(t, cfg.checkPlaintext("127.0.0.1:1"))
	require.Error(t, cfg.checkPlaintext("10.0.0.1:1"))
	cfg.AllowPlaintextToken = true
	require.NoError(t, cfg.checkPlaintext("10.0.0.1:1"))
	cfg = Config{Token: "t", TLS: testTLS()}
	require.NoError(t, cfg.checkPlaintext("10.0.0.1:1"))
}

// TestTokenStaysAtHome: a node on another host that others name gets no token either.
func TestTokenStaysAtHome(t *testing.T) {
	w := &wantsToken{token: "t"}
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 1, shards: 1, server: w.options()})}
	f.net = &fakeNet{c: f.fakeCluster, name: "fake"}
	f.c = f.dial(t, f.net, func(c *Config) { c.Token = "t" })
	f.c.addMembers([]*kvdv1.Member{{NodeId: 9, Address: "192.0.2.1:7400"}})
	eventually(t, "the reason", func() bool {
		for _, p := range f.c.Stats().Peers {
			if p.NodeID == 9 && p.Reason != "" {
				require.Contains(t, p.Reason, "without TLS")
				return true
			}
		}
		return false
	})
}

func TestFromEnv(t *testing.T) {
	a := newAuthority(t)
	cfg, err := FromEnv(Config{})
	require.NoError(t, err)
	require.Nil(t, cfg.TLS)
	t.Setenv("KVD_ENDPOINTS", "a:1,b:2")
	t.Setenv("KVD_TOKEN", "t")
	t.Setenv("KVD_CA", a.path("ca.pem"))
	t.Setenv("KVD_SERVER_NAME", "node.test")
	cfg, err = FromEnv(Config{})
	require.NoError(t, err)
	require.Equal(t, []string{"a:1", "b:2"}, cfg.Endpoints)
	require.Equal(t, "t", cfg.Token)
	require.Equal(t, "node.test", cfg.TLS.ServerName)
	cfg, err = FromEnv(Config{Endpoints: []string{"c:3"}, TokenFile: "f", TLS: testTLS()})
	require.NoError(t, err)
	require.Equal(t, Config{Endpoints: []string{"c:3"}, TokenFile: "f", TLS: cfg.TLS}, cfg)
	require.Empty(t, cfg.TLS.ServerName)
	t.Setenv("KVD_CA", a.path("none"))
	_, err = FromEnv(Config{})
	require.ErrorIs(t, err, ErrInvalid)
}
