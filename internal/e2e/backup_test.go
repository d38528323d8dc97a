//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// contents of a cluster: values and expiries by namespace and key.
type contents map[string]string

func (c *cluster) contents(t testing.TB, namespaces ...string) contents {
	t.Helper()
	all := contents{}
	for _, ns := range namespaces {
		cl := c.dial(t, func(cfg *client.Config) { cfg.Namespace = ns })
		for it, err := range cl.List(context.Background(), nil) {
			require.NoError(t, err)
			all[ns+"/"+string(it.Key)] = fmt.Sprintf("%x until %d", it.Value, it.Expires.UnixMilli())
		}
		require.NoError(t, cl.Close())
	}
	return all
}

type backupSaid struct {
	ClusterID  string `json:"cluster_id"`
	Keys       uint64
	Checksum   string
	Namespaces []string
	Shards     []struct {
		Shard, Index, Term, Keys, Bytes uint64
	}
}

type restoreSaid struct {
	ClusterID string `json:"cluster_id"`
	Restored  uint64
	Same      uint64 `json:"present_same"`
	Other     uint64 `json:"present_other"`
	Expired   uint64
}

// TestBackupRestore: what a backup of a cluster under writes holds comes back in clusters
// of other shapes; each shard as it was at one index; nothing into one that is not empty,
// and nothing of a file that is not whole.
func TestBackupRestore(t *testing.T) {
	a := newCluster(t, devcluster.Config{})
	for _, args := range [][]string{
		{"namespace", "create", "fixed", "--immutable"}, {"namespace", "create", "short", "--default-ttl", "1h"}, {"namespace", "create", "two-sided", "--two-sided-only"},
		{"put", "lives", "an hour", "--ttl", "1h"},
		{"-n", "fixed", "put", "image", "pixels"}, {"-n", "short", "put", "s", "gone in an hour"}, {"-n", "two-sided", "put", "t", "u"}, {"put", "empty", ""},
	} {
		require.Zero(t, a.kvctl(t, args...).code, "%q", args)
	}
	load := a.dial(t, nil)
	ctx := context.Background()
	for i := range 400 {
		value := bytes.Repeat([]byte{byte(i)}, i*37%5000)
		_, err := load.Put(ctx, fmt.Appendf(nil, "data/%05d", i), value)
		require.NoError(t, err)
	}
	large := make([]byte, 1<<20)
	for i := range large {
		large[i] = byte(i * i >> 7)
	}
	_, err := load.Put(ctx, []byte("large"), large)
	require.NoError(t, err)
	// One key after the other in one shard: a backup has all up to some one, and none behind.
	shard := load.ShardOf([]byte("chain/0"))
	var written, stop atomic.Int64
	chain := make(chan error, 1)
	go func() {
		for i := int64(0); stop.Load() == 0; i++ {
			key := fmt.Appendf(nil, "chain/%d", i)
			if load.ShardOf(key) != shard {
				continue
			}
			if _, err := load.Put(ctx, key, binary.BigEndian.AppendUint64(nil, uint64(i))); err != nil {
				chain <- err
				return
			}
			written.Store(i + 1)
		}
		chain <- nil
	}()
	await(t, "writes are under way", func() error {
		if written.Load() < 20 {
			return errors.New("too few")
		}
		return nil
	})
	before := written.Load()
	file := filepath.Join(tempDir(t), "kvd.kvdbak")
	var said, shown backupSaid
	made := a.kvctl(t, "-o", "json", "backup", file)
	stop.Store(1)
	require.NoError(t, <-chain)
	decode(t, made, &said)
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())
	require.NoFileExists(t, file+".partial")
	decode(t, kvctl(t, nil, "-o", "json", "restore", "--dry-run", file), &shown)
	require.Equal(t, said, shown)
	require.Len(t, said.Shards, 4)
	require.Equal(t, []string{"default", "fixed", "short", "two-sided"}, said.Namespaces)
	for _, s := range said.Shards {
		require.Positive(t, s.Index)
		require.Positive(t, s.Keys)
	}
	a.kvctl(t, "backup", file).failed(t, 2, "exists already")
	require.Zero(t, a.kvctl(t, "backup", "--overwrite", filepath.Join(tempDir(t), "other")).code)

	names := []string{"default", "fixed", "short", "two-sided"}
	had := a.contents(t, names...)
	b := newCluster(t, devcluster.Config{Nodes: 1, Shards: 7})
	damaged(t, b, file)

	var put restoreSaid
	decode(t, b.kvctl(t, "-o", "json", "restore", file), &put)
	require.Equal(t, restoreSaid{ClusterID: put.ClusterID, Restored: said.Keys}, put)
	require.NotEqual(t, said.ClusterID, put.ClusterID)
	got := b.contents(t, names...)
	require.Len(t, got, int(said.Keys))
	last := true
	for i := range written.Load() {
		key := fmt.Sprintf("chain/%d", i)
		if load.ShardOf([]byte(key)) != shard {
			continue
		}
		value, there := got["default/"+key]
		if there {
			require.True(t, last, "%s is there, and the one before it is not", key)
			require.Equal(t, had["default/"+key], value)
		} else {
			require.GreaterOrEqual(t, i, before, "%s was acknowledged before the backup, and is missing", key)
			delete(had, "default/"+key)
		}
		last = there
	}
	require.Equal(t, had, got)
	cutPipe(t, file, names, got)
	require.Zero(t, b.kvctl(t, "-n", "fixed", "put", "image", "pixels").code)
	b.kvctl(t, "-n", "fixed", "put", "image", "others").failed(t, 4, "immutable")

	// Again: refused, and with --continue nothing changes.
	b.kvctl(t, "restore", file).failed(t, 4, "not empty", "3 namespaces", "--continue")
	require.Zero(t, b.kvctl(t, "put", "lives", "longer").code)
	require.Zero(t, b.kvctl(t, "del", "large").code)
	decode(t, b.kvctl(t, "-o", "json", "restore", "--continue", file), &put)
	require.Equal(t, restoreSaid{ClusterID: put.ClusterID, Restored: 1, Same: said.Keys - 2, Other: 1}, put)
	require.Equal(t, "longer", b.kvctl(t, "get", "lives").stdout)
	require.Equal(t, string(large), b.kvctl(t, "get", "large").stdout)
	streamed(t, b, names)
}

// damaged asserts that nothing of a file that is not whole gets into an empty cluster.
func damaged(t *testing.T, c *cluster, file string) {
	t.Helper()
	whole, err := os.ReadFile(file)
	require.NoError(t, err)
	newer := bytes.Clone(whole)
	newer[8]++
	flipped := bytes.Clone(whole)
	flipped[len(flipped)-1000] ^= 4
	for _, tc := range []struct {
		name, words string
		content     []byte
	}{
		{"flipped", "damaged", flipped}, {"cut", "cut short", whole[:len(whole)-1]}, {"newer", "newer", newer}, {"other", "not a backup", []byte("hello")}, {"nothing", "not a backup", nil},
	} {
		bad := filepath.Join(tempDir(t), tc.name)
		require.NoError(t, os.WriteFile(bad, tc.content, 0o600))
		c.kvctl(t, "restore", bad).failed(t, 1, tc.words, "nothing was changed")
	}
	c.kvctl(t, "restore", filepath.Join(tempDir(t), "none")).failed(t, 2, "no such file")
	c.kvctl(t, "restore", tempDir(t)).failed(t, 2, "directory")
	require.Empty(t, c.contents(t, "default"))
	require.Equal(t, 1, strings.Count(c.kvctl(t, "-o", "json", "namespace", "ls").stdout, `"name"`))
}

// cutPipe asserts that what comes from a pipe is restored up to where it is damaged, that
// the error says so, and that the rest can be brought up later.
func cutPipe(t *testing.T, file string, names []string, want contents) {
	t.Helper()
	whole, err := os.ReadFile(file)
	require.NoError(t, err)
	flipped := bytes.Clone(whole)
	flipped[len(flipped)-100] ^= 4 // in the last shard
	c := newCluster(t, devcluster.Config{Nodes: 1, Shards: 2})
	c.kvctlIn(t, flipped, "restore", "-").failed(t, 1, "damaged", "left with a part", "--continue")
	c.kvctlIn(t, whole, "restore", "-").failed(t, 4, "not empty")
	r := c.kvctlIn(t, whole, "restore", "--continue", "-")
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stdout, "were there already")
	require.Equal(t, want, c.contents(t, names...))
}

// streamed sends a backup from one cluster to another without a file between them.
func streamed(t *testing.T, from *cluster, names []string) {
	t.Helper()
	began := time.Now()
	out := from.kvctl(t, "backup", "-")
	require.Zero(t, out.code, out.stderr)
	to := newCluster(t, devcluster.Config{Shards: 1})
	in := to.kvctlIn(t, []byte(out.stdout), "restore", "-")
	require.Zero(t, in.code, in.stderr)
	require.Contains(t, in.stdout, "restored ")
	require.Equal(t, from.contents(t, names...), to.contents(t, names...))
	t.Logf("streamed %d bytes within %v", len(out.stdout), time.Since(began))
}
