package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime/pprof"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/layout"
)

// writesClient is a client's end of a stream of writes.
type writesClient struct {
	t      testing.TB
	stream kvdv1.KV_WriteClient
	cancel context.CancelFunc
}

func (c *testCluster) openWrites(i int) *writesClient {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	c.t.Cleanup(cancel)
	s, err := c.kv(i).Write(ctx)
	require.NoError(c.t, err)
	return &writesClient{c.t, s, cancel}
}

func (w *writesClient) send(id uint64, req proto.Message) {
	w.sendFor(id, 0, req)
}

// sendFor gives the write that long; any message that is no write goes as none.
func (w *writesClient) sendFor(id uint64, timeout time.Duration, req proto.Message) {
	f := &kvdv1.WriteFrame{Id: id, TimeoutMs: uint32(timeout.Milliseconds())}
	switch req := req.(type) {
	case *kvdv1.PutRequest:
		f.Op = &kvdv1.WriteFrame_Put{Put: req}
	case *kvdv1.DeleteRequest:
		f.Op = &kvdv1.WriteFrame_Delete{Delete: req}
	}
	require.NoError(w.t, w.stream.Send(f))
}

func (w *writesClient) recv() *kvdv1.WriteResult {
	w.t.Helper()
	r, err := w.stream.Recv()
	require.NoError(w.t, err)
	return r
}

// ends waits for the stream's status; answers before it are given back.
func (w *writesClient) ends() (answers []*kvdv1.WriteResult, err error) {
	for {
		r, err := w.stream.Recv()
		if err != nil {
			return answers, err
		}
		answers = append(answers, r)
	}
}

func putOf(key, value string) *kvdv1.PutRequest {
	return &kvdv1.PutRequest{NamespaceId: 1, Key: []byte(key), Value: []byte(value)}
}

func requireApplied(t testing.TB, r *kvdv1.WriteResult) {
	t.Helper()
	require.Equal(t, applied, r.GetResponse().GetOutcome(), "%v", r)
}

// stall keeps a shard from applying, and so its writes from being answered, until
// the function is called.
func (c *testCluster) stall(node int, shard uint32) (goOn func()) {
	sh := c.nodes[node].shard(shard)
	sh.applyMu.Lock()
	held := true
	goOn = func() {
		if held {
			held = false
			sh.applyMu.Unlock()
		}
	}
	c.t.Cleanup(goOn)
	return goOn
}

// underWay is how many calls and writes the node carries out.
func (n *Node) underWay() int {
	n.calls.mu.Lock()
	defer n.calls.mu.Unlock()
	return n.calls.mu.inside
}

// streamGoroutines that serve streams of writes in this process.
func streamGoroutines(t testing.TB) int {
	var b bytes.Buffer
	require.NoError(t, pprof.Lookup("goroutine").WriteTo(&b, 2))
	return bytes.Count(b.Bytes(), []byte(".(*writeStream).work(")) + bytes.Count(b.Bytes(), []byte(".(*Node).Write("))
}

// A write means the same on a stream and as a call: outcomes, codes, reasons, texts.
func TestWriteStreamMeansTheSame(t *testing.T) {
	c := startCluster(t, 3, 2, func(cfg *Config) { cfg.MaxValueBytes = 1000 })
	ctx := testContext(t)
	_, err := c.put("key", "value", nil)
	require.NoError(t, err)
	leader := c.leaderOf(c.shardOf([]byte("key")))
	both := &kvdv1.Precondition{IfAbsent: true, IfVersion: 1}
	absent := &kvdv1.Precondition{IfAbsent: true}
	for name, req := range map[string]proto.Message{
		"conflict":            &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("key"), Precondition: absent},
		"expired writer":      &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("key"), Writer: &kvdv1.WriterStamp{WriterId: 77, Sequence: 1}},
		"delete conflict":     &kvdv1.DeleteRequest{NamespaceId: 1, Key: []byte("key"), Precondition: &kvdv1.Precondition{IfVersion: 1 << 40}},
		"unknown namespace":   &kvdv1.PutRequest{NamespaceId: 99, Key: []byte("key")},
		"no key":              &kvdv1.PutRequest{NamespaceId: 1},
		"long key":            &kvdv1.DeleteRequest{NamespaceId: 1, Key: make([]byte, layout.MaxKeySize+1)},
		"large value":         &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("key"), Value: make([]byte, 1001)},
		"contradiction":       &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("key"), Precondition: both},
		"no sequence":         &kvdv1.DeleteRequest{NamespaceId: 1, Key: []byte("key"), Writer: &kvdv1.WriterStamp{WriterId: 5}},
		"delete of an absent": &kvdv1.DeleteRequest{NamespaceId: 1, Key: []byte("key"), Precondition: absent},
	} {
		for node := range c.nodes {
			w := c.openWrites(node)
			w.send(math.MaxUint64, req)
			got := w.recv()
			require.EqualValues(t, uint64(math.MaxUint64), got.GetId())
			var resp *kvdv1.WriteResponse
			var err error
			if put, ok := req.(*kvdv1.PutRequest); ok {
				resp, err = c.kv(node).Put(ctx, put)
			} else {
				resp, err = c.kv(node).Delete(ctx, req.(*kvdv1.DeleteRequest))
			}
			st := status.Convert(err)
			require.EqualValues(t, st.Code(), got.GetCode(), name)
			require.Equal(t, st.Message(), got.GetMessage(), name)
			require.Equal(t, resp.GetOutcome(), got.GetResponse().GetOutcome(), name)
			require.Equal(t, resp.GetVersion(), got.GetResponse().GetVersion(), name)
			if err != nil {
				require.Nil(t, got.GetResponse(), name)
				want := requireReason(t, err, got.GetDetail().GetReason(), name)
				require.True(t, proto.Equal(want, got.GetDetail()), name)
			} else {
				require.Equal(t, leader, node, name)
			}
			w.cancel()
		}
	}

	// Many at once, each answered under its own id.
	w := c.openWrites(leader)
	const n = 200
	for i := range uint64(n) {
		w.send(i+1, &kvdv1.PutRequest{NamespaceId: 1, Key: []byte("key"), Value: fmt.Append(nil, i)})
	}
	versions := map[uint64]uint64{}
	for range n {
		r := w.recv()
		requireApplied(t, r)
		require.NotNil(t, r.GetResponse().GetLocation())
		versions[r.GetResponse().GetVersion()] = r.GetId()
	}
	require.Len(t, versions, n)
	g, err := c.get("key")
	require.NoError(t, err)
	require.Equal(t, fmt.Sprint(versions[g.GetVersion()]-1), string(g.GetValue()))
	w.send(1, &kvdv1.DeleteRequest{NamespaceId: 1, Key: []byte("key")})
	requireApplied(t, w.recv())
	w.send(1, &kvdv1.DeleteRequest{NamespaceId: 1, Key: []byte("key")})
	require.Equal(t, notFound, w.recv().GetResponse().GetOutcome())

	require.Equal(t, float64(n+1+1), rpcCount(t, c.nodes[leader], "OK")-3, "beside the three outcomes of the table")
	require.Positive(t, rpcCount(t, c.nodes[leader], codes.InvalidArgument.String()))
}

// rpcCount is the node's count of writes on streams that ended with the code.
func rpcCount(t testing.TB, n *Node, code string) (count float64) {
	families, err := n.metrics.registry.Gather()
	require.NoError(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if f.GetName() == "kvd_rpc_total" && labels["method"] == "/kvd.v1.KV/Write" && labels["code"] == code {
				count += m.GetCounter().GetValue()
			}
		}
	}
	return count
}

// What is no write, or has no id of its own, does not touch the others.
func TestWriteStreamMalformed(t *testing.T) {
	c := startCluster(t, 1, 1)
	c.leaderOf(1)
	w := c.openWrites(0)
	w.send(1, nil)
	r := w.recv()
	require.EqualValues(t, 1, r.GetId())
	require.EqualValues(t, codes.InvalidArgument, r.GetCode())
	require.Equal(t, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT, r.GetDetail().GetReason())
	w.send(1, putOf("a", "1"))
	requireApplied(t, w.recv())

	goOn := c.stall(0, 1)
	w.send(2, putOf("a", "2"))
	w.send(2, putOf("a", "3"))
	eventually(t, "one write", func() bool { return c.nodes[0].underWay() == 1 })
	goOn()
	answers, err := w.ends()
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	require.Len(t, answers, 1, "what was under way is answered before the end")
	requireApplied(t, answers[0])
	g, err := c.get("a")
	require.NoError(t, err)
	require.Equal(t, "2", string(g.GetValue()))

	w = c.openWrites(0)
	w.send(0, putOf("a", "4"))
	_, err = w.ends()
	requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)

	w = c.openWrites(0)
	w.send(1, putOf("a", "5"))
	require.NoError(t, w.stream.CloseSend())
	answers, err = w.ends()
	require.ErrorIs(t, err, io.EOF)
	require.Len(t, answers, 1)
	requireApplied(t, answers[0])
	eventually(t, "nobody serves streams that ended", func() bool { return streamGoroutines(t) == 0 })
}

// A stream has room for so many writes; one more is refused and the others are not
// held up.
func TestWriteStreamLimits(t *testing.T) {
	c := startCluster(t, 1, 2)
	c.leaderOf(1)
	c.leaderOf(2)
	var keys [3]string // by shard
	for i := 0; keys[1] == "" || keys[2] == ""; i++ {
		k := fmt.Sprint("key-", i)
		keys[c.shardOf([]byte(k))] = k
	}
	goOn := c.stall(0, 1)
	w := c.openWrites(0)
	for i := range uint64(maxStreamWrites - 1) {
		w.send(i+1, putOf(keys[1], "v"))
	}
	// Another shard's write overtakes them all.
	w.send(5000, putOf(keys[2], "v"))
	r := w.recv()
	require.EqualValues(t, 5000, r.GetId())
	requireApplied(t, r)
	eventually(t, "all under way", func() bool { return c.nodes[0].underWay() == maxStreamWrites-1 })
	w.sendFor(6000, 20*time.Millisecond, putOf(keys[1], "v"))
	r = w.recv()
	require.EqualValues(t, 6000, r.GetId())
	require.Equal(t, kvdv1.ErrorDetail_REASON_OUTCOME_UNKNOWN, r.GetDetail().GetReason(), "its time was up")
	eventually(t, "its place is free again", func() bool { return c.nodes[0].underWay() == maxStreamWrites-1 })
	w.send(7000, putOf(keys[1], "v"))
	w.send(7001, putOf(keys[2], "w"))
	r = w.recv()
	require.EqualValues(t, 7001, r.GetId())
	require.EqualValues(t, codes.ResourceExhausted, r.GetCode())
	require.Equal(t, kvdv1.ErrorDetail_REASON_EXHAUSTED, r.GetDetail().GetReason())
	require.NotZero(t, r.GetDetail().GetRetryAfterMs())
	goOn()
	for range maxStreamWrites {
		requireApplied(t, w.recv())
	}
	w.send(7001, putOf(keys[2], "w"))
	requireApplied(t, w.recv())
	eventually(t, "the burst's goroutines to end", func() bool { return streamGoroutines(t) <= maxIdleWriters+2 })

	// A client that leaves in the middle leaves nobody behind.
	goOn = c.stall(0, 1)
	for i := range uint64(100) {
		w.send(i+1, putOf(keys[1], "x"))
	}
	eventually(t, "all under way", func() bool { return c.nodes[0].underWay() == 100 })
	w.cancel()
	eventually(t, "nobody serves the stream", func() bool { return streamGoroutines(t) == 0 })
	require.Zero(t, c.nodes[0].underWay())
	goOn()
	eventually(t, "what was proposed is applied", func() bool {
		g, err := c.get(keys[1])
		return err == nil && string(g.GetValue()) == "x"
	})
}

// A node that stops finishes the writes it has and says of the others that they were
// not done.
func TestWriteStreamStop(t *testing.T) {
	c := startCluster(t, 1, 1)
	c.leaderOf(1)
	goOn := c.stall(0, 1)
	w, idle := c.openWrites(0), c.openWrites(0)
	for i := range uint64(10) {
		w.send(i+1, putOf("key", "v"))
	}
	eventually(t, "all under way", func() bool { return c.nodes[0].underWay() == 10 })
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		c.stopNode(0)
	}()
	for id := uint64(100); ; id++ {
		w.sendFor(id, 50*time.Millisecond, putOf("late", "v"))
		if r := w.recv(); r.GetDetail().GetReason() == kvdv1.ErrorDetail_REASON_NOT_READY {
			require.EqualValues(t, id, r.GetId())
			break
		}
	}
	goOn()
	answers, err := w.ends()
	require.Len(t, answers, 10)
	for _, r := range answers {
		requireApplied(t, r)
	}
	requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_READY)
	_, err = idle.ends()
	requireReason(t, err, kvdv1.ErrorDetail_REASON_NOT_READY)
	<-stopped
	require.Zero(t, streamGoroutines(t))
}

// A client that takes no answers is not read any further, and holds nothing up when
// the node stops.
func TestWriteStreamSlowClient(t *testing.T) {
	c := startCluster(t, 1, 1)
	c.leaderOf(1)
	w := c.openWrites(0)
	long := &kvdv1.PutRequest{NamespaceId: 1, Key: make([]byte, layout.MaxKeySize+1)}
	sent := make(chan error, 1)
	go func() {
		for id := uint64(1); ; id++ {
			if err := w.stream.Send(&kvdv1.WriteFrame{Id: id, Op: &kvdv1.WriteFrame_Put{Put: long}}); err != nil {
				sent <- err
				return
			}
		}
	}()
	eventually(t, "answers", func() bool { return rpcCount(t, c.nodes[0], codes.InvalidArgument.String()) > 100 })
	require.LessOrEqual(t, streamGoroutines(t), maxStreamWrites+maxIdleWriters+2)
	c.stopNode(0)
	require.True(t, errors.Is(<-sent, io.EOF))
}

// What is under way on a stream is bounded and has ids that differ.
func TestWriteStreamAdmits(t *testing.T) {
	w := &writeStream{ending: make(chan struct{}), drained: make(chan struct{})}
	w.mu.open = map[uint64]struct{}{}
	admit := func(id uint64) bool {
		ok, err := w.admit(id)
		require.NoError(t, err)
		return ok
	}
	require.True(t, admit(1))
	for _, id := range []uint64{0, 1} {
		_, err := w.admit(id)
		requireReason(t, err, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	}
	for i := range uint64(maxStreamWrites - 1) {
		require.True(t, admit(i+2))
	}
	require.False(t, admit(1<<40))
	w.answered(1)
	require.True(t, admit(1), "the id is free again, and there is room")
	w.end(nil)
	w.end(io.ErrUnexpectedEOF)
	_, err := w.admit(1 << 40)
	require.ErrorIs(t, err, errStreamEnded)
	for i := range uint64(maxStreamWrites) {
		select {
		case <-w.drained:
			t.Fatal("some are not answered yet")
		default:
		}
		w.answered(i + 1)
	}
	<-w.drained
	require.NoError(t, w.mu.err, "the first end counts")
}
