package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/jepsen/history"
)

func TestValues(t *testing.T) {
	for _, size := range []int{0, MinSize, MinSize + 1, 100, 4096, 70000} {
		v := Value(7, size)
		require.Len(t, v, max(size, MinSize))
		id, bad := Identify(v)
		require.Equal(t, uint64(7), id)
		require.Empty(t, bad)
	}
	_, bad := Identify(nil)
	require.NotEmpty(t, bad)
}

// A value made of parts of two is seen wherever the seam is.
func TestTornValues(t *testing.T) {
	a, b := Value(7, 512), Value(8, 512)
	for cut := 1; cut < len(a); cut++ {
		torn := append(bytes.Clone(a[:cut]), b[cut:]...)
		if bytes.Equal(torn, a) || bytes.Equal(torn, b) {
			continue // the first bytes of both are the same
		}
		_, bad := Identify(torn)
		require.NotEmpty(t, bad, "cut at %d", cut)
	}
	_, bad := Identify(a[:500])
	require.Contains(t, bad, "want 512")
}

// What promises nothing leaves a write open and drops a read.
func TestClassify(t *testing.T) {
	for _, c := range []struct {
		err         error
		write, read history.Outcome
	}{
		{nil, history.OK, history.OK},
		{fmt.Errorf("x: %w", client.ErrNotFound), history.Absent, history.Absent},
		{&client.ConflictError{Current: 4}, history.Conflict, history.Fail},
		{client.ErrUnavailable, history.Fail, history.Fail},
		{client.ErrExhausted, history.Fail, history.Fail},
		{client.ErrReadOnly, history.Fail, history.Fail},
		{client.ErrOutcomeUnknown, history.Unknown, history.Fail},
		{fmt.Errorf("%w: %w", client.ErrOutcomeUnknown, client.ErrUnavailable), history.Unknown, history.Fail},
		{context.DeadlineExceeded, history.Unknown, history.Fail},
		{client.ErrClosed, history.Unknown, history.Fail},
		{client.ErrCorrupt, history.Unknown, history.Fail},
		{errors.New("anything else"), history.Unknown, history.Fail},
	} {
		require.Equal(t, c.write, Classify(history.Put, c.err), "%v", c.err)
		require.Equal(t, c.read, Classify(history.Get, c.err), "%v", c.err)
	}
}

func TestNowRises(t *testing.T) {
	before := Now()
	require.GreaterOrEqual(t, Now(), before)
}
