package engine

import (
	"bytes"
	"fmt"
	"io"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
)

func keepingConfig(fs vfs.FS) Config {
	cfg := testConfig(fs)
	cfg.KeepStagings = true
	return cfg
}

// pairsOf is all that a snapshot of the group gives, in order.
func pairsOf(t *testing.T, g *Group) (pairs []string) {
	t.Helper()
	s, err := g.OpenSnapshot()
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	require.NoError(t, s.Items(func(k, v []byte) error {
		pairs = append(pairs, fmt.Sprintf("%x=%x", k, v))
		return nil
	}))
	return pairs
}

// peerState is a group to be sent: its meta, keys in two namespaces, auxiliary pairs.
func peerState(t *testing.T, applied uint64) *Group {
	t.Helper()
	g := openChecked(t, testConfig(vfs.NewMem())).Group(1)
	b := g.NewBatch()
	for i := range 30 {
		require.NoError(t, b.Put(uint32(1+i%2), benchKey(i), Value{Data: []byte("new"), Version: applied}))
		require.NoError(t, b.PutAux('x', benchKey(i), []byte("new")))
	}
	require.NoError(t, b.SetMeta(Meta{Applied: applied, AppliedTerm: 2, ConfigID: 3, Conf: &raftpb.ConfState{Voters: []uint64{1, 2}}}))
	require.NoError(t, b.Commit())
	return g
}

// receive adds what comes behind the staging's last pair, with a checkpoint behind every
// so many pairs, until stop (0: never) of them came.
func receive(t *testing.T, from *Group, st *Staging, every, stop int) {
	t.Helper()
	s, err := from.OpenSnapshot()
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	n := 0
	errStop := fmt.Errorf("stop")
	err = s.ItemsAfter(st.Last(), func(k, v []byte) error {
		if err := st.Add(k, v); err != nil {
			return err
		}
		n++
		if n%every == 0 {
			require.NoError(t, st.Checkpoint(fmt.Append(nil, n)))
			require.Zero(t, st.Unsaved())
		}
		if n == stop {
			return errStop
		}
		return nil
	})
	if stop > 0 {
		require.ErrorIs(t, err, errStop)
		return
	}
	require.NoError(t, err)
}

// ItemsAfter gives what Items gives behind the key, from wherever.
func TestItemsAfter(t *testing.T) {
	g := peerState(t, 50)
	all := pairsOf(t, g)
	s, err := g.OpenSnapshot()
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	var keys [][]byte
	require.NoError(t, s.Items(func(k, _ []byte) error {
		keys = append(keys, append([]byte(nil), k...))
		return nil
	}))
	require.Len(t, keys, 61)
	for i, key := range keys {
		rest := []string{}
		require.NoError(t, s.ItemsAfter(key, func(k, v []byte) error {
			rest = append(rest, fmt.Sprintf("%x=%x", k, v))
			return nil
		}))
		require.Equal(t, all[i+1:], rest)
	}
}

// A crash at any step of receiving with checkpoints leaves the old state, and something
// to go on from that ends in the very state which was sent; or the new one.
func TestCrashWhileReceiving(t *testing.T) {
	src := peerState(t, 50)
	want := pairsOf(t, src)
	c := &crashPoints{mem: vfs.NewCrashableMem(), every: 1, images: make(chan *vfs.MemFS, 1000)}
	e := open(t, keepingConfig(inject(c.mem, c)))
	putAll(t, e.Group(1), 11, 40, "old")
	require.NoError(t, e.Flush())
	old := pairsOf(t, e.Group(1))
	c.on.Store(true)
	st, err := e.NewStaging(1)
	require.NoError(t, err)
	receive(t, src, st, 7, 0)
	require.NoError(t, st.Finish())
	_, err = st.Install()
	require.NoError(t, err)
	require.NoError(t, e.Close())
	images := c.stop()
	require.Less(t, len(images), cap(c.images), "there were more crash points than were kept")
	from := map[int]int{} // how often there was how much to go on from
	for _, image := range images {
		e := open(t, keepingConfig(image))
		kept := e.KeptStagings()
		require.LessOrEqual(t, len(kept), 1)
		if state := pairsOf(t, e.Group(1)); len(state) > 0 && state[0] == want[0] {
			require.Equal(t, want, state)
			for _, st := range kept {
				require.NoError(t, st.Abort())
			}
			from[-1]++
		} else {
			require.Equal(t, old, state)
			if len(kept) == 0 {
				st, err := e.NewStaging(1)
				require.NoError(t, err)
				kept = append(kept, st)
			}
			st := kept[0]
			require.EqualValues(t, 1, st.Group())
			n := 0
			if st.Note() != nil {
				_, err := fmt.Sscan(string(st.Note()), &n)
				require.NoError(t, err)
			}
			from[n]++
			receive(t, src, st, 7, 0)
			require.NoError(t, st.Finish())
			m, err := st.Install()
			require.NoError(t, err)
			require.EqualValues(t, 50, m.Applied)
			require.Equal(t, want, pairsOf(t, e.Group(1)))
		}
		require.NoError(t, e.Check())
		names, err := image.List("data/" + stagingDir)
		if err == nil {
			require.Empty(t, names)
		}
		require.NoError(t, e.Close())
	}
	t.Logf("crash images by what there was to go on from (-1: it was installed): %v", from)
	for n := 0; n <= 56; n += 7 {
		require.Positive(t, from[n], "no crash with %d pairs saved", n)
	}
	require.Positive(t, from[-1])
}

// What was left behind is found again if that is wanted, and only what is whole.
func TestKeptStagings(t *testing.T) {
	src := peerState(t, 50)
	leave := func(t *testing.T, saved bool) *vfs.MemFS {
		fs := vfs.NewCrashableMem()
		e := open(t, keepingConfig(fs))
		st, err := e.NewStaging(1)
		require.NoError(t, err)
		every := 100
		if saved {
			every = 10
		}
		receive(t, src, st, every, 25)
		require.NoError(t, st.Leave())
		require.NoError(t, st.Leave())
		require.NoError(t, e.Close())
		return fs
	}
	const dir = "data/" + stagingDir + "/1-1/"
	// rewrite changes a file in a way that its own format does not show.
	rewrite := func(name string, change func([]byte) []byte) func(*testing.T, *vfs.MemFS) {
		return func(t *testing.T, fs *vfs.MemFS) {
			f, err := fs.Open(dir + name)
			require.NoError(t, err)
			b, err := io.ReadAll(f)
			require.NoError(t, err)
			require.NoError(t, f.Close())
			f, err = fs.Create(dir+name, "kvd-staging")
			require.NoError(t, err)
			_, err = f.Write(change(b))
			require.NoError(t, err)
			require.NoError(t, f.Close())
		}
	}
	longer := func(b []byte) []byte { return append(b, b[:9]...) }
	otherKeys := func(b []byte) []byte {
		require.Equal(t, 1, bytes.Count(b, []byte(`"Keys":19,`)))
		return bytes.Replace(b, []byte(`"Keys":19,`), []byte(`"Keys":18,`), 1)
	}
	for name, c := range map[string]struct {
		saved, keep bool
		spoil       func(*testing.T, *vfs.MemFS)
		want        int
	}{
		"saved":                   {saved: true, keep: true, want: 1},
		"not saved":               {keep: true},
		"not wanted":              {saved: true},
		"damaged checkpoint":      {saved: true, keep: true, spoil: rewrite(checkpointFile, otherKeys)},
		"table of another length": {saved: true, keep: true, spoil: rewrite("000001.sst", longer)},
		"table gone": {saved: true, keep: true, spoil: func(t *testing.T, fs *vfs.MemFS) {
			require.NoError(t, fs.Remove(dir+"000000.sst"))
		}},
		"no staging": {saved: true, keep: true, want: 1, spoil: func(t *testing.T, fs *vfs.MemFS) {
			require.NoError(t, fs.MkdirAll("data/"+stagingDir+"/else", 0o755))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			fs := leave(t, c.saved)
			if c.spoil != nil {
				c.spoil(t, fs)
			}
			cfg := testConfig(fs)
			cfg.KeepStagings = c.keep
			e := openChecked(t, cfg)
			kept := e.KeptStagings()
			require.Len(t, kept, c.want)
			require.Empty(t, e.KeptStagings(), "they are handed over once")
			names, _ := fs.List("data/" + stagingDir)
			require.Len(t, names, c.want)
			another, err := e.NewStaging(1)
			require.NoError(t, err)
			require.Equal(t, c.keep, another.dir == "data/"+stagingDir+"/1-2", "a number was used twice: %s", another.dir)
			require.NoError(t, another.Abort())
			for _, st := range kept {
				require.Equal(t, "20", string(st.Note()))
				receive(t, src, st, 10, 0)
				require.NoError(t, st.Finish())
				_, err := st.Install()
				require.NoError(t, err)
				require.Equal(t, pairsOf(t, src), pairsOf(t, e.Group(1)))
			}
		})
	}
}
