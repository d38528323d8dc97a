package engine

import (
	"fmt"
	"math/rand"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newRand prints its seed; KVD_SEED replays one.
func newRand(t *testing.T) *rand.Rand {
	seed := time.Now().UnixNano()
	if s := os.Getenv("KVD_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseInt(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("KVD_SEED=%d", seed)
	return rand.New(rand.NewSource(seed))
}

// testConfig prepares short log segments: most tests open many engines.
func testConfig(fs vfs.FS) Config {
	return Config{Dir: "data", FS: fs, DiskSlowAfter: -1, walBytes: 64 << 10}
}

func open(t testing.TB, cfg Config) *Engine {
	t.Helper()
	e, err := Open(cfg)
	require.NoError(t, err)
	return e
}

// openChecked is closed, after a check, when the test ends.
func openChecked(t testing.TB, cfg Config) *Engine {
	t.Helper()
	e := open(t, cfg)
	t.Cleanup(func() {
		require.NoError(t, e.Check())
		require.NoError(t, e.Close())
	})
	return e
}

func entry(index, term uint64, data string) *raftpb.Entry {
	return &raftpb.Entry{Index: &index, Term: &term, Type: raftpb.EntryNormal.Enum(), Data: []byte(data)}
}

func entriesOf(lo, hi, term uint64) (es []*raftpb.Entry) {
	for i := lo; i < hi; i++ {
		es = append(es, entry(i, term, fmt.Sprintf("data %d.%d", term, i)))
	}
	return es
}

func hardState(term, vote, commit uint64) *raftpb.HardState {
	return &raftpb.HardState{Term: &term, Vote: &vote, Commit: &commit}
}

func commitLog(t testing.TB, e *Engine, f func(b *LogBatch) error) {
	t.Helper()
	b := e.NewLogBatch()
	require.NoError(t, f(b))
	require.NoError(t, b.Commit(true))
}
