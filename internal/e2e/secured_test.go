//go:build e2e || rdmaguest

package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/internal/devcluster"
)

// authority is a CA in files.
type authority struct {
	t    testing.TB
	file string // its certificate
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func pemFile(t testing.TB, file, kind string, der []byte) {
	// By renaming, as whoever renews certificates does.
	require.NoError(t, os.WriteFile(file+".new", pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
	require.NoError(t, os.Rename(file+".new", file))
}

func newAuthority(t testing.TB, dir, name string) *authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	a := &authority{t, filepath.Join(dir, name+"-ca.pem"), cert, key}
	pemFile(t, a.file, "CERTIFICATE", der)
	return a
}

// issue writes a certificate for loopback and the hosts, which are IP addresses, and its key.
func (a *authority) issue(certFile, keyFile string, hosts ...string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<60))
	require.NoError(a.t, err)
	tmpl := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "node"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(12 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	for _, h := range hosts {
		tmpl.IPAddresses = append(tmpl.IPAddresses, net.ParseIP(h))
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &key.PublicKey, a.key)
	require.NoError(a.t, err)
	k, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(a.t, err)
	pemFile(a.t, keyFile, "PRIVATE KEY", k)
	pemFile(a.t, certFile, "CERTIFICATE", der)
}

func (a *authority) trust() *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &tls.Config{RootCAs: pool}
}

// secured is a cluster with TLS and tokens, and what its operator has.
type secured struct {
	*cluster
	ca       *authority
	root     string // file
	certFile string
	keyFile  string
}

// startSecured starts nodes of cfg, with what they need for TLS and tokens.
func startSecured(t testing.TB, cfg devcluster.Config) *secured {
	dir := tempDir(t)
	s := &secured{ca: newAuthority(t, dir, "nodes"), root: filepath.Join(dir, "root.token"), certFile: filepath.Join(dir, "cert.pem"), keyFile: filepath.Join(dir, "key.pem")}
	s.ca.issue(s.certFile, s.keyFile, cfg.Hosts...)
	require.Zero(t, kvctl(t, nil, "token", "generate", "--file", s.root).code)
	cfg.TLS = s.ca.trust()
	cfg.Args = append(cfg.Args, "--tls-cert", s.certFile, "--tls-key", s.keyFile, "--tls-peer-ca", s.ca.file, "--auth", "tokens", "--auth-root-token-file", s.root)
	s.cluster = newClusterIn(t, dir, cfg)
	return s
}

// as runs kvctl with TLS and the token in a file.
func (s *secured) as(t testing.TB, tokenFile string, args ...string) result {
	t.Helper()
	return s.kvctl(t, append([]string{"--ca", s.ca.file, "--token-file", tokenFile}, args...)...)
}

// token makes one in a new file, and returns that and its id.
func (s *secured) token(t testing.TB, name string, grants ...string) (file, id string) {
	t.Helper()
	file = filepath.Join(s.dir, name+".token")
	args := []string{"-o", "json", "token", "create", name, "--file", file, "--expires", "30d"}
	for _, g := range grants {
		args = append(args, "--grant", g)
	}
	r := s.as(t, s.root, args...)
	require.Zero(t, r.code, r.text())
	var made struct{ ID, Expires string }
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &made))
	require.NotEmpty(t, made.Expires)
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	return file, made.ID
}

func readFile(t testing.TB, file string) string {
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	return strings.TrimSpace(string(b))
}
