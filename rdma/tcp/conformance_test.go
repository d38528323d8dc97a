package tcp

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/rdmatest"
	"github.com/kvd-io/kvd/storage/layout"
)

const (
	conformanceAcceptTimeout = 300 * time.Millisecond
	// Some dozens of handshakes at once, under the race detector, take their time.
	conformanceAcceptTimeoutTLS = 3 * time.Second
)

func conformanceFactory(tb testing.TB, settings Provider) rdmatest.Factory {
	settings.AcceptTimeout = conformanceAcceptTimeout
	if settings.ServerTLS != nil {
		settings.AcceptTimeout = conformanceAcceptTimeoutTLS
	}
	table, query, want := queryExample(tb)
	return rdmatest.Factory{
		AcceptTimeout: settings.AcceptTimeout,
		TargetServes:  true,
		New: func(tb testing.TB) rdmatest.Rig {
			t, err := settings.NewTarget(rdma.TargetConfig{NodeID: 1, BootID: uint64(time.Now().UnixNano())})
			require.NoError(tb, err)
			in, err := settings.NewInitiator(rdma.InitiatorConfig{ConnectTimeout: patience})
			require.NoError(tb, err)
			return rdmatest.Rig{Target: t, Initiator: in, Hold: func() func() { return hold(in.(*initiator)) }}
		},
		Query: &rdmatest.QueryExample{
			Regions: map[rdma.RegionID][]byte{exampleChunk: table},
			Query:   query,
			Want:    want,
			Bad:     badQueries(query),
		},
		ForgeAnswers: forgeAnswers,
	}
}

// hold becomes the flusher of every connection and does not flush.
func hold(in *initiator) (release func()) {
	in.mu.Lock()
	defer in.mu.Unlock()
	var releases []func()
	for c := range in.mu.conns {
		releases = append(releases, stall(c))
	}
	return func() {
		for _, release := range releases {
			release()
		}
	}
}

// forgeAnswers changes the flags, the node, the boot and the token: each time the rest is
// right.
func forgeAnswers(good []byte) [][]byte {
	var out [][]byte
	for _, at := range []int{6, 8, 16, 24, 24 + tokenSize - 1} {
		b := append([]byte(nil), good...)
		b[at] ^= 1
		out = append(out, b)
	}
	return out
}

// badQueries are truncations, and fields that point nowhere.
func badQueries(good []byte) [][]byte {
	bad := [][]byte{{}, good[:1], good[:len(good)-1], make([]byte, maxQueryBytes)}
	for _, at := range []int{8, 16, 20, 24, 28} {
		b := append([]byte(nil), good...)
		for i := range 4 {
			b[at+i] = 0xff
		}
		bad = append(bad, b)
	}
	odd := append([]byte(nil), good...)
	odd[8] ^= 4 // a table that is not 8-byte aligned
	return append(bad, odd)
}

const (
	exampleChunk = 3
	exampleSeed  = 99
)

// queryExample is a region with a table of one bucket and one object, a query for
// its key, and the answer that the layout prescribes.
func queryExample(tb testing.TB) (region, query, want []byte) {
	region = make([]byte, 8192)
	key, value := []byte("a key"), []byte("and its value")
	at := layout.Place{Chunk: exampleChunk, Offset: 4096}
	size := layout.EncodeObject(region[at.Offset:], exampleSeed, at, layout.Object{Version: 5, Key: key, Value: value})
	word := binary.LittleEndian.Uint64(region[at.Offset:])
	binary.LittleEndian.PutUint64(region[at.Offset:], layout.WithState(word, layout.StateLive))

	table := layout.Table{ID: 11, Place: layout.Place{Chunk: exampleChunk, Offset: 64}, Buckets: 1}
	var slots [layout.SlotsPerBucket]layout.Slot
	slots[2] = layout.MakeSlot(layout.HashKey(exampleSeed, key).Fingerprint(), layout.ClassFor(size), at)
	binary.LittleEndian.PutUint64(region[64:], layout.BucketHeader(table.ID, 0, 0, 0, &slots))
	for i, s := range slots {
		binary.LittleEndian.PutUint64(region[64+8*(i+1):], uint64(s))
	}
	query = layout.AppendQuery(nil, table, exampleSeed, key)
	want = layout.AnswerQuery(func(chunk uint32, offset, length uint64) []byte {
		if chunk != exampleChunk {
			return nil
		}
		return region[offset : offset+length]
	}, query, nil)
	answer := layout.DecodeAnswer(want)
	require.Equal(tb, layout.AnswerFound, answer.Kind)
	o, verdict := layout.DecodeObject(answer.Object, exampleSeed, at)
	require.Equal(tb, layout.Valid, verdict)
	require.Equal(tb, value, o.Value)
	return region, query, want
}

func TestConformance(t *testing.T) { rdmatest.Run(t, conformanceFactory(t, Provider{})) }

func TestConformanceTLS(t *testing.T) {
	f := conformanceFactory(t, mutualTLS(t))
	f.MaxAllocs = 2 // crypto/tls: one for each record read, at either end
	rdmatest.Run(t, f)
}

func BenchmarkConformance(b *testing.B) { rdmatest.Benchmark(b, conformanceFactory(b, Provider{})) }

func BenchmarkConformanceTLS(b *testing.B) {
	rdmatest.Benchmark(b, conformanceFactory(b, mutualTLS(b)))
}
