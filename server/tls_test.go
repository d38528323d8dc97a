package server

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/shm"
	"github.com/kvd-io/kvd/rdma/simnic"
	"github.com/kvd-io/kvd/rdma/tcp"
	"github.com/kvd-io/kvd/storage/layout"
)

// authority is a CA of a test.
type authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t testing.TB, name string) *authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return &authority{t, cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

// issue signs a certificate for hosts, for servers and clients, with the key.
func (a *authority) issue(name string, until time.Time, hosts ...string) (certPEM, keyPEM []byte) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<60))
	require.NoError(a.t, err)
	tmpl := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: until,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			tmpl.IPAddresses = append(tmpl.IPAddresses, ip)
		} else {
			tmpl.DNSNames = append(tmpl.DNSNames, h)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &key.PublicKey, a.key)
	require.NoError(a.t, err)
	k, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(a.t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: k})
}

// files writes a node's certificate below dir and returns its settings.
func (a *authority) files(dir string, hosts ...string) TLSConfig {
	cert, key := a.issue("node", time.Now().Add(time.Hour), hosts...)
	c := TLSConfig{CertFile: filepath.Join(dir, "cert.pem"), KeyFile: filepath.Join(dir, "key.pem"), PeerCAFile: filepath.Join(dir, "peers.pem")}
	write(a.t, c.CertFile, cert)
	write(a.t, c.KeyFile, key)
	write(a.t, c.PeerCAFile, a.pem)
	return c
}

// write replaces a file, as whoever renews certificates does.
func write(t testing.TB, file string, b []byte) {
	require.NoError(t, os.WriteFile(file+".new", b, 0o600))
	require.NoError(t, os.Rename(file+".new", file))
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// client trusts a and shows a certificate of ca's; nil: none.
func (a *authority) client(ca *authority, until time.Time, hosts ...string) *tls.Config {
	cfg := &tls.Config{RootCAs: a.pool()}
	if ca != nil {
		c, k := ca.issue("client", until, hosts...)
		pair, err := tls.X509KeyPair(c, k)
		require.NoError(a.t, err)
		// Also where the server names other CAs: it is to be refused there.
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	return cfg
}

// dial returns what a status call over TLS says.
func statusOver(t testing.TB, addr string, cfg *tls.Config) error {
	conn := dialTLS(t, addr, cfg)
	_, err := kvdv1.NewClusterClient(conn).Status(testContext(t), &kvdv1.StatusRequest{})
	return err
}

func dialTLS(t testing.TB, addr string, cfg *tls.Config) *grpc.ClientConn {
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(credentials.NewTLS(cfg)))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// lines is a log that tests look at.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

func (l *lines) count(words string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Count(l.buf.Bytes(), []byte(words))
}

// TestTLS: who has no certificate of the right CA is not served, nor whoever speaks plain
// text, who is told so; a renewed certificate is used at once, and a broken one is not.
func TestTLS(t *testing.T) {
	nodes, clients, others := newAuthority(t, "nodes"), newAuthority(t, "clients"), newAuthority(t, "others")
	later, past := time.Now().Add(time.Hour), time.Now().Add(-time.Hour)
	dir := t.TempDir()
	cfg := nodes.files(dir, "127.0.0.1")
	cfg.ClientCAFile = filepath.Join(dir, "clients.pem")
	write(t, cfg.ClientCAFile, clients.pem)
	log := &lines{}
	c := startCluster(t, 1, 1, func(n *Config) {
		n.TLS, n.Logger = cfg, slog.New(slog.NewTextHandler(log, nil))
	})
	addr := c.nodes[0].Address()

	for name, try := range map[string]struct {
		cfg *tls.Config
		ok  bool
	}{
		"a client's certificate":              {nodes.client(clients, later), true},
		"a node's certificate":                {nodes.client(nodes, later), true},
		"none":                                {nodes.client(nil, later), false},
		"of another CA":                       {nodes.client(others, later), false},
		"expired":                             {nodes.client(clients, past), false},
		"the client does not trust the nodes": {others.client(clients, later), false},
		"TLS 1.1":                             {func() *tls.Config { c := nodes.client(clients, later); c.MaxVersion = tls.VersionTLS11; return c }(), false},
		"TLS 1.2":                             {func() *tls.Config { c := nodes.client(clients, later); c.MaxVersion = tls.VersionTLS12; return c }(), true},
	} {
		err := statusOver(t, addr, try.cfg)
		require.Equal(t, try.ok, err == nil, "%s: %v", name, err)
		if err != nil {
			require.Equal(t, codes.Unavailable, status.Code(err), name)
		}
	}

	// Not each time: the client may see the connection's end before it began the call.
	said := false
	for range 50 {
		_, err := kvdv1.NewClusterClient(c.conns[0]).Status(testContext(t), &kvdv1.StatusRequest{}, grpc.WaitForReady(false))
		require.Equal(t, codes.Unavailable, status.Code(err))
		if said = strings.Contains(err.Error(), wantsTLS); said {
			break
		}
	}
	require.True(t, said)

	// Renewed, by another CA even: from the next connection on.
	serves := func() string {
		conn, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
		require.NoError(t, err)
		defer func() { _ = conn.Close() }()
		return conn.ConnectionState().PeerCertificates[0].Issuer.CommonName
	}
	require.Equal(t, "nodes", serves())
	cert, key := others.issue("renewed", later, "127.0.0.1")
	write(t, cfg.CertFile, cert)
	require.Equal(t, "nodes", serves(), "the new certificate is there and its key is not: the old pair stays")
	require.Equal(t, 1, log.count("can not be used"))
	require.Equal(t, "nodes", serves())
	require.Equal(t, 1, log.count("can not be used"), "said once")
	write(t, cfg.KeyFile, key)
	require.Equal(t, "others", serves())
	write(t, cfg.CertFile, []byte("garbage"))
	require.Equal(t, "others", serves())
	require.NoError(t, os.Remove(cfg.KeyFile))
	require.Equal(t, "others", serves())
	require.Equal(t, 3, log.count("can not be used"))
	// So are CAs.
	write(t, cfg.CertFile, cert)
	write(t, cfg.KeyFile, key)
	require.Error(t, statusOver(t, addr, others.client(others, later)))
	write(t, cfg.ClientCAFile, others.pem)
	require.NoError(t, statusOver(t, addr, others.client(others, later)))
	require.Error(t, statusOver(t, addr, others.client(clients, later)))
}

// A certificate that nobody takes any more, or soon will not, is told of: at the start, and
// when it is read again.
func TestEndOfCertificateIsTold(t *testing.T) {
	nodes := newAuthority(t, "nodes")
	dir := t.TempDir()
	cfg := nodes.files(dir, "127.0.0.1")
	renew := func(left time.Duration) {
		cert, key := nodes.issue("node", time.Now().Add(left), "127.0.0.1")
		write(t, cfg.KeyFile, key)
		write(t, cfg.CertFile, cert)
	}
	said := &lines{}
	renew(-time.Minute)
	files, err := LoadTLS(cfg, slog.New(slog.NewTextHandler(said, nil)))
	require.NoError(t, err)
	require.Equal(t, 1, said.count("the certificate has expired"))
	renew(2 * renewBefore)
	files.material()
	require.Zero(t, said.count("expires soon"))
	renew(renewBefore / 2)
	files.material()
	require.Equal(t, 1, said.count("expires soon"))
	require.Equal(t, 1, said.count("the certificate has expired"))
}

// A private key that others can read is used, and told of: at the start, and when it is
// read again.
func TestOpenKeyIsTold(t *testing.T) {
	nodes, said := newAuthority(t, "nodes"), &lines{}
	cfg := nodes.files(t.TempDir(), "127.0.0.1")
	log := slog.New(slog.NewTextHandler(said, nil))
	const words = "others than its owner can use the private key"
	_, err := LoadTLS(cfg, log)
	require.NoError(t, err)
	require.Zero(t, said.count(words))
	require.NoError(t, os.Chmod(cfg.KeyFile, 0o644))
	files, err := LoadTLS(cfg, log)
	require.NoError(t, err)
	require.Equal(t, 1, said.count(words))
	require.Equal(t, 1, said.count("mode=0644"))
	write(t, cfg.KeyFile, append(mustRead(t, cfg.KeyFile), '\n'))
	files.material()
	require.Equal(t, 1, said.count(words), "the new one is for its owner alone")
}

func mustRead(t testing.TB, file string) []byte {
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	return b
}

func TestOptionalClientCertificates(t *testing.T) {
	nodes, clients, others := newAuthority(t, "nodes"), newAuthority(t, "clients"), newAuthority(t, "others")
	dir := t.TempDir()
	cfg := nodes.files(dir, "127.0.0.1")
	cfg.ClientCAFile, cfg.ClientCerts = filepath.Join(dir, "clients.pem"), clientCertsOptional
	write(t, cfg.ClientCAFile, clients.pem)
	c := startCluster(t, 1, 1, func(n *Config) { n.TLS = cfg })
	addr, later := c.nodes[0].Address(), time.Now().Add(time.Hour)
	require.NoError(t, statusOver(t, addr, nodes.client(nil, later)))
	require.NoError(t, statusOver(t, addr, nodes.client(clients, later)))
	require.Error(t, statusOver(t, addr, nodes.client(others, later)), "one that is shown is looked at")
}

// TestPeersWithTLS: three nodes know each other by certificates. Who has a client's, or a
// node's of another CA, or one of the right CA for no host of the cluster, is no peer.
func TestPeersWithTLS(t *testing.T) {
	nodes, clients, others := newAuthority(t, "nodes"), newAuthority(t, "clients"), newAuthority(t, "others")
	later := time.Now().Add(time.Hour)
	root := tokenOf(rootTokenID, "root")
	rootFile := secretFile(t, root)
	c := startCluster(t, 3, 1, func(n *Config) {
		dir := t.TempDir()
		n.TLS = nodes.files(dir, "127.0.0.1")
		n.TLS.ClientCAFile, n.TLS.ClientCerts = filepath.Join(dir, "clients.pem"), clientCertsOptional
		write(t, n.TLS.ClientCAFile, clients.pem)
		n.Auth = AuthConfig{Mode: AuthTokens, RootTokenFile: rootFile}
	})
	for i := range c.nodes { // two of them pass it on to the third
		conn := dialTLS(t, c.nodes[i].Address(), nodes.client(nil, later))
		_, err := kvdv1.NewClusterClient(conn).ListNamespaces(as(testContext(t), root), &kvdv1.ListNamespacesRequest{})
		require.NoError(t, err)
	}
	hello := func(cfg *tls.Config) error {
		conn := dialTLS(t, c.nodes[0].Address(), cfg)
		_, err := kvdv1.NewPeerClient(conn).Hello(as(testContext(t), root), &kvdv1.HelloRequest{})
		return err
	}
	require.NoError(t, hello(nodes.client(nodes, later, "127.0.0.1")))
	requireReason(t, hello(nodes.client(nil, later)), kvdv1.ErrorDetail_REASON_DENIED)
	requireReason(t, hello(nodes.client(clients, later, "127.0.0.1")), kvdv1.ErrorDetail_REASON_DENIED)
	requireReason(t, hello(nodes.client(nodes, later, "client.example")), kvdv1.ErrorDetail_REASON_DENIED)
	require.Error(t, hello(nodes.client(others, later, "127.0.0.1")))
	// What a node passes on has no token; who is no node can not do the same.
	conn := dialTLS(t, c.nodes[0].Address(), nodes.client(clients, later, "127.0.0.1"))
	ctx := metadata.AppendToOutgoingContext(testContext(t), forwardedKey, "1")
	_, err := kvdv1.NewClusterClient(conn).ListTokens(ctx, &kvdv1.ListTokensRequest{})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_DENIED)
}

// A node with a certificate that its peers do not accept takes no part, and both say why.
func TestPeerOfAnotherCA(t *testing.T) {
	nodes, others := newAuthority(t, "nodes"), newAuthority(t, "others")
	cfgs := testConfigs(t, 2, 1)
	logs := []*lines{{}, {}}
	for i := range cfgs {
		ca := nodes
		if i == 1 {
			ca = others
		}
		cfgs[i].TLS = ca.files(t.TempDir(), "127.0.0.1")
		cfgs[i].BootstrapTimeout = 8 * time.Second
		cfgs[i].Logger = slog.New(slog.NewTextHandler(logs[i], nil))
	}
	var errs [2]error
	var g errgroup.Group
	for i, cfg := range cfgs {
		g.Go(func() error {
			_, errs[i] = Start(context.Background(), cfg)
			return nil
		})
	}
	require.NoError(t, g.Wait())
	for _, err := range errs {
		require.ErrorIs(t, err, ErrRefused)
	}
	const why = "certificate signed by unknown authority"
	require.ErrorContains(t, errs[0], why)
	require.NotZero(t, logs[0].count(why))
}

// TestNamespaceRequiresTLS: READs only where nobody on the network can read along, unless
// its owner says otherwise, and no call in plain text.
func TestNamespaceRequiresTLS(t *testing.T) {
	nodes := newAuthority(t, "nodes")
	fabric, err := simnic.New(simnic.Config{})
	require.NoError(t, err)
	t.Cleanup(fabric.Close)
	files := nodes.files(t.TempDir(), "127.0.0.1")
	secure, err := LoadTLS(files, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	c := startCluster(t, 1, 1, func(n *Config) {
		n.TLS = files
		n.Providers = []rdma.Provider{&shm.Provider{SocketDir: t.TempDir()}, fabric.Host("node"), tcp.Provider{ServerTLS: secure.ServerConfig()}}
	})
	plain := startCluster(t, 1, 1)
	_, err = kvdv1.NewClusterClient(plain.conns[0]).CreateNamespace(testContext(t), &kvdv1.CreateNamespaceRequest{Name: "strict", RequireTls: true})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)

	conn := dialTLS(t, c.nodes[0].Address(), nodes.client(nil, time.Now()))
	cluster, access := kvdv1.NewClusterClient(conn), kvdv1.NewAccessClient(conn)
	_, err = cluster.CreateNamespace(testContext(t), &kvdv1.CreateNamespaceRequest{Name: "odd", PlaintextReads: true})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	for _, req := range []*kvdv1.CreateNamespaceRequest{{Name: "open"}, {Name: "strict", RequireTls: true}, {Name: "lax", RequireTls: true, PlaintextReads: true}} {
		r, err := cluster.CreateNamespace(testContext(t), req)
		require.NoError(t, err)
		require.Equal(t, req.GetRequireTls(), r.GetNamespace().GetRequireTls())
	}
	for name, want := range map[string][]string{
		"open": {"shm", "simnic", "tcp"}, "lax": {"shm", "simnic", "tcp"}, "strict": {"shm", "tcp"},
	} {
		s, err := access.OpenSession(testContext(t), &kvdv1.OpenSessionRequest{Namespace: name, LayoutVersion: layout.Version})
		require.NoError(t, err)
		first, err := s.Recv()
		require.NoError(t, err)
		require.Equal(t, want, first.GetOpened().GetTransports(), name)
		_, err = access.Regions(testContext(t), &kvdv1.RegionsRequest{SessionId: first.GetOpened().GetSessionId(), Transport: "simnic"})
		if name == "strict" {
			requireReason(t, err, kvdv1.ErrorDetail_REASON_DENIED)
		} else {
			require.NoError(t, err)
		}
	}

	// A node that was given no TLS hears of such a namespace all the same.
	n := plain.nodes[0]
	plain.leaderOf(1)
	cmd := &kvdv1.Command{Op: &kvdv1.Command_Namespace{Namespace: &kvdv1.NamespaceOp{Create: &kvdv1.NamespaceInfo{Name: "strict", RequireTls: true, OneSided: true}}}}
	eventually(t, "group 0 has a leader that takes it", func() bool {
		_, _, err = n.propose(testContext(t), 0, n.host.Group(0), cmd)
		return err == nil
	})
	ns := n.namespaces.byName("strict").GetId()
	_, err = plain.kv(0).Get(testContext(t), &kvdv1.GetRequest{NamespaceId: ns, Key: []byte("k")})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_DENIED)
	_, err = plain.kv(0).Put(testContext(t), putOf2(ns, "k", "v"))
	requireReason(t, err, kvdv1.ErrorDetail_REASON_DENIED)
	w := plain.openWrites(0)
	w.send(1, putOf2(ns, "k", "v"))
	require.Equal(t, kvdv1.ErrorDetail_REASON_DENIED, w.recv().GetDetail().GetReason())
	s, err := kvdv1.NewAccessClient(plain.conns[0]).OpenSession(testContext(t), &kvdv1.OpenSessionRequest{Namespace: "strict", LayoutVersion: layout.Version})
	require.NoError(t, err)
	_, err = s.Recv()
	requireReason(t, err, kvdv1.ErrorDetail_REASON_DENIED)
}

func putOf2(namespace uint32, key, value string) *kvdv1.PutRequest {
	return &kvdv1.PutRequest{NamespaceId: namespace, Key: []byte(key), Value: []byte(value)}
}
