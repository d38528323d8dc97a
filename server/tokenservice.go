package server

import (
	"context"
	"crypto/sha256"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// CreateToken implements kvdv1.ClusterServer. The caller drew the id and the secret, so
// the secret is never sent, and the same request once more makes the same token.
func (n *Node) CreateToken(ctx context.Context, req *kvdv1.CreateTokenRequest) (*kvdv1.CreateTokenResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	if err := checkTokenRequest(req); err != nil {
		return nil, err
	}
	var resp *kvdv1.CreateTokenResponse
	err := n.metaLeader(ctx, func(ctx context.Context) (err error) {
		resp, err = n.createTokenHere(ctx, req)
		return err
	}, func(ctx context.Context, c kvdv1.ClusterClient) (err error) {
		resp, err = c.CreateToken(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	// So that it can be used here at once.
	err = n.awaitMeta(ctx, func() bool {
		ends := resp.GetToken().GetExpiresUnixMs()
		return n.tokens.find(req.GetId()) != nil || ends != 0 && ends <= n.cfg.Clock.Now().UnixMilli()
	})
	if err != nil {
		return nil, failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY, RetryAfterMs: 100}, "token %s was made, but has not reached node %d yet", req.GetName(), n.id())
	}
	return resp, nil
}

func checkTokenRequest(req *kvdv1.CreateTokenRequest) error {
	bad := func(format string, args ...any) error {
		return fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, format, args...)
	}
	switch {
	case !tokenID.MatchString(req.GetId()):
		return bad("token id: want 16 hexadecimal digits, drawn at random")
	case !tokenName.MatchString(req.GetName()) || req.GetName() == rootTokenID:
		return bad("token name %q: want 1 to 63 of letters, digits, dot, dash, underscore and @, with a letter or digit at both ends, and not %s", req.GetName(), rootTokenID)
	case len(req.GetSecretSha256()) != sha256.Size:
		return bad("the sum of the token's secret has %d bytes: want the %d of its SHA-256", len(req.GetSecretSha256()), sha256.Size)
	case len(req.GetGrants()) == 0 || len(req.GetGrants()) > maxGrants:
		return bad("%d grants: want 1 to %d", len(req.GetGrants()), maxGrants)
	case req.GetTtlMs() > uint64(1)<<50:
		return bad("the token is to live for %d ms: leave its expiry out instead", req.GetTtlMs())
	}
	seen := map[string]bool{}
	for _, g := range req.GetGrants() {
		switch {
		case g.GetNamespace() != anyNamespace && !namespaceName.MatchString(g.GetNamespace()):
			return bad("a grant for namespace %q: want the name of a namespace, or * for all", g.GetNamespace())
		case seen[g.GetNamespace()]:
			return bad("two grants for namespace %s: want one with all its rights", g.GetNamespace())
		case rightsOf(g) == 0:
			return bad("a grant without rights for namespace %s: want read, write or admin", g.GetNamespace())
		}
		seen[g.GetNamespace()] = true
	}
	return nil
}

func (n *Node) createTokenHere(ctx context.Context, req *kvdv1.CreateTokenRequest) (*kvdv1.CreateTokenResponse, error) {
	if len(*n.tokens.known.Load()) >= maxTokens {
		return nil, fail(kvdv1.ErrorDetail_REASON_EXHAUSTED, "there are %d tokens, the limit: revoke some", maxTokens)
	}
	now := n.cfg.Clock.Now().UnixMilli()
	rec := &kvdv1.TokenRecord{
		Info:         &kvdv1.TokenInfo{Id: req.GetId(), Name: req.GetName(), CreatedUnixMs: now, Grants: req.GetGrants()},
		SecretSha256: req.GetSecretSha256(),
	}
	if req.GetTtlMs() > 0 {
		rec.Info.ExpiresUnixMs = now + int64(req.GetTtlMs())
	}
	// A retried request has another time, and means the token that is there.
	if have := n.tokens.find(req.GetId()); have != nil && sameToken(have.rec, rec) {
		return &kvdv1.CreateTokenResponse{Token: have.rec.GetInfo()}, nil
	}
	r, err := n.changeTokens(ctx, &kvdv1.TokenOp{Create: rec})
	if err != nil {
		return nil, err
	}
	if r.existed {
		return nil, fail(kvdv1.ErrorDetail_REASON_ALREADY_EXISTS, "there is a token named %s already (id %s): revoke it first, or choose another name", r.info.GetName(), r.info.GetId())
	}
	return &kvdv1.CreateTokenResponse{Token: r.info}, nil
}

// sameToken tells whether two records are of one request.
func sameToken(a, b *kvdv1.TokenRecord) bool {
	return string(a.GetSecretSha256()) == string(b.GetSecretSha256()) && a.GetInfo().GetId() == b.GetInfo().GetId() && a.GetInfo().GetName() == b.GetInfo().GetName()
}

// changeTokens proposes a change and returns its outcome. This node leads group 0.
func (n *Node) changeTokens(ctx context.Context, op *kvdv1.TokenOp) (tokenResult, error) {
	cmd := &kvdv1.Command{LeaderUnixMs: n.cfg.Clock.Now().UnixMilli(), Op: &kvdv1.Command_Token{Token: op}}
	result, _, err := n.propose(ctx, 0, n.host.Group(0), cmd)
	if err != nil {
		return tokenResult{}, err
	}
	r, ok := result.(tokenResult)
	if !ok {
		return tokenResult{}, fail(kvdv1.ErrorDetail_REASON_OUTCOME_UNKNOWN, "the tokens may or may not have been changed: list them")
	}
	return r, nil
}

// awaitMeta returns once what this node has applied of group 0 makes done true.
func (n *Node) awaitMeta(ctx context.Context, done func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, metaWait)
	defer cancel()
	for {
		// The index first: what is applied after it is waited for, whatever comes between.
		next := n.meta.appliedIndex() + 1
		if done() {
			return nil
		}
		if err := n.meta.waitApplied(ctx, next); err != nil {
			return err
		}
	}
}

// ListTokens implements kvdv1.ClusterServer; the answer is the leader's.
func (n *Node) ListTokens(ctx context.Context, req *kvdv1.ListTokensRequest) (*kvdv1.ListTokensResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	var resp *kvdv1.ListTokensResponse
	err := n.metaLeader(ctx, func(ctx context.Context) error {
		if err := n.metaBarrier(ctx); err != nil {
			return err
		}
		resp = &kvdv1.ListTokensResponse{Tokens: n.tokens.infos()}
		return nil
	}, func(ctx context.Context, c kvdv1.ClusterClient) (err error) {
		resp, err = c.ListTokens(ctx, req)
		return err
	})
	return resp, err
}

// metaBarrier returns once this node, which leads group 0, has applied everything that
// was acknowledged before.
func (n *Node) metaBarrier(ctx context.Context) error {
	g := n.host.Group(0)
	index, err := g.ReadIndex(ctx)
	if err == nil {
		err = n.meta.waitApplied(ctx, index)
	}
	return failRaft(err, 0, g)
}

// RevokeToken implements kvdv1.ClusterServer.
func (n *Node) RevokeToken(ctx context.Context, req *kvdv1.RevokeTokenRequest) (*kvdv1.RevokeTokenResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	if req.GetId() == rootTokenID {
		return nil, fail(kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "the root token is in a file of each node (auth-root-token-file): change it there and restart the nodes")
	}
	var resp *kvdv1.RevokeTokenResponse
	err := n.metaLeader(ctx, func(ctx context.Context) error {
		// A token that another leader made may not have been applied here.
		if err := n.metaBarrier(ctx); err != nil {
			return err
		}
		if n.tokens.find(req.GetId()) == nil {
			return failUnknownToken(req.GetId())
		}
		r, err := n.changeTokens(ctx, &kvdv1.TokenOp{Revoke: req.GetId()})
		if err == nil && r.unknown {
			err = failUnknownToken(req.GetId())
		}
		resp = &kvdv1.RevokeTokenResponse{}
		return err
	}, func(ctx context.Context, c kvdv1.ClusterClient) (err error) {
		resp, err = c.RevokeToken(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := n.awaitMeta(ctx, func() bool { return n.tokens.find(req.GetId()) == nil }); err != nil {
		return nil, failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY, RetryAfterMs: 100}, "the token is revoked, but node %d has not heard of it yet", n.id())
	}
	if err := n.sessions.awaitOwner(ctx, req.GetId()); err != nil {
		return nil, failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY, RetryAfterMs: 100}, "the token is revoked, but node %d has not ended yet all that it had open: it goes on with that", n.id())
	}
	return resp, nil
}

func failUnknownToken(id string) error {
	return fail(kvdv1.ErrorDetail_REASON_UNKNOWN_TOKEN, "there is no token with id %q: kvctl token ls lists them", id)
}

// expireTokens proposes what is past its time, where this node leads group 0, and ends
// here what such tokens have open.
func (n *Node) expireTokens(ctx context.Context) {
	now := n.cfg.Clock.Now()
	n.tokens.endDead(now)
	g := n.host.Group(0)
	ids := n.tokens.overdue(now)
	if len(ids) == 0 || !g.Status().Leading {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, expireWait)
	defer cancel()
	if _, err := n.changeTokens(ctx, &kvdv1.TokenOp{Expire: &kvdv1.TokenExpiry{Ids: ids}}); err != nil {
		n.log.Info("the end of tokens was not proposed; it will be tried again", "tokens", len(ids), "err", err)
		return
	}
	n.log.Info("tokens ended by their expiry", "tokens", len(ids))
}

// RotateKeys implements kvdv1.ClusterServer: for the answering node.
func (n *Node) RotateKeys(ctx context.Context, req *kvdv1.RotateKeysRequest) (*kvdv1.RotateKeysResponse, error) {
	if !n.ready.Load() {
		return nil, errStarting
	}
	name := req.GetNamespace()
	if name == "" {
		name = DefaultNamespace
	}
	ns, err := n.findNamespace(ctx, name)
	if err != nil {
		return nil, err
	}
	// Looked at again: it may have been unknown here before.
	if err := wantsSecure(callerOf(ctx), ns); err != nil {
		return nil, err
	}
	began := time.Now()
	ended := n.sessions.evict(ns.GetId(), "the keys of namespace "+name+" are rotated: open a new session")
	if err := n.export.rotateKeys(ns.GetId()); err != nil {
		return nil, failTransport("of namespace "+name, err)
	}
	n.log.Info("keys rotated", "namespace", name, "sessions ended", ended, "took", time.Since(began))
	return &kvdv1.RotateKeysResponse{Sessions: uint32(ended)}, nil
}
