//go:build chaos

package faults

import (
	"context"
	"net"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Files that grow use up what is left; what is written over does not.
func TestFullDisk(t *testing.T) {
	d := NewDisk(vfs.NewMem())
	f, err := d.Create("a", vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	_, err = f.Write(make([]byte, 10000))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	d.obey(Order{Full: true, Left: 5000})
	f, err = d.ReuseForWrite("a", "b", vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	for range 2 {
		_, err = f.Write(make([]byte, 5000))
		require.NoError(t, err, "these bytes were the file's already")
	}
	_, err = f.Write(make([]byte, 5000))
	require.NoError(t, err)
	_, err = f.Write(make([]byte, 1))
	require.ErrorIs(t, err, syscall.ENOSPC)
	_, err = d.Create("c", vfs.WriteCategoryUnspecified)
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.EqualValues(t, 2, d.refused.Load())
	g, err := d.FS.Create("old", vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	_, err = g.Write(make([]byte, 1))
	require.NoError(t, err)
	require.NoError(t, g.Close())
	require.NoError(t, d.Remove("old"))
	_, err = f.Write(make([]byte, 1))
	require.NoError(t, err, "what is removed makes room")
	d.obey(Order{})
	_, err = f.Write(make([]byte, 1))
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

func TestOrders(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	st, err := Send(ctx, path, Order{Shift: time.Hour})
	require.NoError(t, err)
	require.WithinDuration(t, time.Now().Add(time.Hour), st.Now, time.Minute)
	require.WithinDuration(t, time.Now().Add(time.Hour), l.Clock.Now(), time.Minute)

	// A sync that hangs goes on with the next order, one that is to fail too.
	l.Disk.FS = vfs.NewMem()
	f, err := l.Disk.Create("x", vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	for _, next := range []Order{{}, {FailSync: true}} {
		_, err = Send(ctx, path, Order{StallSync: true})
		require.NoError(t, err)
		before := l.Disk.stalled.Load()
		done := make(chan error, 1)
		go func() { done <- f.SyncData() }()
		require.Eventually(t, func() bool { return l.Disk.stalled.Load() > before }, time.Minute, time.Millisecond)
		require.Empty(t, done)
		_, err = Send(ctx, path, next)
		require.NoError(t, err)
		if err := <-done; next.FailSync {
			require.ErrorIs(t, err, syscall.EIO)
		} else {
			require.NoError(t, err)
		}
	}
	require.NoError(t, f.Close())

	conn, err := net.Dial("unix", path)
	require.NoError(t, err)
	_, err = conn.Write([]byte(`{"flood": true}` + "\n"))
	require.NoError(t, err)
	answer := make([]byte, 1000)
	n, err := conn.Read(answer)
	require.NoError(t, err)
	require.Contains(t, string(answer[:n]), `unknown field`)
	require.NoError(t, conn.Close())
	require.NoError(t, l.Close())
	_, err = Send(ctx, path, Order{})
	require.ErrorContains(t, err, "built with the tag chaos")
}
