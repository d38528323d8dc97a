package nemesis

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/jepsen/env"
	"github.com/kvd-io/kvd/jepsen/worker"
)

// A node is found by the id that it got, and before that by its address, where others may
// have been that are gone.
func TestFindMember(t *testing.T) {
	all := []worker.Member{
		{Node: 1, Address: "a:1", State: gone}, {Node: 2, Address: "b:1", State: active}, {Node: 5, Address: "a:1", State: "joining"},
	}
	n := &env.Node{ID: 1, Address: "a:1"}
	m, err := findMember(all, n)
	require.NoError(t, err)
	require.Equal(t, uint64(5), m.Node)
	n.Joined(1)
	m, err = findMember(all, n)
	require.NoError(t, err)
	require.Equal(t, gone, m.State, "of the id that it has, whatever took its address since")
	n.Joined(3)
	_, err = findMember(all, n)
	require.Error(t, err)
	_, err = findMember(all, &env.Node{ID: 9, Address: "c:1"})
	require.ErrorContains(t, err, "does not list node 9")
}

// While replicas do not get where they are to be, faults of other lanes go on at first,
// then wait, and do not wait for ever.
func TestQuiet(t *testing.T) {
	for _, c := range []struct {
		took time.Duration
		want bool
	}{{0, false}, {noise - 1, false}, {noise + 1, true}, {noise + calm - 1, true}, {noise + calm, false}, {movePatience, false}} {
		require.Equal(t, c.want, quietAfter(c.took), "%v", c.took)
	}
	r := &Runner{}
	r.holdBack(t.Context()) // nobody asked for quiet: it comes back
	r.quiet.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(2*look, cancel)
	r.holdBack(ctx)
	require.Error(t, ctx.Err(), "it came back before anybody took it back")
	_, err := r.await(t.Context(), 0, "nothing", func() error { return errors.New("not yet") })
	require.ErrorContains(t, err, "nothing: not within 0 s: not yet")
	require.False(t, r.quiet.Load(), "who waits no longer leaves no quiet behind")
	asked := 0
	_, err = r.await(t.Context(), movePatience, "something", func() error {
		if asked++; asked < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, 3, asked)
}
