package rdmatest

import (
	"bytes"
	"context"
	"sync"
	"testing"

	"github.com/kvd-io/kvd/rdma"
)

// asker is a link whose connection is a Querier, with the example's regions added.
type asker struct {
	*link
	q  rdma.Querier
	ex *QueryExample
}

// newAsker is false where the provider answers no queries; then no connection of it
// may claim to.
func newAsker(t *testing.T, f Factory) (*asker, bool) {
	t.Helper()
	s := newSide(t, f)
	d := s.domain("d")
	l := s.connect(d)
	q, ok := l.conn.(rdma.Querier)
	switch {
	case f.Query == nil && ok:
		t.Fatal("the connection is a Querier, but the factory has no example of a query")
	case f.Query == nil:
		t.Log("does not apply: the provider answers no queries")
		return nil, false
	case !ok:
		t.Fatalf("%T is no rdma.Querier, but the factory has an example of a query", l.conn)
	}
	for id, content := range f.Query.Regions {
		m := s.memory(0, len(content))
		clear(m.Bytes())
		copy(m.Bytes(), content)
		l.addRegion(id, m, s.register(d, id, m))
	}
	return &asker{link: l, q: q, ex: f.Query}, true
}

// post asks, and spoils the query at once: it was the provider's only until PostQuery
// returned.
func (a *asker) post(query []byte, room int) *rdma.Batch {
	b := newBatch(rdma.Read{Dst: bytes.Repeat([]byte{0xc5}, room)})
	own := bytes.Clone(query)
	a.q.PostQuery(b, own)
	for i := range own {
		own[i] ^= 0xff
	}
	return b
}

func (a *asker) mustAnswer() {
	a.tb.Helper()
	for _, room := range []int{len(a.ex.Want), len(a.ex.Want) + 100} {
		b := a.post(a.ex.Query, room)
		await(a.tb, b)
		if b.Err() != nil {
			a.tb.Fatalf("query: %v", b.Err())
		}
		r := b.Reads[0]
		if r.N != len(a.ex.Want) || !bytes.Equal(r.Dst[:r.N], a.ex.Want) {
			a.tb.Fatalf("query: answer of %d bytes %x, want %x", r.N, r.Dst[:min(r.N, len(r.Dst))], a.ex.Want)
		}
		for i, c := range r.Dst[r.N:] {
			if c != 0xc5 {
				a.tb.Fatalf("query: byte %d behind the answer was written", i)
			}
		}
	}
}

func testQuery(t *testing.T, f Factory) {
	a, ok := newAsker(t, f)
	if !ok {
		return
	}
	a.mustAnswer()
	if got := a.rig.Target.Stats().Queries; got == 0 {
		t.Fatal("Stats().Queries is 0 after queries")
	}
	b := a.post(a.ex.Query, len(a.ex.Want)-1)
	await(t, b)
	mustFail(t, "query whose answer does not fit", b.Err(), rdma.ErrExhausted)
	a.mustAnswer() // and the connection is fit for more
	for _, bad := range a.ex.Bad {
		await(t, a.post(bad, 64)) // an error or an answer: the query's own business
	}
	// Whatever the bad ones did to that connection, the target lives.
	if again, ok := newAsker(t, f); ok {
		again.mustAnswer()
	}
	if a.conn.Err() == nil {
		a.mustAnswer()
	}
}

// testQueryKilled: queries, like READs, complete exactly once when the connection is
// taken down under them.
func testQueryKilled(t *testing.T, f Factory) {
	a, ok := newAsker(t, f)
	if !ok {
		return
	}
	var wg sync.WaitGroup
	warm := make(chan struct{}, 4)
	for range 4 {
		wg.Go(func() {
			for i := 0; ; i++ {
				pair := []*rdma.Batch{a.post(a.ex.Query, len(a.ex.Want)), a.post(a.ex.Query, len(a.ex.Want))}
				for _, b := range pair {
					if !b.Wait(context.Background(), patience) {
						t.Errorf("query not complete after %v", patience)
						return
					}
				}
				if i == 5 {
					warm <- struct{}{}
				}
				if err := pair[1].Err(); err != nil {
					if !isAny(err, finished) {
						t.Errorf("query ended with %q, want one of the classes %v", err, finished)
					}
					return
				}
				if !bytes.Equal(pair[1].Reads[0].Dst, a.ex.Want) {
					t.Error("a wrong answer under load")
				}
			}
		})
	}
	for range 4 {
		<-warm
	}
	if err := a.ep.Close(); err != nil {
		t.Errorf("endpoint close: %v", err)
	}
	wg.Wait()
	b := a.post(a.ex.Query, len(a.ex.Want))
	await(t, b)
	mustFail(t, "query on a revoked connection", b.Err(), finished...)
}
