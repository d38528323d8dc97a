package engine

import (
	"bytes"
	"errors"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
)

// faults makes operations fail while it is set.
type faults struct {
	match func(op errorfs.Op) bool
	on    atomic.Bool
}

func (f *faults) MaybeError(op errorfs.Op) error {
	if f.on.Load() && f.match(op) {
		return syscall.ENOSPC
	}
	return nil
}

func (f *faults) String() string { return "faults" }

// injectFS asks inj also about files that are used again, which errorfs lets pass.
type injectFS struct {
	vfs.FS
	inj errorfs.Injector
}

func inject(fs vfs.FS, inj errorfs.Injector) vfs.FS { return &injectFS{errorfs.Wrap(fs, inj), inj} }

func (f *injectFS) ReuseForWrite(oldname, newname string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if err := f.inj.MaybeError(errorfs.Op{Kind: errorfs.OpReuseForWrite, Path: newname}); err != nil {
		return nil, err
	}
	if err := f.Rename(oldname, newname); err != nil {
		return nil, err
	}
	return f.OpenReadWrite(newname, c)
}

func kindOf(suffix string, kinds ...errorfs.OpKind) func(op errorfs.Op) bool {
	return func(op errorfs.Op) bool {
		for _, k := range kinds {
			if op.Kind == k && strings.Contains(op.Path, suffix) {
				return true
			}
		}
		return false
	}
}

// Whatever step of writing the log fails: the commit says so, OnFatal is told once,
// reads go on, Close returns, and what was acknowledged is there afterwards.
func TestLogWriteFails(t *testing.T) {
	for name, match := range map[string]func(op errorfs.Op) bool{
		"write":       kindOf(".log", errorfs.OpFileWrite),
		"sync":        kindOf(".log", errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo),
		"rotation":    kindOf(".log", errorfs.OpCreate, errorfs.OpReuseForWrite),
		"rotationdir": func(op errorfs.Op) bool { return op.Kind == errorfs.OpFileSync && strings.HasSuffix(op.Path, "/wal") },
		"manifest":    kindOf("MANIFEST", errorfs.OpFileWrite, errorfs.OpFileSync),
	} {
		t.Run(name, func(t *testing.T) {
			mem := vfs.NewCrashableMem()
			f := &faults{match: match}
			cfg := testConfig(inject(mem, f))
			fatal := make(chan error, 10)
			cfg.OnFatal = func(err error) { fatal <- err }
			e := open(t, cfg)
			twin := &logTwin{}
			appendOne := func() error {
				es := entriesOf(twin.last()+1, twin.last()+2, 1)
				es[0].Data = bytes.Repeat([]byte("x"), 100<<10)
				b := e.NewLogBatch()
				err := b.Append(1, es)
				if err == nil {
					err = b.Commit(true)
				}
				b.Discard()
				if err == nil {
					twin.append(es)
				}
				return err
			}
			for range 3 {
				require.NoError(t, appendOne())
			}
			f.on.Store(true)
			var err error
			for i := 0; err == nil; i++ {
				require.Less(t, i, 1000)
				if err = appendOne(); err == nil && name == "manifest" {
					err = e.flushStore(e.log, "log")
				}
			}
			require.ErrorIs(t, err, ErrFailed)
			require.ErrorContains(t, err, syscall.ENOSPC.Error())
			require.ErrorIs(t, appendOne(), ErrFailed)
			require.ErrorIs(t, e.Group(1).NewBatch().Commit(), ErrFailed)
			require.ErrorContains(t, <-fatal, "log")
			requireLog(t, e, 1, twin)
			crashed := mem.CrashClone(vfs.CrashCloneCfg{})
			f.on.Store(false)
			_ = e.Close() // it may complain; it has to return
			require.Empty(t, fatal)
			cfg.FS = crashed
			e = openChecked(t, testConfig(crashed))
			st, err := e.OpenLog(1)
			require.NoError(t, err)
			// The failed one may have reached the disk.
			require.GreaterOrEqual(t, st.Last, twin.last())
			require.LessOrEqual(t, st.Last, twin.last()+1)
		})
	}
}

// A flush that finds the disk full is tried again; nothing is lost but time.
func TestFlushFindsDiskFull(t *testing.T) {
	mem := vfs.NewMem()
	f := &faults{match: kindOf(".sst", errorfs.OpCreate, errorfs.OpFileWrite)}
	cfg := testConfig(inject(mem, f))
	var told atomic.Int64
	cfg.OnBackgroundError = func(err error) {
		if errors.Is(err, syscall.ENOSPC) {
			told.Add(1)
		}
	}
	e := openChecked(t, cfg)
	g := e.Group(1)
	put := func(applied uint64) {
		b := g.NewBatch()
		require.NoError(t, b.Put(1, []byte("k"), Value{Data: []byte("v")}))
		require.NoError(t, b.SetMeta(Meta{Applied: applied}))
		require.NoError(t, b.Commit())
	}
	put(1)
	require.NoError(t, e.Flush())
	f.on.Store(true)
	put(2)
	require.ErrorContains(t, e.Flush(), "free space")
	require.Positive(t, told.Load())
	require.Positive(t, e.Metrics().BackgroundErrors)
	durable, err := g.DurableApplied()
	require.NoError(t, err)
	require.EqualValues(t, 1, durable)
	v, ok, err := g.Get(1, []byte("k"))
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, "v", string(v.Data))
	f.on.Store(false)
	require.NoError(t, e.Flush())
	durable, err = g.DurableApplied()
	require.NoError(t, err)
	require.EqualValues(t, 2, durable)
}

func TestCloseWithFullDiskReturns(t *testing.T) {
	f := &faults{match: kindOf(".sst", errorfs.OpCreate, errorfs.OpFileWrite)}
	e := open(t, testConfig(inject(vfs.NewMem(), f)))
	b := e.Group(1).NewBatch()
	require.NoError(t, b.SetMeta(Meta{Applied: 1}))
	require.NoError(t, b.Commit())
	f.on.Store(true)
	require.Error(t, e.Close())
	require.ErrorIs(t, e.Close(), ErrClosed)
	_, err := e.Group(1).Meta()
	require.ErrorIs(t, err, ErrClosed)
	_, err = e.OpenLog(1)
	require.ErrorIs(t, err, ErrClosed)
}

// crashPoints takes a crash image before every operation that changes the disk.
type crashPoints struct {
	mem    *vfs.MemFS
	on     atomic.Bool
	every  int64
	n      atomic.Int64
	images chan *vfs.MemFS
}

func (c *crashPoints) MaybeError(op errorfs.Op) error {
	if c.on.Load() && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && c.n.Add(1)%c.every == 0 {
		select {
		case c.images <- c.mem.CrashClone(vfs.CrashCloneCfg{}):
		default:
		}
	}
	return nil
}

func (c *crashPoints) String() string { return "crash points" }

func (c *crashPoints) stop() []*vfs.MemFS {
	c.on.Store(false)
	images := []*vfs.MemFS{c.mem.CrashClone(vfs.CrashCloneCfg{})}
	for len(c.images) > 0 {
		images = append(images, <-c.images)
	}
	return images
}

func putAll(t *testing.T, g *Group, applied uint64, n int, data string) {
	t.Helper()
	b := g.NewBatch()
	for i := range n {
		require.NoError(t, b.Put(1, benchKey(i), Value{Data: []byte(data), Version: applied}))
	}
	require.NoError(t, b.SetMeta(Meta{Applied: applied, Conf: &raftpb.ConfState{}}))
	require.NoError(t, b.Commit())
}

// A crash at any step of receiving and installing a snapshot leaves the old state or
// the new one, whole; and nothing of the old one comes back.
func TestCrashWhileInstalling(t *testing.T) {
	src := openChecked(t, testConfig(vfs.NewMem()))
	putAll(t, src.Group(1), 50, 30, "new")
	c := &crashPoints{mem: vfs.NewCrashableMem(), every: 1, images: make(chan *vfs.MemFS, 500)}
	e := open(t, testConfig(inject(c.mem, c)))
	putAll(t, e.Group(1), 10, 40, "old")
	require.NoError(t, e.Flush())
	putAll(t, e.Group(1), 11, 50, "old")
	c.on.Store(true)
	st, err := e.NewStaging(1)
	require.NoError(t, err)
	snap, err := src.Group(1).OpenSnapshot()
	require.NoError(t, err)
	require.NoError(t, snap.Items(st.Add))
	require.NoError(t, snap.Close())
	require.NoError(t, st.Finish())
	_, err = st.Install()
	require.NoError(t, err)
	after := c.mem.CrashClone(vfs.CrashCloneCfg{})
	commitLog(t, e, func(b *LogBatch) error { return b.Reset(1, 50, 0) })
	require.NoError(t, e.Close())
	images := c.stop()
	require.Greater(t, len(images), 20)
	seen := map[uint64]int{}
	check := func(image *vfs.MemFS) uint64 {
		e := open(t, testConfig(image))
		defer func() { require.NoError(t, e.Close()) }()
		require.NoError(t, e.Check())
		m, err := e.Group(1).Meta()
		require.NoError(t, err)
		want, keys := "old", 40
		switch m.Applied {
		case 11:
			keys = 50
		case 50:
			want, keys = "new", 30
		}
		n := 0
		require.NoError(t, e.Group(1).Scan(func(_ uint32, _ []byte, v Value) error {
			n++
			require.Equal(t, want, string(v.Data))
			return nil
		}))
		require.Equal(t, keys, n)
		names, err := image.List("data")
		require.NoError(t, err)
		require.NotContains(t, names, stagingDir)
		// The owner's way to see that the log's reset is missing.
		log, err := e.OpenLog(1)
		require.NoError(t, err)
		require.True(t, log.Last == 0 || log.Last == 50 && m.Applied == 50)
		seen[m.Applied]++
		return m.Applied
	}
	for _, image := range images {
		check(image)
	}
	require.EqualValues(t, 50, check(after), "installed must be durable")
	require.Positive(t, seen[10]+seen[11])
	require.Positive(t, seen[50])
}

// A crash at any step: the log is what it was after one of the batches, none older
// than the last acknowledged one. Segments are as long as in production, so that
// there is a tail of zeros.
func TestCrashWhileLogging(t *testing.T) {
	rng := newRand(t)
	c := &crashPoints{mem: vfs.NewCrashableMem(), every: 7, images: make(chan *vfs.MemFS, 60)}
	cfg := testConfig(inject(c.mem, c))
	cfg.walBytes = 2 << 20
	e := open(t, cfg)
	twin := &logTwin{}
	acked := twin.clone()
	type image struct {
		fs           *vfs.MemFS
		before, next *logTwin
	}
	var images []image
	for i := range 120 {
		b := e.NewLogBatch()
		twin.step(t, rng, b, 1, 400)
		if i%10 == 0 {
			require.NoError(t, e.log.Flush())
		}
		c.on.Store(true)
		require.NoError(t, b.Commit(true))
		for _, fs := range c.stop()[1:] {
			images = append(images, image{fs, acked, twin.clone()})
		}
		acked = twin.clone()
	}
	require.NoError(t, e.Close())
	require.NotEmpty(t, images)
	for _, im := range images {
		cfg := testConfig(im.fs)
		e := open(t, cfg)
		require.NoError(t, e.Check())
		requireEither(t, e, 1, im.before, im.next)
		require.NoError(t, e.Close())
	}
}

// Even where memtables overlap, which Install avoids, an ingestion is durable when it
// returns: Pebble would else queue it behind them, in a WAL that the state lacks.
func TestIngestionIsDurable(t *testing.T) {
	mem := vfs.NewCrashableMem()
	e := open(t, testConfig(mem))
	putAll(t, e.Group(1), 10, 40, "old")
	st, err := e.NewStaging(1)
	require.NoError(t, err)
	snap, err := e.Group(1).OpenSnapshot()
	require.NoError(t, err)
	require.NoError(t, snap.Items(st.Add))
	require.NoError(t, snap.Close())
	require.NoError(t, st.Finish())
	putAll(t, e.Group(1), 11, 50, "older than the ingestion")
	lower, upper := groupBounds(1)
	require.NoError(t, e.ingest(st.tables, pebble.KeyRange{Start: lower, End: upper}))
	crashed := mem.CrashClone(vfs.CrashCloneCfg{})
	require.NoError(t, st.Abort())
	require.NoError(t, e.Close())
	e = openChecked(t, testConfig(crashed))
	m, err := e.Group(1).Meta()
	require.NoError(t, err)
	require.EqualValues(t, 10, m.Applied)
	require.EqualValues(t, 40, m.Keys)
}
