package client

import (
	"context"
	"sync"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

const (
	// manyKeys and manyBytes bound what one round of a GetMany has under way.
	manyKeys  = 256
	manyBytes = 8 << 20
	// manySingles bounds the keys of a GetMany that are read one by one at a time.
	manySingles = 8
)

// GetMany reads many keys at once: the result at i belongs to keys[i]. READs to
// one node go out as one chain, and one confirmation serves all keys of a shard.
// It is not a snapshot: each key's answer is linearizable by itself. Since a
// shared confirmation costs next to nothing, the weaker levels are answered from
// confirmed chains too, and matter only for keys that need another way.
func (c *Client) GetMany(ctx context.Context, keys [][]byte, opts ...ReadOption) []Result {
	return c.getMany(ctx, keys, nil, opts)
}

// getMany reads into bufs, where there are any.
func (c *Client) getMany(ctx context.Context, keys [][]byte, bufs []*Buffer, opts []ReadOption) []Result {
	level, _ := c.readLevel(opts)
	results := make([]Result, len(keys))
	again := sameBuffer(bufs)
	for i := range again {
		results[i].Err = errBufferInUse
	}
	var left []int // to be read one by one
	for from := 0; from < len(keys); {
		if ctx.Err() != nil {
			c.giveUpMany(ctx, results, left, from)
			return results
		}
		m := many{c: c, ctx: ctx, level: level, keys: keys, bufs: bufs, results: results}
		if c.cfg.Transport == TransportGRPC || !c.cluster().oneSided {
			if results[from].Err == nil {
				m.left = append(m.left, from)
			}
			from++
		} else {
			from = m.collect(from)
			m.readBuckets()
			m.readObjects()
		}
		left = append(left, m.left...)
	}
	c.getSingly(ctx, keys, bufs, results, left, opts)
	return results
}

// giveUpMany ends a GetMany whose context has ended: of the keys that were to be read by
// themselves, and of those from index from on, nothing was read.
func (c *Client) giveUpMany(ctx context.Context, results []Result, left []int, from int) {
	err := c.gaveUp(ctx, "get", "the context had ended before", nil)
	for i := from; i < len(results); i++ {
		left = append(left, i)
	}
	for _, i := range left {
		results[i].Err = err
	}
}

// getSingly reads the keys that a chain did not answer.
func (c *Client) getSingly(ctx context.Context, keys [][]byte, bufs []*Buffer, results []Result, left []int, opts []ReadOption) {
	work := make(chan int, len(left))
	for _, i := range left {
		work <- i
	}
	close(work)
	var wg sync.WaitGroup
	for range min(manySingles, len(left)) {
		wg.Go(func() {
			for i := range work {
				if len(bufs) > 0 && bufs[i] != nil {
					results[i].Value, results[i].Err = bufs[i].GetInto(ctx, keys[i], opts...)
				} else {
					results[i].Value, results[i].Err = c.GetInto(ctx, keys[i], nil, opts...)
				}
			}
		})
	}
	wg.Wait()
}

// many is one round of a GetMany.
type many struct {
	c       *Client
	ctx     context.Context
	level   Level
	keys    [][]byte
	bufs    []*Buffer // one for each key, or none at all
	results []Result

	items []manyItem
	left  []int // keys to be read one by one
}

// manyItem is one key under way.
type manyItem struct {
	index int
	r     reading
	rt    *route
	info  *replicaInfo
	at    layout.Place
	size  int // bytes to READ; 0: absent, only to be confirmed
	gen   uint64
	ver   uint64 // remembered; 0: none
	cold  bool   // the place is still to be found
}

// collect takes keys from index from on into this round and returns where the next
// begins.
func (m *many) collect(from int) (next int) {
	bytes := 0
	for i := from; i < len(m.keys); i++ {
		if len(m.items) == manyKeys || bytes > manyBytes {
			return i
		}
		if m.results[i].Err != nil {
			continue
		}
		if err := m.c.checkKey(m.keys[i]); err != nil {
			m.results[i].Err = err
			continue
		}
		it := manyItem{index: i, r: reading{c: m.c, ctx: m.ctx, key: m.keys[i], level: m.level}}
		usable := false
		if len(m.bufs) > 0 && m.bufs[i] != nil {
			var err error
			if usable, err = m.bufs[i].begin(); err != nil {
				m.results[i].Err = err
				continue
			}
			it.r.buf = m.bufs[i]
		}
		it.r.g = m.c.acquire(m.keys[i])
		if usable {
			it.r.g.sink = it.r.buf
		}
		if !m.locate(&it) {
			m.setAside(&it)
			continue
		}
		bytes += it.size
		m.items = append(m.items, it)
	}
	return len(m.keys)
}

// locate finds out what is known of the key; false: it needs more than a chain.
func (m *many) locate(it *manyItem) bool {
	g := it.r.g
	rt := g.sh.route.Load()
	if rt == nil || rt.leader.ended.Load() {
		rt = m.c.learnRoute(m.ctx, g.sh, rt)
	}
	if rt == nil || rt.leader.conn == nil || len(rt.voters) == 0 || rt.leader.stalled.Load() > 0 {
		return false
	}
	it.rt = rt
	if loc, ok := m.c.cache.get(g.hash, rt.leader.ord); ok && rt.leader.room(loc.at.Chunk, loc.at.Offset) >= uint64(loc.length) {
		m.c.count.cacheHits.Add(1)
		it.at, it.size, it.gen, it.ver = loc.at, int(loc.length), loc.gen, loc.version
		return true
	}
	m.c.count.cacheMisses.Add(1)
	it.info = rt.leader.replicas[g.sh.id].info.Load()
	if it.info == nil || it.info.table.ID == 0 {
		return false
	}
	it.cold, it.gen = true, it.info.tableGen
	return true
}

// setAside leaves the key to be read by itself.
func (m *many) setAside(it *manyItem) {
	it.r.g.release()
	it.r.g = nil
	m.left = append(m.left, it.index)
}

// readBuckets READs the home buckets of the keys whose place is not known, one chain
// a node, and takes from them where the objects lie.
func (m *many) readBuckets() {
	bySession := make(map[*session][]*manyItem)
	for i := range m.items {
		if it := &m.items[i]; it.cold {
			bySession[it.rt.leader] = append(bySession[it.rt.leader], it)
		}
	}
	batches := make(map[*session]*bucketBatch, len(bySession))
	for s, items := range bySession {
		if b := m.postBuckets(s, items); b != nil {
			batches[s] = b
		}
	}
	for s, b := range batches {
		ok := b.batch.Wait(m.ctx, attemptLimit) && b.batch.Err() == nil
		switch {
		case !b.batch.Completed():
			m.c.tasks.spawn(func() { s.outlast(&b.batch, len(b.items)*layout.BucketSize) })
		case b.batch.Err() != nil:
			s.readFailed(b.batch.Err())
		}
		for _, it := range b.items {
			if ok && m.takeBucket(s, it, b.lines[it]) {
				it.cold = false
			}
		}
	}
	m.keep(func(it *manyItem) bool { return !it.cold })
}

// bucketBatch is a chain of bucket READs. It is garbage collected, not pooled: one
// that nobody waits for any more keeps its memory until it is complete.
type bucketBatch struct {
	batch rdma.Batch
	items []*manyItem
	lines map[*manyItem][]byte
}

func (m *many) postBuckets(s *session, items []*manyItem) *bucketBatch {
	b := &bucketBatch{lines: make(map[*manyItem][]byte, len(items))}
	buf := make([]byte, len(items)*layout.BucketSize)
	b.batch.Reset()
	for _, it := range items {
		t := it.info.table
		at := t.Offset(it.r.g.hash.HomeBucket(t.Buckets))
		if s.room(t.Place.Chunk, at) < layout.BucketSize {
			continue
		}
		line := buf[len(b.items)*layout.BucketSize:][:layout.BucketSize]
		b.lines[it] = line
		b.items = append(b.items, it)
		b.batch.Reads = append(b.batch.Reads, rdma.Read{Region: rdma.RegionID(t.Place.Chunk), Offset: at, Dst: line})
	}
	if len(b.items) == 0 {
		return nil
	}
	m.c.count.bucketReads.Add(uint64(len(b.items)))
	s.conn.Post(&b.batch)
	return b
}

// takeBucket finds the object's place in the home bucket; false: the chain is
// longer, or the bucket was being written, or the finger print is not alone.
func (m *many) takeBucket(s *session, it *manyItem, line []byte) bool {
	t := it.info.table
	g := it.r.g
	var f found
	f.add(layout.DecodeBucket(line, t.ID, g.hash.HomeBucket(t.Buckets)), t, g.hash.Fingerprint())
	switch {
	case f.n == 0:
		return f.ended && f.absence() == reasonNone
	case f.n > 1:
		return false
	}
	slot := f.candidates[0]
	it.at = slot.Place()
	it.size = int(min(uint64(layout.ClassSize(slot.Class())), s.room(it.at.Chunk, it.at.Offset)))
	return it.size >= layout.HeaderSize
}

// keep sets the others aside.
func (m *many) keep(good func(it *manyItem) bool) {
	kept := m.items[:0]
	for i := range m.items {
		if it := m.items[i]; good(&it) {
			kept = append(kept, it)
		} else {
			m.setAside(&it)
		}
	}
	m.items = kept
}

// readObjects posts the objects and the records of all keys, one chain a node, and
// judges what comes back.
func (m *many) readObjects() {
	asks := make(map[*session][]*ask)
	for i := range m.items {
		it := &m.items[i]
		for _, a := range it.prepare() {
			asks[a.s] = append(asks[a.s], a)
		}
	}
	for s, list := range asks {
		m.c.convoy.add(&s.lane, nil, list...)
	}
	for i := range m.items {
		it := &m.items[i]
		if !m.settle(it) {
			m.setAside(it)
			continue
		}
		it.r.g.release()
	}
}

// prepare makes the key's asks, without submitting them.
func (it *manyItem) prepare() []*ask {
	g := it.r.g
	g.asks[0].slot, g.asks[0].voter, g.asks[0].leader = it.rt.slot, it.rt.self, true
	g.asks[0].at, g.asks[0].dst = it.at, nil
	if it.size > 0 {
		g.asks[0].dst = g.space(it.size)
	}
	g.asks[0].s = it.rt.leader
	g.n = 1
	for hope := it.rt.self; !it.rt.quorum.reached(hope); {
		bit, s, slot := g.bestVoter(it.rt)
		if bit == 0 {
			break
		}
		a := &g.asks[g.n]
		g.n++
		a.s, a.slot, a.voter, a.leader, a.dst = s, slot, bit, false, nil
		hope |= bit
	}
	list := make([]*ask, g.n)
	for i := range list {
		a := &g.asks[i]
		a.apart, a.late = true, false
		g.refs.Add(1)
		a.state.Store(askWaiting)
		list[i] = a
	}
	return list
}

// settle waits for the key's part of the chains; false: it needs another attempt.
func (m *many) settle(it *manyItem) bool {
	r, s := &it.r, it.rt.leader
	if r.confirm(it.rt, it.gen) != reasonNone {
		return false
	}
	res := &m.results[it.index]
	if it.size == 0 {
		r.noValue(it.rt)
		r.countGet(s)
		res.Err = ErrNotFound
		return true
	}
	switch r.judge(r.g.asks[0].dst, it.at, it.ver) {
	case live:
		if it.ver == 0 {
			r.remember(s, it.at, it.gen)
		}
		res.Value, res.Err = r.accept(s)
		return true
	case expired:
		r.noValue(it.rt)
		r.countGet(s)
		res.Err = ErrNotFound
		return true
	}
	return false
}
