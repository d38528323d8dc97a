package server

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

func openWriteStream(t testing.TB, c *testCluster, node int) kvdv1.KV_WriteClient {
	s, err := c.kv(node).Write(testContext(t))
	require.NoError(t, err)
	_, err = s.Header()
	require.NoError(t, err)
	return s
}

func putFrame(id uint64, key, value string) *kvdv1.WriteFrame {
	return &kvdv1.WriteFrame{Id: id, Op: &kvdv1.WriteFrame_Put{Put: &kvdv1.PutRequest{NamespaceId: 1, Key: []byte(key), Value: []byte(value)}}}
}

// A node that stops answers what it carries out; what it did not answer it did not do.
func TestWriteStreamEndsWithNode(t *testing.T) {
	c := startCluster(t, 1, 2)
	c.leaderOf(1)
	c.leaderOf(2)
	s, mute := openWriteStream(t, c, 0), openWriteStream(t, c, 0)
	for i := range uint64(50) { // from a client that takes no answers
		require.NoError(t, mute.Send(putFrame(i+1, fmt.Sprint("mute", i), "")))
	}
	sent := make(chan uint64, 1)
	go func() {
		id := uint64(1)
		for ; s.Send(putFrame(id, fmt.Sprint("key", id), "")) == nil; id++ {
		}
		sent <- id
	}()
	done, refused := map[uint64]bool{}, 0
	stopped := make(chan time.Duration, 1)
	var end error
	for {
		r, err := s.Recv()
		if err != nil {
			end = err
			break
		}
		switch {
		case r.GetResponse() != nil:
			done[r.GetId()] = true
		case codes.Code(r.GetCode()) == codes.Unavailable || codes.Code(r.GetCode()) == codes.ResourceExhausted:
			refused++
		default:
			require.Failf(t, "an answer that tells nothing", "%v", r)
		}
		if len(done) == 200 {
			go func() {
				began := time.Now()
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				defer cancel()
				if err := c.nodes[0].Stop(ctx); err != nil {
					t.Error(err)
				}
				stopped <- time.Since(began)
			}()
		}
	}
	require.Equal(t, codes.Unavailable, status.Code(end), "%v", end)
	requirePrompt(t, <-stopped)
	last := <-sent
	require.NoError(t, c.conns[0].Close())
	c.nodes[0] = nil
	require.NoError(t, c.start(0))
	for id := uint64(1); id <= last; id++ {
		key := []byte(fmt.Sprint("key", id))
		_, ok, err := c.nodes[0].shard(c.shardOf(key)).eng.Get(1, key)
		require.NoError(t, err)
		require.Equal(t, done[id], ok, "write %d", id)
	}
	t.Logf("%d done, %d refused, %d sent", len(done), refused, last)
}
