//go:build rdmaguest

package verbs

import (
	"bytes"
	"log/slog"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/rdmatest"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// rxe is the settings with which tests reach the guest's Soft-RoCE device.
func rxe() Provider {
	return Provider{Devices: []string{"rxe*"}, AcceptTimeout: 2 * time.Second, RescanInterval: 200 * time.Millisecond}
}

var boots atomic.Uint64

func testLog(tb testing.TB) *slog.Logger {
	if testing.Verbose() && os.Getenv("KVD_TEST_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return nil
}

func newRig(tb testing.TB, server, client Provider) rdmatest.Rig {
	tb.Helper()
	target, err := server.NewTarget(rdma.TargetConfig{NodeID: 7, BootID: boots.Add(1), Logger: testLog(tb)})
	require.NoError(tb, err)
	in, err := client.NewInitiator(rdma.InitiatorConfig{Logger: testLog(tb), ConnectTimeout: patience})
	require.NoError(tb, err)
	return rdmatest.Rig{Target: target, Initiator: in, Hold: func() func() { return hold(in.(*initiator)) }}
}

// hold keeps READs from being posted to the device until release.
func hold(in *initiator) (release func()) {
	in.held.Store(true)
	return func() {
		in.held.Store(false)
		in.mu.Lock()
		defer in.mu.Unlock()
		for c := range in.mu.conns {
			for _, r := range c.all {
				r.post.Lock()
				_ = r.pumpLocked()
				r.post.Unlock()
			}
		}
	}
}

func factory(server, client Provider) rdmatest.Factory {
	return rdmatest.Factory{
		New:           func(tb testing.TB) rdmatest.Rig { return newRig(tb, server, client) },
		AcceptTimeout: server.withDefaults().AcceptTimeout,
		ForgeAnswers:  forgeAnswers,
	}
}

// forgeAnswers changes, one at a time, what a client could hope to change.
func forgeAnswers(good []byte) (bad [][]byte) {
	forge := func(change func(*answer)) {
		a, err := decodeAnswer(good)
		if err != nil {
			panic(err)
		}
		change(&a)
		bad = append(bad, a.encode())
	}
	forge(func(a *answer) { a.nonce[0] ^= 1 })
	forge(func(a *answer) { a.nonce = nonce{} })
	forge(func(a *answer) { a.rails[0].clientRail = 9 })
	forge(func(a *answer) { a.rails[0].qpn ^= 1 })
	version := bytes.Clone(good)
	version[len(answerMagic)]++
	return append(bad, version)
}

func TestConformanceRoCE(t *testing.T) {
	before := ibv.Live()
	p := rxe()
	p.RescanInterval = time.Minute // looking for devices allocates, which is not a READ's doing
	rdmatest.Run(t, factory(p, p))
	require.Equal(t, before, ibv.Live(), "objects left behind")
}

func BenchmarkReadRoCE(b *testing.B) { rdmatest.Benchmark(b, factory(rxe(), rxe())) }

// TestDiscoverRoCE shows what doctor would.
func TestDiscoverRoCE(t *testing.T) {
	r := rxe().Discover()
	t.Logf("%+v", r)
	require.True(t, r.Usable, r.Verdict)
}
