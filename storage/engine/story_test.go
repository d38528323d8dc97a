package engine

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
)

// story is a node's engine and, for snapshots, a peer's.
type story struct {
	fs   *vfs.MemFS
	e    *Engine
	peer *Engine
	st   *Staging
}

// TestStories runs the scripts in testdata; each opens with what it shows.
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		s := &story{fs: vfs.NewCrashableMem()}
		s.e, s.peer = open(t, testConfig(s.fs)), open(t, testConfig(vfs.NewMem()))
		defer func() {
			require.NoError(t, s.e.Close())
			require.NoError(t, s.peer.Close())
		}()
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			out, err := s.run(t, d)
			if err != nil {
				return "error: " + err.Error() + "\n"
			}
			return out
		})
	})
}

func (s *story) run(t *testing.T, d *datadriven.TestData) (string, error) {
	var group, from, to, term, index uint64 = 1, 0, 0, 1, 0
	d.MaybeScanArgs(t, "group", &group)
	d.MaybeScanArgs(t, "from", &from)
	d.MaybeScanArgs(t, "to", &to)
	d.MaybeScanArgs(t, "term", &term)
	d.MaybeScanArgs(t, "index", &index)
	switch d.Cmd {
	case "append":
		return s.logBatch(group, func(b *LogBatch) error { return b.Append(group, entriesOf(from, to+1, term)) })
	case "hard-state":
		return s.logBatch(group, func(b *LogBatch) error { return b.SetHardState(group, hardState(term, 0, index)) })
	case "truncate":
		return s.logBatch(group, func(b *LogBatch) error { return b.Truncate(group, index, term) })
	case "reset":
		return s.logBatch(group, func(b *LogBatch) error { return b.Reset(group, index, term) })
	case "log":
		return s.showLog(group)
	case "apply": // input: lines "key value", or "key" to delete
		return s.apply(s.e, group, index, term, d.Input)
	case "peer-apply":
		return s.apply(s.peer, group, index, term, d.Input)
	case "state":
		return s.showState(group)
	case "flush":
		return "", s.e.Flush()
	case "crash":
		s.fs = s.fs.CrashClone(vfs.CrashCloneCfg{})
		_ = s.e.Close()
		s.e = open(t, testConfig(s.fs))
		return "", s.e.Check()
	case "receive":
		return s.receive(group)
	case "install":
		m, err := s.st.Install()
		return fmt.Sprintf("applied %d term %d\n", m.Applied, m.AppliedTerm), err
	}
	return "", fmt.Errorf("no command %s", d.Cmd)
}

func (s *story) logBatch(group uint64, f func(b *LogBatch) error) (string, error) {
	b := s.e.NewLogBatch()
	defer b.Discard()
	if err := f(b); err != nil {
		return "", err
	}
	if err := b.Commit(true); err != nil {
		return "", err
	}
	return s.showLog(group)
}

func (s *story) showLog(group uint64) (string, error) {
	st, err := s.e.OpenLog(group)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "(%d, %d] truncated term %d", st.Truncated, st.Last, st.TruncatedTerm)
	if st.Hard != nil {
		fmt.Fprintf(&b, ", hard state term %d commit %d", st.Hard.GetTerm(), st.Hard.GetCommit())
	}
	b.WriteString("\nterms:")
	for i := st.Truncated + 1; i <= st.Last; i++ {
		term, err := s.e.LogTerm(group, i)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, " %d", term)
	}
	return b.String() + "\n", nil
}

func (s *story) apply(e *Engine, group, index, term uint64, input string) (string, error) {
	b := e.Group(group).NewBatch()
	defer b.Discard()
	for line := range strings.Lines(input) {
		key, value, put := strings.Cut(strings.TrimSpace(line), " ")
		err := b.Delete(0, []byte(key))
		if put {
			err = b.Put(0, []byte(key), Value{Data: []byte(value), Version: index})
		}
		if err != nil {
			return "", err
		}
	}
	if err := b.SetMeta(Meta{Applied: index, AppliedTerm: term, Conf: &raftpb.ConfState{}}); err != nil {
		return "", err
	}
	return "", b.Commit()
}

func (s *story) showState(group uint64) (string, error) {
	g := s.e.Group(group)
	m, err := g.Meta()
	if err != nil {
		return "", err
	}
	durable, err := g.DurableApplied()
	if err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "applied %d term %d, durable %d, %d keys of %d bytes\n", m.Applied, m.AppliedTerm, durable, m.Keys, m.Bytes)
	err = g.Scan(func(_ uint32, key []byte, v Value) error {
		fmt.Fprintf(&b, "%s = %s @%d\n", key, v.Data, v.Version)
		return nil
	})
	return b.String(), err
}

func (s *story) receive(group uint64) (string, error) {
	snap, err := s.peer.Group(group).OpenSnapshot()
	if err != nil {
		return "", err
	}
	if s.st, err = s.e.NewStaging(group); err != nil {
		return "", err
	}
	n := 0
	err = snap.Items(func(key, value []byte) error {
		n++
		return s.st.Add(key, value)
	})
	if err == nil {
		err = s.st.Finish()
	}
	if cerr := snap.Close(); err == nil {
		err = cerr
	}
	return fmt.Sprintf("%d pairs\n", n), err
}
