package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/kvd-io/kvd/rdma"
)

func testReadUnknownRegion(t *testing.T, f Factory) {
	t.Run("not added", func(t *testing.T) {
		l := newStand(t, f, 4096)
		l.register(l.d, 8, l.memory(8, 4096))
		_, err := l.read(8, 0, 8)
		mustFail(t, "READ of a region that was not added", err, f.refused()...)
	})
	t.Run("not registered", func(t *testing.T) {
		l := newStand(t, f, 4096)
		err := l.conn.AddRegion(99, 4096, l.attr)
		if err == nil {
			_, err = l.read(99, 0, 8)
		}
		// A transport whose attr is the whole truth (an address and a key) may read
		// the memory that attr stands for, which this connection may read anyway.
		if err != nil {
			mustFail(t, "READ of a region that was not registered", err, f.refused()...)
		}
	})
}

// testReadLyingLength: the target, not the client, has the last word on how long
// a region is.
func testReadLyingLength(t *testing.T, f Factory) {
	s := newSide(t, f)
	d := s.domain("d")
	m := s.memory(7, 4096)
	attr := s.register(d, 7, m)
	l := s.connect(d)
	err := l.conn.AddRegion(7, 64*m.Size(), attr)
	if err == nil {
		_, err = l.read(7, m.Size()-4, 8)
	}
	mustFail(t, "READ beyond the memory of a region added with a false length", err, f.refused()...)
}

func testReadGarbageAttr(t *testing.T, f Factory) {
	s := newSide(t, f)
	d := s.domain("d")
	m := s.memory(7, 4096)
	attr := s.register(d, 7, m)
	rnd := seeded(t)
	garbage := [][]byte{nil, {}, {0}, bytes.Repeat([]byte{0xff}, 64)}
	for n := range len(attr) {
		garbage = append(garbage, attr[:n])
	}
	for range 20 {
		g := make([]byte, max(1, len(attr)))
		for i := range g {
			g[i] = byte(rnd.Uint32())
		}
		garbage = append(garbage, g)
	}
	for _, g := range garbage {
		l := s.connect(d)
		err := l.conn.AddRegion(7, m.Size(), g)
		if err == nil {
			var got []byte
			if got, err = l.read(7, 0, 64); err == nil {
				mustMatch(t, got, 7, 0) // transport that needs no attr
			}
		}
		if err != nil {
			mustFail(t, fmt.Sprintf("attr %x", g), err, rdma.ErrAccess, rdma.ErrHandshake)
		}
		l.shut()
	}
}

// shut ends the link from both sides, so that many can be made in one case.
func (l *link) shut() {
	l.tb.Helper()
	if err := errors.Join(l.conn.Close(), l.ep.Close()); err != nil {
		l.tb.Fatalf("close: %v", err)
	}
}

// testDomainsAreApart: no connection reads what is registered in another domain,
// even when it knows all there is to know about it.
func testDomainsAreApart(t *testing.T, f Factory) {
	s := newSide(t, f)
	a, b := s.domain("a"), s.domain("b")
	ma, mb, mb2 := s.memory(1, 4096), s.memory(2, 4096), s.memory(3, 4096)
	attrA := s.register(a, 1, ma)
	attrB := s.register(b, 1, mb)
	attrB2 := s.register(b, 2, mb2)

	l := s.connect(a)
	err := l.conn.AddRegion(2, mb2.Size(), attrB2)
	if err == nil {
		_, err = l.read(2, 0, 64)
	}
	mustFail(t, "READ of a region of another domain", err, f.refused()...)

	l = s.connect(a)
	err = l.conn.AddRegion(1, mb.Size(), attrB)
	if err == nil {
		var got []byte
		if got, err = l.read(1, 0, 64); err == nil {
			mustMatch(t, got, 1, 0) // its own region of that id, never the other's
		}
	}
	if err != nil {
		mustFail(t, "READ with the attr of another domain", err, f.refused()...)
	}

	// Each domain's own connections are unharmed by what was tried.
	l = s.connect(a)
	l.addRegion(1, ma, attrA)
	l.mustRead(1, 1, 8, 64)
	l = s.connect(b)
	l.addRegion(1, mb, attrB)
	l.mustRead(1, 2, 8, 64)

	if err := a.Close(); err != nil {
		t.Fatalf("close domain a: %v", err)
	}
	l.mustRead(1, 2, 16, 64)
}

func testAddRegionTwice(t *testing.T, f Factory) {
	l := newStand(t, f, 4096)
	for range 3 {
		l.addRegion(7, l.m, l.attr)
	}
	// A known region stays as it was: the second word on it is not listened to.
	if err := l.conn.AddRegion(7, 8, nil); err != nil {
		t.Fatalf("AddRegion of a known region: %v, want it to do nothing", err)
	}
	l.mustRead(7, 7, 4000, 64)
	other := l.another()
	other.mustRead(7, 7, 0, 4096)
	l.mustRead(7, 7, 0, 4096)
}

func testRegisterRefusals(t *testing.T, f Factory) {
	l := newStand(t, f, 4096)
	if _, err := l.d.Register(7, l.memory(8, 4096)); err == nil {
		t.Fatal("Register of an id that is in use: succeeded, want an error")
	}
	if err := l.d.Deregister(1234); err == nil {
		t.Fatal("Deregister of an unknown region: succeeded, want an error")
	}
	l.mustRead(7, 7, 0, 64)
	if err := l.d.Close(); err != nil {
		t.Fatalf("close domain: %v", err)
	}
	if _, err := l.d.Register(9, l.memory(9, 4096)); err == nil {
		t.Fatal("Register in a closed domain: succeeded, want an error")
	}
	if _, err := l.tryConnect(l.d); err == nil {
		t.Fatal("connect to a closed domain: succeeded, want an error")
	}
}

// testRegionsGrowWhileLive adds regions to a domain whose connections are busy.
func testRegionsGrowWhileLive(t *testing.T, f Factory) {
	l := newStand(t, f, 64<<10)
	stop := make(chan struct{})
	failed := make(chan error, 1)
	go func() {
		defer close(failed)
		dst := make([]byte, 1024)
		b := newBatch(rdma.Read{Region: 7, Dst: dst})
		for {
			select {
			case <-stop:
				return
			default:
			}
			l.conn.Post(b)
			if !b.Wait(context.Background(), patience) || b.Err() != nil {
				failed <- fmt.Errorf("complete: %v, error: %w", b.Completed(), b.Err())
				return
			}
			b.Reset()
		}
	}()
	for id := rdma.RegionID(100); id < 116; id++ {
		m := l.memory(uint64(id), 8192)
		attr := l.register(l.d, id, m)
		l.addRegion(id, m, attr)
		l.mustRead(id, uint64(id), 8000, 192)
		if !l.conn.HasRegion(id) {
			t.Errorf("HasRegion(%d) is false after AddRegion", id)
		}
	}
	close(stop)
	if err := <-failed; err != nil {
		t.Fatalf("READ of an old region while regions were added: %v", err)
	}
}

func testDeregister(t *testing.T, f Factory) {
	l := newStand(t, f, 4096)
	kept := l.memory(8, 4096)
	attrKept := l.register(l.d, 8, kept)
	l.addRegion(8, kept, attrKept)
	l.mustRead(7, 7, 0, 64)
	if err := l.d.Deregister(7); err != nil {
		t.Fatalf("deregister: %v", err)
	}
	if !f.LastingMappings {
		_, err := l.read(7, 0, 64)
		mustFail(t, "READ of a deregistered region", err, f.refused()...)
	}
	// A connection made later never gets at it, whatever the transport.
	late := l.side.connect(l.d)
	err := late.conn.AddRegion(7, l.m.Size(), l.attr)
	if err == nil {
		_, err = late.read(7, 0, 64)
	}
	mustFail(t, "READ of a deregistered region by a later connection", err, f.refused()...)
	// The other region is untouched by it.
	fresh := l.side.connect(l.d)
	fresh.addRegion(8, kept, attrKept)
	fresh.mustRead(8, 8, 0, 64)
}

func testStats(t *testing.T, f Factory) {
	l := newStand(t, f, 4096)
	was := l.rig.Target.Stats()
	if was.Connections != 1 || was.Accepted != 1 {
		t.Fatalf("after one connection: %+v, want Connections 1 and Accepted 1", was)
	}
	for range 10 {
		if err := l.run(newBatch(rdma.Read{Region: 7, Dst: make([]byte, 100)}, rdma.Read{Region: 7, Dst: make([]byte, 28)})); err != nil {
			t.Fatal(err)
		}
	}
	reads, size := uint64(20), uint64(1280)
	if !f.TargetServes {
		reads, size = 0, 0
	}
	s := func() rdma.TargetStats { return l.rig.Target.Stats() }
	// A target may count after it has sent.
	eventually(t, fmt.Sprintf("Reads +%d, Bytes +%d or more", reads, size),
		func() bool { return s().Reads-was.Reads == reads && s().Bytes-was.Bytes >= size },
		func() string { return fmt.Sprintf("%+v, before %+v", s(), was) })
	if !f.TargetServes && s().Bytes != 0 {
		t.Fatalf("Bytes is %d where the target's CPU serves no READs, want 0", s().Bytes)
	}
	l.shut()
	l.noConnections()
	if got := s().Accepted; got != 1 {
		t.Fatalf("Accepted is %d after the connection ended, want 1", got)
	}
}
