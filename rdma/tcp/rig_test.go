package tcp

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvd-io/kvd/rdma"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of the tests: far more than anything takes.
const patience = 30 * time.Second

// rig is a target with one domain with region 1, and a connection to it.
type rig struct {
	tb     testing.TB
	target *target
	domain *domain
	in     *initiator
	memory *rdma.Memory
	attr   []byte
	conn   *conn
	ep     rdma.Endpoint
}

// newRig registers size bytes of noise as region 1 and connects.
func newRig(tb testing.TB, p Provider, size uint64) *rig {
	tb.Helper()
	r := newUnconnected(tb, p, size)
	r.conn, r.ep = r.connect()
	return r
}

func newUnconnected(tb testing.TB, p Provider, size uint64) *rig {
	tb.Helper()
	r := &rig{tb: tb}
	t, err := p.NewTarget(rdma.TargetConfig{NodeID: 7, BootID: 0xb007})
	require.NoError(tb, err)
	r.target = t.(*target)
	in, err := p.NewInitiator(rdma.InitiatorConfig{ConnectTimeout: patience})
	require.NoError(tb, err)
	r.in = in.(*initiator)
	d, err := t.NewDomain("test")
	require.NoError(tb, err)
	r.domain = d.(*domain)
	r.memory, err = rdma.AllocMemory("kvd-tcp-test", size, rdma.MemoryOptions{})
	require.NoError(tb, err)
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range r.memory.Bytes() {
		r.memory.Bytes()[i] = byte(rnd.Uint32())
	}
	r.attr, err = d.Register(1, r.memory)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		require.NoError(tb, in.Close())
		require.NoError(tb, t.Close())
		require.NoError(tb, r.memory.Free())
	})
	return r
}

// connect makes another connection, to which region 1 is known.
func (r *rig) connect() (*conn, rdma.Endpoint) {
	r.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	d, err := r.in.Prepare(ctx)
	require.NoError(r.tb, err)
	answer, ep, err := r.domain.Accept(ctx, rdma.Peer{Name: r.tb.Name()}, d.Offer())
	require.NoError(r.tb, err)
	c, err := d.Connect(ctx, answer)
	require.NoError(r.tb, err)
	require.NoError(r.tb, c.AddRegion(1, r.memory.Size(), r.attr))
	return c.(*conn), ep
}

func newBatch(reads ...rdma.Read) *rdma.Batch {
	b := &rdma.Batch{Reads: reads}
	b.Reset()
	return b
}

// await waits for a batch that must complete.
func await(tb testing.TB, b *rdma.Batch) error {
	tb.Helper()
	require.True(tb, b.Wait(context.Background(), patience), "batch not complete after %v", patience)
	return b.Err()
}

// eventually waits for a condition.
func eventually(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	for end := time.Now().Add(patience); !cond(); {
		require.True(tb, time.Now().Before(end), "%s: not after %v", what, patience)
		<-time.After(time.Millisecond)
	}
}
