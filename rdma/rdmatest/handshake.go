package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// within runs fn and fails the case if it takes longer than patience.
func within(t *testing.T, what string, fn func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		fn()
	}()
	awaitDone(t, what, done)
}

func (s *side) prepare() rdma.Dial {
	s.tb.Helper()
	dial, err := s.rig.Initiator.Prepare(context.Background())
	if err != nil {
		s.tb.Fatalf("prepare: %v", err)
	}
	return dial
}

// mangled are byte strings that were never a good message: nothing, every
// truncation, noise, and a good one with its first byte changed.
func mangled(t *testing.T, good []byte) [][]byte {
	rnd := seeded(t)
	out := [][]byte{nil, {}, []byte("GET / HTTP/1.1\r\n\r\n")}
	for n := range len(good) {
		out = append(out, bytes.Clone(good[:n]))
	}
	for i := range 50 {
		b := make([]byte, max(len(good), 1)+i%2*rnd.IntN(300))
		for j := range b {
			b[j] = byte(rnd.Uint32())
		}
		out = append(out, b)
	}
	if len(good) > 0 {
		flipped := bytes.Clone(good)
		flipped[0] ^= 0x80
		out = append(out, flipped)
	}
	return out
}

func testBadOffers(t *testing.T, f Factory) {
	s := newSide(t, f)
	d := s.domain("d")
	dial := s.prepare()
	offer := bytes.Clone(dial.Offer())
	dial.Abort()
	if len(offer) == 0 {
		t.Fatal("the offer is empty: it must at least say which protocol and version")
	}
	for _, bad := range mangled(t, offer) {
		within(t, "Accept of a bad offer", func() {
			_, ep, err := d.Accept(context.Background(), peer(), bad)
			if err == nil {
				t.Errorf("Accept of offer %x (good: %x): succeeded", bad, offer)
				_ = ep.Close()
			} else if !isAny(err, refused) {
				t.Errorf("Accept of offer %x: got %q, want one of the classes %v", bad, err, refused)
			}
		})
	}
	s.noConnections()
}

func testBadAnswers(t *testing.T, f Factory) {
	s := newSide(t, f)
	d := s.domain("d")
	dial := s.prepare()
	answer, ep, err := d.Accept(context.Background(), peer(), dial.Offer())
	if err != nil {
		t.Fatalf("accept: %v", err)
	}
	dial.Abort()
	_ = ep.Close()
	bad := mangled(t, answer)
	if f.ForgeAnswers != nil {
		bad = append(bad, f.ForgeAnswers(bytes.Clone(answer))...)
	}
	for _, b := range bad {
		s.mustRefuse(t, "bad answer", b)
	}
	s.mustRefuse(t, "answer whose endpoint is closed", answer)
	s.noConnections()
	m := s.memory(7, 4096)
	attr := s.register(d, 7, m)
	l := s.connect(d)
	l.addRegion(7, m, attr)
	l.mustRead(7, 7, 0, 64)
}

// mustRefuse dials with an answer that must not connect.
func (s *side) mustRefuse(t *testing.T, what string, answer []byte) {
	t.Helper()
	dial := s.prepare()
	within(t, what, func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience/2)
		defer cancel()
		conn, err := dial.Connect(ctx, answer)
		if err == nil {
			t.Errorf("%s %x: connected", what, answer)
			_ = conn.Close()
		} else if !isAny(err, refused) {
			t.Errorf("%s %x: got %q, want one of the classes %v", what, answer, err, refused)
		}
	})
}

// testAnswerOfAnother: an answer belongs to the dial whose offer it answers, when
// the provider binds the two, and to one target: here, one that is gone.
func testAnswerOfAnother(t *testing.T, f Factory) {
	gone := newSide(t, f)
	dial := gone.prepare()
	answer, _, err := gone.domain("d").Accept(context.Background(), peer(), dial.Offer())
	if err != nil {
		t.Fatalf("accept: %v", err)
	}
	dial.Abort()
	if err := gone.rig.Target.Close(); err != nil {
		t.Fatalf("target close: %v", err)
	}
	s := newSide(t, f)
	within(t, "answer of a target that is gone", func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience/2)
		defer cancel()
		conn, err := s.prepare().Connect(ctx, answer)
		if err == nil {
			t.Error("answer of a target that is gone: connected")
			_ = conn.Close()
		} else if !isAny(err, append(refused, rdma.ErrConnLost)) {
			t.Errorf("answer of a target that is gone: got %q", err)
		}
	})
}

// testAnswerReplayed: an answer connects once, and neither a second dial nor one
// after the first has gone gets in with it.
func testAnswerReplayed(t *testing.T, f Factory) {
	s := newSide(t, f)
	d := s.domain("d")
	m := s.memory(7, 4096)
	attr := s.register(d, 7, m)
	dial := s.prepare()
	answer, ep, err := d.Accept(context.Background(), peer(), dial.Offer())
	if err != nil {
		t.Fatalf("accept: %v", err)
	}
	answer = bytes.Clone(answer)
	conn, err := dial.Connect(context.Background(), answer)
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	l := &link{side: s, conn: conn, ep: ep}
	l.addRegion(7, m, attr)
	s.mustRefuse(t, "replayed answer", answer)
	l.mustRead(7, 7, 0, 64)
	if got := s.rig.Target.Stats().Connections; got > 1 {
		t.Fatalf("Connections is %d after a refused replay, want 1", got)
	}
	l.shut()
	s.noConnections()
	s.mustRefuse(t, "answer replayed after its connection ended", answer)
}

func testDialNeverCompleted(t *testing.T, f Factory) {
	s := newSide(t, f)
	d := s.domain("d")
	dial := s.prepare()
	answer, ep, err := d.Accept(context.Background(), peer(), dial.Offer())
	if err != nil {
		t.Fatalf("accept: %v", err)
	}
	start := time.Now()
	awaitDone(t, "endpoint that nobody connected to", ep.Done())
	if waited := time.Since(start); waited > f.AcceptTimeout+patience/4 {
		t.Errorf("endpoint ended after %v, want about the accept timeout, %v", waited, f.AcceptTimeout)
	}
	s.noConnections()
	within(t, "connect after the accept timeout", func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience/2)
		defer cancel()
		conn, err := dial.Connect(ctx, answer)
		if err == nil {
			t.Error("connect after the accept timeout: succeeded")
			_ = conn.Close()
		} else if !isAny(err, refused) {
			t.Errorf("connect after the accept timeout: got %q, want one of the classes %v", err, refused)
		}
	})
	if err := ep.Close(); err != nil {
		t.Fatalf("close of an endpoint that ended by itself: %v", err)
	}
}

func testDialAborted(t *testing.T, f Factory) {
	s := newSide(t, f)
	d := s.domain("d")
	s.prepare().Abort()
	dial := s.prepare()
	_, ep, err := d.Accept(context.Background(), peer(), dial.Offer())
	if err != nil {
		t.Fatalf("accept: %v", err)
	}
	dial.Abort()
	if err := ep.Close(); err != nil {
		t.Fatalf("endpoint close: %v", err)
	}
	awaitDone(t, "endpoint of an aborted dial", ep.Done())
	s.noConnections()
}

// testConnectCancelled: a context that is already over lets nothing through and
// leaves nothing behind.
func testConnectCancelled(t *testing.T, f Factory) {
	s := newSide(t, f)
	d := s.domain("d")
	dial := s.prepare()
	answer, ep, err := d.Accept(context.Background(), peer(), dial.Offer())
	if err != nil {
		t.Fatalf("accept: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	within(t, "connect with a cancelled context", func() {
		conn, err := dial.Connect(ctx, answer)
		if err == nil {
			t.Error("connect with a cancelled context: succeeded")
			_ = conn.Close()
		} else if !errors.Is(err, context.Canceled) && !errors.Is(err, rdma.ErrTimeout) {
			t.Errorf("connect with a cancelled context: got %q, want context.Canceled or ErrTimeout", err)
		}
	})
	awaitDone(t, "endpoint of a cancelled connect", ep.Done())
	s.noConnections()
}
