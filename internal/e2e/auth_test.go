//go:build e2e

package e2e

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// TestTokensAndTLS: real processes with TLS and tokens. Who lacks one of them, or a
// right, is denied with a sentence; READs go by TCP under TLS; a revoked token ends a
// client that reads; tokens survive the loss of every process; and a renewed certificate
// is used by nodes that run.
func TestTokensAndTLS(t *testing.T) {
	s := startSecured(t, devcluster.Config{})
	dir := s.dir

	s.kvctl(t, "--ca", s.ca.file, "get", "k").failed(t, 6, "token")
	s.kvctl(t, "get", "k").failed(t, 5, "TLS")
	other := newAuthority(t, dir, "others")
	s.kvctl(t, "--ca", other.file, "--token-file", s.root, "get", "k").failed(t, 5, "unknown authority")
	forged := filepath.Join(dir, "forged.token")
	require.Zero(t, kvctl(t, nil, "token", "generate", "--file", forged).code)
	s.as(t, forged, "get", "k").failed(t, 6, "not valid")

	require.Zero(t, s.as(t, s.root, "namespace", "create", "secrets", "--require-tls").code)
	ls := s.as(t, s.root, "namespace", "ls")
	require.Contains(t, ls.stdout, "required")
	reads, id := s.token(t, "reads", "secrets:read")
	writes, _ := s.token(t, "writes", "secrets:write", "default:read,write")
	require.Zero(t, s.as(t, writes, "-n", "secrets", "put", "k", "value").code)
	s.as(t, reads, "-n", "secrets", "put", "k", "other").failed(t, 6, "right to write")
	s.as(t, reads, "get", "k").failed(t, 6, "default")
	s.as(t, reads, "token", "ls").failed(t, 6, "all namespaces")
	got := s.as(t, reads, "-n", "secrets", "get", "k", "--transport", "tcp")
	require.Equal(t, "value", got.stdout, got.text())
	all := s.as(t, s.root, "token", "ls")
	require.Contains(t, all.stdout, id)
	require.NotContains(t, all.stdout, readFile(t, reads))
	s.as(t, s.root, "token", "revoke", "0123456789abcdef").failed(t, 3, "no token")
	s.as(t, s.root, "token", "create", "reads", "--grant", "a:read").failed(t, 4, "already")
	s.as(t, s.root, "token", "create", "x", "--grant", "a:eat").failed(t, 2, "no right")

	// Nothing of it is lost with all processes.
	require.NoError(t, s.Kill())
	for _, n := range s.Nodes() {
		require.NoError(t, n.Start())
	}
	for _, n := range s.Nodes() {
		s.awaitServing(t, n.ID)
	}
	await(t, "the token counts after the restart", func() error {
		if r := s.as(t, reads, "-n", "secrets", "get", "k", "--transport", "tcp"); r.stdout != "value" {
			return errors.New(r.text())
		}
		return nil
	})

	// A client that reads: what it has ends with its token, on every node.
	c := s.dial(t, func(cfg *client.Config) {
		cfg.TLS, cfg.Token, cfg.Namespace, cfg.Transport = s.ca.trust(), readFile(t, reads), "secrets", "tcp"
	})
	get := func() error {
		ctx, cancel := within(5 * time.Second)
		defer cancel()
		_, err := c.Get(ctx, []byte("k"))
		return err
	}
	await(t, "READs by TCP", func() error {
		if err := get(); err != nil {
			return err
		}
		if c.Stats().TotalReads() == 0 {
			return errors.New("no READ yet")
		}
		return nil
	})
	rotated := s.as(t, s.root, "namespace", "rotate-keys", "secrets", "-o", "json")
	require.Zero(t, rotated.code, rotated.text())
	require.Equal(t, 3, strings.Count(rotated.stdout, `"rotated": true`), rotated.stdout)
	await(t, "READs with the new keys", func() error {
		before := c.Stats().TotalReads()
		if err := get(); err != nil {
			return err
		}
		if c.Stats().TotalReads() == before {
			return errors.New("it was read over gRPC")
		}
		return nil
	})
	require.Zero(t, s.as(t, s.root, "token", "revoke", id).code)
	await(t, "the revoked client is denied", func() error {
		if err := get(); !errors.Is(err, client.ErrDenied) {
			return fmt.Errorf("seen %v", err)
		}
		return nil
	})
	s.as(t, reads, "-n", "secrets", "get", "k").failed(t, 6, "not valid")

	// Renewed while the nodes run.
	s.ca.issue(s.certFile, s.keyFile)
	require.Equal(t, "value", s.as(t, s.root, "-n", "secrets", "get", "k").stdout)
	for _, n := range s.Nodes() {
		await(t, "the certificate is read again", func() error {
			conn, err := (&tls.Dialer{Config: &tls.Config{RootCAs: s.ca.trust().RootCAs, NextProtos: []string{"h2"}}}).DialContext(context.Background(), "tcp", n.Address)
			if err != nil {
				return err
			}
			defer func() { _ = conn.Close() }()
			cert, err := tls.LoadX509KeyPair(s.certFile, s.keyFile)
			require.NoError(t, err)
			if seen := conn.(*tls.Conn).ConnectionState().PeerCertificates[0]; !seen.Equal(cert.Leaf) {
				return errors.New("the old certificate")
			}
			return nil
		})
	}
}

// TestTokensWithoutTLS: on loopback tokens work without TLS; nodes know each other by the
// secret, and one with another secret has no part until it has the right one.
func TestTokensWithoutTLS(t *testing.T) {
	dir := tempDir(t)
	root, secret, wrong := filepath.Join(dir, "root.token"), filepath.Join(dir, "peers"), filepath.Join(dir, "wrong")
	require.Zero(t, kvctl(t, nil, "token", "generate", "--file", root).code)
	require.NoError(t, os.WriteFile(secret, []byte(strings.Repeat("s", 40)), 0o600))
	require.NoError(t, os.WriteFile(wrong, []byte(strings.Repeat("w", 40)), 0o600))
	c := newClusterIn(t, dir, devcluster.Config{Args: []string{"--auth", "tokens", "--auth-root-token-file", root, "--auth-peer-secret-file", secret}})
	c.kvctl(t, "put", "k", "v").failed(t, 6, "token")
	put := func(value string) {
		await(t, "a put", func() error {
			if r := c.kvctl(t, "--token-file", root, "put", "k", value); r.code != 0 {
				return errors.New(r.text())
			}
			return nil
		})
	}
	put("one")
	require.NoError(t, c.Node(3).Kill())
	require.NoError(t, c.Node(3).Start("--auth-peer-secret-file", wrong))
	await(t, "both sides say why", func() error {
		for _, id := range []uint64{1, 3} {
			if !strings.Contains(c.logOf(t, id), "auth-peer-secret-file") {
				return fmt.Errorf("node %d says nothing", id)
			}
		}
		return nil
	})
	put("two")
	require.NoError(t, c.Node(3).Kill())
	c.restart(t, 3)
	require.NoError(t, c.Node(1).Kill())
	put("three")
	require.Equal(t, "three", c.kvctl(t, "--token-file", root, "get", "k").stdout)
}

// TestAuthMistakes: what would leave a door open is refused at the start.
func TestAuthMistakes(t *testing.T) {
	dir := tempDir(t)
	open := filepath.Join(dir, "open.token")
	require.Zero(t, kvctl(t, nil, "token", "generate", "--file", open).code)
	require.NoError(t, os.Chmod(open, 0o644))
	kvctl(t, nil, "token", "generate", "--file", open).failed(t, 2, "exists already")
	start := func(args ...string) result {
		return command{bin: kvdBin, args: append([]string{"start", "--node-id", "1", "--data-dir", filepath.Join(dir, "data"), "--listen", freeAddr(t)}, args...)}.run(t)
	}
	start("--auth", "tokens", "--auth-root-token-file", open).refused(t, 2, "0644", "want 0600")
	start("--auth", "on").refused(t, 2, "want off or tokens")
	start("--tls-cert", filepath.Join(dir, "none.pem"), "--tls-key", filepath.Join(dir, "none.pem")).refused(t, 2, "no such file")
	start("--tls-key", open).refused(t, 2, "tls-cert")
	start("--auth-allow-plaintext").refused(t, 2, "mean nothing")
}
