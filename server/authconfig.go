package server

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"os"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// AuthMode says whether calls need a token.
type AuthMode string

// The modes.
const (
	AuthOff    AuthMode = "off"
	AuthTokens AuthMode = "tokens"
)

// AuthConfig says who may do what.
type AuthConfig struct {
	// Mode; default AuthOff: who reaches the node may do everything.
	Mode AuthMode
	// RootTokenFile holds the token of the first operator, as kvctl token generate writes
	// it: admin in all namespaces. Nobody else may read the file. It is read at the start.
	RootTokenFile string
	// PeerSecretFile holds what the nodes of a cluster without TLS know each other by: at
	// least 32 bytes, the same on every node.
	PeerSecretFile string
	// AllowPlaintext takes tokens, and the peers' secret, from other hosts over
	// connections without TLS.
	AllowPlaintext bool
}

// minSecretBytes of a PeerSecretFile.
const minSecretBytes = 32

func (c Config) validateAuth() error {
	nodes := max(1, len(c.Peers))
	if err := c.TLS.validate(nodes); err != nil {
		return err
	}
	switch a := c.Auth; a.Mode {
	case AuthOff, "":
		if a.RootTokenFile != "" || a.PeerSecretFile != "" || a.AllowPlaintext {
			return fmt.Errorf("settings of tokens with auth %s, which mean nothing: set auth to %s, or leave them out", AuthOff, AuthTokens)
		}
	case AuthTokens:
		switch {
		case a.PeerSecretFile != "" && c.TLS.PeerCAFile != "":
			return fmt.Errorf("both auth-peer-secret-file and tls-peer-ca: with TLS the nodes know each other by their certificates, leave the secret out")
		case nodes > 1 && a.PeerSecretFile == "" && c.TLS.PeerCAFile == "":
			return fmt.Errorf("auth %s on a cluster of %d nodes that have no way to know each other: set up TLS with tls-peer-ca, or give every node the same auth-peer-secret-file", AuthTokens, nodes)
		}
	default:
		return fmt.Errorf("auth %q: want %s or %s", a.Mode, AuthOff, AuthTokens)
	}
	return nil
}

// readSecret reads a file that nobody but its owner may read.
func readSecret(file string) ([]byte, error) {
	info, err := os.Stat(file)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return nil, fmt.Errorf("%w: %s has mode %04o, so others can read it: want 0600 (chmod 600 %s), and take what it holds for known", ErrConfig, file, mode, file)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return bytes.TrimSpace(b), nil
}

// loadRootToken returns nil where there is no file.
func (a AuthConfig) loadRootToken() (*token, error) {
	if a.RootTokenFile == "" {
		return nil, nil
	}
	b, err := readSecret(a.RootTokenFile)
	if err != nil {
		return nil, err
	}
	id, secret, err := parseToken(string(b))
	if err != nil || id != rootTokenID {
		return nil, fmt.Errorf("%w: %s holds no root token: kvctl token generate --file %s makes one", ErrConfig, a.RootTokenFile, a.RootTokenFile)
	}
	sum := sha256.Sum256(secret[:])
	return &token{&kvdv1.TokenRecord{
		Info:         &kvdv1.TokenInfo{Id: rootTokenID, Name: rootTokenID, Grants: []*kvdv1.Grant{{Namespace: anyNamespace, Admin: true}}},
		SecretSha256: sum[:],
	}}, nil
}

// loadPeerProof returns what nodes show each other; "" where there is no file. It is not
// the secret itself, which may be used for more.
func (a AuthConfig) loadPeerProof() (string, error) {
	if a.PeerSecretFile == "" {
		return "", nil
	}
	b, err := readSecret(a.PeerSecretFile)
	if err != nil {
		return "", err
	}
	if len(b) < minSecretBytes {
		return "", fmt.Errorf("%w: %s holds %d bytes: want at least %d, drawn at random", ErrConfig, a.PeerSecretFile, len(b), minSecretBytes)
	}
	h := hmac.New(sha256.New, b)
	_, _ = h.Write([]byte("kvd peer 1"))
	return hex.EncodeToString(h.Sum(nil)), nil
}

// warnOfOpenDoors tells, once and loudly, what anyone may do, and where nobody may do
// anything.
func (n *Node) warnOfOpenDoors() {
	if n.auth.mode == AuthTokens && n.cfg.Bootstrap && n.cfg.Auth.RootTokenFile == "" {
		n.log.Warn("auth by tokens without a root token: unless this cluster has an operator's token already, nobody can do anything here, nor make a token, until nodes are started with auth-root-token-file")
	}
	tcp, ok := n.listener.Addr().(*net.TCPAddr)
	if !ok || tcp.IP.IsLoopback() {
		return
	}
	if n.auth.mode != AuthTokens {
		n.log.Warn("ANYONE WHO REACHES THIS NODE MAY READ AND WRITE EVERYTHING: auth is off and it listens beyond loopback; set auth to tokens, or keep it on a network that you trust", "listen", n.cfg.ListenAddr)
	}
	if n.auth.mode == AuthTokens && n.auth.tls == nil && n.cfg.Auth.AllowPlaintext {
		n.log.Warn("tokens are taken over plain text, where whoever sees the network can read them: set up TLS", "listen", n.cfg.ListenAddr)
	}
}
