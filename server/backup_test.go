package server

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/raft"
)

func (c *testCluster) backup(i int) kvdv1.BackupClient { return kvdv1.NewBackupClient(c.conns[i]) }

// callBackup is TestWhoMay's.
func callBackup(ctx context.Context, b kvdv1.BackupClient, method string, namespace uint32, key []byte) error {
	opened, err := b.OpenExport(ctx, &kvdv1.OpenExportRequest{Shard: 1})
	id := opened.GetExportId()
	if err == nil {
		defer func() { _, _ = b.CloseExport(ctx, &kvdv1.CloseExportRequest{ExportId: id}) }()
	}
	switch method {
	case kvdv1.Backup_ReadExport_FullMethodName:
		_, err = b.ReadExport(ctx, &kvdv1.ReadExportRequest{ExportId: id})
	case kvdv1.Backup_CloseExport_FullMethodName:
		_, err = b.CloseExport(ctx, &kvdv1.CloseExportRequest{ExportId: id})
	case kvdv1.Backup_Import_FullMethodName:
		_, err = b.Import(ctx, &kvdv1.ImportRequest{Items: []*kvdv1.BackupItem{{NamespaceId: namespace, Key: []byte("present"), Value: key}}})
	case kvdv1.Backup_ImportCluster_FullMethodName:
		_, err = b.ImportCluster(ctx, &kvdv1.ImportClusterRequest{Namespaces: []*kvdv1.NamespaceInfo{{Name: "a", OneSided: true}}})
	}
	return err
}

func (c *testCluster) export(i int, shard uint32) *kvdv1.OpenExportResponse {
	c.t.Helper()
	r, err := c.backup(i).OpenExport(testContext(c.t), &kvdv1.OpenExportRequest{Shard: shard})
	require.NoError(c.t, err)
	return r
}

// read reads an export to its end.
func (c *testCluster) read(i int, id uint64) (items []*kvdv1.BackupItem, pages int) {
	c.t.Helper()
	req := &kvdv1.ReadExportRequest{ExportId: id}
	for {
		r, err := c.backup(i).ReadExport(testContext(c.t), req)
		require.NoError(c.t, err)
		again, err := c.backup(i).ReadExport(testContext(c.t), req)
		require.NoError(c.t, err)
		require.Equal(c.t, fmt.Sprint(r), fmt.Sprint(again), "the same page once more")
		pages++
		items = append(items, r.GetItems()...)
		if !r.GetMore() {
			return items, pages
		}
		last := r.GetItems()[len(r.GetItems())-1]
		req.AfterNamespace, req.AfterKey = last.GetNamespaceId(), last.GetKey()
	}
}

// An export holds what was acknowledged before it was opened, at the index that it names,
// and nothing that came later; by the leader's word, which a follower does not have.
func TestExport(t *testing.T) {
	c := startCluster(t, 3, 1)
	ctx := testContext(t)
	value := strings.Repeat("v", 100_000)
	for i := range 30 {
		_, err := c.put(fmt.Sprintf("key-%02d", i), value, nil)
		require.NoError(t, err)
	}
	leader := c.leaderOf(1)
	_, err := c.backup((leader+1)%3).OpenExport(ctx, &kvdv1.OpenExportRequest{Shard: 1})
	require.Equal(t, uint64(leader+1), requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_LEADER).GetLeaderNode())
	_, err = c.backup(leader).OpenExport(ctx, &kvdv1.OpenExportRequest{Shard: 2})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_NO_REPLICA)

	e := c.export(leader, 1)
	require.Equal(t, uint64(30), e.GetShard().GetKeys())
	require.Equal(t, uint64(30*(6+100_000)), e.GetShard().GetBytes())
	w, err := c.put("key-07", "changed", nil)
	require.NoError(t, err)
	require.Less(t, e.GetShard().GetIndex(), w.GetVersion())
	_, err = c.put("key-99", "new", nil)
	require.NoError(t, err)
	require.NoError(t, c.leader([]byte("key-00"), func(kv kvdv1.KVClient) error {
		_, err := kv.Delete(ctx, &kvdv1.DeleteRequest{NamespaceId: 1, Key: []byte("key-00")})
		return err
	}))
	// Leading is not needed to go on.
	require.NoError(t, c.nodes[leader].host.Group(1).TransferLeader(ctx, raft.NodeID((leader+1)%3+1)))
	items, pages := c.read(leader, e.GetExportId())
	require.Len(t, items, 30)
	require.Equal(t, 3, pages, "30 values of 100 kB in pages of about 1 MiB")
	for i, it := range items {
		require.Equal(t, fmt.Sprintf("key-%02d", i), string(it.GetKey()))
		require.Equal(t, value, string(it.GetValue()))
	}
	_, err = c.backup(leader).CloseExport(ctx, &kvdv1.CloseExportRequest{ExportId: e.GetExportId()})
	require.NoError(t, err)
	for range 2 { // again does no harm
		_, err = c.backup(leader).CloseExport(ctx, &kvdv1.CloseExportRequest{ExportId: e.GetExportId()})
		require.NoError(t, err)
		_, err = c.backup(leader).ReadExport(ctx, &kvdv1.ReadExportRequest{ExportId: e.GetExportId()})
		requireReason(t, err, kvdv1.ErrorDetail_REASON_SESSION_GONE)
	}
}

// A node keeps a few exports, gives up those that nobody reads, and all when it stops.
func TestExportsAreBounded(t *testing.T) {
	now := clock.NewManual(time.Now())
	c := startCluster(t, 1, 1, func(cfg *Config) { cfg.Clock = sweeping{ticking{clock.System, now}} })
	c.leaderOf(1)
	for range maxExports {
		c.export(0, 1)
	}
	_, err := c.backup(0).OpenExport(testContext(t), &kvdv1.OpenExportRequest{Shard: 1})
	require.Positive(t, requireReason(t, err, kvdv1.ErrorDetail_REASON_EXHAUSTED).GetRetryAfterMs())
	now.Advance(exportIdle + exportIdle/8)
	eventually(t, "room for another", func() bool {
		_, err := c.backup(0).OpenExport(testContext(t), &kvdv1.OpenExportRequest{Shard: 1})
		return err == nil
	})
	// The engine does not close with one open: stopping fails then.
}

// sweeping lets the test decide when exports have been idle for long.
type sweeping struct{ ticking }

func (c sweeping) NewTicker(d time.Duration) clock.Ticker {
	if d == exportIdle/8 {
		return c.now.NewTicker(d)
	}
	return c.ticking.NewTicker(d)
}

// Import puts what is absent and leaves what is there, and so may be repeated.
func TestImport(t *testing.T) {
	c := startCluster(t, 3, 1)
	ctx := testContext(t)
	_, err := c.put("there", "before", nil)
	require.NoError(t, err)
	leader := c.leaderOf(1)
	hour := time.Now().Add(time.Hour).UnixMilli()
	req := &kvdv1.ImportRequest{Items: []*kvdv1.BackupItem{
		{NamespaceId: 1, Key: []byte("there"), Value: []byte("other")},
		{NamespaceId: 1, Key: []byte("lives"), Value: []byte("x"), ExpiresUnixMs: hour},
		{NamespaceId: 1, Key: []byte("gone"), Value: []byte("x"), ExpiresUnixMs: 1},
	}}
	for i := range 500 {
		req.Items = append(req.Items, &kvdv1.BackupItem{NamespaceId: 1, Key: fmt.Appendf(nil, "k%d", i), Value: fmt.Appendf(nil, "v%d", i)})
	}
	_, err = c.backup((leader+1)%3).Import(ctx, req)
	requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_LEADER)
	r, err := c.backup(leader).Import(ctx, req)
	require.NoError(t, err)
	require.Equal(t, []uint64{501, 0, 1, 1}, []uint64{r.GetApplied(), r.GetSame(), r.GetOther(), r.GetExpired()})
	r, err = c.backup(leader).Import(ctx, req)
	require.NoError(t, err)
	require.Equal(t, []uint64{0, 501, 1, 1}, []uint64{r.GetApplied(), r.GetSame(), r.GetOther(), r.GetExpired()})
	g, err := c.get("lives")
	require.NoError(t, err)
	require.Equal(t, hour, g.GetExpiresUnixMs())
	g, err = c.get("there")
	require.NoError(t, err)
	require.Equal(t, "before", string(g.GetValue()))

	// One that can not be put keeps all others out.
	for _, tc := range []struct {
		item *kvdv1.BackupItem
		why  kvdv1.ErrorDetail_Reason
	}{
		{&kvdv1.BackupItem{NamespaceId: 1, Value: []byte("v")}, kvdv1.ErrorDetail_REASON_INVALID_KEY},
		{&kvdv1.BackupItem{NamespaceId: 7, Key: []byte("k")}, kvdv1.ErrorDetail_REASON_UNKNOWN_NAMESPACE},
		{&kvdv1.BackupItem{NamespaceId: 1, Key: []byte("k"), Value: make([]byte, 1<<20+1)}, kvdv1.ErrorDetail_REASON_VALUE_TOO_LARGE},
	} {
		_, err = c.backup(leader).Import(ctx, &kvdv1.ImportRequest{Items: []*kvdv1.BackupItem{{NamespaceId: 1, Key: []byte("not put")}, tc.item}})
		requireReason(t, err, tc.why)
	}
	_, err = c.backup(leader).Import(ctx, &kvdv1.ImportRequest{Items: make([]*kvdv1.BackupItem, maxImportItems+1)})
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	g, err = c.get("not put")
	require.NoError(t, err)
	require.False(t, g.GetFound())
}

// Namespaces and tokens come over with all that they are, once; where one differs from
// what is there nothing is made.
func TestImportCluster(t *testing.T) {
	c := startCluster(t, 1, 1)
	ctx := testContext(t)
	eventually(t, "group 0 has a leader", func() bool {
		_, err := c.backup(0).OpenExport(ctx, &kvdv1.OpenExportRequest{})
		return status.Code(err) == codes.OK
	})
	req := &kvdv1.ImportClusterRequest{
		Namespaces: []*kvdv1.NamespaceInfo{
			{Id: 1, Name: DefaultNamespace, OneSided: true}, {Id: 2, Name: "fixed", Immutable: true, OneSided: true}, {Id: 5, Name: "ttl", DefaultTtlMs: 500, QuotaBytes: 1 << 20},
		},
		Tokens: []*kvdv1.TokenRecord{
			{Info: &kvdv1.TokenInfo{Id: "0123456789abcdef", Name: "t", CreatedUnixMs: 5, Grants: []*kvdv1.Grant{{Namespace: "*", Read: true}}}, SecretSha256: make([]byte, 32)},
			{Info: &kvdv1.TokenInfo{Id: "0123456789abcde0", Name: "over", ExpiresUnixMs: 6}, SecretSha256: make([]byte, 32)},
		},
	}
	for range 2 {
		r, err := c.backup(0).ImportCluster(ctx, req)
		require.NoError(t, err)
		require.Len(t, r.GetNamespaces(), 3)
	}
	has := c.export(0, 0).GetCluster()
	require.Equal(t, fmt.Sprint(req.Tokens[:1]), fmt.Sprint(has.GetTokens()))
	for i, ns := range has.GetNamespaces() {
		require.True(t, sameNamespace(req.Namespaces[i], ns), ns)
		require.Equal(t, uint32(i+1), ns.GetId(), "ids have no holes")
	}
	require.Equal(t, c.nodes[0].ClusterID(), has.GetClusterId())

	fresh := &kvdv1.NamespaceInfo{Name: "fresh"}
	for name, bad := range map[string]*kvdv1.ImportClusterRequest{
		"another default": {Namespaces: []*kvdv1.NamespaceInfo{fresh, {Name: DefaultNamespace}}},
		"another token":   {Namespaces: []*kvdv1.NamespaceInfo{fresh}, Tokens: []*kvdv1.TokenRecord{{Info: &kvdv1.TokenInfo{Id: "0123456789abcdef", Name: "u"}, SecretSha256: make([]byte, 32)}}},
		"no name":         {Namespaces: []*kvdv1.NamespaceInfo{fresh, {Name: "/"}}},
		"no sum":          {Namespaces: []*kvdv1.NamespaceInfo{fresh}, Tokens: []*kvdv1.TokenRecord{{Info: &kvdv1.TokenInfo{Id: "0000000000000000", Name: "x"}}}},
		"without TLS":     {Namespaces: []*kvdv1.NamespaceInfo{fresh, {Name: "secret", RequireTls: true}}},
	} {
		_, err := c.backup(0).ImportCluster(ctx, bad)
		why := reasonOf(err)
		require.True(t, why == kvdv1.ErrorDetail_REASON_ALREADY_EXISTS || why == kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, "%s: %v", name, err)
		require.Len(t, c.export(0, 0).GetCluster().GetNamespaces(), 3, name)
	}
}
