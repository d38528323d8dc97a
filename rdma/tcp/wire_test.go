package tcp

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

func TestRequestRoundTrip(t *testing.T) {
	reads := []rdma.Read{
		{Region: 1, Offset: 8, Dst: make([]byte, 64)},
		{Region: 1<<32 - 1, Offset: 1<<64 - 1, Dst: make([]byte, 1)},
	}
	b := appendReads(nil, 77, reads)
	b = appendQuery(b, 78, 1000, []byte("who?"))
	r, size, err := parseRequest(b)
	require.NoError(t, err)
	require.Equal(t, uint8(kindRead), r.kind)
	require.Equal(t, uint32(77), r.seq)
	require.Equal(t, len(reads), r.count)
	for i, want := range reads {
		region, offset, length := r.readAt(i)
		require.Equal(t, want.Region, region)
		require.Equal(t, want.Offset, offset)
		require.Equal(t, uint64(len(want.Dst)), length)
	}
	r, _, err = parseRequest(b[size:])
	require.NoError(t, err)
	query, limit := r.query()
	require.Equal(t, "who?", string(query))
	require.Equal(t, uint64(1000), limit)
}

// Every prefix of a frame is incomplete, and every flipped bit is noticed.
func TestRequestDamage(t *testing.T) {
	good := appendReads(nil, 1, []rdma.Read{{Region: 1, Offset: 8, Dst: make([]byte, 64)}})
	for n := range len(good) {
		_, size, err := parseRequest(good[:n])
		require.NoError(t, err)
		require.Zero(t, size, "%d of %d bytes", n, len(good))
	}
	for bit := range len(good) * 8 {
		b := bytes.Clone(good)
		b[bit/8] ^= 1 << (bit % 8)
		_, _, err := parseRequest(b)
		require.ErrorIs(t, err, errProtocol, "bit %d", bit)
	}
}

func TestResponseDamage(t *testing.T) {
	good := make([]byte, responseHeaderSize)
	want := response{kind: kindData, code: codeLast, index: 3, length: 99, seq: 1 << 31, sum: 1<<31 + 7}
	want.put(good)
	got, err := parseResponse(good)
	require.NoError(t, err)
	require.Equal(t, want, got)
	for bit := range len(good) * 8 {
		b := bytes.Clone(good)
		b[bit/8] ^= 1 << (bit % 8)
		_, err := parseResponse(b)
		require.ErrorIs(t, err, errProtocol, "bit %d", bit)
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add(appendReads(nil, 1, []rdma.Read{{Region: 1, Dst: make([]byte, 8)}}))
	f.Add(appendQuery(nil, 1, 10, []byte("q")))
	f.Fuzz(func(t *testing.T, b []byte) {
		// Both as it came and with sound check sums, or nothing would get past them.
		for _, b := range [][]byte{b, sealed(b)} {
			r, size, err := parseRequest(b)
			if err != nil || size == 0 {
				continue
			}
			require.LessOrEqual(t, size, len(b))
			require.LessOrEqual(t, size, maxRequestBytes)
			switch r.kind {
			case kindRead:
				for i := range r.count {
					r.readAt(i)
				}
			case kindQuery:
				r.query()
			}
		}
	})
}

// sealed gives the bytes the check sums of a request.
func sealed(b []byte) []byte {
	b = bytes.Clone(b)
	if len(b) < requestHeaderSize {
		return b
	}
	r := int(b[2]) | int(b[3])<<8
	sealRequest(b, b[0], r, 5)
	return b
}

// asked is a receiver that waits for the answers to a few batches, without a
// socket.
func asked(chains ...[]int) (*conn, []*rdma.Batch) {
	c := &conn{}
	c.send.init(c, nil)
	c.recv.init(c)
	c.role.init()
	c.role.timer.Stop()
	var batches []*rdma.Batch
	for _, lengths := range chains {
		b := newBatch()
		for _, n := range lengths {
			b.Reads = append(b.Reads, rdma.Read{Region: rdma.ControlRegion, Dst: make([]byte, n)})
		}
		w := &work{c: c, b: b}
		c.outstanding.Add(1)
		if _, err := c.send.queue(w, nil); err != nil {
			panic(err)
		}
		batches = append(batches, b)
	}
	return c, batches
}

// answered is the stream that answers lengths, in segments of at most cut bytes;
// the bytes of READ i of request s are all byte(s+i+1).
func answered(seq uint32, lengths []int, cut int) []byte {
	var out []byte
	for i, n := range lengths {
		for done := 0; done < n; {
			k := min(n-done, cut)
			h := response{kind: kindData, index: uint16(i), seq: seq}
			if done += k; done == n {
				h.code = codeLast
			}
			at := len(out)
			out = append(out, make([]byte, responseHeaderSize)...)
			out = append(out, bytes.Repeat([]byte{byte(int(seq) + i + 1)}, k)...)
			h.seal(out[at:], true)
		}
	}
	return out
}

// feed gives the stream to the receiver in pieces of at most n bytes.
func feed(c *conn, stream []byte, n int) error {
	for len(stream) > 0 {
		err := c.recv.fill(func(p []byte) (int, error) {
			k := copy(p, stream[:min(n, len(stream))])
			stream = stream[k:]
			return k, nil
		})
		c.deliver(nil)
		if err != nil {
			return err
		}
	}
	return nil
}

// However the stream is cut, between sockets or between frames, the bytes arrive.
func TestReceiverSplits(t *testing.T) {
	chains := [][]int{{64}, {1, 70, 8}, {40000}, {64, 64}}
	for _, segment := range []int{1 << 20, 9000, 33} {
		var stream []byte
		for seq, lengths := range chains {
			stream = append(stream, answered(uint32(seq), lengths, segment)...)
		}
		for _, piece := range []int{1, 2, 7, 15, 16, 17, 100, 8191, len(stream)} {
			c, batches := asked(chains...)
			require.NoError(t, feed(c, stream, piece))
			for seq, b := range batches {
				require.True(t, b.Completed(), "segment %d, piece %d, batch %d", segment, piece, seq)
				require.NoError(t, b.Err())
				for i, r := range b.Reads {
					require.Equal(t, len(r.Dst), r.N)
					require.Equal(t, bytes.Repeat([]byte{byte(seq + i + 1)}, r.N), r.Dst)
				}
			}
		}
	}
}

// Every flipped bit of a stream of answers is noticed, in headers and in what was read:
// the batch that it belongs to does not complete.
func TestReceiverDamage(t *testing.T) {
	lengths := []int{64, 8}
	good := answered(0, lengths, 40)
	for bit := range len(good) * 8 {
		stream := bytes.Clone(good)
		stream[bit/8] ^= 1 << (bit % 8)
		for _, piece := range []int{7, len(stream)} {
			c, batches := asked(lengths)
			require.ErrorIs(t, feed(c, stream, piece), errProtocol, "bit %d", bit)
			require.False(t, batches[0].Completed(), "bit %d", bit)
		}
	}
	// Read straight to where it belongs.
	good = answered(0, []int{3 * directSize}, 3*directSize)
	for _, at := range []int{responseHeaderSize, responseHeaderSize + 2*directSize, len(good) - 1} {
		stream := bytes.Clone(good)
		stream[at] ^= 1
		c, batches := asked([]int{3 * directSize})
		require.ErrorIs(t, feed(c, stream, directSize), errProtocol, "byte %d", at)
		require.False(t, batches[0].Completed())
	}
	// Other regions have no check sum, and none is accepted.
	c, batches := asked([]int{8})
	batches[0].Reads[0].Region = 1
	require.ErrorIs(t, feed(c, answered(0, []int{8}, 8), 100), errProtocol)
	c, batches = asked([]int{8})
	batches[0].Reads[0].Region = 1
	frame := append(make([]byte, responseHeaderSize), "anything"...)
	response{kind: kindData, code: codeLast}.seal(frame, false)
	require.NoError(t, feed(c, frame, 100))
	require.True(t, batches[0].Completed())
}

// A stream that ends anywhere completes nothing early.
func TestReceiverTruncation(t *testing.T) {
	stream := answered(0, []int{64, 8}, 40)
	for n := range len(stream) {
		c, batches := asked([]int{64, 8})
		require.NoError(t, feed(c, stream[:n], 1000))
		require.False(t, batches[0].Completed(), "after %d of %d bytes", n, len(stream))
		c.recv.failAll(c.send.stop(io.EOF), io.EOF)
		require.ErrorIs(t, batches[0].Err(), io.EOF)
	}
}

// Sound headers that answer something else than what was asked.
func TestReceiverRefuses(t *testing.T) {
	for name, h := range map[string]response{
		"another request":      {kind: kindData, code: codeLast, length: 64, seq: 1},
		"another READ":         {kind: kindData, code: codeLast, length: 64, index: 1},
		"too long":             {kind: kindData, code: codeLast, length: 65},
		"short, called last":   {kind: kindData, code: codeLast, length: 63},
		"whole, not last":      {kind: kindData, length: 64},
		"empty":                {kind: kindData},
		"unknown flag":         {kind: kindData, code: codeLast | 2, length: 64},
		"answer to no query":   {kind: kindAnswer, code: codeLast, length: 64},
		"unknown kind":         {kind: 0x99, length: 64},
		"a request":            {kind: kindRead, length: 64},
		"unknown error":        {kind: kindError, code: 99},
		"the peer's complaint": {kind: kindBye, code: codeProtocol},
	} {
		c, batches := asked([]int{64})
		stream := make([]byte, responseHeaderSize)
		h.put(stream)
		require.ErrorIs(t, feed(c, stream, len(stream)), errProtocol, name)
		require.False(t, batches[0].Completed(), name)
	}
	c, _ := asked()
	require.ErrorIs(t, feed(c, answered(0, []int{8}, 8), 1000), errProtocol, "an answer to nothing")
	c, batches := asked([]int{64})
	bye := make([]byte, responseHeaderSize)
	response{kind: kindBye, code: codeRevoked}.put(bye)
	require.ErrorIs(t, feed(c, bye, 1000), rdma.ErrRevoked)
	require.False(t, batches[0].Completed())
}

// FuzzReceiver: whatever comes, nothing but a whole answer completes a batch
// without an error, and no byte lands outside of a Dst.
func FuzzReceiver(f *testing.F) {
	f.Add(answered(0, []int{64, 8}, 40), uint16(7), false)
	f.Add(answered(0, []int{64, 8}, 64), uint16(1), true)
	f.Fuzz(func(t *testing.T, stream []byte, piece uint16, seal bool) {
		if seal {
			stream = sealedHeaders(stream)
		}
		c, batches := asked([]int{64, 8}, []int{9000})
		canary := make([]byte, 9016)
		batches[1].Reads[0].Dst = canary[8:9008]
		err := feed(c, stream, int(piece)+1)
		for _, b := range batches {
			if b.Completed() && b.Err() == nil {
				for _, r := range b.Reads {
					require.Equal(t, len(r.Dst), r.N)
				}
			}
		}
		require.Equal(t, make([]byte, 8), canary[:8])
		require.Equal(t, make([]byte, 8), canary[9008:])
		if err != nil && !errors.Is(err, errProtocol) && !errors.Is(err, rdma.ErrRevoked) {
			t.Fatal(err)
		}
		end := io.ErrUnexpectedEOF
		c.recv.failAll(c.send.stop(end), end)
		for _, b := range batches {
			require.True(t, b.Completed())
		}
	})
}

// sealedHeaders repairs the check sums of each frame that the lengths lead to.
func sealedHeaders(b []byte) []byte {
	b = bytes.Clone(b)
	for at := 0; len(b)-at >= responseHeaderSize; {
		h := response{kind: b[at], code: b[at+1], index: uint16(b[at+2]), length: uint32(b[at+4]) | uint32(b[at+5])<<8, seq: uint32(b[at+8] & 1)}
		end := at + responseHeaderSize + int(h.length)
		if end <= len(b) {
			h.seal(b[at:end], true)
		} else {
			h.put(b[at:])
		}
		at = end
	}
	return b
}

// The target's side, against a slow twin: requests in pieces, executed in order.
func TestSessionSplits(t *testing.T) {
	r := newUnconnected(t, Provider{MaxReadBytes: 1 << 20}, 1<<20)
	rnd := rand.New(rand.NewPCG(3, 4))
	var stream []byte
	var want []byte
	for seq := range uint32(40) {
		reads := make([]rdma.Read, 1+rnd.IntN(3))
		for i := range reads {
			n := 1 + rnd.IntN(2000)
			if seq == 20 {
				n = 300_000
			}
			reads[i] = rdma.Read{Region: 1, Offset: uint64(rnd.IntN(1<<20 - n)), Dst: make([]byte, n)}
			want = append(want, r.memory.Bytes()[reads[i].Offset:][:n]...)
		}
		stream = appendReads(stream, seq, reads)
	}
	for _, piece := range []int{1, 3, 19, 20, 21, 500, len(stream)} {
		var got []byte
		s := newSession(&endpoint{d: r.domain}, nil)
		for at := 0; at < len(stream); {
			n := copy(s.in[s.w:], stream[at:min(at+piece, len(stream))])
			at, s.w = at+n, s.w+n
			for more := true; more; {
				var err error
				more, err = s.execute()
				require.NoError(t, err)
				require.LessOrEqual(t, len(s.out), outputSize+responseHeaderSize*(1+len(s.out)/64))
				got = append(got, payloads(t, s.out)...)
				s.out = s.out[:0]
			}
			s.compact()
		}
		require.True(t, bytes.Equal(want, got), "pieces of %d bytes", piece)
	}
}

func payloads(t *testing.T, stream []byte) (out []byte) {
	for len(stream) > 0 {
		h, err := parseResponse(stream)
		require.NoError(t, err)
		require.Equal(t, uint8(kindData), h.kind)
		out = append(out, stream[responseHeaderSize:][:h.length]...)
		stream = stream[responseHeaderSize+int(h.length):]
	}
	return out
}

// FuzzSession: any request stream gives sound frames or a protocol error.
func FuzzSession(f *testing.F) {
	region, query, _ := queryExample(f)
	f.Add(appendReads(nil, 5, []rdma.Read{{Region: exampleChunk, Offset: 64, Dst: make([]byte, 64)}}))
	f.Add(appendQuery(nil, 5, 100, query))
	t := &target{p: Provider{}.withDefaults()}
	d := &domain{t: t}
	d.memory.regions = map[rdma.RegionID][]byte{exampleChunk: region}
	f.Fuzz(func(t *testing.T, b []byte) {
		s := newSession(&endpoint{d: d}, nil)
		s.w = copy(s.in, sealed(b))
		more, err := s.execute()
		if err != nil {
			require.ErrorIs(t, err, errProtocol)
			return
		}
		require.False(t, more && len(s.out) < outputSize-minSegment)
		for out := s.out; len(out) > 0; {
			h, err := parseResponse(out)
			require.NoError(t, err)
			out = out[responseHeaderSize+int(h.length):]
		}
	})
}
