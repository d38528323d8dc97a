package server

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
)

func TestParseToken(t *testing.T) {
	digits := strings.Repeat("0123456789abcdef", 4)
	id, secret, err := parseToken("kvd_0123456789abcdef_" + digits)
	require.NoError(t, err)
	require.Equal(t, "0123456789abcdef", id)
	require.Equal(t, [8]byte{0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef}, [8]byte(secret[:8]))
	id, _, err = parseToken("kvd_root_" + digits)
	require.NoError(t, err)
	require.Equal(t, rootTokenID, id)
	for _, bad := range []string{
		"", "kvd", "kvd_", "kvd__", "kvd_root_", "kvd_root", "root_" + digits, "KVD_root_" + digits, " kvd_root_" + digits, "kvd_root_" + digits + "\n",
		"kvd_Root_" + digits, "kvd_0123456789abcde_" + digits, "kvd_0123456789abcdef0_" + digits, "kvd_0123456789ABCDEF_" + digits,
		"kvd_root_" + digits[1:], "kvd_root_" + digits + "0", "kvd_root_" + strings.ToUpper(digits), "kvd_root_" + digits[:63] + "g", "kvd_root_" + digits + "_x",
	} {
		_, _, err := parseToken(bad)
		require.ErrorIs(t, err, errTokenText, "%q", bad)
		if len(bad) > 8 {
			require.NotContains(t, err.Error(), bad)
		}
	}
}

// FuzzParseToken: what is taken for a token is the one text that such a token has.
func FuzzParseToken(f *testing.F) {
	f.Add("kvd_root_" + strings.Repeat("00", 32))
	f.Add(tokenOf("0123456789abcdef", "x"))
	f.Add("kvd_0123456789abcdef_")
	f.Fuzz(func(t *testing.T, s string) {
		id, secret, err := parseToken(s)
		if err != nil {
			return
		}
		if id != rootTokenID && !tokenID.MatchString(id) {
			t.Fatalf("id %q", id)
		}
		const hexDigits = "0123456789abcdef"
		again := []byte("kvd_" + id + "_")
		for _, b := range secret {
			again = append(again, hexDigits[b>>4], hexDigits[b&15])
		}
		if string(again) != s {
			t.Fatalf("%q is taken for %q", s, again)
		}
	})
}

// Group 0 keeps tokens: what comes of each change, and that a restart and a snapshot
// bring the same.
func TestTokensContent(t *testing.T) {
	r := newRig(t, smallLimits, 16<<20)
	g := r.eng.Group(0)
	b := g.NewBatch()
	require.NoError(t, b.SetMeta(engine.Meta{Applied: 1, AppliedTerm: 1, ConfigID: 1, Conf: r.shard.meta.Conf}))
	require.NoError(t, putNamespace(b, &kvdv1.NamespaceInfo{Id: 1, Name: DefaultNamespace, OneSided: true}))
	require.NoError(t, b.Commit())
	open := func() (*tokens, *machine) {
		known := newTokens(nil)
		m := newMachine(0, g)
		m.content = metaContent{newNamespaces(r.arena), known, newRegistry(&kvdv1.Manifest{}, func(uint64, []*kvdv1.NodeRecord) {}), newShardMap(&kvdv1.Manifest{}, func() {}), g}
		_, err := m.Open()
		require.NoError(t, err)
		return known, m
	}
	rec := func(id, name string, expires int64) *kvdv1.TokenRecord {
		return &kvdv1.TokenRecord{
			Info:         &kvdv1.TokenInfo{Id: strings.Repeat(id, 16), Name: name, ExpiresUnixMs: expires, Grants: []*kvdv1.Grant{{Namespace: "*", Read: true}}},
			SecretSha256: bytes.Repeat([]byte{7}, 32),
		}
	}
	known, m := open()
	index := uint64(1)
	apply := func(now int64, op *kvdv1.TokenOp) tokenResult {
		index++
		cmd := &kvdv1.Command{LeaderUnixMs: now, Op: &kvdv1.Command_Token{Token: op}}
		got, err := m.Apply([]raft.Entry{command(t, index, cmd)}, index, 1)
		require.NoError(t, err)
		return got[0].(tokenResult)
	}
	create := func(x *kvdv1.TokenRecord) tokenResult { return apply(1, &kvdv1.TokenOp{Create: x}) }
	expire := func(now int64, ids ...string) {
		apply(now, &kvdv1.TokenOp{Expire: &kvdv1.TokenExpiry{Ids: ids}})
	}
	a, c := rec("a", "one", 0), rec("c", "three", 100)
	require.False(t, create(a).existed)
	require.False(t, create(a).existed, "the same once more")
	require.True(t, create(rec("b", "one", 0)).existed, "the name")
	require.True(t, create(rec("a", "two", 0)).existed, "the id")
	require.False(t, create(rec("b", "two", 0)).existed)
	require.False(t, create(c).existed)
	held := known.find(c.GetInfo().GetId())
	require.NotNil(t, held)
	expire(99, c.GetInfo().GetId(), a.GetInfo().GetId(), "ffff")
	require.Same(t, held, known.find(c.GetInfo().GetId()), "by the entry's time it still counts, and other changes leave it what it is")
	require.True(t, known.alive(held, time.UnixMilli(99)))
	require.False(t, known.alive(held, time.UnixMilli(100)))
	expire(100, c.GetInfo().GetId(), a.GetInfo().GetId())
	require.Nil(t, known.find(c.GetInfo().GetId()))
	require.NotNil(t, known.find(a.GetInfo().GetId()), "it never expires")
	require.True(t, apply(1, &kvdv1.TokenOp{Revoke: "ffff"}).unknown)
	require.False(t, apply(1, &kvdv1.TokenOp{Revoke: a.GetInfo().GetId()}).unknown)
	require.True(t, apply(1, &kvdv1.TokenOp{Revoke: a.GetInfo().GetId()}).unknown)

	again, _ := open()
	require.Len(t, again.records(), 1)
	require.True(t, proto.Equal(known.records()[0], again.records()[0]))

	index++
	_, err := m.Apply([]raft.Entry{command(t, index, &kvdv1.Command{Op: &kvdv1.Command_Token{Token: &kvdv1.TokenOp{}}})}, index, 1)
	require.ErrorIs(t, err, engine.ErrCorrupt)
	good, err := proto.Marshal(a)
	require.NoError(t, err)
	check := metaContent{}.check
	require.NoError(t, check(engine.Item{Aux: auxToken, Key: []byte(a.GetInfo().GetId()), Value: good}))
	for _, it := range []engine.Item{
		{Aux: auxToken, Key: []byte("bbbbbbbbbbbbbbbb"), Value: good},
		{Aux: auxToken, Key: []byte(a.GetInfo().GetId()), Value: []byte{0xff}},
		{Aux: auxToken, Key: []byte(a.GetInfo().GetId())},
	} {
		require.ErrorIs(t, check(it), engine.ErrCorrupt)
	}
}

// What a caller may want of a token, and what is no token.
func TestTokenRequests(t *testing.T) {
	good := func() *kvdv1.CreateTokenRequest {
		return &kvdv1.CreateTokenRequest{Id: "0123456789abcdef", Name: "x", SecretSha256: make([]byte, 32), Grants: []*kvdv1.Grant{{Namespace: "a", Read: true}, {Namespace: "*", Admin: true}}}
	}
	require.NoError(t, checkTokenRequest(good()))
	for what, change := range map[string]func(*kvdv1.CreateTokenRequest){
		"no id":        func(r *kvdv1.CreateTokenRequest) { r.Id = "" },
		"root":         func(r *kvdv1.CreateTokenRequest) { r.Id = rootTokenID },
		"long id":      func(r *kvdv1.CreateTokenRequest) { r.Id += "0" },
		"no name":      func(r *kvdv1.CreateTokenRequest) { r.Name = "" },
		"root's name":  func(r *kvdv1.CreateTokenRequest) { r.Name = rootTokenID },
		"odd name":     func(r *kvdv1.CreateTokenRequest) { r.Name = "a\nb" },
		"short sum":    func(r *kvdv1.CreateTokenRequest) { r.SecretSha256 = r.SecretSha256[1:] },
		"no grant":     func(r *kvdv1.CreateTokenRequest) { r.Grants = nil },
		"no right":     func(r *kvdv1.CreateTokenRequest) { r.Grants[0].Read = false },
		"no namespace": func(r *kvdv1.CreateTokenRequest) { r.Grants[0].Namespace = "" },
		"a pattern":    func(r *kvdv1.CreateTokenRequest) { r.Grants[0].Namespace = "a*" },
		"twice":        func(r *kvdv1.CreateTokenRequest) { r.Grants[0].Namespace = "*" },
		"too many":     func(r *kvdv1.CreateTokenRequest) { r.Grants = make([]*kvdv1.Grant, maxGrants+1) },
		"for ages":     func(r *kvdv1.CreateTokenRequest) { r.TtlMs = 1 << 60 },
	} {
		r := good()
		change(r)
		requireReason(t, checkTokenRequest(r), kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, what)
	}
}

// A right in one namespace is none in another, whatever the names are.
func TestRights(t *testing.T) {
	tok := &token{&kvdv1.TokenRecord{Info: &kvdv1.TokenInfo{Grants: []*kvdv1.Grant{
		{Namespace: "r", Read: true}, {Namespace: "w", Write: true}, {Namespace: "rw", Read: true, Write: true}, {Namespace: "a", Admin: true},
	}}}}
	for ns, want := range map[string]right{"r": rightRead, "w": rightWrite, "rw": rightRead | rightWrite, "a": rightRead | rightWrite | rightAdmin, "": 0, "*": 0, "r.": 0, "R": 0} {
		for _, r := range []right{rightRead, rightWrite, rightAdmin} {
			require.Equal(t, want&r != 0, tok.may(r, ns), "%v in %q", r, ns)
		}
	}
	require.True(t, tok.mayAnywhere(rightAdmin))
	require.False(t, (&caller{token: tok}).operator(), "admin in a namespace is not the operator")
	all := &token{&kvdv1.TokenRecord{Info: &kvdv1.TokenInfo{Grants: []*kvdv1.Grant{{Namespace: "*", Write: true}}}}}
	require.True(t, all.may(rightWrite, "x"))
	require.False(t, all.may(rightRead, "x"))
}

// Files with secrets are for their owner alone, and hold what they should.
func TestSecretFiles(t *testing.T) {
	dir := t.TempDir()
	file := func(content string, mode os.FileMode) string {
		f := filepath.Join(dir, "f")
		_ = os.Remove(f)
		require.NoError(t, os.WriteFile(f, []byte(content), mode))
		require.NoError(t, os.Chmod(f, mode))
		return f
	}
	root := tokenOf(rootTokenID, "x")
	tok, err := AuthConfig{RootTokenFile: file(root+"\n", 0o600)}.loadRootToken()
	require.NoError(t, err)
	require.True(t, (&caller{token: tok}).operator())
	for words, f := range map[string]func() error{
		"mode 0640": func() error {
			_, err := AuthConfig{RootTokenFile: file(root, 0o640)}.loadRootToken()
			return err
		},
		"mode 0604": func() error {
			_, err := AuthConfig{PeerSecretFile: file(peerSecret, 0o604)}.loadPeerProof()
			return err
		},
		"no root token": func() error {
			_, err := AuthConfig{RootTokenFile: file(tokenOf("0123456789abcdef", "x"), 0o600)}.loadRootToken()
			return err
		},
		"kvctl token generate": func() error {
			_, err := AuthConfig{RootTokenFile: file("secret", 0o600)}.loadRootToken()
			return err
		},
		"no such file": func() error {
			_, err := AuthConfig{RootTokenFile: dir + "/none"}.loadRootToken()
			return err
		},
		"want at least 32": func() error {
			_, err := AuthConfig{PeerSecretFile: file("short", 0o600)}.loadPeerProof()
			return err
		},
	} {
		err := f()
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, words)
		require.NotContains(t, err.Error(), root[20:])
	}
	one, err := AuthConfig{PeerSecretFile: file(peerSecret, 0o600)}.loadPeerProof()
	require.NoError(t, err)
	two, err := AuthConfig{PeerSecretFile: file(peerSecret+"\n", 0o400)}.loadPeerProof()
	require.NoError(t, err)
	require.Equal(t, one, two)
	require.NotContains(t, one, peerSecret)
}

// Settings that would leave a door open, or mean nothing, are refused with a sentence.
func TestAuthSettings(t *testing.T) {
	base := testConfigs(t, 3, 1)[0]
	for words, change := range map[string]func(*Config){
		"want off or tokens":        func(c *Config) { c.Auth.Mode = "on" },
		"mean nothing":              func(c *Config) { c.Auth.RootTokenFile = "x" },
		"no way to know each other": func(c *Config) { c.Auth.Mode = AuthTokens },
		"leave the secret out": func(c *Config) {
			c.Auth = AuthConfig{Mode: AuthTokens, PeerSecretFile: "x"}
			c.TLS = TLSConfig{CertFile: "x", KeyFile: "x", PeerCAFile: "x"}
		},
		"without tls-cert":         func(c *Config) { c.TLS.PeerCAFile = "x" },
		"tls-cert without tls-key": func(c *Config) { c.TLS.CertFile = "x" },
		"without tls-peer-ca":      func(c *Config) { c.TLS = TLSConfig{CertFile: "x", KeyFile: "x"} },
		"want required or optional": func(c *Config) {
			c.TLS = TLSConfig{CertFile: "x", KeyFile: "x", PeerCAFile: "x", ClientCerts: "perhaps"}
		},
		"name the CAs": func(c *Config) {
			c.TLS = TLSConfig{CertFile: "x", KeyFile: "x", PeerCAFile: "x", ClientCerts: "optional"}
		},
	} {
		c := base
		change(&c)
		err := c.Validate()
		require.ErrorIs(t, err, ErrConfig, words)
		require.ErrorContains(t, err, words)
	}
	require.NoError(t, base.Validate())
	base.Auth = AuthConfig{Mode: AuthTokens, PeerSecretFile: "x"}
	require.NoError(t, base.Validate())
}
