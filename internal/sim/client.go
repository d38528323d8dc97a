package sim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/simnic"
)

const (
	// No sum of pauses of whole milliseconds, so that no timer fires in the moment of
	// another one: which is first would be up to the runtime.
	callTimeout    = 80*time.Millisecond + 137*time.Microsecond // of an operation
	connectTimeout = 15*time.Millisecond + 311*time.Microsecond
)

// actor is a process with one client, which does one operation at a time.
type actor struct {
	s      *sim
	id     int // as the network names it
	fabric *simnic.Fabric
	clock  *clock.Manual
	c      *client.Client // nil: no session yet. Set by its goroutine before dialled
	work   chan *history.Op
	quit   context.CancelFunc

	dialled atomic.Bool
	done    atomic.Pointer[history.Op] // an operation that has ended
	busy    *history.Op                // the simulation's
	ttl     time.Duration              // of the put that is under way; 0: none
	expiry  *expiry                    // of that put
	tears   bool                       // its READs come in pieces now and then
	cold    bool                       // it remembers no addresses of values
	over    chan struct{}
	// versions that this process has seen, by key.
	versions map[string]uint64
}

func (a *actor) host() string      { return fmt.Sprintf("c%d", a.id) }
func (a *actor) transport() string { return fmt.Sprintf("simnic%d", a.id) }

// run is the process.
func (a *actor) run(ctx context.Context) {
	defer close(a.over)
	cfg := client.Config{
		// Without it Dial asks all endpoints at once what they are of, in an order that no
		// seed decides.
		ClusterID: a.s.manifest.GetClusterId(),
		Transport: client.TransportAuto, Providers: []rdma.Provider{provider{a.fabric.Host(a.host()), a.transport()}},
		HostID: a.host(), ClientName: a.host(),
		DialTimeout: 100 * time.Millisecond, ConnectTimeout: connectTimeout, CallTimeout: callTimeout,
		RetryMin: 500 * time.Microsecond, RetryMax: 10 * time.Millisecond, StallTimeout: 30 * time.Millisecond, HedgeMin: 200 * time.Microsecond,
		Jitter: a.jitter, Clock: a.clock, Logger: slog.New(slog.DiscardHandler),
		Connect: func(addr string) (grpc.ClientConnInterface, error) {
			return wire{s: a.s, from: a.id, to: nodeOf(addr)}, nil
		},
	}
	if a.cold {
		cfg.CacheEntries = -1
	}
	for _, n := range a.s.nodes {
		cfg.Endpoints = append(cfg.Endpoints, address(n.id))
	}
	for ctx.Err() == nil {
		c, err := client.Dial(ctx, cfg)
		if err == nil {
			a.c = c
			break
		}
		wait(ctx, 5*time.Millisecond)
	}
	if a.c == nil {
		return
	}
	a.dialled.Store(true)
	for {
		select {
		case op := <-a.work:
			a.do(ctx, op)
			a.done.Store(op)
		case <-ctx.Done():
			if err := a.c.Close(); err != nil {
				panic(fmt.Sprintf("sim: close client: %v", err)) // bug: of the client
			}
			return
		}
	}
}

func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// jitter depends on the seed, on who asks and when, and not on who asked before.
func (a *actor) jitter(id uint64) float64 {
	x := a.s.seed ^ uint64(a.id)<<32 ^ uint64(time.Now().UnixNano()) ^ id*0xd6e8feb86659fd93
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return float64((x^x>>31)>>11) / (1 << 53)
}

// do carries the operation out and notes what came of it.
func (a *actor) do(ctx context.Context, op *history.Op) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	key := []byte(op.Key)
	var v client.Value
	var err error
	switch op.Kind {
	case history.Get:
		level := client.LevelDefault
		switch op.Level {
		case "session":
			level = client.Session
		case "stale":
			level = client.Stale
		}
		v, err = a.c.Get(ctx, key, client.WithLevel(level))
	case history.Put:
		op.Version, err = a.c.Put(ctx, key, payload(op.Value, op.Size), client.TTL(a.ttl))
	case history.Add:
		op.Version, err = a.c.Put(ctx, key, payload(op.Value, op.Size), client.IfAbsent())
	case history.Swap:
		op.Version, err = a.c.Put(ctx, key, payload(op.Value, op.Size), client.IfVersion(op.Expect))
	case history.Del:
		op.Version, err = a.c.Delete(ctx, key)
	case history.Drop:
		op.Version, err = a.c.Delete(ctx, key, client.IfVersion(op.Expect))
	}
	op.Shard = a.c.ShardOf(key)
	var conflict *client.ConflictError
	switch {
	case err == nil && op.Kind == history.Get:
		op.Outcome, op.Version = history.OK, v.Version
		op.Got, op.Bad = decode(v.Data)
	case err == nil:
		op.Outcome = history.OK
	case errors.Is(err, client.ErrNotFound):
		op.Outcome = history.Absent
	case errors.As(err, &conflict):
		op.Outcome, op.Version = history.Conflict, conflict.Current
	case errors.Is(err, client.ErrOutcomeUnknown):
		op.Outcome = history.Unknown
	case op.Kind == history.Get, errors.Is(err, client.ErrUnavailable), errors.Is(err, client.ErrExhausted):
		op.Outcome = history.Fail
	default:
		op.Outcome = history.Unknown
	}
	if err != nil {
		op.Err = err.Error()
	}
}

// payload is the value's number in every word of size bytes, so that parts of two values
// show.
func payload(value uint64, size int) []byte {
	b := make([]byte, 0, size+8)
	for i := uint64(0); len(b) < size; i++ {
		b = binary.LittleEndian.AppendUint64(b, value*0x9e3779b97f4a7c15+i)
	}
	return b
}

// decode finds the number, and what is wrong with the bytes.
func decode(b []byte) (value uint64, bad string) {
	const inverse = 0xf1de83e19937733d // of the factor, modulo 2^64
	if len(b) < 8 || len(b)%8 != 0 {
		return 0, fmt.Sprintf("%d bytes, want whole words", len(b))
	}
	first := binary.LittleEndian.Uint64(b)
	for i := uint64(0); i*8 < uint64(len(b)); i++ {
		if binary.LittleEndian.Uint64(b[i*8:]) != first+i {
			return 0, fmt.Sprintf("word %d of %d is not of value %d", i, len(b)/8, first*inverse)
		}
	}
	return first * inverse, ""
}
