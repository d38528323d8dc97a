package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/layout"
)

// Client reads and writes one namespace. Its methods may be called from several
// goroutines. Keys and values given to it are borrowed until the call returns.
type Client struct {
	cfg        Config
	pool       *pool
	transports []*transport
	via        []string // names of the ways of reading; [0] is gRPC
	cache      *cache
	count      counters

	life     context.Context // ends with Close
	end      context.CancelFunc
	nodes    atomic.Pointer[map[uint64]*node] // copied when changed
	changed  broadcast                        // a session began or ended
	ordinals atomic.Uint32                    // given out to boots
	serials  atomic.Uint32                    // given out to sessions
	info     atomic.Pointer[cluster]          // set by the first session
	convoy   convoy
	asking   singleflight.Group // questions to nodes, one of a kind at a time
	strays   sync.Map           // nodes of other clusters that were logged

	membersMu sync.Mutex // held while a list of members is worked in
	members   membership // guarded by membersMu

	mu struct {
		sync.Mutex // guards changes of nodes
		closed     bool
		boots      map[uint64]*boot // by node: the last one seen
	}
	tasks tasks
}

// cluster is what all nodes must agree on. Immutable but for the shards' content.
type cluster struct {
	id        string
	namespace uint32
	immutable bool
	oneSided  bool
	seed      uint64
	shards    uint32
	maxKey    int
	maxValue  int
	shard     []shard // by number; [0] unused
}

// namespaceGrace is how long Dial goes on asking for a namespace that nobody knows:
// one that was created a moment ago may not have reached every node.
const namespaceGrace = 300 * time.Millisecond

// Dial opens a Client. It returns when one node has accepted a session; the other
// nodes are reached in the background. All endpoints are asked which cluster they are of,
// unless Config.ClusterID says it: a second one is refused. An endpoint that hangs is
// waited for 100 ms, or twice as long as the first took, and if it then turns out to be
// of another cluster, that is logged as an error and it is not used.
// Errors: ErrInvalid, ErrUnavailable (no endpoint answered), ErrIncompatible (not kvd),
// ErrWrongCluster (also: the endpoints are of several), ErrUnknownNamespace, ErrDenied,
// ErrNoRDMA (with RequireRDMA).
func Dial(ctx context.Context, cfg Config) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	p, err := newPool(cfg)
	if err != nil {
		return nil, err
	}
	c := &Client{cfg: cfg, pool: p, cache: newCache(cfg.CacheEntries)}
	c.life, c.end = context.WithCancel(context.Background())
	c.nodes.Store(&map[uint64]*node{})
	c.mu.boots = map[uint64]*boot{}
	if err := c.startTransports(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.DialTimeout)
	defer cancel()
	ids := c.askIdentities()
	err = c.dialFirst(ctx)
	if differ := ids.decide(ctx, &cfg); differ != nil {
		err = differ
	}
	if err == nil && cfg.RequireRDMA {
		err = c.awaitRDMA(ctx)
	}
	if err != nil {
		_ = c.Close() // nothing was opened that could fail to close
		return nil, fmt.Errorf("dial: %w", err)
	}
	return c, nil
}

// dialStagger is how long an endpoint is waited for before the next one is asked too: it
// may be of a node that is no more, where nothing answers, not even that nobody is there.
const dialStagger = 200 * time.Millisecond

// dialFirst asks the endpoints until one opens a session. It waits for nodes that are
// starting.
func (c *Client) dialFirst(ctx context.Context) error {
	graceEnds := time.Now().Add(namespaceGrace)
	for {
		s, failures := c.dialRound(ctx)
		if s != nil {
			c.addNode(s.nodeID, s.remote.addr, s)
			return nil
		}
		unknown, starting := 0, 0
		for _, err := range failures {
			if errors.Is(err, ErrUnknownNamespace) {
				unknown++
			}
			if reasonOf(err) == kvdv1.ErrorDetail_REASON_NOT_READY {
				starting++
			}
		}
		if starting > 0 && sleep(ctx, namespaceGrace/10) {
			continue
		}
		if unknown > 0 && time.Now().Before(graceEnds) && sleep(ctx, namespaceGrace/10) {
			continue
		}
		return dialFailed(failures)
	}
}

// dialRound asks each endpoint once, in turn: the next when the one before failed, or did
// not answer for a moment. It returns the first session that one opens, or, in the order of
// the endpoints, why none did.
func (c *Client) dialRound(ctx context.Context) (*session, []error) {
	type result struct {
		i   int
		s   *session
		err error
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan result, len(c.cfg.Endpoints))
	failures := make([]error, len(c.cfg.Endpoints))
	asked, open := 0, 0
	// Whoever answers too late is not needed.
	defer func() {
		c.tasks.spawn(func() {
			for ; open > 0; open-- {
				if r := <-results; r.s != nil {
					r.s.close()
					r.s.stream.stop()
				}
			}
		})
	}()
	for {
		var next <-chan time.Time
		if asked < len(failures) {
			i := asked
			if asked++; !c.tasks.spawn(func() {
				s, err := c.openSession(ctx, c.life, c.cfg.Endpoints[i], 0)
				results <- result{i, s, err}
			}) {
				return nil, []error{ErrClosed}
			}
			open++
			next = time.After(dialStagger)
		}
		select {
		case r := <-results:
			open--
			if r.s != nil {
				return r.s, nil
			}
			failures[r.i] = r.err
			if open == 0 && asked == len(failures) {
				return nil, failures
			}
		case <-next:
		}
	}
}

// dialFailed puts the failures of all endpoints into one sentence. Its class is the
// most telling one.
func dialFailed(failures []error) error {
	class := ErrUnavailable
	for _, of := range []error{ErrUnknownNamespace, ErrWrongCluster, ErrDenied, ErrInvalid, ErrIncompatible, ErrUnavailable} {
		for _, err := range failures {
			if errors.Is(err, of) {
				if len(failures) == 1 {
					return err
				}
				class = of
				return &rpcError{class: class, text: "no endpoint accepted a session: " + sentence(failures)}
			}
		}
	}
	return &rpcError{class: class, text: "no endpoint accepted a session: " + sentence(failures)}
}

// sentence joins what went wrong at each node. What several of them say alike is said
// once.
func sentence(errs []error) string {
	type saying struct {
		words string
		nodes []string // addresses; none: the words name no node, or do it in their own way
	}
	var said []saying
	for _, err := range errs {
		node, words := "", err.Error()
		if rest, ok := strings.CutPrefix(words, "node at "); ok {
			if addr, after, ok := strings.Cut(rest, ": "); ok && !strings.Contains(addr, " ") {
				node, words = addr, after
			}
		}
		i := slices.IndexFunc(said, func(s saying) bool { return s.words == words && (node == "") == (len(s.nodes) == 0) })
		if i < 0 {
			said, i = append(said, saying{words: words}), len(said)
		}
		if node != "" && !slices.Contains(said[i].nodes, node) {
			said[i].nodes = append(said[i].nodes, node)
		}
	}
	parts := make([]string, len(said))
	for i, s := range said {
		switch len(s.nodes) {
		case 0:
			parts[i] = s.words
		case 1:
			parts[i] = "node at " + s.nodes[0] + ": " + s.words
		default:
			parts[i] = "nodes at " + strings.Join(s.nodes, ", ") + ": " + s.words
		}
	}
	return strings.Join(parts, "; ")
}

// adoptCluster takes the first node's word for what the cluster is, and refuses a
// node that says otherwise.
func (c *Client) adoptCluster(o *kvdv1.SessionOpened) error {
	switch {
	case o.GetLayoutVersion() != layout.Version:
		return fmt.Errorf("%w: memory layout %d: this client reads layout %d; use a client of the node's version",
			ErrIncompatible, o.GetLayoutVersion(), layout.Version)
	case o.GetShards() == 0 || o.GetShards() > maxShards:
		return fmt.Errorf("%w: %d shards: want 1 to %d", ErrIncompatible, o.GetShards(), maxShards)
	case c.cfg.ClusterID != "" && o.GetClusterId() != c.cfg.ClusterID:
		return fmt.Errorf("%w: the node is of cluster %s: want %s", ErrWrongCluster, o.GetClusterId(), c.cfg.ClusterID)
	}
	k := &cluster{
		id: o.GetClusterId(), namespace: o.GetNamespaceId(), immutable: o.GetImmutable(), oneSided: o.GetOneSided(),
		seed: o.GetHashSeed(), shards: o.GetShards(),
		maxKey: int(o.GetMaxKeyBytes()), maxValue: int(o.GetMaxValueBytes()),
		shard: make([]shard, o.GetShards()+1),
	}
	for i := range k.shard {
		k.shard[i].id = uint32(i)
	}
	if c.info.CompareAndSwap(nil, k) {
		return nil
	}
	have := c.info.Load()
	if have.id != k.id {
		return fmt.Errorf("%w: the node is of cluster %s: the others are of %s", ErrWrongCluster, k.id, have.id)
	}
	if have.seed != k.seed || have.shards != k.shards || have.namespace != k.namespace || have.immutable != k.immutable {
		return fmt.Errorf("%w: the node describes the namespace or the shards otherwise than the first node did; dial again", ErrIncompatible)
	}
	return nil
}

// maxShards is what the shard word of a route may say.
const maxShards = 1 << 16

func (c *Client) cluster() *cluster { return c.info.Load() }

// Close ends all sessions and connections. Calls that are under way end with
// ErrClosed or ErrUnavailable.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.mu.closed {
		c.mu.Unlock()
		return nil
	}
	c.mu.closed = true
	c.mu.Unlock()
	c.end()
	c.pool.close()
	var errs []error
	for _, t := range c.transports {
		errs = append(errs, t.close())
	}
	c.tasks.wait()
	return errors.Join(errs...)
}

// Stats counts what this Client did.
func (c *Client) Stats() Stats {
	s := c.count.snapshot(c.via)
	for _, n := range c.sortedNodes() {
		s.Peers = append(s.Peers, n.stats())
	}
	return s
}

// Get reads a key. Errors: ErrNotFound, ErrInvalid, ErrUnavailable and the
// context's own.
func (c *Client) Get(ctx context.Context, key []byte, opts ...ReadOption) (Value, error) {
	return c.GetInto(ctx, key, nil, opts...)
}
