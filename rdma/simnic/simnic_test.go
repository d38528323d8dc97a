package simnic

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/rdmatest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func verify(m *testing.M) { goleak.VerifyTestMain(m) }

// factory is a fabric of two hosts for the conformance suite.
func factory(cfg Config) rdmatest.Factory {
	const acceptTimeout = 200 * time.Millisecond
	return rdmatest.Factory{
		AcceptTimeout: acceptTimeout,
		New: func(tb testing.TB) rdmatest.Rig {
			cfg := cfg
			cfg.AcceptTimeout = acceptTimeout
			f, err := New(cfg)
			require.NoError(tb, err)
			tb.Cleanup(f.Close)
			target, err := f.Host("server").NewTarget(rdma.TargetConfig{NodeID: 1, BootID: 7})
			require.NoError(tb, err)
			initiator, err := f.Host("client").NewInitiator(rdma.InitiatorConfig{})
			require.NoError(tb, err)
			return rdmatest.Rig{Target: target, Initiator: initiator, Hold: func() func() { return f.Hold("server") }}
		},
		ForgeAnswers: func(good []byte) [][]byte {
			var forged [][]byte
			for field := range 3 { // nonce, boot, token
				b := append([]byte(nil), good...)
				at := headerLen + 8*field
				binary.BigEndian.PutUint64(b[at:], binary.BigEndian.Uint64(b[at:])+1)
				forged = append(forged, b)
			}
			return append(forged, append(append([]byte(nil), good...), 0))
		},
	}
}

func TestConformance(t *testing.T) { rdmatest.Run(t, factory(Config{Seed: 1})) }

// TestConformanceSlow runs the suite with everything in its way that breaks no
// connection.
func TestConformanceSlow(t *testing.T) {
	const us = time.Microsecond
	rdmatest.Run(t, factory(Config{
		Seed: 2, TearOneIn: 1, Delay: Range{Max: 20 * us}, Gap: Range{Max: us}, Return: Range{Max: 20 * us}, Pause: Range{Max: us},
	}))
}

func BenchmarkRead(b *testing.B) { rdmatest.Benchmark(b, factory(Config{Seed: 1})) }
