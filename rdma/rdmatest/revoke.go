package rdmatest

import (
	"sync"
	"testing"

	"github.com/kvd-io/kvd/rdma"
)

// mustBeRevoked checks what the client sees after the target took the link down:
// Done, a reason, and no READ that succeeds.
func (l *link) mustBeRevoked() {
	l.tb.Helper()
	if !l.f.LastingMappings {
		_, err := l.read(7, 0, 64)
		mustFail(l.tb, "READ posted after the target's Close returned", err, finished...)
	}
	awaitDone(l.tb, "conn", l.conn.Done())
	awaitDone(l.tb, "endpoint", l.ep.Done())
	mustFail(l.tb, "Err of a revoked connection", l.conn.Err(), finished...)
	for range 3 {
		_, err := l.read(7, 0, 64)
		mustFail(l.tb, "READ posted after Done", err, finished...)
	}
	if err := l.conn.Close(); err != nil {
		l.tb.Fatalf("Close of a revoked connection: %v", err)
	}
	mustFail(l.tb, "Err stays what it was", l.conn.Err(), finished...)
	_, err := l.read(7, 0, 64)
	mustFail(l.tb, "READ posted after Close", err, append(finished, rdma.ErrClosed)...)
	l.noConnections()
}

func testEndpointClose(t *testing.T, f Factory) {
	l := newStand(t, f, 4096)
	other := l.another()
	l.mustRead(7, 7, 0, 64)
	for range 2 {
		if err := l.ep.Close(); err != nil {
			t.Fatalf("endpoint close: %v, want nil however often", err)
		}
	}
	awaitDone(t, "conn", l.conn.Done())
	other.mustRead(7, 7, 0, 64) // only the one is revoked
	if err := other.ep.Close(); err != nil {
		t.Fatalf("endpoint close: %v", err)
	}
	other.mustBeRevoked()
	l.mustBeRevoked()
}

func testDomainClose(t *testing.T, f Factory) {
	l := newStand(t, f, 4096)
	if err := l.d.Close(); err != nil {
		t.Fatalf("domain close: %v", err)
	}
	l.mustBeRevoked()
	if err := l.d.Close(); err != nil {
		t.Fatalf("second domain close: %v, want nil", err)
	}
}

func testTargetClose(t *testing.T, f Factory) {
	l := newStand(t, f, 4096)
	if err := l.rig.Target.Close(); err != nil {
		t.Fatalf("target close: %v", err)
	}
	l.mustBeRevoked()
	if _, err := l.rig.Target.NewDomain("late"); err == nil {
		t.Fatal("NewDomain of a closed target: succeeded, want an error")
	}
	if _, err := l.tryConnect(l.d); err == nil {
		t.Fatal("connect to a closed target: succeeded, want an error")
	}
}

func testConnClose(t *testing.T, f Factory) {
	l := newStand(t, f, 4096)
	l.mustRead(7, 7, 0, 64)
	for range 2 {
		if err := l.conn.Close(); err != nil {
			t.Fatalf("close: %v, want nil however often", err)
		}
	}
	l.mustBeClosed()
	awaitDone(t, "endpoint, after the client closed", l.ep.Done())
	l.noConnections()
	if err := l.ep.Close(); err != nil {
		t.Fatalf("endpoint close after the client's: %v", err)
	}
	l.another().mustRead(7, 7, 0, 64)
}

// mustBeClosed checks what a connection shows that this side closed.
func (l *link) mustBeClosed() {
	l.tb.Helper()
	if !isDone(l.conn.Done()) {
		l.tb.Fatal("Done is open after Close returned")
	}
	mustFail(l.tb, "Err after Close", l.conn.Err(), rdma.ErrClosed)
	for range 3 {
		_, err := l.read(7, 0, 64)
		mustFail(l.tb, "READ posted after Close", err, rdma.ErrClosed)
	}
}

func testInitiatorClose(t *testing.T, f Factory) {
	l := newStand(t, f, 4096)
	other := l.another()
	if err := l.rig.Initiator.Close(); err != nil {
		t.Fatalf("initiator close: %v", err)
	}
	l.mustBeClosed()
	other.mustBeClosed()
	awaitDone(t, "endpoint, after the initiator closed", l.ep.Done())
	l.noConnections()
	if _, err := l.tryConnect(l.d); err == nil {
		t.Fatal("connect by a closed initiator: succeeded, want an error")
	}
}

// testEverythingClosedAtOnce closes every part from its own goroutine, in no order:
// no deadlock, no panic, and all that is left says that it has ended.
func testEverythingClosedAtOnce(t *testing.T, f Factory) {
	for range 10 {
		l := newStand(t, f, 4096)
		links := []*link{l.link, l.another(), l.another()}
		parts := []func() error{l.d.Close, l.rig.Target.Close, l.rig.Initiator.Close}
		for _, k := range links {
			parts = append(parts, k.conn.Close, k.ep.Close)
		}
		start := make(chan struct{})
		var wg sync.WaitGroup
		for _, c := range parts {
			wg.Go(func() {
				<-start
				if err := c(); err != nil {
					t.Errorf("close: %v", err)
				}
			})
		}
		close(start)
		within(t, "closing everything at once", wg.Wait)
		for _, k := range links {
			awaitDone(t, "conn", k.conn.Done())
			awaitDone(t, "endpoint", k.ep.Done())
		}
		l.noConnections()
		l.side.close()
	}
}
