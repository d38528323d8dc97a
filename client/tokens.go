package client

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// Grant gives rights in one namespace, or in all ("*"). Admin includes the others; admin
// in all namespaces is the cluster's operator.
type Grant struct {
	Namespace          string
	Read, Write, Admin bool
}

// TokenSpec describes a token to be made.
type TokenSpec struct {
	Name   string
	Grants []Grant
	TTL    time.Duration // 0: it never expires
}

// Token is everything that the cluster knows of one.
type Token struct {
	ID      string
	Name    string
	Created time.Time
	Expires time.Time // zero: never
	Grants  []Grant
}

// RootToken draws a token for a node's auth-root-token-file.
func RootToken() string { return tokenText("root", drawSecret()) }

func drawSecret() (secret [32]byte) {
	_, _ = rand.Read(secret[:]) // it never fails
	return secret
}

func tokenText(id string, secret [32]byte) string {
	return "kvd_" + id + "_" + hex.EncodeToString(secret[:])
}

// CreateToken makes a token and returns its text, which nobody can show again: the
// cluster is only told the SHA-256 of the secret. Errors: ErrAlreadyExists (the name is
// taken), ErrInvalid, ErrDenied, ErrUnavailable, ErrOutcomeUnknown.
func (a *Admin) CreateToken(ctx context.Context, spec TokenSpec) (text string, made Token, err error) {
	if spec.Name == "" || len(spec.Grants) == 0 || spec.TTL < 0 {
		return "", Token{}, fmt.Errorf("create token: %w: want a name, a grant, and a TTL of 0 or more", ErrInvalid)
	}
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	secret, id := drawSecret(), [8]byte{}
	_, _ = rand.Read(id[:]) // it never fails
	sum := sha256.Sum256(secret[:])
	req := &kvdv1.CreateTokenRequest{
		Id: hex.EncodeToString(id[:]), Name: spec.Name, SecretSha256: sum[:], TtlMs: uint64(spec.TTL / time.Millisecond),
	}
	for _, g := range spec.Grants {
		req.Grants = append(req.Grants, &kvdv1.Grant{Namespace: g.Namespace, Read: g.Read, Write: g.Write, Admin: g.Admin})
	}
	err = a.anywhere(ctx, "create token", func(ctx context.Context, r *remote) error {
		// The same request once more makes no second token.
		resp, err := r.cluster.CreateToken(ctx, req)
		if err != nil {
			return registrationFailed(rpcFailed(r.addr, err))
		}
		made = decodeToken(resp.GetToken())
		return nil
	})
	if err != nil {
		return "", Token{}, err
	}
	return tokenText(req.GetId(), secret), made, nil
}

func decodeToken(t *kvdv1.TokenInfo) Token {
	tok := Token{ID: t.GetId(), Name: t.GetName(), Created: time.UnixMilli(t.GetCreatedUnixMs())}
	if ms := t.GetExpiresUnixMs(); ms != 0 {
		tok.Expires = time.UnixMilli(ms)
	}
	for _, g := range t.GetGrants() {
		tok.Grants = append(tok.Grants, Grant{Namespace: g.GetNamespace(), Read: g.GetRead(), Write: g.GetWrite(), Admin: g.GetAdmin()})
	}
	return tok
}

// Tokens lists them by name. The root token is in no list.
func (a *Admin) Tokens(ctx context.Context) ([]Token, error) {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	var list []Token
	err := a.anywhere(ctx, "tokens", func(ctx context.Context, r *remote) error {
		resp, err := r.cluster.ListTokens(ctx, &kvdv1.ListTokensRequest{})
		if err != nil {
			return rpcFailed(r.addr, err)
		}
		list = list[:0]
		for _, t := range resp.GetTokens() {
			list = append(list, decodeToken(t))
		}
		return nil
	})
	return list, err
}

// RevokeToken ends a token: every node ends what it has open as soon as it hears of it.
// Errors: ErrNotFound, ErrDenied, ErrUnavailable.
func (a *Admin) RevokeToken(ctx context.Context, id string) error {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	unsure := false
	var none error
	err := a.anywhere(ctx, "revoke token", func(ctx context.Context, r *remote) error {
		_, err := r.cluster.RevokeToken(ctx, &kvdv1.RevokeTokenRequest{Id: id})
		err = rpcFailed(r.addr, err)
		switch {
		case errors.Is(err, ErrNotFound):
			if !unsure { // else an earlier try did it
				none = err
			}
			return nil // it is the leader's word: no other node knows better
		case err != nil && mayHaveApplied(err):
			unsure = true
			return registrationFailed(err) // to do it twice does no harm
		}
		return err
	})
	if err == nil && none != nil {
		return fmt.Errorf("revoke token: %w", none)
	}
	return err
}

// KeysRotated is one node's answer to RotateKeys.
type KeysRotated struct {
	NodeID   uint64
	Address  string
	Sessions int // that were ended
	Err      error
}

// RotateKeys has every node register a namespace's memory under new keys and end its
// sessions there. A node that did not answer has Err, and may go on with the old keys:
// the error is then set too.
func (a *Admin) RotateKeys(ctx context.Context, namespace string) ([]KeysRotated, error) {
	ctx, cancel := a.withDeadline(ctx)
	defer cancel()
	nodes, err := a.Status(ctx)
	if err != nil {
		return nil, fmt.Errorf("rotate keys: %w", err)
	}
	var list []KeysRotated
	var failed []error
	for _, n := range nodes {
		k := KeysRotated{NodeID: n.NodeID, Address: n.Address, Err: n.Err}
		if k.Err == nil {
			k.Err = a.at(ctx, n.Address, func(ctx context.Context, r *remote) error {
				resp, err := r.cluster.RotateKeys(ctx, &kvdv1.RotateKeysRequest{Namespace: namespace})
				k.Sessions = int(resp.GetSessions())
				return rpcFailed(r.addr, err)
			})
		}
		if k.Err != nil {
			failed = append(failed, k.Err)
		}
		list = append(list, k)
	}
	if len(failed) > 0 {
		return list, fmt.Errorf("rotate keys: not on every node: %w", adminGaveUp(ctx, failed))
	}
	return list, nil
}
