//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// TestLittleDisk: below min-free-disk (here its default) writes are refused early, in
// time for reads to go on; with room again writes are taken by themselves.
func TestLittleDisk(t *testing.T) {
	needRoot(t)
	dir := tempDir(t)
	disks := mountDisks(t, dir, "600m", 1, 2, 3)
	c := newClusterIn(t, dir, devcluster.Config{Args: []string{"--min-free-disk", "256MiB"}})
	cl := c.dial(t, nil)
	held := fill(t, cl, "disk", 50, 1000)
	for _, d := range disks {
		resizeTmpfs(t, d, "120m")
	}
	await(t, "writes are refused", func() error {
		ctx, cancel := within(patience)
		defer cancel()
		_, err := cl.Put(ctx, []byte("disk/more"), []byte("x"))
		if !errors.Is(err, client.ErrReadOnly) {
			return fmt.Errorf("put: %v", err)
		}
		return nil
	})
	for k := range held { // whichever node leads the key's shard
		r := c.kvctl(t, "put", k, "other")
		r.failed(t, 8, "make room; reads go on")
		break
	}
	check(t, cl, held)
	check(t, cl, held, client.WithLevel(client.Session))
	require.Zero(t, c.kvctl(t, "ls", "disk/").code)
	require.Contains(t, c.kvctl(t, "status").stdout, "writes refused")
	every := func(what string) {
		await(t, "every node says that "+what, func() error {
			for id := range uint64(3) {
				if !strings.Contains(c.logOf(t, id+1), what) {
					return fmt.Errorf("node %d does not yet", id+1)
				}
			}
			return nil
		})
	}
	every("writes are refused") // each looks by itself
	for _, d := range disks {
		resizeTmpfs(t, d, "600m")
	}
	await(t, "writes are taken again", func() error {
		ctx, cancel := within(patience)
		defer cancel()
		for k := range held {
			if _, err := cl.Put(ctx, []byte(k), []byte(held[k])); err != nil {
				return err
			}
		}
		return nil
	})
	every("writes are taken again")
}

// TestFullDisk: a disk that is full to the last byte, because min-free-disk was set too
// low. The node stops with a sentence; the others go on; nothing acknowledged is lost.
func TestFullDisk(t *testing.T) {
	needRoot(t)
	dir := tempDir(t)
	disk := mountDisks(t, dir, "96m", 2)[0]
	c := newClusterIn(t, dir, devcluster.Config{Args: []string{"--min-free-disk", "1"}})
	l := startLoad(t, "full", c.dial(t, nil))
	l.awaitProgress(t)
	ballast(t, filepath.Join(disk, "ballast"))
	full := c.Node(2)
	ctx, cancel := within(patience)
	defer cancel()
	// Large values make it quick.
	big := c.dial(t, nil)
	held := map[string]string{}
	for i := 0; full.Running() && ctx.Err() == nil; i++ {
		k := fmt.Sprintf("big/%d", i%64)
		if _, err := big.Put(ctx, []byte(k), []byte(valueOf(k, 200_000))); err == nil {
			held[k] = valueOf(k, 200_000)
		}
	}
	err := full.Wait(ctx)
	require.Error(t, err, "a node whose log can not be written must not take part")
	require.Contains(t, err.Error(), "exit status")
	require.Contains(t, full.LogTail(1), "no space left on device")
	l.awaitProgress(t) // two of three
	require.NoError(t, os.Remove(filepath.Join(disk, "ballast")))
	resizeTmpfs(t, disk, "600m")
	c.restart(t, 2)
	c.awaitServing(t, 2)
	l.awaitProgress(t)
	l.pause()
	c.caughtUp(t)
	c.lead(t, 2) // it has everything
	l.verify(t, c.dial(t, nil))
	check(t, c.dial(t, nil), held)
}

// TestAllDisksFull: with every node's disk full no write can be acknowledged; each says
// so in bounded time, and all that was acknowledged before is there after making room.
func TestAllDisksFull(t *testing.T) {
	needRoot(t)
	dir := tempDir(t)
	disks := mountDisks(t, dir, "96m", 1, 2, 3)
	c := newClusterIn(t, dir, devcluster.Config{Args: []string{"--min-free-disk", "1"}})
	cl := c.dial(t, nil)
	held := fill(t, cl, "all", 50, 1000)
	for _, d := range disks {
		ballast(t, filepath.Join(d, "ballast"))
	}
	failed := 0
	for i := 0; failed < 3; i++ {
		require.Less(t, i, 5000, "puts go on on full disks")
		k := fmt.Sprintf("all/big/%d", i)
		v := valueOf(k, 200_000)
		r := c.kvctlIn(t, []byte(v), "put", "--timeout", "3s", k, "-")
		if r.code == 0 {
			held[k] = v
			continue
		}
		require.Contains(t, []int{5, 7, 8}, r.code, r.text())
		r.failed(t, r.code)
		failed++
	}
	require.NoError(t, c.Kill())
	for _, d := range disks {
		require.NoError(t, os.Remove(filepath.Join(d, "ballast")))
		resizeTmpfs(t, d, "600m")
	}
	for _, n := range c.Nodes() {
		require.NoError(t, n.Start())
	}
	for _, n := range c.Nodes() {
		c.awaitServing(t, n.ID)
	}
	check(t, c.dial(t, nil), held)
	fill(t, c.dial(t, nil), "after", 20, 1000)
}

// mountDisks gives nodes of a cluster in dir small disks of their own.
func mountDisks(t testing.TB, dir, size string, nodes ...int) []string {
	t.Helper()
	var disks []string
	for _, n := range nodes {
		d := filepath.Join(dir, fmt.Sprintf("node%d", n))
		mountTmpfs(t, d, size)
		disks = append(disks, d)
	}
	return disks
}

// ballast takes what is free on a disk, but for a little.
func ballast(t testing.TB, file string) {
	t.Helper()
	f, err := os.Create(file)
	require.NoError(t, err)
	defer func() { _ = f.Close() }()
	block := make([]byte, 256<<10)
	for {
		if _, err := f.Write(block); err != nil {
			break // full
		}
	}
	info, err := f.Stat()
	require.NoError(t, err)
	require.NoError(t, f.Truncate(max(0, info.Size()-2<<20)))
}
