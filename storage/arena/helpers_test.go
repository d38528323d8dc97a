package arena

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

func regionID(chunk uint32) rdma.RegionID { return rdma.RegionID(chunk) }

// The reader twin: it looks keys up as a client does, by READs that may be torn at
// every word, and knows nothing of the arena but what layout says.

type outcome int

const (
	retry outcome = iota // being written, or the route is old
	present
	absent
	unknown // not resident: the leader would be asked
)

// route is what a client learnt before its get starts.
type route struct {
	table layout.Table
	gen   uint64
	ok    bool
}

func (r *rig) route(shard int) route {
	t, gen, ok := r.shards[shard].Table()
	return route{t, gen, ok}
}

// reader is one get. pause is called before each word of a READ.
type reader struct {
	r     *rig
	rng   *rand.Rand
	pause func()
}

// readAt is a READ: whole words, each at its own moment, in no particular order. It
// is short at the end of the chunk and empty where there is no chunk.
func (g *reader) readAt(at layout.Place, n int) []byte {
	n = len(g.copyAt(at, make([]byte, n)))
	dst := make([]byte, n)
	whole := n / 8
	w, step := 0, 1
	if whole > 0 {
		w = g.rng.IntN(whole)
		if g.rng.IntN(2) == 0 {
			step = whole - 1
		}
	}
	for i := range whole {
		if i < 12 || i%64 == 0 {
			g.pause()
		}
		if len(g.copyAt(layout.Place{Chunk: at.Chunk, Offset: at.Offset + uint64(8*w)}, dst[8*w:8*w+8])) < 8 {
			return nil // revoked meanwhile
		}
		w = (w + step) % whole
	}
	g.copyAt(layout.Place{Chunk: at.Chunk, Offset: at.Offset + uint64(8*whole)}, dst[8*whole:])
	return dst
}

// copyAt copies what there is, at one moment where it is a word.
func (g *reader) copyAt(at layout.Place, dst []byte) []byte {
	g.r.reading.RLock()
	defer g.r.reading.RUnlock()
	mem := (*g.r.n.list.Load())[regionID(at.Chunk)]
	if mem == nil || at.Offset >= mem.Size() {
		return nil
	}
	src := mem.Bytes()[at.Offset:]
	if len(dst) == 8 && len(src) >= 8 {
		layout.CopyWords(dst, src)
		return dst
	}
	return dst[:copy(dst, src)]
}

// get looks the key up in the table of the route.
func (g *reader) get(shard int, rt route, key string) (o layout.Object, at layout.Place, out outcome) {
	if !rt.ok {
		return o, at, unknown
	}
	o, at, out = g.lookup(rt.table, key)
	g.pause()
	if g.r.recs[shard].layoutGen() != rt.gen {
		return o, at, retry
	}
	return o, at, out
}

func (g *reader) lookup(t layout.Table, key string) (layout.Object, layout.Place, outcome) {
	h := g.r.hash(key)
	complete, busy := true, false
	number := h.HomeBucket(t.Buckets)
	for range 64 {
		raw := g.readAt(layout.Place{Chunk: t.Place.Chunk, Offset: t.Offset(number)}, layout.BucketSize)
		b := layout.DecodeBucket(raw, t.ID, number)
		busy = busy || !b.Sound
		complete = complete && b.Complete()
		for _, s := range b.Slots {
			if s == 0 || s.Fingerprint() != h.Fingerprint() {
				continue
			}
			o, verdict := layout.DecodeObject(g.readAt(s.Place(), layout.ClassSize(s.Class())), testSeed, s.Place())
			switch {
			case verdict != layout.Valid:
				busy = true
			case string(o.Key) != key:
				complete = false
			case o.State == layout.StateLive:
				return o, s.Place(), present
			default:
				busy = true
			}
		}
		next, ok := t.Next(b.Chain)
		if !ok {
			switch {
			case busy || b.Chain != 0:
				return layout.Object{}, layout.Place{}, retry
			case complete:
				return layout.Object{}, layout.Place{}, absent
			}
			return layout.Object{}, layout.Place{}, unknown
		}
		number = next
	}
	return layout.Object{}, layout.Place{}, retry
}

// remembered reads an object where it was found before.
func (g *reader) remembered(shard int, loc Location, key string) (layout.Object, outcome) {
	o, verdict := layout.DecodeObject(g.readAt(loc.Place, loc.Length), testSeed, loc.Place)
	g.pause()
	if g.r.recs[shard].layoutGen() != loc.LayoutGen || verdict != layout.Valid ||
		o.State != layout.StateLive || o.Version != loc.Version || string(o.Key) != key {
		return o, retry
	}
	return o, present
}

// fact is what is known about one key: enough to judge any get of it. A key is
// written by one goroutine, with rising versions.
type fact struct {
	key     string
	shard   int
	acked   atomic.Uint64 // version<<1 of the last write that returned, |1: it left a value
	started atomic.Uint64 // version of the last put begun
	deleted atomic.Uint64 // version of the last delete begun
	seen    atomic.Uint64 // highest version that any get returned
}

// valueOf is the content of a version; its length is part of it.
func valueOf(key string, version uint64, maxLen int) []byte {
	rng := rand.New(rand.NewPCG(version, uint64(len(key))))
	b := make([]byte, rng.IntN(maxLen+1))
	for i := range b {
		b[i] = byte(uint64(i)*7 + version + uint64(key[len(key)-1]))
	}
	return b
}

// begin is what must be noted before a get, for judge.
func (f *fact) begin() (floor uint64, present bool) {
	seen, acked := f.seen.Load(), f.acked.Load()
	if seen > acked>>1 {
		return seen, true
	}
	return acked >> 1, acked&1 != 0
}

// judge a get that began with that floor.
func (f *fact) judge(o layout.Object, out outcome, floor uint64, was bool, maxLen int) error {
	switch out {
	case present:
		switch {
		case o.Version < floor || o.Version == floor && !was:
			return fmt.Errorf("key %q: got version %d, but %d (value: %v) was known before", f.key, o.Version, floor, was)
		case o.Version > f.started.Load():
			return fmt.Errorf("key %q: got version %d, never written", f.key, o.Version)
		case string(o.Value) != string(valueOf(f.key, o.Version, maxLen)):
			return fmt.Errorf("key %q version %d: wrong content", f.key, o.Version)
		}
		for {
			old := f.seen.Load()
			if old >= o.Version || f.seen.CompareAndSwap(old, o.Version) {
				return nil
			}
		}
	case absent:
		if was && f.deleted.Load() <= floor {
			return fmt.Errorf("key %q: absent, but version %d was there and no delete began", f.key, floor)
		}
	}
	return nil
}

// write makes the next change of the key. rng decides which.
func (f *fact) write(s *Shard, rng *rand.Rand, version uint64, maxLen, deletes int) {
	if rng.IntN(100) < deletes {
		f.deleted.Store(version)
		s.Delete([]byte(f.key), layout.StateDeleted)
		f.acked.Store(version << 1)
		return
	}
	f.started.Store(version)
	s.Put(Item{Key: []byte(f.key), Value: valueOf(f.key, version, maxLen), Version: version})
	f.acked.Store(version<<1 | 1)
}

func (r *rig) facts(n int) []*fact {
	facts := make([]*fact, n)
	for i := range facts {
		key := fmt.Sprintf("key-%05d", i)
		facts[i] = &fact{key: key, shard: int(r.hash(key).Shard(uint32(len(r.shards)))) - 1}
	}
	return facts
}
