package worker

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/jepsen/history"
)

// slowStore is a client each call of which takes until the test lets it go, and notes
// when it began and ended.
type slowStore struct {
	err         error
	entered     chan struct{}
	release     chan struct{}
	began, over int64
}

func (s *slowStore) hold() {
	s.began = Now()
	close(s.entered)
	<-s.release
	s.over = Now()
}

func (s *slowStore) value() client.Value { return client.Value{Data: Value(7, 64), Version: 3} }

func (s *slowStore) Get(context.Context, []byte, ...client.ReadOption) (client.Value, error) {
	s.hold()
	return s.value(), s.err
}

func (s *slowStore) GetMany(_ context.Context, keys [][]byte, _ ...client.ReadOption) []client.Result {
	s.hold()
	out := make([]client.Result, len(keys))
	for i := range out {
		out[i] = client.Result{Value: s.value(), Err: s.err}
	}
	return out
}

func (s *slowStore) List(context.Context, []byte, ...client.ListOption) iter.Seq2[client.Item, error] {
	return func(yield func(client.Item, error) bool) {
		s.hold()
		yield(client.Item{Key: []byte("k"), Value: Value(7, 64), Version: 3}, s.err)
	}
}

func (s *slowStore) Put(context.Context, []byte, []byte, ...client.WriteOption) (uint64, error) {
	s.hold()
	return 3, s.err
}

func (s *slowStore) Delete(context.Context, []byte, ...client.WriteOption) (uint64, error) {
	s.hold()
	return 3, s.err
}

func (s *slowStore) ShardOf([]byte) uint32 { return 1 }

// Call and Return enclose the call, and nothing more than what run itself does: earlier or
// later times would allow orders that did not happen, and hide violations; narrower ones
// would show violations that there are not.
func TestTimesEncloseTheCall(t *testing.T) {
	kinds := []history.Kind{history.Get, history.Many, history.List, history.Put, history.Add, history.Swap, history.Del, history.Drop}
	for _, kind := range kinds {
		for _, err := range []error{nil, errors.New("lost"), client.ErrUnavailable} {
			t.Run(fmt.Sprintf("%s/%v", kind, err), func(t *testing.T) {
				s := &slowStore{err: err, entered: make(chan struct{}), release: make(chan struct{})}
				op := &history.Op{Kind: kind, Key: "k", Keys: []string{"k", "l"}, Value: 7, Size: 64, Expect: 2}
				before := Now()
				done := make(chan struct{})
				go func() {
					defer close(done)
					run(t.Context(), s, op)
				}()
				<-s.entered
				<-time.After(5 * time.Millisecond) // so that times taken on the wrong side differ
				close(s.release)
				<-done
				after := Now()
				require.GreaterOrEqual(t, op.Call, before, "called before anybody asked for it")
				require.LessOrEqual(t, op.Call, s.began, "called after the client began")
				require.GreaterOrEqual(t, op.Return, s.over, "returned before the client had ended")
				require.LessOrEqual(t, op.Return, after, "returned after run had")
			})
		}
	}
}
