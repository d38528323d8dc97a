package nemesis

import (
	"encoding/json"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/internal/faults"
)

// obedient answers orders as a node does, until the test ends.
type obedient struct {
	mu     sync.Mutex
	orders []faults.Order
	state  func(orders []faults.Order) faults.State
}

func (o *obedient) given() []faults.Order {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.orders)
}

func (o *obedient) listen(t *testing.T, socket string) {
	t.Helper()
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			wg.Go(func() {
				defer func() { _ = conn.Close() }()
				var order faults.Order
				if json.NewDecoder(conn).Decode(&order) != nil {
					return
				}
				o.mu.Lock()
				o.orders = append(o.orders, order)
				st := o.state(o.orders)
				o.mu.Unlock()
				_ = json.NewEncoder(conn).Encode(st)
			})
		}
	})
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		wg.Wait()
	})
}

// A node that was started a moment ago does not listen yet: the order is repeated. Nor is
// a disk met with at once: it stays bad until it was, and is well afterwards.
func TestStallIsMade(t *testing.T) {
	e := started(t)
	e.Node(2).Socket = filepath.Join(t.TempDir(), "s")
	o := &obedient{state: func(orders []faults.Order) (st faults.State) {
		if len(orders) > 3 {
			st.Stalled = 2
		}
		return st
	}}
	r := &Runner{Env: e}
	r.Say, r.patient = t.Logf, time.Hour
	done := make(chan bool)
	go func() {
		f := r.insist(t.Context(), Event{Kind: StallSync, Node: 2, Order: []uint64{2, 3, 1}})
		t.Log(f.Detail)
		done <- f.Seen
	}()
	select {
	case <-done:
		t.Error("nobody listens")
	case <-time.After(3 * look):
	}
	o.listen(t, e.Node(2).Socket)
	require.True(t, <-done)
	require.Equal(t, []faults.Order{{StallSync: true}, {StallSync: true}, {StallSync: true}, {StallSync: true}, {}}, o.given())
}

// A disk that never meets anything is not seen, and is well afterwards, too.
func TestStallIsNotSeen(t *testing.T) {
	e := started(t)
	o := &obedient{state: func([]faults.Order) faults.State { return faults.State{Stalled: 7} }}
	for _, n := range e.Nodes {
		n.Socket = filepath.Join(t.TempDir(), "s")
		o.listen(t, n.Socket)
	}
	f := one(t.Context(), t, &Runner{Env: e}, Event{Kind: StallSync})
	require.False(t, f.Seen)
	require.Contains(t, f.Detail, "0 syncs hung")
	given := o.given()
	require.Equal(t, faults.Order{}, given[len(given)-1])
}

// Counts of a process that was started meanwhile prove nothing by being smaller.
func TestMore(t *testing.T) {
	require.EqualValues(t, 2, more(3, 5))
	require.Zero(t, more(5, 3))
}
