package client

import (
	"bytes"
	"container/heap"
	"context"
	"fmt"
	"iter"

	"golang.org/x/sync/errgroup"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

const (
	defaultPageSize = 256
	// maxListCalls bounds the shards asked at once for their first pages.
	maxListCalls = 16
)

// List iterates over the keys with a prefix, in key order. Every page of a shard
// is linearizable by itself (with ListLevel(Stale) it is only committed, and any replica
// answers). It is not
// a snapshot: keys that are written while the iteration runs may or may not show,
// and shards are read at different moments. After an error the iteration ends.
//
// Without a deadline in ctx each page is bounded by Config.CallTimeout.
func (c *Client) List(ctx context.Context, prefix []byte, opts ...ListOption) iter.Seq2[Item, error] {
	o := mergeListOptions(opts)
	level := kvdv1.ReadLevel_READ_LEVEL_LINEARIZABLE
	if o.level == Stale || o.level == LevelDefault && c.cfg.Level == Stale {
		level = kvdv1.ReadLevel_READ_LEVEL_STALE
	}
	return func(yield func(Item, error) bool) {
		pages, err := c.firstPages(ctx, prefix, o, level)
		if err != nil {
			yield(Item{}, err)
			return
		}
		heap.Init(&pages)
		for n := 0; len(pages) > 0 && (o.limit <= 0 || n < o.limit); n++ {
			p := pages[0]
			if !yield(p.items[0], nil) {
				return
			}
			p.items = p.items[1:]
			if len(p.items) == 0 && p.more {
				if err := p.fetch(ctx); err != nil {
					yield(Item{}, err)
					return
				}
			}
			if len(p.items) == 0 {
				heap.Pop(&pages)
			} else {
				heap.Fix(&pages, 0)
			}
		}
	}
}

func mergeListOptions(opts []ListOption) ListOption {
	o := ListOption{}
	for _, p := range opts {
		o.keysOnly = o.keysOnly || p.keysOnly
		if p.startAfter != nil {
			o.startAfter = p.startAfter
		}
		if p.limit > 0 {
			o.limit = p.limit
		}
		if p.pageSize > 0 {
			o.pageSize = p.pageSize
		}
		if p.level != LevelDefault {
			o.level = p.level
		}
	}
	if o.pageSize <= 0 {
		o.pageSize = defaultPageSize
	}
	if o.limit > 0 {
		o.pageSize = min(o.pageSize, o.limit)
	}
	return o
}

// firstPages asks every shard and returns those that have something.
func (c *Client) firstPages(ctx context.Context, prefix []byte, o ListOption, level kvdv1.ReadLevel) (pageHeap, error) {
	k := c.cluster()
	all := make([]*pager, k.shards)
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(maxListCalls)
	for i := range all {
		all[i] = &pager{c: c, sh: &k.shard[i+1], req: &kvdv1.ListRequest{
			NamespaceId: k.namespace, Shard: uint32(i + 1), Prefix: prefix, StartAfter: o.startAfter,
			Limit: uint32(o.pageSize), Level: level, KeysOnly: o.keysOnly,
		}}
		g.Go(func() error { return all[i].fetch(gctx) })
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	var pages pageHeap
	for _, p := range all {
		if len(p.items) > 0 {
			pages = append(pages, p)
		}
	}
	return pages, nil
}

// pager reads one shard's keys page by page.
type pager struct {
	c     *Client
	sh    *shard
	req   *kvdv1.ListRequest
	items []Item // not yet handed out
	more  bool
}

// fetch gets the next page, which is not empty unless the shard is at its end.
func (p *pager) fetch(ctx context.Context) error {
	ctx, cancel := p.c.withDeadline(ctx)
	defer cancel()
	for {
		var resp *kvdv1.ListResponse
		ask := func(ctx context.Context, _ *node, r *remote) (err error) {
			resp, err = r.kv.List(ctx, p.req)
			return rpcFailed(r.addr, err)
		}
		var err error
		if p.req.GetLevel() == kvdv1.ReadLevel_READ_LEVEL_STALE {
			err = p.askReplicas(ctx, ask)
		} else {
			call := leaderCall{c: p.c, sh: p.sh, op: "list"}
			err = call.run(ctx, ask)
		}
		if err != nil {
			return err
		}
		if p.req.GetLevel() == kvdv1.ReadLevel_READ_LEVEL_LINEARIZABLE {
			raise(&p.sh.index, resp.GetApplied())
		}
		p.take(resp)
		if len(p.items) > 0 || !p.more {
			return nil
		}
	}
}

// askReplicas asks one replica after the other until one answers, the request turns out to
// be wrong, or the call's time is over.
func (p *pager) askReplicas(ctx context.Context, ask func(ctx context.Context, n *node, r *remote) error) error {
	pauses := p.c.newBackOff(p.sh.id)
	var last error
	for {
		for _, n := range p.c.replicaNodes(p.sh, uint64(p.sh.id), false) {
			if ctx.Err() != nil {
				break
			}
			err := n.try(ctx, ask)
			if err == nil {
				return nil
			}
			if last = err; permanent(err) {
				return fmt.Errorf("list: %w", err)
			}
		}
		if ctx.Err() != nil || p.c.life.Err() != nil {
			return p.c.gaveUp(ctx, "list", "shard "+fmt.Sprint(p.sh.id), last)
		}
		p.c.pauseFor(ctx, max(pauses.next(), retryAfter(last)))
	}
}

func (p *pager) take(resp *kvdv1.ListResponse) {
	p.items = p.items[:0]
	for _, it := range resp.GetItems() {
		p.items = append(p.items, Item{
			Key: it.GetKey(), Value: it.GetValue(), Version: it.GetVersion(),
			Size: int64(it.GetSize()), Expires: expires(it.GetExpiresUnixMs()),
		})
	}
	// A page may hold nothing but expired keys: its end is named all the same.
	p.more = resp.GetMore() && len(resp.GetLastKey()) > 0
	if p.more {
		p.req.StartAfter = resp.GetLastKey()
	}
}

// pageHeap orders pagers by their next key.
type pageHeap []*pager

func (h pageHeap) Len() int           { return len(h) }
func (h pageHeap) Less(i, j int) bool { return bytes.Compare(h[i].items[0].Key, h[j].items[0].Key) < 0 }
func (h pageHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *pageHeap) Push(x any)        { *h = append(*h, x.(*pager)) }
func (h *pageHeap) Pop() any {
	old := *h
	p := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return p
}
