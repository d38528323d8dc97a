package worker

import (
	"bufio"
	"cmp"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/jepsen/history"
)

// Serve runs a worker until its parent closes the pipe. Logs go to log.
func Serve(ctx context.Context, in io.Reader, out io.Writer, log *slog.Logger) error {
	dec := gob.NewDecoder(bufio.NewReader(in))
	var cfg Config
	if err := dec.Decode(&cfg); err != nil {
		return fmt.Errorf("worker: no configuration: %w", err)
	}
	s := &server{cfg: cfg, enc: gob.NewEncoder(out)}
	defer s.close()
	if err := s.dial(ctx, log); err != nil {
		return errors.Join(err, s.answer(response{Err: err.Error()}))
	}
	if err := s.answer(response{Ready: true}); err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for {
		var req request
		err := dec.Decode(&req)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("worker: %w", err)
		}
		wg.Go(func() {
			resp := s.handle(ctx, &req)
			resp.ID = req.ID
			if err := s.answer(resp); err != nil {
				log.Error("the parent does not listen", "err", err)
			}
		})
	}
}

type server struct {
	cfg     Config
	clients []*client.Client
	admin   *client.Admin

	mu  sync.Mutex // guards enc
	enc *gob.Encoder
}

func (s *server) answer(r response) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.enc.Encode(r)
}

func (s *server) dial(ctx context.Context, log *slog.Logger) (err error) {
	if s.admin, err = client.DialAdmin(client.Config{Endpoints: s.cfg.Endpoints, CallTimeout: s.cfg.CallTimeout}); err != nil {
		return err
	}
	for _, c := range s.cfg.Clients {
		cl, err := s.dialOne(ctx, c, log)
		if err != nil {
			return fmt.Errorf("client %s: %w", c.Name, err)
		}
		s.clients = append(s.clients, cl)
	}
	return nil
}

// dialOne tries again for a while: the nodes may not listen yet, which Dial says at once.
func (s *server) dialOne(ctx context.Context, c ClientConfig, log *slog.Logger) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.DialTimeout)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		cl, err := client.Dial(ctx, client.Config{
			Endpoints: s.cfg.Endpoints, Transport: c.Transport, ClientName: c.Name,
			CallTimeout: s.cfg.CallTimeout, ConnectTimeout: s.cfg.ConnectTimeout, HedgeMin: s.cfg.HedgeMin, Logger: log.With("client", c.Name),
		})
		if err == nil || !errors.Is(err, client.ErrUnavailable) || ctx.Err() != nil {
			return cl, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (s *server) close() {
	for _, c := range s.clients {
		_ = c.Close()
	}
	if s.admin != nil {
		_ = s.admin.Close()
	}
}

const transferTimeout = 500 * time.Millisecond

func (s *server) handle(ctx context.Context, req *request) response {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.CallTimeout)
	defer cancel()
	var err error
	r := response{}
	switch {
	case req.Op != nil:
		if req.Client >= len(s.clients) {
			return response{Err: fmt.Sprintf("worker: there is no client %d", req.Client)}
		}
		run(ctx, s.clients[req.Client], req.Op)
		r.Op = req.Op
	case req.Status:
		r.Status, err = s.status(ctx)
	case req.Stats:
		r.Stats = s.stats()
	case req.Transfer != nil:
		// A node that is cut off must not hold up a storm of transfers.
		short, cancel := context.WithTimeout(ctx, transferTimeout)
		err = s.admin.TransferLeader(short, req.Transfer.Shard, req.Transfer.To)
		cancel()
	case req.Fill != nil:
		r.Count, err = s.fill(context.WithoutCancel(ctx), *req.Fill)
	case req.Members:
		r.Members, err = s.members(ctx)
	case req.Drain != nil:
		if d := *req.Drain; d.ForGood {
			err = s.admin.Decommission(ctx, d.Node)
		} else {
			err = s.admin.Drain(ctx, d.Node, client.DrainOptions{Undo: d.Undo})
		}
	case req.Moving:
		r.Count, err = s.moving(ctx)
	}
	if err != nil {
		r.Err = err.Error()
	}
	return r
}

func (s *server) status(ctx context.Context) (*Status, error) {
	nodes, err := s.admin.Status(ctx)
	if err != nil {
		return nil, err
	}
	st := &Status{Evictions: map[uint64]uint64{}, IndexBytes: map[uint64]uint64{}}
	for _, n := range nodes {
		if n.Err != nil {
			continue
		}
		st.Answered = append(st.Answered, n.NodeID)
		st.Evictions[n.NodeID] = n.Status.GetArena().GetEvictions()
		st.IndexBytes[n.NodeID] = n.Status.GetArena().GetIndexBytes()
		for _, sh := range n.Status.GetShards() {
			st.Replicas = append(st.Replicas, Replica{
				Node: n.NodeID, Shard: sh.GetShard(), Leader: sh.GetLeaderNode(), Voters: sh.GetVoters(),
				ServedTerm: sh.GetServedTerm(), Applied: sh.GetApplied(), First: sh.GetFirstIndex(), Away: sh.GetKeys() - min(sh.GetKeys(), sh.GetResidentKeys()),
			})
		}
	}
	return st, nil
}

func (s *server) members(ctx context.Context) ([]Member, error) {
	list, err := s.admin.Members(ctx)
	var out []Member
	for _, m := range list {
		state := strings.ToLower(strings.TrimPrefix(m.GetNode().GetState().String(), "NODE_STATE_"))
		out = append(out, Member{m.GetNode().GetNodeId(), m.GetNode().GetAddress(), state, m.GetLive(), int(m.GetReplicas())})
	}
	return out, err
}

// moving counts what is under way, and what would be next; leaders that change places are
// no matter.
func (s *server) moving(ctx context.Context) (int, error) {
	r, err := s.admin.Rebalance(ctx, true)
	n := int(r.GetMoving())
	for _, m := range r.GetMoves() {
		if !m.GetLeader() {
			n++
		}
	}
	return n, err
}

func (s *server) stats() *Stats {
	st := &Stats{Gets: map[string]uint64{}, Fallbacks: map[string]uint64{}, Retries: map[string]uint64{},
		Counts: map[string]uint64{}, ClientVias: map[string]string{}, Clients: len(s.clients)}
	for i, c := range s.clients {
		one := c.Stats()
		for _, g := range one.Gets {
			st.Gets[g.Via] += g.Count
		}
		for why, n := range one.Fallbacks {
			st.Fallbacks[why] += n
		}
		for why, n := range one.Retries {
			st.Retries[why] += n
		}
		st.Counts["object READs"] += one.ObjectReads
		st.Counts["bucket READs"] += one.BucketReads
		st.Counts["record READs"] += one.RecordReads
		st.Counts["queries"] += one.Queries
		st.Counts["confirmations"] += one.Confirmations
		st.Counts["write retries"] += one.WriteRetries
		st.Counts["unknown outcomes"] += one.UnknownOutcomes
		st.ClientVias[s.cfg.Clients[i].Name] = s.cfg.Clients[i].Transport
	}
	return st
}

const (
	fillers     = 4                // writes of a Fill that are under way at once, usually
	fillTimeout = 10 * time.Second // of one of them: they are large
)

// fill writes until enough bytes were acknowledged; after a few failures it gives up.
func (s *server) fill(ctx context.Context, f Fill) (int, error) {
	c, atOnce := s.clients[0], uint64(cmp.Or(f.AtOnce, fillers))
	var done, failed atomic.Int64
	var first atomic.Pointer[error]
	var wg sync.WaitGroup
	for i := range atOnce {
		wg.Go(func() {
			for n := i; done.Load()*int64(f.Size) < f.Bytes && failed.Load() < 3*int64(atOnce); n += atOnce {
				key := fmt.Appendf(nil, "%s%d", f.Prefix, n)
				if c.ShardOf(key) != f.Shard {
					continue
				}
				call, cancel := context.WithTimeout(ctx, fillTimeout)
				_, err := c.Put(call, key, Value(n+1, f.Size))
				cancel()
				if err != nil {
					failed.Add(1)
					first.CompareAndSwap(nil, &err)
					continue
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	if done.Load()*int64(f.Size) < f.Bytes {
		return int(done.Load()), fmt.Errorf("filling shard %d: %w", f.Shard, *first.Load())
	}
	return int(done.Load()), nil
}

// store is what operations use of a client.
type store interface {
	Get(ctx context.Context, key []byte, opts ...client.ReadOption) (client.Value, error)
	GetMany(ctx context.Context, keys [][]byte, opts ...client.ReadOption) []client.Result
	List(ctx context.Context, prefix []byte, opts ...client.ListOption) iter.Seq2[client.Item, error]
	Put(ctx context.Context, key, value []byte, opts ...client.WriteOption) (version uint64, err error)
	Delete(ctx context.Context, key []byte, opts ...client.WriteOption) (version uint64, err error)
	ShardOf(key []byte) uint32
}

// run runs one operation and writes into it what came out, and when.
func run(ctx context.Context, c store, op *history.Op) {
	op.Call = Now()
	if op.Key != "" && op.Kind != history.List {
		op.Shard = c.ShardOf([]byte(op.Key))
	}
	var err error
	switch op.Kind {
	case history.Get:
		err = get(ctx, c, op)
	case history.Many:
		many(ctx, c, op)
	case history.List:
		err = list(ctx, c, op)
	case history.Put:
		op.Version, err = c.Put(ctx, []byte(op.Key), Value(op.Value, op.Size))
	case history.Add:
		op.Version, err = c.Put(ctx, []byte(op.Key), Value(op.Value, op.Size), client.IfAbsent())
	case history.Swap:
		op.Version, err = c.Put(ctx, []byte(op.Key), Value(op.Value, op.Size), client.IfVersion(op.Expect))
	case history.Del:
		op.Version, err = c.Delete(ctx, []byte(op.Key))
	case history.Drop:
		op.Version, err = c.Delete(ctx, []byte(op.Key), client.IfVersion(op.Expect))
	default:
		err = fmt.Errorf("%w: worker: operation %q is not known", client.ErrInvalid, op.Kind)
	}
	op.Return = Now()
	op.Outcome = Classify(op.Kind, err)
	if err == nil {
		return
	}
	var conflict *client.ConflictError
	if errors.As(err, &conflict) {
		op.Version = conflict.Current
	}
	if op.Outcome == history.Fail || op.Outcome == history.Unknown {
		op.Err = err.Error()
	}
}

// Classify sorts an error by what it promises. What promises nothing leaves a write
// open.
func Classify(kind history.Kind, err error) history.Outcome {
	switch {
	case err == nil:
		return history.OK
	case errors.Is(err, client.ErrOutcomeUnknown) && kind.Writes():
		return history.Unknown
	case errors.Is(err, client.ErrNotFound):
		return history.Absent
	case !kind.Writes():
		return history.Fail
	case errors.Is(err, client.ErrConflict):
		return history.Conflict
	case errors.Is(err, client.ErrUnavailable), errors.Is(err, client.ErrExhausted), errors.Is(err, client.ErrInvalid), errors.Is(err, client.ErrDenied):
		return history.Fail
	}
	return history.Unknown
}

func readOption(op *history.Op) (client.ReadOption, error) {
	if op.MaxLag != nil {
		return client.WithMaxLag(uint64(*op.MaxLag)), nil
	}
	level, err := client.ParseLevel(op.Level)
	return client.WithLevel(level), err
}

func get(ctx context.Context, c store, op *history.Op) error {
	o, err := readOption(op)
	if err != nil {
		return err
	}
	v, err := c.Get(ctx, []byte(op.Key), o)
	if err != nil {
		return err
	}
	op.Version = v.Version
	op.Got, op.Bad = Identify(v.Data)
	return nil
}

func many(ctx context.Context, c store, op *history.Op) {
	keys := make([][]byte, len(op.Keys))
	for i, k := range op.Keys {
		keys[i] = []byte(k)
	}
	for i, r := range c.GetMany(ctx, keys) {
		it := history.Item{Key: op.Keys[i], Shard: c.ShardOf(keys[i])}
		switch Classify(history.Get, r.Err) {
		case history.OK:
			it.Version = r.Value.Version
			it.Got, it.Bad = Identify(r.Value.Data)
		case history.Absent:
		default:
			it.Failed = true
			op.Err = r.Err.Error()
		}
		op.Items = append(op.Items, it)
	}
}

func list(ctx context.Context, c store, op *history.Op) error {
	var opts []client.ListOption
	if op.After != "" {
		opts = append(opts, client.StartAfter([]byte(op.After)))
	}
	if op.Limit > 0 {
		opts = append(opts, client.Limit(op.Limit))
	}
	if op.Page > 0 {
		opts = append(opts, client.PageSize(op.Page))
	}
	for item, err := range c.List(ctx, []byte(op.Key), opts...) {
		if err != nil {
			op.Items = nil
			return err
		}
		it := history.Item{Key: string(item.Key), Version: item.Version, Shard: c.ShardOf(item.Key)}
		it.Got, it.Bad = Identify(item.Value)
		op.Items = append(op.Items, it)
	}
	return nil
}
