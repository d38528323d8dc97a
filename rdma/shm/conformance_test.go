//go:build linux

package shm

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/rdmatest"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		runRole(role)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction(DeathWordGoroutine))
}

var bootCounter atomic.Uint64

func TestConformance(t *testing.T) {
	const acceptTimeout = 300 * time.Millisecond
	rdmatest.Run(t, rdmatest.Factory{
		AcceptTimeout: acceptTimeout,
		Synchronous:   true,
		New: func(tb testing.TB) rdmatest.Rig {
			p := &Provider{SocketPath: filepath.Join(tb.TempDir(), "s"), AcceptTimeout: acceptTimeout}
			target, err := p.NewTarget(rdma.TargetConfig{NodeID: 7, BootID: bootCounter.Add(1)})
			require.NoError(tb, err)
			in, err := p.NewInitiator(rdma.InitiatorConfig{})
			require.NoError(tb, err)
			return rdmatest.Rig{Target: target, Initiator: in}
		},
		ForgeAnswers: forgeAnswers,
	})
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
	forge(func(a *answer) { a.token[0] ^= 1 })
	forge(func(a *answer) { a.token[tokenSize-1] ^= 0x80 })
	forge(func(a *answer) { a.token = token{} })
	forge(func(a *answer) { a.proof[3] ^= 4 })
	forge(func(a *answer) { a.node++ })
	forge(func(a *answer) { a.boot++ })
	version := append([]byte(nil), good...)
	binary.LittleEndian.PutUint16(version[len(answerMagic):], protocolVersion+1)
	return append(bad, version)
}
