package client

import (
	"context"
	"encoding/binary"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// situation is a state of the cluster that a reader with a warm cache meets.
type situation struct {
	name  string
	nodes int
	// prepare runs before the client learns anything.
	prepare func(f *fixture)
	// happen changes the cluster after the client has read the key once.
	happen func(f *fixture)
	value  string // wanted in the end; "" : none
	err    error  // wanted instead
	retry  reason // counted at least once; reasonNone: no retry at all
	grpc   reason // counted as fallback; reasonNone: read one-sidedly
}

const theKey = "the key"

func (f *fixture) objectAt(id uint64, key string) []byte {
	n := f.nodes[id-1]
	number, i, ok := n.find(1, layout.HashKey(f.seed, []byte(key)), key)
	if !ok {
		panic("no such key")
	}
	return n.chunk[n.bucket(n.tables[1].t, number).Slots[i].Place().Offset:]
}

func (f *fixture) locked(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

// cutOff partitions a node: it goes on being read and learns nothing more.
func (f *fixture) cutOff(id uint64) { f.locked(func() { f.nodes[id-1].cut = true }) }

func situations() []situation {
	return []situation{
		{name: "nothing happened", value: "old"},
		{
			name:   "overwritten",
			happen: func(f *fixture) { f.put(theKey, "new") },
			value:  "new", retry: reasonMoved,
		},
		{
			name:   "deleted",
			happen: func(f *fixture) { f.del(theKey) },
			err:    ErrNotFound, retry: reasonMoved,
		},
		{
			name: "the leader stepped down and another took over",
			happen: func(f *fixture) {
				f.locked(func() { f.elect(1, 2, 6) })
				f.put(theKey, "new")
			},
			value: "new", retry: reasonTerm,
		},
		{
			name: "deposed leader does not know it",
			happen: func(f *fixture) {
				f.cutOff(1)
				f.locked(func() { f.elect(1, 2, 6) })
				f.put(theKey, "new")
			},
			value: "new", retry: reasonTerm,
		},
		{
			name: "the leader was deposed and leads again",
			happen: func(f *fixture) {
				f.locked(func() {
					f.elect(1, 2, 6)
					f.elect(1, 1, 7)
				})
			},
			value: "old", retry: reasonTerm, // the object may have been READ before it caught up
		},
		{
			name: "one voter knows a higher term, the other does not",
			happen: func(f *fixture) {
				f.change(2, 1, func(r *layout.Record) { r.Term = 9 })
			},
			value: "old",
		},
		{
			name: "the leader itself knows a higher term",
			happen: func(f *fixture) {
				f.change(1, 1, func(r *layout.Record) { r.Term = 6 })
				f.locked(func() { f.elect(1, 3, 7) })
				f.put(theKey, "new")
			},
			value: "new", retry: reasonTerm,
		},
		{
			name: "a retired voter confirms nothing",
			happen: func(f *fixture) {
				f.change(2, 1, func(r *layout.Record) { r.Term = layout.RetiredTerm })
				f.cutOff(1)
				f.locked(func() { f.elect(1, 3, 8) })
				f.put(theKey, "new")
			},
			value: "new", retry: reasonTerm,
		},
		{
			name: "another boot in the leader's record",
			happen: func(f *fixture) {
				f.change(1, 1, func(r *layout.Record) { r.BootID = 77 })
				f.locked(func() { f.elect(1, 2, 6) })
				f.put(theKey, "new")
			},
			value: "new", retry: reasonIdentity,
		},
		{
			name: "another replica in a voter's record",
			happen: func(f *fixture) {
				f.change(2, 1, func(r *layout.Record) { r.Replica = 3 })
			},
			value: "old", // the third voter confirms
		},
		{
			name: "another shard in both voters' records",
			happen: func(f *fixture) {
				f.change(2, 1, func(r *layout.Record) { r.Shard = 3 })
				f.change(3, 1, func(r *layout.Record) { r.Shard = 3 })
			},
			value: "old", retry: reasonVoters, grpc: reasonVoters,
		},
		{
			name: "layout changed and the old place still shows the old value",
			happen: func(f *fixture) {
				f.locked(func() {
					n := f.nodes[0]
					rec := n.readRecord(1)
					rec.LayoutGen++
					n.writeRecord(1, rec)
					n.makeTable(1)
				})
				f.put(theKey, "new")
			},
			value: "new", retry: reasonLayout,
		},
		{
			name: "the configuration changed",
			happen: func(f *fixture) {
				for id := uint64(1); id <= 3; id++ {
					f.change(id, 1, func(r *layout.Record) { r.ConfigID = 12 })
				}
			},
			value: "old", retry: reasonConfig,
		},
		{
			name: "torn object",
			happen: func(f *fixture) {
				f.locked(func() { f.objectAt(1, theKey)[layout.HeaderSize+2] ^= 1 })
			},
			value: "old", retry: reasonTorn, grpc: reasonTorn,
		},
		{
			name: "pending object",
			happen: func(f *fixture) {
				f.locked(func() { f.objectAt(1, theKey)[0] = byte(layout.StatePending) })
			},
			value: "old", retry: reasonPending, grpc: reasonPending,
		},
		{
			name: "forged: a valid object's bytes at another place",
			happen: func(f *fixture) {
				f.locked(func() {
					n := f.nodes[0]
					h := layout.HashKey(f.seed, []byte(theKey))
					number, i, _ := n.find(1, h, theKey)
					t := n.tables[1].t
					b := n.bucket(t, number)
					old := b.Slots[i]
					at := n.alloc(256)
					copy(n.chunk[at.Offset:][:256], n.chunk[old.Place().Offset:])
					n.setState(old.Place(), layout.StateMoved)
					b.Slots[i] = layout.MakeSlot(old.Fingerprint(), old.Class(), at)
					n.writeBucket(t, number, b)
				})
			},
			value: "old", retry: reasonTorn, grpc: reasonTorn,
		},
		{
			name: "another version at the remembered place",
			happen: func(f *fixture) {
				f.locked(func() {
					// What lies there is sound and live, but the index leads elsewhere.
					n := f.nodes[0]
					place := n.placeOf(1, theKey)
					v, _ := f.putLocked(theKey, []byte("new"), 0)
					layout.EncodeObject(n.chunk[place.Offset:], f.seed, place, layout.Object{
						Version: v.version + 7, Key: []byte(theKey), Value: []byte("lie"),
					})
					n.setState(place, layout.StateLive)
				})
			},
			value: "new", retry: reasonMoved,
		},
		{
			name: "evicted",
			happen: func(f *fixture) {
				f.locked(func() {
					n := f.nodes[0]
					h := layout.HashKey(f.seed, []byte(theKey))
					number, i, _ := n.find(1, h, theKey)
					t := n.tables[1].t
					b := n.bucket(t, number)
					n.setState(b.Slots[i].Place(), layout.StateEvicted)
					b.Slots[i] = 0
					b.Flags |= layout.BucketIncomplete
					n.writeBucket(t, number, b)
				})
			},
			value: "old", retry: reasonMoved, grpc: reasonIncomplete,
		},
		{
			name: "absent, but the bucket is unsound",
			happen: func(f *fixture) {
				f.del(theKey)
				f.locked(func() {
					n := f.nodes[0]
					t := n.tables[1].t
					number := layout.HashKey(f.seed, []byte(theKey)).HomeBucket(t.Buckets)
					n.chunk[t.Offset(number)] ^= 1
				})
			},
			err: ErrNotFound, retry: reasonUnsound, grpc: reasonUnsound,
		},
		{
			name: "expired",
			happen: func(f *fixture) {
				f.locked(func() { f.putLocked(theKey, []byte("gone"), time.Now().Add(-time.Minute).UnixMilli()) })
			},
			err: ErrNotFound, retry: reasonMoved,
		},
		{
			name: "the voters' connections die",
			happen: func(f *fixture) {
				f.nodes[1].kill()
				f.nodes[2].kill()
				eventually(f.t, "their sessions ended", func() bool { return len(f.c.liveSessions()) == 1 })
			},
			value: "old", retry: reasonVoters, grpc: reasonVoters,
		},
		{
			name:  "joint: the outgoing half knows a higher term",
			nodes: 5,
			prepare: func(f *fixture) {
				f.locked(func() { f.outgoing = []uint64{1, 4, 5} })
			},
			happen: func(f *fixture) {
				f.change(4, 1, func(r *layout.Record) { r.Term = 6 })
				f.change(5, 1, func(r *layout.Record) { r.Term = 6 })
			},
			value: "old", retry: reasonTerm, grpc: reasonTerm,
		},
		{
			name:  "joint: both halves confirm",
			nodes: 5,
			prepare: func(f *fixture) {
				f.locked(func() { f.outgoing = []uint64{1, 4, 5} })
			},
			value: "old",
		},
		{
			name:  "a learner does not count",
			nodes: 4, // the fourth is a learner: no voter
			happen: func(f *fixture) {
				f.change(2, 1, func(r *layout.Record) { r.Term = 6 })
				f.change(3, 1, func(r *layout.Record) { r.Term = 6 })
			},
			value: "old", retry: reasonTerm, grpc: reasonTerm,
		},
		{
			name:  "a leader that is no voter does not count itself",
			nodes: 4,
			prepare: func(f *fixture) {
				f.locked(func() { f.voters = []uint64{2, 3, 4} })
			},
			happen: func(f *fixture) {
				f.change(2, 1, func(r *layout.Record) { r.Term = 6 })
				f.change(3, 1, func(r *layout.Record) { r.Term = 6 })
			},
			value: "old", retry: reasonTerm, grpc: reasonTerm,
		},
	}
}

func (n *fakeNode) placeOf(s uint32, key string) layout.Place {
	number, i, ok := n.find(s, layout.HashKey(n.c.seed, []byte(key)), key)
	if !ok {
		panic("no such key")
	}
	return n.bucket(n.tables[s].t, number).Slots[i].Place()
}

// TestRules puts a reader that knows everything of the state before into each
// situation, on a connection that completes inline, on one that does not, and on
// one that looks keys up itself.
func TestRules(t *testing.T) {
	for _, net := range []struct {
		name string
		opt  netOptions
	}{{"sync", netOptions{sync: true}}, {"async", netOptions{}}, {"query", netOptions{query: true}}} {
		for _, c := range situations() {
			t.Run(net.name+"/"+c.name, func(t *testing.T) {
				f := start(t, fakeOptions{nodes: c.nodes}, net.opt, nil)
				if c.prepare != nil {
					c.prepare(f)
					for _, s := range f.c.liveSessions() {
						require.NoError(t, s.fetchRoutes(context.Background(), nil))
					}
				}
				f.put(theKey, "old")
				f.want(t, theKey, "old")
				if c.happen != nil {
					c.happen(f)
				}
				stats := f.during(func() {
					got, err := f.get(t, theKey)
					if c.err != nil {
						require.ErrorIs(t, err, c.err)
						return
					}
					require.NoError(t, err)
					require.Equal(t, c.value, got)
				})
				if c.retry == reasonNone {
					require.Empty(t, stats.Retries)
				} else if net.name != "query" || c.grpc == reasonNone {
					require.NotZero(t, stats.Retries[c.retry.String()], "%v", stats.Retries)
				}
				if c.grpc == reasonNone {
					require.Empty(t, stats.Fallbacks)
				} else {
					require.EqualValues(t, 1, stats.gets(Linearizable, "grpc"), "%v", stats.Fallbacks)
				}
			})
		}
	}
}

// TestNoLeader: nobody leads, so nothing may be answered, not even with what lies in
// the memory of the one who led.
func TestNoLeader(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, func(c *Config) { c.CallTimeout = 300 * time.Millisecond })
	f.put(theKey, "old")
	f.want(t, theKey, "old")
	for name, happen := range map[string]func(){
		"stepped down within its term": func() { f.change(1, 1, func(r *layout.Record) { r.ServedTerm = 0 }) },
		"everybody is in a later term": func() { f.locked(func() { f.elect(1, 0, 6) }) },
	} {
		happen()
		_, err := f.c.Get(context.Background(), []byte(theKey))
		require.True(t, isTimeout(err), "%s: %v", name, err)
		require.True(t, isTimeout(f.c.GetMany(context.Background(), [][]byte{[]byte(theKey)})[0].Err), name)
		f.locked(func() { f.elect(1, 1, f.term[1]+1) })
		f.want(t, theKey, "old")
	}
}

// TestRecordBehindObject: the leader's record is READ behind the object, in the same
// chain, and behind every bucket of an absence.
func TestRecordBehindObject(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{}, nil)
	f.put(theKey, "1")
	f.net.mu.Lock()
	f.net.trace = nil
	f.net.mu.Unlock()
	f.want(t, theKey, "1")
	f.want(t, theKey, "1")
	f.wantAbsent(t, "nobody")
	f.net.mu.Lock()
	defer f.net.mu.Unlock()
	var chunk []int // chunk READs at the leader not yet vouched for
	objects := 0
	for i, r := range f.net.trace {
		if r.node != 1 {
			continue
		}
		if r.region != rdma.ControlRegion {
			chunk = append(chunk, i)
			continue
		}
		for _, j := range chunk {
			if o := f.net.trace[j]; o.length != layout.BucketSize {
				objects++
				require.Equal(t, r.batch, o.batch, "object and record in one chain")
			}
		}
		chunk = nil
	}
	require.Equal(t, 2, objects)
	require.Empty(t, chunk, "READs without a record behind them")
}

// TestChain: a key in an overflow bucket, and an absence that needs the whole chain.
func TestChain(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	home := func(k string) uint32 { return layout.HashKey(f.seed, []byte(k)).HomeBucket(fakeBuckets) }
	var keys []string
	for _, k := range f.keysInShard(1, 1000) {
		if home(k) == home("key-0") && len(keys) < 18 {
			keys = append(keys, k)
			f.put(k, k)
		}
	}
	require.Len(t, keys, 18)
	for _, k := range keys {
		f.want(t, k, k)
	}
	f.del(keys[17])
	s := f.during(func() { f.wantAbsent(t, keys[17]) })
	require.EqualValues(t, 3, s.BucketReads, "the whole chain")
	require.Empty(t, s.Fallbacks)
	f.locked(func() {
		n := f.nodes[0]
		tb := n.tables[1].t
		b := n.bucket(tb, tb.Buckets+1)
		b.Flags |= layout.BucketIncomplete
		n.writeBucket(tb, tb.Buckets+1, b)
	})
	s = f.during(func() { f.wantAbsent(t, keys[17]) })
	require.EqualValues(t, 1, s.Fallbacks["incomplete_bucket"], "one incomplete bucket of the chain is enough")
}

// TestFingerprintCollision: another key with the same finger print does not hide
// the key, and does not count as proof that it is absent.
func TestFingerprintCollision(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	other := f.twin(theKey)
	f.put(other, "x")
	f.put(theKey, "1")
	f.locked(func() {
		n := f.nodes[0]
		tb := n.tables[1].t
		h := layout.HashKey(f.seed, []byte(theKey))
		number := h.HomeBucket(tb.Buckets)
		b := n.bucket(tb, number)
		at := n.placeOf(1, other)
		b.Slots[6] = b.Slots[0]
		b.Slots[0] = layout.MakeSlot(h.Fingerprint(), layout.ClassFor(64), at)
		n.writeBucket(tb, number, b)
	})
	f.want(t, theKey, "1")
	f.del(theKey)
	s := f.during(func() { f.wantAbsent(t, theKey) })
	require.EqualValues(t, 1, s.Fallbacks["incomplete_bucket"])
}

// TestBlockGivenToAnotherKey: between the bucket and the object the value was
// replaced, and its block given to another key. The key is not absent.
func TestBlockGivenToAnotherKey(t *testing.T) {
	for _, level := range []Level{Linearizable, Session} {
		for _, sameFingerprint := range []bool{false, true} {
			var f *fixture
			reused := false
			run := func(n *fakeNode, b *rdma.Batch, exec func() error, done func(error)) {
				bucket := b.Reads[0].Region != rdma.ControlRegion && len(b.Reads[0].Dst) == layout.BucketSize && len(b.Reads) == 1
				done(exec())
				if !bucket || reused || f == nil {
					return
				}
				reused = true
				f.locked(func() {
					other := "another key"
					if sameFingerprint {
						other = f.twin(theKey)
					}
					for _, m := range f.nodes {
						place := m.placeOf(1, theKey)
						m.chunkReuse(place, other)
					}
				})
			}
			g := start(t, fakeOptions{}, netOptions{run: run}, nil)
			g.put(theKey, "1")
			f = g
			got, err := g.get(t, theKey, WithLevel(level))
			require.True(t, reused)
			require.NoError(t, err)
			require.Equal(t, "2", got)
			require.Empty(t, f.c.Stats().Fallbacks)
		}
	}
}

// chunkReuse replaces theKey's value by "2" and writes another key's object over the
// old one.
func (n *fakeNode) chunkReuse(place layout.Place, other string) {
	n.show(1, theKey, fakeValue{value: []byte("2"), version: 90})
	n.c.truth[theKey] = fakeValue{value: []byte("2"), version: 90}
	layout.EncodeObject(n.chunk[place.Offset:], n.c.seed, place, layout.Object{Version: 91, Key: []byte(other), Value: []byte("x")})
	n.setState(place, layout.StateLive)
}

// twin finds another key with the same finger print.
func (f *fixture) twin(key string) string {
	want := layout.HashKey(f.seed, []byte(key)).Fingerprint()
	for i := 0; ; i++ {
		if k := strconv.Itoa(i); layout.HashKey(f.seed, []byte(k)).Fingerprint() == want {
			return k
		}
	}
}

// TestGarbage: whatever the memory holds, the client answers or fails, and never
// believes it.
func TestGarbage(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	f.put(theKey, "1")
	f.locked(func() {
		n := f.nodes[0]
		for i := 0; i+8 <= len(n.chunk); i += 8 {
			binary.LittleEndian.PutUint64(n.chunk[i:], uint64(i)*0x9e3779b97f4a7c15)
		}
	})
	f.want(t, theKey, "1")
	require.NotZero(t, f.c.Stats().gets(Linearizable, "grpc"))
}
