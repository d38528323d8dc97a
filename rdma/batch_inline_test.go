package rdma

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBatchCompleteInline(t *testing.T) {
	b := new(Batch)
	require.Panics(t, func() { b.CompleteInline(nil) }, "without Reset")
	want := errors.New("seen")
	for _, first := range []error{want, nil} {
		b.Reset()
		require.False(t, b.Completed())
		b.CompleteInline(first)
		require.True(t, b.Completed())
		require.Equal(t, first, b.Err())
		require.True(t, b.Wait(t.Context(), 0))
		select {
		case <-b.Ready():
		default:
			t.Fatal("complete, but not ready")
		}
		require.Panics(t, func() { b.CompleteInline(nil) })
		require.Panics(t, func() { b.Complete(nil) })
	}
	// Either way of completing may follow the other.
	b.Reset()
	select {
	case <-b.Ready():
		t.Fatal("ready before it was posted")
	default:
	}
	b.Complete(nil)
	<-b.Ready()
	b.Reset()
	b.CompleteInline(want)
	require.Equal(t, want, b.Err())
}
