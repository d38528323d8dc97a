package engine

import (
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// smallDisk says how much room it has, and counts the segments that are prepared.
type smallDisk struct {
	vfs.FS
	free     uint64
	prepared atomic.Int64
}

func (d *smallDisk) GetDiskUsage(string) (vfs.DiskUsage, error) {
	return vfs.DiskUsage{AvailBytes: d.free, TotalBytes: 1 << 40}, nil
}

func (d *smallDisk) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if strings.HasPrefix(d.PathBase(name), preparedPrefix) {
		d.prepared.Add(1)
	}
	return d.FS.Create(name, c)
}

// Segments are not prepared with the last of the disk, whatever room the node's owner wants
// to keep; the log works without.
func TestSegmentsAreNotPreparedOnAFullDisk(t *testing.T) {
	for _, c := range []struct {
		free uint64
		want bool
	}{{roomFactor * 64 << 10, true}, {roomFactor*64<<10 - 1, false}, {0, false}} {
		d := &smallDisk{FS: vfs.NewCrashableMem(), free: c.free}
		e := open(t, testConfig(d)) // segments of 64 KiB
		require.Equal(t, c.want, d.prepared.Load() > 0, "%d bytes are free", c.free)
		b := e.NewLogBatch()
		(&logTwin{}).step(t, newRand(t), b, 1, 400)
		require.NoError(t, b.Commit(true))
		require.NoError(t, e.Close())
	}
}
