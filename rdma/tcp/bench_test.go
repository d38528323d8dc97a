package tcp

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

// A READ's request and the header of its answer, so that the raw exchange below
// moves the same bytes.
const rawRequestSize = requestHeaderSize + descriptorSize

// pingPong is what the sockets themselves cost: one caller, one connection,
// blocking reads and writes, no protocol.
func pingPong(b *testing.B, size int) (once func()) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		nc, err := ln.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		request, answer := make([]byte, rawRequestSize), make([]byte, responseHeaderSize+size)
		for {
			if _, err := io.ReadFull(nc, request); err != nil {
				return
			}
			if _, err := nc.Write(answer); err != nil {
				return
			}
		}
	})
	nc, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(b, err)
	b.Cleanup(func() {
		nc.Close()
		ln.Close()
		wg.Wait()
	})
	request, answer := make([]byte, rawRequestSize), make([]byte, responseHeaderSize+size)
	return func() {
		if _, err := nc.Write(request); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(nc, answer); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPingPong(b *testing.B) {
	for _, size := range []int{64, 1024} {
		b.Run(fmt.Sprintf("%dB", size), func(b *testing.B) {
			once := pingPong(b, size)
			for b.Loop() {
				once()
			}
		})
	}
}

// BenchmarkLoneReadRatio sets a lone caller's READ against the bare exchange of the
// same bytes. The two take turns, and the medians are compared, so that what else
// the machine does meets both.
func BenchmarkLoneReadRatio(b *testing.B) {
	for _, size := range []int{64, 1024} {
		b.Run(fmt.Sprintf("%dB", size), func(b *testing.B) {
			raw := pingPong(b, size)
			r := newRig(b, Provider{}, 1<<20)
			batch := newBatch(rdma.Read{Region: 1, Dst: make([]byte, size)})
			read := func() {
				batch.Reset()
				r.conn.Post(batch)
				if !batch.Wait(context.Background(), 0) || batch.Err() != nil {
					b.Fatal(batch.Err())
				}
			}
			var ofRaw, ofRead []time.Duration
			timed := func(f func()) time.Duration {
				start := time.Now()
				for range 20 {
					f()
				}
				return time.Since(start) / 20
			}
			for b.Loop() {
				ofRaw, ofRead = append(ofRaw, timed(raw)), append(ofRead, timed(read))
			}
			slices.Sort(ofRaw)
			slices.Sort(ofRead)
			mid := len(ofRaw) / 2
			b.ReportMetric(float64(ofRead[mid].Nanoseconds()), "ns/read")
			b.ReportMetric(float64(ofRaw[mid].Nanoseconds()), "ns/exchange")
			b.ReportMetric(float64(ofRead[mid])/float64(ofRaw[mid]), "ratio")
		})
	}
}

// BenchmarkRead is READs of one connection by several callers, each waiting for
// its own.
func BenchmarkRead(b *testing.B) { benchRead(b, Provider{}) }

// BenchmarkReadTLS is the same under TLS.
func BenchmarkReadTLS(b *testing.B) { benchRead(b, mutualTLS(b)) }

func benchRead(b *testing.B, p Provider) {
	for _, size := range []int{64, 1024} {
		for _, callers := range []int{1, 8, 64} {
			b.Run(fmt.Sprintf("%dB/callers=%d", size, callers), func(b *testing.B) {
				r := newRig(b, p, 1<<20)
				benchCallers(b, callers, func(batch *rdma.Batch, i int) {
					r.conn.Post(batch)
				}, size)
			})
		}
	}
}

// benchCallers spreads b.N posts over the callers.
func benchCallers(b *testing.B, callers int, post func(*rdma.Batch, int), size int) {
	b.ReportAllocs()
	b.ResetTimer()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			batch := &rdma.Batch{Reads: []rdma.Read{{Region: 1, Dst: make([]byte, size)}}}
			for {
				i := next.Add(1)
				if i > int64(b.N) {
					return
				}
				batch.Reset()
				batch.Reads[0].Offset = uint64(i%512) * 1024
				post(batch, int(i))
				batch.Wait(context.Background(), 0)
				if err := batch.Err(); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "reads/s")
}

// BenchmarkQuery is look-ups run by the target, whose object is small.
func BenchmarkQuery(b *testing.B) {
	region, query, want := queryExample(b)
	for _, callers := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			r := newRig(b, Provider{}, 4096)
			m, err := rdma.AllocMemory("kvd-tcp-bench", uint64(len(region)), rdma.MemoryOptions{})
			require.NoError(b, err)
			copy(m.Bytes(), region)
			_, err = r.domain.Register(exampleChunk, m)
			require.NoError(b, err)
			benchCallers(b, callers, func(batch *rdma.Batch, _ int) { r.conn.PostQuery(batch, query) }, 2*len(want))
			require.NoError(b, r.domain.Deregister(exampleChunk))
			require.NoError(b, m.Free())
		})
	}
}

// BenchmarkLargeRead is one caller reading 1 MiB at a time.
func BenchmarkLargeRead(b *testing.B) { benchLargeRead(b, Provider{}) }

// BenchmarkLargeReadTLS is the same under TLS.
func BenchmarkLargeReadTLS(b *testing.B) { benchLargeRead(b, mutualTLS(b)) }

func benchLargeRead(b *testing.B, p Provider) {
	r := newRig(b, p, 2<<20)
	b.SetBytes(1 << 20)
	benchCallers(b, 1, func(batch *rdma.Batch, _ int) { r.conn.Post(batch) }, 1<<20)
}
